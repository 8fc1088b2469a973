// Errors of the SDK with the line of the trainer that made the call.
//
// Threads: any; plain functions.
// Ownership: plain values. Errors: none of their own.
#ifndef CHORUS_CLIENT_INTERNAL_ERRORS_H_
#define CHORUS_CLIENT_INTERNAL_ERRORS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "chorus/call_site.h"

namespace chorus {
namespace internal {

// FAILED_PRECONDITION kForked: the object is the parent process's.
absl::Status ForkedError();
// True for errors after which there is no daemon to tell anything.
bool IsLost(const absl::Status& status);
// Whether `status`, the end of a call or of a wait, says that its time is over, and nothing of what
// it waits for: a command may come to kTransportTimeout, too, and then that is recorded.
bool IsTimeout(const absl::Status& status);
// Whether `status`, the end of a call or of a wait for a command, is no outcome of that: the daemon
// has not taken it, for a gap or for want of room, or has had no room for whoever waits, or the
// call has ended before its command. Then it may be sent again: one that was taken is answered from
// the record. What a command of the log comes to is recorded: such an error has the record's id.
bool IsNoOutcome(const absl::Status& status);
// At most kMaxSourceLineBytes: the end of it, where the path is longer.
std::string SourceOf(CallSite site);
// `status` with the call site, where it has none.
absl::Status WithSource(const absl::Status& status, const std::string& source);
// `status` of one of the ops that a function is made of: with its name in front.
absl::Status InFunction(absl::string_view name, const absl::Status& status);
// `status` of one of the calls of a coalesced one. An index of -1: it is a call of its own.
absl::Status AtIndex(const absl::Status& status, int64_t index);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_ERRORS_H_
