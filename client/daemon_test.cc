// The SDK against a whole daemon in this process, over every transport.
#include "server/daemon.h"

#include <linux/capability.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "client/internal/access.h"
#include "client/internal/session_core.h"
#include "client/link/open_link.h"
#include "client/testing/silent_socket.h"
#include "client/testing/values.h"
#include "core/backend/host/host_backend.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/failpoint.h"
#include "core/base/mutex.h"
#include "core/base/thread_pool.h"
#include "core/base/unique_fd.h"
#include "core/ops/host_kernels.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"
#include "server/testing/rpc.h"

namespace chorus {
namespace {

using internal::Link;
using internal::OpenLink;
using internal::SessionCore;
using internal::WaitReportOptions;

using testing::AwaitClient;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using testing::SilentPort;
using testing::SilentSocket;
using testing::Values;

struct Way {
  Transport transport;
  bool tcp;
  const char* name;
};

class DaemonTest : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    char directory[] = "/tmp/chorus_XXXXXX";
    ASSERT_NE(::mkdtemp(directory), nullptr);
    directory_ = directory;
    pool_ = std::make_unique<ThreadPool>(2);
    HostBackendOptions backend;
    backend.devices = 4;
    backend.pool = pool_.get();
    backend.make_kernel = MakeHostKernel;
    backend_ = CreateHostBackend(backend);
    Start();
  }
  void TearDown() override {
    daemon_.reset();
    backend_.reset();
    std::system(("rm -rf " + directory_).c_str());
  }

  void Start(const std::string& tcp_address = "127.0.0.1:0") {
    server::DaemonOptions options;
    options.listen = {*server::ParseListenAddress("unix:" + directory_ + "/d.sock"),
                      *server::ParseListenAddress(GetParam().tcp ? tcp_address : "127.0.0.1:0")};
    options.insecure_loopback = true;
    options.node.sequencer.agree_timeout = absl::Seconds(20);
    options.max_wait = max_wait_;
    options.node.max_staging_bytes = max_staging_bytes_;
    absl::StatusOr<std::unique_ptr<server::Daemon>> daemon =
        server::Daemon::Start(options, DevicesOf(backend_.get()));
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    address_ = daemon_->addresses()[GetParam().tcp ? 1 : 0].ToString();
  }

  absl::StatusOr<Session> TryOpen(int devices = 1) {
    SessionOptions options;
    options.address = address_;
    options.transport = GetParam().transport;
    options.device_count = devices;
    options.wait_timeout = std::chrono::seconds(30);
    return Session::Open(options);
  }
  Session Open(int devices = 1) {
    absl::StatusOr<Session> session = TryOpen(devices);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *session : Session();
  }

  // Runs `body` as every rank of a world, each in a thread with a session of its own.
  void RunRanks(int size, const std::function<void(const World&)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([this, r, size, &body] {
        const Session session = Open();
        ASSERT_TRUE(session.is_open());
        WorldOptions options;
        options.name = "job";
        options.rank = r;
        options.size = size;
        absl::StatusOr<World> world = session.Join(options);
        ASSERT_TRUE(world.ok()) << world.status();
        body(*world);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // A world of two ranks in one session of two devices.
  static std::vector<World> JoinBoth(const Session& session, const std::string& name) {
    std::vector<World> worlds(2);
    std::vector<std::thread> joining;
    for (int r = 0; r < 2; ++r) {
      joining.emplace_back([&, r] {
        WorldOptions options;
        options.name = name;
        options.rank = r;
        options.size = 2;
        options.device = r;
        const absl::StatusOr<World> world = session.Join(options);
        ASSERT_TRUE(world.ok()) << world.status();
        worlds[static_cast<size_t>(r)] = *world;
      });
    }
    for (std::thread& thread : joining) thread.join();
    return worlds;
  }

  // Waits until somebody waits in each of `whats`, as the daemon sees it.
  void AwaitPending(const std::vector<std::string>& whats) {
    const auto stub =
        v1::Diagnostics::NewStub(grpc::CreateChannel(address_, grpc::InsecureChannelCredentials()));
    EXPECT_TRUE(server::Eventually([&] {
      v1::ListPendingResponse pending;
      if (!server::Ask(*stub, &v1::Diagnostics::Stub::ListPending, v1::ListPendingRequest(),
                       &pending)
               .ok()) {
        return false;
      }
      return std::all_of(whats.begin(), whats.end(), [&](const std::string& what) {
        return std::any_of(pending.pending().begin(), pending.pending().end(),
                           [&](const auto& p) { return absl::StartsWith(p.what(), what); });
      });
    }));
  }

  absl::Duration max_wait_ = server::DaemonOptions().max_wait;
  int64_t max_staging_bytes_ = server::DaemonOptions().node.max_staging_bytes;
  std::string directory_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<server::Daemon> daemon_;
  std::string address_;
};

// What the other transports do not have.
class RingTest : public DaemonTest {};

TEST_P(DaemonTest, UsesTheTransportThatWasAskedFor) {
  EXPECT_EQ(Open().transport(), GetParam().transport);
}

TEST_P(DaemonTest, ASessionKnowsItsDevices) {
  const Session session = Open(2);
  for (int d = 0; d < 2; ++d) {
    const DeviceInfo info = session.device(d).info();
    EXPECT_EQ(info.name.rfind("host:", 0), 0u) << info.name;
    EXPECT_GT(info.memory_bytes, 0);
    EXPECT_EQ(info.memory_bytes, session.device(0).info().memory_bytes);  // equal parts
    EXPECT_EQ(info.core_count, 2);
  }
  EXPECT_NE(session.device(0).info().name, session.device(1).info().name);
  EXPECT_EQ(session.device(2).info().name, "");
  EXPECT_EQ(DeviceRef().info().memory_bytes, 0);
}

TEST_P(DaemonTest, LocalOpsOfAllSizes) {
  const Session session = Open(2);
  for (const size_t count : {0u, 1u, 16u, 17u, 1000u, 3000000u}) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 1000);
    const Tensor x = FromHost<float>(session, values, {static_cast<int64_t>(count)});
    EXPECT_EQ(Values<float>(x), values);
    const Tensor y = x + x - 1 * x;
    EXPECT_EQ(Values<float>(y), values);
    EXPECT_EQ(Values<float>(CopyTo(y, session.device(1))), values);
  }
}

// The names of one op's operands have room in a frame, those of two do not.
TEST_P(RingTest, LocalOpsWithManyOperandsFitTheirFrames) {
  const Session session = Open();
  std::vector<Tensor> parts[2];
  std::vector<float> expected[2];
  for (size_t p = 0; p < 2; ++p) {
    for (int i = 0; i < 9000; ++i) {
      expected[p].push_back(static_cast<float>(p == 0 ? i : -i));
      parts[p].push_back(Full(session, DType::kF32, {1}, expected[p].back()));
    }
    ASSERT_TRUE(parts[p].back().Wait().ok());
  }
  const Tensor wholes[] = {Concat(parts[0], 0), Concat(parts[1], 0)};
  const Tensor other = Full(session, DType::kF32, {1}, 2);
  const absl::Status done = other.Wait();
  ASSERT_TRUE(done.ok()) << done;
  for (size_t p = 0; p < 2; ++p) EXPECT_EQ(Values<float>(wholes[p]), expected[p]);
}

int64_t AddressSpaceBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

// There is room for the daemon's two mappings of it, in this process, and not for the client's.
TEST_P(RingTest, AnArenaThatCannotBeMappedIsGivenBack) {
  constexpr int64_t kBytes = int64_t{512} << 20;
  SessionOptions options;
  options.address = address_;
  const absl::StatusOr<std::unique_ptr<Link>> link = OpenLink(options);
  ASSERT_TRUE(link.ok()) << link.status();
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  rlimit little = before;
  little.rlim_cur = static_cast<rlim_t>(AddressSpaceBytes() + 2 * kBytes + kBytes / 2);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &little), 0);
  const absl::Status refused = (*link)->CreateStaging(kBytes).status();
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("cannot map an arena"));
  // It is none of those that the session may have.
  for (int i = 0; i < server::DaemonOptions().node.max_staging_arenas; ++i) {
    const absl::Status status = (*link)->CreateStaging(4096).status();
    ASSERT_TRUE(status.ok()) << i << ": " << status;
  }
}

