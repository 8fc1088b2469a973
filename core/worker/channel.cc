#include "core/worker/channel.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/transport/doorbell.h"

namespace chorus::worker {
namespace {

// A message is its pieces, one behind the other.
constexpr uint16_t kLastPiece = 1;
constexpr uint16_t kPiece = 2;

SessionMemoryOptions RingOptions() {
  SessionMemoryOptions options;
  options.ring_bytes = 1 << 20;
  options.tensor_slots = 1;
  return options;
}

absl::Status Gone() { return MakeError(Reason::kDeviceLost, "the other end has gone"); }

absl::StatusOr<UniqueFd> Duplicate(int fd) {
  UniqueFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) {
    return MakeError(Reason::kOutOfMemory, absl::StrCat("a descriptor: ", strerror(errno)));
  }
  return copy;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Channel>> Channel::Create(size_t longest, Descriptors* other) {
  CHORUS_ASSIGN_OR_RETURN(auto out, CreateSessionMemory(RingOptions()));
  CHORUS_ASSIGN_OR_RETURN(auto in, CreateSessionMemory(RingOptions()));
  CHORUS_ASSIGN_OR_RETURN(UniqueFd own_event, CreateWakeEvent());
  CHORUS_ASSIGN_OR_RETURN(UniqueFd other_event, CreateWakeEvent());
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return MakeError(Reason::kOutOfMemory, absl::StrCat("a pair of sockets: ", strerror(errno)));
  }
  UniqueFd socket(sockets[0]);
  UniqueFd other_socket(sockets[1]);
  Descriptors other_descriptors;
  other_descriptors[0] = in->TakeFd();
  other_descriptors[1] = out->TakeFd();
  CHORUS_ASSIGN_OR_RETURN(other_descriptors[2], Duplicate(other_event.get()));
  CHORUS_ASSIGN_OR_RETURN(other_descriptors[3], Duplicate(own_event.get()));
  other_descriptors[4] = std::move(other_socket);
  *other = std::move(other_descriptors);
  return std::unique_ptr<Channel>(new Channel(std::move(out), std::move(in), std::move(own_event),
                                              std::move(other_event), std::move(socket), longest));
}

absl::StatusOr<std::unique_ptr<Channel>> Channel::Open(Descriptors descriptors, size_t longest) {
  CHORUS_ASSIGN_OR_RETURN(auto out, MapSessionMemory(descriptors[0].get()));
  CHORUS_ASSIGN_OR_RETURN(auto in, MapSessionMemory(descriptors[1].get()));
  return std::unique_ptr<Channel>(new Channel(std::move(out), std::move(in),
                                              std::move(descriptors[2]), std::move(descriptors[3]),
                                              std::move(descriptors[4]), longest));
}

Channel::Channel(std::unique_ptr<SessionMemory> out, std::unique_ptr<SessionMemory> in,
                 UniqueFd own_event, UniqueFd other_event, UniqueFd socket, size_t longest)
    : out_(std::move(out)),
      in_(std::move(in)),
      own_event_(std::move(own_event)),
      other_event_(std::move(other_event)),
      socket_(std::move(socket)),
      longest_(longest),
      writer_(out_.get()),
      reader_(in_.get()),
      spin_(SpinClock::Real()) {}

// --- Sending ------------------------------------------------------------------------------------

absl::StatusOr<bool> Channel::TrySendPiece(absl::string_view piece, bool is_last) {
  frame_.resize(kFrameHeaderBytes);
  const FrameStart start{static_cast<uint32_t>(kFrameHeaderBytes + piece.size()),
                         is_last ? kLastPiece : kPiece, kFrameVersion};
  std::memcpy(&frame_[0], &start, sizeof(start));
  frame_.append(piece.data(), piece.size());
  CHORUS_ASSIGN_OR_RETURN(const bool is_sent, writer_.TryWrite(frame_));
  if (is_sent && writer_.must_ring()) RingWakeEvent(other_event_.get());
  return is_sent;
}

absl::StatusOr<bool> Channel::TrySend(absl::string_view message) {
  if (message.size() > writer_.max_frame_bytes() - kFrameHeaderBytes) return false;
  return TrySendPiece(message, /*is_last=*/true);
}

absl::Status Channel::Send(absl::string_view message, const std::function<absl::Status()>& go_on) {
  const size_t most = writer_.max_frame_bytes() - kFrameHeaderBytes;
  do {
    const absl::string_view piece = message.substr(0, most);
    message.remove_prefix(piece.size());
    for (;;) {
      CHORUS_ASSIGN_OR_RETURN(const bool is_sent, TrySendPiece(piece, message.empty()));
      if (is_sent) break;
      CHORUS_RETURN_IF_ERROR(go_on());
      CHORUS_RETURN_IF_ERROR(Sleep(/*until_rung=*/false, 0));
      constexpr absl::Duration kTurn = absl::Milliseconds(100);
      const absl::Status status =
          writer_.WaitForSpace(kFrameHeaderBytes + piece.size(), SteadyNow() + kTurn);
      if (!status.ok() && ErrorOf(status).reason != Reason::kTransportTimeout) return status;
    }
  } while (!message.empty());
  return absl::OkStatus();
}

// --- Receiving ----------------------------------------------------------------------------------

absl::StatusOr<bool> Channel::Receive(std::string* message) {
  for (;;) {
    absl::string_view frame;
    switch (reader_.Poll(&received_, &frame)) {
      case SubmissionRingReader::Result::kEmpty:
        return false;
      case SubmissionRingReader::Result::kMalformed:
        return MakeError(Reason::kDeviceLost, reader_.status().message());
      case SubmissionRingReader::Result::kFrame:
        break;
    }
    FrameStart start;
    std::memcpy(&start, frame.data(), sizeof(start));
    frame.remove_prefix(kFrameHeaderBytes);
    const bool is_piece = start.kind == kLastPiece || (start.kind == kPiece && !frame.empty());
    if (!is_piece || frame.size() > longest_ - pieces_.size()) {
      return MakeError(Reason::kDeviceLost,
                       absl::StrCat("a piece of kind ", start.kind, " and ", frame.size(),
                                    " bytes behind ", pieces_.size(), " of at most ", longest_));
    }
    pieces_.append(frame.data(), frame.size());
    if (start.kind == kPiece) continue;
    message->swap(pieces_);
    pieces_.clear();
    return true;
  }
}

absl::Status Channel::Sleep(bool until_rung, int timeout_ms) {
  pollfd polls[2] = {{socket_.get(), POLLIN, 0}, {own_event_.get(), POLLIN, 0}};
  if (poll(polls, until_rung ? 2 : 1, timeout_ms) <= 0) return absl::OkStatus();
  if (polls[0].revents != 0) return Gone();  // nobody ever writes there
  uint64_t times = 0;
  const ssize_t bytes_read = read(own_event_.get(), &times, sizeof(times));
  static_cast<void>(bytes_read);  // it is readable, and this is its only reader
  return absl::OkStatus();
}

absl::Status Channel::Wait(absl::Duration at_most) {
  const auto ready = [this] {
    return reader_.HasFrame() || woken_.load(std::memory_order_acquire);
  };
  absl::Status status;
  if (!spin_.Spin(ready)) {
    const absl::Time start = SteadyNow();
    // Rung after this store, whatever comes is seen by the poll.
    if (reader_.StopLooking()) {
      if (!woken_.load(std::memory_order_seq_cst)) {
        const int64_t millis = std::min<int64_t>(absl::ToInt64Milliseconds(at_most), 1000);
        status = Sleep(/*until_rung=*/true, static_cast<int>(std::max<int64_t>(millis, 0)));
      }
      reader_.LookAgain();
    }
    spin_.WaitEnded(absl::ToInt64Nanoseconds(SteadyNow() - start));
  }
  woken_.store(false, std::memory_order_relaxed);
  // What the other end has sent before it went is still taken.
  return reader_.HasFrame() ? absl::OkStatus() : status;
}

void Channel::Wake() {
  woken_.store(true, std::memory_order_seq_cst);
  RingWakeEvent(own_event_.get());
}

}  // namespace chorus::worker
