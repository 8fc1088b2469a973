// What kernels that go through oneDNN have in common.
//
// Threads: any. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_HOST_ONEDNN_H_
#define CHORUS_CORE_OPS_HOST_ONEDNN_H_

// Of the OpenMP library that oneDNN is built with; clang has a header of another one.
extern "C" void omp_set_num_threads(int);

namespace chorus {

// One thread for what oneDNN does when this thread calls it, from now on.
inline void UseOneThread() {
  // The setting is the thread's own.
  thread_local const bool one_thread = [] {
    omp_set_num_threads(1);
    return true;
  }();
  static_cast<void>(one_thread);
}

// oneDNN writes the code of its sgemm in the first call, by which some of its convolutions go, too:
// that takes 30 ms and half a megabyte, better where a kernel is made than in a run. What is
// prepared once stays so.
void PrepareSgemm();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_HOST_ONEDNN_H_
