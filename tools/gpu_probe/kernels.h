// The probe's kernels: what each thread does, as functions that a CPU runs, too. kernels.cu makes
// kernels of them for the GPU; tests and the stand-in driver call them.
//
// Threads: each call is one thread of a launch; those of a launch write different memory, but for
//   words that say otherwise. Ownership: all memory is the caller's. Errors: none; every wait ends.
// Build without contraction of a product and a sum: bits are compared.
#ifndef CHORUS_TOOLS_GPU_PROBE_KERNELS_H_
#define CHORUS_TOOLS_GPU_PROBE_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"

namespace chorus {
namespace probe {

using cuda::kBlockThreads;
using cuda::Lane;
using cuda::Pack;

// --- Patterns: word `index` of the memory called `seed` ---

CHORUS_DEVICE uint32_t PatternWord(uint64_t seed, uint64_t index) {
  uint64_t x = (index + 1) * 0x9e3779b97f4a7c15u + seed * 0xd1342543de82ef95u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>((x ^ (x >> 31)) >> 16);
}

// Of either sign and magnitudes from 2^-7 to 2^8, so that sums round; one in 64 is a NaN, an
// infinity, a zero or subnormal.
CHORUS_DEVICE uint32_t PatternFloatBits(uint64_t seed, uint64_t index) {
  const uint32_t word = PatternWord(seed, index);
  const uint32_t sign = word & 0x80000000u;
  const uint32_t mantissa = word & 0x007fffffu;
  if (((word >> 23) & 63) == 0) {
    switch (word & 3) {
      case 0:
        return sign | 0x7fc00000u | mantissa;
      case 1:
        return sign | 0x7f800000u;
      case 2:
        return sign;
      default:
        return sign | mantissa;
    }
  }
  return sign | ((120 + ((word >> 4) & 15)) << 23) | mantissa;
}

struct FillArgs {
  static constexpr int kScratchPacks = 0;
  uint32_t* to = nullptr;
  int64_t words = 0;
  uint64_t seed = 0;
  int32_t floats = 0;  // 1: PatternFloatBits, 0: PatternWord
};
CHORUS_DEVICE void Fill(const FillArgs& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.words; i += lane.count) {
    args.to[i] = args.floats != 0 ? PatternFloatBits(args.seed, i) : PatternWord(args.seed, i);
  }
}

struct CheckArgs {
  static constexpr int kScratchPacks = 0;
  const uint32_t* from = nullptr;
  int64_t words = 0;
  uint64_t seed = 0;
  uint64_t* wrong = nullptr;  // the number of words that are not PatternWord is added
};
CHORUS_DEVICE void Check(const CheckArgs& args, const Lane& lane) {
  uint64_t wrong = 0;
  for (int64_t i = lane.index; i < args.words; i += lane.count) {
    if (args.from[i] != PatternWord(args.seed, i)) ++wrong;
  }
  if (wrong > 0) cuda::AddShared(args.wrong, wrong);
}

// --- Small ones ---

struct EmptyArgs {
  static constexpr int kScratchPacks = 0;
};
CHORUS_DEVICE void Empty(const EmptyArgs& /*args*/, const Lane& /*lane*/) {}

struct WriteWordArgs {
  static constexpr int kScratchPacks = 0;
  uint32_t* word = nullptr;
  uint32_t value = 0;
};
CHORUS_DEVICE void WriteWord(const WriteWordArgs& args, const Lane& lane) {
  if (lane.index == 0) cuda::StoreShared(args.word, args.value);
}

// Counts on only if all before it have come: out of order, the count stands still.
struct CountUpArgs {
  static constexpr int kScratchPacks = 0;
  uint32_t* word = nullptr;
  uint32_t expected = 0;
};
CHORUS_DEVICE void CountUp(const CountUpArgs& args, const Lane& lane) {
  if (lane.index == 0 && *args.word == args.expected) *args.word = args.expected + 1;
}

// Keeps its threads busy until `stop` (if any) is not 0, at most `nanos`.
struct SpinArgs {
  static constexpr int kScratchPacks = 0;
  const uint32_t* stop = nullptr;
  uint32_t* started = nullptr;  // becomes 1
  int64_t nanos = 0;
};
CHORUS_DEVICE void Spin(const SpinArgs& args, const Lane& lane) {
  const int64_t start = cuda::DeviceNanos();
  if (lane.index == 0 && args.started != nullptr) cuda::StoreShared(args.started, 1);
  while (cuda::DeviceNanos() - start < args.nanos) {
    if (args.stop != nullptr && cuda::LoadShared(args.stop) != 0) break;
    cuda::Relax();
  }
}

// Two of these, with `mine` and `theirs` swapped, count up in turns. What has been reached, and how
// long it took, stands in `reached` and `took_nanos`.
struct PingPongArgs {
  static constexpr int kScratchPacks = 0;
  uint32_t* mine = nullptr;
  const uint32_t* theirs = nullptr;
  uint32_t rounds = 0;
  int32_t first = 0;  // 1: begins
  int64_t limit_nanos = 0;
  uint32_t* reached = nullptr;
  uint64_t* took_nanos = nullptr;
};
CHORUS_DEVICE void PingPong(const PingPongArgs& args, const Lane& lane) {
  if (lane.index != 0) return;
  const int64_t start = cuda::DeviceNanos();
  int64_t counted_from = start;
  uint32_t round = 0;
  bool late = false;
  while (round < args.rounds && !late) {
    if (args.first != 0) cuda::StoreShared(args.mine, round + 1);
    while (cuda::LoadShared(args.theirs) < round + 1) {
      if (cuda::DeviceNanos() - start > args.limit_nanos) {
        late = true;
        break;
      }
      cuda::Relax();
    }
    if (late) break;
    if (args.first == 0) cuda::StoreShared(args.mine, round + 1);
    ++round;
    // The first round also waits until the other kernel runs at all.
    if (round == 1) counted_from = cuda::DeviceNanos();
  }
  *args.took_nanos = static_cast<uint64_t>(cuda::DeviceNanos() - counted_from);
  cuda::StoreShared(args.reached, round);
}

// Writes past the end of `words`, on purpose: for tools that find such.
struct OutOfBoundsArgs {
  static constexpr int kScratchPacks = 0;
  uint32_t* words = nullptr;
  int64_t count = 0;  // that the caller has
  int64_t writes = 0;
};
CHORUS_DEVICE void OutOfBounds(const OutOfBoundsArgs& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.writes; i += lane.count) args.words[i] = 1;
}

