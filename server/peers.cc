#include "server/peers.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/error.h"
#include "core/runtime/budget.h"
#include "server/own_memory.h"
#include "server/places.h"
#include "server/tenant_log.h"

namespace chorus::server {
namespace {

// What a connection may ask for while its client is not seen to read; and after how many it is
// looked at, for that takes a call of the system.
constexpr int kMaxRequests = 256;
constexpr int kLookAfter = 32;

// Of one by TCP, for nothing else is listened on: nobody knows which user's it is.
constexpr char kLoopback[] = "loopback";
std::string TenantOfPeer(const absl::optional<PeerCredentials>& peer) {
  return peer.has_value() ? TenantOf(peer->uid) : kLoopback;
}

// Whether a client has read enough of what it was sent for more to be sent.
bool Writable(int socket) {
  pollfd entry = {socket, POLLOUT, 0};
  return poll(&entry, 1, 0) > 0 && (entry.revents & POLLOUT) != 0;
}

}  // namespace

int DescriptorsOf(rlim_t limit) {
  static_assert(kMostDescriptors <= ReadGate::kMaxDescriptor + 1);
  return static_cast<int>(std::min<rlim_t>(limit, kMostDescriptors));
}

int DescriptorLimit() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  return DescriptorsOf(limit.rlim_cur);
}

PeerTable::PeerTable(uid_t daemon_uid, int max_connections, MaxCalls max_calls,
                     OnRefused on_refused)
    : daemon_uid_(daemon_uid),
      max_connections_(max_connections),
      max_calls_(max_calls),
      on_refused_(std::move(on_refused)),
      first_(DescriptorLimit() / 2),
      last_(DescriptorLimit()),
      hangups_(epoll_create1(EPOLL_CLOEXEC)),
      next_(first_) {}

