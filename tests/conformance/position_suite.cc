// Ranks stay in line: whatever one of them does wrong in a step, each result that is handed out is
// right for its step or an error, and from the next step on all are right on every rank.
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "chorus/user_memory.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int kSteps = 6;
constexpr int kBadStep = 3;

enum class Fault {
  kNone,
  kFailedInput,      // of a compiled function
  kFailedTrace,      // of a function that has been traced for other types
  kFailedFirst,      // of one that never has been
  kException,        // in a compiled function
  kStatusOnly,       // a failed tensor that nobody waits for
  kEarlyReturn,      // nothing of the rest of the step is called
  kShortList,        // a coalesced call of fewer tensors
  kRefusedBackward,  // its roots lead to a collective
  kFailedRoot,       // of Backward, by an error that only this rank knows
  kAbort,
};

// What rank `rank` gives in a step, and the sum of it.
double Given(int rank, int step) { return rank + 1 + 100 * step; }
double Sum(int step) {
  double sum = 0;
  for (int rank = 0; rank < kRanks; ++rank) sum += Given(rank, step);
  return sum;
}

// One rank's program: a turn of it for each step, left at the first error.
class Program {
 public:
  Program(int rank, World& world) : rank_(rank), world_(world), memory_(world) {
    step_ = Compile([this](const std::vector<Tensor>& in) {
      Tensor x = in[0];
      if (x.num_elements() == 2) x = MatMul(x, x);
      const Tensor y = AllReduce(x, world_);
      if (in[0].num_elements() == 3) throw std::runtime_error("three are too many");
      return std::vector<Tensor>{AllReduce(y * 2, world_)};
    });
    first_ = Compile([this](const std::vector<Tensor>& in) {
      return std::vector<Tensor>{AllReduce(fails_ ? MatMul(in[0], in[0]) : in[0], world_)};
    });
  }

  absl::Status Turn(int step, Fault fault) {
    try {
      return Calls(step, fault);
    } catch (const std::runtime_error& thrown) {
      return absl::UnknownError(thrown.what());
    }
  }

 private:
  // A tensor of one element, and an error for its value if it is another one.
  absl::Status Expect(const Tensor& y, double expected) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<double> values, y.Read<double>());
    if (values == std::vector<double>{expected}) return absl::OkStatus();
    ADD_FAILURE() << "rank " << rank_ << ", step " << world_.step() << ": expected " << expected
                  << ", got " << values[0];
    return absl::InternalError("a wrong number");
  }

  absl::Status Calls(int step, Fault fault) {
    const double sum = Sum(step);
    CHORUS_RETURN_IF_ERROR(world_.Step(step));
    if (fault == Fault::kAbort) CHORUS_RETURN_IF_ERROR(world_.Abort("enough"));
    const Tensor x = FromHost<double>(world_, {Given(rank_, step)}, {1});

    Tensor input = x;
    if (fault == Fault::kFailedInput) input = FromHost<double>(world_, {1.0}, {2});
    if (fault == Fault::kFailedTrace) input = FromHost<double>(world_, {1.0, 2.0}, {2});
    if (fault == Fault::kException) input = FromHost<double>(world_, {1.0, 2.0, 3.0}, {3});
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> y, step_.Run({input}));
    CHORUS_RETURN_IF_ERROR(Expect(y[0], 2 * kRanks * sum));

    if (fault == Fault::kStatusOnly) {
      const absl::Status failed = AllReduce(Tensor(), world_).status();
      EXPECT_FALSE(failed.ok());
      return failed;
    }
    CHORUS_RETURN_IF_ERROR(Expect(AllReduce(x, world_), sum));
    if (fault == Fault::kEarlyReturn) return absl::CancelledError("enough");

    // A function that is traced in the bad step for the first time.
    fails_ = fault == Fault::kFailedFirst;
    if (step >= kBadStep) {
      CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> z, first_.Run({x}));
      CHORUS_RETURN_IF_ERROR(Expect(z[0], sum));
    }

    CHORUS_ASSIGN_OR_RETURN(const Group group, world_.NewGroup({2, 0, 1}));
    std::vector<Tensor> list(fault == Fault::kShortList ? 2 : 3, x);
    for (const Tensor& each : AllReduceCoalesced(list, group)) {
      CHORUS_RETURN_IF_ERROR(Expect(each, sum));
    }

    const Tensor leaf = FromHost<double>(world_, {Given(rank_, step)}, {1}).RequireGrad();
    const Tensor shared = AllReduce(leaf, world_);
    Tensor loss = chorus::Sum(shared * shared);
    if (fault == Fault::kRefusedBackward) loss = shared * FromHost<double>(world_, {1, 2}, {2});
    if (fault == Fault::kFailedRoot) loss = chorus::Sum(MatMul(shared, shared));
    CHORUS_RETURN_IF_ERROR(Backward(loss));
    CHORUS_RETURN_IF_ERROR(Expect(leaf.grad(), 2 * kRanks * sum));

    const int next = (rank_ + 1) % kRanks;
    const int before = (rank_ + kRanks - 1) % kRanks;
    const Tensor sent = Send(x, next, world_, step);
    CHORUS_RETURN_IF_ERROR(
        Expect(Recv(DType::kF64, {1}, before, world_, step), Given(before, step)));
    CHORUS_RETURN_IF_ERROR(sent.Wait());

    std::vector<double> own(5, Given(rank_, step));
    CHORUS_RETURN_IF_ERROR(memory_.AllReduce(own.data(), own.data(), own.size()));
    EXPECT_EQ(own, std::vector<double>(5, sum)) << "rank " << rank_ << ", step " << step;
    return absl::OkStatus();
  }

  const int rank_;
  World& world_;
  UserMemory memory_;
  Compiled step_;
  Compiled first_;
  bool fails_ = false;
};

