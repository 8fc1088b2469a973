// The services, against a live daemon over the host backend.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "chorus/v1/capabilities.grpc.pb.h"
#include "core/base/error.h"
#include "core/graph/graph.h"
#include "core/ops/registry.h"
#include "core/tensor/type.h"
#include "gmock/gmock.h"
#include "google/protobuf/unknown_field_set.h"
#include "grpc/grpc.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "proto/convert/api_version.h"
#include "proto/convert/errors_convert.h"
#include "server/own_memory.h"
#include "server/testing/rpc.h"
#include "server/testing/test_daemon.h"

namespace chorus::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsSupersetOf;

#define EXPECT_OK(expression)                    \
  do {                                           \
    const absl::Status expect_ok = (expression); \
    EXPECT_TRUE(expect_ok.ok()) << expect_ok;    \
  } while (false)
#define ASSERT_OK(expression)                    \
  do {                                           \
    const absl::Status assert_ok = (expression); \
    ASSERT_TRUE(assert_ok.ok()) << assert_ok;    \
  } while (false)

void ExpectError(const absl::Status& status, absl::StatusCode code, Reason reason) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(ErrorOf(status).reason, reason) << status;
}

// Two ranks of one world on connections of their own, with graph 1 (two floats) registered: the
// next sequence of both is 2.
struct Pair {
  explicit Pair(const TestDaemon& daemon, const std::string& address = "")
      : a(Connect(daemon, address)), b(Connect(daemon, address)) {
    EXPECT_OK(a.Open());
    EXPECT_OK(b.Open());
    std::thread other([this] { EXPECT_OK(b.Join("pair", 2, 1)); });
    EXPECT_OK(a.Join("pair", 2, 0));
    other.join();
    EXPECT_OK(a.Submit(a.RegisterCommand(1, 1, 2)));
    EXPECT_OK(b.Submit(b.RegisterCommand(1, 1, 2)));
  }
  static std::shared_ptr<grpc::Channel> Connect(const TestDaemon& daemon,
                                                const std::string& address) {
    return address.empty() ? daemon.Connect() : daemon.ConnectTo(address);
  }
  RpcRank a;
  RpcRank b;
};

// A unary call of `method`, with no byte in its request.
grpc::Status CallByName(const TestDaemon& daemon, const std::string& method,
                        grpc::ByteBuffer* response) {
  grpc::GenericStub generic(daemon.Connect());
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
  grpc::CompletionQueue queue;
  const grpc::Slice nothing;
  const auto call =
      generic.PrepareUnaryCall(&context, method, grpc::ByteBuffer(&nothing, 1), &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(response, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  EXPECT_TRUE(queue.Next(&tag, &ok));
  return status;
}

// A stream of messages as bytes, which stays until this object goes.
class RawStream {
 public:
  RawStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method)
      : stub_(channel) {
    context_.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
    call_ = stub_.PrepareCall(&context_, method, &queue_);
    call_->StartCall(nullptr);
    Next();
  }
  ~RawStream() {
    context_.TryCancel();
    Finish();
  }
  void Send(const std::string& request) {
    const grpc::Slice slice(request);
    call_->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    Next();
  }
  // Whether `request` has an answer.
  bool Ask(const std::string& request) {
    Send(request);
    grpc::ByteBuffer answer;
    call_->Read(&answer, nullptr);
    return Next();
  }
  grpc::StatusCode Finish() {
    if (!finished_) {
      call_->Finish(&status_, nullptr);
      finished_ = Next();
    }
    return status_.error_code();
  }

 private:
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  grpc::Status status_;
  bool finished_ = false;
};

void AddTcp(DaemonOptions* options) {
  options->insecure_loopback = true;
  options->listen.push_back(*ParseListenAddress("127.0.0.1:0"));
}

// gRPC's own services: nobody admits their calls.
TEST(CallsTest, ThoseOfHealthKeepNobodyOut) {
  TestDaemon daemon([](DaemonOptions* options) {
    AddTcp(options);
    options->max_calls = 8;
  });
  std::vector<std::unique_ptr<RawStream>> watches;
  for (int connection = 0; connection < 3; ++connection) {
    const std::shared_ptr<grpc::Channel> channel = daemon.Connect();
    for (int i = 0; i < 5; ++i) {
      watches.push_back(std::make_unique<RawStream>(channel, "/grpc.health.v1.Health/Watch"));
      ASSERT_TRUE(watches.back()->Ask("")) << watches.size();
    }
  }
  const auto here = RpcRank(daemon.Connect()).ListSessions();
  EXPECT_TRUE(here.ok()) << here.status();
  const std::string tcp = daemon.daemon().addresses()[1].ToString();
  const auto there = RpcRank(daemon.ConnectTo(tcp)).ListSessions();
  EXPECT_TRUE(there.ok()) << there.status();
}

// Each has a thread for itself.
TEST(CallsTest, OneTenantHasSevenEighthsOfThoseOfReflection) {
  TestDaemon daemon(AddTcp);
  const std::string list_services("\x3a\x01*");
  const std::string method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  const std::shared_ptr<grpc::Channel> channel = daemon.Connect();
  std::vector<std::unique_ptr<RawStream>> streams;
  for (int i = 0; i < 21; ++i) {
    streams.push_back(std::make_unique<RawStream>(channel, method));
    ASSERT_TRUE(streams.back()->Ask(list_services)) << i;
  }
  RawStream one_more(channel, method);
  EXPECT_FALSE(one_more.Ask(list_services));
  EXPECT_EQ(one_more.Finish(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  // Another tenant gets in, and all have their other calls.
  const std::string tcp = daemon.daemon().addresses()[1].ToString();
  RawStream there(daemon.ConnectTo(tcp), method);
  EXPECT_TRUE(there.Ask(list_services));
  EXPECT_TRUE(RpcRank(channel).ListSessions().ok());
  // One that ends makes room.
  streams.pop_back();
  EXPECT_TRUE(Eventually([&] { return RawStream(channel, method).Ask(list_services); }));
}

// Commands wait for other ranks; where each took a slot for as long, the ranks that they wait for
// would find none.
TEST(CallsTest, ACommandThatWaitsGivesItsPlaceToTheNextCall) {
  TestDaemon daemon([](DaemonOptions* options) {
    AddTcp(options);
    options->max_calls = 8;  // seven by TCP
  });
  const std::string tcp = daemon.daemon().addresses()[1].ToString();
  Pair pair(daemon, tcp);
  RpcRank observer(daemon.Connect());
  constexpr int kRuns = 20;
  const std::shared_ptr<grpc::Channel> channel = daemon.ConnectTo(tcp);
  std::vector<std::unique_ptr<RawStream>> waits;
  for (int run = 0; run < kRuns; ++run) {
    v1::SubmitRequest request;
    request.set_session(pair.a.session);
    *request.mutable_command() = pair.a.RunCommand(2 + run, 1, 1, run, {1, 2});
    waits.push_back(std::make_unique<RawStream>(channel, "/chorus.v1.Log/Submit"));
    waits.back()->Send(request.SerializeAsString());
    ASSERT_TRUE(Eventually([&] { return observer.ListPending()->pending_size() == run + 1; }))
        << run;
  }
  for (int run = 0; run < kRuns - 7; ++run) {
    EXPECT_EQ(waits[run]->Finish(), grpc::StatusCode::DEADLINE_EXCEEDED) << run;
  }
  for (int run = 0; run < kRuns; ++run) {
    EXPECT_OK(pair.b.Submit(pair.b.RunCommand(2 + run, 1, 1, run, {10, 20})));
    EXPECT_OK(pair.a.Wait(2 + run));
  }
}

TEST(MovedMethodsTest, OldNamesAnswerWithTheNewOnes) {
  TestDaemon daemon;
  grpc::ByteBuffer response;
  for (const std::string method : {"Submit", "Wait", "Commands"}) {
    const absl::Status old =
        FromGrpc(CallByName(daemon, absl::StrCat("/chorus.v1.Graphs/", method), &response));
    ExpectError(old, absl::StatusCode::kUnimplemented, Reason::kVersion);
    EXPECT_THAT(std::string(old.message()), HasSubstr(absl::StrCat("chorus.v1.Log/", method)));
    EXPECT_THAT(std::string(old.message()), HasSubstr(absl::StrCat("version ", kApiVersion)));
  }
  // What never was is another matter.
  const absl::Status never = FromGrpc(CallByName(daemon, "/chorus.v1.Graphs/Dance", &response));
  ExpectError(never, absl::StatusCode::kUnimplemented, Reason::kUnsupported);
  EXPECT_THAT(std::string(never.message()), HasSubstr("chorus.v1.Graphs/Dance"));
}

// Once each, and what there is.
TEST(CapabilitiesTest, AreThoseOfTheTables) {
  TestDaemon daemon;
  v1::GetCapabilitiesResponse got;
  grpc::ClientContext context;
  ASSERT_TRUE(v1::Capabilities::NewStub(daemon.Connect())
                  ->Get(&context, v1::GetCapabilitiesRequest(), &got)
                  .ok());
  std::vector<std::string> ops, expected_ops;
  std::set<CollectiveKind> kinds;
  for (const OpDef* op : AllOps()) {
    expected_ops.push_back(absl::StrCat(op->name, " ", op->version));
    if (op->kind != CollectiveKind::kUnspecified) kinds.insert(op->kind);
  }
  for (const auto& op : got.ops()) ops.push_back(absl::StrCat(op.name(), " ", op.version()));
  EXPECT_EQ(ops, expected_ops);
  std::vector<std::string> names, expected_names;
  for (const int kind : got.collectives()) {
    names.emplace_back(CollectiveKindName(static_cast<CollectiveKind>(kind)));
  }
  for (const CollectiveKind kind : kinds) expected_names.emplace_back(CollectiveKindName(kind));
  EXPECT_EQ(names, expected_names);
  std::vector<std::string> reductions, expected_reductions;
  for (const int reduction : got.reductions()) {
    reductions.emplace_back(ReductionName(static_cast<Reduction>(reduction)));
  }
  for (int i = 1; i <= static_cast<int>(kLastReduction); ++i) {
    expected_reductions.emplace_back(ReductionName(static_cast<Reduction>(i)));
  }
  EXPECT_EQ(reductions, expected_reductions);
  std::vector<std::string> dtypes, expected_dtypes;
  for (const int dtype : got.dtypes()) {
    dtypes.emplace_back(DTypeName(static_cast<DType>(dtype)));
  }
  for (int i = 0; i < 32; ++i) {  // bits of DTypes
    const auto dtype = static_cast<DType>(i);
    if (IsSupported(dtype)) expected_dtypes.emplace_back(DTypeName(dtype));
  }
  EXPECT_EQ(dtypes, expected_dtypes);
  EXPECT_THAT(got.transports(),
              ElementsAre(v1::TRANSPORT_UNARY, v1::TRANSPORT_STREAM, v1::TRANSPORT_RING));
}

// The host's devices share its memory and its processors (of a test daemon 1 GiB, and two threads).
TEST(CapabilitiesTest, EachDeviceHasItsPartOfTheMemory) {
  TestDaemon daemon;
  v1::GetCapabilitiesResponse got;
  grpc::ClientContext context;
  ASSERT_TRUE(v1::Capabilities::NewStub(daemon.Connect())
                  ->Get(&context, v1::GetCapabilitiesRequest(), &got)
                  .ok());
  ASSERT_EQ(got.devices_size(), 4);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(got.devices(i).device(), i);
    EXPECT_EQ(got.devices(i).name(), absl::StrCat("host:", i));
    EXPECT_EQ(got.devices(i).memory_bytes(), int64_t{1} << 28);
    EXPECT_EQ(got.devices(i).core_count(), 2);
  }
}

// A few bytes may stand for gigabytes.
TEST(SessionsTest, CompressedRequestsAreRefusedAndNotInflated) {
  TestDaemon daemon;
  const auto stub = v1::Sessions::NewStub(daemon.Connect());
  for (const auto algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    grpc::ClientContext context;
    context.set_compression_algorithm(algorithm);
    v1::OpenSessionRequest request;
    request.set_api_version(kApiVersion);
    request.set_label(std::string(1 << 20, 'a'));
    v1::OpenSessionResponse response;
    const grpc::Status status = stub->Open(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("is disabled"));
  }
  // The connection serves a client that does not compress.
  RpcRank client(daemon.Connect());
  EXPECT_OK(client.Open());
}

TEST(SessionsTest, AnotherVersionIsRefusedWithBothVersions) {
  TestDaemon daemon;
  RpcRank client(daemon.Connect());
  v1::OpenSessionRequest request;
  request.set_api_version(7);
  const absl::Status status = client.Open(request);
  ExpectError(status, absl::StatusCode::kUnimplemented, Reason::kVersion);
  EXPECT_THAT(std::string(status.message()), HasSubstr("version 7"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("version ", kApiVersion)));
  // Names of instances mean something else there, the log stands elsewhere: no world may have
  // both.
  for (const int32_t older : {1, 2}) {
    request.set_api_version(older);
    ExpectError(client.Open(request), absl::StatusCode::kUnimplemented, Reason::kVersion);
  }
  request.set_api_version(kApiVersion);
  EXPECT_OK(client.Open(request));
}

TEST(SessionsTest, AClosedSessionIsLost) {
  TestDaemon daemon;
  RpcRank client(daemon.Connect());
  ASSERT_OK(client.Open());
  EXPECT_OK(client.Renew());
  EXPECT_OK(client.Close());
  ExpectError(client.Renew(), absl::StatusCode::kNotFound, Reason::kSessionLost);
  ExpectError(client.Close(), absl::StatusCode::kNotFound, Reason::kSessionLost);
  ExpectError(client.Join("w", 1, 0), absl::StatusCode::kNotFound, Reason::kSessionLost);
  ExpectError(client.Submit(client.RegisterCommand(1, 1, 2)), absl::StatusCode::kNotFound,
              Reason::kSessionLost);
  ExpectError(client.Download(1).status(), absl::StatusCode::kNotFound, Reason::kSessionLost);
}

TEST(SessionsTest, ARestartedDaemonTellsTheSessionFromAnUnknownOne) {
  TestDaemon daemon;
  RpcRank client(daemon.Connect());
  ASSERT_OK(client.Open());
  const int64_t before = client.session;
  daemon.Restart();
  RpcRank again(daemon.Connect());
  // Another client has the same number by now; the old name must not reach it.
  ASSERT_OK(again.Open());
  EXPECT_NE(again.session, before);
  again.session = before;
  const absl::Status status = again.Renew();
  ExpectError(status, absl::StatusCode::kNotFound, Reason::kSessionLost);
  EXPECT_THAT(std::string(status.message()), HasSubstr("another start"));
}

TEST(SessionsTest, ALeaseRunsOutWithoutCalls) {
  TestDaemon daemon([](DaemonOptions* o) { o->node.lease = absl::Milliseconds(200); });
  RpcRank client(daemon.Connect());
  ASSERT_OK(client.Open());
  EXPECT_EQ(client.ListSessions()->sessions_size(), 1);
  EXPECT_TRUE(Eventually([&] { return client.ListSessions()->sessions_size() == 0; }));
  ExpectError(client.Renew(), absl::StatusCode::kNotFound, Reason::kSessionLost);
}

// Whether the lease is the daemon's, or the session has asked for it.
class LeasesTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Leases, LeasesTest, testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "AskedFor" : "OfTheDaemon");
});

