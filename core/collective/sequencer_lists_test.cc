// Lists of calls are seen in nothing but speed: a sequencer that has them and one that takes each
// call by itself are told the same, and decide the same.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/collective/sequencer.h"
#include "core/collective/test_run.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::SizeIs;

std::string Text(const std::shared_ptr<const Error>& error) {
  if (error == nullptr) return "";
  // A gang that has failed is named by the first of its collectives, in an order that may differ.
  if (error->reason == Reason::kExecFailed || error->reason == Reason::kExecTimeout) {
    return absl::StrCat(static_cast<int>(error->reason));
  }
  std::string text =
      absl::StrCat(static_cast<int>(error->reason), "|", error->message, "|", error->instance, "|",
                   error->op, "|", error->source, "|", error->culprit.rank, "|", error->expected,
                   "|", error->got, "|", error->alone);
  for (const auto& rank : error->ranks) absl::StrAppend(&text, "|", rank.rank, ":", rank.what);
  return text;
}

std::string Text(const LaunchedInstance& instance, int32_t call) {
  std::string text = instance.KeyAt(call).ToString();
  for (const auto& part : instance.parts) {
    absl::StrAppend(&text, " ", part.run.value(), ".", part.participation + call, "@",
                    part.member.value());
  }
  for (const GroupRank absent : instance.absent) absl::StrAppend(&text, " -", absent.value());
  for (const auto& given_up : instance.given_up) {
    absl::StrAppend(&text, " ^", given_up.rank.value(), given_up.what->source);
  }
  return text;
}

// What an action is to those that it is for. The order of a gang may be another one: that it is one
// is looked at by itself.
std::string Text(const SequencerAction& action) {
  std::string text = absl::StrCat(static_cast<int>(action.kind), " t", action.ticket.value(), " r",
                                  action.run.value(), " e", action.epoch.value(), ".",
                                  action.open_epoch.value(), " ", Text(action.error), " drops");
  for (const InstanceKey& key : action.dropped) absl::StrAppend(&text, " ", key.ToString(), ",");
  std::set<int64_t> runs;
  for (const RunHandle run : action.runs) runs.insert(run.value());
  absl::StrAppend(&text, " runs");
  for (const int64_t run : runs) absl::StrAppend(&text, " ", run);
  std::set<std::string> calls;
  for (const LaunchedInstance& instance : action.instances) {
    for (int32_t call = 0; call < instance.count; ++call) calls.insert(Text(instance, call));
  }
  for (const std::string& call : calls) absl::StrAppend(&text, "\n  ", call);
  return text;
}

// A world whose ranks run more or less the same program, and what becomes of it.
class Twins {
 public:
  explicit Twins(uint32_t seed) : random_(seed) {
    const int size = 2 + Below(3);
    SequencerOptions options;
    options.mismatch_grace = Below(2) == 0 ? absl::ZeroDuration() : absl::Seconds(1);
    if (Below(4) == 0) options.max_pending = 8;
    if (Below(4) == 0) options.newest_pending = 2;
    if (Below(4) == 0) options.check_call_sites = CheckCallSites::kWarn;
    if (Below(4) == 0) options.check_call_sites = CheckCallSites::kRefuse;
    if (Below(6) == 0) options.max_gang_size = 12;
    for (auto* sequencer : {&lists_, &singles_}) {
      *sequencer = std::make_unique<Sequencer>(size, options);
    }
    for (int rank = 0; rank < size; ++rank) ranks_.emplace_back();
    std::vector<Rank> some = {Rank(0), Rank(1)};
    if (size > 3) some = {Rank(1), Rank(3), Rank(0)};
    groups_.push_back({});
    for (int rank = 0; rank < size; ++rank) groups_[0].push_back(Rank(rank));
    groups_.push_back(some);
    for (const Rank rank : some) {
      EXPECT_EQ(lists_->AddGroup(rank, some)->value(), 1);
      EXPECT_EQ(singles_->AddGroup(rank, some)->value(), 1);
    }
    // The first two ranks may be of one session.
    together_ = Below(4) == 0;
    BeginStep();
  }

