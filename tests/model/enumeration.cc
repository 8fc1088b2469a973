#include "tests/model/enumeration.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/optional.h"
#include "core/base/bytes.h"
#include "core/base/work.h"
#include "core/collective/sequencer.h"
#include "core/collective/test_run.h"
#include "tests/model/oracle.h"
#include "xxhash.h"

namespace chorus {
namespace {

constexpr int kRanks = 3;
constexpr int kSteps = 8;  // room for numbering runs

int64_t RunOf(int rank, int step) { return rank * kSteps + step + 1; }

struct RankState {
  int next = 0;
  Epoch epoch{1};
  Epoch told;  // 0, or the epoch that it was told is open, with the cause of `epoch`
  bool here = true;
  bool out_of_line = false;  // until its next step
  int no_gradient = 0;       // what its first steps have recorded has no gradient any more
};

struct Event {
  enum class Kind : uint8_t {
    kStep,
    kEnter,
    kCancel,
    kDie,
    kLeave,
    kExpire,
    kFinish,
    kExecFail,
    kUnblock,
    kReserved,
    kRefuse,
    kRefuseCall,
    kLoseCalls,
    kLeaveOut,
    kLeaveStep,
    kRefusedThere,
  };
  Kind kind;
  int rank = 0;
  int step = 0;
  int64_t ticket = 0;
};

struct State {
  explicit State(const SequencerOptions& options) : sequencer(kRanks, options) {}
  Sequencer sequencer;
  Oracle oracle;
  RankState ranks[kRanks];
  int faults = 0;
  bool silent = false;              // others were not told of a fault
  std::map<int64_t, bool> refused;  // runs that were never made: whether the others were told
  int64_t clock = 0;                // microseconds: every event has a time of its own
};

// What a program calls the parts of its runs: that follows from the program alone.
struct Names {
  int64_t step = 0;
  std::vector<InstanceKey> keys;         // by part
  std::vector<int64_t> points;           // by part: which call of its group, over all steps
  std::map<int32_t, CallPosition> base;  // by group: of the first call of it
  std::vector<int64_t> pair_calls;
  std::vector<RefusedCalls> calls;  // all of them
};

class Enumerator {
 public:
  explicit Enumerator(const ModelConfig& config) : config_(config) {
    for (int rank = 0; rank < static_cast<int>(config.programs.size()); ++rank) Name(rank);
  }

  ModelResult Run() {
    SequencerOptions options;
    options.agree_timeout = absl::Seconds(60);
    options.exec_timeout = absl::Hours(1000);
    options.rows_per_event = 0;  // what is over must be hidden, not gone
    options.newest_pending = 1;  // some one by one, the others by their places
    State start(options);
    for (size_t g = 1; g < config_.groups.size(); ++g) {
      std::vector<Rank> members;
      for (const int32_t rank : config_.groups[g]) members.push_back(Rank(rank));
      const auto group = start.sequencer.AddGroup(members[0], members);
      if (!group.ok() || *group != GroupId(static_cast<int32_t>(g))) result_.fault = "groups";
    }
    for (size_t g = 0; g < config_.groups.size(); ++g) {
      start.oracle.SetGroup(GroupId(static_cast<int32_t>(g)), config_.groups[g]);
    }
    Visit(start);
    return result_;
  }

 private:
  using Kind = Event::Kind;

  absl::Time Now(const State& state) const { return absl::FromUnixMicros(state.clock); }
  // Something is left for another slice.
  bool GoesOn(const State& state) const {
    return config_.busy && state.sequencer.NextDeadline() <= Now(state);
  }

  // 128 bits of the canonical state: two states of millions meet by chance with odds of 10^-25.
  std::pair<uint64_t, uint64_t> Fingerprint(const State& state) const {
    ByteWriter out;
    for (const RankState& rank : state.ranks) {
      out.PutSigned(rank.next);
      out.PutSigned(state.sequencer.epoch().value() - rank.epoch.value());
      out.PutSigned(rank.told == Epoch() ? -1
                                         : state.sequencer.epoch().value() - rank.told.value());
      out.Put<uint8_t>(rank.here + 2 * rank.out_of_line);
      out.PutSigned(rank.no_gradient);
    }
    for (const auto& refused : state.refused) {
      out.PutSigned(refused.first);
      out.Put<uint8_t>(refused.second);
    }
    out.PutSigned(state.faults);
    out.Put<uint8_t>(state.silent);
    out.PutString(state.sequencer.CanonicalState());
    out.PutString(state.oracle.Canonical());
    const XXH128_hash_t hash = XXH3_128bits(out.bytes().data(), out.size());
    return {hash.high64, hash.low64};
  }

  const ModelStep& Step(int rank, int step) const { return config_.programs[rank][step]; }

