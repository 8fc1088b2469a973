// What graphs mean, by naive loops: the reference that kernels, backends, autograd and the client
// are tested against. Slow on purpose; nothing here is shared with what it checks but the graph
// types.
//
// It runs the graphs of several sessions at once. Collectives meet by instance, in any order that
// the data dependences allow. Ranks are reduced in the one order that there is: T(lo, n) is operand
// lo where n is 1, else T(lo, p) op T(lo + p, n - p), p the largest power of two below n, over all
// ranks of the group; absent members are left out.
//
// Threads: pure functions. Ownership: graphs and operands are the caller's; results are copies.
// Errors: UNIMPLEMENTED for an op that it does not know; else said at Evaluate().
#ifndef CHORUS_CORE_OPS_TESTING_EVALUATOR_H_
#define CHORUS_CORE_OPS_TESTING_EVALUATOR_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"
#include "core/ops/op.h"
#include "core/ops/testing/value.h"

namespace chorus {
namespace testing {

// The outputs of one local node whose output types are `outputs`.
absl::StatusOr<std::vector<Value>> EvaluateLocal(const NodeView& node,
                                                 absl::Span<const Value* const> inputs,
                                                 absl::Span<const TensorType> outputs);

struct Session {
  const Graph* graph = nullptr;
  std::vector<Value> inputs;
  std::vector<int> groups;             // a name for the group bound to each group slot
  std::vector<std::string> instances;  // a name for the instance bound to each instance slot
};

// All values of each session's graph, by value index. FAILED_PRECONDITION when something waits for
// a member that never comes, INVALID_ARGUMENT when members disagree. The gradient of an instance
// (InstanceRef::kGradient or kBound) may lack members: each counts as zeros where elements only
// move, and as nothing where they are reduced.
absl::StatusOr<std::vector<std::vector<Value>>> Evaluate(absl::Span<const Session> sessions);

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_TESTING_EVALUATOR_H_