  void Do() {
    const int what = Below(100);
    const int rank = Below(static_cast<int>(ranks_.size()));
    if (what < 66) return SubmitNext(rank);
    if (what < 72) return Refuse(rank);
    if (what < 77) return DropSome(rank);
    if (what < 86) return FinishSome();
    if (what < 89) return Wait();
    if (what < 91) return CancelSome(rank);
    if (what < 93) return WithdrawSome();
    if (what < 95) return UnblockSome();
    if (what == 95 && Below(20) == 0) {
      ranks_[rank].is_gone = true;
      return Tell("leaves", [&](Sequencer* sequencer, Sequencer::Actions* actions) {
        sequencer->Left(Rank(rank), now_, actions);
      });
    }
    if (what == 96 && Below(20) == 0) {
      ranks_[rank].is_gone = true;
      return Tell("dies", [&](Sequencer* sequencer, Sequencer::Actions* actions) {
        sequencer->Dead(Rank(rank), "killed", now_, actions);
      });
    }
    if (what == 97) return SkipStep(rank);
    now_ += absl::Milliseconds(1);
  }

  // They have parted.
  bool is_over() const { return is_over_; }
  int64_t launched() const { return launched_; }
  int64_t launched_in_lists() const { return launched_in_lists_; }

 private:
  struct Call {
    int group = 0;
    int64_t rows = 4;
    bool wants_grad = false;
    bool leads_further = false;
    bool rows_differ = false;
    bool goes_on = false;  // the next one is a further part
    bool needs_last = false;
    bool is_pair = false;
  };
  struct RankState {
    size_t next = 0;  // in its program
    int64_t step = 0;
    std::vector<Call> program;  // of this step and those behind it
    bool is_gone = false;
    Epoch epoch{1};
    std::map<InstanceKey, int64_t> recorded;  // how many gradients it has asked for
    std::vector<int64_t> runs;                // that may be pending
  };

  int Below(int bound) {
    return static_cast<int>(random_() % static_cast<unsigned>(std::max(bound, 1)));
  }

  bool IsMember(int group, int rank) const {
    const auto& members = groups_[static_cast<size_t>(group)];
    return std::find(members.begin(), members.end(), Rank(rank)) != members.end();
  }
  int32_t SeatOf(int group, int rank) const {
    const auto& members = groups_[static_cast<size_t>(group)];
    return static_cast<int32_t>(std::find(members.begin(), members.end(), Rank(rank)) -
                                members.begin());
  }

  // All ranks have the same program, but for a few calls.
  void BeginStep() {
    std::vector<Call> common;
    const int length = 8 + Below(16);
    while (static_cast<int>(common.size()) < length) {
      Call call;
      call.group = Below(4) == 0 ? 1 : 0;
      call.wants_grad = Below(7) == 0;
      call.leads_further = Below(5) == 0;
      call.rows_differ = Below(20) == 0;
      call.needs_last = Below(3) == 0;
      call.is_pair = call.group == 1 && Below(6) == 0;
      int count = Below(3) == 0 ? 1 + Below(6) : 1;
      const bool as_parts = !call.is_pair && Below(2) == 0;
      for (; count > 0; --count) {
        call.goes_on = as_parts && count > 1;
        common.push_back(call);
      }
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (Call call : common) {
        if (!IsMember(call.group, static_cast<int>(rank))) continue;
        if (Below(60) == 0) call.rows = 5;
        if (Below(30) == 0) call.wants_grad = !call.wants_grad;
        if (Below(60) == 0) call.goes_on = !call.goes_on && !call.is_pair;
        if (Below(80) == 0) call.rows_differ = !call.rows_differ;
        ranks_[rank].program.push_back(call);
      }
    }
  }

