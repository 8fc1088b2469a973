#include "server/unix_listener.h"

#include <errno.h>
#include <grp.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/error.h"
#include "server/client_socket.h"

namespace chorus::server {
namespace {

absl::Status Failed(absl::string_view path, absl::string_view what, int error) {
  return MakeError(Reason::kCannotServe,
                   absl::StrCat("socket ", path, ": ", what, ": ", strerror(error)));
}

absl::Status CheckOwner(const std::string& directory, absl::string_view what,
                        const struct stat& info, uid_t uid) {
  const bool trusted = info.st_uid == uid || info.st_uid == 0;
  // A link's own mode says nothing.
  const bool shared =
      S_ISDIR(info.st_mode) && (info.st_mode & 022) != 0 && (info.st_mode & S_ISVTX) == 0;
  if (trusted && !shared) return absl::OkStatus();
  return MakeError(
      Reason::kCannotServe,
      absl::StrFormat("directory %s: expected %s of uid %d or root, to which nobody else may write "
                      "(mode 0755, or with the sticky bit); found one of uid %d, mode %04o",
                      directory, what, uid, info.st_uid, info.st_mode & 07777));
}

absl::StatusOr<gid_t> FindGroup(const std::string& path, const std::string& name) {
  uint32_t id;
  if (absl::SimpleAtoi(name, &id)) return gid_t{id};
  std::vector<char> buffer(16384);
  group entry;
  group* result = nullptr;
  getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &result);
  if (result == nullptr) {
    return Malformed(absl::StrCat("socket ", path, ": there is no group \"", name, "\""));
  }
  return result->gr_gid;
}

absl::Status RemoveStale(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) return absl::OkStatus();
  if (!S_ISSOCK(info.st_mode)) {
    return Failed(path, "something that is no socket stands there", EEXIST);
  }
  if (unlink(path.c_str()) != 0) return Failed(path, "remove a dead daemon's socket", errno);
  return absl::OkStatus();
}

// Lets clients in at the bound socket `listener`, as `access` says.
absl::Status Open(const std::string& path, int listener, const SocketAccess& access) {
  if (!access.group.empty()) {
    CHORUS_ASSIGN_OR_RETURN(const gid_t gid, FindGroup(path, access.group));
    if (chown(path.c_str(), static_cast<uid_t>(-1), gid) != 0) {
      return Failed(path, absl::StrCat("give it to group ", access.group), errno);
    }
  }
  if (listen(listener, SOMAXCONN) != 0) return Failed(path, "listen", errno);
  if (chmod(path.c_str(), access.mode) != 0) return Failed(path, "chmod", errno);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int type, const SocketAccess& access) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return Failed(path, "bind", ENAMETOOLONG);
  memcpy(address.sun_path, path.data(), path.size());
  CHORUS_RETURN_IF_ERROR(RemoveStale(path));
  UniqueFd listener(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid()) return Failed(path, "socket", errno);
  RefuseDescriptors(listener.get());
  // A bound socket takes its mode from the descriptor's: nobody gets in before chmod below.
  if (fchmod(listener.get(), 0) != 0) return Failed(path, "fchmod", errno);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return Failed(path, "bind", errno);
  }
  const absl::Status status = Open(path, listener.get(), access);
  if (!status.ok()) {
    unlink(path.c_str());
    return status;
  }
  return listener;
}

absl::Status CheckSocketDirectory(const std::string& directory, uid_t uid) {
  struct stat info = {};
  if (lstat(directory.c_str(), &info) == 0 && S_ISLNK(info.st_mode)) {
    CHORUS_RETURN_IF_ERROR(CheckOwner(directory, "a link", info, uid));
  }
  if (stat(directory.c_str(), &info) != 0) {
    return MakeError(Reason::kCannotServe,
                     absl::StrCat("directory ", directory, ": ", strerror(errno)));
  }
  return CheckOwner(directory, "a directory", info, uid);
}

absl::StatusOr<PeerCredentials> GetPeerCredentials(int socket) {
  ucred credentials = {};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return MakeError(Reason::kInternal, absl::StrCat("SO_PEERCRED: ", strerror(errno)));
  }
  PeerCredentials peer;
  peer.pid = credentials.pid;
  peer.uid = credentials.uid;
  peer.gid = credentials.gid;
  return peer;
}

}  // namespace chorus::server
