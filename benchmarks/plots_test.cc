#include "benchmarks/plots.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace bench {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

Measured Row(const std::string& name, double p50) {
  Measured row;
  row.name = name;
  RoundStats round;
  round.p50 = p50;
  row.summary = Summarize({round});
  return row;
}

// What is in the files, by suite; also removes them.
class PlotsTest : public ::testing::Test {
 protected:
  PlotsTest() : directory_(::testing::TempDir() + "/plots") {}

  std::string TextOf(const std::string& suite) {
    const std::string path = directory_ + "/" + suite + ".svg";
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    ::unlink(path.c_str());
    return text.str();
  }

  const std::string directory_;
  Plots plots_;
};

TEST_F(PlotsTest, EachSuiteHasAFileAndEachContenderACurve) {
  const Plots::Which small = {"small", "all_reduce, 2 ranks", Plots::Along::kBytes,
                              Plots::Value::kTime};
  plots_.Add(small, 4, {Row("chorus", 3000), Row("peer", 2000)});
  plots_.Add(small, 65536, {Row("chorus", 30000)});
  plots_.AddPoint({"sessions", "p99", Plots::Along::kSessions, Plots::Value::kTime}, "p99", 1000,
                  5e6);
  ASSERT_TRUE(plots_.Write(directory_).ok());
  // Into a directory that is there, too.
  ASSERT_TRUE(plots_.Write(directory_).ok());
  const std::string svg = TextOf("small");
  EXPECT_THAT(svg, HasSubstr(">chorus: 64 KiB, 30 us<"));
  EXPECT_THAT(svg, HasSubstr(">peer: 4 B, 2 us<"));
  EXPECT_THAT(svg, Not(HasSubstr("p99")));
  EXPECT_THAT(TextOf("sessions"), HasSubstr(">p99: 1000, 5 ms<"));
  EXPECT_THAT(TextOf("floor"), IsEmpty());
}

TEST_F(PlotsTest, BandwidthsAndRatesComeFromMedians) {
  plots_.Add({"user", "a", Plots::Along::kBytes, Plots::Value::kBandwidth}, 1 << 20,
             {Row("chorus", 1e6)}, 8e6);
  plots_.Add({"train", "b", Plots::Along::kRanks, Plots::Value::kRate}, 4, {Row("DDP", 8e6)});
  ASSERT_TRUE(plots_.Write(directory_).ok());
  const std::string user = TextOf("user");
  EXPECT_THAT(user, HasSubstr(">chorus: 1 MiB, 8<"));
  EXPECT_THAT(user, HasSubstr("GB/s"));
  const std::string train = TextOf("train");
  EXPECT_THAT(train, HasSubstr(">DDP: 4, 125<"));
  EXPECT_THAT(train, HasSubstr("steps/s"));
}

TEST_F(PlotsTest, WhatCannotBeWrittenIsSaid) {
  plots_.AddPoint({"user", "a", Plots::Along::kBytes, Plots::Value::kTime}, "b", 1, 1);
  EXPECT_THAT(std::string(plots_.Write("/proc/none").message()), HasSubstr("/proc/none"));
  EXPECT_THAT(std::string(plots_.Write("/proc").message()), HasSubstr("/proc/user.svg"));
}

}  // namespace
}  // namespace bench
}  // namespace chorus