  // Tells both, and looks whether both say the same.
  template <typename Event>
  void Tell(const std::string& what, const Event& event) {
    story_.push_back(what);
    std::vector<std::string> texts[2];
    Sequencer::Actions of_lists;
    bool has_conflict = false;  // of calls by themselves
    int index = 0;
    for (auto* sequencer : {lists_.get(), singles_.get()}) {
      Sequencer::Actions actions;
      event(sequencer, &actions);
      std::vector<std::string>& said = texts[index++];
      // Whether a run can follow the order is not what this is about: it always can.
      for (size_t i = 0; i < actions.size(); ++i) {
        if (actions[i].kind != SequencerAction::Kind::kReserve) continue;
        CheckOrder(actions[i]);
        sequencer->Reserved(actions[i].run, now_, &actions);
      }
      // Slices end where the clock says so: to the end.
      for (int turn = 0; sequencer->NextDeadline() <= now_ && turn < 1000; ++turn) {
        sequencer->Advance(now_, &actions);
      }
      for (const SequencerAction& action : OneByOne(actions)) {
        if (action.kind == SequencerAction::Kind::kReserve) continue;
        said.push_back(Text(action));
        has_conflict |= sequencer == singles_.get() && action.error != nullptr &&
                        action.error->reason == Reason::kOrderCycle;
      }
      for (const SequencerAction& action : actions) {
        if (action.kind == SequencerAction::Kind::kLaunch) CheckLaunch(action);
      }
      if (sequencer == lists_.get()) of_lists = std::move(actions);
    }
    // The order of a gang is looked for greedily: as lists it may have one that is not found for
    // calls by themselves. Never the other way round.
    is_over_ = texts[0] != texts[1] && has_conflict;
    if (is_over_) return;
    ASSERT_EQ(texts[0], texts[1]) << Story();
    ASSERT_EQ(lists_->epoch(), singles_->epoch()) << Story();
    ASSERT_EQ(lists_->CanonicalState(), singles_->CanonicalState()) << Story();
    ASSERT_EQ(lists_->NextDeadline(), singles_->NextDeadline()) << Story();
    ASSERT_EQ(lists_->IsQuiet(), singles_->IsQuiet()) << Story();
    ASSERT_EQ(lists_->HeldRows(), singles_->HeldRows()) << Story();
    ASSERT_EQ(PendingText(*lists_), PendingText(*singles_)) << Story();
    for (const SequencerAction& action : of_lists) Note(action);
  }

  std::string PendingText(const Sequencer& sequencer) const {
    std::string text;
    int64_t room = 1000;
    for (const PendingInstance& pending : sequencer.Pending(now_, &room)) {
      absl::StrAppend(&text, pending.key.ToString(), " ", pending.what, " ", pending.source, " ",
                      absl::FormatDuration(pending.waiting), " of ", pending.voted.size(),
                      " lacks ", pending.missing.size(), "\n");
    }
    return text;
  }

  std::string Story() const {
    std::string text;
    const size_t first = story_.size() > 40 ? story_.size() - 40 : 0;
    for (size_t i = first; i < story_.size(); ++i) absl::StrAppend(&text, story_[i], "\n");
    return text;
  }

  void Note(const SequencerAction& action) {
    if (action.kind == SequencerAction::Kind::kEpochEnded ||
        (action.kind == SequencerAction::Kind::kFail && action.open_epoch != Epoch())) {
      for (RankState& rank : ranks_) {
        if (rank.epoch < action.open_epoch && Below(3) != 0) rank.epoch = action.open_epoch;
      }
    }
    if (action.kind != SequencerAction::Kind::kLaunch) return;
    open_.push_back(action.ticket);
    for (const LaunchedInstance& instance : action.instances) {
      launched_ += instance.count;
      if (instance.count > 1) launched_in_lists_ += instance.count;
      for (const auto& part : instance.parts) {
        const auto run = templates_.find(part.run.value());
        if (run == templates_.end()) continue;
        const Participation& participation =
            run->second.what->participations[static_cast<size_t>(part.participation)];
        if (!participation.wants_grad) continue;
        for (const int rank : run->second.ranks) {
          if (RankAt(instance.key, part.member) != rank) continue;
          ranks_[static_cast<size_t>(rank)].recorded.emplace(instance.key, 0);
        }
      }
    }
  }

  int RankAt(const InstanceKey& key, GroupRank member) const {
    return static_cast<int>(
        groups_[static_cast<size_t>(key.group.value())][static_cast<size_t>(member.value())]
            .value());
  }

