#include "core/runtime/memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/runtime/memory_thread.h"

namespace chorus {
namespace {

constexpr size_t kArenasAtATime = 8;

}  // namespace

// --- ArenaSet ---

ArenaSet::Ptr ArenaSet::Create(BudgetRef budget, const ArenaSetOptions& options) {
  return Ptr(new ArenaSet(std::move(budget), options));
}

ArenaSet::ArenaSet(BudgetRef budget, const ArenaSetOptions& options)
    : budget_(std::move(budget)), options_(options) {
  budget_->Reclaim(this, [this](const Budget& full) {
    return budget_->LiesWithin(full) && Trim(kArenasAtATime) > 0;
  });
}

ArenaSet::~ArenaSet() { budget_->Forget(this); }

void ArenaSet::Leave() {
  orphaned_ = true;
  GiveBack();
}

void ArenaSet::GiveBack() {
  if (std::exchange(has_turn_, true)) return;
  if (options_.left == nullptr) {
    GiveBackSome();
  } else {
    options_.left->Add(LeftSet(this));
  }
}

bool ArenaSet::GiveBackSome() {
  while (!empty_.empty() && (options_.left == nullptr || SliceHasTime())) Trim(kArenasAtATime);
  if (!empty_.empty()) return false;
  has_turn_ = false;
  if (live_ == 0) delete this;
  return true;
}

absl::StatusOr<BufferRef> ArenaSet::Allocate(int64_t bytes) {
  if (bytes < 0 || bytes > SizeClass::kLargestBytes) {
    return Malformed(
        absl::StrCat("a buffer has 0 to ", SizeClass::kLargestBytes, " bytes, not ", bytes));
  }
  const SizeClass size_class = SizeClass::Of(bytes);
  Shelf* shelf = shelves_[size_class.index];
  const bool cuts = shelf == nullptr;
  Buffer* buffer = nullptr;
  if (!cuts) {
    buffer = shelf->free;
    shelf->free = buffer->next_free_;
    buffer->next_free_ = nullptr;
    if (shelf->free == nullptr) Unlink(shelf);
  } else {
    CHORUS_ASSIGN_OR_RETURN(buffer, Grow(size_class.index, size_class.bytes));
    shelf = static_cast<Shelf*>(buffer->owner_);
  }
  buffer->bytes_ = bytes;
  buffer->references_ = 1;
  buffer->state_ = Buffer::State::kResult;
  Block* const block = shelf->block;
  if (block->live++ == 0) blocks_.splice(blocks_.end(), empty_, block->at);
  ++live_;
  live_bytes_ += size_class.bytes;
  BufferRef allocated(buffer, BufferRef::Adopt());
  if (cuts) PrepareSpare();
  return allocated;
}

// A row takes twice what the smallest buffer has.
absl::Status ArenaSet::ChargeRow() {
  while ((rows_ + 1) / kFreeRows > static_cast<int64_t>(charged_rows_.size())) {
    CHORUS_ASSIGN_OR_RETURN(Charge rows,
                            budget_->Charge(Domain::kHost, Resource::kResultBytes,
                                            kFreeRows * static_cast<int64_t>(sizeof(Buffer))));
    charged_rows_.push_back(std::move(rows));
  }
  return absl::OkStatus();
}

absl::StatusOr<Buffer*> ArenaSet::Grow(int size_class, int64_t class_bytes) {
  CHORUS_RETURN_IF_ERROR(ChargeRow());  // first: a charge may give back an arena
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
    absl::StatusOr<Block*> block_or = AddBlock(next, true);
    // Where a generous arena does not fit any more, a smaller one may, or one for this buffer
    // alone.
    for (int64_t smaller = next / 4; !block_or.ok() && smaller > class_bytes; smaller /= 4) {
      block_or = AddBlock(smaller, true);
    }
    if (!block_or.ok()) {
      CHORUS_ASSIGN_OR_RETURN(Block * block, AddBlock(class_bytes, false));
      return Cut(block, size_class, class_bytes);
    }
    current_ = *block_or;
  }
  return Cut(current_, size_class, class_bytes);
}

// A caller that asks a full budget makes sets trim: what has been cut counts as in use by now.
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
  Block* const block = &empty_.emplace_back();
  block->at = std::prev(empty_.end());
  arena_bytes_ += arena->bytes();
  block->grows = shared || bytes <= options_.largest_arena_bytes / 4;
  if (block->grows) growing_bytes_ += arena->bytes();
  block->arena = std::move(arena);
  return block;
}

