// Collectives as members call them eagerly: counting a call, and the run of it.
//
// Calls -> MakeEntry (a call that has not been seen) -> Bind -> SessionCore::SubmitRun.
//
// Threads: the session's lock guards all of it.
// Ownership: call_table.h.
// Errors: a call whose types do not fit is MakeEntry's, INVALID_ARGUMENT kBadType; of a coalesced
//   one it says which.
#ifndef CHORUS_CLIENT_INTERNAL_CALLS_H_
#define CHORUS_CLIENT_INTERNAL_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/internal/call_table.h"
#include "client/internal/interner.h"
#include "client/internal/session_lock.h"
#include "core/ops/op.h"

namespace chorus {
namespace internal {

// What a call is as a node of one of the group's graphs, `part` of its call.
NodeSpec NodeSpecOf(const CollectiveSpec& call, const GroupCore& group, int32_t part);

// Of the parts before `p`, the last that is of the same call: of the same member, and of no pair.
// Null: `p` is the first.
const CallPart* PartBefore(absl::Span<const CallPart> parts, size_t p);

// Counts a call of each member that takes part, and names its collectives: done once for every
// call, whatever becomes of it. Where `runs` is given and has begun, it goes on with that call.
// Uses of a part: group, and op, peer and tag of its key's spec.
void CountCall(absl::Span<CallPart> parts, CallInRuns* runs)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

// Makes the key of a part from its spec and inputs.
void InternKey(Interner* interner, CallPart* part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

// The entry of parts that have been counted, but for its graph's name, and that graph. Of one
// group, or of its members in this session.
absl::StatusOr<std::unique_ptr<CallEntry>> MakeEntry(absl::Span<const CallPart> parts,
                                                     int device_count, Interner* interner,
                                                     Graph* graph)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

// Binds the entry's draft to operands, positions and epoch of these parts. `bound`: it is one
// alone, and a gradient. Inputs have a name, or are still to be sent.
void Bind(absl::Span<const CallPart> parts, bool bound, const CallInRuns* runs, CallEntry* entry)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_CALLS_H_
