#include "core/backend/reduction.h"

#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

// Processors that have SSSE3 but not SSE4 are from 2006; each instruction set costs time to
// compile.
#define HWY_DISABLED_TARGETS HWY_SSSE3
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

// --- Types: how a dtype is held in memory (Stored) and in registers (Lane) ---
//
// Each loads and stores vectors of any number of lanes, also of one: what is left over of a range
// goes through the same instructions as the rest of it.

template <typename T>
struct Integer {
  using Stored = T;
  using Lane = T;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const T* from) {
    return hn::LoadU(d, from);
  }
  // As it is stored, for StoreU and Stream.
  template <class D>
  static HWY_INLINE hn::Vec<D> Encode(D /*d*/, hn::Vec<D> v) {
    return v;
  }
};

template <class D>
HWY_INLINE hn::Vec<D> OneNaN(D d, hn::Vec<D> v) {
  using T = hn::TFromD<D>;
  return hn::IfThenElse(hn::IsNaN(v), hn::Set(d, std::numeric_limits<T>::quiet_NaN()), v);
}

template <typename T>
struct Float : Integer<T> {
  template <class D>
  static HWY_INLINE hn::Vec<D> Encode(D d, hn::Vec<D> v) {
    return OneNaN(d, v);
  }
};

// The half types are converted with integers, for Highway's own conversions truncate. Only for f16
// there are instructions that do not, from AVX2 on; they give the same bits (but for the payload of
// a NaN). core/tensor/half.h is the same for single numbers.
#undef CHORUS_HAS_F16C
#if (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL) && \
    !defined(HWY_DISABLE_F16C)
#define CHORUS_HAS_F16C 1
#else
#define CHORUS_HAS_F16C 0
#endif

template <class D>
using HalfVec = hn::Vec<hn::Rebind<uint16_t, D>>;

template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> LoadHalf(D /*d*/, const uint16_t* from) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> dh;
  return hn::PromoteTo(du, hn::LoadU(dh, from));
}

// Lanes of at most 0xffff.
template <class D>
HWY_INLINE HalfVec<D> NarrowHalf(D /*d*/, hn::Vec<hn::RebindToUnsigned<D>> bits) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<uint16_t, D> dh;
  return hn::DemoteTo(dh, hn::BitCast(di, bits));
}

// Adding it before the lower `kShift` bits are cut off rounds to nearest even.
template <int kShift, class DU>
HWY_INLINE hn::Vec<DU> RoundingBias(DU du, hn::Vec<DU> bits) {
  const auto odd = hn::And(hn::ShiftRight<kShift>(bits), hn::Set(du, 1));
  return hn::Add(odd, hn::Set(du, (1u << (kShift - 1)) - 1));
}

struct BFloat16 {
  using Stored = uint16_t;
  using Lane = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const uint16_t* from) {
    return hn::BitCast(d, hn::ShiftLeft<16>(LoadHalf(d, from)));
  }
  template <class D>
  static HWY_INLINE HalfVec<D> Encode(D d, hn::Vec<D> v) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, OneNaN(d, v));
    return NarrowHalf(d, hn::ShiftRight<16>(hn::Add(bits, RoundingBias<16>(du, bits))));
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Lane = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const uint16_t* from) {
#if CHORUS_HAS_F16C
    const hn::Rebind<hwy::float16_t, D> dh;
    return hn::PromoteTo(d, hn::BitCast(dh, hn::LoadU(hn::Rebind<uint16_t, D>(), from)));
#else
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto bits = LoadHalf(d, from);
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fff));
    // The exponents' biases differ by 112; infinity and NaN need it twice.
    const auto bias = hn::Set(du, 112u << 23);
    auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), bias);
    const auto special = hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7bff));
    normal = hn::Add(normal, hn::IfThenElseZero(hn::RebindMask(du, special), bias));
    const auto subnormal =
        hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 0x1p-24f));
    const auto small = hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, 0x400));
    const auto value =
        hn::IfThenElse(hn::RebindMask(du, small), hn::BitCast(du, subnormal), normal);
    return hn::BitCast(d, hn::Or(value, hn::ShiftLeft<16>(hn::Xor(bits, magnitude))));
