// The program from end to end, without a driver and on the stand-in for one.
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tools/gpu_probe/assumptions.h"
#include "tools/gpu_probe/child.h"

namespace chorus {
namespace probe {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Runfile(const std::string& path) {
  const char* const folder = std::getenv("TEST_SRCDIR");
  return (folder == nullptr ? "" : std::string(folder) + "/chorus/") + "tools/gpu_probe/" + path;
}

std::string FileText(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

struct Ran {
  int status = -1;
  std::string output;
};

class GpuProbeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/chorus-gpu-probe-XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    folder_ = path;
  }
  void TearDown() override { ASSERT_EQ(system(("rm -rf " + folder_).c_str()), 0); }

  static Ran RunProbe(const std::vector<std::string>& arguments,
                      const std::vector<std::string>& environment) {
    std::vector<std::string> argv = {Runfile("gpu_probe")};
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    const UniqueFd output = TemporaryFile();
    Child::Options options;
    options.environment = environment;
    options.output = output.get();
    auto child = Child::Start(argv, options);
    if (!child.ok()) return {-1, std::string(child.status().message())};
    const auto status = child->Wait(600);
    return {status.ok() ? *status : -1, ContentOf(output.get())};
  }
  // With the stand-ins for the driver, cuBLASLt and NCCL.
  Ran RunOnFake(std::vector<std::string> arguments, std::vector<std::string> environment = {}) {
    environment.push_back("CHORUS_FAKE_GPU_DIR=" + folder_);
    environment.push_back("LD_LIBRARY_PATH=" + Runfile("testing"));
    return RunProbe(arguments, environment);
  }

  std::string folder_;
};

TEST_F(GpuProbeTest, WithoutADriverItSaysSoInOneLineAndEndsWithAStatusOfItsOwn) {
  const Ran ran = RunProbe({}, {"LD_LIBRARY_PATH=" + folder_});
  if (!absl::StrContains(ran.output, "libcuda.so.1")) GTEST_SKIP() << "this machine has a driver";
  EXPECT_EQ(ran.status, 3);
  EXPECT_THAT(ran.output, HasSubstr("gpu_probe: nothing to probe here: no libcuda.so.1: "));
  EXPECT_EQ(std::count(ran.output.begin(), ran.output.end(), '\n'), 1) << ran.output;
}

TEST_F(GpuProbeTest, WithoutAGpuTheSame) {
  const Ran ran = RunOnFake({}, {"CHORUS_FAKE_GPU_NONE=1"});
  EXPECT_EQ(ran.status, 3);
  EXPECT_EQ(ran.output, "gpu_probe: nothing to probe here: the driver has no GPU\n");
}

TEST_F(GpuProbeTest, ADriverThatCrashesOrFailsAtItsStartIsALine) {
  EXPECT_EQ(RunOnFake({}, {"CHORUS_FAKE_GPU_FAULT=crash:cuInit"}).status, 3);
  const Ran ran = RunOnFake({}, {"CHORUS_FAKE_GPU_FAULT=cuInit"});
  EXPECT_EQ(ran.status, 3);
  EXPECT_THAT(ran.output, HasSubstr("cuInit: CUDA_ERROR_FAKE (999)"));
}

TEST_F(GpuProbeTest, WrongArgumentsAreAStatusOfTheirOwn) {
  const Ran ran = RunProbe({"--only=P99"}, {});
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.output, HasSubstr("no stage P99"));
}

TEST_F(GpuProbeTest, ListsEveryAssumption) {
  const Ran ran = RunProbe({"--list"}, {});
  EXPECT_EQ(ran.status, 0);
  for (const Assumption& assumption : Assumptions()) {
    EXPECT_THAT(ran.output, HasSubstr(absl::StrCat(assumption.id, "\t")));
  }
}

// Stages whose verdict on the stand-in does not depend on time.
TEST_F(GpuProbeTest, DecidesWhatDoesNotDependOnTime) {
  const std::string out = folder_ + "/table.md";
  const Ran ran = RunOnFake({"--only=P2,P11,P12", "--limit=500", "--out=" + out});
  EXPECT_EQ(ran.status, 0) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("**P2 holds**")) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("**P11 holds**"));
  EXPECT_THAT(ran.output, HasSubstr("| P1 | memfd pages"));
  const std::string table = FileText(out);
  EXPECT_THAT(ran.output, HasSubstr(table));
  EXPECT_THAT(table, HasSubstr("## Summary"));
  int verdicts = 0;
  for (const absl::string_view line :
       absl::StrSplit(FileText(out + ".jsonl"), '\n', absl::SkipEmpty())) {
    verdicts += nlohmann::json::parse(line.begin(), line.end())["kind"] == "verdict";
  }
  EXPECT_EQ(verdicts, 3);
}

