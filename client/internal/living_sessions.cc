#include "client/internal/living_sessions.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "client/internal/fork_mark.h"
#include "core/base/mutex.h"

namespace chorus {
namespace internal {
namespace {

struct Living {
  const ForkMark mark;
  Mutex mutex;
  std::vector<std::weak_ptr<SessionCore>> sessions ABSL_GUARDED_BY(mutex);
};

// A forked child's own: nobody may be there to unlock its parent's.
Living& OfThisProcess() {
  static std::atomic<Living*> living{new Living};
  Living* current = living.load();
  if (!current->mark.Forked()) return *current;
  auto of_child = std::make_unique<Living>();
  if (!living.compare_exchange_strong(current, of_child.get())) return *current;
  return *of_child.release();
}

}  // namespace

std::vector<std::shared_ptr<SessionCore>> LivingSessions() {
  Living& living = OfThisProcess();
  std::vector<std::shared_ptr<SessionCore>> sessions;
  MutexLock lock(&living.mutex);
  for (const std::weak_ptr<SessionCore>& session : living.sessions) {
    std::shared_ptr<SessionCore> held = session.lock();
    if (held != nullptr) sessions.push_back(std::move(held));
  }
  return sessions;
}

void AddLivingSession(const std::shared_ptr<SessionCore>& session) {
  Living& living = OfThisProcess();
  MutexLock lock(&living.mutex);
  living.sessions.erase(std::remove_if(living.sessions.begin(), living.sessions.end(),
                                       [](const auto& other) { return other.expired(); }),
                        living.sessions.end());
  living.sessions.push_back(session);
}

}  // namespace internal
}  // namespace chorus
