// Local ops that have been recorded and not sent yet: a fragment of each device and set of origins.
//
// Threads: the session's lock guards it.
// Ownership: a fragment holds the names of its inputs and, weakly, the tensors that it makes: what
//   nobody holds any more and nothing needs is not computed.
// Errors: none; what cannot be sent is told by SessionCore.
#ifndef CHORUS_CLIENT_INTERNAL_FRAGMENTS_H_
#define CHORUS_CLIENT_INTERNAL_FRAGMENTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/internal/origins.h"
#include "client/internal/run_draft.h"
#include "client/internal/session_lock.h"
#include "client/internal/tensor_data.h"
#include "core/graph/graph.h"
#include "core/ops/op.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

// Open from its first op until it is sent, and gone then; its id is never another's, so a value of
// it cannot be taken for one of those that come after it.
class Fragment {
 public:
  Fragment(int64_t id, int32_t device_slot, Origins after)
      : id_(id), device_slot_(device_slot), after_(std::move(after)) {}

  int64_t id() const { return id_; }
  int32_t device_slot() const { return device_slot_; }
  const Origins& after() const { return after_; }
  // False: no op more, so that a loop without collectives or reads still gets going; or none with
  // so many operands and results.
  bool HasRoomFor(size_t values) const {
    return nodes_.size() < kMaxNodes &&
           inputs_.size() + static_cast<size_t>(num_values_) + values <= kMaxRunValues;
  }

  // Adds an op on tensors that have a name, travel, or are values of this fragment. `results` are
  // new, with types and device, and become values of it.
  void Append(NodeSpec spec, absl::Span<const TensorDataPtr> inputs, const TensorDatas& results)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  bool Uses(TensorId tensor) const;
  bool Uses(ArenaId arena) const;
  // Its run; without results where nobody holds any. Leaves the fragment without its ops.
  RunDraft TakeDraft(int device_count);

 private:
  // Local ops that wait at most.
  static constexpr size_t kMaxNodes = 256;

  struct Op {
    NodeSpec spec;  // inputs: >= 0 a value of the fragment, < 0: ~ index among its inputs
    std::vector<TensorType> types;
    int32_t first_value = 0;
    absl::InlinedVector<std::weak_ptr<TensorData>, 1> outputs;
  };
  int32_t InputOf(const TensorDataPtr& data) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  const int64_t id_;
  const int32_t device_slot_;
  const Origins after_;
  std::vector<GraphInput> input_types_;
  std::vector<Binding> inputs_;
  std::vector<Op> nodes_;
  int32_t num_values_ = 0;
};

// The open ones, in the order of their first ops.
class Fragments {
 public:
  // The open one of a device and these origins; null: none is.
  Fragment* Find(int32_t device_slot, const Origins& after) const;
  // A new one of them.
  Fragment* Open(int32_t device_slot, const Origins& after);
  // The id of the oldest; 0: none is open.
  int64_t oldest() const { return open_.empty() ? 0 : open_.front()->id(); }
  // The one of this id, not open any more; null: it is not open.
  std::unique_ptr<Fragment> Take(int64_t id);
  void Clear() { open_.clear(); }
  bool Use(TensorId tensor) const;

 private:
  std::vector<std::unique_ptr<Fragment>> open_;
  int64_t next_ = 1;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_FRAGMENTS_H_
