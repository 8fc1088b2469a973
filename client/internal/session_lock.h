// The name of a session's lock, for clang's thread-safety analysis.
//
// Sessions share the name: the analysis cannot see that a group or a tensor belongs to the session
// that is locked, and no thread holds two of them. SessionLock (session_core.h) takes it.
//
// Lock order, outermost first: HostTensor's mutex; a session's lock; Releases' mutex; what a Link
// locks, which is the mutex of RingLink or of a gRPC link (client/link/grpc_links.cc), then that of
// AttachClient, of RpcLink or of Outcomes. The mutexes of CompiledImpl, of OwnWorld and of the list
// of living sessions are held while nothing else is locked. No lock is held while a function of the
// trainer's runs.
//
// No lock is held while something is waited for, but for these:
// * a session's lock, while there is no room in a link (link.h) or in staging memory (staging.h),
//   which no other thread of this session's has to give; and while the daemon answers at once:
//   makes staging memory, or takes it back (StagingPool::GiveBackAll) or takes bytes for what it
//   has elsewhere (Link::WriteStaging), takes note that a rank leaves (SessionCore::Leave), or says
//   how the registration of a graph has ended (WentWell). Each has its deadline. A call that finds
//   the daemon gone waits half a second for what it may have said before (RpcLink::Goodbye);
// * AttachClient's, while the daemon answers on its socket, where requests go one after another,
//   each with its deadline (AttachClient::Ask); with it RingLink's, where a reader maps an arena of
//   results (RingLink::Locate);
// * HostTensor's, while its pieces are gathered, which is a call like any other.
//
// Threads: that is what it is about. Ownership: none. Errors: none.
#ifndef CHORUS_CLIENT_INTERNAL_SESSION_LOCK_H_
#define CHORUS_CLIENT_INTERNAL_SESSION_LOCK_H_

#include "core/base/mutex.h"

namespace chorus {
namespace internal {

class ABSL_LOCKABLE SessionLockName {};
inline SessionLockName session_lock;

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_SESSION_LOCK_H_
