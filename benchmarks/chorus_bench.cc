// Measures Chorus beside the machine's own limits, Open MPI and c10d/Gloo. See docs/performance.md.
//
//   chorus_bench --daemon=PATH [--attack=PATH] [--quick] [--json=FILE] [--plot=DIRECTORY] [floor]
//   [small] [owned] [user] [compute] [graph] [sessions] [death] [hostile] [train] [conv] [step]
//
// Without names: all of them. The exit status is not 0 when a result was wrong or something failed;
// a missed goal is reported, and no failure.

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "benchmarks/burner.h"
#include "benchmarks/grpc_round_trip.h"
#include "benchmarks/handoff.h"
#include "benchmarks/idle_sessions.h"
#include "benchmarks/machine.h"
#include "benchmarks/memory_floor.h"
#include "benchmarks/open_mpi.h"
#include "benchmarks/plots.h"
#include "benchmarks/report.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "benchmarks/training.h"

ABSL_FLAG(std::string, daemon, "", "The chorusd to measure.");
ABSL_FLAG(std::string, attack, "", "The program of tests/hostile that attacks, for `hostile`.");
ABSL_FLAG(bool, quick, false, "Fewer and shorter rounds: for a first look.");
ABSL_FLAG(bool, smoke, false, "A few iterations of everything: shows that it works.");
ABSL_FLAG(std::vector<std::string>, ranks, std::vector<std::string>({"2", "4", "8"}),
          "How many ranks take part.");
ABSL_FLAG(int64_t, most_mib, 256, "The largest result of a rank.");
ABSL_FLAG(std::vector<std::string>, ops, {},
          "owned: only these collectives, such as reduce,all_to_all_single. hostile: only these "
          "attacks, such as flood,planning.");
ABSL_FLAG(
    std::string, torch_python, "",
    "A Python that has torch: measures c10d/Gloo too. tools/bench --peer=torch installs one.");
ABSL_FLAG(std::string, torch_rank, "benchmarks/torch_rank.py", "A rank of that peer.");
ABSL_FLAG(std::string, json, "", "Where all figures go.");
ABSL_FLAG(std::string, plot, "", "A directory for plots: one SVG file a suite that has any.");
ABSL_FLAG(std::string, commit, "", "What was built, for the heading.");
// Of the helper processes, which are this program too.
ABSL_FLAG(std::string, helper, "", "Internal: which helper to be.");
ABSL_FLAG(std::string, control, "", "Internal: where the driver listens.");
ABSL_FLAG(std::vector<std::string>, burn, {},
          "Internal: for what part of which period, by thread.");
ABSL_FLAG(int, index, 0, "Internal: which of the helpers.");
ABSL_FLAG(std::string, socket, "", "Internal: a gRPC server's socket.");
ABSL_FLAG(std::string, address, "", "Internal: where chorusd listens.");

