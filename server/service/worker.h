// A thread for what must not run on the node thread: serializing and sending replies, and keeping
// leases. Tenants take turns: one for which much is to be done waits behind its own.
//
// Threads: Post, Hold and Drop from any thread, Stop and the destructor from one. Nothing runs
// under its lock. Ownership: it has its thread, and what it has not run. Errors: none; tasks hand
// their own on.
#ifndef CHORUS_SERVER_SERVICE_WORKER_H_
#define CHORUS_SERVER_SERVICE_WORKER_H_

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"
#include "core/base/turn_queue.h"

namespace chorus::server {

class ServiceWorker {
 public:
  // Called by the thread.
  using Renew = std::function<void(std::vector<SessionId> sessions)>;
  // A session with a call under way is renewed so that a long wait does not outlive its own lease,
  // however much the thread has to do: each quarter of that, and of the others' that are shorter,
  // and at least every `longest_period`.
  ServiceWorker(Renew renew, absl::Duration longest_period);
  ~ServiceWorker() { Stop(); }
  // Runs what was posted before, and ends the thread. What is posted later is not run, and goes at
  // once.
  void Stop();

  // What is done for one tenant is done in the order of the calls.
  void Post(const std::string& tenant, std::function<void()> task);

  // Calls of `session` under way: as many Drops as Holds. Its lease has just been renewed.
  void Hold(SessionId session, absl::Duration lease);
  void Drop(SessionId session);

 private:
  struct Held {
    int calls = 0;
    absl::Duration lease;
  };

  void Loop();
  // When one of the lease is to be renewed that is now.
  absl::Time RenewalOf(absl::Duration lease) const;
  // Those that are held, where their renewal is due, and sets the next one.
  std::vector<SessionId> TakeDueLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Renew renew_;
  const absl::Duration longest_period_;

  Mutex mutex_;
  CondVar changed_;
  TurnQueue<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);  // by tenant
  absl::flat_hash_map<SessionId, Held> held_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_renewal_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_WORKER_H_
