#include "server/peers.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/error.h"

namespace chorus {
namespace {

int DescriptorLimit() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 1 << 20));
}

}  // namespace

// The upper half of the numbers is for connections.
PeerTable::PeerTable(uid_t daemon_uid)
    : daemon_uid_(daemon_uid),
      first_(DescriptorLimit() / 2),
      last_(DescriptorLimit()),
      next_(first_) {}

absl::StatusOr<UniqueFd> PeerTable::Add(UniqueFd connection, const PeerCredentials& peer) {
  MutexLock lock(&mutex_);
  // F_DUPFD gives the lowest free number that is not below `next_`; a full upper end wraps once.
  for (int attempt = 0; attempt < 2; ++attempt) {
    UniqueFd numbered(fcntl(connection.get(), F_DUPFD_CLOEXEC, next_));
    if (numbered.valid()) {
      next_ = numbered.get() + 1 < last_ ? numbered.get() + 1 : first_;
      peers_[numbered.get()] = peer;
      return numbered;
    }
    next_ = first_;
  }
  return MakeError(Reason::kQuota,
                   absl::StrCat("no descriptor for a connection: ", strerror(errno)));
}

absl::StatusOr<Caller> PeerTable::Resolve(absl::string_view peer) const {
  Caller caller;
  if (absl::StartsWith(peer, "ipv4:127.") || absl::StartsWith(peer, "ipv6:[::1]") ||
      absl::StartsWith(peer, "ipv6:%5B::1%5D")) {
    caller.tenant = "loopback";
    return caller;
  }
  absl::string_view number = peer;
  int fd = -1;
  if (absl::ConsumePrefix(&number, "fd:") && absl::SimpleAtoi(number, &fd)) {
    MutexLock lock(&mutex_);
    const auto it = peers_.find(fd);
    if (it != peers_.end()) {
      caller.tenant = absl::StrCat("uid:", it->second.uid);
      caller.is_unix = true;
      caller.uid = it->second.uid;
      caller.is_daemon = it->second.uid == daemon_uid_;
      return caller;
    }
  }
  return MakeError(Reason::kNotAttached,
                   absl::StrCat("the daemon does not know who calls from ", peer));
}

}  // namespace chorus
