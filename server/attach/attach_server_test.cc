// Both ends of the attach socket against a live daemon, and clients that do not keep to the
// protocol.

#include "server/attach/attach_server.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <future>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/attach/attach_client.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "core/node/node_loop.h"
#include "core/runtime/devices.h"
#include "core/transport/attach/lingering_socket.h"
#include "core/transport/attach/packet.h"
#include "core/transport/attach/protocol.h"
#include "core/transport/doorbell.h"
#include "core/transport/session_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/tenant_log.h"
#include "server/testing/descriptor_passing.h"
#include "server/testing/rpc.h"
#include "server/testing/test_daemon.h"
#include "server/unix_listener.h"

namespace chorus::server {
namespace {

using testing::HasSubstr;

absl::Time Soon() { return SteadyNow() + absl::Seconds(20); }

std::unique_ptr<AttachClient> Attach(const TestDaemon& daemon) {
  absl::StatusOr<std::unique_ptr<AttachClient>> client =
      AttachClient::Connect(daemon.attach_path(), Soon());
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

absl::Status OpenWith(RpcRank* rank, const std::string& token) {
  v1::OpenSessionRequest request;
  request.set_attach_token(token);
  request.set_label("attached");
  return rank->Open(request);
}

// A client without manners.
class RawClient {
 public:
  explicit RawClient(const TestDaemon& daemon) : RawClient(daemon.attach_path()) {}
  explicit RawClient(const std::string& path)
      : socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, path.data(), path.size());
    EXPECT_EQ(connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }

  int fd() const { return socket_.get(); }
  // Whether the daemon closes the connection.
  bool AwaitHangup() const {
    pollfd entry = {socket_.get(), POLLRDHUP, 0};
    return poll(&entry, 1, 20000) == 1;
  }
  void Send(const std::string& bytes, const std::vector<int>& fds = {}) {
    // The daemon may have closed already.
    SendPacket(socket_.get(), bytes, fds).IgnoreError();
  }
  void Send(const AttachRequest& request) { Send(EncodeAttachRequest(request)); }

  // The next answer; UNAVAILABLE when the daemon has closed, DEADLINE_EXCEEDED when nothing comes.
  absl::StatusOr<AttachReply> Receive() {
    pollfd entry = {socket_.get(), POLLIN, 0};
    if (poll(&entry, 1, 20000) <= 0) return absl::DeadlineExceededError("no answer");
    CHORUS_ASSIGN_OR_RETURN(const absl::optional<Packet> packet,
                            ReceivePacket(socket_.get(), kMaxAttachMessageBytes, 2));
    if (!packet.has_value()) return absl::DeadlineExceededError("no packet");
    return DecodeAttachReply(packet->bytes);
  }

  // Reads an error, then the end of the connection.
  void ExpectRefused(absl::StatusCode code, const std::string& text) {
    const absl::StatusOr<AttachReply> reply = Receive();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->status.code(), code) << reply->status;
    EXPECT_THAT(std::string(reply->status.message()), HasSubstr(text));
    EXPECT_EQ(Receive().status().code(), absl::StatusCode::kUnavailable);
  }

 private:
  UniqueFd socket_;
};

AttachRequest Hello(int32_t oldest = kAttachVersion, int32_t newest = kAttachVersion) {
  AttachRequest hello;
  hello.kind = AttachRequest::Kind::kHello;
  hello.id = 1;
  hello.oldest_version = oldest;
  hello.newest_version = newest;
  return hello;
}

AttachRequest Proof(const std::string& nonce) {
  AttachRequest proof;
  proof.kind = AttachRequest::Kind::kProof;
  proof.id = 2;
  proof.nonce = nonce;
  return proof;
}

// What the descriptors of this process are of.
std::vector<std::string> Descriptors() {
  std::vector<std::string> found;
  DIR* const folder = opendir("/proc/self/fd");
  while (const dirent* const entry = readdir(folder)) {
    char what[256] = {};
    if (readlinkat(dirfd(folder), entry->d_name, what, sizeof(what) - 1) > 0) found.push_back(what);
  }
  closedir(folder);
  return found;
}

int OpenDescriptors() { return static_cast<int>(Descriptors().size()); }

int OpenPidfds() {
  int count = 0;
  for (const std::string& what : Descriptors()) count += what.find("pidfd") != std::string::npos;
  return count;
}

// A server without a daemon around it, so that a test can do what only a daemon does.
class AttachServerTest : public testing::Test {
 protected:
  void Listen() {
    absl::StatusOr<UniqueFd> listener = ListenUnix(path_, SOCK_SEQPACKET, SocketAccess());
    ASSERT_TRUE(listener.ok()) << listener.status();
    listeners_.push_back(*std::move(listener));
  }
  void Serve(const AttachOptions& options = AttachOptions()) {
    if (listeners_.empty()) Listen();
    server_ = std::make_unique<AttachServer>(std::move(listeners_), options, &loop_, &log_);
  }

