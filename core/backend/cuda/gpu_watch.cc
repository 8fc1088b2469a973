#include "core/backend/cuda/gpu_watch.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/device.h"
#include "core/base/error.h"

namespace chorus {
namespace {

// How long the thread looks again and again before it sleeps in between, and how long it sleeps at
// most: an eighth of what it has waited.
constexpr absl::Duration kWatchClosely = absl::Microseconds(50);
constexpr absl::Duration kLongestSleep = absl::Milliseconds(1);
constexpr absl::Duration kShortestSleep = absl::Microseconds(20);

}  // namespace

GpuWatch::GpuWatch(const CudaGpu* gpu, Listener listener)
    : gpu_(gpu), listener_(std::move(listener)) {}

absl::StatusOr<std::unique_ptr<GpuWatch>> GpuWatch::Create(const CudaGpu* gpu,
                                                           const std::vector<cuda::Stream>& streams,
                                                           Listener listener) {
  std::unique_ptr<GpuWatch> watch(new GpuWatch(gpu, std::move(listener)));
  // A word each, on a cache line of its own.
  constexpr int64_t kLine = 64;
  const int64_t bytes = kLine * static_cast<int64_t>(streams.size());
  CHORUS_ASSIGN_OR_RETURN(watch->memory_, gpu->AllocatePinned(bytes));
  std::memset(watch->memory_.host, 0, static_cast<size_t>(bytes));
  int64_t at = 0;
  for (const cuda::Stream stream : streams) {
    Word word;
    word.stream = stream;
    word.host =
        reinterpret_cast<const uint32_t*>(static_cast<const char*>(watch->memory_.host) + at);
    word.device = watch->memory_.device + static_cast<cuda::DevicePtr>(at);
    watch->words_.push_back(std::move(word));
    at += kLine;
  }
  watch->thread_ = std::thread([raw = watch.get()] { raw->Watch(); });
  return watch;
}

GpuWatch::~GpuWatch() {
  Stop();
  gpu_->Enter();
  gpu_->FreePinned(memory_);
}

void GpuWatch::Stop() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(&mutex_);
    ends_ = true;
  }
  changed_.Signal();
  thread_.join();
}

cuda::Result GpuWatch::Await(int stream, std::function<void(absl::Status)> done,
                             absl::Status status) {
  Word& word = words_[static_cast<size_t>(stream)];
  const uint32_t value = ++word.last_value;
  {
    MutexLock lock(&mutex_);
    if (word.awaited.empty()) watched_.push_back(&word);
    word.awaited.push_back({++last_id_, value, std::move(done), std::move(status)});
    fresh_ = true;
    changed_.Signal();
    if (!lost_.ok()) return cuda::Result::kSuccess;
  }
  return gpu_->api().StreamWriteValue32(word.stream, word.device, value, cuda::kWriteValueDefault);
}

void GpuWatch::Lose(const absl::Status& why) {
  MutexLock lock(&mutex_);
  if (lost_.ok()) lost_ = Detached(why);
  changed_.Signal();
}

void GpuWatch::Wake() {
  MutexLock lock(&mutex_);
  wake_ = true;
  changed_.Signal();
}

bool GpuWatch::Look() {
  bool is_new = false;
  for (Word* const word : watched_) {
    const uint32_t value = cuda::LoadShared(word->host);
    is_new |= value != std::exchange(word->seen_value, value);
  }
  return is_new;
}

void GpuWatch::Collect(std::vector<Awaited>* arrivals) {
  while (Look()) {
  }
  for (size_t i = 0; i < watched_.size();) {
    Word* const word = watched_[i];
    while (!word->awaited.empty() &&
           (!lost_.ok() ||
            static_cast<int32_t>(word->seen_value - word->awaited.front().value) >= 0)) {
      arrivals->push_back(std::move(word->awaited.front()));
      word->awaited.pop_front();
      arrivals->back().status.Update(lost_);
    }
    if (word->awaited.empty()) {
      watched_[i] = watched_.back();
      watched_.pop_back();
    } else {
      ++i;
    }
  }
  std::sort(arrivals->begin(), arrivals->end(),
            [](const Awaited& a, const Awaited& b) { return a.id < b.id; });
}

void GpuWatch::Watch() {
  gpu_->Enter();
  std::vector<Awaited> arrivals;
  absl::Time since;  // something was reached, or came to be awaited
  MutexLock lock(&mutex_);
  while (!ends_) {
    if (wake_) {
      wake_ = false;
      mutex_.Unlock();
      listener_.on_wake();
      mutex_.Lock();
      continue;
    }
    if (watched_.empty()) {
      changed_.Wait(&mutex_);
      continue;
    }
    if (fresh_) since = SteadyNow();
    fresh_ = false;
    Collect(&arrivals);
    if (!arrivals.empty()) {
      mutex_.Unlock();
      for (Awaited& awaited : arrivals) awaited.done(std::move(awaited.status));
      arrivals.clear();
      mutex_.Lock();
      fresh_ = true;
      continue;
    }
    const absl::Duration wait_time = SteadyNow() - since;
    if (wait_time < kWatchClosely) {
      mutex_.Unlock();
      std::this_thread::yield();
      mutex_.Lock();
      continue;
    }
    const absl::Duration sleep = std::min(kLongestSleep, std::max(kShortestSleep, wait_time / 8));
    if (sleep < kLongestSleep) {
      changed_.WaitFor(&mutex_, sleep);
      continue;
    }
    const cuda::Stream oldest = watched_.front()->stream;
    mutex_.Unlock();
    listener_.on_overdue(oldest);
    mutex_.Lock();
    if (!ends_ && !wake_ && lost_.ok()) changed_.WaitFor(&mutex_, sleep);
  }
}

}  // namespace chorus
