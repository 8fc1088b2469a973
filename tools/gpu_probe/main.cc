// gpu_probe: decides on a GPU what the cuda backend assumes of it. docs/gpu.md says how it is run.
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "tools/gpu_probe/child.h"
#include "tools/gpu_probe/gpu.h"
#include "tools/gpu_probe/options.h"
#include "tools/gpu_probe/report.h"
#include "tools/gpu_probe/schedule.h"
#include "tools/gpu_probe/stages.h"

namespace chorus {
namespace probe {
namespace {

enum ExitStatus { kAllRan = 0, kSomeBroke = 1, kUsage = 2, kNoGpu = 3 };

// Without a colon's worth of remedy: a line for people.
std::string Line(const absl::Status& status) { return ErrorOf(status).message; }

// Libraries' threads and destructors may outlive what they need: nothing of a process of the probe
// is worth waiting for once it has told what it knows.
[[noreturn]] void EndNow(int status) {
  fflush(nullptr);
  _exit(status);
}

int RunAsStage(const Options& options) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Recorder recorder(Schedule::kRecordsNumber);
  StageContext context;
  context.recorder = &recorder;
  context.libraries = options.libraries;
  const absl::Status status = RunStage(options.stage, &context);
  if (status.ok()) return 0;
  const std::string line = Line(status);
  std::cerr << options.stage << ": " << line << "\n";
  if (recorder.has_verdict()) return 0;
  recorder.Say(options.stage, {Decision::kNotDecided, line});
  return options.stage == "driver" ? 1 : 0;
}

int RunAsHelper(const Options& options) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  RoleContext context;
  context.arguments = options.rest;
  context.libraries = options.libraries;
  const bool has_channel =
      options.child != "start_wrong_writer" && options.child != "write_wrongly";
  if (has_channel) context.channel = Channel(UniqueFd(Channel::kNumber));
  const absl::Status status = RunRole(options.child, &context);
  if (status.ok()) return 0;
  const std::string line = Line(status);
  std::cerr << options.child << ": " << line << "\n";
  // The process that asked reads it where an answer should be.
  if (has_channel) (void)context.channel.Send(line.empty() ? "failed" : line);
  return 1;
}

std::vector<Stage> Wanted(const Options& options) {
  std::vector<Stage> wanted;
  for (const Stage& stage : AllStages()) {
    const bool named =
        std::find(options.only.begin(), options.only.end(), stage.name) != options.only.end();
    if (options.only.empty() || named) wanted.push_back(stage);
  }
  return wanted;
}

void WriteOut(const Options& options, const std::string& text,
              const std::vector<Outcome>& outcomes) {
  if (options.out.empty()) return;
  // After each stage: what has been found out is on the disk if this process is killed.
  for (const auto& [path, content] :
       {std::make_pair(options.out, text),
        std::make_pair(options.out + ".jsonl", JsonLines(outcomes))}) {
    const absl::Status written = ReplaceFile(path, {content});
    if (!written.ok()) std::cerr << "gpu_probe: " << Line(written) << "\n";
  }
}

int Run(const Options& options) {
  Schedule schedule;
  schedule.limit_seconds = options.limit_seconds;
  schedule.command = [&](const Stage& stage, double /*limit_seconds*/) {
    std::vector<std::string> argv = {SelfPath(), "--stage=" + stage.name};
    if (!options.libraries.empty()) {
      argv.push_back("--libraries=" + absl::StrJoin(options.libraries, ":"));
    }
    return argv;
  };
  const double start = NowSeconds();
  // In a process of its own, too: the driver may hang as it starts.
  const Outcome driver =
      RunStages(schedule, {{"driver", "", 0, 20}}, [](const Outcome& /*outcome*/) {})[0];
  if (driver.how != Outcome::How::kEnded) {
    const std::string why =
        driver.records.empty() ? VerdictOf(driver).why : driver.records.back().text;
    std::cerr << "gpu_probe: nothing to probe here: " << why << "\n";
    return kNoGpu;
  }
  schedule.limit_seconds -= NowSeconds() - start;
  std::string text;
  std::vector<Outcome> outcomes;
  bool broke = false;
  RunStages(schedule, Wanted(options), [&](const Outcome& outcome) {
    const std::string of_stage = StageText(outcome);
    std::cout << of_stage << std::flush;
    text += of_stage;
    outcomes.push_back(outcome);
    const bool ran = outcome.how == Outcome::How::kEnded || outcome.how == Outcome::How::kLeftOut;
    broke = broke || !ran || outcome.garbage_lines > 0;
    WriteOut(options, text, outcomes);
  });
  const std::string summary =
      absl::StrCat("## Summary\n\n", SummaryText(outcomes), "\ngpu_probe took ",
                   NumberText(NowSeconds() - start), " s.\n");
  std::cout << summary << std::flush;
  WriteOut(options, text + summary, outcomes);
  return broke ? kSomeBroke : kAllRan;
}

int Main(const std::vector<std::string>& arguments) {
  std::vector<std::string> names;
  for (const Stage& stage : AllStages()) names.push_back(stage.name);
  const auto options = ParseOptions(arguments, names);
  if (!options.ok()) {
    std::cerr << "gpu_probe: " << options.status().message() << "\n\n" << UsageText();
    return kUsage;
  }
  if (!options->stage.empty()) EndNow(RunAsStage(*options));
  if (!options->child.empty()) EndNow(RunAsHelper(*options));
  if (options->help) {
    std::cout << UsageText();
    return kAllRan;
  }
  if (options->list) {
    for (const Stage& stage : AllStages()) {
      std::cout << stage.name << "\t" << stage.title << ", usually " << stage.usual_seconds
                << " s, at most " << stage.limit_seconds << " s\n";
    }
    std::cout << "kernels\t" << (HasKernels() ? "built in" : "none: built without a CUDA toolkit")
              << "\n";
    return kAllRan;
  }
  return Run(*options);
}

}  // namespace
}  // namespace probe
}  // namespace chorus

int main(int argc, char** argv) {
  return chorus::probe::Main(std::vector<std::string>(argv + 1, argv + argc));
}
