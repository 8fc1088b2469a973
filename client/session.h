// Sessions with a daemon, worlds and groups of ranks.
//
// Threads: chorus.h, as for order, fork and steps. What waits says so. Ownership: handles, which
//   share what they stand for; what a session has made goes when it is closed, or with its last
//   handle.
// Errors: each call names its own. All: UNAVAILABLE kDaemonLost or kDraining once the daemon is
//   gone, NOT_FOUND kSessionLost when the session is closed.
#ifndef CHORUS_CLIENT_SESSION_H_
#define CHORUS_CLIENT_SESSION_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "core/base/error.h"
#include "core/collective/call_sites.h"

namespace chorus {

namespace internal {
class Access;
class MemberCore;
class SessionCore;
struct GroupCore;
}  // namespace internal

class Session;
class World;

using Timeout = std::chrono::nanoseconds;

// How commands reach the daemon. All carry the same commands in the same order and give the same
// results and errors; they differ in speed, and in that the ring alone shares memory (View, Map).
enum class Transport {
  kAuto,    // the ring where the daemon is on this machine (unix:), else the stream
  kRing,    // shared memory
  kStream,  // one gRPC stream
  kUnary,   // one gRPC call a command
};

struct SessionOptions {
  // "unix:/run/user/1000/chorus/chorusd.sock", "localhost:7070". Empty: $CHORUS_ADDRESS; else where
  // a chorusd of this user listens unless told otherwise (for user U
  // unix:/run/user/U/chorus/chorusd.sock, or unix:/tmp/chorus-U/chorusd.sock without /run/user/U),
  // then, where none serves there, unix:/run/chorus/chorusd.sock, which is root's.
  std::string address;
  // Whose daemon may be talked to at a Unix address: these users' and nobody else's. Empty: this
  // process's own, root's, and another user's where root has given it the place: the socket's
  // directory belongs to the daemon's user or root, and on the way there root alone may write (in
  // /run/chorus, not in /tmp). It is looked at before each connection is used.
  std::vector<uint32_t> daemon_uids;
  Transport transport = Transport::kAuto;
  // Indices of the daemon's devices; empty: the `device_count` least used ones.
  std::vector<int> devices;
  int device_count = 1;
  // How long Open waits for a daemon that is starting, and for its answers.
  Timeout open_timeout = std::chrono::seconds(10);
  // What a wait without its own timeout waits at most. Longer than the daemon's agree and exec
  // timeouts together, so that their errors, which say more, come first.
  Timeout wait_timeout = std::chrono::minutes(10);
  // Shown in diagnostics, as one line of 256 bytes at most; empty: the program's name and pid.
  std::string label;
  // Join, Reform and waits for tensors say on standard error which ranks they wait for, after 10 s
  // and then each 60 s.
  bool report_waits = true;
};

struct WorldOptions {
  // Empty: the job's id, from CHORUS_WORLD, TORCHELASTIC_RUN_ID, SLURM_JOB_ID,
  // OMPI_MCA_ess_base_jobid or PMIX_NAMESPACE, whichever is set first; else "default".
  std::string name;
  int rank = -1;   // -1: RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK or PMI_RANK
  int size = -1;   // -1: WORLD_SIZE, SLURM_NTASKS, OMPI_COMM_WORLD_SIZE or PMI_SIZE
  int device = 0;  // the member's device: its slot in the session's list
  Timeout join_timeout = Timeout::zero();   // 0: the daemon's
  Timeout agree_timeout = Timeout::zero();  // 0: the daemon's (60 s); how late a rank may be
  Timeout exec_timeout = Timeout::zero();   // 0: the daemon's (300 s)
  // Whether a collective must be called in one line on all its ranks, and its gradient asked for in
  // one: that tells two equal calls apart which one rank makes in the other order, and which would
  // be summed crosswise, and the gradients of two losses that share results. kWarn writes each such
  // pair of lines once into the daemon's log and its flight record; kRefuse makes it a mismatch.
  // All ranks of a world join with the same value (INVALID_ARGUMENT kMismatch where they do not).
  // Programs that call one collective in lines that differ by rank keep it off.
  CheckCallSites check_call_sites = CheckCallSites::kOff;
};

// What its daemon says of a device (Capabilities), at the time when the session was opened. Empty
// and 0: nothing.
struct DeviceInfo {
  std::string name;          // "host:0"
  int64_t memory_bytes = 0;  // what it may hold
  int core_count = 0;        // processors that compute for it
};

// One of a session's devices. A Session stands for its first, a World for its member's.
class DeviceRef {
 public:
  DeviceRef() = default;
  DeviceRef(const Session& session);  // stands for device 0
  DeviceRef(const World& world);      // stands for its member's device

  int slot() const { return slot_; }  // index in the session's list
  DeviceInfo info() const;

  // The same one of the same session.
  friend bool operator==(const DeviceRef& a, const DeviceRef& b) {
    return a.session_ == b.session_ && a.slot_ == b.slot_;
  }
  friend bool operator!=(const DeviceRef& a, const DeviceRef& b) { return !(a == b); }

 private:
  friend class internal::Access;
  DeviceRef(std::shared_ptr<internal::SessionCore> session, int slot)
      : session_(std::move(session)), slot_(slot) {}

  std::shared_ptr<internal::SessionCore> session_;
  int slot_ = 0;
};

// One client's lease with a daemon. What is made through it is released when it is closed, when the
// last handle of it, its worlds, its tensors and the functions compiled with them goes, or when the
// process ends.
class Session {
 public:
  Session() = default;  // empty: calls return FAILED_PRECONDITION

