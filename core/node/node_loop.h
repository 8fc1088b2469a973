// Runs a LocalNode on its thread: polls while there is work, sleeps when there is none.
//
// Threads: what posts, and WatchProcess, may be called from any thread; the rest from the thread
// that made it. Ownership: owns the node and its thread. Errors: none; tasks hand their own on.
#ifndef CHORUS_CORE_NODE_NODE_LOOP_H_
#define CHORUS_CORE_NODE_NODE_LOOP_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/node/node.h"

namespace chorus::node {

class NodeLoop {
 public:
  // Starts the thread. The node has `devices`.
  NodeLoop(NodeOptions options, std::unique_ptr<Devices> devices);
  // Stops the thread; posted closures that did not run are run before it ends.
  ~NodeLoop();

  // Runs `task` on the node thread. However many are posted, what else the node has to do is done
  // in between; and tenants take turns, so that one for which much is posted waits behind its own.
  // What is posted for one tenant is run in the order of the calls.
  using Task = std::function<void(LocalNode& node, absl::Time now)>;
  void Post(const std::string& tenant, Task task);
  // What is nobody's, but the node's own: it has turns as a tenant has.
  void PostOwn(Task task) { Post(/*tenant=*/"", std::move(task)); }
  // The node's own, behind all that has been posted before, of whomever.
  void PostBehindAll(Task task);

  // Watches `pidfd` (taken over) of `tenant`'s session: when the process ends the node is told
  // SessionDied at once. When the session ends, whatever ends it, the watch does, whoever else has
  // the pidfd's file, and the descriptor is closed.
  void WatchProcess(const std::string& tenant, SessionId session, int pidfd);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_NODE_LOOP_H_
