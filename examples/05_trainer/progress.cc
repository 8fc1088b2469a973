#include "examples/05_trainer/progress.h"

#include <unistd.h>

#include "absl/strings/str_format.h"
#include "core/base/clock.h"

namespace trainer {

std::string ProgressBar(int64_t step, int64_t steps, int width) {
  const int64_t full = steps > 0 ? step * width / steps : width;
  return std::string(static_cast<size_t>(full), '#') +
         std::string(static_cast<size_t>(width - full), '.');
}

Progress::Progress(std::FILE* out, int64_t steps)
    : out_(out), terminal_(isatty(fileno(out)) != 0), steps_(steps), start_(chorus::SteadyNow()) {}

Progress::~Progress() {
  if (open_) std::fputc('\n', out_);
}

double Progress::steps_per_second(int64_t step, absl::Time now) const {
  const double seconds = absl::ToDoubleSeconds(now - start_);
  return seconds > 0 ? static_cast<double>(step) / seconds : 0;
}

void Progress::Show(int64_t step, double loss, absl::Time now) {
  const absl::Duration pause = terminal_ ? absl::Milliseconds(100) : absl::Seconds(1);
  if (now - shown_ < pause && step < steps_) return;
  shown_ = now;
  const std::string text = absl::StrFormat("step %d/%d loss %.4f %.1f steps/s", step, steps_, loss,
                                           steps_per_second(step, now));
  if (terminal_) {
    absl::FPrintF(out_, "\r\x1b[K[%s] %s", ProgressBar(step, steps_, 30), text);
    open_ = true;
  } else {
    absl::FPrintF(out_, "%s\n", text);
  }
  std::fflush(out_);
}

void Progress::Say(const std::string& line) {
  if (open_) std::fputs("\r\x1b[K", out_);
  open_ = false;
  absl::FPrintF(out_, "%s\n", line);
  std::fflush(out_);
}

}  // namespace trainer
