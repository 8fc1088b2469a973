// Tracing for Compile: the ops of one call of a function, as one graph.
//
// Threads: a trace belongs to the thread that makes it, from Begin to Finish.
// Ownership: a trace keeps its session and the members whose groups it uses. Errors: Add says what
//   does not fit; Finish gives the first error of Fail.
#ifndef CHORUS_CLIENT_INTERNAL_TRACE_H_
#define CHORUS_CLIENT_INTERNAL_TRACE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/internal/session_core.h"
#include "client/internal/tensor_data.h"
#include "core/base/ids.h"
#include "core/ops/graph_builder.h"

namespace chorus {
namespace internal {

// A tensor's role as an input of a graph: of no dimensions and the trainer's own, it is a number.
InputRole RoleOf(const TensorData& data);

class Trace {
 public:
  // `varies`: the function is traced with several sizes, and must be the same op by op.
  Trace(std::shared_ptr<SessionCore> session, bool varies);

  // The one that this thread is making; null outside Compile.
  static Trace* Current();
  TraceId id() const { return id_; }
  const std::shared_ptr<SessionCore>& session() const { return session_; }
  bool varies() const { return varies_; }

  // A placeholder for an input of the function.
  TensorDataPtr AddInput(const TensorInfoPtr& info, int32_t device_slot, InputRole role,
                         bool donatable);
  // Appends a node. Tensors from outside become inputs. `group` for collectives: fills in its slot.
  // *node is its index in the graph.
  absl::StatusOr<TensorDatas> Add(NodeSpec spec, absl::Span<const TensorDataPtr> inputs,
                                  GroupCore* group, int32_t* node);

  // The function has made a tensor of bytes of the host's, by this command: unlike what is traced
  // it stands in the daemon, and is there as long as that has it.
  void AddUpload(Sequence command) { uploads_.push_back(command); }

  // A collective, or a call for gradients of some, could not be made: the graph would have less of
  // them than it has on other ranks, so there is none.
  void Fail(const absl::Status& status) {
    if (failed_.ok()) failed_ = status;
  }

  // One of the graph's inputs that is not one of the function's.
  struct Capture {
    TensorDataPtr data;
  };
  struct Slot {
    std::vector<GroupCore*> groups;  // the members held here, by rank
    std::vector<int64_t> generations;
    std::vector<int64_t> used;  // calls that each makes in a run
  };
  // Send and recv: counted by pair and tag.
  struct PairUse {
    GroupCore* group = nullptr;
    PairEnd end;
    int64_t used = 0;
  };
  struct Finished {
    Graph graph;
    std::vector<Capture> captures;  // inputs after the function's own
    std::vector<Sequence> uploads;  // of AddUpload
    std::vector<Slot> slots;
    std::vector<PairUse> pairs;
    std::vector<std::shared_ptr<MemberCore>> members;  // kept for the slots
  };
  // The graph with these values of it as outputs, or the first error of Fail.
  absl::StatusOr<Finished> Finish(absl::Span<const TensorDataPtr> outputs);

 private:
  int32_t SlotOf(GroupCore* group);

  const TraceId id_;
  const std::shared_ptr<SessionCore> session_;
  const bool varies_;
  GraphBuilder builder_;
  absl::Status failed_;
  std::vector<Capture> captures_;
  std::vector<Sequence> uploads_;
  absl::flat_hash_map<const TensorData*, TensorDataPtr> captured_;  // -> placeholder
  struct OpenSlot {
    std::vector<GroupCore*> groups;  // ascending by rank
  };
  std::vector<OpenSlot> slots_;
  std::vector<std::shared_ptr<MemberCore>> members_;
};

// Whether this thread traces a function for several sizes.
inline bool TracesSizes() { return Trace::Current() != nullptr && Trace::Current()->varies(); }

// Outside of any for null.
inline TraceId IdOf(const Trace* trace) { return trace == nullptr ? TraceId() : trace->id(); }
// Of what takes effect at once, and is no part of a function's graph: FAILED_PRECONDITION
// kWrongState in a trace. `instead`: what to do. With the second the trace fails, too: the function
// need not look.
absl::Status CheckNotInTrace(absl::string_view call, absl::string_view instead);
absl::Status FailInTrace(absl::string_view call, absl::string_view instead);
// FAILED_PRECONDITION kWrongState: `data` is a value of another trace than this one.
absl::Status CheckTrace(absl::string_view op, const TensorData& data, TraceId trace);

// Makes a trace the current one of this thread while it lives.
class TraceScope {
 public:
  explicit TraceScope(Trace* trace);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  Trace* const outer_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_TRACE_H_
