#include "tools/gpu_probe/host_reference.h"

#include <algorithm>

namespace chorus {
namespace probe {
namespace {

template <int kRanks>
void Sum(const Pack* const* in, Pack* out, int64_t packs) {
  OrderedSumArgs<kRanks> args;
  std::copy_n(in, kRanks, args.in);
  args.out = out;
  args.packs = packs;
  OrderedSum(args, Lane());
}

}  // namespace

void OrderedSumOnHost(int ranks, const Pack* const* in, Pack* out, int64_t packs) {
  if (ranks == 2) return Sum<2>(in, out, packs);
  if (ranks == 4) return Sum<4>(in, out, packs);
  Sum<8>(in, out, packs);
}

void RunChainOnHost(const ChainArgs& args) {
  Pack scratch[ChainArgs::kScratchPacks];
  Lane lane;
  lane.scratch = scratch;
  Chain(args, lane);
}

}  // namespace probe
}  // namespace chorus
