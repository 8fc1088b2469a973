// Recording: from a call on tensors to commands or nodes of a trace, and to entries of the tape.
//
// Threads: any. Ownership: entries of the tape belong to the results (tape.h).
// Errors: in the tensors. What waits is said where it does.
#ifndef CHORUS_CLIENT_INTERNAL_RECORD_H_
#define CHORUS_CLIENT_INTERNAL_RECORD_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "chorus/collectives.h"
#include "chorus/session.h"
#include "chorus/tensor.h"
#include "client/internal/call_table.h"
#include "client/internal/member.h"
#include "core/collective/instance.h"
#include "core/ops/op.h"

namespace chorus {
namespace internal {

// INVALID_ARGUMENT: a slot that its session does not have. A device of no session passes.
absl::Status CheckDevice(absl::string_view op, const DeviceRef& device);

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

// As in collectives.h, in one of the runs of a call. (Defined with the others, in
// client/collectives.cc.)
Tensor AllReduceIn(CallInRuns* runs, const Tensor& x, const Group& group, const ReduceOp& op,
                   CallSite site);
Tensor AllGatherIntoTensorIn(CallInRuns* runs, const Tensor& x, const Group& group, CallSite site);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_RECORD_H_