TEST_P(LeasesTest, ALongCallKeepsItsOwn) {
  const bool is_asked_for = GetParam();
  TestDaemon daemon([&](DaemonOptions* options) {
    if (!is_asked_for) options->node.lease = absl::Milliseconds(300);
  });
  RpcRank client(daemon.Connect());
  v1::OpenSessionRequest open;
  if (is_asked_for) open.mutable_lease()->set_nanos(300'000'000);
  ASSERT_OK(client.Open(open));
  // Five leases long; rank 1 never comes.
  v1::JoinWorldRequest request;
  request.set_session(client.session);
  request.set_name("alone");
  request.set_size(2);
  request.mutable_join_timeout()->set_seconds(1);
  request.mutable_join_timeout()->set_nanos(500'000'000);
  v1::JoinWorldResponse response;
  const absl::Status status = Ask(*client.worlds, &v1::Worlds::Stub::Join, request, &response);
  ExpectError(status, absl::StatusCode::kDeadlineExceeded, Reason::kJoinTimeout);
  EXPECT_THAT(std::string(status.message()), HasSubstr("missing rank 1"));
  EXPECT_OK(client.Renew());
}

// Else its session might end before its first call, or within one.
TEST(SessionsTest, ALeaseHasSomeTime) {
  TestDaemon daemon;
  RpcRank client(daemon.Connect());
  for (const int nanos : {1, 199'999'999, 200'000'000, 200'000'001}) {
    v1::OpenSessionRequest request;
    request.mutable_lease()->set_nanos(nanos);
    v1::OpenSessionResponse response;
    ASSERT_OK(Ask(*client.sessions, &v1::Sessions::Stub::Open, request, &response));
    EXPECT_EQ(response.lease().seconds(), 0);
    EXPECT_EQ(response.lease().nanos(), std::max(nanos, 200'000'000));
  }
}

TEST(SessionsTest, UnattachedCallersOfAnotherUidMayOnlyRead) {
  TestDaemon daemon([](DaemonOptions* o) { o->trusted_uid = geteuid() + 1; });
  RpcRank client(daemon.Connect());
  ExpectError(client.Open(), absl::StatusCode::kPermissionDenied, Reason::kNotAttached);
  v1::ListDevicesResponse devices;
  EXPECT_OK(Ask(*client.diagnostics, &v1::Diagnostics::Stub::ListDevices, v1::ListDevicesRequest(),
                &devices));
  EXPECT_EQ(devices.devices_size(), 4);
  v1::OpenSessionRequest request;
  request.set_attach_token(std::string(16, 'x'));
  ExpectError(client.Open(request), absl::StatusCode::kPermissionDenied, Reason::kNotAttached);
}

// A session that has launched something, and holds its result.
void OpenAndRun(RpcRank* rank, const std::string& world) {
  ASSERT_OK(rank->Open());
  ASSERT_OK(rank->Join(world, 1, 0));
  ASSERT_OK(rank->Submit(rank->RegisterCommand(1, 1, 2)));
  ASSERT_OK(rank->Submit(rank->RunCommand(2, 1, 1, 0, {1, 2})));
  EXPECT_THAT(*rank->DownloadFloats(2), ElementsAre(1, 2));
}

// What a caller is told of devices, all together, and of bytes.
struct Told {
  explicit Told(RpcRank* rank) {
    v1::ListDevicesResponse devices;
    EXPECT_OK(Ask(*rank->diagnostics, &v1::Diagnostics::Stub::ListDevices, v1::ListDevicesRequest(),
                  &devices));
    for (const auto& device : devices.devices()) {
      launches += device.launch_count();
      sessions += device.session_count();
    }
    EXPECT_OK(
        Ask(*rank->diagnostics, &v1::Diagnostics::Stub::GetStats, v1::GetStatsRequest(), &stats));
  }
  int64_t launches = 0;
  int64_t sessions = 0;
  v1::GetStatsResponse stats;
};

// What another uid is told of the daemon: that it is there, and what that uid has itself.
TEST(DiagnosticsTest, OtherUidsAreToldNothingOfOthers) {
  for (const bool own : {true, false}) {
    SCOPED_TRACE(own ? "the daemon's uid" : "another uid");
    TestDaemon daemon([own](DaemonOptions* o) {
      AddTcp(o);
      o->trusted_uid = geteuid() + (own ? 0 : 1);
    });
    RpcRank other(daemon.ConnectTo(daemon.daemon().addresses()[1].ToString()));
    ASSERT_NO_FATAL_FAILURE(OpenAndRun(&other, "theirs"));
    RpcRank client(daemon.Connect());
    const Told told(&client);
    EXPECT_EQ(told.launches > 0, own);
    EXPECT_EQ(told.sessions, own ? 1 : 0);
    EXPECT_EQ(told.stats.memory_limit_bytes() > 0, own);
    EXPECT_EQ(told.stats.memory_used_bytes() > 0, own);
    EXPECT_EQ(told.stats.live_buffer_count() > 0, own);
    EXPECT_EQ(told.stats.published_run_count() > 0, own);
    EXPECT_EQ(told.stats.ByteSizeLong() > 0, own) << told.stats.ShortDebugString();

    grpc::ByteBuffer servers;
    const grpc::Status status =
        CallByName(daemon, "/grpc.channelz.v1.Channelz/GetServers", &servers);
    EXPECT_EQ(status.error_code(), own ? grpc::StatusCode::OK : grpc::StatusCode::PERMISSION_DENIED)
        << status.error_message();
    EXPECT_EQ(servers.Valid() && servers.Length() > 0, own);

    // A user that has a session is told of that, and of what it holds.
    if (!own) continue;
    const Told before(&other);
    EXPECT_EQ(before.sessions, 1);
    EXPECT_GT(before.stats.memory_used_bytes(), 0);
    ASSERT_NO_FATAL_FAILURE(OpenAndRun(&client, "ours"));
    EXPECT_EQ(Told(&client).sessions, 2);
    EXPECT_GT(Told(&client).launches, told.launches);
    EXPECT_GT(Told(&client).stats.memory_used_bytes(), told.stats.memory_used_bytes());
    const Told after(&other);
    EXPECT_EQ(after.launches, 0);
    EXPECT_EQ(after.sessions, 1);
    EXPECT_EQ(after.stats.ShortDebugString(), before.stats.ShortDebugString());
  }
}