#endif
  }
  template <class D>
  static HWY_INLINE HalfVec<D> Encode(D d, hn::Vec<D> v) {
#if CHORUS_HAS_F16C
    const hn::Rebind<hwy::float16_t, D> dh;
    return hn::BitCast(hn::Rebind<uint16_t, D>(), hn::DemoteTo(dh, OneNaN(d, v)));
#else
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(du, OneNaN(d, v));
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffff));
    const auto sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
    const auto rounded = hn::Add(magnitude, RoundingBias<13>(du, magnitude));
    const auto normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(du, 112u << 23)));
    // Adding 0.5 leaves the rounded multiple of 2^-24 in the sum's last bits.
    const auto half = hn::Set(d, 0.5f);
    const auto subnormal =
        hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du, half));
    const auto size = hn::BitCast(di, magnitude);
    const auto is_small = hn::RebindMask(du, hn::Lt(size, hn::Set(di, 0x38800000)));  // 2^-14
    const auto is_large = hn::RebindMask(du, hn::Gt(size, hn::Set(di, 0x477fffff)));  // 2^16 on
    const auto is_nan = hn::RebindMask(du, hn::Gt(size, hn::Set(di, 0x7f800000)));
    auto result = hn::IfThenElse(is_small, subnormal, normal);
    result = hn::IfThenElse(is_large, hn::Set(du, 0x7c00), result);
    result = hn::IfThenElse(is_nan, hn::Set(du, 0x7e00), result);
    return NarrowHalf(d, hn::Or(result, sign));
#endif
  }
};

// Bytes as lanes of two, for there is no product of bytes.
struct WideByte {
  using Stored = uint8_t;
  using Lane = uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const uint8_t* from) {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<uint8_t, D>(), from));
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<uint8_t, D>> Encode(D d, hn::Vec<D> v) {
    const hn::RebindToSigned<D> di;
    return hn::DemoteTo(hn::Rebind<uint8_t, D>(), hn::BitCast(di, hn::And(v, hn::Set(d, 0xff))));
  }
};

// True is all ones in registers.
struct Bool {
  using Stored = uint8_t;
  using Lane = uint8_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const uint8_t* from) {
    return hn::VecFromMask(d, hn::Ne(hn::LoadU(d, from), hn::Zero(d)));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> Encode(D d, hn::Vec<D> v) {
    return hn::And(v, hn::Set(d, 1));
  }
};

// --- Operations: a term of each input, terms combined, a result of them ---

