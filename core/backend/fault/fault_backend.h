// A backend around another that makes things go wrong, by a script and a seed.
//
// Without rules it changes nothing but the time of a call. Work that is delayed or lost holds back
// what is behind it on its stream, and other streams that wait for events behind it, as on a
// device. A lost collective leaves its peers waiting until somebody aborts the communicator.
//
// Threads: as backend.h, on top of an inner backend that is thread-safe (host and sim are): held
// work is forwarded by a timer's thread or by whichever thread lets it go on. Ownership: it owns
// the inner backend. Errors: the inner backend's, and what rules inject: INTERNAL kExecFailed, or
// RESOURCE_EXHAUSTED kOutOfMemory of an allocation. A call of a communicator whose stream is held
// is accepted before the inner backend has seen it; should that refuse it, the refusal arrives as
// the status of the stream.
#ifndef CHORUS_CORE_BACKEND_FAULT_FAULT_BACKEND_H_
#define CHORUS_CORE_BACKEND_FAULT_FAULT_BACKEND_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/backend/backend.h"
#include "core/backend/fault/fault_script.h"

namespace chorus {

// `on_fault` is told of each fault that is injected ("collective lost on device 1"), on the thread
// of the call that it hits; it must not call back. May be null.
std::unique_ptr<Backend> CreateFaultBackend(std::unique_ptr<Backend> inner, FaultScript script,
                                            std::function<void(const std::string&)> on_fault);
// The same by a script's text, as a flag has it; empty: `inner` as it is. Errors:
// ParseFaultScript's.
absl::StatusOr<std::unique_ptr<Backend>> WithFaults(
    std::unique_ptr<Backend> inner, absl::string_view script,
    std::function<void(const std::string&)> on_fault = nullptr);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_FAULT_FAULT_BACKEND_H_
