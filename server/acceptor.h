// Accepts gRPC's Unix connections, so that the daemon knows who calls (server/peers.h).
//
// Threads: one of its own. Start and the destructor are the owner's.
#ifndef CHORUS_SERVER_ACCEPTOR_H_
#define CHORUS_SERVER_ACCEPTOR_H_

#include <thread>
#include <vector>

#include "core/base/unique_fd.h"
#include "grpcpp/server.h"
#include "server/peers.h"

namespace chorus {

class Acceptor {
 public:
  // `peers` and `server` outlive it.
  Acceptor(std::vector<UniqueFd> listeners, PeerTable* peers, grpc::Server* server);
  // Takes no more connections; those that gRPC has stay.
  ~Acceptor();

 private:
  void Loop();
  void AcceptAll(int listener);

  const std::vector<UniqueFd> listeners_;
  PeerTable* const peers_;
  grpc::Server* const server_;
  const UniqueFd stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_ACCEPTOR_H_
