#include "core/node/views.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/work.h"
#include "core/node/describe.h"

namespace chorus::node {
namespace {

bool Shows(absl::string_view tenant, absl::string_view owner) {
  return tenant.empty() || tenant == owner;
}

// By their ids, `one` or all.
std::vector<const World*> WorldsOf(const Viewed& node, absl::string_view tenant,
                                   absl::optional<WorldId> one) {
  std::vector<const World*> worlds;
  node.worlds->ForEach([&](const World& world) {
    if (Shows(tenant, world.tenant) && one.value_or(world.id) == world.id) {
      worlds.push_back(&world);
    }
  });
  std::sort(worlds.begin(), worlds.end(),
            [](const World* a, const World* b) { return a->id < b->id; });
  return worlds;
}

// What waits in one world.
void AddPending(const World& world, absl::Time now, int64_t* room,
                std::vector<PendingView>* pending) {
  *room -= world.size();
  PendingView waiting;  // joining and reforming wait for ranks as well
  waiting.world = world.id;
  waiting.world_name = world.name;
  if (!world.formed()) {
    waiting.instance.what = "join";
    waiting.instance.waiting = now - world.first_joined;
    for (int rank = 0; rank < world.size(); ++rank) {
      const bool joined =
          world.members[static_cast<size_t>(rank)].state != World::Member::State::kMissing;
      (joined ? waiting.instance.voted : waiting.instance.missing).push_back(Rank(rank));
    }
    pending->push_back(std::move(waiting));
    return;
  }
  waiting.instance.what = "reform";
  for (int rank = 0; rank < world.size(); ++rank) {
    const World::Member& member = world.members[static_cast<size_t>(rank)];
    if (member.session == nullptr) continue;
    const bool has_asked = member.on_reformed != nullptr;
    (has_asked ? waiting.instance.voted : waiting.instance.missing).push_back(Rank(rank));
  }
  if (!waiting.instance.voted.empty()) pending->push_back(std::move(waiting));
  for (PendingInstance& instance : world.agreement->Pending(now, room)) {
    pending->push_back({world.id, world.name, std::move(instance)});
  }
}

}  // namespace

std::vector<DeviceInfo> ViewDevices(const Viewed& node, absl::string_view tenant) {
  std::vector<int32_t> sessions(static_cast<size_t>(node.launcher->device_count()));
  node.sessions->ForEach([&](const std::shared_ptr<Session>& session) {
    if (!Shows(tenant, session->tenant->name)) return;
    for (DeviceIndex device : session->devices) ++sessions[static_cast<size_t>(device.value())];
  });
  std::vector<DeviceInfo> devices;
  for (int i = 0; i < node.launcher->device_count(); ++i) {
    DeviceInfo info;
    info.index = DeviceIndex(i);
    info.name = absl::StrCat(node.devices->backend, ":", i);
    info.memory_bytes = node.storage->budget().limit() / node.launcher->device_count();
    info.cores = node.devices->cores_per_device;
    if (tenant.empty()) info.launches = node.launcher->launches(info.index);
    info.sessions = sessions[static_cast<size_t>(i)];
    devices.push_back(std::move(info));
  }
  return devices;
}

std::vector<SessionInfo> ViewSessions(const Viewed& node, absl::string_view tenant,
                                      absl::Time now) {
  std::vector<SessionInfo> infos;
  node.sessions->ForEach([&](const std::shared_ptr<Session>& session) {
    if (Shows(tenant, session->tenant->name)) infos.push_back(Describe(*session, now));
  });
  std::sort(infos.begin(), infos.end(),
            [](const SessionInfo& a, const SessionInfo& b) { return a.id < b.id; });
  CountWork(static_cast<int64_t>(infos.size()));
  return infos;
}

Listing<WorldInfo> ViewWorlds(const Viewed& node, absl::string_view tenant,
                              absl::optional<WorldId> one, absl::Time now) {
  Listing<WorldInfo> listing;
  int64_t room = kMaxListed;
  for (const World* world : WorldsOf(node, tenant, one)) {
    if (room > 0) listing.rows.push_back(Describe(*world, now, &room));
  }
  listing.truncated = room <= 0;
  CountWork(kMaxListed - std::max<int64_t>(room, 0));
  return listing;
}

Listing<PendingView> ViewPending(const Viewed& node, absl::string_view tenant, absl::Time now) {
  Listing<PendingView> listing;
  int64_t room = kMaxListed;
  for (const World* world : WorldsOf(node, tenant, absl::nullopt)) {
    if (room > 0) AddPending(*world, now, &room, &listing.rows);
  }
  listing.truncated = room <= 0;
  CountWork(kMaxListed - std::max<int64_t>(room, 0));
  return listing;
}

std::vector<FlightEvent> ViewFlight(const Viewed& node, absl::string_view tenant, int64_t limit) {
  if (limit <= 0) return {};
  const auto most = static_cast<size_t>(limit);
  std::vector<FlightEvent> events =
      tenant.empty() ? node.flight->Latest(most) : node.flight->LatestOf(tenant, most);
  CountWork(static_cast<int64_t>(events.size()));
  return events;
}

NodeStats ViewStats(const Viewed& node, absl::string_view tenant, const NodeStats& counters) {
  NodeStats result;
  if (tenant.empty()) {
    result = counters;
    result.memory_limit_bytes = node.storage->budget().limit();
    result.memory_used_bytes = node.storage->budget().used();
    result.client_held_bytes = node.storage->client_held_bytes();
    result.idle_bytes = node.storage->idle_bytes();
    result.largest_slice_work = LargestSliceWork();
    result.live_runs = node.runs->live();
    result.live_buffers = node.storage->live_buffers();
    result.loaded_plans = node.launcher->loaded_plans();
  } else if (const std::shared_ptr<const Tenant> tenant_ref = node.storage->FindTenant(tenant)) {
    result.memory_limit_bytes = tenant_ref->budget->limit();
    result.memory_used_bytes = tenant_ref->budget->used();
    result.live_buffers = tenant_ref->arenas->live_buffers();
    result.idle_bytes = tenant_ref->arenas->idle_bytes();
  }
  int64_t worlds = 0;
  node.worlds->ForEach([&](const World& world) {
    ++worlds;
    if (world.formed() && Shows(tenant, world.tenant))
      result.agreement_rows += static_cast<int64_t>(world.agreement->LiveRows());
  });
  CountWork(worlds);
  return result;
}

}  // namespace chorus::node
