// Calls of local ops with the sizes that trainers have, for benchmarks: what is measured, once for
// all that measure it. tools/gpu_torch.py reads them as a program wrote them, and has PyTorch's
// form of each.
//
// Threads: any. Ownership: plain values. Errors: a row that its ops do not take ends the process.
#ifndef CHORUS_CORE_OPS_TESTING_OP_ROWS_H_
#define CHORUS_CORE_OPS_TESTING_OP_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/optional.h"
#include "core/ops/node_spec.h"
#include "core/tensor/type.h"

namespace chorus {
namespace testing {

struct OpRow {
  struct Input {
    TensorType type;
    int64_t below = 0;  // of integers and bool: drawn from 0 to below - 1; floats are normal
    // Of a 0-dim one: not drawn but this, and no matter of the row's that another library is told.
    absl::optional<double> constant;
  };
  struct Step {
    std::string op;
    std::vector<size_t> operands;  // of the inputs, behind which each step's result stands
    Attributes attributes;
    bool prepares = false;  // done once, before anything is measured
    TensorType output;
  };

  std::string family;  // the folder of the op
  std::string op;      // the step's; of several steps, what they are together
  std::vector<Input> inputs;
  std::vector<Step> steps;
  Attributes attributes;  // of the whole: the last step's, where nothing else is said
  std::string note;       // what the shapes do not show
  // What has to be read and written at least, as if one kernel did the steps; products and sums.
  int64_t bytes = 0;
  int64_t flops = 0;  // 0: its rate is that of its bytes

  DType dtype() const;        // the first input's; without one, the result's
  std::string shape() const;  // "4096x4096, 4096x4096": of the inputs; without any, of the result
  std::string name() const;   // "matmul f32 4096x4096, 4096x4096"
  // The type of what a step takes or gives.
  const TensorType& TypeOf(size_t value) const;
};

// Families one after the other. With `smoke` no dimension is larger than 8: the same rows, over at
// once.
std::vector<OpRow> OpRows(bool smoke);

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_TESTING_OP_ROWS_H_
