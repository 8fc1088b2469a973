#include "core/runtime/memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/runtime/memory_thread.h"

namespace chorus {

// --- ArenaSet ---

ArenaSet::Ptr ArenaSet::Create(BudgetRef budget, const ArenaSetOptions& options) {
  return Ptr(new ArenaSet(std::move(budget), options));
}

ArenaSet::ArenaSet(BudgetRef budget, const ArenaSetOptions& options)
    : budget_(std::move(budget)), options_(options) {
  budget_->Reclaim(this, [this](const Budget& full) {
    if (budget_->LiesWithin(full)) Trim();
  });
}

ArenaSet::~ArenaSet() { budget_->Forget(this); }

void ArenaSet::Leave() {
  orphaned_ = true;
  if (live_ == 0) {
    delete this;
  } else {
    Trim();
  }
}

absl::StatusOr<BufferRef> ArenaSet::Allocate(int64_t bytes) {
  if (bytes < 0 || bytes > SizeClass::kLargestBytes) {
    return Malformed(
        absl::StrCat("a buffer has 0 to ", SizeClass::kLargestBytes, " bytes, not ", bytes));
  }
  const SizeClass size_class = SizeClass::Of(bytes);
  Buffer* buffer = free_[size_class.index];
  const bool cuts = buffer == nullptr;
  if (!cuts) {
    free_[size_class.index] = buffer->next_free_;
    buffer->next_free_ = nullptr;
  } else {
    CHORUS_ASSIGN_OR_RETURN(buffer, Grow(size_class.index, size_class.bytes));
  }
  buffer->bytes_ = bytes;
  buffer->references_ = 1;
  buffer->state_ = Buffer::State::kResult;
  ++static_cast<Block*>(buffer->owner_)->live;
  ++live_;
  BufferRef allocated(buffer, BufferRef::Adopt());
  if (cuts) PrepareSpare();
  return allocated;
}

absl::StatusOr<Buffer*> ArenaSet::Grow(int size_class, int64_t class_bytes) {
  const int64_t alignment = class_bytes >= 8 * PageBytes() ? PageBytes() : 64;
  const auto fits = [&](const Block* block) {
    return block != nullptr &&
           RoundUp(block->used, alignment) + class_bytes <= block->arena->bytes();
  };
  if (!fits(current_) && fits(spare_)) current_ = std::exchange(spare_, nullptr);
  if (!fits(current_)) {
    const int64_t next = NextArenaBytes();
    if (class_bytes > next / 4) {
      CHORUS_ASSIGN_OR_RETURN(Block * block, AddBlock(class_bytes, false));
      return Cut(block, size_class, class_bytes);
    }
    absl::StatusOr<Block*> added = AddBlock(next, true);
    // Where a generous arena does not fit any more, one for this buffer alone may.
    if (!added.ok()) {
      CHORUS_ASSIGN_OR_RETURN(Block * block, AddBlock(class_bytes, false));
      return Cut(block, size_class, class_bytes);
    }
    current_ = *added;
  }
  return Cut(current_, size_class, class_bytes);
}

// Whoever asks a full budget makes sets trim: what has been cut counts as in use by now.
void ArenaSet::PrepareSpare() {
  if (options_.helpers.thread == nullptr || spare_ != nullptr || current_ == nullptr ||
      current_->used <= current_->arena->bytes() / 2) {
    return;
  }
  const int64_t next = NextArenaBytes();
  if (next > (budget_->limit() - budget_->used()) / 2) return;
  absl::StatusOr<Block*> spare = AddBlock(next, true);
  if (spare.ok()) spare_ = *spare;
}

int64_t ArenaSet::NextArenaBytes() const {
  return std::min(std::max(options_.first_arena_bytes, growing_bytes_),
                  options_.largest_arena_bytes);
}

absl::StatusOr<ArenaSet::Block*> ArenaSet::AddBlock(int64_t bytes, bool shared) {
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena,
                          Arena::CreateResult(budget_, bytes, options_.helpers));
  if (options_.helpers.thread != nullptr) {
    options_.helpers.thread->Touch(arena->memory());
  } else {
    arena->memory()->Touch(0, arena->bytes());
  }
  auto block = std::make_unique<Block>();
  arena_bytes_ += arena->bytes();
  block->grows = shared || bytes <= options_.largest_arena_bytes / 4;
  if (block->grows) growing_bytes_ += arena->bytes();
  block->arena = std::move(arena);
  blocks_.push_back(std::move(block));
  return blocks_.back().get();
}

