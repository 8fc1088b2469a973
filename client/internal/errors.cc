#include "client/internal/errors.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/source_line.h"

namespace chorus {
namespace internal {

absl::Status ForkedError() {
  return MakeError(Reason::kForked,
                   "this object belongs to the parent process; open a session of your own after "
                   "fork");
}

bool IsLost(const absl::Status& status) {
  switch (ErrorOf(status).reason) {
    case Reason::kDaemonLost:
    case Reason::kSessionLost:
    case Reason::kForked:
      return true;
    default:
      return false;
  }
}

bool IsTimeout(const absl::Status& status) {
  const Error error = ErrorOf(status);
  return error.reason == Reason::kTransportTimeout && error.id == ErrorId();
}

bool IsNoOutcome(const absl::Status& status) {
  const Error error = ErrorOf(status);
  return error.reason == Reason::kSequenceGap || IsTimeout(status) ||
         (error.code == absl::StatusCode::kResourceExhausted && error.id == ErrorId());
}

std::string SourceOf(CallSite site) {
  return std::string(ShortSourceLine(absl::StrCat(site.file, ":", site.line)));
}

absl::Status WithSource(const absl::Status& status, const std::string& source) {
  Error error = ErrorOf(status);
  if (!error.source.empty() || source.empty()) return status;
  error.source = source;
  error.message = absl::StrCat(error.message, " (", source, ")");
  return ToStatus(error);
}

absl::Status InFunction(absl::string_view name, const absl::Status& status) {
  Error error = ErrorOf(status);
  error.message = absl::StrCat(name, ": ", error.message);
  return ToStatus(error);
}

absl::Status AtIndex(const absl::Status& status, int64_t index) {
  if (index < 0) return status;
  Error error = ErrorOf(status);
  error.message = absl::StrCat("at index ", index, " of the coalesced call: ", error.message);
  return ToStatus(error);
}

}  // namespace internal
}  // namespace chorus
