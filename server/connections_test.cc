// Connections of gRPC that nobody uses, against a live daemon.

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/unique_fd.h"
#include "core/transport/attach/lingering_socket.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/acceptor.h"
#include "server/peers.h"
#include "server/testing/descriptor_passing.h"
#include "server/testing/http2_client.h"
#include "server/testing/rpc.h"
#include "server/testing/test_daemon.h"
#include "server/unix_listener.h"

namespace chorus::server {
namespace {

UniqueFd ConnectUnix(const std::string& path, int type = SOCK_STREAM) {
  UniqueFd client(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.data(), path.size());
  EXPECT_EQ(connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return client;
}

UniqueFd ConnectTcp(int port) {
  UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  EXPECT_EQ(connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return client;
}

bool AwaitHangup(int fd) {
  pollfd entry = {fd, POLLRDHUP, 0};
  return poll(&entry, 1, 20000) == 1;
}

void AddTcp(DaemonOptions* options) {
  ListenAddress tcp;
  tcp.host = "127.0.0.1";
  options->listen.push_back(tcp);
  options->insecure_loopback = true;
}

TEST(ConnectionsTest, OneThatSaysNothingOrHalfOfItIsClosed) {
  TestDaemon daemon([](DaemonOptions* options) {
    AddTcp(options);
    options->attach_open_timeout = absl::Milliseconds(200);
  });
  const int port = daemon.daemon().addresses()[1].port;
  const std::string preface = kPreface;
  const std::string settings = Frame(kSettings, 0, 0, "");
  const std::string half_a_call = FrameHead(256, kHeaders, kEndHeaders, 1) + "half";
  for (const bool tcp : {false, true}) {
    SCOPED_TRACE(tcp ? "TCP" : "Unix");
    std::vector<UniqueFd> clients;
    // The last two are HTTP/2, but no call.
    for (const std::string& words : {std::string(), preface.substr(0, 7), preface,
                                     preface + settings, preface + settings + half_a_call}) {
      clients.push_back(tcp ? ConnectTcp(port) : ConnectUnix(daemon.path()));
      EXPECT_EQ(write(clients.back().get(), words.data(), words.size()),
                static_cast<ssize_t>(words.size()));
    }
    for (size_t i = 0; i < clients.size(); ++i) EXPECT_TRUE(AwaitHangup(clients[i].get())) << i;
  }
}

// One whose client says that it will send nothing more, and waits.
TEST(ConnectionsTest, OneThatIsHalfOpenIsClosed) {
  TestDaemon daemon(AddTcp);
  for (const bool tcp : {false, true}) {
    SCOPED_TRACE(tcp ? "TCP" : "Unix");
    const UniqueFd client =
        tcp ? ConnectTcp(daemon.daemon().addresses()[1].port) : ConnectUnix(daemon.path());
    EXPECT_EQ(shutdown(client.get(), SHUT_WR), 0);
    EXPECT_TRUE(AwaitHangup(client.get()));
  }
}

void Send(const UniqueFd& client, const std::string& words) {
  for (size_t sent = 0; sent < words.size();) {
    const ssize_t size = send(client.get(), words.data() + sent, words.size() - sent, MSG_NOSIGNAL);
    ASSERT_GT(size, 0) << strerror(errno);
    sent += static_cast<size_t>(size);
  }
}

// So many calls of a method which there is not, after so many before; nobody reads the answers,
// which have its name: 200 of them are more than a socket holds, also where they are written in a
// few pieces, as on a busy machine.
void CallNobody(const UniqueFd& client, uint32_t before, uint32_t calls) {
  const std::string call = HeadersOf("/chorus.v1.Nobody/Has" + std::string(1500, 'x'));
  std::string words = before == 0 ? kPreface + Frame(kSettings, 0, 0, "") : "";
  for (uint32_t i = before; i < before + calls; ++i) {
    words += Frame(kHeaders, kEndHeaders | kEndStream, 2 * i + 1, call);
  }
  Send(client, words);
}

// A client of `daemon` that has made so many that their answers are more than its socket holds, and
// not more than it may ask for unread.
UniqueFd CallAndDoNotRead(const TestDaemon& daemon) {
  UniqueFd client = ConnectUnix(daemon.path());
  CallNobody(client, 0, 200);
  return client;
}

// What a call of such a method comes to.
grpc::StatusCode CallNobody(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  const grpc::Slice nothing("");
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer response;
  std::promise<grpc::StatusCode> code;
  stub.UnaryCall(&context, "/chorus.v1.Nobody/Has", grpc::StubOptions(), &request, &response,
                 [&code](const grpc::Status& status) { code.set_value(status.error_code()); });
  return code.get_future().get();
}

// They have a time, or nobody of their user's would be told any more that there is no such method.
TEST(ConnectionsTest, RefusalsThatNobodyReadsAreGivenUp) {
  // As long as a busy machine may take to see that there is no room.
  TestDaemon daemon([](DaemonOptions* options) { options->download_timeout = absl::Seconds(4); });
  const std::shared_ptr<grpc::Channel> channel = daemon.Connect();
  std::vector<UniqueFd> unread;
  for (int i = 0; i < 3; ++i) unread.push_back(CallAndDoNotRead(daemon));
  const auto comes_to = [&channel](grpc::StatusCode code) {
    return Eventually([&] { return CallNobody(channel) == code; });
  };
  // Of those that came at once some were too many. Their sockets are full: of later ones none ends.
  for (const UniqueFd& client : unread) CallNobody(client, 200, 50);
  EXPECT_TRUE(comes_to(grpc::StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_TRUE(comes_to(grpc::StatusCode::UNIMPLEMENTED));
}

const std::string kEmptyMessage(5, '\0');

// The first words of a client whose flow is no limit.
std::string AnyFlow() {
  return kPreface +
         Frame(kSettings, 0, 0, BigEndian(kInitialWindowSize, 2) + BigEndian(1 << 30, 4)) +
         Frame(kWindowUpdate, 0, 0, BigEndian(1 << 30, 4));
}
std::string CallOf(const std::string& method, uint32_t stream, const std::string& message) {
  return Frame(kHeaders, kEndHeaders, stream, HeadersOf(method)) +
         Frame(kData, kEndStream, stream, message);
}
// So many calls of `method` that their ends are more than a socket holds.
std::string ManyCalls(const std::string& method) {
  std::string words = AnyFlow();
  for (uint32_t i = 0; i < 200; ++i) words += CallOf(method, 2 * i + 1, kEmptyMessage);
  return words;
}

void GiveUpSoon(DaemonOptions* options) {
  options->max_wait = absl::Milliseconds(200);
  options->download_timeout = absl::Milliseconds(200);
}

// gRPC has done with none that stands in a write that does not come to its end.
TEST(ConnectionsTest, OneWhoseAnswersNobodyReadsIsClosed) {
  TestDaemon daemon(GiveUpSoon);
  for (const char* const method :
       {"/chorus.v1.Capabilities/Get", "/chorus.v1.Log/Commands", "/chorus.v1.Nobody/Has"}) {
    SCOPED_TRACE(method);
    const UniqueFd client = ConnectUnix(daemon.path());
    Send(client, ManyCalls(method));
    EXPECT_TRUE(AwaitHangup(client.get()));
  }
}

// Its call's deadline is far.
TEST(ConnectionsTest, OneThatDoesNotReadADownloadIsClosed) {
  TestDaemon daemon(
      [](DaemonOptions* options) { options->download_timeout = absl::Milliseconds(200); });
  RpcRank rank(daemon.Connect());
  ASSERT_TRUE(rank.Open().ok());
  int slot = 0;
  for (const int64_t size : {64 << 10, 16 << 20}) {
    SCOPED_TRACE(size);
    ++slot;
    v1::CreateStagingRequest create;
    create.set_session(rank.session);
    create.set_size_bytes(size);
    v1::CreateStagingResponse staging;
    ASSERT_TRUE(Ask(*rank.tensors, &v1::Tensors::Stub::CreateStaging, create, &staging).ok());
    v1::Command command;
    command.set_sequence(slot);
    v1::CreateTensor* const tensor = command.mutable_create_tensor();
    tensor->mutable_id()->set_slot(slot);
    tensor->mutable_id()->set_generation(1);
    tensor->mutable_type()->set_dtype(v1::DTYPE_U8);
    tensor->mutable_type()->add_dims(size);
    tensor->mutable_source()->mutable_external()->set_arena(staging.arena());
    ASSERT_TRUE(rank.Submit(command).ok());
    v1::DownloadTensorRequest request;
    request.set_session(rank.session);
    *request.mutable_tensor() = tensor->id();
    const std::string bytes = request.SerializeAsString();
    const UniqueFd client = ConnectUnix(daemon.path());
    Send(client, AnyFlow() + CallOf("/chorus.v1.Tensors/Download", 1,
                                    BigEndian(0, 1) + BigEndian(bytes.size(), 4) + bytes));
    EXPECT_TRUE(AwaitHangup(client.get()));
  }
}

// Another process, which connects, says something and stops.
class Stopped {
 public:
  Stopped(const std::string& path, const std::string& words)
      : socket_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, path.data(), path.size());
    pid_ = fork();
    if (pid_ == 0) {
      // Nothing but calls of the system: the other threads are not here.
      if (connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
          write(socket_.get(), words.data(), words.size()) < 0) {
        _exit(1);
      }
      raise(SIGSTOP);
      for (;;) pause();
    }
    int how = 0;
    EXPECT_EQ(waitpid(pid_, &how, WUNTRACED), pid_);
    EXPECT_TRUE(WIFSTOPPED(how));
  }
  ~Stopped() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  void GoOn() { kill(pid_, SIGCONT); }
  int fd() const { return socket_.get(); }

 private:
  const UniqueFd socket_;
  pid_t pid_ = 0;
};

// It stands in a debugger, say.
TEST(ConnectionsTest, AStoppedProcessKeepsItsConnectionUntilItGoesOn) {
  TestDaemon daemon(GiveUpSoon);
  Stopped stopped(daemon.path(), ManyCalls("/chorus.v1.Capabilities/Get"));
  // Those of others come to their ends, begun later.
  for (int i = 0; i < 3; ++i) {
    const UniqueFd client = ConnectUnix(daemon.path());
    Send(client, ManyCalls("/chorus.v1.Capabilities/Get"));
    EXPECT_TRUE(AwaitHangup(client.get()));
  }
  pollfd entry = {stopped.fd(), POLLRDHUP, 0};
  EXPECT_EQ(poll(&entry, 1, 0), 0);
  stopped.GoOn();
  EXPECT_TRUE(AwaitHangup(stopped.fd()));
}

// One that is half open while answers wait that the client does not read. gRPC alone would keep the
// connection with its client, and the daemon would not end.
TEST(ConnectionsTest, OneThatIsHalfOpenAndDoesNotReadIsClosed) {
  TestDaemon daemon;
  const UniqueFd client = CallAndDoNotRead(daemon);
  EXPECT_EQ(shutdown(client.get(), SHUT_WR), 0);
  EXPECT_TRUE(AwaitHangup(client.get()));
}

TEST(ConnectionsTest, WhoComesByTcpLeavesRoomForOthers) {
  TestDaemon daemon([](DaemonOptions* options) {
    AddTcp(options);
    options->max_connections = 16;
  });
  const int port = daemon.daemon().addresses()[1].port;
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 14; ++i) crowd.push_back(ConnectTcp(port));
  // It is taken from the queue behind the others, and ended.
  EXPECT_TRUE(AwaitHangup(ConnectTcp(port).get()));
  for (const UniqueFd& one : crowd) {
    pollfd entry = {one.get(), POLLRDHUP, 0};
    EXPECT_EQ(poll(&entry, 1, 0), 0);
  }
  EXPECT_TRUE(RpcRank(daemon.Connect()).ListSessions().ok());
  // One that goes makes room.
  crowd.pop_back();
  const auto channel = daemon.ConnectTo(daemon.daemon().addresses()[1].ToString());
  EXPECT_TRUE(Eventually([&] { return RpcRank(channel).ListSessions().ok(); }));
}

// From Linux 6.16 on it can send them to no daemon.
TEST(ConnectionsTest, AClientThatSendsDescriptorsKeepsNobodyWaiting) {
  auto daemon = std::make_unique<TestDaemon>();
  LetDescriptorsCome(daemon->path());
  LetDescriptorsCome(daemon->attach_path());
  const UniqueFd grpc = ConnectUnix(daemon->path());
  const UniqueFd attach = ConnectUnix(daemon->attach_path(), SOCK_SEQPACKET);
  std::vector<LingeringSocket> lingering(2);
  EXPECT_TRUE(IsDoneThough(absl::MakeSpan(lingering), [&] {
    EXPECT_EQ(lingering[0].SendToReader(grpc.get()), 0);
    EXPECT_TRUE(AwaitHangup(grpc.get()));
    EXPECT_EQ(lingering[1].SendToReader(attach.get()), 0);
    EXPECT_TRUE(AwaitHangup(attach.get()));
    EXPECT_TRUE(RpcRank(daemon->Connect()).ListSessions().ok());
    const UniqueFd other = ConnectUnix(daemon->attach_path(), SOCK_SEQPACKET);
    EXPECT_EQ(send(other.get(), "let me in", 9, 0), 9);
    EXPECT_TRUE(AwaitHangup(other.get()));
    daemon = nullptr;
  }));
}

// Those that have gone already make room for the last one when it is let in, unless all of them are
// let in before it is seen that they have.
TEST(ConnectionsTest, ACrowdAtTheDoorDoesNotKeepTheOthersOut) {
  TestDaemon daemon;  // for its folder
  const std::string path = daemon.folder() + "/other.sock";
  absl::StatusOr<UniqueFd> listener = ListenUnix(path, SOCK_STREAM, SocketAccess());
  ASSERT_TRUE(listener.ok()) << listener.status();
  for (int i = 0; i < 400; ++i) ConnectUnix(path);
  const UniqueFd last = ConnectUnix(path);
  PeerTable peers(geteuid(), /*max_connections=*/256, {16, 16, 16});
  const std::unique_ptr<grpc::Server> server = grpc::ServerBuilder().BuildAndStart();
  std::vector<Acceptor::Listener> listeners;
  listeners.push_back({*std::move(listener), /*is_unix=*/true});
  PeerTable::Idle idle;
  idle.first_call = absl::Hours(1);
  idle.next_call = absl::Hours(1);
  Acceptor acceptor(std::move(listeners), std::move(idle), &peers, server.get());
  pollfd entry = {last.get(), POLLIN, 0};
  EXPECT_EQ(poll(&entry, 1, 20000), 1);
  char byte;
  EXPECT_EQ(read(last.get(), &byte, 1), 1) << "its settings";
  acceptor.Stop(absl::ZeroDuration());
  server->Shutdown();
}

class IdleConnectionsTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Sockets, IdleConnectionsTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Tcp" : "Unix"; });

TEST_P(IdleConnectionsTest, AnIdleOneIsClosedAndOneWithACallUnderWayIsNot) {
  TestDaemon daemon([](DaemonOptions* options) {
    AddTcp(options);
    options->idle_timeout = absl::Milliseconds(100);
    options->node.lease = absl::Milliseconds(100);
  });
  const std::string address = daemon.daemon().addresses()[GetParam() ? 1 : 0].ToString();
  const std::shared_ptr<grpc::Channel> busy = daemon.ConnectTo(address);
  const auto log = v1::Log::NewStub(busy);
  grpc::ClientContext context;
  const auto stream = log->Commands(&context);
  // The daemon has the stream when it answers a call behind it.
  ASSERT_TRUE(RpcRank(busy).ListSessions().ok());
  const std::shared_ptr<grpc::Channel> idle = daemon.ConnectTo(address);
  for (int i = 0; i < 3; ++i) {
    // One that was closed connects again.
    ASSERT_TRUE(Eventually([&] { return RpcRank(idle).ListSessions().ok(); }));
    EXPECT_TRUE(idle->WaitForStateChange(GRPC_CHANNEL_READY,
                                         absl::ToChronoTime(absl::Now() + absl::Seconds(20))));
    EXPECT_EQ(busy->GetState(false), GRPC_CHANNEL_READY);
  }
  context.TryCancel();
  stream->Finish();
}

}  // namespace
}  // namespace chorus::server