  // Names the calls of a program: each is the k-th of its group, or of its end of a pair, in its
  // step, whatever becomes of it.
  void Name(int rank) {
    const std::vector<ModelStep>& program = config_.programs[rank];
    names_[rank].resize(program.size());
    int64_t step = 0;
    std::map<int32_t, CallPosition> next;
    std::map<int32_t, int64_t> points;
    std::map<std::pair<InstanceKey, bool>, int64_t> pairs;
    std::map<std::pair<InstanceKey, int64_t>, int64_t> requests;  // of an entry, in a step
    for (size_t s = 0; s < program.size(); ++s) {
      const ModelStep& what = program[s];
      if (what.begins >= 0) {
        step = what.begins;
        next.clear();
        pairs.clear();
      }
      Names& names = names_[rank][s];
      names.step = step;
      std::map<std::pair<InstanceKey, bool>, size_t> ends;  // of this run
      std::map<int32_t, size_t> refused;                    // by group: into names.calls
      for (const ModelPart& part : what.parts) {
        const std::vector<int32_t>& members = config_.groups[part.group];
        const auto rank_in_group = [&](int32_t world_rank) {
          return GroupRank(static_cast<int32_t>(
              std::find(members.begin(), members.end(), world_rank) - members.begin()));
        };
        CallPosition& at = next.emplace(part.group, CallPosition{step, 0, 0}).first->second;
        names.base.emplace(part.group, at);
        InstanceKey key;
        key.group = GroupId(part.group);
        key.since = Epoch(1);
        int64_t point = -1;
        switch (part.kind) {
          case ModelPart::Kind::kAllReduce: {
            if (part.part > 0) at = {step, at.call - 1, part.part};
            key.at = at;
            point = points[part.group]++;
            const auto first = refused.emplace(part.group, names.calls.size());
            if (first.second) {
              names.calls.emplace_back();
              names.calls.back().group = key.group;
              names.calls.back().first = at.call;
            }
            names.calls[first.first->second].next = at.call + 1;
            at = {step, at.call + 1, 0};
            break;
          }
          case ModelPart::Kind::kSend:
          case ModelPart::Kind::kRecv: {
            const bool is_recv = part.kind == ModelPart::Kind::kRecv;
            key.source = is_recv ? rank_in_group(part.peer) : rank_in_group(rank);
            key.destination = is_recv ? rank_in_group(rank) : rank_in_group(part.peer);
            int64_t& calls = pairs[{key, is_recv}];
            if (ends.emplace(std::make_pair(key, is_recv), names.calls.size()).second) {
              names.pair_calls.push_back(calls);
              names.calls.emplace_back();
              RefusedCalls& end = names.calls.back();
              end.group = key.group;
              end.source = key.source;
              end.destination = key.destination;
              end.is_recv = is_recv;
              end.first = calls;
            }
            names.calls[ends.at({key, is_recv})].next = calls + 1;
            key.at = {step, calls++, 0};
            break;
          }
          case ModelPart::Kind::kGradient:
          case ModelPart::Kind::kGradientHere: {
            const InstanceKey& forward = part.kind == ModelPart::Kind::kGradientHere
                                             ? names.keys[part.of_part]
                                             : names_[rank][part.of_step].keys[0];
            key = forward.Gradient({step, requests[{forward, step}]++});
            break;
          }
        }
        names.keys.push_back(key);
        names.points.push_back(config_.points ? point : -1);
      }
      if (what.goes_on) {
        for (const auto& base : names.base) {
          CallPosition& at = next.at(base.first);
          at = {step, at.call - 1, base.second.call == at.call - 1 ? base.second.part + 1 : 1};
        }
      }
    }
  }

  const Names& NamesOf(int rank, int step) const { return names_[rank][step]; }

  // Whether the rank knows that the run's inputs, or what it is to be a gradient of, have failed,
  // or were never asked for. `told`: the others have been told of the first of them.
  bool CannotCall(const State& state, int rank, int step, bool* told) const {
    const auto failed = [&](int of) {
      const int64_t run = RunOf(rank, of);
      *told = true;
      if (state.oracle.Has(run)) return state.oracle.status(run) == Oracle::Status::kFailed;
      const auto refused = state.refused.find(run);
      *told = refused != state.refused.end() && refused->second;
      return true;
    };
    for (const ModelPart& part : Step(rank, step).parts) {
      if (part.kind == ModelPart::Kind::kGradient && failed(part.of_step)) return true;
    }
    for (const int32_t producer : Step(rank, step).producers) {
      if (failed(producer)) return true;
    }
    // The pieces of a call end with the first that fails.
    return step > 0 && Step(rank, step - 1).goes_on && failed(step - 1);
  }

  // Whether a client that has not heard of the failures makes a run of it.
  bool MakesRun(const State& state, int rank, int step) const {
    const auto made = [&](int of) { return state.oracle.Has(RunOf(rank, of)); };
    for (const ModelPart& part : Step(rank, step).parts) {
      if (part.kind != ModelPart::Kind::kGradient) continue;
      // Of what was not launched there is no tape entry, and the run contradicts its rank's past.
      if (part.of_step < state.ranks[rank].no_gradient || !made(part.of_step)) return false;
      const Oracle::Status status = state.oracle.status(RunOf(rank, part.of_step));
      if (status == Oracle::Status::kFailed) return false;
    }
    for (const int32_t producer : Step(rank, step).producers) {
      if (!made(producer)) return false;
    }
    return step == 0 || !Step(rank, step - 1).goes_on;
  }

  std::vector<Event> Events(const State& state) const {
    std::vector<Event> events;
    for (int rank = 0; rank < kRanks; ++rank) {
      const RankState& at = state.ranks[rank];
      if (!at.here) continue;
      if (at.told != Epoch()) {
        events.push_back({Kind::kEnter, rank, 0, 0});
      } else if (at.next < static_cast<int>(config_.programs[rank].size())) {
        events.push_back({Kind::kStep, rank, at.next, 0});
        const ModelStep& what = Step(rank, at.next);
        const bool begins = what.begins >= 0;
        bool alone = false;
        if (config_.faults > 0 && (begins || !at.out_of_line) && !what.parts.empty() &&
            CannotCall(state, rank, at.next, &alone) && MakesRun(state, rank, at.next)) {
          events.push_back({Kind::kRefusedThere, rank, at.next, 0});
        }
        if (state.faults < config_.faults && at.no_gradient == 0 && what.drops < 0 &&
            !what.parts.empty() && (begins || !at.out_of_line) &&
            !CannotCall(state, rank, at.next, &alone)) {
          events.push_back({Kind::kRefuseCall, rank, at.next, 0});
          if (config_.lost_faults) events.push_back({Kind::kLoseCalls, rank, at.next, 0});
          if (config_.silent_faults) {
            events.push_back({Kind::kLeaveOut, rank, at.next, 0});
            events.push_back({Kind::kLeaveStep, rank, at.next, 0});
          }
        }
      }
      for (int step = 0; step < at.next; ++step) {
        const int64_t run = RunOf(rank, step);
        if (!state.oracle.Has(run)) continue;
        const Oracle::Run& record = state.oracle.run(run);
        const bool in_flight =
            record.status == Oracle::Status::kPending || record.status == Oracle::Status::kLaunched;
        if (config_.cancel && in_flight) events.push_back({Kind::kCancel, rank, step, 0});
        if (record.reserving && record.status == Oracle::Status::kPending) {
          events.push_back({Kind::kReserved, rank, step, 0});
          events.push_back({Kind::kRefuse, rank, step, 0});
        }
        if (record.externally_blocked && record.status == Oracle::Status::kPending) {
          events.push_back({Kind::kUnblock, rank, step, 0});
        }
      }
      if (config_.death) events.push_back({Kind::kDie, rank, 0, 0});
      if (config_.leave) events.push_back({Kind::kLeave, rank, 0, 0});
    }
    if (GoesOn(state) ||
        (config_.expiry && state.sequencer.NextDeadline() != absl::InfiniteFuture())) {
      events.push_back({Kind::kExpire, 0, 0, 0});
    }
    for (const int64_t ticket : state.oracle.Unfinished()) {
      events.push_back({Kind::kFinish, 0, 0, ticket});
      if (config_.exec_failure) events.push_back({Kind::kExecFail, 0, 0, ticket});
    }
    return events;
  }

