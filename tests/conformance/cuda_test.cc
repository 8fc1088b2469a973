// The suite without a transport, on logical devices of one GPU.
#include "tests/conformance/conformance.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/every_backend.h"

namespace chorus {
namespace conformance {
namespace {

ConformanceParam Cuda() { return OnBackend(CudaTestBackend(), DirectCluster); }

INSTANTIATE_TEST_SUITE_P(Direct, Conformance, ::testing::Values(Cuda()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Direct, ConformanceInside, ::testing::Values(Cuda()), ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
