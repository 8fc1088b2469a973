#include "benchmarks/gradients.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace chorus {
namespace bench {

Gradients Gradients::OfResNet50(int width) {
  constexpr int64_t kClasses = 1000;
  constexpr int64_t kExpansion = 4;  // a block's output beside its inner convolutions
  constexpr int kBlocks[] = {3, 4, 6, 3};
  // In the order of a forward pass.
  Gradients all;
  const auto convolution = [&all](int64_t from, int64_t to, int64_t size) {
    all.shapes.push_back({to, from, size, size});
    // Its batch normalisation: weight and bias.
    all.shapes.push_back({to});
    all.shapes.push_back({to});
  };
  convolution(3, width, 7);
  int64_t channels = width;
  int64_t inner = width;
  for (const int blocks : kBlocks) {
    for (int block = 0; block < blocks; ++block) {
      convolution(channels, inner, 1);
      convolution(inner, inner, 3);
      convolution(inner, inner * kExpansion, 1);
      // What goes past a stage's first block is brought to the shape of its output.
      if (block == 0) convolution(channels, inner * kExpansion, 1);
      channels = inner * kExpansion;
    }
    inner *= 2;
  }
  all.shapes.push_back({kClasses, channels});
  all.shapes.push_back({kClasses});
  std::reverse(all.shapes.begin(), all.shapes.end());
  return all;
}

std::string Gradients::Encode() const {
  return absl::StrJoin(shapes, ",", [](std::string* to, const std::vector<int64_t>& shape) {
    absl::StrAppend(to, absl::StrJoin(shape, "x"));
  });
}

absl::StatusOr<Gradients> Gradients::Decode(const std::string& text) {
  Gradients gradients;
  for (const absl::string_view one : absl::StrSplit(text, ',')) {
    gradients.shapes.emplace_back();
    for (const absl::string_view size : absl::StrSplit(one, 'x')) {
      int64_t number = 0;
      if (!absl::SimpleAtoi(size, &number) || number < 1) {
        return absl::InvalidArgumentError(absl::StrCat("no shape: ", one));
      }
      gradients.shapes.back().push_back(number);
    }
  }
  return gradients;
}

int64_t Gradients::count(size_t tensor) const {
  int64_t count = 1;
  for (const int64_t size : shapes[tensor]) count *= size;
  return count;
}

int64_t Gradients::total() const {
  int64_t total = 0;
  for (size_t k = 0; k < shapes.size(); ++k) total += count(k);
  return total;
}

}  // namespace bench
}  // namespace chorus