// Each needs what the one before has left idle.
TEST_P(DaemonTest, UploadsThatFitAloneFitOneAfterTheOther) {
  daemon_.reset();
  max_staging_bytes_ = 16 << 20;
  Start();
  const Session session = Open();
  std::vector<Tensor> tensors;
  for (const size_t mib : {1, 5, 9, 13, 16}) {
    const size_t bytes = mib << 20;
    tensors.push_back(FromHost<int8_t>(session,
                                       std::vector<int8_t>(bytes, static_cast<int8_t>(mib)),
                                       {static_cast<int64_t>(bytes)}));
    ASSERT_TRUE(tensors.back().status().ok()) << mib << ": " << tensors.back().status();
  }
  for (const Tensor& tensor : tensors) {
    const std::vector<int8_t> values = Values<int8_t>(tensor);
    ASSERT_FALSE(values.empty());
    EXPECT_EQ(values, std::vector<int8_t>(values.size(), static_cast<int8_t>(values.size() >> 20)));
  }
}

// Of uploads, and of tensors that nobody has any more.
TEST_P(RingTest, AMappedTensorGetsTheStagingThatIsIdle) {
  daemon_.reset();
  max_staging_bytes_ = 16 << 20;
  Start();
  const Session session = Open();
  constexpr int64_t kBytes = 12 << 20;
  const Tensor uploaded = FromHost<int8_t>(session, std::vector<int8_t>(kBytes, 1), {kBytes});
  ASSERT_TRUE(uploaded.Wait().ok()) << uploaded.Wait();
  for (int8_t i = 0; i < 20; ++i) {
    const absl::StatusOr<MappedTensor<int8_t>> mapped = Map<int8_t>(session, {kBytes});
    ASSERT_TRUE(mapped.ok()) << i << ": " << mapped.status();
    std::fill_n(mapped->data(), kBytes, i);
    EXPECT_EQ(Values<int8_t>(mapped->tensor() + 1), std::vector<int8_t>(kBytes, i + 1));
  }
  const absl::Status more = Map<int8_t>(session, {17 << 20}).status();
  EXPECT_EQ(ErrorOf(more).reason, Reason::kQuota) << more;
}

// A name of the program, or its own label, may be any bytes.
TEST_P(DaemonTest, ALabelIsWhatTheDaemonTakes) {
  for (const std::string& label : {std::string("\xff\n"), std::string(255, 'x') + "\u00fc",
                                   std::string(256, 'x'), std::string(257, 'x')}) {
    SessionOptions options;
    options.address = address_;
    options.transport = GetParam().transport;
    options.label = label;
    const absl::Status status = Session::Open(options).status();
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_P(DaemonTest, LocalOpsOfTheMathHeader) {
  const Session session = Open();
  const Tensor x = FromHost<double>(session, {-1, 0.5, 2, 3}, {2, 2}).RequireGrad();
  const Tensor loss = Mean(Where(x > 0, Log1p(Maximum(x, 0)), Exp(x)) / Max(x, {1}, true));
  EXPECT_DOUBLE_EQ(
      *loss.Item<double>(),
      ((std::exp(-1) + std::log1p(0.5)) / 0.5 + (std::log1p(2) + std::log1p(3)) / 3) / 4);
  ASSERT_TRUE(Backward(loss).ok());
  const std::vector<double> g = Values<double>(x.grad());
  EXPECT_DOUBLE_EQ(g[0], std::exp(-1) / 0.5 / 4);
  EXPECT_DOUBLE_EQ(g[2], 1.0 / 3 / 3 / 4);
  const std::vector<float> drawn =
      Values<float>(RandomNormal(session, DType::kF32, {3000000}, 1, 2));
  EXPECT_EQ(Values<float>(RandomNormal(session, DType::kF32, {7}, 1, 2)),
            std::vector<float>(drawn.begin(), drawn.begin() + 7));
}

TEST_P(DaemonTest, AKernelThatRefusesItsOperandsFailsItsRunAlone) {
  const Session session = Open();
  const Tensor x = FromHost<int64_t>(session, {6, 7}, {2});
  ASSERT_TRUE(x.Wait().ok());
  const absl::Status status = (x / FromHost<int64_t>(session, {1, 0}, {2})).Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("div: element 1 of i64[2] is an integer divided by 0"));
  EXPECT_THAT(Values<int64_t>(x / FromHost<int64_t>(session, {4, -2}, {2})), ElementsAre(1, -3));
}

TEST_P(DaemonTest, EveryCollective) {
  RunRanks(3, [](const World& world) {
    const int r = world.rank();
    const Tensor x = FromHost<float>(world, {10.0f * r, 10.0f * r + 1}, {2});
    EXPECT_THAT(Values<float>(AllReduce(x, world)), ElementsAre(30, 33));
    EXPECT_THAT(Values<float>(Broadcast(x, 1, world)), ElementsAre(10, 11));
    const Tensor reduced = Reduce(x, 2, world);
    EXPECT_EQ(reduced.absent(), r != 2);
    if (r == 2) {
      EXPECT_THAT(Values<float>(reduced), ElementsAre(30, 33));
    }
    const std::vector<Tensor> gathered = AllGather(x, world);
    ASSERT_EQ(gathered.size(), 3u);
    for (int s = 0; s < 3; ++s) {
      EXPECT_THAT(Values<float>(gathered[s]), ElementsAre(10 * s, 10 * s + 1));
    }
    EXPECT_THAT(Values<float>(ReduceScatter({x, x * 2, x * 3}, world)),
                ElementsAre(30 * (r + 1), 33 * (r + 1)));
    EXPECT_TRUE(Barrier(world).Wait().ok());
    if (r == 0) {
      EXPECT_TRUE(Send(x + 5, 2, world, 3).Wait().ok());
    }
    if (r == 2) {
      EXPECT_THAT(Values<float>(Recv(DType::kF32, {2}, 0, world, 3)), ElementsAre(5, 6));
    }
    const absl::StatusOr<Group> all = world.NewGroup({2, 0, 1});
    ASSERT_TRUE(all.ok()) << all.status();
    EXPECT_THAT(Values<float>(Broadcast(x, 0, *all)), ElementsAre(20, 21));
  });
}

// Also where its memory cannot be looked at.
TEST_P(DaemonTest, ATensorPrintsItself) {
  RunRanks(2, [](const World& world) {
    const Tensor x = FromHost<float>(world, {1.5, 2, 3, 4}, {2, 2});
    EXPECT_EQ(AllReduce(x, world).ToString(), "f32[2,2] on device 0:\n[[3, 4],\n [6, 8]]");
    const Tensor divided = Cast(x, DType::kI32) / 0;
    EXPECT_THAT(divided.ToString(), HasSubstr(": div: "));
  });
}

TEST_P(DaemonTest, ManySmallCollectives) {
  RunRanks(4, [](const World& world) {
    const NoGrad no_grad;
    Tensor x = Scalar<double>(world, world.rank());
    for (int i = 0; i < 300; ++i) x = AllReduce(x, world) * 0.25;
    EXPECT_THAT(Values<double>(x), ElementsAre(1.5));
  });
}

TEST_P(DaemonTest, ARankMayRunFarAhead) {
  RunRanks(2, [](const World& world) {
    const NoGrad no_grad;
    const Tensor x = Scalar<double>(world, 1);
    Tensor last;
    // More than a session may have under way.
    for (int i = 0; i < 2500; ++i) {
      last = AllReduce(x, world);
      if (world.rank() == 1) {
        ASSERT_TRUE(last.Wait().ok()) << i;
      }
    }
    EXPECT_THAT(Values<double>(last), ElementsAre(2));
  });
}

TEST_P(DaemonTest, GradientsOfGradients) {
  RunRanks(3, [](const World& world) {
    const int r = world.rank();
    const Tensor x = FromHost<double>(world, {1.0 + r}, {1}).RequireGrad();
    BackwardOptions create;
    create.create_graph = true;
    const Tensor y = AllReduce(x, world);
    const absl::StatusOr<std::vector<Tensor>> g = Grad({Sum(y * y * y) * (r + 1)}, {x}, create);
    ASSERT_TRUE(g.ok()) << g.status();
    EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(3 * 36 * 6));
    ASSERT_TRUE(Backward(Sum((*g)[0] * (10 * r + 1))).ok());
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(33 * 6 * 6 * 6));
  });
}

