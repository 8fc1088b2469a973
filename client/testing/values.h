// Reading tensors in tests.
//
// Threads: one. Ownership: copies. Errors: fail the test.
#ifndef CHORUS_CLIENT_TESTING_VALUES_H_
#define CHORUS_CLIENT_TESTING_VALUES_H_

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

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CLIENT_TESTING_VALUES_H_
