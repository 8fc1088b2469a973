// How far a training is, its loss, its speed and the time that is left: a bar that stays on its
// line of a terminal, or plain lines elsewhere.
//
// Threads: one. Ownership: the file is the caller's, and outlives it. Errors: what cannot be shown
//   is not; WritePlot's are those of core/base/file.h.
#ifndef CHORUS_CLIENT_DATA_PROGRESS_BAR_H_
#define CHORUS_CLIENT_DATA_PROGRESS_BAR_H_

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "chorus/data/plot.h"

namespace chorus {
namespace data {

// Times are those of a clock that does not jump; where none is given, now.
class ProgressBar {
 public:
  // Of `steps` steps, `done` of which were done before now, by a training that this one goes on
  // with. Writes to `out`, as a terminal does if it is one.
  ProgressBar(std::FILE* out, int64_t steps, int64_t done = 0,
              absl::optional<absl::Time> start = absl::nullopt);
  // Ends the bar's line.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // `step` steps have ended by `now`. Shows it now and then, and the last one:
  // "step 30/100 loss 0.5000 12.5 steps/s 0:06 left".
  void Show(int64_t step, double loss, absl::optional<absl::Time> now = absl::nullopt);
  // A line of its own.
  void Say(const std::string& line);
  // The losses that Show was given, as an SVG file, in the place of what is there. Of a long
  // training every second one, or fourth, and so on: a few thousand.
  absl::Status WritePlot(const std::string& path) const;
  // Since it was made.
  double steps_per_second(int64_t step, absl::optional<absl::Time> now = absl::nullopt) const;

 private:
  void Keep(int64_t step, double loss);

  std::FILE* const out_;
  const bool terminal_;
  const int64_t steps_;
  const int64_t done_;
  const absl::Time start_;
  absl::Time shown_ = absl::InfinitePast();
  bool open_ = false;  // the cursor stands behind the bar
  plot::Curve losses_{"loss", {}, {}};
  int64_t given_ = 0;
  int64_t keep_every_ = 1;  // of those that were given
};

// What stands there at step `step` of `steps`: "####......".
std::string BarText(int64_t step, int64_t steps, int width);
// "0:06", "1:00:30"; "-:--" where it is not known.
std::string TimeText(absl::Duration time);

}  // namespace data
}  // namespace chorus

#endif  // CHORUS_CLIENT_DATA_PROGRESS_BAR_H_