// --- Through memory as fast as it goes ---

struct CopyArgs {
  static constexpr int kScratchPacks = 0;
  const Pack* from = nullptr;
  Pack* to = nullptr;
  int64_t packs = 0;
};
CHORUS_DEVICE void Copy(const CopyArgs& args, const Lane& lane) {
  constexpr int kAtOnce = 4;
  int64_t i = lane.index;
  for (; i + (kAtOnce - 1) * lane.count < args.packs; i += kAtOnce * lane.count) {
    Pack v[kAtOnce];
    CHORUS_UNROLL
    for (int u = 0; u < kAtOnce; ++u) v[u] = args.from[i + u * lane.count];
    CHORUS_UNROLL
    for (int u = 0; u < kAtOnce; ++u) args.to[i + u * lane.count] = v[u];
  }
  for (; i < args.packs; i += lane.count) args.to[i] = args.from[i];
}

CHORUS_DEVICE Pack Plus(const Pack& a, const Pack& b) {
  return {{a.f[0] + b.f[0], a.f[1] + b.f[1], a.f[2] + b.f[2], a.f[3] + b.f[3]}};
}
CHORUS_DEVICE Pack Times(const Pack& a, const Pack& b) {
  return {{a.f[0] * b.f[0], a.f[1] * b.f[1], a.f[2] * b.f[2], a.f[3] * b.f[3]}};
}
CHORUS_DEVICE Pack Plus(const Pack& a, float b) {
  return {{a.f[0] + b, a.f[1] + b, a.f[2] + b, a.f[3] + b}};
}
CHORUS_DEVICE Pack Times(const Pack& a, float b) {
  return {{a.f[0] * b, a.f[1] * b, a.f[2] * b, a.f[3] * b}};
}

// core/backend/reduction.h: a result that is NaN is the one NaN.
CHORUS_DEVICE Pack OneNaN(const Pack& v) {
  Pack result = v;
  CHORUS_UNROLL
  for (int k = 0; k < 4; ++k) {
    if (v.f[k] != v.f[k]) result.f[k] = cuda::FloatOf(0x7fc00000u);
  }
  return result;
}

