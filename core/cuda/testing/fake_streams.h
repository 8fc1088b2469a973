// The streams of the stand-in driver, and what runs their work.
//
// Only the order within a stream and waits for records keep anything in order. In adversarial order
// one thing runs at a time, and a seeded generator picks what: mostly what was enqueued last, often
// anything else. Before, it lets the program go on for as long as that enqueues, so that nothing
// works only because work is run at once. Work that takes long (a kernel that waits for another
// one's word) goes on beside what follows. In eager order all that may run does, as soon as it can.
//
// A program that enqueues everything before it waits sees the same order with the same seed, others
// nearly so.
//
// Threads: all of it is thread-safe. Work runs on threads of its own, started when there is work.
// Ownership: a stream and a record live as long as anyone has them, a stream's work also when
//   nobody has the stream any more.
// Errors: none; to end while there is work left is a misuse that is reported (report_misuse.h).
#ifndef CHORUS_CORE_CUDA_TESTING_FAKE_STREAMS_H_
#define CHORUS_CORE_CUDA_TESTING_FAKE_STREAMS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "core/base/mutex.h"

namespace chorus {
namespace cuda {

enum class FakeOrder { kAdversarial, kEager };

// What a stream is given to do.
struct FakeWork {
  std::string name;  // in reports
  std::function<void()> run;
  std::vector<uint64_t> uses;  // the blocks of memory that it uses, by their addresses
};

class FakeStreams {
 public:
  struct Stream;
  struct Record;
  using StreamRef = std::shared_ptr<Stream>;
  using RecordRef = std::shared_ptr<Record>;

  FakeStreams(FakeOrder order, uint64_t seed, absl::Duration patience);
  ~FakeStreams();

  StreamRef Create(int gpu);

  void Add(const StreamRef& stream, FakeWork work);
  // Reached when all that the stream has by now is done.
  RecordRef AddRecord(const StreamRef& stream);
  // What follows on the stream comes after the record, of whatever stream.
  void AddWait(const StreamRef& stream, RecordRef record);

  bool Idle(const Stream& stream);
  bool Reached(const Record& record);
  absl::Time WhenReached(const Record& record);
  // These return once that is so.
  void AwaitIdle(const Stream& stream);
  void AwaitIdleGpu(int gpu);
  void AwaitReached(const Record& record);

  // The name of unfinished work that uses a block of memory; "" if none does.
  std::string UserOf(uint64_t block);

 private:
  // How the next stream is chosen. Kept for some steps and then drawn anew.
  enum class Mode { kLatest, kStarved, kAhead, kAny, kOldest };

  void Enqueue(const StreamRef& stream, FakeWork work, RecordRef record, bool waits);
  void MakeReady(const StreamRef& stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Work();
  void TakeTurn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DrawMode() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Hold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  StreamRef Pick() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Step(const StreamRef& stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const FakeOrder order_;
  const absl::Duration patience_;

  Mutex mutex_;
  CondVar enqueued_;   // the thread that has the turn waits for work
  CondVar turn_free_;  // all others wait for the turn
  CondVar done_;       // callers wait for work's end
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  Mode mode_ ABSL_GUARDED_BY(mutex_) = Mode::kAny;
  uint64_t steps_left_ ABSL_GUARDED_BY(mutex_) = 0;
  StreamRef chosen_ ABSL_GUARDED_BY(mutex_);
  // Streams whose first item may run, by that item's number, and streams that have items.
  std::map<uint64_t, StreamRef> ready_ ABSL_GUARDED_BY(mutex_);
  std::map<const Stream*, StreamRef> busy_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t held_at_ ABSL_GUARDED_BY(mutex_) = 0;
  // Which thread picks. A number, so that a thread whose work took long sees that it is another's
  // by now.
  uint64_t turn_ ABSL_GUARDED_BY(mutex_) = 0;
  bool turn_taken_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time running_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // in this turn
  int without_turn_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_TESTING_FAKE_STREAMS_H_
