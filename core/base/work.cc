#include "core/base/work.h"

#include <algorithm>

namespace chorus {
namespace {

thread_local WorkSlice* current = nullptr;
thread_local int64_t largest = 0;

}  // namespace

WorkSlice::WorkSlice() : outer_(current) { current = this; }

WorkSlice::~WorkSlice() {
  current = outer_;
  largest = std::max(largest, work_);
}

void CountWork(int64_t work) {
  if (current != nullptr) current->work_ += work;
}

int64_t SliceWork() { return current == nullptr ? 0 : current->work_; }

int64_t LargestSliceWork() { return largest; }

}  // namespace chorus
