// The name of a session's lock, for clang's thread-safety analysis.
//
// Sessions share the name: the analysis cannot see that a group or a tensor belongs to the session
// that is locked, and no thread holds two of them. SessionLock (session_core.h) takes it.
//
// Lock order, outermost first: a session's lock; Releases' mutex; what a Link locks. The mutexes of
// CompiledImpl and of OwnWorld are held while nothing else is locked. No lock is held while a
// function of the trainer's runs, or something is waited for; but for room in a link (link.h) and
// in staging memory (staging.h), which no other thread of this session's has to give.
//
// Threads: that is what it is about. Ownership, errors: none.
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
