// The backends of this build, by name.
//
// Threads: any. Ownership: a backend is the caller's, and so is the pool of its options.
// Errors: said at OpenBackend().
#ifndef CHORUS_CORE_BACKEND_BACKENDS_H_
#define CHORUS_CORE_BACKEND_BACKENDS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/backend/backend_options.h"

namespace chorus {

// "host", "sim": ascending.
absl::Span<const absl::string_view> BackendNames();

// INVALID_ARGUMENT kMalformed: no such backend, or not 1 to kMaxDevices devices.
absl::StatusOr<std::unique_ptr<Backend>> OpenBackend(absl::string_view name,
                                                     const BackendOptions& options);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_BACKENDS_H_
