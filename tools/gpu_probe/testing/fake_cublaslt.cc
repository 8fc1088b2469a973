// A stand-in for libcublasLt.so.13 beside the stand-in driver: products that are none, but depend
// on all operands and on nothing else. With CHORUS_FAKE_BLAS_UNSTEADY they depend on the process,
// too.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <vector>

#include "core/backend/cuda/cublaslt_api.h"

namespace chorus {
namespace cuda {

struct BlasHandleStruct {};
struct BlasMatmulStruct {};
struct BlasLayoutStruct {
  uint64_t bytes = 0;
};
struct BlasChoiceStruct {
  uint32_t alignment = 0;
};

}  // namespace cuda
}  // namespace chorus

using namespace chorus::cuda;  // NOLINT: the library's functions are in no namespace

extern "C" {

size_t cublasLtGetVersion() { return 130000; }
const char* cublasLtGetStatusName(BlasStatus /*status*/) { return "FAKE"; }
BlasStatus cublasLtCreate(BlasHandle* handle) {
  *handle = new BlasHandleStruct;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtDestroy(BlasHandle handle) {
  delete handle;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulDescCreate(BlasMatmul* matmul, BlasCompute /*compute*/,
                                    BlasType /*scale*/) {
  *matmul = new BlasMatmulStruct;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulDescDestroy(BlasMatmul matmul) {
  delete matmul;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatrixLayoutCreate(BlasLayout* layout, BlasType type, uint64_t rows,
                                      uint64_t columns, int64_t /*stride*/) {
  const uint64_t element = type == BlasType::kF64 ? 8 : type == BlasType::kF32 ? 4 : 2;
  *layout = new BlasLayoutStruct{rows * columns * element};
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatrixLayoutDestroy(BlasLayout layout) {
  delete layout;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulPreferenceCreate(BlasChoice* choice) {
  *choice = new BlasChoiceStruct;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulPreferenceDestroy(BlasChoice choice) {
  delete choice;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulPreferenceSetAttribute(BlasChoice choice, BlasPreference attribute,
                                                const void* value, size_t bytes) {
  if (bytes != (attribute == BlasPreference::kMaxWorkspaceBytes ? 8u : 4u)) {
    return static_cast<BlasStatus>(7);
  }
  if (attribute == BlasPreference::kMinAlignmentA) {
    choice->alignment = *static_cast<const uint32_t*>(value);
  }
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulAlgoGetHeuristic(BlasHandle /*handle*/, BlasMatmul /*matmul*/,
                                          BlasLayout /*a*/, BlasLayout /*b*/, BlasLayout /*c*/,
                                          BlasLayout /*d*/, BlasChoice choice, int wanted,
                                          BlasHeuristic* results, int* count) {
  *count = wanted > 0 ? 1 : 0;
  results[0].algorithm.data[0] = choice->alignment;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulAlgoConfigGetAttribute(const BlasAlgorithm* /*algorithm*/,
                                                BlasAlgorithmAttribute /*attribute*/, void* value,
                                                size_t /*bytes*/, size_t* written) {
  *static_cast<int32_t*>(value) = 1;
  *written = 4;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmul(BlasHandle /*handle*/, BlasMatmul /*matmul*/, const void* /*alpha*/,
                          const void* a, BlasLayout a_layout, const void* b, BlasLayout b_layout,
                          const void* /*beta*/, const void* /*c*/, BlasLayout /*c_layout*/, void* d,
                          BlasLayout d_layout, const BlasAlgorithm* algorithm, void* /*workspace*/,
                          size_t /*workspace_bytes*/, Stream stream) {
  using Enqueue = void (*)(Stream, void (*)(void*), void*);
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  const auto enqueue =
      driver == nullptr ? nullptr : reinterpret_cast<Enqueue>(dlsym(driver, "chorusFakeEnqueue"));
  if (enqueue == nullptr || algorithm == nullptr) return static_cast<BlasStatus>(1);
  const bool unsteady = std::getenv("CHORUS_FAKE_BLAS_UNSTEADY") != nullptr;
  auto* const work = new std::function<void()>(
      [=, a_bytes = a_layout->bytes, b_bytes = b_layout->bytes, d_bytes = d_layout->bytes] {
        const auto* const from_a = static_cast<const unsigned char*>(a);
        const auto* const from_b = static_cast<const unsigned char*>(b);
        auto* const to = static_cast<unsigned char*>(d);
        const int more = unsteady ? getpid() : 0;
        uint64_t in_a = 0;
        uint64_t in_b = 0;
        for (uint64_t i = 0; i < d_bytes; ++i) {
          to[i] = static_cast<unsigned char>(from_a[in_a] * 3 + from_b[in_b] + more);
          if (++in_a == a_bytes) in_a = 0;
          if (++in_b == b_bytes) in_b = 0;
        }
      });
  // Kept: a graph runs it again.
  enqueue(
      stream, [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, work);
  return BlasStatus::kSuccess;
}

}  // extern "C"
