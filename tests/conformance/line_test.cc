// Random programs with faults: ranks stay in line, or are told.
//
// Each rank runs the same numbered calls (all_reduces and gradients, in several groups, several of
// them in one compiled function, cut differently on each rank), runs ahead of its own results, and
// fails at random places in random ways. Every result that is handed out is right for its number or
// an error; and from the step after the last that any rank had begun before it heard of the last
// fault on, every result is right on every rank.
// --programs=N and --first_seed=S choose the programs.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/chorus.h"
#include "core/base/error.h"
#include "gtest/gtest.h"
#include "tests/conformance/conformance.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

uint64_t first_seed = 1;
int programs = 120;

enum class Fault {
  kUndefined,     // an operand that is no tensor; looked at by status() only
  kFailed,        // an operand that has failed here
  kShort,         // a compiled function's input is one value short
  kThrow,         // an exception in a compiled function
  kLeave,         // the rest of the step is left out
  kAbort,         // the epoch is ended by hand
  kLostBackward,  // a gradient is asked for wrongly
  kCount,
};

struct Program {
  int ranks = 2;
  bool sim = false;
  int steps = 0;
  int last_fault = 0;                    // step
  std::vector<std::vector<int>> groups;  // world ranks; the first is everybody
  struct Call {
    int group = 0;
    bool gradient = false;  // two requests of one all_reduce
  };
  std::vector<Call> calls;             // of each step
  std::vector<std::vector<int>> cuts;  // by rank: how many calls each of its runs takes
  std::vector<int> ahead;              // by rank: steps whose results it has not looked at
  struct Fails {
    int step = 0;
    int call = 0;
    int rank = -1;  // -1: all of them
    Fault fault = Fault::kUndefined;
  };
  std::vector<Fails> faults;
};

Program Make(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&random](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  Program p;
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
    // Gradients are taken of single calls.
    for (int call = 0; call < calls;) {
      int count = 1;
      for (int more = pick(0, 2);
           more > 0 && !p.calls[static_cast<size_t>(call)].gradient && call + count < calls &&
           !p.calls[static_cast<size_t>(call + count)].gradient;
           --more) {
        ++count;
      }
      p.cuts.back().push_back(count);
      call += count;
    }
    p.ahead.push_back(pick(0, 3));
  }
  for (int f = pick(1, 5); f > 0; --f) {
    Program::Fails fails;
    fails.step = pick(1, 8);
    fails.call = pick(0, calls - 1);
    fails.rank = pick(0, 4) == 0 ? -1 : pick(0, p.ranks - 1);
    fails.fault = static_cast<Fault>(pick(0, static_cast<int>(Fault::kCount) - 1));
    p.faults.push_back(fails);
    p.last_fault = std::max(p.last_fault, fails.step);
  }
  // Enough for whoever is ahead: a rank whose calls fail at once goes on until it waits.
  p.steps = p.last_fault + 25;
  return p;
}

// What a rank gives to a call of a step, and the sum over its group.
double Given(int step, int call, int rank) { return 1000 * step + 20 * call + rank + 1; }
double Sum(const Program& p, int step, int call) {
  double sum = 0;
  for (const int rank : p.groups[static_cast<size_t>(p.calls[static_cast<size_t>(call)].group)]) {
    sum += Given(step, call, rank);
  }
  return sum;
}

struct Outcome {
  std::vector<int> right;                            // steps
  std::vector<std::pair<int, std::string>> refused;  // step and error
  std::string wrong;
  // By epoch: the last step that was begun before the rank was in it.
  std::vector<std::pair<int64_t, int>> entered;
};

// The last step that any rank had begun before it heard of the last fault.
int LastStepOfTrouble(const Program& p, const std::vector<Outcome>& outcomes) {
  int64_t last_epoch = 1;
  for (const Outcome& outcome : outcomes) {
    for (const auto& entry : outcome.entered) last_epoch = std::max(last_epoch, entry.first);
  }
  int step = p.last_fault;
  for (const Outcome& outcome : outcomes) {
    for (const auto& entry : outcome.entered) {
      if (entry.first < last_epoch) continue;
      step = std::max(step, entry.second);
      break;
    }
  }
  return step;
}

class RankProgram {
 public:
  RankProgram(const Program& p, World& world, Outcome* outcome)
      : p_(p), world_(world), rank_(world.rank()), outcome_(outcome) {}

