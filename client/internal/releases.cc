#include "client/internal/releases.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace chorus {
namespace internal {
namespace {

// Released tensors wait for company, unless they hold memory that others could use.
constexpr size_t kMaxTensors = 64;
constexpr int64_t kMaxBytes = 256 * 1024;

}  // namespace

void Releases::Add(TensorId tensor, int64_t bytes) {
  if (mark_.Forked()) return;
  MutexLock lock(&mutex_);
  batch_.tensors.push_back(tensor);
  bytes_ += bytes;
  if (batch_.tensors.size() >= kMaxTensors || bytes_ >= kMaxBytes) {
    urgent_.store(true, std::memory_order_relaxed);
  }
}

void Releases::Add(ArenaId arena) {
  if (mark_.Forked()) return;
  MutexLock lock(&mutex_);
  batch_.arenas.push_back(arena);
  urgent_.store(true, std::memory_order_relaxed);
}

void Releases::Add(DropTape::Entry tape) {
  if (mark_.Forked()) return;
  MutexLock lock(&mutex_);
  batch_.tapes.push_back(std::move(tape));
  urgent_.store(true, std::memory_order_relaxed);
}

void Releases::Add(GoneWorld world) {
  if (mark_.Forked()) return;
  MutexLock lock(&mutex_);
  batch_.worlds.push_back(std::move(world));
  urgent_.store(true, std::memory_order_relaxed);
}

void Releases::Add(absl::Span<const GraphId> graphs, bool of_calls) {
  if (mark_.Forked()) return;
  MutexLock lock(&mutex_);
  if (of_calls) graphs_.of_calls += static_cast<int32_t>(graphs.size());
  graphs_.ids.insert(graphs_.ids.end(), graphs.begin(), graphs.end());
  urgent_.store(true, std::memory_order_relaxed);
}

Releases::Batch Releases::Take(bool all) {
  Batch batch;
  MutexLock lock(&mutex_);
  urgent_.store(false, std::memory_order_relaxed);
  if (all || batch_.tensors.size() >= kMaxTensors || bytes_ >= kMaxBytes) {
    std::swap(batch.tensors, batch_.tensors);
    batch_.tensors.reserve(kMaxTensors);
    bytes_ = 0;
  }
  std::swap(batch.arenas, batch_.arenas);
  std::swap(batch.tapes, batch_.tapes);
  std::swap(batch.worlds, batch_.worlds);
  return batch;
}

void Releases::PutBack(Batch batch) {
  MutexLock lock(&mutex_);
  // Ahead of what has come since.
  const auto put = [](auto* back, auto* into) {
    into->insert(into->begin(), std::make_move_iterator(back->begin()),
                 std::make_move_iterator(back->end()));
  };
  put(&batch.tensors, &batch_.tensors);
  put(&batch.arenas, &batch_.arenas);
  put(&batch.tapes, &batch_.tapes);
  put(&batch.worlds, &batch_.worlds);
  bytes_ = std::max(bytes_, kMaxBytes);  // how large they are has been forgotten
  urgent_.store(true, std::memory_order_relaxed);
}

Releases::Graphs Releases::TakeGraphs() {
  Graphs graphs;
  MutexLock lock(&mutex_);
  std::swap(graphs, graphs_);
  return graphs;
}

}  // namespace internal
}  // namespace chorus
