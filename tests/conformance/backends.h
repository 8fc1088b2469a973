// The backends of the conformance suite: those of the build, and sim's other domains.
#ifndef CHORUS_TESTS_CONFORMANCE_BACKENDS_H_
#define CHORUS_TESTS_CONFORMANCE_BACKENDS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace chorus {

class Backend;
class ThreadPool;

namespace conformance {

// Elements of f32 in one chunk of the CPU's work for two ranks: the suite's sizes lie around it.
constexpr int64_t kChunkElements = 1024;

struct TestBackend {
  std::string name;     // "sim_pairs"
  std::string backend;  // its name in core/backend/backends.h
  // Of one domain, in their order: what ranks there have in common is done and kept once.
  int devices_per_domain = 1;
};
const std::vector<TestBackend>& TestBackends();
// Logical devices of one GPU, a stand-in's or this machine's
// (core/backend/cuda/testing/test_gpu.h). Not among TestBackends(): it has a test of its own.
TestBackend CudaTestBackend();

// By the name of a TestBackend. It cuts its work small, so that small tensors have several chunks.
std::unique_ptr<Backend> MakeBackend(const std::string& name, int devices, uint64_t seed,
                                     ThreadPool* pool);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_BACKENDS_H_
