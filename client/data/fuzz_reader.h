// What the fuzz targets of readers ask of what was read.
//
// Threads: any. Ownership: none. Errors: ends the process where something does not hold.
#ifndef CHORUS_CLIENT_DATA_FUZZ_READER_H_
#define CHORUS_CLIENT_DATA_FUZZ_READER_H_

#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "chorus/parallel/host_tensor.h"
#include "core/base/error.h"

namespace chorus {
namespace data {

// The bytes end where they end: a reader that goes beyond is found.
inline std::string FuzzBytes(const uint8_t* data, size_t size) {
  return std::string(reinterpret_cast<const char*>(data), size);
}

inline void CheckArray(const parallel::HostTensor& array) {
  int64_t bytes = DTypeBytes(array.dtype());
  for (const int64_t dim : array.shape()) bytes *= dim;
  if (!array.status().ok() || bytes < 0) std::abort();
  int sum = 0;
  for (int64_t i = 0; i < bytes; ++i) sum += array.bytes()[i];
  volatile int used = sum;
  (void)used;
}

inline void CheckRefused(const absl::Status& status) {
  const Reason reason = ErrorOf(status).reason;
  if (reason != Reason::kMalformed && reason != Reason::kUnsupported) std::abort();
}

}  // namespace data
}  // namespace chorus

#endif  // CHORUS_CLIENT_DATA_FUZZ_READER_H_