  // On the node thread, behind what was posted before.
  void AskNode(const node::NodeLoop::Task& task) {
    std::promise<void> done;
    loop_.PostBehindAll([&](node::LocalNode& node, absl::Time now) {
      task(node, now);
      done.set_value();
    });
    done.get_future().wait();
  }
  // The node thread does nothing until the promise is kept.
  std::promise<void> Occupy() {
    std::promise<void> go;
    loop_.PostOwn([gone = std::make_shared<std::future<void>>(go.get_future())](
                      node::LocalNode&, absl::Time) { gone->wait(); });
    return go;
  }
  // Through the handshake, with a session.
  void Bind(RawClient* client) {
    client->Send(Hello());
    const absl::StatusOr<AttachReply> challenge = client->Receive();
    ASSERT_TRUE(challenge.ok()) << challenge.status();
    client->Send(Proof(challenge->secret));
    const absl::StatusOr<AttachReply> welcome = client->Receive();
    ASSERT_TRUE(welcome.ok()) << welcome.status();
    const absl::StatusOr<AttachServer::Client> claimed = server_->Claim(welcome->secret, geteuid());
    ASSERT_TRUE(claimed.ok()) << claimed.status();
    AskNode([&](node::LocalNode& node, absl::Time now) {
      node::OpenSessionRequest open;
      open.tenant = "uid:0";
      open.attached = true;
      const absl::StatusOr<node::SessionInfo> session = node.OpenSession(open, now);
      ASSERT_TRUE(session.ok()) << session.status();
      EXPECT_TRUE(server_->Bind(claimed->connection, session->id));
      bound_ = session->id;
    });
  }
  // The thread has looked at every connection so many times when it has answered.
  void AwaitTurns(int turns) {
    for (int i = 0; i < turns; ++i) {
      RawClient client(path_);
      client.Send(Hello());
      ASSERT_TRUE(client.Receive().ok());
    }
  }

  TestDaemon daemon_;  // for its folder and its backend
  const std::string path_ = daemon_.folder() + "/other.sock";
  std::vector<UniqueFd> listeners_;
  TenantLog log_{nullptr};
  node::NodeLoop loop_{node::NodeOptions(), DevicesOf(daemon_.backend())};
  std::unique_ptr<AttachServer> server_;
  SessionId bound_;  // the last one
};

// What a client has sent and the daemon has not read.
int Unread(const RawClient& client) {
  int bytes = -1;
  EXPECT_EQ(ioctl(client.fd(), SIOCOUTQ, &bytes), 0);
  return bytes;
}

AttachRequest Ask(AttachRequest::Kind kind, uint32_t id) {
  AttachRequest request;
  request.kind = kind;
  request.id = id;
  request.bytes = 4096;
  request.arena = ArenaId(99);
  return request;
}

TEST_F(AttachServerTest, AClientIsReadNoFurtherThanItsRequestsAreAnswered) {
  Serve();
  auto client = std::make_unique<RawClient>(path_);
  Bind(client.get());
  std::promise<void> go = Occupy();
  // More than are read at a time, and so few that this client may be slow to read the answers.
  constexpr uint32_t kRequests = 20;
  for (uint32_t id = 1; id <= kRequests; ++id) {
    client->Send(Ask(AttachRequest::Kind::kReleaseStaging, id));
  }
  AwaitTurns(20);
  EXPECT_GT(Unread(*client), 0);
  // Each is answered in the end.
  go.set_value();
  for (uint32_t id = 1; id <= kRequests; ++id) {
    const absl::StatusOr<AttachReply> reply = client->Receive();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->id, id);
  }
  // One that goes while it is not read is gone.
  go = Occupy();
  for (uint32_t id = 1; id <= kRequests; ++id) {
    client->Send(Ask(AttachRequest::Kind::kReleaseStaging, id));
  }
  AwaitTurns(20);
  EXPECT_TRUE(server_->Attached(getpid()));
  client.reset();
  EXPECT_TRUE(Eventually([&] { return !server_->Attached(getpid()); }));
  go.set_value();
}

// A process stands behind no other user's, however many calls those have.
TEST_F(AttachServerTest, WhatItAsksOfTheNodeHasATurnOfItsUsers) {
  Serve();
  RawClient client(path_);
  Bind(&client);
  std::promise<void> go = Occupy();
  std::promise<void> answer;
  const std::shared_future<void> answered = answer.get_future().share();
  for (int i = 0; i < 600; ++i) {
    loop_.Post("another", [answered, i](node::LocalNode&, absl::Time) {
      if (i != 10) return;
      EXPECT_EQ(answered.wait_for(std::chrono::seconds(30)), std::future_status::ready);
    });
  }
  client.Send(Ask(AttachRequest::Kind::kReleaseStaging, 1));
  EXPECT_TRUE(Eventually([&] { return Unread(client) == 0; }));
  AwaitTurns(2);
  go.set_value();
  const absl::StatusOr<AttachReply> reply = client.Receive();
  EXPECT_TRUE(reply.ok()) << reply.status();
  answer.set_value();
}

