#include "core/transport/attach/protocol.h"

#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/types/span.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "core/transport/attach/lingering_socket.h"
#include "core/transport/attach/packet.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

std::vector<AttachRequest> Requests() {
  std::vector<AttachRequest> requests(8);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].kind = static_cast<AttachRequest::Kind>(i + 1);
    requests[i].id = 0xfffffff0u + static_cast<uint32_t>(i);
  }
  requests[0].oldest_version = -1;
  requests[0].newest_version = 9;
  requests[1].nonce = std::string(kAttachTokenBytes, '\xfe');
  requests[3].bytes = std::numeric_limits<int64_t>::min();
  requests[4].arena = ArenaId(3);
  requests[5].arena = ArenaId(-1);
  requests[6].arena = ArenaId(std::numeric_limits<int32_t>::max());
  return requests;
}

AttachReply FullReply() {
  AttachReply reply;
  reply.id = 7;
  reply.status = MakeError(Reason::kSessionLost, "gone");
  reply.version = 1;
  reply.secret = std::string(kAttachTokenBytes, 's');
  reply.incarnation = int64_t{1} << 40;
  reply.daemon_version = "chorusd 0.1.0";
  reply.arena = ArenaId(4);
  reply.bytes = 4096;
  return reply;
}

TEST(AttachProtocolTest, MessagesSurvive) {
  for (const AttachRequest& request : Requests()) {
    const absl::StatusOr<AttachRequest> back = DecodeAttachRequest(EncodeAttachRequest(request));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_TRUE(*back == request) << static_cast<int>(request.kind);
  }
  for (const AttachReply& reply : {AttachReply(), FullReply()}) {
    const absl::StatusOr<AttachReply> back = DecodeAttachReply(EncodeAttachReply(reply));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_TRUE(*back == reply);
    EXPECT_EQ(ErrorOf(back->status).reason, ErrorOf(reply.status).reason);
  }
}

// protocol_fuzz begins with these: what does not decode shows nothing of the decoders.
TEST(AttachProtocolTest, TheCorpusHasAMessageOfEachKind) {
  std::set<std::string> kinds;
  for (const auto& entry :
       std::filesystem::directory_iterator("core/transport/attach/fuzz_corpus")) {
    const std::string name = entry.path().filename();
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    if (name.rfind("reply", 0) == 0) {
      const absl::StatusOr<AttachReply> reply = DecodeAttachReply(bytes);
      ASSERT_TRUE(reply.ok()) << name << ": " << reply.status();
      EXPECT_EQ(EncodeAttachReply(*reply), bytes) << name;
      kinds.insert(reply->status.ok() ? "reply" : "error");
    } else {
      const absl::StatusOr<AttachRequest> request = DecodeAttachRequest(bytes);
      ASSERT_TRUE(request.ok()) << name << ": " << request.status();
      kinds.insert(std::to_string(static_cast<int>(request->kind)));
    }
  }
  for (const AttachRequest& request : Requests()) {
    const std::string bytes = EncodeAttachRequest(request);
    EXPECT_EQ(kinds.erase(std::to_string(static_cast<int>(request.kind))), 1u)
        << absl::BytesToHexString(bytes);
  }
  EXPECT_EQ(kinds, (std::set<std::string>{"error", "reply"}))
      << absl::BytesToHexString(EncodeAttachReply(FullReply()));
}

