#include "server/accept.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <utility>

#include "core/base/unique_fd.h"
#include "glog/logging.h"
#include "server/own_memory.h"

namespace chorus::server {
namespace {

constexpr int kAcceptsPerTurn = 64;

}  // namespace

void Accept(absl::string_view logger, int listener, int stop,
            const std::function<void(ClientSocket connection)>& take) {
  const auto pause = [stop](int milliseconds) {
    pollfd entry = {stop, POLLIN, 0};
    poll(&entry, 1, milliseconds);
  };
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    if (TooManyUnclosed()) return pause(1);
    ClientSocket connection(
        UniqueFd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)));
    if (!connection.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      LOG(ERROR) << logger << ": accept: " << strerror(errno);
      return pause(100);
    }
    int family = AF_UNSPEC;
    socklen_t size = sizeof(family);
    getsockopt(connection.get(), SOL_SOCKET, SO_DOMAIN, &family, &size);
    const int bytes = kSocketBytes;
    if (family == AF_UNIX) {
      setsockopt(connection.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    }
    take(std::move(connection));
  }
}

}  // namespace chorus::server
