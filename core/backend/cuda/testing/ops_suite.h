// Times the local ops' kernels on the GPU of tests: the rows of core/ops/testing/op_rows.h.
//
// Threads: one. Ownership: nothing is kept. Errors: end the process, in one line.
#ifndef CHORUS_CORE_BACKEND_CUDA_TESTING_OPS_SUITE_H_
#define CHORUS_CORE_BACKEND_CUDA_TESTING_OPS_SUITE_H_

#include <string>

namespace chorus {

struct OpsSuiteOptions {
  bool smoke = false;  // tiny tensors, each row once: that it runs, not how long it takes
  // The rows as lines of JSON, which tools/gpu_torch.py reads; "": nowhere.
  std::string out;
  double limit_seconds = 0;  // beyond it rows are left out, and said to be; 0: there is none
};

// To standard output, as a table.
void RunOpsSuite(const OpsSuiteOptions& options);
// The rows as RunOpsSuite writes them to `out`, but with nothing measured: to standard output.
void ListOpsSuite();

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_TESTING_OPS_SUITE_H_