// What a rank asks all the time, and what it begins with, look at what is its own: with so many
// sessions no slice has as much work as to look at all of them.
TEST(SessionsTest, RenewAndJoinLookAtNoOtherSessions) {
  constexpr int kSessions = 800;
  TestDaemon daemon([](DaemonOptions* o) { o->node.max_sessions = 2 * kSessions; });
  RpcRank client(daemon.Connect());
  for (int i = 0; i < kSessions; ++i) ASSERT_OK(client.Open());
  ASSERT_OK(client.Renew());
  ASSERT_OK(client.Join("one", 1, 0));
  EXPECT_LT(Told(&client).stats.largest_slice_work(), kSessions / 2);
  // To list them is such a look: that it is counted shows what the others would have been.
  EXPECT_EQ(client.ListSessions()->sessions_size(), kSessions);
  EXPECT_GE(Told(&client).stats.largest_slice_work(), kSessions);
}

TEST(SessionsTest, TenantsSeeAndUseOnlyTheirOwn) {
  TestDaemon daemon(AddTcp);
  const std::string tcp = daemon.daemon().addresses()[1].ToString();
  RpcRank here(daemon.Connect());
  RpcRank there(daemon.ConnectTo(tcp));
  ASSERT_OK(here.Open());
  ASSERT_OK(there.Open());
  // The daemon's own uid sees all; loopback sees what came over loopback.
  EXPECT_EQ(here.ListSessions()->sessions_size(), 2);
  ASSERT_EQ(there.ListSessions()->sessions_size(), 1);
  EXPECT_EQ(there.ListSessions()->sessions(0).tenant(), "loopback");

  // Here a world waits for its second rank, and a command has failed.
  RpcRank first(daemon.Connect());
  ASSERT_OK(first.Open());
  std::thread joins([&] { EXPECT_OK(first.Join("pair", 2, 0)); });
  EXPECT_TRUE(Eventually([&] { return here.ListPending()->pending_size() == 1; }));
  EXPECT_EQ(there.ListPending()->pending_size(), 0);
  v1::DescribeWorldsRequest describe;
  v1::DescribeWorldsResponse worlds;
  EXPECT_OK(Ask(*here.worlds, &v1::Worlds::Stub::Describe, describe, &worlds));
  EXPECT_EQ(worlds.worlds_size(), 1);
  describe.set_world(worlds.worlds_size() == 1 ? worlds.worlds(0).world() : 0);
  EXPECT_OK(Ask(*here.worlds, &v1::Worlds::Stub::Describe, describe, &worlds));
  EXPECT_EQ(worlds.worlds_size(), 1);
  ExpectError(Ask(*there.worlds, &v1::Worlds::Stub::Describe, describe, &worlds),
              absl::StatusCode::kNotFound, Reason::kUnknownName);
  describe.clear_world();
  EXPECT_OK(Ask(*there.worlds, &v1::Worlds::Stub::Describe, describe, &worlds));
  EXPECT_EQ(worlds.worlds_size(), 0);
  const absl::Status failed = here.Submit(here.RunCommand(1, 7, 1, 0, {1, 2}));
  ExpectError(failed, absl::StatusCode::kNotFound, Reason::kUnknownName);
  v1::GetErrorRequest get_error;
  get_error.set_error_id(ErrorOf(failed).id.value());
  v1::GetErrorResponse error;
  EXPECT_OK(Ask(*here.diagnostics, &v1::Diagnostics::Stub::GetError, get_error, &error));
  EXPECT_EQ(error.error().reason(), "UNKNOWN_NAME");
  ExpectError(Ask(*there.diagnostics, &v1::Diagnostics::Stub::GetError, get_error, &error),
              absl::StatusCode::kNotFound, Reason::kUnknownName);
  const auto sessions_of_events = [](RpcRank& rank) {
    v1::ListFlightEventsRequest list;
    list.set_limit(1000);
    v1::ListFlightEventsResponse events;
    EXPECT_OK(Ask(*rank.diagnostics, &v1::Diagnostics::Stub::ListFlightEvents, list, &events));
    std::set<int64_t> sessions;
    for (const auto& event : events.events()) sessions.insert(event.session());
    return sessions;
  };
  EXPECT_THAT(sessions_of_events(there), ElementsAre(there.session));
  EXPECT_THAT(sessions_of_events(here), IsSupersetOf({here.session, there.session}));
  EXPECT_OK(here.Join("pair", 2, 1));
  joins.join();

  there.session = here.session;
  ExpectError(there.Renew(), absl::StatusCode::kNotFound, Reason::kSessionLost);
  ExpectError(there.Close(), absl::StatusCode::kNotFound, Reason::kSessionLost);
  ExpectError(there.Submit(there.RegisterCommand(1, 1, 2)), absl::StatusCode::kNotFound,
              Reason::kSessionLost);
  EXPECT_OK(here.Renew());
}

TEST(SessionsTest, HostileRequestsAreRefusedWithTheField) {
  TestDaemon daemon;
  RpcRank client(daemon.Connect());
  v1::OpenSessionRequest request;
  request.set_device_count(-1);
  EXPECT_THAT(std::string(client.Open(request).message()), HasSubstr("device_count"));
  request.Clear();
  request.add_devices(-5);
  EXPECT_THAT(std::string(client.Open(request).message()), HasSubstr("devices"));
  request.Clear();
  request.add_devices(4);
  ExpectError(client.Open(request), absl::StatusCode::kNotFound, Reason::kUnknownName);
  request.Clear();
  request.mutable_lease()->set_seconds(std::numeric_limits<int64_t>::min());
  EXPECT_THAT(std::string(client.Open(request).message()), HasSubstr("lease"));
  request.Clear();
  request.set_label(std::string(257, 'x'));
  EXPECT_THAT(std::string(client.Open(request).message()), HasSubstr("label"));

  ASSERT_OK(client.Open());
  EXPECT_THAT(std::string(client.Join("", 1, 0).message()), HasSubstr("name"));
  for (const auto& [size, rank] : std::vector<std::pair<int, int>>{
           {0, 0}, {-1, 0}, {2, 2}, {2, -1}, {std::numeric_limits<int>::max(), 0}}) {
    const absl::Status status = client.Join("w", size, rank, absl::Milliseconds(10));
    ExpectError(status, absl::StatusCode::kInvalidArgument, Reason::kMalformed);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(size == 2 ? "ranks of a world of 2 go" : "a world has 1 to"));
  }
  v1::Command command;
  EXPECT_EQ(client.Submit(command).code(), absl::StatusCode::kInvalidArgument);
  command.set_sequence(-1);
  command.mutable_cancel()->set_run_sequence(1);
  EXPECT_THAT(std::string(client.Submit(command).message()), HasSubstr("sequence"));
  ExpectError(client.Wait(0), absl::StatusCode::kInvalidArgument, Reason::kMalformed);
  client.session = -1;
  ExpectError(client.Renew(), absl::StatusCode::kInvalidArgument, Reason::kMalformed);
}

TEST(GraphsTest, TwoRanksReduceByUnaryCalls) {
  TestDaemon daemon;
  Pair pair(daemon);
  std::thread other([&] { EXPECT_OK(pair.b.Submit(pair.b.RunCommand(2, 1, 1, 0, {10, 20}))); });
  EXPECT_OK(pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2})));
  other.join();
  EXPECT_THAT(*pair.a.DownloadFloats(2), ElementsAre(11, 22));
  EXPECT_THAT(*pair.b.DownloadFloats(2), ElementsAre(11, 22));
}

TEST(GraphsTest, TwoRanksReduceOverLoopback) {
  TestDaemon daemon([](DaemonOptions* o) {
    o->insecure_loopback = true;
    o->listen.push_back(*ParseListenAddress("[::1]:0"));
    o->listen.push_back(*ParseListenAddress("127.0.0.1:0"));
  });
  Pair pair(daemon, daemon.daemon().addresses()[2].ToString());
  std::thread other([&] { EXPECT_OK(pair.b.Submit(pair.b.RunCommand(2, 1, 1, 0, {3, 4}))); });
  EXPECT_OK(pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2})));
  other.join();
  EXPECT_THAT(*pair.a.DownloadFloats(2), ElementsAre(4, 6));
}

TEST(GraphsTest, AMismatchIsToldToBothAndKept) {
  TestDaemon daemon;
  Pair pair(daemon);
  EXPECT_OK(pair.b.Submit(pair.b.RegisterCommand(2, 2, 3)));
  absl::Status at_b;
  std::thread other([&] { at_b = pair.b.Submit(pair.b.RunCommand(3, 2, 1, 0, {1, 2, 3})); });
  const absl::Status at_a = pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2}));
  other.join();
  for (const absl::Status& status : {at_a, at_b}) {
    ExpectError(status, absl::StatusCode::kInvalidArgument, Reason::kMismatch);
    EXPECT_EQ(ErrorOf(status).op, "all_reduce");
    EXPECT_EQ(ErrorOf(status).ranks.size(), 2u);
    EXPECT_THAT(std::string(status.message()), HasSubstr("f32[3]"));
    EXPECT_EQ(ErrorOf(status).instance, "group 0 call 0");
    EXPECT_THAT(ErrorOf(status).ended,
                ElementsAre(Error::EndedEpoch{WorldId(pair.a.world), Epoch(2)}));
  }
  EXPECT_EQ(ErrorOf(at_a).id, ErrorOf(at_b).id);

  v1::GetErrorRequest request;
  request.set_error_id(ErrorOf(at_a).id.value());
  v1::GetErrorResponse response;
  EXPECT_OK(Ask(*pair.a.diagnostics, &v1::Diagnostics::Stub::GetError, request, &response));
  EXPECT_EQ(response.error().reason(), "MISMATCH");
  EXPECT_EQ(response.error().message(), ErrorOf(at_a).message);
  ASSERT_EQ(response.error().ended_size(), 1);
  EXPECT_EQ(response.error().ended(0).world(), pair.a.world);
  EXPECT_EQ(response.error().ended(0).open_epoch(), 2);
  request.set_error_id(123456);
  ExpectError(Ask(*pair.a.diagnostics, &v1::Diagnostics::Stub::GetError, request, &response),
              absl::StatusCode::kNotFound, Reason::kUnknownName);
}

TEST(GraphsTest, WithoutAPositionTheDaemonCounts) {
  TestDaemon daemon;
  Pair pair(daemon);
  for (int i = 0; i < 3; ++i) {
    std::thread other([&] {
      EXPECT_OK(pair.b.Submit(pair.b.RunCommand(2 + i, 1, 1, i, {10, 20})));
    });
    EXPECT_OK(pair.a.Submit(pair.a.RunCommand(2 + i, 1, 1, -1, {1, 2})));
    other.join();
  }
  v1::DescribeWorldsResponse worlds;
  EXPECT_OK(Ask(*pair.a.worlds, &v1::Worlds::Stub::Describe, v1::DescribeWorldsRequest(), &worlds));
  ASSERT_EQ(worlds.worlds_size(), 1);
  for (const v1::World::Member& member : worlds.worlds(0).members()) {
    EXPECT_EQ(member.next().step(), 0);
    EXPECT_EQ(member.next().call(), 3);
  }
}

