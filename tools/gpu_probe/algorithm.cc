#include "tools/gpu_probe/algorithm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace chorus {
namespace probe {
namespace {

constexpr size_t kBytes = sizeof(cuda::BlasAlgorithm);

std::string BytesOf(const cuda::BlasAlgorithm& structure) {
  std::string bytes(kBytes, '\0');
  std::memcpy(bytes.data(), &structure, kBytes);
  return bytes;
}

}  // namespace

const std::array<AlgorithmField, Algorithm::kFields>& AlgorithmFields() {
  using Attribute = cuda::BlasAlgorithmAttribute;
  static constexpr std::array<AlgorithmField, Algorithm::kFields> kAll = {{
      {Attribute::kId, "algorithm", 4},
      {Attribute::kTile, "tile", 4},
      {Attribute::kSplitK, "split-k", 4},
      {Attribute::kReductionScheme, "reduction scheme", 4},
      {Attribute::kSwizzle, "swizzle", 4},
      {Attribute::kCustomOption, "custom option", 4},
      {Attribute::kStages, "stages", 4},
      {Attribute::kInnerShape, "inner shape", 2},
      {Attribute::kClusterShape, "cluster shape", 2},
  }};
  return kAll;
}

std::string AlgorithmText(const Algorithm& algorithm) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < Algorithm::kFields; ++i) {
    const int64_t value = algorithm.values[i];
    const std::string text = value == Algorithm::kNotKnown ? "?" : absl::StrCat(value);
    parts.push_back(absl::StrCat(AlgorithmFields()[i].name, " ", text));
  }
  return absl::StrJoin(parts, ", ");
}

std::string AlgorithmLine(const Algorithm& algorithm) {
  return absl::StrCat(absl::BytesToHexString(BytesOf(algorithm.structure)), " ",
                      absl::StrJoin(algorithm.values, " "));
}

absl::StatusOr<Algorithm> ParseAlgorithm(absl::string_view line) {
  const std::vector<absl::string_view> parts = absl::StrSplit(line, ' ');
  bool is_one = parts.size() == 1 + Algorithm::kFields && parts[0].size() == 2 * kBytes &&
                std::all_of(parts[0].begin(), parts[0].end(), absl::ascii_isxdigit);
  Algorithm algorithm;
  for (size_t i = 0; is_one && i < Algorithm::kFields; ++i) {
    is_one = absl::SimpleAtoi(parts[1 + i], &algorithm.values[i]);
  }
  if (!is_one) return absl::InvalidArgumentError(absl::StrCat("no algorithm: ", line));
  const std::string bytes = absl::HexStringToBytes(parts[0]);
  std::memcpy(&algorithm.structure, bytes.data(), kBytes);
  return algorithm;
}

bool SameStructure(const cuda::BlasAlgorithm& a, const cuda::BlasAlgorithm& b) {
  return BytesOf(a) == BytesOf(b);
}

std::string DifferingBytes(const cuda::BlasAlgorithm& a, const cuda::BlasAlgorithm& b) {
  const std::string of_a = BytesOf(a);
  const std::string of_b = BytesOf(b);
  std::vector<std::string> parts;
  for (size_t first = 0; first < kBytes; ++first) {
    size_t end = first;
    while (end < kBytes && of_a[end] != of_b[end]) ++end;
    if (end == first) continue;
    const auto hex = [&](const std::string& of) {
      return absl::BytesToHexString(of.substr(first, end - first));
    };
    parts.push_back(absl::StrCat(end == first + 1 ? absl::StrCat("byte ", first)
                                                  : absl::StrCat("bytes ", first, " to ", end - 1),
                                 ": ", hex(of_a), ", ", hex(of_b)));
    first = end;
  }
  return absl::StrJoin(parts, "; ");
}

}  // namespace probe
}  // namespace chorus
