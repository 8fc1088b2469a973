#include "tools/gpu_probe/options.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace probe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::vector<std::string> kNames = {"ceilings", "P1", "P2", "P12"};

TEST(OptionsTest, NothingSaidIsEverythingInFourMinutes) {
  const auto options = ParseOptions({}, kNames);
  ASSERT_TRUE(options.ok());
  EXPECT_THAT(options->only, IsEmpty());
  EXPECT_EQ(options->limit_seconds, 240);
  EXPECT_EQ(options->out, "");
  EXPECT_FALSE(options->list || options->help);
}

TEST(OptionsTest, TakesAll) {
  const auto options = ParseOptions(
      {"--only=P1,P12", "--limit=7.5", "--out=a/b.md", "--libraries=/x:/y", "--list"}, kNames);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->only, ElementsAre("P1", "P12"));
  EXPECT_EQ(options->limit_seconds, 7.5);
  EXPECT_EQ(options->out, "a/b.md");
  EXPECT_THAT(options->libraries, ElementsAre("/x", "/y"));
  EXPECT_TRUE(options->list);
}

TEST(OptionsTest, NamesWhatIsWrong) {
  for (const std::string bad :
       {"--only=P3", "--only=P", "--only=P1,p2", "--only=", "--limit=", "--limit=0", "--limit=-1",
        "--limit=nan", "--limit=1e9", "--limit=4m", "--out=", "P1", "--verbose"}) {
    const auto options = ParseOptions({bad}, kNames);
    EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_THAT(std::string(ParseOptions({"--only=P3"}, kNames).status().message()),
              HasSubstr("no stage P3; there are ceilings, P1, P2, P12"));
}

TEST(OptionsTest, AHelperGetsWhatFollowsAndTheLibraries) {
  const auto options =
      ParseOptions({"--child=read_chunk", "512", "--limit=9", "--libraries=/x"}, kNames);
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->child, "read_chunk");
  EXPECT_THAT(options->rest, ElementsAre("512", "--limit=9"));
  EXPECT_THAT(options->libraries, ElementsAre("/x"));
}

}  // namespace
}  // namespace probe
}  // namespace chorus