struct Unscaled {
  template <class D>
  static HWY_INLINE hn::Vec<D> Term(D /*d*/, hn::Vec<D> x, const ReducePass& /*pass*/, int /*k*/) {
    return x;
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> Result(D /*d*/, hn::Vec<D> v, const ReducePass& /*pass*/) {
    return v;
  }
};

struct Sum : Unscaled {
  template <class V>
  static HWY_INLINE V Combine(V v, V x) {
    return hn::Add(v, x);
  }
};

// AVG and PREMUL_SUM. The target is built without contraction, so that a product and a sum round
// twice on every instruction set.
struct ScaledSum : Sum {
  template <class D>
  static HWY_INLINE hn::Vec<D> Term(D d, hn::Vec<D> x, const ReducePass& pass, int k) {
    return hn::Mul(x, hn::Set(d, static_cast<hn::TFromD<D>>(pass.factors[k])));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> Result(D d, hn::Vec<D> v, const ReducePass& pass) {
    return hn::Div(v, hn::Set(d, static_cast<hn::TFromD<D>>(pass.divisor)));
  }
};

struct Product : Unscaled {
  template <class V>
  static HWY_INLINE V Combine(V v, V x) {
    return hn::Mul(v, x);
  }
};

struct Min : Unscaled {
  template <class V>
  static HWY_INLINE V Combine(V v, V x) {
    return hn::Min(v, x);
  }
};
struct Max : Unscaled {
  template <class V>
  static HWY_INLINE V Combine(V v, V x) {
    return hn::Max(v, x);
  }
};
// The right one wins only by being less, or NaN; a NaN on the left loses only to another.
struct FloatMin : Unscaled {
  template <class V>
  static HWY_INLINE V Combine(V v, V x) {
    return hn::IfThenElse(hn::Or(hn::Lt(x, v), hn::IsNaN(x)), x, v);
  }
};
struct FloatMax : Unscaled {
  template <class V>
  static HWY_INLINE V Combine(V v, V x) {
    return hn::IfThenElse(hn::Or(hn::Gt(x, v), hn::IsNaN(x)), x, v);
  }
};

struct BitAnd : Unscaled {
  template <class V>
  static HWY_INLINE V Combine(V v, V x) {
    return hn::And(v, x);
  }
};
struct BitOr : Unscaled {
  template <class V>
  static HWY_INLINE V Combine(V v, V x) {
    return hn::Or(v, x);
  }
};
struct BitXor : Unscaled {
  template <class V>
  static HWY_INLINE V Combine(V v, V x) {
    return hn::Xor(v, x);
  }
};

// --- Loops ---

// One element, from any address, by way of vectors of one lane.
template <class Type>
HWY_INLINE hn::Vec<hn::CappedTag<typename Type::Lane, 1>> LoadOne(const void* base, int64_t i) {
  typename Type::Stored one;
  std::memcpy(&one, static_cast<const char*>(base) + i * sizeof(one), sizeof(one));
  return Type::Load(hn::CappedTag<typename Type::Lane, 1>(), &one);
}

// The tree of kOperands operands from the k-th on.
template <class Type, class Op, int kOperands, class D>
HWY_INLINE hn::Vec<D> Subtree(D d, const ReducePass& pass, int k, int64_t i) {
  using T = typename Type::Stored;
  if constexpr (kOperands > 1) {
    constexpr int kHalf = kOperands / 2;
    return Op::Combine(Subtree<Type, Op, kHalf>(d, pass, k, i),
                       Subtree<Type, Op, kHalf>(d, pass, k + kHalf, i));
  } else if constexpr (std::is_same<D, hn::CappedTag<typename Type::Lane, 1>>::value) {
    return Op::Term(d, LoadOne<Type>(pass.inputs[k], i), pass, k);
  } else {
    return Op::Term(d, Type::Load(d, static_cast<const T*>(pass.inputs[k]) + i), pass, k);
  }
}

template <class Type, class Op>
void ReduceOnes(const ReducePass& pass, int64_t begin, int64_t end) {
  using T = typename Type::Stored;
  using Lane = typename Type::Lane;
  const hn::CappedTag<Lane, 1> d;
  const auto take = [&](int operands, int k, int64_t i) HWY_ATTR {
    if (operands == 1) return Subtree<Type, Op, 1>(d, pass, k, i);
    if (operands == 2) return Subtree<Type, Op, 2>(d, pass, k, i);
    return Subtree<Type, Op, ReductionTree::kMostOperands>(d, pass, k, i);
  };
  for (int64_t i = begin; i < end; ++i) {
    Lane waiting[ReductionTree::kMaxHeight];
    Lane* top = waiting;
    const ReductionTree::Step* step = pass.steps;
    auto v = take(step->operands, 0, i);
    for (int k = step->operands; k < pass.num_inputs; k += step->operands) {
      ++step;
      const auto x = take(step->operands, k, i);
      if (step->joins == 0) {
        hn::StoreU(v, d, top++);
        v = x;
        continue;
      }
      v = Op::Combine(v, x);
      for (int joins = step->joins; joins > 1; --joins) v = Op::Combine(hn::LoadU(d, --top), v);
    }
    T one;
    hn::StoreU(Type::Encode(d, Op::Result(d, v, pass)), hn::Rebind<T, decltype(d)>(), &one);
    std::memcpy(static_cast<char*>(pass.output) + i * sizeof(T), &one, sizeof(T));
  }
}

template <class V, typename T>
HWY_INLINE void Put(V v, T* to, bool streaming) {
  const hn::ScalableTag<T> d;
  if (streaming) {
    hn::Stream(v, d, to);
  } else {
    hn::StoreU(v, d, to);
  }
}

// Two neighbours. Only whole vectors can be streamed, so halves are put together first.
template <class V, typename T>
HWY_INLINE void PutPair(V low, V high, T* to, int64_t lanes, bool streaming) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(hn::DFromV<V>()) < hn::MaxLanes(hn::ScalableTag<T>())) {
    Put(hn::Combine(hn::ScalableTag<T>(), high, low), to, streaming);
  } else
#endif
  {
    Put(low, to, streaming);
    Put(high, to + lanes, streaming);
  }
}

