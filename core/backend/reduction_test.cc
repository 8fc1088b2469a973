#include "core/backend/reduction.h"

#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"

namespace chorus {
namespace {

// `storage` with room to start at any byte of a cache line.
template <typename T>
T* Shifted(std::vector<uint8_t>* storage, int64_t count, int64_t shift_bytes) {
  storage->assign(count * sizeof(T) + 128, 0xee);
  auto address = reinterpret_cast<uintptr_t>(storage->data());
  address = (address + 63) / 64 * 64 + shift_bytes;
  return reinterpret_cast<T*>(address);
}

template <typename T>
T Load(const T* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// Every element in [begin, end), bit for bit, and nothing outside.
template <typename T>
void CheckSum(DType dtype, int num_inputs, int64_t begin, int64_t end, int64_t shift,
              bool streaming, bool in_place) {
  SCOPED_TRACE(testing::Message() << num_inputs << " inputs, [" << begin << ", " << end
                                  << "), shift " << shift << ", streaming " << streaming);
  const int64_t count = end + 5;
  std::mt19937_64 random(count * 31 + num_inputs);
  std::vector<std::vector<uint8_t>> storage(num_inputs + 1);
  std::vector<const void*> inputs;
  std::vector<T*> writable;
  for (int k = 0; k < num_inputs; ++k) {
    // Inputs stand at addresses of their own, even odd ones.
    T* input = Shifted<T>(&storage[k], count, (k * 4 + shift) % 64);
    for (int64_t i = 0; i < count; ++i) {
      T value = static_cast<T>(static_cast<double>(random() % 2000) / 7 - 100);
      if (std::is_integral<T>::value) value = static_cast<T>(random());
      std::memcpy(input + i, &value, sizeof(T));
    }
    inputs.push_back(input);
    writable.push_back(input);
  }
  T* output = in_place ? writable[num_inputs - 1] : Shifted<T>(&storage[num_inputs], count, shift);
  std::vector<T> expected(count);
  for (int64_t i = 0; i < count; ++i) {
    expected[i] = Load(output + i);
    if (i < begin || i >= end) continue;
    expected[i] = Load(writable[0] + i);
    for (int k = 1; k < num_inputs; ++k) {
      const T x = Load(writable[k] + i);
      if constexpr (std::is_integral<T>::value) {
        using U = std::make_unsigned_t<T>;
        expected[i] = static_cast<T>(static_cast<U>(expected[i]) + static_cast<U>(x));
      } else {
        expected[i] = expected[i] + x;
      }
    }
  }
  FindReduction(Reduction::kSum, dtype)(inputs.data(), num_inputs, output, begin, end, streaming);
  ASSERT_EQ(std::memcmp(output, expected.data(), count * sizeof(T)), 0);
}

template <typename T>
void CheckAll(DType dtype) {
  for (const int num_inputs : {1, 2, 3, 8}) {
    for (const int64_t count : {0, 1, 15, 16, 17, 63, 64, 65, 255, 257, 1021}) {
      for (const int64_t begin : {0, 1, 13}) {
        for (const int64_t shift : {0, 4, 8, 60, 1}) {
          for (const bool streaming : {false, true}) {
            for (const bool in_place : {false, true}) {
              CheckSum<T>(dtype, num_inputs, begin, begin + count, shift, streaming, in_place);
              if (testing::Test::HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

class ReductionTest : public testing::TestWithParam<int64_t> {
 protected:
  // One of the instruction sets that this machine and this build have.
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(ReductionTest, SumsF32) { CheckAll<float>(DType::kF32); }
TEST_P(ReductionTest, SumsF64) { CheckAll<double>(DType::kF64); }
TEST_P(ReductionTest, SumsI64AndWraps) { CheckAll<int64_t>(DType::kI64); }

TEST_P(ReductionTest, CopiesBytes) {
  for (const int64_t bytes : {0, 1, 63, 64, 65, 300, 1021}) {
    for (const int64_t shift : {0, 1, 63}) {
      for (const bool streaming : {false, true}) {
        std::vector<uint8_t> from_storage;
        std::vector<uint8_t> to_storage;
        uint8_t* from = Shifted<uint8_t>(&from_storage, bytes, 7);
        uint8_t* to = Shifted<uint8_t>(&to_storage, bytes, shift);
        for (int64_t i = 0; i < bytes; ++i) from[i] = static_cast<uint8_t>(i * 7);
        const uint8_t behind = to[bytes];
        CopyBytes(to, from, bytes, streaming);
        ASSERT_EQ(std::memcmp(to, from, bytes), 0) << bytes << " bytes, shift " << shift;
        ASSERT_EQ(to[bytes], behind);
      }
    }
  }
}

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  for (int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    targets.push_back(left & (~left + 1));
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, ReductionTest, testing::ValuesIn(Targets()),
                         [](const testing::TestParamInfo<int64_t>& info) {
                           return std::string(hwy::TargetName(info.param));
                         });

TEST(FindReductionTest, HasNothingForWhatIsNotBuilt) {
  EXPECT_EQ(FindReduction(Reduction::kSum, DType::kBool), nullptr);
  EXPECT_EQ(FindReduction(Reduction::kProduct, DType::kF32), nullptr);
}

}  // namespace
}  // namespace chorus
