// What each thread of the kernels of comparisons, logic, where and cast does.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_COMPARE_COMPARE_KERNELS_H_
#define CHORUS_CORE_OPS_COMPARE_COMPARE_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/compare/compare_functions.h"
#include "core/ops/device_elements.h"
#include "core/tensor/half.h"

namespace chorus {
namespace cuda {

template <typename F, typename T>
CHORUS_DEVICE void CompareElements(const ElementsArgs& args, const Lane& lane) {
  EachElement<compare::OfElements<F>, Bool, T, T>(args, lane);
}

CHORUS_DEVICE void NegateElements(const ElementsArgs& args, const Lane& lane) {
  EachElement<compare::OfElements<compare::Not>, Bool, Bool>(args, lane);
}

// T has the width of an element; what it holds does not matter.
template <typename T>
struct Either {
  CHORUS_DEVICE static T Of(Bool condition, T a, T b) { return condition ? a : b; }
};
template <typename T>
CHORUS_DEVICE void Where(const ElementsArgs& args, const Lane& lane) {
  EachElement<Either<T>, T, Bool, T, T>(args, lane);
}

template <typename To>
struct ConvertTo {
  template <typename From>
  CHORUS_DEVICE static To Of(From element) {
    return compare::Convert<To>(element);
  }
};
template <typename To, typename From>
CHORUS_DEVICE void CastElements(const ElementsArgs& args, const Lane& lane) {
  EachElement<ConvertTo<To>, To, From>(args, lane);
}

#define CHORUS_COMPARE_OF(X, op, F)                                 \
  X(op##_f16, ElementsArgs, (CompareElements<compare::F, F16>))     \
  X(op##_bf16, ElementsArgs, (CompareElements<compare::F, BF16>))   \
  X(op##_f32, ElementsArgs, (CompareElements<compare::F, float>))   \
  X(op##_f64, ElementsArgs, (CompareElements<compare::F, double>))  \
  X(op##_i8, ElementsArgs, (CompareElements<compare::F, int8_t>))   \
  X(op##_u8, ElementsArgs, (CompareElements<compare::F, uint8_t>))  \
  X(op##_i16, ElementsArgs, (CompareElements<compare::F, int16_t>)) \
  X(op##_i32, ElementsArgs, (CompareElements<compare::F, int32_t>)) \
  X(op##_i64, ElementsArgs, (CompareElements<compare::F, int64_t>)) \
  X(op##_bool, ElementsArgs, (CompareElements<compare::F, Bool>))
#define CHORUS_CAST_OF(X, from, From)                               \
  X(cast_##from##_f16, ElementsArgs, (CastElements<F16, From>))     \
  X(cast_##from##_bf16, ElementsArgs, (CastElements<BF16, From>))   \
  X(cast_##from##_f32, ElementsArgs, (CastElements<float, From>))   \
  X(cast_##from##_f64, ElementsArgs, (CastElements<double, From>))  \
  X(cast_##from##_i8, ElementsArgs, (CastElements<int8_t, From>))   \
  X(cast_##from##_u8, ElementsArgs, (CastElements<uint8_t, From>))  \
  X(cast_##from##_i16, ElementsArgs, (CastElements<int16_t, From>)) \
  X(cast_##from##_i32, ElementsArgs, (CastElements<int32_t, From>)) \
  X(cast_##from##_i64, ElementsArgs, (CastElements<int64_t, From>)) \
  X(cast_##from##_bool, ElementsArgs, (CastElements<Bool, From>))

// gt and ge are lt and le of the other one, logical_xor is ne of bool.
#define CHORUS_KERNELS_OF_Compare(X)                                       \
  CHORUS_COMPARE_OF(X, eq, Eq)                                             \
  CHORUS_COMPARE_OF(X, le, Le)                                             \
  CHORUS_COMPARE_OF(X, lt, Lt)                                             \
  CHORUS_COMPARE_OF(X, ne, Ne)                                             \
  X(logical_and_bool, ElementsArgs, (CompareElements<compare::And, Bool>)) \
  X(logical_not_bool, ElementsArgs, NegateElements)                        \
  X(logical_or_bool, ElementsArgs, (CompareElements<compare::Or, Bool>))   \
  X(where_1, ElementsArgs, Where<uint8_t>)                                 \
  X(where_2, ElementsArgs, Where<uint16_t>)                                \
  X(where_4, ElementsArgs, Where<uint32_t>)                                \
  X(where_8, ElementsArgs, Where<uint64_t>)                                \
  CHORUS_CAST_OF(X, f16, F16)                                              \
  CHORUS_CAST_OF(X, bf16, BF16)                                            \
  CHORUS_CAST_OF(X, f32, float)                                            \
  CHORUS_CAST_OF(X, f64, double)                                           \
  CHORUS_CAST_OF(X, i8, int8_t)                                            \
  CHORUS_CAST_OF(X, u8, uint8_t)                                           \
  CHORUS_CAST_OF(X, i16, int16_t)                                          \
  CHORUS_CAST_OF(X, i32, int32_t)                                          \
  CHORUS_CAST_OF(X, i64, int64_t)                                          \
  CHORUS_CAST_OF(X, bool, Bool)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_COMPARE_COMPARE_KERNELS_H_
