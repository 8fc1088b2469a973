#include "core/backend/cpu_engine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/registry.h"

namespace chorus {

// --- Chains of kernels ---

namespace {

// Fewer elements stay in the caches anyway; more kernels have more pairs to be looked at.
constexpr int64_t kLeastChained = 4096;
constexpr size_t kMostChained = 15;

// Memory that kernels of a chain read or write.
struct Touched {
  DeviceAddress begin = 0;
  int64_t bytes = 0;
  bool is_written = false;
  bool by_element = false;  // element i by the kernel's element i alone
};

bool AreIndependent(const Touched& a, const Touched& b) {
  if (!a.is_written && !b.is_written) return true;
  if (a.begin == b.begin && a.bytes == b.bytes) return a.by_element && b.by_element;
  return a.begin + static_cast<DeviceAddress>(a.bytes) <= b.begin ||
         b.begin + static_cast<DeviceAddress>(b.bytes) <= a.begin;
}

}  // namespace

void CpuEngine::TakeChain(CpuStream* stream, const KernelCall& first) {
  stream->chain.clear();
  const auto prepared_of = [](const KernelCall& call) {
    return static_cast<const PreparedKernel*>(call.kernel);
  };
  const PreparedKernel& head = *prepared_of(first);
  if (!head.elementwise || head.kernel->units() < kLeastChained) return;
  absl::InlinedVector<Touched, 32> touched;
  const auto append = [&](const KernelCall& call) {
    const PreparedKernel& prepared = *prepared_of(call);
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      touched.push_back(
          {call.inputs[i], prepared.input_bytes[i], false, prepared.input_is_like_output[i]});
    }
    touched.push_back({call.outputs[0], prepared.output_bytes[0], true, true});
  };
  // Each operand is compared with all others, and the devices wait meanwhile.
  constexpr size_t kMostOperands = 128;
  const auto has_operands = [&](const KernelCall& call) {
    return call.inputs.size() == prepared_of(call)->input_bytes.size() &&
           call.outputs.size() == 1 && touched.size() + call.inputs.size() < kMostOperands;
  };
  if (!has_operands(first)) return;
  append(first);
  // A stream that waits for a kernel is not kept waiting for those behind it.
  uint64_t last = std::numeric_limits<uint64_t>::max();
  for (const StreamState::Waiter& waiter : stream->waiters) last = std::min(last, waiter.position);
  while (!stream->items.empty() && stream->chain.size() < kMostChained &&
         stream->completed + stream->chain.size() + 1 < last) {
    auto* const next = absl::get_if<KernelCall>(&stream->items.front());
    if (next == nullptr || !has_operands(*next)) return;
    const PreparedKernel& prepared = *prepared_of(*next);
    if (!prepared.elementwise || prepared.kernel->units() != head.kernel->units()) return;
    if (next->unless != nullptr && next->unless->load(std::memory_order_acquire)) return;
    const size_t before = touched.size();
    append(*next);
    for (size_t i = 0; i < before; ++i) {
      for (size_t j = before; j < touched.size(); ++j) {
        if (!AreIndependent(touched[i], touched[j])) return;
      }
    }
    stream->chain.push_back(std::move(*next));
    stream->items.Pop();
  }
}

// --- Kernels and copies ---

absl::StatusOr<std::unique_ptr<Kernel>> CpuEngine::MakeKernel(
    const NodeView& node, absl::Span<const TensorType> outputs) {
  auto prepared = std::make_unique<PreparedKernel>();
  CHORUS_ASSIGN_OR_RETURN(prepared->kernel, make_kernel_(node, outputs));
  for (const TensorType* input : node.inputs) prepared->input_bytes.push_back(input->num_bytes());
  for (const TensorType& output : outputs) prepared->output_bytes.push_back(output.num_bytes());
  // No number holds what the largest could cost, a chain of them, and what is reckoned with that.
  constexpr int64_t kMostCost = int64_t{1} << 56;
  if (__builtin_mul_overflow(prepared->kernel->units(), prepared->kernel->cost_per_unit(),
                             &prepared->cost)) {
    prepared->cost = kMostCost;
  }
  prepared->cost = std::min(prepared->cost, kMostCost);
  prepared->op = std::string(node.op);
  prepared->source = std::string(node.source);
  const OpDef* const def = FindOp(node.op);
  prepared->may_fail = def == nullptr || MayFail(*def, node);  // a test's own op may
  prepared->elementwise = def != nullptr && def->elementwise && outputs.size() == 1 &&
                          prepared->kernel->units() == outputs[0].num_elements() &&
                          prepared->workspace_bytes() == 0;
  for (const TensorType* input : node.inputs) {
    prepared->input_is_like_output.push_back(outputs.size() == 1 && *input == outputs[0]);
  }
  return std::unique_ptr<Kernel>(std::move(prepared));
}