  // What a run needs is ahead of it.
  void CheckOrder(const SequencerAction& action) {
    const std::vector<Participation>& parts =
        templates_.at(action.run.value()).what->participations;
    ASSERT_EQ(action.order.size(), parts.size()) << Story();
    std::vector<bool> is_done(parts.size());
    for (const int32_t i : action.order) {
      for (const int32_t before : parts[static_cast<size_t>(i)].after) {
        ASSERT_TRUE(is_done[static_cast<size_t>(before)]) << Story();
      }
      ASSERT_FALSE(is_done[static_cast<size_t>(i)]) << Story();
      is_done[static_cast<size_t>(i)] = true;
    }
  }
  void CheckLaunch(const SequencerAction& action) {
    std::map<int64_t, std::set<int32_t>> is_done;
    std::map<int, int64_t> last_run;            // by rank
    std::map<int, std::set<int64_t>> left_run;  // by rank: those that others came behind
    for (const LaunchedInstance& instance : action.instances) {
      for (int32_t call = 0; call < instance.count; ++call) {
        std::vector<std::pair<int64_t, int32_t>> now;
        for (const auto& part : instance.parts) {
          const int64_t run = part.run.value();
          const TestTemplate& of_run = templates_.at(run);
          const int32_t i = part.participation + call;
          for (const int32_t before : of_run.what->participations[static_cast<size_t>(i)].after) {
            ASSERT_TRUE(is_done[run].count(before)) << Story();
          }
          const int rank = RankAt(instance.key, part.member);
          ASSERT_FALSE(left_run[rank].count(run)) << Story();
          const auto last = last_run.emplace(rank, run);
          if (!last.second && last.first->second != run) {
            left_run[rank].insert(last.first->second);
            last.first->second = run;
          }
          now.emplace_back(run, i);
        }
        for (const auto& done : now) is_done[done.first].insert(done.second);
      }
    }
    for (const RunHandle run : action.runs) {
      ASSERT_EQ(is_done[run.value()].size(), templates_.at(run.value()).what->participations.size())
          << Story();
    }
  }

