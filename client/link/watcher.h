// Tells when a daemon is gone: its end of a connection closes.
//
// One thread a process sleeps on all connections; it uses no processor while nothing happens. A
// forked child has none: its sessions are inert, and sessions of its own start another.
//
// Threads: any.
// Ownership: the caller keeps the socket open as long as the Watch. Errors: WatchForHangup says
//   what it gives where it cannot watch.
#ifndef CHORUS_CLIENT_LINK_WATCHER_H_
#define CHORUS_CLIENT_LINK_WATCHER_H_

#include <functional>
#include <memory>

namespace chorus {
namespace internal {

// Watches until it is destroyed. Its destructor waits for a callback that is under way; it must not
// be called by it.
class Watch {
 public:
  virtual ~Watch() = default;
};

// `on_hangup` is called once, on the watcher's thread, when the other end of `socket_fd` closes.
// Null when the system has no descriptors left: then nobody watches.
std::unique_ptr<Watch> WatchForHangup(int socket_fd, std::function<void()> on_hangup);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_LINK_WATCHER_H_
