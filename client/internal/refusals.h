// What cannot be called. Others must not wait for it: the daemon is told, which ends the epoch for
// everybody unless they have passed these calls.
//
// Threads: the session's lock guards the members. A Refusals is one thread's, until
//   SubmitRefusals sends it.
// Ownership: plain values.
// Errors: what SubmitRefusals finds no room for goes with the next command, and nobody waits for
// it;
//   AwaitRefused, RefuseOn and RefuseRest give the error as the daemon has recorded it.
#ifndef CHORUS_CLIENT_INTERNAL_REFUSALS_H_
#define CHORUS_CLIENT_INTERNAL_REFUSALS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/internal/call_table.h"
#include "client/internal/log.h"
#include "client/internal/member.h"
#include "client/internal/session_lock.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

// A command for each world; `why` is filled in when they are sent.
using Refusals = absl::InlinedVector<Refuse, 1>;

// What is refused of a member: of its step, and from its epoch.
RefusedMember* RefusedOf(MemberCore* member, Refusals* refusals)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
void AddRefused(absl::Span<const CallPart> parts, Refusals* refusals)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
// It is not known what these members would have called: they are out of line until their next
// steps.
void PutOutOfLine(const MemberTable& members, const absl::Status& why, Refusals* refusals)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
void PutOutOfLine(MemberCore* member, const absl::Status& why, Refusals* refusals)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
// Why members that call at once cannot: the first that is out of line says so. All of a world
// together, as those of a device group call, are in line again: whatever each would have called
// before lies before this call, and they begin a step of their own.
absl::Status BringInLine(absl::Span<MemberCore* const> members)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
// A step of its own for each of these members of one session.
absl::Status BeginOwnSteps(absl::Span<const std::shared_ptr<MemberCore>> members)
    ABSL_LOCKS_EXCLUDED(session_lock);
// A member's tape entries from before `order` have no gradient any more, as MemberCore says.
void LoseTapes(MemberCore* member, uint64_t order, const absl::Status& why, Refusals* refusals)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

// As many as it takes: a frame names so many members, and so many of their calls and gradients.
std::vector<Refuse> InFrames(Refuse refuse);
// With texts of no more bytes than a frame takes.
Error InShort(const Error& why);
// Sends them. What comes back is for AwaitRefused, without the lock.
std::vector<Sequence> SubmitRefusals(Log* log, Refusals refusals, const absl::Status& why)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
// Waits until the daemon has told the others, and enters the epochs that are open now. `why` as the
// daemon has recorded it.
absl::Status AwaitRefused(SessionCore* session, const std::vector<Sequence>& sent,
                          const absl::Status& why) ABSL_LOCKS_EXCLUDED(session_lock);
// Tells of a call that was refused on this session what `collect` says under its lock, as
// AwaitRefused. Or what it says instead.
absl::Status RefuseOn(SessionCore* session, const absl::Status& why,
                      absl::FunctionRef<absl::Status(Refusals*)> collect)
    ABSL_LOCKS_EXCLUDED(session_lock);
// RefuseOn each of these, where it cannot be told on which a call would have been made. `why` as
// the last of them has recorded it.
absl::Status RefuseOnAll(absl::Span<const std::shared_ptr<SessionCore>> sessions,
                         const absl::Status& why,
                         absl::FunctionRef<absl::Status(SessionCore*, Refusals*)> collect)
    ABSL_LOCKS_EXCLUDED(session_lock);
// RefuseOn, of the rest of a call in runs, which counts if it has not begun.
absl::Status RefuseRest(GroupCore* group, CallInRuns* call, const absl::Status& why)
    ABSL_LOCKS_EXCLUDED(session_lock);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_REFUSALS_H_
