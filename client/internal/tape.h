// The tape: what tensors were computed from, as far as gradients are concerned.
//
// A tape entry (GradNode) belongs to the results of one op: it lives as long as one of them, or an
// entry that depends on one, does. Ops are recorded by record.h; gradients.h takes gradients.
//
// Threads: any; one tensor's gradients are accumulated by one thread at a time. Whether gradients
//   are on is each thread's own.
// Ownership: an entry keeps its session, its member, the entries that it depends on and the tensors
//   that its rule uses; Consume gives the last two up.
// Errors: none; a tensor may carry one.
#ifndef CHORUS_CLIENT_INTERNAL_TAPE_H_
#define CHORUS_CLIENT_INTERNAL_TAPE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "chorus/tensor.h"
#include "client/internal/interner.h"
#include "client/internal/member.h"
#include "client/internal/tensor_data.h"
#include "core/collective/instance.h"
#include "core/ops/op.h"

namespace chorus {
namespace internal {

struct GateSet;
struct GradNode;
using GradNodePtr = std::shared_ptr<GradNode>;
// Entries of collectives and gates that a tensor stands for beside what it was computed from: a
// caller that differentiates it takes part in them. The gradients of a call with create_graph,
// constants too, have for history every collective in which that call took part, the forward ones
// and its own: through just these came what other ranks' parts of the gradients depend on, so ranks
// that were in line at one order are at the next. Of one trace, or of none; never empty.
using Companions = std::shared_ptr<const std::vector<GradNodePtr>>;

using GateMembers = std::shared_ptr<const std::vector<std::shared_ptr<MemberCore>>>;

// Where a tensor comes from, as far as gradients are concerned (Collective).
struct Leads {
  bool to_collective = false;
  bool to_leaf = false;
  // To companions, maybe of a constant: no number comes from there, so a vote does not say it.
  bool to_companions = false;
};

class TensorImpl {
 public:
  TensorDataPtr data;
  GradNodePtr node;  // what computed it; null for a leaf and for what is not recorded
  int output = 0;    // of `node`
  Companions companions;
  bool leaf_requires_grad = false;
  // Of an input of a traced function, or of what stands for a captured tensor in its tape: where
  // that comes from outside (Leads). Of a gradient in it, the second: its seed has companions
  // outside.
  bool outer_collective = false;
  bool outer_companions = false;
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
  // In a trace: what it has from outside leads so far, and the trace ends here.
  Leads outer;
  bool cut_off() const { return outer.to_collective || outer.to_companions; }
  Companions companions;
  // Without node: whose gradient it may be. Null: nobody's, as it required none when this was
  // recorded; if it requires one later, that is of later uses alone.
  std::shared_ptr<TensorImpl> leaf;
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
  // Of the gates that the call which consumed it went through; null: none.
  GateMembers consumed_through;
  // What that call took part in with zeros, and has left for another. Null: nothing.
  std::shared_ptr<const std::vector<std::weak_ptr<GradNode>>> left_live;

  // Collectives.
  std::shared_ptr<MemberCore> member;
  GroupCore* group = nullptr;
  InstanceKey key;           // eager
  int64_t next_request = 0;  // of gradients, in `request_step`
  int64_t request_step = 0;

  // In a trace.
  TraceId trace;
  int32_t trace_node = -1;

  // Of a gate (gate.h).
  std::shared_ptr<const GateSet> gates;
  int gate = -1;

  // Frees what the rule would need, and tells the daemon that the entry is gone.
  void Consume();

 private:
  void DropEntry(bool was_consumed);
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

// While one lives, this thread computes gradients: what it calls without recording it may depend on
// anything, and ranks that have recorded theirs hear so.
class GradientScope {
 public:
  GradientScope();
  ~GradientScope();
  GradientScope(const GradientScope&) = delete;
  GradientScope& operator=(const GradientScope&) = delete;

 private:
  const bool before_;
};
bool ComputesGradients();

// While one lives, this thread calls a function that is traced, with a placeholder for each of
// `inputs`. Both outlive it.
class CallInputs {
 public:
  CallInputs(absl::Span<const Tensor> inputs, absl::Span<const Tensor> placeholders);
  ~CallInputs();
  CallInputs(const CallInputs&) = delete;
  CallInputs& operator=(const CallInputs&) = delete;

  // What `placeholder` stands for: what the calls that are under way were given for it, from the
  // innermost on.
  static std::vector<Tensor> StoodForBy(const Tensor& placeholder);

 private:
  const absl::Span<const Tensor> inputs_;
  const absl::Span<const Tensor> placeholders_;
  const CallInputs* const outer_;
};

// Orders of entries: the next one, and what all so far are below.
uint64_t TakeOrder();
uint64_t NextOrder();

Tensor MakeTensor(TensorDataPtr data);
// A tensor that carries an error.
Tensor FailedTensor(const std::shared_ptr<SessionCore>& session, absl::Status status);
Tensor FailedTensor(const std::shared_ptr<SessionCore>& session,
                    std::shared_ptr<const Failure> failure);

// The sessions that these are of, each once.
std::vector<std::shared_ptr<SessionCore>> SessionsOf(absl::Span<const Tensor> tensors);

// `impl`'s companions, where this trace knows them.
Companions CompanionsIn(TraceId trace, const TensorImpl& impl);
// `x` as an input of an entry of this trace, or of none. `keep_data`: the rule uses it.
Edge EdgeTo(const Tensor& x, TraceId trace, bool keep_data);
// Where what is computed from these comes from. What a trace captures leads where it does outside.
Leads LeadsOf(absl::Span<const Tensor> inputs);
void AddEdges(GradNode* node, absl::Span<const Tensor> inputs, TraceId trace, Saved saved);
// Makes `result` the output `output` of a tape entry.
void Attach(const GradNodePtr& node, size_t output, Tensor* result);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_TAPE_H_
