// tools/conformance: golden vectors through the SDK and a chorusd.

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "tests/vectors/runner.h"

ABSL_FLAG(std::string, vectors, "", "Directory with the JSON files of the vectors.");
ABSL_FLAG(std::string, transport, "ring", "How the SDK reaches the daemon: ring, stream or unary.");
ABSL_FLAG(std::string, backend, "host", "The daemon's backend: host or sim.");
ABSL_FLAG(uint64_t, sim_seed, 1, "Of --backend=sim: the order in which it runs its work.");
ABSL_FLAG(std::string, daemon, "", "The program chorusd.");

namespace chorus {
namespace vectors {
namespace {

int Main() {
  RunnerOptions options;
  options.daemon = absl::GetFlag(FLAGS_daemon);
  options.backend = absl::GetFlag(FLAGS_backend);
  options.sim_seed = absl::GetFlag(FLAGS_sim_seed);
  const std::string transport = absl::GetFlag(FLAGS_transport);
  if (transport == "ring") {
    options.transport = Transport::kRing;
  } else if (transport == "stream") {
    options.transport = Transport::kStream;
  } else if (transport == "unary") {
    options.transport = Transport::kUnary;
  } else {
    std::cerr << "conformance: --transport: expected ring, stream or unary, got \"" << transport
              << "\"\n";
    return 2;
  }
  if (options.backend != "host" && options.backend != "sim") {
    std::cerr << "conformance: --backend: expected host or sim, got \"" << options.backend
              << "\"\n";
    return 2;
  }
  const auto say = [](const std::string& line) { std::cout << line << std::endl; };
  Tally all;
  const absl::StatusOr<std::vector<std::string>> files = VectorFiles(absl::GetFlag(FLAGS_vectors));
  if (files.ok()) {
    Runner runner(options);
    for (const std::string& file : *files) {
      const Tally tally = runner.RunFile(file, say);
      all.passed += tally.passed;
      all.failed += tally.failed;
    }
  } else {
    ++all.failed;
    say("FAILED " + std::string(files.status().message()));
  }
  std::cout << all.passed << " passed, " << all.failed << " failed" << std::endl;
  return all.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace vectors
}  // namespace chorus

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "Runs every golden vector of a directory through the client SDK and a daemon: results, "
      "gradients, gradients of gradients. A line for each that failed; the last line counts.");
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  if (rest.size() > 1) {
    std::cerr << "conformance: expected flags only, got \"" << rest[1] << "\"\n";
    return 2;
  }
  // A rank that hangs is a thread that still runs: it must not see this process being taken down.
  std::_Exit(chorus::vectors::Main());
}
