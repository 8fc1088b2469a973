#include "tests/conformance/messages.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/time/clock.h"

namespace chorus {
namespace conformance {
namespace {

bool WriteAll(int fd, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

bool ReadBytes(int fd, size_t size, absl::Time deadline, std::string* bytes) {
  bytes->resize(size);
  size_t done = 0;
  while (done < size) {
    const absl::Duration left = deadline - absl::Now();
    pollfd poll_fd{fd, POLLIN, 0};
    const int timeout =
        deadline == absl::InfiniteFuture()
            ? -1
            : static_cast<int>(std::max<int64_t>(0, absl::ToInt64Milliseconds(left)));
    if (poll(&poll_fd, 1, timeout) <= 0) return false;
    const ssize_t n = read(fd, &(*bytes)[done], size - done);
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

bool WriteMessage(int fd, const std::string& text) {
  const uint64_t size = text.size();
  std::string message(reinterpret_cast<const char*>(&size), sizeof(size));
  return WriteAll(fd, message + text);
}

bool ReadMessage(int fd, absl::Time deadline, std::string* text) {
  std::string head;
  if (!ReadBytes(fd, sizeof(uint64_t), deadline, &head)) return false;
  uint64_t size = 0;
  std::memcpy(&size, head.data(), sizeof(size));
  return size < (1u << 30) && ReadBytes(fd, size, deadline, text);
}

}  // namespace conformance
}  // namespace chorus
