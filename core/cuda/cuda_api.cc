#include "core/cuda/cuda_api.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"
#include "core/cuda/fill_table.h"
#include "core/cuda/shared_library.h"

namespace chorus {
namespace cuda {
namespace {

// Where installers and container runtimes put the driver's library, beyond the loader's own list.
const char* const kDriverFolders[] = {"/usr/local/nvidia/lib64", "/usr/local/nvidia/lib",
                                      "/usr/lib/x86_64-linux-gnu", "/usr/lib64",
                                      "/usr/lib/wsl/lib"};

}  // namespace

absl::StatusOr<Api> LoadApi(const std::vector<std::string>& folders) {
  CHORUS_ASSIGN_OR_RETURN(
      const SharedLibrary library,
      SharedLibrary::Open({"libcuda.so.1"}, folders,
                          {std::begin(kDriverFolders), std::end(kDriverFolders)}));
  Api api;
  std::vector<const char*> missing;
#define CHORUS_CUDA_FILL(name, symbol, parameters) FillField(library, #symbol, &api.name, &missing);
  CHORUS_CUDA_FUNCTIONS(CHORUS_CUDA_FILL)
#undef CHORUS_CUDA_FILL
  if (missing.empty()) return api;
  return MakeError(Reason::kWrongState,
                   absl::StrCat(library.path(), " is too old: it lacks ",
                                absl::StrJoin(missing, ", "), "; a driver for CUDA 12.4 has all"));
}

const std::vector<const char*>& ApiSymbols() {
  static const auto& symbols = *new std::vector<const char*>{
#define CHORUS_CUDA_SYMBOL(name, symbol, parameters) #symbol,
      CHORUS_CUDA_FUNCTIONS(CHORUS_CUDA_SYMBOL)
#undef CHORUS_CUDA_SYMBOL
  };
  return symbols;
}

std::string ResultText(const Api& api, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.GetErrorName(result, &name) != Result::kSuccess || name == nullptr) name = "CUDA_ERROR";
  if (api.GetErrorString(result, &text) != Result::kSuccess || text == nullptr) text = "unknown";
  return absl::StrCat(name, " (", static_cast<int>(result), "), ", text);
}

absl::Status ToStatus(const Api& api, Result result, const char* call) {
  if (result == Result::kSuccess) return absl::OkStatus();
  const Reason reason = result == Result::kOutOfMemory ? Reason::kOutOfMemory : Reason::kExecFailed;
  return MakeError(reason, absl::StrCat(call, ": ", ResultText(api, result)));
}

}  // namespace cuda
}  // namespace chorus
