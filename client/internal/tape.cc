#include "client/internal/tape.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "client/internal/trace.h"
#include "core/autograd/backward.h"
#include "core/base/error.h"
#include "core/ops/registry.h"

namespace chorus {
inline namespace sdk {
namespace {

thread_local bool grad_enabled = true;
std::atomic<uint64_t> next_order{1};

// Entries that die while another one dies: long tapes are taken down without recursion.
struct Graveyard {
  bool active = false;
  std::vector<absl::InlinedVector<Edge, 2>> edges;
  absl::InlinedVector<std::shared_ptr<SessionCore>, 1> sessions;
};
thread_local Graveyard graveyard;

absl::Status Precondition(absl::string_view message) {
  return MakeError(Reason::kWrongState, message);
}

absl::Status NoTensor(absl::string_view op) {
  return BadType(absl::StrCat(op, ": expected a tensor, got an undefined one"));
}

// What is wrong with an operand before its type is looked at. *failure is set where the operand
// carries an error of its own.
absl::Status CheckOperand(absl::string_view op, const Tensor& x, const SessionCore* session,
                          const Trace* trace, std::shared_ptr<const Failure>* failure) {
  if (!x.defined()) return NoTensor(op);
  const TensorData& data = *x.impl()->data;
  switch (data.state.load(std::memory_order_acquire)) {
    case TensorData::State::kFailed:
      *failure = data.failure;
      return data.failure->status;
    case TensorData::State::kAbsent:
      return BadType(
          absl::StrCat(op, ": expected a tensor, got the absent result of another rank"));
    case TensorData::State::kTraced:
      if (data.trace != trace) {
        return Precondition(absl::StrCat(
            op, ": a tensor of a compiled function was used outside; return it instead"));
      }
      break;
    default:
      break;
  }
  if (data.session.get() != session) {
    return BadType(absl::StrCat(op, ": expected tensors of one session, got one of another"));
  }
  return absl::OkStatus();
}

// Those of a tensor that this trace knows.
Companions CompanionsIn(const Trace* trace, const TensorImpl& impl) {
  if (impl.companions == nullptr || impl.companions->front()->trace != trace) return nullptr;
  return impl.companions;
}

Edge EdgeTo(const Tensor& x, const Trace* trace, bool keep_data) {
  const TensorImpl& impl = *x.impl();
  Edge edge;
  edge.info = impl.data->info;
  edge.device_slot = impl.data->device_slot;
  if (keep_data) edge.data = impl.data;
  // What an outer tape says about a captured tensor is not the function's business.
  const bool own = impl.node == nullptr || impl.node->trace == trace;
  if (impl.node != nullptr && own) {
    edge.node = impl.node;
    edge.output = impl.output;
  } else if (keep_data || impl.requires_grad()) {
    edge.leaf = impl.leaf != nullptr ? impl.leaf : x.impl();
  }
  if (own) edge.companions = CompanionsIn(trace, impl);
  return edge;
}

// Where what is computed from these comes from, by the tape of this trace.
Leads LeadsOf(absl::Span<const Tensor> inputs, const Trace* trace) {
  Leads leads;
  for (const Tensor& input : inputs) {
    const TensorImpl& impl = *input.impl();
    if (impl.node == nullptr) {
      const TensorImpl& leaf = impl.leaf != nullptr ? *impl.leaf : impl;
      leads.to_leaf = leads.to_leaf || leaf.leaf_requires_grad;
    } else if (impl.node->trace == trace) {
      const GradNode& node = *impl.node;
      const bool local = node.member == nullptr;
      leads.to_collective = leads.to_collective || !local || node.leads.to_collective;
      leads.to_leaf = leads.to_leaf || (local && node.leads.to_leaf);
    }
  }
  return leads;
}

void AddEdges(GradNode* node, absl::Span<const Tensor> inputs, const Trace* trace, Saved saved) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    node->inputs.push_back(EdgeTo(inputs[i], trace, static_cast<int>(i) >= saved.inputs_from));
  }
}

// Makes `result` the output `output` of a tape entry.
void Attach(const GradNodePtr& node, size_t output, Tensor* result) {
  const TensorInfo* const info = result->impl()->data->info.get();
  if (info != nullptr && !IsFloating(info->type.dtype)) return;
  result->impl()->node = node;
  result->impl()->output = static_cast<int>(output);
}

}  // namespace

// --- Tape entries -------------------------------------------------------------------------------

GradNode::~GradNode() {
  if (member != nullptr && trace == nullptr && !consumed) {
    session->RetireTape({member->world, GroupRank(group->rank), key, /*consumed=*/false});
  }
  graveyard.edges.push_back(std::move(inputs));
  for (Edge& edge : behind) {
    graveyard.edges.emplace_back();
    graveyard.edges.back().push_back(std::move(edge));
  }
  graveyard.sessions.push_back(std::move(session));
  if (graveyard.active) return;
  graveyard.active = true;
  while (!graveyard.edges.empty()) {
    const absl::InlinedVector<Edge, 2> edges = std::move(graveyard.edges.back());
    graveyard.edges.pop_back();
  }
  graveyard.active = false;
  const auto sessions = std::move(graveyard.sessions);
  graveyard.sessions.clear();
  for (const auto& s : sessions) s->DrainIfUrgent();
}