  // Where the rank stands in its latest run.
  std::string StageOf(const State& state, int rank) const {
    const RankState& at = state.ranks[rank];
    if (at.told != Epoch()) return "cause_received";
    if (at.epoch < state.sequencer.epoch()) return "epoch_ended_unseen";
    for (int step = at.next - 1; step >= 0; --step) {
      const int64_t run = RunOf(rank, step);
      if (!state.oracle.Has(run)) continue;
      switch (state.oracle.status(run)) {
        case Oracle::Status::kPending:
          return state.oracle.LacksVotes(run) ? "voted_waiting" : "gang_blocked";
        case Oracle::Status::kLaunched:
          return "launched";
        case Oracle::Status::kPublished:
          return "published";
        case Oracle::Status::kFailed:
          return "entered_next_epoch";
      }
    }
    return "before_vote";
  }

  InstanceKey KeyOf(const State& state, int rank, int step, int part_index) const {
    return state.oracle.run(RunOf(rank, step)).parts[part_index].key;
  }

  // The step's run; the keys that the oracle gets are the program's own.
  void Make(const State& state, int rank, int step, TestRun* made, Oracle::Run* what_it_is) const {
    const ModelStep& what = Step(rank, step);
    const Names& names = NamesOf(rank, step);
    TestRun& run = *made;
    Oracle::Run& record = *what_it_is;
    const Epoch epoch = state.ranks[rank].epoch;
    record.epoch = epoch;
    record.externally_blocked = what.externally_blocked;
    if (what.externally_blocked) run.BlockExternally();
    // Ranks donate or not, as they like.
    record.donates = rank != 2;
    if (record.donates) run.Donate();
    record.goes_on = what.goes_on;
    run.vote().call_goes_on = what.goes_on;
    run.vote().pair_calls.assign(names.pair_calls.begin(), names.pair_calls.end());
    for (const int32_t producer : what.producers) {
      run.producers().push_back(RunHandle(RunOf(rank, producer)));
      record.producers.push_back(RunOf(rank, producer));
    }
    std::vector<int32_t> slots(config_.groups.size(), -1);
    for (size_t i = 0; i < what.parts.size(); ++i) {
      const ModelPart& part = what.parts[i];
      const std::vector<int32_t>& members = config_.groups[part.group];
      const auto rank_in_group = [&](int32_t world_rank) {
        return static_cast<int32_t>(std::find(members.begin(), members.end(), world_rank) -
                                    members.begin());
      };
      const int32_t member = rank_in_group(rank);
      if (slots[part.group] < 0) {
        slots[part.group] =
            run.Slot(GroupId(part.group), static_cast<int32_t>(members.size()), {member}, {0});
        run.vote().groups.back().base[0] = names.base.at(part.group);
      }
      Oracle::Part voted;
      voted.rank = rank;
      voted.all = members;
      voted.point = names.points[i];
      voted.shape = part.other_shape ? 1 : 0;
      voted.wants_grad = part.tape;
      voted.leads_to_collective = part.leads_to_collective;
      voted.leads_to_leaf = part.leads_to_leaf;
      voted.after = part.after;
      voted.key = names.keys[i];
      Participation* out = nullptr;
      switch (part.kind) {
        case ModelPart::Kind::kAllReduce:
          out = &run.AllReduce(slots[part.group], member, part.after);
          out->part = part.part;
          break;
        case ModelPart::Kind::kSend:
        case ModelPart::Kind::kRecv:
          voted.is_recv = part.kind == ModelPart::Kind::kRecv;
          voted.all = {voted.is_recv ? part.peer : rank, voted.is_recv ? rank : part.peer};
          out = voted.is_recv ? &run.RecvFrom(slots[part.group], member, rank_in_group(part.peer))
                              : &run.SendTo(slots[part.group], member, rank_in_group(part.peer));
          break;
        case ModelPart::Kind::kGradient:
        case ModelPart::Kind::kGradientHere: {
          const auto request = static_cast<int32_t>(voted.key.path.back().number);
          out = part.kind == ModelPart::Kind::kGradientHere
                    ? &run.GradientHere(part.of_part, request, slots[part.group], member)
                    : &run.GradientOf(voted.key.Parent(), request, slots[part.group], member);
          break;
        }
      }
      out->wants_grad = part.tape;
      out->leads_to_collective = part.leads_to_collective;
      out->leads_to_leaf = part.leads_to_leaf;
      if (part.other_shape) out->descriptor.dims = {5};
      record.parts.push_back(voted);
    }
  }

  std::string Submit(State* state, int rank, int step, Sequencer::Actions* actions) {
    const Epoch epoch = state->ranks[rank].epoch;
    TestRun run(RunOf(rank, step), epoch, NamesOf(rank, step).step);
    Oracle::Run record;
    Make(*state, rank, step, &run, &record);
    const Vote& vote = run.Build();
    if (epoch == state->sequencer.epoch()) {
      const auto keys = state->sequencer.Resolve(vote);
      if (!keys.ok()) return keys.status().ToString();
      for (size_t i = 0; i < record.parts.size(); ++i) {
        if ((*keys)[i] != record.parts[i].key) {
          return absl::StrCat("part ", i, " is counted as ", (*keys)[i].ToString(), "; it is ",
                              record.parts[i].key.ToString());
        }
      }
    }
    state->oracle.Submitted(RunOf(rank, step), std::move(record));
    const absl::Status status = state->sequencer.Submit(vote, Now(*state), actions);
    return status.ok() ? "" : status.ToString();
  }

  // The rank makes no run of its next step (and of what else it belongs to), and says so.
  void Refuse(State* state, int rank, bool rest_of_step, bool alone, Sequencer::Actions* actions) {
    RankState& at = state->ranks[rank];
    RefusedMember refused;
    refused.rank = Rank(rank);
    refused.rest_of_step = rest_of_step;
    refused.step = NamesOf(rank, at.next).step;
    if (!rest_of_step) refused.calls = NamesOf(rank, at.next).calls;
    // Which gradients it would have asked for is not known in general.
    for (const ModelPart& part : Step(rank, at.next).parts) {
      refused.drops_tapes |= part.kind == ModelPart::Kind::kGradient;
    }
    if (refused.drops_tapes) at.no_gradient = at.next;
    if (rest_of_step) at.out_of_line = true;
    do {
      state->refused[RunOf(rank, at.next)] = true;
    } while (Step(rank, at.next++).goes_on);
    Error why(Reason::kBadType);
    why.message = "a batch of 31 rows";
    why.alone = alone;
    state->oracle.Refused({refused}, at.epoch, alone);
    state->sequencer.Refuse({refused}, at.epoch, why, Now(*state), actions);
    // The rank waits for the outcome, and goes on in the open epoch.
    at.epoch = state->sequencer.epoch();
  }

