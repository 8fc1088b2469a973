// Chorus for trainers: sessions, worlds, tensors, collectives and their gradients.
//
// Start here. A trainer opens a session with the daemon of its node, joins a world as one of its
// ranks, and calls collectives on tensors that the daemon owns:
//
//   CHORUS_ASSIGN_OR_RETURN(chorus::Session session, chorus::Session::Open());
//   CHORUS_ASSIGN_OR_RETURN(chorus::World world, session.Join());   // RANK, WORLD_SIZE, ...
//   chorus::Tensor x = chorus::FromHost<float>(world, {1, 2, 3}, {3}).RequireGrad();
//   chorus::Tensor y = chorus::AllReduce(x, world);                 // returns at once
//   CHORUS_RETURN_IF_ERROR(chorus::Backward(chorus::Sum(y * y)));
//   CHORUS_ASSIGN_OR_RETURN(std::vector<float> g, x.grad().Read<float>());
//
// Nothing here waits but what says so: Open, Join, NewGroup, Abort, Reform, and a tensor's Wait,
// Read, Item and View. A call that fails returns a tensor that carries the error and the line of
// the call; so does every op on that tensor; the next synchronising call hands it out. (A call that
// is refused on this rank waits for the daemon's word that the other ranks have been told.)
//
// Ranks stay in line by counting. The name of a collective call is its position in its rank's
// program: (step, how many calls of the group the rank has made before in the step). Calls meet
// that have one name, and never others. Every call counts, also one that is refused here or fails
// later; what is coalesced is one call. Sends and receives count for each peer, direction and tag
// by themselves, requests for gradients for each collective that they are gradients of, and
// NewGroup for each list of ranks. World::Step(n) begins step n, where all of them count from 0
// again:
//   * Begin each turn of a training loop with a step. A rank that leaves a turn early, by an error
//     or an exception, is then in line again at the next one; calls of the turn that it has left
//     are passed. Without Step a rank that leaves out calls is out of line for good, and nothing
//     tells but that calls which do not fit (another type, shape or reduction) mismatch.
//   * What is sent in a step is received in it. A step that is done again has a new number.
// What can become of a call:
//   * Who is ahead waits, at most agree_timeout.
//   * A call that one rank cannot make (an operand that does not fit, a function that cannot be
//     compiled, ...) ends the world's *epoch*: that rank has its own error, every call of
//     the world that is under way on other ranks fails with kPeerRefused naming the rank, the line
//     and the error, and calls of the next epoch work at once. So do a mismatch, a late rank, a
//     death and Abort. A rank is in the next epoch as soon as it has been handed the cause. Where
//     all ranks make one mistake at one call, one epoch ends.
//   * What uses a result that has failed carries its error on. A call of which that is all ends no
//     epoch again, for the others have been told: who needs it fails, alone.
//   * A call that needs a rank which has passed its position (it has made a later call of the
//     group, or begun a later step, without that one) fails with kMismatch naming both calls and
//     lines: alone, with what waits for it and what uses its result. No epoch ends.
//   * A rank of which nobody knows what it would have called (a compiled function that could not
//     be traced, see Compiled) is *out of line*: it takes part in nothing more until its next step
//     (Reform, where there are no steps). Its calls fail at once, for those who need them too.
//
// **The loss that is differentiated is the sum over ranks of each rank's loss.** So the gradient of
// AllReduce is an AllReduce, and a loss that each rank computes alike counts once for every rank.
// A gradient is a collective like any other: every rank that took part in the forward collective
// takes part in its gradient, by Backward or Grad, or has given up its tape (NoGrad, Detach, or the
// result's last handle dropped) and then counts as zeros; where its operand had come from another
// collective zeros would make others' gradients wrong, so that who asks for them gets kGradientLost
// naming it. While gradients are on, every collective of a floating type is recorded, also where
// this rank's input wants no gradient: another rank's may, and then needs this rank's part of the
// loss. Put metrics under NoGrad.
//
// Threads: every function and class here may be used from any thread; a Tensor, World or Group
//   object itself is a handle like a std::shared_ptr: copy it, do not change one object from two
//   threads. Members of several ranks may live in one session.
// Order: the calls of one thread take effect in its order. Members of one group must call its
//   collectives in one order; several threads that use one member must order themselves.
// Fork: in a forked child every object made before the fork is inert: calls return kForked, and
//   destructors touch nothing.
#ifndef CHORUS_CLIENT_CHORUS_H_
#define CHORUS_CLIENT_CHORUS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/error.h"
#include "core/collective/call_sites.h"
#include "core/graph/graph.h"
#include "core/tensor/half.h"
#include "core/tensor/type.h"

namespace chorus {

namespace internal {
class Access;
class CompiledImpl;
class GradMode;
class MemberCore;
class SessionCore;
class TensorImpl;
struct GroupCore;
}  // namespace internal

class Group;
class Session;
class Tensor;
class World;

using Shape = std::vector<int64_t>;
using Timeout = std::chrono::nanoseconds;

// The line of the trainer that made a call: errors name it. What records something takes one as its
// last argument; leave it out, and it is the line of the call. A helper of your own takes one as
// well and hands it on, and errors then name its caller's line:
//
//   Tensor MyMean(const Tensor& x, CallSite site = CallSite::Here()) {
//     const CallSiteScope lines(site);  // operators take no argument
//     return Sum(x) * (1.0 / static_cast<double>(x.num_elements()));
//   }
struct CallSite {
  const char* file = "";
  int line = 0;
  // This line; or, under a CallSiteScope, the line that it was given.
  static CallSite Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return scoped == nullptr ? CallSite{file, line} : *scoped;
  }

