// That the runner passes what is right and fails what is wrong, whatever it is given.
#include "tests/vectors/runner.h"

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "benchmarks/process.h"
#include "gmock/gmock.h"
#include "tests/vectors/testing.h"

namespace chorus {
namespace vectors {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using Json = nlohmann::json;

constexpr char kDaemon[] = "server/chorusd";
constexpr char kTool[] = "tests/vectors/conformance";

void Write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

class RunnerTest : public ::testing::Test {
 protected:
  RunnerOptions Options() const {
    RunnerOptions options;
    options.daemon = kDaemon;
    return options;
  }

  // The lines for the failures of a file with these vectors.
  std::vector<std::string> Run(const std::vector<Json>& vectors) {
    return RunText(FileText(vectors), vectors.size());
  }

  std::vector<std::string> RunText(const std::string& text, size_t count) {
    const std::string path = absl::StrCat(scratch_.path(), "/vectors.json");
    Write(path, text);
    std::vector<std::string> lines;
    const Tally tally = runner_.RunFile(path, [&](const std::string& line) {
      EXPECT_THAT(line, StartsWith("FAILED "));
      EXPECT_FALSE(absl::StrContains(line, "\n"));
      lines.push_back(line.substr(7));
    });
    EXPECT_EQ(static_cast<size_t>(tally.failed), lines.size());
    EXPECT_EQ(static_cast<size_t>(tally.passed + tally.failed), count);
    return lines;
  }

  // The same vector with another id and something changed.
  static Json Changed(const char* id, const std::function<void(Json*)>& change) {
    Json json = SmallVector();
    json["id"] = id;
    change(&json);
    return json;
  }

