// Reductions by their definition, one element at a time, to test the fast ones against: no code of
// core/backend/reduction.h is used here.
//
// Elements are passed as the bytes of one each. Threads: pure functions.
#ifndef CHORUS_CORE_BACKEND_TESTING_NAIVE_REDUCTION_H_
#define CHORUS_CORE_BACKEND_TESTING_NAIVE_REDUCTION_H_

#include <cstdint>
#include <random>
#include <vector>

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

// `factors`: of PREMUL_SUM, one for each operand. `divisor`: of AVG.
void NaiveReduce(Reduction reduction, DType dtype, absl::Span<const uint8_t* const> operands,
                 absl::Span<const double> factors, int divisor, uint8_t* result);

// How many of the operands hold `result`, where operand k is one of them; else 0.
float NaiveHolders(DType dtype, absl::Span<const uint8_t* const> operands, const uint8_t* result,
                   size_t k);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_TESTING_NAIVE_REDUCTION_H_