 private:
  friend class CallSiteScope;
  inline static thread_local const CallSite* scoped = nullptr;
};

// While one lives, calls of this thread that are given no line have its. A function that is
// compiled has lines of its own, wherever Run is called.
class CallSiteScope {
 public:
  explicit CallSiteScope(CallSite site) : site_(site), outer_(CallSite::scoped) {
    CallSite::scoped = &site_;
  }
  // Lines of their own again.
  CallSiteScope() : outer_(CallSite::scoped) { CallSite::scoped = nullptr; }
  ~CallSiteScope() { CallSite::scoped = outer_; }
  CallSiteScope(const CallSiteScope&) = delete;
  CallSiteScope& operator=(const CallSiteScope&) = delete;

 private:
  const CallSite site_;
  const CallSite* const outer_;
};

// The dtype of a C++ type: DTypeOf<float>() is DType::kF32. Only the types below.
template <typename T>
constexpr DType DTypeOf();
template <>
constexpr DType DTypeOf<float>() {
  return DType::kF32;
}
template <>
constexpr DType DTypeOf<double>() {
  return DType::kF64;
}
template <>
constexpr DType DTypeOf<int64_t>() {
  return DType::kI64;
}
template <>
constexpr DType DTypeOf<int32_t>() {
  return DType::kI32;
}
template <>
constexpr DType DTypeOf<int16_t>() {
  return DType::kI16;
}
template <>
constexpr DType DTypeOf<int8_t>() {
  return DType::kI8;
}
template <>
constexpr DType DTypeOf<uint8_t>() {
  return DType::kU8;
}
// The half types of core/tensor/half.h: F16(1.5f) rounds, float(half) is exact.
template <>
constexpr DType DTypeOf<F16>() {
  return DType::kF16;
}
template <>
constexpr DType DTypeOf<BF16>() {
  return DType::kBF16;
}
template <>
constexpr DType DTypeOf<bool>() {
  return DType::kBool;
}
static_assert(sizeof(bool) == 1, "elements of a bool tensor are bytes");

// --- Sessions -----------------------------------------------------------------------------------

// How commands reach the daemon. All carry the same commands in the same order and give the same
// results and errors; they differ in speed.
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
  // Numbers of the daemon's devices; empty: the `device_count` least used ones.
  std::vector<int> devices;
  int device_count = 1;
  // How long Open waits for a daemon that is starting, and for its answers.
  Timeout open_timeout = std::chrono::seconds(10);
  // What a wait without its own timeout waits at most. Longer than the daemon's agree and exec
  // timeouts together, so that their errors, which say more, come first.
  Timeout wait_timeout = std::chrono::minutes(10);
  std::string label;  // shown in diagnostics; empty: the program's name and pid
  // Join, Reform and waits for tensors say on standard error whom they wait for, after 10 s and
  // then each 60 s.
  bool report_waits = true;
};

struct WorldOptions {
  // Empty: the job's id, from CHORUS_WORLD, TORCHELASTIC_RUN_ID, SLURM_JOB_ID,
  // OMPI_MCA_ess_base_jobid or PMIX_NAMESPACE, whichever is set first; else "default".
  std::string name;
  int rank = -1;   // -1: RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK or PMI_RANK
  int size = -1;   // -1: WORLD_SIZE, SLURM_NTASKS, OMPI_COMM_WORLD_SIZE or PMI_SIZE
  int device = 0;  // the member's device: a place in the session's list
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

// One of a session's devices. A Session stands for its first, a World for its member's.
class DeviceRef {
 public:
  DeviceRef() = default;
  DeviceRef(const Session& session);  // NOLINT: stands for device 0
  DeviceRef(const World& world);      // NOLINT: stands for its member's device

  int slot() const { return slot_; }  // place in the session's list

 private:
  friend class internal::Access;
  DeviceRef(std::shared_ptr<internal::SessionCore> session, int slot)
      : session_(std::move(session)), slot_(slot) {}

  std::shared_ptr<internal::SessionCore> session_;
  int slot_ = 0;
};

// One client's lease with a daemon. What is made through it is released when it is closed, when the
// last handle of it, its worlds and its tensors goes, or when the process ends.
class Session {
 public:
  Session() = default;  // empty: calls return FAILED_PRECONDITION

  // UNAVAILABLE kDaemonLost: no daemon came to serve at the address within open_timeout, kDraining:
  // it is shutting down. DEADLINE_EXCEEDED kTransportTimeout: it does not answer. INVALID_ARGUMENT
  // kMalformed: no address, or a path at which something else stands than a socket.
  // PERMISSION_DENIED kNotAttached: another user's socket that does not let this one in, or another
  // user's daemon (SessionOptions::daemon_uids). UNIMPLEMENTED kVersion: the daemon is of
  // another version. UNAUTHENTICATED kNotAttached: the ring was asked for and is not to be had.
  static absl::StatusOr<Session> Open(const SessionOptions& options = {});

