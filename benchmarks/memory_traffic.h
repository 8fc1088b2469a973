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

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace chorus {
namespace bench {

// One way to move the bytes.
struct TrafficVariant {
  int threads = 1;
  bool streaming = false;  // past the caches
  bool prefetch = false;   // by a kernel of its own; otherwise by core's

  std::string Name() const;
  // For Task::text.
  std::string Encode() const;
  static TrafficVariant Decode(absl::string_view text);
};
// One thread and as many as there are cores, with each kernel that this machine runs.
std::vector<TrafficVariant> AllTrafficVariants();

// Float32 arrays of one length, page-aligned; the caller's.
struct Traffic {
  static constexpr int kMostInputs = 16;
  std::vector<const float*> inputs;
  std::vector<float*> outputs;
  int64_t count = 0;
  bool in_turn = false;  // one output a move, each in its turn; else all of them
};

// What is moved: a memfd's memory, like the daemon's; inputs with their patterns.
class TrafficMemory {
 public:
  ~TrafficMemory() { Release(); }
  TrafficMemory() = default;
  TrafficMemory(const TrafficMemory&) = delete;
  TrafficMemory& operator=(const TrafficMemory&) = delete;

  // Arrays of `bytes` each, the outputs' contents wrong; what was there is used again where it
  // fits.
  absl::Status Reserve(int inputs, int outputs, int64_t bytes);
  void Release();
  Traffic AsTraffic() const;
  // DATA_LOSS unless every output is the sum of the inputs.
  absl::Status CheckOutputs() const;

 private:
  float* Part(int k) const;
  int64_t count() const { return bytes_ / static_cast<int64_t>(sizeof(float)); }

  char* data_ = nullptr;
  int64_t total_ = 0;
  int inputs_ = 0;
  int outputs_ = 0;
  int64_t bytes_ = 0;
};

// The calling thread and variant.threads - 1 others, which yield while they wait for the next turn,
// so that starting them costs next to nothing. Threads: thread-compatible.
class TrafficTeam {
 public:
  TrafficTeam(Traffic traffic, const TrafficVariant& variant);
  ~TrafficTeam();
  TrafficTeam(const TrafficTeam&) = delete;
  TrafficTeam& operator=(const TrafficTeam&) = delete;

  // Moves everything once: to all outputs, or to the next one.
  void Move();

 private:
  void Work();
  void MoveChunks();

  Traffic traffic_;  // what one move moves
  const std::vector<float*> outputs_;
  size_t moves_ = 0;
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
