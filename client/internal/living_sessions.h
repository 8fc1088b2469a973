// The sessions that this process has open.
//
// Threads: any. Ownership: none of them is kept. Errors: none.
#ifndef CHORUS_CLIENT_INTERNAL_LIVING_SESSIONS_H_
#define CHORUS_CLIENT_INTERNAL_LIVING_SESSIONS_H_

#include <memory>
#include <vector>

namespace chorus {
namespace internal {

class SessionCore;

// A forked child has none of its parent's.
std::vector<std::shared_ptr<SessionCore>> LivingSessions();
// That it is one of them, as long as anybody holds it.
void AddLivingSession(const std::shared_ptr<SessionCore>& session);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_LIVING_SESSIONS_H_
