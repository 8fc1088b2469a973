#include "tests/vectors/check.h"

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "gmock/gmock.h"
#include "tests/vectors/testing.h"

namespace chorus {
namespace vectors {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Json = nlohmann::json;

struct Parsed {
  Vector v;
  Tolerance tolerance;
};

Parsed Parse(const Json& json) {
  absl::StatusOr<VectorFile> file = ParseVectorFile("f.json", FileText({json}));
  EXPECT_TRUE(file.ok() && file->entries[0].vector.ok()) << file->entries[0].vector.status();
  return {*std::move(file->entries[0].vector), file->tolerance};
}

// What a sound system would give.
std::vector<RankResults> Sound(const Vector& v) {
  std::vector<RankResults> results(v.group.size());
  for (size_t r = 0; r < results.size(); ++r) {
    results[r].y = results[r].y_again = v.outputs[r];
    if (v.first.has_value()) results[r].xbar = v.first->xbar[r];
    if (!v.second.has_value()) continue;
    results[r].G = v.second->G[r];
    results[r].dS = v.second->dS[r];
    results[r].S = r == 0 ? v.second->S : 0;
  }
  return results;
}

void Set(Array* array, int64_t i, double value) {
  Array one;
  one.dtype = array->dtype;
  ASSERT_TRUE(AppendFloat(value, &one).ok());
  array->bytes.replace(static_cast<size_t>(i) * one.bytes.size(), one.bytes.size(), one.bytes);
}

std::vector<std::string> CheckWith(const Json& json,
                                   const std::function<void(std::vector<RankResults>*)>& change) {
  const Parsed parsed = Parse(json);
  std::vector<RankResults> results = Sound(parsed.v);
  change(&results);
  return Check(parsed.v, parsed.tolerance, Pass::kAsItStands, results);
}

TEST(CheckTest, FindsNothingWrongWithWhatIsRight) {
  EXPECT_THAT(CheckWith(SmallVector(), [](auto*) {}), IsEmpty());
}

TEST(CheckTest, FindsAWrongNumberInEachResult) {
  EXPECT_THAT(CheckWith(SmallVector(),
                        [](auto* r) {
                          for (auto& rank : *r) {
                            Set(&rank.y[0], 1, 2.75);
                            rank.y_again = rank.y;
                          }
                        }),
              ElementsAre("y rank 0 tensor 0 element 1: got 2.75, want 2.5, tolerance 1.42e-14",
                          "y rank 1 tensor 0 element 1: got 2.75, want 2.5, tolerance 1.42e-14"));
  EXPECT_THAT(CheckWith(SmallVector(), [](auto* r) { Set(&*(*(*r)[1].xbar)[0], 0, 4); }),
              ElementsAre("xbar rank 1 tensor 0 element 0: got 4, want 3, tolerance 1.07e-14"));
  EXPECT_THAT(CheckWith(SmallVector(), [](auto* r) { Set(&*(*(*r)[0].G)[0], 1, 24.5); }),
              ElementsAre("G rank 0 tensor 0 element 1: got 24.5, want 24.75, tolerance 2.43e-12"));
  EXPECT_THAT(CheckWith(SmallVector(), [](auto* r) { (*r)[1].S = 1; }),
              ElementsAre("S: got 307, want 306, tolerance 1.42e-11"));
  EXPECT_THAT(CheckWith(SmallVector(), [](auto* r) { Set(&*(*(*r)[1].dS)[0], 0, 118); }),
              ElementsAre("dS rank 1 tensor 0 element 0: got 118, want 117, tolerance 1.42e-11"));
}

TEST(CheckTest, TheToleranceIsTheFilesForTheDTypeTimesTheScale) {
  // 16 * 2^-52 * 4 on either side of 4: three units of 2^-50 or less, and no more.
  const double unit = std::ldexp(1, -50);
  for (const double off : {16.0, 17.0}) {
    const auto failures = CheckWith(SmallVector(), [&](auto* r) {
      for (auto& rank : *r) {
        Set(&rank.y[0], 0, 4 + off * unit);
        rank.y_again = rank.y;
      }
    });
    EXPECT_EQ(failures.size(), off == 16 ? 0 : 2);
  }
  // Half types: 2 * 2^-7 * 4 = 1/16 for bf16.
  Json json = SmallVector();
  json["dtype"] = "bf16";
  json.erase("second");
  for (const double off : {0.0625, 0.125}) {
    const auto failures = CheckWith(json, [&](auto* r) {
      for (auto& rank : *r) Set(&rank.y[0], 0, 4 - off);
    });
    EXPECT_EQ(failures.size(), off == 0.0625 ? 0 : 2);
  }
}

TEST(CheckTest, ExactIsExact) {
  Json json = SmallVector();
  json["exact"] = {"y", "xbar"};
  const double next = std::nextafter(3, 4);
  EXPECT_THAT(CheckWith(json, [&](auto* r) { Set(&*(*(*r)[1].xbar)[0], 0, next); }),
              ElementsAre("xbar rank 1 tensor 0 element 0: got 3.0000000000000004, want 3, exact"));
  EXPECT_THAT(CheckWith(SmallVector(), [&](auto* r) { Set(&*(*(*r)[1].xbar)[0], 0, next); }),
              IsEmpty());
}

TEST(CheckTest, NoNumberIsNearNanOrInfinity) {
  for (const char* const want : {"nan", "inf", "-inf"}) {
    Json json = SmallVector();
    json["outputs"][0][0]["data"][0] = json["outputs"][1][0]["data"][0] = want;
    EXPECT_THAT(CheckWith(json, [](auto*) {}), IsEmpty());
    for (const double got : {1e300, std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      const auto failures = CheckWith(json, [&](auto* r) {
        for (auto& rank : *r) {
          Set(&rank.y[0], 0, got);
          rank.y_again = rank.y;
        }
      });
      const std::string text(want);
      const bool same =
          std::isnan(got) ? text == "nan" : std::isinf(got) && text == (got > 0 ? "inf" : "-inf");
      EXPECT_EQ(failures.empty(), same) << want << " " << got;
    }
  }
  EXPECT_EQ(
      CheckWith(SmallVector(), [](auto* r) { Set(&*(*(*r)[0].G)[0], 0, std::nan("")); }).size(), 1);
}

TEST(CheckTest, RanksAgreeBitForBit) {
  // Within the tolerance, and -0 = +0, but not the same bits.
  Json json = SmallVector();
  json["outputs"][0][0]["data"] = json["outputs"][1][0]["data"] = {4, 0};
  EXPECT_THAT(CheckWith(json,
                        [](auto* r) {
                          Set(&(*r)[1].y[0], 1, -0.0);
                          (*r)[1].y_again = (*r)[1].y;
                        }),
              ElementsAre("y rank 1 tensor 0 element 1: got -0, other bits than 0 as on rank 0"));
  EXPECT_THAT(CheckWith(json, [](auto* r) { Set(&(*r)[1].y_again[0], 1, -0.0); }),
              ElementsAre("y rank 1 tensor 0 element 1: got -0, other bits than 0 as before"));
}

TEST(CheckTest, FindsWhatIsMissingOrOfAnotherType) {
  EXPECT_THAT(CheckWith(SmallVector(),
                        [](auto* r) {
                          (*r)[0].y.clear();
                          (*r)[0].y_again.clear();
                        }),
              ::testing::Contains("y rank 0: got 0 tensors, want 1"));
  EXPECT_THAT(CheckWith(SmallVector(), [](auto* r) { (*r)[1].xbar.reset(); }),
              ElementsAre("xbar rank 1: got none"));
  EXPECT_THAT(CheckWith(SmallVector(), [](auto* r) { (*(*r)[1].dS)[0].reset(); }),
              ElementsAre("dS rank 1 tensor 0: got none"));
  EXPECT_THAT(CheckWith(SmallVector(),
                        [](auto* r) {
                          (*(*r)[0].G)[0]->shape = {2, 1};
                        }),
              ElementsAre("G rank 0 tensor 0: got f64[2,1], want f64[2]"));
  Json integers = SmallVector();
  integers.erase("grad");
  integers.erase("second");
  integers["dtype"] = "i64";
  integers["inputs"][1][0]["data"] = {3, 1};
  integers["outputs"][0][0]["data"] = integers["outputs"][1][0]["data"] = {4, 3};
  EXPECT_THAT(CheckWith(integers,
                        [](auto* r) {
                          for (auto& rank : *r) rank.y[0].bytes[0] = 5;
                        }),
              ElementsAre("y rank 0 tensor 0 element 0: got 5, want 4, exact",
                          "y rank 1 tensor 0 element 0: got 5, want 4, exact"));
}

TEST(CheckTest, ARankThatSkipsIsAskedOnlyWhereAllJoin) {
  Json json = SmallVector();
  json["grad"]["g"][0] = json["second"]["w"][0] = json["second"]["v"][0] = nullptr;
  const Parsed parsed = Parse(json);
  EXPECT_TRUE(NeedsAllJoin(parsed.v));
  EXPECT_FALSE(NeedsAllJoin(Parse(SmallVector()).v));
  EXPECT_FALSE(AsksFirst(parsed.v, 0, Pass::kAsItStands));
  EXPECT_TRUE(AsksFirst(parsed.v, 1, Pass::kAsItStands));
  EXPECT_TRUE(AsksFirst(parsed.v, 0, Pass::kAllJoin));
  EXPECT_FALSE(AsksSecond(parsed.v, 0, Pass::kAsItStands));
  EXPECT_TRUE(AsksSecond(parsed.v, 0, Pass::kAllJoin));
  std::vector<RankResults> results = Sound(parsed.v);
  results[0].xbar.reset();
  EXPECT_THAT(Check(parsed.v, parsed.tolerance, Pass::kAsItStands, results), IsEmpty());
  EXPECT_THAT(Check(parsed.v, parsed.tolerance, Pass::kAllJoin, results),
              ElementsAre("xbar rank 0: got none"));
}

}  // namespace
}  // namespace vectors
}  // namespace chorus