v1::Command Refusal(const RpcRank& rank, int64_t sequence, int64_t epoch, int64_t call) {
  v1::Command command;
  command.set_sequence(sequence);
  v1::Refuse* refuse = command.mutable_refuse();
  refuse->set_world(rank.world);
  refuse->set_epoch(epoch);
  refuse->add_members()->set_rank(rank.rank);
  refuse->mutable_members(0)->add_calls()->set_first(call);
  refuse->mutable_members(0)->mutable_calls(0)->set_next(call + 1);
  refuse->mutable_why()->set_code(3);
  refuse->mutable_why()->set_reason("BAD_TYPE");
  refuse->mutable_why()->set_message("a batch of 31 rows, 32 are expected");
  refuse->mutable_why()->set_source("train.cc:9");
  return command;
}

TEST(GraphsTest, ARefusalEndsTheEpochAndIsToldToWhoWaits) {
  TestDaemon daemon;
  Pair pair(daemon);
  absl::Status told;
  std::thread waiting([&] { told = pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2})); });
  ASSERT_TRUE(Eventually([&] { return pair.b.ListPending()->pending_size() == 1; }));
  const absl::Status own = pair.b.Submit(Refusal(pair.b, 2, 1, 0));
  waiting.join();
  ExpectError(own, absl::StatusCode::kInvalidArgument, Reason::kBadType);
  EXPECT_EQ(ErrorOf(own).source, "train.cc:9");
  EXPECT_GT(ErrorOf(own).id, ErrorId());
  ExpectError(told, absl::StatusCode::kAborted, Reason::kPeerRefused);
  EXPECT_EQ(ErrorOf(told).culprit.rank, 1);
  EXPECT_THAT(std::string(told.message()), HasSubstr("a batch of 31 rows, 32 are expected"));
  EXPECT_THAT(std::string(told.message()), HasSubstr("train.cc:9"));
  for (const absl::Status& status : {own, told}) {
    EXPECT_THAT(ErrorOf(status).ended,
                ElementsAre(Error::EndedEpoch{WorldId(pair.a.world), Epoch(2)}));
  }
  // Both have counted the call: the next ones meet.
  std::thread other([&] { EXPECT_OK(pair.b.Submit(pair.b.RunCommand(3, 1, 2, 1, {10, 20}))); });
  EXPECT_OK(pair.a.Submit(pair.a.RunCommand(3, 1, 2, 1, {1, 2})));
  other.join();
  EXPECT_THAT(*pair.a.DownloadFloats(3), ElementsAre(11, 22));
}

TEST(GraphsTest, ACallThatAnotherRankHasPassedFailsAlone) {
  TestDaemon daemon;
  Pair pair(daemon);
  ExpectError(pair.b.Submit(Refusal(pair.b, 2, 1, 0)), absl::StatusCode::kInvalidArgument,
              Reason::kBadType);
  const absl::Status told = pair.a.Submit(pair.a.RunCommand(2, 1, 2, 0, {1, 2}));
  ExpectError(told, absl::StatusCode::kInvalidArgument, Reason::kMismatch);
  EXPECT_TRUE(ErrorOf(told).alone);
  EXPECT_TRUE(ErrorOf(told).ended.empty());
  // The epoch goes on.
  std::thread other([&] { EXPECT_OK(pair.b.Submit(pair.b.RunCommand(3, 1, 2, 1, {10, 20}))); });
  EXPECT_OK(pair.a.Submit(pair.a.RunCommand(3, 1, 2, 1, {1, 2})));
  other.join();
  // A refusal of what others have passed ends nothing, and says which epoch is open.
  std::thread third([&] { EXPECT_OK(pair.b.Submit(pair.b.RunCommand(4, 1, 2, 2, {10, 20}))); });
  EXPECT_OK(pair.a.Submit(pair.a.RunCommand(4, 1, 2, 2, {1, 2})));
  third.join();
  ExpectError(pair.a.Submit(Refusal(pair.a, 5, 2, 3)), absl::StatusCode::kInvalidArgument,
              Reason::kBadType);
  const absl::Status late = pair.b.Submit(Refusal(pair.b, 5, 3, 3));
  EXPECT_THAT(ErrorOf(late).ended, ElementsAre(Error::EndedEpoch{WorldId(pair.a.world), Epoch(3)}));
}

TEST(GraphsTest, ACallThatRanOutOfTimeLeavesItsRun) {
  TestDaemon daemon([](DaemonOptions* o) { o->max_wait = absl::Milliseconds(300); });
  Pair pair(daemon);
  // The client's own deadline.
  const absl::Status own =
      pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2}), absl::Milliseconds(100));
  EXPECT_EQ(own.code(), absl::StatusCode::kDeadlineExceeded) << own;
  // The daemon's, for a client that has patience.
  ExpectError(pair.a.Wait(2), absl::StatusCode::kDeadlineExceeded, Reason::kTransportTimeout);
  // A repeat waits for the same run.
  ExpectError(pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2})),
              absl::StatusCode::kDeadlineExceeded, Reason::kTransportTimeout);
  EXPECT_OK(pair.b.Submit(pair.b.RunCommand(2, 1, 1, 0, {10, 20})));
  EXPECT_OK(pair.a.Wait(2));
  EXPECT_OK(pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {5, 5})));  // answered, not executed
  EXPECT_THAT(*pair.a.DownloadFloats(2), ElementsAre(11, 22));
}

TEST(GraphsTest, AGapIsWaitedForAndThenAnError) {
  TestDaemon daemon([](DaemonOptions* o) { o->node.gap_timeout = absl::Milliseconds(200); });
  Pair pair(daemon);
  ExpectError(pair.a.Submit(pair.a.RegisterCommand(3, 3, 2)), absl::StatusCode::kFailedPrecondition,
              Reason::kSequenceGap);
  // In the wrong order, but in time.
  std::thread late([&] { EXPECT_OK(pair.a.Submit(pair.a.RegisterCommand(3, 3, 2))); });
  RpcRank second(daemon.Connect());
  second.session = pair.a.session;
  EXPECT_OK(second.Submit(second.RegisterCommand(2, 2, 2)));
  late.join();
}

TEST(GraphsTest, PendingNamesWhoIsMissing) {
  TestDaemon daemon;
  Pair pair(daemon);
  std::thread first([&] { EXPECT_OK(pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2}))); });
  RpcRank observer(daemon.Connect());
  v1::ListPendingResponse pending;
  EXPECT_TRUE(Eventually([&] {
    pending = *observer.ListPending();
    return pending.pending_size() == 1;
  }));
  EXPECT_EQ(pending.pending(0).world_name(), "pair");
  EXPECT_EQ(pending.pending(0).what(), "all_reduce SUM f32[2]");
  EXPECT_EQ(pending.pending(0).source(), "rpc_test.cc:1");
  EXPECT_THAT(pending.pending(0).voted_ranks(), ElementsAre(0));
  EXPECT_THAT(pending.pending(0).missing_ranks(), ElementsAre(1));
  EXPECT_OK(pair.b.Submit(pair.b.RunCommand(2, 1, 1, 0, {1, 2})));
  first.join();
  EXPECT_EQ(observer.ListPending()->pending_size(), 0);
}

TEST(WorldsTest, AbortAndLeaveAreToldToWhoWaits) {
  TestDaemon daemon;
  Pair pair(daemon);
  absl::Status told;
  std::thread waiting([&] { told = pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2})); });
  ASSERT_TRUE(Eventually([&] { return pair.b.ListPending()->pending_size() == 1; }));
  v1::AbortWorldRequest abort;
  abort.set_session(pair.b.session);
  abort.set_world(pair.b.world);
  abort.set_rank(1);
  abort.set_message("bad data on rank 1");
  v1::AbortWorldResponse aborted;
  // Not the open one: nothing happens.
  abort.set_epoch(2);
  EXPECT_OK(Ask(*pair.b.worlds, &v1::Worlds::Stub::Abort, abort, &aborted));
  abort.set_epoch(-1);
  ExpectError(Ask(*pair.b.worlds, &v1::Worlds::Stub::Abort, abort, &aborted),
              absl::StatusCode::kInvalidArgument, Reason::kMalformed);
  EXPECT_EQ(pair.b.ListPending()->pending_size(), 1);
  abort.set_epoch(1);
  EXPECT_OK(Ask(*pair.b.worlds, &v1::Worlds::Stub::Abort, abort, &aborted));
  waiting.join();
  ExpectError(told, absl::StatusCode::kAborted, Reason::kAborted);
  EXPECT_EQ(ErrorOf(told).culprit.rank, 1);
  EXPECT_THAT(std::string(told.message()), HasSubstr("bad data on rank 1"));

  std::thread again([&] { told = pair.a.Submit(pair.a.RunCommand(3, 1, 2, 1, {1, 2})); });
  ASSERT_TRUE(Eventually([&] { return pair.b.ListPending()->pending_size() == 1; }));
  EXPECT_OK(pair.b.Close());
  again.join();
  ExpectError(told, absl::StatusCode::kAborted, Reason::kPeerLeft);
  EXPECT_EQ(ErrorOf(told).culprit.rank, 1);
}

TEST(SessionsTest, ASessionThatEndsAnswersWhoeverWaitsInIt) {
  TestDaemon daemon;
  Pair pair(daemon);
  const auto twin = [&] {
    auto rank = std::make_unique<RpcRank>(daemon.Connect());
    rank->session = pair.a.session;
    return rank;
  };
  std::vector<absl::Status> told(4);
  const absl::Time started = absl::Now();
  std::vector<std::thread> waits;
  waits.emplace_back([&] { told[0] = pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2})); });
  ASSERT_TRUE(Eventually([&] { return pair.b.ListPending()->pending_size() == 1; }));
  waits.emplace_back([&] { told[1] = twin()->Wait(2); });
  waits.emplace_back([&] { told[2] = twin()->Download(2).status(); });
  waits.emplace_back([&] { told[3] = twin()->Join("another", 2, 0); });
  ASSERT_TRUE(Eventually([&] {
    v1::DescribeWorldsResponse worlds;
    return Ask(*pair.b.worlds, &v1::Worlds::Stub::Describe, v1::DescribeWorldsRequest(), &worlds)
               .ok() &&
           worlds.worlds_size() == 2;
  }));
  EXPECT_OK(twin()->Close());
  for (std::thread& wait : waits) wait.join();
  for (const absl::Status& status : told) {
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  }
  EXPECT_LT(absl::Now() - started, absl::Seconds(20));
}