// Of four neighbouring vectors.
template <class Type, class Op, int kOperands, class D, class V>
HWY_INLINE void Subtrees(D d, const ReducePass& pass, int k, int64_t i, V& v0, V& v1, V& v2,
                         V& v3) {
  const int64_t lanes = hn::Lanes(d);
  v0 = Subtree<Type, Op, kOperands>(d, pass, k, i);
  v1 = Subtree<Type, Op, kOperands>(d, pass, k, i + lanes);
  v2 = Subtree<Type, Op, kOperands>(d, pass, k, i + 2 * lanes);
  v3 = Subtree<Type, Op, kOperands>(d, pass, k, i + 3 * lanes);
}

template <class Type, class Op, class D, class V>
HWY_INLINE void Take(D d, const ReducePass& pass, int operands, int k, int64_t i, V& v0, V& v1,
                     V& v2, V& v3) {
  if (operands == 1) return Subtrees<Type, Op, 1>(d, pass, k, i, v0, v1, v2, v3);
  if (operands == 2) return Subtrees<Type, Op, 2>(d, pass, k, i, v0, v1, v2, v3);
  Subtrees<Type, Op, ReductionTree::kMostOperands>(d, pass, k, i, v0, v1, v2, v3);
}

// The elements [begin, end), of which there is a whole number of blocks of four vectors. With four
// of them in flight the cost of fetching the inputs' addresses again and again disappears. Of the
// results that wait the latest is in registers, others in the first level of the cache.
template <class Type, class Op>
void ReduceBlocks(const ReducePass& pass_args, int64_t begin, int64_t end, bool streaming) {
  const ReducePass pass = pass_args;  // in registers: a store could change it where it stands
  using T = typename Type::Stored;
  const hn::ScalableTag<typename Type::Lane> d;
  using V = hn::Vec<decltype(d)>;
  const int64_t lanes = hn::Lanes(d);
  const int64_t block = 4 * lanes;
  HWY_ALIGN
  typename Type::Lane waiting[ReductionTree::kMaxHeight * 4 * hn::MaxLanes(decltype(d)())];
  for (int64_t i = begin; i < end; i += block) {
    auto* top = waiting;
    const ReductionTree::Step* step = pass.steps;
    V v0, v1, v2, v3;
    Take<Type, Op>(d, pass, step->operands, 0, i, v0, v1, v2, v3);
    for (int k = step->operands; k < pass.num_inputs; k += step->operands) {
      ++step;
      V x0, x1, x2, x3;
      Take<Type, Op>(d, pass, step->operands, k, i, x0, x1, x2, x3);
      if (step->joins == 0) {
        hn::Store(v0, d, top);
        hn::Store(v1, d, top + lanes);
        hn::Store(v2, d, top + 2 * lanes);
        hn::Store(v3, d, top + 3 * lanes);
        top += block;
        v0 = x0;
        v1 = x1;
        v2 = x2;
        v3 = x3;
        continue;
      }
      v0 = Op::Combine(v0, x0);
      v1 = Op::Combine(v1, x1);
      v2 = Op::Combine(v2, x2);
      v3 = Op::Combine(v3, x3);
      for (int joins = step->joins; joins > 1; --joins) {
        top -= block;
        v0 = Op::Combine(hn::Load(d, top), v0);
        v1 = Op::Combine(hn::Load(d, top + lanes), v1);
        v2 = Op::Combine(hn::Load(d, top + 2 * lanes), v2);
        v3 = Op::Combine(hn::Load(d, top + 3 * lanes), v3);
      }
    }
    const auto e0 = Type::Encode(d, Op::Result(d, v0, pass));
    const auto e1 = Type::Encode(d, Op::Result(d, v1, pass));
    const auto e2 = Type::Encode(d, Op::Result(d, v2, pass));
    const auto e3 = Type::Encode(d, Op::Result(d, v3, pass));
    T* to = static_cast<T*>(pass.output) + i;
    PutPair(e0, e1, to, lanes, streaming);
    PutPair(e2, e3, to + 2 * lanes, lanes, streaming);
  }
}

template <class Type, class Op>
void Reduce(const ReducePass& pass, int64_t begin, int64_t end, bool streaming) {
  using T = typename Type::Stored;
  const int64_t block = 4 * hn::Lanes(hn::ScalableTag<typename Type::Lane>());
  const auto address = reinterpret_cast<uintptr_t>(pass.output) + begin * sizeof(T);
  const uintptr_t alignment = hn::Lanes(hn::ScalableTag<T>()) * sizeof(T);
  streaming = streaming && address % sizeof(T) == 0;
  if (streaming && address % alignment != 0) {
    int64_t head = (alignment - address % alignment) / sizeof(T);
    if (head > end - begin) head = end - begin;
    ReduceOnes<Type, Op>(pass, begin, begin + head);
    begin += head;
  }
  const int64_t blocks_end = begin + (end - begin) / block * block;
  ReduceBlocks<Type, Op>(pass, begin, blocks_end, streaming);
  if (streaming) hwy::FlushStream();
  ReduceOnes<Type, Op>(pass, blocks_end, end);
}