struct Case {
  const char* name;
  Fault fault;
  // What the others read, with the rank's name; empty: each is told who has passed its call first,
  // which may be one that was told before.
  const char* told;
};

// What one rank does wrong in one step, and what all of them do.
void ExpectInLineAfter(const ConformanceParam& param, const Case& c, bool everybody) {
  SCOPED_TRACE(absl::StrCat(c.name, everybody ? " on all ranks" : " on rank 1"));
  Job job(param, kRanks);
  job.Run([&](int rank, World& world) {
    const bool bad = everybody || rank == 1;
    Program program(rank, world);
    for (int step = 1; step <= kSteps; ++step) {
      const absl::Status turn =
          program.Turn(step, step == kBadStep && bad ? c.fault : Fault::kNone);
      if (step != kBadStep) {
        EXPECT_TRUE(turn.ok()) << c.name << ", rank " << rank << ", step " << step << ": " << turn;
        continue;
      }
      EXPECT_FALSE(turn.ok()) << c.name << ", rank " << rank;
      if (bad || *c.told == 0) continue;
      EXPECT_THAT(std::string(turn.message()), HasSubstr(c.told)) << c.name << ", rank " << rank;
      EXPECT_THAT(std::string(turn.message()), HasSubstr("rank 1")) << c.name << ", rank " << rank;
    }
  });
}

const Case kCases[] = {
    {"a failed input of a compiled function", Fault::kFailedInput, "expected 2 values"},
    {"a trace that fails", Fault::kFailedTrace, "matmul"},
    {"a first trace that fails", Fault::kFailedFirst, "matmul"},
    {"an exception in a compiled function", Fault::kException, "three are too many"},
    {"a failed tensor looked at by status() only", Fault::kStatusOnly, "undefined"},
    {"an early return", Fault::kEarlyReturn, ""},
    {"a coalesced call of fewer tensors", Fault::kShortList, ""},
    {"a refused Backward", Fault::kRefusedBackward, "a root of one element"},
    {"a Backward of a failed root", Fault::kFailedRoot, "matmul"},
    {"an abort", Fault::kAbort, "enough"},
};

TEST_P(Conformance, AFaultOfOneRankIsOverWithItsStep) {
  for (const Case& c : kCases) ExpectInLineAfter(GetParam(), c, /*everybody=*/false);
}

TEST_P(Conformance, AFaultOfAllRanksIsOverWithItsStep) {
  for (const Case& c : kCases) {
    // Shorter lists on all ranks are equal ones; a rank that has aborted goes on with the step.
    if (c.fault == Fault::kShortList || c.fault == Fault::kAbort) continue;
    ExpectInLineAfter(GetParam(), c, /*everybody=*/true);
  }
}

// Without steps: a mistake that all ranks make at one call costs one epoch, and the next good
// collective is good.
TEST_P(Conformance, AMistakeOfAllRanksCostsOneEpoch) {
  Job job(GetParam(), kRanks);
  job.Run([](int rank, World& world) {
    const NoGrad no_grad;
    for (int i = 1; i <= 3; ++i) {
      EXPECT_FALSE(AllReduce(Tensor(), world).status().ok());
      const absl::StatusOr<double> sum =
          AllReduce(Scalar<double>(world, Given(rank, i)), world).Item<double>();
      ASSERT_TRUE(sum.ok()) << "rank " << rank << ": " << sum.status();
      EXPECT_EQ(*sum, Sum(i));
    }
    EXPECT_EQ(world.epoch(), 4);
  });
}

// Without steps: a rank of which nobody knows what it would have called is out of line until all
// have reformed.
TEST_P(Conformance, AReformBringsARankBackInLine) {
  Job job(GetParam(), kRanks);
  job.Run([](int rank, World& world) {
    const NoGrad no_grad;
    const auto sum = [&world, rank](int step) {
      return AllReduce(Scalar<double>(world, Given(rank, step)), world).Item<double>();
    };
    const Compiled function = Compile([rank, &world](const std::vector<Tensor>& in) {
      return std::vector<Tensor>{AllReduce(rank == 1 ? MatMul(in[0], in[0]) : in[0], world)};
    });
    const auto run = function.Run({FromHost<double>(world, {Given(rank, 1)}, {1})});
    EXPECT_EQ(run.ok(), rank != 1);
    if (run.ok()) {
      EXPECT_FALSE((*run)[0].Wait().ok()) << "rank " << rank;
    }
    for (int i = 0; i < 2; ++i) {
      const absl::Status out = sum(1).status();
      EXPECT_EQ(ErrorOf(out).reason, rank == 1 ? Reason::kOutOfLine : Reason::kMismatch)
          << "rank " << rank << ": " << out;
    }
    const absl::StatusOr<World::Reformed> reformed = world.Reform(kWaitTimeout);
    ASSERT_TRUE(reformed.ok()) << "rank " << rank << ": " << reformed.status();
    EXPECT_EQ(reformed->size, kRanks);
    for (int step = 1; step <= 3; ++step) {
      const absl::StatusOr<double> whole = sum(step);
      ASSERT_TRUE(whole.ok()) << "rank " << rank << ": " << whole.status();
      EXPECT_EQ(*whole, Sum(step));
    }
  });
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
