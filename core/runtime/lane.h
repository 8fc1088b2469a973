// One lane of a device: launches and transfers that are in order with each other, as messages.h
// says, and go on beside those of the device's other lanes, on streams of its own.
//
// Threads: one thread makes all calls of a device's lanes; events come on any. Ownership: of its
// streams; the device and its names outlive it. Errors: as Executor's.
#ifndef CHORUS_CORE_RUNTIME_LANE_H_
#define CHORUS_CORE_RUNTIME_LANE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/runtime/device_names.h"
#include "core/runtime/device_program.h"
#include "core/runtime/executor.h"
#include "core/runtime/messages.h"

namespace chorus {

class Lane {
 public:
  using Say = std::function<void(const EventMessage&)>;
  // All outlive it.
  Lane(Device* device, DeviceNames* names, const DeviceExecutorOptions* options, const Say* say);
  // Waits for what is under way.
  ~Lane();

  void Launch(absl::string_view bytes);
  // Enqueues a slice of what was too large to be enqueued at once.
  void Continue();
  bool HasMore() const { return launching_ || !behind_.empty(); }
  // Called once what the lane has been given so far is enqueued: at once, if that is so.
  void Behind(std::function<void()> call);
  // As Executor's. Whether the launch has begun here.
  bool Abandon(LaunchId launch);
  void Upload(TransferId id, DeviceAddress to, const void* from, int64_t bytes);
  void Download(TransferId id, void* to, DeviceAddress from, int64_t bytes, LaunchId after);

 private:
  static constexpr int kCompute = static_cast<int>(DevicePlan::StreamId::kCompute);
  static constexpr int kCommunication = static_cast<int>(DevicePlan::StreamId::kCommunication);
  static constexpr int kPlanStreams = DevicePlan::kStreams;
  // Uploads and downloads go on beside the plans' work.
  static constexpr int kCopy = kPlanStreams;
  static constexpr int kStreams = kPlanStreams + 1;
  static constexpr size_t kPositions = 1024;

  // How much work each stream had been given.
  struct Position {
    LaunchId launch;
    int64_t end[kStreams] = {};
    bool may_fail = false;  // the launch, or one whose results it reads
  };
  // What a launch has come to: the first failure, or the first of its own.
  struct Failure {
    absl::Status status;
    bool is_origin = false;

    void Add(const absl::Status& result, bool is_own) {
      if (result.ok() || (!status.ok() && (is_origin || !is_own))) return;
      status = Detached(result);
      is_origin = is_own;
    }
  };
  // What decides whether a launch may write over what was given to it.
  struct Guard : Veto {
    std::atomic<bool> failed{false};
    Mutex mutex;
    Failure failure ABSL_GUARDED_BY(mutex);

    void Add(const absl::Status& result, bool is_own = false) {
      if (result.ok()) return;
      MutexLock lock(&mutex);
      failure.Add(result, is_own);
      failed.store(true, std::memory_order_release);
    }
    Failure Result() {
      MutexLock lock(&mutex);
      return {Detached(failure.status), failure.is_origin};
    }
    absl::Status status() override { return Result().status; }
  };
  struct Ending;
  // The launch that is being enqueued; `message_`, `bound_`, `left_out_` and `commit_` are its own.
  using Inlines = absl::InlinedVector<LaunchMessage::Inline, 1>;
  struct UnderWay {
    DeviceProgram* plan = nullptr;
    size_t next = 0;  // step
    bool commits = false;
    bool may_fail = false;  // else it has nothing to hold back for
    bool reads_what_may_fail = false;
    bool uses[kPlanStreams] = {};
    Failure failure;  // of what could not be enqueued
    std::shared_ptr<Guard> guard;
    std::shared_ptr<Ending> ending;          // null: of its kernels none can be left out
    std::shared_ptr<const Inlines> inlines;  // read until it has ended
  };
  // What the ends of one launch on its streams have in common.
  struct Ending {
    std::atomic<bool> unwanted{false};
    std::atomic<int> left{0};
    std::shared_ptr<const Inlines> inlines;
    // What it reads and may have failed: then so has it, for those that read its results. Nothing
    // where its guard asks for that.
    FailureLog<LaunchId>::Ids after;
    FailureLog<TransferId>::Ids uploads;
    Mutex mutex;
    Failure failure ABSL_GUARDED_BY(mutex);
  };

  // --- Launching ---

  void BeginLaunch(absl::string_view bytes);
  absl::Status Bind(DeviceProgram** plan);
  void EnqueueSlice();
  void BringInlines();
  std::shared_ptr<Guard> MakeGuard(const bool (&uses)[kPlanStreams], const Failure& enqueued);
  void Enqueue(DeviceProgram::LoadedStep* step, const Guard* guard, Failure* failure);
  void EnqueueCollective(DeviceProgram::LoadedStep* step, Stream* stream, Failure* failure);
  DeviceAddress AddressOf(const DevicePlan::Location& location) const {
    return DeviceProgram::AddressOf(location, message_.buffers);
  }
  Event* EventAt(int32_t index);

  // --- Order between launches ---

  Position NeededBy(absl::Span<const LaunchId> launches) const;
  void Order(int stream, const Position& needed);
  void Note(bool may_fail);

  // --- The end of launches ---

  bool AllDone() const { return in_flight_.load(std::memory_order_acquire) == 0; }
  void Begin() { in_flight_.fetch_add(1, std::memory_order_relaxed); }
  void End() { in_flight_.fetch_sub(1, std::memory_order_release); }
  absl::Status FailureOf(absl::Span<const LaunchId> launches, absl::Span<const TransferId> uploads);
  void Complete(LaunchId launch, const absl::Status& status, bool held_back = false,
                bool is_origin = false) {
    (*say_)(CompletionMessage{launch, status, held_back, is_origin});
  }
  void EndTransfer(TransferId id, bool is_upload);
  void Finish(UnderWay* done);

  Device* const device_;
  DeviceNames* const names_;
  const DeviceExecutorOptions* const options_;
  const Say* const say_;

  std::vector<std::unique_ptr<Event>> events_;             // of plans; each launch uses them afresh
  std::array<std::unique_ptr<Event>, kStreams> crossing_;  // between launches; [s]: recorded on s

  Position enqueued_;
  int64_t waited_end_[kStreams][kStreams] = {};  // how far of each other stream each has waited for
  int64_t uploaded_ = 0;                         // where on the copy stream the last upload ended
  std::array<Position, kPositions> positions_;   // of the last launches
  size_t positions_count_ = 0;

  // Of launches of several kernels that have not ended, and of others.
  std::deque<std::pair<LaunchId, std::weak_ptr<Ending>>> endings_;
  UnderWay launch_;
  bool launching_ = false;                    // it is not enqueued whole
  int64_t slice_ = 0;                         // pieces that may still be done in this call
  std::deque<std::function<void()>> behind_;  // calls that wait for that
  absl::flat_hash_set<LaunchId> unwanted_;    // of launches that may be among these
  LaunchMessage message_;                     // the one being launched
  absl::InlinedVector<const DeviceNames::OpenedCommunicator*, 4> bound_;
  std::vector<bool> left_out_;  // by group of equal work
  const DeviceNames::OpenedCommunicator* commit_ = nullptr;

  std::atomic<int64_t> in_flight_{0};  // ended by completions

  // Last: the work on them uses the rest.
  std::array<std::unique_ptr<Stream>, kStreams> streams_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_LANE_H_
