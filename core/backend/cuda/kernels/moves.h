// The kernels that run a collective on one GPU, whose members all have their memory there: what
// each thread does, as functions that a CPU runs, too. moves.cu makes kernels of them; tests and
// stand-in drivers call them.
//
// A launch runs a program, the list of moves that core/backend/collective_work.h makes of a
// collective: the elements of a move's inputs are reduced and written to all of its outputs. Bits
// are those of core/backend/reduction.h, whatever the alignment of operands and the number of
// threads. MoveProgram (move_program.h) writes programs.
//
// Threads: each call is one thread of a launch; those of a launch write different memory.
// Ownership: all memory is the caller's. Errors: none; programs are taken to be sound.
// Build without contraction of a product and a sum: they round twice.
#ifndef CHORUS_CORE_BACKEND_CUDA_KERNELS_MOVES_H_
#define CHORUS_CORE_BACKEND_CUDA_KERNELS_MOVES_H_

#include <cstdint>
#include <type_traits>

#include "core/base/device.h"

namespace chorus {
namespace cuda {

// --- Programs ---

// 16 bytes of each operand. It may be read over whatever type stands there.
struct alignas(16) [[gnu::may_alias]] Unit {
  uint32_t w[4];
};
inline constexpr int kUnitBytes = sizeof(Unit);

// A program is one block of bytes: this, num_moves of MoveEntry, and tables at offsets from its
// start, each of which has an alignment of 8. Addresses are those of the GPU.
struct ProgramHeader {
  int64_t units = 0;  // of all moves
  double divisor = 1;
  int32_t num_moves = 0;
  int32_t inputs = 0;   // uint64_t addresses, move by move
  int32_t outputs = 0;  // uint64_t addresses
  int32_t holders = 0;  // uint64_t addresses of f32, 0 where none is wanted
  int32_t factors = 0;  // FactorEntry
  int32_t scales = 0;   // uint64_t, by a move's input: where its factor stands (an f64 if the
                        // elements are, else an f32), or 0: it is 1. All are if the offset is 0
  int32_t steps = 0;    // TreeStep, of the tree of each move that reduces
  int32_t reserved = 0;
};

// One pass: the elements of the inputs, reduced, to every output. An output may be one of the
// inputs; other overlaps are not allowed, also between moves.
struct MoveEntry {
  int64_t first_unit = 0;  // those of the moves before it
  int64_t bytes = 0;       // of each operand
  int32_t first_input = 0;
  int32_t num_inputs = 0;  // 0: the outputs become zeros
  int32_t first_output = 0;
  int32_t num_outputs = 0;
  int32_t first_holders = -1;  // one for each input; -1: there are none
  int32_t first_factor = 0;
  int32_t num_factors = 0;
  int32_t width = kUnitBytes;  // of 1, 2, 4, 8 and 16 bytes the largest that aligns all operands
};

// A copy of an input as it is before outputs are written.
struct FactorEntry {
  int64_t input = 0;  // in the table of inputs
  uint64_t to = 0;
};

// core/backend/reduction.h: ReductionTree::Step.
struct TreeStep {
  uint8_t operands = 1;
  uint8_t joins = 0;
};

// The partial results that wait at a time, beside the one in registers: enough for 64 members.
inline constexpr int kMostWaiting = 5;

// A kernel's parameter: the program, or where it stands if it is too large for that.
struct MoveArgs {
  static constexpr int kScratchPacks = 0;
  static constexpr int kInlineBytes = 1024;

