// The gradients of one training step: many tensors whose means over the ranks are wanted. One
// description, so that ours, Open MPI's ranks and DDP's exchange the same; torch_rank.py reads it
// too.
#ifndef CHORUS_BENCHMARKS_GRADIENTS_H_
#define CHORUS_BENCHMARKS_GRADIENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace chorus {
namespace bench {

struct Gradients {
  // Those of torchvision's ResNet-50, whose first convolution has 64 channels, or of one that is
  // narrower everywhere; the last layer's first, which is the order in which a backward pass has
  // them.
  static Gradients OfResNet50(int width = 64);

  // "1000,1000x2048,...". INVALID_ARGUMENT: it is none.
  std::string Encode() const;
  static absl::StatusOr<Gradients> Decode(const std::string& text);

  int64_t count(size_t tensor) const;  // of elements
  int64_t total() const;
  int64_t bytes() const { return total() * static_cast<int64_t>(sizeof(float)); }

  std::vector<std::vector<int64_t>> shapes;
};

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_GRADIENTS_H_
