#include "tools/gpu_probe/stages.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace chorus {
namespace probe {

absl::StatusOr<Helper> StageContext::Start(const std::string& role,
                                           const std::vector<std::string>& arguments,
                                           const std::vector<std::string>& environment) const {
  std::vector<std::string> all = arguments;
  if (!libraries.empty()) all.push_back("--libraries=" + absl::StrJoin(libraries, ":"));
  return StartHelper(role, all, environment);
}

const std::vector<Stage>& AllStages() {
  // The usual times are far more than an H100 took (18 s for all, in the first run); the limits
  // keep one that hangs from taking what the others need. All together: assumptions about memory
  // and processes shape the design, speeds only tune it, but all are cheap beside a context's start
  // of about a second.
  static const auto& stages = *new std::vector<Stage>{
      {"ceilings", "what this GPU can do at most", 5, 25},
      {"P1", "pinned memory files", 4, 25},
      {"P2", "memory that outlives its process", 8, 35},
      {"P3", "completions", 3, 20},
      {"P4", "streams", 4, 20},
      {"P5", "graphs", 5, 25},
      {"P6", "ordered reductions", 4, 25},
      {"P7", "interpreted chains", 4, 25},
      {"P8", "a killed process", 6, 25},
      {"P9", "cuBLASLt", 15, 60},
      {"P10", "two contexts; NCCL", 10, 50},
      {"P11", "this program here", 1, 10},
      {"P12", "compute-sanitizer", 10, 45},
  };
  return stages;
}

absl::Status RunStage(const std::string& name, StageContext* context) {
  static const auto& stages = *new std::map<std::string, absl::Status (*)(StageContext*)>{
      {"driver", &RunDriver}, {"ceilings", &RunCeilings},
      {"P1", &RunP1},         {"P2", &RunP2},
      {"P3", &RunP3},         {"P4", &RunP4},
      {"P5", &RunP5},         {"P6", &RunP6},
      {"P7", &RunP7},         {"P8", &RunP8},
      {"P9", &RunP9},         {"P10", &RunP10},
      {"P11", &RunP11},       {"P12", &RunP12},
  };
  const auto row = stages.find(name);
  if (row == stages.end()) return absl::NotFoundError(absl::StrCat("no stage ", name));
  return row->second(context);
}

absl::Status RunRole(const std::string& role, RoleContext* context) {
  static const auto& roles = *new std::map<std::string, absl::Status (*)(RoleContext*)>{
      {"own_chunk", &OwnChunk},
      {"read_chunk", &ReadChunk},
      {"free_memory", &TellFreeMemory},
      {"streams", &RunStreams},
      {"spin", &SpinUntilKilled},
      {"watch", &WatchGpu},
      {"multiply", &Multiply},
      {"load", &LoadGpu},
      {"ping_pong", &PlayPingPong},
      {"nccl_rank", &BeNcclRank},
      {"start_wrong_writer", &StartWrongWriter},
      {"write_wrongly", &WriteWrongly},
  };
  const auto row = roles.find(role);
  if (row == roles.end()) return absl::NotFoundError(absl::StrCat("no role ", role));
  return row->second(context);
}

}  // namespace probe
}  // namespace chorus
