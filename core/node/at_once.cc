#include "core/node/at_once.h"

#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"

namespace chorus::node {
namespace {

// What a call takes beside its bytes, in bytes.
constexpr int64_t kBytesOfCall = 512;

// Its collectives are in program order: the call of a participation has its number.
bool IsPlain(const RunState& run) {
  return run.plan->plan.only_collectives && run.own_plan == nullptr && run.inlines.empty() &&
         run.uploads.empty();
}

}  // namespace

// --- One collective -----------------------------------------------------------------------------

int64_t CollectiveAtOnce::BytesOf(const Plan& plan, size_t participation, int64_t members,
                                  bool is_first) {
  const auto traffic = [members](const Plan::Written::Bytes& written) {
    return written.reduced * (members + 1) + written.copied * 2;
  };
  const Plan::Written& written = plan.written[participation];
  return kBytesOfCall + traffic(written.own) + (is_first ? traffic(written.shared) : 0);
}

int64_t CollectiveAtOnce::bytes_left() const {
  return launcher_->at_once_bytes() - SliceWork() * kBytesOfWork;
}

void CollectiveAtOnce::Begin(size_t members) { members_.assign(members, CollectiveWork::Member()); }

absl::Status CollectiveAtOnce::Add(size_t member, const LoadedPlan& plan, size_t participation,
                                   DeviceIndex device, absl::Span<const DeviceAddress> addresses) {
  CHORUS_ASSIGN_OR_RETURN(const PlanId id, launcher_->PlanOn(plan, /*slot=*/0, device));
  const CollectiveCall* const call =
      launcher_->executor(device)->FillCall(id, participation, addresses);
  if (call == nullptr) {
    return MakeError(Reason::kInternal,
                     absl::StrCat("plan ", id.value(), " of device ", device.value(),
                                  " has no call ", participation));
  }
  CHORUS_RETURN_IF_ERROR(
      CheckCall(*call, static_cast<int>(members_.size()), static_cast<int>(member)));
  members_[member].device = static_cast<int>(device.value());
  members_[member].call = call;
  return absl::OkStatus();
}

absl::Status CollectiveAtOnce::Prepare() {
  const auto common = CollectiveWork::Common::Of(*members_.front().call, /*member=*/0);
  for (size_t m = 1; m < members_.size(); ++m) {
    if (CollectiveWork::Common::Of(*members_[m].call, static_cast<int>(m)) == common) continue;
    return MakeError(Reason::kInternal,
                     absl::StrCat("member ", m, " does not call what others do"));
  }
  return work_.Prepare(common, members_, /*space=*/nullptr);
}

void CollectiveAtOnce::Run() {
  work_.RunWhole();
  CountWork((kBytesOfCall * static_cast<int64_t>(members_.size()) + work_.traffic_bytes()) /
            kBytesOfWork);
}

// --- A gang -------------------------------------------------------------------------------------

bool AtOnce::Takes(const SequencerAction& action, absl::Span<RunState* const> members) const {
  if (launcher_->at_once_bytes() == 0 || !action.donating.empty()) return false;
  for (const RunState* run : members) {
    if (!IsPlain(*run)) return false;
    for (const CellRef& input : run->inputs) {
      if (input == nullptr || input->settled()) continue;
      const RunState* const producer = runs_->Find(input->producer);
      if (producer == nullptr || producer->gang != run->gang) return false;
    }
  }
  int64_t bytes_left = collective_.bytes_left();
  for (const LaunchedInstance& instance : action.instances) {
    if (!instance.absent.empty() || instance.key.is_pair()) return false;
    const auto size = static_cast<int64_t>(instance.parts.size());
    bool is_first = true;
    for (const LaunchedInstance::Part& part : instance.parts) {
      const Plan& plan = runs_->Find(part.run)->plan->plan;
      for (int32_t call = 0; call < instance.count && bytes_left >= 0; ++call) {
        const auto participation = static_cast<size_t>(part.participation + call);
        if (plan.votes->participations[participation].descriptor.runtime_counts) return false;
        // Devices whose memory is this process's are of one domain.
        bytes_left -= CollectiveAtOnce::BytesOf(plan, participation, size, is_first);
      }
      is_first = false;
    }
    if (bytes_left < 0) return false;
  }
  return true;
}

absl::Status AtOnce::Run(const SequencerAction& action) {
  for (const LaunchedInstance& instance : action.instances) {
    CHORUS_RETURN_IF_ERROR(RunInstance(instance));
  }
  return absl::OkStatus();
}

absl::Status AtOnce::RunInstance(const LaunchedInstance& instance) {
  absl::InlinedVector<const RunState*, 16> runs;  // by part
  for (const LaunchedInstance::Part& part : instance.parts) runs.push_back(runs_->Find(part.run));
  for (int32_t call = 0; call < instance.count; ++call) {
    collective_.Begin(instance.parts.size());
    for (size_t p = 0; p < runs.size(); ++p) {
      const LaunchedInstance::Part& part = instance.parts[p];
      CHORUS_RETURN_IF_ERROR(collective_.Add(static_cast<size_t>(part.member.value()),
                                             *runs[p]->plan,
                                             static_cast<size_t>(part.participation + call),
                                             runs[p]->devices.front(), runs[p]->addresses));
    }
    CHORUS_RETURN_IF_ERROR(collective_.Prepare());
    collective_.Run();
  }
  return absl::OkStatus();
}

}  // namespace chorus::node
