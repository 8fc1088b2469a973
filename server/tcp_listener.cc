#include "server/tcp_listener.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>

#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus::server {
namespace {

// Of a connection over which nothing comes: when its other end is asked for the first time, how
// often then, and how many of these may stay without an answer.
constexpr int kProbeAfterSeconds = 30;
constexpr int kProbeEverySeconds = 10;
constexpr int kProbes = 3;
// For what was sent to be acknowledged.
constexpr int kUnansweredMilliseconds = 1000 * (kProbeAfterSeconds + kProbes * kProbeEverySeconds);

absl::Status Failed(const ListenAddress& address, absl::string_view why) {
  return MakeError(Reason::kCannotServe, absl::StrCat("--listen=", address.ToString(), ": ", why));
}

bool Set(int socket, int level, int option, int value) {
  return setsockopt(socket, level, option, &value, sizeof(value)) == 0;
}

// Each accepted connection has them from the socket that listens.
bool SetOptions(int socket, int family) {
  // Else an address whose last connections have just ended is in use for a minute.
  return Set(socket, SOL_SOCKET, SO_REUSEADDR, 1) &&
         // Else [::] would take the IPv4 addresses as well.
         (family != AF_INET6 || Set(socket, IPPROTO_IPV6, IPV6_V6ONLY, 1)) &&
         Set(socket, IPPROTO_TCP, TCP_NODELAY, 1) && Set(socket, SOL_SOCKET, SO_KEEPALIVE, 1) &&
         Set(socket, IPPROTO_TCP, TCP_KEEPIDLE, kProbeAfterSeconds) &&
         Set(socket, IPPROTO_TCP, TCP_KEEPINTVL, kProbeEverySeconds) &&
         Set(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes) &&
         Set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kUnansweredMilliseconds);
}

int PortOf(int socket) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  const in_port_t port = address.ss_family == AF_INET6
                             ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                             : reinterpret_cast<const sockaddr_in*>(&address)->sin_port;
  return ntohs(port);
}

}  // namespace

absl::StatusOr<std::vector<UniqueFd>> ListenTcp(ListenAddress* address) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error =
      getaddrinfo(address->host.c_str(), absl::StrCat(address->port).c_str(), &hints, &list);
  if (error != 0) return Failed(*address, gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list_owner(list, freeaddrinfo);
  std::vector<UniqueFd> listeners;
  std::set<std::string> seen;
  int listen_error = 0;
  for (const addrinfo* at = list; at != nullptr; at = at->ai_next) {
    // A hosts file may give a name the same address twice.
    if (!seen.emplace(reinterpret_cast<const char*>(at->ai_addr), at->ai_addrlen).second) continue;
    // The others take the port that the system has chosen for the first.
    sockaddr_storage local = {};
    memcpy(&local, at->ai_addr, at->ai_addrlen);
    const in_port_t port = htons(static_cast<uint16_t>(address->port));
    if (at->ai_family == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&local)->sin6_port = port;
    } else {
      reinterpret_cast<sockaddr_in*>(&local)->sin_port = port;
    }
    UniqueFd listener(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener.valid() || !SetOptions(listener.get(), at->ai_family) ||
        bind(listener.get(), reinterpret_cast<const sockaddr*>(&local), at->ai_addrlen) != 0 ||
        listen(listener.get(), SOMAXCONN) != 0) {
      // A machine without IPv6 has a localhost all the same; an address that is in use is
      // another's.
      listen_error = errno;
      if (listen_error == EADDRINUSE) break;
      continue;
    }
    if (address->port == 0) address->port = PortOf(listener.get());
    listeners.push_back(std::move(listener));
  }
  if (listen_error == EADDRINUSE || listeners.empty()) {
    return Failed(*address, strerror(listen_error));
  }
  return listeners;
}

}  // namespace chorus::server
