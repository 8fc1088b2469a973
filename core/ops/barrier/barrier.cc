#include "core/ops/barrier/barrier.h"

#include <vector>

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferBarrier(const NodeView&) {
  return std::vector<TensorType>();
}

}  // namespace

absl::Span<const OpDef* const> BarrierOps() {
  static const auto* const ops = [] {
    auto* def = new OpDef;
    def->name = "barrier";
    def->effect = Effect::kCollective;
    def->kind = CollectiveKind::kBarrier;
    def->doc = "Every member has come to it.";
    def->infer_types = InferBarrier;
    return new std::vector<const OpDef*>{def};
  }();
  return *ops;
}

}  // namespace chorus
