// The ranks that run vectors: threads of this process, each with a session of its own.
#ifndef CHORUS_TESTS_VECTORS_TRAINERS_H_
#define CHORUS_TESTS_VECTORS_TRAINERS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/chorus.h"
#include "tests/vectors/check.h"
#include "tests/vectors/vector.h"

namespace chorus {
namespace vectors {

struct TrainerOptions {
  std::string address;
  Transport transport = Transport::kRing;
  // How late a rank may be, and how long a launched collective may take. Waits of a session end
  // after twice that, and what then still runs is given up after three times that.
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

  const TrainerOptions options_;
  std::string name_;  // of the worlds
  int lives_ = 0;
  // By world rank; shared with threads that hang.
  std::vector<std::shared_ptr<Rank>> ranks_;
};

// What the daemon waits for, in one line.
std::string PendingText(const std::string& address);

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_TRAINERS_H_
