// Elements of a tensor as a text for readers.
//
// Threads: any; a pure function. Ownership: the text is a copy. Errors: none.
#ifndef CHORUS_CLIENT_INTERNAL_VALUES_TEXT_H_
#define CHORUS_CLIENT_INTERNAL_VALUES_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor/type.h"

namespace chorus {
namespace internal {

// A bracket for each dimension, "[[1, 2],\n [3, 4]]"; of no dimensions the element alone; of no
// elements "[]". A floating-point number is as short as it can be told from others of f64, or of
// f32 for it and the half types. Of more than 1,000 elements the middle of each dimension that has
// more than 6 is "...". `bytes` are the elements, row-major, of a dtype that is supported.
std::string ValuesText(DType dtype, const std::vector<int64_t>& shape, const char* bytes);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_VALUES_TEXT_H_
