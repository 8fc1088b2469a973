#include "server/tenant_log.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"

namespace chorus::server {
namespace {

void WriteByGlog(google::LogSeverity severity, absl::string_view, absl::string_view line) {
  google::LogMessage(__FILE__, __LINE__, severity).stream() << line;
}

}  // namespace

std::string TenantOf(uid_t uid) { return absl::StrCat("uid:", uid); }

TenantLog::TenantLog(Write write) : write_(write != nullptr ? std::move(write) : &WriteByGlog) {}

void TenantLog::Say(google::LogSeverity severity, absl::string_view tenant,
                    absl::string_view line) {
  int64_t left_out = 0;
  {
    MutexLock lock(&mutex_);
    if (!budgets_[tenant].Take(SteadyNow(), &left_out)) return;
  }
  if (left_out > 0) {
    write_(google::GLOG_WARNING, tenant,
           absl::StrCat(left_out, " more lines of ", tenant,
                        " were too many for the log; Diagnostics has the errors"));
  }
  write_(severity, tenant, line);
}

}  // namespace chorus::server
