// Accepts gRPC's connections, so that the daemon knows which users call and how many they are
// (server/peers.h), and ends those that are idle.
//
// Threads: one of its own. The constructor, Stop and the destructor are the owner's. Ownership: it
// has the listeners; a connection is gRPC's once it has been handed over. Errors: logged; a
// connection that is refused is closed.
#ifndef CHORUS_SERVER_ACCEPTOR_H_
#define CHORUS_SERVER_ACCEPTOR_H_

#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "grpcpp/server.h"
#include "grpcpp/support/server_interceptor.h"
#include "server/peers.h"

namespace chorus::server {

class Acceptor {
 public:
  struct Listener {
    UniqueFd socket;
    bool is_unix = false;  // else TCP
  };
  // `peers` and `server` outlive it.
  Acceptor(std::vector<Listener> listeners, PeerTable::Idle idle, PeerTable* peers,
           grpc::Server* server);
  // Takes no more connections: none comes to the server after it returns. Ends all that there are
  // `patience` later.
  void Stop(absl::Duration patience);
  // Connections that gRPC has stay, when Stop was not called or its time has not come.
  ~Acceptor();

 private:
  void Loop();
  // Takes those that are there, so many at a time.
  void Accept(const Listener& listener);
  // Ends what is due, and returns when to look again, in milliseconds; -1: never.
  int Sweep();
  void Wake();

  std::vector<Listener> listeners_;  // the thread's
  absl::Time next_sweep_;            // the thread's
  const PeerTable::Idle idle_;
  PeerTable* const peers_;
  grpc::Server* const server_;
  const UniqueFd wake_;  // an eventfd
  Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool accepts_ ABSL_GUARDED_BY(mutex_) = true;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;  // the listeners
  CondVar changed_;
  absl::Time end_all_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::thread thread_;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_ACCEPTOR_H_
