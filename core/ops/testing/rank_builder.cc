#include "core/ops/testing/rank_builder.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "core/ops/registry.h"

namespace chorus {
namespace testing {
namespace {

GroupSlot OneMember(int32_t rank, int32_t size) {
  GroupSlot slot;
  slot.size = size;
  slot.held = {GroupRank(rank)};
  slot.device_slots = {0};
  return slot;
}

std::vector<ValueIndex> Must(absl::StatusOr<std::vector<ValueIndex>> outputs) {
  if (!outputs.ok()) {
    std::fprintf(stderr, "%s\n", outputs.status().ToString().c_str());
    std::abort();
  }
  return *std::move(outputs);
}

}  // namespace

RankBuilder::RankBuilder(int32_t rank, int32_t size, int32_t num_device_slots)
    : rank_(rank), size_(size), builder_(num_device_slots, {OneMember(rank, size)}) {
  builder_.set_record_gradients(true);
}

ValueIndex RankBuilder::Input(const TensorType& type, int32_t device_slot) {
  GraphInput input;
  input.type = type;
  input.device_slot = device_slot;
  return builder_.AddInput(input);
}

ValueIndex RankBuilder::Op(const std::string& op, std::vector<ValueIndex> inputs,
                           Attributes attributes, int32_t device_slot) {
  NodeSpec spec;
  spec.op = op;
  spec.inputs = std::move(inputs);
  spec.attributes = std::move(attributes);
  spec.device_slot = device_slot;
  return Must(builder_.Emit(std::move(spec)))[0];
}

Collective RankBuilder::MakeCollective(CollectiveKind kind) const {
  Collective c;
  c.kind = kind;
  c.rank = GroupRank(rank_);
  c.wants_grad = wants_grad_;
  if (IsReducing(kind)) c.reduction = Reduction::kSum;
  return c;
}

std::vector<ValueIndex> RankBuilder::Emit(const Collective& collective,
                                          std::vector<ValueIndex> inputs, Attributes attributes,
                                          absl::string_view op) {
  NodeSpec spec;
  const absl::string_view name = op.empty() ? CollectiveKindName(collective.kind) : op;
  spec.op.assign(name.data(), name.size());
  spec.inputs = std::move(inputs);
  spec.attributes = std::move(attributes);
  spec.collective = collective;
  return Must(builder_.Emit(std::move(spec)));
}

std::vector<ValueIndex> RankBuilder::ApplyCollective(absl::string_view op,
                                                     std::vector<ValueIndex> inputs, const How& how,
                                                     Attributes attributes) {
  Collective c = MakeCollective(FindOp(op)->kind);
  if (how.reduction != Reduction::kNone) c.reduction = how.reduction;
  c.root = GroupRank(how.root);
  c.counts = how.counts;
  c.runtime_counts_input = how.runtime_counts_input;
  c.runtime_count_maximum = how.runtime_count_maximum;
  return Emit(c, std::move(inputs), std::move(attributes), op);
}

ValueIndex RankBuilder::AllReduce(ValueIndex x) {
  return Emit(MakeCollective(CollectiveKind::kAllReduce), {x})[0];
}

ValueIndex RankBuilder::Broadcast(ValueIndex x, const TensorType& type, int32_t root) {
  Collective c = MakeCollective(CollectiveKind::kBroadcast);
  c.root = GroupRank(root);
  return rank_ == root ? Emit(c, {x})[0] : Emit(c, {}, TypeAttributes(type))[0];
}

std::vector<ValueIndex> RankBuilder::Reduce(ValueIndex x, int32_t root) {
  Collective c = MakeCollective(CollectiveKind::kReduce);
  c.root = GroupRank(root);
  return Emit(c, {x});
}

std::vector<ValueIndex> RankBuilder::AllGather(ValueIndex x) {
  return Emit(MakeCollective(CollectiveKind::kAllGather), {x});
}

ValueIndex RankBuilder::ReduceScatter(const std::vector<ValueIndex>& xs) {
  return Emit(MakeCollective(CollectiveKind::kReduceScatter), xs)[0];
}

void RankBuilder::Send(ValueIndex x, int32_t peer, int64_t tag) {
  Collective c = MakeCollective(CollectiveKind::kSend);
  c.peer = GroupRank(peer);
  c.tag = tag;
  Emit(c, {x});
}

ValueIndex RankBuilder::Recv(const TensorType& type, int32_t peer, int64_t tag) {
  Collective c = MakeCollective(CollectiveKind::kRecv);
  c.peer = GroupRank(peer);
  c.tag = tag;
  return Emit(c, {}, TypeAttributes(type))[0];
}

void RankBuilder::Barrier() { Emit(MakeCollective(CollectiveKind::kBarrier), {}); }

}  // namespace testing
}  // namespace chorus
