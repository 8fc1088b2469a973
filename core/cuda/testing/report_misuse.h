// What the stand-in driver does about a program that the real one would let corrupt memory.
//
// Threads: any. Ownership: none. Errors: it does not return.
#ifndef CHORUS_CORE_CUDA_TESTING_REPORT_MISUSE_H_
#define CHORUS_CORE_CUDA_TESTING_REPORT_MISUSE_H_

#include <cstdio>
#include <cstdlib>
#include <string>

namespace chorus {
namespace cuda {

[[noreturn]] inline void ReportMisuse(const std::string& what) {
  std::fprintf(stderr, "fake driver: %s\n", what.c_str());
  std::abort();
}

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_TESTING_REPORT_MISUSE_H_
