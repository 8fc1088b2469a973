// Reductions by their definition, one element at a time, to test the fast ones against: no code of
// core/backend/reduction.h is used here.
//
// Operands are given by their ranks in the group, as the bytes of one element each; null where a
// member is absent.
//
// Threads: pure functions. Ownership: operands are the caller's. Errors: none; dtypes and
// reductions are those of the lists below.
#ifndef CHORUS_CORE_BACKEND_TESTING_NAIVE_REDUCTION_H_
#define CHORUS_CORE_BACKEND_TESTING_NAIVE_REDUCTION_H_

#include <cstdint>
#include <random>
#include <vector>

#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"
#include "core/tensor/type.h"

namespace chorus {

// Every dtype that reductions take.
absl::Span<const DType> ReducedDTypes();
// Every reduction that `dtype` has.
std::vector<Reduction> ReductionsOf(DType dtype);

// The bytes of `count` elements: among ordinary numbers zeros of both signs, infinities, subnormals
// and, if wanted, NaNs of several kinds; integers of any bits; bools that are true in several ways.
std::vector<uint8_t> RandomElements(DType dtype, int64_t count, bool with_nan,
                                    std::mt19937_64* random);

// The one order in which ranks are reduced:
//   T(lo, n) = operand lo where n = 1, else T(lo, p) op T(lo + p, n - p),
// p the largest power of two below n. `operand(rank)` is absent where the member is; a side in
// which nobody is there is nothing, and a node with one such side is its other side.
template <typename T, typename Operand, typename Op>
absl::optional<T> NaiveTree(int lo, int n, const Operand& operand, const Op& op) {
  if (n == 1) return operand(lo);
  int p = 1;
  while (2 * p < n) p *= 2;
  const absl::optional<T> left = NaiveTree<T>(lo, p, operand, op);
  const absl::optional<T> right = NaiveTree<T>(lo + p, n - p, operand, op);
  if (!left.has_value()) return right;
  if (!right.has_value()) return left;
  return op(*left, *right);
}

// `factors`: of PREMUL_SUM, one for each rank. `divisor`: of AVG. A single operand is reduced like
// several: its NaN becomes the one NaN.
void NaiveReduce(Reduction reduction, DType dtype, absl::Span<const uint8_t* const> operands,
                 absl::Span<const double> factors, int divisor, uint8_t* result);

// How many of the operands hold `result`, where operand k is one of them; else 0.
float NaiveHolders(DType dtype, absl::Span<const uint8_t* const> operands, const uint8_t* result,
                   size_t k);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_TESTING_NAIVE_REDUCTION_H_