  // Applies the event; what it was to each rank that it touched goes to the table of failpoints.
  std::string Take(const Event& event, State* state) {
    state->clock += 1;
    Sequencer::Actions actions;
    Sequencer& sequencer = state->sequencer;
    const bool was_pending = state->oracle.AnyPending();
    std::set<Reason> allowed;  // causes that this event may give an epoch
    absl::optional<WorkSlice> slice;
    if (config_.busy && event.kind != Kind::kExpire) {
      slice.emplace();
      CountWork(kTurnWork + 1);
    }
    const auto point = [&](int rank, const char* name) {
      result_.points.emplace(StageOf(*state, rank), name);
    };
    switch (event.kind) {
      case Kind::kStep: {
        RankState& rank = state->ranks[event.rank];
        const ModelStep& what = Step(event.rank, event.step);
        if (what.begins >= 0) rank.out_of_line = false;
        bool has_gradient = true;
        for (const ModelPart& part : what.parts) {
          has_gradient &=
              part.kind != ModelPart::Kind::kGradient || part.of_step >= rank.no_gradient;
        }
        // The others know that it does not take part.
        const bool nothing_to_say =
            rank.out_of_line || (!has_gradient && NamesOf(event.rank, event.step).calls.empty());
        if (nothing_to_say && what.drops < 0) {
          state->refused[RunOf(event.rank, event.step)] = true;
          ++rank.next;
          return "";
        }
        bool alone = false;
        if (what.drops < 0 &&
            (!has_gradient || CannotCall(*state, event.rank, event.step, &alone))) {
          if (what.parts.empty()) {
            state->refused[RunOf(event.rank, event.step)] = alone;
            ++rank.next;
            return "";
          }
          Refuse(state, event.rank, false, alone, &actions);
          allowed = {Reason::kPeerRefused};
          break;
        }
        rank.next = event.step + 1;
        if (what.drops >= 0) {
          const int64_t of = RunOf(event.rank, what.drops);
          if (!state->oracle.Has(of)) return "";
          point(event.rank, "drop_tape");
          const InstanceKey key = KeyOf(*state, event.rank, what.drops, 0);
          state->oracle.Dropped(event.rank, key, what.consumed, rank.epoch);
          sequencer.DropTape(Rank(event.rank), key, what.consumed, rank.epoch, Now(*state),
                             &actions);
          allowed = {Reason::kTapeConsumed};
          if (config_.may_lose) allowed.insert(Reason::kGradientLost);
          break;
        }
        rank.next = event.step;
        point(event.rank, "vote");
        rank.next = event.step + 1;
        const std::string fault = Submit(state, event.rank, event.step, &actions);
        if (!fault.empty()) return fault;
        allowed = {Reason::kNeedsReform, Reason::kPeerLeft, Reason::kTapeConsumed};
        if (config_.may_mismatch) allowed.insert(Reason::kMismatch);
        if (config_.may_circle) allowed.insert(Reason::kOrderCycle);
        if (config_.may_lose) allowed.insert(Reason::kGradientLost);
        break;
      }
      case Kind::kEnter: {
        RankState& rank = state->ranks[event.rank];
        point(event.rank, "enter");
        rank.epoch = rank.told;
        rank.told = Epoch();
        break;
      }
      case Kind::kCancel:
        point(event.rank, "cancel");
        sequencer.Cancel(RunHandle(RunOf(event.rank, event.step)), Rank(event.rank), Now(*state),
                         &actions);
        if (state->oracle.status(RunOf(event.rank, event.step)) == Oracle::Status::kPending) {
          allowed = {Reason::kCancelled};
          if (actions.empty()) return "cancel of a pending run did nothing";
        } else if (!actions.empty()) {
          return "cancel of a launched run did something";
        }
        break;
      case Kind::kDie:
        point(event.rank, "die");
        state->ranks[event.rank].here = false;
        sequencer.Dead(Rank(event.rank), "its process ended", Now(*state), &actions);
        allowed = {Reason::kPeerDied};
        if (actions.empty()) return "a death did not end the epoch";
        break;
      case Kind::kLeave:
        point(event.rank, "leave");
        state->ranks[event.rank].here = false;
        state->oracle.Left(event.rank);
        sequencer.Left(Rank(event.rank), Now(*state), &actions);
        allowed = {Reason::kPeerLeft};
        if (config_.may_lose) allowed.insert(Reason::kGradientLost);
        break;
      case Kind::kExpire: {
        for (int rank = 0; rank < kRanks; ++rank) {
          if (state->ranks[rank].here) point(rank, "expire");
        }
        // A deadline may have passed already while another one was waited for.
        const absl::Time due = std::max(sequencer.NextDeadline(), Now(*state));
        if (due > Now(*state)) sequencer.Advance(due - absl::Microseconds(1), &actions);
        if (!actions.empty()) return "it expired before its deadline";
        sequencer.Advance(due, &actions);
        state->clock = absl::ToUnixMicros(due);
        allowed = {Reason::kAgreeTimeout, Reason::kExecTimeout};
        if (config_.may_mismatch) allowed.insert(Reason::kMismatch);
        // Where slices had no time for it, only now.
        if (config_.busy && config_.may_circle) allowed.insert(Reason::kOrderCycle);
        if (config_.busy && config_.may_lose) allowed.insert(Reason::kGradientLost);
        if (sequencer.NextDeadline() <= due) return "a deadline passed and nothing came of it";
        break;
      }
      case Kind::kFinish:
      case Kind::kExecFail: {
        const bool ok = event.kind == Kind::kFinish;
        for (int rank = 0; rank < kRanks; ++rank) {
          if (state->ranks[rank].here && StageOf(*state, rank) == "launched") {
            point(rank, ok ? "finish" : "exec_fail");
          }
        }
        state->oracle.Finished(event.ticket, ok);
        sequencer.Finished(Ticket(event.ticket),
                           ok ? absl::OkStatus() : MakeError(Reason::kExecFailed, "device"),
                           Now(*state), &actions);
        allowed = {Reason::kExecFailed};
        if (ok && !actions.empty()) return "a gang that finished well had consequences";
        break;
      }
      case Kind::kUnblock: {
        point(event.rank, "unblock");
        const int64_t run = RunOf(event.rank, event.step);
        state->oracle.Unblocked(run);
        sequencer.Unblock(RunHandle(run), Now(*state), &actions);
        if (config_.may_circle) allowed.insert(Reason::kOrderCycle);
        break;
      }
      case Kind::kReserved: {
        const int64_t run = RunOf(event.rank, event.step);
        state->oracle.Reserved(run);
        sequencer.Reserved(RunHandle(run), Now(*state), &actions);
        break;
      }
      case Kind::kRefuse: {
        Error error(Reason::kOutOfMemory);
        error.message = "no memory for that order";
        // Its calls have counted already.
        std::vector<RefusedMember> members(1);
        members[0].rank = Rank(event.rank);
        members[0].step = NamesOf(event.rank, event.step).step;
        state->oracle.Refused(members, state->ranks[event.rank].epoch, false);
        sequencer.Refuse(members, state->ranks[event.rank].epoch, error, Now(*state), &actions);
        allowed = {Reason::kPeerRefused};
        break;
      }
      case Kind::kRefusedThere: {
        // The rank runs ahead: the daemon finds that its input has failed.
        RankState& rank = state->ranks[event.rank];
        if (Step(event.rank, event.step).begins >= 0) rank.out_of_line = false;
        TestRun run(RunOf(event.rank, event.step), rank.epoch,
                    NamesOf(event.rank, event.step).step);
        Oracle::Run record;
        Make(*state, event.rank, event.step, &run, &record);
        Error why;
        CannotCall(*state, event.rank, event.step, &why.alone);
        why.code = absl::StatusCode::kAborted;
        why.reason = Reason::kPeerRefused;
        why.message = "an input has failed";
        std::vector<RefusedMember> members = sequencer.CallsOf(run.Build());
        if (members.empty()) return "the calls of a run are not known";
        std::vector<InstanceKey> gradients;
        for (const Oracle::Part& part : record.parts) {
          if (part.key.is_gradient()) gradients.push_back(part.key);
        }
        std::vector<RefusedMember> counted(1);
        counted[0].rank = Rank(event.rank);
        counted[0].step = NamesOf(event.rank, event.step).step;
        counted[0].calls = NamesOf(event.rank, event.step).calls;
        state->oracle.Refused(counted, rank.epoch, why.alone, gradients);
        sequencer.Refuse(members, rank.epoch, why, Now(*state), &actions);
        allowed = {Reason::kPeerRefused};
        state->refused[RunOf(event.rank, event.step)] = true;
        bool root_alone = false;
        for (const int32_t producer : Step(event.rank, event.step).producers) {
          root_alone |= state->oracle.run(RunOf(event.rank, producer)).failed_alone;
        }
        ++rank.next;
        if (!root_alone && rank.epoch < sequencer.epoch()) rank.told = sequencer.epoch();
        break;
      }
      case Kind::kRefuseCall:
      case Kind::kLoseCalls:
        ++state->faults;
        if (Step(event.rank, event.step).begins >= 0) state->ranks[event.rank].out_of_line = false;
        Refuse(state, event.rank, event.kind == Kind::kLoseCalls, false, &actions);
        allowed = {Reason::kPeerRefused};
        break;
      case Kind::kLeaveOut:
      case Kind::kLeaveStep: {
        ++state->faults;
        state->silent = true;
        RankState& rank = state->ranks[event.rank];
        const bool all = event.kind == Kind::kLeaveStep;
        if (Step(event.rank, event.step).begins >= 0) rank.out_of_line = false;
        do {
          state->refused[RunOf(event.rank, rank.next)] = false;
          const bool goes_on = Step(event.rank, rank.next).goes_on;
          ++rank.next;
          if (!all && !goes_on) break;
        } while (rank.next < static_cast<int>(config_.programs[event.rank].size()) &&
                 Step(event.rank, rank.next).begins < 0);
        break;
      }
    }

    for (const SequencerAction& action : actions) {
      if (action.kind == SequencerAction::Kind::kEpochEnded &&
          allowed.count(action.error->reason) == 0) {
        return absl::StrCat("the epoch ended with ", ReasonName(action.error->reason), ": ",
                            action.error->message);
      }
    }
    const std::string fault =
        state->oracle.ApplyActions(actions, sequencer.epoch(), GoesOn(*state));
    if (!fault.empty()) return fault;
    for (const SequencerAction& action : OneByOne(actions)) {
      if (action.kind != SequencerAction::Kind::kFail) continue;
      RankState& rank = state->ranks[(action.run.value() - 1) / kSteps];
      if (action.open_epoch == Epoch()) ++result_.failed_alone;
      if (rank.epoch < action.open_epoch) rank.told = std::max(rank.told, action.open_epoch);
    }
    if (!config_.finish) {
      for (const int64_t ticket : state->oracle.Unfinished()) {
        state->oracle.Finished(ticket, true);
        Sequencer::Actions none;
        sequencer.Finished(Ticket(ticket), absl::OkStatus(), Now(*state), &none);
        if (!none.empty()) return "a gang that finished well had consequences";
      }
    }
    // Nothing waits for ever.
    if (state->oracle.AnyPending() && sequencer.NextDeadline() == absl::InfiniteFuture()) {
      return "a vote is pending and no deadline would end it";
    }
    if (event.kind == Kind::kExpire && was_pending && state->oracle.AnyPending()) {
      for (const SequencerAction& action : actions) {
        if (action.kind == SequencerAction::Kind::kEpochEnded) {
          return "a vote is pending after its epoch expired";
        }
      }
    }
    return "";
  }

