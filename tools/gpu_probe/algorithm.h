// An algorithm of cuBLASLt: the structure that the library runs, what it shows of it, and both as a
// line for another process.
//
// Threads: values. Ownership: none. Errors: INVALID_ARGUMENT: a line that is no algorithm.
#ifndef CHORUS_TOOLS_GPU_PROBE_ALGORITHM_H_
#define CHORUS_TOOLS_GPU_PROBE_ALGORITHM_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/cuda/cublaslt_api.h"

namespace chorus {
namespace probe {

struct Algorithm {
  static constexpr size_t kFields = 9;
  static constexpr int64_t kNotKnown = -1;  // the library does not tell

  cuda::BlasAlgorithm structure;
  std::array<int64_t, kFields> values = {};  // in the order of AlgorithmFields()
};

struct AlgorithmField {
  cuda::BlasAlgorithmAttribute attribute;
  const char* name;
  size_t bytes;
};
// The id first, then all that may be set.
const std::array<AlgorithmField, Algorithm::kFields>& AlgorithmFields();

// "algorithm 66, tile 20, split-k 1, reduction scheme 0" and so on; "?" for what is not known.
std::string AlgorithmText(const Algorithm& algorithm);

// The structure's bytes in hex, and the values.
std::string AlgorithmLine(const Algorithm& algorithm);
absl::StatusOr<Algorithm> ParseAlgorithm(absl::string_view line);

bool SameStructure(const cuda::BlasAlgorithm& a, const cuda::BlasAlgorithm& b);
// "byte 7: 00, 01; bytes 12 to 15: 00000000, 1f000000", those of `a` first; empty where all agree.
std::string DifferingBytes(const cuda::BlasAlgorithm& a, const cuda::BlasAlgorithm& b);

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_ALGORITHM_H_
