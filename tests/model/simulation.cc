#include "tests/model/simulation.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/collective/sequencer.h"
#include "core/collective/test_run.h"
#include "tests/model/oracle.h"

namespace chorus {
namespace {

constexpr int kFaultyEpochs =
    10;                     // later ones are left in peace, so that the world comes to an end
constexpr int kRounds = 4;  // scripts that a world works off without a failure
constexpr double kAgreeTimeout = 60;
constexpr double kExecTimeout = 300;

// One collective of the script that all ranks follow.
struct Op {
  int32_t group = 0;
  int32_t gradient_of = -1;  // an earlier op of the script
};

struct Script {
  std::vector<Op> ops;
  double compiled = 0;   // chance that a rank compiles an op together with those that follow
  double consuming = 0;  // chance that a run consumes the result of the one before
};

class Simulation {
 public:
  Simulation(uint64_t seed, int ranks)
      : random_(seed), size_(ranks), sequencer_(ranks, Options()), ranks_(ranks) {}

  SimulationResult Run() {
    oracle_.set_check_pending(false);  // hundreds are pending: Obey looks at them now and then
    groups_.resize(1);
    for (int32_t rank = 0; rank < size_; ++rank) groups_[0].push_back(rank);
    for (int g = 0; g < 12; ++g) {
      std::vector<int32_t> members = groups_[0];
      std::shuffle(members.begin(), members.end(), random_);
      members.resize(2 + random_() % 12);
      AddGroup(members);
    }
    for (int32_t rank = 0; rank < size_; ++rank) Think(rank);
    Later(Uniform(0.05, 0.5), [this] { Disturb(); });
    while (result_.fault.empty()) {
      // The sequencer's own deadlines come in between.
      const absl::Time deadline = sequencer_.NextDeadline();
      if (queue_.empty() && deadline == absl::InfiniteFuture()) break;
      if (queue_.empty() || deadline < At(queue_.top().time)) {
        now_ = std::max(now_, absl::ToDoubleSeconds(deadline - absl::UnixEpoch()));
        Sequencer::Actions actions;
        sequencer_.Advance(deadline, &actions);
        if (actions.empty() && sequencer_.NextDeadline() <= deadline) {
          result_.fault = "a deadline passed and nothing came of it";
        }
        Obey(actions);
        continue;
      }
      const Item item = queue_.top();
      queue_.pop();
      now_ = item.time;
      if (now_ > 20000) {
        result_.fault = "the world does not come to an end";
        break;
      }
      item.what();
      if (AllDone()) break;
    }
    if (result_.fault.empty() && !AllDone()) result_.fault = "nothing more happens, and ranks wait";
    result_.epochs = sequencer_.epoch().value();
    return result_;
  }

 private:
  struct Item {
    double time;
    int64_t order;
    std::function<void()> what;
    bool operator<(const Item& other) const {
      return std::make_pair(other.time, other.order) < std::make_pair(time, order);
    }
  };

  // A run as its rank planned it.
  struct Planned {
    std::vector<int32_t> ops;    // of the script
    std::vector<int32_t> drops;  // ops whose tape entry is dropped afterwards
    bool consumed = false;
  };

  struct RankState {
    bool here = true;
    bool done = false;
    bool stalled = false;
    Epoch epoch{1};
    int round = 0;
    bool planned = false;
    std::deque<Planned> plan;
    std::map<int32_t, int64_t> asked;     // by group, in this epoch
    std::map<int32_t, InstanceKey> keys;  // by op of this round's script
    std::set<int32_t> tapes;              // ops that it holds an entry for
    std::set<int64_t> under_way;
    int64_t last_run = 0;
    double last_sent = 0;  // messages of a rank, and to it, arrive in order
    double last_received = 0;
    int generation = 0;  // of its thoughts: old ones are void
  };

  static SequencerOptions Options() {
    SequencerOptions options;
    options.agree_timeout = absl::Seconds(kAgreeTimeout);
    options.exec_timeout = absl::Seconds(kExecTimeout);
    return options;
  }

  absl::Time At(double seconds) const { return absl::UnixEpoch() + absl::Seconds(seconds); }
  absl::Time Now() const { return At(now_); }
  double Uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(random_() >> 11) * 0x1.0p-53;
  }
  bool Chance(double probability) { return Uniform(0, 1) < probability; }
  bool Faulty() const { return sequencer_.epoch().value() <= kFaultyEpochs; }

