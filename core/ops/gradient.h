// How an op's gradient is written down: a rule sees the forward node, gets the gradients of its
// outputs, and emits the ops that those of its inputs are made of.
//
// Rules are pure and work graph to graph: they emit through an Emitter, so a client's tape, a
// compiled function and the tests all use the same ones, and gradients of gradients need nothing
// more. The convention, everywhere: **the loss that is differentiated is the sum over ranks of each
// rank's loss.**
//
// Threads: an Emitter, and a GradientContext with it, belongs to one thread. Ownership: a context
// refers to what one call of a rule is given; values are the emitter's. Errors: the emitter's,
// which rules hand on.
#ifndef CHORUS_CORE_OPS_GRADIENT_H_
#define CHORUS_CORE_OPS_GRADIENT_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/graph/collective_kind.h"
#include "core/graph/graph.h"
#include "core/ops/collective_operands.h"
#include "core/ops/node_spec.h"
#include "core/tensor/type.h"

namespace chorus {

class GradientContext;
// One for each input; absent: no gradient reaches it (which is zero, and costs nothing).
using InputGradients = std::vector<absl::optional<ValueIndex>>;

// A node that was recorded, and what came of it: an entry of a tape, or a node of a graph.
// Value, device slot and group slot indices are those of the Emitter that takes the gradient.
struct RecordedNode {
  NodeSpec spec;
  std::vector<ValueIndex> outputs;
  int32_t id = -1;  // names the node to the emitter's BindGradient
  // Null: the op's. A rule of the recorder's own may call what other ranks wait for, so its node
  // takes part like a collective.
  std::function<absl::StatusOr<InputGradients>(GradientContext& context)> rule;
};

// Where gradient rules put the ops that they are made of.
class Emitter {
 public:
  virtual ~Emitter() = default;

  // Appends a node and returns its outputs. Fails as InferTypes does.
  virtual absl::StatusOr<std::vector<ValueIndex>> Emit(NodeSpec spec) = 0;
  // Of any value that was given to or came from this emitter; the reference stays valid.
  virtual const TensorType& TypeOf(ValueIndex value) const = 0;
  virtual int32_t DeviceOf(ValueIndex value) const = 0;
  virtual int32_t GroupSizeOf(int32_t group_slot) const = 0;
  // Sets `instance` and `wants_grad` of a collective that is the gradient of `forward`'s
  // collective: only the emitter knows how instances are named and whether it is recording.
  virtual void BindGradient(const RecordedNode& forward, Collective* gradient) = 0;
};

// One call of a gradient rule: a forward node, the gradients of its outputs, and the means to emit.
class GradientContext {
 public:
  // `grads`: one for each output of `forward`, absent where nothing depends on that output.
  // `needs`: one for each input, whether its gradient is used.
  GradientContext(const RecordedNode& forward, absl::Span<const absl::optional<ValueIndex>> grads,
                  absl::Span<const bool> needs, Emitter* emitter)
      : forward_(forward), grads_(grads), needs_(needs), emitter_(emitter) {}

  const NodeSpec& node() const { return forward_.spec; }
  const Collective& collective() const { return *forward_.spec.collective; }
  int32_t group_size() const { return emitter_->GroupSizeOf(collective().group_slot); }
  bool is_root() const { return collective().rank == collective().root; }

  int num_inputs() const { return static_cast<int>(forward_.spec.inputs.size()); }
  int num_outputs() const { return static_cast<int>(forward_.outputs.size()); }
  ValueIndex input(int i) const { return forward_.spec.inputs[i]; }
  ValueIndex output(int i) const { return forward_.outputs[i]; }
  const TensorType& input_type(int i) const { return emitter_->TypeOf(input(i)); }
  const TensorType& output_type(int i) const { return emitter_->TypeOf(output(i)); }
  const TensorType& TypeOf(ValueIndex value) const { return emitter_->TypeOf(value); }
  int32_t DeviceOf(ValueIndex value) const { return emitter_->DeviceOf(value); }

  // False: the rule may leave that gradient out. A collective is emitted all the same: the other
  // ranks wait for it.
  bool needs(int i) const { return needs_[i]; }
  const absl::optional<ValueIndex>& grad(int i) const { return grads_[i]; }
  // The gradient of output i, or zeros of its type.
  absl::StatusOr<ValueIndex> GradOrZeros(int i);

  // Of a collective: its inputs without counts and factor, and its outputs without the extras.
  int num_pieces() const { return NumPieces(collective(), num_inputs()); }
  int num_visible() const { return NumVisibleOutputs(collective(), num_outputs()); }

  // A local op with one output, on the forward node's device.
  absl::StatusOr<ValueIndex> Emit(absl::string_view op, std::vector<ValueIndex> inputs,
                                  Attributes attributes = {});
  absl::StatusOr<ValueIndex> EmitOn(int32_t device_slot, absl::string_view op,
                                    std::vector<ValueIndex> inputs, Attributes attributes = {});
  absl::StatusOr<ValueIndex> EmitFill(const TensorType& type, double value);
  // `x` itself where it is of that dtype.
  absl::StatusOr<ValueIndex> EmitCast(ValueIndex x, DType dtype);
  // `x` in the type that halves are computed in: f32, where products of them do not overflow on the
  // way to a number that has room. `x` itself where it is no half.
  absl::StatusOr<ValueIndex> EmitWide(ValueIndex x);
  // The gradient of input i from that of what it was stretched to: the sum over all elements, where
  // the input is 0-dim and `g` is not.
  absl::StatusOr<ValueIndex> SumToInput(ValueIndex g, int i);
  // A collective that the forward node's gradient is made of: `op` names its form, and `kind` its
  // kind where it is not GradientKind's.
  // It is for the same member of the same group, with the same root, peer and tag. A rule emits one
  // whatever gradients there are: the other ranks cannot know.
  absl::StatusOr<std::vector<ValueIndex>> EmitGradientCollective(
      absl::string_view op, std::vector<ValueIndex> inputs, Attributes attributes = {},
      std::vector<int64_t> counts = {}, Reduction reduction = Reduction::kSum,
      CollectiveKind kind = CollectiveKind::kUnspecified);
  // The same, back along the way that counts at run time have shown: to this member's x from its
  // gradient of y. Absent where it has no x.
  absl::StatusOr<absl::optional<ValueIndex>> EmitRuntimeGradient(absl::string_view op);
  // The same from `pieces`, of which each member gets the rows that `sends` says.
  absl::StatusOr<ValueIndex> EmitRuntimeGradient(absl::string_view op, ValueIndex pieces,
                                                 ValueIndex sends);

 private:
  Collective GradientCollective(CollectiveKind kind) const;
  absl::StatusOr<std::vector<ValueIndex>> EmitCollective(absl::string_view op, Collective gradient,
                                                         std::vector<ValueIndex> inputs,
                                                         Attributes attributes);
  absl::StatusOr<absl::optional<ValueIndex>> EmitRuntimeCollective(absl::string_view op,
                                                                   std::vector<ValueIndex> sent,
                                                                   Attributes attributes);

  const RecordedNode& forward_;
  absl::Span<const absl::optional<ValueIndex>> grads_;
  absl::Span<const bool> needs_;
  Emitter* emitter_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_GRADIENT_H_
