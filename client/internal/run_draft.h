// A run as its maker describes it: pending local ops (fragments.h), collectives (calls.h), a
// compiled function (program_run.h). SessionCore::SubmitRun decides the rest, which is its sequence
// and the names of its results.
//
// Threads: plain data; under the session's lock where it is the session's.
// Ownership: operands are their callers', and outlive the submission. Errors: none; SubmitRun says
//   them.
#ifndef CHORUS_CLIENT_INTERNAL_RUN_DRAFT_H_
#define CHORUS_CLIENT_INTERNAL_RUN_DRAFT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/variant.h"
#include "client/internal/interner.h"
#include "client/internal/tensor_data.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

class MemberCore;

// The most inputs and results that a run of several calls or ops may have: a frame holds their
// names.
inline constexpr size_t kMaxRunValues = 4096;

// May be kept and submitted again.
struct RunDraft {
  struct Result {
    TensorInfoPtr info;
    int32_t device_slot = 0;
    TensorDataPtr lazy;  // the tensor whose value it is; null: a new one
  };

  RunDraft() { command.body.emplace<Run>(); }
  Run& run() { return absl::get<Run>(command.body); }
  const Run& run() const { return absl::get<Run>(command.body); }

  Command command;      // a Run with the bindings of its groups; of its inputs, where no operands
  std::string encoded;  // the graph of a fragment; empty: the run names one
  // What is bound to the inputs: this session's.
  absl::InlinedVector<const TensorData*, 2> operands;
  std::vector<Result> results;
  // One whose collectives the run has: new results wait for it. Null: for what operands wait for.
  const MemberCore* member = nullptr;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_RUN_DRAFT_H_