// Steps of batches of several sizes, donated parameters, each rank with its own last short batch.
TEST_P(DaemonTest, ACompiledStepTakesBatchesOfAnySize) {
  RunRanks(2, [](const World& world) {
    const int r = world.rank();
    CompileOptions options;
    options.varying = {1};
    options.max_size = 40;
    options.donate = {0};
    const Compiled step = Compile(
        [world](const std::vector<Tensor>& in) {
          const auto g = Grad({Sum(MatMul(in[1], in[0]))}, {in[0]});
          if (!g.ok()) return std::vector<Tensor>{Tensor()};
          return std::vector<Tensor>{in[0].Detach() - AllReduce((*g)[0], world) * in[2],
                                     MatMul(in[1], in[0])};
        },
        options);
    Tensor w = FromHost<double>(world, std::vector<double>(60, 0), {20, 3}).RequireGrad();
    double expected = 0;
    for (const int64_t rows : {40, 40, 7, 1, 40, 7}) {
      const int64_t own_rows = r == 0 ? rows : 41 - rows;
      const std::vector<double> x(static_cast<size_t>(own_rows * 20), r + 1);
      const auto out =
          step.Run({w, FromHost<double>(world, x, {own_rows, 20}), Scalar<double>(world, 0.5)});
      ASSERT_TRUE(out.ok()) << out.status();
      EXPECT_EQ(Values<double>((*out)[1]),
                std::vector<double>(static_cast<size_t>(own_rows * 3), expected * 20 * (r + 1)));
      expected -= 0.5 * static_cast<double>(rows + 2 * (41 - rows));
      w = (*out)[0];
      w.RequireGrad();
    }
    EXPECT_EQ(Values<double>(w), std::vector<double>(60, expected));
    EXPECT_EQ(step.traces(), 1);
  });
}

TEST_P(DaemonTest, ARankMayAbandonItsTape) {
  RunRanks(3, [](const World& world) {
    const int r = world.rank();
    const Tensor x = FromHost<double>(world, {1.0 + r}, {1}).RequireGrad();
    Tensor y = AllReduce(x, world);
    const Tensor z = Broadcast(x, 1, world);
    if (r == 0) {
      y = Tensor();
      ASSERT_TRUE(Backward(Sum(z * 3)).ok());
    } else {
      ASSERT_TRUE(Backward(Sum(y * 5 + z)).ok());
      EXPECT_THAT(Values<double>(x.grad()), ElementsAre(r == 1 ? 10 + 5 : 10));
    }
    // A session that ends takes its pending part along.
    EXPECT_TRUE(Barrier(world).Wait().ok());
  });
}

TEST_P(DaemonTest, ACompiledStep) {
  RunRanks(3, [](const World& world) {
    const int r = world.rank();
    Tensor w = FromHost<double>(world, {1, 1}, {2}).RequireGrad();
    CompileOptions options;
    options.donate = {0};
    const Compiled step = Compile(
        [world](const std::vector<Tensor>& in) {
          const Tensor loss = Sum(in[0] * in[0] * in[1]);
          const absl::Status status = Backward(loss);
          if (!status.ok()) return std::vector<Tensor>{Tensor()};
          const Tensor total = AllReduce(in[0].grad(), world);
          return std::vector<Tensor>{in[0] - in[2] * total, AllReduce(loss, world)};
        },
        options);
    double expected[] = {1, 1};
    for (int i = 0; i < 5; ++i) {
      const double rate = 0.01 * (i + 1);
      const absl::StatusOr<std::vector<Tensor>> out =
          step.Run({w, FromHost<double>(world, {1.0 * r, 2.0}, {2}), Scalar<double>(world, rate)});
      ASSERT_TRUE(out.ok()) << out.status();
      const double loss = expected[0] * expected[0] * 3 + expected[1] * expected[1] * 6;
      expected[0] -= rate * 2 * expected[0] * 3;
      expected[1] -= rate * 2 * expected[1] * 6;
      EXPECT_NEAR(Values<double>((*out)[1])[0], loss, 1e-12);
      w = (*out)[0];
      w.RequireGrad();
    }
    const std::vector<double> values = Values<double>(w);
    EXPECT_NEAR(values[0], expected[0], 1e-12);
    EXPECT_NEAR(values[1], expected[1], 1e-12);
  });
}

