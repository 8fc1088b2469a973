// What diagnostics show of a node. Nothing here changes anything.
//
// Threads: the node thread. Ownership: copies. Errors: none.
#ifndef CHORUS_CORE_NODE_VIEWS_H_
#define CHORUS_CORE_NODE_VIEWS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/node/info.h"
#include "core/node/launcher.h"
#include "core/node/records.h"
#include "core/node/run_state.h"
#include "core/node/session.h"
#include "core/node/storage.h"
#include "core/node/worlds.h"
#include "core/runtime/devices.h"

namespace chorus::node {

// What is looked at. All outlive the call.
struct Viewed {
  const DevicesInfo* devices = nullptr;
  const SessionTable* sessions = nullptr;
  const Worlds* worlds = nullptr;
  const Launcher* launcher = nullptr;
  const Storage* storage = nullptr;
  const RunTable* runs = nullptr;
  const FlightRecord* flight = nullptr;
};

// `tenant` empty: all.
std::vector<DeviceInfo> ViewDevices(const Viewed& node, absl::string_view tenant);
std::vector<SessionInfo> ViewSessions(const Viewed& node, absl::string_view tenant, absl::Time now);
// `one`: no other.
Listing<WorldInfo> ViewWorlds(const Viewed& node, absl::string_view tenant,
                              absl::optional<WorldId> one, absl::Time now);
Listing<PendingView> ViewPending(const Viewed& node, absl::string_view tenant, absl::Time now);
std::vector<FlightEvent> ViewFlight(const Viewed& node, absl::string_view tenant, int64_t limit);
// `counters`, with what is held at this moment; of a tenant only what it holds.
NodeStats ViewStats(const Viewed& node, absl::string_view tenant, const NodeStats& counters);

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_VIEWS_H_
