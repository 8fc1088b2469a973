#include "core/cuda/cudnn_api.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/cuda/fill_table.h"
#include "core/cuda/shared_library.h"

namespace chorus {
namespace cuda {

absl::StatusOr<DnnApi> LoadDnnApi(const std::vector<std::string>& folders) {
  std::vector<std::string> last = PythonLibraryFolders({"cudnn"});
  last.push_back("/usr/local/cuda/lib64");
  CHORUS_ASSIGN_OR_RETURN(
      const SharedLibrary library,
      SharedLibrary::Open({"libcudnn.so.9"}, WithLibraryFolders(folders), last));
  DnnApi api;
  std::vector<const char*> missing;
#define CHORUS_CUDNN_FILL(name, symbol, result, parameters) \
  FillField(library, #symbol, &api.name, &missing);
  CHORUS_CUDNN_FUNCTIONS(CHORUS_CUDNN_FILL)
#undef CHORUS_CUDNN_FILL
  CHORUS_RETURN_IF_ERROR(ExpectNoneMissing(library, missing));
  api.path = library.path();
  return api;
}

std::string StatusText(const DnnApi& api, DnnStatus status) {
  const char* const name = api.GetErrorString(status);
  return absl::StrCat(name == nullptr ? "?" : name, " (", static_cast<int>(status), ")");
}

const std::vector<const char*>& DnnSymbols() {
  static const auto& symbols = *new std::vector<const char*>{
#define CHORUS_CUDNN_SYMBOL(name, symbol, result, parameters) #symbol,
      CHORUS_CUDNN_FUNCTIONS(CHORUS_CUDNN_SYMBOL)
#undef CHORUS_CUDNN_SYMBOL
  };
  return symbols;
}

}  // namespace cuda
}  // namespace chorus
