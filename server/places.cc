#include "server/places.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/runtime/budget.h"

namespace chorus::server {

absl::Status CheckPlaces(absl::string_view what, int own_count, int all_count, int most) {
  const int64_t share = ShareOf(most);
  if (own_count < share && all_count < most) return absl::OkStatus();
  return MakeError(Reason::kQuota,
                   absl::StrCat("too many ", what, ": the caller has ", own_count,
                                "; expected at most ", share, " of one user, ", most, " in all"));
}

}  // namespace chorus::server
