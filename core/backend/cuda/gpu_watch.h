// Learns when streams of the GPU have come somewhere, without waiting in the driver: a stream that
// is asked writes a word in pinned memory as it comes there, and a thread looks at the words.
//
// Order. Where one stream came to A before another came to B because it waited for what stood
// behind A, A is told before B, whatever their streams. Two things are needed for that. A caller
// that asks for B asked for A before, for the wait between them was enqueued behind A and in front
// of B: so what is told together is told in the order of the asking. And A must be told together
// with B, or earlier: words that are read one after the other may show B and not A, which both came
// between the two reads. So the words are read again until nothing is new. As words only go up,
// each then has stood still between two looks; there was a moment at which all of them stood as
// they were read, and what had been written by then was all that it came behind. One more look at
// what was asked for earlier would not do: it could find A, and not what A came behind. The looks
// end, because nothing more is asked for meanwhile (mutex_ is held), and the streams have no more
// to write than what is awaited.
//
// Threads: any, but calls of Await are one at a time. It has a thread of its own, on which it calls
//   what it was given, with no lock held.
// Ownership: it has the words, the caller the streams; these must have ended before it goes, and
//   the thread before them (Stop). The GPU must outlive it.
// Errors: said at each function. What has been lost it is told (Lose); nothing that is awaited then
//   stays away.
#ifndef CHORUS_CORE_BACKEND_CUDA_GPU_WATCH_H_
#define CHORUS_CORE_BACKEND_CUDA_GPU_WATCH_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/mutex.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/gpu.h"

namespace chorus {

class GpuWatch {
 public:
  struct Listener {
    std::function<void()> on_wake;  // by Wake()
    // Nothing has come for long, least of all this stream: the driver may know why.
    std::function<void(cuda::Stream stream)> on_overdue;
  };
  // Of these streams, which are named by their indices. The driver's error: there is no pinned
  // memory.
  static absl::StatusOr<std::unique_ptr<GpuWatch>> Create(const CudaGpu* gpu,
                                                          const std::vector<cuda::Stream>& streams,
                                                          Listener listener);
  ~GpuWatch();
  GpuWatch(const GpuWatch&) = delete;
  GpuWatch& operator=(const GpuWatch&) = delete;

  // `done` is called with `status` when the stream has come here; in which order is said above. The
  // driver's answer: where it refuses, the stream never says so, and the caller has to call Lose().
  cuda::Result Await(int stream, std::function<void(absl::Status)> done, absl::Status status);
  // Everything that is awaited, now or later, ends with `why`, unless it has a status of its own;
  // in the order of the asking.
  void Lose(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Has the listener's `on_wake` called soon: once, however often it is asked for until then.
  void Wake() ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the thread. What is awaited by then is never called.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Awaited {
    uint64_t id = 0;  // in the order of the asking, of all streams
    uint32_t value = 0;
    std::function<void(absl::Status)> done;
    absl::Status status;
  };
  struct Word {
    cuda::Stream stream = nullptr;
    const uint32_t* host = nullptr;
    cuda::DevicePtr device = 0;
    uint32_t last_value = 0;      // that the stream will write: the caller's
    uint32_t seen_value = 0;      // at the last look; guarded by mutex_
    std::deque<Awaited> awaited;  // guarded by mutex_
  };

  GpuWatch(const CudaGpu* gpu, Listener listener);
  void Watch() ABSL_LOCKS_EXCLUDED(mutex_);
  // Reads the words that are watched; false: all are as they were.
  bool Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What has been reached, out of `watched_`, in the order in which it is to be told.
  void Collect(std::vector<Awaited>* arrivals) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const CudaGpu* const gpu_;
  const Listener listener_;
  PinnedMemory memory_;
  std::vector<Word> words_;  // by stream

  Mutex mutex_;
  CondVar changed_;
  std::vector<Word*> watched_ ABSL_GUARDED_BY(mutex_);  // have something awaited
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  bool fresh_ ABSL_GUARDED_BY(mutex_) = false;  // something is awaited, newly
  bool wake_ ABSL_GUARDED_BY(mutex_) = false;
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_GPU_WATCH_H_