void GradNode::Consume() {
  if (consumed) return;
  consumed = true;
  if (member != nullptr && trace == nullptr) {
    session->RetireTape({member->world, GroupRank(group->rank), key, /*consumed=*/true});
  }
  const absl::InlinedVector<Edge, 2> edges = std::move(inputs);
  const std::vector<Edge> rest = std::move(behind);
  inputs.clear();
  behind.clear();
  saved.clear();
}

bool GradEnabled() { return grad_enabled; }

GradMode::GradMode(bool enabled) : before_(grad_enabled) { grad_enabled = enabled; }
GradMode::~GradMode() { grad_enabled = before_; }

Tensor MakeTensor(TensorDataPtr data) {
  auto impl = std::make_shared<TensorImpl>();
  impl->data = std::move(data);
  return Tensor(std::move(impl));
}

namespace {

Tensor FailedTensor(const std::shared_ptr<SessionCore>& session,
                    std::shared_ptr<const Failure> failure) {
  auto data = std::make_shared<TensorData>(session);
  data->failure = std::move(failure);
  data->state.store(TensorData::State::kFailed, std::memory_order_release);
  return MakeTensor(std::move(data));
}

}  // namespace

Tensor FailedTensor(const std::shared_ptr<SessionCore>& session, absl::Status status) {
  return FailedTensor(session, std::make_shared<Failure>(Failure{std::move(status)}));
}

// --- Local ops ----------------------------------------------------------------------------------

Tensor ApplyLocal(NodeSpec spec, absl::Span<const Tensor> inputs, const DeviceRef* device) {
  Trace* const trace = Trace::Current();
  std::shared_ptr<SessionCore> session;
  if (device != nullptr) session = device->session();
  for (const Tensor& input : inputs) {
    if (session == nullptr && input.defined()) session = input.impl()->data->session;
  }
  if (session == nullptr) {
    return FailedTensor(nullptr, WithSource(NoTensor(spec.op), spec.source));
  }
  std::shared_ptr<const Failure> failure;
  absl::InlinedVector<TensorDataPtr, 2> datas;
  absl::InlinedVector<const TensorType*, 2> types;
  const OpDef* const op = FindOp(spec.op);
  const bool crosses = op != nullptr && op->crosses_devices;
  for (const Tensor& input : inputs) {
    const absl::Status status = CheckOperand(spec.op, input, session.get(), trace, &failure);
    if (!status.ok()) {
      if (failure != nullptr) return FailedTensor(session, failure);
      return FailedTensor(session, WithSource(status, spec.source));
    }
    datas.push_back(input.impl()->data);
    types.push_back(&datas.back()->info->type);
    if (crosses) continue;
    if (datas.size() == 1 && device == nullptr) spec.device_slot = datas[0]->device_slot;
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
  if (grad_enabled) {
    for (const Tensor& input : inputs) record = record || input.impl()->requires_grad();
  }
  GradNodePtr node;
  Saved saved;
  if (record) {
    node = std::make_shared<GradNode>();
    node->spec = std::make_shared<NodeSpec>(spec);
    node->session = session;
    node->device_slot = spec.device_slot;
    saved = SavedBy(*op, spec, static_cast<int>(inputs.size()), static_cast<int>(outputs->size()));
    AddEdges(node.get(), inputs, trace, saved);
    node->leads = LeadsOf(inputs, trace);
  }
  TensorDataPtr data;
  if (trace != nullptr) {
    if (trace->session() != session) {
      return FailedTensor(session,
                          Precondition("a compiled function uses tensors of two sessions"));
    }
    int32_t number = -1;
    absl::StatusOr<TensorDatas> added = trace->Add(std::move(spec), datas, nullptr, &number);
    if (!added.ok()) return FailedTensor(session, added.status());
    data = std::move((*added)[0]);
    if (record) {
      node->trace = trace;
      node->trace_node = number;
    }
  } else {
    session->Throttle();
    for (size_t i = 0; record && i < datas.size(); ++i) {
      if (node->inputs[i].data == nullptr) continue;
      // The trainer may write to its own memory again before the gradient is asked for.
      if (datas[i]->state.load(std::memory_order_relaxed) != TensorData::State::kExternal) continue;
      SessionLock lock(session.get());
      if (!lock.status().ok()) return FailedTensor(session, lock.status());
      absl::StatusOr<TensorDataPtr> frozen = session->FreezeLocked(*datas[i]);
      if (!frozen.ok()) return FailedTensor(session, WithSource(frozen.status(), spec.source));
      node->inputs[i].data = *frozen;
      datas[i] = *std::move(frozen);
    }
    SessionLock lock(session.get());
    if (!lock.status().ok()) return FailedTensor(session, lock.status());
    data = std::move(session->AppendLocked(std::move(spec), datas, *outputs)[0]);
  }
  Tensor result = MakeTensor(std::move(data));
  if (record) {
    node->order = next_order.fetch_add(1, std::memory_order_relaxed);
    node->outputs.push_back(result.impl()->data->info);
    if (saved.outputs_from == 0) node->saved.push_back(result.impl()->data);
    Attach(node, 0, &result);
  }
  return result;
}

// --- Collectives --------------------------------------------------------------------------------

namespace {

// The first of these members that takes part in nothing more in its step says why.
absl::Status OutOfLine(absl::Span<const CallPart> parts)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
  for (const CallPart& part : parts) {
    if (!part.group->member->out_of_line.ok()) return Detached(part.group->member->out_of_line);
  }
  return absl::OkStatus();
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
    const absl::Status out_of_line = OutOfLine(parts);
    if (!out_of_line.ok()) {
      return FailedTensor(session, std::make_shared<Failure>(Failure{out_of_line, true}));
    }
    if (!counted) SessionCore::CountCallLocked(parts, runs);
    SessionCore::Refusals refusals;
    SessionCore::AddRefused(parts, &refusals);
    sent = session->RefuseLocked(std::move(refusals), status);
  }
  const absl::Status recorded = session->AwaitRefused(sent, status);
  return FailedTensor(session, std::make_shared<Failure>(Failure{recorded, true}));
}

