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
#include "absl/types/optional.h"
#include "core/base/work.h"
#include "core/collective/sequencer.h"
#include "core/collective/test_run.h"
#include "tests/model/oracle.h"

namespace chorus {
namespace {

constexpr int kOps = 24;  // of a step
constexpr int64_t kSteps = 32;
// Faults come where no rank is farther than this: behind them all must go well.
constexpr int64_t kFaultySteps = 10;
constexpr double kAgreeTimeout = 60;
constexpr double kExecTimeout = 300;
constexpr double kSlice = 0.001;
// A busy world needs no more of them for what one deadline asks for.
constexpr int kMostSlices = 1000;

// One collective of the script that all ranks follow.
struct Op {
  int32_t group = 0;
  int32_t gradient_of = -1;  // an earlier op of the script
};

struct Script {  // of a step
  std::vector<Op> ops;
  double compiled = 0;   // chance that a rank compiles an op together with those that follow
  double consuming = 0;  // chance that a run consumes the result of the one before
  double ahead = 0;      // chance that a rank begins the next step before all results are there
};

class Simulation {
 public:
  Simulation(uint64_t seed, int ranks, bool steps)
      : random_(seed),
        size_(ranks),
        with_steps_(steps),
        busy_(seed % 2 == 0),
        sequencer_(ranks, Options(seed)),
        ranks_(ranks) {}

