#include "client/internal/log.h"

#include <algorithm>
#include <utility>

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
    const absl::Status told = link->WaitCommand(command, kAnswer);
    if (ErrorOf(told).reason == Reason::kTransportTimeout) return absl::nullopt;
    return told.ok();
  }
  if (!outcome->has_value()) return absl::nullopt;
  return (*outcome)->code == absl::StatusCode::kOk;
}

absl::StatusOr<Sequence> Log::Submit(CommandBody body) {
  Command command{Sequence(), std::move(body)};
  return Submit(&command);
}

absl::StatusOr<Sequence> Log::Submit(Command* command) {
  CHORUS_RETURN_IF_ERROR(broken_);
  command->sequence = Sequence(next_sequence_);
  const absl::Status status = link_->Submit(*command);
  if (!status.ok()) {
    // A full ring may have room later, and the next command may be one that can be sent; a daemon
    // that is gone stays so.
    const Reason reason = ErrorOf(status).reason;
    if (reason != Reason::kTransportTimeout && reason != Reason::kMalformed) broken_ = status;
    return status;
  }
  return Sequence(next_sequence_++);
}

void Log::CountRun(Sequence run) {
  under_way_.push_back(run);
  Counted();
}

bool Log::IsOver(Sequence run) {
  const auto outcome = link_->Peek(run);
  // A forgotten outcome is an outcome.
  return !outcome.ok() || outcome->has_value();
}

Sequence Log::OldestUnderWay() {
  while (!under_way_.empty() && IsOver(under_way_.front())) under_way_.pop_front();
  Counted();
  return under_way_.empty() ? next() : under_way_.front();
}

absl::optional<Sequence> Log::AwaitsRoom() {
  // Runs end in any order.
  under_way_.erase(std::remove_if(under_way_.begin(), under_way_.end(),
                                  [this](Sequence run) { return IsOver(run); }),
                   under_way_.end());
  Counted();
  if (under_way_.size() < kMaxUnderWay) return absl::nullopt;
  return under_way_.front();
}

}  // namespace internal
}  // namespace chorus
