// Scratch memory of one device slot: offsets for values that live for some steps only.
//
// A block may be handed on while steps that touch it are still to run on the other stream: only to
// a step that is behind them anyway, so that no wait is added for it.
//
// Threads: thread-compatible. Ownership: offsets only. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_WORKSPACE_H_
#define CHORUS_CORE_RUNTIME_PLAN_WORKSPACE_H_

#include <cstdint>
#include <vector>

#include "core/runtime/device_plan.h"

namespace chorus::planning {

class Workspace {
 public:
  struct Block {
    int64_t offset = 0;
    int size_class = 0;
    // The last step of each stream that touches it; steps of one slot are numbered across both
    // streams.
    int32_t touched[DevicePlan::kStreams] = {-1, -1};
  };

  // A block that a step of `stream` may write, which knows that the other stream has passed step
  // `passed_step`. It may be in use still by earlier steps of `stream`.
  Block Allocate(int64_t bytes, DevicePlan::StreamId stream, int32_t passed_step);
  void Free(const Block& block);

  // That all blocks together ever took.
  int64_t bytes() const { return bytes_; }

 private:
  std::vector<std::vector<Block>> free_;  // by size class
  int64_t bytes_ = 0;
};

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_WORKSPACE_H_
