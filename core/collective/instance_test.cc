#include "core/collective/instance.h"

#include <vector>

#include "gtest/gtest.h"

namespace chorus {
namespace {

InstanceKey Key(int32_t group, int64_t epoch, int64_t index, const std::vector<int32_t>& path) {
  InstanceKey key;
  key.group = GroupId(group);
  key.epoch = Epoch(epoch);
  key.index = index;
  for (const int32_t request : path) key.path.push_back({key.epoch, request});
  return key;
}

InstanceKey Pair(int32_t source, int32_t destination, int64_t tag) {
  InstanceKey key = Key(2, 9, 1, {});
  key.source = GroupRank(source);
  key.destination = GroupRank(destination);
  key.tag = tag;
  return key;
}

TEST(InstanceKeyTest, TextNamesAllOfIt) {
  EXPECT_EQ(Key(0, 3, 17, {}).ToString(), "group 0 epoch 3 index 17");
  EXPECT_EQ(Key(0, 3, 17, {0, 1}).ToString(), "group 0 epoch 3 index 17, gradient 0.1");
  EXPECT_EQ(Key(0, 3, 17, {0}).Gradient(Epoch(5), 1).ToString(),
            "group 0 epoch 3 index 17, gradient 0.1@5");
  EXPECT_EQ(Pair(1, 2, 7).ToString(), "group 2 epoch 9 from 1 to 2 tag 7 index 1");
}

TEST(InstanceKeyTest, GradientAndParentAreInverse) {
  const InstanceKey key = Key(1, 2, 3, {4});
  EXPECT_EQ(key.Gradient(Epoch(2), 5), Key(1, 2, 3, {4, 5}));
  EXPECT_NE(key.Gradient(Epoch(3), 5), Key(1, 2, 3, {4, 5}));
  EXPECT_EQ(key.Gradient(Epoch(3), 5).Parent(), key);
  EXPECT_TRUE(key < key.Gradient(Epoch(2), 0));
  EXPECT_FALSE(key.Gradient(Epoch(2), 0) < key);
  EXPECT_TRUE(key.Gradient(Epoch(2), 1) < key.Gradient(Epoch(3), 0));
}

TEST(InstanceKeyTest, DecodesWhatItEncodes) {
  const std::vector<InstanceKey> keys = {Key(0, 1, 0, {}), Key(7, 1LL << 40, 1LL << 50, {}),
                                         Key(1, 2, 3, {0, 2147483647, 1}), Pair(0, 0, -5),
                                         Pair(3, 1, 1LL << 60).Gradient(Epoch(11), 2)};
  ByteWriter out;
  for (const InstanceKey& key : keys) EncodeInstanceKey(key, &out);
  ByteReader in(out.bytes());
  for (const InstanceKey& key : keys) EXPECT_EQ(DecodeInstanceKey(&in), key);
  EXPECT_TRUE(in.Done());
}

TEST(InstanceKeyTest, EveryTruncationFails) {
  ByteWriter out;
  EncodeInstanceKey(Pair(3, 1, 300).Gradient(Epoch(11), 2), &out);
  for (size_t size = 0; size < out.size(); ++size) {
    ByteReader in(absl::string_view(out.bytes()).substr(0, size));
    DecodeInstanceKey(&in);
    EXPECT_FALSE(in.ok()) << size;
  }
}

TEST(InstanceKeyTest, NumbersOutOfRangeFail) {
  const auto fails = [](const InstanceKey& key) {
    ByteWriter out;
    EncodeInstanceKey(key, &out);
    ByteReader in(out.bytes());
    DecodeInstanceKey(&in);
    return !in.ok();
  };
  EXPECT_FALSE(fails(Key(0, 1, 0, {})));
  EXPECT_TRUE(fails(Key(-1, 1, 0, {})));
  EXPECT_TRUE(fails(Key(0, -1, 0, {})));
  EXPECT_TRUE(fails(Key(0, 1, -1, {})));
  EXPECT_TRUE(fails(Key(0, 1, 0, {-1})));
  EXPECT_TRUE(fails(Pair(0, -1, 0)));
  EXPECT_TRUE(fails(Key(0, 1, 0, std::vector<int32_t>(kMaxGradientOrder + 1, 0))));
}

TEST(DescriptorTest, TextNamesWhatIsSet) {
  Descriptor descriptor;
  descriptor.kind = CollectiveKind::kAllReduce;
  descriptor.reduction = Reduction::kSum;
  descriptor.dtype = DType::kF32;
  descriptor.dims = {4};
  EXPECT_EQ(descriptor.ToString(), "all_reduce SUM f32[4]");
  descriptor = Descriptor();
  descriptor.kind = CollectiveKind::kBroadcast;
  descriptor.root = GroupRank(2);
  descriptor.dtype = DType::kF64;
  descriptor.dims = {3, 3};
  EXPECT_EQ(descriptor.ToString(), "broadcast root=2 f64[3,3]");
  descriptor = Descriptor();
  descriptor.kind = CollectiveKind::kBarrier;
  EXPECT_EQ(descriptor.ToString(), "barrier");
}

}  // namespace
}  // namespace chorus
