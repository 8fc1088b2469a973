// NumPy's files: .npy, an array, and .npz, a zip archive of them (numpy.save, savez,
// savez_compressed). https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
//
// Versions 1 to 3, in C's and Fortran's order, of f16, f32, f64, i8, i16, i32, i64, u8 and bool,
// little-endian. A file is not trusted: no more is allocated for it than it can have, and what does
// not fit exactly is refused. Nothing of it is executed: pickled objects are refused too.
//
// Threads: any. Ownership: a tensor holds its elements, an array in C's order as the mapped file.
// Errors: returned, with the path and the member. NOT_FOUND kUnknownName: no such file.
//   INVALID_ARGUMENT kMalformed: of another format, cut or damaged. UNIMPLEMENTED kUnsupported:
//   sound, but of a dtype, version or compression that is not read here.
#ifndef CHORUS_CLIENT_DATA_NUMPY_H_
#define CHORUS_CLIENT_DATA_NUMPY_H_

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "chorus/parallel/host_tensor.h"

namespace chorus {
namespace data {

absl::StatusOr<parallel::HostTensor> ReadNpy(const std::string& path);
// By name, without ".npy": all of an archive's arrays.
absl::StatusOr<std::map<std::string, parallel::HostTensor>> ReadNpz(const std::string& path);

// The same of bytes in memory; errors call them `path`.
absl::StatusOr<parallel::HostTensor> ParseNpy(const std::string& path, std::string bytes);
absl::StatusOr<std::map<std::string, parallel::HostTensor>> ParseNpz(const std::string& path,
                                                                     std::string bytes);

}  // namespace data
}  // namespace chorus

#endif  // CHORUS_CLIENT_DATA_NUMPY_H_