// T(lo, n) of core/backend/reduction.h, with SUM: the left side has the largest power of two below
// n.
CHORUS_DEVICE constexpr int LeftOf(int n) {
  int left = 1;
  while (2 * left < n) left *= 2;
  return left;
}
template <int kLow, int kRanks>
struct SumTree {
  static CHORUS_DEVICE Pack Of(const Pack* in) {
    if constexpr (kRanks == 1) {
      return in[kLow];
    } else {
      constexpr int kLeft = LeftOf(kRanks);
      return Plus(SumTree<kLow, kLeft>::Of(in), SumTree<kLow + kLeft, kRanks - kLeft>::Of(in));
    }
  }
};

template <int kRanks>
struct OrderedSumArgs {
  static constexpr int kScratchPacks = 0;
  const Pack* in[kRanks] = {};
  Pack* out = nullptr;
  int64_t packs = 0;
};
template <int kRanks>
CHORUS_DEVICE void OrderedSum(const OrderedSumArgs<kRanks>& args, const Lane& lane) {
  // So that about eight loads of a thread are on their way at a time.
  constexpr int kAtOnce = kRanks >= 8 ? 1 : 8 / kRanks;
  int64_t i = lane.index;
  for (; i + (kAtOnce - 1) * lane.count < args.packs; i += kAtOnce * lane.count) {
    Pack v[kAtOnce][kRanks];
    CHORUS_UNROLL
    for (int u = 0; u < kAtOnce; ++u) {
      CHORUS_UNROLL
      for (int r = 0; r < kRanks; ++r) v[u][r] = args.in[r][i + u * lane.count];
    }
    CHORUS_UNROLL
    for (int u = 0; u < kAtOnce; ++u) {
      args.out[i + u * lane.count] = OneNaN(SumTree<0, kRanks>::Of(v[u]));
    }
  }
  for (; i < args.packs; i += lane.count) {
    Pack v[kRanks];
    CHORUS_UNROLL
    for (int r = 0; r < kRanks; ++r) v[r] = args.in[r][i];
    args.out[i] = OneNaN(SumTree<0, kRanks>::Of(v));
  }
}

// --- Chains of element-wise ops, interpreted ---

// A machine with one value, and slots. Of the value v and slot s:
enum class ChainCode : uint8_t {
  kLoad,       // v = s
  kStore,      // s = v
  kAdd,        // v = v + s
  kMul,        // v = v * s
  kAddNumber,  // v = v + number
  kMulNumber,  // v = v * number
  kRelu,       // v = v > 0 ? v : 0
};
struct ChainOp {
  ChainCode code = ChainCode::kLoad;
  uint8_t slot = 0;
  float number = 0;
};

// Inputs are in slots 0, 1, ...; outputs are what stands in their slots at the end.
struct ChainArgs {
  static constexpr int kMaxOps = 20;  // 16 that compute, beside loads and stores
  static constexpr int kMaxInputs = 3;
  static constexpr int kMaxOutputs = 2;
  static constexpr int kSlots = 4;
  // Packs that go through an op together: the op is decoded once for them.
  static constexpr int kAtOnce = 4;
  static constexpr int kScratchPacks = kSlots * kAtOnce;

