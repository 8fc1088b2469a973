// What planning costs for graphs that are much to plan: time, and the most memory at any time.
//
//   bazel run //core/runtime/plan:plan_benchmark [-- SIZE]
//
// Each graph is planned in a process of its own, so that its memory is its own.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/graph/encoding.h"
#include "core/runtime/plan/plan.h"
#include "core/runtime/testing/hostile_graphs.h"

namespace chorus {
namespace {

int64_t MostMemory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} << 10;
}

void Measure(testing::HostileGraph kind, int size) {
  const Graph graph = testing::MakeHostileGraph(kind, size);
  const size_t bytes = EncodeGraph(graph).size();
  const int64_t before = MostMemory();
  const absl::Time start = absl::Now();
  const absl::StatusOr<Plan> plan = CompilePlan(graph, {});
  const absl::Duration took = absl::Now() - start;
  const absl::string_view name = testing::NameOf(kind);
  std::printf("%-20.*s %8.2f MB of graph, %8.3f s, %8.1f MB more: %s\n",
              static_cast<int>(name.size()), name.data(), static_cast<double>(bytes) / 1e6,
              absl::ToDoubleSeconds(took), static_cast<double>(MostMemory() - before) / 1e6,
              plan.ok() ? "planned" : plan.status().ToString().c_str());
}

int Main(int size) {
  for (const testing::HostileGraph kind : testing::kHostileGraphs) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child < 0) return 1;
    if (child == 0) {
      Measure(kind, size);
      std::fflush(stdout);
      std::_Exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) {
      const std::string name(testing::NameOf(kind));
      std::printf("%-20s ended with %d\n", name.c_str(), status);
    }
  }
  return 0;
}

}  // namespace
}  // namespace chorus

int main(int argc, char** argv) { return chorus::Main(argc > 1 ? std::atoi(argv[1]) : 20000); }
