// What agreement costs: votes in, launches out, no bytes moved. Items are votes.
#include <cstdint>
#include <memory>
#include <vector>

#include "benchmark/benchmark.h"
#include "core/collective/sequencer.h"

namespace chorus {
namespace {

// Every rank runs a graph with `instances` all_reduces again and again, as in training.
void BM_Agree(benchmark::State& state) {
  const int32_t ranks = static_cast<int32_t>(state.range(0));
  const int32_t instances = static_cast<int32_t>(state.range(1));
  Sequencer sequencer(ranks, SequencerOptions());
  std::vector<std::vector<GroupSlot>> slots(ranks);
  std::vector<Vote> votes(ranks);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    GroupSlot slot;
    slot.size = ranks;
    slot.held = {GroupRank(rank)};
    slots[rank] = {slot};
    auto what = std::make_shared<VoteTemplate>();
    what->fingerprint.lo = rank;
    for (int32_t i = 0; i < instances; ++i) {
      Participation part;
      part.descriptor.kind = CollectiveKind::kAllReduce;
      part.descriptor.reduction = Reduction::kSum;
      part.descriptor.dtype = DType::kF32;
      part.descriptor.dims = {1024};
      part.member = GroupRank(rank);
      if (i > 0) part.after = {i - 1};
      what->participations.push_back(part);
    }
    votes[rank].epoch = Epoch(1);
    votes[rank].what = what;
    votes[rank].groups.resize(1);
    votes[rank].groups[0].base.resize(1);
    votes[rank].slots = &slots[rank];
  }
  Sequencer::Actions actions;
  int64_t run = 0;
  int64_t base = 0;
  absl::Time now = absl::UnixEpoch();
  for (auto _ : state) {
    now += absl::Microseconds(1);
    for (Vote& vote : votes) {
      vote.run = RunHandle(++run);
      vote.groups[0].base[0].call = base;
      if (!sequencer.Submit(vote, now, &actions).ok()) state.SkipWithError("refused");
    }
    base += instances;
    if (actions.size() != 1 || actions[0].instances.size() != static_cast<size_t>(instances)) {
      state.SkipWithError("not launched");
      break;
    }
    const Ticket ticket = actions[0].ticket;
    actions.clear();
    sequencer.Finished(ticket, absl::OkStatus(), now, &actions);
  }
  state.SetItemsProcessed(state.iterations() * ranks * instances);
}
BENCHMARK(BM_Agree)->Args({2, 1})->Args({4, 1})->Args({8, 1})->Args({64, 1})->Args({4, 1000})->Args(
    {8, 1000});

}  // namespace
}  // namespace chorus
