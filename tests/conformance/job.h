// Ranks for tests: a cluster, sessions, a world, and a thread for each rank.
#ifndef CHORUS_TESTS_CONFORMANCE_JOB_H_
#define CHORUS_TESTS_CONFORMANCE_JOB_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "gtest/gtest.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/conformance.h"

namespace chorus {
namespace conformance {

// The seed of this run, printed once.
uint64_t TestSeed();

struct JobOptions {
  int ranks = 2;
  int sessions = -1;  // ranks are dealt to so many sessions in turn; -1: one each
  Timeout agree_timeout = Timeout::zero();  // 0: the daemon's
  bool share_equal_work = true;
  CheckCallSites check_call_sites = CheckCallSites::kOff;
  // Of its cluster (cluster.h), but for devices, seed and share_equal_work.
  ClusterOptions cluster;
};

class Job {
 public:
  Job(const ConformanceParam& param, const JobOptions& options);
  Job(const ConformanceParam& param, int ranks) : Job(param, Ranks(ranks)) {}
  ~Job();

  int size() const { return static_cast<int>(worlds_.size()); }
  World& world(int rank) { return worlds_[static_cast<size_t>(rank)]; }
  const Session& session(int rank) const {
    return sessions_[static_cast<size_t>(rank) % sessions_.size()];
  }
  Cluster& cluster() { return *cluster_; }

  // Calls `body` for each rank, each on a thread of its own, and waits for them all. Threads that
  // do not end in time end the process: they hold what the test would destroy.
  void Run(const std::function<void(int rank, World& world)>& body);

 private:
  static JobOptions Ranks(int ranks) {
    JobOptions options;
    options.ranks = ranks;
    return options;
  }

  std::unique_ptr<Cluster> cluster_;
  std::vector<Session> sessions_;
  std::vector<World> worlds_;
};

// The elements of a tensor; a failure of the test and {} when they cannot be had.
template <typename T>
std::vector<T> Values(const Tensor& tensor) {
  absl::StatusOr<std::vector<T>> values = tensor.Read<T>();
  EXPECT_TRUE(values.ok()) << values.status();
  return values.ok() ? *std::move(values) : std::vector<T>();
}

// What rank `rank` has at index `i` of its `salt`-th tensor: small whole numbers that differ by all
// three, so that a swapped chunk or a missing rank shows.
template <typename T>
T Element(int rank, int64_t i, int64_t salt = 0) {
  return static_cast<T>(((rank + 1) * 37 + i * 11 + salt * 29 + i / 101) % 211 - 105);
}

template <typename T>
std::vector<T> Elements(int rank, int64_t size, int64_t salt = 0) {
  std::vector<T> elements(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    elements[static_cast<size_t>(i)] = Element<T>(rank, i, salt);
  }
  return elements;
}

template <typename T>
Tensor Upload(const World& world, const std::vector<T>& values) {
  return FromHost<T>(world, values, {static_cast<int64_t>(values.size())});
}

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_JOB_H_