  const char* on_device = nullptr;  // if null, `program` is meant
  alignas(16) char program[kInlineBytes] = {};
};

template <typename T>
CHORUS_DEVICE const T* TableOf(const char* program, int32_t offset) {
  return reinterpret_cast<const T*>(program + offset);
}

// The move to which `unit` belongs, which is not before the move `from`.
CHORUS_DEVICE int32_t MoveOf(const MoveEntry* moves, int32_t num_moves, int32_t from,
                             int64_t unit) {
  int32_t behind = num_moves;
  while (from + 1 < behind) {
    const int32_t middle = from + (behind - from) / 2;
    if (moves[middle].first_unit <= unit) {
      from = middle;
    } else {
      behind = middle;
    }
  }
  return from;
}

// What follows has names that others use as well.
namespace moves {

// --- Numbers in units ---

template <typename T>
CHORUS_DEVICE T NumberOf(uint64_t bits) {
  if constexpr (std::is_same<T, double>::value) {
    return DoubleOf(bits);
  } else if constexpr (std::is_same<T, float>::value) {
    return FloatOf(static_cast<uint32_t>(bits));
  } else {
    return static_cast<T>(bits);
  }
}
template <typename T>
CHORUS_DEVICE auto BitsOfNumber(T number) {
  if constexpr (std::is_floating_point<T>::value) {
    return BitsOf(number);
  } else {
    return static_cast<std::make_unsigned_t<T>>(number);
  }
}

// Number i of those that lie in units one after the other. With shifts, not by way of memory:
// where i is known to the compiler, all stays in registers.
template <typename T>
CHORUS_DEVICE T Get(const Unit* units, int i) {
  if constexpr (sizeof(T) == 8) {
    const uint32_t* const w = units[i / 2].w + i % 2 * 2;
    return NumberOf<T>(uint64_t{w[1]} << 32 | w[0]);
  } else {
    constexpr int kInWord = 4 / sizeof(T);
    const int word = i / kInWord;
    return NumberOf<T>(units[word / 4].w[word % 4] >> (i % kInWord * 8 * sizeof(T)));
  }
}
// Into bits that are 0.
template <typename T>
CHORUS_DEVICE void Put(Unit* units, int i, T number) {
  const auto bits = BitsOfNumber(number);
  if constexpr (sizeof(T) == 8) {
    uint32_t* const w = units[i / 2].w + i % 2 * 2;
    w[0] = static_cast<uint32_t>(bits);
    w[1] = static_cast<uint32_t>(bits >> 32);
  } else {
    constexpr int kInWord = 4 / sizeof(T);
    const int word = i / kInWord;
    units[word / 4].w[word % 4] |= uint32_t{bits} << (i % kInWord * 8 * sizeof(T));
  }
}

// --- Memory ---

template <typename T>
struct [[gnu::may_alias]] InMemory {
  T value;
};
template <typename T>
CHORUS_DEVICE T LoadFrom(uint64_t address) {
  return GlobalMemory<const InMemory<T>>(address)->value;
}
template <typename T>
CHORUS_DEVICE void StoreTo(uint64_t address, T value) {
  GlobalMemory<InMemory<T>>(address)->value = value;
}

// How a thread gets at a unit. Whole ones, where everything is aligned:
struct WholeUnit {
  static constexpr bool kWhole = true;

  CHORUS_DEVICE Unit Load(uint64_t address) const { return *GlobalMemory<const Unit>(address); }
  CHORUS_DEVICE void Store(uint64_t address, const Unit& unit) const {
    *GlobalMemory<Unit>(address) = unit;
  }
  // One for each element of the unit.
  template <int kElements>
  CHORUS_DEVICE void StoreFloats(uint64_t address, const float* floats) const {
    constexpr int kAtOnce = kElements % 4 == 0 ? 4 : 1;
    CHORUS_UNROLL
    for (int i = 0; i < kElements; i += kAtOnce) {
      if constexpr (kAtOnce == 4) {
        Store(address + i * sizeof(float), {{BitsOf(floats[i]), BitsOf(floats[i + 1]),
                                             BitsOf(floats[i + 2]), BitsOf(floats[i + 3])}});
      } else {
        StoreTo(address + i * sizeof(float), floats[i]);
      }
    }
  }
};
// All others, and what is left over at a move's end; bytes that are not there are zeros.
struct PartialUnit {
  static constexpr bool kWhole = false;

