#include "tests/hostile/report.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace chorus {
namespace hostile {

absl::Status ExpectEnd(absl::string_view part, const absl::Status& end, absl::StatusCode code,
                       const std::vector<absl::string_view>& says) {
  bool as_expected = end.code() == code;
  for (const absl::string_view words : says) {
    as_expected = as_expected && absl::StrContains(end.message(), words);
  }
  if (as_expected) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(part, ": expected ", absl::StatusCodeToString(code),
                                          " that says \"", absl::StrJoin(says, "\" and \""),
                                          "\", got ", end.ToString()));
}

}  // namespace hostile
}  // namespace chorus
