#include "core/backend/backends.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/backend/backend_list.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using Opener = std::unique_ptr<Backend> (*)(const BackendOptions& options);

// CHORUS_BACKENDS names each twice: "host", Host.
#define CHORUS_NAME(name, Name) name,
constexpr absl::string_view kNames[] = {CHORUS_BACKENDS(CHORUS_NAME)};
#undef CHORUS_NAME
#define CHORUS_OPENER(name, Name) Open##Name,
constexpr Opener kOpeners[] = {CHORUS_BACKENDS(CHORUS_OPENER)};
#undef CHORUS_OPENER

}  // namespace

absl::Span<const absl::string_view> BackendNames() { return kNames; }

absl::StatusOr<std::unique_ptr<Backend>> OpenBackend(absl::string_view name,
                                                     const BackendOptions& options) {
  CHORUS_RETURN_IF_ERROR(CheckDeviceCount(options.devices));
  for (size_t i = 0; i < BackendNames().size(); ++i) {
    if (kNames[i] == name) return kOpeners[i](options);
  }
  return Malformed(absl::StrCat("backend: expected ", absl::StrJoin(kNames, " or "), ", got \"",
                                Printable(name), "\""));
}

}  // namespace chorus
