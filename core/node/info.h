// What a node tells of itself, its sessions, worlds and devices.
//
// Threads: plain data. Ownership: copies. Errors: none.
#ifndef CHORUS_CORE_NODE_INFO_H_
#define CHORUS_CORE_NODE_INFO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/collective/decisions.h"
#include "core/collective/instance.h"

namespace chorus::node {

enum class SessionState { kActive, kDetached, kDead };

// Sessions are counted from 1, in a node's life; what stands for one outside has so many bits for
// that. (At ten thousand a second they are used up after fourteen years.)
inline constexpr int kSessionIdBits = 42;
inline constexpr int64_t kMaxSessionId = (int64_t{1} << kSessionIdBits) - 1;

struct SessionInfo {
  SessionId id;
  std::string tenant;
  std::string label;
  int32_t pid = -1;
  bool attached = false;
  SessionState state = SessionState::kActive;
  std::vector<DeviceIndex> devices;
  int64_t live_tensors = 0;
  int64_t live_graphs = 0;
  int64_t staging_bytes = 0;
  int64_t commands = 0;       // taken from the log so far
  absl::Duration lease_left;  // infinite when attached
};

struct WorldInfo {
  struct Member {
    Rank rank;
    SessionId session;
    DeviceIndex device;
    int32_t pid = -1;
    bool alive = true;  // false: dead or left
    bool joined = false;
    CallPosition next;  // its next call of the world's group, as counted here
  };
  WorldId id;
  std::string tenant;
  std::string name;
  int32_t size = 0;
  Epoch epoch;
  std::vector<Member> members;
  std::vector<std::vector<Rank>> groups;  // by GroupId
  absl::Duration waiting;                 // while members are missing: since the first joined
  absl::Duration agree_timeout;
};

struct DeviceInfo {
  DeviceIndex index;
  std::string name;  // "host:0"
  // What it may hold: of devices that share a memory (the host's do), an equal part of its limit.
  int64_t memory_bytes = 0;
  int32_t cores = 0;  // that compute for it; devices of the host share them
  int64_t launches = 0;
  int32_t sessions = 0;
};

// How bytes took their way, summed since the start: shows that nothing fell back silently.
struct PathCounters {
  int64_t aliased_bytes = 0;   // results that moved nothing
  int64_t reduced_bytes = 0;   // results written by reductions
  int64_t copied_bytes = 0;    // uploads, frozen inputs, pieces moved by collectives
  int64_t streamed_bytes = 0;  // over gRPC
  int64_t donated_bytes = 0;   // results that took over donated inputs
  int64_t shared_bytes = 0;    // results of work that another rank did for this one as well
};

struct NodeStats {
  int64_t memory_limit_bytes = 0;
  int64_t memory_used_bytes = 0;
  // The part of these that is pages of arenas, and of ended sessions' memory, which are gone here
  // and which clients still hold.
  int64_t client_held_bytes = 0;
  // The part of these that is kept for the next results: what is free of arenas, and rows.
  int64_t idle_bytes = 0;
  int64_t runs_published = 0;
  int64_t short_runs = 0;  // of these, the ones that went the short way (short_way.h)
  int64_t runs_failed = 0;
  int64_t shared_kernels = 0;  // that were not run, because another rank ran an equal one
  // Parts of gradients that ranks gave up though a leaf of theirs lay behind, and others asked for.
  int64_t gradients_given_up = 0;
  PathCounters paths;
  // Held at this moment: none of it may grow while a job goes on.
  int64_t live_runs = 0;
  int64_t live_buffers = 0;
  int64_t loaded_plans = 0;
  int64_t agreement_rows = 0;  // of all worlds' sequencers
  // Of the node thread, since the start (core/base/work.h).
  int64_t largest_slice_work = 0;
};

// A list that ends where it would take the node thread too long. What fits: 16,384 members and
// ranks, or 1,600 waits of pairs.
inline constexpr int64_t kMaxListed = 16384;
template <typename Row>
struct Listing {
  std::vector<Row> rows;
  bool truncated = false;  // there may be more
};

// What a world waits for.
struct PendingView {
  WorldId world;
  std::string world_name;
  PendingInstance instance;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_INFO_H_