// It waits behind its own user's calls, and behind nobody else's and nothing of the node's own.
TEST_F(AttachServerTest, ThatAProcessHasLetGoIsToldInATurnOfItsUsers) {
  Serve();
  auto client = std::make_unique<RawClient>(path_);
  Bind(client.get());
  std::promise<void> go = Occupy();
  int of_node = 0;
  int of_another = 0;
  for (int i = 0; i < 600; ++i) {
    loop_.PostOwn([&](node::LocalNode&, absl::Time) { ++of_node; });
    loop_.Post("another", [&](node::LocalNode&, absl::Time) { ++of_another; });
  }
  client.reset();
  EXPECT_TRUE(Eventually([&] { return !server_->Attached(getpid()); }));
  AwaitTurns(1);
  std::promise<void> looked;
  loop_.Post(TenantOf(geteuid()), [&](node::LocalNode& node, absl::Time now) {
    const absl::StatusOr<node::SessionInfo> told = node.Describe(bound_, now);
    EXPECT_TRUE(told.ok() && told->state == node::SessionState::kDetached);
    // Behind one other of its own.
    EXPECT_LE(of_node, 2);
    EXPECT_LE(of_another, 2);
    looked.set_value();
  });
  go.set_value();
  looked.get_future().wait();
  AskNode([](node::LocalNode&, absl::Time) {});  // behind all the others
}

TEST_F(AttachServerTest, DescriptorsThatAreNotReadAreFew) {
  Serve();
  RawClient client(path_);
  Bind(&client);
  using Kind = AttachRequest::Kind;
  for (const Kind kind : {Kind::kSessionMemory, Kind::kCreateStaging}) {
    constexpr uint32_t kRequests = 10;
    for (uint32_t id = 1; id <= kRequests; ++id) client.Send(Ask(kind, id));
    // Behind the last of them.
    client.Send(Ask(Kind::kReleaseStaging, kRequests + 1));
    EXPECT_TRUE(Eventually([&] { return Unread(client) == 0; }));
    AskNode([](node::LocalNode&, absl::Time) {});
    const uint32_t let_through = kind == Kind::kSessionMemory ? 2 : 4;
    for (uint32_t id = 1; id <= kRequests; ++id) {
      const absl::StatusOr<AttachReply> reply = client.Receive();
      ASSERT_TRUE(reply.ok()) << reply.status();
      EXPECT_EQ(reply->id, id);
      EXPECT_EQ(reply->status.code(),
                id <= let_through ? absl::StatusCode::kOk : absl::StatusCode::kResourceExhausted)
          << id << ": " << reply->status;
    }
    EXPECT_EQ(client.Receive()->id, kRequests + 1);
  }
  // A client that reads gets more, however much.
  for (uint32_t id = 1; id <= 20; ++id) {
    client.Send(Ask(Kind::kSessionMemory, id));
    const absl::StatusOr<AttachReply> reply = client.Receive();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(reply->status.ok()) << reply->status;
  }
}

// What it has not read is on its way, with its descriptors, after its connection was closed.
TEST_F(AttachServerTest, AClosedConnectionCountsUntilItsClientHasRead) {
  AttachOptions options;
  options.max_connections = 8;
  options.open_timeout = absl::Milliseconds(40);  // the thread looks four times in that
  Serve(options);
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 7; ++i) {
    clients.push_back(std::make_unique<RawClient>(path_));
    RawClient& client = *clients.back();
    client.Send(Hello());
    const absl::StatusOr<AttachReply> challenge = client.Receive();
    ASSERT_TRUE(challenge.ok()) << challenge.status();
    client.Send(Proof(challenge->secret));
    EXPECT_TRUE(client.AwaitHangup());  // it opens no session
  }
  EXPECT_EQ(OpenPidfds(), 0);
  RawClient(path_).ExpectRefused(absl::StatusCode::kResourceExhausted, "the caller has 7");
  // One reads, another goes.
  EXPECT_TRUE(clients[0]->Receive().ok());
  clients[1].reset();
  for (const bool more : {true, true}) {
    EXPECT_TRUE(Eventually([&] {
      clients.push_back(std::make_unique<RawClient>(path_));
      clients.back()->Send(Hello());
      const absl::StatusOr<AttachReply> reply = clients.back()->Receive();
      return reply.ok() && reply->status.ok() && more;
    }));
  }
}

TEST_F(AttachServerTest, ACrowdAtTheDoorDoesNotKeepItFromThoseWhoAreIn) {
  Listen();
  // All that are at fault leave at their first word: there is room for the last one when it is let
  // in, unless all of them are let in before any is listened to.
  constexpr int kCrowd = 400;
  std::vector<std::unique_ptr<RawClient>> crowd;
  for (int i = 0; i < kCrowd; ++i) {
    crowd.push_back(std::make_unique<RawClient>(path_));
    crowd.back()->Send("let me in");
  }
  RawClient last(path_);
  last.Send(Hello());
  AttachOptions options;
  options.max_connections = 256;
  Serve(options);
  const absl::StatusOr<AttachReply> reply = last.Receive();
  EXPECT_TRUE(reply.ok() && reply->status.ok()) << reply.status();
}

