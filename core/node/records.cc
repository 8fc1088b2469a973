#include "core/node/records.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

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

std::vector<FlightEvent> FlightRecord::Latest(size_t limit) const {
  const uint64_t available = std::min<uint64_t>(count_, ring_.size());
  const uint64_t count = std::min<uint64_t>(available, limit);
  std::vector<FlightEvent> events;
  events.reserve(static_cast<size_t>(count));
  for (uint64_t i = count_ - count; i < count_; ++i) {
    events.push_back(ring_[static_cast<size_t>(i % ring_.size())]);
  }
  return events;
}

bool ErrorStore::Record(absl::string_view tenant, Error* error) {
  // One cause fails many runs one after the other: they share its record.
  const size_t recent = std::min<size_t>(entries_.size(), 32);
  for (size_t i = 0; i < recent; ++i) {
    const Entry& entry = entries_[entries_.size() - 1 - i];
    if (tenant != entry.tenant || entry.error.message != error->message) continue;
    Error same = *error;
    same.id = entry.error.id;
    if (EncodeError(same) != EncodeError(entry.error)) continue;
    error->id = entry.error.id;
    return false;
  }
  error->id = ErrorId(next_++);
  entries_.push_back({std::string(tenant), *error});
  if (entries_.size() > capacity_) entries_.pop_front();
  return true;
}

absl::optional<Error> ErrorStore::Find(ErrorId id, absl::string_view tenant) const {
  const int64_t first = next_ - static_cast<int64_t>(entries_.size());
  if (id.value() < first || id.value() >= next_) return absl::nullopt;
  const Entry& entry = entries_[static_cast<size_t>(id.value() - first)];
  if (!tenant.empty() && tenant != entry.tenant) return absl::nullopt;
  return entry.error;
}

std::string FailureLine(const FailureOrigin& failure, const Error& error) {
  const auto or_dash = [](int32_t value) { return value < 0 ? "-" : absl::StrCat(value); };
  std::string message = error.message;
  for (char& c : message) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = ' ';
  }
  const std::string job =
      failure.job.empty() ? "-" : absl::StrCat("\"", absl::Utf8SafeCEscape(failure.job), "\"");
  return absl::StrCat("failure: job=", job, " rank=", or_dash(failure.rank),
                      " pid=", or_dash(failure.pid), " reason=", ReasonName(error.reason),
                      " error_id=", error.id.value(), ": ", message);
}

}  // namespace chorus::node