Buffer* ArenaSet::Cut(Block* block, int size_class, int64_t class_bytes) {
  const int64_t alignment = class_bytes >= 8 * PageBytes() ? PageBytes() : 64;
  const int64_t offset = RoundUp(block->used, alignment);
  block->used = offset + class_bytes;
  std::unique_ptr<Shelf>& shelf = block->shelves[size_class];
  if (shelf == nullptr) {
    shelf = std::make_unique<Shelf>();
    shelf->block = block;
    shelf->size_class = size_class;
    shelf->class_bytes = class_bytes;
  }
  Buffer* const buffer = &block->buffers->emplace_back();
  ++rows_;
  buffer->home_ = this;
  buffer->address_ = reinterpret_cast<DeviceAddress>(block->arena->data() + offset);
  buffer->offset_ = offset;
  buffer->arena_ = block->arena->id();
  buffer->owner_ = shelf.get();
  return buffer;
}

void ArenaSet::Link(Shelf* shelf) {
  Shelf*& first = shelves_[static_cast<size_t>(shelf->size_class)];
  shelf->before = nullptr;
  shelf->next = first;
  if (first != nullptr) first->before = shelf;
  first = shelf;
}

void ArenaSet::Unlink(Shelf* shelf) {
  Shelf*& first = shelves_[static_cast<size_t>(shelf->size_class)];
  (shelf->before != nullptr ? shelf->before->next : first) = shelf->next;
  if (shelf->next != nullptr) shelf->next->before = shelf->before;
}

void ArenaSet::Return(Buffer* buffer) {
  auto* const shelf = static_cast<Shelf*>(buffer->owner_);
  Block* const block = shelf->block;
  buffer->next_free_ = shelf->free;
  shelf->free = buffer;
  // What has been used last is used again first: it may be in the caches.
  if (shelves_[static_cast<size_t>(shelf->size_class)] != shelf) {
    if (buffer->next_free_ != nullptr) Unlink(shelf);
    Link(shelf);
  }
  --live_;
  live_bytes_ -= shelf->class_bytes;
  if (--block->live == 0) empty_.splice(empty_.end(), blocks_, block->at);
  if (orphaned_) GiveBack();
}

int64_t ArenaSet::Trim(size_t most) {
  const int64_t before = arena_bytes_;
  for (; most > 0 && !empty_.empty(); --most) Drop(&empty_.front());
  return before - arena_bytes_;
}

void ArenaSet::Drop(Block* block) {
  for (const auto& shelf : block->shelves) {
    if (shelf.second->free != nullptr) Unlink(shelf.second.get());
  }
  if (block == current_) current_ = nullptr;
  if (block == spare_) spare_ = nullptr;
  arena_bytes_ -= block->arena->bytes();
  if (block->grows) growing_bytes_ -= block->arena->bytes();
  rows_ -= static_cast<int64_t>(block->buffers->size());
  // It may have half a million.
  if (options_.helpers.thread != nullptr) {
    options_.helpers.thread->Dispose(*budget_, std::move(block->buffers));
  }
  while (rows_ / kFreeRows < static_cast<int64_t>(charged_rows_.size())) {
    if (options_.helpers.thread != nullptr) {
      options_.helpers.thread->Leave(std::move(charged_rows_.back()));
    }
    charged_rows_.pop_back();
  }
  empty_.erase(block->at);
}

int64_t ArenaSet::idle_bytes() const {
  const auto charged_rows = kFreeRows * static_cast<int64_t>(charged_rows_.size());
  return arena_bytes_ - live_bytes_ +
         std::max<int64_t>(0, charged_rows - live_) * static_cast<int64_t>(sizeof(Buffer));
}

Arena* ArenaSet::Find(ArenaId id) const {
  for (const std::list<Block>* blocks : {&blocks_, &empty_}) {
    for (const Block& block : *blocks) {
      if (block.arena->id() == id) return block.arena.get();
    }
  }
  return nullptr;
}

bool LeftSet::Release() { return set_ == nullptr || set_->GiveBackSome(); }

// --- DeviceSet ---

absl::StatusOr<BufferRef> DeviceSet::Allocate(const BudgetRef& budget, int64_t bytes) {
  if (bytes < 0 || bytes > SizeClass::kLargestBytes) {
    return Malformed(
        absl::StrCat("a buffer has 0 to ", SizeClass::kLargestBytes, " bytes, not ", bytes));
  }
  CHORUS_ASSIGN_OR_RETURN(Charge charge, budget->Charge(Domain::kHost, Resource::kResultBytes,
                                                        kBytesPerBuffer + bytes));
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

bool DeviceSet::Settle() {
  bool has_settled = false;
  const int64_t freed = leaving_.empty() ? 0 : devices_->freed();
  for (; !leaving_.empty() && leaving_.front().first <= freed; has_settled = true) {
    leaving_.pop_front();
  }
  return has_settled;
}

void DeviceSet::Return(Buffer* buffer) {
  Settle();
  const int64_t number = buffer->address_ == 0 ? 0 : devices_->Free(device_, buffer->address_);
  if (number != 0) {
    Charge row = buffer->charge_.Split(kBytesPerBuffer);
    row.Leave();
    leaving_.emplace_back(number, std::move(row));
  }
  --live_;
  delete buffer;
}

}  // namespace chorus
