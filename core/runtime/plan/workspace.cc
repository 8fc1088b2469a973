#include "core/runtime/plan/workspace.h"

#include <algorithm>
#include <cstddef>

#include "core/runtime/size_class.h"

namespace chorus::planning {

Workspace::Block Workspace::Allocate(int64_t bytes, DevicePlan::StreamId stream,
                                     int32_t passed_step) {
  constexpr size_t kLook = 8;
  const SizeClass size_class = SizeClass::Of(bytes);
  const int other = 1 - static_cast<int>(stream);
  const int last_class =
      std::min(size_class.index + SizeClass::kPerDoubling, SizeClass::kCount - 1);
  for (int c = size_class.index; c <= last_class && c < static_cast<int>(free_.size()); ++c) {
    std::vector<Block>& blocks = free_[c];
    for (size_t i = 0; i < std::min(kLook, blocks.size()); ++i) {
      Block& candidate = blocks[blocks.size() - 1 - i];
      if (candidate.touched[other] > passed_step) continue;
      const Block block = candidate;
      candidate = blocks.back();
      blocks.pop_back();
      return block;
    }
  }
  Block block;
  block.offset = bytes_;
  block.size_class = size_class.index;
  bytes_ += size_class.bytes;
  return block;
}

void Workspace::Free(const Block& block) {
  const auto size_class = static_cast<size_t>(block.size_class);
  if (free_.size() <= size_class) free_.resize(size_class + 1);
  free_[size_class].push_back(block);
}

}  // namespace chorus::planning