TEST(WorldsTest, DescribeGroupsAndRefusals) {
  TestDaemon daemon;
  Pair pair(daemon);
  v1::CreateGroupRequest create;
  create.set_session(pair.a.session);
  create.set_world(pair.a.world);
  create.set_rank(0);
  create.add_ranks(1);
  create.add_ranks(0);
  v1::CreateGroupResponse group;
  EXPECT_OK(Ask(*pair.a.worlds, &v1::Worlds::Stub::CreateGroup, create, &group));
  EXPECT_GT(group.group(), 0);
  // The same request, and another one.
  const int32_t first = group.group();
  create.set_session(pair.b.session);
  create.set_rank(1);
  create.set_step(0);
  create.set_number(0);
  EXPECT_OK(Ask(*pair.b.worlds, &v1::Worlds::Stub::CreateGroup, create, &group));
  EXPECT_EQ(group.group(), first);
  create.set_number(1);
  EXPECT_OK(Ask(*pair.b.worlds, &v1::Worlds::Stub::CreateGroup, create, &group));
  EXPECT_NE(group.group(), first);
  create.set_number(-1);
  EXPECT_THAT(
      std::string(Ask(*pair.b.worlds, &v1::Worlds::Stub::CreateGroup, create, &group).message()),
      HasSubstr("number: expected a number from 0"));
  create.clear_number();
  EXPECT_THAT(
      std::string(Ask(*pair.b.worlds, &v1::Worlds::Stub::CreateGroup, create, &group).message()),
      HasSubstr("step, number: expected both or none"));
  create.clear_step();
  create.set_session(pair.a.session);
  create.set_rank(0);
  create.add_ranks(0);
  absl::Status refused = Ask(*pair.a.worlds, &v1::Worlds::Stub::CreateGroup, create, &group);
  ExpectError(refused, absl::StatusCode::kInvalidArgument, Reason::kMalformed);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rank 0 is twice"));
  create.mutable_ranks()->RemoveLast();
  // Somebody else's rank.
  create.set_rank(1);
  refused = Ask(*pair.a.worlds, &v1::Worlds::Stub::CreateGroup, create, &group);
  ExpectError(refused, absl::StatusCode::kNotFound, Reason::kUnknownName);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("this session is not rank 1"));

  v1::DescribeWorldsResponse worlds;
  EXPECT_OK(Ask(*pair.a.worlds, &v1::Worlds::Stub::Describe, v1::DescribeWorldsRequest(), &worlds));
  ASSERT_EQ(worlds.worlds_size(), 1);
  EXPECT_EQ(worlds.worlds(0).name(), "pair");
  EXPECT_EQ(worlds.worlds(0).members_size(), 2);
  EXPECT_EQ(worlds.worlds(0).members(1).session(), pair.b.session);
  ASSERT_EQ(worlds.worlds(0).groups_size(), 3);
  EXPECT_THAT(worlds.worlds(0).groups(1).ranks(), ElementsAre(1, 0));
  v1::DescribeWorldsRequest one;
  one.set_world(999);
  ExpectError(Ask(*pair.a.worlds, &v1::Worlds::Stub::Describe, one, &worlds),
              absl::StatusCode::kNotFound, Reason::kUnknownName);

  RpcRank third(daemon.Connect());
  ASSERT_OK(third.Open());
  ExpectError(third.Join("pair", 2, 1), absl::StatusCode::kAlreadyExists, Reason::kDuplicateRank);
  ExpectError(third.Join("pair", 3, 2), absl::StatusCode::kInvalidArgument, Reason::kWorldSize);

  v1::ReformWorldRequest reform;
  reform.set_session(pair.a.session);
  reform.set_world(pair.a.world);
  reform.set_grow_to(4);
  v1::ReformWorldResponse reformed;
  ExpectError(Ask(*pair.a.worlds, &v1::Worlds::Stub::Reform, reform, &reformed),
              absl::StatusCode::kUnimplemented, Reason::kUnsupported);
}