  // Waits until every rank of the world has joined. ALREADY_EXISTS kDuplicateRank,
  // INVALID_ARGUMENT kWorldSize, DEADLINE_EXCEEDED kJoinTimeout naming the missing ranks. A rank
  // that is not let in is told, and so are at once, with its error, those who wait for it.
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
// destinations are places in the group.
class Group {
 public:
  Group() = default;
  Group(const World& world);  // NOLINT: everybody

  int rank() const;  // this member's place
  int size() const;
  // The place of a rank of the world; -1 when it is not in the group.
  int GroupRankOf(int world_rank) const;
  const std::vector<int>& world_ranks() const;  // by place

 private:
  friend class internal::Access;
  Group(std::shared_ptr<internal::MemberCore> member, internal::GroupCore* core)
      : member_(std::move(member)), core_(core) {}

  std::shared_ptr<internal::MemberCore> member_;
  internal::GroupCore* core_ = nullptr;  // its member's
};

// One member of a job: this rank.
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
  // FAILED_PRECONDITION: inside a compiled function.
  absl::Status Step(int64_t n, CallSite site = CallSite::Here()) const;
  int64_t step() const;  // 0 before the first

  DeviceRef device() const;
  Group group() const;  // everybody
  // `world_ranks` in the order of the new group; this rank is one of them. Every member calls it;
  // the k-th request of each in a step for the same list is the same group, so nobody waits for
  // anybody. A world has so many groups in its life (4,096 unless its daemon was told otherwise;
  // RESOURCE_EXHAUSTED kQuota): ask once, and keep it.
  absl::StatusOr<Group> NewGroup(const std::vector<int>& world_ranks) const;

  // Orderly: only collectives that need this rank fail from now on (kPeerLeft, then kNeedsReform).
  // What the session kept for the world goes with it: who joins, uses and leaves worlds may do so
  // for ever. (The last handle of a world does not leave it: others may need the rank until its
  // session closes.)
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

// --- Tensors ------------------------------------------------------------------------------------

// A tensor's bytes, mapped read-only where the daemon has them. Keeps them alive.
template <typename T>
class TensorView {
 public:
  TensorView() = default;
  TensorView(std::shared_ptr<const void> keep, const T* data, size_t size)
      : keep_(std::move(keep)), data_(data), size_(size) {}
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  const T& operator[](size_t i) const { return data_[i]; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

 private:
  std::shared_ptr<const void> keep_;
  const T* data_ = nullptr;
  size_t size_ = 0;
};

// A handle to an immutable tensor of the daemon: to what it is at once, to its bytes when they are
// computed. It is its own future: Wait.
class Tensor {
 public:
  Tensor() = default;  // no tensor: waits and ops give FAILED_PRECONDITION

  // Known at once, also while it is pending. kUnspecified and {} for a failed or absent one.
  DType dtype() const;
  const Shape& shape() const;
  int64_t num_elements() const;
  DeviceRef device() const;

  // True for a result that this rank does not get: of Send and Barrier, of Reduce off its root. It
  // can be waited for, and be a root of Backward: then this rank takes part with nothing.
  bool absent() const;
  bool defined() const { return impl_ != nullptr; }  // false: Tensor()

  // What is known without waiting: an error that it carries, OK while it is pending or ready.
  absl::Status status() const;

  // Waits until it is computed, or failed: then the error of the op that failed, with the line that
  // called it. DEADLINE_EXCEEDED kTransportTimeout: the timeout passed; nothing has changed, the
  // outcome is still to be had. Without a timeout: SessionOptions::wait_timeout.
  absl::Status Wait() const;
  absl::Status Wait(Timeout timeout) const;

  // The elements, row-major; waits. INVALID_ARGUMENT kBadType: T is not its dtype.
  template <typename T>
  absl::StatusOr<std::vector<T>> Read() const;
  // The one element of a tensor of one.
  template <typename T>
  absl::StatusOr<T> Item() const;
  // The elements in place, without a copy; waits. UNIMPLEMENTED where the daemon is remote: Read.
  template <typename T>
  absl::StatusOr<TensorView<T>> View() const;

  // --- Gradients ---
  // Marks a tensor that was not computed from others (a leaf) as one whose gradient is wanted.
  // Returns itself. INVALID (status() tells): not floating point, or a result.
  Tensor& RequireGrad();
  // True for such a leaf and for everything that is recorded as depending on one.
  bool requires_grad() const;
  // What Backward has added up so far; an undefined tensor when nothing has.
  Tensor grad() const;
  void ClearGrad() const;
  // The same tensor without its history.
  Tensor Detach() const;

 private:
  friend class internal::Access;
  explicit Tensor(std::shared_ptr<internal::TensorImpl> impl) : impl_(std::move(impl)) {}
  absl::Status ReadInto(DType dtype, std::function<char*(int64_t elements)> allocate) const;
  absl::StatusOr<std::pair<std::shared_ptr<const void>, const char*>> Map(DType dtype) const;

  std::shared_ptr<internal::TensorImpl> impl_;
};

// Memory of the trainer's that the daemon reads in place: staging. Fill data(), then use tensor()
// as an operand: nothing is copied on this side, and a floating-point AllReduce reads it where it
// is. Do not write while an op that uses it is pending: only this rank's own contribution is
// undefined then, the ranks still agree on the result.
template <typename T>
class MappedTensor {
 public:
  MappedTensor() = default;
  T* data() const { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data_[i]; }
  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }  // NOLINT: an operand

