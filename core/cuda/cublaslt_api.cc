#include "core/cuda/cublaslt_api.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/cuda/fill_table.h"
#include "core/cuda/shared_library.h"

namespace chorus {
namespace cuda {

absl::StatusOr<BlasApi> LoadBlasApi(const std::vector<std::string>& folders) {
  std::vector<std::string> last = PythonLibraryFolders({"cu13", "cublas"});
  last.push_back("/usr/local/cuda/lib64");
  CHORUS_ASSIGN_OR_RETURN(const SharedLibrary library,
                          SharedLibrary::Open({"libcublasLt.so.13", "libcublasLt.so.12"},
                                              WithLibraryFolders(folders), last));
  BlasApi api;
  std::vector<const char*> missing;
#define CHORUS_CUBLASLT_FILL(name, symbol, result, parameters) \
  FillField(library, #symbol, &api.name, &missing);
  CHORUS_CUBLASLT_FUNCTIONS(CHORUS_CUBLASLT_FILL)
#undef CHORUS_CUBLASLT_FILL
  CHORUS_RETURN_IF_ERROR(ExpectNoneMissing(library, missing));
  api.path = library.path();
  return api;
}

int64_t ElementBytes(BlasType type) {
  return type == BlasType::kF64 ? 8 : type == BlasType::kF32 ? 4 : 2;
}

const char* NameOf(BlasType type) {
  switch (type) {
    case BlasType::kF32:
      return "f32";
    case BlasType::kF64:
      return "f64";
    case BlasType::kF16:
      return "f16";
    case BlasType::kBF16:
      return "bf16";
  }
  return "?";
}

std::string StatusText(const BlasApi& api, BlasStatus status) {
  const char* const name = api.GetStatusName(status);
  return absl::StrCat(name == nullptr ? "?" : name, " (", static_cast<int>(status), ")");
}

const std::vector<const char*>& BlasSymbols() {
  static const auto& symbols = *new std::vector<const char*>{
#define CHORUS_CUBLASLT_SYMBOL(name, symbol, result, parameters) #symbol,
      CHORUS_CUBLASLT_FUNCTIONS(CHORUS_CUBLASLT_SYMBOL)
#undef CHORUS_CUBLASLT_SYMBOL
  };
  return symbols;
}

}  // namespace cuda
}  // namespace chorus
