// Streams, events and communicators: the queues of every backend.
//
// The engine keeps the queues and decides what may run: stream order, events and the meeting of
// collective calls. What derives from it decides where and when, and what running is: the CPU's
// engines (cpu_engine.h) compute, `cuda` hands work to a GPU. They share everything else, so that a
// program that is right on one is wrong on the other only for what order lets happen.
//
// An item has passed when Advance() has been called for it. Where running means computing, that is
// when it has ended. Where it means handing over (HandsOver), it is when whoever it was handed to
// knows of it, and keeps the order from there on: an event is then an item of its own, so that its
// record and each wait for it are handed over, too.
//
// An event's record is the number of items that must have passed. Stream states are recycled and
// never freed before the engine, and their counts never go back, so an old event stays meaningful.
//
// Threads: one mutex guards every queue. Work and callbacks run outside it. Ownership: the engine
// has the states of streams and the groups of communicators; the handles that it gives refer to
// them, and go before it. Errors: those of backend.h.
#ifndef CHORUS_CORE_BACKEND_STREAM_ENGINE_H_
#define CHORUS_CORE_BACKEND_STREAM_ENGINE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/variant.h"
#include "core/backend/backend.h"
#include "core/backend/collective_work.h"
#include "core/base/mutex.h"

namespace chorus {

class StreamEngine {
 public:
  // `space` turns addresses into pointers, null where they are pointers; it must outlive the
  // engine.
  explicit StreamEngine(const AddressSpace* space);
  virtual ~StreamEngine();
  StreamEngine(const StreamEngine&) = delete;
  StreamEngine& operator=(const StreamEngine&) = delete;

  std::unique_ptr<Stream> CreateStream(int device);
  std::unique_ptr<Event> CreateEvent();
  absl::StatusOr<std::unique_ptr<Communicator>> OpenCommunicator(uint64_t id,
                                                                 absl::Span<const int> devices,
                                                                 int member);

 protected:
  struct StreamState;
  struct Meeting;

  struct WaitItem {
    StreamState* on = nullptr;
    uint64_t position = 0;
  };
  struct CopyItem {
    enum class Direction : uint8_t { kOnDevice, kFromHost, kToHost };
    Direction direction = Direction::kOnDevice;
    DeviceAddress to = 0;    // kToHost: a pointer
    DeviceAddress from = 0;  // kFromHost: a pointer
    int64_t bytes = 0;
  };
  struct CallbackItem {
    std::function<void(absl::Status)> done;
    absl::Status status;
  };
  struct CollectiveItem {
    Meeting* meeting = nullptr;
    int32_t member = 0;
  };
  struct RecordItem {};  // only where the engine hands over
  using Item =
      absl::variant<WaitItem, RecordItem, CopyItem, KernelCall, CallbackItem, CollectiveItem>;

  // First in, first out. A long one takes no more than its items: they never move, and what those
  // that have gone leave empty is given back, but for one block.
  class ItemQueue {
   public:
    bool empty() const { return blocks_.empty() || (first_ == end_ && blocks_.size() == 1); }
    Item& front() { return (*blocks_.front())[first_]; }
    Item& Push();  // a slot at the end, to be assigned
    void Pop();

   private:
    static constexpr size_t kBlock = 64;
    using Block = std::array<Item, kBlock>;
    std::deque<std::unique_ptr<Block>> blocks_;
    std::unique_ptr<Block> spare_;
    size_t first_ = 0;  // in the first block
    size_t end_ = 0;    // in the last one
  };

  struct StreamState {
    virtual ~StreamState() = default;
    enum class State : uint8_t {
      kIdle,     // nothing to do
      kReady,    // in ready_, or in the hands of a thread that runs it
      kBlocked,  // waits for another stream, or for the members of a meeting
    };
    struct Waiter {
      StreamState* stream = nullptr;
      uint64_t position = 0;
    };

    StreamEngine* engine = nullptr;
    int device = 0;
    ItemQueue items;
    uint64_t enqueued = 0;
    uint64_t completed = 0;
    State state = State::kIdle;
    Meeting* at = nullptr;  // the one whose other members it waits for
    uint64_t search = 0;    // the last that has come to it
    bool released = false;  // its Stream is gone; recycled when it is idle
    absl::Status failure;   // the first since the last callback
    std::vector<Waiter> waiters;
  };

  // --- For backends. All with the mutex held unless they say otherwise. ---

  // ready_ may have grown: have it run. May release the mutex meanwhile.
  virtual void Schedule() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // The same from a thread that enqueues nothing and must not be kept: an abort.
  virtual void ScheduleElsewhere() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // A new state of the engine's own kind.
  virtual std::unique_ptr<StreamState> MakeState() const = 0;
  virtual bool HandsOver() const { return false; }
  // Where the engine hands over: `stream` comes to what asks a question of the host (a kernel's
  // `unless`, a veto), which callbacks in front of it may answer. False: they have not all run; the
  // stream waits until it is given to Resume().
  virtual bool HostHasPassed(StreamState* /*stream*/) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return true;
  }
  // Where the engine hands over: what follows on `stream` is behind `position` of `on`, which has
  // passed.
  virtual void PassWait(StreamState* /*stream*/, const WaitItem& /*wait*/)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {}

