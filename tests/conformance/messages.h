// Messages between a test and its processes, over pipes: a length of eight bytes and so many bytes.
#ifndef CHORUS_TESTS_CONFORMANCE_MESSAGES_H_
#define CHORUS_TESTS_CONFORMANCE_MESSAGES_H_

#include <string>

#include "absl/time/time.h"

namespace chorus {
namespace conformance {

// False: the other end has gone.
bool WriteMessage(int fd, const std::string& text);
// False: it has gone, or nothing has come until `deadline`.
bool ReadMessage(int fd, absl::Time deadline, std::string* text);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_MESSAGES_H_
