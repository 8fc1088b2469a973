// A session as the SDK has it: the one place that sends commands, and waits for what they give.
//
// Its parts have headers of their own: log.h (sequences, names), interner.h, origins.h, staging.h,
// graphs.h, fragments.h (pending local ops), member.h, releases.h (what destructors leave). A part
// that wants a run describes it (run_draft.h); SubmitRun sends it.
//
// Threads: any. The session's lock (SessionLock) guards what is annotated with session_lock; the
//   rest is atomic, or does not change. Lock order: session_lock.h.
// Ownership: handles, tensors and tape entries share it. It owns its link, but for a forked child:
//   there its objects do nothing, see Forked.
// Errors: kForked in a child; kSessionLost when it is closed; the link's once the daemon is gone.
#ifndef CHORUS_CLIENT_INTERNAL_SESSION_CORE_H_
#define CHORUS_CLIENT_INTERNAL_SESSION_CORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "chorus/call_site.h"
#include "client/internal/call_table.h"
#include "client/internal/errors.h"
#include "client/internal/fork_mark.h"
#include "client/internal/fragments.h"
#include "client/internal/graphs.h"
#include "client/internal/interner.h"
#include "client/internal/link.h"
#include "client/internal/log.h"
#include "client/internal/member.h"
#include "client/internal/origins.h"
#include "client/internal/releases.h"
#include "client/internal/run_draft.h"
#include "client/internal/session_lock.h"
#include "client/internal/staging.h"
#include "client/internal/tensor_data.h"
#include "client/internal/wait_reports.h"
#include "core/base/mutex.h"
#include "core/ops/op.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

class SessionCore : public std::enable_shared_from_this<SessionCore> {
 public:
  // One of this process's living ones (living_sessions.h).
  static std::shared_ptr<SessionCore> Make(std::unique_ptr<Link> link, absl::Duration wait_timeout,
                                           WaitReportOptions reports = {});
  ~SessionCore();

