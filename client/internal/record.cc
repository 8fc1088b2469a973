#include "client/internal/record.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/internal/access.h"
#include "client/internal/calls.h"
#include "client/internal/errors.h"
#include "client/internal/refusals.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "client/internal/trace.h"
#include "core/base/error.h"
#include "core/ops/collective_operands.h"
#include "core/ops/registry.h"

namespace chorus {
namespace internal {

namespace {

absl::Status Precondition(absl::string_view message) {
  return MakeError(Reason::kWrongState, message);
}

absl::Status NoTensor(absl::string_view op) {
  return BadType(absl::StrCat(op, ": expected a tensor, got an undefined one"));
}

// What is wrong with an operand before its type is looked at. *failure is set where the operand
// carries an error of its own.
absl::Status CheckOperand(absl::string_view op, const Tensor& x, const SessionCore* session,
                          std::shared_ptr<const Failure>* failure) {
  if (!x.defined()) return NoTensor(op);
  const TensorData& data = *ImplOf(x)->data;
  switch (data.state.load(std::memory_order_acquire)) {
    case TensorData::State::kFailed:
      *failure = data.failure;
      return data.failure->status;
    case TensorData::State::kAbsent:
      return BadType(
          absl::StrCat(op, ": expected a tensor, got the absent result of another rank"));
    case TensorData::State::kTraced:
      CHORUS_RETURN_IF_ERROR(CheckTrace(op, data, IdOf(Trace::Current())));
      break;
    default:
      break;
  }
  if (data.session.get() != session) {
    return BadType(absl::StrCat(op, ": expected tensors of one session, got one of another"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckDevice(absl::string_view op, const DeviceRef& device) {
  const std::shared_ptr<SessionCore>& session = SessionOf(device);
  if (session == nullptr) return absl::OkStatus();
  if (device.slot() >= 0 && device.slot() < session->device_count()) return absl::OkStatus();
  return BadType(absl::StrCat(op, ": device ", device.slot(), " is none of the session's ",
                              session->device_count()));
}

// --- Local ops ----------------------------------------------------------------------------------

Tensor ApplyLocal(NodeSpec spec, absl::Span<const Tensor> inputs, const DeviceRef* device) {
  Trace* const trace = Trace::Current();
  std::shared_ptr<SessionCore> session;
  if (device != nullptr) session = SessionOf(*device);
  for (const Tensor& input : inputs) {
    if (session == nullptr && input.defined()) session = ImplOf(input)->data->session;
  }
  std::shared_ptr<const Failure> failure;
  if (session == nullptr) {
    // A call that could not even be told its session has an error of its own.
    for (const Tensor& input : inputs) {
      if (input.defined()) CheckOperand(spec.op, input, nullptr, &failure).IgnoreError();
      if (failure != nullptr) return FailedTensor(nullptr, failure);
    }
    return FailedTensor(nullptr, WithSource(NoTensor(spec.op), spec.source));
  }
  if (device != nullptr) {
    const absl::Status status = CheckDevice(spec.op, *device);
    if (!status.ok()) return FailedTensor(session, WithSource(status, spec.source));
  }
  absl::InlinedVector<TensorDataPtr, 2> datas;
  absl::InlinedVector<const TensorType*, 2> types;
  const OpDef* const op = FindOp(spec.op);
  const bool crosses = op != nullptr && op->crosses_devices;
  for (const Tensor& input : inputs) {
    const absl::Status status = CheckOperand(spec.op, input, session.get(), &failure);
    if (!status.ok()) {
      if (failure != nullptr) return FailedTensor(session, failure);
      return FailedTensor(session, WithSource(status, spec.source));
    }
    datas.push_back(ImplOf(input)->data);
    types.push_back(&datas.back()->info->type);
    if (datas.size() == 1 && device == nullptr) spec.device_slot = datas[0]->device_slot;
    if (crosses) continue;
    if (datas.back()->device_slot != spec.device_slot) {
      return FailedTensor(session,
                          WithSource(BadType(absl::StrCat(
                                         spec.op, ": expected operands on one device, got devices ",
                                         spec.device_slot, " and ", datas.back()->device_slot,
                                         " of the session; CopyTo moves a tensor")),
                                     spec.source));
    }
  }
  NodeView view;
  view.op = spec.op;
  view.version = spec.version;
  view.attributes = spec.attributes;
  view.inputs = types;
  const absl::StatusOr<std::vector<TensorType>> outputs = InferTypes(view);
  if (!outputs.ok()) return FailedTensor(session, WithSource(outputs.status(), spec.source));

  bool record = false;
  if (GradEnabled()) {
    for (const Tensor& input : inputs) record = record || ImplOf(input)->requires_grad();
  }
  GradNodePtr node;
  Saved saved;
  if (record) {
    node = std::make_shared<GradNode>();
    node->spec = std::make_shared<NodeSpec>(spec);
    node->session = session;
    node->device_slot = spec.device_slot;
    saved = SavedBy(*op, spec, static_cast<int>(inputs.size()), static_cast<int>(outputs->size()));
    AddEdges(node.get(), inputs, IdOf(trace), saved);
    node->leads = LeadsOf(inputs);
  }
  TensorDataPtr data;
  if (trace != nullptr) {
    if (trace->session() != session) {
      return FailedTensor(session,
                          Precondition("a compiled function uses tensors of two sessions"));
    }
    int32_t trace_node = -1;
    absl::StatusOr<TensorDatas> added = trace->Add(std::move(spec), datas, nullptr, &trace_node);
    if (!added.ok()) return FailedTensor(session, added.status());
    data = std::move((*added)[0]);
    if (record) {
      node->trace = trace->id();
      node->trace_node = trace_node;
    }
  } else {
    session->Throttle(nullptr);
    for (size_t i = 0; record && i < datas.size(); ++i) {
      if (node->inputs[i].data == nullptr) continue;
      // The trainer may write to its own memory again before the gradient is asked for.
      if (datas[i]->state.load(std::memory_order_relaxed) != TensorData::State::kExternal) continue;
      SessionLock lock(session.get());
      if (!lock.status().ok()) return FailedTensor(session, lock.status());
      absl::StatusOr<TensorDataPtr> frozen = session->Freeze(*datas[i]);
      if (!frozen.ok()) return FailedTensor(session, WithSource(frozen.status(), spec.source));
      node->inputs[i].data = *frozen;
      datas[i] = *std::move(frozen);
    }
    SessionLock lock(session.get());
    if (!lock.status().ok()) return FailedTensor(session, lock.status());
    data = std::move(session->Append(std::move(spec), datas, *outputs)[0]);
  }
  Tensor result = MakeTensor(std::move(data));
  if (record) {
    node->order = TakeOrder();
    node->outputs.push_back(ImplOf(result)->data->info);
    if (saved.outputs_from == 0) node->saved.push_back(ImplOf(result)->data);
    Attach(node, 0, &result);
  }
  return result;
}

// --- Collectives --------------------------------------------------------------------------------

namespace {

absl::Status BringInLine(absl::Span<const CallPart> parts)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
  bool in_line = true;
  for (const CallPart& part : parts) in_line = in_line && part.group->member->out_of_line.ok();
  if (in_line) return absl::OkStatus();
  std::vector<MemberCore*> members;
  for (const CallPart& part : parts) members.push_back(part.group->member);
  return BringInLine(members);
}

// This rank cannot take part, which counts. The others are told: they would wait for it. `counted`:
// it has been already.
Tensor Refused(absl::Span<CallPart> parts, bool counted, CallInRuns* runs, absl::Status status) {
  const std::shared_ptr<SessionCore>& session = parts[0].group->member->session;
  if (IsLost(status)) return FailedTensor(session, std::move(status));
  std::vector<Sequence> sent;
  {
    SessionLock lock(session.get());
    if (!lock.status().ok()) return FailedTensor(session, lock.status());
    const absl::Status in_line = BringInLine(parts);
    if (!in_line.ok()) {
      return FailedTensor(session, std::make_shared<Failure>(Failure{in_line, true}));
    }
    if (!counted) CountCall(parts, runs);
    Refusals refusals;
    AddRefused(parts, &refusals);
    sent = SubmitRefusals(&session->log(), std::move(refusals), status);
  }
  const absl::Status recorded = AwaitRefused(session.get(), sent, status);
  return FailedTensor(session, std::make_shared<Failure>(Failure{recorded, true}));
}

// What is wrong with a member's call before its types are looked at; else its operands.
absl::Status CheckCall(const MemberCall& call, CallPart* part,
                       std::shared_ptr<const Failure>* failure) {
  const absl::string_view op = call.call->spec.op->name;
  const MemberCore& member = **call.member;
  const TensorType* const declared = call.call->spec.type;
  if (declared != nullptr) CHORUS_RETURN_IF_ERROR(declared->Validate(kMaxValueBytes));
  for (const Tensor& input : call.inputs) {
    CHORUS_RETURN_IF_ERROR(CheckOperand(op, input, member.session.get(), failure));
    TensorData& data = *ImplOf(input)->data;
    part->inputs.push_back(&data);
    if (data.device_slot != member.device_slot) {
      return BadType(absl::StrCat(op, ": expected a tensor on the member's device, ",
                                  member.device_slot, ", got one on device ", data.device_slot,
                                  " of the session; CopyTo moves it"));
    }
  }
  return absl::OkStatus();
}

TensorDataPtr AbsentResult(const MemberCore& member, TraceId trace, Sequence producer) {
  auto absent = std::make_shared<TensorData>(member.session);
  absent->device_slot = member.device_slot;
  absent->trace = trace;
  absent->producer = producer;
  absent->state.store(TensorData::State::kAbsent, std::memory_order_release);
  return absent;
}

// A collective on its way from a call to results.
struct Recording {
  MemberCall call;
  bool record = false;
  absl::InlinedVector<TensorDataPtr, 1> outputs;  // extras last
  std::shared_ptr<const NodeSpec> spec;
  int visible = 0;
  Saved saved;
  // The copies of operands in the trainer's own memory that the gradient rule uses, with their
  // indices.
  std::vector<std::pair<size_t, TensorDataPtr>> frozen;
  Sequence producer;               // eager
  const CallPart* part = nullptr;  // eager
  int32_t trace_node = -1;         // in a trace
  Results* results = nullptr;
};

// The results, with a tape entry where the call is recorded.
void Finish(Recording* r, TraceId trace) {
  const std::shared_ptr<MemberCore>& member = *r->call.member;
  Results& results = *r->results;
  if (!r->record) {
    for (TensorDataPtr& output : r->outputs) results.push_back(MakeTensor(std::move(output)));
    if (results.empty()) results.push_back(MakeTensor(AbsentResult(*member, trace, r->producer)));
    return;
  }
  for (int i = 0; i < r->visible; ++i) results.push_back(MakeTensor(r->outputs[i]));
  if (results.empty()) results.push_back(MakeTensor(AbsentResult(*member, trace, r->producer)));
  auto node = std::make_shared<GradNode>();
  node->session = member->session;
  node->device_slot = member->device_slot;
  node->spec = std::move(r->spec);
  AddEdges(node.get(), r->call.inputs, trace, r->saved);
  for (auto& [input, data] : r->frozen) node->inputs[input].data = std::move(data);
  for (const Tensor& x : r->call.call->behind) {
    if (!x.defined() || !x.requires_grad() || ImplOf(x)->data->session != member->session) continue;
    node->behind.push_back(EdgeTo(x, trace, false));
  }
  for (const TensorDataPtr& output : r->outputs) node->outputs.push_back(output->info);
  for (size_t o = static_cast<size_t>(r->saved.outputs_from); o < r->outputs.size(); ++o) {
    node->saved.push_back(std::move(r->outputs[o]));
  }
  node->member = member;
  node->group = r->call.group;
  if (trace != TraceId()) {
    node->trace = trace;
    node->trace_node = r->trace_node;
  } else {
    node->key = r->part->instance;
    node->request_step = member->step.load(std::memory_order_relaxed);
  }
  node->order = TakeOrder();
  for (size_t i = 0; i < results.size(); ++i) Attach(node, i, &results[i]);
}

// What stands beside the pieces (a factor, counts) is kept for the gradient: the trainer may write
// to its own memory again before that is asked for, so the call uses a copy.
absl::Status FreezeKept(SessionCore* session, Recording* r, CallPart* part)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
  const size_t count = part->inputs.size();
  const auto pieces = NumPieces(part->key.spec.collective, static_cast<int>(count));
  for (auto i = static_cast<size_t>(pieces); i < count; ++i) {
    const TensorData& data = *part->inputs[i];
    if (data.state.load(std::memory_order_relaxed) != TensorData::State::kExternal) continue;
    CHORUS_ASSIGN_OR_RETURN(TensorDataPtr frozen, session->Freeze(data));
    part->inputs[i] = frozen.get();
    r->frozen.emplace_back(i, std::move(frozen));
  }
  return absl::OkStatus();
}

absl::Status AddToTrace(Recording* r, Trace* trace) {
  const CollectiveSpec& call = r->part->key.spec;
  NodeSpec spec = NodeSpecOf(call, *r->call.group, r->part->instance.at.part);
  TensorDatas operands;
  for (const Tensor& input : r->call.inputs) operands.push_back(ImplOf(input)->data);
  auto spec_copy = std::make_shared<NodeSpec>(spec);
  CHORUS_ASSIGN_OR_RETURN(TensorDatas added,
                          trace->Add(std::move(spec), operands, r->call.group, &r->trace_node));
  r->visible = NumVisibleOutputs(*spec_copy->collective, static_cast<int>(added.size()));
  r->saved = SavedBy(*call.op, *spec_copy, static_cast<int>(operands.size()),
                     static_cast<int>(added.size()));
  r->spec = std::move(spec_copy);
  r->outputs = std::move(added);
  return absl::OkStatus();
}

// Fills in the results of `num_calls` recordings, whose calls are `parts`. kOne: of one, which is
// the usual case; then the loops are none.
template <bool kOne>
void RecordCalls(size_t num_calls, Recording* recordings, CallPart* parts) {
  const size_t count = kOne ? 1 : num_calls;
  const CallRequest& first = *recordings[0].call.call;
  const CollectiveSpec& first_spec = first.spec;
  Trace* const trace = Trace::Current();
  const auto fail = [&](const Tensor& failed) {
    // Without it the function would call less than it does on other ranks.
    if (trace != nullptr) trace->Fail(failed.status());
    for (size_t i = 0; i < count; ++i) *recordings[i].results = {failed};
  };
  const auto sourced = [&first_spec](const absl::Status& status) {
    return WithSource(
        status, first_spec.source != nullptr ? *first_spec.source : SourceOf(first_spec.site));
  };
  for (size_t i = 0; i < count; ++i) {
    const MemberCall& call = recordings[i].call;
    const absl::string_view op = call.call->spec.op->name;
    if (*call.member == nullptr) {
      return fail(FailedTensor(nullptr,
                               sourced(BadType(absl::StrCat(op, ": expected a group, got none")))));
    }
    if (!call.group->alive.load(std::memory_order_relaxed)) {
      return fail(FailedTensor((*call.member)->session,
                               sourced(Precondition(absl::StrCat(
                                   op, ": the group ended when its world was reformed")))));
    }
  }
  const std::shared_ptr<SessionCore>& session = (*recordings[0].call.member)->session;
  const auto refuse = [&](const absl::Status& status, bool counted) {
    // Of gradients it is the whole request for them that is refused.
    if (trace != nullptr || first.bound != nullptr) return fail(FailedTensor(session, status));
    fail(Refused(absl::MakeSpan(parts, count), counted, first.runs, status));
  };
  for (size_t i = 0; i < count; ++i) {
    const MemberCall& call = recordings[i].call;
    std::shared_ptr<const Failure> failure;
    absl::Status status = CheckCall(call, &parts[i], &failure);
    if (!status.ok()) {
      if (failure == nullptr) status = AtIndex(status, parts[i].index);
      return refuse(failure != nullptr ? failure->status : sourced(status), /*counted=*/false);
    }
    Collective& collective = parts[i].key.spec.collective;
    const TensorType* type = call.call->spec.type;
    if (type == nullptr && !parts[i].inputs.empty()) type = &parts[i].inputs[0]->info->type;
    recordings[i].part = &parts[i];
    recordings[i].record = GradEnabled() && call.call->record &&
                           call.call->spec.op->gradient != nullptr && type != nullptr &&
                           IsFloating(type->dtype);
    Leads leads;
    if (ComputesGradients() && !GradEnabled()) {
      leads = {true, true};
    } else if (recordings[i].record) {
      leads = LeadsOf(call.inputs);
    }
    collective.wants_grad = recordings[i].record;
    collective.leads_to_collective = leads.to_collective;
    collective.leads_to_leaf = leads.to_leaf;
    // Of the rule's own numbering of groups; a call says which group by itself.
    collective.group_slot = 0;
  }
  if (trace != nullptr) {
    for (size_t i = 0; i < count; ++i) {
      int32_t& part = parts[i].instance.at.part;
      if (const CallPart* const before = PartBefore(absl::MakeConstSpan(parts, count), i)) {
        part = before->instance.at.part + 1;
      } else if (first.runs != nullptr) {
        part = first.runs->next.part;
      }
      const absl::Status added = AddToTrace(&recordings[i], trace);
      if (!added.ok()) {
        return fail(FailedTensor(session, sourced(AtIndex(added, parts[i].index))));
      }
      if (first.runs != nullptr) first.runs->next.part = part + 1;
    }
  } else {
    session->Throttle(recordings[0].call.member->get());
    absl::Status refused;
    {
      SessionLock lock(session.get());
      if (!lock.status().ok()) return fail(FailedTensor(session, lock.status()));
      const absl::Status in_line = BringInLine(absl::MakeConstSpan(parts, count));
      if (!in_line.ok()) {
        return fail(FailedTensor(session, std::make_shared<Failure>(Failure{in_line, true})));
      }
      if (first.bound != nullptr) {
        parts[0].instance = *first.bound;
      } else {
        CountCall(absl::MakeSpan(parts, count), first.runs);
      }
      for (size_t i = 0; refused.ok() && i < count; ++i) {
        if (!recordings[i].record || parts[i].inputs.size() < 2) continue;
        refused = FreezeKept(session.get(), &recordings[i], &parts[i]);
      }
      session->TrimCalls();
      for (size_t i = 0; i < count; ++i) InternKey(&session->interner(), &parts[i]);
      const CallEntry* entry = nullptr;
      TensorDatas sent;
      const absl::StatusOr<Sequence> run =
          refused.ok()
              ? session->SubmitCalls(absl::MakeSpan(parts, count), first.bound != nullptr,
                                     first.runs, &entry, kOne ? &recordings[0].outputs : &sent)
              : refused;
      refused = run.status();
      auto next = sent.begin();
      for (size_t i = 0; refused.ok() && i < count; ++i) {
        Recording& r = recordings[i];
        const CallEntry::Part& part = entry->parts[i];
        for (size_t o = 0; !kOne && o < part.outputs; ++o) r.outputs.push_back(std::move(*next++));
        if (r.record) r.spec = part.spec;
        r.visible = part.visible;
        r.saved = part.saved;
        r.producer = *run;
      }
    }
    if (!refused.ok()) return refuse(sourced(refused), /*counted=*/true);
  }
  for (size_t i = 0; i < count; ++i) Finish(&recordings[i], IdOf(trace));
}

}  // namespace

Results ApplyCollective(const CallRequest& call, absl::Span<const Tensor> inputs,
                        const std::shared_ptr<MemberCore>& member, GroupCore* group) {
  Results results;
  Recording recording;
  recording.call = {&call, inputs, &member, group};
  recording.results = &results;
  CallPart part(group, call.spec);
  RecordCalls<true>(1, &recording, &part);
  return results;
}

std::vector<Results> ApplyCollectives(absl::Span<const MemberCall> calls) {
  std::vector<Results> results(calls.size());
  std::vector<Recording> recordings(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    recordings[i].call = calls[i];
    recordings[i].results = &results[i];
  }
  std::vector<CallPart> parts;
  parts.reserve(calls.size());
  for (const MemberCall& call : calls) parts.emplace_back(call.group, call.call->spec);
  CallInRuns* const runs = calls.empty() ? nullptr : calls[0].call->runs;
  const size_t before = runs == nullptr ? 0 : runs->calls;
  for (size_t i = 0; before + parts.size() > 1 && i < parts.size(); ++i) {
    parts[i].index = static_cast<int64_t>(before + i);
  }
  if (runs != nullptr) runs->calls += calls.size();
  if (!calls.empty()) RecordCalls<false>(calls.size(), recordings.data(), parts.data());
  return results;
}

}  // namespace internal
}  // namespace chorus
