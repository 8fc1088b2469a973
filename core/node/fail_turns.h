// What fails takes turns: an epoch that ends, or a gang, may fail tens of thousands of results,
// more than a slice has time for. Until they have failed, the logs of their sessions are held back,
// and those of all members of a world whose epoch has ended: no command sees some of them only, or
// not their memory.
//
// What is a tenant's is in order: a world, its members and their runs are of one. Tenants take
// turns, so that none waits for all that another has brought to fail.
//
// Threads: the node thread. Ownership: owns what is still to be done, which keeps its sessions.
// Errors: none of its own.
#ifndef CHORUS_CORE_NODE_FAIL_TURNS_H_
#define CHORUS_CORE_NODE_FAIL_TURNS_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/base/turn_queue.h"
#include "core/node/session.h"
#include "core/node/world.h"

namespace chorus::node {

class FailTurns {
 public:
  // `go_on`: with the log of a session that was held back.
  explicit FailTurns(std::function<void(const std::shared_ptr<Session>&)> go_on)
      : go_on_(std::move(go_on)) {}
  FailTurns(const FailTurns&) = delete;
  FailTurns& operator=(const FailTurns&) = delete;

  bool empty() const { return turns_.empty(); }
  // Whether something of the tenant's waits.
  bool Has(const std::string& tenant) const { return turns_.Has(tenant); }
  // Behind all of the tenant's that wait, and never at once: what `then` does may be the next
  // frame, and the caller in the middle of something.
  void Add(const std::string& tenant, std::function<void()> then) {
    turns_.Push(tenant, std::move(then));
  }
  // Before them: the rest of what had its turn.
  void AddRest(const std::string& tenant, std::function<void()> then) {
    turns_.PushFirst(tenant, std::move(then));
  }
  // Does what is first of the tenant whose turn it is, of which there is one.
  void Take();

  // The session's log stands until LetGoOn() was called as often.
  static void HoldBack(Session* session);
  void LetGoOn(const std::shared_ptr<Session>& session);
  // HoldBack() of the world's members; what it returns is LetGoOn() of these.
  std::function<void()> HoldBackAll(const World& world);

 private:
  const std::function<void(const std::shared_ptr<Session>&)> go_on_;
  TurnQueue<std::function<void()>> turns_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_FAIL_TURNS_H_
