#include "core/backend/testing/naive_reduction.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/tensor/half.h"

namespace chorus {
namespace {

template <typename T>
T LoadAs(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
template <typename T>
void StoreAs(T value, uint8_t* to) {
  std::memcpy(to, &value, sizeof(T));
}

// Calls `f` with a value of the dtype's C++ type. Bool is not among them.
template <typename F>
auto WithType(DType dtype, F f) {
  switch (dtype) {
    case DType::kF16:
      return f(F16());
    case DType::kBF16:
      return f(BF16());
    case DType::kF32:
      return f(float{});
    case DType::kF64:
      return f(double{});
    case DType::kI8:
      return f(int8_t{});
    case DType::kU8:
      return f(uint8_t{});
    case DType::kI16:
      return f(int16_t{});
    case DType::kI32:
      return f(int32_t{});
    case DType::kI64:
      return f(int64_t{});
    default:
      std::fprintf(stderr, "no such reduction\n");
      std::abort();
  }
}

template <typename A>
A Combine(Reduction reduction, A v, A x) {
  switch (reduction) {
    case Reduction::kSum:
    case Reduction::kAvg:
    case Reduction::kPremulSum:
      return v + x;
    case Reduction::kProduct:
      return v * x;
    case Reduction::kMin:
      return x < v ? x : v;
    case Reduction::kMax:
      return x > v ? x : v;
    default:
      break;
  }
  if constexpr (std::is_integral<A>::value) {
    if (reduction == Reduction::kBand) return v & x;
    if (reduction == Reduction::kBor) return v | x;
    if (reduction == Reduction::kBxor) return v ^ x;
  }
  std::fprintf(stderr, "no such reduction\n");
  std::abort();
}

template <typename T>
void StoreNaN(uint8_t* to) {
  if (std::is_same<T, F16>::value) return StoreAs(uint16_t{0x7e00}, to);
  if (std::is_same<T, BF16>::value) return StoreAs(uint16_t{0x7fc0}, to);
  if (std::is_same<T, float>::value) return StoreAs(uint32_t{0x7fc00000}, to);
  StoreAs(uint64_t{0x7ff8} << 48, to);
}

// `A`: what is computed with.
template <typename T, typename A>
void ReduceFloating(Reduction reduction, absl::Span<const uint8_t* const> operands,
                    absl::Span<const double> factors, int divisor, uint8_t* result) {
  bool nan = false;
  const auto operand = [&](int k) -> absl::optional<A> {
    if (operands[k] == nullptr) return absl::nullopt;
    A x = static_cast<A>(LoadAs<T>(operands[k]));
    if (reduction == Reduction::kPremulSum) x = x * static_cast<A>(factors[k]);
    nan = nan || std::isnan(x);
    return x;
  };
  A value = *NaiveTree<A>(0, static_cast<int>(operands.size()), operand,
                          [&](A a, A b) { return Combine(reduction, a, b); });
  if (reduction == Reduction::kAvg) value = value / static_cast<A>(divisor);
  if (nan || std::isnan(value)) return StoreNaN<T>(result);
  StoreAs(T(value), result);
}

template <typename T>
void ReduceIntegers(Reduction reduction, absl::Span<const uint8_t* const> operands,
                    uint8_t* result) {
  const auto operand = [&](int k) -> absl::optional<T> {
    if (operands[k] == nullptr) return absl::nullopt;
    return LoadAs<T>(operands[k]);
  };
  const auto combine = [&](T a, T b) {
    if (reduction == Reduction::kSum || reduction == Reduction::kProduct) {
      // Unsigned, for it wraps; of 64 bits, for nothing smaller is promoted to int.
      return static_cast<T>(Combine(reduction, static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
    }
    return static_cast<T>(Combine<int64_t>(reduction, a, b));
  };
  StoreAs(*NaiveTree<T>(0, static_cast<int>(operands.size()), operand, combine), result);
}

void ReduceBools(Reduction reduction, absl::Span<const uint8_t* const> operands, uint8_t* result) {
  int yes = 0;
  int all = 0;
  for (const uint8_t* operand : operands) {
    if (operand == nullptr) continue;
    yes += *operand != 0 ? 1 : 0;
    ++all;
  }
  switch (reduction) {
    case Reduction::kSum:
    case Reduction::kMax:
    case Reduction::kBor:
      *result = yes > 0 ? 1 : 0;
      break;
    case Reduction::kProduct:
    case Reduction::kMin:
    case Reduction::kBand:
      *result = yes == all ? 1 : 0;
      break;
    default:
      *result = yes % 2;
  }
}

}  // namespace

absl::Span<const DType> ReducedDTypes() {
  static constexpr DType kDTypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64,
                                      DType::kI8,  DType::kU8,   DType::kI16, DType::kI32,
                                      DType::kI64, DType::kBool};
  return kDTypes;
}

std::vector<Reduction> ReductionsOf(DType dtype) {
  std::vector<Reduction> reductions = {Reduction::kSum, Reduction::kProduct, Reduction::kMin,
                                       Reduction::kMax};
  const bool floating =
      dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32 || dtype == DType::kF64;
  const auto add = [&](std::initializer_list<Reduction> more) {
    reductions.insert(reductions.end(), more);
  };
  if (floating) {
    add({Reduction::kAvg, Reduction::kPremulSum});
  } else {
    add({Reduction::kBand, Reduction::kBor, Reduction::kBxor});
  }
  return reductions;
}

std::vector<uint8_t> RandomElements(DType dtype, int64_t count, bool with_nan,
                                    std::mt19937_64* random) {
  const int64_t element_bytes = DTypeBytes(dtype);
  std::vector<uint8_t> bytes(count * element_bytes);
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* const to = bytes.data() + i * element_bytes;
    uint64_t bits = (*random)();
    const uint64_t choice = (*random)() % 16;
    if (dtype == DType::kBool) {
      static constexpr uint8_t kBools[] = {0, 0, 1, 1, 1, 2, 0x80, 0xff};
      *to = kBools[choice % 8];
      continue;
    }
    WithType(dtype, [&](auto type) {
      using T = decltype(type);
      if constexpr (std::is_integral<T>::value) {
        // Few enough of them for MIN and MAX to have ties.
        StoreAs(static_cast<T>(choice < 4 ? bits % 3 : bits), to);
      } else {
        constexpr int kMantissa = std::is_same<T, F16>::value     ? 10
                                  : std::is_same<T, BF16>::value  ? 7
                                  : std::is_same<T, float>::value ? 23
                                                                  : 52;
        constexpr int kBits = sizeof(T) * 8;
        constexpr uint64_t kOne = 1;
        const uint64_t infinity =
            ((kOne << (kBits - 1)) - 1) & ~((kOne << kMantissa) - 1);  // all of the exponent
        const uint64_t sign = bits & (kOne << (kBits - 1));
        const uint64_t fraction = bits & ((kOne << kMantissa) - 1);
        if (choice == 0) {
          bits = sign;
        } else if (choice == 1) {
          bits = sign | (bits % 8 == 0 ? infinity : 0);
        } else if (choice == 2) {
          bits = sign | fraction;  // subnormal
        } else if (choice == 3) {
          bits = sign | infinity | (with_nan ? fraction : 0);
        } else if (choice < 8 && std::is_same<T, F16>::value) {
          // Any finite number of a dtype that has few.
          if ((bits & infinity) == infinity) bits ^= kOne << kMantissa;
        } else {
          // Whole and half numbers, which tie, and others; small enough for products.
          const double number = choice < 12 ? static_cast<double>(bits % 64) / 2 - 16
                                            : static_cast<double>(bits % 100003) / 7919 - 6;
          StoreAs(T(static_cast<double>(number)), to);
          return;
        }
        std::memcpy(to, &bits, sizeof(T));
      }
    });
  }
  return bytes;
}

void NaiveReduce(Reduction reduction, DType dtype, absl::Span<const uint8_t* const> operands,
                 absl::Span<const double> factors, int divisor, uint8_t* result) {
  if (dtype == DType::kBool) return ReduceBools(reduction, operands, result);
  WithType(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (std::is_integral<T>::value) {
      ReduceIntegers<T>(reduction, operands, result);
    } else {
      using A = std::conditional_t<std::is_same<T, double>::value, double, float>;
      ReduceFloating<T, A>(reduction, operands, factors, divisor, result);
    }
  });
}

float NaiveHolders(DType dtype, absl::Span<const uint8_t* const> operands, const uint8_t* result,
                   size_t k) {
  return WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto number = [](const uint8_t* from) { return static_cast<double>(LoadAs<T>(from)); };
    const auto holds = [&](size_t i) {
      const double x = number(operands[i]);
      const double y = number(result);
      return std::isnan(y) ? std::isnan(x) : x == y;
    };
    if (!holds(k)) return 0.0f;
    int count = 0;
    for (size_t i = 0; i < operands.size(); ++i) count += holds(i) ? 1 : 0;
    return static_cast<float>(count);
  });
}

}  // namespace chorus
