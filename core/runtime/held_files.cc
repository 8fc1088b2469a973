#include "core/runtime/held_files.h"

#include <algorithm>

#include "core/base/shared_file.h"
#include "core/runtime/memory_thread.h"

namespace chorus {

void HeldFiles::Add(std::shared_ptr<const UniqueFd> file, Charge bytes, Charge descriptors) {
  if (!IsHeldByOthers(file->get())) return;
  bytes_ += bytes.amount();
  held_.push_back({std::move(file), std::move(bytes), std::move(descriptors)});
  if (added_ != nullptr) added_();
}

void HeldFiles::Look(size_t count) {
  for (count = std::min(count, held_.size()); count > 0; --count) {
    Held next = std::move(held_.front());
    held_.pop_front();
    if (IsHeld(&next)) held_.push_back(std::move(next));
  }
}

void HeldFiles::LookWithin(const Budget& budget) {
  held_.erase(
      std::remove_if(held_.begin(), held_.end(),
                     [&](Held& held) { return held.bytes.LiesWithin(budget) && !IsHeld(&held); }),
      held_.end());
}

bool HeldFiles::IsHeld(Held* held) {
  if (IsHeldByOthers(held->file->get())) return true;
  bytes_ -= held->bytes.amount();
  if (thread_ != nullptr) thread_->Dispose(std::move(held->file));
  return false;
}

}  // namespace chorus
