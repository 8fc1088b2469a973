#include "chorus/data/progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_format.h"
#include "core/base/clock.h"
#include "core/base/file.h"

namespace chorus {
namespace data {

std::string BarText(int64_t step, int64_t steps, int width) {
  const int64_t full = steps > 0 ? std::min(step, steps) * width / steps : width;
  return std::string(static_cast<size_t>(full), '#') +
         std::string(static_cast<size_t>(width - full), '.');
}

std::string TimeText(absl::Duration time) {
  if (time == absl::InfiniteDuration()) return "-:--";
  const int64_t seconds = absl::ToInt64Seconds(time);
  const int64_t minutes = seconds / 60;
  if (minutes < 60) return absl::StrFormat("%d:%02d", minutes, seconds % 60);
  return absl::StrFormat("%d:%02d:%02d", minutes / 60, minutes % 60, seconds % 60);
}

ProgressBar::ProgressBar(std::FILE* out, int64_t steps, int64_t done,
                         absl::optional<absl::Time> start)
    : out_(out),
      terminal_(isatty(fileno(out)) != 0),
      steps_(steps),
      done_(done),
      start_(start.has_value() ? *start : SteadyNow()) {}

ProgressBar::~ProgressBar() {
  if (open_) std::fputc('\n', out_);
}

double ProgressBar::steps_per_second(int64_t step, absl::optional<absl::Time> now) const {
  const absl::Time end = now.has_value() ? *now : SteadyNow();
  const double seconds = absl::ToDoubleSeconds(end - start_);
  return seconds > 0 ? static_cast<double>(step - done_) / seconds : 0;
}

void ProgressBar::Keep(int64_t step, double loss) {
  constexpr size_t kMost = 4096;
  if (given_++ % keep_every_ != 0) return;
  if (losses_.x.size() == kMost) {
    for (std::vector<double>* of : {&losses_.x, &losses_.y}) {
      for (size_t i = 0; i < kMost / 2; ++i) (*of)[i] = (*of)[2 * i];
      of->resize(kMost / 2);
    }
    keep_every_ *= 2;
  }
  losses_.x.push_back(static_cast<double>(step));
  losses_.y.push_back(loss);
}

absl::Status ProgressBar::WritePlot(const std::string& path) const {
  const std::string svg = plot::Svg({{"training", {"step"}, {"loss"}, {losses_}}});
  return ReplaceFile(path, {svg});
}

void ProgressBar::Show(int64_t step, double loss, absl::optional<absl::Time> now) {
  Keep(step, loss);
  const absl::Time at = now.has_value() ? *now : SteadyNow();
  const absl::Duration pause = terminal_ ? absl::Milliseconds(100) : absl::Seconds(1);
  if (at - shown_ < pause && step < steps_) return;
  shown_ = at;
  const double speed = steps_per_second(step, at);
  const absl::Duration left = speed > 0 ? absl::Seconds(static_cast<double>(steps_ - step) / speed)
                                        : absl::InfiniteDuration();
  const std::string text = absl::StrFormat("step %d/%d loss %.4f %.1f steps/s %s left", step,
                                           steps_, loss, speed, TimeText(left));
  if (terminal_) {
    absl::FPrintF(out_, "\r\x1b[K[%s] %s", BarText(step, steps_, 30), text);
    open_ = true;
  } else {
    absl::FPrintF(out_, "%s\n", text);
  }
  std::fflush(out_);
}

void ProgressBar::Say(const std::string& line) {
  if (open_) std::fputs("\r\x1b[K", out_);
  open_ = false;
  absl::FPrintF(out_, "%s\n", line);
  std::fflush(out_);
}

}  // namespace data
}  // namespace chorus
