#include "tests/conformance/job.h"

#include <cstdlib>
#include <iostream>
#include <random>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/mutex.h"

namespace chorus {
namespace conformance {
namespace {

// For all ranks of one Run, with the sanitizers on a loaded machine.
constexpr absl::Duration kRunDeadline = absl::Seconds(200);

}  // namespace

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ConformanceInside);

uint64_t TestSeed() {
  static const uint64_t seed = [] {
    uint64_t value = std::random_device()();
    const char* const given = std::getenv("CHORUS_TEST_SEED");
    if (given != nullptr && !absl::SimpleAtoi(given, &value)) {
      std::cerr << "CHORUS_TEST_SEED: expected a number, got \"" << given << "\"\n";
      std::abort();
    }
    std::cout << "CHORUS_TEST_SEED=" << value << std::endl;
    return value;
  }();
  return seed;
}

Job::Job(const ConformanceParam& param, const JobOptions& options) {
  ClusterOptions cluster = options.cluster;
  cluster.devices = options.ranks;
  cluster.seed = TestSeed();
  cluster.share_equal_work = options.share_equal_work;
  absl::StatusOr<std::unique_ptr<Cluster>> opened = param.open(cluster);
  if (!opened.ok()) {
    // Nothing of a test makes sense without it.
    std::cerr << "cannot start " << param.name << ": " << opened.status() << std::endl;
    std::abort();
  }
  cluster_ = *std::move(opened);
  const int sessions = options.sessions < 0 ? options.ranks : options.sessions;
  for (int s = 0; s < sessions; ++s) {
    std::vector<int> devices;
    for (int rank = s; rank < options.ranks; rank += sessions) devices.push_back(rank);
    absl::StatusOr<Session> session = cluster_->Open(devices);
    if (!session.ok()) {
      std::cerr << "cannot open a session: " << session.status() << std::endl;
      std::abort();
    }
    sessions_.push_back(*std::move(session));
  }
  worlds_.resize(static_cast<size_t>(options.ranks));
  Run([&](int rank, World& world) {
    WorldOptions join;
    join.name = "conformance";
    join.rank = rank;
    join.size = options.ranks;
    join.device = rank / sessions;
    join.agree_timeout = options.agree_timeout;
    join.check_call_sites = options.check_call_sites;
    absl::StatusOr<World> joined = session(rank).Join(join);
    if (!joined.ok()) {
      std::cerr << "rank " << rank << " cannot join: " << joined.status() << std::endl;
      std::abort();
    }
    world = *std::move(joined);
  });
}

Job::~Job() {
  worlds_.clear();
  sessions_.clear();
}

void Job::Run(const std::function<void(int rank, World& world)>& body) {
  Mutex mutex;
  CondVar changed;
  int running = size();
  std::vector<bool> done(worlds_.size(), false);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank) {
    threads.emplace_back([&, rank] {
      body(rank, world(rank));
      MutexLock lock(&mutex);
      done[static_cast<size_t>(rank)] = true;
      if (--running == 0) changed.SignalAll();
    });
  }
  {
    const absl::Time deadline = absl::Now() + kRunDeadline;
    MutexLock lock(&mutex);
    while (running > 0) {
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) {
        for (int rank = 0; rank < size(); ++rank) {
          if (!done[static_cast<size_t>(rank)]) {
            std::cerr << "rank " << rank << " has not ended after "
                      << absl::FormatDuration(kRunDeadline) << std::endl;
          }
        }
        std::abort();
      }
      changed.WaitFor(&mutex, left);
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace conformance
}  // namespace chorus
