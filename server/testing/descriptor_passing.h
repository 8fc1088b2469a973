// A daemon whose clients may send it descriptors, on any kernel.
//
// It takes none from Linux 6.16 on (RefuseDescriptors, server/client_socket.h). Before that they
// come whether anybody wants them or not, and a daemon has to be rid of them without waiting: what
// tests that, on whatever kernel it runs, lets them come first.
//
// Threads: any. Ownership: none. Errors: fail the test.
#ifndef CHORUS_SERVER_TESTING_DESCRIPTOR_PASSING_H_
#define CHORUS_SERVER_TESTING_DESCRIPTOR_PASSING_H_

#include <string>

namespace chorus::server {

// Whoever connects from now on to `path`, a Unix socket on which this process listens, may send
// descriptors.
void LetDescriptorsCome(const std::string& path);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_TESTING_DESCRIPTOR_PASSING_H_
