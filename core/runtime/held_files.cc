#include "core/runtime/held_files.h"

#include <algorithm>

#include "core/base/shared_file.h"
#include "core/base/work.h"
#include "core/runtime/memory_thread.h"

namespace chorus {

void HeldFiles::Add(const std::shared_ptr<const UniqueFd>& file,
                    std::shared_ptr<const void> mapping, Charge* bytes, Charge* descriptors) {
  if (!IsHeldByOthers(file->get())) return;
  bytes_ += bytes->amount();
  held_.push_back({file, std::move(mapping), std::move(*bytes), std::move(*descriptors)});
  if (added_ != nullptr) added_();
}

void HeldFiles::Look(size_t count) {
  for (count = std::min(count, held_.size()); count > 0; --count) {
    Held next = std::move(held_.front());
    held_.pop_front();
    if (IsHeld(&next)) held_.push_back(std::move(next));
  }
}

bool HeldFiles::LookWithin(const Budget& budget) {
  constexpr size_t kMostPassed = 256;
  constexpr size_t kMostLooks = 16;
  // It is most often in vain, and one command may have a thousand charges that fail.
  if (SliceWork() > kReclaimWork) return false;
  const size_t size_before = held_.size();
  size_t looks = 0;
  for (size_t looks_left = std::min(size_before, kMostPassed); looks_left > 0 && looks < kMostLooks;
       --looks_left) {
    Held next = std::move(held_.front());
    held_.pop_front();
    const bool is_within = next.bytes.LiesWithin(budget);
    looks += is_within ? 1 : 0;
    if (!is_within || IsHeld(&next)) held_.push_back(std::move(next));
    CountWork(1);
  }
  return held_.size() < size_before;
}

bool HeldFiles::IsHeld(Held* held) {
  constexpr int64_t kWorkPerLook = 24;  // calls of the system
  CountWork(kWorkPerLook);
  if (IsHeldByOthers(held->file->get())) return true;
  bytes_ -= held->bytes.amount();
  if (thread_ != nullptr) {
    if (held->mapping != nullptr) {
      thread_->Dispose(held->bytes.budget(), std::move(held->mapping));
    }
    thread_->Dispose(held->bytes.budget(), std::move(held->file));
    thread_->Leave(std::move(held->bytes));
    thread_->Leave(std::move(held->descriptors));
  }
  return false;
}

}  // namespace chorus