  const Pack* in[kMaxInputs] = {};
  Pack* out[kMaxOutputs] = {};
  int64_t packs = 0;
  int32_t inputs = 0;
  int32_t outputs = 0;
  int32_t ops = 0;
  uint8_t output_slot[kMaxOutputs] = {};
  ChainOp op[kMaxOps];
};
CHORUS_DEVICE void Chain(const ChainArgs& args, const Lane& lane) {
  constexpr int kAtOnce = ChainArgs::kAtOnce;
  const int64_t block = kAtOnce * lane.count;
  for (int64_t i = lane.index; i < args.packs; i += block) {
    const auto slot = [&](int s, int u) -> Pack& {
      return lane.scratch[(s * kAtOnce + u) * lane.stride];
    };
    for (int k = 0; k < args.inputs; ++k) {
      CHORUS_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        const int64_t at = i + u * lane.count;
        if (at < args.packs) slot(k, u) = args.in[k][at];
      }
    }
    Pack v[kAtOnce] = {};
    for (int n = 0; n < args.ops; ++n) {
      const ChainOp op = args.op[n];
      switch (op.code) {
        case ChainCode::kLoad:
          CHORUS_UNROLL
          for (int u = 0; u < kAtOnce; ++u) v[u] = slot(op.slot, u);
          break;
        case ChainCode::kStore:
          CHORUS_UNROLL
          for (int u = 0; u < kAtOnce; ++u) slot(op.slot, u) = v[u];
          break;
        case ChainCode::kAdd:
          CHORUS_UNROLL
          for (int u = 0; u < kAtOnce; ++u) v[u] = Plus(v[u], slot(op.slot, u));
          break;
        case ChainCode::kMul:
          CHORUS_UNROLL
          for (int u = 0; u < kAtOnce; ++u) v[u] = Times(v[u], slot(op.slot, u));
          break;
        case ChainCode::kAddNumber:
          CHORUS_UNROLL
          for (int u = 0; u < kAtOnce; ++u) v[u] = Plus(v[u], op.number);
          break;
        case ChainCode::kMulNumber:
          CHORUS_UNROLL
          for (int u = 0; u < kAtOnce; ++u) v[u] = Times(v[u], op.number);
          break;
        case ChainCode::kRelu:
          CHORUS_UNROLL
          for (int u = 0; u < kAtOnce; ++u) {
            CHORUS_UNROLL
            for (int k = 0; k < 4; ++k) v[u].f[k] = v[u].f[k] > 0 ? v[u].f[k] : 0;
          }
          break;
      }
    }
    for (int k = 0; k < args.outputs; ++k) {
      CHORUS_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        const int64_t at = i + u * lane.count;
        if (at < args.packs) args.out[k][at] = slot(args.output_slot[k], u);
      }
    }
  }
}

// The same by hand: m = momentum m + g, p = p - rate m.
struct SgdArgs {
  static constexpr int kScratchPacks = 0;
  const Pack* parameter = nullptr;
  const Pack* gradient = nullptr;
  const Pack* momentum = nullptr;
  Pack* new_parameter = nullptr;
  Pack* new_momentum = nullptr;
  int64_t packs = 0;
  float decay = 0;
  float minus_rate = 0;
};
CHORUS_DEVICE void Sgd(const SgdArgs& args, const Lane& lane) {
  constexpr int kAtOnce = 2;
  int64_t i = lane.index;
  const auto one = [&](const Pack& p, const Pack& g, const Pack& m, int64_t at) {
    const Pack new_m = Plus(Times(m, args.decay), g);
    args.new_momentum[at] = new_m;
    args.new_parameter[at] = Plus(Times(new_m, args.minus_rate), p);
  };
  for (; i + (kAtOnce - 1) * lane.count < args.packs; i += kAtOnce * lane.count) {
    Pack p[kAtOnce], g[kAtOnce], m[kAtOnce];
    CHORUS_UNROLL
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t at = i + u * lane.count;
      p[u] = args.parameter[at];
      g[u] = args.gradient[at];
      m[u] = args.momentum[at];
    }
    CHORUS_UNROLL
    for (int u = 0; u < kAtOnce; ++u) one(p[u], g[u], m[u], i + u * lane.count);
  }
  for (; i < args.packs; i += lane.count) {
    one(args.parameter[i], args.gradient[i], args.momentum[i], i);
  }
}

// X(kernel's name, its arguments, what each thread does). A kernel has the one parameter
// `arguments`.
#define CHORUS_PROBE_KERNELS(X)                      \
  X(fill, FillArgs, Fill)                            \
  X(check, CheckArgs, Check)                         \
  X(empty, EmptyArgs, Empty)                         \
  X(write_word, WriteWordArgs, WriteWord)            \
  X(count_up, CountUpArgs, CountUp)                  \
  X(spin, SpinArgs, Spin)                            \
  X(ping_pong, PingPongArgs, PingPong)               \
  X(out_of_bounds, OutOfBoundsArgs, OutOfBounds)     \
  X(copy, CopyArgs, Copy)                            \
  X(ordered_sum_2, OrderedSumArgs<2>, OrderedSum<2>) \
  X(ordered_sum_4, OrderedSumArgs<4>, OrderedSum<4>) \
  X(ordered_sum_8, OrderedSumArgs<8>, OrderedSum<8>) \
  X(chain, ChainArgs, Chain)                         \
  X(sgd, SgdArgs, Sgd)

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_KERNELS_H_
