// The program: flags, lock file, socket modes, signals.

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "proto/convert/errors_convert.h"
#include "server/testing/chorusd_process.h"
#include "server/testing/http2_client.h"
#include "server/testing/rpc.h"

namespace chorus::server {
namespace {

using testing::HasSubstr;
using testing::Not;

UniqueFd ConnectTo(const std::string& path, int type = SOCK_STREAM) {
  UniqueFd client(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.data(), path.size());
  if (connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return UniqueFd();
  }
  return client;
}

bool Connects(const std::string& path) { return ConnectTo(path).valid(); }

mode_t ModeOf(const std::string& path) {
  struct stat info = {};
  EXPECT_EQ(lstat(path.c_str(), &info), 0) << path;
  return info.st_mode & 07777;
}

class ChorusdTest : public testing::Test {
 protected:
  ChorusdTest() {
    std::string pattern = "/tmp/chorusd-test-XXXXXX";
    EXPECT_NE(mkdtemp(&pattern[0]), nullptr);
    folder_ = pattern;
    path_ = absl::StrCat(folder_, "/sub/chorusd.sock");
  }
  ~ChorusdTest() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::string Listen() const { return absl::StrCat("--listen=unix:", path_); }
  std::shared_ptr<grpc::Channel> Channel() const {
    return grpc::CreateChannel(absl::StrCat("unix:", path_), grpc::InsecureChannelCredentials());
  }
  // Starts it with `flags`, expects it to end by itself, and returns what it said.
  std::string Refusal(std::vector<std::string> flags) {
    ChorusdProcess process(folder_, std::move(flags));
    const int status = process.Wait();
    EXPECT_GT(status, 0);
    return process.output();
  }

  std::string folder_;
  std::string path_;
};

TEST_F(ChorusdTest, ServesAndEndsOnSigterm) {
  for (const int number : {SIGTERM, SIGINT}) {
    ChorusdProcess chorusd(
        folder_, {Listen(), "--host_devices=3", "--listen=127.0.0.1:0", "--insecure_loopback"});
    ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
    EXPECT_THAT(chorusd.output(), HasSubstr(absl::StrCat("serves 3 host devices on unix:", path_)));
    EXPECT_THAT(chorusd.output(), HasSubstr("incarnation"));
    EXPECT_THAT(chorusd.output(), Not(HasSubstr("127.0.0.1:0")));  // the port that it got
    EXPECT_TRUE(Connects(path_));
    chorusd.Signal(number);
    EXPECT_EQ(chorusd.Wait(), 0) << chorusd.output();
    EXPECT_FALSE(std::filesystem::exists(path_));
    EXPECT_FALSE(std::filesystem::exists(path_ + ".attach"));
    EXPECT_FALSE(std::filesystem::exists(path_ + ".lock"));
  }
}

TEST_F(ChorusdTest, SighupDoesNotEndIt) {
  ChorusdProcess chorusd(folder_, {Listen()});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  chorusd.Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return absl::StrContains(chorusd.output(), "ignored"); }))
      << chorusd.output();
  EXPECT_TRUE(Connects(path_));
  chorusd.Signal(SIGTERM);
  EXPECT_EQ(chorusd.Wait(), 0) << chorusd.output();
}

TEST_F(ChorusdTest, ItSaysHowMuchMemoryItMayUseAndWhy) {
  for (const char* named : {"", "auto", "64MiB"}) {
    SCOPED_TRACE(named);
    std::vector<std::string> flags = {Listen()};
    if (*named != '\0') flags.push_back(absl::StrCat("--memory_limit_bytes=", named));
    ChorusdProcess chorusd(folder_, flags);
    ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
    RpcRank rank(Channel());
    v1::GetStatsResponse stats;
    EXPECT_TRUE(
        Ask(*rank.diagnostics, &v1::Diagnostics::Stub::GetStats, v1::GetStatsRequest(), &stats)
            .ok());
    chorusd.Signal(SIGTERM);
    EXPECT_EQ(chorusd.Wait(), 0) << chorusd.output();
    const std::string limit = absl::StrCat("memory limit: ", stats.memory_limit_bytes(), " bytes");
    EXPECT_THAT(chorusd.output(), HasSubstr(absl::StrCat(limit, absl::EndsWith(named, "MiB")
                                                                    ? ": --memory_limit_bytes"
                                                                    : ": three quarters of the ")));
    // This test's process is in its cgroup, or there is none.
    EXPECT_THAT(chorusd.output(), HasSubstr("memory guard: off: "));
  }
}

