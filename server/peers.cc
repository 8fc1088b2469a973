#include "server/peers.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/error.h"
#include "core/runtime/budget.h"
#include "server/tenant_log.h"

namespace chorus {
int DescriptorLimit() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 1 << 20));
}

// The upper half of the numbers is for connections.
PeerTable::PeerTable(uid_t daemon_uid, int max_connections, int max_calls)
    : daemon_uid_(daemon_uid),
      max_connections_(max_connections),
      max_calls_(max_calls),
      first_(DescriptorLimit() / 2),
      last_(DescriptorLimit()),
      hangups_(epoll_create1(EPOLL_CLOEXEC)),
      next_(first_) {}

absl::StatusOr<UniqueFd> PeerTable::Add(UniqueFd connection,
                                        const absl::optional<PeerCredentials>& peer) {
  const Owner owner = OwnerOf(peer);
  MutexLock lock(&mutex_);
  const auto count = per_owner_.find(owner);
  const int own_count = count == per_owner_.end() ? 0 : count->second;
  if (own_count >= ShareOf(max_connections_) || open_ >= max_connections_) {
    return MakeError(Reason::kQuota,
                     absl::StrCat("too many connections: ", own_count,
                                  owner.has_value() ? absl::StrCat(" of uid ", *owner) : " by TCP",
                                  ", ", open_, " in all, of ", max_connections_));
  }
  // F_DUPFD gives the lowest free number that is not below `next_`; a full upper end wraps once.
  for (int attempt = 0; attempt < 2; ++attempt) {
    UniqueFd numbered(fcntl(connection.get(), F_DUPFD_CLOEXEC, next_));
    if (numbered.valid()) {
      next_ = numbered.get() + 1 < last_ ? numbered.get() + 1 : first_;
      Connection& added = peers_[numbered.get()];
      // gRPC has closed the last one of this number; its hangup was not looked at yet.
      EndedLocked(&added);
      AddCallsLocked(&added, -added.calls);
      epoll_event event = {};
      event.events = EPOLLRDHUP;
      event.data.fd = numbered.get();
      if (epoll_ctl(hangups_.get(), EPOLL_CTL_ADD, connection.get(), &event) != 0) break;
      added.peer = peer;
      added.watch = std::move(connection);
      added.called = false;
      added.since = Clock::now();
      ++open_;
      ++per_owner_[owner];
      return numbered;
    }
    next_ = first_;
  }
  return MakeError(Reason::kQuota,
                   absl::StrCat("no descriptor for a connection: ", strerror(errno)));
}

void PeerTable::EndedLocked(Connection* connection) {
  if (!connection->watch.valid()) return;
  // The file stays open, and would stay watched, as long as gRPC has it.
  epoll_ctl(hangups_.get(), EPOLL_CTL_DEL, connection->watch.get(), nullptr);
  // A client that only sends no more may still let a write of gRPC's wait, and gRPC closes nothing
  // while it writes: the connection would stay, counted by nobody, and no server shuts down.
  shutdown(connection->watch.get(), SHUT_RDWR);
  connection->watch = UniqueFd();
  --open_;
  const auto count = per_owner_.find(OwnerOf(connection->peer));
  if (--count->second == 0) per_owner_.erase(count);
}

absl::optional<int> PeerTable::NumberOf(absl::string_view peer) {
  int number = -1;
  if (!absl::ConsumePrefix(&peer, "fd:") || !absl::SimpleAtoi(peer, &number)) return absl::nullopt;
  return number;
}

void PeerTable::CallBegan(int number) {
  MutexLock lock(&mutex_);
  const auto it = peers_.find(number);
  if (it == peers_.end()) return;
  AddCallsLocked(&it->second, 1);
  it->second.called = true;
}

void PeerTable::CallEnded(int number) {
  MutexLock lock(&mutex_);
  const auto it = peers_.find(number);
  // 0: of a connection before this one of the same number.
  if (it == peers_.end() || it->second.calls == 0) return;
  AddCallsLocked(&it->second, -1);
  it->second.since = Clock::now();
}

