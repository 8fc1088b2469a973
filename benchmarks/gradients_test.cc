#include "benchmarks/gradients.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace bench {
namespace {

using ::testing::ElementsAre;

TEST(GradientsTest, ThoseOfResNet50AreTorchvisions) {
  const Gradients all = Gradients::OfResNet50();
  EXPECT_EQ(all.shapes.size(), 161u);
  EXPECT_EQ(all.total(), 25557032);
  EXPECT_EQ(all.bytes(), 4 * all.total());
  // The last layer's first, the first layer's last.
  EXPECT_THAT(all.shapes[0], ElementsAre(1000));
  EXPECT_THAT(all.shapes[1], ElementsAre(1000, 2048));
  EXPECT_THAT(all.shapes[2], ElementsAre(2048));
  EXPECT_THAT(all.shapes[4], ElementsAre(2048, 512, 1, 1));
  EXPECT_THAT(all.shapes[7], ElementsAre(512, 512, 3, 3));
  EXPECT_THAT(all.shapes[158], ElementsAre(64));
  EXPECT_THAT(all.shapes[160], ElementsAre(64, 3, 7, 7));
  int convolutions = 0;
  for (const auto& shape : all.shapes) convolutions += shape.size() == 4 ? 1 : 0;
  EXPECT_EQ(convolutions, 53);
}

TEST(GradientsTest, ANarrowOneHasAsManyTensors) {
  EXPECT_EQ(Gradients::OfResNet50(1).shapes.size(), 161u);
  EXPECT_LT(Gradients::OfResNet50(8).total(), 25557032 / 32);
}

TEST(GradientsTest, TextAndBack) {
  const Gradients all = Gradients::OfResNet50();
  const absl::StatusOr<Gradients> again = Gradients::Decode(all.Encode());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->shapes, all.shapes);
  const Gradients two{{{2}, {3, 4}}};
  EXPECT_EQ(two.Encode(), "2,3x4");
  for (const char* text : {"", ",", "3,", "3x", "a", "0", "-1", "3 4"}) {
    EXPECT_EQ(Gradients::Decode(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace bench
}  // namespace chorus
