// What every backend must do, as one suite of tests.
//
// A backend's test opens it and instantiates the suite in a few lines:
//   INSTANTIATE_TEST_SUITE_P(Host, BackendConformance, testing::Values(BackendConformanceParam{
//       "default", [](int devices, HostKernelFactory kernels) { return ...; }}),
//       BackendConformanceName);
// Seeds are printed; CHORUS_TEST_SEED sets one. Every wait has a deadline.
//
// Threads: tests run one after the other; backends use what threads they like. Ownership: a test
// has the backend that it opens. Errors: fail the test.
#ifndef CHORUS_CORE_BACKEND_TESTING_BACKEND_CONFORMANCE_H_
#define CHORUS_CORE_BACKEND_TESTING_BACKEND_CONFORMANCE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "core/backend/backend.h"
#include "core/ops/host_kernel.h"
#include "gtest/gtest.h"

namespace chorus {

// Memory that OpenBackend must allow and no more, so that running out of it can be tested.
constexpr int64_t kConformanceMemoryBytes = int64_t{256} << 20;

struct BackendConformanceParam {
  using OpenBackend =
      std::function<std::unique_ptr<Backend>(int devices, HostKernelFactory make_kernel)>;
  std::string name;
  OpenBackend open;
};

inline void PrintTo(const BackendConformanceParam& param, std::ostream* out) { *out << param.name; }

inline std::string BackendConformanceName(
    const testing::TestParamInfo<BackendConformanceParam>& info) {
  return info.param.name;
}

class BackendConformance : public testing::TestWithParam<BackendConformanceParam> {};

// Kernels of the suite: "test_affine" (a, b: f32[n]) -> 2 a + b; "test_scratch" (a: f32[n]) -> a,
// by way of its workspace; "test_fail" (a) -> ABORTED, and "neg" (a) -> ABORTED, which is a bug:
// that op never fails.
HostKernelOrError MakeTestKernel(const NodeView& node, absl::Span<const TensorType> outputs);

// The seed of this run, printed once.
uint64_t TestSeed();

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_TESTING_BACKEND_CONFORMANCE_H_