  void Later(double delay, std::function<void()> what) {
    queue_.push({now_ + delay, next_order_++, std::move(what)});
  }
  // A message takes its time, and each loss costs a retransmission; order is kept.
  double Arrival(double* last) {
    double at = now_ + Uniform(0.0001, 0.005);
    while (Chance(0.1)) at += 0.05;
    *last = std::max(*last + 1e-9, at);
    return *last - now_;
  }
  void ToDaemon(int32_t rank, std::function<void()> what) {
    Later(Arrival(&ranks_[rank].last_sent), std::move(what));
  }
  void ToRank(int32_t rank, std::function<void()> what) {
    Later(Arrival(&ranks_[rank].last_received), std::move(what));
  }

  int32_t AddGroup(const std::vector<int32_t>& members) {
    std::vector<Rank> list;
    for (const int32_t member : members) list.push_back(Rank(member));
    const auto group = sequencer_.AddGroup(list[0], list);
    if (!group.ok() || group->value() != static_cast<int32_t>(groups_.size())) {
      result_.fault = "groups are not numbered as asked for";
    }
    groups_.push_back(members);
    return static_cast<int32_t>(groups_.size()) - 1;
  }

  // What every rank works off in this round of this epoch. The last op joins all who are there, so
  // that nobody is through before all are.
  const Script& ScriptOf(Epoch epoch, int round) {
    const auto inserted = scripts_.emplace(std::make_pair(epoch.value(), round), Script());
    if (!inserted.second) return inserted.first->second;
    // From all eager to so much compiled that most of a script is one gang.
    inserted.first->second.compiled = std::vector<double>{0, 0.002, 0.02, 0.4}[random_() % 4];
    inserted.first->second.consuming = std::vector<double>{0, 0.1, 0.5}[random_() % 3];
    std::vector<Op>& script = inserted.first->second.ops;
    std::vector<int32_t> usable;
    for (size_t g = 0; g < groups_.size(); ++g) {
      bool all_here = true;
      for (const int32_t member : groups_[g]) all_here &= ranks_[member].here;
      if (all_here) usable.push_back(static_cast<int32_t>(g));
    }
    std::vector<int32_t> here;
    for (int32_t rank = 0; rank < size_; ++rank) {
      if (ranks_[rank].here) here.push_back(rank);
    }
    for (int i = 0; i < 60 && !usable.empty(); ++i) {
      Op op;
      op.group = usable[random_() % usable.size()];
      if (i > 0 && Chance(0.3)) {
        const int32_t forward = static_cast<int32_t>(random_() % i);
        bool asked = script[forward].gradient_of >= 0;
        for (const Op& other : script) asked |= other.gradient_of == forward;
        if (!asked) {
          op.gradient_of = forward;
          op.group = script[forward].group;
        }
      }
      script.push_back(op);
    }
    Op last;
    last.group = AddGroup(here);
    script.push_back(last);
    return inserted.first->second;
  }

  bool IsIn(int32_t rank, int32_t group) const {
    return std::find(groups_[group].begin(), groups_[group].end(), rank) != groups_[group].end();
  }

  // Cuts the rank's part of the script into runs; every rank cuts in its own way.
  void Plan(int32_t rank) {
    RankState& state = ranks_[rank];
    const Script& whole = ScriptOf(state.epoch, state.round);
    const std::vector<Op>& script = whole.ops;
    state.planned = true;
    state.plan.clear();
    state.keys.clear();
    state.tapes.clear();
    std::map<int32_t, bool> asks;  // forward op: it asks for the gradient, else drops its entry
    for (const Op& op : script) {
      if (op.gradient_of >= 0 && IsIn(rank, op.group) && Chance(0.8)) {
        state.tapes.insert(op.gradient_of);
        asks[op.gradient_of] = Chance(0.8);
      }
    }
    Planned run;
    size_t length = Chance(whole.compiled) ? 2 + random_() % 3 : 1;
    const auto flush = [&] {
      if (!run.ops.empty()) state.plan.push_back(run);
      run = Planned();
      length = Chance(whole.compiled) ? 2 + random_() % 3 : 1;
    };
    for (size_t i = 0; i < script.size(); ++i) {
      if (!IsIn(rank, script[i].group)) continue;
      const int32_t forward = script[i].gradient_of;
      if (forward >= 0) {
        if (state.tapes.count(forward) == 0) continue;
        if (!asks[forward]) {
          flush();
          Planned drop;
          drop.drops = {forward};
          state.plan.push_back(drop);
          continue;
        }
      }
      run.ops.push_back(static_cast<int32_t>(i));
      if (forward >= 0) {
        run.drops.push_back(forward);
        run.consumed = true;
      }
      if (run.ops.size() >= length) flush();
    }
    flush();
  }