  Link& link() { return *link_; }
  absl::Duration wait_timeout() const { return wait_timeout_; }
  const WaitReports& reports() const { return reports_; }
  int device_count() const { return static_cast<int>(devices_.size()); }
  DeviceIndex device(int slot) const { return devices_[slot]; }
  Log& log() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) { return log_; }
  Interner& interner() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) { return interner_; }
  MemberTable& members() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) { return members_; }
  Graphs& graphs() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) { return graphs_; }
  // Where destructors leave what is to be released.
  Releases& releases() { return releases_; }

  // For what is called under this session's lock and whose type cannot say so.
  void AssertLocked() const ABSL_ASSERT_EXCLUSIVE_LOCK(session_lock);

  // True in a child of the process that opened the session. Any thread, no lock.
  bool Forked() const { return mark_.Forked(); }

  // --- Runs -------------------------------------------------------------------------------------
  // Adds a local op to the open fragment of its device and origins. `inputs` are this session's and
  // not failed. What other fragments make is sent first.
  TensorDatas Append(NodeSpec spec, absl::Span<const TensorDataPtr> inputs,
                     absl::Span<const TensorType> outputs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sends all pending fragments. What fails to be sent marks its tensors.
  void Flush() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sends collectives that are counted and have their keys as one run: of one group, or of its
  // members in this session. `bound`: it is one alone, and a gradient. Adds the results of the
  // entry's parts to *results, in order.
  absl::StatusOr<Sequence> SubmitCalls(absl::Span<CallPart> parts, bool bound,
                                       const CallInRuns* runs, const CallEntry** entry,
                                       TensorDatas* results)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // The one way to send a run: sends what is pending, unless that is what the draft is made of,
  // binds the operands, names all results or none, counts the run for Throttle, and adds the
  // results to *results. Not OK: the run was not sent and has taken no name; the error is an
  // operand's own, or says why.
  absl::StatusOr<Sequence> SubmitRun(RunDraft* draft, TensorDatas* results)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Waits while as many runs are under way as a daemon lets a session have, and the member has its
  // share of them: called before one more of it is recorded (null: of local ops). Errors of runs
  // are not its business.
  void Throttle(const MemberCore* member) ABSL_LOCKS_EXCLUDED(session_lock);
  // Forgets calls of the past with what they had that was interned, once it is much. No key of a
  // call may be in use.
  void TrimCalls() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // --- Tensors ----------------------------------------------------------------------------------
  // A tensor with a copy of `bytes`: the daemon's, or, where they are few, kHost.
  absl::StatusOr<TensorDataPtr> FromHost(const TensorInfoPtr& info, int32_t device_slot,
                                         const char* bytes, CallSite site)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // The trainer's own staging memory; where there is none to be had, what is idle of the session's
  // is given back first.
  absl::StatusOr<Link::Staging> CreateStaging(int64_t bytes) ABSL_LOCKS_EXCLUDED(session_lock);
  // Makes a kHost tensor one of the daemon's; nothing to do for others.
  absl::Status Name(TensorData* data) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
    const bool host = data->state.load(std::memory_order_relaxed) == TensorData::State::kHost;
    return host ? NameHost(data) : absl::OkStatus();
  }
  // A tensor that `data`'s staging memory holds now: the trainer may write there afterwards.
  absl::StatusOr<TensorDataPtr> Freeze(const TensorData& data)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // --- Waiting ----------------------------------------------------------------------------------
  // Waits until `data` is computed; if it has failed, enters the epochs that are open since. True:
  // it is where only its device can read it.
  absl::StatusOr<bool> Wait(const TensorDataPtr& data, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(session_lock);
  // Waits for a run's end, at most the session's wait_timeout.
  absl::Status WaitForRun(Sequence run) ABSL_LOCKS_EXCLUDED(session_lock);
  // Copies out what Wait has seen, which said `on_device`; or gives it in place.
  absl::Status Read(const TensorDataPtr& data, bool on_device, char* out)
      ABSL_LOCKS_EXCLUDED(session_lock);
  // What it gives in place keeps the tensor, and the mapping.
  absl::StatusOr<std::shared_ptr<const char>> Map(const TensorDataPtr& data, bool on_device)
      ABSL_LOCKS_EXCLUDED(session_lock);
  // An error of the daemon has come here: members whose world's epoch ended by it enter the one
  // that was opened. By this alone do they.
  void OnError(const absl::Status& status) ABSL_LOCKS_EXCLUDED(session_lock);
  // How often that said that a device was lost. Any thread, no lock.
  int64_t losses() const { return losses_.load(std::memory_order_relaxed); }

  // --- Ends -------------------------------------------------------------------------------------
  // Leaves own worlds that are gone, if their runs are over by now.
  void LeaveWhatIsOver() ABSL_LOCKS_EXCLUDED(session_lock);
  absl::Status Close() ABSL_LOCKS_EXCLUDED(session_lock);

  // Rows of the tables that live as long as the session, for tests that they do not grow.
  struct Tables {
    size_t types = 0;
    size_t sources = 0;
    size_t members = 0;
    size_t worlds = 0;  // to be left
    size_t graphs = 0;
  };
  Tables CountTables() ABSL_LOCKS_EXCLUDED(session_lock);

 private:
  SessionCore(std::unique_ptr<Link> link, absl::Duration wait_timeout, WaitReportOptions reports);
  friend class SessionLock;

  // A new tensor of the daemon's with the bytes of `source`.
  struct Created {
    TensorId id;
    Sequence sequence;
  };
  absl::StatusOr<Created> Create(const TensorInfoPtr& info, int32_t device_slot, Binding source,
                                 const std::string& call_site = "")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  absl::StatusOr<TensorId> NewTensorId() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  absl::Status NameHost(TensorData* data) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sends the fragment of this id, if it is open.
  void FlushOne(int64_t fragment_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sends what destructors left. `all`: also the few tensors that could wait for company.
  void Drain(bool all) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // The same of what was taken there; leaves what has found no room.
  void SendLeft(Releases::Batch* left) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Leaves the worlds that are gone and whose runs are over.
  void Leave() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  Link* const link_;  // owned, but for a forked child
  const absl::Duration wait_timeout_;
  const WaitReports reports_;
  const std::vector<DeviceIndex> devices_;
  const ForkMark mark_;

  Mutex mutex_;                      // what session_lock stands for
  std::atomic<bool> closed_{false};  // becomes true under session_lock
  std::atomic<int64_t> losses_{0};   // of devices
  Log log_;                          // guarded by session_lock, but for what log.h says
  StagingPool staging_ ABSL_GUARDED_BY(session_lock);
  Interner interner_ ABSL_GUARDED_BY(session_lock);
  OriginTable origins_ ABSL_GUARDED_BY(session_lock);
  Fragments fragments_ ABSL_GUARDED_BY(session_lock);
  // Those that are no longer open and not in the log yet: the names that they use are kept.
  std::vector<const Fragment*> sending_ ABSL_GUARDED_BY(session_lock);
  MemberTable members_ ABSL_GUARDED_BY(session_lock);
  std::vector<GoneWorld> leaving_ ABSL_GUARDED_BY(session_lock);  // with runs under way
  std::atomic<size_t> leaving_count_{0};
  Releases releases_;
  Graphs graphs_ ABSL_GUARDED_BY(session_lock);
};

// Holds a session's lock. In a forked child, or when the session is closed or lost, status() says
// so. In the child nothing is locked: a thread that goes on there without an OK status holds no
// lock, which the analysis cannot see, as it looks into no constructor or destructor.
class ABSL_SCOPED_LOCKABLE SessionLock {
 public:
  explicit SessionLock(SessionCore* core) ABSL_EXCLUSIVE_LOCK_FUNCTION(session_lock);
  ~SessionLock() ABSL_UNLOCK_FUNCTION();
  SessionLock(const SessionLock&) = delete;
  SessionLock& operator=(const SessionLock&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  SessionCore* const core_;
  bool held_ = false;
  absl::Status status_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_SESSION_CORE_H_
