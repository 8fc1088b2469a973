// What a node is started with.
//
// Threads: plain data; `log_failure` is called on the node thread. Ownership: copied. Errors: none.
#ifndef CHORUS_CORE_NODE_OPTIONS_H_
#define CHORUS_CORE_NODE_OPTIONS_H_

#include <cstdint>
#include <functional>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/work.h"
#include "core/collective/decisions.h"
#include "core/graph/encoding.h"
#include "core/ops/validate.h"
#include "core/runtime/plan/plan_options.h"

namespace chorus {
class MemoryGuard;
}  // namespace chorus

namespace chorus::node {

// About a hundred nodes, half a millisecond.
inline constexpr int64_t kMaxInlineGraphBytes = 4096;

inline constexpr int32_t kDefaultMaxSessions = 256;
// What the node keeps for a call that waits for something, from above. (The call itself, or its
// stream, is the server's.) A session is not charged for a few of them: one that has no memory left
// must be able to ask for what lets go of some.
inline constexpr int64_t kWaitBytes = 768;
inline constexpr int64_t kFreeWaits = 16;

struct NodeOptions {
  // One tenant may have seven eighths of each of these (core/runtime/budget.h), so that another
  // always gets in.
  int64_t memory_limit_bytes = int64_t{8} << 30;
  int32_t max_sessions = kDefaultMaxSessions;
  int32_t max_worlds = 1024;
  int64_t max_waits = 65536;            // calls that wait for something
  int64_t max_downloads = 512;          // tensors that are being read; each takes up to 512 KiB
  int64_t max_node_graphs = 1 << 20;    // registered ones, of all sessions together
  int64_t max_descriptors = INT64_MAX;  // of arenas and sessions
  // For each session:
  int32_t max_tensors = 65536;
  int32_t max_graphs = 16384;
  int32_t max_staging_arenas = 256;
  int64_t max_staging_bytes = int64_t{8} << 30;
  int32_t max_pending_runs = 1024;
  int32_t max_graph_nodes = static_cast<int32_t>(GraphLimits().max_nodes);
  int32_t max_graph_collectives = static_cast<int32_t>(GraphLimits().max_collectives);
  int32_t max_graph_inputs = static_cast<int32_t>(GraphLimits().max_inputs);
  int32_t max_graph_outputs = static_cast<int32_t>(GraphLimits().max_outputs);
  int64_t max_graph_bytes = kMaxClientGraphBytes;  // in memory, and on its way
  PlanLimits plan;
  // A graph that comes in more bytes is decoded, checked and planned beside the node thread.
  int64_t max_inline_graph_bytes = kMaxInlineGraphBytes;
  // What runs do in one slice beyond so much work (core/base/work.h), such as to fail, waits for
  // the turns that come.
  int64_t fail_work = kTurnWork;
  int64_t max_session_downloads = 64;
  absl::Duration lease = absl::Seconds(60);         // of unattached sessions, unless they ask
  absl::Duration max_lease = absl::Hours(1);        // that they may ask for
  absl::Duration detach_grace = absl::Seconds(30);  // votes of a session without channel stand
  absl::Duration join_timeout = absl::Seconds(300);
  absl::Duration gap_timeout = absl::Seconds(10);  // for a missing predecessor in a log
  // For devices to end what is aborted, beyond sequencer.exec_timeout, if they are a worker's
  // (core/worker/worker_devices.h).
  absl::Duration kill_timeout = absl::Seconds(10);
  SequencerOptions sequencer;  // a world's own options override it
  // Work that is the same on several ranks (a data-parallel optimiser's update) is done once and
  // kept once. Results are the same bits either way.
  bool share_equal_work = true;
  // For tests: whatever may be done later is, large or small.
  void DoLater() {
    max_inline_graph_bytes = 0;
    fail_work = -1;
  }

  // Small collectives that all ranks call alike go their short way (short_way.h). Results and
  // errors are the same either way.
  bool short_way = true;

  // Looks whether the kernel may be asked for more memory that clients map
  // (core/runtime/memory_guard.h); outlives the node. Null: what fits into the limit is asked for.
  MemoryGuard* memory_guard = nullptr;

  // Takes one line for each failure of a tenant's (records.h, FailureLine); empty: none is written.
  std::function<void(absl::string_view tenant, absl::string_view line)> log_failure;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_OPTIONS_H_