TEST(TensorsTest, BytesGoThroughStagingAndBackInParts) {
  TestDaemon daemon;
  RpcRank client(daemon.Connect());
  ASSERT_OK(client.Open());
  const int64_t count = 3 * (1 << 16) + 7;  // floats: three chunks and a bit
  std::string bytes(static_cast<size_t>(count) * 4, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + i / 251);

  v1::CreateStagingRequest create;
  create.set_session(client.session);
  create.set_size_bytes(static_cast<int64_t>(bytes.size()));
  v1::CreateStagingResponse staging;
  ASSERT_OK(Ask(*client.tensors, &v1::Tensors::Stub::CreateStaging, create, &staging));
  EXPECT_GE(staging.size_bytes(), static_cast<int64_t>(bytes.size()));
  constexpr size_t kChunk = 256 << 10;
  v1::WriteStagingRequest write;
  v1::WriteStagingResponse written;
  write.set_session(client.session);
  write.set_arena(staging.arena());
  for (size_t at = 0; at < bytes.size(); at += kChunk) {
    write.set_offset_bytes(static_cast<int64_t>(at));
    write.set_data(bytes.substr(at, kChunk));
    ASSERT_OK(Ask(*client.tensors, &v1::Tensors::Stub::WriteStaging, write, &written));
  }
  v1::GetStatsResponse stats;
  ASSERT_OK(
      Ask(*client.diagnostics, &v1::Diagnostics::Stub::GetStats, v1::GetStatsRequest(), &stats));
  EXPECT_EQ(stats.streamed_bytes(), static_cast<int64_t>(bytes.size()));
  // Outside, too long, negative, another arena.
  write.set_offset_bytes(staging.size_bytes() - 1);
  write.set_data("ab");
  EXPECT_EQ(Ask(*client.tensors, &v1::Tensors::Stub::WriteStaging, write, &written).code(),
            absl::StatusCode::kInvalidArgument);
  write.set_offset_bytes(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(Ask(*client.tensors, &v1::Tensors::Stub::WriteStaging, write, &written).code(),
            absl::StatusCode::kInvalidArgument);
  write.set_offset_bytes(-1);
  EXPECT_EQ(Ask(*client.tensors, &v1::Tensors::Stub::WriteStaging, write, &written).code(),
            absl::StatusCode::kInvalidArgument);
  write.set_offset_bytes(0);
  write.set_data(std::string(kChunk + 1, 'x'));
  EXPECT_EQ(Ask(*client.tensors, &v1::Tensors::Stub::WriteStaging, write, &written).code(),
            absl::StatusCode::kInvalidArgument);
  write.set_arena(staging.arena() + 1000);
  write.set_data("a");
  EXPECT_EQ(Ask(*client.tensors, &v1::Tensors::Stub::WriteStaging, write, &written).code(),
            absl::StatusCode::kNotFound);

  v1::Command command;
  command.set_sequence(1);
  v1::CreateTensor* tensor = command.mutable_create_tensor();
  tensor->mutable_id()->set_slot(5);
  tensor->mutable_id()->set_generation(1);
  tensor->mutable_type()->set_dtype(v1::DTYPE_F32);
  tensor->mutable_type()->add_dims(count);
  tensor->mutable_source()->mutable_external()->set_arena(staging.arena());
  ASSERT_OK(client.Submit(command));

  const auto parts = client.Download(5);
  ASSERT_TRUE(parts.ok()) << parts.status();
  ASSERT_EQ(parts->size(), 4u);
  std::string back;
  for (size_t i = 0; i < parts->size(); ++i) {
    EXPECT_LE((*parts)[i].data().size(), kChunk);
    EXPECT_EQ((*parts)[i].offset_bytes(), static_cast<int64_t>(back.size()));
    EXPECT_EQ((*parts)[i].has_type(), i == 0);
    back += (*parts)[i].data();
  }
  EXPECT_EQ((*parts)[0].type().dims(0), count);
  EXPECT_TRUE(back == bytes);

  const auto range = client.Download(5, 1000, 2000);
  ASSERT_TRUE(range.ok()) << range.status();
  ASSERT_EQ(range->size(), 1u);
  EXPECT_TRUE((*range)[0].data() == bytes.substr(1000, 2000));
  const auto rest = client.Download(5, static_cast<int64_t>(bytes.size()) - 3, 100);
  ASSERT_TRUE(rest.ok()) << rest.status();
  EXPECT_EQ((*rest)[0].data().size(), 3u);
  EXPECT_EQ(client.Download(5, static_cast<int64_t>(bytes.size()) + 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client.Download(5, -1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client.Download(6).status().code(), absl::StatusCode::kNotFound);

  v1::ReleaseTensorsRequest release;
  release.set_session(client.session);
  release.set_sequence(2);
  *release.add_tensors() = tensor->id();
  v1::ReleaseTensorsResponse released;
  EXPECT_OK(Ask(*client.tensors, &v1::Tensors::Stub::Release, release, &released));
  EXPECT_EQ(client.Download(5).status().code(), absl::StatusCode::kNotFound);
}

// A session with two tensors: 16 MiB, more than a connection takes in before anybody reads, in slot
// 5, and one number in slot 6.
struct TwoTensors {
  explicit TwoTensors(const TestDaemon& daemon) : client(daemon.Connect()) {
    constexpr int64_t kBytes = 16 << 20;
    v1::OpenSessionRequest open;
    open.add_devices(0);
    EXPECT_OK(client.Open(open));
    v1::CreateStagingRequest create;
    create.set_session(client.session);
    create.set_size_bytes(kBytes);
    v1::CreateStagingResponse staging;
    EXPECT_OK(Ask(*client.tensors, &v1::Tensors::Stub::CreateStaging, create, &staging));
    v1::Command command;
    v1::CreateTensor* tensor = command.mutable_create_tensor();
    tensor->mutable_id()->set_generation(1);
    tensor->mutable_type()->set_dtype(v1::DTYPE_U8);
    tensor->mutable_type()->add_dims(kBytes);
    tensor->mutable_id()->set_slot(5);
    tensor->mutable_source()->mutable_external()->set_arena(staging.arena());
    command.set_sequence(1);
    EXPECT_OK(client.Submit(command));
    tensor->mutable_id()->set_slot(6);
    tensor->mutable_type()->set_dims(0, 1);
    tensor->mutable_source()->set_inline_("7");
    command.set_sequence(2);
    EXPECT_OK(client.Submit(command));
  }
  // Asks for the large one, and reads nothing of it. Its first part is on its way.
  std::unique_ptr<grpc::ClientReader<v1::DownloadTensorResponse>> Begin(
      grpc::ClientContext* context) {
    v1::DownloadTensorRequest request;
    request.set_session(client.session);
    request.mutable_tensor()->set_slot(5);
    request.mutable_tensor()->set_generation(1);
    auto reader = client.tensors->Download(context, request);
    reader->WaitForInitialMetadata();
    return reader;
  }
  RpcRank client;
};

TEST(TensorsTest, ASessionReadsSoManyTensorsAtATime) {
  TestDaemon daemon([](DaemonOptions* options) { options->node.max_session_downloads = 2; });
  TwoTensors two(daemon);
  grpc::ClientContext contexts[2];
  const auto first = two.Begin(&contexts[0]);
  const auto second = two.Begin(&contexts[1]);
  const absl::Status refused = two.client.Download(6).status();
  ExpectError(refused, absl::StatusCode::kResourceExhausted, Reason::kQuota);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("holds 2 downloads of 2"));
  // Another session has its own.
  EXPECT_OK(TwoTensors(daemon).client.Download(6).status());
  contexts[0].TryCancel();
  EXPECT_TRUE(Eventually([&] { return two.client.Download(6).ok(); }));
  contexts[1].TryCancel();
  first->Finish();
  second->Finish();
}

TEST(TensorsTest, ALongDownloadKeepsItsSessionsLease) {
  TestDaemon daemon([](DaemonOptions* options) { options->node.lease = absl::Milliseconds(300); });
  TwoTensors two(daemon);
  grpc::ClientContext context;
  const auto reader = two.Begin(&context);
  // One that begins later and calls no more has ended.
  RpcRank other(daemon.Connect());
  EXPECT_OK(other.Open());
  const auto has = [&other](int64_t session) {
    const auto sessions = other.ListSessions();
    return std::any_of(sessions->sessions().begin(), sessions->sessions().end(),
                       [session](const auto& one) { return one.session() == session; });
  };
  EXPECT_TRUE(Eventually([&] { return !has(other.session); }));
  EXPECT_TRUE(has(two.client.session));
  context.TryCancel();
  reader->Finish();
}

TEST(TensorsTest, OneAfterTheOtherIsOneAtATime) {
  TestDaemon daemon([](DaemonOptions* options) { options->node.max_session_downloads = 1; });
  TwoTensors two(daemon);
  for (int i = 0; i < 300; ++i) ASSERT_OK(two.client.Download(6).status());
}

// A reader that has begun, and reads nothing, is told so by the daemon, and holds nothing more.
void ExpectALateReaderIsTold(TestDaemon& daemon) {
  TwoTensors two(daemon);
  grpc::ClientContext context;
  const auto reader = two.Begin(&context);
  ASSERT_FALSE(two.client.Download(6).ok());
  EXPECT_TRUE(Eventually([&] { return two.client.Download(6).ok(); }));
  v1::DownloadTensorResponse part;
  while (reader->Read(&part)) {
  }
  const absl::Status told = FromGrpc(reader->Finish());
  ExpectError(told, absl::StatusCode::kDeadlineExceeded, Reason::kTransportTimeout);
  EXPECT_THAT(std::string(told.message()), HasSubstr("has not taken"));
}

TEST(TensorsTest, WhoDoesNotReadAPartIsToldSo) {
  TestDaemon daemon([](DaemonOptions* options) {
    options->node.max_session_downloads = 1;
    options->download_timeout = absl::Milliseconds(100);
  });
  ExpectALateReaderIsTold(daemon);
}

// Whatever time each part may take.
TEST(TensorsTest, WhoDoesNotComeToTheEndInTimeIsToldSo) {
  TestDaemon daemon([](DaemonOptions* options) {
    options->node.max_session_downloads = 1;
    options->download_timeout = absl::Hours(1);
    options->max_wait = absl::Seconds(3);
  });
  ExpectALateReaderIsTold(daemon);
}

using Stream = grpc::ClientReaderWriter<v1::CommandsRequest, v1::CommandsResponse>;

struct OpenStream {
  explicit OpenStream(RpcRank& rank) {
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
    stream = rank.log->Commands(&context);
  }
  bool Send(int64_t session, const v1::Command& command) {
    v1::CommandsRequest request;
    request.set_session(session);
    *request.mutable_command() = command;
    return stream->Write(request);
  }
  grpc::ClientContext context;
  std::unique_ptr<Stream> stream;
};

// More than may wait that nobody has taken; and larger ones behind small ones, which gRPC sends
// piece by piece as these make room.
TEST(CommandStreamTest, AnyNumberOfCommandsMayCome) {
  TestDaemon daemon;
  RpcRank client(daemon.Connect());
  OpenStream open(client);
  constexpr int kCommands = kMaxLaterMessages + 1000;
  constexpr int kBetween = 600;  // from one large one to the next
  std::thread sends([&] {
    for (int i = 0; i < kCommands; ++i) {
      v1::Command command;
      if (i % kBetween == kBetween - 1) {
        // Of 66 bytes to 3.7 KiB, in a field that the daemon does not know.
        command.GetReflection()->MutableUnknownFields(&command)->AddLengthDelimited(
            1000, std::string(i / 9, 'x'));
      }
      ASSERT_TRUE(open.Send(0, command)) << i;
    }
    open.stream->WritesDone();
  });
  v1::CommandsResponse outcome;
  int outcomes = 0;
  while (open.stream->Read(&outcome)) ++outcomes;
  sends.join();
  EXPECT_EQ(outcomes, kCommands);
  EXPECT_OK(FromGrpc(open.stream->Finish()));
}

// Calls whose request does not come have an end, and those behind them their turn.
TEST(RequestTest, ItComesInTimeOrItsCallEnds) {
  TestDaemon daemon([](DaemonOptions* options) { options->read_timeout = absl::Milliseconds(50); });
  grpc::GenericStub stub(daemon.Connect());
  grpc::CompletionQueue queue;
  struct Begun {
    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call;
    grpc::Status status;
  };
  std::vector<Begun> begun(20);
  for (Begun& one : begun) {
    one.context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
    one.call = stub.PrepareCall(&one.context, "/chorus.v1.Diagnostics/GetStats", &queue);
    one.call->StartCall(nullptr);
    one.call->Finish(&one.status, &one);
  }
  for (size_t ended = 0; ended < begun.size();) {
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    if (tag == nullptr) continue;  // one has started
    ++ended;
    const absl::Status told = FromGrpc(static_cast<Begun*>(tag)->status);
    ExpectError(told, absl::StatusCode::kDeadlineExceeded, Reason::kTransportTimeout);
    EXPECT_THAT(std::string(told.message()), HasSubstr("has not come whole within 50ms"));
  }
}

// A command that waits for another rank, sent again and again by calls that end before it; and one
// that waits for the command before it.
TEST(WaitsTest, SubmitsThatHaveEndedWaitNoMore) {
  TestDaemon daemon([](DaemonOptions* options) { options->node.max_waits = 16; });
  RpcRank client(daemon.Connect());
  RpcRank other(daemon.Connect());
  ASSERT_OK(client.Open());
  ASSERT_OK(other.Open());
  std::thread joins([&] { EXPECT_OK(other.Join("pair", 2, 1)); });
  ASSERT_OK(client.Join("pair", 2, 0));
  joins.join();
  ASSERT_OK(client.Submit(client.RegisterCommand(1, 1, 2)));
  for (const int64_t sequence : {2, 4}) {
    const v1::Command run = client.RunCommand(sequence, 1, 1, sequence / 2 - 1, {1, 2});
    for (int i = 0; i < 40; ++i) {
      EXPECT_EQ(client.Submit(run, absl::Milliseconds(20)).code(),
                absl::StatusCode::kDeadlineExceeded)
          << sequence << ": " << i;
    }
  }
  EXPECT_TRUE(
      Eventually([&] { return absl::IsDeadlineExceeded(client.Wait(2, absl::Milliseconds(20))); }));
}

// The same of streams: each waits for one command, and is cancelled when the log has come to that.
TEST(WaitsTest, CommandsOfStreamsThatHaveEndedWaitNoMore) {
  TestDaemon daemon([](DaemonOptions* options) { options->node.max_waits = 16; });
  Pair pair(daemon);
  const v1::Command over = pair.a.RegisterCommand(1, 1, 2);
  for (const int64_t sequence : {2, 4}) {  // the second waits for the one before it
    const v1::Command run = pair.a.RunCommand(sequence, 1, 1, sequence / 2 - 1, {1, 2});
    for (int i = 0; i < 40; ++i) {
      OpenStream open(pair.a);
      ASSERT_TRUE(open.Send(pair.a.session, run)) << sequence << ": " << i;
      ASSERT_TRUE(open.Send(0, over)) << sequence << ": " << i;
      v1::CommandsResponse outcome;
      ASSERT_TRUE(open.stream->Read(&outcome)) << sequence << ": " << i;
      open.context.TryCancel();
      EXPECT_FALSE(open.stream->Finish().ok());
    }
  }
  EXPECT_TRUE(Eventually([&] { return pair.a.Wait(1).ok(); }));
}

// Clients that go while they wait, by deadlines far away.
TEST(WaitsTest, WhoGoesWaitsNoMore) {
  TestDaemon daemon([](DaemonOptions* options) {
    options->node.max_session_downloads = 1;
    options->node.max_waits = 16;
  });
  const std::shared_ptr<grpc::Channel> channel = daemon.Connect();
  RpcRank client(channel);
  ASSERT_OK(client.Open());
  const auto download = [&client](grpc::ClientContext* context, int slot) {
    v1::DownloadTensorRequest request;
    request.set_session(client.session);
    request.mutable_tensor()->set_slot(slot);
    request.mutable_tensor()->set_generation(1);
    context->set_deadline(absl::ToChronoTime(absl::Now() + absl::Minutes(5)));
    return client.tensors->Download(context, request);
  };
  const auto wait = [&client] {
    v1::WaitRequest request;
    request.set_session(client.session);
    request.set_sequence(1);
    v1::WaitResponse response;
    return Ask(*client.log, &v1::Log::Stub::Wait, request, &response);
  };
  // A result that waits for another rank, and a tensor that is there.
  RpcRank other(daemon.Connect());
  ASSERT_OK(other.Open());
  std::thread joins([&] { EXPECT_OK(other.Join("pair", 2, 1)); });
  ASSERT_OK(client.Join("pair", 2, 0));
  joins.join();
  ASSERT_OK(client.Submit(client.RegisterCommand(1, 1, 2)));
  OpenStream open(client);
  ASSERT_TRUE(open.Send(client.session, client.RunCommand(2, 1, 1, 0, {1, 2})));
  ASSERT_TRUE(Eventually([&] { return other.ListPending()->pending_size() == 1; }));
  v1::Command create;
  create.set_sequence(3);
  v1::CreateTensor* const tensor = create.mutable_create_tensor();
  tensor->mutable_id()->set_slot(9);
  tensor->mutable_id()->set_generation(1);
  tensor->mutable_type()->set_dtype(v1::DTYPE_U8);
  tensor->mutable_source()->set_inline_("7");
  ASSERT_OK(client.Submit(create));

  // Comes again if a Download of below had the slot.
  std::mutex mutex;
  std::shared_ptr<grpc::ClientContext> reads;
  grpc::StatusCode read = grpc::StatusCode::OK;
  std::thread reader([&] {
    do {
      const auto context = std::make_shared<grpc::ClientContext>();
      {
        std::lock_guard<std::mutex> lock(mutex);
        reads = context;
      }
      read = download(context.get(), 2)->Finish().error_code();
    } while (read == grpc::StatusCode::RESOURCE_EXHAUSTED);
  });
  const auto is_refused = [](const absl::Status& status) {
    return absl::IsResourceExhausted(status);
  };
  EXPECT_TRUE(Eventually([&] { return is_refused(client.Download(9).status()); }));
  {
    std::lock_guard<std::mutex> lock(mutex);
    reads->TryCancel();
  }
  reader.join();
  EXPECT_EQ(read, grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return client.Download(9).ok(); }));

  {
    std::vector<std::unique_ptr<RawStream>> waits;
    v1::WaitRequest request;
    request.set_session(client.session);
    request.set_sequence(77);
    for (int i = 0; i < 20; ++i) {
      waits.push_back(std::make_unique<RawStream>(channel, "/chorus.v1.Log/Wait"));
      waits.back()->Send(request.SerializeAsString());
    }
    EXPECT_TRUE(Eventually([&] { return is_refused(wait()); }));
  }
  EXPECT_TRUE(Eventually([&] { return wait().ok(); }));
}