  template <typename T>
  CHORUS_DEVICE Unit LoadParts(uint64_t address) const {
    Unit unit = {};
    CHORUS_UNROLL
    for (int at = 0; at < kUnitBytes; at += sizeof(T)) {
      if (at < bytes) Put(&unit, at / static_cast<int>(sizeof(T)), LoadFrom<T>(address + at));
    }
    return unit;
  }
  template <typename T>
  CHORUS_DEVICE void StoreParts(uint64_t address, const Unit& unit) const {
    CHORUS_UNROLL
    for (int at = 0; at < kUnitBytes; at += sizeof(T)) {
      if (at < bytes) StoreTo(address + at, Get<T>(&unit, at / static_cast<int>(sizeof(T))));
    }
  }
  CHORUS_DEVICE Unit Load(uint64_t address) const {
    if (width == 8) return LoadParts<uint64_t>(address);
    if (width == 4) return LoadParts<uint32_t>(address);
    if (width == 2) return LoadParts<uint16_t>(address);
    return LoadParts<uint8_t>(address);
  }
  CHORUS_DEVICE void Store(uint64_t address, const Unit& unit) const {
    if (width == 8) return StoreParts<uint64_t>(address, unit);
    if (width == 4) return StoreParts<uint32_t>(address, unit);
    if (width == 2) return StoreParts<uint16_t>(address, unit);
    StoreParts<uint8_t>(address, unit);
  }
  template <int kElements>
  CHORUS_DEVICE void StoreFloats(uint64_t address, const float* floats) const {
    CHORUS_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (i * (kUnitBytes / kElements) < bytes) StoreTo(address + i * sizeof(float), floats[i]);
    }
  }

