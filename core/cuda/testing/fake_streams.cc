#include "core/cuda/testing/fake_streams.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/clock.h"
#include "core/cuda/testing/report_misuse.h"

namespace chorus {
namespace cuda {
namespace {

// What runs longer gets company.
constexpr absl::Duration kLong = absl::Milliseconds(20);

// What this thread runs, for a report of its crash.
thread_local const char* running = nullptr;
struct sigaction old_action;

void Write(const char* text) { (void)!write(STDERR_FILENO, text, strlen(text)); }

// Says which work touched what it must not, and lets it crash. Only what a handler may call.
void ReportFault(int signal, siginfo_t* info, void* /*context*/) {
  if (running != nullptr) {
    char hex[] = "0x0000000000000000";
    auto address = reinterpret_cast<uint64_t>(info->si_addr);
    for (int digit = 17; digit > 1; --digit, address >>= 4) {
      hex[digit] = "0123456789abcdef"[address & 15];
    }
    Write("fake driver: ");
    Write(running);
    Write(" touched ");
    Write(hex);
    Write(", which is no memory that it may use (freed, or beyond what was allocated)\n");
  }
  sigaction(signal, &old_action, nullptr);  // what comes next when the same instruction runs again
}

void InstallReportFault() {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_sigaction = &ReportFault;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGSEGV, &action, &old_action) == 0;
  }();
  if (!installed) ReportMisuse("sigaction(SIGSEGV) failed");
}

}  // namespace

struct FakeStreams::Record {
  bool reached = false;
  absl::Time when;
  std::vector<StreamRef> waiting;  // their first item waits for it
};

struct FakeStreams::Stream {
  // One of three: work to run, a record, a wait for a record.
  struct Item {
    uint64_t number = 0;  // in the order of all streams' enqueuing
    FakeWork work;
    RecordRef record;
    bool waits = false;
  };
  int gpu = 0;
  std::deque<Item> items;  // the first one stays here while it runs
};

FakeStreams::FakeStreams(FakeOrder order, uint64_t seed, absl::Duration patience)
    : order_(order), patience_(patience), random_(seed) {
  InstallReportFault();
}

FakeStreams::~FakeStreams() {
  std::vector<std::thread> threads;
  {
    MutexLock lock(&mutex_);
    if (!busy_.empty()) {
      const Stream::Item& item = busy_.begin()->second->items.front();
      ReportMisuse("it ends while a stream has not finished " + item.work.name);
    }
    stopping_ = true;
    threads.swap(threads_);
  }
  enqueued_.SignalAll();
  turn_free_.SignalAll();
  for (std::thread& thread : threads) thread.join();
}

FakeStreams::StreamRef FakeStreams::Create(int gpu) {
  auto stream = std::make_shared<Stream>();
  stream->gpu = gpu;
  return stream;
}

void FakeStreams::Add(const StreamRef& stream, FakeWork work) {
  Enqueue(stream, std::move(work), nullptr, false);
}

FakeStreams::RecordRef FakeStreams::AddRecord(const StreamRef& stream) {
  auto record = std::make_shared<Record>();
  Enqueue(stream, {"a record of an event", nullptr, {}}, record, false);
  return record;
}

void FakeStreams::AddWait(const StreamRef& stream, RecordRef record) {
  Enqueue(stream, {"a wait for an event", nullptr, {}}, std::move(record), true);
}

void FakeStreams::Enqueue(const StreamRef& stream, FakeWork work, RecordRef record, bool waits) {
  MutexLock lock(&mutex_);
  stream->items.push_back({++last_number_, std::move(work), std::move(record), waits});
  if (stream->items.size() == 1) {
    busy_[stream.get()] = stream;
    MakeReady(stream);
  }
  if (threads_.empty()) threads_.emplace_back([this] { Work(); });
  enqueued_.Signal();
}

// The stream has a first item, which does not run.
void FakeStreams::MakeReady(const StreamRef& stream) {
  const Stream::Item& first = stream->items.front();
  if (first.waits && !first.record->reached) {
    first.record->waiting.push_back(stream);
    return;
  }
  ready_[first.number] = stream;
  enqueued_.Signal();
}

bool FakeStreams::Idle(const Stream& stream) {
  MutexLock lock(&mutex_);
  return stream.items.empty();
}

bool FakeStreams::Reached(const Record& record) {
  MutexLock lock(&mutex_);
  return record.reached;
}

absl::Time FakeStreams::WhenReached(const Record& record) {
  MutexLock lock(&mutex_);
  return record.when;
}

void FakeStreams::AwaitIdle(const Stream& stream) {
  MutexLock lock(&mutex_);
  while (!stream.items.empty()) done_.Wait(&mutex_);
}

void FakeStreams::AwaitIdleGpu(int gpu) {
  MutexLock lock(&mutex_);
  const auto of_gpu = [gpu](const auto& busy) { return busy.second->gpu == gpu; };
  while (std::any_of(busy_.begin(), busy_.end(), of_gpu)) done_.Wait(&mutex_);
}

void FakeStreams::AwaitReached(const Record& record) {
  MutexLock lock(&mutex_);
  while (!record.reached) done_.Wait(&mutex_);
}

