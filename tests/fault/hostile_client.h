// A client that opens a session as any other and keeps to nothing afterwards.
//
// Threads: one at a time.
#ifndef CHORUS_TESTS_FAULT_HOSTILE_CLIENT_H_
#define CHORUS_TESTS_FAULT_HOSTILE_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace chorus {
namespace fault {

class HostileClient {
 public:
  // "unix:PATH". With the attach protocol it gets a ring; without, it lives by a lease.
  static absl::StatusOr<std::unique_ptr<HostileClient>> Open(const std::string& address,
                                                             bool attached);
  ~HostileClient();

  // Waits until the world is complete. `agree_seconds`: 0: the daemon's.
  absl::Status Join(const std::string& name, int rank, int size, int64_t agree_seconds);

  // Does it, and gives words about it. `kind`:
  //   tail     the ring's tail where it cannot be
  //   bytes    random bytes as frames
  //   skip     a skip record that skips too much, or nothing
  //   size     a frame that states another size than it has
  //   body     a whole frame with a random body
  //   numbers  commands of the right form with names, indices and ranges out of any bound: each
  //            must be answered with an error, and the session goes on
  // All but the last end the session; this returns when the daemon says so, with what it says as
  // "message=". DEADLINE_EXCEEDED: it has not.
  absl::StatusOr<std::string> Attack(const std::string& kind, uint64_t seed);

 private:
  struct Impl;
  explicit HostileClient(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace fault
}  // namespace chorus

#endif  // CHORUS_TESTS_FAULT_HOSTILE_CLIENT_H_
