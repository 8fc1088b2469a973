// The ranks that run vectors: threads of this process, each with a session of its own; or one
// thread with a session of several devices.
#ifndef CHORUS_TESTS_VECTORS_TRAINERS_H_
#define CHORUS_TESTS_VECTORS_TRAINERS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "chorus/chorus.h"
#include "tests/vectors/check.h"
#include "tests/vectors/vector.h"

namespace chorus {
namespace vectors {

struct TrainerOptions {
  // A session with these of the daemon's devices. Called by several threads at a time. Its waits
  // should end after twice the patience.
  std::function<absl::StatusOr<Session>(const std::vector<int>& devices)> open;
  // What the daemon waits for, in one line.
  std::function<std::string()> pending;
  // How late a rank may be, and how long a launched collective may take. What still runs after
  // three times that is given up.
  absl::Duration patience = absl::Seconds(20);
};

// Threads: the one that made it.
class Trainers {
 public:
  explicit Trainers(TrainerOptions options);
  ~Trainers();

  // What all ranks get. Sessions, worlds and groups are kept for the next run; after an error they
  // are new. DEADLINE_EXCEEDED: a rank hangs; its thread is left behind.
  absl::StatusOr<std::vector<RankResults>> Run(const Vector& v, Pass pass);

 private:
  class Rank;
  class Process;

  const TrainerOptions options_;
  std::string name_;  // of the worlds
  int lives_ = 0;
  // Shared with threads that hang.
  std::vector<std::shared_ptr<Rank>> ranks_;  // by world rank
  std::shared_ptr<Process> process_;
};

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_TRAINERS_H_
