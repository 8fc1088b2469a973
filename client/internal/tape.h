// Recording: from a call on tensors to commands or nodes of a trace, and to entries of the tape.
//
// A tape entry (GradNode) belongs to the results of one op: it lives as long as one of them, or an
// entry that depends on one, does. Backward gathers the entries that its roots lead to, in the
// order of recording, and core/autograd turns them into more ops, which are recorded like any
// other.
//
// Threads: any; one tensor's gradients are accumulated by one thread at a time.
#ifndef CHORUS_CLIENT_INTERNAL_TAPE_H_
#define CHORUS_CLIENT_INTERNAL_TAPE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/chorus.h"
#include "client/internal/core.h"
#include "core/collective/instance.h"
#include "core/ops/op.h"

namespace chorus {
inline namespace sdk {

struct GradNode;
using GradNodePtr = std::shared_ptr<GradNode>;
// Entries of collectives that a tensor stands for beside what it was computed from: whoever
// differentiates it takes part in them. The gradients of a call with create_graph, constants too,
// have for history every collective in which that call took part, the forward ones and its own:
// through just these came what other ranks' parts of the gradients depend on, so ranks that were in
// line at one order are at the next. Of one trace, or of none; never empty.
using Companions = std::shared_ptr<const std::vector<GradNodePtr>>;

// Where a tensor comes from, as far as gradients are concerned (Collective).
struct Leads {
  bool to_collective = false;
  bool to_leaf = false;
};

class TensorImpl {
 public:
  TensorDataPtr data;
  GradNodePtr node;  // what computed it; null for a leaf and for what is not recorded
  int output = 0;    // of `node`
  Companions companions;
  bool leaf_requires_grad = false;
  // Set where this stands for a leaf, with a copy of its bytes as they were when it was recorded.
  std::shared_ptr<TensorImpl> leaf;
  Tensor grad;  // of a leaf

  bool requires_grad() const {
    return leaf_requires_grad || node != nullptr || companions != nullptr;
  }
};

// An input of a recorded op.
struct Edge {
  GradNodePtr node;
  int output = 0;
  Companions companions;
  std::shared_ptr<TensorImpl> leaf;  // without node: whose gradient it may be; null: nobody's
  TensorInfoPtr info;
  int32_t device_slot = 0;
  TensorDataPtr data;  // where the gradient rule uses it
};

struct GradNode {
  ~GradNode();

  uint64_t order = 0;                    // of recording, in this process
  std::shared_ptr<const NodeSpec> spec;  // without inputs
  absl::InlinedVector<Edge, 2> inputs;
  // Tensors that the result does not depend on here and others' results do: what a rank that is not
  // the root gives to a broadcast. History, and nothing else.
  std::vector<Edge> behind;
  Leads leads;  // of a local op's inputs
  std::shared_ptr<SessionCore> session;
  absl::InlinedVector<TensorInfoPtr, 1> outputs;
  // Outputs that the gradient rule uses, which need no handle of the trainer's: the last ones.
  absl::InlinedVector<TensorDataPtr, 1> saved;
  int32_t device_slot = 0;
  bool consumed = false;

  // Collectives.
  std::shared_ptr<MemberCore> member;
  GroupCore* group = nullptr;
  InstanceKey key;           // eager
  int64_t next_request = 0;  // of gradients, in `request_step`
  int64_t request_step = 0;

  // In a trace.
  Trace* trace = nullptr;
  int32_t trace_node = -1;

  // Frees what the rule would need, and tells the daemon that the entry is gone.
  void Consume();
};

bool GradEnabled();
// Sets it for this thread and puts it back.
class GradMode {
 public:
  explicit GradMode(bool enabled);
  ~GradMode();
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;

 private:
  const bool before_;
};

Tensor MakeTensor(TensorDataPtr data);
Tensor FailedTensor(const std::shared_ptr<SessionCore>& session, absl::Status status);

// A local op on tensors of one session: its one result, or a tensor with the error. Ops without
// inputs say on which device they run.
Tensor ApplyLocal(NodeSpec spec, absl::Span<const Tensor> inputs,
                  const DeviceRef* device = nullptr);

// A call of a collective by one member.
struct CallRequest {
  CallRequest() = default;
  CallRequest(const OpDef* op, CallSite site) : spec(op, site) {}

  CollectiveSpec spec;  // what is recorded, and where its operand comes from, is found out
  bool record = true;   // where gradients are on; false: it is known that nobody wants one
  // It is a gradient that is not recorded though its operand may depend on anything.
  bool unrecorded_gradient = false;
  absl::Span<const Tensor> behind;  // GradNode::behind; what is unusable is left out
  // The instance, where the spec's is bound.
  const InstanceKey* bound = nullptr;
  CallInRuns* runs = nullptr;  // where one run is not all of the call
};

// Its visible results; one absent tensor where there are none. Errors are in the tensors. A call
// that is refused here counts, and the other ranks are told, so that they need not wait for this
// one: that takes an answer of the daemon. In a trace nothing is sent, and the trace fails.
using Results = absl::InlinedVector<Tensor, 1>;
Results ApplyCollective(const CallRequest& call, absl::Span<const Tensor> inputs,
                        const std::shared_ptr<MemberCore>& member, GroupCore* group);

// Several in one run: of one group, or of its members in this session (whose calls meet). Results
// are by call. One that is refused refuses them all: each result carries the error.
struct MemberCall {
  const CallRequest* call = nullptr;
  absl::Span<const Tensor> inputs;
  const std::shared_ptr<MemberCore>* member = nullptr;
  GroupCore* group = nullptr;
};
std::vector<Results> ApplyCollectives(absl::Span<const MemberCall> calls);

// As in chorus.h, in one of the runs of a call. (Defined with the others, in client/functional.cc.)
Tensor AllReduceIn(CallInRuns* runs, const Tensor& x, const Group& group, const ReduceOp& op,
                   CallSite site);
Tensor AllGatherIntoTensorIn(CallInRuns* runs, const Tensor& x, const Group& group, CallSite site);

// Roots and wanted tensors for the gradients of their sum. The result is one tensor for each wanted
// one (undefined: the roots do not depend on it).
struct GradientRequest {
  absl::Span<const Tensor> roots;
  absl::Span<const Tensor> seeds;  // empty: ones
  absl::Span<const Tensor> wanted;
  bool leaves = false;  // instead of `wanted`: adds to every leaf's grad
  bool retain = false;
  bool create = false;
};
// Refused where a root has failed or leads to a collective of which others may want this rank's
// gradient, the other ranks are told, and what was recorded before has no gradient any more.
absl::StatusOr<std::vector<Tensor>> TakeGradients(const GradientRequest& request, CallSite site);

}  // namespace sdk
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_TAPE_H_
