#include "server/listen_address.h"

#include <arpa/inet.h>
#include <sys/un.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/error.h"
#include "core/transport/attach/protocol.h"

namespace chorus::server {
namespace {

absl::Status BadAddress(absl::string_view text, absl::string_view expected) {
  return Malformed(absl::StrCat("--listen=", text, ": expected ", expected));
}

}  // namespace

bool ListenAddress::is_loopback() const {
  if (host == "localhost") return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

std::string ListenAddress::ToString() const {
  if (is_unix()) return absl::StrCat("unix:", path);
  if (absl::StrContains(host, ":")) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text) {
  ListenAddress address;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    if (!absl::StartsWith(rest, "/")) return BadAddress(text, "an absolute path after unix:");
    // The longest name beside it is that of the attach socket.
    constexpr size_t kMaxPath = sizeof(sockaddr_un::sun_path) - 1;
    if (AttachPath(rest).size() > kMaxPath) {
      return BadAddress(
          text, absl::StrCat("a path of at most ", kMaxPath - AttachPath("").size(), " bytes"));
    }
    address.path = std::string(rest);
    return address;
  }
  const size_t colon = rest.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) {
    return BadAddress(text, "unix:/PATH or HOST:PORT");
  }
  absl::string_view host = rest.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[") && !absl::ConsumeSuffix(&host, "]")) {
    return BadAddress(text, "[HOST]:PORT");
  }
  address.host = std::string(host);
  if (!absl::SimpleAtoi(rest.substr(colon + 1), &address.port) || address.port < 0 ||
      address.port > 65535) {
    return BadAddress(text, "a port of 0 to 65535 (0: the system chooses)");
  }
  return address;
}

absl::Status CheckListenAddress(const ListenAddress& address, bool insecure_loopback) {
  if (address.is_unix()) return absl::OkStatus();
  if (!address.is_loopback()) {
    return MakeError(
        Reason::kCannotServe,
        absl::StrCat("--listen=", address.ToString(),
                     ": only loopback addresses are served: TCP beyond this machine needs TLS, "
                     "which a later version brings. Listen on a Unix socket, or on 127.0.0.1 with "
                     "--insecure_loopback."));
  }
  if (!insecure_loopback) {
    return MakeError(Reason::kCannotServe,
                     absl::StrCat("--listen=", address.ToString(),
                                  ": every user of this machine could use it, with neither TLS "
                                  "(which a later version brings) nor credentials. Say "
                                  "--insecure_loopback if that is meant."));
  }
  return absl::OkStatus();
}

}  // namespace chorus::server
