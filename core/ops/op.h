// What an op is: its shape rule, its gradient rule, its attributes and what a planner must know.
//
// An op is defined once, in its folder under core/ops, and linked by client and daemon alike; its
// kernels are targets of their own beside it (core/ops/host_kernel.h). Adding an op touches one
// folder and one line of registry.cc.
//
// Gradient rules are pure and work graph to graph: they emit ops through an Emitter, so a client's
// tape, a compiled function and the tests all use the same rules, and gradients of gradients need
// nothing more. The convention, everywhere: **the loss that is differentiated is the sum over ranks
// of each rank's loss.**
//
// Threads: definitions are immutable; an Emitter belongs to one thread.
#ifndef CHORUS_CORE_OPS_OP_H_
#define CHORUS_CORE_OPS_OP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"
#include "core/tensor/type.h"

namespace chorus {

using Attributes = std::vector<Attribute>;  // sorted by name, no name twice

// A node whose outputs are still to be inferred.
struct NodeSpec {
  std::string op;
  int32_t version = 1;
  Attributes attributes;
  std::vector<ValueIndex> inputs;
  int32_t device_slot = 0;
  absl::optional<Collective> collective;  // present exactly for collective ops
  std::string source;
};

// What a shape rule sees of a node. Refers to memory of the caller.
struct NodeView {
  absl::string_view op;
  int32_t version = 1;
  absl::Span<const Attribute> attributes;
  absl::Span<const TensorType* const> inputs;
  const Collective* collective = nullptr;
  int32_t group_size = 0;    // of the collective's group
  absl::string_view source;  // the trainer's file:line, for what fails as the node runs

