#include "core/runtime/device_plan.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/graph/encoding.h"

namespace chorus {
namespace {

constexpr uint32_t kMagic = 0x4e4c5043;  // "CPLN"
constexpr uint8_t kVersion = 4;

// An executor keeps a bit for each.
constexpr int64_t kMaxEqualGroups = int64_t{1} << 20;

void PutLocation(const DevicePlan::Location& location, ByteWriter* out) {
  out->PutSigned(location.buffer);
  out->PutSigned(location.offset);
  out->PutSigned(location.producer);
}

// Reads numbers that must lie in a range; out of it the reader fails.
int64_t GetInRange(ByteReader* in, int64_t least, int64_t limit) {
  const int64_t value = in->GetSigned();
  if (value >= least && value < limit) return value;
  in->Fail();
  return least;
}

constexpr int64_t kAnyInt64 = std::numeric_limits<int64_t>::max();
constexpr int64_t kAnyInt32 = std::numeric_limits<int32_t>::max();

int32_t GetInt32(ByteReader* in, int64_t least, int64_t limit) {
  return static_cast<int32_t>(GetInRange(in, least, limit));
}

template <typename Enum>
Enum GetEnum(ByteReader* in, Enum last) {
  const uint8_t value = in->Get<uint8_t>();
  if (value <= static_cast<uint8_t>(last)) return static_cast<Enum>(value);
  in->Fail();
  return Enum();
}

DevicePlan::Location GetLocation(const DevicePlan& plan, ByteReader* in) {
  DevicePlan::Location location;
  location.buffer = GetInt32(in, -1, plan.num_buffers);
  location.offset = GetInRange(in, 0, kAnyInt64);
  location.producer = GetInt32(in, -1, kAnyInt32);
  return location;
}

void PutCounts(const std::vector<int64_t>& counts, ByteWriter* out) {
  out->PutVarint(counts.size());
  for (const int64_t count : counts) out->PutSigned(count);
}

// One for each of `pieces`, or none.
std::vector<int64_t> GetCounts(int32_t pieces, ByteReader* in) {
  std::vector<int64_t> counts;
  const size_t size = in->GetCount();
  if (size != 0 && size != static_cast<size_t>(pieces)) in->Fail();
  for (size_t i = 0; i < size && in->ok(); ++i) counts.push_back(GetInRange(in, 0, kAnyInt64));
  return counts;
}

bool GetBool(ByteReader* in) {
  const uint8_t value = in->Get<uint8_t>();
  if (value > 1) in->Fail();
  return value == 1;
}

void PutRuntime(const DevicePlan::RuntimeCounts& runtime, ByteWriter* out) {
  out->PutSigned(runtime.row_elements);
  out->PutSigned(runtime.input_rows);
  out->PutSigned(runtime.output_rows);
  for (const bool has : {runtime.sends, runtime.receives, runtime.received}) {
    out->Put(static_cast<uint8_t>(has));
  }
  out->PutString(runtime.source);
}

DevicePlan::RuntimeCounts GetRuntime(ByteReader* in) {
  DevicePlan::RuntimeCounts runtime;
  runtime.row_elements = GetInRange(in, 0, kAnyInt64);
  runtime.input_rows = GetInRange(in, 0, kAnyInt64);
  runtime.output_rows = GetInRange(in, 0, kAnyInt64);
  for (bool* has : {&runtime.sends, &runtime.receives, &runtime.received}) *has = GetBool(in);
  runtime.source = std::string(in->GetString());
  return runtime;
}

// Behind the pieces: counts and the factor; counts, and either nothing or what backward needs.
bool HasSoundOperands(const DevicePlan::CollectiveStep& collective, const DevicePlan::Step& step) {
  auto inputs = static_cast<size_t>(collective.num_inputs);
  auto outputs = static_cast<size_t>(collective.num_outputs);
  if (collective.reduction == Reduction::kPremulSum) ++inputs;
  if (collective.runtime.has_value()) {
    inputs += static_cast<size_t>(collective.runtime->sends) +
              static_cast<size_t>(collective.runtime->receives);
    outputs += static_cast<size_t>(collective.runtime->received);
  }
  return step.inputs.size() == inputs && step.outputs.size() >= outputs;
}

}  // namespace

// The nodes travel as a graph: its format has attributes, types and limits already.
std::string EncodeDevicePlan(const DevicePlan& plan) {
  ByteWriter out;
  out.Put(kMagic);
  out.Put(kVersion);
  out.PutSigned(plan.num_buffers);
  out.PutSigned(plan.num_bindings);
  out.PutSigned(plan.num_events);
  out.PutSigned(plan.num_equal_groups);
  Graph nodes;
  nodes.nodes.reserve(plan.nodes.size());
  for (const DevicePlan::Kernel& kernel : plan.nodes) nodes.nodes.push_back(kernel.node);
  out.PutString(EncodeGraph(nodes));
  for (const DevicePlan::Kernel& kernel : plan.nodes) {
    out.PutVarint(kernel.input_types.size());
    for (const TensorType& type : kernel.input_types) EncodeType(type, &out);
  }
  out.PutVarint(plan.collectives.size());
  for (const DevicePlan::CollectiveStep& collective : plan.collectives) {
    out.Put(static_cast<uint8_t>(collective.kind));
    out.Put(static_cast<uint8_t>(collective.reduction));
    out.Put(static_cast<uint8_t>(collective.dtype));
    out.PutSigned(collective.count);
    out.PutSigned(collective.root);
    out.PutSigned(collective.binding);
    out.PutSigned(collective.num_inputs);
    out.PutSigned(collective.num_outputs);
    PutCounts(collective.input_counts, &out);
    PutCounts(collective.output_counts, &out);
    out.Put(static_cast<uint8_t>(collective.runtime.has_value()));
    if (collective.runtime.has_value()) PutRuntime(*collective.runtime, &out);
  }
  out.PutVarint(plan.steps.size());
  for (const DevicePlan::Step& step : plan.steps) {
    out.Put(static_cast<uint8_t>(step.stream));
    out.PutSigned(step.node);
    out.PutSigned(step.collective);
    out.PutSigned(step.wait);
    out.PutSigned(step.record);
    out.Put(static_cast<uint8_t>(step.held_back));
    out.PutSigned(step.equal_group);
    out.PutVarint(step.inputs.size());
    for (const DevicePlan::Location& location : step.inputs) PutLocation(location, &out);
    out.PutVarint(step.outputs.size());
    for (const DevicePlan::Location& location : step.outputs) PutLocation(location, &out);
    out.PutSigned(step.workspace_bytes);
    if (step.workspace_bytes > 0) PutLocation(step.workspace, &out);
  }
  return out.Take();
}

absl::StatusOr<DevicePlan> DecodeDevicePlan(absl::string_view bytes) {
  ByteReader in(bytes);
  DevicePlan plan;
  if (in.Get<uint32_t>() != kMagic || in.Get<uint8_t>() != kVersion) {
    return Malformed(absl::StrCat("a device plan of ", bytes.size(),
                                  " bytes does not begin as one of version ", kVersion));
  }
  plan.num_buffers = GetInt32(&in, 0, kAnyInt32);
  plan.num_bindings = GetInt32(&in, 0, kAnyInt32);
  plan.num_events = GetInt32(&in, 0, kAnyInt32);
  plan.num_equal_groups = GetInt32(&in, 0, kMaxEqualGroups);
  const absl::string_view encoded_nodes = in.GetString();
  if (in.ok()) {
    CHORUS_ASSIGN_OR_RETURN(Graph nodes, DecodeGraph(encoded_nodes));
    plan.nodes.resize(nodes.nodes.size());
    for (size_t i = 0; i < plan.nodes.size(); ++i) {
      plan.nodes[i].node = std::move(nodes.nodes[i]);
      const size_t types = in.GetCount();
      for (size_t t = 0; t < types && in.ok(); ++t) {
        plan.nodes[i].input_types.push_back(DecodeType(&in));
      }
    }
  }
  const size_t collectives = in.GetCount(11);
  for (size_t i = 0; i < collectives && in.ok(); ++i) {
    DevicePlan::CollectiveStep collective;
    collective.kind = GetEnum(&in, kLastCollectiveKind);
    collective.reduction = GetEnum(&in, kLastReduction);
    collective.dtype = GetEnum(&in, DType::kComplex128);
    collective.count = GetInRange(&in, 0, kAnyInt64);
    collective.root = GetInt32(&in, -1, kAnyInt32);
    collective.binding = GetInt32(&in, 0, plan.num_bindings);
    collective.num_inputs = GetInt32(&in, 0, kAnyInt32);
    collective.num_outputs = GetInt32(&in, 0, kAnyInt32);
    collective.input_counts = GetCounts(collective.num_inputs, &in);
    collective.output_counts = GetCounts(collective.num_outputs, &in);
    if (GetBool(&in)) collective.runtime = GetRuntime(&in);
    plan.collectives.push_back(collective);
  }
  // An event is recorded by one step and waited for by one of the other stream, in turns.
  enum class EventState : uint8_t { kFree, kRecorded };
  struct EventUse {
    EventState state = EventState::kFree;
    DevicePlan::StreamId stream = DevicePlan::StreamId::kCompute;
  };
  const size_t steps = in.GetCount(10);
  if (static_cast<size_t>(plan.num_events) > steps) in.Fail();
  std::vector<EventUse> events(in.ok() ? static_cast<size_t>(plan.num_events) : 0);
  for (size_t i = 0; i < steps && in.ok(); ++i) {
    DevicePlan::Step step;
    step.stream = GetEnum(&in, DevicePlan::StreamId::kCommunication);
    step.node = GetInt32(&in, -1, static_cast<int64_t>(plan.nodes.size()));
    step.collective = GetInt32(&in, -1, static_cast<int64_t>(plan.collectives.size()));
    if ((step.node < 0) == (step.collective < 0)) in.Fail();
    step.wait = GetInt32(&in, -1, plan.num_events);
    step.record = GetInt32(&in, -1, plan.num_events);
    step.held_back = GetBool(&in);
    step.equal_group = GetInt32(&in, -1, plan.num_equal_groups);
    if ((step.held_back || step.equal_group >= 0) && step.node < 0) in.Fail();
    const size_t inputs = in.GetCount(3);
    for (size_t k = 0; k < inputs && in.ok(); ++k) step.inputs.push_back(GetLocation(plan, &in));
    const size_t outputs = in.GetCount(3);
    for (size_t k = 0; k < outputs && in.ok(); ++k) step.outputs.push_back(GetLocation(plan, &in));
    step.workspace_bytes = GetInRange(&in, 0, kAnyInt64);
    if (step.workspace_bytes > 0) {
      step.workspace = GetLocation(plan, &in);
      if (step.node < 0 || step.workspace.buffer < 0) in.Fail();
    }
    if (!in.ok()) break;
    if (step.collective >= 0 &&
        !HasSoundOperands(plan.collectives[static_cast<size_t>(step.collective)], step)) {
      in.Fail();
    }
    if (step.node >= 0) {
      const DevicePlan::Kernel& kernel = plan.nodes[static_cast<size_t>(step.node)];
      if (step.inputs.size() != kernel.input_types.size() ||
          step.outputs.size() != kernel.node.outputs.size()) {
        in.Fail();
      }
    }
    if (step.wait >= 0) {
      EventUse& event = events[static_cast<size_t>(step.wait)];
      if (event.state != EventState::kRecorded || event.stream == step.stream) in.Fail();
      event.state = EventState::kFree;
    }
    if (step.record >= 0) {
      EventUse& event = events[static_cast<size_t>(step.record)];
      if (event.state != EventState::kFree) in.Fail();
      event = {EventState::kRecorded, step.stream};
    }
    plan.steps.push_back(std::move(step));
  }
  if (!in.Done()) {
    return Malformed(absl::StrCat("a device plan of ", bytes.size(), " bytes does not decode"));
  }
  return plan;
}

}  // namespace chorus