TEST(AttachProtocolTest, EveryOtherSizeIsRefused) {
  for (const AttachRequest& request : Requests()) {
    const std::string bytes = EncodeAttachRequest(request);
    for (size_t size = 0; size < bytes.size(); ++size) {
      const absl::StatusOr<AttachRequest> cut = DecodeAttachRequest(bytes.substr(0, size));
      EXPECT_FALSE(cut.ok()) << size;
      EXPECT_EQ(ErrorOf(cut.status()).reason, Reason::kMalformed);
    }
    EXPECT_FALSE(DecodeAttachRequest(bytes + "x").ok());
  }
  const std::string reply = EncodeAttachReply(FullReply());
  for (size_t size = 0; size < reply.size(); ++size) {
    EXPECT_FALSE(DecodeAttachReply(reply.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DecodeAttachReply(reply + "x").ok());
}

TEST(AttachProtocolTest, RandomBytesDoNoHarm) {
  std::mt19937 random(20240607);  // a fixed seed: a failure names its message
  const std::string sound = EncodeAttachReply(FullReply());
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = sound;
    for (int flips = 1 + static_cast<int>(random() % 4); flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    const absl::StatusOr<AttachReply> reply = DecodeAttachReply(bytes);
    if (!reply.ok()) {
      EXPECT_EQ(ErrorOf(reply.status()).reason, Reason::kMalformed);
    }
    DecodeAttachRequest(bytes).status().IgnoreError();
  }
}

struct Sockets {
  Sockets() {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    a.Reset(fds[0]);
    b.Reset(fds[1]);
  }
  UniqueFd a;
  UniqueFd b;
};

TEST(PacketTest, CarriesBytesAndDescriptors) {
  Sockets sockets;
  ASSERT_TRUE(SendPacket(sockets.a.get(), "hello", {0, sockets.a.get()}).ok());
  const auto packet = ReceivePacket(sockets.b.get(), 100, 2);
  ASSERT_TRUE(packet.ok()) << packet.status();
  ASSERT_TRUE(packet->has_value());
  EXPECT_EQ((*packet)->bytes, "hello");
  ASSERT_EQ((*packet)->fds.size(), 2u);
  EXPECT_GE((*packet)->fds[0].get(), 0);
  EXPECT_FALSE((*packet)->sender.has_value());
  const auto nothing = ReceivePacket(sockets.b.get(), 100, 2);
  ASSERT_TRUE(nothing.ok());
  EXPECT_FALSE(nothing->has_value());
}

TEST(PacketTest, KeepsUnwantedDescriptorsOut) {
  Sockets sockets;
  const int lowest = dup(0);  // the number that the next descriptor gets
  close(lowest);
  for (const int wanted : {1, 0}) {
    ASSERT_TRUE(SendPacket(sockets.a.get(), "x", {0, 0, 0, 0, 0, 0, 0, 0}).ok());
    {
      const auto packet = ReceivePacket(sockets.b.get(), 100, wanted);
      EXPECT_EQ(packet.ok(), wanted > 0) << packet.status();
      if (packet.ok()) {
        EXPECT_EQ((*packet)->fds.size(), static_cast<size_t>(wanted));
      }
    }
    const int next = dup(0);
    EXPECT_EQ(next, lowest);
    close(next);
  }
}

// With room for the sender's credentials and without.
TEST(PacketTest, WhoeverWantsNoDescriptorsWaitsForTheEndOfNone) {
  for (const int passes_credentials : {0, 1}) {
    const Sockets sockets;
    EXPECT_EQ(setsockopt(sockets.b.get(), SOL_SOCKET, SO_PASSCRED, &passes_credentials,
                         sizeof(passes_credentials)),
              0);
    LingeringSocket lingering;
    ASSERT_TRUE(SendPacket(sockets.a.get(), "first", {}).ok());
    ASSERT_EQ(lingering.SendOver(sockets.a.get()), 0);
    EXPECT_TRUE(IsDoneThough(absl::MakeSpan(&lingering, 1), [&] {
      const auto first = ReceivePacket(sockets.b.get(), 100, 0);
      EXPECT_TRUE(first.ok() && (*first)->bytes == "first") << first.status();
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(ErrorOf(ReceivePacket(sockets.b.get(), 100, 0).status()).reason,
                  Reason::kMalformed);
      }
    }));
  }
}

TEST(PacketTest, NamesTheSender) {
  Sockets sockets;
  const int on = 1;
  ASSERT_EQ(setsockopt(sockets.b.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)), 0);
  ASSERT_TRUE(SendPacket(sockets.a.get(), "x", {}).ok());
  const auto packet = ReceivePacket(sockets.b.get(), 100, 0);
  ASSERT_TRUE(packet.ok());
  EXPECT_EQ((*packet)->sender, getpid());
}

TEST(PacketTest, TellsTooLongFromGone) {
  Sockets sockets;
  ASSERT_TRUE(SendPacket(sockets.a.get(), std::string(101, 'x'), {}).ok());
  EXPECT_EQ(ReceivePacket(sockets.b.get(), 100, 0).status().code(),
            absl::StatusCode::kInvalidArgument);
  sockets.a.Reset();
  EXPECT_EQ(ReceivePacket(sockets.b.get(), 100, 0).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(SendPacket(sockets.b.get(), "x", {}).code(), absl::StatusCode::kUnavailable);
}

// What a daemon says last is there for a client that had asked something at that moment.
TEST(PacketTest, TheLastWordOfAPeerThatHasNotReadAllIsHeard) {
  Sockets sockets;
  ASSERT_TRUE(SendPacket(sockets.b.get(), "a question", {}).ok());
  ASSERT_TRUE(SendPacket(sockets.a.get(), "goodbye", {}).ok());
  sockets.a.Reset();
  const auto packet = ReceivePacket(sockets.b.get(), 100, 0);
  ASSERT_TRUE(packet.ok()) << packet.status();
  ASSERT_TRUE(packet->has_value());
  EXPECT_EQ((*packet)->bytes, "goodbye");
  EXPECT_EQ(ReceivePacket(sockets.b.get(), 100, 0).status().code(), absl::StatusCode::kUnavailable);
}

TEST(PacketTest, AFullSocketIsAnErrorAndNoWait) {
  Sockets sockets;
  absl::Status status;
  for (int i = 0; i < 100000 && status.ok(); ++i) {
    status = SendPacket(sockets.a.get(), std::string(1000, 'x'), {});
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace chorus