  MappedTensor(Tensor tensor, T* data, size_t size)
      : tensor_(std::move(tensor)), data_(data), size_(size) {}

 private:
  Tensor tensor_;
  T* data_ = nullptr;
  size_t size_ = 0;
};

// Internal: what the templates below are made of.
Tensor FromBytes(const DeviceRef& device, DType dtype, const Shape& shape, const char* bytes,
                 int64_t elements, CallSite site);
absl::StatusOr<std::pair<Tensor, char*>> MapBytes(const DeviceRef& device, DType dtype,
                                                  const Shape& shape, CallSite site);

// A tensor with a copy of `values`; as many as `shape` has elements, row-major. FromHost<bool>
// takes a std::vector<bool> or a bool*, and Read<bool> gives a std::vector<bool>.
template <typename T>
Tensor FromHost(const DeviceRef& device, const std::vector<T>& values, const Shape& shape,
                CallSite site = CallSite::Here()) {
  const int64_t count = static_cast<int64_t>(values.size());
  if constexpr (std::is_same_v<T, bool>) {
    // Its elements are bits.
    const std::vector<char> bytes(values.begin(), values.end());
    return FromBytes(device, DType::kBool, shape, bytes.data(), count, site);
  } else {
    return FromBytes(device, DTypeOf<T>(), shape, reinterpret_cast<const char*>(values.data()),
                     count, site);
  }
}
template <typename T>
Tensor FromHost(const DeviceRef& device, const T* values, size_t count, const Shape& shape,
                CallSite site = CallSite::Here()) {
  return FromBytes(device, DTypeOf<T>(), shape, reinterpret_cast<const char*>(values),
                   static_cast<int64_t>(count), site);
}
// Of no dimensions.
template <typename T>
Tensor Scalar(const DeviceRef& device, T value, CallSite site = CallSite::Here()) {
  return FromBytes(device, DTypeOf<T>(), {}, reinterpret_cast<const char*>(&value), 1, site);
}
Tensor Full(const DeviceRef& device, DType dtype, const Shape& shape, double value,
            CallSite site = CallSite::Here());
Tensor Zeros(const DeviceRef& device, DType dtype, const Shape& shape,
             CallSite site = CallSite::Here());

// A tensor that carries an error (not OK), as a failed op gives: for a function that is being
// compiled and cannot go on.
Tensor FromError(const DeviceRef& device, const absl::Status& error);

// Waits for the daemon to make the memory. UNIMPLEMENTED where it is remote. RESOURCE_EXHAUSTED.
template <typename T>
absl::StatusOr<MappedTensor<T>> Map(const DeviceRef& device, const Shape& shape,
                                    CallSite site = CallSite::Here()) {
  auto mapped = MapBytes(device, DTypeOf<T>(), shape, site);
  if (!mapped.ok()) return mapped.status();
  const size_t size = static_cast<size_t>(mapped->first.num_elements());
  return MappedTensor<T>(std::move(mapped->first), reinterpret_cast<T*>(mapped->second), size);
}

// --- Collectives --------------------------------------------------------------------------------
// Each goes out at once and returns at once. `group` may be a World: everybody. Every member calls
// the same, in the same order, and each says what must be equal on all of them; dtypes always must.
// A mismatch is INVALID_ARGUMENT kMismatch on every rank, with each rank's version and line;
// nothing was executed. A call that is refused on one rank (a wrong number of tensors or of rows, a
// root outside the group, a failed operand, ...) carries that error there, and ends the epoch for
// the others, who are told.
//
// Ranks (`root`, `to`, `from`) are places in the group: Group::GroupRankOf translates those of the
// world. A *piece* is what goes from one member to another; its *rows* are its dimension 0. Pieces
// of one collective are alike but for their rows: where these differ, and only there, `rows` says
// how many each member's piece has, by place; empty means that all are equal. Forms "IntoTensor",
// "Tensor" and "Single" have all pieces in one tensor, one after the other along `dim` (negative:
// from the end), and then rows are sizes of that dimension; list forms have a tensor a piece. Both
// forms of one collective may meet. Tensors of no dimensions are pieces of one type, and count as
// one row where pieces come into one tensor.
//
// Reductions between ranks are taken in one order: with operand r of the member at place r,
//   T(lo, n) = operand lo where n = 1, else T(lo, p) op T(lo + p, n - p),
// p the largest power of two below n, over all places of the group, the same for every form, piece,
// destination and coalescing. A member that takes no part in a gradient is left out: a side of a
// node in which nobody is there is nothing, and the node is its other side; a single operand is the
// result, bit for bit (AVG, PREMUL_SUM and bool apart). Factors of PREMUL_SUM are applied to the
// operands; AVG divides T by the number of all members, whoever is absent; half types are f32 up to
// T, which is rounded once; a NaN T is the one NaN; MIN and MAX keep the left one of +0 and -0.
// Integers wrap; of bool, SUM and MAX are "or", PRODUCT and MIN "and". So bits are equal from run
// to run, and on all ranks that get the same, wherever the ranks are.

// How tensors are reduced: AllReduce(x, world, Reduction::kMax),
// AllReduce(x, world, ReduceOp::PremulSum(0.25)).
//   SUM                     gradient: that of the result, where the rule below says nothing else
//   AVG                     the sum by the number of members; floating point. The same by it
//   PREMUL_SUM              the sum of each member's tensor times its own factor; floating point.
//                           The same times this rank's factor, which itself is a number
//   PRODUCT                 the product of the other members' elements, never a quotient: zeros and
//                           overflow are no special case
//   MIN, MAX                NaN anywhere gives NaN. The members that hold the result (equal to it,
//                           +0 = -0; or NaN like it) share the gradient evenly, others get exactly
//                           0
//   BAND, BOR, BXOR         integers and bool; no gradient
// Where gradients are on, PRODUCT, MIN and MAX keep in forward what theirs needs of other ranks.
class ReduceOp {
 public:
  ReduceOp(Reduction reduction = Reduction::kSum)  // NOLINT: implicit
      : reduction_(reduction) {}
  static ReduceOp PremulSum(double factor) {
    ReduceOp op(Reduction::kPremulSum);
    op.factor_ = factor;
    op.has_factor_ = true;
    return op;
  }
  Reduction reduction() const { return reduction_; }
  double factor() const { return factor_; }
  bool has_factor() const { return has_factor_; }  // kPremulSum is nothing without

