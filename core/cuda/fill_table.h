// Fills a field of a table of functions with a library's symbol of that name.
//
// Threads: any. Ownership: none. Errors: a symbol that is not there is added to a list.
#ifndef CHORUS_CORE_CUDA_FILL_TABLE_H_
#define CHORUS_CORE_CUDA_FILL_TABLE_H_

#include <vector>

#include "core/cuda/shared_library.h"

namespace chorus {
namespace cuda {

template <typename Function>
void FillField(const SharedLibrary& library, const char* symbol, Function* field,
               std::vector<const char*>* missing) {
  *field = reinterpret_cast<Function>(library.Find(symbol));
  if (*field == nullptr) missing->push_back(symbol);
}

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_FILL_TABLE_H_
