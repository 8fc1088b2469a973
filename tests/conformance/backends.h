// The backends of the conformance suite.
#ifndef CHORUS_TESTS_CONFORMANCE_BACKENDS_H_
#define CHORUS_TESTS_CONFORMANCE_BACKENDS_H_

#include <cstdint>
#include <memory>
#include <string>

namespace chorus {

class Backend;
class ThreadPool;

namespace conformance {

// Elements of f32 in one chunk of the CPU's work for two ranks: the suite's sizes lie around it.
constexpr int64_t kChunkElements = 1024;

// By its name in core/backend/backends.h. It cuts its work small, so that small tensors have
// several chunks.
std::unique_ptr<Backend> MakeBackend(const std::string& name, int devices, uint64_t seed,
                                     ThreadPool* pool);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_BACKENDS_H_
