// Making and reading tensors in tests.
//
// Threads: one. Ownership: copies. Errors: fail the test.
#ifndef CHORUS_CLIENT_TESTING_VALUES_H_
#define CHORUS_CLIENT_TESTING_VALUES_H_

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "chorus/chorus.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {

// The elements of a tensor; a test failure and {} when it cannot be read.
template <typename T>
std::vector<T> Values(const Tensor& tensor) {
  absl::StatusOr<std::vector<T>> values = tensor.Read<T>();
  EXPECT_TRUE(values.ok()) << values.status();
  return values.ok() ? *std::move(values) : std::vector<T>();
}

// Numbers without a pattern, from -1 to 1: others by another seed.
inline std::vector<double> Numbers(int64_t count, int seed = 0) {
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(std::sin(12.9898 * static_cast<double>(i + 1) + 78.233 * seed));
  }
  return values;
}
inline Tensor Numbers(const DeviceRef& device, const Shape& shape, int seed = 0) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return FromHost(device, Numbers(count, seed), shape);
}

// Tensors that take all names that the session has left.
inline std::vector<Tensor> TakeAllNames(const DeviceRef& device) {
  std::vector<Tensor> held;
  while (true) {
    Tensor next = Numbers(device, {17});  // more than travels with runs
    if (!next.status().ok()) return held;
    held.push_back(std::move(next));
  }
}

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CLIENT_TESTING_VALUES_H_
