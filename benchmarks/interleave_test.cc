#include "benchmarks/interleave.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A contender whose iterations take what it is told, and which writes down when it was called.
class Fake {
 public:
  Fake(std::string name, double ns, std::vector<std::string>* calls)
      : name_(std::move(name)), ns_(ns), calls_(calls) {}

  Setting AsSetting() {
    return {name_, [this](int64_t iterations) -> absl::StatusOr<std::vector<double>> {
              calls_->push_back(name_);
              iterations_.push_back(iterations);
              return std::vector<double>(iterations, ns_);
            }};
  }
  const std::vector<int64_t>& iterations() const { return iterations_; }

 private:
  const std::string name_;
  const double ns_;
  std::vector<std::string>* const calls_;
  std::vector<int64_t> iterations_;
};

TEST(InterleaveTest, RoundsAlternateAndTheOrderTurns) {
  std::vector<std::string> calls;
  Fake a("a", 10, &calls), b("b", 20, &calls), c("c", 30, &calls);
  InterleaveOptions options;
  options.rounds = 3;
  options.round_ns = 100;
  auto measured = MeasureInterleaved({{"a", Role::kOurs, {a.AsSetting()}},
                                      {"b", Role::kFloor, {b.AsSetting()}},
                                      {"c", Role::kPeer, {c.AsSetting()}}},
                                     options);
  ASSERT_TRUE(measured.ok()) << measured.status();
  EXPECT_THAT(calls, ElementsAre("a", "b", "c",  // how long they take
                                 "a", "b", "c", "b", "c", "a", "c", "a", "b"));
  ASSERT_EQ(measured->size(), 3u);
  EXPECT_EQ((*measured)[1].name, "b");
  EXPECT_EQ((*measured)[1].role, Role::kFloor);
  EXPECT_EQ((*measured)[1].summary.p50, 20);
  EXPECT_EQ((*measured)[1].summary.rounds.size(), 3u);
}

TEST(InterleaveTest, IterationsFillARoundWithinTheLimits) {
  std::vector<std::string> calls;
  Fake quick("quick", 1, &calls), fitting("fitting", 50, &calls), slow("slow", 1e9, &calls);
  InterleaveOptions options;
  options.rounds = 1;
  options.round_ns = 1000;
  options.least_iterations = 2;
  options.most_iterations = 100;
  auto measured = MeasureInterleaved({{"quick", Role::kOurs, {quick.AsSetting()}},
                                      {"fitting", Role::kOurs, {fitting.AsSetting()}},
                                      {"slow", Role::kOurs, {slow.AsSetting()}}},
                                     options);
  ASSERT_TRUE(measured.ok()) << measured.status();
  EXPECT_THAT(quick.iterations(), ElementsAre(2, 100));
  EXPECT_THAT(fitting.iterations(), ElementsAre(2, 20));
  EXPECT_THAT(slow.iterations(), ElementsAre(2, 2));
  EXPECT_EQ((*measured)[1].iterations, 20);
}

TEST(InterleaveTest, TheBestSettingIsMeasuredAndAllAreTold) {
  std::vector<std::string> calls;
  Fake spin("spin", 900, &calls), yield("yield", 200, &calls), sleep("sleep", 500, &calls);
  InterleaveOptions options;
  options.rounds = 2;
  options.round_ns = 1000;
  auto measured = MeasureInterleaved(
      {{"peer", Role::kPeer, {spin.AsSetting(), yield.AsSetting(), sleep.AsSetting()}}}, options);
  ASSERT_TRUE(measured.ok()) << measured.status();
  const Measured& peer = measured->front();
  EXPECT_EQ(peer.setting, "yield");
  EXPECT_EQ(peer.summary.p50, 200);
  EXPECT_THAT(peer.tried, ElementsAre(std::make_pair(std::string("spin"), 900.0),
                                      std::make_pair(std::string("yield"), 200.0),
                                      std::make_pair(std::string("sleep"), 500.0)));
  EXPECT_EQ(spin.iterations().size(), 2u);
  EXPECT_EQ(yield.iterations().size(), 4u);
}

TEST(InterleaveTest, AHopelessSettingGetsNoTrial) {
  std::vector<std::string> calls;
  Fake spin("spin", 5e9, &calls), yield("yield", 200, &calls);
  InterleaveOptions options;
  options.rounds = 1;
  auto measured =
      MeasureInterleaved({{"peer", Role::kPeer, {spin.AsSetting(), yield.AsSetting()}}}, options);
  ASSERT_TRUE(measured.ok()) << measured.status();
  EXPECT_EQ(measured->front().setting, "yield");
  EXPECT_THAT(spin.iterations(), ElementsAre(options.least_iterations));
  EXPECT_EQ(measured->front().tried[0].second, 5e9);
}

TEST(InterleaveTest, AContenderWithoutASettingIsAnError) {
  const auto measured = MeasureInterleaved({{"none", Role::kPeer, {}}}, InterleaveOptions());
  EXPECT_EQ(measured.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(measured.status().message()), HasSubstr("none"));
}

TEST(InterleaveTest, AnErrorNamesTheContender) {
  Setting broken{"fast", [](int64_t) -> absl::StatusOr<std::vector<double>> {
                   return absl::DataLossError("element 3: expected 6, got 5");
                 }};
  auto measured = MeasureInterleaved({{"chorus", Role::kOurs, {broken}}}, {});
  EXPECT_EQ(measured.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(measured.status().message()),
              HasSubstr("chorus fast: element 3: expected 6, got 5"));
  Setting empty{"", [](int64_t) { return std::vector<double>(); }};
  EXPECT_FALSE(MeasureInterleaved({{"chorus", Role::kOurs, {empty}}}, {}).ok());
}

}  // namespace
}  // namespace bench
}  // namespace chorus
