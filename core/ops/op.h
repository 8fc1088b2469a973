// What an op is: its shape rule, its gradient rule, its attributes and what a planner must know.
//
// An op is defined once, in its folder under core/ops, and linked by client and daemon alike; its
// kernels are targets of their own beside it (core/ops/host_kernel.h). Adding an op touches one
// folder and one line of ops.bzl.
//
// Threads: definitions are immutable. Ownership: they are static. Errors: of a shape rule
// INVALID_ARGUMENT kBadType (ShapeError), of a gradient rule the emitter's.
#ifndef CHORUS_CORE_OPS_OP_H_
#define CHORUS_CORE_OPS_OP_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/graph/graph.h"
#include "core/ops/collective_operands.h"
#include "core/ops/gradient.h"
#include "core/ops/node_spec.h"
#include "core/tensor/type.h"

namespace chorus {

struct AttributeSpec {
  enum class Kind : uint8_t { kInt, kInts, kString, kNumber /* int64 or double */ };
  absl::string_view name;
  Kind kind = Kind::kInt;
  bool required = false;
  absl::string_view doc;
};

// For shape rules of elementwise ops: the one type that all inputs from `first` on have, where any
// of them may be 0-dim instead and then stands for all elements. Nothing else is broadcast.
absl::StatusOr<TensorType> StretchedType(const NodeView& node, int first = 0);

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
  // Where an input is of one of these types a kernel may fail for what it holds: an index or a
  // label out of range, a divisor of 0. None: kernels of the op never fail, and one that does is a
  // bug (kInternal). Collectives fail for what they read where counts come at run time, whatever
  // this says: MayFail.
  DTypes fallible = 0;
  // What a kernel may take beside what it is made of: code that is made for its sizes. That takes
  // milliseconds, and so the graph's plan is not loaded by a thread that others wait for.
  int64_t kernel_bytes = 0;
};

// Whether running `node`, which is one of `def` and passed InferTypes, may fail for what its inputs
// hold. Executors guard against failures only where something may fail.
bool MayFail(const OpDef& def, const NodeView& node);

inline Saved SavedBy(const OpDef& def, const NodeSpec& spec, int num_inputs, int num_outputs) {
  if (def.gradient_saves == nullptr) return {num_inputs, num_outputs};
  return def.gradient_saves(spec, num_inputs, num_outputs);
}

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_OP_H_
