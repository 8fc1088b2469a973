#include "core/node/fail_turns.h"

#include <vector>

namespace chorus::node {

void FailTurns::Take() {
  const std::function<void()> then = turns_.Pop();
  then();
}

void FailTurns::HoldBack(Session* session) {
  if (session->failing++ == 0) session->log.Park();
}

void FailTurns::LetGoOn(const std::shared_ptr<Session>& session) {
  if (--session->failing > 0) return;
  for (auto& then : std::exchange(session->when_failed, {})) {
    Add(session->tenant->name, [session, then = std::move(then)] { then(session); });
  }
  if (!session->dead()) go_on_(session);
}

std::function<void()> FailTurns::HoldBackAll(const World& world) {
  std::vector<std::shared_ptr<Session>> sessions;
  for (const World::Member& member : world.members) {
    if (member.session == nullptr) continue;
    HoldBack(member.session.get());
    sessions.push_back(member.session);
  }
  return [this, sessions = std::move(sessions)] {
    for (const std::shared_ptr<Session>& session : sessions) LetGoOn(session);
  };
}

}  // namespace chorus::node
