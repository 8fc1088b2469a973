#include "client/internal/fork_mark.h"

#include <pthread.h>

#include <atomic>

namespace chorus {
namespace internal {
namespace {

std::atomic<uint64_t> fork_count{0};

void CountFork() { fork_count.fetch_add(1, std::memory_order_relaxed); }

uint64_t ForkCount() {
  static const int registered = pthread_atfork(nullptr, nullptr, CountFork);
  (void)registered;
  return fork_count.load(std::memory_order_relaxed);
}

}  // namespace

ForkMark::ForkMark() : forks_(ForkCount()) {}

bool ForkMark::Forked() const { return fork_count.load(std::memory_order_relaxed) != forks_; }

}  // namespace internal
}  // namespace chorus
