// Runs stages one after the other, each in a process of its own with a time limit, within a limit
// for all: whatever one of them does, what the others tell is kept.
//
// Threads: one. Ownership: plain values. Errors: none; an outcome says how its stage ended.
#ifndef CHORUS_TOOLS_GPU_PROBE_SCHEDULE_H_
#define CHORUS_TOOLS_GPU_PROBE_SCHEDULE_H_

#include <functional>
#include <string>
#include <vector>

#include "tools/gpu_probe/record.h"

namespace chorus {
namespace probe {

struct Stage {
  std::string name;   // "P1"
  std::string title;  // what it looks at
  // It is begun only if so much is left of the whole, and is killed after the limit, or when the
  // whole is over.
  double usual_seconds = 0;
  double limit_seconds = 0;
};

struct Outcome {
  enum class How { kEnded, kFailed, kCrashed, kHung, kNotStarted, kLeftOut };
  Stage stage;
  How how = How::kEnded;
  std::string how_text;  // "killed after 10 s", "SIGSEGV"; empty for kEnded
  double seconds = 0;
  std::vector<Record> records;
  int garbage_lines = 0;  // where records should have been
  std::string log_tail;   // the last of what it printed
};
// "crashed", "hung", and so on.
const char* HowText(Outcome::How how);

struct Schedule {
  double limit_seconds = 240;
  // The program of a stage: it writes its records to descriptor kRecordsNumber.
  static constexpr int kRecordsNumber = 4;
  std::function<std::vector<std::string>(const Stage&, double limit_seconds)> command;
  std::vector<std::string> environment;
};

// Every stage has an outcome, in their order; `ended` is told of each at once.
std::vector<Outcome> RunStages(const Schedule& schedule, const std::vector<Stage>& stages,
                               const std::function<void(const Outcome&)>& ended);

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_SCHEDULE_H_