absl::StatusOr<int64_t> CpuEngine::WorkspaceBytes(const NodeView& node,
                                                  absl::Span<const TensorType> outputs) const {
  CHORUS_ASSIGN_OR_RETURN(const std::unique_ptr<HostKernel> kernel, make_kernel_(node, outputs));
  return kernel->workspace_bytes();
}

absl::Status CpuEngine::ResolvedKernel::Run(int64_t begin, int64_t end) const {
  if (begin == end) return absl::OkStatus();
  const HostBuffers buffers = {inputs, outputs, workspace};
  absl::Status status = prepared->kernel->Run(buffers, begin, end);
  if (status.ok()) return status;
  return KernelFailure(status, prepared->op, prepared->source, prepared->may_fail);
}

int64_t CpuEngine::CostOf(const KernelCall& call) {
  return static_cast<const PreparedKernel*>(call.kernel)->cost;
}

absl::StatusOr<CpuEngine::ResolvedKernel> CpuEngine::Resolve(const KernelCall& call,
                                                             int device) const {
  const auto* prepared = static_cast<const PreparedKernel*>(call.kernel);
  if (call.inputs.size() != prepared->input_bytes.size() ||
      call.outputs.size() != prepared->output_bytes.size()) {
    return MakeError(Reason::kInternal,
                     absl::StrCat("a kernel of ", prepared->input_bytes.size(), " inputs and ",
                                  prepared->output_bytes.size(), " outputs was launched with ",
                                  call.inputs.size(), " and ", call.outputs.size()));
  }
  ResolvedKernel resolved;
  resolved.prepared = prepared;
  void* pointer = nullptr;
  const auto resolve = [&](DeviceAddress address, int64_t bytes) {
    if (space_ != nullptr && bytes > 0) return space_->Resolve(device, address, bytes, &pointer);
    pointer = space_ == nullptr ? reinterpret_cast<void*>(address) : nullptr;
    return absl::OkStatus();
  };
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    CHORUS_RETURN_IF_ERROR(resolve(call.inputs[i], prepared->input_bytes[i]));
    resolved.inputs.push_back(pointer);
  }
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    CHORUS_RETURN_IF_ERROR(resolve(call.outputs[i], prepared->output_bytes[i]));
    resolved.outputs.push_back(pointer);
  }
  if (const int64_t bytes = prepared->workspace_bytes(); bytes > 0) {
    if (call.workspace == 0) {
      return MakeError(Reason::kInternal,
                       absl::StrCat(prepared->op, ": a kernel that wants ", bytes,
                                    " bytes of workspace was launched without any"));
    }
    CHORUS_RETURN_IF_ERROR(resolve(call.workspace, bytes));
    resolved.workspace = absl::MakeSpan(static_cast<char*>(pointer), static_cast<size_t>(bytes));
  }
  return resolved;
}

absl::StatusOr<CpuEngine::ResolvedCopy> CpuEngine::Resolve(const CopyItem& item, int device) const {
  ResolvedCopy copy;
  copy.bytes = item.bytes;
  copy.to = reinterpret_cast<void*>(item.to);
  void* from = reinterpret_cast<void*>(item.from);
  if (space_ != nullptr && item.bytes > 0) {
    if (item.direction != CopyItem::Direction::kToHost) {
      CHORUS_RETURN_IF_ERROR(space_->Resolve(device, item.to, item.bytes, &copy.to));
    }
    if (item.direction != CopyItem::Direction::kFromHost) {
      CHORUS_RETURN_IF_ERROR(space_->Resolve(device, item.from, item.bytes, &from));
    }
  }
  copy.from = from;
  return copy;
}

}  // namespace chorus
