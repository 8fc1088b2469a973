#include "client/internal/staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/types/optional.h"
#include "client/internal/errors.h"
#include "core/base/clock.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

namespace {

constexpr int64_t kBlockBytes = 4 << 20;
constexpr int64_t kMaxBytes = 64 << 20;
constexpr int64_t kAlign = 64;
constexpr int64_t kPageBytes = 4096;
// A trainer's step has fewer: what each of its steps uses is kept.
constexpr int64_t kKeptForSends = 64;
constexpr size_t kArenasPerFrame = 2048;

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

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

absl::StatusOr<StagingPool::Block*> StagingPool::Emptied(Block* block) const {
  CHORUS_RETURN_IF_ERROR(Await(block));
  block->used = 0;
  return block;
}

absl::StatusOr<StagingPool::Block*> StagingPool::BlockFor(int64_t bytes) {
  int64_t total = 0;
  Block* smallest = nullptr;  // of those that have room
  Block* oldest = nullptr;    // of those that will
  for (const auto& block : blocks_) {
    total += block->bytes;
    if (block->bytes < bytes || block->is_spoilt) continue;
    // What is far too large is not kept by what is small.
    if (block->bytes > kMaxBytes && block->bytes / 4 > bytes) continue;
    if (block->bytes - block->used < bytes) {
      if (!IsFree(block.get())) {
        if (block->unsent > 0) continue;
        if (oldest == nullptr || block->readers.back() < oldest->readers.back()) {
          oldest = block.get();
        }
        continue;
      }
      block->used = 0;
    }
    if (smallest == nullptr || block->bytes < smallest->bytes) smallest = block.get();
  }
  if (smallest != nullptr) {
    GiveBackFree(total - kMaxBytes, 0, smallest);
    return smallest;
  }
  if (oldest != nullptr && total + bytes > kMaxBytes) return Emptied(oldest);
  auto block = std::make_unique<Block>();
  block->bytes = RoundUp(std::max(bytes, kBlockBytes), kPageBytes);
  GiveBackFree(total + block->bytes - kMaxBytes, block->bytes, oldest);
  absl::StatusOr<Link::Staging> staging = link_->CreateStaging(block->bytes);
  if (absl::IsResourceExhausted(staging.status())) {
    // There may be enough of what it has.
    if (oldest != nullptr) return Emptied(oldest);
    CHORUS_RETURN_IF_ERROR(GiveBackAll());
    staging = link_->CreateStaging(block->bytes);
  }
  CHORUS_RETURN_IF_ERROR(staging.status());
  block->staging = *staging;
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
  block->used += RoundUp(size, kAlign);
  block->last_use = ++sends_;
  ++block->unsent;
  const absl::StatusOr<Sequence> reader = send(range);
  --block->unsent;
  if (reader.ok()) block->readers.push_back(*reader);
  GiveBackSpoilt(block);
  return reader;
}

void StagingPool::Release(absl::Span<const ArenaId> arenas) {
  for (size_t begin = 0; begin < arenas.size(); begin += kArenasPerFrame) {
    const absl::Span<const ArenaId> frame = arenas.subspan(begin, kArenasPerFrame);
    chorus::Release release;
    release.arenas.assign(frame.begin(), frame.end());
    const absl::optional<Sequence> sequence = log_->SubmitOrKeep(std::move(release));
    if (sequence.has_value()) last_release_ = *sequence;
    for (const ArenaId arena : frame) link_->UnmapStaging(arena);
  }
}

absl::Status StagingPool::GiveBackAll() {
  for (const auto& block : blocks_) {
    if (block->unsent == 0) CHORUS_RETURN_IF_ERROR(Await(block.get()));
  }
  GiveBackIf([](Block*) { return true; });
  if (last_release_ == Sequence()) return absl::OkStatus();
  const absl::Status taken = link_->WaitCommand(last_release_, wait_timeout_);
  return IsNoOutcome(taken) ? taken : absl::OkStatus();
}

void StagingPool::GiveBackFree(int64_t bytes, int64_t below, const Block* but) {
  if (bytes <= 0) return;
  GiveBackIf([&](Block* block) {
    const bool may_go = block->bytes < below || sends_ - block->last_use >= kKeptForSends;
    if (bytes <= 0 || block == but || !may_go || !IsFree(block)) return false;
    bytes -= block->bytes;
    return true;
  });
}

void StagingPool::GiveBackSpoilt(Block* block) {
  if (block->is_spoilt) GiveBackIf([block](const Block* one) { return one == block; });
}

void StagingPool::GiveBackIf(absl::FunctionRef<bool(Block* block)> goes) {
  const auto first = std::stable_partition(
      blocks_.begin(), blocks_.end(),
      [&goes](const auto& block) { return block->unsent > 0 || !goes(block.get()); });
  std::vector<ArenaId> arenas;
  for (auto it = first; it != blocks_.end(); ++it) arenas.push_back((*it)->staging.arena);
  blocks_.erase(first, blocks_.end());
  Release(arenas);
}

}  // namespace internal
}  // namespace chorus