 private:
  Reduction reduction_;
  bool has_factor_ = false;
  double factor_ = 1;
};

// The reduction of all members' tensors (of one shape), to all. Equal on all: shape, reduction.
// Gradient: AllReduce of the gradients; of PRODUCT also a ReduceScatter, for those of its factors.
Tensor AllReduce(const Tensor& x, const Group& group, ReduceOp op = {},
                 CallSite site = CallSite::Here());
// The root's tensor, to all. All give a tensor of one shape; only the root's values matter.
// Equal on all: shape, root. Gradient: Reduce to the root; elsewhere zeros, with which what is
// behind x takes part: Detach it where the root's has another history.
Tensor Broadcast(const Tensor& x, int root, const Group& group, CallSite site = CallSite::Here());
// The reduction, to the root; absent elsewhere. Equal on all: shape, reduction, root.
// Gradient: Broadcast from the root; of PRODUCT, Scatter.
Tensor Reduce(const Tensor& x, int root, const Group& group, ReduceOp op = {},
              CallSite site = CallSite::Here());

// Every member's tensor, by place. Equal on all: rows, and the other dimensions.
// Gradient: ReduceScatter.
std::vector<Tensor> AllGather(const Tensor& x, const Group& group,
                              const std::vector<int64_t>& rows = {},
                              CallSite site = CallSite::Here());
// The same one after the other along `dim`.
Tensor AllGatherIntoTensor(const Tensor& x, const Group& group,
                           const std::vector<int64_t>& rows = {}, int64_t dim = 0,
                           CallSite site = CallSite::Here());
// Every member's tensor, by place, on the root; elsewhere one absent tensor. Equal on all: root,
// and the dimensions but for the rows. The root gives the rows where they differ; others may.
// Gradient: Scatter.
std::vector<Tensor> Gather(const Tensor& x, int root, const Group& group,
                           const std::vector<int64_t>& rows = {}, CallSite site = CallSite::Here());
// The same one after the other along `dim`; absent off the root.
Tensor GatherIntoTensor(const Tensor& x, int root, const Group& group,
                        const std::vector<int64_t>& rows = {}, int64_t dim = 0,
                        CallSite site = CallSite::Here());

// The piece for this member of the root's `xs`, which has one for each, by place, and is not looked
// at elsewhere (leave it empty). `dtype` and `shape` are those of this member's piece, on the root
// too. Equal on all: root, and the dimensions but for the rows. Gradient: Gather.
Tensor Scatter(const std::vector<Tensor>& xs, DType dtype, const Shape& shape, int root,
               const Group& group, CallSite site = CallSite::Here());
// The same from one tensor of the root's (elsewhere Tensor()), split along `dim`. The root gives
// the rows where they differ; others may.
Tensor ScatterTensor(const Tensor& x, DType dtype, const Shape& shape, int root, const Group& group,
                     const std::vector<int64_t>& rows = {}, int64_t dim = 0,
                     CallSite site = CallSite::Here());

// `xs`: one for each member, by place. Gives the reduction of what the members have for this one.
// Equal on all: the shape of each member's piece, reduction. Gradient: AllGather; of PRODUCT,
// AllToAll.
Tensor ReduceScatter(const std::vector<Tensor>& xs, const Group& group, ReduceOp op = {},
                     CallSite site = CallSite::Here());
// The same from one tensor, split along `dim`. Equal on all: also the rows.
Tensor ReduceScatterTensor(const Tensor& x, const Group& group, ReduceOp op = {},
                           const std::vector<int64_t>& rows = {}, int64_t dim = 0,
                           CallSite site = CallSite::Here());

// `xs`: one for each member, by place; what comes back is what each has for this one. `rows`: of
// what comes from each. What two members say of what goes between them must be the same; all other
// dimensions are equal on all. Gradient: AllToAll back.
std::vector<Tensor> AllToAll(const std::vector<Tensor>& xs, const Group& group,
                             const std::vector<int64_t>& rows = {},
                             CallSite site = CallSite::Here());
// The same from one tensor into one, along dimension 0: `send_rows` go to each member and
// `receive_rows` come from each; both or neither.
Tensor AllToAllSingle(const Tensor& x, const Group& group,
                      const std::vector<int64_t>& send_rows = {},
                      const std::vector<int64_t>& receive_rows = {},
                      CallSite site = CallSite::Here());

// To and from one other member. The n-th Send of a step to a member with a tag meets the n-th Recv
// of that step from this one with that tag: their dtypes and shapes must be equal. Send's result is
// absent. Gradient: the opposite direction.
Tensor Send(const Tensor& x, int to, const Group& group, int64_t tag = 0,
            CallSite site = CallSite::Here());
Tensor Recv(DType dtype, const Shape& shape, int from, const Group& group, int64_t tag = 0,
            CallSite site = CallSite::Here());
// Any number of them, in one call. Each is done as soon as its peer has come, whatever the others
// wait for; results are by place, absent for sends.
struct Transfer {
  static Transfer Send(Tensor x, int to, int64_t tag = 0) {
    return Transfer{true, std::move(x), DType::kUnspecified, {}, to, tag};
  }
  static Transfer Recv(DType dtype, Shape shape, int from, int64_t tag = 0) {
    return Transfer{false, Tensor(), dtype, std::move(shape), from, tag};
  }
  bool send = false;
  Tensor tensor;  // of a send
  DType dtype = DType::kUnspecified;
  Shape shape;
  int peer = -1;
  int64_t tag = 0;
};
std::vector<Tensor> BatchSendRecv(const std::vector<Transfer>& transfers, const Group& group,
                                  CallSite site = CallSite::Here());
// Absent; Wait for it returns when every member has called.
Tensor Barrier(const Group& group, CallSite site = CallSite::Here());

// Ragged: rows that are known only when the collective runs, like those of the tokens for an
// expert. They come as a tensor of i64, and another split is no other graph. `x` has its pieces one
// after the other from its first row on, and may have more rows than they take. `values` has
// `max_rows` rows: the pieces that came, one after the other, and zeros behind them; `counts` says
// how many rows came in each. Slice what is needed, once the counts have been read, or mask it.
// Equal on all: the dimensions but for the rows, root, reduction. Rows that two members do not
// agree on, that are negative, more than `x` has or than `max_rows` are INVALID_ARGUMENT on every
// rank when it runs. Gradients are those of the forms above, to any order; counts have none.
struct Ragged {
  Tensor values;
  Tensor counts;
};
// `send_counts`: rows for each member. What comes: a count of each.
Ragged AllToAllRagged(const Tensor& x, const Tensor& send_counts, int64_t max_rows,
                      const Group& group, CallSite site = CallSite::Here());
// `count`: rows of this member's piece (a tensor of one element). What comes: a count of each.
Ragged AllGatherRagged(const Tensor& x, const Tensor& count, int64_t max_rows, const Group& group,
                       CallSite site = CallSite::Here());
// The same to the root; absent elsewhere.
Ragged GatherRagged(const Tensor& x, const Tensor& count, int64_t max_rows, int root,
                    const Group& group, CallSite site = CallSite::Here());
// From the root, where `counts` says the rows for each member; elsewhere both are Tensor(). `dtype`
// and `shape` are those of `values`, so its first dimension is the most rows that may come. What
// comes: one count.
Ragged ScatterRagged(const Tensor& x, const Tensor& counts, DType dtype, const Shape& shape,
                     int root, const Group& group, CallSite site = CallSite::Here());
// `counts`: rows of each member's piece, equal on all. What comes: one count.
Ragged ReduceScatterRagged(const Tensor& x, const Tensor& counts, int64_t max_rows,
                           const Group& group, ReduceOp op = {}, CallSite site = CallSite::Here());

// Coalesced: as many collectives in one call, for many small tensors. Results, gradients and bits
// are those of the single calls in that order; what they cost is not. Every member coalesces the
// same ones: it is one call, whatever is in its list, and none where that is empty. Results come
// when all are done; an error in one of them is an error of all, and names its place. Shapes and
// dtypes may differ from place to place; nothing in, nothing out.
std::vector<Tensor> AllReduceCoalesced(const std::vector<Tensor>& xs, const Group& group,
                                       ReduceOp op = {}, CallSite site = CallSite::Here());
std::vector<Tensor> BroadcastCoalesced(const std::vector<Tensor>& xs, int root, const Group& group,
                                       CallSite site = CallSite::Here());
std::vector<Tensor> ReduceCoalesced(const std::vector<Tensor>& xs, int root, const Group& group,
                                    ReduceOp op = {}, CallSite site = CallSite::Here());
std::vector<std::vector<Tensor>> AllGatherCoalesced(const std::vector<Tensor>& xs,
                                                    const Group& group,
                                                    CallSite site = CallSite::Here());
std::vector<Tensor> AllGatherIntoTensorCoalesced(const std::vector<Tensor>& xs, const Group& group,
                                                 CallSite site = CallSite::Here());
std::vector<Tensor> ReduceScatterCoalesced(const std::vector<std::vector<Tensor>>& xs,
                                           const Group& group, ReduceOp op = {},
                                           CallSite site = CallSite::Here());
std::vector<Tensor> ReduceScatterTensorCoalesced(const std::vector<Tensor>& xs, const Group& group,
                                                 ReduceOp op = {},
                                                 CallSite site = CallSite::Here());

// --- Local ops ----------------------------------------------------------------------------------
// More of them are in client/functional: math.h and nn.h; docs/ops.md has them all.
// Recorded, and sent together when a result is needed: at a collective, a read, a limit, or the end
// of Backward. Shapes of two operands broadcast as usual (sizes 1 and missing leading dimensions
// stretch); dtypes and devices must be equal.
Tensor Add(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor Sub(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor Mul(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor Neg(const Tensor& x, CallSite site = CallSite::Here());
// Of matrices: [..., m, k] and [..., k, n]. Leading dimensions broadcast; one matrix on the right
// for all on the left costs nothing more.
Tensor MatMul(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor Relu(const Tensor& x, CallSite site = CallSite::Here());
Tensor Sin(const Tensor& x, CallSite site = CallSite::Here());
Tensor Cos(const Tensor& x, CallSite site = CallSite::Here());
// The axes of a reduction: all, or a list of them (negative: from the end), which may be empty.
class Axes {
 public:
  Axes() = default;
  Axes(std::vector<int64_t> axes)  // NOLINT: implicit
      : all_(false), axes_(std::move(axes)) {}
  Axes(std::initializer_list<int64_t> axes) : all_(false), axes_(axes) {}  // NOLINT: implicit

  bool all() const { return all_; }
  const std::vector<int64_t>& list() const { return axes_; }

 private:
  bool all_ = true;
  std::vector<int64_t> axes_;
};
Tensor Sum(const Tensor& x, const Axes& axes = Axes(), bool keep_dims = false,
           CallSite site = CallSite::Here());
Tensor Expand(const Tensor& x, const Shape& shape, CallSite site = CallSite::Here());
Tensor Reshape(const Tensor& x, const Shape& shape, CallSite site = CallSite::Here());
// Swaps the last two axes, or permutes all.
Tensor Transpose(const Tensor& x, CallSite site = CallSite::Here());
Tensor Transpose(const Tensor& x, const std::vector<int64_t>& permutation,
                 CallSite site = CallSite::Here());
// [begin, end) of one axis.
Tensor Slice(const Tensor& x, int64_t axis, int64_t begin, int64_t end,
             CallSite site = CallSite::Here());
Tensor Concat(const std::vector<Tensor>& xs, int64_t axis, CallSite site = CallSite::Here());
// To another device of the same session.
Tensor CopyTo(const Tensor& x, const DeviceRef& device, CallSite site = CallSite::Here());

// For operators: a tensor, or a number that takes the other side's dtype.
class Operand {
 public:
  Operand(const Tensor& tensor, CallSite site = CallSite::Here())  // NOLINT: implicit
      : tensor_(tensor), site_(site) {}
  template <typename T>
  Operand(const MappedTensor<T>& mapped, CallSite site = CallSite::Here())  // NOLINT: implicit
      : tensor_(mapped.tensor()), site_(site) {}
  Operand(double value, CallSite site = CallSite::Here())  // NOLINT: implicit
      : value_(value), is_value_(true), site_(site) {}

  const Tensor& tensor() const { return tensor_; }
  double value() const { return value_; }
  bool is_value() const { return is_value_; }
  CallSite site() const { return site_; }

 private:
  Tensor tensor_;
  double value_ = 0;
  bool is_value_ = false;
  CallSite site_;
};
Tensor operator+(const Operand& a, const Operand& b);
Tensor operator-(const Operand& a, const Operand& b);
Tensor operator*(const Operand& a, const Operand& b);
Tensor operator-(const Operand& x);

// --- Gradients ----------------------------------------------------------------------------------

// Adds the gradients of the sum of `roots` (weighted by `seeds`, of the roots' shapes) to grad() of
// every leaf that they depend on. Without seeds a root has one element, or is absent. Returns when
// everything is recorded and sent, not computed. Afterwards the tape is used up, unless
// `retain_graph`. FAILED_PRECONDITION: a root has no history, or it is used up.
//
// Each rank asks for the gradients of one collective in one order; those of different ones in any.
// A call that is refused, and whose roots have failed or lead to collectives, ends the epoch for
// everybody: which gradients it would have asked for is not known. So what this rank has recorded
// up to then has no gradient any more: kTapeConsumed for who asks, here and on other ranks.
struct BackwardOptions {
  std::vector<Tensor> seeds;  // empty: ones
  bool retain_graph = false;
  // Record the gradients, so that they can be differentiated. All of them, constants too, have for
  // history the collectives in which the call took part: whoever differentiates one takes part in
  // these, with zeros where nothing comes in.
  bool create_graph = false;
};
absl::Status Backward(const Tensor& root, const BackwardOptions& options = {},
                      CallSite site = CallSite::Here());
absl::Status Backward(const std::vector<Tensor>& roots, const BackwardOptions& options = {},
                      CallSite site = CallSite::Here());

// The gradients with respect to `inputs`, one for each; leaves' grad() stays as it is. An input
// that the outputs do not depend on gets zeros. `create_graph` implies `retain_graph`.
absl::StatusOr<std::vector<Tensor>> Grad(const std::vector<Tensor>& outputs,
                                         const std::vector<Tensor>& inputs,
                                         const BackwardOptions& options = {},
                                         CallSite site = CallSite::Here());

// While one lives, the calls of this thread are not recorded, and this rank counts as zeros in the
// gradients of its collectives.
class NoGrad {
 public:
  NoGrad();
  ~NoGrad();
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  std::unique_ptr<internal::GradMode> mode_;
};

// --- Compile ------------------------------------------------------------------------------------

using Function = std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)>;

struct CompileOptions {
  // Inputs whose memory outputs of their types may take over (parameters that the step replaces),
  // by place. Honoured where nobody else has the tensor (detached from it, for a gradient, or in
  // another run that is not over), the function runs on one device and does not return the input
  // itself, and no collective needs the output; else the step gets memory of its own, and the input
  // stays. Where it is honoured the tensor, and every copy of its handle, is gone: its use is
  // FAILED_PRECONDITION `DONATED`. The result of a call that is under way may be given to the next.
  // Steps are whole: one that fails (a mismatch, a late rank, no memory, a kernel or a device of
  // any rank) leaves what went into it, and its handle, as they were, and the calls behind it that
  // use its results fail with its error: keep the handles of the last steps, and go on from the
  // last one that can be waited for. Only a device that fails while it writes the outputs
  // themselves loses what was donated; what was not donated never is.
  std::vector<int> donate;
  // A dimension of an input that may change from call to call, like the rows of a last short batch.
  struct Varying {
    Varying(int i, int d = 0) : input(i), dim(d) {}  // NOLINT: an input, its first dimension
    int input = 0;
    int dim = 0;
  };
  // They all have one size, of 1 to `max_size`; another size is neither another trace nor another
  // graph. The function is traced with a few sizes, and must be the same op by op but for shapes,
  // whose sizes may be linear in it: what it makes of the size otherwise (a number 1 / size: use
  // Mean) is an error that names the line. With several ranks each may have its own size, unless a
  // collective's shape depends on it.
  std::vector<Varying> varying;
  int64_t max_size = 0;
  // How many calls may be under way: one more waits for the first of them. Each has memory for its
  // results and for what it computes on the way.
  int max_under_way = 16;
};

// A function of tensors as one registered graph: local ops, collectives, Backward and Grad inside,
// one small message a call.
class Compiled {
 public:
  Compiled() = default;
  // Runs it; the first call with inputs of these types, devices and `requires_grad` traces the
  // function, which sees tensors without bytes (Read and Wait fail in it). Tensors that it captures
  // become further inputs; groups that it captures are bound anew at each call. Results carry no
  // history: differentiate inside. Returns at once, like any op, unless as many calls as
  // CompileOptions says are under way. A few bytes from the host (Scalar,
  // or FromHost of 64 bytes at most) travel with the call: a learning rate, a step number or a seed
  // that changes costs nothing beside it, and no other graph.
  // A run that is refused (an input that has failed or is undefined, a function that cannot be
  // traced, a collective that is refused in it, also where its result is not used, or an exception,
  // which goes on to the caller) counts what all traces so far have counted, and ends the epoch for
  // everybody. Where they have counted differently, or there is none, it is not known what this
  // rank would have called: it is out of line until its next World::Step. While a function is
  // traced nothing is sent.
  absl::StatusOr<std::vector<Tensor>> Run(const std::vector<Tensor>& inputs,
                                          CallSite site = CallSite::Here()) const;
  // How often the function was traced: once for each list of types of its inputs. The graphs of the
  // last 256 lists are kept.
  int traces() const;

  explicit Compiled(std::shared_ptr<internal::CompiledImpl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<internal::CompiledImpl> impl_;
};
Compiled Compile(Function function, const CompileOptions& options = {});

// --- Templates ----------------------------------------------------------------------------------

template <typename T>
absl::StatusOr<std::vector<T>> Tensor::Read() const {
  // The elements of a std::vector<bool> are bits.
  std::vector<std::conditional_t<std::is_same_v<T, bool>, char, T>> values;
  const absl::Status status = ReadInto(DTypeOf<T>(), [&values](int64_t elements) {
    values.resize(static_cast<size_t>(elements));
    return reinterpret_cast<char*>(values.data());
  });
  if (!status.ok()) return status;
  if constexpr (std::is_same_v<T, bool>) {
    return std::vector<bool>(values.begin(), values.end());
  } else {
    return values;
  }
}

template <typename T>
absl::StatusOr<T> Tensor::Item() const {
  absl::StatusOr<std::vector<T>> values = Read<T>();
  if (!values.ok()) return values.status();
  if (values->size() != 1) {
    return BadType("Item: expected a tensor of one element, got " + std::to_string(values->size()));
  }
  return values->front();
}

template <typename T>
absl::StatusOr<TensorView<T>> Tensor::View() const {
  auto mapped = Map(DTypeOf<T>());
  if (!mapped.ok()) return mapped.status();
  return TensorView<T>(std::move(mapped->first), reinterpret_cast<const T*>(mapped->second),
                       static_cast<size_t>(num_elements()));
}

}  // namespace chorus

#endif  // CHORUS_CLIENT_CHORUS_H_
