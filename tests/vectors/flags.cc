#include "tests/vectors/flags.h"

#include <random>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"

ABSL_FLAG(std::string, transport, "ring", "How the SDK reaches the daemon: ring, stream or unary.");
ABSL_FLAG(std::string, backend, "host",
          "The daemon's backend; one that it does not have it names.");
ABSL_FLAG(uint64_t, sim_seed, 0,
          "Of --backend=sim: the order in which it runs its work; 0: another one each time.");
ABSL_FLAG(std::string, daemon, "server/chorusd", "The program chorusd.");

namespace chorus {
namespace vectors {

absl::StatusOr<RunnerOptions> OptionsFromFlags() {
  RunnerOptions options;
  options.daemon = absl::GetFlag(FLAGS_daemon);
  options.backend = absl::GetFlag(FLAGS_backend);
  options.sim_seed = absl::GetFlag(FLAGS_sim_seed);
  if (options.sim_seed == 0) options.sim_seed = std::random_device()();
  const std::string transport = absl::GetFlag(FLAGS_transport);
  if (transport == "ring") {
    options.transport = Transport::kRing;
  } else if (transport == "stream") {
    options.transport = Transport::kStream;
  } else if (transport == "unary") {
    options.transport = Transport::kUnary;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("--transport: expected ring, stream or unary, got \"", transport, "\""));
  }
  return options;
}

}  // namespace vectors
}  // namespace chorus