  void Run() {
    for (const std::vector<int>& ranks : p_.groups) {
      if (&ranks == &p_.groups[0]) {
        groups_.push_back(world_);
      } else if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) {
        groups_.emplace_back();
      } else {
        groups_.push_back(*world_.NewGroup(ranks));
      }
    }
    int call = 0;
    for (const int count : p_.cuts[static_cast<size_t>(rank_)]) {
      functions_.push_back(Compiled());
      if (count > 1) functions_.back() = Function(call, count);
      call += count;
    }
    for (int step = 1; step <= p_.steps; ++step) {
      ASSERT_TRUE(world_.Step(step).ok());
      step_ = step;
      try {
        Calls(step);
      } catch (const std::runtime_error&) {
      }
      while (!waiting_.empty() &&
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
    return groups_[static_cast<size_t>(p_.calls[static_cast<size_t>(call)].group)].core() !=
           nullptr;
  }
  const Group& GroupOf(int call) const {
    return groups_[static_cast<size_t>(p_.calls[static_cast<size_t>(call)].group)];
  }
  bool Fails(int step, int call, Fault fault) const {
    return std::any_of(p_.faults.begin(), p_.faults.end(), [&](const Program::Fails& f) {
      return f.step == step && f.call == call && f.fault == fault &&
             (f.rank == -1 || f.rank == rank_);
    });
  }

  // The calls from `first` on, of which this rank is a member: an input and a result each. A
  // gradient's is what its own all_reduce sums.
  Compiled Function(int first, int count) {
    return Compile([this, first, count](const std::vector<Tensor>& in) {
      std::vector<Tensor> results;
      size_t at = 0;
      for (int call = first; call < first + count; ++call) {
        if (!IsMember(call)) continue;
        const Tensor x = in[at++] * in.back();
        results.push_back(AllReduce(x, GroupOf(call)));
        if (throws_) throw std::runtime_error("enough");
      }
      if (results.empty()) results.push_back(in[0]);
      return results;
    });
  }

  void Calls(int step) {
    int call = 0;
    for (size_t run = 0; run < functions_.size(); ++run) {
      const int count = p_.cuts[static_cast<size_t>(rank_)][run];
      if (count == 1) {
        if (Eager(step, call)) return;
      } else if (InOneRun(step, call, count, functions_[run])) {
        return;
      }
      call += count;
    }
  }

  void Abort() { EXPECT_TRUE(world_.Abort("enough").ok()); }
  Tensor Value(double value) { return FromHost<double>(world_, {value}, {1}); }

  // True: the step is left.
  bool Eager(int step, int call) {
    if (Fails(step, call, Fault::kLeave)) return true;
    if (Fails(step, call, Fault::kAbort)) Abort();
    if (!IsMember(call)) return false;
    Tensor x = Value(Given(step, call, rank_));
    if (Fails(step, call, Fault::kUndefined)) x = Tensor();
    if (Fails(step, call, Fault::kFailed)) x = MatMul(x, x);
    if (!p_.calls[static_cast<size_t>(call)].gradient) {
      Expect(step, call, Sum(p_, step, call), AllReduce(x, GroupOf(call)));
      return false;
    }
    if (x.defined() && x.status().ok()) x.RequireGrad();
    const Tensor y = AllReduce(x, GroupOf(call));
    Expect(step, call, Sum(p_, step, call), y);
    // Two losses: sums over the ranks of what each takes.
    for (const int factor : {1, 7}) {
      Tensor loss = y * Value(factor * Given(step, call, rank_));
      // Nothing that this rank's part can be told from.
      if (factor == 1 && Fails(step, call, Fault::kLostBackward))
        loss = y * FromHost<double>(world_, {1, 2}, {2});
      BackwardOptions retain;
      retain.retain_graph = true;
      const absl::StatusOr<std::vector<Tensor>> g = Grad({loss}, {x}, retain);
      if (g.ok()) Expect(step, call, factor * Sum(p_, step, call), (*g)[0]);
    }
    return false;
  }

  bool InOneRun(int step, int first, int count, const Compiled& function) {
    std::vector<Tensor> inputs;
    std::vector<int> calls;
    throws_ = false;
    for (int call = first; call < first + count; ++call) {
      if (Fails(step, call, Fault::kLeave)) return true;
      if (Fails(step, call, Fault::kAbort)) Abort();
      if (!IsMember(call)) continue;
      Tensor x = Value(Given(step, call, rank_));
      if (Fails(step, call, Fault::kUndefined)) x = Tensor();
      if (Fails(step, call, Fault::kFailed)) x = MatMul(x, x);
      if (Fails(step, call, Fault::kShort)) x = FromHost<double>(world_, {1.0, 2.0}, {3});
      // Traced anew, for its type, and thrown out of.
      if (Fails(step, call, Fault::kThrow)) {
        x = FromHost<double>(world_, {1.0, 2.0}, {2});
        throws_ = true;
      }
      inputs.push_back(x);
      calls.push_back(call);
    }
    if (inputs.empty()) return false;
    inputs.push_back(Value(1));
    const absl::StatusOr<std::vector<Tensor>> results = function.Run(inputs);
    if (!results.ok()) return false;
    for (size_t i = 0; i < calls.size(); ++i) {
      Expect(step, calls[i], Sum(p_, step, calls[i]), (*results)[i]);
    }
    return false;
  }

  void Expect(int step, int call, double right, Tensor tensor) {
    waiting_.push_back({step, call, right, std::move(tensor)});
  }

  void Look() {
    const Waiting w = std::move(waiting_.front());
    waiting_.pop_front();
    const absl::StatusOr<std::vector<double>> values = w.tensor.Read<double>();
    const std::string where =
        absl::StrCat("\n  rank ", rank_, ", step ", w.step, ", call ", w.call, ": ");
    if (!values.ok()) {
      outcome_->refused.emplace_back(w.step,
                                     absl::StrCat(where, std::string(values.status().message())));
      return;
    }
    outcome_->right.push_back(w.step);
    if (*values == std::vector<double>{w.right}) return;
    absl::StrAppend(&outcome_->wrong, where, (*values)[0], ", right is ", w.right);
  }

  const Program& p_;
  World& world_;
  const int rank_;
  Outcome* const outcome_;
  std::vector<Group> groups_;
  std::vector<Compiled> functions_;
  std::deque<Waiting> waiting_;
  bool throws_ = false;
  int step_ = 0;
};

TEST(LineTest, WhateverRanksDoWrongTheirResultsAreRightOrErrorsAndRightAgainAfterwards) {
  std::cout << "seeds " << first_seed << " to " << first_seed + programs - 1 << std::endl;
  int64_t right = 0;
  int64_t right_afterwards = 0;
  int64_t refused = 0;
  for (uint64_t seed = first_seed; seed < first_seed + programs; ++seed) {
    const Program p = Make(seed);
    ConformanceParam param;
    param.name = p.sim ? "Sim" : "Host";
    param.open = DirectCluster(p.sim ? BackendKind::kSim : BackendKind::kHost);
    JobOptions options;
    options.ranks = p.ranks;
    // Nobody may be left waiting: it would be an error that no rule explains.
    options.agree_timeout = std::chrono::seconds(60);
    Job job(param, options);
    std::vector<Outcome> outcomes(static_cast<size_t>(p.ranks));
    job.Run([&](int rank, World& world) {
      RankProgram(p, world, &outcomes[static_cast<size_t>(rank)]).Run();
    });
    const int trouble = LastStepOfTrouble(p, outcomes);
    for (Outcome& outcome : outcomes) {
      for (const auto& error : outcome.refused) {
        if (error.first > trouble) outcome.wrong += error.second;
      }
      ASSERT_EQ(outcome.wrong, "")
          << "--first_seed=" << seed << " --programs=1; trouble until step " << trouble << " of "
          << p.steps;
      right += static_cast<int64_t>(outcome.right.size());
      refused += static_cast<int64_t>(outcome.refused.size());
      right_afterwards += std::count_if(outcome.right.begin(), outcome.right.end(),
                                        [trouble](int step) { return step > trouble; });
    }
  }
  std::cout << right << " right results, " << right_afterwards << " of them when all had heard; "
            << refused << " refused" << std::endl;
  EXPECT_GT(refused, 0);
  EXPECT_GT(right_afterwards, right / 3);
}

}  // namespace
}  // namespace conformance
}  // namespace chorus

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--programs=", 11) == 0) {
      chorus::conformance::programs = std::atoi(argv[i] + 11);
    }
    if (std::strncmp(argv[i], "--first_seed=", 13) == 0) {
      chorus::conformance::first_seed = std::strtoull(argv[i] + 13, nullptr, 10);
    }
  }
  return RUN_ALL_TESTS();
}