  // UNAVAILABLE kDaemonLost: no daemon came to serve at the address within open_timeout, kDraining:
  // it is shutting down. DEADLINE_EXCEEDED kTransportTimeout: it does not answer. INVALID_ARGUMENT
  // kMalformed: no address, a path at which something else stands than a socket, more devices than
  // the daemon has, or one of them twice. NOT_FOUND kUnknownName: a device that it does not have.
  // RESOURCE_EXHAUSTED kQuota, kOutOfMemory: there may be no more sessions.
  // PERMISSION_DENIED kNotAttached: another user's socket that does not let this one in, another
  // user's daemon (SessionOptions::daemon_uids), or the ring was asked for at an address that is
  // not unix:PATH. UNIMPLEMENTED kVersion: the daemon is of another version.
  static absl::StatusOr<Session> Open(const SessionOptions& options = {});

  // Waits until every rank of the world has joined. ALREADY_EXISTS kDuplicateRank, INVALID_ARGUMENT
  // kWorldSize, DEADLINE_EXCEEDED kJoinTimeout naming the missing ranks. A rank that is not let in
  // is told, and so are at once, with its error, the ranks that wait for it. (Not where it is the
  // name or the rank that is wrong or missing: these say who waits.)
  absl::StatusOr<World> Join(const WorldOptions& options = {}) const;

  // Releases everything now: members leave their worlds, tensors become unusable (NOT_FOUND
  // kSessionLost). Later calls do nothing.
  absl::Status Close() const;

  int device_count() const;
  DeviceRef device(int slot) const;
  Transport transport() const;  // the one in use, never kAuto
  bool is_open() const;

 private:
  friend class internal::Access;
  explicit Session(std::shared_ptr<internal::SessionCore> session) : session_(std::move(session)) {}

  std::shared_ptr<internal::SessionCore> session_;
};

// An ordered subset of a world's ranks, as one of its members sees it. Roots, peers, sources and
// destinations are ranks in the group.
class Group {
 public:
  Group() = default;
  Group(const World& world);  // everybody

  int rank() const;  // this member's, in the group
  int size() const;
  // The rank in the group of a rank of the world; -1 when it is not in the group.
  int GroupRankOf(int world_rank) const;
  const std::vector<int>& world_ranks() const;  // by rank in the group

 private:
  friend class internal::Access;
  Group(std::shared_ptr<internal::MemberCore> member, internal::GroupCore* core)
      : member_(std::move(member)), core_(core) {}

  std::shared_ptr<internal::MemberCore> member_;
  internal::GroupCore* core_ = nullptr;  // its member's
};

// One member of a job: this rank. Step, NewGroup, Leave, Abort and Reform are FAILED_PRECONDITION
// inside a compiled function: they concern the whole world, and take effect at once.
class World {
 public:
  World() = default;

  int rank() const;
  int size() const;
  const std::string& name() const;
  // Counts the world's lives, from 1: the one that this rank is in. A refused call, a mismatch, a
  // late rank, an abort and a death end the epoch for all ranks. The call that hands the error out
  // (a wait, or the refused call itself) enters the one that is open then, in which collectives
  // work again at once. Failures that end none leave it as it is. Tensors stay valid, and no count
  // is set back.
  int64_t epoch() const;

  // Begins a step of this rank's program: its calls count from 0 again. A rank that is out of line
  // is in line again. Nothing is sent, and nobody waits: other ranks hear of it by the next call.
  // INVALID_ARGUMENT: `n` is not above the last step's (the first is 1 or more) or not below 2^48.
  absl::Status Step(int64_t n, CallSite site = CallSite::Here()) const;
  int64_t step() const;  // 0 before the first

  DeviceRef device() const;
  Group group() const;  // everybody
  // `world_ranks` in the order of the new group; this rank is one of them. Every member calls it;
  // the k-th request of each in a step for the same list is the same group, so nobody waits for
  // anybody. A world has so many groups in its life (4,096 unless its daemon was told otherwise;
  // RESOURCE_EXHAUSTED kQuota): ask once, and keep it.
  absl::StatusOr<Group> NewGroup(const std::vector<int>& world_ranks) const;

  // Orderly, behind this rank's calls so far: only collectives that need it for more fail from now
  // on (kPeerLeft, then kNeedsReform).
  // What the session kept for the world goes with it: a session may join, use and leave worlds for
  // ever. (The last handle of a world does not leave it: others may need the rank until its session
  // closes.)
  absl::Status Leave() const;
  // Ends the epoch with ABORTED kAborted naming this rank, with `why`, for every rank: behind
  // this rank's calls so far. Where the epoch has ended already, only enters the open one.
  absl::Status Abort(const std::string& why) const;

  struct Survivor {
    int old_rank = -1;
    std::string last_published;  // its last finished collective, "" when it has none
  };
  struct Reformed {
    int rank = -1;
    int size = 0;
    int64_t epoch = 0;
    std::vector<Survivor> survivors;  // by new rank: where to resume
  };
  // After a member's death: waits until every survivor has asked; those left get new ranks, in
  // their old order. This handle is changed; its groups but group() are gone. All counts begin
  // anew, and the step is 0 again. Meanwhile no other thread may use the world's groups.
  absl::StatusOr<Reformed> Reform(Timeout timeout = std::chrono::seconds(60));

 private:
  friend class internal::Access;
  explicit World(std::shared_ptr<internal::MemberCore> member) : member_(std::move(member)) {}

  std::shared_ptr<internal::MemberCore> member_;
};

}  // namespace chorus

#endif  // CHORUS_CLIENT_SESSION_H_