  bench::ScratchDirectory scratch_;
  Runner runner_{Options()};
};

TEST_F(RunnerTest, FindsAChangedNumberInEachResult) {
  const auto lines = Run({
      SmallVector(),
      Changed("y", [](Json* v) { (*v)["outputs"][1][0]["data"][0] = 4.5; }),
      Changed("xbar", [](Json* v) { (*v)["grad"]["xbar"][0][0]["data"][1] = -0.75; }),
      Changed("G", [](Json* v) { (*v)["second"]["G"][1][0]["data"][1] = 25; }),
      Changed("S", [](Json* v) { (*v)["second"]["S"] = 307; }),
      Changed("dS", [](Json* v) { (*v)["second"]["dS"][0][0]["data"][0] = 118; }),
      Changed("exact",
              [](Json* v) {
                (*v)["exact"] = {"xbar"};
                // One unit in the last place: nothing that a tolerance would find.
                (*v)["grad"]["xbar"][1][0]["data"][0] = 3.0000000000000004;
              }),
      Changed("tolerated",
              [](Json* v) { (*v)["grad"]["xbar"][1][0]["data"][0] = 3.0000000000000004; }),
      Changed("shape",
              [](Json* v) {
                for (auto& rank : (*v)["outputs"]) rank[0]["shape"] = {1, 2};
                v->erase("grad");
                v->erase("second");
              }),
  });
  EXPECT_THAT(
      lines,
      ElementsAre("y: y rank 1 tensor 0 element 0: got 4, want 4.5, tolerance 1.42e-14",
                  "xbar: xbar rank 0 tensor 0 element 1: got -0.5, want -0.75, tolerance 1.07e-14",
                  "G: G rank 1 tensor 0 element 1: got 24.75, want 25, tolerance 2.43e-12",
                  "S: S: got 306, want 307, tolerance 1.42e-11",
                  "dS: dS rank 0 tensor 0 element 0: got 117, want 118, tolerance 1.42e-11",
                  "exact: xbar rank 1 tensor 0 element 0: got 3, want 3.0000000000000004, exact",
                  "shape: y rank 0 tensor 0: got f64[2], want f64[1,2] (and 1 more)"));
}

TEST_F(RunnerTest, ARankThatSkipsIsRunBothWays) {
  const auto skip = [](Json* v) {
    Json& grad = (*v)["grad"];
    grad["g"][0] = nullptr;
    for (auto& rank : grad["xbar"]) rank[0]["data"] = {2, 0.5};
    v->erase("second");
  };
  EXPECT_THAT(Run({Changed("skips", skip)}), IsEmpty());
  EXPECT_THAT(Run({Changed("skips",
                           [&](Json* v) {
                             skip(v);
                             (*v)["grad"]["xbar"][0][0]["data"][0] = 7;
                           })}),
              ElementsAre("skips: xbar rank 0 tensor 0 element 0: got 2, want 7, tolerance "
                          "1.07e-14, where all ranks join"));
}

// S depends on the losses of ranks whose own inputs want no gradient.
TEST_F(RunnerTest, RanksWhoseInputsAreFrozenStillCount) {
  const auto freeze = [](Json* v) {
    (*v)["requires_grad"] = {true, false};
    (*v)["grad"]["xbar"][1][0] = nullptr;
  };
  EXPECT_THAT(Run({Changed("frozen", freeze)}), IsEmpty());
  EXPECT_THAT(Run({Changed("frozen",
                           [&](Json* v) {
                             freeze(v);
                             (*v)["requires_grad"][0] = false;
                           })}),
              ElementsAre("frozen: xbar rank 0 tensor 0: got none"));
}

// One session's two devices: the sum of both, on the first.
TEST_F(RunnerTest, OneProcessRunsAllItsDevices) {
  const auto devices = [](Json* v) {
    (*v)["op"] = "reduce_add_coalesced";
    (*v)["attrs"] = {{"dst", 0}, {"buffer_size", 8}};
    (*v)["outputs"][1] = (*v)["grad"]["g"][1] = (*v)["second"]["w"][1] = Json::array();
    for (auto& rank : (*v)["grad"]["xbar"]) rank[0]["data"] = {1, -1};
    (*v)["second"]["w"][0][0]["data"] = {3, 1};
  };
  const auto skip = [&](Json* v) {
    devices(v);
    (*v)["grad"]["g"][0] = (*v)["second"]["w"][0] = nullptr;
    for (auto& rank : (*v)["grad"]["xbar"]) rank[0]["data"] = {0, 0};
    for (const char* const key : {"G", "dS"}) {
      for (auto& rank : (*v)["second"][key]) rank[0]["data"] = {0, 0};
    }
    (*v)["second"]["S"] = 0;
  };
  const auto freeze = [&](Json* v) {
    devices(v);
    (*v)["requires_grad"] = {false, false};
    for (auto& rank : (*v)["grad"]["xbar"]) rank[0] = nullptr;
  };
  const auto wrong = [&](Json* v) {
    devices(v);
    (*v)["second"]["dS"][1][0]["data"][1] = 35;
  };
  EXPECT_THAT(Run({Changed("devices", devices), Changed("skip", skip), Changed("freeze", freeze),
                   Changed("wrong", wrong)}),
              ElementsAre("wrong: dS rank 1 tensor 0 element 1: got 34, want 35, tolerance "
                          "1.42e-11"));
}

TEST_F(RunnerTest, AnErrorOfOneVectorIsItsOwn) {
  const auto lines = Run({
      Changed("mismatch",
              [](Json* v) {
                (*v)["inputs"][1][0] = {{"shape", {3}}, {"data", {1, 2, 3}}};
                v->erase("grad");
                v->erase("second");
              }),
      Changed("huge and empty",
              [](Json* v) {
                for (const char* const key : {"inputs", "outputs"}) {
                  for (auto& rank : (*v)[key]) {
                    rank[0] = {{"shape", {0, 1 << 30}}, {"data", Json::array()}};
                  }
                }
                v->erase("grad");
                v->erase("second");
              }),
      Changed("many dimensions",
              [](Json* v) {
                for (const char* const key : {"inputs", "outputs"}) {
                  for (auto& rank : (*v)[key]) {
                    rank[0]["shape"] = std::vector<int>(40, 1);
                    rank[0]["data"] = {1};
                  }
                }
                v->erase("grad");
                v->erase("second");
              }),
      Changed("more devices",
              [](Json* v) {
                (*v)["world"] = 11;
                (*v)["group"] = {10, 3};
              }),
      SmallVector(),
  });
  ASSERT_EQ(lines.size(), 2) << ::testing::PrintToString(lines);
  EXPECT_THAT(lines[0], StartsWith("mismatch: "));
  EXPECT_THAT(lines[0], HasSubstr("MISMATCH"));
  EXPECT_THAT(lines[1], StartsWith("many dimensions: "));
}

TEST_F(RunnerTest, AFileThatIsNoneCountsAsOne) {
  EXPECT_THAT(RunText("{", 1), ElementsAre("vectors.json: vectors.json: this is no JSON"));
  EXPECT_THAT(RunText(R"({"vectors": [1, {"id": "x"}], "schema": 3})", 2),
              ElementsAre(HasSubstr("vectors.json#0: "), HasSubstr("x: ")));
  std::vector<std::string> lines;
  const Tally tally = runner_.RunFile(scratch_.path() + "/none.json",
                                      [&](const std::string& line) { lines.push_back(line); });
  EXPECT_EQ(tally.failed, 1);
  EXPECT_THAT(lines, ElementsAre("FAILED none.json: cannot be read"));
}

TEST_F(RunnerTest, GoesOnAfterADaemonThatIsGone) {
  EXPECT_THAT(Run({SmallVector()}), IsEmpty());
  ASSERT_EQ(kill(runner_.daemon()->pid(), SIGKILL), 0);
  ASSERT_FALSE(runner_.daemon()->Lives(int64_t{60} * 1000000000));
  EXPECT_THAT(Run({SmallVector(), SmallVector()}), IsEmpty());
}

TEST_F(RunnerTest, AHangIsAFailureWithWhatIsPending) {
  RunnerOptions options = Options();
  options.patience = absl::Seconds(3);
  Runner runner(options);
  const absl::StatusOr<VectorFile> file = ParseVectorFile("f", FileText({SmallVector()}));
  const Vector& v = *file->entries[0].vector;
  EXPECT_EQ(runner.Run(v, file->tolerance), "");
  runner.daemon()->Stop();
  EXPECT_THAT(runner.Run(v, file->tolerance), HasSubstr("; pending: unknown"));
  ASSERT_EQ(kill(runner.daemon()->pid(), SIGCONT), 0);
  EXPECT_EQ(runner.Run(v, file->tolerance), "");
}

// --- The tool -----------------------------------------------------------------------------------

class ToolTest : public RunnerTest {
 protected:
  // The exit status; `last` gets the last line.
  int Tool(const std::vector<std::string>& flags, std::string* last) {
    const std::string log = absl::StrCat(scratch_.path(), "/log");
    std::filesystem::remove(log);
    std::vector<std::string> argv = {kTool, absl::StrCat("--daemon=", kDaemon)};
    argv.insert(argv.end(), flags.begin(), flags.end());
    bench::Process::Options options;
    options.log = log;
    absl::StatusOr<bench::Process> process = bench::Process::Start(argv, options);
    EXPECT_TRUE(process.ok()) << process.status();
    const absl::StatusOr<int> status = process->Wait(int64_t{120} * 1000000000);
    EXPECT_TRUE(status.ok()) << status.status();
    const std::vector<std::string> lines =
        absl::StrSplit(bench::FileText(log), '\n', absl::SkipEmpty());
    *last = lines.empty() ? "" : lines.back();
    return status.value_or(-1);
  }

