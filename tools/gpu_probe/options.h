// What the command line of gpu_probe says.
//
// Threads: pure functions. Ownership: plain values. Errors: INVALID_ARGUMENT, with the argument.
#ifndef CHORUS_TOOLS_GPU_PROBE_OPTIONS_H_
#define CHORUS_TOOLS_GPU_PROBE_OPTIONS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace chorus {
namespace probe {

struct Options {
  bool help = false;
  bool list = false;
  std::vector<std::string> only;       // stages' names; empty: all
  double limit_seconds = 240;          // of everything
  std::string out;                     // a file for the tables; the records go to OUT.jsonl
  std::vector<std::string> libraries;  // folders that are searched first
  // Of a process that the probe starts for itself; one of the two at most.
  std::string stage;
  std::string child;
  std::vector<std::string> rest;  // arguments of `child`
};

// `names` are those of the stages.
absl::StatusOr<Options> ParseOptions(const std::vector<std::string>& arguments,
                                     const std::vector<std::string>& names);
std::string UsageText();

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_OPTIONS_H_
