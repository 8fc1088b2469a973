// The tenant of an RPC, and the connections that gRPC serves.
//
// gRPC tells nothing about a client on a Unix socket, and has no bound on connections. So the
// daemon accepts connections itself, reads SO_PEERCRED of those on Unix sockets, notes it under the
// descriptor's number and hands the descriptor over; in a handler gRPC then names the peer
// "fd:NUMBER". Of each connection it keeps a duplicate, by which it sees the end, and can bring it
// about.
//
// A number is given out again only after thousands of others: a call of a closed connection that is
// still on its way must not meet the credentials of a newer one.
//
// Threads: thread-safe. Ownership: of a connection the table has a duplicate; the descriptor that
// Add() gives is gRPC's. Errors: said at each function.
#ifndef CHORUS_SERVER_PEERS_H_
#define CHORUS_SERVER_PEERS_H_

#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "server/client_socket.h"
#include "server/http2_frames.h"
#include "server/read_gate.h"
#include "server/unix_listener.h"

namespace chorus::server {

// More descriptors are not asked for, and where there are more they are not used: arenas are mapped
// as often as they have descriptors, and a process that has as many mappings as the system lets it
// have, 65,530 by default (vm.max_map_count), cannot get memory for anything; and of each number
// that a connection has had there is a row (PeerTable).
inline constexpr int kMostDescriptors = 65536;
// How many the daemon goes by, of so many that the process may have: the upper half of their
// numbers is for connections.
int DescriptorsOf(rlim_t limit);
// Of this process.
int DescriptorLimit();

struct Caller {
  std::string tenant;  // "uid:1000", "loopback"
  bool is_unix = false;
  uid_t uid = 0;           // of a Unix caller
  bool is_daemon = false;  // a Unix caller of the daemon's own uid
  // May open sessions without the attach socket: the daemon's own uid, and loopback TCP, which the
  // operator has allowed to everybody.
  bool may_write() const { return is_daemon || !is_unix; }
  // Empty for those that may see every tenant's things.
  absl::string_view sees() const {
    return is_daemon ? absl::string_view() : absl::string_view(tenant);
  }
};

class PeerTable {
 public:
  struct MaxCalls {
    int admitted = 0;  // by Admit
    int others = 0;    // those that are not, or not yet: of gRPC's own services, say
    int ending = 0;    // beyond these, which are told that, and those whose answer is on its way
    // In which gRPC tells of a call that is one.
    absl::Duration telling = absl::Seconds(10);
    int64_t all() const { return int64_t{admitted} + others + ending; }
  };
  // Says why a connection of `tenant`'s has to end; on a thread that may hold locks of gRPC's.
  using OnRefused = std::function<void(absl::string_view tenant, absl::string_view why)>;
  // `daemon_uid`: whose processes are trusted without attaching. At most `max_connections` are open
  // at a time, and at most `max_calls` calls under way: ShareOf each of them of one uid, or by TCP.
  PeerTable(uid_t daemon_uid, int max_connections, MaxCalls max_calls,
            OnRefused on_refused = nullptr);

  // Notes a connection's peer, nobody for one by TCP, and returns its descriptor under the number
  // that gRPC shall get. RESOURCE_EXHAUSTED: too many connections, or no descriptor is free.
  absl::StatusOr<UniqueFd> Add(ClientSocket connection,
                               const absl::optional<PeerCredentials>& peer);

  // `peer` as gRPC names it. PERMISSION_DENIED kNotAttached: it is not known.
  absl::StatusOr<Caller> Resolve(absl::string_view peer) const;

  // The id of a connection: its descriptor's number.
  static absl::optional<int> ConnectionIdOf(absl::string_view peer);
  // The connection asks for `counts`. False: it may not, and has to be ended: its user has too many
  // calls that have not ended, or messages that nobody has taken (kMaxLaterMessages), or it asks
  // and asks and does not read what it is sent, or what it sends is broken (a message of more than
  // kMaxMessageBytes). Of MaxCalls::all() a user may have its share (ShareOf); where all users
  // together would have more than all of them, what the share leaves, for nobody's connection is
  // ended for what others do. So it is with messages.
  bool MayAsk(int connection_id, const Http2Frames::Counts& counts);
  // A call of the connection is under way, until CallEnded. RESOURCE_EXHAUSTED kQuota: it is not
  // counted, and has to end at once, for too many are under way that Admit has not let go on. That
  // bound is not Admit's: calls that are refused keep nobody out.
  absl::Status CallBegan(int connection_id);
  // `was_counted`: CallBegan has counted it.
  void CallEnded(int connection_id, bool was_counted);

  // A call's slot among those that are admitted, until it ends; until this object goes it counts as
  // one that ends. The table outlives it.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept
        : table_(std::exchange(other.table_, nullptr)),
          connection_id_(other.connection_id_),
          spare_(other.spare_),
          ends_(other.ends_) {}
    Slot& operator=(Slot&& other) noexcept {
      std::swap(table_, other.table_);
      std::swap(connection_id_, other.connection_id_);
      std::swap(spare_, other.spare_);
      std::swap(ends_, other.ends_);
      return *this;
    }
    ~Slot() {
      if (table_ != nullptr) table_->Leave(connection_id_, spare_, ends_);
    }
    // Its answer is about to be sent: the client that gets it may make the next call at once.
    void End() {
      if (table_ != nullptr && !std::exchange(ends_, true)) table_->Ends(connection_id_, spare_);
    }
    // Once: the call can be spared, for what it waits for goes on without it. A call of its user's
    // that would find no slot takes the slot of the one that has been so for longest; then the slot
    // has ended, and `on_taken` has to end the call. It is called by Admit, without its lock.
    void Spare(std::function<void()> on_taken) {
      if (table_ == nullptr || ends_) return;
      spare_ = table_->AddSpare(connection_id_, std::move(on_taken));
    }
    // So many messages of the call have been taken, not counting its first. Before the call ends.
    void Took(int messages) {
      if (table_ != nullptr) table_->TookMessages(connection_id_, messages);
    }