TEST_F(GpuProbeTest, ReductionsChainsAndGraphsComputeWhatTheyShould) {
  const Ran ran = RunOnFake({"--only=P5,P6,P7", "--limit=500"});
  EXPECT_EQ(ran.status, 0) << ran.output;
  // Of speed nothing is asked here.
  EXPECT_THAT(ran.output, Not(HasSubstr("not so: "))) << ran.output;
  EXPECT_THAT(ran.output, Not(HasSubstr("stopped")));
  EXPECT_THAT(ran.output, HasSubstr("nodes of a captured product | 1 |"));
  EXPECT_THAT(ran.output, HasSubstr("sum of 8 x 1 MiB, eight waves"));
  EXPECT_THAT(ran.output, HasSubstr("SGD with momentum, by hand over 1 MiB, one wave"));
}

TEST_F(GpuProbeTest, TwoProcessesPlayThroughFlagsAndNccl) {
  const Ran ran = RunOnFake({"--only=P10", "--limit=500"});
  EXPECT_THAT(ran.output, HasSubstr("rounds that the first process's kernel saw")) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("NCCL | 2.28.9"));
  EXPECT_THAT(ran.output, Not(HasSubstr("wrong sums of NCCL at rank 0 1")));
}

TEST_F(GpuProbeTest, AStageThatCrashesLosesNothingOfTheOthers) {
  const Ran ran = RunOnFake({"--only=P1,P11", "--limit=500"},
                            {"CHORUS_FAKE_GPU_FAULT=crash:cuMemHostRegister"});
  EXPECT_EQ(ran.status, 1) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("**P1 not decided**: the stage crashed: signal 6"));
  EXPECT_THAT(ran.output, HasSubstr("**P11 holds**"));
}

TEST_F(GpuProbeTest, AStageThatHangsIsKilledAndTheOthersGoOn) {
  // P11 has a limit of ten seconds, which it waits for here.
  const Ran ran =
      RunOnFake({"--only=P11,P12", "--limit=500"}, {"CHORUS_FAKE_GPU_FAULT=hang:cuModuleLoadData"});
  EXPECT_EQ(ran.status, 1) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("**P11 not decided**: the stage hung: killed after 10 s"));
  EXPECT_THAT(ran.output,
              HasSubstr("| P12 | compute-sanitizer follows the worker | not decided |"));
}

TEST_F(GpuProbeTest, AnErrorOfTheDriverIsWhyNothingIsDecided) {
  const Ran ran =
      RunOnFake({"--only=P11", "--limit=500"}, {"CHORUS_FAKE_GPU_FAULT=cuModuleLoadData"});
  EXPECT_EQ(ran.status, 0) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("**P11 not decided**: "));
}

TEST_F(GpuProbeTest, MemoryThatCannotBePinnedIsAnAnswer) {
  const Ran ran =
      RunOnFake({"--only=P1", "--limit=500"}, {"CHORUS_FAKE_GPU_FAULT=cuMemHostRegister"});
  EXPECT_EQ(ran.status, 0) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("**P1 does not hold**: not so: cuMemHostRegister takes"));
  EXPECT_THAT(ran.output, HasSubstr("If it is false: bounce ring of cuMemHostAlloc"));
}

TEST_F(GpuProbeTest, AChunkThatNobodyElseCanReadIsAnAnswer) {
  const Ran ran = RunOnFake({"--only=P2", "--limit=500"},
                            {"CHORUS_FAKE_GPU_FAULT=cuMemImportFromShareableHandle"});
  EXPECT_THAT(ran.output, HasSubstr("**P2 does not hold**: not so: another process can read"))
      << ran.output;
}

TEST_F(GpuProbeTest, ResultsThatDifferBetweenProcessesAreFound) {
  const Ran ran = RunOnFake({"--only=P9", "--limit=500"}, {"CHORUS_FAKE_BLAS_UNSTEADY=1"});
  EXPECT_THAT(ran.output, HasSubstr("**P9 does not hold**: ")) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("results of f32 1024 x 1024 x 1024 2 > 1"));
}

}  // namespace
}  // namespace probe
}  // namespace chorus
