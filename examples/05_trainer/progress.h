// How far a training is: a bar that stays on its line of a terminal, or plain lines elsewhere.
//
// Threads: one. Ownership: the file is the caller's, and outlives it. Errors: none: what cannot be
//   written is not shown.
#ifndef CHORUS_EXAMPLES_TRAINER_PROGRESS_H_
#define CHORUS_EXAMPLES_TRAINER_PROGRESS_H_

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/time/time.h"

namespace trainer {

// What stands there at step `step` of `steps`.
std::string ProgressBar(int64_t step, int64_t steps, int width);

class Progress {
 public:
  // Writes to `out`, as a terminal does if it is one.
  Progress(std::FILE* out, int64_t steps);
  // Ends the bar's line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `step` steps have ended by `now`. Shows it now and then, and the last one.
  void Show(int64_t step, double loss, absl::Time now);
  // A line of its own.
  void Say(const std::string& line);
  double steps_per_second(int64_t step, absl::Time now) const;

 private:
  std::FILE* const out_;
  const bool terminal_;
  const int64_t steps_;
  const absl::Time start_;
  absl::Time shown_ = absl::InfinitePast();
  bool open_ = false;  // the cursor stands behind the bar
};

}  // namespace trainer

#endif  // CHORUS_EXAMPLES_TRAINER_PROGRESS_H_