absl::StatusOr<UniqueFd> PeerTable::Add(ClientSocket connection,
                                        const absl::optional<PeerCredentials>& peer) {
  const Owner owner = OwnerOf(peer);
  MutexLock lock(&mutex_);
  DropGatesLocked();
  const auto count = per_owner_.find(owner);
  const int own_count = count == per_owner_.end() ? 0 : count->second;
  const std::string owner_text = owner.has_value() ? absl::StrCat("uid ", *owner) : "TCP";
  CHORUS_RETURN_IF_ERROR(
      CheckPlaces(absl::StrCat("connections by ", owner_text), own_count, open_, max_connections_));
  // F_DUPFD gives the lowest free number that is not below `next_`, beyond the range too; a full
  // upper end wraps once.
  for (int attempt = 0; attempt < 2; ++attempt) {
    UniqueFd fd(fcntl(connection.get(), F_DUPFD_CLOEXEC, next_));
    if (fd.get() >= last_) {
      fd = UniqueFd();
      errno = EMFILE;
    }
    if (fd.valid()) {
      next_ = fd.get() + 1 < last_ ? fd.get() + 1 : first_;
      Connection& entry = peers_[fd.get()];
      // gRPC has closed the last one of this number; its hangup was not looked at yet.
      EndedLocked(&entry);
      entry.unread = ClientSocket();
      AddCallsLocked(&entry, -entry.calls);
      epoll_event event = {};
      event.events = EPOLLRDHUP;
      event.data.fd = fd.get();
      if (epoll_ctl(hangups_.get(), EPOLL_CTL_ADD, connection.get(), &event) != 0) break;
      entry.peer = peer;
      const int connection_id = fd.get();
      ended_.erase(connection_id);
      entry.gate = std::make_unique<ReadGate>(
          connection_id,
          // gRPC lets a connection have as many streams as calls may be admitted.
          Http2Frames::Limits{static_cast<size_t>(max_calls_.admitted), kMaxMessageBytes,
                              kMessagePieces, kMessageBytesAPiece, kPiecesAMessage, kMostPieces},
          [this, connection_id](const Http2Frames::Counts& counts) {
            return MayAsk(connection_id, counts);
          });
      entry.requests = 0;
      entry.watch = std::move(connection);
      entry.has_called = false;
      entry.idle_since = Clock::now();
      ++open_;
      ++per_owner_[owner];
      return fd;
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
  // Whatever its client has sent: gRPC may read on, and must not be the last to close it.
  if (MayBringDescriptors(connection->watch.get())) {
    connection->unread = std::move(connection->watch);
  }
  connection->watch = ClientSocket();
  --open_;
  const auto count = per_owner_.find(OwnerOf(connection->peer));
  if (--count->second == 0) per_owner_.erase(count);
}

void PeerTable::DropGatesLocked() {
  for (auto it = ended_.begin(); it != ended_.end();) {
    const auto current = it++;
    // gRPC still has it, and may read on: what came before the end is counted like all else.
    if (fcntl(*current, F_GETFD) >= 0) continue;
    peers_[*current].gate = nullptr;
    peers_[*current].unread = ClientSocket();
    ended_.erase(current);
  }
}

absl::optional<int> PeerTable::ConnectionIdOf(absl::string_view peer) {
  int connection_id = -1;
  if (!absl::ConsumePrefix(&peer, "fd:") || !absl::SimpleAtoi(peer, &connection_id)) {
    return absl::nullopt;
  }
  return connection_id;
}

bool PeerTable::MayAsk(int connection_id, const Http2Frames::Counts& counts) {
  std::string why;
  std::string tenant;
  {
    MutexLock lock(&mutex_);
    const auto it = peers_.find(connection_id);
    if (it == peers_.end()) return true;
    why = WhyNotAskLocked(connection_id, &it->second, counts);
    if (why.empty()) return true;
    tenant = TenantOfPeer(it->second.peer);
  }
  if (on_refused_) on_refused_(tenant, why);
  return false;
}

std::string PeerTable::WhyNotAskLocked(int connection_id, Connection* connection,
                                       const Http2Frames::Counts& counts) {
  if (!counts.broken.empty()) return counts.broken;
  const Clock::time_point now = Clock::now();
  ForgetLostLocked(connection, now);
  if (counts.requests > 0) connection->last_request = now;
  connection->requests += counts.requests;
  if (connection->requests > kLookAfter && Writable(connection_id)) connection->requests = 0;
  if (connection->requests > kMaxRequests) {
    return absl::StrCat("it has asked for ", connection->requests,
                        " answers, and was not seen to read; expected at most ", kMaxRequests);
  }
  const std::string why = WhyNotCallsLocked(connection, counts.calls);
  return why.empty() ? WhyNotLaterLocked(connection, counts.later_messages) : why;
}

std::string PeerTable::WhyNotCallsLocked(Connection* connection, int calls) {
  if (calls == 0) return "";
  const int64_t share = ShareWhere(all_calls_.unended + calls, max_calls_.all());
  const int unended = CallsOfLocked(*connection).unended;
  if (unended + calls > share) {
    return absl::StrCat("its user has ", unended, " calls that have not ended, and makes ", calls,
                        " more; expected at most ", share);
  }
  AddCallsLocked(connection, {calls, 0, 0, 0, 0});
  return "";
}

std::string PeerTable::WhyNotLaterLocked(Connection* connection, int later_messages) {
  // What comes for calls that have ended gRPC drops.
  if (later_messages == 0 || connection->calls.unended == 0) return "";
  const int64_t share = ShareWhere(all_calls_.later_messages + later_messages, kMaxLaterMessages);
  const int own_messages = CallsOfLocked(*connection).later_messages;
  if (own_messages + later_messages > share) {
    return absl::StrCat("its user has ", own_messages,
                        " messages that nobody has taken, and sends ", later_messages,
                        " more; expected at most ", share);
  }
  AddCallsLocked(connection, {0, 0, 0, 0, later_messages});
  return "";
}

int64_t PeerTable::ShareWhere(int64_t taken, int64_t most) {
  return taken > most ? most - ShareOf(most) : ShareOf(most);
}

void PeerTable::TookMessages(int connection_id, int messages) {
  MutexLock lock(&mutex_);
  Connection& connection = peers_[connection_id];
  // 0: as for CallEnded.
  if (connection.calls.unended > 0) AddCallsLocked(&connection, {0, 0, 0, 0, -messages});
}

void PeerTable::ForgetLostLocked(Connection* connection, Clock::time_point now) {
  const Calls& calls = connection->calls;
  if (calls.unended == calls.under_way) return;
  if (absl::FromChrono(now - connection->last_request) < max_calls_.telling) return;
  // Those of them that are under way may be counted twice: then as many lost ones stay.
  const int open = connection->watch.valid() ? connection->gate->open() : 0;
  const int lost = calls.unended - calls.under_way - open;
  if (lost > 0) AddCallsLocked(connection, {-lost, 0, 0, 0, 0});
}

absl::Status PeerTable::CallBegan(int connection_id) {
  MutexLock lock(&mutex_);
  const auto it = peers_.find(connection_id);
  if (it == peers_.end()) return absl::OkStatus();
  it->second.has_called = true;
  CHORUS_RETURN_IF_ERROR(CheckPlaces("calls that are refused or gRPC's own",
                                     CallsOfLocked(it->second).others(), all_calls_.others(),
                                     max_calls_.others));
  AddCallsLocked(&it->second, {0, 1, 0, 0, 0});
  return absl::OkStatus();
}

void PeerTable::CallEnded(int connection_id, bool was_counted) {
  MutexLock lock(&mutex_);
  const auto it = peers_.find(connection_id);
  if (it == peers_.end()) return;
  // 0: of a connection before this one of the same number, or forgotten.
  const Calls& calls = it->second.calls;
  AddCallsLocked(&it->second, {calls.unended > 0 ? -1 : 0,
                               was_counted && calls.under_way > 0 ? -1 : 0, 0, 0, 0});
  it->second.idle_since = Clock::now();
}

PeerTable::Calls PeerTable::CallsOfLocked(const Connection& connection) const {
  const auto calls = calls_of_.find(OwnerOf(connection.peer));
  return calls == calls_of_.end() ? Calls() : calls->second;
}

void PeerTable::AddCallsLocked(Connection* connection, const Calls& calls) {
  const auto count = calls_of_.try_emplace(OwnerOf(connection->peer)).first;
  for (Calls* const sum : {&connection->calls, &all_calls_, &count->second}) {
    sum->unended += calls.unended;
    sum->under_way += calls.under_way;
    sum->admitted += calls.admitted;
    sum->ending += calls.ending;
    sum->later_messages += calls.later_messages;
  }
  if (connection->calls.unended == 0 && connection->calls.later_messages != 0) {
    const int later_messages = connection->calls.later_messages;
    for (Calls* const sum : {&connection->calls, &all_calls_, &count->second}) {
      sum->later_messages -= later_messages;
    }
  }
  const Calls& rest = count->second;
  if (rest.unended == 0 && rest.under_way == 0 && rest.admitted == 0 && rest.ending == 0 &&
      rest.later_messages == 0) {
    calls_of_.erase(count);
  }
}

absl::StatusOr<PeerTable::Admitted> PeerTable::Admit(absl::string_view peer) {
  Admitted admitted;
  CHORUS_ASSIGN_OR_RETURN(admitted.caller, Resolve(peer));
  const int connection_id = *ConnectionIdOf(peer);
  std::function<void()> on_taken;
  {
    MutexLock lock(&mutex_);
    Connection& connection = peers_[connection_id];
    const absl::Status status = CheckPlaces("calls under way", CallsOfLocked(connection).admitted,
                                            all_calls_.admitted, max_calls_.admitted);
    if (!status.ok()) {
      on_taken = TakeSpareLocked(connection);
      if (on_taken == nullptr) return status;
    }
    AddCallsLocked(&connection, {0, 0, 1, 0, 0});
    admitted.slot = Slot(this, connection_id);
  }
  if (on_taken != nullptr) on_taken();
  return admitted;
}

int64_t PeerTable::AddSpare(int connection_id, std::function<void()> on_taken) {
  MutexLock lock(&mutex_);
  spare_slots_.emplace(++last_spare_, SpareSlot{connection_id, std::move(on_taken)});
  return last_spare_;
}

std::function<void()> PeerTable::TakeSpareLocked(const Connection& connection) {
  const Owner owner = OwnerOf(connection.peer);
  for (auto spare = spare_slots_.begin(); spare != spare_slots_.end(); ++spare) {
    const Connection& holder = peers_[spare->second.connection_id];
    // 0: as for CallEnded.
    if (OwnerOf(holder.peer) != owner || holder.calls.admitted == 0) continue;
    EndsLocked(spare->second.connection_id);
    std::function<void()> on_taken = std::move(spare->second.on_taken);
    spare_slots_.erase(spare);
    return on_taken;
  }
  return nullptr;
}

void PeerTable::EndsLocked(int connection_id) {
  Connection& connection = peers_[connection_id];
  // 0: as for CallEnded.
  if (connection.calls.admitted > 0) AddCallsLocked(&connection, {0, 0, -1, 1, 0});
}

void PeerTable::Ends(int connection_id, int64_t spare) {
  MutexLock lock(&mutex_);
  // One that was taken has ended.
  if (spare == 0 || spare_slots_.erase(spare) > 0) EndsLocked(connection_id);
}

void PeerTable::Leave(int connection_id, int64_t spare, bool ends) {
  MutexLock lock(&mutex_);
  Connection& connection = peers_[connection_id];
  const Calls& calls = connection.calls;
  ends = ends || (spare != 0 && spare_slots_.erase(spare) == 0);
  if (ends) {
    if (calls.ending > 0) AddCallsLocked(&connection, {0, 0, 0, -1, 0});
  } else if (calls.admitted > 0) {
    AddCallsLocked(&connection, {0, 0, -1, 0, 0});
  }
}

void PeerTable::TakeHangups() {
  epoll_event events[64];
  MutexLock lock(&mutex_);
  const int count = epoll_wait(hangups_.get(), events, 64, 0);
  for (int i = 0; i < count; ++i) {
    EndedLocked(&peers_[events[i].data.fd]);
    ended_.insert(events[i].data.fd);
  }
}

bool PeerTable::IsIdle(const Connection& connection, const Idle& idle, Clock::time_point now) {
  if (!connection.watch.valid() || connection.calls.under_way > 0) return false;
  const absl::Duration time = absl::FromChrono(now - connection.idle_since);
  return time >= (connection.has_called ? idle.next_call : idle.first_call);
}

void PeerTable::EndIdle(const Idle& idle) {
  const Clock::time_point now = Clock::now();
  std::vector<std::pair<int, PeerCredentials>> candidates;
  {
    MutexLock lock(&mutex_);
    for (auto& [connection_id, connection] : peers_) {
      ForgetLostLocked(&connection, now);
      if (!IsIdle(connection, idle, now)) continue;
      if (connection.has_called && connection.peer.has_value()) {
        candidates.emplace_back(connection_id, *connection.peer);
      } else {
        // Both gRPC and TakeHangups see its end.
        shutdown(connection.watch.get(), SHUT_RDWR);
      }
    }
  }
  const auto keeps = [&idle](const auto& one) { return idle.keeps(one.second); };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), keeps), candidates.end());
  MutexLock lock(&mutex_);
  for (const auto& [connection_id, peer] : candidates) {
    const Connection& connection = peers_[connection_id];
    if (IsIdle(connection, idle, now)) shutdown(connection.watch.get(), SHUT_RDWR);
  }
}

