#include "tests/model/enumeration.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/bytes.h"
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
  bool told = false;  // it has received the cause of `epoch`
  bool here = true;
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
  int64_t clock = 0;  // microseconds: every event has a time of its own
};

class Enumerator {
 public:
  explicit Enumerator(const ModelConfig& config) : config_(config) {}

  ModelResult Run() {
    SequencerOptions options;
    options.agree_timeout = absl::Seconds(60);
    options.exec_timeout = absl::Hours(1000);
    State start(options);
    for (size_t g = 1; g < config_.groups.size(); ++g) {
      std::vector<Rank> members;
      for (const int32_t rank : config_.groups[g]) members.push_back(Rank(rank));
      const auto group = start.sequencer.AddGroup(members[0], members);
      if (!group.ok() || *group != GroupId(static_cast<int32_t>(g))) result_.fault = "groups";
    }
    Visit(start);
    return result_;
  }

 private:
  using Kind = Event::Kind;

  absl::Time Now(const State& state) const { return absl::FromUnixMicros(state.clock); }

  // 128 bits of the canonical state: two states of millions meet by chance with odds of 10^-25.
  std::pair<uint64_t, uint64_t> Fingerprint(const State& state) const {
    ByteWriter out;
    for (const RankState& rank : state.ranks) {
      out.PutSigned(rank.next);
      out.PutSigned(state.sequencer.epoch().value() - rank.epoch.value());
      out.Put<uint8_t>(rank.told + 2 * rank.here);
    }
    out.PutString(state.sequencer.CanonicalState());
    out.PutString(state.oracle.Canonical());
    const XXH128_hash_t hash = XXH3_128bits(out.bytes().data(), out.size());
    return {hash.high64, hash.low64};
  }

  const ModelStep& Step(int rank, int step) const { return config_.programs[rank][step]; }

  // A gradient whose forward run failed, or was never asked for, is not asked for either.
  bool Skips(const State& state, int rank, int step) const {
    const auto usable = [&](int of) {
      const int64_t run = RunOf(rank, of);
      if (!state.oracle.Has(run)) return false;
      const Oracle::Status status = state.oracle.status(run);
      return status != Oracle::Status::kFailed;
    };
    for (const ModelPart& part : Step(rank, step).parts) {
      if (part.kind == ModelPart::Kind::kGradient && !usable(part.of_step)) return true;
    }
    for (const int32_t producer : Step(rank, step).producers) {
      if (!usable(producer)) return true;  // the client knows that its input has failed
    }
    return false;
  }

