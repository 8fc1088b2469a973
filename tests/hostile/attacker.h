// One process that makes the daemon hold, or compute, as much as it can in one way.
//
// It speaks the daemon's protocols itself, as the SDK would never. It goes on until it is refused
// or has done what is plainly too much, keeps all that it got, and says what became of it.
//
// Threads: one at a time.
#ifndef CHORUS_TESTS_HOSTILE_ATTACKER_H_
#define CHORUS_TESTS_HOSTILE_ATTACKER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tests/hostile/report.h"

namespace chorus {
namespace hostile {

class Attacker;

// By its name, which says what is asked for: by an attached client, or by gRPC alone
// (rpc_attacks.h).
bool IsAttack(const std::string& name);
absl::StatusOr<Report> Attack(const std::string& name, Attacker* attacker);

class Attacker {
 public:
  // A session for this attack, attached where the attack or the user needs it. `address`:
  // "unix:PATH".
  static absl::StatusOr<std::unique_ptr<Attacker>> Open(const std::string& address,
                                                        const std::string& attack);
  ~Attacker();
  // Its session and those that it has opened. Without it they stay for as long as this process
  // lives, and a while.
  void CloseSessions();

  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  explicit Attacker(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace hostile
}  // namespace chorus

#endif  // CHORUS_TESTS_HOSTILE_ATTACKER_H_