void PeerTable::End(int connection_id) {
  MutexLock lock(&mutex_);
  const auto it = peers_.find(connection_id);
  if (it != peers_.end() && it->second.watch.valid()) shutdown(it->second.watch.get(), SHUT_RDWR);
}

bool PeerTable::IsStopped(int connection_id) const {
  pid_t pid = 0;
  {
    MutexLock lock(&mutex_);
    const auto it = peers_.find(connection_id);
    if (it == peers_.end() || !it->second.peer.has_value()) return false;
    pid = it->second.peer->pid;
  }
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  // proc_pid_stat(5): the state stands behind the name, in which there may be anything.
  const size_t name = line.rfind(") ");
  if (name == std::string::npos || name + 2 >= line.size()) return false;
  const char state = line[name + 2];
  return state == 'T' || state == 't';
}

void PeerTable::EndAll() {
  MutexLock lock(&mutex_);
  for (const auto& [connection_id, connection] : peers_) {
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
  for (const auto& [connection_id, connection] : peers_) {
    if (connection.watch.valid()) calls += connection.calls.under_way;
  }
  return calls;
}

absl::StatusOr<Caller> PeerTable::Resolve(absl::string_view peer) const {
  if (const absl::optional<int> connection_id = ConnectionIdOf(peer)) {
    MutexLock lock(&mutex_);
    const auto it = peers_.find(*connection_id);
    if (it != peers_.end()) {
      const absl::optional<PeerCredentials>& peer_of = it->second.peer;
      Caller caller;
      caller.tenant = TenantOfPeer(peer_of);
      caller.is_unix = peer_of.has_value();
      if (!caller.is_unix) return caller;
      caller.uid = peer_of->uid;
      caller.is_daemon = caller.uid == daemon_uid_;
      return caller;
    }
  }
  return MakeError(Reason::kNotAttached,
                   absl::StrCat("the daemon does not know who calls from ", peer));
}

}  // namespace chorus::server
