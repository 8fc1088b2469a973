// One process that makes the daemon hold, or compute, as much as it can in one way.
//
// It speaks the daemon's protocols itself, as the SDK would never. It goes on until it is refused
// or has done what is plainly too much, keeps all that it got, and says what became of it.
//
// Threads: one at a time.
#ifndef CHORUS_TESTS_HOSTILE_ATTACKER_H_
#define CHORUS_TESTS_HOSTILE_ATTACKER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace chorus {
namespace hostile {

class Attacker;

// What it was told at last, and how often it was not refused before.
struct Report {
  absl::Status refused;  // OK: it was never refused
  int64_t done = 0;
};

using Attack = std::function<absl::StatusOr<Report>(Attacker* attacker)>;
// By name, which says what is asked for.
const std::map<std::string, Attack>& Attacks();

class Attacker {
 public:
  // A session with a ring. `address`: "unix:PATH".
  static absl::StatusOr<std::unique_ptr<Attacker>> Open(const std::string& address);
  ~Attacker();

  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  explicit Attacker(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace hostile
}  // namespace chorus

#endif  // CHORUS_TESTS_HOSTILE_ATTACKER_H_