  void Think(int32_t rank) {
    const int generation = ++ranks_[rank].generation;
    Later(Uniform(0.0001, 0.003), [this, rank, generation] {
      if (generation == ranks_[rank].generation) Act(rank);
    });
  }

  void Act(int32_t rank) {
    RankState& state = ranks_[rank];
    if (!state.here || state.done || state.stalled) return;
    if (!state.planned) Plan(rank);
    if (state.plan.empty()) {
      if (!state.under_way.empty()) return;  // the answers wake it
      state.planned = false;
      if (++state.round == kRounds) {
        state.done = true;
      } else {
        Think(rank);
      }
      return;
    }
    if (Faulty() && Chance(0.0001)) {  // a rank that sleeps for longer than the others wait
      state.stalled = true;
      Later(Uniform(10, 100), [this, rank] {
        ranks_[rank].stalled = false;
        Think(rank);
      });
      return;
    }
    const Planned planned = state.plan.front();
    state.plan.pop_front();
    if (!planned.ops.empty()) Send(rank, planned);
    for (const int32_t forward : planned.drops) {
      if (state.keys.count(forward) == 0) continue;
      const InstanceKey key = state.keys[forward];
      const Epoch epoch = state.epoch;
      const bool consumed = planned.consumed;
      ToDaemon(rank, [this, rank, key, epoch, consumed] {
        if (!ranks_[rank].here) return;
        Sequencer::Actions actions;
        oracle_.Dropped(rank, key, consumed, epoch);
        sequencer_.DropTape(Rank(rank), key, consumed, epoch, Now(), &actions);
        Obey(actions);
      });
    }
    Think(rank);
  }

  void Send(int32_t rank, const Planned& planned) {
    RankState& state = ranks_[rank];
    const Script& whole = ScriptOf(state.epoch, state.round);
    const std::vector<Op>& script = whole.ops;
    const int64_t id = next_run_++;
    auto run = std::make_shared<TestRun>(id, state.epoch);
    Oracle::Run record;
    record.epoch = state.epoch;
    if (state.last_run != 0 && Chance(whole.consuming)) {
      run->producers().push_back(RunHandle(state.last_run));
      record.producers.push_back(state.last_run);
    }
    if (Chance(0.02)) {
      run->BlockExternally();
      record.externally_blocked = true;
    }
    if (Chance(0.3)) {
      run->Donate();
      record.donates = true;
    }
    std::map<int32_t, int32_t> slots;
    std::map<int32_t, int32_t> places;  // op: its part of this run
    for (const int32_t i : planned.ops) {
      const Op& op = script[i];
      const std::vector<int32_t>& members = groups_[op.group];
      const int32_t member =
          static_cast<int32_t>(std::find(members.begin(), members.end(), rank) - members.begin());
      if (slots.count(op.group) == 0) {
        slots[op.group] = run->Slot(GroupId(op.group), static_cast<int32_t>(members.size()),
                                    {member}, {state.asked[op.group]});
      }
      const int32_t slot = slots[op.group];
      Oracle::Part part;
      part.rank = rank;
      part.all = members;
      if (!record.parts.empty() && Chance(0.5)) {
        part.after.push_back(static_cast<int32_t>(random_() % record.parts.size()));
      }
      Participation* out = nullptr;
      if (op.gradient_of < 0) {
        part.key.group = GroupId(op.group);
        part.key.epoch = state.epoch;
        part.key.index = state.asked[op.group]++;
        part.wants_grad = state.tapes.count(i) > 0;
        part.leads_to_collective = Faulty() && Chance(0.001);
        part.leads_to_leaf = Chance(0.3);
        state.keys[i] = part.key;
        out = &run->AllReduce(slot, member);
      } else {
        const InstanceKey forward = state.keys.at(op.gradient_of);
        part.key = forward.Gradient(state.epoch, 0);
        const auto here = places.find(op.gradient_of);
        out = here != places.end() ? &run->GradientHere(here->second, 0, slot, member)
                                   : &run->GradientOf(forward, 0, slot, member);
      }
      out->wants_grad = part.wants_grad;
      out->leads_to_collective = part.leads_to_collective;
      out->leads_to_leaf = part.leads_to_leaf;
      out->after = part.after;
      if (Faulty() && Chance(0.0001)) out->descriptor.dims = {5};
      places[i] = static_cast<int32_t>(record.parts.size());
      record.parts.push_back(std::move(part));
    }
    state.last_run = id;
    state.under_way.insert(id);
    ++result_.runs;
    ToDaemon(rank, [this, rank, id, run, record] { Arrive(rank, id, *run, record); });
    if (Faulty() && Chance(0.0002)) {
      Later(Uniform(0, 0.02), [this, rank, id] {
        ToDaemon(rank, [this, rank, id] {
          if (!ranks_[rank].here) return;
          Sequencer::Actions actions;
          sequencer_.Cancel(RunHandle(id), Rank(rank), Now(), &actions);
          Obey(actions);
        });
      });
    }
  }

