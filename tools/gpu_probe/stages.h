// The stages of the probe, each in a process of its own, and the roles of the processes that they
// start in turn.
//
// Threads: one a process. Ownership: what a stage takes goes with its process. Errors: a stage's
//   status is why its assumption is not decided, unless it has said its verdict before.
#ifndef CHORUS_TOOLS_GPU_PROBE_STAGES_H_
#define CHORUS_TOOLS_GPU_PROBE_STAGES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/gpu_probe/child.h"
#include "tools/gpu_probe/record.h"
#include "tools/gpu_probe/schedule.h"

namespace chorus {
namespace probe {

struct StageContext {
  Recorder* recorder = nullptr;
  std::vector<std::string> libraries;

  // A helper that looks for libraries in the same folders.
  absl::StatusOr<Helper> Start(const std::string& role,
                               const std::vector<std::string>& arguments = {},
                               const std::vector<std::string>& environment = {}) const;
};

// In the order in which they run: what decides most comes first.
const std::vector<Stage>& AllStages();
// The stage `name`. NOT_FOUND: there is none.
absl::Status RunStage(const std::string& name, StageContext* context);

// --- Stages, by files ---

absl::Status RunDriver(StageContext* context);  // whether there is anything to probe
absl::Status RunCeilings(StageContext* context);
absl::Status RunP1(StageContext* context);
absl::Status RunP2(StageContext* context);
absl::Status RunP3(StageContext* context);
absl::Status RunP4(StageContext* context);
absl::Status RunP5(StageContext* context);
absl::Status RunP6(StageContext* context);
absl::Status RunP7(StageContext* context);
absl::Status RunP8(StageContext* context);
absl::Status RunP9(StageContext* context);
absl::Status RunP10(StageContext* context);
absl::Status RunP11(StageContext* context);
absl::Status RunP12(StageContext* context);

// --- Helpers ---

struct RoleContext {
  std::vector<std::string> arguments;
  std::vector<std::string> libraries;
  Channel channel;  // to the process that started it; invalid in roles without one
};
// NOT_FOUND: there is no such role.
absl::Status RunRole(const std::string& role, RoleContext* context);

// P2
absl::Status OwnChunk(RoleContext* context);
absl::Status ReadChunk(RoleContext* context);
absl::Status TellFreeMemory(RoleContext* context);
// P4
absl::Status RunStreams(RoleContext* context);
// P8
absl::Status SpinUntilKilled(RoleContext* context);
absl::Status WatchGpu(RoleContext* context);
// P9
absl::Status Multiply(RoleContext* context);
absl::Status LoadGpu(RoleContext* context);
// P10
absl::Status PlayPingPong(RoleContext* context);
absl::Status BeNcclRank(RoleContext* context);
// P12, without channels
absl::Status StartWrongWriter(RoleContext* context);
absl::Status WriteWrongly(RoleContext* context);

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_STAGES_H_
