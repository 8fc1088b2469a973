// What this process has taken of the kernel, to see that nothing leaks.
//
// Threads: any; the process must do nothing else meanwhile. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_TESTING_PROCESS_RESOURCES_H_
#define CHORUS_CORE_RUNTIME_TESTING_PROCESS_RESOURCES_H_

#include <fcntl.h>

#include <fstream>
#include <string>

#include "absl/strings/match.h"

namespace chorus {
namespace testing {

// Descriptors that are open, of the first 1024.
inline int OpenDescriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

// Arenas that are mapped, a file once for each mapping.
inline int MappedArenas() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += absl::StrContains(line, "memfd:chorus");
  }
  return count;
}

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_TESTING_PROCESS_RESOURCES_H_
