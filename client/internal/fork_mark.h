// Whether this process is a child of the one that made an object: there the object's locks may be
// held for good by threads that do not exist, and what it stands for is the parent's.
//
// Threads: any. Ownership: none. Errors: none.
#ifndef CHORUS_CLIENT_INTERNAL_FORK_MARK_H_
#define CHORUS_CLIENT_INTERNAL_FORK_MARK_H_

#include <atomic>
#include <cstdint>

namespace chorus {
namespace internal {

class ForkMark {
 public:
  ForkMark() : forks_before_(CountForks()) {}
  // True in a forked child of the process that made it.
  bool Forked() const { return forks_.load(std::memory_order_relaxed) != forks_before_; }

 private:
  static uint64_t CountForks();

  static inline std::atomic<uint64_t> forks_{0};  // on the way from the first process to this one
  const uint64_t forks_before_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_FORK_MARK_H_
