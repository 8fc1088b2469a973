#include "tests/conformance/line_program.h"

#include <algorithm>
#include <deque>
#include <random>
#include <sstream>
#include <stdexcept>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace chorus {
namespace conformance {

LineProgram MakeLineProgram(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&random](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  LineProgram p;
  p.sim = pick(0, 1) == 1;
  p.ranks = pick(2, 4);
  p.groups.emplace_back();
  for (int rank = 0; rank < p.ranks; ++rank) p.groups[0].push_back(rank);
  for (int g = pick(0, 2); g > 0; --g) {
    std::vector<int> members = p.groups[0];
    std::shuffle(members.begin(), members.end(), random);
    members.resize(static_cast<size_t>(pick(2, p.ranks)));
    p.groups.push_back(members);
  }
  const int calls = pick(2, 6);
  for (int i = 0; i < calls; ++i) {
    p.calls.push_back({pick(0, static_cast<int>(p.groups.size()) - 1), pick(0, 3) == 0});
  }
  for (int rank = 0; rank < p.ranks; ++rank) {
    p.cuts.emplace_back();
    for (int call = 0; call < calls;) {
      const int count = std::min(1 + pick(0, 2), calls - call);
      p.cuts.back().push_back(count);
      call += count;
    }
    p.ahead.push_back(pick(0, 3));
  }
  p.numbered = pick(0, 3) > 0;
  for (int f = pick(1, 5); f > 0; --f) {
    LineProgram::Fails fails;
    // Without Step what a refused Run would have called is known from its traces: one comes first.
    fails.step = pick(p.numbered ? 1 : 2, 8);
    fails.call = pick(0, calls - 1);
    fails.rank = pick(0, 4) == 0 ? -1 : pick(0, p.ranks - 1);
    const Fault end = p.numbered ? Fault::kCount : Fault::kThrow;
    fails.fault = static_cast<Fault>(pick(0, static_cast<int>(end) - 1));
    p.faults.push_back(fails);
    p.last_fault = std::max(p.last_fault, fails.step);
  }
  // Enough for a rank that is ahead: one whose calls fail at once goes on until it waits.
  p.steps = p.last_fault + 25;
  return p;
}

namespace {

// What a rank gives to a call of a step, and the sum over its group.
double Given(int step, int call, int rank) { return 1000 * step + 20 * call + rank + 1; }
double Sum(const LineProgram& p, int step, int call) {
  double sum = 0;
  for (const int rank : p.groups[static_cast<size_t>(p.calls[static_cast<size_t>(call)].group)]) {
    sum += Given(step, call, rank);
  }
  return sum;
}

class RankProgram {
 public:
  RankProgram(const LineProgram& p, World& world, LineOutcome* outcome)
      : p_(p), world_(world), rank_(world.rank()), outcome_(outcome) {}

  void Run() {
    for (const std::vector<int>& ranks : p_.groups) {
      if (&ranks == &p_.groups[0]) {
        groups_.push_back(world_);
      } else if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) {
        groups_.emplace_back();
      } else {
        absl::StatusOr<Group> group = world_.NewGroup(ranks);
        if (!group.ok()) return Wrong("NewGroup", group.status());
        groups_.push_back(*std::move(group));
      }
    }
    int call = 0;
    for (const int count : p_.cuts[static_cast<size_t>(rank_)]) {
      functions_.push_back(Compiled());
      if (count > 1) functions_.back() = Function(call, count);
      call += count;
    }
    for (int step = 1; step <= p_.steps; ++step) {
      if (p_.numbered) {
        const absl::Status begun = world_.Step(step);
        if (!begun.ok()) return Wrong(absl::StrCat("Step ", step), begun);
      }
      step_ = step;
      // What it called before it left a step others may have compiled with what it left out: that
      // is over only when it has begun the next one.
      bool left = true;
      try {
        left = Calls(step);
      } catch (const std::runtime_error&) {
      }
      while (!left && !waiting_.empty() &&
             waiting_.front().step <= step - p_.ahead[static_cast<size_t>(rank_)]) {
        Look();
      }
      NoteEpoch();
    }
    while (!waiting_.empty()) Look();
    NoteEpoch();
  }

