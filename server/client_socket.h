// Sockets by which clients have come, and how they are closed.
//
// A client may send a descriptor over a Unix socket and close its own. Then the thread that drops
// the packet drops the last reference to that file, and the system lets that thread wait for the
// file's end: at a TCP socket that lingers (SO_LINGER), and whose peer does not read, for as long
// as the client likes. From Linux 6.16 on a socket can refuse descriptors. Before that nobody reads
// what may bring some without having looked (read_gate.h, core/transport/attach/packet.h), and
// accepted Unix sockets are closed by a thread that has nothing else to do: nobody waits for it,
// and a signal takes it out of such a wait. It is that of the process, and ends with it.
//
// Threads: functions are thread-safe. Ownership: as said. Errors: none.
#ifndef CHORUS_SERVER_CLIENT_SOCKET_H_
#define CHORUS_SERVER_CLIENT_SOCKET_H_

#include <utility>

#include "core/base/unique_fd.h"

namespace chorus::server {

// Those that `listener` accepts, and it, get no descriptors from now on, where the system can
// refuse them: a client that sends one gets EPERM.
void RefuseDescriptors(int listener);
// Whether the other end of `socket` can have sent some.
bool MayBringDescriptors(int socket);

// An accepted socket. Its end waits for nothing, whatever the client has sent.
class ClientSocket {
 public:
  ClientSocket() = default;
  explicit ClientSocket(UniqueFd socket) : socket_(std::move(socket)) {}
  ClientSocket(ClientSocket&&) noexcept = default;
  ClientSocket& operator=(ClientSocket&& other) noexcept {
    std::swap(socket_, other.socket_);
    return *this;
  }
  // Nothing is read by another descriptor of it any more.
  ~ClientSocket();

  int get() const { return socket_.get(); }
  bool valid() const { return socket_.valid(); }

 private:
  UniqueFd socket_;
};

// Of sockets whose clients have gone so many may wait to be closed. While there are more nobody
// accepts: a client makes the daemon hold no more by coming again and again.
inline constexpr int kMaxUnclosed = 64;
// Whether there are more. The thread that closes them waits for none of them any longer then: a
// caller that asks often enough gets false.
bool TooManyUnclosed();

}  // namespace chorus::server

#endif  // CHORUS_SERVER_CLIENT_SOCKET_H_