// As before Linux 6.16: in the handshake, over the bound, before it is let in, as it ends.
TEST_F(AttachServerTest, NobodyWaitsForADescriptorThatAClientHasSent) {
  Listen();
  LetDescriptorsCome(path_);
  AttachOptions options;
  options.max_connections = 8;
  Serve(options);
  constexpr size_t kTries = 100;
  std::vector<LingeringSocket> lingering(2 + kTries);
  std::vector<std::unique_ptr<RawClient>> crowd;
  EXPECT_TRUE(IsDoneThough(absl::MakeSpan(lingering), [&] {
    RawClient first(path_);
    first.Send(Hello());
    EXPECT_TRUE(first.Receive().ok());
    EXPECT_EQ(lingering[0].SendToReader(first.fd()), 0);
    first.ExpectRefused(absl::StatusCode::kInvalidArgument, "without descriptors");
    std::promise<void> go = Occupy();
    for (int i = 0; i < 7; ++i) {
      crowd.push_back(std::make_unique<RawClient>(path_));
      crowd.back()->Send(Hello());
      EXPECT_TRUE(crowd.back()->Receive().ok());
    }
    // The eighth may be refused before it sends: until one is in time.
    bool sent = false;
    for (size_t i = 0; i < kTries && !sent; ++i) {
      RawClient eighth(path_);
      sent = lingering[2 + i].SendToReader(eighth.fd()) == 0;
      EXPECT_TRUE(eighth.AwaitHangup());
    }
    EXPECT_TRUE(sent);
    crowd.pop_back();
    AwaitTurns(1);
    go.set_value();
    EXPECT_EQ(lingering[1].SendToReader(crowd.front()->fd()), 0);
    server_->Stop();
  }));
}

TEST_F(AttachServerTest, WhenItHasStoppedTheNodeMayStillAsk) {
  Serve();
  RawClient client(path_);
  Bind(&client);
  server_->Stop();
  EXPECT_TRUE(client.AwaitHangup());
  EXPECT_FALSE(server_->Attached(getpid()));
  EXPECT_FALSE(server_->Bind(1 << 16, SessionId(1)));
  EXPECT_EQ(ErrorOf(server_->Claim("token", geteuid()).status()).reason, Reason::kNotAttached);
}

TEST(AttachTest, AnAttachedSessionGetsItsMemory) {
  TestDaemon daemon;
  const auto client = Attach(daemon);
  ASSERT_NE(client, nullptr);
  EXPECT_EQ(client->token().size(), kAttachTokenBytes);
  EXPECT_EQ(client->incarnation(), daemon.daemon().incarnation());
  EXPECT_THAT(client->daemon_version(), HasSubstr("chorusd"));
  struct stat doorbell;
  ASSERT_EQ(fstat(client->doorbell_fd(), &doorbell), 0);
  EXPECT_GT(doorbell.st_size, 0);
  // The doorbell is the daemon's to write.
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, client->doorbell_fd(), 0),
            MAP_FAILED);

  // Not before the session is there.
  EXPECT_EQ(ErrorOf(client->SessionMemory(Soon()).status()).reason, Reason::kNotAttached);
  RpcRank rank(daemon.Connect());
  ASSERT_TRUE(OpenWith(&rank, client->token()).ok());
  absl::StatusOr<AttachClient::SessionMemoryFds> fds = client->SessionMemory(Soon());
  ASSERT_TRUE(fds.ok()) << fds.status();
  const auto memory = MapSessionMemory(fds->memory.get());
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_TRUE(client->ConfirmMemory(Soon()).ok());
  const uint64_t one = 1;
  EXPECT_EQ(write(fds->wake.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));

  const auto sessions = rank.ListSessions();
  ASSERT_EQ(sessions->sessions_size(), 1);
  EXPECT_TRUE(sessions->sessions(0).attached());
  EXPECT_EQ(sessions->sessions(0).pid(), getpid());
  EXPECT_FALSE(sessions->sessions(0).has_lease_left());
}

