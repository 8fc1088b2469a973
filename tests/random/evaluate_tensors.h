// The tensors that the evaluator (evaluate.h) computes with: arrays of nodes of its graph of
// scalars. Here are the ops that a rank computes by itself, and what collectives are made of: parts
// of tensors, tensors joined, and tensors reduced to one.
//
// Threads: thread-compatible, together with the graph. Ownership: arrays are values; a TensorOps
// refers to a graph, which must outlive it, and adds nodes there. Errors: INVALID_ARGUMENT, of what
// would be refused or has no value.
#ifndef CHORUS_TESTS_RANDOM_EVALUATE_TENSORS_H_
#define CHORUS_TESTS_RANDOM_EVALUATE_TENSORS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/random/evaluate_scalars.h"
#include "tests/random/program.h"

namespace chorus {
namespace random_programs {

struct Array {
  DType dtype = DType::kF32;
  Dims shape;
  std::vector<int> nodes;
};
using Arrays = std::vector<Array>;

// From the front; `axis` < 0 counts from the back.
int64_t Axis(int64_t axis, const Dims& shape);

class TensorOps {
 public:
  explicit TensorOps(ScalarGraph* graph) : graph_(graph) {}

  // The result of an op that a rank computes by itself, which is to be like `out`.
  absl::StatusOr<Array> Local(const Statement& s, const Arrays& in, const Value& out);

  Array Copied(const Array& x);
  Array DetachedArray(const Array& x);
  Array ZerosOf(DType dtype, const Dims& shape);
  Array Counts(const std::vector<int64_t>& counts);
  Array Sliced(const Array& x, int64_t axis, int64_t begin, int64_t end);
  // Pieces of these rows along an axis. No rows: of equally many.
  absl::StatusOr<Arrays> Split(const Array& x, int64_t axis, std::vector<int64_t> rows,
                               size_t pieces);
  absl::StatusOr<Array> Joined(const Arrays& pieces, int64_t axis);
  // Element by element.
  absl::StatusOr<Array> Reduced(Reduction reduction, const Arrays& of,
                                const std::vector<double>& factors);
  // x W^T + b, of nn::Linear.
  absl::StatusOr<Array> Linear(const Array& x, const Array& weight, const Array& bias);
  // Its elements, as indices or counts.
  absl::StatusOr<std::vector<int64_t>> Whole(const Array& x) const;

 private:
  // Of that shape: at each index what `x` has at `from` of it.
  Array Mapped(const Array& x, const Dims& shape, const std::function<Dims(const Dims&)>& from);
  // `result` with a sum for each element.
  absl::StatusOr<Array> Summed(Array result, const std::vector<Edges>& sums);
  absl::StatusOr<Array> Reduction1(const Statement& s, const Array& x, const Value& out);
  // kSort, kArgSort.
  absl::StatusOr<Array> Sorted(const Statement& s, const Array& x, const Value& out);
  absl::StatusOr<Array> MatMul(const Array& a, const Array& b);
  // kLayerNorm, kGroupNorm, kBatchNorm.
  absl::StatusOr<Array> Normalized(const Statement& s, const Array& x, const Array& weight,
                                   const Array& bias);
  // kConv2d, kConvTranspose2d; of a shape.
  absl::StatusOr<Array> Convolved(const Statement& s, const Array& x, const Array& weight,
                                  const Dims& shape);
  // The other three.
  absl::StatusOr<Array> Pooled(const Statement& s, const Array& x, const Dims& shape);
  // One of some nodes, the first of the largest.
  int Largest(DType dtype, const std::vector<int>& of);

  ScalarGraph* const graph_;
};

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_EVALUATE_TENSORS_H_
