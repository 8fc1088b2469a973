// A stand-in for libcublasLt.so.13 beside the stand-in driver: products that are none, but depend
// on all operands and on how often the algorithm splits k, and on nothing else.
// CHORUS_FAKE_BLAS_FAULT is what is wrong with it:
//   bits        products depend on the process, too
//   split_k     the heuristic gives each process a split-k of its own
//   first_call  a process's first call of the heuristic gives another split-k than those that
//   follow bytes       structures have bytes of the process that no attribute shows hidden      the
//   same, and products depend on them init        no algorithm can be built from its id refuse the
//   heuristic gives none for products whose k is 1 run         no product runs with the algorithm
//   of another process (whose bytes are as in `bytes`)
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "core/cuda/cublaslt_api.h"
#include "core/cuda/testing/fake_blas_structs.h"

using namespace chorus::cuda;  // the library's functions are in no namespace

namespace {

bool HasFault(const char* fault) {
  const char* const wanted = std::getenv("CHORUS_FAKE_BLAS_FAULT");
  return wanted != nullptr && wanted == std::string(fault);
}

// What a BlasAlgorithm holds.
struct Configuration {
  uint32_t values[9] = {};  // by attributes
  int32_t hidden = 0;
};
static_assert(sizeof(Configuration) <= sizeof(BlasAlgorithm));

Configuration ConfigurationOf(const BlasAlgorithm& algorithm) {
  Configuration configuration;
  std::memcpy(static_cast<void*>(&configuration), algorithm.data, sizeof(configuration));
  return configuration;
}
void Put(const Configuration& configuration, BlasAlgorithm* algorithm) {
  std::memcpy(algorithm->data, &configuration, sizeof(configuration));
}

constexpr BlasStatus kRefused = BlasStatus::kInvalidValue;

struct Sides {
  uint64_t rows;
  uint64_t columns;
};
Sides SidesOf(BlasOperation operation, BlasLayout layout) {
  return operation == BlasOperation::kAsIs ? Sides{layout->rows, layout->columns}
                                           : Sides{layout->columns, layout->rows};
}
bool IsProduct(BlasMatmul matmul, BlasLayout a, BlasLayout b, BlasLayout d) {
  const Sides of_a = SidesOf(matmul->a, a);
  const Sides of_b = SidesOf(matmul->b, b);
  return of_a.columns == of_b.rows && of_a.rows == d->rows && of_b.columns == d->columns;
}

uint64_t BytesOf(const BlasLayoutStruct& layout) {
  const uint64_t element = layout.type == BlasType::kF64   ? 8
                           : layout.type == BlasType::kF32 ? 4
                                                           : 2;
  return layout.rows * layout.columns * element;
}
uint64_t WordsOf(const BlasLayoutStruct& layout) { return BytesOf(layout) / sizeof(uint64_t); }

size_t BytesOf(BlasAlgorithmAttribute attribute) {
  return attribute < BlasAlgorithmAttribute::kInnerShape ? 4 : 2;
}

}  // namespace

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
BlasStatus cublasLtMatmulDescSetAttribute(BlasMatmul matmul, BlasMatmulAttribute attribute,
                                          const void* value, size_t bytes) {
  if (bytes != sizeof(BlasOperation)) return kRefused;
  (attribute == BlasMatmulAttribute::kTransposeA ? matmul->a : matmul->b) =
      *static_cast<const BlasOperation*>(value);
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatrixLayoutCreate(BlasLayout* layout, BlasType type, uint64_t rows,
                                      uint64_t columns, int64_t /*stride*/) {
  BlasLayoutStruct fields;
  fields.type = type;
  fields.rows = rows;
  fields.columns = columns;
  if (BytesOf(fields) % sizeof(uint64_t) != 0) return kRefused;
  *layout = new BlasLayoutStruct(fields);
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatrixLayoutDestroy(BlasLayout layout) {
  delete layout;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatrixLayoutSetAttribute(BlasLayout /*layout*/,
                                            BlasLayoutAttribute /*attribute*/,
                                            const void* /*value*/, size_t /*bytes*/) {
  return kRefused;  // the probe asks for none
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
    return kRefused;
  }
  if (attribute == BlasPreference::kMinAlignmentA) {
    choice->alignments[0] = *static_cast<const uint32_t*>(value);
  }
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulAlgoGetHeuristic(BlasHandle /*handle*/, BlasMatmul matmul, BlasLayout a,
                                          BlasLayout b, BlasLayout /*c*/, BlasLayout d,
                                          BlasChoice choice, int wanted, BlasHeuristic* results,
                                          int* count) {
  static int calls = 0;
  if (!IsProduct(matmul, a, b, d)) return kRefused;
  const bool refused = HasFault("refuse") && SidesOf(matmul->a, a).columns == 1;
  *count = wanted > 0 && !refused ? 1 : 0;
  Configuration chosen;
  uint32_t value = 20;
  for (uint32_t& each : chosen.values) each = value++;
  chosen.values[static_cast<int>(BlasAlgorithmAttribute::kCustomOption)] = choice->alignments[0];
  uint32_t& split_k = chosen.values[static_cast<int>(BlasAlgorithmAttribute::kSplitK)];
  if (HasFault("split_k")) split_k = static_cast<uint32_t>(getpid());
  if (HasFault("first_call") && calls++ == 0) split_k = 2;
  if (HasFault("bytes") || HasFault("hidden") || HasFault("run")) chosen.hidden = getpid();
  Put(chosen, &results[0].algorithm);
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulAlgoInit(BlasHandle /*handle*/, BlasCompute /*compute*/,
                                  BlasType /*scale*/, BlasType /*a*/, BlasType /*b*/,
                                  BlasType /*c*/, BlasType /*d*/, int id,
                                  BlasAlgorithm* algorithm) {
  if (HasFault("init")) return kRefused;
  *algorithm = {};
  Configuration fresh;
  fresh.values[0] = static_cast<uint32_t>(id);
  Put(fresh, algorithm);
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulAlgoConfigSetAttribute(BlasAlgorithm* algorithm,
                                                BlasAlgorithmAttribute attribute, const void* value,
                                                size_t bytes) {
  if (attribute == BlasAlgorithmAttribute::kId || bytes != BytesOf(attribute)) return kRefused;
  Configuration configuration = ConfigurationOf(*algorithm);
  std::memcpy(&configuration.values[static_cast<int>(attribute)], value, bytes);
  Put(configuration, algorithm);
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmulAlgoConfigGetAttribute(const BlasAlgorithm* algorithm,
                                                BlasAlgorithmAttribute attribute, void* value,
                                                size_t bytes, size_t* written) {
  if (bytes != BytesOf(attribute)) return kRefused;
  const Configuration configuration = ConfigurationOf(*algorithm);
  std::memcpy(value, &configuration.values[static_cast<int>(attribute)], bytes);
  *written = bytes;
  return BlasStatus::kSuccess;
}
BlasStatus cublasLtMatmul(BlasHandle /*handle*/, BlasMatmul matmul, const void* /*alpha*/,
                          const void* a, BlasLayout a_layout, const void* b, BlasLayout b_layout,
                          const void* /*beta*/, const void* /*c*/, BlasLayout /*c_layout*/, void* d,
                          BlasLayout d_layout, const BlasAlgorithm* algorithm, void* /*workspace*/,
                          size_t /*workspace_bytes*/, Stream stream) {
  using Enqueue = void (*)(Stream, void (*)(void*), void*);
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  const auto enqueue =
      driver == nullptr ? nullptr : reinterpret_cast<Enqueue>(dlsym(driver, "chorusFakeEnqueue"));
  if (enqueue == nullptr || algorithm == nullptr) return static_cast<BlasStatus>(1);
  if (!IsProduct(matmul, a_layout, b_layout, d_layout)) return kRefused;
  const Configuration configuration = ConfigurationOf(*algorithm);
  if (HasFault("run") && configuration.hidden != getpid()) return kRefused;
  // As a real product's bits do.
  uint64_t addend = configuration.values[static_cast<int>(BlasAlgorithmAttribute::kSplitK)];
  if (HasFault("bits")) addend += static_cast<uint32_t>(getpid());
  if (HasFault("hidden")) addend += static_cast<uint32_t>(configuration.hidden);
  auto* const work =
      new std::function<void()>([=, a_words = WordsOf(*a_layout), b_words = WordsOf(*b_layout),
                                 d_words = WordsOf(*d_layout)] {
        const auto* const from_a = static_cast<const uint64_t*>(a);
        const auto* const from_b = static_cast<const uint64_t*>(b);
        auto* const to = static_cast<uint64_t*>(d);
        uint64_t in_a = 0;
        uint64_t in_b = 0;
        for (uint64_t i = 0; i < d_words; ++i) {
          to[i] = from_a[in_a] * 3 + from_b[in_b] + addend;
          if (++in_a == a_words) in_a = 0;
          if (++in_b == b_words) in_b = 0;
        }
      });
  // Kept: a graph runs it again.
  enqueue(
      stream, [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, work);
  return BlasStatus::kSuccess;
}

}  // extern "C"