  void SubmitNext(int rank) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    if (state.is_gone) return;
    if (state.next >= state.program.size()) {
      if (ranks_ahead() < state.program.size() + 64) BeginStep();
      return;
    }
    TestRun run(next_run_, state.epoch);
    std::vector<int> speaks_for = {rank};
    if (together_ && rank < 2 && Below(2) == 0) {
      const auto other = static_cast<size_t>(1 - rank);
      if (!ranks_[other].is_gone && ranks_[other].next < ranks_[other].program.size() &&
          ranks_[other].epoch == state.epoch) {
        speaks_for = {0, 1};
      }
    }
    std::map<int, int32_t> slots;
    for (int group = 0; group < 2; ++group) {
      std::vector<int32_t> held;
      for (const int speaker : speaks_for) {
        if (IsMember(group, speaker)) held.push_back(SeatOf(group, speaker));
      }
      if (held.empty()) continue;
      slots[group] =
          run.Slot(GroupId(group), static_cast<int32_t>(groups_[static_cast<size_t>(group)].size()),
                   held, {});
    }
    std::string what = absl::StrCat("run ", next_run_, " of");
    int count_of_all = 0;
    bool goes_on = false;
    for (const int speaker : speaks_for) {
      absl::StrAppend(&what, " rank ", speaker, ":");
      RankState& speaks = ranks_[static_cast<size_t>(speaker)];
      std::map<int, int32_t> last_part;  // by group: of a call that goes on
      std::map<int, bool> call_goes_on;
      const int count = 1 + Below(speaks_for.size() > 1 ? 4 : 8);
      for (int i = 0; i < count && speaks.next < speaks.program.size(); ++i, ++speaks.next) {
        const Call& call = speaks.program[speaks.next];
        const int32_t member = SeatOf(call.group, speaker);
        std::vector<int32_t> after;
        if (call.needs_last && count_of_all > 0) after = {Below(count_of_all)};
        Participation* part = nullptr;
        if (call.is_pair) {
          const int32_t size =
              static_cast<int32_t>(groups_[static_cast<size_t>(call.group)].size());
          if (member == 0) {
            part = &run.SendTo(slots[call.group], member, size - 1);
          } else if (member == size - 1) {
            part = &run.RecvFrom(slots[call.group], member, 0);
          } else {
            continue;
          }
          part->after = after;
        } else {
          part = &run.AllReduce(slots[call.group], member, after);
          part->descriptor.dims = {call.rows};
          part->part = call_goes_on[call.group] ? last_part[call.group] + 1 : 0;
          last_part[call.group] = part->part;
          call_goes_on[call.group] = call.goes_on;
          if (call.rows_differ) {
            part->descriptor.kind = CollectiveKind::kAllGather;
            part->descriptor.reduction = Reduction::kNone;
            part->descriptor.dims = {Descriptor::kRowsDiffer};
            part->descriptor.sends = {call.rows + member};
          }
          part->wants_grad = call.wants_grad;
          part->leads_to_collective = call.leads_further && call.wants_grad;
          part->leads_to_leaf = call.leads_further;
          // Most often the ranks have the same lines.
          part->source = absl::StrCat("line", speaks.next + (Below(40) == 0 ? 1 : 0));
        }
        ++count_of_all;
        absl::StrAppend(&what, call.is_pair ? " p" : " g", call.group, part->wants_grad ? "!" : "",
                        part->part > 0 ? absl::StrCat(".", part->part) : "",
                        call.rows != 4 ? "*" : "", call.rows_differ ? "~" : "");
      }
      goes_on |= call_goes_on[0] || call_goes_on[1];
    }
    // Only one that ends so says so, for all of its groups.
    if (speaks_for.size() == 1) AskForGradients(rank, slots, &run, &what);
    run.vote().call_goes_on = goes_on && Below(2) == 0;
    if (run.vote().call_goes_on) absl::StrAppend(&what, " ...");
    for (const int speaker : speaks_for) {
      const auto& earlier = ranks_[static_cast<size_t>(speaker)].runs;
      if (!earlier.empty() && Below(5) == 0) {
        const int64_t producer =
            earlier[earlier.size() - 1 -
                    static_cast<size_t>(
                        Below(static_cast<int>(std::min<size_t>(earlier.size(), 3))))];
        run.producers().push_back(RunHandle(producer));
        absl::StrAppend(&what, " reads ", producer);
      }
    }
    if (Below(25) == 0) {
      run.BlockExternally();
      blocked_.push_back(next_run_);
    }
    const Vote as_lists = run.Build();
    Vote alone = as_lists;
    auto without_lists = std::make_shared<VoteTemplate>(*alone.what);
    without_lists->lists.clear();
    alone.what = without_lists;
    templates_[next_run_] = {alone.what, speaks_for};
    for (const int speaker : speaks_for) {
      ranks_[static_cast<size_t>(speaker)].runs.push_back(next_run_);
    }
    ++next_run_;
    std::vector<std::string> statuses;
    Tell(what, [&](Sequencer* sequencer, Sequencer::Actions* actions) {
      const Vote& vote = sequencer == lists_.get() ? as_lists : alone;
      if (vote.epoch == sequencer->epoch()) (void)sequencer->Resolve(vote);
      const absl::Status status = sequencer->Submit(vote, now_, actions);
      statuses.push_back(status.ToString());
      if (status.ok()) return;
      // As the node does.
      sequencer->Refuse(sequencer->CallsOf(vote), vote.epoch, ErrorOf(status), now_, actions);
    });
    ASSERT_THAT(statuses, SizeIs(2));
    EXPECT_EQ(statuses[0], statuses[1]) << Story();
    if (statuses[0] != "OK") story_.back() += absl::StrCat(": ", statuses[0]);
  }

  void AskForGradients(int rank, std::map<int, int32_t>& slots, TestRun* run, std::string* what) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    for (auto& recorded : state.recorded) {
      if (Below(6) != 0 || recorded.first.is_pair()) continue;
      const int group = static_cast<int>(recorded.first.group.value());
      Participation& part = run->GradientOf(recorded.first, static_cast<int32_t>(recorded.second++),
                                            slots[group], SeatOf(group, rank));
      part.source = "gradient";
      absl::StrAppend(what, " d(", recorded.first.ToString(), ")");
    }
  }

  void Refuse(int rank) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    if (state.is_gone) return;
    std::vector<RefusedMember> refused(1);
    refused[0].rank = Rank(rank);
    refused[0].step = state.step;
    refused[0].rest_of_step = Below(8) == 0;
    refused[0].drops_tapes = Below(8) == 0;
    RefusedCalls calls;
    calls.group = GroupId(Below(2));
    if (!IsMember(static_cast<int>(calls.group.value()), rank)) return;
    calls.first = lists_->NextCall(calls.group, Rank(rank)).call;
    calls.next = calls.first + Below(4);
    refused[0].calls.push_back(calls);
    Error why(Reason::kOutOfMemory);
    why.message = "no room";
    why.source = "refused";
    why.alone = Below(2) == 0;
    Tell(absl::StrCat("rank ", rank, " is refused ", calls.first, " to ", calls.next, " of group ",
                      calls.group.value(), why.alone ? " alone" : "",
                      refused[0].rest_of_step ? " and the rest" : ""),
         [&](Sequencer* sequencer, Sequencer::Actions* actions) {
           sequencer->Refuse(refused, state.epoch, why, now_, actions);
         });
  }

  void DropSome(int rank) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    if (state.recorded.empty()) return;
    auto at = state.recorded.begin();
    std::advance(at, Below(static_cast<int>(state.recorded.size())));
    const InstanceKey key = at->first;
    state.recorded.erase(at);
    const bool consumed = Below(2) == 0;
    Tell(absl::StrCat("rank ", rank, consumed ? " uses up " : " drops ", key.ToString()),
         [&](Sequencer* sequencer, Sequencer::Actions* actions) {
           sequencer->DropTape(Rank(rank), key, consumed, state.epoch, now_, actions);
         });
  }

  void FinishSome() {
    if (open_.empty()) return;
    const Ticket ticket = open_.front();
    open_.pop_front();
    const absl::Status status =
        Below(30) == 0 ? MakeError(Reason::kExecFailed, "a kernel failed") : absl::OkStatus();
    Tell(absl::StrCat("gang ", ticket.value(), " ends"),
         [&](Sequencer* sequencer, Sequencer::Actions* actions) {
           sequencer->Finished(ticket, status, now_, actions);
         });
  }

  void Wait() {
    now_ += Below(3) == 0 ? absl::Seconds(61) : absl::Milliseconds(1 + Below(1500));
    Tell("time passes", [&](Sequencer* sequencer, Sequencer::Actions* actions) {
      sequencer->Advance(now_, actions);
    });
  }

  absl::optional<int64_t> SomePending() {
    for (int tries = 0; tries < 8; ++tries) {
      const int64_t run = 1 + Below(static_cast<int>(next_run_));
      if (singles_->IsPending(RunHandle(run))) return run;
    }
    return absl::nullopt;
  }
  void CancelSome(int rank) {
    const absl::optional<int64_t> run = SomePending();
    if (!run.has_value() || Below(4) != 0) return;
    Tell(absl::StrCat("run ", *run, " is cancelled"),
         [&](Sequencer* sequencer, Sequencer::Actions* actions) {
           sequencer->Cancel(RunHandle(*run), Rank(rank), now_, actions);
         });
  }
  void WithdrawSome() {
    const absl::optional<int64_t> run = SomePending();
    if (!run.has_value()) return;
    Tell(absl::StrCat("run ", *run, " is withdrawn"),
         [&](Sequencer* sequencer, Sequencer::Actions* actions) {
           sequencer->Withdraw(RunHandle(*run), Error(Reason::kOutOfMemory, "no"), now_, actions);
         });
  }
  void UnblockSome() {
    if (blocked_.empty()) return;
    const int64_t run = blocked_.front();
    blocked_.pop_front();
    Tell(absl::StrCat("run ", run, " goes on"),
         [&](Sequencer* sequencer, Sequencer::Actions* actions) {
           sequencer->Unblock(RunHandle(run), now_, actions);
         });
  }
  void SkipStep(int rank) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    if (state.is_gone) return;
    std::vector<RefusedMember> stepped(1);
    stepped[0].rank = Rank(rank);
    stepped[0].step = ++state.step;
    Error why(Reason::kOutOfMemory);
    why.alone = true;
    Tell(absl::StrCat("rank ", rank, " steps"),
         [&](Sequencer* sequencer, Sequencer::Actions* actions) {
           sequencer->Refuse(stepped, state.epoch, why, now_, actions);
         });
  }
  size_t ranks_ahead() const {
    size_t most = 0;
    for (const RankState& rank : ranks_) most = std::max(most, rank.program.size());
    return most;
  }

  struct TestTemplate {
    std::shared_ptr<const VoteTemplate> what;
    std::vector<int> ranks;
  };

  std::mt19937 random_;
  std::unique_ptr<Sequencer> lists_;
  std::unique_ptr<Sequencer> singles_;
  std::vector<RankState> ranks_;
  std::vector<std::vector<Rank>> groups_;
  bool together_ = false;
  absl::Time now_ = absl::UnixEpoch();
  int64_t next_run_ = 1;
  std::map<int64_t, TestTemplate> templates_;
  std::deque<Ticket> open_;
  std::deque<int64_t> blocked_;
  std::vector<std::string> story_;
  bool is_over_ = false;
  int64_t launched_ = 0;
  int64_t launched_in_lists_ = 0;
};

