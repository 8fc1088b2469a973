#include "client/internal/log.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "client/internal/errors.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

namespace {

// For what the daemon answers at once.
constexpr absl::Duration kAnswer = absl::Seconds(30);

}  // namespace

absl::optional<bool> WentWell(Link* link, Sequence command) {
  const auto outcome = link->Peek(command);
  if (!outcome.ok()) {
    const absl::Status status = link->WaitCommand(command, kAnswer);
    if (IsNoOutcome(status)) return absl::nullopt;
    return status.ok();
  }
  if (!outcome->has_value()) return absl::nullopt;
  return (*outcome)->code == absl::StatusCode::kOk;
}

absl::StatusOr<Sequence> Log::Submit(CommandBody body) {
  Command command{Sequence(), std::move(body)};
  return Submit(&command);
}

absl::StatusOr<Sequence> Log::Submit(Command* command) {
  CHORUS_RETURN_IF_ERROR(SendKept());
  return Send(command);
}

absl::optional<Sequence> Log::SubmitOrKeep(CommandBody body) {
  Command command{Sequence(), std::move(body)};
  if (!has_no_room()) {
    const absl::StatusOr<Sequence> sequence = Submit(&command);
    if (sequence.ok()) return *sequence;
  }
  if (has_no_room()) kept_.push_back(std::move(command));
  return absl::nullopt;
}

absl::Status Log::SendKept() {
  while (!kept_.empty()) {
    const absl::Status sent = Send(&kept_.front()).status();
    if (has_no_room()) return sent;
    kept_.pop_front();
  }
  return broken_;
}

absl::StatusOr<Sequence> Log::Send(Command* command) {
  CHORUS_RETURN_IF_ERROR(broken_);
  command->sequence = Sequence(next_sequence_);
  const absl::Status status = link_->Submit(*command);
  if (status.ok()) {
    has_no_room_.store(false, std::memory_order_relaxed);
    return Sequence(next_sequence_++);
  }
  // A full ring may have room later, and the next command may be one that can be sent; a daemon
  // that is gone stays so.
  const Reason reason = ErrorOf(status).reason;
  has_no_room_.store(reason == Reason::kTransportTimeout, std::memory_order_relaxed);
  if (reason != Reason::kTransportTimeout && reason != Reason::kMalformed) broken_ = status;
  return status;
}

void Log::CountRun(Sequence run, const MemberCore* member) {
  under_way_.push_back({run, member});
  Counted();
}

bool Log::IsOver(Sequence run) {
  const auto outcome = link_->Peek(run);
  // A forgotten outcome is an outcome.
  return !outcome.ok() || outcome->has_value();
}

Sequence Log::OldestUnderWay() {
  while (!under_way_.empty() && IsOver(under_way_.front().run)) under_way_.pop_front();
  Counted();
  return under_way_.empty() ? next() : under_way_.front().run;
}

absl::optional<Sequence> Log::AwaitsRoom(const MemberCore* member) {
  // Runs end in any order.
  under_way_.erase(std::remove_if(under_way_.begin(), under_way_.end(),
                                  [this](const UnderWay& one) { return IsOver(one.run); }),
                   under_way_.end());
  Counted();
  if (under_way_.size() < kMaxUnderWay) return absl::nullopt;
  absl::flat_hash_set<const MemberCore*> members = {member};
  const UnderWay* oldest = nullptr;
  size_t own_runs = 0;
  for (const UnderWay& one : under_way_) {
    members.insert(one.member);
    if (one.member != member) continue;
    if (oldest == nullptr) oldest = &one;
    ++own_runs;
  }
  if (own_runs * members.size() < kMaxUnderWay) return absl::nullopt;
  return oldest->run;
}

}  // namespace internal
}  // namespace chorus
