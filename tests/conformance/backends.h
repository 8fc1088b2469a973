// The backends of the conformance suite.
#ifndef CHORUS_TESTS_CONFORMANCE_BACKENDS_H_
#define CHORUS_TESTS_CONFORMANCE_BACKENDS_H_

#include <cstdint>
#include <memory>

namespace chorus {

class Backend;
class ThreadPool;

namespace conformance {

enum class BackendKind { kHost, kSim };

// Elements of f32 in one chunk of host's work for two ranks: the suite's sizes lie around it.
constexpr int64_t kChunkElements = 1024;

// It cuts its work small, so that small tensors have several chunks. `seed` is sim's.
std::unique_ptr<Backend> MakeBackend(BackendKind kind, int devices, uint64_t seed,
                                     ThreadPool* pool);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_BACKENDS_H_