TEST_P(DaemonTest, GradientsOfGradientsInOneGraph) {
  RunRanks(2, [](const World& world) {
    const int r = world.rank();
    const Compiled f = Compile([world, r](const std::vector<Tensor>& in) {
      BackwardOptions create;
      create.create_graph = true;
      const Tensor y = AllReduce(in[0], world);
      const auto g = Grad({Sum(y * y * y) * (r + 1)}, {in[0]}, create);
      if (!g.ok()) return std::vector<Tensor>{Tensor()};
      const auto h = Grad({Sum((*g)[0] * (10 * r + 1))}, {in[0]});
      if (!h.ok()) return std::vector<Tensor>{Tensor()};
      return std::vector<Tensor>{(*g)[0], (*h)[0]};
    });
    for (int i = 0; i < 3; ++i) {
      const auto out = f.Run({FromHost<double>(world, {1.0 + r}, {1}).RequireGrad()});
      ASSERT_TRUE(out.ok()) << out.status();
      EXPECT_THAT(Values<double>((*out)[0]), ElementsAre(3 * 9 * 3));
      EXPECT_THAT(Values<double>((*out)[1]), ElementsAre(12 * 6 * 3 * 3));
    }
  });
}

TEST_P(DaemonTest, AMismatchIsToldToEveryRankWithItsLineAndWorkGoesOn) {
  RunRanks(3, [](const World& world) {
    const int r = world.rank();
    const Tensor x = FromHost<float>(world, std::vector<float>(r + 1, 1.0f), {r + 1});
    const Tensor bad = AllReduce(x, world);
    const absl::Status status = bad.Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    const Error error = ErrorOf(status);
    EXPECT_EQ(error.reason, Reason::kMismatch);
    EXPECT_THAT(error.message, HasSubstr("f32["));
    EXPECT_THAT(error.source, HasSubstr("daemon_test.cc"));
    EXPECT_GE(error.ranks.size(), 2u);
    EXPECT_EQ(world.epoch(), 2);
    for (int i = 0; i < 3; ++i) {
      EXPECT_THAT(Values<float>(AllReduce(Sum(x), world)), ElementsAre(6));
    }
  });
}

TEST_P(DaemonTest, ARefusedCallIsToldToTheOthers) {
  RunRanks(2, [](const World& world) {
    const Tensor x = FromHost<float>(world, {1, 2}, {2});
    const Tensor y = AllReduce(world.rank() == 0 ? MatMul(x, x) : x, world);
    const Error error = ErrorOf(y.Wait());
    EXPECT_EQ(error.reason, world.rank() == 0 ? Reason::kBadType : Reason::kPeerRefused);
    EXPECT_THAT(error.message, HasSubstr("matmul"));
    EXPECT_THAT(Values<float>(AllReduce(x, world)), ElementsAre(2, 4));
  });
}

TEST_P(DaemonTest, ALabelOutOfRangeEndsItsRunAlone) {
  RunRanks(2, [](const World& world) {
    const Tensor x = FromHost<float>(world, {5, 5, 5, 5}, {2, 2});
    const Tensor good = Sum(CrossEntropy(x, FromHost<uint8_t>(world, {1, 0}, {2})));
    EXPECT_THAT(Values<float>(good), ElementsAre(FloatNear(1.386294f, 1e-5f)));
    const Tensor bad = CrossEntropy(x, FromHost<uint8_t>(world, {1, 2}, {2}));
    const absl::Status status = bad.Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(ErrorOf(status).message,
                HasSubstr("cross_entropy: input 1, u8[2], holds 2 at [1], expected from 0 to 1"));
    EXPECT_EQ(world.epoch(), 1);
    EXPECT_THAT(Values<float>(AllReduce(good, world)), ElementsAre(FloatNear(2.772589f, 1e-5f)));
  });
}

TEST_P(DaemonTest, AUsersOwnTimeoutChangesNothing) {
  RunRanks(2, [](const World& world) {
    if (world.rank() == 0) {
      const Tensor y = AllReduce(Scalar<float>(world, 1), world);
      const absl::Status early = y.Wait(std::chrono::milliseconds(1));
      if (!early.ok()) {
        EXPECT_EQ(ErrorOf(early).reason, Reason::kTransportTimeout);
      }
      EXPECT_TRUE(Send(Scalar<float>(world, 7), 1, world).Wait().ok());
      EXPECT_THAT(Values<float>(y), ElementsAre(3));
    } else {
      EXPECT_THAT(Values<float>(Recv(DType::kF32, {}, 0, world)), ElementsAre(7));
      EXPECT_THAT(Values<float>(AllReduce(Scalar<float>(world, 2), world)), ElementsAre(3));
    }
  });
}

TEST_P(DaemonTest, SeveralRanksInOneSession) {
  const Session session = Open(3);
  std::vector<World> worlds(3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      WorldOptions options;
      options.name = "three";
      options.rank = r;
      options.size = 3;
      options.device = r;
      const absl::StatusOr<World> world = session.Join(options);
      ASSERT_TRUE(world.ok()) << world.status();
      worlds[r] = *world;
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<Tensor> x, loss;
  for (int r = 0; r < 3; ++r) {
    x.push_back(FromHost<double>(worlds[r], {1.0 + r}, {1}).RequireGrad());
    const Tensor y = AllReduce(x[r], worlds[r]);
    loss.push_back(Sum(y * y) * (r + 1));
  }
  ASSERT_TRUE(Backward(loss).ok());
  for (int r = 0; r < 3; ++r) {
    EXPECT_THAT(Values<double>(x[r].grad()), ElementsAre(2 * 6 * 6));
  }
  const Compiled f = Compile([worlds](const std::vector<Tensor>& in) {
    std::vector<Tensor> out;
    for (int r = 0; r < 3; ++r) out.push_back(AllReduce(in[r] * in[r], worlds[r]));
    return out;
  });
  const auto out = f.Run(x);
  ASSERT_TRUE(out.ok()) << out.status();
  for (const Tensor& t : *out) EXPECT_THAT(Values<double>(t), ElementsAre(14));
}

TEST_P(DaemonTest, ALostDaemonEndsEveryWait) {
  const Session session = Open(2);
  const std::vector<World> worlds = JoinBoth(session, "two");
  const Tensor waiting = AllReduce(Scalar<float>(worlds[0], 1), worlds[0]);
  EXPECT_EQ(waiting.Wait(std::chrono::milliseconds(20)).code(),
            absl::StatusCode::kDeadlineExceeded);
  std::thread waiter([&] { EXPECT_FALSE(waiting.Wait().ok()); });
  daemon_.reset();
  waiter.join();
  const auto started = std::chrono::steady_clock::now();
  EXPECT_FALSE(AllReduce(Scalar<float>(worlds[1], 1), worlds[1]).Wait().ok());
  EXPECT_FALSE(Barrier(worlds[0]).Wait().ok());
  EXPECT_FALSE(session.Join().ok());
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(5));
}

