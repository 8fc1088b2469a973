// tools/conformance: golden vectors through the SDK and a chorusd.

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "tests/vectors/flags.h"
#include "tests/vectors/runner.h"

ABSL_FLAG(std::string, vectors, "", "Directory with the JSON files of the vectors.");

namespace chorus {
namespace vectors {
namespace {

int Main() {
  const absl::StatusOr<RunnerOptions> options = OptionsFromFlags();
  if (!options.ok()) {
    std::cerr << "conformance: " << options.status().message() << "\n";
    return 2;
  }
  if (options->backend == "sim") {
    std::cout << "conformance: --sim_seed=" << options->sim_seed << std::endl;
  }
  const auto say = [](const std::string& line) { std::cout << line << std::endl; };
  Tally all;
  const absl::StatusOr<std::vector<std::string>> files = VectorFiles(absl::GetFlag(FLAGS_vectors));
  if (files.ok()) {
    Runner runner(*options);
    for (const std::string& file : *files) {
      const Tally tally = runner.RunFile(file, say);
      all.passed += tally.passed;
      all.failed += tally.failed;
    }
  } else {
    ++all.failed;
    say("FAILED " + std::string(files.status().message()));
  }
  if (all.passed + all.failed == 0) {
    ++all.failed;
    say("FAILED expected vectors in the files, got none");
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