TEST(CommandStreamTest, CarriesTheLogWithAnOutcomeForEachCommand) {
  TestDaemon daemon;
  Pair pair(daemon);
  constexpr int kRuns = 100;
  const auto drive = [&](RpcRank& rank) {
    OpenStream open(rank);
    for (int i = 0; i < kRuns; ++i) {
      // The session is named once.
      ASSERT_TRUE(open.Send(i == 0 ? rank.session : 0,
                            rank.RunCommand(2 + i, 1, 1, i, {static_cast<float>(i), 1})));
    }
    open.stream->WritesDone();
    std::vector<int64_t> ended;
    v1::CommandsResponse response;
    while (open.stream->Read(&response)) {
      EXPECT_FALSE(response.has_error()) << response.error().message();
      ended.push_back(response.sequence());
    }
    EXPECT_TRUE(open.stream->Finish().ok());
    std::sort(ended.begin(), ended.end());
    ASSERT_EQ(ended.size(), static_cast<size_t>(kRuns));
    for (int i = 0; i < kRuns; ++i) EXPECT_EQ(ended[i], 2 + i);
  };
  std::thread other([&] { drive(pair.b); });
  drive(pair.a);
  other.join();
  EXPECT_THAT(*pair.a.DownloadFloats(2 + 42), ElementsAre(84, 2));
}

TEST(CommandStreamTest, AWrongCommandIsToldAndMayBeSentAgain) {
  TestDaemon daemon;
  Pair pair(daemon);
  OpenStream open(pair.a);
  v1::Command wrong = pair.a.RegisterCommand(2, 2, 2);
  wrong.mutable_register_graph()->mutable_graph()->mutable_nodes(0)->set_inputs(0, -1);
  ASSERT_TRUE(open.Send(pair.a.session, wrong));
  v1::CommandsResponse response;
  ASSERT_TRUE(open.stream->Read(&response));
  EXPECT_EQ(response.sequence(), 2);
  ExpectError(FromRpcStatus(response.error()), absl::StatusCode::kInvalidArgument,
              Reason::kMalformed);
  ASSERT_TRUE(open.Send(pair.a.session, pair.a.RegisterCommand(2, 2, 2)));
  ASSERT_TRUE(open.stream->Read(&response));
  EXPECT_EQ(response.sequence(), 2);
  EXPECT_FALSE(response.has_error()) << response.error().message();
  // Another session on the same stream.
  ASSERT_TRUE(open.Send(pair.b.session, pair.a.RegisterCommand(3, 3, 2)));
  EXPECT_FALSE(open.stream->Read(&response));
  ExpectError(FromGrpc(open.stream->Finish()), absl::StatusCode::kInvalidArgument,
              Reason::kMalformed);
}

TEST(CommandStreamTest, AStreamOfNoSessionEnds) {
  TestDaemon daemon;
  RpcRank client(daemon.Connect());
  v1::CommandsResponse response;
  {
    OpenStream open(client);
    ASSERT_TRUE(open.Send(0, client.RegisterCommand(1, 1, 2)));
    EXPECT_FALSE(open.stream->Read(&response));
    ExpectError(FromGrpc(open.stream->Finish()), absl::StatusCode::kInvalidArgument,
                Reason::kMalformed);
  }
  ASSERT_OK(client.Open());
  ASSERT_OK(client.Close());
  OpenStream open(client);
  ASSERT_TRUE(open.Send(client.session, client.RegisterCommand(1, 1, 2)));
  EXPECT_FALSE(open.stream->Read(&response));
  ExpectError(FromGrpc(open.stream->Finish()), absl::StatusCode::kNotFound, Reason::kSessionLost);
}

TEST(CommandStreamTest, AClientThatDoesNotReadStopsItselfOnly) {
  TestDaemon daemon;
  Pair pair(daemon);
  OpenStream open(pair.a);
  constexpr int kCommands = 4000;  // more than may be under way
  std::thread writer([&] {
    for (int i = 0; i < kCommands; ++i) {
      v1::Command command;
      command.set_sequence(2 + i);
      v1::CreateTensor* tensor = command.mutable_create_tensor();
      tensor->mutable_id()->set_slot(10 + i);
      tensor->mutable_id()->set_generation(1);
      tensor->mutable_type()->set_dtype(v1::DTYPE_F32);
      tensor->mutable_source()->set_inline_(Floats({static_cast<float>(i)}));
      if (!open.Send(pair.a.session, command)) break;
    }
    open.stream->WritesDone();
  });
  // Meanwhile others are served.
  EXPECT_OK(pair.b.Renew());
  int outcomes = 0;
  v1::CommandsResponse response;
  while (open.stream->Read(&response)) {
    EXPECT_FALSE(response.has_error()) << response.error().message();
    ++outcomes;
  }
  writer.join();
  EXPECT_TRUE(open.stream->Finish().ok());
  EXPECT_EQ(outcomes, kCommands);
}

// Its client says nothing more, and would keep its slot for as long as it is connected.
TEST(CommandStreamTest, EndsWithItsSession) {
  TestDaemon daemon([](DaemonOptions* options) { options->node.lease = absl::Seconds(4); });
  RpcRank ends(daemon.Connect());
  RpcRank stays(daemon.Connect());
  v1::Command nothing;
  nothing.set_sequence(1);
  nothing.mutable_release();
  v1::CommandsResponse response;
  const auto send = [&](OpenStream& open, RpcRank& rank) {
    EXPECT_TRUE(open.Send(rank.session, nothing) && open.stream->Read(&response));
  };
  ASSERT_OK(ends.Open());
  ASSERT_OK(stays.Open());
  OpenStream ended(ends);
  OpenStream other(stays);
  send(ended, ends);
  send(other, stays);
  ASSERT_OK(ends.Close());
  EXPECT_FALSE(ended.stream->Read(&response));
  ExpectError(FromGrpc(ended.stream->Finish()), absl::StatusCode::kNotFound, Reason::kSessionLost);
  send(other, stays);
}

// What a stream has room for is free when it has ended, whatever its commands still wait for.
TEST(CommandStreamTest, OneThatHasEndedKeepsNoPlace) {
  TestDaemon daemon([](DaemonOptions* options) { options->max_streams = 2; });  // one, of a user
  Pair pair(daemon);
  {
    OpenStream first(pair.a);
    ASSERT_TRUE(first.Send(pair.a.session, pair.a.RunCommand(2, 1, 1, 0, {1, 2})));
    v1::Command nothing;
    nothing.set_sequence(3);
    nothing.mutable_release();
    ASSERT_OK(pair.a.Submit(nothing));  // the log has come to the run
    first.context.TryCancel();
    EXPECT_FALSE(first.stream->Finish().ok());
  }
  // The daemon hears of that in a moment.
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  bool taken = false;
  while (!taken && absl::Now() < deadline) {
    OpenStream next(pair.a);
    v1::Command nothing;
    nothing.set_sequence(4);
    nothing.mutable_release();
    v1::CommandsResponse response;
    taken = next.Send(pair.a.session, nothing) && next.stream->Read(&response);
    next.stream->WritesDone();
    EXPECT_EQ(FromGrpc(next.stream->Finish()).ok(), taken);
  }
  EXPECT_TRUE(taken) << "the place of the first is not free";
}

// Its outcomes stand before what would tell its client, who reads neither.
TEST(CommandStreamTest, OneWhoseSessionHasEndedIsGivenUpWhereNobodyReads) {
  TestDaemon daemon([](DaemonOptions* options) {
    options->max_streams = 2;  // one, of a user
    options->download_timeout = absl::Milliseconds(200);
    options->node.lease = absl::Seconds(4);
  });
  Pair pair(daemon);
  v1::AbortWorldRequest abort;
  abort.set_session(pair.b.session);
  abort.set_world(pair.b.world);
  abort.set_rank(1);
  abort.set_epoch(1);
  abort.set_message(std::string(1000, 'x'));
  v1::AbortWorldResponse aborted;
  EXPECT_OK(Ask(*pair.b.worlds, &v1::Worlds::Stub::Abort, abort, &aborted));
  EXPECT_EQ(pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2})).code(),
            absl::StatusCode::kAborted);
  // Each fails with that text.
  OpenStream open(pair.a);
  constexpr int kCommands = 300;
  for (int i = 0; i < kCommands; ++i) {
    v1::Command command;
    command.set_sequence(3 + i);
    v1::TensorId* const result = command.mutable_make_readable()->add_tensors();
    result->set_slot(2);
    result->set_generation(1);
    ASSERT_TRUE(open.Send(pair.a.session, command));
  }
  v1::CommandsResponse response;
  ASSERT_TRUE(open.stream->Read(&response));
  ASSERT_TRUE(response.has_error());
  // More than its window has room for, behind that one.
  const auto more = 1 + 65535 / static_cast<int64_t>(response.ByteSizeLong());
  EXPECT_TRUE(Eventually([&] {
    EXPECT_OK(pair.b.Renew());
    const auto sessions = pair.b.ListSessions()->sessions();
    return std::any_of(sessions.begin(), sessions.end(), [&](const auto& session) {
      return session.session() == pair.a.session && session.command_count() >= 3 + more;
    });
  }));
  ASSERT_OK(pair.a.Close());
  EXPECT_TRUE(Eventually([&] {
    OpenStream next(pair.b);
    v1::Command nothing;
    nothing.set_sequence(2);
    nothing.mutable_release();
    return next.Send(pair.b.session, nothing) && next.stream->Read(&response);
  })) << "the place of the first is not free";
}

