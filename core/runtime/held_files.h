// Files that are done with here while clients hold their pages: these stay with the kernel, and
// charged to those that had the file, until nobody has them any more.
//
// Threads: the node thread. Ownership: owns the files that are held, and their charges. Errors:
// none.
#ifndef CHORUS_CORE_RUNTIME_HELD_FILES_H_
#define CHORUS_CORE_RUNTIME_HELD_FILES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "core/base/unique_fd.h"
#include "core/runtime/budget.h"

namespace chorus {

class MemoryThread;

class HeldFiles {
 public:
  // `thread` gives the pages back of what was held, and outlives this; null: the calling one does.
  // `added`, unless null, is told of each file that is held.
  explicit HeldFiles(MemoryThread* thread = nullptr, std::function<void()> added = nullptr)
      : thread_(thread), added_(std::move(added)) {}
  HeldFiles(const HeldFiles&) = delete;
  HeldFiles& operator=(const HeldFiles&) = delete;

  // `file` is the only descriptor here of an opener (core/base/shared_file.h). If others hold it,
  // it stays charged until they let go: then the charges are taken; else nothing is. `mapping`,
  // unless null, stays as long: it was made by `file`, out of which the others can take pages.
  // Whoever unmaps it while they do that waits until they are done, and meanwhile nobody in this
  // process can map anything.
  void Add(const std::shared_ptr<const UniqueFd>& file, std::shared_ptr<const void> mapping,
           Charge* bytes, Charge* descriptors);
  // Looks whether at most so many of them are held, in turns, and lets go of those that are not.
  static constexpr size_t kLooks = 64;  // that take little time
  void Look(size_t count = kLooks);
  // The same for some of those that are charged to budgets within this one. Whether it let go of
  // any: then there may be more.
  bool LookWithin(const Budget& budget);
  size_t size() const { return held_.size(); }
  int64_t bytes() const { return bytes_; }

 private:
  struct Held {
    std::shared_ptr<const UniqueFd> file;
    std::shared_ptr<const void> mapping;
    Charge bytes;
    Charge descriptors;
  };
  // Lets go of it unless it is held. Whether it is.
  bool IsHeld(Held* held);

  MemoryThread* const thread_;
  const std::function<void()> added_;
  int64_t bytes_ = 0;
  std::deque<Held> held_;  // the one that was looked at last is the last
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_HELD_FILES_H_