// What is wrong with a member's call before its types are looked at; else its operands.
absl::Status CheckCall(const MemberCall& call, const Trace* trace, CallPart* part,
                       std::shared_ptr<const Failure>* failure) {
  const absl::string_view op = call.call->spec.op->name;
  const MemberCore& member = **call.member;
  const TensorType* const declared = call.call->spec.type;
  if (declared != nullptr) CHORUS_RETURN_IF_ERROR(declared->Validate(kMaxValueBytes));
  for (const Tensor& input : call.inputs) {
    CHORUS_RETURN_IF_ERROR(CheckOperand(op, input, member.session.get(), trace, failure));
    TensorData& data = *input.impl()->data;
    part->inputs.push_back(&data);
    if (data.device_slot != member.device_slot) {
      return BadType(absl::StrCat(op, ": expected a tensor on the member's device, ",
                                  member.device_slot, ", got one on device ", data.device_slot,
                                  " of the session; CopyTo moves it"));
    }
  }
  return absl::OkStatus();
}

// Makes the key of a part from its spec and inputs.
void InternKey(SessionCore* session, CallPart* part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
  CallKey& key = part->key;
  if (key.spec.type != nullptr) {
    part->declared = session->Intern(*key.spec.type);
    key.spec.type = &part->declared->type;
  }
  if (key.spec.source != nullptr) key.spec.source = session->InternSource(*key.spec.source);
  key.num_inputs = static_cast<int32_t>(part->inputs.size());
  bool differ = false;
  for (const TensorData* input : part->inputs) {
    differ = differ || input->info != part->inputs[0]->info;
  }
  for (size_t i = 0; i < (differ ? part->inputs.size() : std::min<size_t>(1, key.num_inputs));
       ++i) {
    key.types.push_back(part->inputs[i]->info.get());
  }
}

TensorDataPtr AbsentResult(const MemberCore& member, Trace* trace, Sequence producer) {
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
  Sequence producer;               // eager
  const CallPart* part = nullptr;  // eager
  int32_t trace_node = -1;         // in a trace
  Results* results = nullptr;
};

// The results, with a tape entry where the call is recorded.
void Finish(Recording* r, Trace* trace) {
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
  for (const Tensor& x : r->call.call->behind) {
    if (!x.defined() || !x.requires_grad() || x.impl()->data->session != member->session) continue;
    node->behind.push_back(EdgeTo(x, trace, false));
  }
  for (const TensorDataPtr& output : r->outputs) node->outputs.push_back(output->info);
  for (size_t o = static_cast<size_t>(r->saved.outputs_from); o < r->outputs.size(); ++o) {
    node->saved.push_back(std::move(r->outputs[o]));
  }
  node->member = member;
  node->group = r->call.group;
  if (trace != nullptr) {
    node->trace = trace;
    node->trace_node = r->trace_node;
  } else {
    node->key = r->part->instance;
    node->request_step = member->step.load(std::memory_order_relaxed);
  }
  node->order = next_order.fetch_add(1, std::memory_order_relaxed);
  for (size_t i = 0; i < results.size(); ++i) Attach(node, i, &results[i]);
}

absl::Status AddToTrace(Recording* r, Trace* trace) {
  const CollectiveSpec& call = r->part->key.spec;
  NodeSpec spec = NodeSpecOf(call, *r->call.group, r->part->instance.at.part);
  TensorDatas operands;
  for (const Tensor& input : r->call.inputs) operands.push_back(input.impl()->data);
  auto kept = std::make_shared<NodeSpec>(spec);
  CHORUS_ASSIGN_OR_RETURN(TensorDatas added,
                          trace->Add(std::move(spec), operands, r->call.group, &r->trace_node));
  r->visible = NumVisibleOutputs(*kept->collective, static_cast<int>(added.size()));
  r->saved =
      SavedBy(*call.op, *kept, static_cast<int>(operands.size()), static_cast<int>(added.size()));
  r->spec = std::move(kept);
  r->outputs = std::move(added);
  return absl::OkStatus();
}

