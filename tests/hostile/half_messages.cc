#include "tests/hostile/half_messages.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/attach/daemon_socket.h"
#include "core/base/error.h"
#include "server/testing/http2_client.h"
#include "tests/fault/raw_session.h"

namespace chorus {
namespace hostile {
namespace {

using server::BigEndian;
using server::Frame;
using server::FrameHead;
using server::FrameType;
using server::HeaderField;
using server::HeadersOf;
using server::kAck;
using server::kContinuation;
using server::kData;
using server::kEndHeaders;
using server::kEndStream;
using server::kFrameHead;
using server::kGoAway;
using server::kHeaders;
using server::kInitialWindowSize;
using server::kPing;
using server::kPreface;
using server::kReset;
using server::kSettings;
using server::kWindowUpdate;

constexpr int64_t kInitialWindow = 65535;  // until the daemon's settings are acknowledged

uint32_t Number(absl::string_view bytes) {
  uint32_t number = 0;
  for (const char byte : bytes) number = number << 8 | static_cast<uint8_t>(byte);
  return number;
}

// For poll().
int PatienceMillis() {
  return static_cast<int>(absl::ToInt64Milliseconds(fault::RawSession::kPatience));
}

class Connection {
 public:
  explicit Connection(int socket) : socket_(socket) {}

  // False from all of these: the connection has ended, or nothing has come for long.
  bool Send(FrameType type, uint8_t flags, uint32_t stream, absl::string_view content) {
    // Not in the middle of another frame, where what it answers may have come.
    return SendBytes(std::exchange(answers_, "") + Frame(type, flags, stream, content));
  }
  bool SendBytes(absl::string_view bytes) { return TakeBytes(&bytes); }
  // Leaves those that have not been taken.
  bool TakeBytes(absl::string_view* bytes) {
    while (!bytes->empty()) {
      while (Receive()) {
      }
      const ssize_t sent = send(socket_, bytes->data(), bytes->size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        bytes->remove_prefix(static_cast<size_t>(sent));
      } else if (!Wait(POLLIN | POLLOUT)) {
        return false;
      }
    }
    return true;
  }
  // As much of `content` as may be sent now, in frames of `frame` bytes: `*sent` bytes; none in a
  // stream that the daemon has ended.
  bool SendData(uint32_t stream, absl::string_view content, size_t frame, size_t* sent) {
    *sent = 0;
    int64_t& granted = granted_[stream];
    const auto may = static_cast<size_t>(std::max<int64_t>(
        0, std::min({static_cast<int64_t>(content.size()), window_, kInitialWindow + granted})));
    if (may == 0 || ended(stream)) return SendBytes("");
    window_ -= static_cast<int64_t>(may);
    granted -= static_cast<int64_t>(may);
    const std::string answers = std::exchange(answers_, "");
    std::string frames = answers;
    for (size_t at = 0; at < may; at += frame) {
      frames += Frame(kData, 0, stream, content.substr(at, std::min(frame, may - at)));
    }
    absl::string_view left = frames;
    const bool open = TakeBytes(&left);
    size_t taken = frames.size() - left.size();
    taken -= std::min(answers.size(), taken);
    // But for the last one they are all as long.
    const size_t begun = taken % (kFrameHead + frame);
    *sent = taken / (kFrameHead + frame) * frame + begun - std::min(kFrameHead, begun);
    return open;
  }
  // Whether the daemon has ended a call, as far as what has come tells.
  bool ended(uint32_t stream) const { return ended_.count(stream) > 0; }
  // Until what the peer has said to all of this has come. (gRPC does not like pings.)
  bool Settle() {
    const int64_t acks = acks_;
    if (!Send(kSettings, 0, 0, "")) return false;
    while (acks_ == acks) {
      if (!Receive() && !Wait(POLLIN)) return false;
    }
    return true;
  }