// One wait of each kind when a daemon is stopped, and calls behind them.
TEST_P(DaemonTest, AStoppedDaemonSaysSoToEveryClientAndEveryWaiter) {
  const Session session = Open(2);
  const Session idle = Open();
  const std::vector<World> worlds = JoinBoth(session, "two");
  const Tensor waiting = AllReduce(Scalar<float>(worlds[0], 1), worlds[0]);
  const Tensor behind = waiting + waiting;
  // Both are sent: a wait that begins when the daemon is gone can be told nothing.
  for (const Tensor& sent : {waiting, behind}) {
    EXPECT_EQ(sent.Wait(std::chrono::milliseconds(20)).code(), absl::StatusCode::kDeadlineExceeded);
  }
  std::vector<absl::Status> told(4);
  std::vector<std::thread> waiters;
  waiters.emplace_back([&] { told[0] = waiting.Wait(); });
  waiters.emplace_back([&] { told[1] = behind.Wait(); });
  waiters.emplace_back([&] {
    WorldOptions options;
    options.name = "never complete";
    options.rank = 0;
    options.size = 2;
    told[2] = Open().Join(options).status();
  });
  waiters.emplace_back([&] {
    World world = worlds[0];
    told[3] = world.Reform(std::chrono::seconds(30)).status();
  });
  AwaitPending({"join", "reform", "all_reduce"});
  daemon_->Drain(SteadyNow() + absl::Milliseconds(20));
  for (std::thread& waiter : waiters) waiter.join();
  for (size_t i = 0; i < told.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(told[i].code(), absl::StatusCode::kUnavailable) << told[i];
    EXPECT_EQ(ErrorOf(told[i]).reason, Reason::kDraining) << told[i];
    EXPECT_THAT(std::string(told[i].message()),
                HasSubstr(absl::StrCat(address_, " is shutting down")));
  }
  daemon_.reset();
  for (const Session& client : {session, idle}) {
    absl::Status later = Scalar<float>(client, 1).Wait();
    if (later.ok()) later = (FromHost<float>(client, std::vector<float>(100), {100}) * 2).Wait();
    EXPECT_EQ(later.code(), absl::StatusCode::kUnavailable) << later;
    EXPECT_THAT(std::string(later.message()), HasSubstr(address_));
    // The same, of one without a connection that stays open.
    if (GetParam().transport == Transport::kUnary) continue;
    EXPECT_EQ(ErrorOf(later).reason, Reason::kDraining) << later;
  }
}

// Also where the client itself sees that the options are wrong.
TEST_P(DaemonTest, AJoinWithWrongOptionsIsToldToThoseWhoWaitForIt) {
  const Session first = Open();
  const Session second = Open();
  const auto options = [](int rank) {
    WorldOptions options;
    options.name = "refused";
    options.rank = rank;
    options.size = 2;
    options.join_timeout = std::chrono::seconds(20);
    return options;
  };
  struct Wrong {
    WorldOptions options;
    Reason reason;
    const char* text;
  };
  std::vector<Wrong> all(4, Wrong{options(1), Reason::kBadType, ""});
  all[0].options.device = 1;
  all[0].text = "WorldOptions: device 1 is none of the session's 1";
  all[1].options.device = -1;
  all[1].text = "WorldOptions: device -1 is none of the session's 1";
  ASSERT_EQ(::setenv("WORLD_SIZE", "many", 1), 0);
  all[2].options.size = -1;
  all[2].text = "environment variable WORLD_SIZE: expected a number, got \"many\"";
  all[3].options.exec_timeout = Timeout::max();
  all[3].reason = Reason::kMalformed;
  all[3].text = "exec_timeout: expected 0 s to ";
  for (const Wrong& wrong : all) {
    SCOPED_TRACE(wrong.text);
    absl::Status told;
    std::thread waiting([&] { told = first.Join(options(0)).status(); });
    AwaitPending({"join"});
    const absl::Status refused = second.Join(wrong.options).status();
    waiting.join();
    EXPECT_EQ(ErrorOf(refused).reason, wrong.reason) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(wrong.text));
    const Error error = ErrorOf(told);
    EXPECT_EQ(error.reason, Reason::kMalformed) << told;
    EXPECT_EQ(error.culprit.rank, 1);
    EXPECT_THAT(error.message, HasSubstr("rank 1"));
    EXPECT_THAT(error.message, HasSubstr(" was not let in: "));
  }
  ::unsetenv("WORLD_SIZE");
  absl::Status joined[2];
  std::thread other([&] { joined[0] = first.Join(options(0)).status(); });
  joined[1] = second.Join(options(1)).status();
  other.join();
  for (const absl::Status& status : joined) EXPECT_TRUE(status.ok()) << status;
}

// A daemon ends each call after a while: who has more patience waits on, and hears who is missing.
TEST_P(DaemonTest, RanksWaitForOthersLongerThanACallMayTake) {
  daemon_.reset();
  max_wait_ = absl::Milliseconds(200);
  Start();
  const Session sessions[] = {Open(), Open()};
  const auto options = [](int rank, std::chrono::milliseconds join_timeout) {
    WorldOptions options;
    options.name = "patient";
    options.rank = rank;
    options.size = 2;
    options.join_timeout = join_timeout;
    return options;
  };
  const absl::Status alone = sessions[0].Join(options(0, std::chrono::milliseconds(500))).status();
  EXPECT_EQ(ErrorOf(alone).reason, Reason::kJoinTimeout) << alone;
  EXPECT_THAT(std::string(alone.message()), HasSubstr("1"));
  // However slow the machine is.
  constexpr std::chrono::seconds kPatience(60);
  absl::StatusOr<World> worlds[2];
  std::thread other([&] { worlds[0] = sessions[0].Join(options(0, kPatience)); });
  worlds[1] = sessions[1].Join(options(1, kPatience));
  other.join();
  for (const absl::StatusOr<World>& world : worlds) ASSERT_TRUE(world.ok()) << world.status();
  const absl::Status reformed = worlds[0]->Reform(std::chrono::milliseconds(500)).status();
  EXPECT_EQ(ErrorOf(reformed).reason, Reason::kAgreeTimeout) << reformed;
}