template <class V>
HWY_INLINE auto Holds(V x, V result) {
  return hn::Or(hn::Eq(x, result), hn::And(hn::IsNaN(x), hn::IsNaN(result)));
}

HWY_INLINE hn::Vec<hn::ScalableTag<float>> ToFloat(hn::ScalableTag<float> /*d*/,
                                                   hn::Vec<hn::ScalableTag<float>> v) {
  return v;
}
HWY_INLINE hn::Vec<hn::Rebind<float, hn::ScalableTag<double>>> ToFloat(
    hn::ScalableTag<double> d, hn::Vec<hn::ScalableTag<double>> v) {
  return hn::DemoteTo(hn::Rebind<float, decltype(d)>(), v);
}

template <class Type>
void CountHolders(const void* const* inputs, int n, const void* result, float* const* holders,
                  int64_t begin, int64_t end) {
  using T = typename Type::Stored;
  const hn::ScalableTag<typename Type::Lane> d;
  const hn::Rebind<float, decltype(d)> df;
  const int64_t lanes = hn::Lanes(d);
  const auto one = hn::Set(d, 1);
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    const auto y = Type::Load(d, static_cast<const T*>(result) + i);
    auto count = hn::Zero(d);
    for (int k = 0; k < n; ++k) {
      const auto x = Type::Load(d, static_cast<const T*>(inputs[k]) + i);
      count = hn::Add(count, hn::IfThenElseZero(Holds(x, y), one));
    }
    for (int k = 0; k < n; ++k) {
      if (holders[k] == nullptr) continue;
      const auto x = Type::Load(d, static_cast<const T*>(inputs[k]) + i);
      hn::StoreU(ToFloat(d, hn::IfThenElseZero(Holds(x, y), count)), df, holders[k] + i);
    }
  }
  for (; i < end; ++i) {
    const auto y = LoadOne<Type>(result, i);
    const hn::CappedTag<typename Type::Lane, 1> d1;
    int count = 0;
    for (int k = 0; k < n; ++k) {
      if (hn::AllTrue(d1, Holds(LoadOne<Type>(inputs[k], i), y))) ++count;
    }
    for (int k = 0; k < n; ++k) {
      if (holders[k] == nullptr) continue;
      const bool holds = hn::AllTrue(d1, Holds(LoadOne<Type>(inputs[k], i), y));
      holders[k][i] = holds ? static_cast<float>(count) : 0.0f;
    }
  }
}

// One line for each function; kReductions says what they are for.
#define CHORUS_REDUCTIONS(X)                \
  X(SumF16, Float16, Sum)                   \
  X(SumBF16, BFloat16, Sum)                 \
  X(SumF32, Float<float>, Sum)              \
  X(SumF64, Float<double>, Sum)             \
  X(SumI8, Integer<uint8_t>, Sum)           \
  X(SumI16, Integer<uint16_t>, Sum)         \
  X(SumI32, Integer<uint32_t>, Sum)         \
  X(SumI64, Integer<uint64_t>, Sum)         \
  X(ScaledSumF16, Float16, ScaledSum)       \
  X(ScaledSumBF16, BFloat16, ScaledSum)     \
  X(ScaledSumF32, Float<float>, ScaledSum)  \
  X(ScaledSumF64, Float<double>, ScaledSum) \
  X(ProductF16, Float16, Product)           \
  X(ProductBF16, BFloat16, Product)         \
  X(ProductF32, Float<float>, Product)      \
  X(ProductF64, Float<double>, Product)     \
  X(ProductI8, WideByte, Product)           \
  X(ProductI16, Integer<uint16_t>, Product) \
  X(ProductI32, Integer<uint32_t>, Product) \
  X(ProductI64, Integer<uint64_t>, Product) \
  X(MinF16, Float16, FloatMin)              \
  X(MinBF16, BFloat16, FloatMin)            \
  X(MinF32, Float<float>, FloatMin)         \
  X(MinF64, Float<double>, FloatMin)        \
  X(MinI8, Integer<int8_t>, Min)            \
  X(MinU8, Integer<uint8_t>, Min)           \
  X(MinI16, Integer<int16_t>, Min)          \
  X(MinI32, Integer<int32_t>, Min)          \
  X(MinI64, Integer<int64_t>, Min)          \
  X(MaxF16, Float16, FloatMax)              \
  X(MaxBF16, BFloat16, FloatMax)            \
  X(MaxF32, Float<float>, FloatMax)         \
  X(MaxF64, Float<double>, FloatMax)        \
  X(MaxI8, Integer<int8_t>, Max)            \
  X(MaxU8, Integer<uint8_t>, Max)           \
  X(MaxI16, Integer<int16_t>, Max)          \
  X(MaxI32, Integer<int32_t>, Max)          \
  X(MaxI64, Integer<int64_t>, Max)          \
  X(AndBytes, Integer<uint8_t>, BitAnd)     \
  X(OrBytes, Integer<uint8_t>, BitOr)       \
  X(XorBytes, Integer<uint8_t>, BitXor)     \
  X(AndBool, Bool, BitAnd)                  \
  X(OrBool, Bool, BitOr)                    \
  X(XorBool, Bool, BitXor)
