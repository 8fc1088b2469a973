// Memory traffic by a team of threads: every input read once, their sum written to every output.
//
// This is what a reduction cannot do without, done as well as we know how: what is above it in a
// measurement is queues, hand-over and agreement.
#ifndef CHORUS_BENCHMARKS_MEMORY_TRAFFIC_H_
#define CHORUS_BENCHMARKS_MEMORY_TRAFFIC_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace chorus {
namespace bench {

// One way to move the bytes.
struct TrafficVariant {
  int threads = 1;
  bool streaming = false;  // past the caches
  bool prefetch = false;   // by a kernel of its own; otherwise by core's

  std::string Name() const;
};
// One thread and as many as there are cores, with each kernel that this machine runs.
std::vector<TrafficVariant> AllTrafficVariants();

// Float32 arrays of one length, page-aligned; the caller's.
struct Traffic {
  static constexpr int kMostInputs = 16;
  std::vector<const float*> inputs;
  std::vector<float*> outputs;
  int64_t count = 0;
};

// The calling thread and variant.threads - 1 others, which yield while they wait for the next turn,
// so that starting them costs next to nothing. Threads: thread-compatible.
class TrafficTeam {
 public:
  TrafficTeam(Traffic traffic, const TrafficVariant& variant);
  ~TrafficTeam();
  TrafficTeam(const TrafficTeam&) = delete;
  TrafficTeam& operator=(const TrafficTeam&) = delete;

  // Moves everything once.
  void Move();

 private:
  void Work();
  void MoveChunks();

  const Traffic traffic_;
  const TrafficVariant variant_;
  std::atomic<uint64_t> turn_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<size_t> done_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_MEMORY_TRAFFIC_H_
