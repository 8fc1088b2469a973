#include "core/backend/reduction.h"

#include <cstring>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/backend/reduction.cc"
#include "hwy/foreach_target.h"  // compiles this file once for each instruction set
// After foreach_target.h.
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chorus {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// How a dtype is held in memory and in registers. A half type would load to float and round here.
template <typename T>
struct Plain {
  using Stored = T;
  using Tag = hn::ScalableTag<T>;
  // Signed overflow is undefined in C++, so lanes that do not fill a vector add as unsigned.
  using Scalar = typename std::conditional_t<std::is_integral<T>::value, std::make_unsigned<T>,
                                             std::common_type<T>>::type;

  template <typename D>
  static HWY_INLINE hn::Vec<D> Load(D d, const T* from) {
    return hn::LoadU(d, from);
  }
  static HWY_INLINE Scalar LoadScalar(const void* base, int64_t i) {
    Scalar value;
    std::memcpy(&value, static_cast<const char*>(base) + i * sizeof(T), sizeof(T));
    return value;
  }
  static HWY_INLINE void StoreScalar(Scalar value, void* base, int64_t i) {
    std::memcpy(static_cast<char*>(base) + i * sizeof(T), &value, sizeof(T));
  }
};

struct Sum {
  template <typename V>
  static HWY_INLINE V Vector(V a, V b) {
    return hn::Add(a, b);
  }
  template <typename S>
  static HWY_INLINE S Scalar(S a, S b) {
    return a + b;
  }
};

template <class Type, class Op>
void ReduceScalars(const void* const* inputs, int n, void* output, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    typename Type::Scalar sum = Type::LoadScalar(inputs[0], i);
    for (int k = 1; k < n; ++k) sum = Op::Scalar(sum, Type::LoadScalar(inputs[k], i));
    Type::StoreScalar(sum, output, i);
  }
}

// The elements [begin, end), of which there is a whole number of blocks of four vectors. With four
// of them in flight the cost of fetching the inputs' addresses again and again disappears.
template <class Type, class Op, bool kStreaming>
void ReduceBlocks(const void* const* inputs, int n, typename Type::Stored* output, int64_t begin,
                  int64_t end) {
  using T = typename Type::Stored;
  const typename Type::Tag d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = begin; i < end; i += 4 * lanes) {
    const T* first = static_cast<const T*>(inputs[0]) + i;
    auto v0 = Type::Load(d, first);
    auto v1 = Type::Load(d, first + lanes);
    auto v2 = Type::Load(d, first + 2 * lanes);
    auto v3 = Type::Load(d, first + 3 * lanes);
    for (int k = 1; k < n; ++k) {
      const T* next = static_cast<const T*>(inputs[k]) + i;
      v0 = Op::Vector(v0, Type::Load(d, next));
      v1 = Op::Vector(v1, Type::Load(d, next + lanes));
      v2 = Op::Vector(v2, Type::Load(d, next + 2 * lanes));
      v3 = Op::Vector(v3, Type::Load(d, next + 3 * lanes));
    }
    T* to = output + i;
    if (kStreaming) {
      hn::Stream(v0, d, to);
      hn::Stream(v1, d, to + lanes);
      hn::Stream(v2, d, to + 2 * lanes);
      hn::Stream(v3, d, to + 3 * lanes);
    } else {
      hn::StoreU(v0, d, to);
      hn::StoreU(v1, d, to + lanes);
      hn::StoreU(v2, d, to + 2 * lanes);
      hn::StoreU(v3, d, to + 3 * lanes);
    }
  }
}

template <class Type, class Op>
void Reduce(const void* const* inputs, int n, void* output, int64_t begin, int64_t end,
            bool streaming) {
  using T = typename Type::Stored;
  const int64_t block = 4 * hn::Lanes(typename Type::Tag());
  T* out = static_cast<T*>(output);
  const auto address = reinterpret_cast<uintptr_t>(out) + begin * sizeof(T);
  const uintptr_t alignment = block / 4 * sizeof(T);
  streaming = streaming && address % sizeof(T) == 0;
  if (streaming && address % alignment != 0) {
    int64_t head = (alignment - address % alignment) / sizeof(T);
    if (head > end - begin) head = end - begin;
    ReduceScalars<Type, Op>(inputs, n, output, begin, begin + head);
    begin += head;
  }
  const int64_t blocks_end = begin + (end - begin) / block * block;
  if (streaming) {
    ReduceBlocks<Type, Op, true>(inputs, n, out, begin, blocks_end);
    hwy::FlushStream();
  } else {
    ReduceBlocks<Type, Op, false>(inputs, n, out, begin, blocks_end);
  }
  ReduceScalars<Type, Op>(inputs, n, output, blocks_end, end);
}

// One line for each pair that this build can reduce; FindReduction has the other.
#define CHORUS_REDUCTION(name, type, op)                                                \
  void name(const void* const* inputs, int n, void* output, int64_t begin, int64_t end, \
            bool streaming) {                                                           \
    Reduce<type, op>(inputs, n, output, begin, end, streaming);                         \
  }
CHORUS_REDUCTION(SumF32, Plain<float>, Sum)
CHORUS_REDUCTION(SumF64, Plain<double>, Sum)
CHORUS_REDUCTION(SumI64, Plain<int64_t>, Sum)
// A reduction of one input copies it, and bytes are as good as any type.
CHORUS_REDUCTION(StreamBytes, Plain<uint8_t>, Sum)
#undef CHORUS_REDUCTION

}  // namespace HWY_NAMESPACE
}  // namespace chorus
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace chorus {
namespace {

#define CHORUS_REDUCTION(name)                                                          \
  HWY_EXPORT(name);                                                                     \
  void name(const void* const* inputs, int n, void* output, int64_t begin, int64_t end, \
            bool streaming) {                                                           \
    HWY_DYNAMIC_DISPATCH(name)(inputs, n, output, begin, end, streaming);               \
  }
CHORUS_REDUCTION(SumF32)
CHORUS_REDUCTION(SumF64)
CHORUS_REDUCTION(SumI64)
CHORUS_REDUCTION(StreamBytes)
#undef CHORUS_REDUCTION

struct Entry {
  Reduction reduction;
  DType dtype;
  ReduceFunction function;
};
constexpr Entry kReductions[] = {
    {Reduction::kSum, DType::kF32, &SumF32},
    {Reduction::kSum, DType::kF64, &SumF64},
    {Reduction::kSum, DType::kI64, &SumI64},
};

}  // namespace

ReduceFunction FindReduction(Reduction reduction, DType dtype) {
  for (const Entry& entry : kReductions) {
    if (entry.reduction == reduction && entry.dtype == dtype) return entry.function;
  }
  return nullptr;
}

void CopyBytes(void* to, const void* from, int64_t bytes, bool streaming) {
  if (bytes == 0 || to == from) return;
  if (streaming) {
    StreamBytes(&from, 1, to, 0, bytes, true);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace chorus

#endif  // HWY_ONCE