Buffer* ArenaSet::Cut(Block* block, int size_class, int64_t class_bytes) {
  const int64_t alignment = class_bytes >= 8 * PageBytes() ? PageBytes() : 64;
  const int64_t offset = RoundUp(block->used, alignment);
  block->used = offset + class_bytes;
  block->buffers.emplace_back();
  Buffer* const buffer = &block->buffers.back();
  buffer->home_ = this;
  buffer->address_ = reinterpret_cast<DeviceAddress>(block->arena->data() + offset);
  buffer->offset_ = offset;
  buffer->arena_ = block->arena->id();
  buffer->size_class_ = static_cast<uint16_t>(size_class);
  buffer->owner_ = block;
  return buffer;
}

void ArenaSet::Return(Buffer* buffer) {
  auto* const block = static_cast<Block*>(buffer->owner_);
  buffer->next_free_ = free_[buffer->size_class_];
  free_[buffer->size_class_] = buffer;
  --block->live;
  --live_;
  if (!orphaned_) return;
  if (live_ == 0) {
    delete this;
  } else if (block->live == 0) {
    Trim();
  }
}

int64_t ArenaSet::Trim() {
  bool any = false;
  for (const auto& block : blocks_) any |= block->live == 0;
  if (!any) return 0;
  for (Buffer*& head : free_) {
    Buffer** link = &head;
    while (*link != nullptr) {
      if (static_cast<Block*>((*link)->owner_)->live == 0) {
        *link = (*link)->next_free_;
      } else {
        link = &(*link)->next_free_;
      }
    }
  }
  int64_t given_back = 0;
  auto used_end = blocks_.begin();
  for (auto& block : blocks_) {
    if (block->live == 0) {
      given_back += block->arena->bytes();
      if (block->grows) growing_bytes_ -= block->arena->bytes();
      if (block.get() == current_) current_ = nullptr;
      if (block.get() == spare_) spare_ = nullptr;
      block.reset();
    } else {
      *used_end++ = std::move(block);
    }
  }
  blocks_.erase(used_end, blocks_.end());
  arena_bytes_ -= given_back;
  return given_back;
}

Arena* ArenaSet::Find(ArenaId id) const {
  for (const auto& block : blocks_) {
    if (block->arena->id() == id) return block->arena.get();
  }
  return nullptr;
}

// --- DeviceSet ---

absl::StatusOr<BufferRef> DeviceSet::Allocate(const BudgetRef& budget, int64_t bytes) {
  if (bytes < 0 || bytes > SizeClass::kLargestBytes) {
    return Malformed(
        absl::StrCat("a buffer has 0 to ", SizeClass::kLargestBytes, " bytes, not ", bytes));
  }
  CHORUS_ASSIGN_OR_RETURN(Charge charge,
                          budget->Charge(Domain::kHost, Resource::kResultBytes, bytes));
  DeviceAddress address = 0;
  if (bytes > 0) {
    CHORUS_ASSIGN_OR_RETURN(address, devices_->Allocate(device_, bytes));
  }
  auto* const buffer = new Buffer;
  buffer->home_ = this;
  buffer->address_ = address;
  buffer->bytes_ = bytes;
  buffer->references_ = 1;
  buffer->charge_ = std::move(charge);
  ++live_;
  return BufferRef(buffer, BufferRef::Adopt());
}

void DeviceSet::Return(Buffer* buffer) {
  if (buffer->address_ != 0) devices_->Free(device_, buffer->address_);
  --live_;
  delete buffer;
}

}  // namespace chorus