  std::string EventText(const Event& event) const {
    switch (event.kind) {
      case Kind::kStep:
        return absl::StrCat("rank ", event.rank, " step ", event.step);
      case Kind::kEnter:
        return absl::StrCat("rank ", event.rank, " enters");
      case Kind::kCancel:
        return absl::StrCat("rank ", event.rank, " cancels step ", event.step);
      case Kind::kDie:
        return absl::StrCat("rank ", event.rank, " dies");
      case Kind::kLeave:
        return absl::StrCat("rank ", event.rank, " leaves");
      case Kind::kExpire:
        return "expiry";
      case Kind::kFinish:
        return absl::StrCat("ticket ", event.ticket, " finishes");
      case Kind::kExecFail:
        return absl::StrCat("ticket ", event.ticket, " fails");
      case Kind::kUnblock:
        return absl::StrCat("rank ", event.rank, " step ", event.step, " is unblocked");
      case Kind::kReserved:
        return absl::StrCat("rank ", event.rank, " is ready for the order of step ", event.step);
      case Kind::kRefuse:
        return absl::StrCat("rank ", event.rank, " refuses the order of step ", event.step);
      case Kind::kRefuseCall:
        return absl::StrCat("rank ", event.rank, " cannot make step ", event.step);
      case Kind::kLoseCalls:
        return absl::StrCat("rank ", event.rank, " is out of line at step ", event.step);
      case Kind::kLeaveOut:
        return absl::StrCat("rank ", event.rank, " leaves out step ", event.step);
      case Kind::kLeaveStep:
        return absl::StrCat("rank ", event.rank, " leaves at step ", event.step);
      case Kind::kRefusedThere:
        return absl::StrCat("rank ", event.rank, " runs ahead with step ", event.step);
    }
    return "";
  }

