#include "server/places.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/runtime/budget.h"

namespace chorus::server {

absl::Status CheckPlaces(absl::string_view what, int own, int all, int most) {
  const int64_t share = ShareOf(most);
  if (own < share && all < most) return absl::OkStatus();
  return MakeError(Reason::kQuota,
                   absl::StrCat("too many ", what, ": the caller has ", own, "; expected at most ",
                                share, " of one user, ", most, " in all"));
}

}  // namespace chorus::server
