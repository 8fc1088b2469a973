#include "client/internal/log.h"

#include <cstdint>
#include <limits>

#include "absl/types/optional.h"
#include "core/base/ids.h"
#include "gtest/gtest.h"

namespace chorus {
namespace internal {
namespace {

constexpr uint32_t kLast = std::numeric_limits<uint32_t>::max();

TEST(NamePoolTest, ASlotsGenerationsRise) {
  NamePool<TensorId> names(2);
  EXPECT_EQ(names.Take(), (TensorId{0, 1}));
  EXPECT_EQ(names.Take(), (TensorId{1, 1}));
  EXPECT_TRUE(names.empty());
  EXPECT_EQ(names.Take(), absl::nullopt);
  names.Release({0, 1});
  EXPECT_EQ(names.used(), 1u);
  EXPECT_EQ(names.Take(), (TensorId{0, 2}));
  names.GiveBack({0, 2});
  EXPECT_EQ(names.Take(), (TensorId{0, 2})) << "it was not used";
}

TEST(NamePoolTest, ASlotIsNotUsedAgainAfterItsLastGeneration) {
  NamePool<TensorId> names(2);
  ASSERT_EQ(names.Take(), (TensorId{0, 1}));
  names.GiveBack({0, kLast - 1});  // as after so many uses
  ASSERT_EQ(names.Take(), (TensorId{0, kLast - 1}));
  names.Release({0, kLast - 1});
  EXPECT_EQ(names.Take(), (TensorId{0, kLast}));
  EXPECT_EQ(names.used(), 1u);
  names.Release({0, kLast});
  EXPECT_EQ(names.used(), 0u);
  EXPECT_FALSE(names.empty());
  EXPECT_EQ(names.Take(), (TensorId{1, 1}));
  names.Release({1, 1});
  EXPECT_EQ(names.Take(), (TensorId{1, 2}));
  EXPECT_TRUE(names.empty());
}

}  // namespace
}  // namespace internal
}  // namespace chorus
