// Whole files: mapped to be read, and replaced in one piece.
//
// Threads: any. Ownership: bytes are held by what comes with them. Errors: returned, with the
//   path. NOT_FOUND kUnknownName: no such file; INVALID_ARGUMENT kMalformed: it is no file;
//   FAILED_PRECONDITION kWrongState: the system's own text.
#ifndef CHORUS_CORE_BASE_FILE_H_
#define CHORUS_CORE_BASE_FILE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace chorus {

// Bytes, and what they live in.
struct HeldBytes {
  std::shared_ptr<const void> keep;
  absl::string_view bytes;
};
HeldBytes Hold(std::string bytes);

// The file's bytes, mapped. A process that makes the file shorter meanwhile kills its readers
// (SIGBUS), so files are replaced, not cut.
absl::StatusOr<HeldBytes> MapFile(const std::string& path);

// Writes `parts`, one behind the other, into a file beside `path` ("PATH.new.0", or the next number
// that is free), which takes its place when all of it is on the disk: there is the old file or the
// new one, whatever happens. Of several that write one path at the same time the last one's file is
// there. A process that dies meanwhile leaves its file, which is in nobody's way.
absl::Status ReplaceFile(const std::string& path, const std::vector<absl::string_view>& parts);

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_FILE_H_
