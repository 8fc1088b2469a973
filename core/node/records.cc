#include "core/node/records.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/utf8.h"

namespace chorus::node {

absl::string_view FlightKindName(FlightKind kind) {
  switch (kind) {
    case FlightKind::kSessionOpened:
      return "session_opened";
    case FlightKind::kSessionEnded:
      return "session_ended";
    case FlightKind::kWorldFormed:
      return "world_formed";
    case FlightKind::kVoted:
      return "voted";
    case FlightKind::kLaunched:
      return "launched";
    case FlightKind::kPublished:
      return "published";
    case FlightKind::kFailed:
      return "failed";
    case FlightKind::kEpochEnded:
      return "epoch_ended";
    case FlightKind::kReformed:
      return "reformed";
    case FlightKind::kCallSitesDiffer:
      return "call_sites_differ";
    case FlightKind::kGradientGivenUp:
      return "gradient_given_up";
  }
  return "unknown";
}

void FlightRecord::Add(const FlightEvent& event, absl::string_view tenant) {
  // Most events are of the tenant that the one before was of.
  if (newest_ == nullptr || newest_->first != tenant) newest_ = &LastOf(tenant);
  Row& row = ring_[static_cast<size_t>(count_++ % ring_.size())];
  row.event = event;
  row.before = std::exchange(newest_->second, count_);
}

std::pair<const std::string, uint64_t>& FlightRecord::LastOf(absl::string_view tenant) {
  const auto last = last_.find(tenant);
  if (last != last_.end()) return *last;
  // Users come and go; of those whose events are gone nothing is kept.
  constexpr size_t kManyTenants = 1024;
  if (last_.size() >= kManyTenants) {
    absl::erase_if(last_, [this](const auto& one) { return !IsKept(one.second); });
  }
  return *last_.emplace(std::string(tenant), 0).first;
}

std::vector<FlightEvent> FlightRecord::Latest(size_t limit) const {
  std::vector<FlightEvent> events;
  for (uint64_t number = count_; IsKept(number) && events.size() < limit; --number) {
    events.push_back(RowOf(number).event);
  }
  std::reverse(events.begin(), events.end());
  return events;
}

std::vector<FlightEvent> FlightRecord::LatestOf(absl::string_view tenant, size_t limit) const {
  const auto last = last_.find(tenant);
  std::vector<FlightEvent> events;
  uint64_t number = last == last_.end() ? 0 : last->second;
  while (IsKept(number) && events.size() < limit) {
    const Row& row = RowOf(number);
    events.push_back(row.event);
    number = row.before;
  }
  std::reverse(events.begin(), events.end());
  return events;
}

bool ErrorStore::Record(absl::string_view tenant, Error* error) {
  Errors& errors = of_tenant_[tenant];
  error->id = ErrorId();
  std::string bytes = EncodeError(*error);
  // One cause fails many runs one after the other: they share its record.
  const size_t recent = std::min<size_t>(errors.size(), 32);
  for (size_t i = 0; i < recent; ++i) {
    const Kept& entry = errors[errors.size() - 1 - i];
    if (entry.bytes != bytes) continue;
    // The end of an epoch, which says so, is one failure, of all its runs.
    if (error->ended.empty()) told_.erase(entry.id);
    error->id = entry.id;
    return false;
  }
  error->id = ErrorId(next_++);
  errors.push_back({error->id, std::move(bytes)});
  if (++count_ > capacity_) ForgetOne();
  return true;
}

void ErrorStore::ForgetOne() {
  const auto most =
      std::max_element(of_tenant_.begin(), of_tenant_.end(), [](const auto& a, const auto& b) {
        // Of those that have as many the one whose oldest is the oldest.
        return std::make_pair(a.second.size(), b.second.front().id) <
               std::make_pair(b.second.size(), a.second.front().id);
      });
  told_.erase(most->second.front().id);
  most->second.pop_front();
  if (most->second.empty()) of_tenant_.erase(most);
  --count_;
}

const ErrorStore::Kept* ErrorStore::FindIn(const Errors& errors, ErrorId id) {
  const auto at = std::lower_bound(errors.begin(), errors.end(), id,
                                   [](const Kept& e, ErrorId wanted) { return e.id < wanted; });
  return at == errors.end() || at->id != id ? nullptr : &*at;
}

absl::optional<Error> ErrorStore::Find(ErrorId id, absl::string_view tenant) const {
  for (const auto& [name, errors] : of_tenant_) {
    if (!tenant.empty() && name != tenant) continue;
    const Kept* const kept = FindIn(errors, id);
    if (kept == nullptr) continue;
    Error error = DecodeError(kept->bytes);
    error.id = id;
    return error;
  }
  return absl::nullopt;
}

bool ErrorStore::Has(ErrorId id, absl::string_view tenant) const {
  const auto it = of_tenant_.find(tenant);
  return it != of_tenant_.end() && FindIn(it->second, id) != nullptr;
}

void ErrorStore::NoteTold(ErrorId id, WorldId world) {
  absl::InlinedVector<WorldId, 1>& worlds = told_[id];
  if (absl::c_linear_search(worlds, world)) return;
  if (worlds.size() == kMostWorldsTold) worlds.erase(worlds.begin());
  worlds.push_back(world);
}

bool ErrorStore::HasTold(ErrorId id, WorldId world) const {
  const auto worlds = told_.find(id);
  return worlds != told_.end() && absl::c_linear_search(worlds->second, world);
}

std::string FailureLine(const FailureOrigin& failure, const Error& error) {
  const auto or_dash = [](int32_t value) { return value < 0 ? "-" : absl::StrCat(value); };
  const std::string job =
      failure.job.empty() ? "-" : absl::StrCat("\"", absl::Utf8SafeCEscape(failure.job), "\"");
  return OneLine(absl::StrCat("failure: job=", job, " rank=", or_dash(failure.rank),
                              " pid=", or_dash(failure.pid), " reason=", ReasonName(error.reason),
                              " error_id=", error.id.value(), ": ", error.message));
}

}  // namespace chorus::node
