#include "core/node/producers.h"

#include <algorithm>

#include "core/base/work.h"

namespace chorus::node {
namespace {

// Unless it was seen in this look.
void AddVoted(RunState* producer, int64_t look, RunState* run) {
  if (RunTable::FirstSeen(producer, look)) run->voted_producers.push_back(producer->handle);
}

bool HasVotedIn(const World* world, const RunState& run) {
  return run.world.get() == world && run.phase == RunState::Phase::kVoted;
}

// Whether it has producers that the sequencer of `run` does not know.
bool HidesProducers(const RunState& producer, const RunState& run) {
  return producer.local() && !(run.world != nullptr && HasVotedIn(run.world.get(), producer));
}

// The one at `index` among its consumers needs its results no more. The others keep their indices.
void DropConsumer(RunState* producer, int32_t index) {
  producer->consumers[static_cast<size_t>(index)] = RunHandle();
  if (++producer->consumers_gone < static_cast<int32_t>(producer->consumers.size())) return;
  producer->consumers.clear();
  producer->consumers_gone = 0;
}

}  // namespace

// --- Adoption -----------------------------------------------------------------------------------

void Adoption::Reach(RunHandle producer) {
  const RunState* const run = runs_->Find(producer);
  if (run == nullptr || run->phase != RunState::Phase::kWaiting) return;
  if (seen_.insert(producer).second) reached_.push_back(producer);
}

bool Adoption::LiesBetween(const RunState& local) const {
  return std::any_of(local.voted_producers.begin(), local.voted_producers.end(),
                     [this](RunHandle handle) {
                       CountWork(1);
                       const RunState* const producer = runs_->Find(handle);
                       return producer != nullptr && HasVotedIn(world_.get(), *producer);
                     });
}

RunState* Adoption::Step() {
  CountWork(1);
  if (reached_.empty()) return JoinNext();
  SearchNext();
  return nullptr;
}

// Null: it waits no more, or does not lie between any more.
RunState* Adoption::FindBetween(RunHandle handle) const {
  RunState* const local = runs_->Find(handle);
  const bool waits = local != nullptr && local->phase == RunState::Phase::kWaiting;
  return waits && LiesBetween(*local) ? local : nullptr;
}

void Adoption::SearchNext() {
  const RunHandle handle = reached_.back();
  reached_.pop_back();
  if (const RunState* const local = FindBetween(handle)) {
    between_.emplace_back(local->sequence, handle);
    CountWork(static_cast<int64_t>(local->producers.size()));
    for (const RunHandle producer : local->producers) Reach(producer);
  }
  if (reached_.empty()) std::sort(between_.begin(), between_.end());
}

RunState* Adoption::JoinNext() {
  RunState* const local = FindBetween(between_[next_++].second);
  if (local != nullptr) Join(local);
  return local;
}

void Adoption::Join(RunState* local) {
  local->world = world_;
  CountWork(static_cast<int64_t>(local->voted_producers.size() + local->producers.size()));
  const int64_t look = runs_->BeginLook();
  for (const RunHandle handle : local->voted_producers) {
    if (RunState* const producer = runs_->Find(handle)) RunTable::FirstSeen(producer, look);
  }
  for (size_t i = 0; i < local->producers.size(); ++i) {
    RunState* const producer = runs_->Find(local->producers[i]);
    if (producer == nullptr || !HasVotedIn(world_.get(), *producer)) continue;
    DropConsumer(producer, local->consumer_indices[i]);
    --local->blockers;
    AddVoted(producer, look, local);
  }
}

// --- Producers ----------------------------------------------------------------------------------

void Producers::Find(RunState* run) {
  const int64_t look = runs_->BeginLook();
  for (const CellRef& cell : run->inputs) {
    if (cell == nullptr || cell->state != Cell::State::kPending) continue;
    RunState* const producer = runs_->Find(cell->producer);
    if (producer == nullptr || !RunTable::FirstSeen(producer, look)) continue;
    run->producers.push_back(producer->handle);
  }
}

Adoption Producers::Adopt(const Names& names, const Run& command,
                          const std::shared_ptr<World>& world, Epoch epoch) const {
  Adoption adoption(runs_, world, epoch);
  for (const Binding& input : command.inputs) {
    const auto* const id = absl::get_if<TensorId>(&input);
    const Cell* const cell = id == nullptr ? nullptr : names.CellOf(*id);
    if (cell == nullptr) continue;
    if (cell->state == Cell::State::kFailed) return Adoption(runs_, world, epoch);
    if (cell->state == Cell::State::kPending) adoption.Reach(cell->producer);
  }
  return adoption;
}

int64_t Producers::ThroughLocals(const RunState& run) const {
  int64_t count = 0;
  for (const RunHandle handle : run.producers) {
    const RunState* const producer = runs_->Find(handle);
    if (producer == nullptr || producer->phase == RunState::Phase::kLaunched) continue;
    if (!HidesProducers(*producer, run)) continue;
    count += static_cast<int64_t>(producer->voted_producers.size());
  }
  return count;
}

void Producers::Await(RunState* run) {
  const int64_t look = runs_->BeginLook();
  run->consumer_indices.resize(run->producers.size(), -1);
  for (size_t i = 0; i < run->producers.size(); ++i) {
    RunState* const producer = runs_->Find(run->producers[i]);
    if (producer == nullptr || producer->phase == RunState::Phase::kLaunched) continue;
    const bool voted = producer->phase == RunState::Phase::kVoted;
    if (voted) AddVoted(producer, look, run);
    if (HidesProducers(*producer, *run)) {
      for (const RunHandle handle : producer->voted_producers) {
        RunState* const voted_producer = runs_->Find(handle);
        if (voted_producer != nullptr && voted_producer->phase == RunState::Phase::kVoted) {
          AddVoted(voted_producer, look, run);
        }
      }
    }
    if (voted && producer->world == run->world) continue;
    run->consumer_indices[i] = static_cast<int32_t>(producer->consumers.size());
    producer->consumers.push_back(run->handle);
    ++run->blockers;
  }
}

}  // namespace chorus::node
