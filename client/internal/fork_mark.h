// Whether this process is a child of the one that made an object: there the object's locks may be
// held for good by threads that do not exist, and what it stands for is the parent's.
//
// Threads: any.
#ifndef CHORUS_CLIENT_INTERNAL_FORK_MARK_H_
#define CHORUS_CLIENT_INTERNAL_FORK_MARK_H_

#include <cstdint>

namespace chorus {
namespace internal {

class ForkMark {
 public:
  ForkMark();
  // True in a forked child of the process that made it.
  bool Forked() const;

 private:
  const uint64_t forks_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_FORK_MARK_H_
