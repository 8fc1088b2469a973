#include "core/base/failpoint.h"

#include <set>
#include <string>

#include "gtest/gtest.h"

namespace chorus {
namespace {

std::string* hits = new std::string;

void Record(absl::string_view name) { hits->append(name.data(), name.size()).append(";"); }

TEST(FailpointTest, TheHookSeesFailpointsWhileItIsSet) {
  CHORUS_FAILPOINT("ring.before_copy");
  SetFailpointHook(&Record);
  CHORUS_FAILPOINT("ring.before_copy");
  CHORUS_FAILPOINT("ring.before_tail");
  SetFailpointHook(nullptr);
  CHORUS_FAILPOINT("ring.before_copy");
  EXPECT_EQ(*hits, "ring.before_copy;ring.before_tail;");
}

TEST(FailpointTest, NamesAreUnique) {
  const std::set<std::string> names(AllFailpoints().begin(), AllFailpoints().end());
  EXPECT_EQ(names.size(), AllFailpoints().size());
}

TEST(FailpointTest, ParsesWhatTheHeaderSays) {
  absl::string_view name;
  int count = 0;
  EXPECT_TRUE(ParseFailpoint("ring.before_tail=kill", &name, &count));
  EXPECT_EQ(name, "ring.before_tail");
  EXPECT_EQ(count, 1);
  EXPECT_TRUE(ParseFailpoint("ring.mid_copy:17=kill", &name, &count));
  EXPECT_EQ(name, "ring.mid_copy");
  EXPECT_EQ(count, 17);
  for (const char* wrong : {"", "ring.mid_copy", "ring.mid_copy=", "ring.mid_copy=stop", "=kill",
                            "ring.no_such=kill", "ring.mid_copy:=kill", "ring.mid_copy:0=kill",
                            "ring.mid_copy:x=kill", "ring.mid_copy:1=kill "}) {
    EXPECT_FALSE(ParseFailpoint(wrong, &name, &count)) << wrong;
  }
}

TEST(FailpointDeathTest, AnEnvironmentThatNamesNothingEndsTheProcess) {
  ASSERT_EQ(setenv("CHORUS_FAILPOINT", "ring.no_such=kill", 1), 0);
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";  // starts the program again
  EXPECT_EXIT(std::exit(0), ::testing::ExitedWithCode(2), "expected name.*got 'ring.no_such=kill'");
  ASSERT_EQ(unsetenv("CHORUS_FAILPOINT"), 0);
}

}  // namespace
}  // namespace chorus