// Fills in the results of `number` recordings. `parts` are room for as many. kOne: of one, which is
// the usual case; then the loops are none.
template <bool kOne>
void Apply(size_t number, Recording* recordings, CallPart* parts) {
  const size_t count = kOne ? 1 : number;
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
      return fail(sdk::FailedTensor(
          nullptr, sourced(BadType(absl::StrCat(op, ": expected a group, got none")))));
    }
    if (!call.group->alive.load(std::memory_order_relaxed)) {
      return fail(sdk::FailedTensor((*call.member)->session,
                                    sourced(Precondition(absl::StrCat(
                                        op, ": the group ended when its world was reformed")))));
    }
    parts[i].group = call.group;
    parts[i].key.spec = call.call->spec;
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
    absl::Status status = CheckCall(call, trace, &parts[i], &failure);
    if (!status.ok()) {
      if (count > 1 && failure == nullptr) status = AtPlace(status, i);
      return refuse(failure != nullptr ? failure->status : sourced(status), /*counted=*/false);
    }
    Collective& collective = parts[i].key.spec.collective;
    const TensorType* type = call.call->spec.type;
    if (type == nullptr && !parts[i].inputs.empty()) type = &parts[i].inputs[0]->info->type;
    recordings[i].part = &parts[i];
    recordings[i].record = grad_enabled && call.call->record &&
                           collective.kind != CollectiveKind::kBarrier && type != nullptr &&
                           IsFloating(type->dtype);
    Leads leads;
    if (call.call->unrecorded_gradient) {
      leads = {true, true};
    } else if (recordings[i].record) {
      leads = LeadsOf(call.inputs, trace);
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
      if (!added.ok()) return fail(FailedTensor(session, added));
      if (first.runs != nullptr) first.runs->next.part = part + 1;
    }
  } else {
    session->Throttle();
    absl::Status refused;
    {
      SessionLock lock(session.get());
      if (!lock.status().ok()) return fail(FailedTensor(session, lock.status()));
      const absl::Status out_of_line = OutOfLine(absl::MakeConstSpan(parts, count));
      if (!out_of_line.ok()) {
        return fail(FailedTensor(session, std::make_shared<Failure>(Failure{out_of_line, true})));
      }
      if (first.bound != nullptr) {
        parts[0].instance = *first.bound;
      } else {
        SessionCore::CountCallLocked(absl::MakeSpan(parts, count), first.runs);
      }
      session->TrimCallsLocked();
      for (size_t i = 0; i < count; ++i) InternKey(session.get(), &parts[i]);
      const CallEntry* entry = nullptr;
      TensorDatas sent;
      const absl::StatusOr<Sequence> run =
          session->CollectivesLocked(absl::MakeSpan(parts, count), first.bound != nullptr,
                                     first.runs, &entry, kOne ? &recordings[0].outputs : &sent);
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
  for (size_t i = 0; i < count; ++i) Finish(&recordings[i], trace);
}

}  // namespace

Results ApplyCollective(const CallRequest& call, absl::Span<const Tensor> inputs,
                        const std::shared_ptr<MemberCore>& member, GroupCore* group) {
  Results results;
  Recording recording;
  recording.call = {&call, inputs, &member, group};
  recording.results = &results;
  CallPart part;
  Apply<true>(1, &recording, &part);
  return results;
}

std::vector<Results> ApplyCollectives(absl::Span<const MemberCall> calls) {
  std::vector<Results> results(calls.size());
  std::vector<Recording> recordings(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    recordings[i].call = calls[i];
    recordings[i].results = &results[i];
  }
  std::vector<CallPart> parts(calls.size());
  if (!calls.empty()) Apply<false>(calls.size(), recordings.data(), parts.data());
  return results;
}

// --- Gradients ----------------------------------------------------------------------------------

namespace {

// Gradient rules number values; here a value is a tensor, or what is left of one on the tape.
class TapeEmitter : public Emitter {
 public:
  // `source`: the line that asks for the gradients.
  TapeEmitter(std::shared_ptr<SessionCore> session, std::string source)
      : session_(std::move(session)), source_(std::move(source)) {}

  ValueIndex AddTensor(const Tensor& tensor) {
    Value value;
    value.tensor = tensor;
    value.info = tensor.impl()->data->info;
    value.device_slot = tensor.impl()->data->device_slot;
    values_.push_back(std::move(value));
    return static_cast<ValueIndex>(values_.size()) - 1;
  }
  ValueIndex AddType(const TensorInfoPtr& info, int32_t device_slot) {
    Value value;
    value.info = info;
    value.device_slot = device_slot;
    values_.push_back(std::move(value));
    return static_cast<ValueIndex>(values_.size()) - 1;
  }
  // Gives a value that only had a type its tensor.
  void SetTensor(ValueIndex value, const Tensor& tensor) { values_[value].tensor = tensor; }
  bool HasTensor(ValueIndex value) const { return values_[value].tensor.defined(); }

  const Tensor& tensor(ValueIndex value) const { return values_[value].tensor; }

  int32_t AddGroup(const GradNodePtr& node) {
    for (size_t i = 0; i < groups_.size(); ++i) {
      if (groups_[i]->group == node->group) return static_cast<int32_t>(i);
    }
    groups_.push_back(node);
    return static_cast<int32_t>(groups_.size()) - 1;
  }
  void SetRecord(const std::vector<GradNodePtr>* record) { record_ = record; }

