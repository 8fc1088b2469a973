#include "server/tenant_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace chorus::server {
namespace {

void WriteByGlog(google::LogSeverity severity, absl::string_view, absl::string_view line) {
  google::LogMessage(__FILE__, __LINE__, severity).stream() << line;
}

}  // namespace

std::string TenantOf(uid_t uid) { return absl::StrCat("uid:", uid); }

TenantLog::TenantLog(Write write, std::function<absl::Time()> clock)
    : write_(write != nullptr ? std::move(write) : &WriteByGlog), clock_(std::move(clock)) {}

void TenantLog::Say(google::LogSeverity severity, absl::string_view tenant,
                    absl::string_view line) {
  int64_t left_out = 0;
  bool says = false;
  std::vector<LeftOut> of_idle;
  {
    MutexLock lock(&mutex_);
    const absl::Time now = clock_();
    says = budgets_[tenant].Take(now, &left_out);
    if (budgets_.size() >= forget_at_) of_idle = ForgetIdle(now);
  }
  for (const LeftOut& of : of_idle) SayLeftOut(of.tenant, of.lines);
  if (!says) return;
  SayLeftOut(tenant, left_out);
  write_(severity, tenant, line);
}

// A user may have as many uids as the system gives out to it.
std::vector<TenantLog::LeftOut> TenantLog::ForgetIdle(absl::Time now) {
  std::vector<LeftOut> left_out;
  absl::erase_if(budgets_, [&](const auto& budget) {
    if (!budget.second.IsIdle(now)) return false;
    if (budget.second.left_out() > 0) left_out.push_back({budget.first, budget.second.left_out()});
    return true;
  });
  forget_at_ = std::max(kForgetAt, 2 * budgets_.size());
  return left_out;
}

void TenantLog::SayLeftOut(absl::string_view tenant, int64_t lines) const {
  if (lines == 0) return;
  write_(google::GLOG_WARNING, tenant,
         absl::StrCat(lines, " more lines of ", tenant,
                      " were too many for the log; Diagnostics has the errors"));
}

}  // namespace chorus::server
