// Libraries that are looked for when the program runs: the driver, NCCL, cuBLASLt, cuDNN. Nothing
// of Chorus is linked against them, so that it starts where they are not.
//
// Threads: any; a SharedLibrary does not change. Ownership: a library stays loaded until the
// process ends, for none of these can be unloaded safely. Errors: FAILED_PRECONDITION kWrongState,
// in one line: which names were looked for, and what the loader says of the first.
#ifndef CHORUS_CORE_CUDA_SHARED_LIBRARY_H_
#define CHORUS_CORE_CUDA_SHARED_LIBRARY_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace chorus {
namespace cuda {

class SharedLibrary {
 public:
  // The first of `names` ("libnccl.so.2") that can be loaded: for each, from `first`, then where
  // the system's loader looks (LD_LIBRARY_PATH too), then from `last`. Folders that are not there
  // are passed over.
  static absl::StatusOr<SharedLibrary> Open(const std::vector<std::string>& names,
                                            const std::vector<std::string>& first,
                                            const std::vector<std::string>& last);

  // Null: it has no such symbol.
  void* Find(const char* symbol) const;
  // The file it was loaded from; the name that was asked for, where the loader does not say.
  const std::string& path() const { return path_; }

 private:
  SharedLibrary(void* handle, std::string path) : handle_(handle), path_(std::move(path)) {}
  void* handle_ = nullptr;
  std::string path_;
};

// `folders`, and behind them those that a user names in the environment: CHORUS_CUDA_LIBRARIES=A:B.
std::vector<std::string> WithLibraryFolders(std::vector<std::string> folders);

// Where Python's packages bring NVIDIA's libraries: nvidia/PART/lib for each of `parts` ("cu13"),
// in the site-packages of the interpreters that PATH, VIRTUAL_ENV, CONDA_PREFIX and PYTHONPATH lead
// to, and of the usual prefixes. Only folders that are there.
std::vector<std::string> PythonLibraryFolders(const std::vector<std::string>& parts);

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_SHARED_LIBRARY_H_
