// Which daemon a session goes to, and waiting for one that is starting.
//
// Threads: plain functions; they wait until their deadline, by SteadyNow (core/base/clock.h), at
//   most.
// Ownership: FoundDaemon owns its connection. Errors: each function says them.
#ifndef CHORUS_CLIENT_LINK_FIND_DAEMON_H_
#define CHORUS_CLIENT_LINK_FIND_DAEMON_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/attach/attach_client.h"
#include "core/base/clock.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

// How long to wait before the next look whether a daemon has started.
inline constexpr absl::Duration kFirstLook = absl::Milliseconds(10);
inline constexpr absl::Duration kLastLook = absl::Milliseconds(200);

// Where to look, the first one first: `address`, or where that is empty $CHORUS_ADDRESS, else where
// this user's own daemon listens unless told otherwise, then kSystemSocketPath.
// INVALID_ARGUMENT (MALFORMED): neither unix:PATH nor HOST:PORT (an IPv6 host in brackets).
absl::StatusOr<std::vector<std::string>> AddressesFor(std::string address);

struct FoundDaemon {
  std::string path;
  std::unique_ptr<AttachClient> attach;
};

// Attaches to the daemon at the first of the socket `paths` where one serves that may be talked to
// (client/attach/daemon_socket.h), and waits for one until `deadline`, which is `patience` ahead.
// An error at the first path that no wait can mend ends the wait, unless another path serves: that
// path is this user's own. Those of the others are told when nothing has come.
// UNAVAILABLE (DAEMON_LOST), PERMISSION_DENIED (NOT_ATTACHED), DEADLINE_EXCEEDED
// (TRANSPORT_TIMEOUT), INVALID_ARGUMENT (MALFORMED: no socket), UNIMPLEMENTED (VERSION).
absl::StatusOr<FoundDaemon> FindDaemon(const std::vector<std::string>& paths,
                                       absl::Span<const uint32_t> daemon_uids, absl::Time deadline,
                                       absl::Duration patience);

// `status` with the address, where no daemon has made it.
absl::Status NoAnswer(absl::string_view address, const absl::Status& status,
                      absl::Duration patience);

// Calls `open` until it gives something else than DAEMON_LOST, or `deadline`: a daemon that is
// starting will be there.
template <typename Open>
auto WhenItServes(absl::Time deadline, const Open& open) -> decltype(open()) {
  absl::Duration look = kFirstLook;
  absl::Status why;
  for (;;) {
    auto result = open();
    if (result.ok()) return result;
    const Reason reason = ErrorOf(result.status()).reason;
    // The last look may have had no time: what the one before saw says more.
    if (reason == Reason::kTransportTimeout && !why.ok()) return why;
    const absl::Duration left = deadline - SteadyNow();
    if (reason != Reason::kDaemonLost || left <= absl::ZeroDuration()) return result;
    why = result.status();
    absl::SleepFor(std::min(look, left));
    look = std::min(2 * look, kLastLook);
  }
}

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_LINK_FIND_DAEMON_H_
