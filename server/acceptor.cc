#include "server/acceptor.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "glog/logging.h"
#include "grpcpp/server_posix.h"
#include "server/accept.h"
#include "server/client_socket.h"
#include "server/unix_listener.h"

namespace chorus::server {

Acceptor::Acceptor(std::vector<Listener> listeners, PeerTable::Idle idle, PeerTable* peers,
                   grpc::Server* server)
    : listeners_(std::move(listeners)),
      idle_(std::move(idle)),
      peers_(peers),
      server_(server),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { Loop(); }) {}

Acceptor::~Acceptor() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
  }
  Wake();
  thread_.join();
}

void Acceptor::Stop(absl::Duration patience) {
  {
    MutexLock lock(&mutex_);
    accepts_ = false;
    end_all_ = SteadyNow() + patience;
  }
  Wake();
  MutexLock lock(&mutex_);
  while (!closed_) changed_.Wait(&mutex_);
}

void Acceptor::Wake() {
  const uint64_t one = 1;
  // An eventfd of a fresh count takes a 1.
  if (write(wake_.get(), &one, sizeof(one)) < 0) LOG(ERROR) << "acceptor: " << strerror(errno);
}

void Acceptor::Loop() {
  for (;;) {
    {
      MutexLock lock(&mutex_);
      if (!accepts_ && !closed_) {
        listeners_.clear();
        closed_ = true;
        changed_.SignalAll();
      }
      if (stop_) return;
    }
    std::vector<pollfd> entries;
    entries.push_back({wake_.get(), POLLIN, 0});
    entries.push_back({peers_->hangups_fd(), POLLIN, 0});
    for (const Listener& listener : listeners_) {
      entries.push_back({listener.socket.get(), POLLIN, 0});
    }
    if (poll(entries.data(), entries.size(), Sweep()) < 0 && errno != EINTR) {
      // Out of memory: pause instead of spinning.
      LOG(ERROR) << "acceptor: poll: " << strerror(errno);
      poll(nullptr, 0, 100);
      continue;
    }
    uint64_t count;
    if (entries[0].revents != 0 && read(wake_.get(), &count, sizeof(count)) > 0) continue;
    // First those that make room.
    if (entries[1].revents != 0) peers_->TakeHangups();
    for (size_t i = 2; i < entries.size(); ++i) {
      if (entries[i].revents != 0) Accept(listeners_[i - 2]);
    }
  }
}

int Acceptor::Sweep() {
  absl::Duration left = absl::InfiniteDuration();
  {
    MutexLock lock(&mutex_);
    left = end_all_ - SteadyNow();
    if (left <= absl::ZeroDuration()) end_all_ = absl::InfiniteFuture();
  }
  if (left <= absl::ZeroDuration()) {
    peers_->EndAll();
    left = absl::InfiniteDuration();
  }
  if (peers_->open() > 0) {
    const absl::Time now = SteadyNow();
    if (now >= next_sweep_) {
      peers_->EndIdle(idle_);
      // A connection is ended that much late at most.
      next_sweep_ = now + std::min(idle_.first_call, idle_.next_call) / 4;
    }
    left = std::min(left, next_sweep_ - now);
  }
  if (left == absl::InfiniteDuration()) return -1;
  return static_cast<int>(
      absl::ToInt64Milliseconds(std::min(absl::Ceil(left, absl::Milliseconds(1)), absl::Hours(1))));
}

void Acceptor::Accept(const Listener& listener) {
  server::Accept("acceptor", listener.socket.get(), wake_.get(), [&](ClientSocket connection) {
    absl::optional<PeerCredentials> peer;
    if (listener.is_unix) {
      const absl::StatusOr<PeerCredentials> credentials = GetPeerCredentials(connection.get());
      if (!credentials.ok()) {
        LOG(ERROR) << "acceptor: " << credentials.status();
        return;
      }
      peer = *credentials;
    }
    absl::StatusOr<UniqueFd> fd = peers_->Add(std::move(connection), peer);
    if (!fd.ok()) {
      LOG_EVERY_T(ERROR, 1) << "acceptor: " << ErrorOf(fd.status()).message;
      return;
    }
    grpc::AddInsecureChannelFromFd(server_, fd->Release());
  });
}

}  // namespace chorus::server