  int width = 1;  // at most 8, divides `bytes`
  int bytes = 0;  // of the unit that are there
};

// --- Types: how a dtype is held in memory (Stored) and in registers (Number) ---

template <typename StoredType, typename NumberType>
struct Held {
  using Stored = StoredType;
  using Number = NumberType;
  static constexpr int kElements = kUnitBytes / sizeof(Stored);
  static constexpr int kUnits = kElements * sizeof(Number) / kUnitBytes;  // of as many numbers
};

template <typename T>
struct Integer : Held<T, T> {
  static CHORUS_DEVICE T Decode(T stored) { return stored; }
  static CHORUS_DEVICE T Encode(T number) { return number; }
};

// What is NaN becomes the one NaN.
CHORUS_DEVICE float OneNaN(float v) { return v != v ? FloatOf(0x7fc00000u) : v; }
CHORUS_DEVICE double OneNaN(double v) { return v != v ? DoubleOf(uint64_t{0x7ff8} << 48) : v; }

template <typename T>
struct Float : Held<T, T> {
  static CHORUS_DEVICE T Decode(T stored) { return stored; }
  static CHORUS_DEVICE T Encode(T number) { return OneNaN(number); }
};

// The half types round to nearest even, by integers. core/tensor/half.h is the same for those that
// are no NaN.
struct BFloat16 : Held<uint16_t, float> {
  static CHORUS_DEVICE float Decode(uint16_t stored) { return FloatOf(uint32_t{stored} << 16); }
  static CHORUS_DEVICE uint16_t Encode(float number) {
    const uint32_t bits = BitsOf(OneNaN(number));
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};
struct Float16 : Held<uint16_t, float> {
  static CHORUS_DEVICE float Decode(uint16_t stored) {
    const uint32_t magnitude = stored & 0x7fffu;
    // The exponents' biases differ by 112. Subnormal ones are so as floats, too, and come right
    // as well; infinity and NaN have the largest exponent.
    const uint32_t finite = BitsOf(FloatOf(magnitude << 13) * 0x1p112f);
    const uint32_t special = magnitude << 13 | 0x7f800000u;
    return FloatOf((magnitude < 0x7c00 ? finite : special) | uint32_t{stored & 0x8000u} << 16);
  }
  static CHORUS_DEVICE uint16_t Encode(float number) {
    const uint32_t bits = BitsOf(number);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000u) >> 13;
    // Adding 0.5 leaves the rounded multiple of 2^-24 in the sum's last bits.
    const uint32_t subnormal = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
    result = magnitude < 0x47800000u ? result : 0x7c00u;             // 2^16
    result |= sign;
    return static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7e00u : result);
  }
};

struct Bool : Held<uint8_t, uint8_t> {
  static CHORUS_DEVICE uint8_t Decode(uint8_t stored) { return stored != 0 ? 1 : 0; }
  static CHORUS_DEVICE uint8_t Encode(uint8_t number) { return number; }
};

// Whether the reduction of a single input may differ from it: ChangesSingleInput of
// core/backend/reduction.h.
template <class Type, class Op>
inline constexpr bool kChangesSingle = Op::kScales || std::is_same<Type, Bool>::value;

// --- Operations ---

// What T is computed with: integers wrap, and do not become the signed `int`.
template <typename T>
using Wrapping = std::conditional_t<std::is_integral<T>::value && sizeof(T) < 4, uint32_t, T>;

struct Sum {
  static constexpr bool kScales = false;
  static constexpr bool kHasHolders = false;
  static constexpr bool kHasFactors = false;
  template <typename T>
  static CHORUS_DEVICE T Combine(T v, T x) {
    return static_cast<T>(static_cast<Wrapping<T>>(v) + static_cast<Wrapping<T>>(x));
  }
};
// AVG and PREMUL_SUM: terms are scaled, what they come to is divided.
struct ScaledSum : Sum {
  static constexpr bool kScales = true;
};
struct Product : Sum {
  static constexpr bool kHasFactors = true;
  template <typename T>
  static CHORUS_DEVICE T Combine(T v, T x) {
    return static_cast<T>(static_cast<Wrapping<T>>(v) * static_cast<Wrapping<T>>(x));
  }
};
// The right one wins only by being less, or NaN; a NaN on the left loses only to another.
struct Min : Sum {
  template <typename T>
  static CHORUS_DEVICE T Combine(T v, T x) {
    return x < v || x != x ? x : v;
  }
};
struct Max : Sum {
  template <typename T>
  static CHORUS_DEVICE T Combine(T v, T x) {
    return x > v || x != x ? x : v;
  }
};
// Of floating numbers, whose gradients want holders.
struct FloatMin : Min {
  static constexpr bool kHasHolders = true;
};
struct FloatMax : Max {
  static constexpr bool kHasHolders = true;
};
struct BitAnd : Sum {
  template <typename T>
  static CHORUS_DEVICE T Combine(T v, T x) {
    return static_cast<T>(v & x);
  }
};
// Also PRODUCT.
struct BoolAnd : BitAnd {
  static constexpr bool kHasFactors = true;
};
struct BitOr : Sum {
  template <typename T>
  static CHORUS_DEVICE T Combine(T v, T x) {
    return static_cast<T>(v | x);
  }
};
struct BitXor : Sum {
  template <typename T>
  static CHORUS_DEVICE T Combine(T v, T x) {
    return static_cast<T>(v ^ x);
  }
};

// --- The reduction of a unit ---

// The tree of kOperands operands, of which `units` has the unit, from the first on.
template <class Type, class Op, int kOperands>
CHORUS_DEVICE typename Type::Number Subtree(const Unit* units, const typename Type::Number* scales,
                                            int i) {
  if constexpr (kOperands > 1) {
    constexpr int kHalf = kOperands / 2;
    return Op::Combine(Subtree<Type, Op, kHalf>(units, scales, i),
                       Subtree<Type, Op, kHalf>(units + kHalf, scales + kHalf, i));
  } else {
    const auto number = Type::Decode(Get<typename Type::Stored>(units, i));
    if constexpr (Op::kScales) {
      return number * *scales;
    } else {
      return number;
    }
  }
}

// A unit of a move's inputs.
template <class Access>
struct Operands {
  Access access;
  const uint64_t* inputs = nullptr;  // the move's
  const uint64_t* scales = nullptr;
  int64_t offset = 0;
};

template <class Type, class Op, int kOperands, class Access>
CHORUS_DEVICE void Take(const Operands<Access>& from, int k, typename Type::Number* x) {
  using Number = typename Type::Number;
  // All operands are on their way before the first is looked at.
  KeepApart<kOperands>();
  Unit units[kOperands];
  CHORUS_UNROLL
  for (int o = 0; o < kOperands; ++o) {
    units[o] = from.access.Load(from.inputs[k + o] + from.offset);
  }
  Number scales[kOperands];
  CHORUS_UNROLL
  for (int o = 0; o < kOperands; ++o) {
    scales[o] = 1;
    if constexpr (Op::kScales) {
      const uint64_t scale = from.scales == nullptr ? 0 : from.scales[k + o];
      if (scale != 0) scales[o] = LoadFrom<Number>(scale);
    }
  }
  CHORUS_UNROLL
  for (int i = 0; i < Type::kElements; ++i) x[i] = Subtree<Type, Op, kOperands>(units, scales, i);
}

// Partial results that wait, the latest on top, in the thread's scratch memory.
template <class Type>
struct WaitingResults {
  using Number = typename Type::Number;

