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

absl::Status NotDifferentiable(const RecordedNode& node, absl::string_view why) {
  Error error;
  error.code = absl::StatusCode::kFailedPrecondition;
  error.reason = Reason::kUnsupported;
  error.op = node.spec.op;
  error.source = node.spec.source;
  error.message = absl::StrCat("backward: ", Where(node), " ", why);
  return ToStatus(error);
}

class Walk {
 public:
  Walk(absl::Span<const RecordedNode* const> record, Emitter* emitter)
      : record_(record), emitter_(emitter), is_root_(record.size(), false) {}

  absl::Status AddRoot(const BackwardRoot& root) {
    if (root.value < 0) {
      if (root.node < 0 || root.node >= static_cast<int32_t>(record_.size())) {
        return Malformed(absl::StrCat("backward: root node ", root.node, " is none of the ",
                                      record_.size(), " recorded"));
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
    absl::InlinedVector<absl::optional<ValueIndex>, 2> grads;
    bool reached = is_root_[index];
    for (const ValueIndex output : node.outputs) {
      grads.push_back(Find(output));
      reached = reached || grads.back().has_value();
    }
    if (!reached) return absl::OkStatus();

    if (node.spec.collective.has_value() && !node.spec.collective->wants_grad) {
      return NotDifferentiable(node, "was recorded without a gradient");
    }
    const OpDef* def = FindOp(node.spec.op);
    if (def == nullptr || def->gradient == nullptr) {
      return NotDifferentiable(node, "has no gradient");
    }
    absl::InlinedVector<bool, 2> needs;
    for (const ValueIndex input : node.spec.inputs) needs.push_back(leads_.contains(input));
    GradientContext context(node, grads, needs, emitter_);
    CHORUS_ASSIGN_OR_RETURN(InputGradients gradients, def->gradient(context));
    visited_.push_back(index);
    if (gradients.size() != node.spec.inputs.size()) {
      return MakeError(
          absl::StatusCode::kInternal, Reason::kInternal,
          absl::StrCat("backward: the gradient rule of ", node.spec.op, " gave ", gradients.size(),
                       " gradients for ", node.spec.inputs.size(), " inputs"));
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].has_value() || !needs[i]) continue;
      const ValueIndex input = node.spec.inputs[i];
      if (emitter_->TypeOf(*gradients[i]) != emitter_->TypeOf(input)) {
        return MakeError(absl::StatusCode::kInternal, Reason::kInternal,
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
  std::vector<int32_t> TakeVisited() { return std::move(visited_); }

 private:
  static absl::Status CheckRootType(const TensorType& type) {
    if (IsFloating(type.dtype)) return absl::OkStatus();
    return BadType(absl::StrCat("backward: a root must be floating point, got ", type.ToString()));
  }

  bool Leads(const RecordedNode& node) const {
    if (node.spec.collective.has_value() && node.spec.collective->wants_grad) return true;
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
  std::vector<int32_t> visited_;
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
  // Pointers into a deque that grows at its end stay valid while the walk appends.
  std::vector<const RecordedNode*> record;
  record.reserve(builder->nodes().size());
  for (const RecordedNode& node : builder->nodes()) record.push_back(&node);
  return BuildBackward(record, roots, wanted, builder);
}

}  // namespace chorus