TEST_P(DaemonTest, ALongWaitSaysWhomItWaitsFor) {
  Mutex mutex;
  CondVar said;
  std::string reports;
  SessionOptions options;
  options.address = address_;
  options.transport = GetParam().transport;
  options.device_count = 2;
  absl::StatusOr<std::unique_ptr<Link>> link = OpenLink(options);
  ASSERT_TRUE(link.ok()) << link.status();
  WaitReportOptions often;
  often.first = often.period = absl::Milliseconds(1);
  often.write = [&](const std::string& report) {
    MutexLock lock(&mutex);
    reports += report;
    said.SignalAll();
  };
  const Session session =
      internal::SessionFrom(SessionCore::Make(*std::move(link), absl::Seconds(30), often));
  const auto await = [&](const std::string& text) {
    MutexLock lock(&mutex);
    const absl::Time deadline = SteadyNow() + absl::Seconds(30);
    while (reports.find(text) == std::string::npos && SteadyNow() < deadline) {
      said.WaitFor(&mutex, deadline - SteadyNow());
    }
    EXPECT_THAT(reports, HasSubstr(text));
    reports.clear();
  };
  std::vector<World> worlds(2);
  const auto join = [&](int r) {
    WorldOptions world;
    world.name = "slow";
    world.rank = r;
    world.size = 2;
    world.device = r;
    const absl::StatusOr<World> joined = session.Join(world);
    ASSERT_TRUE(joined.ok()) << joined.status();
    worlds[static_cast<size_t>(r)] = *joined;
  };
  std::thread first([&] { join(0); });
  await(": join (rank 0 of world \"slow\"): missing rank 1\n");
  join(1);
  first.join();
  const Tensor sum = AllReduce(Scalar<float>(worlds[0], 1), worlds[0]);
  const int line = __LINE__ - 1;
  std::thread reader([&] { EXPECT_TRUE(sum.Wait().ok()); });
  await(": all_reduce SUM f32[] at client/daemon_test.cc:" + std::to_string(line) +
        " (rank 0 of world \"slow\"): missing rank 1");
  EXPECT_TRUE(AllReduce(Scalar<float>(worlds[1], 1), worlds[1]).Wait().ok());
  reader.join();
  World world = worlds[0];
  std::thread reforming([&] { EXPECT_TRUE(world.Reform().ok()); });
  await(": reform (rank 0 of world \"slow\"): missing rank 1");
  World other = worlds[1];
  EXPECT_TRUE(other.Reform().ok());
  reforming.join();
}

// Of the steps that members have begun by themselves a Reform keeps no count, nor of what has put
// them out of line.
TEST_P(DaemonTest, AReformBringsMembersWithStepsOfTheirOwnInLine) {
  const Session session = Open(2);
  std::vector<World> worlds = JoinBoth(session, "own steps");
  for (const World& world : worlds) ASSERT_TRUE(world.Step(1).ok());
  for (const bool again : {true, true, false}) {
    const Compiled f = Compile([&worlds](const std::vector<Tensor>& in) {
      return std::vector<Tensor>{AllReduce(in[0], worlds[0]), AllReduce(in[1], worlds[1])};
    });
    // What it would have called is not known yet.
    EXPECT_FALSE(f.Run({Tensor()}).ok());
    EXPECT_EQ(ErrorOf(AllReduce(Scalar<double>(worlds[1], 1), worlds[1]).status()).reason,
              Reason::kOutOfLine);
    if (!again) continue;
    // A call of all members.
    const auto out = f.Run({Scalar<double>(worlds[0], 1), Scalar<double>(worlds[1], 2)});
    ASSERT_TRUE(out.ok()) << out.status();
    EXPECT_THAT(Values<double>((*out)[1]), ElementsAre(3));
  }
  for (const World& world : worlds) EXPECT_EQ(world.step(), 1);
  std::vector<std::thread> reforming;
  for (World& world : worlds) {
    reforming.emplace_back([&world] { EXPECT_TRUE(world.Reform().ok()); });
  }
  for (std::thread& thread : reforming) thread.join();
  for (const int step : {0, 1}) {
    std::vector<Tensor> sums;
    for (const World& world : worlds) {
      if (step > 0) {
        ASSERT_TRUE(world.Step(step).ok());
      }
      EXPECT_EQ(world.step(), step);
      sums.push_back(AllReduce(Scalar<double>(world, 1 + world.rank()), world));
    }
    for (const Tensor& sum : sums) EXPECT_THAT(Values<double>(sum), ElementsAre(3));
  }
}

TEST_P(DaemonTest, OpenWaitsForADaemonThatIsStarting) {
  daemon_.reset();
  const std::string attach = directory_ + "/d.sock.attach";
  UniqueFd silent;
  if (GetParam().tcp) {
    // The port that the last one had is free.
    silent = SilentPort(std::stoi(address_.substr(address_.rfind(':') + 1)));
  } else {
    std::system(("rm -rf " + directory_ + " && mkdir " + directory_).c_str());
    silent = SilentSocket(attach, SOCK_SEQPACKET);
  }
  absl::StatusOr<Session> session;
  SessionOptions options;
  options.address = address_;
  options.transport = GetParam().transport;
  options.open_timeout = std::chrono::seconds(60);
  std::thread opening([&] { session = Session::Open(options); });
  {
    // It has looked, and there was no daemon.
    const UniqueFd first = AwaitClient(silent);
  }
  silent.Reset();
  if (!GetParam().tcp) {
    EXPECT_EQ(::unlink(attach.c_str()), 0);
  }
  Start(address_);
  opening.join();
  EXPECT_TRUE(session.ok()) << session.status();
}

