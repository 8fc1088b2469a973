// All_reduce of the trainer's own memory, against a whole daemon in this process.
#include "chorus/user_memory.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "chorus/chorus.h"
#include "core/backend/host/host_backend.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernels.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/daemon.h"

namespace chorus {
namespace {

using Path = UserMemory::Path;

size_t Total(const std::vector<size_t>& chunks) {
  size_t total = 0;
  for (const size_t chunk : chunks) total += chunk;
  return total;
}

// As many elements as three whole chunks and a part of one have.
template <typename T>
size_t SeveralChunks() {
  return UserMemory::ChunksOf(size_t{1} << 22, sizeof(T))[0] * 7 / 2;
}

TEST(ChunksTest, HoldEverythingAndAreNeverLongerThanTheFirst) {
  for (const size_t bytes : {1, 2, 4, 8}) {
    const size_t most = UserMemory::ChunksOf(size_t{1} << 24, bytes)[0];
    for (const size_t count :
         {size_t{0}, size_t{1}, most - 1, most, most + 1, 2 * most - 64, 2 * most - 63, 2 * most,
          2 * most + 1, 100 * most, size_t{123456789}, size_t{1} << 33}) {
      SCOPED_TRACE(count);
      const std::vector<size_t> chunks = UserMemory::ChunksOf(count, bytes);
      EXPECT_EQ(Total(chunks), count);
      for (const size_t chunk : chunks) {
        EXPECT_LE(chunk, most);
        EXPECT_TRUE(chunk > 0 || count == 0);
      }
      // They begin where a line of the cache does, where the memory does.
      EXPECT_TRUE(chunks.size() == 1 || chunks.front() * bytes % 64 == 0);
    }
    EXPECT_EQ(most * bytes % 64, 0u);
  }
}

struct Way {
  Transport transport;
  bool tcp;
  const char* name;
};

class UserMemoryTest : public ::testing::TestWithParam<Way> {
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
    server::DaemonOptions options;
    options.listen = {*server::ParseListenAddress("unix:" + directory_ + "/d.sock"),
                      *server::ParseListenAddress("127.0.0.1:0")};
    options.insecure_loopback = true;
    options.node.sequencer.agree_timeout = absl::Seconds(60);
    absl::StatusOr<std::unique_ptr<server::Daemon>> daemon =
        server::Daemon::Start(options, DevicesOf(backend_.get()));
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  void TearDown() override {
    daemon_.reset();
    backend_.reset();
    std::system(("rm -rf " + directory_).c_str());
  }

