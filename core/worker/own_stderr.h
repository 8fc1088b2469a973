// Standard error, for a process that must not wait for whoever reads it.
//
// It is often shared: the daemon's, and with it a terminal, a pipe, or the socket of a system's
// log. Where the reader has stopped, whoever writes would wait; and O_NONBLOCK would be for all who
// share it. So this process gets one of its own: what is there, opened once more, where the system
// does that (not a socket, nor a pipe of another user's), or else a pipe, from which a thread
// carries lines on. What there is no room for is left out. A file makes nobody wait, and stays.
//
// Threads: one of its own, where it carries lines on. Ownership: standard error, from its making to
// its end; one at a time. Errors: none; where no pipe is to be had, standard error stays as it is.
#ifndef CHORUS_CORE_WORKER_OWN_STDERR_H_
#define CHORUS_CORE_WORKER_OWN_STDERR_H_

#include <memory>

namespace chorus::worker {

class OwnStderr {
 public:
  OwnStderr();
  // Waits until what was written has been carried on, a second at most. What is written behind it
  // is lost.
  ~OwnStderr();
  OwnStderr(const OwnStderr&) = delete;
  OwnStderr& operator=(const OwnStderr&) = delete;

 private:
  struct Carrier;
  // Shared with its thread: one that hangs in a write is left behind. Null: there is none.
  std::shared_ptr<Carrier> carrier_;
};

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_OWN_STDERR_H_
