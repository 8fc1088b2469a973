// What errors of values say: the rank, the op, the value, where it stands, what was expected, the
// trainer's line, the reason and what to do. The same in a call of its own and in a compiled step.
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr CallSite kSite{"train.cc", 12};

// `call` of a tensor and of `numbers`, which are bad on rank 1.
struct BadValue {
  const char* name;
  Shape shape;  // of the tensor, f32
  std::vector<int64_t> good;
  std::vector<int64_t> bad;
  std::function<Tensor(const World&, const Tensor& x, const Tensor& numbers)> call;
  const char* text;  // before the line
};

std::vector<BadValue> BadValues() {
  return {
      {"index",
       {5, 2},
       {0, 1, 2},
       {0, 4, 7},
       [](const World&, const Tensor& x, const Tensor& numbers) {
         return Take(x, numbers, 0, kSite);
       },
       "rank 1: take: input 1, i64[3], holds 7 at [2], expected from 0 to 4"},
      {"label",
       {2, 3},
       {0, 2},
       {0, -1},
       [](const World&, const Tensor& x, const Tensor& numbers) {
         return CrossEntropy(x, numbers, kSite);
       },
       "rank 1: cross_entropy: input 1, i64[2], holds -1 at [1], expected from 0 to 2"},
      {"divisor",
       {1},
       {1, 2, 3},
       {1, 0, 3},
       [](const World&, const Tensor&, const Tensor& numbers) {
         return Div(numbers, numbers, kSite);
       },
       "rank 1: div: element 1 of i64[3] is an integer divided by 0, expected divisors other than "
       "0"},
      {"count",
       {4, 2},
       {1, 1},
       {9, 1},
       [](const World& world, const Tensor& x, const Tensor& numbers) {
         return AllToAllRagged(x, numbers, 8, world, kSite).values;
       },
       "all_to_all: rank 1 sends 9 rows to rank 0, expected 0 to 4"},
  };
}

TEST_P(Conformance, ValuesThatAnOpDoesNotTakeAreToldWithRankPlaceRangeAndLine) {
  for (const BadValue& c : BadValues()) {
    for (const bool compiled : {false, true}) {
      SCOPED_TRACE(absl::StrCat(c.name, compiled ? " compiled" : " eager"));
      Job job(GetParam(), 2);
      job.Run([&](int rank, World& world) {
        const NoGrad no_grad;
        const Tensor x = Zeros(world, DType::kF32, c.shape);
        const Tensor numbers = Upload(world, rank == 1 ? c.bad : c.good);
        const auto call = [&](const std::vector<Tensor>& in) {
          return AllReduce(Cast(c.call(world, in[0], in[1]), DType::kF32), world);
        };
        absl::Status status;
        if (compiled) {
          const auto step =
              Compile([&](const std::vector<Tensor>& in) { return std::vector<Tensor>{call(in)}; });
          const auto results = step.Run({x, numbers});
          status = results.ok() ? (*results)[0].Wait() : results.status();
        } else {
          status = call({x, numbers}).Wait();
        }
        const std::string text(status.message());
        const Error error = ErrorOf(status);
        EXPECT_THAT(text, HasSubstr(absl::StrCat(c.text, " (train.cc:12)"))) << rank;
        EXPECT_EQ(error.culprit.rank, 1) << status;
        EXPECT_THAT(text, HasSubstr(absl::StrCat("; ", InfoOf(error.reason).remedy, "; error ",
                                                 error.id.value(), "]")));
        if (error.reason == Reason::kBadType) {
          EXPECT_THAT(text, StartsWith(c.text));
          EXPECT_EQ(error.source, "train.cc:12");
        } else {
          // Beside its call, not in it, where each call is one of its own.
          EXPECT_EQ(error.reason, Reason::kPeerRefused) << status;
          EXPECT_FALSE(compiled || rank == 1);
        }
        EXPECT_THAT(status.ToString(), Not(HasSubstr("\\"))) << "bytes are shown";
      });
    }
  }
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
