#include "server/service/context.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus::server {

int64_t WireSession(int64_t incarnation, SessionId session) {
  return (incarnation << node::kSessionIdBits) | session.value();
}

int64_t WireSessionOrZero(int64_t incarnation, SessionId session) {
  return session.value() == 0 ? 0 : WireSession(incarnation, session);
}

absl::StatusOr<SessionId> ParseSession(int64_t incarnation, int64_t name) {
  if (name <= 0) {
    return Malformed(
        absl::StrCat("session: expected the number that Sessions.Open gave, got ", name));
  }
  const int64_t session_incarnation = name >> node::kSessionIdBits;
  if (session_incarnation != incarnation) {
    return MakeError(
        Reason::kSessionLost,
        absl::StrCat("session ", name, " is of another start of the daemon (", session_incarnation,
                     ", this one is ", incarnation, "); open a new one"));
  }
  return SessionId(name & node::kMaxSessionId);
}

absl::Status SessionLost(int64_t name) {
  return MakeError(
      Reason::kSessionLost,
      absl::StrCat("session ", name, " has ended, or is not the caller's own; open a new one"));
}

}  // namespace chorus::server