// Of commands that fail at once, each with an error of a KiB and more.
TEST(CommandStreamTest, OutcomesThatNobodyReadsHaveSoMuchRoom) {
  TestDaemon daemon([](DaemonOptions* options) { options->answer_bytes = 256 << 10; });
  Pair pair(daemon);
  OpenStream open(pair.a);
  constexpr int kCommands = 600;
  ASSERT_TRUE(open.Send(pair.a.session, pair.a.RunCommand(2, 1, 1, 0, {1, 2})));
  const auto make_readable = [](int sequence) {
    v1::Command command;
    command.set_sequence(sequence);
    v1::TensorId* const result = command.mutable_make_readable()->add_tensors();
    result->set_slot(2);
    result->set_generation(1);
    return command;
  };
  for (int i = 1; i < kCommands; ++i) {
    ASSERT_TRUE(open.Send(pair.a.session, make_readable(2 + i)));
  }
  // The last of those that wait is a call of its own: once it is answered all outcomes are with the
  // stream, whose client has read none.
  std::thread last([&] {
    EXPECT_EQ(pair.a.Submit(make_readable(2 + kCommands)).code(), absl::StatusCode::kAborted);
  });
  // The log has come to it.
  v1::Command nothing;
  nothing.set_sequence(3 + kCommands);
  nothing.mutable_release();
  EXPECT_OK(pair.a.Submit(nothing));
  v1::AbortWorldRequest abort;
  abort.set_session(pair.b.session);
  abort.set_world(pair.b.world);
  abort.set_rank(1);
  abort.set_epoch(1);
  abort.set_message(std::string(1000, 'x'));
  v1::AbortWorldResponse aborted;
  EXPECT_OK(Ask(*pair.b.worlds, &v1::Worlds::Stub::Abort, abort, &aborted));
  last.join();
  int outcomes = 0;
  v1::CommandsResponse response;
  while (open.stream->Read(&response)) {
    EXPECT_TRUE(response.has_error());
    ++outcomes;
  }
  ExpectError(FromGrpc(open.stream->Finish()), absl::StatusCode::kResourceExhausted,
              Reason::kQuota);
  EXPECT_LT(outcomes, 400);
}

TEST(DiagnosticsTest, StatsAndFlightRecord) {
  TestDaemon daemon;
  Pair pair(daemon);
  std::thread other([&] { EXPECT_OK(pair.b.Submit(pair.b.RunCommand(2, 1, 1, 0, {10, 20}))); });
  EXPECT_OK(pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2})));
  other.join();
  v1::GetStatsResponse stats;
  EXPECT_OK(
      Ask(*pair.a.diagnostics, &v1::Diagnostics::Stub::GetStats, v1::GetStatsRequest(), &stats));
  EXPECT_EQ(stats.memory_limit_bytes(), int64_t{1} << 30);
  EXPECT_EQ(stats.published_run_count(), 2);
  // Two sessions' books, at least.
  EXPECT_GT(stats.memory_used_bytes(), 0);
  EXPECT_LE(stats.memory_used_bytes(), stats.memory_limit_bytes());
  v1::ListFlightEventsResponse events;
  EXPECT_OK(Ask(*pair.a.diagnostics, &v1::Diagnostics::Stub::ListFlightEvents,
                v1::ListFlightEventsRequest(), &events));
  std::vector<int> kinds;
  for (const auto& event : events.events()) {
    kinds.push_back(event.kind());
    EXPECT_NEAR(static_cast<double>(event.time().seconds()),
                static_cast<double>(absl::ToUnixSeconds(absl::Now())), 300);
  }
  EXPECT_THAT(kinds, testing::IsSupersetOf({v1::FLIGHT_KIND_SESSION_OPENED,
                                            v1::FLIGHT_KIND_WORLD_FORMED, v1::FLIGHT_KIND_VOTED,
                                            v1::FLIGHT_KIND_LAUNCHED, v1::FLIGHT_KIND_PUBLISHED}));
  v1::ListFlightEventsRequest limited;
  limited.set_limit(-1);
  EXPECT_EQ(
      Ask(*pair.a.diagnostics, &v1::Diagnostics::Stub::ListFlightEvents, limited, &events).code(),
      absl::StatusCode::kInvalidArgument);
}

// What a drain must not be judged by: how fast the node thread and the clients are.
void DrainPatiently(DaemonOptions* options) {
  options->drain_patience = absl::Minutes(1);
  options->farewell_patience = absl::Minutes(1);
}

// Streams whose clients write as fast as they can while the daemon ends. Each is told why, by the
// status of the stream: a client by TCP, without an attach socket, learns of it nowhere else.
class FarewellTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Sockets, FarewellTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Tcp" : "Unix"; });

TEST_P(FarewellTest, EveryStreamHearsItHoweverMuchItSends) {
  constexpr int kStreams = 8;
  TestDaemon daemon([](DaemonOptions* options) {
    DrainPatiently(options);
    ListenAddress tcp;
    tcp.host = "127.0.0.1";
    options->listen.push_back(tcp);
    options->insecure_loopback = true;
  });
  const std::string address = daemon.daemon().addresses()[GetParam() ? 1 : 0].ToString();
  std::vector<absl::Status> told(kStreams);
  std::atomic<int> busy{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < kStreams; ++i) {
    clients.emplace_back([&, i] {
      RpcRank client(daemon.ConnectTo(address));
      EXPECT_OK(client.Open());
      OpenStream stream(client);
      std::thread writer([&] {
        v1::Command nothing;
        nothing.mutable_release();
        do {
          nothing.set_sequence(nothing.sequence() + 1);
          if (nothing.sequence() == 100) ++busy;
        } while (stream.Send(client.session, nothing));
      });
      v1::CommandsResponse response;
      while (stream.stream->Read(&response)) {
      }
      writer.join();
      told[static_cast<size_t>(i)] = FromGrpc(stream.stream->Finish());
    });
  }
  EXPECT_TRUE(Eventually([&] { return busy == kStreams; }));
  daemon.daemon().Drain(absl::Now());
  for (std::thread& client : clients) client.join();
  for (const absl::Status& status : told) {
    ExpectError(status, absl::StatusCode::kUnavailable, Reason::kDraining);
    EXPECT_THAT(std::string(status.message()), HasSubstr("shutting down"));
  }
}

// It would wait for a thread of its own, which may sleep for ten seconds where a client was slow to
// read.
TEST(DrainTest, GrpcDoesNotEndWithTheDaemon) {
  { const TestDaemon daemon; }
  EXPECT_NE(grpc_is_initialized(), 0);
}

TEST(DrainTest, WhoWaitsIsToldAndNothingNewIsTaken) {
  TestDaemon daemon(DrainPatiently);
  Pair pair(daemon);
  absl::Status told;
  std::thread waiting([&] { told = pair.a.Submit(pair.a.RunCommand(2, 1, 1, 0, {1, 2})); });
  ASSERT_TRUE(Eventually([&] { return pair.b.ListPending()->pending_size() == 1; }));
  daemon.daemon().Drain(absl::Now() + absl::Milliseconds(100));
  waiting.join();
  ExpectError(told, absl::StatusCode::kUnavailable, Reason::kDraining);
  EXPECT_EQ(pair.b.Renew().code(), absl::StatusCode::kUnavailable);
}

// Whatever of that the node thread has not come to.
TEST(DrainTest, WhatWasAskedBeforeItIsDone) {
  constexpr int kStreams = 12;
  constexpr int kCommands = 12;  // of each: more of them are not posted
  std::promise<void> begun;
  std::promise<void> go;
  std::atomic<int> failures{0};
  std::function<bool()> serves;
  TestDaemon daemon([&](DaemonOptions* options) {
    DrainPatiently(options);
    // The node thread's, at each of the commands, which fail. The first waits until the drain has
    // been asked for; the others take as long as a round trip now and then, so that a drain that
    // does not wait for them is over before they are.
    options->node.log_failure = [&](absl::string_view, absl::string_view) {
      const int before = failures++;
      if (before == 0) {
        begun.set_value();
        go.get_future().wait();
      } else if (before % 8 == 0) {
        serves();
      }
    };
  });
  serves = [&daemon] {
    grpc::ByteBuffer answer;
    grpc::Slice bytes;
    return !CallByName(daemon, "/grpc.health.v1.Health/Check", &answer).ok() ||
           !answer.DumpToSingleSlice(&bytes).ok() ||
           std::string(bytes.begin(), bytes.end()) != "\x08\x02";  // NOT_SERVING
  };
  int32_t slot = 0;
  const auto fails = [&slot](int64_t sequence) {
    v1::Command command;
    command.set_sequence(sequence);
    v1::TensorId* const missing = command.mutable_make_readable()->add_tensors();
    missing->set_slot(++slot);  // each is a failure of its own
    missing->set_generation(1);
    return command;
  };
  std::vector<std::unique_ptr<RpcRank>> clients;
  std::vector<std::unique_ptr<OpenStream>> streams;
  for (int i = 0; i < kStreams; ++i) {
    clients.push_back(std::make_unique<RpcRank>(daemon.Connect()));
    ASSERT_OK(clients.back()->Open());
    streams.push_back(std::make_unique<OpenStream>(*clients.back()));
  }
  EXPECT_TRUE(streams[0]->Send(clients[0]->session, fails(1)));
  begun.get_future().wait();
  v1::CommandsResponse outcome;
  for (int i = 0; i < kStreams; ++i) {
    OpenStream& stream = *streams[static_cast<size_t>(i)];
    for (int sequence = i == 0 ? 2 : 1; sequence <= kCommands; ++sequence) {
      EXPECT_TRUE(stream.Send(clients[static_cast<size_t>(i)]->session, fails(sequence)));
    }
    // Is none, and answered when it has been read.
    EXPECT_TRUE(stream.Send(0, v1::Command()));
    EXPECT_TRUE(stream.stream->Read(&outcome));
    EXPECT_EQ(outcome.sequence(), 0);
  }
  std::thread drains([&] { daemon.daemon().Drain(absl::Now()); });
  // What it asks of the node stands behind the commands by then.
  EXPECT_TRUE(Eventually([&] { return !serves(); }));
  EXPECT_EQ(failures, 1);
  go.set_value();
  slot = 0;
  for (const auto& open : streams) {
    for (int sequence = 1; sequence <= kCommands; ++sequence) {
      EXPECT_TRUE(open->stream->Read(&outcome)) << sequence;
      EXPECT_EQ(outcome.sequence(), sequence);
      const absl::Status told = FromRpcStatus(outcome.error());
      EXPECT_EQ(ErrorOf(told).reason, Reason::kUnknownName) << told;
      EXPECT_THAT(std::string(told.message()), HasSubstr(absl::StrCat("tensor ", ++slot, ".1 ")));
    }
    EXPECT_FALSE(open->stream->Read(&outcome));
    ExpectError(FromGrpc(open->stream->Finish()), absl::StatusCode::kUnavailable,
                Reason::kDraining);
  }
  drains.join();
  EXPECT_EQ(failures, kStreams * kCommands);
}

}  // namespace
}  // namespace chorus::server
