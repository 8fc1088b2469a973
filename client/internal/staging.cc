#include "client/internal/staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "client/internal/errors.h"
#include "core/base/clock.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

namespace {

constexpr int64_t kBlockBytes = 4 << 20;
constexpr int64_t kMaxBytes = 64 << 20;
constexpr int64_t kAlign = 64;

}  // namespace

bool StagingPool::IsFree(Block* block) const {
  if (block->unsent > 0) return false;
  while (!block->readers.empty()) {
    const auto outcome = link_->Peek(block->readers.back());
    // A forgotten outcome is an outcome.
    if (outcome.ok() && !outcome->has_value()) return false;
    block->readers.pop_back();
  }
  return true;
}

absl::Status StagingPool::Await(Block* block) const {
  const absl::Time deadline = SteadyNow() + wait_timeout_;
  while (!IsFree(block)) {
    const absl::Status done = link_->WaitCommand(block->readers.back(), deadline - SteadyNow());
    // It may be under way, and read the block.
    if (IsNoOutcome(done)) return done;
    block->readers.pop_back();
  }
  return absl::OkStatus();
}

absl::StatusOr<StagingPool::Block*> StagingPool::BlockFor(int64_t bytes) {
  int64_t total = 0;
  Block* oldest = nullptr;
  for (const auto& block : blocks_) {
    total += block->bytes;
    if (block->bytes < bytes || block->is_spoilt) continue;
    if (block->bytes - block->used >= bytes) return block.get();
    if (IsFree(block.get())) {
      block->used = 0;
      return block.get();
    }
    if (block->unsent > 0) continue;
    if (oldest == nullptr || block->readers.back() < oldest->readers.back()) oldest = block.get();
  }
  if (oldest != nullptr && total + bytes > kMaxBytes) {
    CHORUS_RETURN_IF_ERROR(Await(oldest));
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

absl::StatusOr<Sequence> StagingPool::Send(
    absl::string_view bytes,
    absl::FunctionRef<absl::StatusOr<Sequence>(const ExternalRange& range)> send) {
  const auto size = static_cast<int64_t>(bytes.size());
  CHORUS_ASSIGN_OR_RETURN(Block* const block, BlockFor(size));
  ExternalRange range;
  range.arena = block->staging.arena;
  range.offset = block->used;
  if (block->staging.data != nullptr) {
    std::memcpy(block->staging.data + block->used, bytes.data(), bytes.size());
  } else {
    const absl::Status written = link_->WriteStaging(block->staging.arena, block->used, bytes);
    if (!written.ok()) {
      block->is_spoilt = true;
      GiveBackSpoilt(block);
      return written;
    }
  }
  block->used += (size + kAlign - 1) / kAlign * kAlign;
  ++block->unsent;
  const absl::StatusOr<Sequence> reader = send(range);
  --block->unsent;
  if (reader.ok()) block->readers.push_back(*reader);
  GiveBackSpoilt(block);
  return reader;
}

void StagingPool::GiveBackSpoilt(Block* block) {
  if (!block->is_spoilt || block->unsent > 0) return;
  releases_->Add(block->staging.arena);
  blocks_.erase(std::find_if(blocks_.begin(), blocks_.end(),
                             [block](const auto& one) { return one.get() == block; }));
}

}  // namespace internal
}  // namespace chorus
