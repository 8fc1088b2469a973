#include "core/cuda/nccl_api.h"

#include "core/base/error.h"
#include "core/cuda/fill_table.h"
#include "core/cuda/shared_library.h"

namespace chorus {
namespace cuda {

absl::StatusOr<NcclApi> LoadNcclApi(const std::vector<std::string>& folders) {
  std::vector<std::string> last = PythonLibraryFolders({"nccl"});
  last.push_back("/usr/local/cuda/lib64");
  CHORUS_ASSIGN_OR_RETURN(const SharedLibrary library,
                          SharedLibrary::Open({"libnccl.so.2"}, WithLibraryFolders(folders), last));
  NcclApi api;
  std::vector<const char*> missing;
#define CHORUS_NCCL_FILL(name, symbol, result, parameters) \
  FillField(library, #symbol, &api.name, &missing);
  CHORUS_NCCL_FUNCTIONS(CHORUS_NCCL_FILL)
#undef CHORUS_NCCL_FILL
  CHORUS_RETURN_IF_ERROR(ExpectNoneMissing(library, missing));
  api.path = library.path();
  return api;
}

const std::vector<const char*>& NcclSymbols() {
  static const auto& symbols = *new std::vector<const char*>{
#define CHORUS_NCCL_SYMBOL(name, symbol, result, parameters) #symbol,
      CHORUS_NCCL_FUNCTIONS(CHORUS_NCCL_SYMBOL)
#undef CHORUS_NCCL_SYMBOL
  };
  return symbols;
}

}  // namespace cuda
}  // namespace chorus