  // A rank that makes the same calls as the others, and says so where it does not, leaves none
  // waiting.
  std::string CheckEnd(const State& state) const {
    if (!config_.in_line || state.silent || GoesOn(state)) return "";
    for (int rank = 0; rank < kRanks; ++rank) {
      const RankState& at = state.ranks[rank];
      if (!at.here || at.told != Epoch() ||
          at.next < static_cast<int>(config_.programs[rank].size())) {
        return "";
      }
    }
    for (const int64_t run : state.oracle.Pending()) {
      if (state.oracle.LacksVotes(run)) {
        return absl::StrCat("every rank has made its calls, and run ", run, " waits for one");
      }
    }
    return "";
  }

  void Visit(const State& state) {
    if (!result_.fault.empty() || !seen_.insert(Fingerprint(state)).second) return;
    ++result_.states;
    const std::string left = CheckEnd(state);
    if (!left.empty()) {
      result_.fault = absl::StrCat(left, "\nafter: ", absl::StrJoin(path_, "; "));
      return;
    }
    bool published = true;
    for (int rank = 0; rank < kRanks; ++rank) {
      for (size_t step = 0; step < config_.programs[rank].size(); ++step) {
        if (Step(rank, step).drops >= 0) continue;
        const int64_t run = RunOf(rank, step);
        published = published && state.oracle.Has(run) &&
                    state.oracle.status(run) == Oracle::Status::kPublished;
      }
    }
    result_.all_published += published;
    for (const Event& event : Events(state)) {
      State next = state;
      ++result_.transitions;
      path_.push_back(EventText(event));
      const std::string fault = Take(event, &next);
      if (!fault.empty()) {
        result_.fault = absl::StrCat(fault, "\nafter: ", absl::StrJoin(path_, "; "));
        return;
      }
      Visit(next);
      if (!result_.fault.empty()) return;
      path_.pop_back();
    }
  }

