#include "client/link/find_daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "core/transport/attach/protocol.h"

namespace chorus {
namespace internal {
namespace {

// gRPC's other kinds of addresses, which it takes for such: at one of an abstract Unix socket it
// would talk to whoever listens there.
constexpr absl::string_view kSchemes[] = {"binder", "dns",  "google-c2p", "google-c2p-experimental",
                                          "ipv4",   "ipv6", "unix",       "unix-abstract",
                                          "vsock",  "xds"};

bool IsHost(absl::string_view text) {
  if (absl::ConsumePrefix(&text, "[")) {
    return absl::ConsumeSuffix(&text, "]") && !text.empty() && !absl::StrContains(text, '[') &&
           !absl::StrContains(text, ']');
  }
  if (text.empty() || absl::StrContains(text, ':') || absl::StrContains(text, ']')) return false;
  return std::none_of(std::begin(kSchemes), std::end(kSchemes), [text](absl::string_view scheme) {
    return absl::EqualsIgnoreCase(scheme, text);
  });
}

absl::Status CheckAddress(absl::string_view address) {
  if (absl::StartsWith(address, "unix:")) return absl::OkStatus();
  if (absl::StrContains(address, '/')) {
    return Malformed(absl::StrCat("address \"", address,
                                  "\": a path needs unix: before it (unix:", address, ")"));
  }
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon + 1 == address.size() ||
      !IsHost(address.substr(0, colon))) {
    return Malformed(absl::StrCat("address \"", address, "\": expected unix:/PATH or HOST:PORT"));
  }
  return absl::OkStatus();
}

// What stands at `path` that no daemon will ever serve.
absl::Status CheckSocket(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) return absl::OkStatus();  // perhaps soon
  if (S_ISSOCK(info.st_mode)) return absl::OkStatus();
  return Malformed(absl::StrCat("unix:", path, ": expected a socket, found ",
                                S_ISDIR(info.st_mode) ? "a directory" : "another kind of file"));
}

// Of a socket that this user may not use.
absl::Status ForeignSocket(const std::string& path, const absl::Status& denied) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) {
    return MakeError(Reason::kNotAttached,
                     absl::StrCat("unix:", path, ": this process (uid ", geteuid(),
                                  ") may not look there: ", strerror(errno)));
  }
  return MakeError(
      Reason::kNotAttached,
      absl::StrCat("unix:", path, ": the socket of uid ", info.st_uid, " (mode ",
                   absl::StrFormat("%04o", info.st_mode & 07777), ") does not let uid ", geteuid(),
                   " in: use a daemon of your own, or have this one started with --socket_mode "
                   "and --socket_group (",
                   ErrorOf(denied).message, ")"));
}

absl::StatusOr<FoundDaemon> AttachAt(const std::string& path,
                                     absl::Span<const uint32_t> daemon_uids, absl::Time deadline) {
  CHORUS_RETURN_IF_ERROR(CheckSocket(path));
  FoundDaemon daemon;
  daemon.path = path;
  auto attached = AttachClient::Connect(AttachPath(path), deadline, daemon_uids);
  // Not the daemon's own word on who may attach.
  if (ErrorOf(attached.status()).reason == Reason::kNotAttached &&
      faccessat(AT_FDCWD, AttachPath(path).c_str(), W_OK, AT_EACCESS) != 0) {
    return ForeignSocket(path, attached.status());
  }
  CHORUS_ASSIGN_OR_RETURN(daemon.attach, std::move(attached));
  return daemon;
}

bool IsLost(const absl::Status& status) { return ErrorOf(status).reason == Reason::kDaemonLost; }

}  // namespace

absl::StatusOr<std::vector<std::string>> AddressesFor(std::string address) {
  const char* const environment = std::getenv("CHORUS_ADDRESS");
  if (address.empty() && environment != nullptr) address = environment;
  if (!address.empty()) {
    CHORUS_RETURN_IF_ERROR(CheckAddress(address));
    return std::vector<std::string>{address};
  }
  std::vector<std::string> addresses = {absl::StrCat("unix:", DefaultSocketPath())};
  const std::string system = absl::StrCat("unix:", kSystemSocketPath);
  if (addresses[0] != system) addresses.push_back(system);
  return addresses;
}

absl::StatusOr<FoundDaemon> FindDaemon(const std::vector<std::string>& paths,
                                       absl::Span<const uint32_t> daemon_uids, absl::Time deadline,
                                       absl::Duration patience) {
  absl::Status elsewhere;
  auto daemon = WhenItServes(deadline, [&]() -> absl::StatusOr<FoundDaemon> {
    auto first = AttachAt(paths[0], daemon_uids, deadline);
    if (first.ok()) return first;
    elsewhere = absl::OkStatus();
    for (size_t i = 1; i < paths.size(); ++i) {
      auto other = AttachAt(paths[i], daemon_uids, deadline);
      if (other.ok()) return other;
      if (!IsLost(other.status())) elsewhere = other.status();
    }
    return first;
  });
  if (daemon.ok()) return daemon;
  if (IsLost(daemon.status()) && !elsewhere.ok()) return elsewhere;
  return NoAnswer(absl::StrCat("unix:", absl::StrJoin(paths, " or unix:")), daemon.status(),
                  patience);
}

absl::Status NoAnswer(absl::string_view address, const absl::Status& status,
                      absl::Duration patience) {
  Error error = ErrorOf(status);
  const std::string within = absl::StrCat(" within ", absl::FormatDuration(patience));
  if (error.reason == Reason::kDaemonLost) {
    error.message = absl::StrCat("no daemon serves at ", address, within, ": ", error.message);
  } else if (error.reason == Reason::kTransportTimeout) {
    error.message =
        absl::StrCat("the daemon at ", address, " did not answer", within, ": ", error.message);
  }
  return ToStatus(error);
}

}  // namespace internal
}  // namespace chorus
