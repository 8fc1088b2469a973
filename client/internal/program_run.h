// A run of a compiled function: what it calls, and how it is sent.
//
// Threads: the session's lock guards the counts of groups; CallsOf is a plain function.
// Ownership: the program keeps what its trace names, and outlives the call.
// Errors: SubmitProgram's are SessionCore::SubmitRun's; BringInLine's are those of refusals.h.
#ifndef CHORUS_CLIENT_INTERNAL_PROGRAM_RUN_H_
#define CHORUS_CLIENT_INTERNAL_PROGRAM_RUN_H_

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/compile.h"
#include "chorus/tensor.h"
#include "client/internal/group_counters.h"
#include "client/internal/member.h"
#include "client/internal/program.h"
#include "client/internal/refusals.h"
#include "client/internal/session_lock.h"
#include "client/internal/tensor_data.h"
#include "client/internal/trace.h"
#include "core/base/ids.h"
#include "core/collective/instance.h"

namespace chorus {
namespace internal {

// How often a run calls, by group and end of a pair; by no end for the group itself.
std::map<std::pair<GroupCore*, PairEnd>, int64_t> CallsOf(const Trace::Finished& trace);

// Where the calls of a run stand.
struct CallPositions {
  std::vector<absl::InlinedVector<CallPosition, 1>> bases;  // by slot
  absl::InlinedVector<int64_t, 1> pairs;                    // by pair
};

// Counts the calls of a run: once for each, whatever becomes of it.
CallPositions CountCalls(const Trace::Finished& trace) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
void AddRefused(const Trace::Finished& trace, const CallPositions& calls, Refusals* refusals)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
// That of the members (refusals.h).
absl::Status BringInLine(const Trace::Finished& trace) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

// The member whose calls a run with these inputs has, or waits for, as the log counts it; null: it
// waits for none. To be compared only.
const MemberCore* MemberOfRun(const Program& program, const std::vector<Tensor>& inputs);

// Sends a run with these operands, whose calls stand at `calls`. `infos`: of the outputs,
// whose tensors are added to *results.
absl::StatusOr<Sequence> SubmitProgram(const Program& program, const CompileOptions& options,
                                       const std::vector<Tensor>& inputs, const Infos& infos,
                                       const CallPositions& calls, TensorDatas* results)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_PROGRAM_RUN_H_
