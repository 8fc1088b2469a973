// Fills a field of a table of functions with a library's symbol of that name.
//
// Threads: any. Ownership: none. Errors: a symbol that is not there is added to a list; said else.
#ifndef CHORUS_CORE_CUDA_FILL_TABLE_H_
#define CHORUS_CORE_CUDA_FILL_TABLE_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"
#include "core/cuda/shared_library.h"

namespace chorus {
namespace cuda {

template <typename Function>
void FillField(const SharedLibrary& library, const char* symbol, Function* field,
               std::vector<const char*>* missing) {
  *field = reinterpret_cast<Function>(library.Find(symbol));
  if (*field == nullptr) missing->push_back(symbol);
}

// FAILED_PRECONDITION kWrongState: the library lacks these.
inline absl::Status ExpectNoneMissing(const SharedLibrary& library,
                                      const std::vector<const char*>& missing) {
  if (missing.empty()) return absl::OkStatus();
  return MakeError(Reason::kWrongState,
                   absl::StrCat(library.path(), " lacks ", absl::StrJoin(missing, ", ")));
}

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_FILL_TABLE_H_