  CHORUS_DEVICE Unit* At(int k) const { return reinterpret_cast<Unit*>(scratch + k * stride); }
  CHORUS_DEVICE void Push(const Number* numbers) {
    Unit units[Type::kUnits] = {};
    CHORUS_UNROLL
    for (int i = 0; i < Type::kElements; ++i) Put(units, i, numbers[i]);
    CHORUS_UNROLL
    for (int k = 0; k < Type::kUnits; ++k) *At(size + k) = units[k];
    size += Type::kUnits;
  }
  CHORUS_DEVICE void Pop(Number* numbers) {
    size -= Type::kUnits;
    Unit units[Type::kUnits];
    CHORUS_UNROLL
    for (int k = 0; k < Type::kUnits; ++k) units[k] = *At(size + k);
    CHORUS_UNROLL
    for (int i = 0; i < Type::kElements; ++i) numbers[i] = Get<Number>(units, i);
  }

  Pack* scratch = nullptr;
  int stride = 1;
  int size = 0;  // in packs
};

// The steps of the tree. Partial units take operands one by one, so that what loads a part, which
// is long, is there once.
template <class Access>
struct StepsOf {
  CHORUS_DEVICE TreeStep Next() {
    if constexpr (Access::kWhole) {
      return *step++;
    } else {
      // Of the tree of four operands, the second joins the first, and the fourth two.
      ++taken;
      TreeStep one;
      one.joins = static_cast<uint8_t>(taken % 2 == 1 ? 0 : taken / 2);
      if (taken == step->operands) {
        one.joins = static_cast<uint8_t>(one.joins + step->joins);
        taken = 0;
        ++step;
      }
      return one;
    }
  }

