#include "client/internal/staging.h"

#include <cstring>
#include <utility>

#include "core/base/error.h"

namespace chorus {
namespace internal {

namespace {

constexpr int64_t kBlockBytes = 4 << 20;
constexpr int64_t kMaxBytes = 64 << 20;
constexpr int64_t kAlign = 64;

}  // namespace

absl::StatusOr<StagingPool::Block*> StagingPool::BlockFor(int64_t bytes) {
  int64_t total = 0;
  Block* oldest = nullptr;
  for (const auto& block : blocks_) {
    total += block->bytes;
    if (block->bytes < bytes) continue;
    if (block->bytes - block->used >= bytes) return block.get();
    const auto outcome = link_->Peek(block->last);
    // A forgotten outcome is an outcome.
    if (!outcome.ok() || outcome->has_value()) {
      block->used = 0;
      return block.get();
    }
    if (oldest == nullptr || block->last < oldest->last) oldest = block.get();
  }
  if (oldest != nullptr && total + bytes > kMaxBytes) {
    const absl::Status done = link_->WaitCommand(oldest->last, wait_timeout_);
    if (ErrorOf(done).reason == Reason::kTransportTimeout) return done;
    oldest->used = 0;
    return oldest;
  }
  auto block = std::make_unique<Block>();
  block->bytes = kBlockBytes;
  while (block->bytes < bytes) block->bytes *= 2;
  CHORUS_ASSIGN_OR_RETURN(block->staging, link_->CreateStaging(block->bytes));
  blocks_.push_back(std::move(block));
  return blocks_.back().get();
}

absl::StatusOr<StagingPool::Placement> StagingPool::Put(absl::string_view bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  CHORUS_ASSIGN_OR_RETURN(Block* const block, BlockFor(size));
  Placement placement;
  placement.range.arena = block->staging.arena;
  placement.range.offset = block->used;
  placement.reader = &block->last;
  if (block->staging.data != nullptr) {
    std::memcpy(block->staging.data + block->used, bytes.data(), bytes.size());
  } else {
    CHORUS_RETURN_IF_ERROR(link_->WriteStaging(block->staging.arena, block->used, bytes));
  }
  block->used += (size + kAlign - 1) / kAlign * kAlign;
  return placement;
}

}  // namespace internal
}  // namespace chorus