 private:
  // Takes what has come. False: nothing has.
  bool Receive() {
    char bytes[kMaxFrame];
    const ssize_t got = closed_ ? 0 : recv(socket_, bytes, sizeof(bytes), MSG_DONTWAIT);
    closed_ |= got == 0;
    if (got <= 0) return false;
    received_.append(bytes, static_cast<size_t>(got));
    while (TakeFrame()) {
    }
    return true;
  }
  bool Wait(short events) {
    pollfd fd{socket_, events, 0};
    return !closed_ && poll(&fd, 1, PatienceMillis()) > 0 &&
           (fd.revents & (POLLERR | POLLHUP)) == 0;
  }

  bool TakeFrame() {
    if (received_.size() < kFrameHead) return false;
    const std::string head = received_.substr(0, kFrameHead);
    const size_t size = Number(absl::string_view(head).substr(0, 3));
    if (received_.size() < kFrameHead + size) return false;
    const std::string content = received_.substr(kFrameHead, size);
    received_.erase(0, kFrameHead + size);
    const uint32_t stream = Number(absl::string_view(head).substr(5, 4));
    const bool is_answer = (head[4] & kAck) != 0;
    switch (static_cast<FrameType>(head[3])) {
      case kWindowUpdate:
        (stream == 0 ? window_ : granted_[stream]) += Number(content);
        break;
      case kSettings:
        acks_ += is_answer;
        break;
      case kPing:
        if (!is_answer) answers_ += Frame(kPing, kAck, 0, content);
        break;
      case kGoAway:
        closed_ = true;
        break;
      case kHeaders:
        if ((head[4] & kEndStream) != 0) ended_.insert(stream);
        break;
      case kReset:
        ended_.insert(stream);
        break;
      default:
        break;
    }
    return true;
  }