   private:
    friend class PeerTable;
    Slot(PeerTable* table, int connection_id) : table_(table), connection_id_(connection_id) {}
    PeerTable* table_ = nullptr;
    int connection_id_ = 0;
    int64_t spare_ = 0;  // its name there; 0: it is none
    bool ends_ = false;
  };
  struct Admitted {
    Caller caller;
    Slot slot;
  };
  // Lets a call of `peer` that is under way go on. RESOURCE_EXHAUSTED kQuota: there are too many,
  // and none of its user's can be spared. Errors of Resolve.
  absl::StatusOr<Admitted> Admit(absl::string_view peer);

  // Readable when a connection has ended, for TakeHangups.
  int hangups_fd() const { return hangups_.get(); }
  void TakeHangups();

  // Which connections are idle.
  struct Idle {
    absl::Duration first_call;  // one that has made no call yet, after this time
    absl::Duration next_call;   // one that made some, after this time without any,
    // Unless this says that its process stays. It may call the table.
    std::function<bool(const PeerCredentials&)> keeps;
  };
  // Ends connections that are idle. Asks `keeps` without the lock.
  void EndIdle(const Idle& idle);
  // Ends the connection, unless it has ended.
  void End(int connection_id);
  // Whether the process that made the connection is stopped, by a signal or in a debugger, as far
  // as the system tells. It reads a file.
  bool IsStopped(int connection_id) const;
  // Ends all.
  void EndAll();

  int open() const;
  // Calls under way, of all open connections.
  int calls() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Calls {
    int unended = 0;    // that have not ended
    int under_way = 0;  // of these, by CallBegan
    int admitted = 0;   // of these, by Admit
    int ending = 0;     // of these, no more
    // Messages that have come for them, behind the first of each, and that nobody has taken. Of
    // calls that end before that it is not known; they go with the last call of their connection.
    int later_messages = 0;
    int others() const { return under_way - admitted - ending; }
    Calls operator-() const { return {-unended, -under_way, -admitted, -ending, -later_messages}; }
  };
  struct Connection {
    absl::optional<PeerCredentials> peer;  // stays when it has ended: see above. None: by TCP
    ClientSocket watch;                    // a duplicate; not valid when the connection has ended
    ClientSocket unread;                   // then it, as long as the gate: see EndedLocked
    std::unique_ptr<ReadGate> gate;        // see DropGatesLocked
    Calls calls;
    int requests = 0;  // since its client was last seen to read
    Clock::time_point last_request;
    bool has_called = false;       // ever
    Clock::time_point idle_since;  // accepted, or the last call's end
  };
  // Whose it is, as far as it is known: one of the uids, or all that come by TCP.
  using Owner = absl::optional<uid_t>;
  static Owner OwnerOf(const absl::optional<PeerCredentials>& peer) {
    return peer.has_value() ? Owner(peer->uid) : absl::nullopt;
  }

  // Empty: it may.
  std::string WhyNotAskLocked(int connection_id, Connection* connection,
                              const Http2Frames::Counts& counts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string WhyNotLaterLocked(Connection* connection, int later_messages)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string WhyNotCallsLocked(Connection* connection, int calls)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What one user may have of `most`, of which all have `taken`.
  static int64_t ShareWhere(int64_t taken, int64_t most);
  // Of calls that gRPC has ended before anybody could count them as begun nobody hears. Of one of a
  // service of its own gRPC does not tell before its message has come: that stays for as long as
  // its client keeps its stream open.
  void ForgetLostLocked(Connection* connection, Clock::time_point now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of all connections that its owner has.
  Calls CallsOfLocked(const Connection& connection) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddCallsLocked(Connection* connection, const Calls& calls)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The name of a slot that is spare, as Slot has it.
  int64_t AddSpare(int connection_id, std::function<void()> on_taken);
  // The end of a spare slot that `connection`'s owner has: what has to be called then, or null.
  std::function<void()> TakeSpareLocked(const Connection& connection)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndsLocked(int connection_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Ends(int connection_id, int64_t spare);
  void TookMessages(int connection_id, int messages);
  void Leave(int connection_id, int64_t spare, bool ends);
  static bool IsIdle(const Connection& connection, const Idle& idle, Clock::time_point now);
  void EndedLocked(Connection* connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops the gates of connections that have ended and whose descriptor gRPC has closed. A gate may
  // keep a row for each of hundreds of streams (http2_frames.h), and it is thousands of connections
  // until its number is given out again: without this, dead ones would hold a gigabyte.
  void DropGatesLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uid_t daemon_uid_;
  const int max_connections_;
  const MaxCalls max_calls_;
  const OnRefused on_refused_;
  const int first_;  // the range of numbers
  const int last_;
  const UniqueFd hangups_;  // an epoll of the duplicates
  mutable Mutex mutex_;
  int next_ ABSL_GUARDED_BY(mutex_);
  int open_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<Owner, int> per_owner_ ABSL_GUARDED_BY(mutex_);  // open ones
  Calls all_calls_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<Owner, Calls> calls_of_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<int, Connection> peers_ ABSL_GUARDED_BY(mutex_);
  // Of these, those that have ended and whose gate is still there, by number.
  absl::flat_hash_set<int> ended_ ABSL_GUARDED_BY(mutex_);
  struct SpareSlot {
    int connection_id;
    std::function<void()> on_taken;
  };
  int64_t last_spare_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, SpareSlot> spare_slots_ ABSL_GUARDED_BY(mutex_);  // the oldest is first
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_PEERS_H_