  absl::StatusOr<std::vector<ValueIndex>> Emit(NodeSpec spec) override {
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
      const DeviceRef device(session_, spec.device_slot);
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
    call.unrecorded_gradient = !grad_enabled;
    if (call.spec.collective.instance.kind == InstanceRef::Kind::kBound) call.bound = &bound_;
    // Requests of one entry meet by number: the line tells those of one loss from another's.
    if (group->member->compares_lines) {
      absl::StrAppend(&spec.source, ", differentiated at ", source_);
    }
    const Results results = ApplyCollective(call, inputs, group->member, group->group);
    for (const Tensor& result : results) {
      CHORUS_RETURN_IF_ERROR(result.status());
      if (!result.absent()) outputs.push_back(AddTensor(result));
    }
    if (const GradNodePtr& node = results[0].impl()->node) companions_.push_back(node);
    return outputs;
  }
  const TensorType& TypeOf(ValueIndex value) const override { return values_[value].info->type; }
  int32_t DeviceOf(ValueIndex value) const override { return values_[value].device_slot; }
  int32_t GroupSizeOf(int32_t group_slot) const override {
    return static_cast<int32_t>(groups_[group_slot]->group->ranks.size());
  }
  void BindGradient(const RecordedNode& forward, Collective* gradient) override {
    GradNode& node = *(*record_)[forward.id];
    gradient->wants_grad = grad_enabled;
    if (node.trace != nullptr) {
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

  // The entries of the collectives that were emitted.
  std::vector<GradNodePtr> TakeCompanions() { return std::move(companions_); }

 private:
  struct Value {
    Tensor tensor;
    TensorInfoPtr info;
    int32_t device_slot = 0;
  };
  const std::shared_ptr<SessionCore> session_;
  const std::string source_;
  std::deque<Value> values_;
  std::vector<GradNodePtr> groups_;  // one entry of each group
  const std::vector<GradNodePtr>* record_ = nullptr;
  InstanceKey bound_;
  std::vector<GradNodePtr> companions_;
};

bool IsLostEntry(const GradNode& node) {
  return node.member != nullptr && node.trace == nullptr &&
         node.order < node.member->tapes_lost_before.load(std::memory_order_relaxed);
}

absl::Status CheckNotLost(const GradNode& node) {
  if (!IsLostEntry(node)) return absl::OkStatus();
  SessionLock lock(node.session.get());
  CHORUS_RETURN_IF_ERROR(lock.status());
  return Detached(node.member->why_tapes_lost);
}

// The entries that the roots lead to, and how their values are numbered.
class Tape {
  // (entry, output), (leaf, 0), or (reader, ~place).
  using Name = std::pair<const void*, int>;

 public:
  Tape(TapeEmitter* emitter, const Trace* trace) : emitter_(emitter), trace_(trace) {}

  // Gathers what `tensor` was computed from.
  absl::Status Gather(const Tensor& tensor) {
    Push(EdgeTo(tensor, trace_, false));
    while (!stack_.empty()) {
      const GradNodePtr node = std::move(stack_.back());
      stack_.pop_back();
      if (!seen_.insert(node.get()).second) continue;
      if (node->consumed) {
        return Precondition(absl::StrCat(
            "the gradient through ", node->spec->op, " at ", node->spec->source,
            " was taken before; BackwardOptions::retain_graph keeps it for another time"));
      }
      CHORUS_RETURN_IF_ERROR(CheckNotLost(*node));
      for (const Edge& edge : node->inputs) Push(edge);
      for (const Edge& edge : node->behind) Push(edge);
      nodes_.push_back(node);
    }
    return absl::OkStatus();
  }

  void Number() {
    std::sort(nodes_.begin(), nodes_.end(),
              [](const GradNodePtr& a, const GradNodePtr& b) { return a->order < b->order; });
    for (size_t n = 0; n < nodes_.size(); ++n) {
      const GradNodePtr& node = nodes_[n];
      RecordedNode recorded;
      recorded.spec = *node->spec;
      recorded.id = static_cast<int32_t>(n);
      place_[node.get()] = recorded.id;
      for (size_t i = 0; i < node->inputs.size(); ++i) {
        const Edge& edge = node->inputs[i];
        const ValueIndex value = NumberOf(edge, *node, static_cast<int>(i));
        recorded.spec.inputs.push_back(value);
        // Any reader's view of the value serves: they are the same tensor.
        if (emitter_->HasTensor(value) || edge.data == nullptr) continue;
        auto impl = std::make_shared<TensorImpl>();
        impl->data = edge.data;
        impl->leaf = edge.leaf;
        impl->leaf_requires_grad = edge.leaf != nullptr && edge.leaf->leaf_requires_grad;
        impl->node = edge.node;
        impl->output = edge.output;
        impl->companions = edge.companions;
        emitter_->SetTensor(value, Tensor(std::move(impl)));
      }
      for (size_t o = 0; o < node->outputs.size(); ++o) {
        recorded.outputs.push_back(emitter_->AddType(node->outputs[o], node->device_slot));
        numbers_[{node.get(), static_cast<int>(o)}] = recorded.outputs.back();
      }
      // What the rule uses of them stands for itself in the record: its own gradients flow on.
      const size_t first_saved = node->outputs.size() - node->saved.size();
      for (size_t k = 0; k < node->saved.size(); ++k) {
        auto impl = std::make_shared<TensorImpl>();
        impl->data = node->saved[k];
        Tensor saved(std::move(impl));
        Attach(node, first_saved + k, &saved);
        emitter_->SetTensor(recorded.outputs[first_saved + k], saved);
      }
      if (recorded.spec.collective.has_value()) {
        recorded.spec.collective->group_slot = emitter_->AddGroup(node);
        // Recorded means wanted; a trace decides later what it says about it.
        recorded.spec.collective->wants_grad = true;
      }
      record_.push_back(std::move(recorded));
    }
    emitter_->SetRecord(&nodes_);
  }

  // -1: not on this tape.
  ValueIndex Find(const Tensor& tensor) const {
    const auto found = numbers_.find(NameOf(EdgeTo(tensor, trace_, false)));
    return found == numbers_.end() ? -1 : found->second;
  }
  // As Find, and numbers what is not there yet.
  ValueIndex FindOrAdd(const Tensor& tensor) {
    const ValueIndex found = Find(tensor);
    if (found >= 0) return found;
    const ValueIndex added = emitter_->AddTensor(tensor);
    numbers_[NameOf(EdgeTo(tensor, trace_, false))] = added;
    return added;
  }
  int32_t PlaceOf(const GradNode* node) const { return place_.at(node); }

  const std::vector<GradNodePtr>& nodes() const { return nodes_; }
  const std::vector<RecordedNode>& record() const { return record_; }
  // Leaves whose gradient is wanted, in the order in which they were first used.
  std::vector<std::shared_ptr<TensorImpl>> Leaves() const {
    std::vector<std::shared_ptr<TensorImpl>> leaves;
    absl::flat_hash_set<const TensorImpl*> seen;
    for (const GradNodePtr& node : nodes_) {
      for (const Edge& edge : node->inputs) {
        if (edge.leaf == nullptr || !edge.leaf->leaf_requires_grad) continue;
        if (seen.insert(edge.leaf.get()).second) leaves.push_back(edge.leaf);
      }
    }
    return leaves;
  }

 private:
  void Push(const Edge& edge) {
    if (edge.node != nullptr) stack_.push_back(edge.node);
    // Gradients of one call share their list: thousands of parameters may.
    if (edge.companions == nullptr || !seen_lists_.insert(edge.companions.get()).second) return;
    for (const GradNodePtr& companion : *edge.companions) {
      if (!seen_.contains(companion.get())) stack_.push_back(companion);
    }
  }
  static Name NameOf(const Edge& edge) {
    return edge.node != nullptr ? Name{edge.node.get(), edge.output} : Name{edge.leaf.get(), 0};
  }
  ValueIndex NumberOf(const Edge& edge, const GradNode& reader, int place) {
    Name name = NameOf(edge);
    // Nobody can ask for the gradient of what has no history and requires none.
    if (name.first == nullptr) name = {&reader, ~place};
    const auto found = numbers_.find(name);
    if (found != numbers_.end()) return found->second;
    const ValueIndex added = emitter_->AddType(edge.info, edge.device_slot);
    numbers_[name] = added;
    return added;
  }

  TapeEmitter* const emitter_;
  const Trace* const trace_;
  std::vector<GradNodePtr> stack_;
  absl::flat_hash_set<const GradNode*> seen_;
  absl::flat_hash_set<const std::vector<GradNodePtr>*> seen_lists_;
  std::vector<GradNodePtr> nodes_;
  std::vector<RecordedNode> record_;
  absl::flat_hash_map<Name, ValueIndex> numbers_;
  absl::flat_hash_map<const GradNode*, int32_t> place_;
};

Tensor FillLike(const Tensor& like, double value, const std::string& source) {
  const TensorData& data = *like.impl()->data;
  NodeSpec spec;
  spec.op = "fill";
  spec.attributes = TypeAttributes(data.info->type);
  spec.attributes.push_back({"value", value});
  spec.device_slot = data.device_slot;
  spec.source = source;
  const DeviceRef device(data.session, data.device_slot);
  return ApplyLocal(std::move(spec), {}, &device);
}

// Who would have taken part in gradients of collectives if a call for those of `roots` had not been
// refused; but for device groups, in which nobody else waits.
absl::flat_hash_set<std::shared_ptr<MemberCore>> MembersAsked(absl::Span<const Tensor> roots,
                                                              const Trace* trace) {
  absl::flat_hash_set<std::shared_ptr<MemberCore>> members;
  absl::flat_hash_set<const void*> seen;
  std::vector<GradNodePtr> stack;
  const auto push = [&](const Edge& edge) {
    if (edge.node != nullptr) stack.push_back(edge.node);
    if (edge.companions == nullptr || !seen.insert(edge.companions.get()).second) return;
    stack.insert(stack.end(), edge.companions->begin(), edge.companions->end());
  };
  for (const Tensor& root : roots) push(EdgeTo(root, trace, false));
  while (!stack.empty()) {
    const GradNodePtr node = std::move(stack.back());
    stack.pop_back();
    if (node->consumed || !seen.insert(node.get()).second) continue;
    if (node->member != nullptr && !IsLostEntry(*node) &&
        !node->member->in_device_group.load(std::memory_order_relaxed)) {
      members.insert(node->member);
    }
    for (const Edge& edge : node->inputs) push(edge);
    for (const Edge& edge : node->behind) push(edge);
  }
  return members;
}

// A call for the gradients of `roots` was refused: `why`. Tells the other ranks, where they may
// wait for this one's part.
absl::Status RefusedGradients(absl::Span<const Tensor> roots, const absl::Status& why) {
  if (IsLost(why)) return why;
  Trace* const trace = Trace::Current();
  std::shared_ptr<SessionCore> session;
  bool failed = false;  // where such a root would have led to nobody knows
  bool untold = false;  // and others have not heard of it
  for (const Tensor& root : roots) {
    if (!root.defined()) {
      failed = untold = true;
      continue;
    }
    const TensorData& data = *root.impl()->data;
    if (session == nullptr) session = data.session;
    if (data.state.load(std::memory_order_acquire) != TensorData::State::kFailed) continue;
    failed = true;
    untold = untold || !data.failure->told;
  }
  std::vector<Tensor> defined;
  for (const Tensor& root : roots) {
    if (root.defined()) defined.push_back(root);
  }
  const auto asked = MembersAsked(defined, trace);
  if (session == nullptr || (!failed && asked.empty())) return why;
  if (trace != nullptr) {
    trace->Fail(why);
    return why;
  }
  std::vector<Sequence> sent;
  {
    SessionLock lock(session.get());
    CHORUS_RETURN_IF_ERROR(lock.status());
    std::vector<MemberCore*> members;
    for (const auto& member : asked) members.push_back(member.get());
    if (failed) members.clear();
    SessionCore::Refusals refusals;
    session->LoseTapesLocked(members, next_order.load(std::memory_order_relaxed), why,
                             /*ends_epoch=*/untold || !asked.empty(), &refusals);
    sent = session->RefuseLocked(std::move(refusals), why);
  }
  return session->AwaitRefused(sent, why);
}

absl::StatusOr<std::vector<Tensor>> GradientsOf(const GradientRequest& request, CallSite site) {
  const std::string source = SourceOf(site);
  const auto refuse = [&source](const absl::Status& status) { return WithSource(status, source); };
  std::shared_ptr<SessionCore> session;
  if (request.roots.empty()) return refuse(BadType("backward: expected a root, got none"));
  if (!request.seeds.empty() && request.seeds.size() != request.roots.size()) {
    return refuse(
        BadType(absl::StrCat("backward: expected one seed for each of ", request.roots.size(),
                             " roots, got ", request.seeds.size())));
  }
  for (const Tensor& root : request.roots) {
    if (!root.defined()) return refuse(NoTensor("backward"));
    CHORUS_RETURN_IF_ERROR(root.status());
    if (session == nullptr) session = root.impl()->data->session;
    if (root.impl()->data->session != session) {
      return refuse(BadType("backward: expected roots of one session, got one of another"));
    }
    if (!root.requires_grad()) {
      return refuse(Precondition(
          "backward: a root has no history: nothing that it was computed from requires a gradient, "
          "or it comes from under NoGrad, Detach or a compiled function (differentiate inside "
          "it)"));
    }
  }
  for (const Tensor& wanted : request.wanted) {
    if (!wanted.defined()) return refuse(NoTensor("grad"));
    CHORUS_RETURN_IF_ERROR(wanted.status());
    if (wanted.impl()->data->session != session) {
      return refuse(BadType("grad: expected inputs of the outputs' session, got one of another"));
    }
    if (wanted.absent()) return refuse(BadType("grad: an absent result has no gradient"));
    if (!wanted.requires_grad()) {
      return refuse(Precondition("grad: an input does not require a gradient; RequireGrad first"));
    }
  }
  if (session->Forked()) return ForkedError();

  const GradMode mode(request.create);
  const Trace* const trace = Trace::Current();
  TapeEmitter emitter(session, source);
  Tape tape(&emitter, trace);
  for (const Tensor& root : request.roots) {
    const absl::Status gathered = tape.Gather(root);
    if (!gathered.ok()) return refuse(gathered);
  }
  tape.Number();

  std::vector<BackwardRoot> roots;
  for (size_t i = 0; i < request.roots.size(); ++i) {
    const Tensor& root = request.roots[i];
    if (root.absent()) {
      roots.push_back(BackwardRoot::AbsentResult(tape.PlaceOf(root.impl()->node.get())));
      continue;
    }
    Tensor seed;
    if (!request.seeds.empty() && request.seeds[i].defined()) {
      seed = request.seeds[i];
      CHORUS_RETURN_IF_ERROR(seed.status());
      if (seed.impl()->data->session != session || seed.absent()) {
        return refuse(BadType("backward: a seed must be a tensor of the roots' session"));
      }
    } else if (root.num_elements() == 1) {
      seed = FillLike(root, 1, source);
      CHORUS_RETURN_IF_ERROR(seed.status());
    } else {
      return refuse(
          BadType(absl::StrCat("backward: expected a root of one element, or a seed, got ",
                               root.impl()->data->info->type.ToString())));
    }
    const ValueIndex value = tape.FindOrAdd(root);
    roots.push_back(BackwardRoot::Value(value, emitter.AddTensor(seed)));
  }

  std::vector<Tensor> wanted(request.wanted.begin(), request.wanted.end());
  if (request.leaves) {
    for (const std::shared_ptr<TensorImpl>& leaf : tape.Leaves()) wanted.push_back(Tensor(leaf));
    for (const Tensor& root : request.roots) {
      // A leaf may be a root itself.
      const std::shared_ptr<TensorImpl>& leaf =
          root.impl()->leaf != nullptr ? root.impl()->leaf : root.impl();
      if (leaf->leaf_requires_grad && tape.Find(root) >= 0 &&
          std::find_if(wanted.begin(), wanted.end(),
                       [&leaf](const Tensor& w) { return w.impl() == leaf; }) == wanted.end()) {
        wanted.push_back(Tensor(leaf));
      }
    }
    for (const Tensor& leaf : wanted) {
      if (trace != nullptr &&
          leaf.impl()->data->state.load(std::memory_order_acquire) != TensorData::State::kTraced) {
        return refuse(Precondition(
            "backward: inside a compiled function, the gradient of a captured tensor has no place "
            "to stay; make it an input of the function, or use Grad"));
      }
    }
  }
  std::vector<ValueIndex> wanted_values;
  std::vector<int> place(wanted.size(), -1);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const ValueIndex value = tape.Find(wanted[i]);
    if (value < 0) continue;
    place[i] = static_cast<int>(wanted_values.size());
    wanted_values.push_back(value);
  }

  std::vector<const RecordedNode*> record;
  for (const RecordedNode& node : tape.record()) record.push_back(&node);
  const absl::StatusOr<BackwardResult> built =
      BuildBackward(record, roots, wanted_values, &emitter);
  if (!built.ok()) return refuse(built.status());

  Companions companions;
  std::vector<GradNodePtr> took_part = emitter.TakeCompanions();
  for (size_t i = 0; request.create && i < built->visited.size(); ++i) {
    const GradNodePtr& node = tape.nodes()[built->visited[i].node];
    if (node->member != nullptr) took_part.push_back(node);
  }
  if (!took_part.empty()) {
    companions = std::make_shared<const std::vector<GradNodePtr>>(std::move(took_part));
  }
  // Gradients that are the seeds themselves, or one value for two inputs, get handles of their own,
  // with the history of the value: a seed's, where the call is recorded.
  const auto own = [&](const Tensor& gradient) {
    auto impl = std::make_shared<TensorImpl>();
    const std::shared_ptr<TensorImpl>& of = gradient.impl();
    impl->data = of->data;
    if (!request.create) return Tensor(std::move(impl));
    impl->node = of->node;
    impl->output = of->output;
    impl->companions = of->companions;
    if (of->leaf_requires_grad) {
      impl->leaf = of->leaf != nullptr ? of->leaf : of;
      impl->leaf_requires_grad = true;
    }
    if (companions == nullptr) return Tensor(std::move(impl));
    const Companions before = CompanionsIn(trace, *impl);
    impl->companions = companions;
    if (before != nullptr) {  // a seed's
      auto both = std::make_shared<std::vector<GradNodePtr>>(*before);
      both->insert(both->end(), companions->begin(), companions->end());
      impl->companions = std::move(both);
    }
    return Tensor(std::move(impl));
  };
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (place[i] >= 0 && built->gradients[place[i]].has_value()) {
      gradients.push_back(own(emitter.tensor(*built->gradients[place[i]])));
    } else if (request.leaves) {
      gradients.emplace_back();
    } else {
      const Tensor zeros = FillLike(wanted[i], 0, source);
      CHORUS_RETURN_IF_ERROR(zeros.status());
      gradients.push_back(own(zeros));
    }
  }
  if (request.leaves) {
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!gradients[i].defined()) continue;
      Tensor& grad = wanted[i].impl()->grad;
      grad = grad.defined() ? Add(grad, gradients[i], site) : gradients[i];
      CHORUS_RETURN_IF_ERROR(grad.status());
    }
  }
  if (!request.retain && !request.create) {
    // What was only taken part in with zeros may be asked for by another loss.
    for (const BackwardResult::Visited& visited : built->visited) {
      if (visited.reached) tape.nodes()[visited.node]->Consume();
    }
  }
  if (trace == nullptr) {
    SessionLock lock(session.get());
    CHORUS_RETURN_IF_ERROR(lock.status());
    session->FlushLocked();
  }
  return gradients;
}

}  // namespace

absl::StatusOr<std::vector<Tensor>> TakeGradients(const GradientRequest& request, CallSite site) {
  absl::StatusOr<std::vector<Tensor>> gradients = GradientsOf(request, site);
  if (gradients.ok()) return gradients;
  return RefusedGradients(request.roots, gradients.status());
}

}  // namespace sdk
}  // namespace chorus