  // Takes the next work from a stream that the caller has removed from ready_. True: `work` is to
  // be run (a record, copy, kernel or callback, then Advance; or a collective that all members have
  // reached, then FinishMeeting). False: the stream is idle or blocked, and what changes that makes
  // it ready.
  bool Begin(StreamState* stream, Item* work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The work that Begin gave has ended. The stream stays in the caller's hands.
  void Advance(StreamState* stream, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives a stream back: ready when it has more to do, else idle.
  void Requeue(StreamState* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of a stream that waits for the host.
  void Resume(StreamState* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { MakeReady(stream); }
  // Ends a collective for all its members and gives back their streams.
  void FinishMeeting(Meeting* meeting, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Of what a kernel's failure comes to: it says where in the trainer it was asked for. INTERNAL: a
  // kernel failed that must not (`may_fail`: MayFail of core/ops/op.h); nobody guards against that.
  static absl::Status KernelFailure(const absl::Status& status, absl::string_view op,
                                    absl::string_view source, bool may_fail);

  // Without the mutex: only the thread that Begin gave the work to may use them.
  absl::Status PrepareMeeting(Meeting* meeting);  // fills its work
  static CollectiveWork& WorkOf(Meeting* meeting);
  // The numbers of a device's memory that its list depends on.
  static std::vector<std::pair<DeviceAddress, int64_t>> NumbersOf(Meeting* meeting);
  // The streams of the members that take part, in their order.
  static void StreamsOf(const Meeting& meeting, std::vector<StreamState*>* streams);

  const AddressSpace* const space_;
  mutable Mutex mutex_;
  // Streams that may run, each once.
  std::vector<StreamState*> ready_ ABSL_GUARDED_BY(mutex_);

 private:
  class EngineStream;
  class EngineEvent;
  class EngineCommunicator;
  struct Channel;
  struct Group;

  // Of one of Item's kinds: it is moved once, into its place.
  template <typename T>
  void Push(StreamState* stream, T item) ABSL_LOCKS_EXCLUDED(mutex_);
  template <typename T>
  void PushLocked(StreamState* stream, T item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeReady(StreamState* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static bool AsksTheHost(const Item& item);
  void Recycle(StreamState* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Status EnqueueCall(Group* group, int member, const CollectiveCall& call,
                           StreamState* stream) ABSL_LOCKS_EXCLUDED(mutex_);
  static void ListMembers(Meeting* meeting);
  Meeting* Join(Group* group, int member, const CollectiveCall& call)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Breaks the group: its meetings that have not started end with `why`.
  void Break(Group* group, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailMeeting(Meeting* meeting, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Streams that wait for each other in a circle do so for ever: members have called in different
  // orders. To be asked whenever a blocked stream comes to wait for others, or others for it:
  // breaks the groups whose calls are in the circle.
  void BreakCircleThrough(StreamState* blocked) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The streams that a blocked one waits for, one after the other from *next on; then null.
  static StreamState* NextAwaited(StreamState* blocked, size_t* next);
  // Counts a member's stream as past the meeting, which ends with the last.
  void Pass(Meeting* meeting) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseMember(Group* group, int member) ABSL_LOCKS_EXCLUDED(mutex_);
  void RetireIfUnused(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::vector<std::unique_ptr<StreamState>> streams_ ABSL_GUARDED_BY(mutex_);
  std::vector<StreamState*> free_streams_ ABSL_GUARDED_BY(mutex_);
  struct SearchStep {
    StreamState* stream = nullptr;
    size_t next = 0;  // of those that it waits for
  };
  std::vector<SearchStep> path_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_search_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<uint64_t, std::unique_ptr<Group>> groups_ ABSL_GUARDED_BY(mutex_);
  // Groups without members whose last calls are still under way.
  std::vector<std::unique_ptr<Group>> retired_ ABSL_GUARDED_BY(mutex_);
  // Of meetings that have ended some are kept for the next, of whichever group.
  static constexpr size_t kKeptMeetings = 1024;
  std::vector<std::unique_ptr<Meeting>> free_meetings_ ABSL_GUARDED_BY(mutex_);
};

// INVALID_ARGUMENT: communicator `id` is to have a device that the backend does not have. Backends
// ask before they open one: engines do not know how many devices there are.
absl::Status CheckDevices(const Backend& backend, uint64_t id, absl::Span<const int> devices);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_STREAM_ENGINE_H_