// Of a run of one member in two groups: how many participations each list has, of parts with a dot.
class FindListsTest : public ::testing::Test {
 protected:
  FindListsTest() : run_(1, Epoch(1)) {
    run_.Slot(GroupId(0), 2, {0}, {});
    run_.Slot(GroupId(1), 2, {0}, {});
  }
  std::string Lists() {
    std::vector<std::string> texts;
    int32_t next = 0;
    for (const CallList& list : run_.Build().what->lists) {
      EXPECT_EQ(list.first, next);
      next += list.count;
      texts.push_back(absl::StrCat(list.count, list.by_parts ? "." : ""));
    }
    EXPECT_EQ(next, static_cast<int32_t>(run_.Build().what->participations.size()));
    return absl::StrJoin(texts, " ");
  }

  TestRun run_;
};

TEST_F(FindListsTest, CallsOfOneGroupInARow) {
  for (const int slot : {0, 0, 0, 1, 0, 0}) run_.AllReduce(slot, 0);
  EXPECT_EQ(Lists(), "3 1 2");
}

TEST_F(FindListsTest, PartsOfOneCall) {
  for (const int part : {0, 0, 1, 2, 0, 0, 1}) run_.AllReduce(0, 0).part = part;
  EXPECT_EQ(Lists(), "1 3. 1 2.");
}