TEST_P(DaemonTest, MappedMemoryAndViews) {
  const Session session = Open();
  absl::StatusOr<MappedTensor<float>> mapped = Map<float>(session, {2});
  if (GetParam().transport != Transport::kRing) {
    EXPECT_EQ(mapped.status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_EQ(Scalar<float>(session, 1).View<float>().status().code(),
              absl::StatusCode::kUnimplemented);
    return;
  }
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  mapped->data()[0] = 3;
  mapped->data()[1] = 4;
  const Tensor y = *mapped * *mapped;
  absl::StatusOr<TensorView<float>> view = y.View<float>();
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_THAT(std::vector<float>(view->begin(), view->end()), ElementsAre(9, 16));
}

// The log waits while the daemon plans a large graph; nothing overtakes what is behind it.
TEST_P(RingTest, MappedMemoryMayBeDroppedOnceItIsUsed) {
  RunRanks(2, [](const World& world) {
    const NoGrad no_grad;
    const Tensor x = Scalar<double>(world, 1);
    for (int i = 0; i < 8; ++i) {
      Tensor large = x;
      for (int op = 0; op < 200 + i; ++op) large = large + x;
      absl::StatusOr<MappedTensor<float>> mapped = Map<float>(world, {3});
      ASSERT_TRUE(mapped.ok()) << mapped.status();
      for (int e = 0; e < 3; ++e) mapped->data()[e] = static_cast<float>(10 * world.rank() + e);
      const Tensor sum = AllReduce(*mapped, world);
      mapped = MappedTensor<float>();
      EXPECT_THAT(Values<float>(sum), ElementsAre(10, 12, 14));
      EXPECT_THAT(Values<double>(large), ElementsAre(201 + i));
    }
  });
}

// As far as it may: what waits for the other holds up nothing else.
TEST_P(DaemonTest, AMemberMayRunAheadOfAnotherOfItsSession) {
  const Session session = Open(2);
  const std::vector<World> worlds = JoinBoth(session, "ahead");
  const NoGrad no_grad;
  std::vector<std::vector<Tensor>> sums(2);
  for (const World& world : worlds) {
    const Tensor x = Scalar<double>(world, world.rank() + 1);
    for (int i = 0; i < 100; ++i) {
      sums[static_cast<size_t>(world.rank())].push_back(AllReduce(x + i, world));
    }
  }
  for (const std::vector<Tensor>& of_rank : sums) {
    for (int i = 0; i < 100; ++i) {
      EXPECT_THAT(Values<double>(of_rank[static_cast<size_t>(i)]), ElementsAre(3 + 2 * i));
    }
  }
}

// More commands than have a record come between.
TEST_P(DaemonTest, WhatIsPendingForLongIsNotForgotten) {
  RunRanks(2, [](const World& world) {
    const NoGrad no_grad;
    const Tensor x = Scalar<double>(world, 1);
    ASSERT_TRUE(x.Wait().ok());
    if (world.rank() == 1) {
      EXPECT_THAT(Values<double>(Recv(DType::kF64, {}, 0, world, 7)), ElementsAre(1));
      ASSERT_TRUE(Barrier(world).Wait().ok());
      return;
    }
    const auto make_many = [&world] {
      const std::vector<double> values(20, 3);
      Tensor made;
      for (int i = 0; i < 1100; ++i) made = FromHost<double>(world, values, {20});
      EXPECT_EQ(Values<double>(made), values);
    };
    const Tensor last = Barrier(world);
    make_many();
    const absl::Status pending = last.Wait(std::chrono::milliseconds(1));
    EXPECT_EQ(ErrorOf(pending).reason, Reason::kTransportTimeout) << pending;
    const Tensor sent = Send(x, 1, world, 7);
    EXPECT_TRUE(last.Wait().ok()) << last.Wait();
    make_many();
    EXPECT_TRUE(last.Wait().ok()) << last.Wait();
    EXPECT_TRUE(sent.Wait().ok()) << sent.Wait();
  });
}

TEST_P(DaemonTest, ALargeGraphGoesThroughStaging) {
  const Session session = Open();
  const Compiled f = Compile([](const std::vector<Tensor>& in) {
    Tensor y = in[0];
    for (int i = 0; i < 3000; ++i) y = y + in[0];
    return std::vector<Tensor>{y};
  });
  const auto out = f.Run({Scalar<double>(session, 1)});
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_THAT(Values<double>((*out)[0]), ElementsAre(3001));
}

// Its log may stand where it leaves: the graph of its last call is planned beside the node's
// thread.
TEST_P(DaemonTest, WhatARankHasCalledComesBeforeItsLeaving) {
  RunRanks(2, [this](const World& world) {
    const Compiled f = Compile([&world](const std::vector<Tensor>& in) {
      Tensor y = in[0];
      for (int i = 0; i < 3000; ++i) y = y + in[0];
      return std::vector<Tensor>{AllReduce(y, world)};
    });
    if (world.rank() == 0) AwaitPending({"all_reduce"});
    const auto out = f.Run({Scalar<double>(world, 1)});
    ASSERT_TRUE(out.ok()) << out.status();
    if (world.rank() == 0) {
      const absl::Status left = world.Leave();
      EXPECT_TRUE(left.ok()) << left;
    }
    EXPECT_THAT(Values<double>((*out)[0]), ElementsAre(6002));
  });
}

// A handle that has been given away, looked at at once: what it was, or the error, but never what
// the next step writes there. Who looked before sees what it was.
TEST_P(DaemonTest, WhatWasGivenAwayIsNeverReadAsSomethingElse) {
  constexpr int64_t kSize = 1 << 16;
  const Session session = Open();
  CompileOptions options;
  options.donate = {0};
  const Compiled step = Compile(
      [](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] + 1}; }, options);
  Tensor x = Zeros(session, DType::kF32, {kSize}) + 0;
  ASSERT_TRUE(x.Wait().ok());
  const bool views = GetParam().transport == Transport::kRing;
  for (int i = 0; i < 60; ++i) {
    SCOPED_TRACE(i);
    absl::StatusOr<TensorView<float>> before;
    if (views && i % 4 == 0) {
      before = x.View<float>();
      ASSERT_TRUE(before.ok()) << before.status();
    }
    const auto next = step.Run({x});
    ASSERT_TRUE(next.ok()) << next.status();
    const std::vector<float> expected(kSize, static_cast<float>(i));
    const auto is_expected = [&](const TensorView<float>& view) {
      return std::equal(expected.begin(), expected.end(), view.begin(), view.end());
    };
    if (views && i % 2 == 0) {
      const auto view = x.View<float>();
      EXPECT_TRUE((*next)[0].Wait().ok());
      if (view.ok()) {
        EXPECT_TRUE(is_expected(*view));
      } else {
        EXPECT_EQ(ErrorOf(view.status()).reason, Reason::kDonated) << view.status();
      }
      if (before.ok()) {
        // The run has not taken what is looked at.
        EXPECT_TRUE(view.ok()) << view.status();
        EXPECT_TRUE(is_expected(*before));
      }
    } else {
      const auto read = x.Read<float>();
      if (read.ok()) {
        EXPECT_TRUE(*read == expected);
      } else {
        EXPECT_EQ(ErrorOf(read.status()).reason, Reason::kDonated) << read.status();
      }
    }
    x = (*next)[0];
    ASSERT_TRUE(x.Wait().ok());
  }
}

// How far the reader and the daemon of the test below have come; each waits for the other.
class ReadAndDonation {
 public:
  enum Place { kNowhere, kCopied, kMidRecord, kReaderWaits, kOver };

  void Reach(absl::string_view failpoint) {
    if (failpoint == "ring_reader.before_copy") {
      Await(kCopied);
    } else if (failpoint == "ring_link.result_copied") {
      GoOn(kNowhere, kCopied);
      Await(kMidRecord);
    } else if (failpoint == "completion_writer.mid_record") {
      if (GoOn(kCopied, kMidRecord)) Await(kReaderWaits);
    } else if (failpoint == "completion.waiting") {
      GoOn(kMidRecord, kReaderWaits);
    }
  }

