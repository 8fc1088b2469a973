#include "core/autograd/backward.h"

#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/registry.h"

namespace chorus {
namespace {

std::string Where(const RecordedNode& node) {
  return node.spec.source.empty() ? node.spec.op
                                  : absl::StrCat(node.spec.op, " at ", node.spec.source);
}

absl::Status NotDifferentiable(const RecordedNode& node, Reason reason, absl::string_view why) {
  Error error(reason);
  error.op = node.spec.op;
  error.source = node.spec.source;
  error.message = absl::StrCat("backward: ", Where(node), " ", why);
  return ToStatus(error);
}

absl::Status NoSuchRoot(int32_t node, size_t recorded) {
  return Malformed(
      absl::StrCat("backward: root node ", node, " is none of the ", recorded, " recorded"));
}

class Walk {
 public:
  Walk(absl::Span<const RecordedNode* const> record, Emitter* emitter)
      : record_(record), emitter_(emitter), is_root_(record.size(), false) {}

  absl::Status AddRoot(const BackwardRoot& root) {
    if (root.value < 0) {
      if (root.node < 0 || root.node >= static_cast<int32_t>(record_.size())) {
        return NoSuchRoot(root.node, record_.size());
      }
      // Counts beside the pieces are integers.
      const NodeSpec& spec = record_[root.node]->spec;
      const auto num_inputs = static_cast<int>(spec.inputs.size());
      const int pieces =
          spec.collective.has_value() ? NumPieces(*spec.collective, num_inputs) : num_inputs;
      for (int i = 0; i < pieces; ++i) {
        CHORUS_RETURN_IF_ERROR(CheckRootType(emitter_->TypeOf(spec.inputs[i])));
      }
      is_root_[root.node] = true;
      return absl::OkStatus();
    }
    const TensorType& type = emitter_->TypeOf(root.value);
    const TensorType& seed = emitter_->TypeOf(root.seed);
    CHORUS_RETURN_IF_ERROR(CheckRootType(type));
    if (type != seed) {
      return BadType(absl::StrCat("backward: the gradient of a root of type ", type.ToString(),
                                  " must have that type, got ", seed.ToString()));
    }
    reached_.insert(root.value);
    return Accumulate(root.value, root.seed, emitter_->DeviceOf(root.value), "");
  }

  // Which values a gradient has to reach: what is wanted, what is computed from it, and what comes
  // from collectives that other ranks may be waiting for.
  absl::Status AddWanted(absl::Span<const ValueIndex> wanted) {
    for (const ValueIndex value : wanted) {
      const TensorType& type = emitter_->TypeOf(value);
      if (!IsFloating(type.dtype)) {
        return BadType(absl::StrCat("backward: only floating-point values have a gradient, got ",
                                    type.ToString()));
      }
      leads_.insert(value);
    }
    for (const RecordedNode* node : record_) {
      if (!Leads(*node)) continue;
      for (const ValueIndex output : node->outputs) {
        if (IsFloating(emitter_->TypeOf(output).dtype)) leads_.insert(output);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Visit(int32_t index) {
    const RecordedNode& node = *record_[index];
    if (!Leads(node)) return absl::OkStatus();
    const bool takes_part = TakesPart(node);
    absl::InlinedVector<absl::optional<ValueIndex>, 2> grads;
    bool visit = is_root_[index] || takes_part;
    bool reached = is_root_[index];
    for (const ValueIndex output : node.outputs) {
      grads.push_back(Find(output));
      visit = visit || grads.back().has_value();
      reached = reached || reached_.contains(output);
    }
    if (!visit) return absl::OkStatus();

    if (node.spec.collective.has_value() && !takes_part) {
      return NotDifferentiable(node, Reason::kWrongState, "was recorded without a gradient");
    }
    const OpDef* const def = node.rule == nullptr ? FindOp(node.spec.op) : nullptr;
    if (node.rule == nullptr && (def == nullptr || def->gradient == nullptr)) {
      return NotDifferentiable(node, Reason::kUnsupported, "has no gradient");
    }
    absl::InlinedVector<bool, 2> needs;
    for (const ValueIndex input : node.spec.inputs) needs.push_back(leads_.contains(input));
    GradientContext context(node, grads, needs, emitter_);
    CHORUS_ASSIGN_OR_RETURN(InputGradients gradients,
                            node.rule != nullptr ? node.rule(context) : def->gradient(context));
    visited_.push_back({index, reached});
    if (gradients.size() != node.spec.inputs.size()) {
      return MakeError(
          Reason::kInternal,
          absl::StrCat("backward: the gradient rule of ", node.spec.op, " gave ", gradients.size(),
                       " gradients for ", node.spec.inputs.size(), " inputs"));
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].has_value() || !needs[i]) continue;
      const ValueIndex input = node.spec.inputs[i];
      if (reached) reached_.insert(input);
      if (emitter_->TypeOf(*gradients[i]) != emitter_->TypeOf(input)) {
        return MakeError(Reason::kInternal,
                         absl::StrCat("backward: the gradient rule of ", node.spec.op, " gave ",
                                      emitter_->TypeOf(*gradients[i]).ToString(), " for input ", i,
                                      " of type ", emitter_->TypeOf(input).ToString()));
      }
      CHORUS_RETURN_IF_ERROR(
          Accumulate(input, *gradients[i], emitter_->DeviceOf(input), node.spec.source));
    }
    return absl::OkStatus();
  }

  absl::optional<ValueIndex> Find(ValueIndex value) const {
    const auto it = gradients_.find(value);
    return it == gradients_.end() ? absl::optional<ValueIndex>() : it->second;
  }
  std::vector<BackwardResult::Visited> TakeVisited() { return std::move(visited_); }

 private:
  static absl::Status CheckRootType(const TensorType& type) {
    if (IsFloating(type.dtype)) return absl::OkStatus();
    return BadType(absl::StrCat("backward: a root must be floating point, got ", type.ToString()));
  }

  // Whatever gradients there are: others may wait for it.
  static bool TakesPart(const RecordedNode& node) {
    return node.rule != nullptr ||
           (node.spec.collective.has_value() && node.spec.collective->wants_grad);
  }

  bool Leads(const RecordedNode& node) const {
    if (TakesPart(node)) return true;
    for (const ValueIndex input : node.spec.inputs) {
      if (leads_.contains(input)) return true;
    }
    return false;
  }

  absl::Status Accumulate(ValueIndex value, ValueIndex gradient, int32_t device_slot,
                          const std::string& source) {
    const auto inserted = gradients_.emplace(value, gradient);
    if (inserted.second) return absl::OkStatus();
    NodeSpec spec;
    spec.op = "add";
    spec.inputs = {inserted.first->second, gradient};
    spec.device_slot = device_slot;
    spec.source = source;
    CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> sum, emitter_->Emit(std::move(spec)));
    inserted.first->second = sum[0];
    return absl::OkStatus();
  }

