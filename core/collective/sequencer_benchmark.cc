// What agreement costs: votes in, launches out, no bytes moved. Items are votes.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "benchmark/benchmark.h"
#include "core/base/work.h"
#include "core/collective/sequencer.h"

namespace chorus {
namespace {

// A rank's run of so many all_reduces, each of the last one's result.
struct AllReduces {
  AllReduces(int32_t rank, int32_t ranks, int32_t instances, bool wants_grad) {
    slots.resize(1);
    slots[0].size = ranks;
    slots[0].held = {GroupRank(rank)};
    auto what = std::make_shared<VoteTemplate>();
    what->fingerprint.lo = rank;
    for (int32_t i = 0; i < instances; ++i) {
      Participation part;
      part.descriptor.kind = CollectiveKind::kAllReduce;
      part.descriptor.reduction = Reduction::kSum;
      part.descriptor.dtype = DType::kF32;
      part.descriptor.dims = {1024};
      part.member = GroupRank(rank);
      part.wants_grad = wants_grad;
      if (i > 0) part.after = {i - 1};
      what->participations.push_back(part);
    }
    vote.epoch = Epoch(1);
    vote.what = what;
    vote.groups.resize(1);
    vote.groups[0].base.resize(1);
    vote.slots = &slots;
  }
  AllReduces(const AllReduces&) = delete;
  AllReduces& operator=(const AllReduces&) = delete;