  std::vector<Event> Events(const State& state) const {
    std::vector<Event> events;
    for (int rank = 0; rank < kRanks; ++rank) {
      const RankState& at = state.ranks[rank];
      if (!at.here) continue;
      if (at.told) {
        events.push_back({Kind::kEnter, rank, 0, 0});
      } else if (at.next < static_cast<int>(config_.programs[rank].size())) {
        events.push_back({Kind::kStep, rank, at.next, 0});
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
    if (config_.expiry && state.sequencer.NextDeadline() != absl::InfiniteFuture()) {
      events.push_back({Kind::kExpire, 0, 0, 0});
    }
    for (const int64_t ticket : state.oracle.Unfinished()) {
      events.push_back({Kind::kFinish, 0, 0, ticket});
      if (config_.exec_failure) events.push_back({Kind::kExecFail, 0, 0, ticket});
    }
    return events;
  }

  // Where the rank stands in its latest run.
  std::string Place(const State& state, int rank) const {
    const RankState& at = state.ranks[rank];
    if (at.told) return "cause_received";
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

  // Submits the step's run; the keys that the oracle gets are counted here, by the program.
  std::string Submit(State* state, int rank, int step, Sequencer::Actions* actions) {
    const ModelStep& what = Step(rank, step);
    const Epoch epoch = state->ranks[rank].epoch;
    TestRun run(RunOf(rank, step), epoch);
    Oracle::Run record;
    record.epoch = epoch;
    record.externally_blocked = what.externally_blocked;
    if (what.externally_blocked) run.BlockExternally();
    // Ranks donate or not, as they like.
    record.donates = rank != 2;
    if (record.donates) run.Donate();
    for (const int32_t producer : what.producers) {
      run.producers().push_back(RunHandle(RunOf(rank, producer)));
      record.producers.push_back(RunOf(rank, producer));
    }
    // Everything that the rank has asked for before in this epoch.
    const auto count = [&](const std::function<bool(const Oracle::Part&)>& counts) {
      int64_t n = 0;
      for (int earlier = 0; earlier < step; ++earlier) {
        const int64_t id = RunOf(rank, earlier);
        if (!state->oracle.Has(id) || state->oracle.run(id).epoch != epoch) continue;
        for (const Oracle::Part& part : state->oracle.run(id).parts) n += counts(part);
      }
      for (const Oracle::Part& part : record.parts) n += counts(part);
      return n;
    };
    std::vector<int32_t> slots(config_.groups.size(), -1);
    for (const ModelPart& part : what.parts) {
      const std::vector<int32_t>& members = config_.groups[part.group];
      const auto place = [&](int32_t world_rank) {
        return static_cast<int32_t>(std::find(members.begin(), members.end(), world_rank) -
                                    members.begin());
      };
      const int32_t member = place(rank);
      const GroupId group(part.group);
      if (slots[part.group] < 0) {
        const int64_t base = count([&](const Oracle::Part& p) {
          return p.key.group == group && !p.key.is_pair() && !p.key.is_gradient();
        });
        slots[part.group] = run.Slot(group, static_cast<int32_t>(members.size()), {member}, {base});
      }
      Oracle::Part voted;
      voted.rank = rank;
      voted.all = members;
      voted.wants_grad = part.tape;
      voted.leads_to_collective = part.leads_to_collective;
      voted.leads_to_leaf = part.leads_to_leaf;
      voted.after = part.after;
      voted.key.group = group;
      voted.key.epoch = epoch;
      Participation* out = nullptr;
      switch (part.kind) {
        case ModelPart::Kind::kAllReduce:
          voted.key.index = count([&](const Oracle::Part& p) {
            return p.key.group == group && !p.key.is_pair() && !p.key.is_gradient();
          });
          out = &run.AllReduce(slots[part.group], member, part.after);
          break;
        case ModelPart::Kind::kSend:
        case ModelPart::Kind::kRecv: {
          const bool is_recv = part.kind == ModelPart::Kind::kRecv;
          voted.key.source = GroupRank(is_recv ? place(part.peer) : member);
          voted.key.destination = GroupRank(is_recv ? member : place(part.peer));
          InstanceKey pair = voted.key;
          voted.key.index = count([&](const Oracle::Part& p) {
            pair.index = p.key.index;
            return p.key == pair;
          });
          voted.all = {is_recv ? part.peer : rank, is_recv ? rank : part.peer};
          out = is_recv ? &run.RecvFrom(slots[part.group], member, place(part.peer))
                        : &run.SendTo(slots[part.group], member, place(part.peer));
          break;
        }
        case ModelPart::Kind::kGradient:
        case ModelPart::Kind::kGradientHere: {
          const bool here = part.kind == ModelPart::Kind::kGradientHere;
          const InstanceKey forward =
              here ? record.parts[part.of_part].key : KeyOf(*state, rank, part.of_step, 0);
          const int32_t request = static_cast<int32_t>(count([&](const Oracle::Part& p) {
            return p.key.is_gradient() && p.key.Parent() == forward;
          }));
          voted.key = forward.Gradient(epoch, request);
          out = here ? &run.GradientHere(part.of_part, request, slots[part.group], member)
                     : &run.GradientOf(forward, request, slots[part.group], member);
          break;
        }
      }
      out->wants_grad = part.tape;
      out->leads_to_collective = part.leads_to_collective;
      out->leads_to_leaf = part.leads_to_leaf;
      if (part.other_shape) out->descriptor.dims = {5};
      record.parts.push_back(voted);
    }
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

  // Applies the event; what it was to each rank that it touched goes to the table of failpoints.
  std::string Take(const Event& event, State* state) {
    state->clock += 1;
    Sequencer::Actions actions;
    Sequencer& sequencer = state->sequencer;
    const bool was_pending = state->oracle.AnyPending();
    std::set<Reason> allowed;  // causes that this event may give an epoch
    const auto point = [&](int rank, const char* name) {
      result_.points.emplace(Place(*state, rank), name);
    };
    switch (event.kind) {
      case Kind::kStep: {
        RankState& rank = state->ranks[event.rank];
        rank.next = event.step + 1;
        const ModelStep& what = Step(event.rank, event.step);
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
        if (Skips(*state, event.rank, event.step)) return "";
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
        rank.epoch = Epoch(rank.epoch.value() + 1);
        rank.told = false;
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
        if (sequencer.NextDeadline() <= due) return "a deadline passed and nothing came of it";
        break;
      }
      case Kind::kFinish:
      case Kind::kExecFail: {
        const bool ok = event.kind == Kind::kFinish;
        for (int rank = 0; rank < kRanks; ++rank) {
          if (state->ranks[rank].here && Place(*state, rank) == "launched") {
            point(rank, ok ? "finish" : "exec_fail");
          }
        }
        state->oracle.Finished(event.ticket, ok);
        sequencer.Finished(
            Ticket(event.ticket),
            ok ? absl::OkStatus()
               : MakeError(absl::StatusCode::kInternal, Reason::kExecFailed, "device"),
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
        Error error;
        error.code = absl::StatusCode::kResourceExhausted;
        error.reason = Reason::kOutOfMemory;
        error.message = "no memory for that order";
        sequencer.Refuse(Rank(event.rank), state->ranks[event.rank].epoch, error, Now(*state),
                         &actions);
        allowed = {Reason::kPeerRefused};
        if (actions.empty()) return "a refusal did not end the epoch";
        break;
      }
    }

    for (const SequencerAction& action : actions) {
      if (action.kind == SequencerAction::Kind::kEpochEnded &&
          allowed.count(action.error.reason) == 0) {
        return absl::StrCat("the epoch ended with ", ReasonName(action.error.reason), ": ",
                            action.error.message);
      }
    }
    const std::string fault = state->oracle.Apply(actions, sequencer.epoch());
    if (!fault.empty()) return fault;
    for (const SequencerAction& action : actions) {
      if (action.kind != SequencerAction::Kind::kFail) continue;
      RankState& rank = state->ranks[(action.run.value() - 1) / kSteps];
      if (action.epoch == rank.epoch) rank.told = true;
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
    }
    return "";
  }

  void Visit(const State& state) {
    if (!result_.fault.empty() || !seen_.insert(Fingerprint(state)).second) return;
    ++result_.states;
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
    // The same, compiled: rank 1's run keeps no entry, rank 0's asks itself.
    ModelConfig config;
    config.name = "given_up_compiled";
    config.groups = nested;
    ModelPart here = All(0);
    here.kind = ModelPart::Kind::kGradientHere;
    here.of_part = 0;
    config.programs = {
        {Step({Taped(0), here}), Drop(0, true), Step({})},
        {Step({ToCollective(All(0)), here}), Step({})},
        {Step({ToLeaf(ToCollective(Taped(0)))}), Step({Gradient(0)}), Step({Gradient(0)})}};
    config.may_lose = true;
    configs.push_back(config);
  }
  {
    // Rank 0 compiled forward and backward into one run; double backward on the others.
    ModelConfig config;
    config.name = "double_backward";
    config.groups = nested;
    ModelPart first = All(0);
    first.kind = ModelPart::Kind::kGradientHere;
    first.of_part = 0;
    ModelPart second = first;
    second.of_part = 1;
    ModelPart kept = Gradient(0);
    kept.tape = true;
    config.programs = {{Step({All(0), first, second}), Step({}, {0})},
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
  return configs;
}

}  // namespace chorus