TEST_F(FindListsTest, NotWhatMoreMayBeAskedOfOrIsCompared) {
  for (int i = 0; i < 3; ++i) run_.AllReduce(0, 0);
  run_.AllReduce(0, 0).wants_grad = true;
  run_.AllReduce(0, 0).descriptor.runtime_counts = true;
  run_.AllReduce(0, 0).descriptor.dims = {Descriptor::kRowsDiffer};
  run_.SendTo(0, 0, 1);
  run_.SendTo(0, 0, 1);
  run_.GradientHere(1, 0, 0, 0);
  EXPECT_EQ(Lists(), "1 1 1 1 1 1 1 1 1");
}

// A cut takes as long as what is cut off, so a list may be asked for call by call.
TEST(SequencerListsTest, AListIsCutCallByCallInLittleWork) {
  constexpr int kCalls = 2048;
  constexpr int kRanks = 3;
  Sequencer sequencer(kRanks, {});
  Sequencer::Actions actions;
  int64_t work = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    TestRun run(rank + 1, Epoch(1));
    run.Slot(GroupId(0), kRanks, {rank}, {0});
    for (int i = 0; i < kCalls; ++i) run.AllReduce(0, rank).wants_grad = rank == kRanks - 1;
    const Vote& vote = run.Build();
    ASSERT_THAT(vote.what->lists, SizeIs(rank < kRanks - 1 ? 1 : kCalls));
    const WorkSlice slice;
    ASSERT_TRUE(sequencer.Submit(vote, absl::UnixEpoch(), &actions).ok());
    work = SliceWork();
  }
  EXPECT_GT(work, kCalls);
  sequencer.Advance(absl::UnixEpoch(), &actions);
  ASSERT_THAT(actions, SizeIs(1));
  EXPECT_THAT(actions[0].instances, SizeIs(kCalls));
  EXPECT_LE(work, 10 * kCalls);
}

TEST(SequencerListsTest, DecideAsCallsByThemselves) {
  const char* const asked = std::getenv("CHORUS_SEEDS");
  const uint32_t seeds = asked == nullptr ? 2000 : static_cast<uint32_t>(std::atoi(asked));
  const char* const from = std::getenv("CHORUS_SEED");
  const uint32_t first = from == nullptr ? 1 : static_cast<uint32_t>(std::atoi(from));
  int64_t launched = 0;
  int64_t launched_in_lists = 0;
  for (uint32_t seed = first; seed < first + seeds; ++seed) {
    SCOPED_TRACE(absl::StrCat("CHORUS_SEED=", seed));
    Twins twins(seed);
    for (int i = 0; i < 150 && !twins.is_over() && !::testing::Test::HasFailure(); ++i) {
      twins.Do();
    }
    if (::testing::Test::HasFailure()) return;
    launched += twins.launched();
    launched_in_lists += twins.launched_in_lists();
  }
  // Enough of both.
  EXPECT_GT(launched_in_lists, launched / 10);
  EXPECT_LT(launched_in_lists, launched);
}

}  // namespace
}  // namespace chorus
