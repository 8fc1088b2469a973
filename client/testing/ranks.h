// Several ranks of one world, in one thread or in one each.
//
// Threads: one; Run has others, and waits for them. Ownership: a world is its caller's; Ranks has
// its sessions. Errors: fail the test.
#ifndef CHORUS_CLIENT_TESTING_RANKS_H_
#define CHORUS_CLIENT_TESTING_RANKS_H_

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "chorus/chorus.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/values.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {

// All ranks of world `name` as members of one session, each on the device whose index is its rank.
inline std::vector<World> JoinAll(const Session& session, const std::string& name, int size) {
  std::vector<World> worlds;
  for (int r = 0; r < size; ++r) {
    WorldOptions options;
    options.name = name;
    options.rank = r;
    options.size = size;
    options.device = r;
    absl::StatusOr<World> world = session.Join(options);
    EXPECT_TRUE(world.ok()) << world.status();
    worlds.push_back(*std::move(world));
  }
  return worlds;
}

// Each with a session of its own. Ownership: it has the sessions; the daemon outlives it.
struct Ranks {
  explicit Ranks(int size, FakeDaemon* daemon, Timeout wait_timeout = std::chrono::seconds(20)) {
    for (int r = 0; r < size; ++r) {
      sessions.push_back(daemon->Open(1, wait_timeout));
      WorldOptions options;
      options.name = "job";
      options.rank = r;
      options.size = size;
      absl::StatusOr<World> world = sessions.back().Join(options);
      EXPECT_TRUE(world.ok()) << world.status();
      worlds.push_back(*std::move(world));
    }
  }
  int size() const { return static_cast<int>(worlds.size()); }
  // The function of each rank, each in a thread of its own.
  void Run(const std::function<void(const World& world, int rank)>& function) const {
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] { function(worlds[static_cast<size_t>(r)], r); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<Session> sessions;
  std::vector<World> worlds;
};

// Ranks of a world of their own.
inline void OnRanks(int size, const std::function<void(const World& world, int rank)>& function) {
  FakeDaemon daemon;
  Ranks(size, &daemon).Run(function);
}

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CLIENT_TESTING_RANKS_H_
