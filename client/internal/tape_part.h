// A part of the tape: the entries that the roots of a call for gradients lead to, in the order in
// which core/autograd reads them, with ids for their values.
//
// Threads: one. Ownership: keeps the entries; the emitter outlives it. Errors: what has no gradient
//   any more, and what reads a tensor past the gate (gate.h) that stands for it where its bytes may
//   be others.
#ifndef CHORUS_CLIENT_INTERNAL_TAPE_PART_H_
#define CHORUS_CLIENT_INTERNAL_TAPE_PART_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "chorus/tensor.h"
#include "client/internal/gate.h"
#include "client/internal/tape.h"
#include "client/internal/tape_emitter.h"
#include "core/autograd/backward.h"

namespace chorus {
namespace internal {

// It has no gradient any more: a call for gradients was refused after it was recorded
// (MemberCore::tapes_lost_before, gates_lost_before).
bool IsLostEntry(const GradNode& node);

class TapePart {
 public:
  // `leaves`: Backward's; null: for Grad.
  TapePart(TapeEmitter* emitter, TraceId trace, LeafChanges* leaves)
      : emitter_(emitter), trace_(trace), leaves_(leaves) {}

  // Gathers what `root` was computed from.
  absl::Status Gather(const Tensor& root);
  // Once, after all roots; what follows is for afterwards.
  absl::Status AssignIds();

  // -1: not on this tape. Of a leaf, not what stands for its bytes of some time (FindAll).
  ValueIndex Find(const Tensor& tensor) const;
  // Of a root; gives an id to what has none yet.
  ValueIndex FindOrAddRoot(const Tensor& root);
  // All whose gradients add up to that of `tensor`: a leaf in the trainer's own memory has held
  // other bytes at each of its uses.
  absl::InlinedVector<ValueIndex, 1> FindAll(const Tensor& tensor) const;
  int32_t IndexOf(const GradNode* node) const { return index_.at(node); }

  const std::vector<GradNodePtr>& nodes() const { return nodes_; }
  const std::vector<RecordedNode>& record() const { return record_; }
  // Those whose gradients may be asked for.
  std::vector<MemberCore*> Members() const;
  // Null: it has no gates.
  GateMembers MembersOfGates() const;
  // Leaves whose gradient is wanted, in the order in which they were first used.
  std::vector<std::shared_ptr<TensorImpl>> Leaves() const;

 private:
  // (entry, output), (leaf, 0), (bytes of a leaf, 0), or (reader, ~input).
  using Name = std::pair<const void*, int>;
  struct GateOutput {
    GradNodePtr gate;
    int output = 0;
  };

  static Name NameOf(const Edge& edge);
  static Name NameOf(const GateOutput& of) { return {of.gate.get(), of.output}; }
  void Push(const Edge& edge);
  // Each gate to where the first op is that uses it or a gate recorded after it, whose rule comes
  // before its own. Casts to where they are first read: of a gate's tensor they are made at once,
  // and would be all first uses.
  void MoveGates();
  // What `reader` (null: a root) reads of a tensor that a gate on this tape stands for comes from
  // behind the gate, also where it was read past it: else that part of the gradient would go past
  // the gate's rule. (Of a tensor with several gates from behind the first.) Null: no gate does.
  const GateOutput* GateOf(const Edge& edge, const GradNode* reader) const;
  // Whether what the entry reads is what gates on this tape stand for. What is recorded before it
  // has an index.
  absl::Status CheckReads(const GradNode& node) const;
  RecordedNode Record(const GradNodePtr& node);
  ValueIndex IdOf(const Edge& edge, const GateOutput* gate, const GradNode& reader, int input);

  TapeEmitter* const emitter_;
  const TraceId trace_;
  LeafChanges* const leaves_;
  std::vector<GradNodePtr> stack_;
  std::vector<Edge> roots_;
  absl::flat_hash_set<const GradNode*> seen_;
  absl::flat_hash_set<const std::vector<GradNodePtr>*> seen_lists_;
  std::vector<GradNodePtr> nodes_;
  std::vector<RecordedNode> record_;
  absl::flat_hash_map<Name, ValueIndex> ids_;
  // By leaf: the values that stand for its bytes of some time, in the order of their first uses.
  absl::flat_hash_map<const TensorImpl*, std::vector<ValueIndex>> of_bytes_;
  absl::flat_hash_map<const GradNode*, int32_t> index_;
  absl::flat_hash_map<const GateSet*, GateUses> gate_uses_;
  absl::flat_hash_map<Name, GateOutput> gates_;  // by what they stand for
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_TAPE_PART_H_