TEST(AttachTest, StagingIsSealedOnceItIsConfirmedAndResultsAreReadOnly) {
  TestDaemon daemon;
  const auto client = Attach(daemon);
  RpcRank rank(daemon.Connect());
  ASSERT_TRUE(OpenWith(&rank, client->token()).ok());
  const auto fds = client->SessionMemory(Soon());
  ASSERT_TRUE(fds.ok());
  EXPECT_EQ(ErrorOf(client->ConfirmMemory(Soon())).reason, Reason::kMalformed) << "not sealed yet";
  const auto memory = MapSessionMemory(fds->memory.get());
  ASSERT_TRUE(memory.ok());
  ASSERT_TRUE(client->ConfirmMemory(Soon()).ok());

  const absl::StatusOr<AttachClient::Staging> staging = client->CreateStaging(10000, Soon());
  ASSERT_TRUE(staging.ok()) << staging.status();
  EXPECT_GE(staging->bytes, 10000);
  void* const mapped = mmap(nullptr, static_cast<size_t>(staging->bytes), PROT_READ | PROT_WRITE,
                            MAP_SHARED, staging->fd.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_NE(ftruncate(staging->fd.get(), 0), 0);  // its size is sealed from the start
  ASSERT_TRUE(client->ConfirmStaging(*staging, Soon()).ok());
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, staging->fd.get(), 0),
            MAP_FAILED);
  for (int i = 0; i < 100; ++i) static_cast<float*>(mapped)[i] = static_cast<float>(i);

  v1::Command command;
  command.set_sequence(1);
  v1::CreateTensor* create = command.mutable_create_tensor();
  create->mutable_id()->set_slot(3);
  create->mutable_id()->set_generation(1);
  create->mutable_type()->set_dtype(v1::DTYPE_F32);
  create->mutable_type()->add_dims(100);
  create->mutable_source()->mutable_external()->set_arena(staging->arena.value());
  ASSERT_TRUE(rank.Submit(command).ok());

  const TensorSlot& slot = (*memory)->tensors()[3];
  ASSERT_EQ(slot.word.load() & 0xff, static_cast<uint64_t>(TensorState::kReady));
  const absl::StatusOr<AttachClient::ResultArenaFd> result =
      client->ResultArena(ArenaId(slot.arena.load()), Soon());
  ASSERT_TRUE(result.ok()) << result.status();
  const size_t size = static_cast<size_t>(result->bytes);
  EXPECT_EQ(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, result->fd.get(), 0),
            MAP_FAILED);
  const char* const bytes =
      static_cast<const char*>(mmap(nullptr, size, PROT_READ, MAP_SHARED, result->fd.get(), 0));
  ASSERT_NE(bytes, MAP_FAILED);
  float value;
  memcpy(&value, bytes + slot.offset.load() + 42 * sizeof(float), sizeof(value));
  EXPECT_EQ(value, 42);

  EXPECT_TRUE(client->ReleaseStaging(staging->arena, Soon()).ok());
  EXPECT_EQ(client->ReleaseStaging(staging->arena, Soon()).code(), absl::StatusCode::kNotFound);
  AttachClient::Staging unknown;
  unknown.arena = ArenaId(-7);
  unknown.fd = UniqueFd(dup(staging->fd.get()));
  EXPECT_EQ(client->ConfirmStaging(unknown, Soon()).code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(client->ResultArena(ArenaId(12345), Soon()).ok());
  EXPECT_FALSE(client->CreateStaging(-1, Soon()).ok());
  EXPECT_FALSE(client->CreateStaging(int64_t{1} << 60, Soon()).ok());
  // A refused request is no reason to hang up.
  EXPECT_TRUE(client->CreateStaging(4096, Soon()).ok());
}