  const int socket_;
  std::string received_;
  std::string answers_;  // that go with the next frame
  // What may be sent: of the connection; of each stream what it has been granted, less what it has
  // sent.
  int64_t window_ = kInitialWindow;
  std::map<uint32_t, int64_t> granted_;
  std::set<uint32_t> ended_;  // streams, by the daemon
  int64_t acks_ = 0;          // of settings
  bool closed_ = false;
};

absl::StatusOr<UniqueFd> Connect(const std::string& path) {
  return ConnectToDaemon(path, SOCK_STREAM, {}, fault::RawSession::Deadline());
}

// Of one that reads nothing: all of `frames`. UNAVAILABLE: the connection was ended, or nobody
// takes them.
absl::Status SendUnread(const UniqueFd& connection, absl::string_view frames) {
  while (!frames.empty()) {
    pollfd fd{connection.get(), POLLOUT, 0};
    const int ready = poll(&fd, 1, PatienceMillis());
    const ssize_t sent =
        ready <= 0 ? -1 : send(fd.fd, frames.data(), frames.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent <= 0) return absl::UnavailableError("the connection was ended, or is not read");
    frames.remove_prefix(static_cast<size_t>(sent));
  }
  return absl::OkStatus();
}

uint32_t StreamOf(size_t call) { return static_cast<uint32_t>(2 * call + 1); }

// Many calls, streams of commands first, each with as much of `content` as it takes, in frames of
// `frame` bytes; but of `silent` calls behind the streams nothing more than their headers.
absl::StatusOr<Report> SendEverywhere(const std::string& path, const std::string& content,
                                      size_t frame, size_t silent, UniqueFd* connection) {
  constexpr size_t kStreams = 56;
  constexpr size_t kCalls = 600;
  CHORUS_ASSIGN_OR_RETURN(*connection, Connect(path));
  Connection http(connection->get());
  bool open = http.SendBytes(kPreface) && http.Send(kSettings, 0, 0, "");
  for (size_t i = 0; open && i < kCalls; ++i) {
    open = http.Send(
        kHeaders, kEndHeaders, StreamOf(i),
        HeadersOf(i < kStreams ? "/chorus.v1.Log/Commands" : "/chorus.v1.Tensors/WriteStaging"));
  }
  // So that what ends it later is what follows.
  open = open && http.Settle();
  std::vector<size_t> sent(kCalls);
  // What it grants comes when it likes.
  for (int idle = 0; open && idle < 20; ++idle) {
    for (size_t i = 0; open && i < kCalls; ++i) {
      if (i >= kStreams && i < kStreams + silent) continue;
      size_t now = 0;
      open = http.SendData(StreamOf(i), absl::string_view(content).substr(sent[i], kMaxFrame),
                           frame, &now);
      sent[i] += now;
      if (now > 0) idle = 0;
    }
    open = open && http.Settle();
  }
  Report report;
  for (const size_t bytes : sent) report.amount += static_cast<int64_t>(bytes);
  for (size_t i = 0; open && i < kCalls; ++i) {
    const bool is_silent = i >= kStreams && i < kStreams + silent;
    if (!http.ended(StreamOf(i)) && (is_silent || sent[i] > 0)) ++report.done;
  }
  return report;
}

}  // namespace

absl::StatusOr<Report> SendHalfMessages(const std::string& path, size_t frame,
                                        UniqueFd* connection) {
  constexpr size_t kMessage = 256 << 10;
  // Not compressed, and as long.
  return SendEverywhere(path,
                        BigEndian(0, 1) + BigEndian(kMessage, 4) + std::string(kMessage - 1, '\0'),
                        frame, 0, connection);
}

absl::StatusOr<Report> SendEmptyMessages(const std::string& path, size_t messages, size_t frame,
                                         UniqueFd* connection) {
  // Four of a connection are read at a time, each for ten seconds.
  constexpr size_t kSilent = 40;
  return SendEverywhere(path, std::string(5 * messages, '\0'), frame, kSilent, connection);
}

absl::StatusOr<Report> SendDeclared(const std::string& path, UniqueFd* connection) {
  constexpr int64_t kMessage = int64_t{1} << 30;
  CHORUS_ASSIGN_OR_RETURN(*connection, Connect(path));
  Connection http(connection->get());
  std::string content = BigEndian(0, 1) + BigEndian(kMessage, 4) + std::string(kMaxFrame - 5, '\0');
  bool open = http.SendBytes(kPreface) && http.Send(kSettings, 0, 0, "") &&
              http.Send(kHeaders, kEndHeaders, StreamOf(0), HeadersOf("/chorus.v1.Log/Commands")) &&
              http.Settle();
  int64_t sent = 0;
  for (int idle = 0; open && idle < 20 && sent < kMessage; ++idle) {
    size_t now = 0;
    open = http.SendData(StreamOf(0), content, kMaxFrame, &now) && (now > 0 || http.Settle());
    content.assign(now > 0 ? kMaxFrame : content.size(), '\0');
    if (now > 0) idle = 0;
    sent += static_cast<int64_t>(now);
  }
  Report report;
  report.done = sent >> 20;
  report.amount = sent;
  return report;
}

absl::StatusOr<Report> SendHalfHeaders(const std::string& path,
                                       std::vector<UniqueFd>* connections) {
  constexpr size_t kConnections = 500;
  // The smallest fields, and a frame of which half is missing.
  std::string fields;
  while (fields.size() < kMaxFrame / 2) fields += HeaderField("a", "b");
  const std::string frames = kPreface + Frame(kSettings, 0, 0, "") +
                             FrameHead(kMaxFrame, kHeaders, kEndHeaders, 1) + fields;
  Report report;
  for (size_t i = 0; i < kConnections; ++i) {
    CHORUS_ASSIGN_OR_RETURN(UniqueFd connection, Connect(path));
    if (SendUnread(connection, frames).ok()) ++report.done;
    connections->push_back(std::move(connection));
  }
  return report;
}

absl::StatusOr<Report> SendUnreadHalves(const std::string& path,
                                        std::vector<UniqueFd>* connections) {
  constexpr size_t kConnections = 8;
  constexpr size_t kAnswers = 60;  // of more than a thousand bytes
  constexpr size_t kHalves = 4;
  // Their flow is no limit.
  std::string frames =
      kPreface + Frame(kSettings, 0, 0, BigEndian(kInitialWindowSize, 2) + BigEndian(1 << 30, 4)) +
      Frame(kWindowUpdate, 0, 0, BigEndian(1 << 30, 4));
  size_t call = 0;
  for (; call < kAnswers; ++call) {
    frames +=
        Frame(kHeaders, kEndHeaders, StreamOf(call), HeadersOf("/chorus.v1.Capabilities/Get"));
    frames += Frame(kData, kEndStream, StreamOf(call), BigEndian(0, 5));
  }
  // These are read behind the others, whose answers fill the socket.
  for (; call < kAnswers + kHalves; ++call) {
    frames += Frame(kHeaders, kEndHeaders, StreamOf(call), HeadersOf("/chorus.v1.Log/Submit"));
  }
  Report report;
  for (size_t i = 0; i < kConnections; ++i) {
    CHORUS_ASSIGN_OR_RETURN(connections->emplace_back(), Connect(path));
    CHORUS_RETURN_IF_ERROR(SendUnread(connections->back(), frames));
    report.done += kHalves;
  }
  return report;
}

absl::StatusOr<Report> SendFlood(const std::string& path, FloodKind kind,
                                 std::vector<UniqueFd>* connections) {
  constexpr size_t kConnections = 20;
  constexpr size_t kFrames = 60000;
  const std::string headers = HeadersOf(kind == FloodKind::kUnknownCalls ? "/chorus.v1.Nobody/HasIt"
                                                                         : "/chorus.v1.Log/Submit");
  std::string frames = kPreface + Frame(kSettings, 0, 0, "");
  if (kind == FloodKind::kHeaders) frames += Frame(kHeaders, 0, StreamOf(0), headers);
  const std::string content = kind == FloodKind::kHeaders ? std::string(1000, '\x82') : "";
  for (size_t i = 0; i < kFrames; ++i) {
    switch (kind) {
      case FloodKind::kCalls:
      case FloodKind::kUnknownCalls:
        frames += Frame(kHeaders, kEndHeaders | kEndStream, StreamOf(i), headers);
        break;
      case FloodKind::kClosedCalls:
        frames += Frame(kHeaders, kEndHeaders, StreamOf(i), headers);
        frames += Frame(kReset, 0, StreamOf(i), BigEndian(8, 4));
        break;
      case FloodKind::kPings:
        frames += Frame(kPing, 0, 0, BigEndian(i, 8));
        break;
      case FloodKind::kSettings:
        frames += Frame(kSettings, 0, 0, "");
        break;
      case FloodKind::kHeaders:
        frames += Frame(kContinuation, 0, StreamOf(0), content);
        break;
    }
  }
  struct Sender {
    UniqueFd connection;
    absl::string_view left;
  };
  std::vector<Sender> senders(kConnections);
  for (Sender& sender : senders) {
    CHORUS_ASSIGN_OR_RETURN(sender.connection, Connect(path));
    sender.left = frames;
  }
  // Until none is taken any more: the connections have ended, or are not read.
  for (int idle = 0; idle < 20; ++idle) {
    std::vector<pollfd> open;
    for (Sender& sender : senders) {
      ssize_t sent = 0;
      while (!sender.left.empty() &&
             (sent = send(sender.connection.get(), sender.left.data(), sender.left.size(),
                          MSG_NOSIGNAL | MSG_DONTWAIT)) > 0) {
        sender.left.remove_prefix(static_cast<size_t>(sent));
        idle = 0;
      }
      if (sent < 0 && errno == EAGAIN) open.push_back({sender.connection.get(), POLLOUT, 0});
    }
    if (open.empty()) break;
    poll(open.data(), open.size(), 20);
  }
  Report report;
  for (Sender& sender : senders) {
    report.done += sender.left.empty() ? 0 : 1;
    connections->push_back(std::move(sender.connection));
  }
  return report;
}

}  // namespace hostile
}  // namespace chorus
