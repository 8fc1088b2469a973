#include "client/internal/gradients.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "chorus/math.h"
#include "client/internal/access.h"
#include "client/internal/gate.h"
#include "client/internal/living_sessions.h"
#include "client/internal/record.h"
#include "client/internal/refusals.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "client/internal/trace.h"
#include "core/autograd/backward.h"
#include "core/base/error.h"
#include "core/ops/registry.h"

namespace chorus {
namespace internal {

namespace {

absl::Status Precondition(absl::string_view message) {
  return MakeError(Reason::kWrongState, message);
}

// Gradient rules give values ids; here a value is a tensor, or what is left of one on the tape.
class TapeEmitter : public Emitter {
 public:
  // `source`: the line that asks for the gradients.
  TapeEmitter(std::shared_ptr<SessionCore> session, std::string source)
      : session_(std::move(session)), source_(std::move(source)) {}

  ValueIndex AddTensor(const Tensor& tensor) {
    Value value;
    value.tensor = tensor;
    value.info = ImplOf(tensor)->data->info;
    value.device_slot = ImplOf(tensor)->data->device_slot;
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
      absl::StrAppend(&spec.source, ", differentiated at ", source_);
    }
    const Results results = ApplyCollective(call, inputs, group->member, group->group);
    for (const Tensor& result : results) {
      CHORUS_RETURN_IF_ERROR(result.status());
      if (!result.absent()) outputs.push_back(AddTensor(result));
    }
    if (const GradNodePtr& node = ImplOf(results[0])->node) companions_.push_back(node);
    return outputs;
  }
  const TensorType& TypeOf(ValueIndex value) const override { return values_[value].info->type; }
  int32_t DeviceOf(ValueIndex value) const override { return values_[value].device_slot; }
  int32_t GroupSizeOf(int32_t group_slot) const override {
    return static_cast<int32_t>(groups_[group_slot]->group->ranks.size());
  }
  void BindGradient(const RecordedNode& forward, Collective* gradient) override {
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

  // The rule of a gate, with the gradients that have come to it.
  absl::StatusOr<InputGradients> PassGate(const GradNode& gate, GateRequest request,
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

  // The entries of the collectives that were emitted.
  std::vector<GradNodePtr> TakeCompanions() { return std::move(companions_); }

 private:
  // Those that `tensors` were computed with since the entry of that order.
  void AddCompanionsBehind(const std::vector<Tensor>& tensors, uint64_t first) {
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

// Whose collectives the entry's gradient is made of; null: none.
const std::shared_ptr<MemberCore>& MemberOf(const GradNode& node) {
  return node.gates != nullptr ? node.gates->member : node.member;
}

bool IsLostEntry(const GradNode& node) {
  const std::shared_ptr<MemberCore>& member = MemberOf(node);
  if (member == nullptr || node.trace != TraceId()) return false;
  const std::atomic<uint64_t>& lost_before =
      node.gates != nullptr ? member->gates_lost_before : member->tapes_lost_before;
  return node.order < lost_before.load(std::memory_order_relaxed);
}

absl::Status CheckNotLost(const GradNode& node) {
  if (!IsLostEntry(node)) return absl::OkStatus();
  SessionLock lock(node.session.get());
  CHORUS_RETURN_IF_ERROR(lock.status());
  return Detached(MemberOf(node)->why_tapes_lost);
}

// The entries that the roots lead to, and the ids of their values.
class Tape {
  // (entry, output), (leaf, 0), (bytes of a leaf, 0), or (reader, ~input).
  using Name = std::pair<const void*, int>;

 public:
  // `leaves`: Backward's; null: for Grad.
  Tape(TapeEmitter* emitter, TraceId trace, LeafChanges* leaves)
      : emitter_(emitter), trace_(trace), leaves_(leaves) {}

  // Gathers what `tensor` was computed from.
  absl::Status Gather(const Tensor& tensor) {
    roots_.push_back(EdgeTo(tensor, trace_, false));
    Push(roots_.back());
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

  absl::Status AssignIds() {
    std::sort(nodes_.begin(), nodes_.end(),
              [](const GradNodePtr& a, const GradNodePtr& b) { return a->order < b->order; });
    MoveGates();
    for (size_t n = 0; n < nodes_.size(); ++n) {
      const GradNodePtr& node = nodes_[n];
      RecordedNode recorded;
      recorded.spec = *node->spec;
      recorded.id = static_cast<int32_t>(n);
      index_[node.get()] = recorded.id;
      for (size_t i = 0; i < node->inputs.size(); ++i) {
        if (node->gates == nullptr) {
          CHORUS_RETURN_IF_ERROR(CheckBehindGate(node->inputs[i], *node));
        } else if (node->inputs[i].node != nullptr &&
                   !index_.contains(node->inputs[i].node.get())) {
          return Precondition(absl::StrCat("backward: a parameter is read past ", node->spec->op,
                                           " at ", node->spec->source, " before ",
                                           node->inputs[i].node->spec->op, " at ",
                                           node->inputs[i].node->spec->source,
                                           " has made another one; read it behind the call"));
        }
        const Edge routed =
            behind_gates_.empty() ? Edge() : BehindGate(node->inputs[i], node.get());
        const Edge& edge = behind_gates_.empty() ? node->inputs[i] : routed;
        const ValueIndex value = IdOf(edge, *node, static_cast<int>(i));
        recorded.spec.inputs.push_back(value);
        // Any reader's view of the value serves: they have the same bytes.
        if (emitter_->HasTensor(value) || edge.data == nullptr) continue;
        auto impl = std::make_shared<TensorImpl>();
        impl->data = edge.data;
        impl->leaf = edge.leaf;
        impl->leaf_requires_grad = edge.leaf != nullptr && edge.leaf->leaf_requires_grad;
        impl->node = edge.node;
        impl->output = edge.output;
        impl->companions = edge.companions;
        emitter_->SetTensor(value, TensorFrom(std::move(impl)));
      }
      for (size_t o = 0; o < node->outputs.size(); ++o) {
        recorded.outputs.push_back(emitter_->AddType(node->outputs[o], node->device_slot));
        ids_[{node.get(), static_cast<int>(o)}] = recorded.outputs.back();
      }
      // What the rule uses of them stands for itself in the record: its own gradients flow on.
      const size_t first_saved = node->outputs.size() - node->saved.size();
      for (size_t k = 0; k < node->saved.size(); ++k) {
        auto impl = std::make_shared<TensorImpl>();
        impl->data = node->saved[k];
        Tensor saved = TensorFrom(std::move(impl));
        Attach(node, first_saved + k, &saved);
        emitter_->SetTensor(recorded.outputs[first_saved + k], saved);
      }
      if (recorded.spec.collective.has_value()) {
        recorded.spec.collective->group_slot = emitter_->AddGroup(node);
        // Recorded means wanted; a trace decides later what it says about it.
        recorded.spec.collective->wants_grad = true;
      }
      if (node->gates != nullptr) {
        recorded.rule = [this, &gate = *node](GradientContext& context) {
          GateRequest request;
          request.uses = &gate_uses_.at(gate.gates.get());
          request.leaves = leaves_;
          return emitter_->PassGate(gate, std::move(request), context);
        };
      }
      record_.push_back(std::move(recorded));
    }
    emitter_->SetRecord(&nodes_);
    return absl::OkStatus();
  }

  // -1: not on this tape. Of a leaf, not what stands for its bytes of some time (FindAll).
  ValueIndex Find(const Tensor& tensor) const {
    const auto row = ids_.find(NameOf(EdgeTo(tensor, trace_, false)));
    return row == ids_.end() ? ValueIndex() : row->second;
  }
  // Of a root; gives an id to what has none yet.
  ValueIndex FindOrAddRoot(const Tensor& tensor) {
    const Name name = NameOf(BehindGate(EdgeTo(tensor, trace_, false), nullptr));
    const auto row = ids_.find(name);
    if (row != ids_.end()) return row->second;
    const ValueIndex added = emitter_->AddTensor(tensor);
    ids_[name] = added;
    return added;
  }
  // All whose gradients add up to that of `tensor`: a leaf in the trainer's own memory has held
  // other bytes at each of its uses.
  absl::InlinedVector<ValueIndex, 1> FindAll(const Tensor& tensor) const {
    absl::InlinedVector<ValueIndex, 1> values;
    const ValueIndex value = Find(tensor);
    if (value >= 0) values.push_back(value);
    if (of_bytes_.empty()) return values;
    const auto row = of_bytes_.find(EdgeTo(tensor, trace_, false).leaf.get());
    if (row != of_bytes_.end()) values.insert(values.end(), row->second.begin(), row->second.end());
    return values;
  }
  int32_t IndexOf(const GradNode* node) const { return index_.at(node); }

  const std::vector<GradNodePtr>& nodes() const { return nodes_; }
  const std::vector<RecordedNode>& record() const { return record_; }
  // Those whose gradients may be asked for.
  std::vector<MemberCore*> Members() const {
    std::vector<MemberCore*> members;
    for (const GradNodePtr& node : nodes_) {
      MemberCore* const member = MemberOf(*node).get();
      if (member == nullptr) continue;
      if (std::find(members.begin(), members.end(), member) == members.end()) {
        members.push_back(member);
      }
    }
    return members;
  }
  // Null: it has no gates.
  GateMembers MembersOfGates() const {
    std::vector<std::shared_ptr<MemberCore>> members;
    for (const auto& of_gates : gate_uses_) {
      const std::shared_ptr<MemberCore>& member = of_gates.first->member;
      if (std::find(members.begin(), members.end(), member) != members.end()) continue;
      members.push_back(member);
    }
    if (members.empty()) return nullptr;
    return std::make_shared<const std::vector<std::shared_ptr<MemberCore>>>(std::move(members));
  }
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
  // Each gate to where the first op is that uses it or a gate recorded after it, whose rule comes
  // before its own.
  void MoveGates() {
    std::vector<const GradNode*> gates;
    for (const GradNodePtr& node : nodes_) {
      if (node->gates == nullptr) continue;
      gates.push_back(node.get());
      GateUses& uses = gate_uses_[node->gates.get()];
      if (!uses.empty()) continue;
      for (const int size : node->gates->sizes) {
        uses.emplace_back(static_cast<size_t>(size), kUnused);
      }
    }
    if (gates.empty()) return;
    for (const GradNodePtr& node : nodes_) {
      if (node->gates == nullptr) continue;
      for (size_t i = 0; i < node->inputs.size(); ++i) {
        const Name name = NameOf(node->inputs[i]);
        if (name.first != nullptr) behind_gates_.emplace(name, std::make_pair(node, i));
      }
    }
    const auto use = [&](const Edge& used, const GradNode* reader, uint64_t order) {
      const Edge edge = BehindGate(used, reader);
      if (edge.node == nullptr || edge.node->gates == nullptr) return;
      uint64_t& first = gate_uses_[edge.node->gates.get()][static_cast<size_t>(edge.node->gate)]
                                  [static_cast<size_t>(edge.output)];
      first = std::min(first, order);
    };
    for (const GradNodePtr& node : nodes_) {
      for (const Edge& edge : node->inputs) use(edge, node.get(), node->order);
      for (const Edge& edge : node->behind) use(edge, node.get(), node->order);
    }
    // After all ops.
    for (const Edge& edge : roots_) use(edge, nullptr, kUnused - 1);
    absl::flat_hash_map<const GradNode*, uint64_t> first_uses;
    uint64_t first_use = kUnused;
    for (size_t g = gates.size(); g-- > 0;) {
      for (const uint64_t use :
           gate_uses_[gates[g]->gates.get()][static_cast<size_t>(gates[g]->gate)]) {
        first_use = std::min(first_use, use);
      }
      first_uses[gates[g]] = first_use;
    }
    const auto order_of = [&](const GradNodePtr& node) {
      const auto it = first_uses.find(node.get());
      return it == first_uses.end() ? std::make_pair(node->order, true)
                                    : std::make_pair(it->second, false);
    };
    std::stable_sort(nodes_.begin(), nodes_.end(), [&](const GradNodePtr& a, const GradNodePtr& b) {
      return order_of(a) < order_of(b);
    });
  }
  // A use of a leaf whose bytes were copied when it was recorded: it may hold others by now.
  static bool HasOwnBytes(const Edge& edge) {
    return edge.leaf != nullptr && edge.data != nullptr && edge.data != edge.leaf->data;
  }
  // What `reader` (null: a root) reads of a tensor that a gate on this tape stands for comes from
  // behind the gate, also where it was read past it: else that part of the gradient would go past
  // the gate's rule. (Of a tensor with several gates from behind the first.)
  Edge BehindGate(const Edge& edge, const GradNode* reader) const {
    Edge behind = edge;
    if (behind_gates_.empty() || (reader != nullptr && reader->gates != nullptr)) return behind;
    const auto gate = behind_gates_.find(NameOf(edge));
    if (gate == behind_gates_.end()) return behind;
    behind.node = gate->second.first;
    behind.output = static_cast<int>(gate->second.second);
    behind.leaf = nullptr;
    return behind;
  }
  absl::Status CheckBehindGate(const Edge& edge, const GradNode& reader) const {
    if (behind_gates_.empty() || !HasOwnBytes(edge) ||
        !behind_gates_.contains(Name(edge.leaf.get(), 0))) {
      return absl::OkStatus();
    }
    return Precondition(absl::StrCat(
        "backward: ", reader.spec->op, " at ", reader.spec->source,
        " reads a parameter, in the trainer's own memory, past the module that shares it: what it "
        "has read may not be what the module has"));
  }
  static Name NameOf(const Edge& edge) {
    if (edge.node != nullptr) return {edge.node.get(), edge.output};
    if (HasOwnBytes(edge)) return {edge.data.get(), 0};
    return {edge.leaf.get(), 0};
  }
  ValueIndex IdOf(const Edge& edge, const GradNode& reader, int input) {
    Name name = NameOf(edge);
    // Nobody can ask for the gradient of what had no history and required none.
    if (name.first == nullptr) name = {&reader, ~input};
    const auto row = ids_.find(name);
    if (row != ids_.end()) return row->second;
    const ValueIndex added = emitter_->AddType(edge.info, edge.device_slot);
    ids_[name] = added;
    if (HasOwnBytes(edge)) of_bytes_[edge.leaf.get()].push_back(added);
    return added;
  }

  TapeEmitter* const emitter_;
  const TraceId trace_;
  LeafChanges* const leaves_;
  std::vector<GradNodePtr> stack_;
  std::vector<Edge> roots_;
  absl::flat_hash_set<const GradNode*> seen_;
  absl::flat_hash_set<const std::vector<GradNodePtr>*> seen_lists_;
  std::vector<GradNodePtr> nodes_;
  std::vector<RecordedNode> record_;
  absl::flat_hash_map<Name, ValueIndex> ids_;
  // By leaf: the values that stand for its bytes of some time, in the order of their first uses.
  absl::flat_hash_map<const TensorImpl*, std::vector<ValueIndex>> of_bytes_;
  absl::flat_hash_map<const GradNode*, int32_t> index_;
  absl::flat_hash_map<const GateSet*, GateUses> gate_uses_;
  // By what a gate stands for: the gate, and which output of it.
  absl::flat_hash_map<Name, std::pair<GradNodePtr, size_t>> behind_gates_;
};

Tensor FillLike(const Tensor& like, double value, const std::string& source) {
  const TensorData& data = *ImplOf(like)->data;
  NodeSpec spec;
  spec.op = "fill";
  spec.attributes = TypeAttributes(data.info->type);
  spec.attributes.push_back({"value", value});
  spec.device_slot = data.device_slot;
  spec.source = source;
  const DeviceRef device = DeviceFrom(data.session, data.device_slot);
  return ApplyLocal(std::move(spec), {}, &device);
}

// What a root leads to is known to this trace, or to the tape outside of any: inside a compiled
// function a captured tensor is a constant, unless it is a leaf.
bool HasHistoryIn(TraceId trace, const Tensor& root) {
  const Edge edge = EdgeTo(root, trace, false);
  return edge.node != nullptr || edge.companions != nullptr ||
         (edge.leaf != nullptr && edge.leaf->leaf_requires_grad);
}

// Other ranks count on this one's part of the gradient of a collective, to which a call outside
// would go on. A function's own gradients end at what it has from outside, so that is for its
// caller to go on from, and has to be asked for.
absl::Status CheckNothingIsCutOff(absl::Span<const Tensor> roots, absl::Span<const Tensor> wanted,
                                  TraceId trace) {
  absl::flat_hash_set<const TensorImpl*> wanted_leaves;
  for (const Tensor& tensor : wanted) wanted_leaves.insert(EdgeTo(tensor, trace, false).leaf.get());
  absl::flat_hash_set<const GradNode*> seen;
  std::vector<const GradNode*> stack;
  // `reader`: null for a root.
  const auto check = [&](const Edge& edge, const GradNode* reader) {
    if (edge.node != nullptr && seen.insert(edge.node.get()).second) {
      stack.push_back(edge.node.get());
    }
    if (edge.leaf == nullptr || wanted_leaves.contains(edge.leaf.get()) ||
        !LeadsOf({TensorFrom(edge.leaf)}).to_collective) {
      return absl::OkStatus();
    }
    return Precondition(absl::StrCat(
        "backward: the gradient leads through what is the result of a collective outside of the "
        "compiled function",
        reader == nullptr
            ? ""
            : absl::StrCat(" and is read by ", reader->spec->op, " at ", reader->spec->source),
        ", and other ranks count on this one's part there: ask for its gradient too (Grad) and go "
        "on from it outside, or Detach it"));
  };
  for (const Tensor& root : roots) {
    CHORUS_RETURN_IF_ERROR(check(EdgeTo(root, trace, false), nullptr));
  }
  while (!stack.empty()) {
    const GradNode* const node = stack.back();
    stack.pop_back();
    for (const Edge& edge : node->inputs) CHORUS_RETURN_IF_ERROR(check(edge, node));
  }
  return absl::OkStatus();
}

// `seed` as it is now: it may become the gradient itself, which is not to change with the
// trainer's own memory.
Tensor Settled(const Tensor& seed, const std::string& source) {
  if (ImplOf(seed)->data->state.load(std::memory_order_acquire) != TensorData::State::kExternal) {
    return seed;
  }
  NodeSpec copy;
  copy.op = "reshape";
  copy.attributes.push_back({"dims", seed.shape()});
  copy.source = source;
  return ApplyLocal(std::move(copy), {seed});
}

// The members that would have taken part in gradients of collectives if a call for those of `roots`
// had not been refused. Those of device groups too: it may have asked for a part, which the next
// call would lack, and a member that calls by itself would meet others' requests for another loss.
struct Asked {
  absl::flat_hash_set<std::shared_ptr<MemberCore>> members;
  // Of those the ones that gates would have called collectives with, also where the tape is used
  // up or lost: what is left out is no request of an entry, of which the daemon would know, but
  // calls that others make, and count.
  absl::flat_hash_set<std::shared_ptr<MemberCore>> of_gates;
};
Asked MembersAsked(absl::Span<const Tensor> roots, TraceId trace) {
  Asked asked;
  const auto add_gates_of = [&asked](const std::shared_ptr<MemberCore>& member) {
    asked.members.insert(member);
    asked.of_gates.insert(member);
  };
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
    if (!seen.insert(node.get()).second) continue;
    if (node->consumed) {
      if (node->consumed_through == nullptr) continue;
      for (const auto& member : *node->consumed_through) add_gates_of(member);
      continue;
    }
    if (node->gates != nullptr) {
      add_gates_of(node->gates->member);
    } else if (node->member != nullptr && !IsLostEntry(*node)) {
      asked.members.insert(node->member);
    }
    for (const Edge& edge : node->inputs) push(edge);
    for (const Edge& edge : node->behind) push(edge);
  }
  return asked;
}

// The request was refused: `why`. Tells the other ranks, where they may wait for this one's part.
absl::Status RefusedGradients(const GradientRequest& request, const absl::Status& why) {
  if (IsLost(why)) return why;
  Trace* const trace = Trace::Current();
  std::vector<std::shared_ptr<SessionCore>> sessions;
  const auto add_session = [&sessions](const Tensor& tensor) {
    const std::shared_ptr<SessionCore>& session = ImplOf(tensor)->data->session;
    const bool is_new = std::find(sessions.begin(), sessions.end(), session) == sessions.end();
    if (session != nullptr && is_new) sessions.push_back(session);
  };
  std::vector<Tensor> defined;
  bool failed = request.roots.empty();  // where such a root would have led to nobody knows
  bool untold = failed;                 // and others have not heard of it
  for (const Tensor& root : request.roots) {
    if (!root.defined()) {
      failed = untold = true;
      continue;
    }
    defined.push_back(root);
    add_session(root);
    const TensorData& data = *ImplOf(root)->data;
    if (data.state.load(std::memory_order_acquire) != TensorData::State::kFailed) continue;
    failed = true;
    untold = untold || !data.failure->told;
  }
  const auto [members, of_gates] = MembersAsked(defined, IdOf(trace));
  if (!failed && members.empty()) return why;
  if (trace != nullptr) {
    trace->Fail(why);
    return why;
  }
  // Roots that are undefined, or were made of such, are of no session.
  for (const auto& others : {request.wanted, request.seeds}) {
    for (const Tensor& other : others) {
      if (sessions.empty() && other.defined()) add_session(other);
    }
  }
  if (sessions.empty()) sessions = LivingSessions();
  const bool others_know = !untold && members.empty();
  return RefuseOnAll(sessions, why, [&, &asked = members, &gated = of_gates](SessionCore* session) {
    std::vector<Sequence> sent;
    {
      SessionLock lock(session);
      CHORUS_RETURN_IF_ERROR(lock.status());
      Refusals refusals;
      for (const std::shared_ptr<MemberCore>& member : session->members().members()) {
        if (!failed && !asked.contains(member)) continue;
        LoseTapes(member.get(), NextOrder(), why, &refusals);
        const bool may_have_called =
            failed && member->gated_modules.load(std::memory_order_relaxed) > 0;
        if (may_have_called || gated.contains(member)) PutOutOfLine(member.get(), why, &refusals);
      }
      // The epoch before the member's own is over then.
      for (Refuse& refuse : refusals) {
        if (others_know) refuse.epoch = Epoch(refuse.epoch.value() - 1);
      }
      sent = SubmitRefusals(&session->log(), std::move(refusals), why);
    }
    return AwaitRefused(session, sent, why);
  });
}

absl::StatusOr<std::vector<Tensor>> GradientsOf(const GradientRequest& request, CallSite site) {
  const std::string source = SourceOf(site);
  const auto refuse = [&source](const absl::Status& status) {
    return status.ok() ? status : WithSource(status, source);
  };
  const TraceId trace = IdOf(Trace::Current());
  std::shared_ptr<SessionCore> session;
  if (request.roots.empty()) return refuse(BadType("backward: expected a root, got none"));
  if (!request.seeds.empty() && request.seeds.size() != request.roots.size()) {
    return refuse(
        BadType(absl::StrCat("backward: expected one seed for each of ", request.roots.size(),
                             " roots, got ", request.seeds.size())));
  }
  for (const Tensor& root : request.roots) {
    if (!root.defined())
      return refuse(BadType("backward: expected a tensor, got an undefined one"));
    CHORUS_RETURN_IF_ERROR(root.status());
    if (session == nullptr) session = ImplOf(root)->data->session;
    if (ImplOf(root)->data->session != session) {
      return refuse(BadType("backward: expected roots of one session, got one of another"));
    }
    if (!root.requires_grad()) {
      return refuse(Precondition(
          "backward: a root has no history: nothing that it was computed from requires a gradient, "
          "or it comes from under NoGrad, Detach or a compiled function (differentiate inside "
          "it)"));
    }
    CHORUS_RETURN_IF_ERROR(refuse(CheckTrace("backward", *ImplOf(root)->data, trace)));
    if (!HasHistoryIn(trace, root)) {
      return refuse(Precondition(
          "backward: a root was computed outside of the compiled function, which sees a constant; "
          "differentiate it there, or compute it inside"));
    }
  }
  for (const Tensor& wanted : request.wanted) {
    if (!wanted.defined()) return refuse(BadType("grad: expected a tensor, got an undefined one"));
    CHORUS_RETURN_IF_ERROR(wanted.status());
    if (ImplOf(wanted)->data->session != session) {
      return refuse(BadType("grad: expected inputs of the outputs' session, got one of another"));
    }
    if (wanted.absent()) return refuse(BadType("grad: an absent result has no gradient"));
    CHORUS_RETURN_IF_ERROR(refuse(CheckTrace("grad", *ImplOf(wanted)->data, trace)));
    if (!wanted.requires_grad()) {
      return refuse(Precondition("grad: an input does not require a gradient; RequireGrad first"));
    }
  }
  if (session->Forked()) return ForkedError();

  const GradMode mode(request.create);
  const GradientScope computing;
  TapeEmitter emitter(session, source);
  LeafChanges changes;
  Tape tape(&emitter, trace, request.leaves ? &changes : nullptr);
  for (const Tensor& root : request.roots) {
    const absl::Status gathered = tape.Gather(root);
    if (!gathered.ok()) return refuse(gathered);
  }
  CHORUS_RETURN_IF_ERROR(refuse(tape.AssignIds()));
  if (trace == TraceId()) {
    // Its requests are made one by one: of all members of a world together it is a call of them
    // all.
    const std::vector<MemberCore*> members = tape.Members();
    SessionLock lock(session.get());
    CHORUS_RETURN_IF_ERROR(refuse(lock.status()));
    BringInLine(members).IgnoreError();
  }

  std::vector<BackwardRoot> roots;
  for (size_t i = 0; i < request.roots.size(); ++i) {
    const Tensor& root = request.roots[i];
    if (root.absent()) {
      roots.push_back(BackwardRoot::AbsentResult(tape.IndexOf(ImplOf(root)->node.get())));
      continue;
    }
    Tensor seed;
    if (!request.seeds.empty() && request.seeds[i].defined()) {
      seed = request.seeds[i];
      CHORUS_RETURN_IF_ERROR(seed.status());
      if (ImplOf(seed)->data->session != session || seed.absent()) {
        return refuse(BadType("backward: a seed must be a tensor of the roots' session"));
      }
      CHORUS_RETURN_IF_ERROR(refuse(CheckTrace("backward", *ImplOf(seed)->data, trace)));
      seed = Settled(seed, source);
      CHORUS_RETURN_IF_ERROR(seed.status());
    } else if (root.num_elements() == 1) {
      seed = FillLike(root, 1, source);
      CHORUS_RETURN_IF_ERROR(seed.status());
    } else {
      return refuse(
          BadType(absl::StrCat("backward: expected a root of one element, or a seed, got ",
                               ImplOf(root)->data->info->type.ToString())));
    }
    const ValueIndex value = tape.FindOrAddRoot(root);
    roots.push_back(BackwardRoot::Value(value, emitter.AddTensor(seed)));
  }

  std::vector<Tensor> wanted(request.wanted.begin(), request.wanted.end());
  if (request.leaves) {
    for (const std::shared_ptr<TensorImpl>& leaf : tape.Leaves())
      wanted.push_back(TensorFrom(leaf));
    for (const Tensor& root : request.roots) {
      // A leaf may be a root itself.
      const std::shared_ptr<TensorImpl>& leaf =
          ImplOf(root)->leaf != nullptr ? ImplOf(root)->leaf : ImplOf(root);
      if (leaf->leaf_requires_grad && tape.Find(root) >= 0 &&
          std::find_if(wanted.begin(), wanted.end(),
                       [&leaf](const Tensor& w) { return ImplOf(w) == leaf; }) == wanted.end()) {
        wanted.push_back(TensorFrom(leaf));
      }
    }
    for (const Tensor& leaf : wanted) {
      if (trace != TraceId() &&
          ImplOf(leaf)->data->state.load(std::memory_order_acquire) != TensorData::State::kTraced) {
        return refuse(Precondition(
            "backward: inside a compiled function, the gradient of a captured tensor has no place "
            "to stay; make it an input of the function, or use Grad"));
      }
    }
  }
  if (trace != TraceId()) {
    CHORUS_RETURN_IF_ERROR(refuse(CheckNothingIsCutOff(request.roots, wanted, trace)));
  }
  std::vector<ValueIndex> wanted_values;
  std::vector<size_t> values_end;  // of each wanted tensor, in `wanted_values`
  for (const Tensor& tensor : wanted) {
    for (const ValueIndex value : tape.FindAll(tensor)) wanted_values.push_back(value);
    values_end.push_back(wanted_values.size());
  }

  std::vector<const RecordedNode*> record;
  for (const RecordedNode& node : tape.record()) record.push_back(&node);
  const absl::StatusOr<BackwardResult> built =
      BuildBackward(record, roots, wanted_values, &emitter);
  if (!built.ok()) return refuse(built.status());
  std::vector<absl::optional<ValueIndex>> sums(wanted.size());
  for (size_t i = 0, v = 0; i < wanted.size(); ++i) {
    for (; v < values_end[i]; ++v) {
      const absl::optional<ValueIndex>& gradient = built->gradients[v];
      if (!gradient.has_value()) continue;
      if (!sums[i].has_value()) {
        sums[i] = gradient;
        continue;
      }
      NodeSpec add;
      add.op = "add";
      add.inputs = {*sums[i], *gradient};
      add.device_slot = emitter.DeviceOf(*gradient);
      add.source = source;
      const absl::StatusOr<std::vector<ValueIndex>> sum = emitter.Emit(std::move(add));
      if (!sum.ok()) return refuse(sum.status());
      sums[i] = (*sum)[0];
    }
  }

  Companions companions;
  std::vector<GradNodePtr> took_part = emitter.TakeCompanions();
  for (size_t i = 0; request.create && i < built->visited.size(); ++i) {
    const GradNodePtr& node = tape.nodes()[built->visited[i].node];
    if (node->member != nullptr || node->gates != nullptr) took_part.push_back(node);
  }
  if (!took_part.empty()) {
    companions = std::make_shared<const std::vector<GradNodePtr>>(std::move(took_part));
  }
  // Gradients that are the seeds themselves, or one value for two inputs, get handles of their own,
  // with the history of the value: a seed's, where the call is recorded.
  const auto handle_of = [&](const Tensor& gradient) {
    auto impl = std::make_shared<TensorImpl>();
    const std::shared_ptr<TensorImpl>& of = ImplOf(gradient);
    impl->data = of->data;
    if (!request.create) return TensorFrom(std::move(impl));
    impl->node = of->node;
    impl->output = of->output;
    impl->companions = of->companions;
    if (of->leaf_requires_grad) {
      impl->leaf = of->leaf != nullptr ? of->leaf : of;
      impl->leaf_requires_grad = true;
    }
    if (companions == nullptr) return TensorFrom(std::move(impl));
    const Companions before = CompanionsIn(trace, *impl);
    impl->companions = companions;
    if (before != nullptr) {  // a seed's
      auto both = std::make_shared<std::vector<GradNodePtr>>(*before);
      both->insert(both->end(), companions->begin(), companions->end());
      impl->companions = std::move(both);
    }
    return TensorFrom(std::move(impl));
  };
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (sums[i].has_value()) {
      gradients.push_back(handle_of(emitter.tensor(*sums[i])));
    } else if (request.leaves) {
      gradients.emplace_back();
    } else {
      const Tensor zeros = FillLike(wanted[i], 0, source);
      CHORUS_RETURN_IF_ERROR(zeros.status());
      gradients.push_back(handle_of(zeros));
    }
  }
  for (size_t i = 0; request.leaves && i < wanted.size(); ++i) {
    const std::shared_ptr<TensorImpl>& leaf = ImplOf(wanted[i]);
    if (!gradients[i].defined() || !leaf->grad.defined()) continue;
    if (!changes.replaced.contains(leaf.get())) {
      gradients[i] = Add(leaf->grad, gradients[i], site);
    }
  }
  if (trace == TraceId()) {
    SessionLock lock(session.get());
    CHORUS_RETURN_IF_ERROR(lock.status());
    session->Flush();
  }
  // Nothing has changed up to here: a caller may try again.
  for (const Tensor& gradient : gradients) {
    if (gradient.defined()) CHORUS_RETURN_IF_ERROR(refuse(gradient.status()));
  }
  for (size_t i = 0; request.leaves && i < wanted.size(); ++i) {
    if (gradients[i].defined()) ImplOf(wanted[i])->grad = gradients[i];
  }
  for (const std::function<void()>& change : changes.on_success) change();
  if (!request.retain && !request.create) {
    // What was only taken part in with zeros may be asked for by another loss.
    const GateMembers through = tape.MembersOfGates();
    for (const BackwardResult::Visited& visited : built->visited) {
      if (!visited.reached) continue;
      tape.nodes()[visited.node]->Consume();
      tape.nodes()[visited.node]->consumed_through = through;
    }
  }
  return gradients;
}

}  // namespace

absl::StatusOr<std::vector<Tensor>> TakeGradients(const GradientRequest& request, CallSite site) {
  absl::StatusOr<std::vector<Tensor>> gradients = std::vector<Tensor>();
  try {
    gradients = GradientsOf(request, site);
  } catch (...) {
    // Of a hook: it may lack calls that others make.
    const absl::Status thrown =
        MakeError(Reason::kCancelled, "backward: a hook threw an exception");
    RefusedGradients(request, WithSource(thrown, SourceOf(site))).IgnoreError();
    throw;
  }
  if (gradients.ok()) return gradients;
  return RefusedGradients(request, gradients.status());
}

}  // namespace internal
}  // namespace chorus
