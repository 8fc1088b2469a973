// The program from end to end, without a driver and on the stand-in for one.
#include <dlfcn.h>
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

using ::testing::ContainsRegex;
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
  if (void* const driver = dlopen("libcuda.so.1", RTLD_LAZY); driver != nullptr) {
    dlclose(driver);
    GTEST_SKIP() << "this machine has a driver";
  }
  const Ran ran = RunProbe({}, {"LD_LIBRARY_PATH=" + folder_});
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
  EXPECT_THAT(ran.output, HasSubstr("all-reduce of 1 MiB, median, rank 1"));
  EXPECT_THAT(ran.output, Not(ContainsRegex("wrong sums of NCCL at rank [01] [0-9]+ >")));
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

// P9 on a cuBLASLt with this fault.
class GpuProbeBlasTest : public GpuProbeTest {
 protected:
  std::string RunP9(const std::string& fault) {
    const Ran ran = RunOnFake({"--only=P9", "--limit=500"}, {"CHORUS_FAKE_BLAS_FAULT=" + fault});
    EXPECT_EQ(ran.status, 0) << ran.output;
    return ran.output;
  }
  static constexpr const char* kHeuristicHolds =
      "| P9 holds by heuristics | yes: one result and one algorithm for each of 36 products |";
  static constexpr const char* kPinnedHolds =
      "| pinned by its 64 bytes: equal bits | yes: one result for each of 36 products |";
  static constexpr const char* kRebuiltHolds =
      "| pinned by its attributes: equal bits | yes: one result for each of 36 products, that of "
      "the "
      "pinned one |";
};

TEST_F(GpuProbeBlasTest, EqualBitsHoldInEachWay) {
  const std::string output = RunP9("none");
  EXPECT_THAT(output, HasSubstr("**P9 holds**: pinned by its 64 bytes, equal bits: yes: one result "
                                "for each of 36 products (3 times at offsets 0 and 64, in two "
                                "processes, alone and both at once, also under load of a third); "))
      << output;
  EXPECT_THAT(output, HasSubstr(kHeuristicHolds));
  EXPECT_THAT(output, HasSubstr(kPinnedHolds));
  EXPECT_THAT(output, HasSubstr(kRebuiltHolds));
  EXPECT_THAT(output, HasSubstr("| f32 256 x 784 x 64, B^T | algorithm 20, tile 21, split-k 22, "
                                "reduction scheme 23, swizzle 24, custom option 64, stages 26, "
                                "inner shape 27, cluster shape 28; results: by heuristic 1, pinned "
                                "1, rebuilt 1; algorithms: 1, of 1 structure |"));
  EXPECT_THAT(output, Not(HasSubstr(", structure 1 of")));
  EXPECT_THAT(output, HasSubstr("than at 64 | f32 256 x 64 x 784; f32 1024 x 1024 x 1024; "));
  EXPECT_THAT(output, HasSubstr("has other bytes (pinned, rebuilt) | nowhere |"));
}

TEST_F(GpuProbeBlasTest, ResultsThatDifferBetweenProcessesAreFoundInEachWay) {
  const std::string output = RunP9("bits");
  EXPECT_THAT(
      output,
      HasSubstr("**P9 does not hold**: pinned by its 64 bytes, equal bits: no: results of "))
      << output;
  EXPECT_THAT(output,
              HasSubstr("| P9 holds by heuristics | no: results of f32 256 x 64 x 784 2 > 1"));
  EXPECT_THAT(output, HasSubstr("pinned by its attributes: equal bits | no: results of "));
  EXPECT_THAT(output, HasSubstr("results of f32 1024 x 1024 x 1024 2 > 1"));
}

TEST_F(GpuProbeBlasTest, AlgorithmsThatDifferByProcessAreToldAndPinnedAway) {
  const std::string output = RunP9("split_k");
  EXPECT_THAT(output, HasSubstr("**P9 holds**: ")) << output;
  EXPECT_THAT(output,
              HasSubstr("| P9 holds by heuristics | no: results of f32 256 x 64 x 784 2 > 1; "
                        "algorithms of f32 256 x 64 x 784 2 > 1; "));
  EXPECT_THAT(output, HasSubstr(kPinnedHolds));
  EXPECT_THAT(output, HasSubstr(kRebuiltHolds));
  EXPECT_THAT(output, HasSubstr("algorithms: 2, of 2 structures"));
  EXPECT_THAT(output, ContainsRegex("f32 256 x 64 x 784, structure 1 of 2 \\| algorithm 20, [^|]*; "
                                    "given to: first process, call 1 \\(alone\\); first process, "
                                    "call 2 \\(alone\\); first process, call 3 \\(both\\); "));
  EXPECT_THAT(output,
              ContainsRegex("structure 2 of 2 \\| [^|]*, not that of structure 1, whose "
                            "bytes differ \\(its, these\\): bytes? [89][^|]*; given to: second "
                            "process, call 1 \\(alone\\); "));
}

