#include "client/internal/fork_mark.h"

#include <pthread.h>

namespace chorus {
namespace internal {

uint64_t ForkMark::CountForks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks_.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return forks_.load(std::memory_order_relaxed);
}

}  // namespace internal
}  // namespace chorus