  const ModelConfig& config_;
  std::vector<Names> names_[kRanks];  // by step
  ModelResult result_;
  absl::flat_hash_set<std::pair<uint64_t, uint64_t>> seen_;
  std::vector<std::string> path_;
};

ModelPart All(int32_t group) {
  ModelPart part;
  part.group = group;
  return part;
}
ModelPart Taped(int32_t group) {
  ModelPart part = All(group);
  part.tape = true;
  return part;
}
ModelPart ToCollective(ModelPart part) {
  part.leads_to_collective = true;
  return part;
}
ModelPart ToLeaf(ModelPart part) {
  part.leads_to_leaf = true;
  return part;
}
ModelPart Gradient(int32_t of_step, int32_t group = 0) {
  ModelPart part = All(group);
  part.kind = ModelPart::Kind::kGradient;
  part.of_step = of_step;
  return part;
}
// Of a part of the same step.
ModelPart GradientHere(int32_t of_part) {
  ModelPart part = All(0);
  part.kind = ModelPart::Kind::kGradientHere;
  part.of_part = of_part;
  return part;
}
ModelPart After(ModelPart part, std::vector<int32_t> after) {
  part.after = std::move(after);
  return part;
}
ModelPart To(int32_t peer) {
  ModelPart part;
  part.kind = ModelPart::Kind::kSend;
  part.peer = peer;
  return part;
}
ModelPart From(int32_t peer) {
  ModelPart part = To(peer);
  part.kind = ModelPart::Kind::kRecv;
  return part;
}
ModelStep Step(std::vector<ModelPart> parts, std::vector<int32_t> producers = {}) {
  ModelStep step;
  step.parts = std::move(parts);
  step.producers = std::move(producers);
  return step;
}
// The rank begins step `n` of its program with it.
ModelStep Begin(int64_t n, ModelStep step) {
  step.begins = n;
  return step;
}
ModelStep GoesOn(ModelStep step) {
  step.goes_on = true;
  return step;
}
ModelPart Further(int32_t group, int32_t part) {
  ModelPart further = All(group);
  further.part = part;
  return further;
}
ModelStep Drop(int32_t step, bool consumed) {
  ModelStep drop;
  drop.drops = step;
  drop.consumed = consumed;
  return drop;
}

}  // namespace

ModelResult Enumerate(const ModelConfig& config) { return Enumerator(config).Run(); }

std::vector<ModelConfig> ModelConfigs() {
  std::vector<ModelConfig> configs;
  const std::vector<std::vector<int32_t>> chain = {{0, 1, 2}, {0, 1}, {1, 2}};
  const std::vector<std::vector<int32_t>> nested = {{0, 1, 2}, {1, 0}};
  {
    // Two groups that share rank 1; every vote finds its partners.
    ModelConfig config;
    config.name = "chain";
    config.groups = chain;
    config.programs = {{Step({All(1)}), Step({All(1)}), Step({})},
                       {Step({All(1)}), Step({All(2)}), Step({All(1)})},
                       {Step({All(2)}), Step({}), Step({}, {0})}};
    config.finish = false;
    configs.push_back(config);
  }
  {
    // The world and a pair, asked for in different orders; rank 2 asks for one too many.
    ModelConfig config;
    config.name = "nested";
    config.groups = nested;
    config.programs = {{Step({All(0)}), Step({All(1)}), Step({All(0)})},
                       {Step({All(1)}), Step({All(0)}), Step({All(0)})},
                       {Step({All(0)}), Step({All(0)}), Step({All(0)})}};
    config.exec_failure = true;
    configs.push_back(config);
  }
  {
    // Runs with several instances, data dependences, producers. Ranks 0 and 1 compile differently.
    ModelConfig config;
    config.name = "compiled";
    config.groups = nested;
    config.programs = {
        {Step({All(1)}), Step({All(0)}, {0}), Step({All(1), After(All(0), {0})}, {1})},
        {Step({All(1), After(All(0), {0})}), Step({All(1)}, {0}), Step({All(0)}, {1})},
        {Step({All(0), All(0)}), Step({}, {0}), Step({}, {1})}};
    configs.push_back(config);
  }
  {
    // Rank 1 compiles what rank 0 calls one by one, with local runs between: these belong to the
    // gang. Key order alone would put the collectives the other way round.
    ModelConfig config;
    config.name = "local_between";
    config.groups = nested;
    config.programs = {{Step({All(1)}), Step({}, {0}), Step({}, {1}), Step({All(0)}, {2})},
                       {Step({All(1), All(0)})},
                       {Step({All(0)})}};
    configs.push_back(config);
  }
  {
    // Ranks 0 and 1 feed each group's result into the other group: a circle, unless something else
    // ends the epoch first.
    ModelConfig config;
    config.name = "circle";
    config.groups = {{0, 1, 2}, {0, 1}, {1, 0}};
    config.programs = {{Step({All(1)}), Step({All(2)}, {0}), Step({All(0)})},
                       {Step({All(2)}), Step({All(1)}, {0}), Step({All(0)}, {1})},
                       {Step({All(0)}), Step({}), Step({})}};
    config.may_circle = true;
    configs.push_back(config);
  }
  {
    // Circles inside a gang: the ranks' data dependences contradict each other.
    ModelConfig config;
    config.name = "inner_circle";
    config.groups = nested;
    config.programs = {{Step({All(1), After(All(0), {0})}), Step({All(0)}), Step({})},
                       {Step({All(0), After(All(1), {0})}), Step({All(0)}), Step({})},
                       {Step({All(0)}), Step({All(0)}), Step({})}};
    config.may_circle = true;
    configs.push_back(config);
  }
  {
    // Rank 2's second all_reduce has another shape.
    ModelConfig config;
    config.name = "mismatch";
    config.groups = nested;
    ModelPart other = All(0);
    other.other_shape = true;
    config.programs = {{Step({All(0)}), Step({All(0)}), Step({All(1)})},
                       {Step({All(0)}), Step({All(1)}), Step({All(0)})},
                       {Step({All(0)}), Step({other}), Step({All(0)})}};
    config.may_mismatch = true;
    configs.push_back(config);
  }
  {
    // Rank 0 runs forward and backward, rank 1 abandons its tape, rank 2 never held one.
    ModelConfig config;
    config.name = "abandoned";
    config.groups = nested;
    config.programs = {{Step({Taped(0)}), Step({Gradient(0)}, {0}), Drop(0, true), Step({All(1)})},
                       {Step({Taped(0)}), Drop(0, false), Step({All(1)})},
                       {Step({All(0)}), Step({}, {0})}};
    configs.push_back(config);
  }
  {
    // Two backwards on rank 0, one that consumes on rank 1, none on rank 2 until it drops.
    ModelConfig config;
    config.name = "consumed";
    config.groups = nested;
    config.programs = {{Step({Taped(0)}), Step({Gradient(0)}), Step({Gradient(0)})},
                       {Step({Taped(0)}), Step({Gradient(0)}), Drop(0, true), Step({})},
                       {Step({ToLeaf(Taped(0))}), Drop(0, false)}};
    config.leave = true;
    configs.push_back(config);
  }
  {
    // Rank 0 has compiled forward and backward into one run, which uses its entry up; rank 1 asks
    // once more than that, and rank 2 never held one.
    ModelConfig config;
    config.name = "used_up";
    config.groups = nested;
    config.programs = {{Step({Taped(0), GradientHere(0)}), Step({})},
                       {Step({Taped(0)}), Step({Gradient(0)}), Step({Gradient(0)})},
                       {Step({ToLeaf(All(0))}), Step({})}};
    configs.push_back(config);
  }
  {
    // Rank 1 gives up what led to another collective, rank 2 what led to a leaf; rank 0 asks.
    ModelConfig config;
    config.name = "given_up";
    config.groups = nested;
    config.programs = {{Step({Taped(0)}), Step({Gradient(0)}), Step({Gradient(0)})},
                       {Step({ToCollective(Taped(0))}), Step({Gradient(0)}), Drop(0, true)},
                       {Step({ToLeaf(Taped(0))}), Drop(0, false), Step({})}};
    config.leave = true;
    config.may_lose = true;
    configs.push_back(config);
  }
  {
    // The same, compiled: rank 1's run keeps no entry, rank 0's takes the gradient itself, and has
    // used its entry up when rank 2 asks again.
    ModelConfig config;
    config.name = "given_up_compiled";
    config.groups = nested;
    config.programs = {
        {Step({Taped(0), GradientHere(0)}), Step({}), Step({})},
        {Step({ToCollective(All(0)), GradientHere(0)}), Step({})},
        {Step({ToLeaf(ToCollective(Taped(0)))}), Step({Gradient(0)}), Step({Gradient(0)})}};
    config.may_lose = true;
    configs.push_back(config);
  }
  {
    // Rank 0 compiled forward and backward into one run, which keeps nothing, though it records all
    // that it differentiates; double backward on the others.
    ModelConfig config;
    config.name = "double_backward";
    config.groups = nested;
    ModelPart first = GradientHere(0);
    first.tape = true;
    const ModelPart second = GradientHere(1);
    ModelPart kept = Gradient(0);
    kept.tape = true;
    config.programs = {{Step({Taped(0), first, second}), Step({}, {0})},
                       {Step({Taped(0)}), Step({kept}), Step({Gradient(1)}), Drop(0, false)},
                       {Step({Taped(0)}), Step({Gradient(0)}), Drop(0, true)}};
    configs.push_back(config);
  }
  {
    // Results of another world are waited for.
    ModelConfig config;
    config.name = "external";
    config.groups = chain;
    ModelStep blocked = Step({All(1)});
    blocked.externally_blocked = true;
    ModelStep blocked_local = Step({}, {0});
    blocked_local.externally_blocked = true;
    config.programs = {{blocked, Step({All(0)}, {0}), Step({All(1)})},
                       {Step({All(1)}), Step({All(0)}), Step({All(1)}, {1})},
                       {Step({All(0)}), blocked_local, Step({}, {1})}};
    configs.push_back(config);
  }
  {
    // Ranks 0 and 1 compile the same collectives in different orders: one of them must follow the
    // other's, or refuse to. Rank 2's second run waits for both.
    ModelConfig config;
    config.name = "reordered";
    config.groups = nested;
    config.programs = {{Step({All(1), All(0)}), Step({All(1), All(0)}, {0})},
                       {Step({All(0), All(1)}), Step({All(1), All(0)}, {0})},
                       {Step({All(0)}), Step({All(0)}, {0}), Step({}, {1})}};
    configs.push_back(config);
  }
  {
    // Messages beside collectives, and members that leave in an orderly way.
    ModelConfig config;
    config.name = "messages";
    config.groups = nested;
    config.programs = {{Step({To(1)}), Step({From(2)}), Step({To(1), All(1)})},
                       {Step({From(0)}), Step({To(2)}), Step({From(0), All(1)})},
                       {Step({To(0), From(1)}), Step({}, {0}), Step({})}};
    config.leave = true;
    config.finish = false;
    configs.push_back(config);
  }
  // In the ones that follow nobody dies, but calls cannot be made, are left out, and steps are
  // left.
  const auto with_faults = [&](const std::string& name, int faults) {
    ModelConfig config;
    config.name = name;
    config.groups = chain;
    config.cancel = false;
    config.death = false;
    config.finish = false;
    config.faults = faults;
    config.in_line = true;
    return config;
  };
  {
    // One step of two groups behind the other; eager on rank 0, compiled on the others.
    ModelConfig config = with_faults("steps", 1);
    config.programs = {
        {Begin(1, Step({All(1)})), Step({All(0)}), Begin(2, Step({All(1)})), Step({All(0)})},
        {Begin(1, Step({All(1), All(2)})), Step({All(0)}),
         Begin(2, Step({All(1), All(2), All(0)}))},
        {Begin(1, Step({All(2), All(0)})), Begin(2, Step({All(2)})), Step({All(0)})}};
    configs.push_back(config);
  }
  {
    // The same, shorter, with more that goes wrong.
    ModelConfig config = with_faults("two_faults", 2);
    config.programs = {{Begin(1, Step({All(1)})), Begin(2, Step({All(1)}))},
                       {Begin(1, Step({All(1), All(2)})), Begin(2, Step({All(1)})), Step({All(2)})},
                       {Begin(1, Step({All(2)})), Begin(2, Step({All(2)}))}};
    configs.push_back(config);
  }
  {
    // Without steps: results of one call go into the next.
    ModelConfig config = with_faults("counted", 2);
    config.lost_faults = false;
    config.programs = {{Step({All(1)}), Step({All(1)}, {0}), Step({All(0)})},
                       {Step({All(1)}), Step({All(2)}), Step({All(1)}, {1}), Step({All(0)})},
                       {Step({All(2)}), Step({All(0)}, {0})}};
    configs.push_back(config);
  }
  {
    // Gradients, two requests for one entry among them, over two steps.
    ModelConfig config = with_faults("requests", 1);
    config.programs = {
        {Step({Taped(0)}), Step({Gradient(0)}), Begin(1, Step({Gradient(0), Gradient(0)}))},
        {Step({Taped(0)}), Step({Gradient(0)}, {0}), Begin(1, Step({Gradient(0)})),
         Step({Gradient(0)})},
        {Step({Taped(0), All(2)}), Step({Gradient(0)}),
         Begin(1, Step({Gradient(0), Gradient(0)}))}};
    config.programs[1].insert(config.programs[1].begin() + 1, Step({All(2)}));
    config.programs[1][2] = Step({Gradient(0)});
    configs.push_back(config);
  }
  {
    // Gradients whose seeds come from another group, which may fail for itself.
    ModelConfig config = with_faults("seeds", 1);
    config.programs = {
        {Step({Taped(1)}), Step({Gradient(0, 1)}), Step({All(1)})},
        {Step({Taped(1)}), Step({All(2)}), Step({Gradient(0, 1)}, {1}), Step({All(2), All(1)})},
        {Step({All(2)}), Step({All(2)})}};
    configs.push_back(config);
  }
  {
    // Calls of several collectives: coalesced, and in pieces of which each is a run of its own.
    ModelConfig config = with_faults("parts", 2);
    config.lost_faults = false;
    config.groups = nested;
    config.programs = {
        {Step({All(0), Further(0, 1)}), GoesOn(Step({All(1)})), Step({All(1)}), Step({All(0)})},
        {Step({All(0), Further(0, 1)}), GoesOn(Step({All(1)})), Step({All(1), All(0)})},
        {Step({All(0), Further(0, 1)}), Step({All(0)}, {0})}};
    configs.push_back(config);
  }
  {
    // Rank 1 makes one collective where the others make two in a call, and one piece more.
    ModelConfig config = with_faults("unequal_parts", 0);
    config.groups = nested;
    config.in_line = false;
    config.points = false;
    config.programs = {
        {Step({All(0), Further(0, 1)}), GoesOn(Step({All(1)})), Step({All(1)}), Step({All(0)})},
        {Step({All(0)}), GoesOn(Step({All(1)})), GoesOn(Step({All(1)})), Step({All(1)}),
         Step({All(0)})},
        {Step({All(0), Further(0, 1)}), Step({All(0)}, {0})}};
    configs.push_back(config);
  }
  {
    // Messages are counted at each end, and go with their step.
    ModelConfig config = with_faults("messages_in_steps", 2);
    config.groups = nested;
    config.programs = {
        {Begin(1, Step({To(1)})), Step({From(2)}), Begin(2, Step({To(1), All(1)}))},
        {Begin(1, Step({From(0)})), Step({To(2)}), Begin(2, Step({From(0), All(1)}))},
        {Begin(1, Step({To(0), From(1)})), Begin(2, Step({}))}};
    configs.push_back(config);
  }
  {
    // A fault beside a death: what nobody can make any more waits for nobody.
    ModelConfig config = with_faults("fault_and_death", 1);
    config.death = true;
    config.expiry = false;
    config.in_line = false;
    config.programs = {{Step({All(1)}), Begin(1, Step({All(1)}))},
                       {Step({All(1)}), Begin(1, Step({All(1)})), Step({All(2)})},
                       {Begin(1, Step({All(2)}))}};
    configs.push_back(config);
  }
  return configs;
}

}  // namespace chorus
