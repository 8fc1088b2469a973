#include "tools/gpu_probe/chains.h"

#include <initializer_list>

namespace chorus {
namespace probe {

ChainArgs ArithmeticChain(int ops) {
  ChainArgs args;
  args.inputs = 2;
  args.outputs = 1;
  args.output_slot[0] = 0;
  args.op[args.ops++] = {ChainCode::kLoad, 0, 0};
  for (int n = 0; n < ops; ++n) {
    switch (n % 4) {
      case 0:
        args.op[args.ops++] = {ChainCode::kMulNumber, 0, 0.75f + 0.125f * static_cast<float>(n)};
        break;
      case 1:
        args.op[args.ops++] = {ChainCode::kAdd, 1, 0};
        break;
      case 2:
        args.op[args.ops++] = {n % 8 == 2 ? ChainCode::kRelu : ChainCode::kMul, 1, 0};
        break;
      default:
        args.op[args.ops++] = {ChainCode::kAddNumber, 0, 0.3f * static_cast<float>(n)};
        break;
    }
  }
  args.op[args.ops++] = {ChainCode::kStore, 0, 0};
  return args;
}

ChainArgs SgdChain(float decay, float minus_rate) {
  ChainArgs args;
  args.inputs = 3;
  args.outputs = 2;
  args.output_slot[0] = 0;
  args.output_slot[1] = 2;
  for (const ChainOp op :
       {ChainOp{ChainCode::kLoad, 2, 0}, ChainOp{ChainCode::kMulNumber, 0, decay},
        ChainOp{ChainCode::kAdd, 1, 0}, ChainOp{ChainCode::kStore, 2, 0},
        ChainOp{ChainCode::kMulNumber, 0, minus_rate}, ChainOp{ChainCode::kAdd, 0, 0},
        ChainOp{ChainCode::kStore, 0, 0}}) {
    args.op[args.ops++] = op;
  }
  return args;
}

}  // namespace probe
}  // namespace chorus