 private:
  void NoteEpoch() {
    const int64_t epoch = world_.epoch();
    if (outcome_->entered.empty() || outcome_->entered.back().first < epoch) {
      outcome_->entered.emplace_back(epoch, outcome_->entered.empty() ? 0 : step_);
    }
  }

  struct Waiting {
    int step = 0;
    int call = 0;
    double right = 0;
    Tensor tensor;
  };

  bool IsMember(int call) const {
    return groups_[static_cast<size_t>(p_.calls[static_cast<size_t>(call)].group)].size() > 0;
  }
  const Group& GroupOf(int call) const {
    return groups_[static_cast<size_t>(p_.calls[static_cast<size_t>(call)].group)];
  }
  bool Fails(int step, int call, Fault fault) const {
    return std::any_of(p_.faults.begin(), p_.faults.end(), [&](const LineProgram::Fails& f) {
      return f.step == step && f.call == call && f.fault == fault &&
             (f.rank == -1 || f.rank == rank_);
    });
  }

  // The calls from `first` on, of which this rank is a member: an input, and what Call() gives,
  // each.
  Compiled Function(int first, int count) {
    return Compile([this, first, count](const std::vector<Tensor>& in) {
      std::vector<Tensor> results;
      size_t at = 0;
      for (int call = first; call < first + count; ++call) {
        if (!IsMember(call)) continue;
        const Tensor& x = in[at++];
        Call(call, x, refuses_ ? MatMul(x, x) : x * in.back(), loses_, &results);
        if (throws_) throw std::runtime_error("enough");
      }
      if (results.empty()) results.push_back(in[0]);
      return results;
    });
  }

  // Adds the sum of the members' `operand`, and where the call has gradients, those of two losses
  // with regard to `x`, each the sum over the ranks of what they take: x, or 7 x.
  void Call(int call, const Tensor& x, const Tensor& operand, bool loses,
            std::vector<Tensor>* results) {
    const Tensor y = AllReduce(operand, GroupOf(call));
    results->push_back(y);
    if (!p_.calls[static_cast<size_t>(call)].gradient) return;
    for (const double factor : {1.0, 7.0}) {
      Tensor loss = y * x.Detach() * factor;
      // Nothing that this rank's part can be told from.
      if (loses && factor == 1) loss = y * FromHost<double>(world_, {1, 2}, {2});
      BackwardOptions retain;
      retain.retain_graph = true;
      absl::StatusOr<std::vector<Tensor>> g = Grad({loss}, {x}, retain);
      results->push_back(g.ok() ? (*g)[0] : Tensor());
    }
  }

  // True: the step is left.
  bool Calls(int step) {
    int call = 0;
    for (size_t run = 0; run < functions_.size(); ++run) {
      const int count = p_.cuts[static_cast<size_t>(rank_)][run];
      if (count == 1) {
        if (Eager(step, call)) return true;
      } else if (InOneRun(step, call, count, functions_[run])) {
        return true;
      }
      call += count;
    }
    return false;
  }

  void Wrong(const std::string& what, const absl::Status& status) {
    absl::StrAppend(&outcome_->wrong, "\n  rank ", rank_, ", ", what, ": ",
                    std::string(status.message()));
  }
  void Abort() {
    const absl::Status aborted = world_.Abort("enough");
    if (!aborted.ok()) Wrong("Abort", aborted);
  }
  Tensor Value(double value) { return FromHost<double>(world_, {value}, {1}); }

  // True: the step is left.
  bool Eager(int step, int call) {
    if (Fails(step, call, Fault::kLeave)) return true;
    if (Fails(step, call, Fault::kAbort)) Abort();
    if (!IsMember(call)) return false;
    Tensor x = Value(Given(step, call, rank_));
    if (Fails(step, call, Fault::kUndefined)) x = Tensor();
    if (Fails(step, call, Fault::kFailed)) x = MatMul(x, x);
    RequireGradOf(call, x);
    std::vector<Tensor> results;
    Call(call, x, x, Fails(step, call, Fault::kLostBackward), &results);
    Expect(step, call, results.data());
    return false;
  }

