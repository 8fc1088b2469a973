// Calls that change nothing: what they look at, and what they tell of it.
//
// Threads: Show and ShowList on any; a look is on the node thread, what is made of it elsewhere.
// Ownership: what was looked at is a copy. Errors: a look's end the call; of a list also that there
// is no room for it.
#ifndef CHORUS_SERVER_SERVICE_SHOW_H_
#define CHORUS_SERVER_SERVICE_SHOW_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/service/call.h"

namespace chorus::server {

// What ends a call with what was looked at: good, unless the look itself says otherwise.
template <typename What>
absl::Status LookedAt(const What&) {
  return absl::OkStatus();
}
template <typename What>
absl::Status LookedAt(const absl::StatusOr<What>& what) {
  return what.status();
}

// Lets `look(node, now, tenant)` take what it needs on the node thread, and `fill(what, response)`
// make a message of it elsewhere; a look that fails ends the call with its error.
template <typename Response, typename Look, typename Fill>
void Show(const CallRef<Response>& call, Look look, Fill fill) {
  call->Post([call, sees = std::string(call->caller().sees()), look = std::move(look),
              fill = std::move(fill)](node::LocalNode& node, absl::Time now) {
    auto what = look(node, now, sees);
    const absl::Status status = LookedAt(what);
    call->Reply(status, [what = std::move(what), fill](Response* to) { fill(what, to); });
  });
}

// The same for a list, which has room before the node is asked.
template <typename Response, typename Look, typename Fill>
void ShowList(const CallRef<Response>& call, Look look, Fill fill) {
  const absl::Status room = call->Reserve(kListBytes);
  if (!room.ok()) return call->Reply(room);
  Show(call, std::move(look), std::move(fill));
}

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_SHOW_H_