  void Arrive(int32_t rank, int64_t id, TestRun run, const Oracle::Run& record) {
    if (!ranks_[rank].here) return;
    Sequencer::Actions actions;
    if (Faulty() && record.epoch == sequencer_.epoch() && Chance(0.0001)) {
      // The daemon has no memory for it: its rank is told, and so are the others.
      Error why;
      why.code = absl::StatusCode::kResourceExhausted;
      why.reason = Reason::kOutOfMemory;
      why.message = "no memory";
      sequencer_.Refuse(Rank(rank), record.epoch, why, Now(), &actions);
      Obey(actions);
      Answer(rank, id, record.epoch, false);
      return;
    }
    owner_[id] = {rank, now_};
    waiting_.emplace(now_, id);
    oracle_.Submitted(id, record);
    const absl::Status status = sequencer_.Submit(run.Build(), Now(), &actions);
    if (!status.ok()) {
      result_.fault = status.ToString();
      return;
    }
    Obey(actions);
    if (record.externally_blocked) {
      Later(Uniform(0, 0.02), [this, id] {
        if (oracle_.Has(id)) oracle_.Unblocked(id);
        Sequencer::Actions unblocked;
        sequencer_.Unblock(RunHandle(id), Now(), &unblocked);
        Obey(unblocked);
      });
    }
  }

  // Does what the sequencer said, after the oracle has judged it.
  void Obey(const Sequencer::Actions& actions) {
    if (!result_.fault.empty()) return;
    for (const SequencerAction& action : actions) {
      if (action.kind != SequencerAction::Kind::kLaunch) continue;
      for (const RunHandle run : action.runs)
        launched_owner_[action.ticket.value()].push_back(run.value());
    }
    result_.fault = oracle_.Apply(actions, sequencer_.epoch());
    if (!result_.fault.empty()) return;
    for (const SequencerAction& action : actions) {
      switch (action.kind) {
        case SequencerAction::Kind::kLaunch: {
          ++result_.gangs;
          for (const LaunchedInstance& instance : action.instances) {
            result_.absences += static_cast<int64_t>(instance.absent.size());
          }
          const int64_t ticket = action.ticket.value();
          if (Faulty() && Chance(0.001)) break;  // the device hangs: it never finishes
          const bool ok = !(Faulty() && Chance(0.001));
          Later(Uniform(0.0001, 0.005), [this, ticket, ok] { Finish(ticket, ok); });
          break;
        }
        case SequencerAction::Kind::kReserve: {
          const int64_t id = action.run.value();
          const Epoch epoch = action.epoch;
          const int32_t rank = owner_.at(id).first;
          const bool ok = !(Faulty() && Chance(0.01));
          Later(Uniform(0, 0.001), [this, id, rank, epoch, ok] {
            Sequencer::Actions then;
            if (ok) {
              if (oracle_.Has(id)) oracle_.Reserved(id);
              sequencer_.Reserved(RunHandle(id), Now(), &then);
            } else {
              sequencer_.Refuse(Rank(rank), epoch, Error(), Now(), &then);
            }
            Obey(then);
          });
          break;
        }
        case SequencerAction::Kind::kFail:
          Settled(action.run.value(), action.epoch, false);
          break;
        case SequencerAction::Kind::kEpochEnded:
          ++result_.causes[std::string(ReasonName(action.error.reason))];
          // Who was through starts again with the others: some of these may not have been.
          for (int32_t rank = 0; rank < size_; ++rank) {
            if (!ranks_[rank].done) continue;
            const Epoch ended = action.epoch;
            ToRank(rank, [this, rank, ended] {
              RankState& state = ranks_[rank];
              if (!state.done || state.epoch > ended) return;
              Enter(&state, Epoch(ended.value() + 1));
              Think(rank);
            });
          }
          break;
      }
    }
    // By agree_timeout a run is launched or has failed; by exec_timeout after that it is over.
    while (!waiting_.empty()) {
      const auto oldest = *waiting_.begin();
      if (owner_.count(oldest.second) == 0) {
        waiting_.erase(waiting_.begin());
        continue;
      }
      const bool pending = oracle_.status(oldest.second) == Oracle::Status::kPending;
      const double limit = pending ? kAgreeTimeout + 0.03 : kAgreeTimeout + kExecTimeout + 0.03;
      if (now_ > oldest.first + limit) {
        result_.fault = absl::StrCat("run ", oldest.second, " has no outcome after ",
                                     now_ - oldest.first, " s");
        return;
      }
      break;
    }
    if (++judged_ % 64 == 0 && result_.fault.empty()) {
      oracle_.Forget();
      result_.fault = oracle_.CheckPending();
    }
  }