std::string FakeStreams::UserOf(uint64_t block) {
  MutexLock lock(&mutex_);
  for (const auto& [key, stream] : busy_) {
    for (const Stream::Item& item : stream->items) {
      const auto& uses = item.work.uses;
      if (std::find(uses.begin(), uses.end(), block) != uses.end()) return item.work.name;
    }
  }
  return "";
}

void FakeStreams::Work() {
  MutexLock lock(&mutex_);
  while (true) {
    TakeTurn();
    const uint64_t turn = turn_;
    while (turn == turn_) {
      while (ready_.empty() && !stopping_) enqueued_.Wait(&mutex_);
      if (stopping_) return;
      if (order_ == FakeOrder::kAdversarial) {
        Hold();
        if (steps_left_ == 0) DrawMode();
      }
      const StreamRef stream = Pick();
      if (without_turn_ == 0) threads_.emplace_back([this] { Work(); });
      if (order_ == FakeOrder::kAdversarial) {
        running_since_ = SteadyNow();
        Step(stream);
        if (turn == turn_) running_since_ = absl::InfiniteFuture();
        continue;
      }
      // The others go on at once; this thread keeps to its stream for as long as that can run.
      turn_taken_ = false;
      turn_free_.Signal();
      while (true) {
        Step(stream);
        if (stream->items.empty() || ready_.erase(stream->items.front().number) == 0) break;
      }
      break;
    }
  }
}

// Returns when the turn is this thread's, or when all ends.
void FakeStreams::TakeTurn() {
  ++without_turn_;
  while (turn_taken_ && !stopping_ && SteadyNow() - running_since_ < kLong) {
    turn_free_.WaitFor(&mutex_, order_ == FakeOrder::kEager ? absl::InfiniteDuration() : kLong);
  }
  --without_turn_;
  turn_taken_ = true;
  ++turn_;
  running_since_ = absl::InfiniteFuture();
}

// The order of enqueuing is always right: what is missing shows where later work overtakes.
void FakeStreams::DrawMode() {
  constexpr Mode kModes[] = {Mode::kLatest,  Mode::kLatest, Mode::kLatest, Mode::kStarved,
                             Mode::kStarved, Mode::kAhead,  Mode::kAny,    Mode::kOldest};
  mode_ = kModes[random_() % std::size(kModes)];
  steps_left_ = 1 + random_() % (random_() % 4 == 0 ? 512 : 32);
  chosen_ = mode_ == Mode::kStarved ? ready_.begin()->second : ready_.rbegin()->second;
}

// Lets the program go on for as long as it keeps enqueuing, within patience_, and now and then for
// all that time.
void FakeStreams::Hold() {
  if (last_number_ == held_at_) return;  // nothing new since the last time
  const absl::Time end = SteadyNow() + patience_;
  const absl::Duration quiet = patience_ / (random_() % 4 == 0 ? 1 : 8);
  while (!stopping_ && SteadyNow() < end) {
    const uint64_t before = last_number_;
    const absl::Time until = std::min(end, SteadyNow() + quiet);
    while (!stopping_ && SteadyNow() < until) {
      enqueued_.WaitFor(&mutex_, until - SteadyNow());
    }
    if (last_number_ == before) break;
  }
  held_at_ = last_number_;
}

FakeStreams::StreamRef FakeStreams::Pick() {
  auto picked = ready_.begin();
  if (order_ == FakeOrder::kAdversarial) {
    --steps_left_;
    const uint64_t first = ready_.begin()->first;
    const uint64_t numbers = ready_.rbegin()->first - first + 1;
    const auto any = ready_.lower_bound(first + random_() % numbers);
    switch (mode_) {
      case Mode::kLatest:
        picked = std::prev(ready_.end());
        break;
      case Mode::kStarved:
        picked = any;
        if (picked->second == chosen_ && ++picked == ready_.end()) picked = ready_.begin();
        break;
      case Mode::kAhead: {
        const auto ahead =
            chosen_->items.empty() ? ready_.end() : ready_.find(chosen_->items.front().number);
        picked = ahead == ready_.end() ? any : ahead;
        break;
      }
      case Mode::kAny:
        picked = any;
        break;
      case Mode::kOldest:
        break;
    }
  }
  StreamRef stream = picked->second;
  ready_.erase(picked);
  return stream;
}

// Does the stream's first item, which is not in ready_.
void FakeStreams::Step(const StreamRef& stream) {
  Stream::Item& item = stream->items.front();  // a deque keeps it in place when it grows
  if (item.work.run != nullptr) {
    mutex_.Unlock();
    running = item.work.name.c_str();
    item.work.run();
    running = nullptr;
    item.work.run = nullptr;  // what it holds is released outside the mutex
    mutex_.Lock();
  } else if (!item.waits) {
    item.record->reached = true;
    item.record->when = SteadyNow();
    for (const StreamRef& waiting : item.record->waiting) MakeReady(waiting);
    item.record->waiting.clear();
  }
  stream->items.pop_front();
  if (stream->items.empty()) {
    busy_.erase(stream.get());
  } else {
    MakeReady(stream);
  }
  done_.SignalAll();
}

}  // namespace cuda
}  // namespace chorus
