#include "tests/vectors/public_vectors.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "gmock/gmock.h"

namespace chorus {
namespace vectors {
namespace {

constexpr char kVectors[] = "tests/vectors/public";

Runner* runner = nullptr;

class PublicVectors : public ::testing::TestWithParam<std::string> {};

TEST_P(PublicVectors, GiveWhatTheySay) {
  std::vector<std::string> failures;
  const Tally tally = runner->RunFile(
      GetParam(), [&failures](const std::string& line) { failures.push_back(line); });
  EXPECT_EQ(tally.failed, 0) << absl::StrJoin(failures, "\n");
  EXPECT_GT(tally.passed, 0);
}

// "tests/vectors/public/all_reduce.json" is "all_reduce".
std::string OpOf(const ::testing::TestParamInfo<std::string>& info) {
  const size_t start = info.param.rfind('/') + 1;
  return info.param.substr(start, info.param.rfind('.') - start);
}

INSTANTIATE_TEST_SUITE_P(Ops, PublicVectors, ::testing::ValuesIn(VectorFiles(kVectors).value()),
                         OpOf);

}  // namespace

int RunPublicVectors(const RunnerOptions& options) {
  Runner one(options);
  runner = &one;
  return RUN_ALL_TESTS();
}

}  // namespace vectors
}  // namespace chorus