  void Finish(int64_t ticket, bool ok) {
    const std::vector<int64_t> runs = launched_owner_[ticket];
    launched_owner_.erase(ticket);
    std::vector<Epoch> epochs;
    for (const int64_t run : runs) epochs.push_back(oracle_.run(run).epoch);
    oracle_.Finished(ticket, ok);
    Sequencer::Actions actions;
    sequencer_.Finished(Ticket(ticket),
                        ok ? absl::OkStatus()
                           : MakeError(absl::StatusCode::kInternal, Reason::kExecFailed, "device"),
                        Now(), &actions);
    Obey(actions);
    for (size_t i = 0; i < runs.size() && ok; ++i) Settled(runs[i], epochs[i], true);
  }

  void Settled(int64_t run, Epoch epoch, bool published) {
    const auto owner = owner_.find(run);
    if (owner == owner_.end()) {
      result_.fault = absl::StrCat("run ", run, " has a second outcome");
      return;
    }
    result_.published += published;
    const int32_t rank = owner->second.first;
    owner_.erase(owner);
    Answer(rank, run, epoch, published);
  }

  static void Enter(RankState* state, Epoch epoch) {
    state->epoch = epoch;
    state->round = 0;
    state->planned = false;
    state->plan.clear();
    state->asked.clear();
    state->last_run = 0;
    state->done = false;
  }

  void Answer(int32_t rank, int64_t run, Epoch epoch, bool published) {
    ToRank(rank, [this, rank, run, epoch, published] {
      RankState& state = ranks_[rank];
      state.under_way.erase(run);
      if (!published && epoch == state.epoch) {
        // It has received the cause and starts the next epoch's script.
        Enter(&state, Epoch(epoch.value() + 1));
      }
      if (!state.stalled) Think(rank);
    });
  }

  // Deaths and departures.
  void Disturb() {
    if (!Faulty()) return;
    const int32_t rank = static_cast<int32_t>(random_() % size_);
    if (ranks_[rank].here && gone_ < size_ / 4) {
      ++gone_;
      const bool dies = Chance(0.6);
      ranks_[rank].here = false;
      ++ranks_[rank].generation;
      Later(Uniform(0.001, 0.01), [this, rank, dies] {
        Sequencer::Actions actions;
        if (dies) {
          sequencer_.Dead(Rank(rank), "its process ended", Now(), &actions);
        } else {
          oracle_.Left(rank);
          sequencer_.Left(Rank(rank), Now(), &actions);
        }
        Obey(actions);
      });
    }
    Later(Uniform(0.1, 3), [this] { Disturb(); });
  }

  bool AllDone() const {
    for (const RankState& rank : ranks_) {
      if (rank.here && !rank.done) return false;
    }
    return true;
  }

  std::mt19937_64 random_;
  const int32_t size_;
  Sequencer sequencer_;
  Oracle oracle_;
  std::vector<RankState> ranks_;
  std::vector<std::vector<int32_t>> groups_;
  std::map<std::pair<int64_t, int>, Script> scripts_;
  std::priority_queue<Item> queue_;
  double now_ = 0;
  int64_t next_order_ = 0;
  int64_t next_run_ = 1;
  int64_t judged_ = 0;
  int gone_ = 0;
  std::map<int64_t, std::pair<int32_t, double>> owner_;  // runs without an outcome: rank, arrival
  std::set<std::pair<double, int64_t>> waiting_;         // the same by arrival
  std::map<int64_t, std::vector<int64_t>> launched_owner_;
  SimulationResult result_;
};

}  // namespace

SimulationResult Simulate(uint64_t seed, int ranks) { return Simulation(seed, ranks).Run(); }

}  // namespace chorus
