// Calls of every local op, of many sizes, for tests that hold kernels against the evaluator.
//
// Threads: any. Ownership: plain values. Errors: fail the test.
#ifndef CHORUS_CORE_OPS_TESTING_KERNEL_CASES_H_
#define CHORUS_CORE_OPS_TESTING_KERNEL_CASES_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/ops/node_spec.h"
#include "core/ops/testing/value.h"
#include "core/tensor/type.h"

namespace chorus {
namespace testing {

struct KernelCase {
  std::string op;
  std::vector<std::vector<int64_t>> inputs;
  Attributes attributes;
  // An input of indices from 0 to limit - 1, of that dtype.
  int index_input = -1;
  int64_t limit = 0;
  DType index_dtype = DType::kI64;
};

std::vector<KernelCase> KernelCases();

// Those that there are kernels for.
std::vector<DType> AllDTypes();
TensorType WithDType(DType dtype, const std::vector<int64_t>& sizes);

// Input i of the call, where others are of that dtype.
TensorType TypeOfInput(const KernelCase& c, size_t i, DType dtype);
// Whether the op takes that dtype.
bool Takes(const KernelCase& c, DType dtype);
// Inputs that the op takes, of that dtype where they have none of their own.
std::vector<Value> InputsOf(const KernelCase& c, DType dtype, std::mt19937_64* random);

// Of one type, and as near as that type's precision allows; NaN is near NaN. `what` begins with the
// op.
void ExpectNear(const Value& got, const Value& expected, const std::string& what);

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_TESTING_KERNEL_CASES_H_