  const TreeStep* step = nullptr;
  int taken = 0;  // of the step's operands
};

// T of core/backend/reduction.h.
template <class Type, class Op, class Access>
CHORUS_DEVICE Unit ReduceUnit(const Operands<Access>& from, int num_inputs, StepsOf<Access> steps,
                              double divisor, const Lane& lane) {
  using Number = typename Type::Number;
  const auto take = [&](int operands, int k, Number* x) {
    if constexpr (Access::kWhole) {
      if (operands == 4) return Take<Type, Op, 4>(from, k, x);
      if (operands == 2) return Take<Type, Op, 2>(from, k, x);
    }
    Take<Type, Op, 1>(from, k, x);
  };
  WaitingResults<Type> waiting;
  waiting.scratch = lane.scratch;
  waiting.stride = lane.stride;
  Number v[Type::kElements] = {};
  int k = 0;
  CHORUS_KEEP_LOOP
  while (k < num_inputs) {
    const TreeStep step = steps.Next();
    Number x[Type::kElements];
    take(step.operands, k, x);
    if (step.joins == 0) {
      if (k > 0) waiting.Push(v);
      CHORUS_UNROLL
      for (int i = 0; i < Type::kElements; ++i) v[i] = x[i];
    } else {
      CHORUS_UNROLL
      for (int i = 0; i < Type::kElements; ++i) v[i] = Op::Combine(v[i], x[i]);
    }
    CHORUS_KEEP_LOOP
    for (int joins = step.joins; joins > 1; --joins) {
      Number left[Type::kElements];
      waiting.Pop(left);
      CHORUS_UNROLL
      for (int i = 0; i < Type::kElements; ++i) v[i] = Op::Combine(left[i], v[i]);
    }
    k += step.operands;
  }
  Unit result = {};
  CHORUS_UNROLL
  for (int i = 0; i < Type::kElements; ++i) {
    if constexpr (Op::kScales) v[i] = v[i] / static_cast<Number>(divisor);
    Put(&result, i, Type::Encode(v[i]));
  }
  return result;
}

// To each wanted holders[k] the number of inputs that hold the result, where input k is one.
template <class Type, class Access>
CHORUS_DEVICE void CountHolders(const Operands<Access>& from, int num_inputs,
                                const uint64_t* holders, const Unit& result) {
  using Number = typename Type::Number;
  using Stored = typename Type::Stored;
  const auto holds = [&](const Unit& unit, int i) {
    const Number x = Type::Decode(Get<Stored>(&unit, i));
    const Number y = Type::Decode(Get<Stored>(&result, i));
    return x == y || (x != x && y != y);
  };
  float count[Type::kElements] = {};
  CHORUS_KEEP_LOOP
  for (int k = 0; k < num_inputs; ++k) {
    const Unit unit = from.access.Load(from.inputs[k] + from.offset);
    CHORUS_UNROLL
    for (int i = 0; i < Type::kElements; ++i) count[i] += holds(unit, i) ? 1.0f : 0.0f;
  }
  CHORUS_KEEP_LOOP
  for (int k = 0; k < num_inputs; ++k) {
    if (holders[k] == 0) continue;
    const Unit unit = from.access.Load(from.inputs[k] + from.offset);
    float held[Type::kElements];
    CHORUS_UNROLL
    for (int i = 0; i < Type::kElements; ++i) held[i] = holds(unit, i) ? count[i] : 0.0f;
    const int64_t first = from.offset / static_cast<int64_t>(sizeof(Stored));
    from.access.template StoreFloats<Type::kElements>(holders[k] + first * sizeof(float), held);
  }
}

// --- What threads do ---

// Calls run(access, move, offset of the unit in each operand) for all units of this thread.
template <typename Run>
CHORUS_DEVICE void ForEachUnit(const char* program, const Lane& lane, const Run& run) {
  const auto& header = *reinterpret_cast<const ProgramHeader*>(program);
  const MoveEntry* const moves = TableOf<MoveEntry>(program, sizeof(ProgramHeader));
  const int64_t units = header.units;
  const int32_t num_moves = header.num_moves;
  int32_t index = 0;
  MoveEntry move;
  int64_t end = 0;  // of the move's bytes, counted from the first of all units
  for (int64_t unit = lane.index; unit < units; unit += lane.count) {
    // Neighbours are mostly in the same move.
    if (unit * kUnitBytes >= end) {
      index = MoveOf(moves, num_moves, index, unit);
      move = moves[index];
      end = move.first_unit * kUnitBytes + move.bytes;
    }
    const int64_t offset = (unit - move.first_unit) * kUnitBytes;
    const int64_t left = move.bytes - offset;
    if (move.width == kUnitBytes && left >= kUnitBytes) {
      run(WholeUnit(), move, offset);
      continue;
    }
    PartialUnit part;
    part.bytes = static_cast<int>(left < kUnitBytes ? left : kUnitBytes);
    const int aligned = move.width | part.bytes;
    part.width = aligned & -aligned;  // the lowest bit
    if (part.width > 8) part.width = 8;
    run(part, move, offset);
  }
}

CHORUS_DEVICE const char* ProgramOf(const MoveArgs& args) {
  return args.on_device != nullptr ? args.on_device : args.program;
}

// Movement: each move has at most one input.
CHORUS_DEVICE void MoveBytes(const MoveArgs& args, const Lane& lane) {
  const char* const program = ProgramOf(args);
  const auto& header = *reinterpret_cast<const ProgramHeader*>(program);
  const uint64_t* const inputs = TableOf<uint64_t>(program, header.inputs);
  const uint64_t* const outputs = TableOf<uint64_t>(program, header.outputs);
  ForEachUnit(program, lane, [&](auto access, const MoveEntry& move, int64_t offset) {
    Unit unit = {};
    if (move.num_inputs > 0) unit = access.Load(inputs[move.first_input] + offset);
    CHORUS_KEEP_LOOP
    for (int k = 0; k < move.num_outputs; ++k) {
      access.Store(outputs[move.first_output + k] + offset, unit);
    }
  });
}

template <class Type>
struct ReduceArgs : MoveArgs {
  static constexpr int kScratchPacks = kMostWaiting * Type::kUnits;
};
template <class Type, class Op>
CHORUS_DEVICE void Reduce(const ReduceArgs<Type>& args, const Lane& lane) {
  const char* const program = ProgramOf(args);
  const auto& header = *reinterpret_cast<const ProgramHeader*>(program);
  const uint64_t* const outputs = TableOf<uint64_t>(program, header.outputs);
  ForEachUnit(program, lane, [&](auto access, const MoveEntry& move, int64_t offset) {
    using Access = decltype(access);
    Operands<Access> from;
    from.access = access;
    from.inputs = TableOf<uint64_t>(program, header.inputs) + move.first_input;
    from.offset = offset;
    if constexpr (Op::kHasFactors) {
      // Before outputs are written, which may be inputs.
      const FactorEntry* const factors =
          TableOf<FactorEntry>(program, header.factors) + move.first_factor;
      CHORUS_KEEP_LOOP
      for (int k = 0; k < move.num_factors; ++k) {
        const uint64_t input = TableOf<uint64_t>(program, header.inputs)[factors[k].input];
        access.Store(factors[k].to + offset, access.Load(input + offset));
      }
    }
    Unit result = {};
    if (move.num_inputs > (kChangesSingle<Type, Op> ? 0 : 1)) {
      if constexpr (Op::kScales) {
        if (header.scales != 0) from.scales = TableOf<uint64_t>(program, header.scales);
      }
      StepsOf<Access> steps;
      steps.step = TableOf<TreeStep>(program, header.steps);
      result = ReduceUnit<Type, Op>(from, move.num_inputs, steps, header.divisor, lane);
    } else if (move.num_inputs == 1) {
      result = access.Load(from.inputs[0] + offset);
    }
    if constexpr (Op::kHasHolders) {
      if (move.first_holders >= 0) {
        CountHolders<Type>(from, move.num_inputs,
                           TableOf<uint64_t>(program, header.holders) + move.first_holders, result);
      }
    }
    CHORUS_KEEP_LOOP
    for (int k = 0; k < move.num_outputs; ++k) {
      access.Store(outputs[move.first_output + k] + offset, result);
    }
  });
}

}  // namespace moves

