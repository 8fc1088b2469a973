// The public vectors, a case for each op, over one transport on one backend.
//
//   public_ring_host_test --transport=ring --backend=host     as BUILD.bazel has them
#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "tests/vectors/flags.h"
#include "tests/vectors/runner.h"

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
}  // namespace vectors
}  // namespace chorus

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  absl::ParseCommandLine(argc, argv);
  const absl::StatusOr<chorus::vectors::RunnerOptions> options =
      chorus::vectors::OptionsFromFlags();
  if (!options.ok()) {
    std::cerr << options.status().message() << std::endl;
    return 2;
  }
  std::cout << "--sim_seed=" << options->sim_seed << std::endl;
  chorus::vectors::Runner runner(*options);
  chorus::vectors::runner = &runner;
  return RUN_ALL_TESTS();
}
