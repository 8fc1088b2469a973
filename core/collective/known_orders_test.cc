#include "core/collective/known_orders.h"

#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/counting_heap.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

GangOrder OrderOf(int32_t instances, int32_t first_run) {
  GangOrder order;
  order.instances.resize(static_cast<size_t>(instances));
  std::iota(order.instances.begin(), order.instances.end(), 0);
  order.runs = {first_run, 1 - first_run};
  order.reordered = {{}, order.instances};
  return order;
}

TEST(KnownOrdersTest, KeepsWhatATrainerHas) {
  KnownOrders orders;
  for (int32_t gang = 0; gang < 6; ++gang) {
    EXPECT_EQ(orders.Find(absl::StrCat("gang ", gang)), nullptr);
    const GangOrder* kept = orders.Keep(absl::StrCat("gang ", gang), OrderOf(1000, gang % 2));
    EXPECT_EQ(kept->runs[0], gang % 2);
  }
  for (int32_t gang = 0; gang < 6; ++gang) {
    const GangOrder* order = orders.Find(absl::StrCat("gang ", gang));
    ASSERT_NE(order, nullptr);
    EXPECT_EQ(order->runs[0], gang % 2);
    EXPECT_EQ(order->instances.size(), 1000u);
  }
}

TEST(KnownOrdersTest, TakesNoMoreThanItSays) {
  for (const int32_t instances : {0, 2, 3, 127, 128, 3001}) {
    SCOPED_TRACE(instances);
    const HeapUse heap;
    KnownOrders orders;
    for (int32_t gang = 0; gang < 1000; ++gang) {
      orders.Keep(absl::StrCat("gang ", gang, " of a long name"), OrderOf(instances, 0));
      EXPECT_LE(orders.bytes(), KnownOrders::kMostBytes);
      // The table has a few bytes that are for no slot.
      ASSERT_LE(heap.bytes(), static_cast<int64_t>(orders.bytes()) + 64) << gang;
      EXPECT_NE(orders.Find(absl::StrCat("gang ", gang, " of a long name")), nullptr);
    }
  }
}

TEST(KnownOrdersTest, OneThatIsTooLargeIsNotKept) {
  KnownOrders orders;
  orders.Keep("small", OrderOf(2, 0));
  const size_t small = orders.bytes();
  EXPECT_EQ(orders.Keep("large", OrderOf(5000, 1))->runs[0], 1);
  EXPECT_EQ(orders.Find("large"), nullptr);
  EXPECT_GT(orders.bytes(), small + KnownOrders::kMostBytes / 2) << "but it is there";
  orders.Keep("other", OrderOf(2, 2));
  EXPECT_LE(orders.bytes(), KnownOrders::kMostBytes / 2) << "until the next one";
  EXPECT_NE(orders.Find("small"), nullptr);
}

TEST(SignatureWriterTest, ListsThatDifferHaveOtherBytes) {
  const std::vector<std::vector<int64_t>> lists = {
      {}, {0}, {1}, {-1}, {0, 0}, {0, 1}, {1, 0}, {0, 1, 2}, {0, 2}, {2, 3}, {-1, 0}, {0, 1, 0, 1}};
  std::set<std::string> signatures;
  for (const std::vector<int64_t>& a : lists) {
    for (const std::vector<int64_t>& b : lists) {
      ByteWriter out;
      SignatureWriter writer(&out);
      for (const auto* list : {&a, &b}) {
        for (const int64_t number : *list) writer.Put(number);
        writer.End();
      }
      EXPECT_TRUE(signatures.insert(out.Take()).second);
    }
  }
}

TEST(SignatureWriterTest, NumbersThatFollowEachOtherTakeAFewBytes) {
  ByteWriter out;
  SignatureWriter writer(&out);
  for (int64_t number = 0; number < 100000; ++number) writer.Put(number);
  writer.End();
  EXPECT_LT(out.bytes().size(), 10u);
}

}  // namespace
}  // namespace chorus
