#include "client/internal/tape_part.h"

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "client/internal/access.h"
#include "client/internal/session_core.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

namespace {

// Whose collectives the entry's gradient is made of; null: none.
const std::shared_ptr<MemberCore>& MemberOf(const GradNode& node) {
  return node.gates != nullptr ? node.gates->member : node.member;
}

absl::Status CheckNotLost(const GradNode& node) {
  if (!IsLostEntry(node)) return absl::OkStatus();
  SessionLock lock(node.session.get());
  CHORUS_RETURN_IF_ERROR(lock.status());
  return Detached(MemberOf(node)->why_tapes_lost);
}

// A use of a leaf whose bytes were copied when it was recorded: it may hold others by now.
bool HasOwnBytes(const Edge& edge) {
  return edge.leaf != nullptr && edge.data != nullptr && edge.data != edge.leaf->data;
}

}  // namespace

bool IsLostEntry(const GradNode& node) {
  const std::shared_ptr<MemberCore>& member = MemberOf(node);
  if (member == nullptr || node.trace != TraceId()) return false;
  const std::atomic<uint64_t>& lost_before =
      node.gates != nullptr ? member->gates_lost_before : member->tapes_lost_before;
  return node.order < lost_before.load(std::memory_order_relaxed);
}

absl::Status TapePart::Gather(const Tensor& root) {
  roots_.push_back(EdgeTo(root, trace_, false));
  Push(roots_.back());
  while (!stack_.empty()) {
    const GradNodePtr node = std::move(stack_.back());
    stack_.pop_back();
    if (!seen_.insert(node.get()).second) continue;
    if (node->consumed) {
      return MakeError(
          Reason::kWrongState,
          absl::StrCat("the gradient through ", node->spec->op, " at ", node->spec->source,
                       " was taken before; BackwardOptions::retain_graph keeps it for another "
                       "time"));
    }
    CHORUS_RETURN_IF_ERROR(CheckNotLost(*node));
    for (const Edge& edge : node->inputs) Push(edge);
    for (const Edge& edge : node->behind) Push(edge);
    nodes_.push_back(node);
  }
  return absl::OkStatus();
}

void TapePart::Push(const Edge& edge) {
  if (edge.node != nullptr) stack_.push_back(edge.node);
  // Gradients of one call share their list: thousands of parameters may.
  if (edge.companions == nullptr || !seen_lists_.insert(edge.companions.get()).second) return;
  for (const GradNodePtr& companion : *edge.companions) {
    if (!seen_.contains(companion.get())) stack_.push_back(companion);
  }
}

absl::Status TapePart::AssignIds() {
  std::sort(nodes_.begin(), nodes_.end(),
            [](const GradNodePtr& a, const GradNodePtr& b) { return a->order < b->order; });
  MoveGates();
  for (const GradNodePtr& node : nodes_) {
    CHORUS_RETURN_IF_ERROR(CheckReads(*node));
    record_.push_back(Record(node));
  }
  emitter_->SetRecord(&nodes_);
  return absl::OkStatus();
}

void TapePart::MoveGates() {
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
      if (name.first != nullptr) gates_.emplace(name, GateOutput{node, static_cast<int>(i)});
    }
  }
  const auto for_each_edge = [this](const auto& visit) {
    for (const GradNodePtr& node : nodes_) {
      for (const Edge& edge : node->inputs) visit(edge, node.get());
      for (const Edge& edge : node->behind) visit(edge, node.get());
    }
  };
  absl::flat_hash_map<const GradNode*, uint64_t> casts;  // the order of the first reader
  for (const GradNodePtr& node : nodes_) {
    if (node->spec->op == "cast") casts.emplace(node.get(), kUnused - 1);
  }
  for_each_edge([&casts](const Edge& edge, const GradNode* reader) {
    const auto cast = casts.find(edge.node.get());
    if (cast == casts.end()) return;
    // A gate may go to before where it was recorded.
    const uint64_t order = reader->gates != nullptr ? edge.node->order : reader->order;
    cast->second = std::min(cast->second, order);
  });
  const auto use = [this](const Edge& edge, const GradNode* reader, uint64_t order) {
    const GateOutput* const behind = GateOf(edge, reader);
    const GradNode* const node = behind != nullptr ? behind->gate.get() : edge.node.get();
    if (node == nullptr || node->gates == nullptr) return;
    const int output = behind != nullptr ? behind->output : edge.output;
    uint64_t& first =
        gate_uses_[node->gates.get()][static_cast<size_t>(node->gate)][static_cast<size_t>(output)];
    first = std::min(first, order);
  };
  for_each_edge([&](const Edge& edge, const GradNode* reader) {
    const auto cast = casts.find(reader);
    use(edge, reader, cast == casts.end() ? reader->order : cast->second);
  });
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
  // In one place gates come first, then casts, then what reads them.
  const auto order_of = [&](const GradNodePtr& node) {
    const auto gate = first_uses.find(node.get());
    if (gate != first_uses.end()) return std::make_pair(gate->second, 0);
    const auto cast = casts.find(node.get());
    return cast != casts.end() ? std::make_pair(cast->second, 1) : std::make_pair(node->order, 2);
  };
  std::stable_sort(nodes_.begin(), nodes_.end(), [&](const GradNodePtr& a, const GradNodePtr& b) {
    return order_of(a) < order_of(b);
  });
}

const TapePart::GateOutput* TapePart::GateOf(const Edge& edge, const GradNode* reader) const {
  if (gates_.empty() || (reader != nullptr && reader->gates != nullptr)) return nullptr;
  const auto row = gates_.find(NameOf(edge));
  return row == gates_.end() ? nullptr : &row->second;
}

