#include "server/testing/descriptor_passing.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "gtest/gtest.h"

namespace chorus::server {

void LetDescriptorsCome(const std::string& path) {
  constexpr int kPassRights = 83;  // SO_PASSRIGHTS, which the headers of older systems have not
  // The listener is somewhere within the daemon: it is looked for among all descriptors.
  constexpr int kMostDescriptors = 1024;
  int listeners = 0;
  for (int fd = 0; fd < kMostDescriptors; ++fd) {
    sockaddr_un address = {};
    socklen_t size = sizeof(address);
    int listens = 0;
    socklen_t listens_size = sizeof(listens);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
        address.sun_family != AF_UNIX || path != address.sun_path ||
        getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &listens_size) != 0 || listens == 0) {
      continue;
    }
    ++listeners;
    const int passes = 1;
    if (setsockopt(fd, SOL_SOCKET, kPassRights, &passes, sizeof(passes)) != 0) {
      // An older kernel, where they come anyway.
      EXPECT_EQ(errno, ENOPROTOOPT);
    }
  }
  EXPECT_GT(listeners, 0) << path;
}

}  // namespace chorus::server