  SimulationResult Run() {
    oracle_.set_check_pending(false);  // hundreds are pending: Obey looks at them now and then
    groups_.resize(1);
    for (int32_t rank = 0; rank < size_; ++rank) groups_[0].push_back(rank);
    for (int g = 0; g < 12; ++g) {
      std::vector<int32_t> members = groups_[0];
      std::shuffle(members.begin(), members.end(), random_);
      members.resize(std::min<size_t>(members.size(), 2 + random_() % 12));
      AddGroup(members);
    }
    oracle_.SetGroup(GroupId(0), groups_[0]);
    for (int32_t rank = 0; rank < size_; ++rank) {
      Begin(rank);
      Think(rank);
    }
    Later(Uniform(0.05, 0.5), [this] { Disturb(); });
    int unmoved = 0;  // times that it went on, and nothing came of it
    while (result_.fault.empty()) {
      // The sequencer's own deadlines come in between.
      const absl::Time deadline = sequencer_.NextDeadline();
      if (queue_.empty() && deadline == absl::InfiniteFuture()) break;
      // What is due at once may come behind other events, but not behind a pause.
      const bool waits =
          postponed_ && !queue_.empty() && queue_.top().time < now_ + kSlice && Chance(0.5);
      if (queue_.empty() || (deadline < At(queue_.top().time) && !waits)) {
        now_ = std::max(now_, absl::ToDoubleSeconds(deadline - absl::UnixEpoch()));
        Sequencer::Actions actions;
        {
          const Slice slice(this);
          sequencer_.Advance(Now(), &actions);
        }
        unmoved = actions.empty() && sequencer_.NextDeadline() <= deadline ? unmoved + 1 : 0;
        if (unmoved > (busy_ ? kMostSlices : 0)) {
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
    if (result_.fault.empty() && last_failure_ > last_disturbed_) {
      result_.fault = absl::StrCat("a run of step ", last_failure_,
                                   " failed; no fault was heard of behind step ", last_disturbed_);
    }
    result_.epochs = sequencer_.epoch().value();
    result_.failed_alone = oracle_.failed_alone();
    result_.calm_steps = kSteps - last_disturbed_;
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

  enum Why { kFault, kConsequence };

  struct RankState {
    bool here = true;
    bool done = false;
    bool stalled = false;
    Epoch epoch{1};
    int64_t step = 0;
    std::deque<Planned> plan;
    std::map<int32_t, int64_t> asked;     // by group, in this step
    std::map<int32_t, int64_t> requests;  // by op: gradients asked of it
    std::map<int32_t, InstanceKey> keys;  // by op of this step's script
    std::set<int32_t> tapes;              // ops that it holds an entry for
    bool out_of_line = false;
    bool no_gradients = false;  // in this step: what is recorded may have none any more
    std::set<int64_t> under_way;
    int64_t last_run = 0;
    double last_sent = 0;  // messages of a rank, and to it, arrive in order
    double last_received = 0;
    int generation = 0;  // of its thoughts: old ones are void
  };

  static SequencerOptions Options(uint64_t seed) {
    SequencerOptions options;
    options.agree_timeout = absl::Seconds(kAgreeTimeout);
    options.exec_timeout = absl::Seconds(kExecTimeout);
    options.rows_per_event = seed % 3;  // none: what is over must be hidden, not gone
    options.newest_pending = seed % 2 == 0 ? seed % 5 : options.newest_pending;
    return options;
  }

  absl::Time At(double seconds) const { return absl::UnixEpoch() + absl::Seconds(seconds); }
  absl::Time Now() const { return At(now_); }
  double Uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(random_() >> 11) * 0x1.0p-53;
  }
  // What an event can leave for another slice it may have to: all of it, or what follows a few
  // pieces.
  class Slice {
   public:
    explicit Slice(Simulation* simulation) {
      if (!simulation->busy_) return;
      slice_.emplace();
      if (!simulation->Chance(0.7)) return;
      CountWork(kTurnWork + 1 - static_cast<int64_t>(simulation->Uniform(0, 5)));
    }

   private:
    absl::optional<WorkSlice> slice_;
  };

  bool Chance(double probability) { return Uniform(0, 1) < probability; }
  // Faults come where no rank is far.
  bool Faulty() const { return last_step_ <= kFaultySteps; }
  // As often in a small world as in one of 64 ranks.
  bool Fails(double probability) { return Faulty() && Chance(probability * 64 / size_); }
  // The step that names have. Without steps the ranks count on, round after round.
  int64_t NameStep(int64_t step) const { return with_steps_ ? step : 0; }
  // Something has gone wrong that ranks may still suffer from in this step.
  void Disturbed(int64_t step) { last_disturbed_ = std::max(last_disturbed_, step); }

  void Later(double delay, std::function<void()> what) {
    queue_.push({now_ + delay, next_order_++, std::move(what)});
  }
  // Pieces whose rows differ; a member that is wrong contradicts each that is not.
  static void AskForRows(int32_t member, int32_t members, bool is_wrong, Descriptor* what) {
    what->kind = CollectiveKind::kAllToAll;
    what->reduction = Reduction::kNone;
    what->dims[0] = Descriptor::kRowsDiffer;
    for (int32_t peer = 0; peer < members; ++peer) {
      what->sends.push_back(3 * member + peer + (is_wrong ? 1 : 0));
      what->receives.push_back(3 * peer + member + (is_wrong ? 1 : 0));
    }
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
    if (group.ok()) oracle_.SetGroup(*group, members);
    groups_.push_back(members);
    return static_cast<int32_t>(groups_.size()) - 1;
  }

  // What every rank works off in this step. The last op joins all that are there.
  const Script& ScriptOf(int64_t step) {
    const auto inserted = scripts_.emplace(step, Script());
    if (!inserted.second) return inserted.first->second;
    // From all eager to so much compiled that most of a script is one gang.
    inserted.first->second.compiled = std::vector<double>{0, 0.002, 0.02, 0.4}[random_() % 4];
    inserted.first->second.consuming = std::vector<double>{0, 0.1, 0.5}[random_() % 3];
    inserted.first->second.ahead = std::vector<double>{0, 0.3, 0.8}[random_() % 3];
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
    for (int i = 0; i < kOps && !usable.empty(); ++i) {
      Op op;
      op.group = usable[random_() % usable.size()];
      if (i > 0 && Chance(0.3)) {
        const int32_t forward = static_cast<int32_t>(random_() % i);
        if (script[forward].gradient_of < 0) {
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

  // The rank begins its next step, and cuts its part of the script into runs; every rank cuts in
  // its own way.
  void Begin(int32_t rank) {
    RankState& state = ranks_[rank];
    state.plan.clear();
    if (state.step == kSteps) {
      state.done = true;
      return;
    }
    ++state.step;
    last_step_ = std::max(last_step_, state.step);
    if (with_steps_) state.asked.clear();
    state.requests.clear();
    state.keys.clear();
    state.tapes.clear();
    state.out_of_line = false;
    state.no_gradients = false;
    state.last_run = 0;
    const Script& whole = ScriptOf(state.step);
    const std::vector<Op>& script = whole.ops;
    std::map<int32_t, bool> asks;  // forward op: it asks for its gradients, else drops its entry
    std::map<int32_t, size_t> last;
    for (size_t i = 0; i < script.size(); ++i) {
      const int32_t forward = script[i].gradient_of;
      if (forward < 0 || !IsIn(rank, script[i].group)) continue;
      last[forward] = i;
      if (asks.count(forward) > 0 || !Chance(0.8)) continue;
      state.tapes.insert(forward);
      asks[forward] = Chance(0.8);
    }
    Planned run;
    std::vector<int32_t> abandoned;
    size_t length = Chance(whole.compiled) ? 2 + random_() % 3 : 1;
    const auto flush = [&] {
      if (!run.ops.empty()) state.plan.push_back(run);
      for (const int32_t forward : abandoned) {
        Planned drop;
        drop.drops = {forward};
        state.plan.push_back(drop);
      }
      run = Planned();
      abandoned.clear();
      length = Chance(whole.compiled) ? 2 + random_() % 3 : 1;
    };
    const auto is_here = [&run](int32_t op) {
      return std::find(run.ops.begin(), run.ops.end(), op) != run.ops.end();
    };
    // A run that takes a gradient of its own op uses the entry up: so it takes all of them.
    const auto may_end = [&](size_t i) {
      return std::none_of(run.ops.begin(), run.ops.end(), [&](int32_t op) {
        const int32_t forward = script[op].gradient_of;
        return forward >= 0 && is_here(forward) && last[forward] > i;
      });
    };
    for (size_t i = 0; i < script.size(); ++i) {
      if (!IsIn(rank, script[i].group)) continue;
      const int32_t forward = script[i].gradient_of;
      if (forward >= 0) {
        if (state.tapes.count(forward) == 0) continue;
        if (!asks[forward]) {
          abandoned.push_back(forward);
          if (may_end(i)) flush();
          continue;
        }
      }
      run.ops.push_back(static_cast<int32_t>(i));
      if (forward >= 0 && last[forward] == i && !is_here(forward)) {
        run.drops.push_back(forward);
        run.consumed = true;
      }
      if (run.ops.size() >= length && may_end(i)) flush();
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
    if (state.plan.empty()) {
      const bool waits = state.step == kSteps || state.under_way.size() > 512 ||
                         !Chance(ScriptOf(state.step).ahead);
      if (waits && !state.under_way.empty()) return;  // the answers wake it
      Begin(rank);
      Think(rank);
      return;
    }
    if (Fails(0.0001)) {  // a rank that sleeps for longer than the others wait
      state.stalled = true;
      Disturbed(state.step);
      Later(Uniform(10, 100), [this, rank] {
        ranks_[rank].stalled = false;
        Think(rank);
      });
      return;
    }
    if (with_steps_ && Fails(0.0003)) {  // it leaves the step, and says nothing
      Disturbed(state.step);
      Begin(rank);
      Think(rank);
      return;
    }
    const Planned planned = state.plan.front();
    state.plan.pop_front();
    if (!state.out_of_line && !planned.ops.empty() && Fails(0.0003)) {
      CannotCall(rank, planned, kFault);
      return;
    }
    if (state.out_of_line) {
      Think(rank);
      return;
    }
    if (!planned.ops.empty() && !Send(rank, planned)) return;
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

  // The rank cannot make the run: that is a mistake of its own, or for want of what has failed. It
  // says so, and waits for the answer.
  void CannotCall(int32_t rank, const Planned& planned, Why reason) {
    RankState& state = ranks_[rank];
    const std::vector<Op>& script = ScriptOf(state.step).ops;
    if (reason == kFault) Disturbed(state.step);
    RefusedMember refused;
    refused.rank = Rank(rank);
    refused.step = NameStep(state.step);
    refused.rest_of_step = reason == kFault && with_steps_ && Chance(0.3);
    for (const int32_t i : planned.ops) {
      const int32_t group = script[i].group;
      if (script[i].gradient_of >= 0) {
        refused.drops_tapes = true;
        continue;
      }
      RefusedCalls calls;
      calls.group = GroupId(group);
      calls.first = state.asked[group]++;
      calls.next = calls.first + 1;
      if (!refused.rest_of_step) refused.calls.push_back(calls);
    }
    state.out_of_line = refused.rest_of_step;
    if (refused.drops_tapes) state.no_gradients = true;
    const Epoch epoch = state.epoch;
    state.stalled = true;
    // Where others have been told of the failure already, no epoch ends for what comes of it.
    const bool alone = reason == kConsequence;
    const int64_t step = state.step;
    ToDaemon(rank, [this, rank, refused, epoch, step, alone] {
      if (!ranks_[rank].here) return;
      Error why(Reason::kBadType);
      why.message = "a batch of 31 rows";
      why.alone = alone;
      Sequencer::Actions actions;
      oracle_.Refused({refused}, epoch, alone);
      {
        const Slice slice(this);
        sequencer_.Refuse({refused}, epoch, why, Now(), &actions);
      }
      Obey(actions);
      const Epoch open = alone ? Epoch() : sequencer_.epoch();
      ToRank(rank, [this, rank, open, step] {
        ranks_[rank].stalled = false;
        Hear(rank, open);
        const bool leaves = with_steps_ && !ranks_[rank].done && Chance(0.5);
        if (leaves && ranks_[rank].step == step) Begin(rank);
        Think(rank);
      });
    });
  }

  // False: it needs what has failed, or has no gradient any more. It leaves the step, or says so
  // where there is none.
  bool Send(int32_t rank, const Planned& planned) {
    RankState& state = ranks_[rank];
    const Script& whole = ScriptOf(state.step);
    const std::vector<Op>& script = whole.ops;
    for (const int32_t i : planned.ops) {
      const int32_t forward = script[i].gradient_of;
      if (forward < 0 ||
          std::find(planned.ops.begin(), planned.ops.end(), forward) != planned.ops.end()) {
        continue;
      }
      const bool usable = !state.no_gradients && state.keys.count(forward) > 0 &&
                          failed_.count({rank, state.keys.at(forward)}) == 0;
      if (usable) continue;
      CannotCall(rank, planned, kConsequence);
      return false;
    }
    const int64_t id = next_run_++;
    auto run = std::make_shared<TestRun>(id, state.epoch, NameStep(state.step));
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
    std::map<int32_t, int32_t> part_of;  // op: its part of this run
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
        part.key.since = Epoch(1);
        part.key.at = {NameStep(state.step), state.asked[op.group]++, 0};
        part.point = state.step * 1000 + i;
        part.wants_grad = state.tapes.count(i) > 0;
        part.leads_to_collective = Fails(0.001);
        if (part.leads_to_collective) Disturbed(state.step);
        part.leads_to_leaf = Chance(0.3);
        state.keys[i] = part.key;
        out = &run->AllReduce(slot, member);
      } else {
        const InstanceKey forward = state.keys.at(op.gradient_of);
        const int64_t request = state.requests[op.gradient_of]++;
        part.key = forward.Gradient({NameStep(state.step), request});
        const auto here = part_of.find(op.gradient_of);
        const auto number = static_cast<int32_t>(request);
        out = here != part_of.end() ? &run->GradientHere(here->second, number, slot, member)
                                    : &run->GradientOf(forward, number, slot, member);
      }
      out->wants_grad = part.wants_grad;
      out->leads_to_collective = part.leads_to_collective;
      out->leads_to_leaf = part.leads_to_leaf;
      out->after = part.after;
      const bool is_wrong = Fails(0.0001);
      if (op.group % 2 == 1) {
        AskForRows(member, static_cast<int32_t>(members.size()), is_wrong, &out->descriptor);
      } else if (is_wrong) {
        out->descriptor.dims = {5};
      }
      if (is_wrong) {
        Disturbed(state.step);
        part.shape = 1;
      }
      part_of[i] = static_cast<int32_t>(record.parts.size());
      record.parts.push_back(std::move(part));
    }
    state.last_run = id;
    state.under_way.insert(id);
    steps_[id] = state.step;
    ++result_.runs;
    ToDaemon(rank, [this, rank, id, run, record] { Arrive(rank, id, *run, record); });
    if (Fails(0.0002)) {
      Disturbed(state.step);
      Later(Uniform(0, 0.02), [this, rank, id] {
        ToDaemon(rank, [this, rank, id] {
          if (!ranks_[rank].here) return;
          Sequencer::Actions actions;
          sequencer_.Cancel(RunHandle(id), Rank(rank), Now(), &actions);
          Obey(actions);
        });
      });
    }
    return true;
  }

  void Arrive(int32_t rank, int64_t id, TestRun run, const Oracle::Run& record) {
    if (!ranks_[rank].here) return;
    Sequencer::Actions actions;
    const Vote& vote = run.Build();
    // What its inputs have come to, the daemon knows.
    bool failed = false;
    bool alone = false;
    for (const int64_t producer : record.producers) {
      const auto found = failed_runs_.find(producer);
      if (found == failed_runs_.end()) continue;
      failed = true;
      alone = found->second;
    }
    // So is what has been found out about the collective that a gradient is asked of.
    if (record.epoch == sequencer_.epoch() && !failed) {
      const auto keys = sequencer_.Resolve(vote);
      failed = alone = !keys.ok() && ErrorOf(keys.status()).alone;
      bool gone = false;
      for (const Oracle::Part& part : record.parts) {
        gone |= part.key.is_gradient() && never_launched_.count({rank, part.key.Parent()}) > 0;
      }
      if (failed != gone) {
        result_.fault = absl::StrCat("a gradient is refused alone: ", failed,
                                     "; what it is a gradient of has failed: ", gone);
        return;
      }
    }
    const bool no_memory = Faulty() && record.epoch == sequencer_.epoch() && Chance(0.0001);
    if (failed || no_memory) {
      if (no_memory && !failed) Disturbed(ranks_[rank].step);
      Error why(Reason::kOutOfMemory);
      why.message = "no memory";
      why.alone = failed;
      std::vector<RefusedMember> members = sequencer_.CallsOf(vote);
      std::vector<InstanceKey> gradients;
      for (const Oracle::Part& part : record.parts) {
        if (part.key.is_gradient() && !IsOfThis(record, part.key.Parent())) {
          gradients.push_back(part.key);
        }
      }
      if (members.empty() || members[0].gradients.size() > gradients.size()) {
        result_.fault = "the calls of a run are not known";
        return;
      }
      // Of what is gone already nothing is said, nor need it be.
      members[0].gradients = gradients;
      oracle_.Refused(members, record.epoch, why.alone, gradients);
      {
        const Slice slice(this);
        sequencer_.Refuse(members, record.epoch, why, Now(), &actions);
      }
      const Epoch open = why.alone ? Epoch() : sequencer_.epoch();
      failed_runs_[id] = why.alone;
      for (const Oracle::Part& part : record.parts) {
        failed_.insert({rank, part.key});
        never_launched_.insert({rank, part.key});
      }
      last_failure_ = std::max(last_failure_, steps_.at(id));
      Obey(actions);
      Answer(rank, id, open);
      return;
    }
    owner_[id] = {rank, now_};
    waiting_.emplace(now_, id);
    oracle_.Submitted(id, record);
    absl::Status status;
    {
      const Slice slice(this);
      status = sequencer_.Submit(vote, Now(), &actions);
    }
    if (!status.ok()) {
      result_.fault = status.ToString();
      return;
    }
    Obey(actions);
    if (record.externally_blocked) {
      Later(Uniform(0, 0.02), [this, id] {
        if (oracle_.Has(id)) oracle_.Unblocked(id);
        Sequencer::Actions unblocked;
        {
          const Slice slice(this);
          sequencer_.Unblock(RunHandle(id), Now(), &unblocked);
        }
        Obey(unblocked);
      });
    }
  }

  static bool IsOfThis(const Oracle::Run& run, const InstanceKey& key) {
    for (const Oracle::Part& part : run.parts) {
      if (part.key == key) return true;
    }
    return false;
  }

  // Does what the sequencer said, after the oracle has judged it.
  void Obey(const Sequencer::Actions& decided) {
    if (!result_.fault.empty()) return;
    const Sequencer::Actions actions = OneByOne(decided);
    for (const SequencerAction& action : actions) {
      if (action.kind != SequencerAction::Kind::kLaunch) continue;
      for (const RunHandle run : action.runs)
        launched_owner_[action.ticket.value()].push_back(run.value());
    }
    for (const SequencerAction& action : actions) {
      if (action.kind != SequencerAction::Kind::kFail || !oracle_.Has(action.run.value())) continue;
      const Oracle::Run& run = oracle_.run(action.run.value());
      failed_runs_[action.run.value()] = action.error->alone;
      for (const Oracle::Part& part : run.parts) {
        failed_.insert({part.rank, part.key});
        if (run.status != Oracle::Status::kLaunched) never_launched_.insert({part.rank, part.key});
      }
    }
    postponed_ = busy_ && sequencer_.NextDeadline() <= Now();
    result_.postponed += postponed_ ? 1 : 0;
    result_.fault = oracle_.ApplyActions(decided, sequencer_.epoch(), postponed_);
    if (!result_.fault.empty()) return;
    for (const SequencerAction& action : actions) {
      switch (action.kind) {
        case SequencerAction::Kind::kLaunch: {
          ++result_.gangs;
          for (const LaunchedInstance& instance : action.instances) {
            result_.absences += static_cast<int64_t>(instance.absent.size());
          }
          const int64_t ticket = action.ticket.value();
          if (Fails(0.001)) {  // the device hangs: it never finishes
            Disturbed(last_step_);
            break;
          }
          const bool ok = !(Fails(0.001));
          if (!ok) Disturbed(last_step_);
          Later(Uniform(0.0001, 0.005), [this, ticket, ok] { Finish(ticket, ok); });
          break;
        }
        case SequencerAction::Kind::kReserve: {
          const int64_t id = action.run.value();
          const Epoch epoch = action.epoch;
          const int32_t rank = owner_.at(id).first;
          const bool ok = !(Fails(0.01));
          if (!ok) Disturbed(last_step_);
          Later(Uniform(0, 0.001), [this, id, rank, epoch, ok] {
            Sequencer::Actions then;
            if (ok) {
              if (oracle_.Has(id)) oracle_.Reserved(id);
              sequencer_.Reserved(RunHandle(id), Now(), &then);
            } else {
              std::vector<RefusedMember> members(1);
              members[0].rank = Rank(rank);
              oracle_.Refused(members, epoch, false);
              sequencer_.Refuse(members, epoch, Error(), Now(), &then);
            }
            Obey(then);
          });
          break;
        }
        case SequencerAction::Kind::kFail:
          last_failure_ = std::max(last_failure_, steps_.at(action.run.value()));
          Settled(action.run.value(), action.open_epoch, false);
          break;
        case SequencerAction::Kind::kEpochEnded:
          ++result_.causes[std::string(ReasonName(action.error->reason))];
          break;
        case SequencerAction::Kind::kWarn:
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
      result_.fault = oracle_.CheckPending(postponed_);
    }
  }

  void Finish(int64_t ticket, bool ok) {
    const std::vector<int64_t> runs = launched_owner_[ticket];
    launched_owner_.erase(ticket);
    oracle_.Finished(ticket, ok);
    Sequencer::Actions actions;
    sequencer_.Finished(Ticket(ticket),
                        ok ? absl::OkStatus() : MakeError(Reason::kExecFailed, "device"), Now(),
                        &actions);
    Obey(actions);
    for (size_t i = 0; i < runs.size() && ok; ++i) Settled(runs[i], Epoch(), true);
  }

  // `open`: the epoch that its rank is told of, or 0.
  void Settled(int64_t run, Epoch open, bool published) {
    const auto owner = owner_.find(run);
    if (owner == owner_.end()) {
      result_.fault = absl::StrCat("run ", run, " has a second outcome");
      return;
    }
    result_.published += published;
    const int32_t rank = owner->second.first;
    owner_.erase(owner);
    Answer(rank, run, open);
  }

  // The rank is told that an epoch has ended: it goes on in the open one, in its step or the next.
  void Hear(int32_t rank, Epoch open) {
    RankState& state = ranks_[rank];
    if (open <= state.epoch) return;
    Disturbed(state.step);
    state.epoch = open;
    if (with_steps_ && !state.done && Chance(0.7)) Begin(rank);
  }

  void Answer(int32_t rank, int64_t run, Epoch open) {
    ToRank(rank, [this, rank, run, open] {
      RankState& state = ranks_[rank];
      state.under_way.erase(run);
      Hear(rank, open);
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
      // Others have planned for it in steps that they are in, or come to before they hear.
      Disturbed(scripts_.rbegin()->first);
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
  const bool with_steps_;
  const bool busy_;
  bool postponed_ = false;  // something is left for another slice
  Sequencer sequencer_;
  Oracle oracle_;
  std::vector<RankState> ranks_;
  std::vector<std::vector<int32_t>> groups_;
  std::map<int64_t, Script> scripts_;  // by step
  int64_t last_step_ = 0;              // that a rank has begun
  int64_t last_disturbed_ = 0;         // step that a rank was in when it met, or heard of, a fault
  int64_t last_failure_ = 0;           // step of a run that failed
  std::map<int64_t, int64_t> steps_;   // of runs
  std::map<int64_t, bool> failed_runs_;  // whether alone
  // Votes of failed runs, by rank.
  std::set<std::pair<int32_t, InstanceKey>> failed_;
  // Of these. Those that were launched have gradients all the same, which a rank may ask for before
  // it hears.
  std::set<std::pair<int32_t, InstanceKey>> never_launched_;
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

SimulationResult Simulate(uint64_t seed, int ranks, bool steps) {
  return Simulation(seed, ranks, steps).Run();
}

}  // namespace chorus
