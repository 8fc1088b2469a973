#include "core/runtime/device_program.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/op.h"
#include "core/ops/registry.h"

namespace chorus {
namespace {

std::unique_ptr<DeviceProgram::LoadedCall> LoadCall(const DevicePlan::CollectiveStep& c,
                                                    size_t num_outputs) {
  auto loaded = std::make_unique<DeviceProgram::LoadedCall>();
  CollectiveCall& call = loaded->call;
  call.kind = c.kind;
  call.reduction = c.reduction;
  call.dtype = c.dtype;
  call.count = c.count;
  call.input_counts = c.input_counts;
  call.output_counts = c.output_counts;
  call.root = c.root;
  call.inputs.resize(static_cast<size_t>(c.num_inputs));
  call.outputs.resize(static_cast<size_t>(c.num_outputs));
  if (c.runtime.has_value()) {
    CollectiveCall::RuntimeCounts& runtime = call.runtime.emplace();
    runtime.row_elements = c.runtime->row_elements;
    runtime.input_rows = c.runtime->input_rows;
    runtime.output_rows = c.runtime->output_rows;
    runtime.source = c.runtime->source;
    loaded->sends = c.runtime->sends;
    loaded->receives = c.runtime->receives;
    loaded->received = c.runtime->received;
  }
  const size_t extras = num_outputs - call.outputs.size() - static_cast<size_t>(loaded->received);
  (c.reduction == Reduction::kProduct ? call.factors : call.holders).resize(extras);
  loaded->binding = static_cast<size_t>(c.binding);
  return loaded;
}

// Sets `may_fail` where this one may, and else leaves it.
absl::StatusOr<std::unique_ptr<Kernel>> MakeKernel(const DevicePlan::Kernel& kernel, Device* device,
                                                   bool* may_fail) {
  const Node& node = kernel.node;
  if (node.collective.has_value() || node.effect == Effect::kCollective) {
    return Malformed(absl::StrCat("a device plan has the collective ", node.op, " as a kernel"));
  }
  absl::InlinedVector<const TensorType*, 4> types;
  for (const TensorType& type : kernel.input_types) types.push_back(&type);
  const NodeView view = ViewOf(node, types);
  CHORUS_ASSIGN_OR_RETURN(const std::vector<TensorType> inferred, InferTypes(view));
  if (inferred != node.outputs) {
    return Malformed(absl::StrCat("a device plan has outputs for ", node.op,
                                  " that are not what its inputs give"));
  }
  *may_fail |= MayFail(*FindOp(node.op), view);
  return device->MakeKernel(view, node.outputs);
}

}  // namespace

DeviceAddress DeviceProgram::AddressOf(const DevicePlan::Location& location,
                                       absl::Span<const DeviceAddress> buffers) {
  if (location.buffer < 0) return 0;
  const DeviceAddress base = buffers[static_cast<size_t>(location.buffer)];
  return base == 0 ? 0 : base + static_cast<DeviceAddress>(location.offset);
}

const CollectiveCall& DeviceProgram::FillCall(LoadedStep* step,
                                              absl::Span<const DeviceAddress> buffers,
                                              const LaunchMessage::CollectiveBinding& binding) {
  LoadedCall& collective = *step->collective;
  CollectiveCall& call = collective.call;
  const auto& present = binding.present;
  call.present.assign(present.begin(), present.end());
  const auto operand = [&](const DevicePlan::Location& at) { return AddressOf(at, buffers); };
  const auto result = [&](const DevicePlan::Location& at) {
    const bool stands_there =
        at.producer >= 0 && (present.empty() || std::find(present.begin(), present.end(),
                                                          at.producer) != present.end());
    return stands_there ? 0 : operand(at);
  };
  const DevicePlan::Location* from = step->inputs.data();
  for (DeviceAddress& address : call.inputs) address = operand(*from++);
  const DevicePlan::Location* to = step->outputs.data();
  for (DeviceAddress& address : call.outputs) address = result(*to++);
  if (call.runtime.has_value()) {
    call.runtime->rank = binding.rank;
    if (collective.sends) call.runtime->sends = operand(*from++);
    if (collective.receives) call.runtime->receives = operand(*from++);
    if (collective.received) call.runtime->received = result(*to++);
  }
  if (call.reduction == Reduction::kPremulSum) call.factor = operand(*from++);
  for (std::vector<DeviceAddress>* extras : {&call.factors, &call.holders}) {
    for (DeviceAddress& address : *extras) address = result(*to++);
  }
  return call;
}

absl::StatusOr<std::unique_ptr<DeviceProgram>> LoadProgram(absl::string_view bytes,
                                                           Device* device) {
  CHORUS_ASSIGN_OR_RETURN(DevicePlan decoded, DecodeDevicePlan(bytes));
  auto program = std::make_unique<DeviceProgram>();
  program->num_buffers = static_cast<size_t>(decoded.num_buffers);
  program->num_bindings = static_cast<size_t>(decoded.num_bindings);
  program->num_equal_groups = static_cast<size_t>(decoded.num_equal_groups);
  program->kernels.reserve(decoded.nodes.size());
  for (const DevicePlan::Kernel& kernel : decoded.nodes) {
    program->kernels.emplace_back();
    CHORUS_ASSIGN_OR_RETURN(program->kernels.back(),
                            MakeKernel(kernel, device, &program->kernels_may_fail));
  }
  program->steps.reserve(decoded.steps.size());
  for (DevicePlan::Step& step : decoded.steps) {
    DeviceProgram::LoadedStep loaded;
    loaded.stream = step.stream;
    program->uses[static_cast<size_t>(step.stream)] = true;
    loaded.wait = step.wait;
    loaded.record = step.record;
    loaded.held_back = step.held_back;
    loaded.equal_group = step.equal_group;
    if (step.node >= 0) {
      const auto node = static_cast<size_t>(step.node);
      loaded.kernel = program->kernels[node].get();
      if (step.workspace_bytes < loaded.kernel->workspace_bytes()) {
        return Malformed(absl::StrCat("a device plan has ", step.workspace_bytes,
                                      " bytes of workspace for ", decoded.nodes[node].node.op,
                                      ", expected ", loaded.kernel->workspace_bytes()));
      }
      loaded.workspace = step.workspace;
    } else {
      const DevicePlan::CollectiveStep& c =
          decoded.collectives[static_cast<size_t>(step.collective)];
      loaded.collective = LoadCall(c, step.outputs.size());
    }
    loaded.inputs = std::move(step.inputs);
    loaded.outputs = std::move(step.outputs);
    program->steps.push_back(std::move(loaded));
  }
  return program;
}

}  // namespace chorus
