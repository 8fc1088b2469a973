#include "client/internal/tape_emitter.h"

#include <cstddef>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/internal/access.h"
#include "client/internal/record.h"
#include "core/base/error.h"
#include "core/base/source_line.h"
#include "core/ops/registry.h"

namespace chorus {
namespace internal {

namespace {

// The line of what a gradient is of, with that of the call which asks for it: also where the first
// has one of an order before.
std::string DifferentiatedAt(absl::string_view forward, absl::string_view call) {
  constexpr absl::string_view kBetween = ", differentiated at ";
  constexpr size_t kMost = (kMaxSourceLineBytes - kBetween.size()) / 2;
  forward = forward.substr(0, forward.find(kBetween));
  return absl::StrCat(ShortSourceLine(forward, kMost), kBetween, ShortSourceLine(call, kMost));
}

}  // namespace

TapeEmitter::TapeEmitter(std::shared_ptr<SessionCore> session, std::string source)
    : session_(std::move(session)), source_(std::move(source)) {}

ValueIndex TapeEmitter::AddTensor(const Tensor& tensor) {
  Value value;
  value.tensor = tensor;
  value.info = ImplOf(tensor)->data->info;
  value.device_slot = ImplOf(tensor)->data->device_slot;
  values_.push_back(std::move(value));
  return static_cast<ValueIndex>(values_.size()) - 1;
}

ValueIndex TapeEmitter::AddType(const TensorInfoPtr& info, int32_t device_slot) {
  Value value;
  value.info = info;
  value.device_slot = device_slot;
  values_.push_back(std::move(value));
  return static_cast<ValueIndex>(values_.size()) - 1;
}

int32_t TapeEmitter::AddGroup(const GradNodePtr& node) {
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i]->group == node->group) return static_cast<int32_t>(i);
  }
  groups_.push_back(node);
  return static_cast<int32_t>(groups_.size()) - 1;
}

absl::StatusOr<std::vector<ValueIndex>> TapeEmitter::Emit(NodeSpec spec) {
  std::vector<Tensor> inputs;
  for (const ValueIndex value : spec.inputs) {
    if (!values_[value].tensor.defined()) {
      return MakeError(Reason::kInternal, absl::StrCat("the gradient of ", spec.op,
                                                       " needs a result that was not kept"));
    }
    inputs.push_back(values_[value].tensor);
  }
  std::vector<ValueIndex> outputs;
  if (!spec.collective.has_value()) {
    const DeviceRef device = DeviceFrom(session_, spec.device_slot);
    spec.inputs.clear();
    const Tensor result = ApplyLocal(std::move(spec), inputs, &device);
    CHORUS_RETURN_IF_ERROR(result.status());
    outputs.push_back(AddTensor(result));
    return outputs;
  }
  const OpDef* const op = FindOp(spec.op);
  if (op == nullptr) {
    return MakeError(Reason::kInternal,
                     absl::StrCat("a gradient rule emits an op '", spec.op, "', which is none"));
  }
  const GradNodePtr& group = groups_[spec.collective->group_slot];
  CallRequest call(op, CallSite());
  call.spec.collective = *std::move(spec.collective);
  call.spec.source = &spec.source;
  TensorType type;
  if (!spec.attributes.empty()) {
    NodeView view;
    view.op = spec.op;
    view.attributes = spec.attributes;
    CHORUS_ASSIGN_OR_RETURN(type, TypeOfAttributes(view));
    call.spec.type = &type;
  }
  if (call.spec.collective.instance.kind == InstanceRef::Kind::kBound) call.bound = &bound_;
  // Requests of one entry meet by number: the line tells those of one loss from another's.
  if (group->member->compares_lines) {
    spec.source = DifferentiatedAt(spec.source, source_);
  }
  const Results results = ApplyCollective(call, inputs, group->member, group->group);
  for (const Tensor& result : results) {
    CHORUS_RETURN_IF_ERROR(result.status());
    if (!result.absent()) outputs.push_back(AddTensor(result));
  }
  if (const GradNodePtr& node = ImplOf(results[0])->node) companions_.push_back(node);
  return outputs;
}

int32_t TapeEmitter::GroupSizeOf(int32_t group_slot) const {
  return static_cast<int32_t>(groups_[group_slot]->group->ranks.size());
}

void TapeEmitter::BindGradient(const RecordedNode& forward, Collective* gradient) {
  GradNode& node = *(*record_)[forward.id];
  gradient->wants_grad = GradEnabled();
  if (node.trace != TraceId()) {
    gradient->instance.kind = InstanceRef::Kind::kGradient;
    gradient->instance.node = node.trace_node;
    gradient->instance.request = static_cast<int32_t>(node.next_request++);
    return;
  }
  const int64_t step = node.member->step.load(std::memory_order_relaxed);
  if (node.request_step != step) {
    node.request_step = step;
    node.next_request = 0;
  }
  gradient->instance.kind = InstanceRef::Kind::kBound;
  gradient->instance.slot = 0;
  bound_ = node.key.Gradient({step, node.next_request++});
}

absl::StatusOr<InputGradients> TapeEmitter::PassGate(const GradNode& gate, GateRequest request,
                                                     const GradientContext& context) {
  for (int i = 0; i < context.num_outputs(); ++i) {
    const absl::optional<ValueIndex>& gradient = context.grad(i);
    request.gradients.push_back(gradient.has_value() ? tensor(*gradient) : Tensor());
  }
  const uint64_t first = NextOrder();
  CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> results,
                          gate.gates->rules[static_cast<size_t>(gate.gate)](request));
  if (results.size() != request.gradients.size()) {
    return BadType(absl::StrCat(gate.spec->op, ": expected ", request.gradients.size(),
                                " gradients, got ", results.size()));
  }
  InputGradients gradients(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) continue;
    CHORUS_RETURN_IF_ERROR(results[i].status());
    const TensorData& data = *ImplOf(results[i])->data;
    const TensorType& type = gate.outputs[i]->type;
    if (results[i].absent() || data.session != session_ || data.info->type != type ||
        data.device_slot != gate.device_slot) {
      return BadType(absl::StrCat(
          gate.spec->op, ": expected ", type.ToString(), " on device ", gate.device_slot,
          " for gradient ", i, ", got ",
          results[i].absent()
              ? "an absent result"
              : absl::StrCat(data.info->type.ToString(), " on device ", data.device_slot,
                             data.session == session_ ? "" : " of another session")));
    }
    gradients[i] = AddTensor(results[i]);
  }
  AddCompanionsBehind(results, first);
  return gradients;
}

void TapeEmitter::AddCompanionsBehind(const std::vector<Tensor>& tensors, uint64_t first) {
  absl::flat_hash_set<const GradNode*> seen;
  std::vector<GradNodePtr> stack;
  const auto push = [&](const GradNodePtr& node) {
    if (node != nullptr && node->order >= first && seen.insert(node.get()).second) {
      stack.push_back(node);
    }
  };
  for (const Tensor& tensor : tensors) {
    if (tensor.defined()) push(ImplOf(tensor)->node);
  }
  while (!stack.empty()) {
    const GradNodePtr node = std::move(stack.back());
    stack.pop_back();
    if (node->member != nullptr) companions_.push_back(node);
    for (const Edge& edge : node->inputs) push(edge.node);
  }
}

}  // namespace internal
}  // namespace chorus