void PeerTable::AddCallsLocked(Connection* connection, int calls) {
  connection->calls += calls;
  all_calls_ += calls;
  const auto count = calls_of_.try_emplace(OwnerOf(connection->peer), 0).first;
  count->second += calls;
  if (count->second == 0) calls_of_.erase(count);
}

absl::Status PeerTable::CheckCalls(absl::string_view peer) const {
  const absl::optional<int> number = NumberOf(peer);
  if (!number.has_value()) return absl::OkStatus();
  MutexLock lock(&mutex_);
  const auto it = peers_.find(*number);
  if (it == peers_.end()) return absl::OkStatus();
  const Owner owner = OwnerOf(it->second.peer);
  const auto count = calls_of_.find(owner);
  const int own_calls = count == calls_of_.end() ? 0 : count->second;
  if (own_calls <= ShareOf(max_calls_) && all_calls_ <= max_calls_) return absl::OkStatus();
  return MakeError(Reason::kQuota,
                   absl::StrCat("too many calls under way: ", own_calls,
                                owner.has_value() ? absl::StrCat(" of uid ", *owner) : " by TCP",
                                ", ", all_calls_, " in all, of ", max_calls_));
}

absl::StatusOr<Caller> PeerTable::Admit(absl::string_view peer) const {
  CHORUS_RETURN_IF_ERROR(CheckCalls(peer));
  return Resolve(peer);
}

void PeerTable::TakeHangups() {
  epoll_event events[64];
  MutexLock lock(&mutex_);
  const int count = epoll_wait(hangups_.get(), events, 64, 0);
  for (int i = 0; i < count; ++i) EndedLocked(&peers_[events[i].data.fd]);
}

void PeerTable::EndIdle(const Idle& idle) {
  const Clock::time_point now = Clock::now();
  const auto is_idle = [&](const Connection& connection) {
    return connection.watch.valid() && connection.calls == 0 &&
           absl::FromChrono(now - connection.since) >=
               (connection.called ? idle.next_call : idle.first_call);
  };
  // Each with the process that may keep it, which is asked for when the table is free.
  std::vector<std::pair<int, absl::optional<PeerCredentials>>> found;
  {
    MutexLock lock(&mutex_);
    for (const auto& [number, connection] : peers_) {
      if (!is_idle(connection)) continue;
      found.emplace_back(number, connection.called ? connection.peer : absl::nullopt);
    }
  }
  for (const auto& [number, process] : found) {
    if (process.has_value() && idle.keeps(*process)) continue;
    MutexLock lock(&mutex_);
    const Connection& connection = peers_[number];
    // Both gRPC and TakeHangups see its end.
    if (is_idle(connection)) shutdown(connection.watch.get(), SHUT_RDWR);
  }
}

void PeerTable::EndAll() {
  MutexLock lock(&mutex_);
  for (const auto& [number, connection] : peers_) {
    if (connection.watch.valid()) shutdown(connection.watch.get(), SHUT_RDWR);
  }
}

int PeerTable::open() const {
  MutexLock lock(&mutex_);
  return open_;
}

int PeerTable::calls() const {
  MutexLock lock(&mutex_);
  int calls = 0;
  for (const auto& [number, connection] : peers_) {
    if (connection.watch.valid()) calls += connection.calls;
  }
  return calls;
}

absl::StatusOr<Caller> PeerTable::Resolve(absl::string_view peer) const {
  if (const absl::optional<int> number = NumberOf(peer)) {
    MutexLock lock(&mutex_);
    const auto it = peers_.find(*number);
    if (it != peers_.end()) {
      Caller caller;
      caller.is_unix = it->second.peer.has_value();
      if (!caller.is_unix) {
        // Nothing else is listened on.
        caller.tenant = "loopback";
        return caller;
      }
      caller.uid = it->second.peer->uid;
      caller.tenant = TenantOf(caller.uid);
      caller.is_daemon = caller.uid == daemon_uid_;
      return caller;
    }
  }
  return MakeError(Reason::kNotAttached,
                   absl::StrCat("the daemon does not know who calls from ", peer));
}

}  // namespace chorus
