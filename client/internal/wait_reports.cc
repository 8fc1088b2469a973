#include "client/internal/wait_reports.h"

#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

void WaitReports::Report(absl::Duration waited) const {
  absl::StatusOr<std::vector<std::string>> waits = link_->Waits();
  if (!waits.ok()) waits = std::vector<std::string>{ErrorOf(waits.status()).message};
  if (waits->empty()) waits->push_back("no rank is missing, the daemon is still at work");
  std::string report;
  for (const std::string& wait : *waits) {
    absl::StrAppend(&report, "chorus: waiting for ", absl::FormatDuration(waited), ": ", wait,
                    "\n");
  }
  if (options_.write != nullptr) {
    options_.write(report);
  } else {
    std::fputs(report.c_str(), stderr);
  }
}

WaitReports::During::During(const WaitReports* reports) : reports_(reports) {
  if (reports->options_.on) thread_ = std::thread([this] { Run(); });
}

WaitReports::During::~During() {
  {
    MutexLock lock(&mutex_);
    over_ = true;
    ended_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

void WaitReports::During::Run() {
  const absl::Time start = SteadyNow();
  absl::Time due = start + reports_->options_.first;
  for (;;) {
    {
      MutexLock lock(&mutex_);
      while (!over_ && SteadyNow() < due) ended_.WaitFor(&mutex_, due - SteadyNow());
      if (over_) return;
    }
    reports_->Report(due - start);
    due += reports_->options_.period;
  }
}

}  // namespace internal
}  // namespace chorus
