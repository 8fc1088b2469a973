// Tensors with bytes, for tests.
//
// Threads: plain data and pure functions. Ownership: copies. Errors: none.
#ifndef CHORUS_CORE_OPS_TESTING_VALUE_H_
#define CHORUS_CORE_OPS_TESTING_VALUE_H_

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/tensor/half.h"
#include "core/tensor/type.h"

namespace chorus {
namespace testing {

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<F16> {
  static constexpr DType value = DType::kF16;
};
template <>
struct DTypeOf<BF16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<int8_t> {
  static constexpr DType value = DType::kI8;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kU8;
};
template <>
struct DTypeOf<int16_t> {
  static constexpr DType value = DType::kI16;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};

// Calls `f` with a value of the C++ type of `dtype`; bool is a byte, as it lies in memory.
template <typename F>
auto Dispatch(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF16:
      return f(F16());
    case DType::kBF16:
      return f(BF16());
    case DType::kF32:
      return f(float());
    case DType::kF64:
      return f(double());
    case DType::kI8:
      return f(int8_t());
    case DType::kI16:
      return f(int16_t());
    case DType::kI32:
      return f(int32_t());
    case DType::kI64:
      return f(int64_t());
    default:
      return f(uint8_t());
  }
}

// A tensor: row-major bytes of exactly its type.
struct Value {
  TensorType type;
  std::string bytes;

  friend bool operator==(const Value& a, const Value& b) {
    return a.type == b.type && a.bytes == b.bytes;
  }
};

template <typename T>
std::vector<T> Elements(const Value& value) {
  std::vector<T> elements(value.bytes.size() / sizeof(T));
  if (!elements.empty()) std::memcpy(elements.data(), value.bytes.data(), value.bytes.size());
  return elements;
}

template <typename T>
Value MakeValue(const TensorType& type, const std::vector<T>& elements) {
  return Value{type, std::string(reinterpret_cast<const char*>(elements.data()),
                                 elements.size() * sizeof(T))};
}

// MakeValue<float>({2, 3}, {...}).
template <typename T>
Value MakeValue(const std::vector<int64_t>& sizes, const std::vector<T>& elements) {
  TensorType type(DTypeOf<T>::value, {});
  for (const int64_t size : sizes) type.dims.emplace_back(size);
  return MakeValue<T>(type, elements);
}

// Of any dtype, by way of doubles: exact for whole numbers below 2^53.
Value FromDoubles(const TensorType& type, const std::vector<double>& elements);
std::vector<double> ToDoubles(const Value& value);

Value Zeros(const TensorType& type);
// Whole numbers within bounds: sums of few small ones are exact in every dtype.
Value RandomWhole(const TensorType& type, int64_t least, int64_t most, std::mt19937_64* random);
// Normally distributed.
Value RandomNormal(const TensorType& type, std::mt19937_64* random);

// Sum of the products of elements.
double Dot(const Value& a, const Value& b);
// a + scale * b.
Value AddScaled(const Value& a, double scale, const Value& b);

std::string ToString(const Value& value);  // "f32[2]{1, 2.5}"

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_TESTING_VALUE_H_