TEST(AttachTest, ATokenIsGoodOnce) {
  TestDaemon daemon;
  const auto client = Attach(daemon);
  RpcRank first(daemon.Connect());
  RpcRank second(daemon.Connect());
  std::string wrong = client->token();
  wrong[5] = static_cast<char>(wrong[5] ^ 1);
  EXPECT_EQ(OpenWith(&second, wrong).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(OpenWith(&first, client->token()).ok());
  EXPECT_EQ(OpenWith(&second, client->token()).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_NE(RandomToken(), RandomToken());
}

TEST(AttachTest, AnAttachedCallerOfAnotherUidMayWrite) {
  TestDaemon daemon([](DaemonOptions* o) { o->trusted_uid = geteuid() + 1; });
  const auto client = Attach(daemon);
  RpcRank rank(daemon.Connect());
  EXPECT_EQ(rank.Open().code(), absl::StatusCode::kPermissionDenied);
  ASSERT_TRUE(OpenWith(&rank, client->token()).ok());
  EXPECT_TRUE(rank.Submit(rank.RegisterCommand(1, 1, 2)).ok());
}

TEST(AttachTest, ATokenIsOfItsUid) {
  TestDaemon daemon;  // for its folder
  // A server of its own, so that the test can claim as somebody else.
  const std::string path = daemon.folder() + "/other.sock";
  absl::StatusOr<UniqueFd> listener = ListenUnix(path, SOCK_SEQPACKET, SocketAccess());
  ASSERT_TRUE(listener.ok()) << listener.status();
  std::vector<UniqueFd> listeners;
  listeners.push_back(*std::move(listener));
  node::NodeLoop loop(node::NodeOptions(), DevicesOf(daemon.backend()));
  TenantLog log(nullptr);
  AttachServer server(std::move(listeners), AttachOptions(), &loop, &log);
  const auto client = AttachClient::Connect(path, Soon());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(server.Claim((*client)->token(), geteuid() + 1).status().code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(server.Claim((*client)->token(), geteuid()).ok());
}

TEST(AttachTest, AnotherVersionIsRefusedWithBothVersions) {
  TestDaemon daemon;
  RawClient newer(daemon);
  newer.Send(Hello(17, 23));
  newer.ExpectRefused(absl::StatusCode::kUnimplemented, "17 to 23");
  RawClient older(daemon);
  older.Send(Hello(-3, 0));
  older.ExpectRefused(absl::StatusCode::kUnimplemented, "speaks 2");
  RawClient wider(daemon);
  wider.Send(Hello(-3, 9));
  const absl::StatusOr<AttachReply> reply = wider.Receive();
  ASSERT_TRUE(reply.ok());
  EXPECT_TRUE(reply->status.ok()) << reply->status;
  EXPECT_EQ(reply->version, kAttachVersion);
}

TEST(AttachTest, WhoBreaksTheProtocolLosesTheConnectionAndNobodyElseNotices) {
  TestDaemon daemon;
  const auto good = Attach(daemon);
  RpcRank rank(daemon.Connect());
  ASSERT_TRUE(OpenWith(&rank, good->token()).ok());
  const int before = OpenDescriptors();

  RawClient garbage(daemon);
  garbage.Send(std::string("GET / HTTP/1.1\r\n\r\n"));
  garbage.ExpectRefused(absl::StatusCode::kInvalidArgument, "magic");
  RawClient large(daemon);
  large.Send(std::string(kMaxAttachMessageBytes + 1, 'x'));
  large.ExpectRefused(absl::StatusCode::kInvalidArgument, "at most");
  RawClient impatient(daemon);
  AttachRequest memory;
  memory.kind = AttachRequest::Kind::kSessionMemory;
  impatient.Send(memory);
  impatient.ExpectRefused(absl::StatusCode::kInvalidArgument, "Hello");
  RawClient liar(daemon);
  liar.Send(Proof(std::string(kAttachTokenBytes, 'n')));
  liar.ExpectRefused(absl::StatusCode::kInvalidArgument, "Hello");
  RawClient guesser(daemon);
  guesser.Send(Hello());
  ASSERT_TRUE(guesser.Receive().ok());
  guesser.Send(Proof(std::string(kAttachTokenBytes, 'n')));
  guesser.ExpectRefused(absl::StatusCode::kPermissionDenied, "proof");
  RawClient twice(daemon);
  twice.Send(Hello());
  ASSERT_TRUE(twice.Receive().ok());
  twice.Send(Hello());
  twice.ExpectRefused(absl::StatusCode::kInvalidArgument, "Hello");
  {
    // Hundreds of descriptors do not arrive in the daemon (this process, in this test), also where
    // the system lets them come.
    LetDescriptorsCome(daemon.attach_path());
    RawClient giver(daemon);
    // The daemon may have closed before the others.
    EXPECT_TRUE(SendPacket(giver.fd(), "junk", {0, 1, 2, 0, 1, 2, 0, 1}).ok());
    for (int i = 1; i < 100; ++i) giver.Send("junk", {0, 1, 2, 0, 1, 2, 0, 1});
    // What it had still to say is thrown away, so the end may come as a reset.
    EXPECT_TRUE(Eventually([&] { return absl::IsUnavailable(giver.Receive().status()); }));
    // One that stops in the middle, one that never begins.
    RawClient half(daemon);
    half.Send(Hello());
    ASSERT_TRUE(half.Receive().ok());
    RawClient silent(daemon);
  }
  EXPECT_TRUE(good->CreateStaging(4096, Soon()).ok());
  EXPECT_NE(Attach(daemon), nullptr);
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() <= before + 40; }));
}

TEST(AttachTest, AClientThatDoesNotReadItsAnswersIsDropped) {
  TestDaemon daemon;
  RawClient client(daemon);
  client.Send(Hello());
  const absl::StatusOr<AttachReply> challenge = client.Receive();
  ASSERT_TRUE(challenge.ok());
  client.Send(Proof(challenge->secret));
  const absl::StatusOr<AttachReply> welcome = client.Receive();
  ASSERT_TRUE(welcome.ok()) << welcome.status();
  RpcRank rank(daemon.Connect());
  ASSERT_TRUE(OpenWith(&rank, welcome->secret).ok());
  AttachRequest ask;
  ask.kind = AttachRequest::Kind::kReleaseStaging;
  ask.arena = ArenaId(99);
  EXPECT_TRUE(Eventually([&] {
    client.Send(ask);
    pollfd entry = {client.fd(), POLLRDHUP, 0};
    return poll(&entry, 1, 0) > 0;
  }));
  EXPECT_NE(Attach(daemon), nullptr);
}

