// The suite over the submission ring: attached trainers of this machine.
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "chorus/chorus.h"
#include "core/base/error.h"
#include "gtest/gtest.h"
#include "tests/conformance/conformance.h"
#include "tests/conformance/daemon_cluster.h"
#include "tests/conformance/every_backend.h"

namespace chorus {
namespace conformance {
namespace {

INSTANTIATE_TEST_SUITE_P(Ring, Conformance,
                         ::testing::ValuesIn(OnEveryBackend([](const std::string& backend) {
                           return DaemonCluster(backend, Transport::kRing, Wire::kUnix);
                         })),
                         ConformanceName);

// What a device has computed is copied to be read. The reader hears that there is no memory for it,
// and reads it when there is.
TEST(RingTest, AReadThatHasNoMemoryForItsCopySaysSo) {
  constexpr int64_t kMiB = 1 << 20;
  constexpr int64_t kElements = 6 * kMiB / 4;
  ClusterOptions options;
  options.memory_limit_bytes = 32 * kMiB;  // 7/8 are this user's
  const auto cluster = DaemonCluster("sim", Transport::kRing, Wire::kUnix)(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const absl::StatusOr<Session> session = (*cluster)->Open({0});
  ASSERT_TRUE(session.ok()) << session.status();
  const Tensor large = Full(*session, DType::kF32, {kElements}, 3);
  ASSERT_TRUE(large.Wait().ok()) << large.Wait();
  {
    absl::StatusOr<Session> other = (*cluster)->Open({0});
    ASSERT_TRUE(other.ok()) << other.status();
    const absl::StatusOr<MappedTensor<float>> much = Map<float>(*other, {2 * kElements});
    ASSERT_TRUE(much.ok()) << much.status();
    const absl::Status read = large.Read<float>().status();
    EXPECT_EQ(ErrorOf(read).reason, Reason::kOutOfMemory) << read;
    ASSERT_TRUE(other->Close().ok());
  }
  // What that session had is free when its client has let it go.
  absl::StatusOr<std::vector<float>> read = large.Read<float>();
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (ErrorOf(read.status()).reason == Reason::kOutOfMemory && absl::Now() < deadline) {
    read = large.Read<float>();
  }
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->size(), static_cast<size_t>(kElements));
  EXPECT_EQ(read->back(), 3);
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