  // From `from`; false: it is somewhere else.
  bool GoOn(Place from, Place to) {
    const MutexLock lock(&mutex_);
    if (place_ != from) return false;
    place_ = to;
    changed_.SignalAll();
    return true;
  }
  void Set(Place place) {
    const MutexLock lock(&mutex_);
    place_ = place;
    changed_.SignalAll();
  }
  void Await(Place place) {
    const MutexLock lock(&mutex_);
    while (place_ < place) changed_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  Place place_ ABSL_GUARDED_BY(mutex_) = kNowhere;
};

// Of the process: the daemon's thread may still be there when the test has ended.
ReadAndDonation* TheReadAndDonation() {
  static auto* const both = new ReadAndDonation;
  return both;
}

// Nothing can be said of bytes whose name is between two states: the reader waits for the second.
TEST_P(RingTest, WhoHasCopiedWhatIsBeingGivenAwayIsTold) {
  const Session session = Open();
  CompileOptions options;
  options.donate = {0};
  const Compiled step = Compile(
      [](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] + 1}; }, options);
  const auto first = step.Run({Zeros(session, DType::kF32, {1000}) + 0});
  ASSERT_TRUE(first.ok()) << first.status();
  const Tensor x = (*first)[0];
  // Its arena is mapped, for which the daemon is not asked then.
  ASSERT_TRUE(x.Read<float>().ok());
  TheReadAndDonation()->Set(ReadAndDonation::kNowhere);
  SetFailpointHook([](absl::string_view name) { TheReadAndDonation()->Reach(name); });
  const auto next = step.Run({x});
  const auto read = x.Read<float>();
  TheReadAndDonation()->Set(ReadAndDonation::kOver);
  SetFailpointHook(nullptr);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE((*next)[0].Wait().ok());
  EXPECT_EQ(ErrorOf(read.status()).reason, Reason::kDonated) << read.status();
}

INSTANTIATE_TEST_SUITE_P(Transports, DaemonTest,
                         ::testing::Values(Way{Transport::kRing, false, "Ring"},
                                           Way{Transport::kStream, false, "Stream"},
                                           Way{Transport::kStream, true, "StreamOverTcp"},
                                           Way{Transport::kUnary, true, "UnaryOverTcp"}),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Transports, RingTest,
                         ::testing::Values(Way{Transport::kRing, false, "Ring"}),
                         [](const auto& info) { return std::string(info.param.name); });

absl::Status OpenError(const std::string& address,
                       Timeout timeout = std::chrono::milliseconds(100)) {
  SessionOptions options;
  options.address = address;
  options.open_timeout = timeout;
  return Session::Open(options).status();
}

class Directory {
 public:
  Directory() { EXPECT_NE(::mkdtemp(&path_[0]), nullptr); }
  ~Directory() { std::system(("rm -rf " + path_).c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/chorus_open_XXXXXX";
};

TEST(OpenTest, APathNeedsUnixBeforeItAndAHostAPort) {
  const absl::Status path = OpenError("/tmp/chorusd.sock");
  EXPECT_EQ(path.code(), absl::StatusCode::kInvalidArgument) << path;
  EXPECT_THAT(std::string(path.message()), HasSubstr("unix:/tmp/chorusd.sock"));
  const absl::Status host = OpenError("localhost");
  EXPECT_EQ(host.code(), absl::StatusCode::kInvalidArgument) << host;
  EXPECT_THAT(std::string(host.message()), HasSubstr("HOST:PORT"));
}

TEST(OpenTest, WhatIsNoSocketIsNamed) {
  const Directory directory;
  const std::string file = directory.path() + "/file";
  std::ofstream(file) << "not a socket";
  const absl::Status plain = OpenError("unix:" + file);
  EXPECT_EQ(plain.code(), absl::StatusCode::kInvalidArgument) << plain;
  EXPECT_THAT(std::string(plain.message()), HasSubstr(file + ": expected a socket"));
  EXPECT_THAT(std::string(OpenError("unix:" + directory.path()).message()),
              HasSubstr("found a directory"));
}

TEST(OpenTest, AnotherUsersSocketIsNamedWithItsOwner) {
  const Directory directory;
  const std::string path = directory.path() + "/d.sock";
  const UniqueFd attach = SilentSocket(path + ".attach", SOCK_SEQPACKET);
  const UniqueFd grpc = SilentSocket(path, SOCK_STREAM);
  ASSERT_EQ(::chmod(directory.path().c_str(), 0755), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  ASSERT_EQ(::chmod((path + ".attach").c_str(), 0), 0);
  // Root may write anywhere: a process without its privileges asks.
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct none[2] = {};
    if (::syscall(SYS_capset, &header, none) != 0) ::_exit(1);
    const absl::Status status = OpenError("unix:" + path);
    const std::string text =
        std::string(ReasonName(ErrorOf(status).reason)) + " " + std::string(status.message());
    if (::write(pipe[1], text.data(), text.size()) < 0) ::_exit(1);
    ::_exit(0);
  }
  ::close(pipe[1]);
  std::string text(4096, '\0');
  text.resize(static_cast<size_t>(std::max<ssize_t>(::read(pipe[0], &text[0], text.size()), 0)));
  ::close(pipe[0]);
  ::waitpid(child, nullptr, 0);
  EXPECT_THAT(text, HasSubstr("NOT_ATTACHED"));
  EXPECT_THAT(text, HasSubstr("the socket of uid " + std::to_string(::geteuid()) + " (mode 0600)"));
  EXPECT_THAT(text, HasSubstr("--socket_mode"));
}

TEST(OpenTest, WhoDoesNotAnswerIsNamed) {
  const Directory directory;
  const std::string path = directory.path() + "/d.sock";
  const UniqueFd attach = SilentSocket(path + ".attach", SOCK_SEQPACKET);
  const UniqueFd local = SilentSocket(path, SOCK_STREAM);
  const absl::Status silent = OpenError("unix:" + path);
  EXPECT_EQ(ErrorOf(silent).reason, Reason::kTransportTimeout) << silent;
  EXPECT_THAT(std::string(silent.message()), HasSubstr("unix:" + path + " did not answer"));
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string tcp = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  // Long enough to be refused once, whatever else the machine does.
  const absl::Status refused = OpenError(tcp, std::chrono::seconds(3));
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kDaemonLost) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no daemon serves at " + tcp));
  ASSERT_EQ(::listen(listener.get(), 5), 0);
  const absl::Status mute = OpenError(tcp);
  EXPECT_THAT(std::string(mute.message()), HasSubstr(tcp)) << mute;
}

TEST(OpenTest, SaysWhereNobodyAnswers) {
  SessionOptions options;
  options.address = "unix:/nowhere/chorusd.sock";
  options.open_timeout = std::chrono::milliseconds(100);
  const absl::Status status = Session::Open(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrorOf(status).reason, Reason::kDaemonLost);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nowhere/chorusd.sock"));
  options.address = "localhost:1";
  options.transport = Transport::kRing;
  EXPECT_EQ(ErrorOf(Session::Open(options).status()).reason, Reason::kNotAttached);
}

}  // namespace
}  // namespace chorus
