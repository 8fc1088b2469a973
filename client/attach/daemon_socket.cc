#include "client/attach/daemon_socket.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <deque>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/clock.h"
#include "core/base/error.h"

namespace chorus {
namespace {

// As many as the kernel follows.
constexpr int kMaxLinks = 40;

absl::Status NotPlaced(absl::string_view why) { return MakeError(Reason::kNotAttached, why); }

// Whether nobody but root and `uid` may change what `directory` (without links) has.
absl::Status WritableBy(const std::string& directory, uid_t uid) {
  struct stat info = {};
  if (lstat(directory.c_str(), &info) != 0) {
    return NotPlaced(absl::StrCat(directory, ": ", strerror(errno)));
  }
  if ((info.st_uid == 0 || info.st_uid == uid) && (info.st_mode & 022) == 0) {
    return absl::OkStatus();
  }
  return NotPlaced(absl::StrFormat("others than %s may write to %s (uid %d, mode %04o)",
                                   uid == 0 ? "root" : "root and that user", directory, info.st_uid,
                                   info.st_mode & 07777));
}

void Prepend(const std::string& path, std::deque<std::string>* names) {
  const std::vector<std::string> components = absl::StrSplit(path, '/', absl::SkipEmpty());
  names->insert(names->begin(), components.begin(), components.end());
}

// The directory `path` without links, if root alone decides what each name on the way to it means.
absl::StatusOr<std::string> ResolveByRoot(const std::string& path) {
  std::deque<std::string> names;
  Prepend(path, &names);
  std::string at = "/";
  for (int links = 0; !names.empty();) {
    const std::string name = names.front();
    names.pop_front();
    if (name == ".") continue;
    if (name == "..") {
      at = at.substr(0, std::max<size_t>(at.rfind('/'), 1));
      continue;
    }
    CHORUS_RETURN_IF_ERROR(WritableBy(at, 0));
    const std::string next = absl::StrCat(at == "/" ? "" : at, "/", name);
    struct stat info = {};
    if (lstat(next.c_str(), &info) != 0) {
      return NotPlaced(absl::StrCat(next, ": ", strerror(errno)));
    }
    if (!S_ISLNK(info.st_mode)) {
      at = next;
      continue;
    }
    char target[PATH_MAX];
    const ssize_t size = readlink(next.c_str(), target, sizeof(target));
    if (size <= 0 || ++links > kMaxLinks) return NotPlaced(absl::StrCat(next, " leads nowhere"));
    const std::string leads_to(target, static_cast<size_t>(size));
    if (leads_to[0] == '/') at = "/";
    Prepend(leads_to, &names);
  }
  return at;
}

absl::Status CheckDaemon(const std::string& path, uid_t daemon,
                         absl::Span<const uint32_t> daemon_uids) {
  std::string why;
  if (!daemon_uids.empty()) {
    if (std::find(daemon_uids.begin(), daemon_uids.end(), daemon) != daemon_uids.end()) {
      return absl::OkStatus();
    }
    why = absl::StrCat("SessionOptions::daemon_uids has only ", absl::StrJoin(daemon_uids, ", "));
  } else {
    if (daemon == geteuid() || daemon == 0) return absl::OkStatus();
    const absl::Status placed = PlacedByRoot(path, daemon);
    if (placed.ok()) return absl::OkStatus();
    why = absl::StrCat(ErrorOf(placed).message,
                       "; name that uid in SessionOptions::daemon_uids if it is meant");
  }
  return MakeError(Reason::kNotAttached,
                   absl::StrCat("the daemon at unix:", path, " is uid ", daemon,
                                "'s, this process is uid ", geteuid(), "'s: ", why));
}

}  // namespace

absl::Status PlacedByRoot(const std::string& path, uid_t uid) {
  std::string whole = path;
  if (!absl::StartsWith(whole, "/")) {
    char directory[PATH_MAX];
    if (getcwd(directory, sizeof(directory)) == nullptr) {
      return NotPlaced(absl::StrCat(path, ": ", strerror(errno)));
    }
    whole = absl::StrCat(directory, "/", path);
  }
  CHORUS_ASSIGN_OR_RETURN(const std::string directory,
                          ResolveByRoot(whole.substr(0, whole.rfind('/'))));
  return WritableBy(directory, uid);
}

absl::StatusOr<UniqueFd> ConnectToDaemon(const std::string& path, int type,
                                         absl::Span<const uint32_t> daemon_uids,
                                         absl::Time deadline) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return Malformed(absl::StrCat("unix:", path, ": expected a path of 1 to ",
                                  sizeof(address.sun_path) - 1, " bytes, got ", path.size()));
  }
  memcpy(address.sun_path, path.data(), path.size());
  UniqueFd connection(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (!connection.valid()) {
    return MakeError(Reason::kQuota, absl::StrCat("socket: ", strerror(errno)));
  }
  // connect() waits while the daemon's queue is full; this bounds it.
  const absl::Duration left =
      std::min(std::max(deadline - SteadyNow(), absl::Milliseconds(1)), absl::Hours(1));
  const timeval timeout = absl::ToTimeval(left);
  setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  if (connect(connection.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EAGAIN || errno == EINPROGRESS) {
      return MakeError(Reason::kTransportTimeout,
                       absl::StrCat("the daemon at ", path,
                                    " does not answer: it did not take the connection in time"));
    }
    return MakeError(errno == EACCES ? Reason::kNotAttached : Reason::kDaemonLost,
                     absl::StrCat("no chorusd answers at ", path, ": ", strerror(errno)));
  }
  // Of the process that has called listen() on the other end.
  ucred daemon = {};
  socklen_t size = sizeof(daemon);
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &daemon, &size) != 0) {
    return MakeError(Reason::kInternal, absl::StrCat("SO_PEERCRED: ", strerror(errno)));
  }
  CHORUS_RETURN_IF_ERROR(CheckDaemon(path, daemon.uid, daemon_uids));
  return connection;
}

}  // namespace chorus