  const absl::Span<const RecordedNode* const> record_;
  Emitter* const emitter_;
  std::vector<bool> is_root_;  // by node: reached although it has no result
  absl::flat_hash_set<ValueIndex> leads_;
  absl::flat_hash_map<ValueIndex, ValueIndex> gradients_;
  absl::flat_hash_set<ValueIndex> reached_;  // those with a gradient that comes from a root
  std::vector<BackwardResult::Visited> visited_;
};

}  // namespace

absl::StatusOr<BackwardResult> BuildBackward(absl::Span<const RecordedNode* const> record,
                                             absl::Span<const BackwardRoot> roots,
                                             absl::Span<const ValueIndex> wanted,
                                             Emitter* emitter) {
  Walk walk(record, emitter);
  for (const BackwardRoot& root : roots) CHORUS_RETURN_IF_ERROR(walk.AddRoot(root));
  CHORUS_RETURN_IF_ERROR(walk.AddWanted(wanted));
  for (int32_t i = static_cast<int32_t>(record.size()) - 1; i >= 0; --i) {
    CHORUS_RETURN_IF_ERROR(walk.Visit(i));
  }
  BackwardResult result;
  for (const ValueIndex value : wanted) result.gradients.push_back(walk.Find(value));
  result.visited = walk.TakeVisited();
  return result;
}

absl::StatusOr<BackwardResult> AppendBackward(absl::Span<const BackwardRoot> roots,
                                              absl::Span<const ValueIndex> wanted,
                                              GraphBuilder* builder) {
  // What the roots were computed from, by floating-point values.
  absl::flat_hash_set<ValueIndex> values;
  std::vector<bool> history(builder->nodes().size(), false);
  for (const BackwardRoot& root : roots) {
    if (root.value >= 0) {
      values.insert(root.value);
    } else if (root.node >= 0 && static_cast<size_t>(root.node) < history.size()) {
      history[static_cast<size_t>(root.node)] = true;
    } else {
      return NoSuchRoot(root.node, history.size());
    }
  }
  for (size_t n = history.size(); n-- > 0;) {
    const RecordedNode& node = builder->nodes()[n];
    for (const ValueIndex output : node.outputs) {
      if (values.contains(output)) history[n] = true;
    }
    const bool recorded = !node.spec.collective.has_value() || node.spec.collective->wants_grad;
    if (!history[n] || !recorded) continue;
    for (const ValueIndex input : node.spec.inputs) {
      if (IsFloating(builder->TypeOf(input).dtype)) values.insert(input);
    }
  }
  // Pointers into a deque that grows at its end stay valid while the walk appends.
  std::vector<const RecordedNode*> record;
  std::vector<int32_t> record_index(history.size(),
                                    -1);  // by node of the builder: its index in the record
  std::vector<int32_t> node_at;
  for (size_t n = 0; n < history.size(); ++n) {
    if (!history[n]) continue;
    record_index[n] = static_cast<int32_t>(record.size());
    record.push_back(&builder->nodes()[n]);
    node_at.push_back(static_cast<int32_t>(n));
  }
  std::vector<BackwardRoot> renumbered(roots.begin(), roots.end());
  for (BackwardRoot& root : renumbered) {
    if (root.value < 0) root.node = record_index[static_cast<size_t>(root.node)];
  }
  CHORUS_ASSIGN_OR_RETURN(BackwardResult result,
                          BuildBackward(record, renumbered, wanted, builder));
  for (BackwardResult::Visited& visited : result.visited) visited.node = node_at[visited.node];
  return result;
}

}  // namespace chorus
