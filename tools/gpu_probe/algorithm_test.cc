#include "tools/gpu_probe/algorithm.h"

#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "core/cuda/cublaslt_api.h"
#include "gtest/gtest.h"

namespace chorus {
namespace probe {
namespace {

Algorithm Some() {
  Algorithm algorithm;
  for (size_t i = 0; i < 8; ++i) algorithm.structure.data[i] = 0x0102030405060708u * (i + 1);
  algorithm.values = {66, 20, 4, 1, 0, 4294967295, 8, 65535, Algorithm::kNotKnown};
  return algorithm;
}

void SetByte(cuda::BlasAlgorithm* structure, size_t index, unsigned char value) {
  std::memcpy(reinterpret_cast<char*>(structure) + index, &value, 1);
}

TEST(AlgorithmTest, TellsWhatTheLibraryShows) {
  EXPECT_EQ(AlgorithmText(Some()),
            "algorithm 66, tile 20, split-k 4, reduction scheme 1, swizzle 0, custom option "
            "4294967295, stages 8, inner shape 65535, cluster shape ?");
}

TEST(AlgorithmTest, ComesBackFromALine) {
  const auto back = ParseAlgorithm(AlgorithmLine(Some()));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(SameStructure(back->structure, Some().structure));
  EXPECT_EQ(back->values, Some().values);
}

TEST(AlgorithmTest, WhatIsNoAlgorithmIsRefused) {
  const std::string line = AlgorithmLine(Some());
  const auto refused = [](const std::string& text) {
    return ParseAlgorithm(text).status().code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused(""));
  EXPECT_TRUE(refused(line.substr(2)));
  EXPECT_TRUE(refused(line + " 1"));
  EXPECT_TRUE(refused(line.substr(0, line.rfind(' '))));
  EXPECT_TRUE(refused(line + "x"));
  EXPECT_TRUE(refused("xy" + line.substr(2)));
}

TEST(AlgorithmTest, FindsTheBytesThatDiffer) {
  const cuda::BlasAlgorithm zero;
  EXPECT_EQ(DifferingBytes(zero, zero), "");
  EXPECT_TRUE(SameStructure(zero, zero));
  cuda::BlasAlgorithm other;
  SetByte(&other, 7, 1);
  SetByte(&other, 12, 0x1f);
  SetByte(&other, 13, 0x2e);
  SetByte(&other, 63, 0xff);
  EXPECT_EQ(DifferingBytes(zero, other),
            "byte 7: 00, 01; bytes 12 to 13: 0000, 1f2e; byte 63: 00, ff");
  EXPECT_EQ(DifferingBytes(other, zero),
            "byte 7: 01, 00; bytes 12 to 13: 1f2e, 0000; byte 63: ff, 00");
  EXPECT_FALSE(SameStructure(zero, other));
}

}  // namespace
}  // namespace probe
}  // namespace chorus
