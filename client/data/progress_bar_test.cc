#include "chorus/data/progress_bar.h"

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace data {
namespace {

// What `show` writes.
template <typename F>
std::string Written(const F& show) {
  std::FILE* const file = std::tmpfile();
  EXPECT_NE(file, nullptr);
  show(file);
  std::rewind(file);
  std::string text(1000, '\0');
  text.resize(std::fread(&text[0], 1, text.size(), file));
  std::fclose(file);
  return text;
}

TEST(ProgressBarTest, WhatIsNoTerminalGetsPlainLines) {
  const absl::Time start = absl::UnixEpoch();
  EXPECT_EQ(Written([&](std::FILE* file) {
              ProgressBar bar(file, 300, 0, start);
              bar.Show(0, 0.75, start);
              bar.Show(10, 0.5, start + absl::Seconds(2));
              bar.Show(20, 0.25, start + absl::Milliseconds(2900));  // too soon
              bar.Say("epoch 1");
              bar.Show(40, 0.25, start + absl::Seconds(4));
              bar.Show(300, 0.125, start + absl::Milliseconds(4100));  // the last one
            }),
            "step 0/300 loss 0.7500 0.0 steps/s -:-- left\n"
            "step 10/300 loss 0.5000 5.0 steps/s 0:58 left\n"
            "epoch 1\n"
            "step 40/300 loss 0.2500 10.0 steps/s 0:26 left\n"
            "step 300/300 loss 0.1250 73.2 steps/s 0:00 left\n");
}

TEST(ProgressBarTest, AResumedTrainingsSpeedIsOfItsOwnSteps) {
  const absl::Time start = absl::UnixEpoch();
  EXPECT_EQ(Written([&](std::FILE* file) {
              ProgressBar bar(file, 200, 100, start);
              bar.Show(110, 0.5, start + absl::Seconds(10));
            }),
            "step 110/200 loss 0.5000 1.0 steps/s 1:30 left\n");
}

// What WritePlot writes after `count` losses, and what it is to be of every so many of them.
void ExpectPlotOfEvery(int64_t every, int64_t count) {
  const std::string path = ::testing::TempDir() + "/losses.svg";
  plot::Curve losses{"loss", {}, {}};
  Written([&](std::FILE* file) {
    ProgressBar bar(file, count, 0, absl::UnixEpoch());
    for (int64_t i = 0; i < count; ++i) {
      const double loss = 1 / (1 + static_cast<double>(i % 7));
      bar.Show(i + 1, loss, absl::UnixEpoch());
      if (i % every != 0) continue;
      losses.x.push_back(static_cast<double>(i + 1));
      losses.y.push_back(loss);
    }
    ASSERT_TRUE(bar.WritePlot(path).ok());
  });
  const auto written = MapFile(path);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(std::string(written->bytes), plot::Svg({{"training", {"step"}, {"loss"}, {losses}}}));
}

TEST(ProgressBarTest, PlotsTheLosses) {
  ExpectPlotOfEvery(1, 3);
  ExpectPlotOfEvery(1, 4096);
  ExpectPlotOfEvery(2, 4097);
  ExpectPlotOfEvery(4, 10000);
  Written([](std::FILE* file) {
    const ProgressBar bar(file, 1);
    EXPECT_FALSE(bar.WritePlot("/no/such/directory/losses.svg").ok());
  });
}

TEST(ProgressBarTest, BarsAndTimes) {
  EXPECT_EQ(BarText(0, 10, 4), "....");
  EXPECT_EQ(BarText(5, 10, 4), "##..");
  EXPECT_EQ(BarText(10, 10, 4), "####");
  EXPECT_EQ(BarText(11, 10, 4), "####");
  EXPECT_EQ(BarText(0, 0, 4), "####");
  EXPECT_EQ(TimeText(absl::ZeroDuration()), "0:00");
  EXPECT_EQ(TimeText(absl::Seconds(3599.9)), "59:59");
  EXPECT_EQ(TimeText(absl::Seconds(3600)), "1:00:00");
  EXPECT_EQ(TimeText(absl::Seconds(86400 + 61)), "24:01:01");
}

// Between the looks at it before and after.
TEST(ProgressBarTest, WhereNoTimeIsGivenItIsTheSteadyClocks) {
  std::FILE* const file = std::tmpfile();
  {
    const absl::Time start = SteadyNow() - absl::Seconds(10);
    const ProgressBar bar(file, 10, 0, start);
    const absl::Duration least = SteadyNow() - start;
    const double speed = bar.steps_per_second(5);
    const absl::Duration most = SteadyNow() - start;
    EXPECT_LE(speed, 5 / absl::ToDoubleSeconds(least));
    EXPECT_GE(speed, 5 / absl::ToDoubleSeconds(most));
  }
  {
    const absl::Time before = SteadyNow();
    const ProgressBar bar(file, 10);
    const absl::Time after = SteadyNow();
    const absl::Time end = after + absl::Seconds(10);
    const double speed = bar.steps_per_second(5, end);
    EXPECT_LE(speed, 5 / absl::ToDoubleSeconds(end - after));
    EXPECT_GE(speed, 5 / absl::ToDoubleSeconds(end - before));
  }
  std::fclose(file);
}

}  // namespace
}  // namespace data
}  // namespace chorus