absl::Status TapePart::CheckReads(const GradNode& node) const {
  if (gates_.empty()) return absl::OkStatus();
  for (const Edge& edge : node.inputs) {
    if (node.gates != nullptr) {
      if (edge.node == nullptr || index_.contains(edge.node.get())) continue;
      return MakeError(
          Reason::kWrongState,
          absl::StrCat("backward: a parameter is read past ", node.spec->op, " at ",
                       node.spec->source, " before ", edge.node->spec->op, " at ",
                       edge.node->spec->source, " has made another one; read it behind the call"));
    }
    if (!HasOwnBytes(edge) || !gates_.contains(Name(edge.leaf.get(), 0))) continue;
    return MakeError(
        Reason::kWrongState,
        absl::StrCat("backward: ", node.spec->op, " at ", node.spec->source,
                     " reads a parameter, in the trainer's own memory, past the module that shares "
                     "it: what it has read may not be what the module has"));
  }
  return absl::OkStatus();
}

RecordedNode TapePart::Record(const GradNodePtr& node) {
  RecordedNode recorded;
  recorded.spec = *node->spec;
  recorded.id = static_cast<int32_t>(record_.size());
  index_[node.get()] = recorded.id;
  for (size_t i = 0; i < node->inputs.size(); ++i) {
    const Edge& edge = node->inputs[i];
    const GateOutput* const behind = GateOf(edge, node.get());
    const ValueIndex value = IdOf(edge, behind, *node, static_cast<int>(i));
    recorded.spec.inputs.push_back(value);
    // Any reader's view of the value serves: they have the same bytes.
    if (emitter_->HasTensor(value) || edge.data == nullptr) continue;
    auto impl = std::make_shared<TensorImpl>();
    impl->data = edge.data;
    impl->companions = edge.companions;
    if (behind != nullptr) {
      impl->node = behind->gate;
      impl->output = behind->output;
    } else {
      impl->leaf = edge.leaf;
      impl->leaf_requires_grad = edge.leaf != nullptr && edge.leaf->requires_grad();
      impl->outer_collective = edge.outer.to_collective;
      impl->outer_companions = edge.outer.to_companions;
      impl->node = edge.node;
      impl->output = edge.output;
    }
    emitter_->SetTensor(value, TensorFrom(std::move(impl)));
  }
  for (size_t o = 0; o < node->outputs.size(); ++o) {
    recorded.outputs.push_back(emitter_->AddType(node->outputs[o], node->device_slot));
    ids_[{node.get(), static_cast<int>(o)}] = recorded.outputs.back();
  }
  // What the rule uses of them stands for itself in the record: its own gradients flow on.
  const size_t first_saved = node->outputs.size() - node->saved.size();
  for (size_t k = 0; k < node->saved.size(); ++k) {
    Tensor saved = MakeTensor(node->saved[k]);
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
  return recorded;
}

TapePart::Name TapePart::NameOf(const Edge& edge) {
  if (edge.node != nullptr) return {edge.node.get(), edge.output};
  if (HasOwnBytes(edge)) return {edge.data.get(), 0};
  return {edge.leaf.get(), 0};
}

ValueIndex TapePart::IdOf(const Edge& edge, const GateOutput* gate, const GradNode& reader,
                          int input) {
  Name name = gate != nullptr ? NameOf(*gate) : NameOf(edge);
  // Nobody can ask for the gradient of what had no history and required none.
  if (name.first == nullptr) name = {&reader, ~input};
  const auto row = ids_.find(name);
  if (row != ids_.end()) return row->second;
  const ValueIndex added = emitter_->AddType(edge.info, edge.device_slot);
  ids_[name] = added;
  if (HasOwnBytes(edge)) of_bytes_[edge.leaf.get()].push_back(added);
  return added;
}

ValueIndex TapePart::Find(const Tensor& tensor) const {
  const auto row = ids_.find(NameOf(EdgeTo(tensor, trace_, false)));
  return row == ids_.end() ? ValueIndex() : row->second;
}

ValueIndex TapePart::FindOrAddRoot(const Tensor& root) {
  const Edge edge = EdgeTo(root, trace_, false);
  const GateOutput* const gate = GateOf(edge, nullptr);
  const Name name = gate != nullptr ? NameOf(*gate) : NameOf(edge);
  const auto row = ids_.find(name);
  if (row != ids_.end()) return row->second;
  const ValueIndex added = emitter_->AddTensor(root);
  ids_[name] = added;
  return added;
}

absl::InlinedVector<ValueIndex, 1> TapePart::FindAll(const Tensor& tensor) const {
  absl::InlinedVector<ValueIndex, 1> values;
  const ValueIndex value = Find(tensor);
  if (value >= 0) values.push_back(value);
  if (of_bytes_.empty()) return values;
  const auto row = of_bytes_.find(EdgeTo(tensor, trace_, false).leaf.get());
  if (row != of_bytes_.end()) values.insert(values.end(), row->second.begin(), row->second.end());
  return values;
}

std::vector<MemberCore*> TapePart::Members() const {
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

GateMembers TapePart::MembersOfGates() const {
  std::vector<std::shared_ptr<MemberCore>> members;
  for (const auto& of_gates : gate_uses_) {
    const std::shared_ptr<MemberCore>& member = of_gates.first->member;
    if (std::find(members.begin(), members.end(), member) != members.end()) continue;
    members.push_back(member);
  }
  if (members.empty()) return nullptr;
  return std::make_shared<const std::vector<std::shared_ptr<MemberCore>>>(std::move(members));
}

std::vector<std::shared_ptr<TensorImpl>> TapePart::Leaves() const {
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

}  // namespace internal
}  // namespace chorus
