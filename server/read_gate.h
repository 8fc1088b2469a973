// Looks at what gRPC reads of its connections before gRPC does.
//
// gRPC 1.51 makes a call of each stream that a client opens, and answers each PING and SETTINGS,
// however many there are: what it asks of its clients it does not enforce, and what it has to send
// waits in its memory for those that do not read. (Measured with twenty connections of a client
// that writes HTTP/2 by hand, which closes each stream as soon as it has opened it: 14 MB that it
// sends are 1.2 GB.) A message it takes whole, whatever length is declared before it, and looks
// then whether it is too long. No option of the library bounds that. So this program has a recvmsg
// of its own, by which gRPC reads: it counts the frames of the descriptors that a gate has been set
// on, and a connection that asks for more than it may is ended. All others are the system's affair.
//
// Where a client can send descriptors (client_socket.h) it looks before it reads, which copies the
// bytes twice, and leaves them where they are: what the system drops as gRPC reads keeps its
// threads, of which there are few, waiting for as long as the client likes.
//
// Threads: thread-safe; of one descriptor one thread reads at a time. Ownership: a gate is its
// maker's, the descriptor gRPC's. Errors: a connection that asks for too much, or sends
// descriptors, is shut down; its reader gets ECONNRESET.
#ifndef CHORUS_SERVER_READ_GATE_H_
#define CHORUS_SERVER_READ_GATE_H_

#include <atomic>
#include <functional>

#include "server/http2_frames.h"

namespace chorus::server {

class ReadGate {
 public:
  // Whether the connection may ask for these; one that may not has ended. It is called by the
  // thread that reads, which may hold locks of gRPC's. Of Counts::later_messages it is asked some
  // at a time, so that most reads of a stream ask nobody.
  using MayAsk = std::function<bool(const Http2Frames::Counts& counts)>;

  // The largest descriptor with a gate.
  static constexpr int kMaxDescriptor = (1 << 20) - 1;

  // What is read from `fd`, at most kMaxDescriptor, goes through this gate. Nothing has been read
  // from it yet, and nothing reads from it any more when the gate goes. One that is set on the same
  // number takes its place.
  ReadGate(int fd, const Http2Frames::Limits& limits, MayAsk may_ask);
  ~ReadGate();
  ReadGate(const ReadGate&) = delete;
  ReadGate& operator=(const ReadGate&) = delete;

  // Of the connection's streams, those that its client has not ended; on any thread.
  int open() const { return open_.load(std::memory_order_relaxed); }

 private:
  friend struct ReadGates;
  const int fd_;
  const bool may_bring_descriptors_;
  const MayAsk may_ask_;
  Http2Frames frames_;
  int later_ = 0;  // Counts::later_messages that nobody has been asked for
  std::atomic<int> open_{0};
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_READ_GATE_H_