  // Runs `body` as every rank of a world, each in a thread with a session of its own.
  void RunRanks(int size, const std::function<void(const World&)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([this, r, size, &body] {
        SessionOptions options;
        options.address = daemon_->addresses()[GetParam().tcp ? 1 : 0].ToString();
        options.transport = GetParam().transport;
        options.wait_timeout = std::chrono::seconds(90);
        const absl::StatusOr<Session> session = Session::Open(options);
        ASSERT_TRUE(session.ok()) << session.status();
        WorldOptions member;
        member.name = "job";
        member.rank = r;
        member.size = size;
        const absl::StatusOr<World> world = session->Join(member);
        ASSERT_TRUE(world.ok()) << world.status();
        body(*world);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::string directory_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<server::Daemon> daemon_;
};

// Different on every rank and at every place, and not exact in a sum of floats.
template <typename T>
std::vector<T> Numbers(int rank, size_t count) {
  std::vector<T> numbers(count);
  for (size_t i = 0; i < count; ++i) {
    numbers[i] = static_cast<T>((i * 2654435761u % 1000003) * (rank + 1)) / static_cast<T>(7);
  }
  return numbers;
}

template <typename T>
void ExpectTheBitsOfAllReduce(UserMemory* memory, const World& world, size_t count, Path path) {
  SCOPED_TRACE(count);
  const std::vector<T> in = Numbers<T>(world.rank(), count);
  std::vector<T> out(count + 2, T{77});
  const absl::Status status = memory->AllReduce(in.data(), out.data() + 1, count);
  ASSERT_TRUE(status.ok()) << status;
  const auto expected =
      AllReduce(FromHost<T>(world, in, {static_cast<int64_t>(count)}), world).template Read<T>();
  ASSERT_TRUE(expected.ok()) << expected.status();
  // Memory of no elements may be null, which memcmp does not take even for nothing.
  EXPECT_TRUE(count == 0 || std::memcmp(out.data() + 1, expected->data(), count * sizeof(T)) == 0);
  // Nothing beside it was touched.
  EXPECT_EQ(out.front(), T{77});
  EXPECT_EQ(out.back(), T{77});
  EXPECT_EQ(memory->path(), path);
}

// Which lacks what the parent has mapped.
TEST_P(UserMemoryTest, AForkedChildIsToldSo) {
  RunRanks(1, [](const World& world) {
    const size_t count = 100000;
    std::vector<float> values(count, 1);
    UserMemory memory(world);
    ASSERT_TRUE(memory.AllReduce(values.data(), values.data(), count).ok());
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const absl::Status status = memory.AllReduce(values.data(), values.data(), count);
      ::_exit(ErrorOf(status).reason == Reason::kForked ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
  });
}

TEST_P(UserMemoryTest, GivesTheBitsOfAllReduceAtEverySize) {
  RunRanks(3, [](const World& world) {
    UserMemory memory(world);
    const Path large = GetParam().transport == Transport::kRing ? Path::kStaging : Path::kUpload;
    const size_t chunk = UserMemory::ChunksOf(1 << 24, 4)[0];
    for (const size_t count : {size_t{0}, size_t{1}, size_t{1000}}) {
      ExpectTheBitsOfAllReduce<float>(&memory, world, count, Path::kUpload);
    }
    for (const size_t count : {size_t{100001}, chunk, chunk + 1, SeveralChunks<float>()}) {
      ExpectTheBitsOfAllReduce<float>(&memory, world, count, large);
    }
    ExpectTheBitsOfAllReduce<float>(&memory, world, 9 * chunk + 5, large);
    ExpectTheBitsOfAllReduce<double>(&memory, world, SeveralChunks<double>(), large);
    ExpectTheBitsOfAllReduce<int64_t>(&memory, world, SeveralChunks<int64_t>(), large);
  });
}

TEST_P(UserMemoryTest, WorksInPlaceAndOverAndOver) {
  RunRanks(2, [](const World& world) {
    UserMemory memory(world);
    // More lengths than it keeps memory for.
    for (size_t k = 0; k < 160; ++k) {
      const size_t count = 50000 + k % 80 * 500;
      std::vector<float> values(count, static_cast<float>(world.rank() + k));
      ASSERT_TRUE(memory.AllReduce(values.data(), values.data(), count).ok());
      EXPECT_EQ(values, std::vector<float>(count, static_cast<float>(2 * k + 1)));
    }
    std::vector<float> values = Numbers<float>(world.rank(), SeveralChunks<float>());
    const std::vector<float> zero = Numbers<float>(0, values.size());
    const std::vector<float> one = Numbers<float>(1, values.size());
    ASSERT_TRUE(memory.AllReduce(values.data(), values.data(), values.size()).ok());
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], zero[i] + one[i]) << i;
  });
}

TEST_P(UserMemoryTest, AnotherCountIsAMismatchOnEveryRankAndTheNextCallWorks) {
  RunRanks(2, [](const World& world) {
    UserMemory memory(world);
    const size_t count = SeveralChunks<float>();
    const size_t chunk = UserMemory::ChunksOf(1 << 24, 4)[0];
    // As many chunks, one more, many more, and one; and one that is as long, or nearly so, as the
    // other's first.
    const std::pair<size_t, size_t> counts[] = {
        {count, count + 1}, {count, count + chunk},          {count, count + 9 * chunk},
        {count, 1},         {chunk - 16, chunk + chunk / 7}, {chunk, 2 * chunk}};
    for (const auto& [zeroth, first] : counts) {
      SCOPED_TRACE(absl::StrCat(zeroth, " and ", first));
      std::vector<float> values(world.rank() == 0 ? zeroth : first, 1);
      const absl::Status status = memory.AllReduce(values.data(), values.data(), values.size());
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(ErrorOf(status).reason, Reason::kMismatch) << status;
      std::vector<float> right(count, 1);
      const absl::Status again = memory.AllReduce(right.data(), right.data(), count);
      ASSERT_TRUE(again.ok()) << again;
      EXPECT_EQ(right, std::vector<float>(count, 2.0f));
    }
  });
}

TEST_P(UserMemoryTest, ManyPartsAreReducedAsIfTheyWereOne) {
  RunRanks(3, [](const World& world) {
    UserMemory memory(world);
    const size_t chunk = UserMemory::ChunksOf(1 << 24, 4)[0];
    // Shorter than a chunk, longer, and nothing; the second and the last in their place.
    const size_t counts[] = {3, 1000, 0, 2 * chunk + 7, chunk - 1, 1};
    std::vector<std::vector<float>> in, out;
    std::vector<UserMemory::Part<float>> parts;
    for (const size_t count : counts) {
      in.push_back(Numbers<float>(world.rank(), count + in.size()));
      in.back().resize(count);
      out.emplace_back(count + 2, 77.0f);
    }
    const std::vector<std::vector<float>> before = in;
    for (size_t k = 0; k < in.size(); ++k) {
      const bool in_place = k == 1 || k == 5;
      parts.push_back({in[k].data(), in_place ? in[k].data() : out[k].data() + 1, counts[k]});
    }
    const absl::Status status = memory.AllReduceCoalesced(parts, Reduction::kAvg);
    ASSERT_TRUE(status.ok()) << status;
    for (size_t k = 0; k < parts.size(); ++k) {
      SCOPED_TRACE(k);
      const auto shape = static_cast<int64_t>(counts[k]);
      const auto expected =
          AllReduce(FromHost<float>(world, before[k], {shape}), world, Reduction::kAvg)
              .Read<float>();
      ASSERT_TRUE(expected.ok()) << expected.status();
      EXPECT_EQ(std::vector<float>(parts[k].out, parts[k].out + counts[k]), *expected);
      EXPECT_EQ(out[k].front(), 77);
      EXPECT_EQ(out[k].back(), 77);
    }
    EXPECT_TRUE(memory.AllReduceCoalesced<float>({}).ok());
  });
}

TEST_P(UserMemoryTest, OtherPartsOfAsManyElementsAreAMismatchOnEveryRank) {
  RunRanks(2, [](const World& world) {
    UserMemory memory(world);
    std::vector<float> x(50000, 1);
    const auto parts = [&](size_t first, size_t second) {
      return std::vector<UserMemory::Part<float>>{
          {x.data(), x.data(), first},
          {x.data() + first, x.data() + first, second},
          {x.data() + first + second, x.data() + first + second, 10}};
    };
    const std::pair<size_t, size_t> others[] = {{40, 20000}, {19999, 41}, {0, 20040}, {20000, 39}};
    for (const auto& [first, second] : others) {
      const absl::Status status =
          memory.AllReduceCoalesced(world.rank() == 0 ? parts(20000, 40) : parts(first, second));
      EXPECT_EQ(ErrorOf(status).reason, Reason::kMismatch) << status;
      const bool first_differs = first != 20000;
      EXPECT_THAT(
          std::string(status.message()),
          ::testing::HasSubstr(absl::StrCat(
              "rank 1 of the group gives ", first_differs ? first : second, " elements as part ",
              first_differs ? 0 : 1, ", rank 0 gives ", first_differs ? 20000 : 40)));
      EXPECT_THAT(x, ::testing::Each(1.0f)) << "nothing was reduced";
    }
    EXPECT_TRUE(memory.AllReduceCoalesced(parts(3, 4)).ok());
    EXPECT_EQ(x[16], 2);
    EXPECT_EQ(x[17], 1);
  });
}

TEST_P(UserMemoryTest, AMismatchNamesWhatEachRankGives) {
  RunRanks(2, [](const World& world) {
    UserMemory memory(world);
    std::vector<float> x(100, 1);
    const auto parts = [&](size_t n, size_t last) {
      std::vector<UserMemory::Part<float>> parts(n, {x.data(), x.data(), 1});
      for (size_t i = 0; i < n; ++i) parts[i].in = parts[i].out = x.data() + i;
      parts.back().count = last;
      return parts;
    };
    const auto text = [](const absl::Status& status) {
      EXPECT_EQ(ErrorOf(status).reason, Reason::kMismatch) << status;
      return std::string(status.message());
    };
    const bool other = world.rank() == 1;
    EXPECT_THAT(text(memory.AllReduceCoalesced(parts(other ? 3 : 2, 1))),
                ::testing::HasSubstr("rank 1 of the group gives 3 parts, rank 0 gives 2"));
    EXPECT_THAT(text(memory.AllReduceCoalesced(parts(70, other ? 2 : 1))),
                ::testing::HasSubstr("gives other counts than rank 0 behind part 63"));
    const size_t count = other ? 7 : 5;
    const std::string one = text(memory.AllReduce(x.data(), x.data(), count));
    EXPECT_THAT(one, ::testing::HasSubstr("rank 0: all_reduce SUM f32[5]"));
    EXPECT_THAT(one, ::testing::HasSubstr("rank 1: all_reduce SUM f32[7]"));
    EXPECT_THAT(
        one, ::testing::HasSubstr(absl::StrCat("; in all this rank gives ", count, " elements")));
  });
}

TEST_P(UserMemoryTest, NoGroupIsAnError) {
  UserMemory memory((Group()));
  float value = 1;
  EXPECT_EQ(memory.AllReduce(&value, &value, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(memory.path(), Path::kNone);
}

INSTANTIATE_TEST_SUITE_P(Ways, UserMemoryTest,
                         ::testing::Values(Way{Transport::kRing, false, "Ring"},
                                           Way{Transport::kStream, true, "Stream"}),
                         [](const ::testing::TestParamInfo<Way>& info) { return info.param.name; });

}  // namespace
}  // namespace chorus