// X(kernel's name, its arguments, what each thread does). A kernel has the one parameter
// `arguments`. Signed and unsigned integers share what does not depend on the sign; bits have no
// type, and so are taken by the word.
#define CHORUS_REDUCE_KERNEL(X, name, Type, Op) \
  X(reduce_##name, moves::ReduceArgs<moves::Type>, (moves::Reduce<moves::Type, moves::Op>))
#define CHORUS_MOVE_KERNELS(X)                                      \
  X(move_bytes, MoveArgs, moves::MoveBytes)                         \
  CHORUS_REDUCE_KERNEL(X, sum_f16, Float16, Sum)                    \
  CHORUS_REDUCE_KERNEL(X, sum_bf16, BFloat16, Sum)                  \
  CHORUS_REDUCE_KERNEL(X, sum_f32, Float<float>, Sum)               \
  CHORUS_REDUCE_KERNEL(X, sum_f64, Float<double>, Sum)              \
  CHORUS_REDUCE_KERNEL(X, sum_i8, Integer<uint8_t>, Sum)            \
  CHORUS_REDUCE_KERNEL(X, sum_i16, Integer<uint16_t>, Sum)          \
  CHORUS_REDUCE_KERNEL(X, sum_i32, Integer<uint32_t>, Sum)          \
  CHORUS_REDUCE_KERNEL(X, sum_i64, Integer<uint64_t>, Sum)          \
  CHORUS_REDUCE_KERNEL(X, scaled_sum_f16, Float16, ScaledSum)       \
  CHORUS_REDUCE_KERNEL(X, scaled_sum_bf16, BFloat16, ScaledSum)     \
  CHORUS_REDUCE_KERNEL(X, scaled_sum_f32, Float<float>, ScaledSum)  \
  CHORUS_REDUCE_KERNEL(X, scaled_sum_f64, Float<double>, ScaledSum) \
  CHORUS_REDUCE_KERNEL(X, product_f16, Float16, Product)            \
  CHORUS_REDUCE_KERNEL(X, product_bf16, BFloat16, Product)          \
  CHORUS_REDUCE_KERNEL(X, product_f32, Float<float>, Product)       \
  CHORUS_REDUCE_KERNEL(X, product_f64, Float<double>, Product)      \
  CHORUS_REDUCE_KERNEL(X, product_i8, Integer<uint8_t>, Product)    \
  CHORUS_REDUCE_KERNEL(X, product_i16, Integer<uint16_t>, Product)  \
  CHORUS_REDUCE_KERNEL(X, product_i32, Integer<uint32_t>, Product)  \
  CHORUS_REDUCE_KERNEL(X, product_i64, Integer<uint64_t>, Product)  \
  CHORUS_REDUCE_KERNEL(X, min_f16, Float16, FloatMin)               \
  CHORUS_REDUCE_KERNEL(X, min_bf16, BFloat16, FloatMin)             \
  CHORUS_REDUCE_KERNEL(X, min_f32, Float<float>, FloatMin)          \
  CHORUS_REDUCE_KERNEL(X, min_f64, Float<double>, FloatMin)         \
  CHORUS_REDUCE_KERNEL(X, min_i8, Integer<int8_t>, Min)             \
  CHORUS_REDUCE_KERNEL(X, min_u8, Integer<uint8_t>, Min)            \
  CHORUS_REDUCE_KERNEL(X, min_i16, Integer<int16_t>, Min)           \
  CHORUS_REDUCE_KERNEL(X, min_i32, Integer<int32_t>, Min)           \
  CHORUS_REDUCE_KERNEL(X, min_i64, Integer<int64_t>, Min)           \
  CHORUS_REDUCE_KERNEL(X, max_f16, Float16, FloatMax)               \
  CHORUS_REDUCE_KERNEL(X, max_bf16, BFloat16, FloatMax)             \
  CHORUS_REDUCE_KERNEL(X, max_f32, Float<float>, FloatMax)          \
  CHORUS_REDUCE_KERNEL(X, max_f64, Float<double>, FloatMax)         \
  CHORUS_REDUCE_KERNEL(X, max_i8, Integer<int8_t>, Max)             \
  CHORUS_REDUCE_KERNEL(X, max_u8, Integer<uint8_t>, Max)            \
  CHORUS_REDUCE_KERNEL(X, max_i16, Integer<int16_t>, Max)           \
  CHORUS_REDUCE_KERNEL(X, max_i32, Integer<int32_t>, Max)           \
  CHORUS_REDUCE_KERNEL(X, max_i64, Integer<int64_t>, Max)           \
  CHORUS_REDUCE_KERNEL(X, and_bits, Integer<uint32_t>, BitAnd)      \
  CHORUS_REDUCE_KERNEL(X, or_bits, Integer<uint32_t>, BitOr)        \
  CHORUS_REDUCE_KERNEL(X, xor_bits, Integer<uint32_t>, BitXor)      \
  CHORUS_REDUCE_KERNEL(X, and_bool, Bool, BoolAnd)                  \
  CHORUS_REDUCE_KERNEL(X, or_bool, Bool, BitOr)                     \
  CHORUS_REDUCE_KERNEL(X, xor_bool, Bool, BitXor)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_KERNELS_MOVES_H_
