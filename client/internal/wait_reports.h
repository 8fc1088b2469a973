// Says on standard error which ranks a long wait waits for.
//
// Threads: any; a During has one of its own. Nothing is read or written before a wait has become
// long. Ownership: the link is the session's, and outlives it. Errors: the wait's own; where the
// daemon does not say who is missing, the report has its error.
#ifndef CHORUS_CLIENT_INTERNAL_WAIT_REPORTS_H_
#define CHORUS_CLIENT_INTERNAL_WAIT_REPORTS_H_

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/internal/errors.h"
#include "client/internal/link.h"
#include "core/base/mutex.h"

namespace chorus {
namespace internal {

struct WaitReportOptions {
  bool on = true;
  absl::Duration first = absl::Seconds(10);
  absl::Duration period = absl::Seconds(60);             // of the later ones
  std::function<void(const std::string& report)> write;  // whole lines; empty: standard error
};

class WaitReports {
 public:
  // `link` outlives it.
  WaitReports(Link* link, WaitReportOptions options) : link_(link), options_(std::move(options)) {}

  // What `wait(timeout)` gives, which may be asked in parts: the end of a part's time (IsTimeout)
  // is followed by a report and the next.
  template <typename Wait>
  auto InParts(absl::Duration timeout, const Wait& wait) const -> decltype(wait(timeout)) {
    if (!options_.on || timeout <= options_.first) return wait(timeout);
    auto result = wait(options_.first);
    absl::Duration waited = options_.first;
    while (IsTimeout(StatusOf(result)) && waited < timeout) {
      Report(waited);
      const absl::Duration part = std::min(options_.period, timeout - waited);
      result = wait(part);
      waited += part;
    }
    return result;
  }

  // Reports, from a thread of its own, for as long as it lives: beside a call that cannot be asked
  // in parts. `reports` outlives it.
  class During {
   public:
    explicit During(const WaitReports* reports);
    ~During();
    During(const During&) = delete;
    During& operator=(const During&) = delete;

   private:
    void Run();

    const WaitReports* const reports_;
    Mutex mutex_;
    CondVar ended_;
    bool over_ ABSL_GUARDED_BY(mutex_) = false;
    std::thread thread_;
  };

 private:
  static const absl::Status& StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }
  void Report(absl::Duration waited) const;

  Link* const link_;
  const WaitReportOptions options_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_WAIT_REPORTS_H_