TEST(AttachTest, AForkedChildCannotSpeakForItsParent) {
  TestDaemon daemon;
  RawClient client(daemon);
  client.Send(Hello());
  const absl::StatusOr<AttachReply> challenge = client.Receive();
  ASSERT_TRUE(challenge.ok()) << challenge.status();
  const std::string proof = EncodeAttachRequest(Proof(challenge->secret));
  const pid_t child = fork();
  if (child == 0) {
    const ssize_t sent = send(client.fd(), proof.data(), proof.size(), MSG_NOSIGNAL);
    _exit(sent == static_cast<ssize_t>(proof.size()) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  client.ExpectRefused(absl::StatusCode::kPermissionDenied, "after fork");
}

TEST(AttachTest, AClosedConnectionDetachesTheSessionUntilTheGraceEnds) {
  TestDaemon daemon([](DaemonOptions* o) { o->node.detach_grace = absl::Milliseconds(300); });
  auto client = Attach(daemon);
  RpcRank rank(daemon.Connect());
  ASSERT_TRUE(OpenWith(&rank, client->token()).ok());
  RpcRank observer(daemon.Connect());
  EXPECT_EQ(observer.ListSessions()->sessions(0).state(), v1::SESSION_STATE_ACTIVE);
  client.reset();
  EXPECT_TRUE(Eventually([&] {
    const auto sessions = observer.ListSessions();
    return sessions->sessions_size() == 1 &&
           sessions->sessions(0).state() == v1::SESSION_STATE_DETACHED;
  }));
  EXPECT_TRUE(Eventually([&] { return observer.ListSessions()->sessions_size() == 0; }));
  EXPECT_EQ(ErrorOf(rank.Renew()).reason, Reason::kSessionLost);
}

TEST(AttachTest, ADeadProcessIsSeenThoughItsForkedChildHoldsTheSocket) {
  TestDaemon daemon;
  int to_parent[2];
  ASSERT_EQ(pipe(to_parent), 0);
  const std::string path = daemon.attach_path();
  const pid_t child = fork();
  if (child == 0) {
    setpgid(0, 0);
    // Only plain system calls and the attach client from here on: gRPC does not survive a fork.
    const auto client = AttachClient::Connect(path, Soon());
    if (!client.ok()) _exit(1);
    if (fork() == 0) {
      // Holds the socket open until the test ends.
      close(to_parent[1]);
      for (;;) pause();
    }
    const std::string& token = (*client)->token();
    if (write(to_parent[1], token.data(), token.size()) < 0) _exit(2);
    for (;;) pause();
  }
  char token[kAttachTokenBytes];
  ASSERT_EQ(read(to_parent[0], token, sizeof(token)), static_cast<ssize_t>(sizeof(token)));
  RpcRank rank(daemon.Connect());
  ASSERT_TRUE(OpenWith(&rank, std::string(token, sizeof(token))).ok());
  ASSERT_EQ(rank.ListSessions()->sessions(0).pid(), child);
  const absl::Time killed = SteadyNow();
  kill(child, SIGKILL);
  EXPECT_TRUE(
      Eventually([&] { return rank.ListSessions()->sessions_size() == 0; }, absl::Seconds(5)));
  std::cout << "known after " << SteadyNow() - killed << std::endl;
  kill(-child, SIGKILL);  // the grandchild
  waitpid(child, nullptr, 0);
  close(to_parent[0]);
  close(to_parent[1]);
}

TEST(AttachTest, AConnectionThatOpensNoSessionIsClosed) {
  TestDaemon daemon([](DaemonOptions* o) { o->attach_open_timeout = absl::Milliseconds(100); });
  const auto client = Attach(daemon);
  ASSERT_NE(client, nullptr);
  pollfd entry = {client->socket_fd(), POLLRDHUP, 0};
  EXPECT_EQ(poll(&entry, 1, 20000), 1);
  RpcRank rank(daemon.Connect());
  EXPECT_EQ(OpenWith(&rank, client->token()).code(), absl::StatusCode::kPermissionDenied);
}

TEST(AttachTest, AConnectionThatSaysNothingOrHalfOfItIsClosed) {
  TestDaemon daemon;  // for its folder
  const std::string path = daemon.folder() + "/other.sock";
  absl::StatusOr<UniqueFd> listener = ListenUnix(path, SOCK_SEQPACKET, SocketAccess());
  ASSERT_TRUE(listener.ok()) << listener.status();
  std::vector<UniqueFd> listeners;
  listeners.push_back(*std::move(listener));
  AttachOptions options;
  options.handshake_timeout = absl::Milliseconds(100);
  node::NodeLoop loop(node::NodeOptions(), DevicesOf(daemon.backend()));
  TenantLog log(nullptr);
  AttachServer server(std::move(listeners), options, &loop, &log);
  const RawClient silent(path);
  RawClient half(path);
  half.Send(Hello());
  EXPECT_TRUE(half.Receive().ok());
  EXPECT_TRUE(silent.AwaitHangup());
  EXPECT_TRUE(half.AwaitHangup());
}

TEST(AttachTest, AConnectionWhoseSessionCannotBeOpenedIsClosed) {
  TestDaemon daemon([](DaemonOptions* o) { o->attach_open_timeout = absl::Milliseconds(200); });
  const auto client = Attach(daemon);
  ASSERT_NE(client, nullptr);
  RpcRank rank(daemon.Connect());
  v1::OpenSessionRequest request;
  request.set_attach_token(client->token());
  request.set_device_count(5);
  EXPECT_FALSE(rank.Open(request).ok());
  pollfd entry = {client->socket_fd(), POLLRDHUP, 0};
  EXPECT_EQ(poll(&entry, 1, 20000), 1);
}

TEST(AttachTest, AConnectionWhoseSessionHasEndedIsClosed) {
  TestDaemon daemon([](DaemonOptions* o) { o->attach_open_timeout = absl::Milliseconds(400); });
  const auto client = Attach(daemon);
  const auto other = Attach(daemon);
  RpcRank rank(daemon.Connect());
  ASSERT_TRUE(OpenWith(&rank, client->token()).ok());
  RpcRank stays(daemon.Connect());
  ASSERT_TRUE(OpenWith(&stays, other->token()).ok());
  ASSERT_TRUE(rank.Close().ok());
  pollfd entry = {client->socket_fd(), POLLRDHUP, 0};
  EXPECT_EQ(poll(&entry, 1, 20000), 1);
  EXPECT_TRUE(other->CreateStaging(4096, Soon()).ok());
}

// A daemon remembers it for those that ask why.
TEST(AttachTest, AConnectionWhoseSessionWasEndedForMalformedBytesIsClosed) {
  TestDaemon daemon([](DaemonOptions* o) { o->attach_open_timeout = absl::Milliseconds(400); });
  const auto client = Attach(daemon);
  RpcRank rank(daemon.Connect());
  ASSERT_TRUE(OpenWith(&rank, client->token()).ok());
  const auto fds = client->SessionMemory(Soon());
  ASSERT_TRUE(fds.ok()) << fds.status();
  const auto memory = MapSessionMemory(fds->memory.get());
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_TRUE(client->ConfirmMemory(Soon()).ok());
  // More bytes than a ring has are said to be in it.
  (*memory)->control().client.tail += uint64_t{1} << 32;
  RingWakeEvent(fds->wake.get());
  pollfd entry = {client->socket_fd(), POLLRDHUP, 0};
  EXPECT_EQ(poll(&entry, 1, 20000), 1);
  EXPECT_EQ(ErrorOf(rank.Renew()).reason, Reason::kSessionLost);
}

TEST(AttachTest, OneUidLeavesConnectionsToOthers) {
  TestDaemon daemon([](DaemonOptions* o) { o->max_connections = 8; });
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 7; ++i) {
    clients.push_back(std::make_unique<RawClient>(daemon));
    clients.back()->Send(Hello());
    EXPECT_TRUE(clients.back()->Receive().ok());
  }
  RawClient eighth(daemon);
  eighth.ExpectRefused(absl::StatusCode::kResourceExhausted, "the caller has 7");
  clients.pop_back();
  EXPECT_TRUE(Eventually([&] {
    RawClient again(daemon);
    again.Send(Hello());
    const absl::StatusOr<AttachReply> reply = again.Receive();
    return reply.ok() && reply->status.ok();
  }));
}

// One that comes to it after the daemon has passed it by.
TEST(AttachTest, ANodeThreadThatIsLateOpensASessionForNobody) {
  std::promise<void> stuck;
  std::promise<void> go;
  bool first = true;
  TestDaemon daemon([&](DaemonOptions* o) {
    o->node.log_failure = [&](absl::string_view, absl::string_view) {
      if (!std::exchange(first, false)) return;
      stuck.set_value();
      go.get_future().wait();
    };
  });
  const auto client = Attach(daemon);
  std::thread failing([&] {
    v1::OpenSessionRequest request;
    request.set_device_count(-1);
    EXPECT_FALSE(RpcRank(daemon.Connect()).Open(request).ok());
  });
  stuck.get_future().wait();
  std::thread late([&] {
    RpcRank rank(daemon.Connect());
    EXPECT_FALSE(OpenWith(&rank, client->token()).ok());
  });
  // The daemon has one of the client's process by the connection, then one for the session to be.
  EXPECT_TRUE(Eventually([&] { return OpenPidfds() == 2; }));
  daemon.daemon().Drain(SteadyNow());
  go.set_value();
  failing.join();
  late.join();
}

TEST(AttachTest, ClientsHearOfTheDaemonsEnd) {
  auto daemon = std::make_unique<TestDaemon>();
  const auto client = Attach(*daemon);
  const std::string path = daemon->attach_path();
  daemon.reset();
  pollfd entry = {client->socket_fd(), POLLRDHUP, 0};
  EXPECT_EQ(poll(&entry, 1, 20000), 1);
  EXPECT_EQ(client->CreateStaging(4096, Soon()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrorOf(AttachClient::Connect(path, Soon()).status()).reason, Reason::kDaemonLost);
}

}  // namespace
}  // namespace chorus::server
