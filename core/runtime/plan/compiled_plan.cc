#include "core/runtime/plan/compiled_plan.h"

#include "core/base/memory_account.h"

namespace chorus {
namespace {

int64_t MemoryOf(const VoteTemplate& votes) {
  int64_t bytes = static_cast<int64_t>(sizeof(VoteTemplate)) + ListBytes(votes.participations) +
                  ListBytes(votes.lists);
  for (const Participation& p : votes.participations) {
    bytes += ListBytes(p.descriptor.dims) + ListBytes(p.descriptor.sends) +
             ListBytes(p.descriptor.receives) + ListBytes(p.after) + TextBytes(p.source.size());
    if (p.label == nullptr) continue;
    bytes += BlockBytes(sizeof(PartLabel)) + TextBytes(p.label->op.size()) +
             TextBytes(p.label->what.size()) + TextBytes(p.label->source.size());
  }
  return bytes;
}

}  // namespace

int64_t MemoryOf(const Plan& plan) {
  int64_t bytes = static_cast<int64_t>(sizeof(Plan)) + ListBytes<BufferSpec>(plan.buffers.size()) +
                  ListBytes(plan.outputs) + ListBytes(plan.equal_groups) +
                  BlockBytes(static_cast<int64_t>(plan.input_may_be_staging.size()) / 8) +
                  ListBytes(plan.operands) + ListBytes(plan.instances) + ListBytes(plan.written) +
                  ListBytes(plan.collectives) + ListBytes(plan.meetings) +
                  ListBytes(plan.device_plans) + ListBytes(plan.workspace_bytes);
  for (const Plan::EqualGroup& group : plan.equal_groups) {
    bytes += ListBytes(group.leaves) + ListBytes(group.results);
  }
  for (const auto& operands : plan.operands) bytes += ListBytes(operands);
  for (const auto& slots : plan.collectives) bytes += ListBytes(slots);
  for (const auto& meetings : plan.meetings) bytes += ListBytes(meetings);
  for (const std::string& device_plan : plan.device_plans) bytes += TextBytes(device_plan.size());
  return bytes + (plan.votes == nullptr ? 0 : kBlockOverheadBytes + MemoryOf(*plan.votes));
}

}  // namespace chorus