TEST_F(ChorusdTest, HelpShowsItsFlags) {
  const std::string text = Refusal({"--help"});
  EXPECT_THAT(text, HasSubstr("--listen"));
  EXPECT_THAT(text, HasSubstr("--memory_limit_bytes"));
  EXPECT_THAT(text, HasSubstr("default: auto"));
  EXPECT_THAT(text, HasSubstr("--agree_timeout"));
  EXPECT_THAT(text, Not(HasSubstr("--undefok")));  // of the library
}

TEST_F(ChorusdTest, AStartThatFailsLeavesNothing) {
  const auto all = [this] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
      const std::string name = entry.path().filename();
      if (!absl::StartsWith(name, "log")) names.push_back(entry.path());
    }
    return names;
  };
  // The group is looked for when the socket is there, the port when both are.
  Refusal({Listen(), "--socket_group=no-such-group"});
  EXPECT_THAT(all(), testing::IsEmpty());
  UniqueFd taken(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(taken.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(taken.get(), 1), 0);
  ASSERT_EQ(getsockname(taken.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string port = absl::StrCat("--listen=127.0.0.1:", ntohs(address.sin_port));
  EXPECT_THAT(Refusal({Listen(), port, "--insecure_loopback"}), HasSubstr("in use"));
  EXPECT_THAT(all(), testing::IsEmpty());
  // What was there, and a daemon that serves, stay.
  ChorusdProcess chorusd(folder_, {Listen()});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  const std::vector<std::string> before = all();
  Refusal({Listen()});
  EXPECT_EQ(all(), before);
  EXPECT_TRUE(Connects(path_));
}

TEST_F(ChorusdTest, DurationsAndSizesThatAreNotUnderstoodAreNamedWithAnExample) {
  for (const char* flag : {"--lease=10", "--agree_timeout=soon", "--drain_timeout=-1s"}) {
    EXPECT_THAT(Refusal({Listen(), flag}),
                testing::AllOf(HasSubstr("such as 500ms, 10s"), HasSubstr(strchr(flag, '=') + 1)));
  }
  for (const char* flag : {"--memory_limit_bytes=8GB", "--memory_limit_bytes=0",
                           "--max_staging_bytes=9000000000GiB"}) {
    EXPECT_THAT(Refusal({Listen(), flag}),
                testing::AllOf(HasSubstr("such as 8589934592, 512MiB or 8GiB"),
                               HasSubstr(strchr(flag, '=') + 1)));
  }
  EXPECT_THAT(Refusal({Listen(), "--max_sessions=-3"}), HasSubstr("positive number, got -3"));
  ChorusdProcess chorusd(folder_, {Listen(), "--memory_limit_bytes=64MiB", "--lease=1h30m"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  RpcRank rank(Channel());
  v1::GetStatsResponse stats;
  ASSERT_TRUE(
      Ask(*rank.diagnostics, &v1::Diagnostics::Stub::GetStats, v1::GetStatsRequest(), &stats).ok());
  EXPECT_EQ(stats.memory_limit_bytes(), int64_t{64} << 20);
}

TEST_F(ChorusdTest, ARequestHasAsLongToComeAsItsFlagSays) {
  ChorusdProcess chorusd(folder_, {Listen(), "--read_timeout=50ms"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  grpc::GenericStub stub(Channel());
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
  grpc::Status status;
  const auto call = stub.PrepareCall(&context, "/chorus.v1.Diagnostics/GetStats", &queue);
  call->StartCall(&context);
  call->Finish(&status, &status);
  void* tag = nullptr;
  bool ok = false;
  while (tag != &status) ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(ErrorOf(FromGrpc(status)).reason, Reason::kTransportTimeout);
  EXPECT_THAT(status.error_message(), HasSubstr("has not come whole within 50ms"));
}

TEST_F(ChorusdTest, ARequestOfWhichHalfComesHasAsLong) {
  ChorusdProcess chorusd(folder_, {Listen(), "--read_timeout=50ms"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  const UniqueFd client = ConnectTo(path_);
  ASSERT_TRUE(client.valid());
  const std::string half = BigEndian(0, 1) + BigEndian(100, 4) + "half";
  const std::string words =
      kPreface + Frame(kSettings, 0, 0, "") +
      Frame(kHeaders, kEndHeaders, 1, HeadersOf("/chorus.v1.Diagnostics/GetStats")) +
      Frame(kData, 0, 1, half);
  ASSERT_EQ(write(client.get(), words.data(), words.size()), static_cast<ssize_t>(words.size()));
  timeval patience = {60, 0};
  setsockopt(client.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  std::string told;
  while (!absl::StrContains(told, "has not come whole within 50ms")) {
    char bytes[4096];
    const ssize_t size = read(client.get(), bytes, sizeof(bytes));
    ASSERT_GT(size, 0) << told;
    told.append(bytes, static_cast<size_t>(size));
  }
}

TEST_F(ChorusdTest, SigtermTellsWhoWaitsAndStillEndsWell) {
  ChorusdProcess chorusd(folder_, {Listen(), "--drain_timeout=200ms"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  RpcRank rank(Channel());
  RpcRank observer(Channel());
  ASSERT_TRUE(rank.Open().ok());
  absl::Status told;
  std::thread waiting([&] { told = rank.Join("never complete", 2, 0); });
  ASSERT_TRUE(Eventually([&] {
    v1::DescribeWorldsResponse worlds;
    return Ask(*observer.worlds, &v1::Worlds::Stub::Describe, v1::DescribeWorldsRequest(), &worlds)
               .ok() &&
           worlds.worlds_size() == 1;
  }));
  chorusd.Signal(SIGTERM);
  waiting.join();
  EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable) << told;
  EXPECT_EQ(ErrorOf(told).reason, Reason::kDraining) << told;
  EXPECT_EQ(chorusd.Wait(), 0) << chorusd.output();
}

// A client that computes x + x on device 0, and its run.
absl::Status SubmitLocalRun(RpcRank* rank) {
  v1::Command graph = rank->RegisterCommand(1, 1, 4);
  v1::Graph* const to = graph.mutable_register_graph()->mutable_graph();
  to->mutable_nodes(0)->set_op("add");
  to->mutable_nodes(0)->add_inputs(0);
  to->mutable_nodes(0)->clear_collective();
  to->clear_group_slots();
  CHORUS_RETURN_IF_ERROR(rank->Submit(graph));
  v1::Command run = rank->RunCommand(2, 1, 1, -1, {1, 2, 3, 4});
  run.mutable_run()->clear_groups();
  return rank->Submit(run, absl::Milliseconds(50));
}

TEST_F(ChorusdTest, WorkThatNeverEndsDoesNotKeepItAlive) {
  ChorusdProcess chorusd(folder_, {Listen(), "--fault_script=launch lost", "--drain_timeout=10ms",
                                   "--exit_timeout=200ms"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  RpcRank rank(Channel());
  ASSERT_TRUE(rank.Open().ok());
  EXPECT_EQ(SubmitLocalRun(&rank).code(), absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(Eventually([&] { return absl::StrContains(chorusd.output(), "launch lost"); }))
      << chorusd.output();
  chorusd.Signal(SIGTERM);
  EXPECT_EQ(chorusd.Wait(), 3) << chorusd.output();
  EXPECT_THAT(chorusd.output(), HasSubstr("did not end in time; it was at: ending"));
  EXPECT_THAT(chorusd.output(), Not(HasSubstr("stopped")));
  // The next daemon finds the path free.
  ChorusdProcess next(folder_, {Listen()});
  EXPECT_TRUE(next.WaitForStart()) << next.output();
}

// A pipe, or a socket, that nobody reads any more, with every byte of it taken.
void Fill(int writer) {
  const auto fill = [](const auto& write_some) {
    for (const size_t part : {4096, 1}) {
      const std::string text(part, '-');
      while (write_some(text) > 0) {
      }
    }
  };
  fill([writer](const std::string& text) {
    return send(writer, text.data(), text.size(), MSG_DONTWAIT);
  });
  // A pipe is opened again: O_NONBLOCK is not for the process that shares it.
  const UniqueFd again(
      open(absl::StrCat("/proc/self/fd/", writer).c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
  fill([&again](const std::string& text) { return write(again.get(), text.data(), text.size()); });
}

// Nor does it stop a worker.
TEST_F(ChorusdTest, AFullLogStopsNothing) {
  int pipe[2];
  ASSERT_EQ(pipe2(pipe, O_CLOEXEC), 0);
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets), 0);
  const UniqueFd readers[] = {UniqueFd(pipe[0]), UniqueFd(sockets[0])};
  const UniqueFd writers[] = {UniqueFd(pipe[1]), UniqueFd(sockets[1])};
  const std::vector<std::string> alone = {Listen()};
  const std::vector<std::string> with_worker = {Listen(), "--backend=sim", "--worker_processes"};
  const struct {
    const char* what;
    const UniqueFd& log;
    const std::vector<std::string>& flags;
  } cases[] = {{"pipe", writers[0], alone},
               {"pipe, worker", writers[0], with_worker},
               {"socket", writers[1], alone},
               {"socket, worker", writers[1], with_worker}};
  for (const auto& one : cases) {
    SCOPED_TRACE(one.what);
    Fill(one.log.get());
    ChorusdProcess chorusd(folder_, one.flags, absl::nullopt, one.log.get());
    ASSERT_TRUE(Eventually([&] { return Connects(path_); }));
    RpcRank rank(Channel());
    v1::OpenSessionRequest refused;
    refused.set_device_count(5);
    v1::OpenSessionRequest no_text;
    no_text.set_label("\xff");
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(rank.Open().ok());
      ASSERT_TRUE(rank.Close().ok());
      ASSERT_EQ(rank.Open(refused).code(), absl::StatusCode::kInvalidArgument);
      ASSERT_EQ(rank.Open(no_text).code(), absl::StatusCode::kInvalidArgument);
    }
    chorusd.Signal(SIGTERM);
    EXPECT_EQ(chorusd.Wait(), 0);
  }
}

TEST_F(ChorusdTest, AFullLogDoesNotKeepAliveWhatCannotStart) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  Fill(writer.get());
  ChorusdProcess first(folder_, {Listen()});
  ASSERT_TRUE(first.WaitForStart()) << first.output();
  ChorusdProcess second(folder_, {Listen()}, absl::nullopt, writer.get());
  EXPECT_EQ(second.Wait(), 1);
  ChorusdProcess third(folder_, {Listen(), "--backend=sim", "--worker_processes", "--worker=/none"},
                       absl::nullopt, writer.get());
  EXPECT_EQ(third.Wait(), 2);
  for (const char* flag :
       {"--backend=abacus", "--host_devices=-3", "--max_sessions=-3", "--fault_script=x"}) {
    ChorusdProcess refused(folder_, {Listen(), flag}, absl::nullopt, writer.get());
    EXPECT_EQ(refused.Wait(), 2) << flag;
  }
}

TEST_F(ChorusdTest, ALabelCannotForgeALineOfTheLog) {
  ChorusdProcess chorusd(folder_, {Listen()});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  RpcRank rank(Channel());
  v1::OpenSessionRequest request;
  request.set_label("mine\" attached\nE0101 failure: job=\"theirs\" rank=0\x1b[2J");
  ASSERT_TRUE(rank.Open(request).ok());
  ASSERT_TRUE(Eventually([&] { return absl::StrContains(chorusd.output(), "theirs"); }));
  EXPECT_THAT(
      chorusd.output(),
      HasSubstr("\"mine\\\" attached\\nE0101 failure: job=\\\"theirs\\\" rank=0\\033[2J\"\n"));
  EXPECT_THAT(chorusd.output(), Not(HasSubstr("\nE0101")));
}

// Clients that say nothing, begin to, or end in the middle of a call.
TEST_F(ChorusdTest, ADrainWaitsForNoPeer) {
  ChorusdProcess chorusd(folder_, {Listen(), "--listen=127.0.0.1:0", "--insecure_loopback",
                                   "--drain_timeout=100ms", "--exit_timeout=1h"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  const std::string preface = kPreface;
  const std::string settings = Frame(kSettings, 0, 0, "");
  const std::string half_a_call = FrameHead(256, kHeaders, kEndHeaders, 1) + "half";
  std::vector<UniqueFd> clients;
  for (const std::string& words : {std::string(), preface.substr(0, 7), preface, preface + settings,
                                   preface + settings + half_a_call}) {
    clients.push_back(ConnectTo(path_));
    ASSERT_TRUE(clients.back().valid());
    ASSERT_EQ(write(clients.back().get(), words.data(), words.size()),
              static_cast<ssize_t>(words.size()));
  }
  clients.push_back(ConnectTo(path_ + ".attach", SOCK_SEQPACKET));
  ASSERT_TRUE(clients.back().valid());
  chorusd.Signal(SIGTERM);
  EXPECT_EQ(chorusd.Wait(), 0) << chorusd.output();
}

TEST_F(ChorusdTest, AFailureIsALineOfTheLog) {
  ChorusdProcess chorusd(folder_, {Listen(), "--host_devices=2"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  RpcRank rank(Channel());
  v1::OpenSessionRequest request;
  request.set_device_count(3);
  const absl::Status refused = rank.Open(request);
  ASSERT_TRUE(rank.Open().ok());
  const absl::Status late = rank.Join("my job", 2, 0, absl::Milliseconds(50));
  for (const auto& [where, status] :
       {std::pair<std::string, absl::Status>("job=- rank=- pid=-", refused),
        {"job=\"my job\" rank=1 pid=-", late}}) {
    const Error error = ErrorOf(status);
    EXPECT_NE(error.id, ErrorId()) << status;
    const std::string line =
        absl::StrCat("] failure: ", where, " reason=", ReasonName(error.reason),
                     " error_id=", error.id.value(), ": ", error.message, "\n");
    EXPECT_TRUE(Eventually([&] { return absl::StrContains(chorusd.output(), line); }))
        << line << chorusd.output();
  }
}

TEST_F(ChorusdTest, ASecondDaemonIsKeptOffThePath) {
  ChorusdProcess first(folder_, {Listen()});
  ASSERT_TRUE(first.WaitForStart()) << first.output();
  const std::string text = Refusal({Listen()});
  EXPECT_THAT(text, HasSubstr(absl::StrCat("another chorusd (pid ", first.pid(), ")")));
  EXPECT_TRUE(Connects(path_));
  // A killed one leaves its sockets, and no lock.
  first.Signal(SIGKILL);
  EXPECT_EQ(first.Wait(), -2);
  EXPECT_TRUE(std::filesystem::exists(path_));
  ChorusdProcess second(folder_, {Listen()});
  ASSERT_TRUE(second.WaitForStart()) << second.output();
  EXPECT_TRUE(Connects(path_));
}

// Another group than the daemon's own only root can give: other_uid_test.
TEST_F(ChorusdTest, SocketsHaveTheModeThatWasAsked) {
  {
    ChorusdProcess chorusd(folder_, {Listen()});
    ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
    EXPECT_EQ(ModeOf(path_), mode_t{0600});
    EXPECT_EQ(ModeOf(path_ + ".attach"), mode_t{0600});
  }
  ChorusdProcess chorusd(
      folder_, {Listen(), "--socket_mode=0660", absl::StrCat("--socket_group=", getegid())});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  EXPECT_EQ(ModeOf(path_), mode_t{0660});
  EXPECT_EQ(ModeOf(path_ + ".attach"), mode_t{0660});
}

TEST_F(ChorusdTest, RefusesWhatItCannotServeWithAClearText) {
  EXPECT_THAT(Refusal({"--listen=0.0.0.0:9440", "--insecure_loopback"}), HasSubstr("TLS"));
  EXPECT_THAT(Refusal({"--listen=10.1.2.3:9440"}), HasSubstr("TLS"));
  EXPECT_THAT(Refusal({"--listen=127.0.0.1:0"}), HasSubstr("--insecure_loopback"));
  EXPECT_THAT(Refusal({"--listen=unix:relative.sock"}), HasSubstr("absolute path"));
  EXPECT_THAT(Refusal({absl::StrCat("--listen=unix:/", std::string(120, 'x'))}),
              HasSubstr("at most"));
  EXPECT_THAT(Refusal({"--listen=nonsense"}), HasSubstr("HOST:PORT"));
  EXPECT_THAT(Refusal({"--listen=localhost:99999"}), HasSubstr("65535"));
  EXPECT_THAT(Refusal({Listen(), "--host_devices=0"}),
              HasSubstr("chorusd: --backend=host --host_devices=0: "));
  EXPECT_THAT(Refusal({Listen(), "--backend=abacus"}),
              HasSubstr("chorusd: --backend: expected host, sim or cuda, got \"abacus\"\n"));
  EXPECT_THAT(Refusal({Listen(), "--max_sessions=-3"}),
              HasSubstr("chorusd: --max_sessions: expected a positive number, got -3\n"));
  EXPECT_THAT(Refusal({Listen(), "--fault_script=x"}), HasSubstr("chorusd: --fault_script: "));
  // Without a driver as well as without so many GPUs.
  EXPECT_THAT(Refusal({Listen(), "--backend=cuda", "--gpu=1000"}), HasSubstr("--backend=cuda: "));
  EXPECT_THAT(Refusal({Listen(), "--backend=host", "--worker_processes"}),
              HasSubstr("memory of host devices is the daemon's own"));
  EXPECT_THAT(Refusal({Listen(), "--backend=sim", "--worker_processes", "--worker=/no/worker"}),
              HasSubstr("--backend=sim: /no/worker: No such file or directory"));
  EXPECT_THAT(Refusal({Listen(), "--socket_mode=rw"}), HasSubstr("octal"));
  EXPECT_THAT(Refusal({Listen(), "--socket_group=no-such-group"}), HasSubstr("no-such-group"));
  EXPECT_THAT(Refusal({Listen(), "--lease=-1s"}), HasSubstr("lease"));
  EXPECT_THAT(Refusal({Listen(), "stray"}), HasSubstr("stray"));
  // Something else stands where the socket should.
  std::filesystem::create_directories(path_);
  EXPECT_THAT(Refusal({Listen()}), HasSubstr("no socket"));
}

TEST_F(ChorusdTest, FlagsMayComeFromAFileAndListenMayRepeat) {
  const std::string file = absl::StrCat(folder_, "/flags");
  std::ofstream(file) << Listen() << "\n--listen=unix:" << folder_ << "/second.sock\n"
                      << "--host_devices=2\n";
  ChorusdProcess chorusd(folder_, {absl::StrCat("--flagfile=", file)});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  EXPECT_THAT(chorusd.output(), HasSubstr("2 host devices"));
  EXPECT_TRUE(Connects(path_));
  EXPECT_TRUE(Connects(absl::StrCat(folder_, "/second.sock")));
}

TEST_F(ChorusdTest, TheSimulatedBackendServes) {
  ChorusdProcess chorusd(folder_, {Listen(), "--backend=sim", "--sim_seed=7"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  EXPECT_THAT(chorusd.output(), HasSubstr("4 sim devices"));
  chorusd.Signal(SIGTERM);
  EXPECT_EQ(chorusd.Wait(), 0) << chorusd.output();
}

// The process that some thread of `parent` has started; -1: none.
pid_t ChildOf(pid_t parent) {
  const std::string tasks = absl::StrCat("/proc/", parent, "/task");
  std::error_code ended;
  for (const auto& task : std::filesystem::directory_iterator(tasks, ended)) {
    std::ifstream children(task.path() / "children");
    pid_t child = -1;
    if (children >> child) return child;
  }
  return -1;
}

TEST_F(ChorusdTest, ADeadWorkerDoesNotTakeTheDaemonAlong) {
  ChorusdProcess chorusd(folder_, {Listen(), "--backend=sim", "--worker_processes"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  EXPECT_THAT(chorusd.output(), HasSubstr("4 sim devices"));
  const pid_t worker = ChildOf(chorusd.pid());
  ASSERT_GT(worker, 0);
  kill(worker, SIGKILL);
  const std::string lost =
      absl::StrCat("the devices are lost: its worker (pid ", worker, ") was killed by signal 9");
  EXPECT_TRUE(Eventually([&] { return absl::StrContains(chorusd.output(), lost); }))
      << chorusd.output();
  EXPECT_TRUE(Eventually([&] { return ChildOf(chorusd.pid()) > 0; })) << "it is started again";
  EXPECT_TRUE(Connects(path_));
  const pid_t next = ChildOf(chorusd.pid());
  EXPECT_NE(next, worker);
  chorusd.Signal(SIGTERM);
  EXPECT_EQ(chorusd.Wait(), 0) << chorusd.output();
  EXPECT_NE(kill(next, 0), 0) << "it has ended with the daemon";
}

TEST_F(ChorusdTest, AWorkerDoesNotOutliveItsDaemon) {
  ChorusdProcess chorusd(folder_, {Listen(), "--backend=sim", "--worker_processes"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  const pid_t worker = ChildOf(chorusd.pid());
  ASSERT_GT(worker, 0);
  kill(worker, SIGSTOP);
  chorusd.Signal(SIGKILL);
  chorusd.Wait();
  // Its end is its new parent's to see, which may be slow: a zombie has no program.
  EXPECT_TRUE(Eventually([&] {
    std::error_code ignored;
    return std::filesystem::read_symlink(absl::StrCat("/proc/", worker, "/exe"), ignored).empty();
  }));
}

}  // namespace
}  // namespace chorus::server