namespace chorus {
namespace bench {
namespace {

int BeHelper(const std::string& helper) {
  const std::string control = absl::GetFlag(FLAGS_control);
  if (helper == "memory") return RunMemoryFloorHelper(control);
  if (helper == "open_mpi") return RunOpenMpiHelper(control);
  if (helper == "grpc_server") return RunGrpcServerHelper(control, absl::GetFlag(FLAGS_socket));
  if (helper == "grpc_client") return RunGrpcClientHelper(control, absl::GetFlag(FLAGS_socket));
  if (helper == "training") {
    return RunTrainingHelper(control, absl::GetFlag(FLAGS_index), absl::GetFlag(FLAGS_address));
  }
  if (helper == "burner") return RunBurnerHelper(absl::GetFlag(FLAGS_burn));
  if (helper == "idle_sessions") {
    return RunIdleSessionsHelper(control, absl::GetFlag(FLAGS_address));
  }
  if (helper == "trainer")
    return RunTrainerHelper(control, absl::GetFlag(FLAGS_index), absl::GetFlag(FLAGS_address));
  std::cerr << "no helper " << helper << "\n";
  return 2;
}

struct Suite {
  const char* name;
  absl::Status (*run)(const Context&);
};
constexpr Suite kSuites[] = {
    {"floor", &RunFloor},       {"small", &RunSmall},     {"owned", &RunOwned},
    {"user", &RunUser},         {"compute", &RunCompute}, {"graph", &RunGraph},
    {"sessions", &RunSessions}, {"death", &RunDeath},     {"hostile", &RunHostile},
    {"train", &RunTrain},       {"conv", &RunConv},       {"step", &RunStep}};

absl::StatusOr<std::vector<Suite>> Chosen(const std::vector<char*>& arguments) {
  std::vector<Suite> chosen;
  for (size_t i = 1; i < arguments.size(); ++i) {
    bool is_known = false;
    for (const Suite& suite : kSuites) {
      if (std::string(suite.name) != arguments[i]) continue;
      chosen.push_back(suite);
      is_known = true;
    }
    if (!is_known) {
      return absl::InvalidArgumentError(absl::StrCat(
          "no benchmark ", arguments[i],
          "; there are floor, small, owned, user, compute, graph, sessions, death, hostile, "
          "train, conv, step"));
    }
  }
  if (chosen.empty()) chosen.assign(std::begin(kSuites), std::end(kSuites));
  return chosen;
}

int Main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "measures Chorus: [floor] [small] [owned] [user] [compute] [graph] [sessions] [death] "
      "[hostile] [train] [conv] [step]");
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  if (!absl::GetFlag(FLAGS_helper).empty()) return BeHelper(absl::GetFlag(FLAGS_helper));

  const absl::StatusOr<std::vector<Suite>> suites = Chosen(arguments);
  if (!suites.ok()) {
    std::cerr << suites.status().message() << "\n";
    return 2;
  }
  const ScratchDirectory scratch;
  Report report(DescribeMachine(absl::GetFlag(FLAGS_commit)));
  Context context;
  context.scratch = &scratch;
  context.report = &report;
  Plots plots;
  context.plots = &plots;
  context.daemon_program = absl::GetFlag(FLAGS_daemon);
  context.attack_program = absl::GetFlag(FLAGS_attack);
  context.effort = absl::GetFlag(FLAGS_smoke)   ? Effort::kSmoke
                   : absl::GetFlag(FLAGS_quick) ? Effort::kQuick
                                                : Effort::kFull;
  context.most_bytes = absl::GetFlag(FLAGS_most_mib) << 20;
  context.ops = absl::GetFlag(FLAGS_ops);
  context.torch_python = absl::GetFlag(FLAGS_torch_python);
  context.torch_rank = absl::GetFlag(FLAGS_torch_rank);
  context.ranks.clear();
  for (const std::string& text : absl::GetFlag(FLAGS_ranks)) {
    int ranks = 0;
    if (!absl::SimpleAtoi(text, &ranks) || ranks < 2 || ranks > HandoffGroup::kMostClients) {
      std::cerr << "--ranks: expected numbers from 2 to " << HandoffGroup::kMostClients << ", got "
                << text << "\n";
      return 2;
    }
    context.ranks.push_back(ranks);
  }
  std::cout << report.MachineText() << std::flush;
  int status = 0;
  for (const Suite& suite : *suites) {
    std::cout << "\n== " << suite.name << "\n" << std::flush;
    const absl::Status suite_status = suite.run(context);
    context.Show();
    if (!suite_status.ok()) {
      std::cerr << suite.name << ": " << suite_status << "\n";
      status = 1;
    }
  }
  std::cout << "\n" << report.GoalsText();
  const std::string json = absl::GetFlag(FLAGS_json);
  const std::string plot = absl::GetFlag(FLAGS_plot);
  absl::Status written;
  if (!json.empty()) written.Update(report.WriteJson(json));
  if (!plot.empty()) written.Update(plots.Write(plot));
  if (!written.ok()) {
    std::cerr << written.message() << "\n";
    status = 1;
  }
  return status;
}

}  // namespace
}  // namespace bench
}  // namespace chorus

int main(int argc, char** argv) { return chorus::bench::Main(argc, argv); }