  std::string Folder(const std::string& name, const std::vector<std::string>& files) {
    const std::string folder = absl::StrCat(scratch_.path(), "/", name);
    std::filesystem::create_directory(folder);
    for (size_t i = 0; i < files.size(); ++i) {
      Write(absl::StrCat(folder, "/", i, ".json"), files[i]);
    }
    return folder;
  }
};

TEST_F(ToolTest, CountsAllVectorsOfADirectoryInItsLastLine) {
  const Json wrong = Changed("wrong", [](Json* v) { (*v)["second"]["S"] = 1; });
  const std::string good = Folder("good", {FileText({SmallVector()}), FileText({SmallVector()})});
  const std::string bad = Folder("bad", {FileText({SmallVector(), wrong}), "{", "[]"});
  std::string last;
  for (const char* const transport : {"ring", "stream", "unary"}) {
    for (const char* const backend : {"host", "sim"}) {
      SCOPED_TRACE(absl::StrCat(transport, " ", backend));
      const std::vector<std::string> flags = {absl::StrCat("--transport=", transport), "--backend",
                                              backend};
      const auto with = [&](const std::string& folder) {
        std::vector<std::string> all = flags;
        all.insert(all.end(), {"--vectors", folder});
        return all;
      };
      EXPECT_EQ(Tool(with(good), &last), 0);
      EXPECT_EQ(last, "2 passed, 0 failed");
      EXPECT_EQ(Tool(with(bad), &last), 1);
      EXPECT_EQ(last, "1 passed, 3 failed");
    }
  }
}

TEST_F(ToolTest, FailsWithoutVectors) {
  std::string last;
  EXPECT_EQ(Tool({"--vectors", scratch_.path() + "/none"}, &last), 1);
  EXPECT_EQ(last, "0 passed, 1 failed");
  EXPECT_EQ(Tool({"--vectors", Folder("empty", {})}, &last), 1);
  EXPECT_EQ(last, "0 passed, 1 failed");
  EXPECT_EQ(Tool({"--vectors", Folder("hollow", {FileText({})})}, &last), 1);
  EXPECT_EQ(last, "0 passed, 1 failed");
  const std::string good = Folder("good", {FileText({SmallVector()})});
  EXPECT_EQ(Tool({"--vectors", good, "--daemon=/none"}, &last), 1);
  EXPECT_EQ(last, "0 passed, 1 failed");
  EXPECT_EQ(Tool({"--vectors", good, "--backend=abacus"}, &last), 1);
  EXPECT_EQ(last, "0 passed, 1 failed");
  EXPECT_EQ(Tool({"--vectors", good, "--transport=pigeon"}, &last), 2);
  EXPECT_EQ(Tool({good}, &last), 2);
}

}  // namespace
}  // namespace vectors
}  // namespace chorus