  void RequireGradOf(int call, Tensor x) const {
    const bool gradient = p_.calls[static_cast<size_t>(call)].gradient;
    if (gradient && x.defined() && x.status().ok()) x.RequireGrad();
  }

  bool InOneRun(int step, int first, int count, const Compiled& function) {
    std::vector<Tensor> inputs;
    std::vector<int> calls;
    throws_ = refuses_ = loses_ = false;
    for (int call = first; call < first + count; ++call) {
      if (Fails(step, call, Fault::kLeave)) return true;
      if (Fails(step, call, Fault::kAbort)) Abort();
      if (!IsMember(call)) continue;
      Tensor x = Value(Given(step, call, rank_));
      if (Fails(step, call, Fault::kUndefined)) x = Tensor();
      if (Fails(step, call, Fault::kFailed)) x = MatMul(x, x);
      if (Fails(step, call, Fault::kShort)) x = FromHost<double>(world_, {1.0, 2.0}, {3});
      // Traced anew, for its type, and not to the end.
      const bool throws = Fails(step, call, Fault::kThrow);
      const bool refuses = Fails(step, call, Fault::kTrace);
      const bool loses =
          p_.calls[static_cast<size_t>(call)].gradient && Fails(step, call, Fault::kLostBackward);
      if (throws || refuses || loses) x = FromHost<double>(world_, {1.0, 2.0}, {2});
      throws_ = throws_ || throws;
      refuses_ = refuses_ || refuses;
      loses_ = loses_ || loses;
      RequireGradOf(call, x);
      inputs.push_back(x);
      calls.push_back(call);
    }
    if (inputs.empty()) return false;
    inputs.push_back(Value(1));
    const absl::StatusOr<std::vector<Tensor>> results = function.Run(inputs);
    if (!results.ok()) {
      Refused(step, calls[0], results.status());
      return false;
    }
    const Tensor* next = results->data();
    for (const int call : calls) next = Expect(step, call, next);
    return false;
  }

  std::string Where(int step, int call) const {
    return absl::StrCat("\n  rank ", rank_, ", step ", step, ", call ", call, ": ");
  }
  void Refused(int step, int call, const absl::Status& error) {
    outcome_->refused.emplace_back(step,
                                   absl::StrCat(Where(step, call), std::string(error.message())));
  }

  // What Call() gave, from `next` on; returns its end.
  const Tensor* Expect(int step, int call, const Tensor* next) {
    if (Fails(step, call, Fault::kImpatient)) {
      next->Wait(std::chrono::microseconds(1)).IgnoreError();
    }
    const double sum = Sum(p_, step, call);
    waiting_.push_back({step, call, sum, *next++});
    if (!p_.calls[static_cast<size_t>(call)].gradient) return next;
    for (const int factor : {1, 7}) waiting_.push_back({step, call, factor * sum, *next++});
    return next;
  }

  void Look() {
    const Waiting w = std::move(waiting_.front());
    waiting_.pop_front();
    const absl::StatusOr<std::vector<double>> values = w.tensor.Read<double>();
    if (!values.ok()) {
      Refused(w.step, w.call, values.status());
      // A rank that cannot come has passed, or is told.
      if (absl::IsDeadlineExceeded(values.status())) {
        outcome_->wrong += outcome_->refused.back().second;
      }
      return;
    }
    outcome_->right.push_back(w.step);
    if (*values == std::vector<double>{w.right}) return;
    absl::StrAppend(&outcome_->wrong, Where(w.step, w.call), (*values)[0], ", right is ", w.right);
  }

  const LineProgram& p_;
  World& world_;
  const int rank_;
  LineOutcome* const outcome_;
  std::vector<Group> groups_;
  std::vector<Compiled> functions_;
  std::deque<Waiting> waiting_;
  // What is wrong with the function that is traced next.
  bool throws_ = false;
  bool refuses_ = false;
  bool loses_ = false;
  int step_ = 0;
};

}  // namespace

