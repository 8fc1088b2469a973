// A function of tensors as one graph: traced for a list of types of its inputs, and registered.
//
// Threads: plain functions, which take the session's lock where they need it. A Program does not
//   change, but for `infos_at` and `commands_are_over`.
// Ownership: a program has its graph's name and keeps its session; its destructor queues the name
//   for release.
// Errors: INVALID_ARGUMENT kBadType: inputs or options that do not fit, a function that is another
//   one at another size; UNIMPLEMENTED kUnsupported: groups of different worlds; what the
//   function's own tensors carry; what it throws.
#ifndef CHORUS_CLIENT_INTERNAL_PROGRAM_H_
#define CHORUS_CLIENT_INTERNAL_PROGRAM_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "chorus/compile.h"
#include "chorus/tensor.h"
#include "client/internal/interner.h"
#include "client/internal/session_core.h"
#include "client/internal/tensor_data.h"
#include "client/internal/trace.h"
#include "core/base/ids.h"

namespace chorus {
namespace internal {

// What it depends on of one input.
struct InputKey {
  TensorInfoPtr info;
  int32_t device_slot = 0;
  bool requires_grad = false;
  // What the function makes of it has no history outside: a call for the gradient of a collective
  // in it, which no call of the function differentiates, must hear that this part of it is lost.
  bool from_collective = false;
  // It has a history of collectives, maybe as a constant: a gradient in the function ends there.
  bool has_companions = false;
  // The first input that is the same tensor: they are one to a gradient in the function. -1: none
  // before this one.
  int32_t same_as = -1;
  friend bool operator==(const InputKey& a, const InputKey& b) {
    return a.info == b.info && a.device_slot == b.device_slot &&
           a.requires_grad == b.requires_grad && a.from_collective == b.from_collective &&
           a.has_companions == b.has_companions && a.same_as == b.same_as;
  }
};

// By input, of the types that they have. All are such as CheckInput takes.
std::vector<InputKey> KeysOf(absl::Span<const Tensor> inputs);

// What a trace depends on.
struct ProgramKey {
  std::vector<InputKey> inputs;
  // A function under NoGrad records nothing, as if it were called eagerly.
  bool grad_enabled = true;
  bool computes_gradients = false;  // called by Backward or Grad
  friend bool operator==(const ProgramKey& a, const ProgramKey& b) {
    return a.inputs == b.inputs && a.grad_enabled == b.grad_enabled &&
           a.computes_gradients == b.computes_gradients;
  }
};

// Where a result of the function comes from.
struct ProgramResult {
  int32_t output = -1;    // of the graph
  TensorDataPtr outside;  // a tensor from outside that the function returned
  int32_t input = -1;     // an input, returned as it is
  TensorInfoPtr info;     // null: absent
  int32_t device_slot = 0;
};

// Of outputs.
using Infos = std::vector<TensorInfoPtr>;

// A function for inputs of one list of types, and one mode.
struct Program {
  // Its last run has been sent, or nobody can send one.
  ~Program();

  std::shared_ptr<SessionCore> session;
  ProgramKey key;
  std::vector<ProgramResult> results;
  std::shared_ptr<const Infos> output_infos;  // where the size that varies is the largest
  std::vector<int32_t> output_devices;
  Trace::Finished trace;
  GraphId graph;
  // Without which no run succeeds: the trace's uploads, and the graph's registration.
  std::vector<Sequence> commands;
  std::atomic<bool> commands_are_over{false};  // well, all of them
  int64_t losses_before = 0;                   // SessionCore::losses before it was traced
  // By size. Guarded by the mutex of its CompiledImpl.
  static constexpr size_t kMaxSizes = 1024;
  std::map<int64_t, std::shared_ptr<const Infos>> infos_at;

  // As far as is known, the daemon has what a run needs that nobody but this can put there again:
  // none of the commands has failed (for want of memory, say), and of what the function has made
  // itself nothing was lost with a device. The daemon is asked for outcomes that are forgotten
  // here, until all are known.
  bool IsThere();
};

// The groups are those that were traced: a Reform changes ranks and sizes.
bool IsCurrent(const Trace::Finished& trace);

// The type of input `i` with its dimensions that vary as `size`; *actual_size is what they are, the
// same in all inputs (-1: none has been seen).
absl::StatusOr<TensorInfoPtr> AtSize(SessionCore* session, const CompileOptions& options, int i,
                                     const TensorInfoPtr& info, int64_t size, int64_t* actual_size);

// Whether a function that is called in this thread, inside another one's trace or outside of any,
// may have this input. Not OK: INVALID_ARGUMENT kBadType; FAILED_PRECONDITION kWrongState: it is a
// value of another trace; its own error.
absl::Status CheckInput(const Tensor& input);

// Calls `function`, which may throw, inside this thread's trace, which is another function's: its
// ops become part of that one's graph, and it sees what it would see in a trace of its own.
// `inputs` are checked.
absl::StatusOr<std::vector<Tensor>> CallInside(const Function& function,
                                               const std::vector<Tensor>& inputs);

// Traces `function`, which may throw, for inputs of these types in the calling thread's mode
// (NoGrad), and registers its graph.
absl::StatusOr<std::shared_ptr<Program>> MakeProgram(const Function& function,
                                                     const CompileOptions& options,
                                                     const std::shared_ptr<SessionCore>& session,
                                                     const std::vector<Tensor>& inputs,
                                                     const ProgramKey& key);

// The types of its outputs where the size that varies is `size`.
absl::StatusOr<std::shared_ptr<const Infos>> OutputInfosAt(const Program& program, int64_t size);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_PROGRAM_H_
