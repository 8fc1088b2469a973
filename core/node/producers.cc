#include "core/node/producers.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "core/base/work.h"

namespace chorus::node {

void Producers::Find(RunState* run) {
  const int64_t look = runs_->BeginLook();
  for (const CellRef& cell : run->inputs) {
    if (cell == nullptr || cell->state != Cell::State::kPending) continue;
    RunState* const producer = runs_->Find(cell->producer);
    if (producer == nullptr || !RunTable::FirstSeen(producer, look)) continue;
    run->producers.push_back(producer->handle);
  }
}

bool Producers::LiesBetween(const RunState& local, const World* world) {
  return std::any_of(local.voted_producers.begin(), local.voted_producers.end(),
                     [&](RunHandle handle) {
                       CountWork(1);
                       const RunState* const producer = runs_->Find(handle);
                       return producer != nullptr && producer->world.get() == world &&
                              producer->phase == RunState::Phase::kVoted;
                     });
}

std::vector<RunHandle> Producers::Between(const RunState& run) {
  const int64_t look = runs_->BeginLook();
  std::vector<std::pair<Sequence, RunHandle>> between;
  absl::InlinedVector<const RunState*, 8> consumers = {&run};
  while (!consumers.empty()) {
    const RunState* const consumer = consumers.back();
    consumers.pop_back();
    CountWork(static_cast<int64_t>(consumer->producers.size()));
    for (const RunHandle handle : consumer->producers) {
      RunState* const producer = runs_->Find(handle);
      if (producer == nullptr || producer->phase != RunState::Phase::kWaiting) continue;
      if (!RunTable::FirstSeen(producer, look)) continue;
      if (!LiesBetween(*producer, run.world.get())) continue;
      between.emplace_back(producer->sequence, handle);
      consumers.push_back(producer);
    }
  }
  std::sort(between.begin(), between.end());
  std::vector<RunHandle> handles;
  for (const auto& local : between) handles.push_back(local.second);
  return handles;
}

void Producers::Join(const std::shared_ptr<World>& world, RunState* local) {
  local->world = world;
  CountWork(static_cast<int64_t>(local->voted_producers.size() + local->producers.size()));
  const int64_t look = runs_->BeginLook();
  for (const RunHandle handle : local->voted_producers) {
    if (RunState* const known = runs_->Find(handle)) RunTable::FirstSeen(known, look);
  }
  for (const RunHandle handle : local->producers) {
    RunState* const producer = runs_->Find(handle);
    if (producer == nullptr || producer->world != world ||
        producer->phase != RunState::Phase::kVoted) {
      continue;
    }
    auto& consumers = producer->consumers;
    CountWork(static_cast<int64_t>(consumers.size() * sizeof(RunHandle)) / kBytesOfWork);
    consumers.erase(std::find(consumers.begin(), consumers.end(), local->handle));
    --local->blockers;
    AddVoted(producer, look, local);
  }
}

int64_t Producers::ThroughLocals(const RunState& run) const {
  int64_t through = 0;
  for (const RunHandle handle : run.producers) {
    const RunState* const producer = runs_->Find(handle);
    if (producer == nullptr || producer->phase == RunState::Phase::kLaunched) continue;
    if (producer->local()) through += static_cast<int64_t>(producer->voted_producers.size());
  }
  return through;
}

void Producers::Await(RunState* run) {
  const int64_t look = runs_->BeginLook();
  for (const RunHandle handle : run->producers) {
    RunState* const producer = runs_->Find(handle);
    if (producer == nullptr || producer->phase == RunState::Phase::kLaunched) continue;
    const bool voted = producer->phase == RunState::Phase::kVoted;
    if (voted) AddVoted(producer, look, run);
    if (producer->local()) {
      for (const RunHandle through : producer->voted_producers) {
        RunState* const reached = runs_->Find(through);
        if (reached != nullptr && reached->phase == RunState::Phase::kVoted) {
          AddVoted(reached, look, run);
        }
      }
    }
    if (voted && producer->world == run->world) continue;
    producer->consumers.push_back(run->handle);
    ++run->blockers;
  }
}

}  // namespace chorus::node
