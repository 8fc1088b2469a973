// IDX files, as MNIST's: big-endian numbers of one type in some dimensions, gzipped (in one
// member or several) or not.
//
//   0, 0, type, number of dimensions; each dimension in 4 bytes; the elements, row-major
//
// Types: 8 u8, 9 i8, 11 i16, 12 i32, 13 f32, 14 f64. A file is not trusted: no more is allocated
// for it than it can have, and what does not fit exactly is refused.
//
// Threads: any. Ownership: a tensor holds its elements (of u8 and i8, not gzipped: the mapped
//   file). Errors: returned, with the path. NOT_FOUND kUnknownName: no such file. INVALID_ARGUMENT
//   kMalformed: of another format, cut or damaged. UNIMPLEMENTED kUnsupported: another type.
#ifndef CHORUS_CLIENT_DATA_IDX_H_
#define CHORUS_CLIENT_DATA_IDX_H_

#include <string>

#include "absl/status/statusor.h"
#include "chorus/parallel/host_tensor.h"

namespace chorus {
namespace data {

absl::StatusOr<parallel::HostTensor> ReadIdx(const std::string& path);
// Of bytes in memory; errors call them `path`.
absl::StatusOr<parallel::HostTensor> ParseIdx(const std::string& path, std::string bytes);

}  // namespace data
}  // namespace chorus

#endif  // CHORUS_CLIENT_DATA_IDX_H_
