#include "tools/gpu_probe/schedule.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tools/gpu_probe/child.h"

namespace chorus {
namespace probe {
namespace {

constexpr size_t kLogTailBytes = 1500;

void ReadRecords(const std::string& content, Outcome* outcome) {
  for (const absl::string_view line : absl::StrSplit(content, '\n', absl::SkipEmpty())) {
    Record record;
    if (ParseRecord(line, &record)) {
      outcome->records.push_back(std::move(record));
    } else {
      ++outcome->garbage_lines;
    }
  }
}

Outcome RunStage(const Schedule& schedule, const Stage& stage, double limit) {
  Outcome outcome;
  outcome.stage = stage;
  const UniqueFd records = TemporaryFile();
  const UniqueFd log = TemporaryFile();
  const double start = NowSeconds();
  Child::Options options;
  options.environment = schedule.environment;
  options.descriptors = {{records.get(), Schedule::kRecordsNumber}};
  options.output = log.get();
  options.group = true;
  auto child = Child::Start(schedule.command(stage, limit), options);
  if (!child.ok()) {
    outcome.how = Outcome::How::kNotStarted;
    outcome.how_text = std::string(child.status().message());
    return outcome;
  }
  const auto status = child->Wait(limit);
  if (!status.ok()) {
    outcome.how = Outcome::How::kHung;
    outcome.how_text = absl::StrCat("killed after ", NumberText(limit), " s");
    if (!child->Kill()) absl::StrAppend(&outcome.how_text, ", and does not even end then");
  } else if (*status > 128) {
    outcome.how = Outcome::How::kCrashed;
    outcome.how_text = absl::StrCat("signal ", *status - 128, ", ", strsignal(*status - 128));
  } else if (*status != 0) {
    outcome.how = Outcome::How::kFailed;
    outcome.how_text = absl::StrCat("status ", *status);
  }
  outcome.seconds = NowSeconds() - start;
  ReadRecords(ContentOf(records.get()), &outcome);
  const std::string printed = ContentOf(log.get());
  outcome.log_tail = printed.substr(printed.size() - std::min(printed.size(), kLogTailBytes));
  return outcome;
}

}  // namespace

const char* HowText(Outcome::How how) {
  switch (how) {
    case Outcome::How::kEnded:
      return "ended";
    case Outcome::How::kFailed:
      return "failed";
    case Outcome::How::kCrashed:
      return "crashed";
    case Outcome::How::kHung:
      return "hung";
    case Outcome::How::kNotStarted:
      return "not started";
    case Outcome::How::kLeftOut:
      return "left out";
  }
  return "?";
}

std::vector<Outcome> RunStages(const Schedule& schedule, const std::vector<Stage>& stages,
                               const std::function<void(const Outcome&)>& ended) {
  const double end = NowSeconds() + schedule.limit_seconds;
  std::vector<Outcome> outcomes;
  for (const Stage& stage : stages) {
    const double left = end - NowSeconds();
    Outcome outcome;
    if (left < stage.usual_seconds) {
      outcome.stage = stage;
      outcome.how = Outcome::How::kLeftOut;
      outcome.how_text = absl::StrCat("usually takes ", NumberText(stage.usual_seconds), " s, ",
                                      NumberText(std::max(0.0, left)), " s were left");
    } else {
      outcome = RunStage(schedule, stage, std::min(left, stage.limit_seconds));
    }
    ended(outcome);
    outcomes.push_back(std::move(outcome));
  }
  return outcomes;
}

}  // namespace probe
}  // namespace chorus