#define CHORUS_HOLDERS(X)     \
  X(HoldersF16, Float16)      \
  X(HoldersBF16, BFloat16)    \
  X(HoldersF32, Float<float>) \
  X(HoldersF64, Float<double>)

#define CHORUS_DEFINE(name, type, op)                                             \
  void name(const ReducePass& pass, int64_t begin, int64_t end, bool streaming) { \
    Reduce<type, op>(pass, begin, end, streaming);                                \
  }
CHORUS_REDUCTIONS(CHORUS_DEFINE)
#undef CHORUS_DEFINE
#define CHORUS_DEFINE(name, type)                                                        \
  void name(const void* const* inputs, int n, const void* result, float* const* holders, \
            int64_t begin, int64_t end) {                                                \
    CountHolders<type>(inputs, n, result, holders, begin, end);                          \
  }
CHORUS_HOLDERS(CHORUS_DEFINE)
#undef CHORUS_DEFINE

}  // namespace HWY_NAMESPACE
}  // namespace chorus
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace chorus {

// T is the tree of a power of two of ranks of which the last are absent: there two neighbours
// among the operands, at a < b, part at the height of the highest bit of a ^ b. An operand thus
// completes the open nodes that are lower than where it parts from the next, the last one all.
void ReductionTree::Set(absl::Span<const int32_t> ranks) {
  if (ranks == absl::MakeConstSpan(ranks_)) return;
  ranks_.assign(ranks.begin(), ranks.end());
  steps_.clear();
  uint32_t open = 0;  // heights of the nodes that lack their right side
  for (size_t k = 0; k < ranks.size(); ++k) {
    uint32_t height = 0x80000000;
    if (k + 1 < ranks.size()) {
      const auto differ = static_cast<uint32_t>(ranks[k] ^ ranks[k + 1]);
      height >>= hwy::Num0BitsAboveMS1Bit_Nonzero32(differ);
    }
    const uint32_t lower = height - 1;
    steps_.push_back({1, static_cast<uint8_t>(hwy::PopCount(open & lower))});
    open = (open & ~lower) | height;
    // Two steps as one, where they are the sides of a node.
    while (steps_.size() > 1) {
      Step& left = steps_[steps_.size() - 2];
      const Step& right = steps_.back();
      if (left.operands != right.operands || left.operands == kMostOperands) break;
      if (left.joins > 0 || right.joins == 0) break;
      left.operands = static_cast<uint8_t>(2 * left.operands);
      left.joins = static_cast<uint8_t>(right.joins - 1);
      steps_.pop_back();
    }
  }
}

ReductionTree ReductionTree::Whole(int size) {
  std::vector<int32_t> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  ReductionTree tree;
  tree.Set(ranks);
  return tree;
}

namespace {

#define CHORUS_DISPATCH(name, type, op)                                           \
  HWY_EXPORT(name);                                                               \
  void name(const ReducePass& pass, int64_t begin, int64_t end, bool streaming) { \
    HWY_DYNAMIC_DISPATCH(name)(pass, begin, end, streaming);                      \
  }
CHORUS_REDUCTIONS(CHORUS_DISPATCH)
#undef CHORUS_DISPATCH
#define CHORUS_DISPATCH(name, type)                                                      \
  HWY_EXPORT(name);                                                                      \
  void name(const void* const* inputs, int n, const void* result, float* const* holders, \
            int64_t begin, int64_t end) {                                                \
    HWY_DYNAMIC_DISPATCH(name)(inputs, n, result, holders, begin, end);                  \
  }
CHORUS_HOLDERS(CHORUS_DISPATCH)
#undef CHORUS_DISPATCH

// Bits need no lanes: of elements of any width.
template <ReduceFunction function, int64_t kElementBytes>
void Bits(const ReducePass& pass, int64_t begin, int64_t end, bool streaming) {
  function(pass, begin * kElementBytes, end * kElementBytes, streaming);
}

// Rows and columns as DType and Reduction count them, from kF16 and kSum on: f16 bf16 f32 f64 i8 u8
// i16 i32 i64 bool; SUM AVG PRODUCT MIN MAX PREMUL_SUM BAND BOR BXOR.
constexpr int kRows = 10;
constexpr int kColumns = 9;
// Signed and unsigned integers of one width share what does not depend on the sign.
constexpr ReduceFunction kReductions[kRows][kColumns] = {
    /* f16 */ {&SumF16, &ScaledSumF16, &ProductF16, &MinF16, &MaxF16, &ScaledSumF16},
    /* bf16 */ {&SumBF16, &ScaledSumBF16, &ProductBF16, &MinBF16, &MaxBF16, &ScaledSumBF16},
    /* f32 */ {&SumF32, &ScaledSumF32, &ProductF32, &MinF32, &MaxF32, &ScaledSumF32},
    /* f64 */ {&SumF64, &ScaledSumF64, &ProductF64, &MinF64, &MaxF64, &ScaledSumF64},
    /* i8 */ {&SumI8, nullptr, &ProductI8, &MinI8, &MaxI8, nullptr, &AndBytes, &OrBytes, &XorBytes},
    /* u8 */ {&SumI8, nullptr, &ProductI8, &MinU8, &MaxU8, nullptr, &AndBytes, &OrBytes, &XorBytes},
    /* i16 */
    {&SumI16, nullptr, &ProductI16, &MinI16, &MaxI16, nullptr, &Bits<AndBytes, 2>,
     &Bits<OrBytes, 2>, &Bits<XorBytes, 2>},
    /* i32 */
    {&SumI32, nullptr, &ProductI32, &MinI32, &MaxI32, nullptr, &Bits<AndBytes, 4>,
     &Bits<OrBytes, 4>, &Bits<XorBytes, 4>},
    /* i64 */
    {&SumI64, nullptr, &ProductI64, &MinI64, &MaxI64, nullptr, &Bits<AndBytes, 8>,
     &Bits<OrBytes, 8>, &Bits<XorBytes, 8>},
    /* bool */
    {&OrBool, nullptr, &AndBool, &AndBool, &OrBool, nullptr, &AndBool, &OrBool, &XorBool},
};

}  // namespace

ReduceFunction FindReduction(Reduction reduction, DType dtype) {
  const int row = static_cast<int>(dtype) - static_cast<int>(DType::kF16);
  const int column = static_cast<int>(reduction) - static_cast<int>(Reduction::kSum);
  if (row < 0 || row >= kRows || column < 0 || column >= kColumns) return nullptr;
  return kReductions[row][column];
}

bool ChangesSingleInput(Reduction reduction, DType dtype) {
  return reduction == Reduction::kAvg || reduction == Reduction::kPremulSum ||
         dtype == DType::kBool;
}

HoldersFunction FindHolders(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return &HoldersF16;
    case DType::kBF16:
      return &HoldersBF16;
    case DType::kF32:
      return &HoldersF32;
    case DType::kF64:
      return &HoldersF64;
    default:
      return nullptr;
  }
}

void CopyBytes(void* to, const void* from, int64_t bytes, bool streaming) {
  if (bytes == 0 || to == from) return;
  if (streaming) {
    ReducePass pass;
    pass.inputs = &from;
    pass.num_inputs = 1;
    pass.output = to;
    OrBytes(pass, 0, bytes, true);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace chorus

#endif  // HWY_ONCE
