// Work that takes longer than the node thread may be kept from others: large graphs are decoded,
// checked and planned here, strided memory is copied.
//
// One thread: what work takes while it is done, beside its result, is of one thing at a time.
// Tenants take turns: a tenant that asks for much waits behind its own work.
//
// Threads: the node thread makes all calls but Ask() and DoOwn(); work runs on the thread of its
// own.
// Ownership: owns that thread and what has not run. Errors: none; work hands its own on.
#ifndef CHORUS_CORE_NODE_BACKGROUND_H_
#define CHORUS_CORE_NODE_BACKGROUND_H_

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "core/base/mutex.h"
#include "core/base/turn_queue.h"

namespace chorus::node {

class Background {
 public:
  // `post` runs a closure on the node thread, from any thread; it outlives this.
  explicit Background(std::function<void(std::function<void()>)> post);
  ~Background() { Stop(); }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Runs `work` on the thread and `then` on the node thread afterwards. `then` never leaves the
  // node thread: what only that may touch is kept there, until the work is done with it. Work of
  // one tenant is done in the order of the calls; an empty name is the node itself.
  void Do(const std::string& tenant, std::function<void()> work, std::function<void()> then);
  // Of work, in the middle: runs `question` on the node thread, and waits until it has. False: it
  // never will, for the node ends.
  bool Ask(absl::FunctionRef<void()> question);
  // Of work, in the middle: does the node's own that waits, such as giving back memory that this
  // work was refused. What follows that is there before the next question. False: there is none.
  bool DoOwn();
  // Waits for the work under way. What has not begun is dropped, as is what comes from now on, and
  // nothing is asked nor follows any more.
  void Stop();

 private:
  struct Job {
    uint64_t id = 0;
    std::function<void()> work;
  };
  void Loop();
  void Run(Job job);
  void Answer();

  const std::function<void(std::function<void()>)> post_;
  // The node thread's: what follows the jobs under way.
  absl::flat_hash_map<uint64_t, std::function<void()>> then_;
  uint64_t last_id_ = 0;

  Mutex mutex_;
  CondVar changed_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  const absl::FunctionRef<void()>* question_ ABSL_GUARDED_BY(mutex_) = nullptr;  // not answered yet
  TurnQueue<Job> jobs_ ABSL_GUARDED_BY(mutex_);                                  // by tenant
  std::thread thread_;  // last: it uses the rest
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_BACKGROUND_H_
