#include "benchmarks/interleave.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

absl::StatusOr<RoundStats> RunRound(const Contender& contender, const Setting& setting,
                                    int64_t iterations) {
  absl::StatusOr<std::vector<double>> samples = setting.run(iterations);
  if (!samples.ok()) {
    return absl::Status(samples.status().code(), absl::StrCat(contender.name, " ", setting.name,
                                                              ": ", samples.status().message()));
  }
  if (samples->empty()) {
    return absl::InternalError(absl::StrCat(contender.name, ": a round without samples"));
  }
  return StatsOf(*std::move(samples));
}

int64_t FittingIterations(double iteration_ns, const InterleaveOptions& options) {
  const double fitting = options.round_ns / std::max(iteration_ns, 1.0);
  if (fitting >= static_cast<double>(options.most_iterations)) return options.most_iterations;
  return std::max(options.least_iterations, static_cast<int64_t>(fitting));
}

// A contender with the setting that won the trial.
struct Choice {
  const Setting* setting = nullptr;
  int64_t iterations = 0;
  std::vector<std::pair<std::string, double>> tried;
};

absl::StatusOr<Choice> Try(const Contender& contender, const InterleaveOptions& options) {
  // A few iterations say how many are needed, and which settings are out of the question.
  constexpr double kHopeless = 10;
  if (contender.settings.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(contender.name, " has no setting to run"));
  }
  std::vector<double> medians;
  for (const Setting& setting : contender.settings) {
    CHORUS_ASSIGN_OR_RETURN(RoundStats first,
                            RunRound(contender, setting, options.least_iterations));
    medians.push_back(first.p50);
  }
  const bool several = medians.size() > 1;
  const double least = *std::min_element(medians.begin(), medians.end());
  Choice choice;
  double best = INFINITY;
  for (size_t i = 0; i < medians.size(); ++i) {
    const Setting& setting = contender.settings[i];
    if (several && medians[i] <= kHopeless * least) {
      CHORUS_ASSIGN_OR_RETURN(RoundStats trial,
                              RunRound(contender, setting, FittingIterations(medians[i], options)));
      medians[i] = trial.p50;
    }
    if (several) choice.tried.emplace_back(setting.name, medians[i]);
    if (medians[i] < best) {
      best = medians[i];
      choice.setting = &setting;
      choice.iterations = FittingIterations(best, options);
    }
  }
  return choice;
}

}  // namespace

absl::StatusOr<std::vector<Measured>> MeasureInterleaved(const std::vector<Contender>& contenders,
                                                         const InterleaveOptions& options) {
  std::vector<Choice> choices;
  for (const Contender& contender : contenders) {
    CHORUS_ASSIGN_OR_RETURN(Choice choice, Try(contender, options));
    choices.push_back(std::move(choice));
  }
  const size_t count = contenders.size();
  std::vector<std::vector<RoundStats>> rounds(count);
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t turn = 0; turn < count; ++turn) {
      const size_t i = (turn + round) % count;
      CHORUS_ASSIGN_OR_RETURN(RoundStats stats,
                              RunRound(contenders[i], *choices[i].setting, choices[i].iterations));
      rounds[i].push_back(stats);
    }
  }
  std::vector<Measured> measured(count);
  for (size_t i = 0; i < count; ++i) {
    measured[i].name = contenders[i].name;
    measured[i].role = contenders[i].role;
    measured[i].setting = choices[i].setting->name;
    measured[i].tried = std::move(choices[i].tried);
    measured[i].iterations = choices[i].iterations;
    measured[i].summary = Summarize(std::move(rounds[i]));
  }
  return measured;
}

}  // namespace bench
}  // namespace chorus
