// Collectives as members call them eagerly: how a call is described, what is kept of one that has
// been seen, and where a group looks for it. What is done with them: calls.h.
//
// Threads: the session's lock guards all of it.
// Ownership: entries belong to the table of their first group; their graphs are the session's,
//   which releases them.
// Errors: none.
#ifndef CHORUS_CLIENT_INTERNAL_CALL_TABLE_H_
#define CHORUS_CLIENT_INTERNAL_CALL_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "chorus/call_site.h"
#include "client/internal/interner.h"
#include "client/internal/run_draft.h"
#include "client/internal/session_lock.h"
#include "client/internal/tensor_data.h"
#include "core/collective/instance.h"
#include "core/ops/op.h"

namespace chorus {
namespace internal {

struct GroupCore;

// A collective as a member calls it: a NodeSpec whose texts have not been made. To make and hash
// them would cost a call two thirds more (docs/performance.md): NodeSpecOf makes them of calls that
// have not been seen before.
struct CollectiveSpec {
  CollectiveSpec() = default;
  CollectiveSpec(const OpDef* o, CallSite where) : op(o), site(where) { collective.kind = o->kind; }

  const OpDef* op = nullptr;         // NodeSpec's op and version
  Collective collective;             // but for group slot, rank and part, which the call gives
  const TensorType* type = nullptr;  // the result's, where no input has it: NodeSpec's attributes
  // The line of the call: NodeSpec's source. Files are compared by address: another one is only
  // another entry.
  CallSite site;
  const std::string* source = nullptr;  // instead of `site`
};

// What decides which graph an eager collective is: `type` and `source` are interned, so they are
// compared by address, like the types of inputs. Its entry keeps these.
struct CallKey {
  CallKey() = default;
  explicit CallKey(const CollectiveSpec& call) : spec(call) {}

  CollectiveSpec spec;
  absl::InlinedVector<const TensorInfo*, 2> types;  // of inputs; one, where all are of one
  int32_t num_inputs = 0;

  friend bool operator==(const CallKey& a, const CallKey& b) {
    return a.types == b.types && a.spec.site.line == b.spec.site.line &&
           a.spec.site.file == b.spec.site.file && a.spec.source == b.spec.source &&
           a.spec.op == b.spec.op && a.spec.type == b.spec.type && a.num_inputs == b.num_inputs &&
           a.spec.collective == b.spec.collective;
  }
  template <typename H>
  friend H AbslHashValue(H h, const CallKey& k) {
    const Collective& c = k.spec.collective;
    return H::combine(std::move(h), k.types, k.num_inputs, k.spec.op, k.spec.type,
                      static_cast<const void*>(k.spec.site.file), k.spec.site.line, k.spec.source,
                      c.root.value(), c.reduction, c.wants_grad, c.leads_to_collective,
                      c.leads_to_leaf, c.peer.value(), c.tag, c.instance.kind, c.counts,
                      c.runtime_counts_input, c.runtime_count_maximum);
  }
};

// One of the collectives of an eager run, as a member calls it.
struct CallPart {
  CallPart(GroupCore* called, const CollectiveSpec& call) : group(called), key(call) {}

  GroupCore* group;
  CallKey key;
  TensorInfoPtr declared;                      // keeps the key's type
  absl::InlinedVector<TensorData*, 2> inputs;  // this session's and not failed
  InstanceKey instance;                        // as counted
  int64_t index = -1;                          // in a coalesced call; -1: it is none
};

// A call that takes several runs, which share its position: coalesced, of very many tensors, or a
// trainer's own memory in pieces.
struct CallInRuns {
  bool begun = false;
  bool last = false;  // set before the last run
  CallPosition next;  // of the first collective of its next run
  size_t calls = 0;   // of a coalesced call: those of the runs so far
};

// Collectives that have been called: their graph, and what a run of it is.
struct CallEntry {
  struct Part {
    std::shared_ptr<const NodeSpec> spec;         // without inputs
    absl::InlinedVector<TensorInfoPtr, 2> types;  // of its key
    size_t outputs = 0;                           // extras last
    int32_t rank = 0;     // index of its member among those that the run holds
    int32_t visible = 0;  // outputs that are no extras
    Saved saved;          // what the gradient rule uses
  };
  RunDraft draft;         // with the bindings of the last call
  Sequence registration;  // of its graph, until that is known to have gone well
  absl::InlinedVector<Part, 1> parts;
};

// Calls that a group has seen, and the last one: a loop asks for the same again.
class CallTable {
 public:
  static constexpr size_t kMax = 1024;

  // Null: they have not been seen. The parts' first group is the table's.
  CallEntry* Find(absl::Span<const CallPart> parts) {
    const bool again = parts.size() == 1 && last_entry_ != nullptr && last_key_ == parts[0].key;
    return again ? last_entry_ : Search(parts);
  }
  CallEntry* Add(absl::Span<const CallPart> parts, std::unique_ptr<CallEntry> entry);
  size_t size() const { return calls_.size() + batches_.size(); }
  std::vector<GraphId> graphs() const;
  void Clear();

 private:
  CallEntry* Search(absl::Span<const CallPart> parts);

  // Of several collectives, of this group's members in this session.
  using BatchKey = std::vector<std::pair<GroupCore*, CallKey>>;
  static BatchKey KeyOf(absl::Span<const CallPart> parts);

  absl::flat_hash_map<CallKey, std::unique_ptr<CallEntry>> calls_;
  absl::flat_hash_map<BatchKey, std::unique_ptr<CallEntry>> batches_;
  CallKey last_key_;
  CallEntry* last_entry_ = nullptr;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_CALL_TABLE_H_