TEST_F(GpuProbeBlasTest, AnAlgorithmThatOnlyTheFirstCallGivesIsTold) {
  const std::string output = RunP9("first_call");
  EXPECT_THAT(output, HasSubstr("**P9 holds**: ")) << output;
  EXPECT_THAT(output,
              ContainsRegex("f32 256 x 64 x 784, structure 1 of 2 \\| algorithm 20, tile 21, "
                            "split-k 2, [^|]*; given to: first process, call 1 \\(alone\\); "
                            "second process, call 1 \\(alone\\) \\|"));
  EXPECT_THAT(output, HasSubstr("; given to: first process, call 2 (alone); "));
  EXPECT_THAT(output, HasSubstr("bytes differ (its, these): byte 8: 02, 16; given to: "));
  EXPECT_THAT(output,
              HasSubstr("| P9 holds by heuristics | no: results of f32 256 x 64 x 784 2 > 1; "
                        "algorithms of f32 256 x 64 x 784 2 > 1 |"));
}

TEST_F(GpuProbeBlasTest, BytesThatNoAttributeShowsMakeNoOtherAlgorithm) {
  const std::string output = RunP9("bytes");
  EXPECT_THAT(output, HasSubstr("**P9 holds**: ")) << output;
  EXPECT_THAT(output, HasSubstr(kHeuristicHolds));
  EXPECT_THAT(output, HasSubstr("algorithms: 1, of 2 structures"));
  EXPECT_THAT(output,
              ContainsRegex("structure 2 of 2 \\| [^|]*, the same as structure 1, whose bytes "
                            "differ \\(its, these\\): bytes? 3[678]"));
  EXPECT_THAT(output, ContainsRegex("has other bytes \\(pinned, rebuilt\\) \\| f32 256 x 64 x 784 "
                                    "\\(bytes? 3[678]"));
}

TEST_F(GpuProbeBlasTest, BytesThatNoAttributeShowsMayMakeOtherBits) {
  const std::string output = RunP9("hidden");
  EXPECT_THAT(output, HasSubstr("**P9 holds**: ")) << output;
  EXPECT_THAT(output,
              HasSubstr("| P9 holds by heuristics | no: results of f32 256 x 64 x 784 2 > 1"));
  EXPECT_THAT(output, Not(HasSubstr("algorithms of ")));
  EXPECT_THAT(output, HasSubstr(kPinnedHolds));
  EXPECT_THAT(output, HasSubstr("pinned by its attributes: equal bits | no: results of "));
}

TEST_F(GpuProbeBlasTest, WhatCannotBeRebuiltCanStillBePinned) {
  const std::string output = RunP9("init");
  EXPECT_THAT(output, HasSubstr("**P9 holds**: ")) << output;
  EXPECT_THAT(output,
              HasSubstr("pinned by its attributes: equal bits | no: not so: f32 256 x 64 x 784 "
                        "runs (cublasLtMatmulAlgoInit: FAKE (7)); "));
}

TEST_F(GpuProbeBlasTest, AProductWithoutAnAlgorithmLeavesItOpen) {
  const std::string output = RunP9("refuse");
  EXPECT_THAT(output,
              HasSubstr("**P9 not decided**: pinned by its 64 bytes, equal bits: not decided: "
                        "unknown: there is no algorithm for f32 256 x 64 x 1; "))
      << output;
  EXPECT_THAT(output,
              HasSubstr("| f32 256 x 64 x 1 | no algorithm: the heuristic offers no algorithm |"));
}

TEST_F(GpuProbeBlasTest, AnAlgorithmThatTheOtherProcessCannotRunIsAnAnswer) {
  const std::string output = RunP9("run");
  EXPECT_THAT(output,
              HasSubstr("**P9 does not hold**: pinned by its 64 bytes, equal bits: no: not so: "
                        "f32 256 x 64 x 784 runs (cublasLtMatmul: FAKE (7)); "))
      << output;
  EXPECT_THAT(output, HasSubstr("If it is false: matmul kernels of our own"));
}

}  // namespace
}  // namespace probe
}  // namespace chorus
