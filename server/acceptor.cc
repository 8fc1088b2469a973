#include "server/acceptor.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <utility>

#include "glog/logging.h"
#include "grpcpp/server_posix.h"
#include "server/unix_listener.h"

namespace chorus {

Acceptor::Acceptor(std::vector<UniqueFd> listeners, PeerTable* peers, grpc::Server* server)
    : listeners_(std::move(listeners)),
      peers_(peers),
      server_(server),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { Loop(); }) {}

Acceptor::~Acceptor() {
  const uint64_t one = 1;
  // An eventfd of a fresh count takes a 1.
  if (write(stop_.get(), &one, sizeof(one)) < 0) LOG(ERROR) << "acceptor: " << strerror(errno);
  thread_.join();
}

void Acceptor::Loop() {
  std::vector<pollfd> entries;
  entries.push_back({stop_.get(), POLLIN, 0});
  for (const UniqueFd& listener : listeners_) entries.push_back({listener.get(), POLLIN, 0});
  for (;;) {
    if (poll(entries.data(), entries.size(), -1) < 0 && errno != EINTR) {
      LOG(ERROR) << "acceptor: poll: " << strerror(errno);
      return;
    }
    if (entries[0].revents != 0) return;
    for (size_t i = 1; i < entries.size(); ++i) {
      if (entries[i].revents != 0) AcceptAll(entries[i].fd);
    }
  }
}

void Acceptor::AcceptAll(int listener) {
  for (;;) {
    UniqueFd connection(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // Out of descriptors or memory: the connection stays in the queue, so pause instead of
      // spinning. What ends the shortage are other threads.
      LOG(ERROR) << "acceptor: accept: " << strerror(errno);
      pollfd stopped = {stop_.get(), POLLIN, 0};
      poll(&stopped, 1, 100);
      return;
    }
    const absl::StatusOr<PeerCredentials> peer = GetPeerCredentials(connection.get());
    if (!peer.ok()) {
      LOG(ERROR) << "acceptor: " << peer.status();
      continue;
    }
    absl::StatusOr<UniqueFd> numbered = peers_->Add(std::move(connection), *peer);
    if (!numbered.ok()) {
      LOG(ERROR) << "acceptor: " << numbered.status();
      continue;
    }
    grpc::AddInsecureChannelFromFd(server_, numbered->Release());
  }
}

}  // namespace chorus