  int num_inputs() const { return static_cast<int>(inputs.size()); }
  const TensorType& input(int i) const { return *inputs[i]; }
};

// No value of any graph is larger than this: the daemon's own limits are below it, and it keeps
// every product of sizes within 64 bits.
inline constexpr int64_t kMaxValueBytes = int64_t{1} << 40;

// --- Attributes ---

const AttributeValue* FindAttribute(absl::Span<const Attribute> attributes, absl::string_view name);
// The value, or `otherwise` when it is absent. Kinds were checked by InferTypes (registry.h).
int64_t IntAttribute(absl::Span<const Attribute> attributes, absl::string_view name,
                     int64_t otherwise = 0);
std::vector<int64_t> IntsAttribute(absl::Span<const Attribute> attributes, absl::string_view name);

// A type written as attributes `dims` and `dtype`, for ops that have no input to take it from.
Attributes TypeAttributes(const TensorType& type);
// INVALID_ARGUMENT when they are missing or are no type.
absl::StatusOr<TensorType> TypeOfAttributes(const NodeView& node);

// --- Operands and results of a collective ---

// Counts that are known only when a collective runs, of the forms with one tensor: Collective says
// which input is the first that holds them (runtime_counts_input) and how many rows the output has
// room for (runtime_count_maximum). All are i64 of one dimension.
//   inputs   x, the pieces one after the other from its first row on; then `sends`, the rows for
//            each member (all_gather, gather: how many of x count), where there is an x; then, if
//            there, `receives`, what is expected from each member (reduce_scatter, scatter: of
//            one's own piece): a member that is absent from a gradient gives as many zeros
//   outputs  y, with zeros behind the last piece; then `received`, like `receives`: what came
// Wrong counts end the run; the shape rules see none of them. They have no gradient.
constexpr bool HasRuntimeCounts(const Collective& c) { return c.runtime_counts_input >= 0; }
// How many numbers `sends`, and `receives` and `received`, are on this member; 0: it has none.
constexpr int32_t NumRuntimeSends(const Collective& c, int32_t group_size) {
  return PiecesOn(FactsOf(c.kind).in, group_size, c.rank == c.root);
}
constexpr int32_t NumRuntimeReceives(const Collective& c, int32_t group_size) {
  return PiecesOn(FactsOf(c.kind).out, group_size, c.rank == c.root);
}

// How many of a collective node's inputs are its pieces. Counts come after them, and last of all
// the factor of PREMUL_SUM.
constexpr int NumPieces(const Collective& c, int num_inputs) {
  if (HasRuntimeCounts(c)) return c.runtime_counts_input;
  return c.reduction == Reduction::kPremulSum ? num_inputs - 1 : num_inputs;
}
// The dtype of the factor of PREMUL_SUM, a 0-dim tensor.
constexpr DType FactorType(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// Outputs that a reducing collective has after its visible ones, for its gradient rule: what
// backward needs from other members is computed in forward, so that every backward collective is
// linear in the gradients that come in. Each rank has them or not, as it wants a gradient.
enum class Extras : uint8_t {
  kNone = 0,
  // MIN, MAX: for each piece that goes in, f32 of its dims: how many members hold the result
  // (their element equals it, +0 = -0, or is NaN where the result is), where this member does;
  // else 0. Every member has them, where the result is absent as well.
  kHolders = 1,
  // PRODUCT, where the result is: each member's factors of it, in rank order. They only move, like
  // what OutputAlias::kMember names. The inputs are then saved for backward by everybody.
  kFactors = 2,
};
inline Extras ExtrasOf(const Collective& c, DType dtype) {
  if (!c.wants_grad || !IsReducing(c.kind) || !IsFloating(dtype)) return Extras::kNone;
  if (c.reduction == Reduction::kProduct) return Extras::kFactors;
  const bool selects = c.reduction == Reduction::kMin || c.reduction == Reduction::kMax;
  return selects ? Extras::kHolders : Extras::kNone;
}
// How many of a collective node's outputs are not extras.
constexpr int NumVisibleOutputs(const Collective& c, int num_outputs) {
  if (!IsReducing(c.kind)) return num_outputs;
  if (HasRuntimeCounts(c)) return 2;
  return c.kind == CollectiveKind::kReduce && c.rank != c.root ? 0 : 1;
}

struct AttributeSpec {
  enum class Kind : uint8_t { kInt, kInts, kString, kNumber /* int64 or double */ };
  absl::string_view name;
  Kind kind = Kind::kInt;
  bool required = false;
  absl::string_view doc;
};

// INVALID_ARGUMENT, kBadType: "add: expected ..., got ...", with op, expected and got apart.
absl::Status ShapeError(const NodeView& node, absl::string_view expected, absl::string_view got);

// For shape rules of elementwise ops: the one type that all inputs from `first` on have, where any
// of them may be 0-dim instead and then stands for all elements. Nothing else is broadcast.
absl::StatusOr<TensorType> StretchedType(const NodeView& node, int first = 0);

// --- Differentiation ---

// A node that was recorded, and what came of it: an entry of a tape, or a node of a graph.
// Value, device slot and group slot numbers are those of the Emitter that takes the gradient.
struct RecordedNode {
  NodeSpec spec;
  std::vector<ValueIndex> outputs;
  int32_t id = -1;  // names the node to the emitter's BindGradient
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

// One for each input; absent: no gradient reaches it (which is zero, and costs nothing).
using InputGradients = std::vector<absl::optional<ValueIndex>>;

// --- The definition ---

// What an op's outputs are made of, where that saves a copy. Permissions: a planner may ignore
// them.
enum class OutputAlias : uint8_t {
  kFresh = 0,
  kInput = 1,  // output 0 has the bytes of input 0: reshape; copy, where both devices share memory
  // Output i has the bytes of one member's input: broadcast, recv (their only output: the root's,
  // the sender's), all_gather and gather (member i's), scatter (the root's input for this rank),
  // all_to_all (member i's input for this rank).
  kMember = 2,
};

// How inputs may be read while their client can still write to them (staging memory).
enum class InputUse : uint8_t {
  kDaemonCopy = 0,        // never: they are copied to daemon memory first
  kReductionOperand = 1,  // each element once, as operand of a floating-point reduction; integers
                          // and anything saved for backward are copied first all the same
  kCopySource = 2,        // as the source of one copy into daemon memory, which is then used
};

// Which values a gradient rule uses beside the gradients: the inputs from `inputs_from` on and the
// outputs from `outputs_from` on. A tape keeps them for it.
struct Saved {
  int inputs_from = 0;
  int outputs_from = 0;
};
// What most rules save that save anything.
Saved SaveInputs(const NodeSpec& spec, int num_inputs, int num_outputs);
// What those of collectives save: extras, the factor of PREMUL_SUM, counts that came at run time.
Saved SaveForCollective(const NodeSpec& spec, int num_inputs, int num_outputs);

struct OpDef {
  absl::string_view name;
  int32_t version = 1;
  Effect effect = Effect::kPure;
  CollectiveKind kind = CollectiveKind::kUnspecified;  // for Effect::kCollective
  absl::string_view doc;                               // one line
  std::vector<AttributeSpec> attributes;               // sorted by name
  int min_inputs = 0;                                  // without the factor of PREMUL_SUM
  int max_inputs = 0;                                  // -1: no limit
  DTypes dtypes = kSupportedDTypes;                    // that there are kernels for
  // Types of the visible outputs. Not called where counts come at run time. Called with attributes,
  // arity, collective and input types that passed the checks of InferTypes: known names and kinds,
  // static and supported types, counts in their number and range. Does not see the factor of
  // PREMUL_SUM.
  absl::StatusOr<std::vector<TensorType>> (*infer_types)(const NodeView& node) = nullptr;
  // Vector-Jacobian product; null: no gradient passes (barrier).
  absl::StatusOr<InputGradients> (*gradient)(GradientContext& context) = nullptr;
  // Null: the rule uses no values, only types. `spec` may lack its inputs.
  Saved (*gradient_saves)(const NodeSpec& spec, int num_inputs, int num_outputs) = nullptr;
  OutputAlias alias = OutputAlias::kFresh;
  InputUse input_use = InputUse::kDaemonCopy;
  bool crosses_devices = false;  // inputs may be on another device slot than the node: copy
  // The pieces that go in, or come out, stand in one tensor, one after the other along dimension 0.
  // Forms of one kind may meet in an instance: they move the same pieces.
  bool one_input = false;
  bool one_output = false;
  // How many numbers Collective::counts may have for each member: 0 (it must be empty), 1 or 2.
  int counts_per_member = 0;
  // Element i of the output depends on element i of the inputs of the output's type only, and on
  // whatever it likes of inputs of other types (a 0-dim one is read for all elements): kernels may
  // run in the place of an input of the output's type.
  bool elementwise = false;
};

inline Saved SavedBy(const OpDef& def, const NodeSpec& spec, int num_inputs, int num_outputs) {
  if (def.gradient_saves == nullptr) return {num_inputs, num_outputs};
  return def.gradient_saves(spec, num_inputs, num_outputs);
}

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_OP_H_