  std::vector<GroupSlot> slots;
  Vote vote;  // but for its run, and the position of its first call
};

// Every rank runs a graph with `instances` all_reduces again and again, as in training.
void BM_Agree(benchmark::State& state) {
  const int32_t ranks = static_cast<int32_t>(state.range(0));
  const int32_t instances = static_cast<int32_t>(state.range(1));
  Sequencer sequencer(ranks, SequencerOptions());
  std::deque<AllReduces> votes;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    votes.emplace_back(rank, ranks, instances, /*wants_grad=*/false);
  }
  Sequencer::Actions actions;
  int64_t run = 0;
  int64_t base = 0;
  absl::Time now = absl::UnixEpoch();
  for (auto _ : state) {
    now += absl::Microseconds(1);
    for (AllReduces& calls : votes) {
      Vote& vote = calls.vote;
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

// What one event costs that ends all that a world may have: so many collectives by the first rank
// of two, alone or with the other, so that they may be differentiated.
enum class Ends { kEpoch, kLeft, kReform, kWorld, kTapes };
void BM_End(benchmark::State& state) {
  const auto ends = static_cast<Ends>(state.range(0));
  const auto instances = static_cast<int32_t>(state.range(1));
  const bool wants_grad = state.range(2) != 0;
  const bool by_both = state.range(3) != 0;
  constexpr int32_t kInstances = 1024;  // of a run
  Sequencer::Actions actions;
  for (auto _ : state) {
    state.PauseTiming();
    auto sequencer = std::make_unique<Sequencer>(2, SequencerOptions());
    for (int32_t run = 0; run * kInstances < instances; ++run) {
      for (int32_t rank = 0; rank <= (by_both ? 1 : 0); ++rank) {
        AllReduces calls(rank, 2, kInstances, wants_grad && rank == 0);
        calls.vote.run = RunHandle(2 * run + rank + 1);
        calls.vote.groups[0].base[0].call = int64_t{run} * kInstances;
        actions.clear();
        if (!sequencer->Submit(calls.vote, absl::UnixEpoch(), &actions).ok()) {
          state.SkipWithError("refused");
        }
        for (const SequencerAction& action : actions) {
          if (action.kind != SequencerAction::Kind::kLaunch) continue;
          Sequencer::Actions none;
          sequencer->Finished(action.ticket, absl::OkStatus(), absl::UnixEpoch(), &none);
        }
      }
    }
    actions.clear();
    state.ResumeTiming();
    switch (ends) {
      case Ends::kEpoch:
        sequencer->Abort(Error(Reason::kAborted), absl::UnixEpoch(), &actions);
        break;
      case Ends::kLeft:
        sequencer->Left(Rank(0), absl::UnixEpoch(), &actions);
        break;
      case Ends::kReform:
        sequencer->Shrink(absl::UnixEpoch(), &actions);
        break;
      case Ends::kWorld:
        sequencer = nullptr;
        break;
      case Ends::kTapes: {
        RefusedMember member;
        member.rank = Rank(0);
        member.drops_tapes = true;
        Error why(Reason::kBadType);
        why.alone = true;
        sequencer->Refuse({member}, Epoch(1), why, absl::UnixEpoch(), &actions);
        break;
      }
    }
    state.PauseTiming();
    sequencer = nullptr;
    actions.clear();  // with what a node lets go of elsewhere
    state.ResumeTiming();
  }
}
BENCHMARK(BM_End)
    ->Unit(benchmark::kMicrosecond)
    ->Iterations(20)
    ->ArgNames({"ends", "instances", "wants_grad", "by_both"})
    ->Args({0, 65536, 0, 0})
    ->Args({0, 65536, 1, 0})
    ->Args({1, 262144, 1, 1})
    ->Args({2, 262144, 1, 1})
    ->Args({3, 65536, 0, 0})
    ->Args({3, 262144, 1, 1})
    ->Args({4, 262144, 1, 1});

// Rank 1, beside what waits, calls a group that it is alone in; its runs have numbers behind `run`.
void GoOnAlone(int64_t run, Sequencer* sequencer, Sequencer::Actions* actions,
               benchmark::State& state) {
  AllReduces calls(0, 1, 1, /*wants_grad=*/false);
  calls.vote.groups[0].group = *sequencer->AddGroup(Rank(1), {Rank(1)});
  for (auto _ : state) {
    calls.vote.run = RunHandle(++run);
    calls.vote.groups[0].base[0].call = 2 * run;
    actions->clear();
    if (!sequencer->Submit(calls.vote, absl::UnixEpoch(), actions).ok() || actions->size() != 1) {
      state.SkipWithError("not launched alone");
      break;
    }
    const Ticket ticket = (*actions)[0].ticket;
    sequencer->Finished(ticket, absl::OkStatus(), absl::UnixEpoch(), actions);
  }
}

// A rank leaves calls out, and makes one of a group of its own, while all that a world may have
// pending waits for it: nothing of that is passed.
void BM_Move(benchmark::State& state) {
  constexpr int32_t kInstances = 1024;  // of a run
  const auto pending = static_cast<int32_t>(state.range(0));
  Sequencer sequencer(2, SequencerOptions());
  Sequencer::Actions actions;
  for (int32_t run = 0; run * kInstances < pending; ++run) {
    AllReduces calls(0, 2, kInstances, /*wants_grad=*/false);
    calls.vote.run = RunHandle(run + 1);
    calls.vote.groups[0].base[0].call = int64_t{run} * kInstances;
    if (!sequencer.Submit(calls.vote, absl::UnixEpoch(), &actions).ok()) {
      state.SkipWithError("refused");
    }
  }
  GoOnAlone(1000, &sequencer, &actions, state);
}
BENCHMARK(BM_Move)->Arg(1024)->Arg(64512);

// A gang of two ranks' runs whose order is not known: of 2,048 calls the second half need the
// results of all of the first, or of so many of them.
void BM_Order(benchmark::State& state) {
  const auto needs = static_cast<int32_t>(state.range(0));
  constexpr int32_t kHalf = 1024;
  Sequencer sequencer(2, SequencerOptions());
  std::deque<AllReduces> votes;
  std::vector<std::shared_ptr<VoteTemplate>> templates;
  for (int32_t rank = 0; rank < 2; ++rank) {
    votes.emplace_back(rank, 2, 2 * kHalf, /*wants_grad=*/false);
    auto what = std::make_shared<VoteTemplate>(*votes.back().vote.what);
    for (int32_t i = 0; i < 2 * kHalf; ++i) {
      std::vector<int32_t>& after = what->participations[static_cast<size_t>(i)].after;
      after.clear();
      for (int32_t before = 0; i >= kHalf && before < needs; ++before) after.push_back(before);
    }
    templates.push_back(what);
    votes.back().vote.what = what;
  }
  Sequencer::Actions actions;
  int64_t run = 0;
  int64_t base = 0;
  for (auto _ : state) {
    for (size_t rank = 0; rank < 2; ++rank) {
      templates[rank]->fingerprint.hi = static_cast<uint64_t>(++run);
      votes[rank].vote.run = RunHandle(run);
      votes[rank].vote.groups[0].base[0].call = base;
      if (!sequencer.Submit(votes[rank].vote, absl::UnixEpoch(), &actions).ok()) {
        state.SkipWithError("refused");
      }
    }
    base += 2 * kHalf;
    if (actions.size() != 1) {
      state.SkipWithError("not launched");
      break;
    }
    const Ticket ticket = actions[0].ticket;
    actions.clear();
    sequencer.Finished(ticket, absl::OkStatus(), absl::UnixEpoch(), &actions);
  }
}
BENCHMARK(BM_Order)->Unit(benchmark::kMicrosecond)->Arg(0)->Arg(1)->Arg(8)->Arg(16)->Arg(1024);

// The last vote of a world for so many all_to_alls whose pieces all have rows of their own, and all
// that it takes until they are launched, in slices. Of those that launch nothing `longest_us` is
// the longest, in the round where that took least.
void BM_RowsDiffer(benchmark::State& state) {
  const auto ranks = static_cast<int32_t>(state.range(0));
  const auto calls = static_cast<int32_t>(state.range(1));
  std::deque<AllReduces> votes;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    votes.emplace_back(rank, ranks, calls, /*wants_grad=*/false);
    auto what = std::make_shared<VoteTemplate>(*votes.back().vote.what);
    for (Participation& part : what->participations) {
      part.after.clear();
      part.descriptor.kind = CollectiveKind::kAllToAll;
      part.descriptor.reduction = Reduction::kNone;
      part.descriptor.dims = {Descriptor::kRowsDiffer, 1024};
      for (int32_t peer = 0; peer < ranks; ++peer) {
        part.descriptor.sends.push_back(rank + 2 * peer);
        part.descriptor.receives.push_back(peer + 2 * rank);
      }
    }
    votes.back().vote.what = what;
  }
  Sequencer sequencer(ranks, SequencerOptions());
  Sequencer::Actions actions;
  const absl::Time now = absl::UnixEpoch();
  int64_t run = 0;
  int64_t base = 0;
  auto least = std::chrono::nanoseconds::max();
  for (auto _ : state) {
    state.PauseTiming();
    actions.clear();
    for (AllReduces& of_rank : votes) {
      Vote& vote = of_rank.vote;
      vote.run = RunHandle(++run);
      vote.groups[0].base[0].call = base;
      if (&of_rank == &votes.back()) break;
      if (!sequencer.Submit(vote, now, &actions).ok()) state.SkipWithError("refused");
    }
    base += calls;
    std::chrono::nanoseconds longest{0};
    state.ResumeTiming();
    for (bool first = true; first || sequencer.NextDeadline() <= now; first = false) {
      const WorkSlice slice;
      const auto start = std::chrono::steady_clock::now();
      if (!first) {
        sequencer.Advance(now, &actions);
      } else if (!sequencer.Submit(votes.back().vote, now, &actions).ok()) {
        state.SkipWithError("refused");
      }
      if (!actions.empty()) continue;
      longest =
          std::max<std::chrono::nanoseconds>(longest, std::chrono::steady_clock::now() - start);
    }
    least = std::min(least, longest);
    if (actions.size() != 1) {
      state.SkipWithError("not launched");
      break;
    }
    const Ticket ticket = actions[0].ticket;
    sequencer.Finished(ticket, absl::OkStatus(), now, &actions);
  }
  state.SetItemsProcessed(state.iterations() * ranks * calls);
  state.counters["longest_us"] = static_cast<double>(least.count()) / 1000;
}
BENCHMARK(BM_RowsDiffer)
    ->Unit(benchmark::kMicrosecond)
    ->Args({2, 1})
    ->Args({8, 64})
    ->Args({64, 1024});

// As BM_Move, where the calls that wait are of two groups of so many members that take turns.
void BM_MoveBesideGroups(benchmark::State& state) {
  const auto ranks = static_cast<int32_t>(state.range(0));
  constexpr int32_t kPending = 4096;
  Sequencer sequencer(ranks, SequencerOptions());
  std::vector<Rank> members;
  for (int32_t rank = ranks; rank-- > 0;) members.push_back(Rank(rank));
  const GroupId other = *sequencer.AddGroup(Rank(0), members);
  AllReduces ahead(0, ranks, kPending, /*wants_grad=*/false);
  ahead.slots.push_back(ahead.slots[0]);
  ahead.slots[1].held = {GroupRank(ranks - 1)};
  ahead.vote.groups.push_back(ahead.vote.groups[0]);
  ahead.vote.groups[1].group = other;
  auto what = std::make_shared<VoteTemplate>(*ahead.vote.what);
  for (size_t i = 1; i < what->participations.size(); i += 2) {
    what->participations[i].group_slot = 1;
    what->participations[i].member = GroupRank(ranks - 1);
  }
  Sequencer::Actions actions;
  constexpr size_t kCalls = 32;  // of a run: a gang may have so many seats
  for (size_t first = 0; first < what->participations.size(); first += kCalls) {
    auto part = std::make_shared<VoteTemplate>();
    const auto begin = what->participations.begin() + static_cast<std::ptrdiff_t>(first);
    part->participations.assign(begin, begin + kCalls);
    for (Participation& p : part->participations) p.after.clear();
    ahead.vote.what = part;
    ahead.vote.run = RunHandle(static_cast<int64_t>(first) + 1);
    for (GroupBinding& binding : ahead.vote.groups) {
      binding.base[0].call = static_cast<int64_t>(first) / 2;
    }
    if (!sequencer.Submit(ahead.vote, absl::UnixEpoch(), &actions).ok()) {
      state.SkipWithError("refused");
    }
  }
  GoOnAlone(2 * kPending, &sequencer, &actions, state);
}
BENCHMARK(BM_MoveBesideGroups)->Unit(benchmark::kMicrosecond)->Arg(10)->Arg(1000);

// A member dies, of so many groups that all ranks are in.
void BM_Dead(benchmark::State& state) {
  constexpr int32_t kRanks = 1000;
  Sequencer with_groups(kRanks, SequencerOptions());
  std::vector<Rank> members;
  for (int32_t rank = 0; rank < kRanks; ++rank) members.push_back(Rank(rank));
  for (int64_t group = 0; group < state.range(0); ++group) {
    if (!with_groups.AddGroup(Rank(0), members).ok()) state.SkipWithError("refused");
  }
  Sequencer::Actions actions;
  for (auto _ : state) {
    state.PauseTiming();
    auto sequencer = std::make_unique<Sequencer>(with_groups);
    actions.clear();
    state.ResumeTiming();
    sequencer->Dead(Rank(kRanks - 1), "gone", absl::UnixEpoch(), &actions);
    state.PauseTiming();
    sequencer = nullptr;
    state.ResumeTiming();
  }
}
BENCHMARK(BM_Dead)->Unit(benchmark::kMicrosecond)->Iterations(10)->Arg(1)->Arg(1000);

}  // namespace
}  // namespace chorus