LineOutcome RunRank(const LineProgram& program, World& world) {
  LineOutcome outcome;
  RankProgram(program, world, &outcome).Run();
  return outcome;
}

std::string Text(const LineProgram& p) {
  constexpr const char* kFaults[] = {"undefined", "failed",        "short", "trace", "impatient",
                                     "abort",     "lost backward", "throw", "leave"};
  static_assert(sizeof(kFaults) / sizeof(kFaults[0]) == static_cast<size_t>(Fault::kCount),
                "a name each");
  std::string text = absl::StrCat(p.sim ? "sim, " : "host, ", p.ranks, " ranks, ", p.steps,
                                  p.numbered ? " steps" : " steps without number", "\n  groups:");
  for (const auto& group : p.groups) absl::StrAppend(&text, " {", absl::StrJoin(group, " "), "}");
  absl::StrAppend(&text, "\n  calls:");
  for (const LineProgram::Call& call : p.calls) {
    absl::StrAppend(&text, call.gradient ? " gradients in g" : " g", call.group);
  }
  for (size_t r = 0; r < p.cuts.size(); ++r) {
    absl::StrAppend(&text, "\n  rank ", r, ": runs of ", absl::StrJoin(p.cuts[r], " "), " calls, ",
                    p.ahead[r], " steps ahead");
  }
  for (const LineProgram::Fails& f : p.faults) {
    absl::StrAppend(&text, "\n  step ", f.step, ", call ", f.call, ", rank ", f.rank, ": ",
                    kFaults[static_cast<size_t>(f.fault)]);
  }
  return text;
}

int64_t ResultsOfAStep(const LineProgram& p, int rank) {
  int64_t results = 0;
  for (const LineProgram::Call& call : p.calls) {
    const std::vector<int>& members = p.groups[static_cast<size_t>(call.group)];
    if (std::count(members.begin(), members.end(), rank) == 0) continue;
    results += call.gradient ? 3 : 1;
  }
  return results;
}

int LastStepOfTrouble(const LineProgram& p, const std::vector<LineOutcome>& outcomes) {
  int64_t last_epoch = 1;
  for (const LineOutcome& outcome : outcomes) {
    for (const auto& entry : outcome.entered) last_epoch = std::max(last_epoch, entry.first);
  }
  int step = p.last_fault;
  for (const LineOutcome& outcome : outcomes) {
    for (const auto& entry : outcome.entered) {
      if (entry.first < last_epoch) continue;
      step = std::max(step, entry.second);
      break;
    }
  }
  return step;
}

std::string ToText(const LineOutcome& outcome) {
  std::ostringstream out;
  out << outcome.right.size();
  for (const int step : outcome.right) out << " " << step;
  out << "\n" << outcome.refused.size();
  for (const auto& error : outcome.refused) {
    out << "\n" << error.first << " x" << absl::BytesToHexString(error.second);
  }
  out << "\n" << outcome.entered.size();
  for (const auto& entry : outcome.entered) out << " " << entry.first << " " << entry.second;
  out << "\nx" << absl::BytesToHexString(outcome.wrong) << "\n";
  return out.str();
}

absl::StatusOr<LineOutcome> LineOutcomeOf(const std::string& text) {
  std::istringstream in(text);
  LineOutcome outcome;
  std::string hex;
  const auto list = [&in](auto* list) {
    size_t size = 0;
    if (in >> size && size < 1u << 20) list->resize(size);
    return list;
  };
  for (int& step : *list(&outcome.right)) in >> step;
  for (auto& error : *list(&outcome.refused)) {
    in >> error.first >> hex;
    if (in) error.second = absl::HexStringToBytes(hex.substr(1));
  }
  for (auto& entry : *list(&outcome.entered)) in >> entry.first >> entry.second;
  if (!(in >> hex)) return absl::InvalidArgumentError("that is no outcome");
  outcome.wrong = absl::HexStringToBytes(hex.substr(1));
  return outcome;
}

}  // namespace conformance
}  // namespace chorus
