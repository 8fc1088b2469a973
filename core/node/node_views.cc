// What diagnostics show. Nothing here changes anything.
#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "core/node/node_impl.h"

namespace chorus {

std::vector<DeviceInfo> LocalNode::Impl::Devices() const {
  std::vector<DeviceInfo> devices;
  for (int i = 0; i < launcher_.device_count(); ++i) {
    DeviceInfo info;
    info.index = DeviceIndex(i);
    info.name = absl::StrCat(backend_->name(), ":", i);
    info.launches = launcher_.launches(info.index);
    info.sessions = device_sessions_[static_cast<size_t>(i)];
    devices.push_back(std::move(info));
  }
  return devices;
}

SessionInfo LocalNode::Impl::Describe(const Session& session, absl::Time now) const {
  SessionInfo info;
  info.id = session.id;
  info.tenant = session.tenant->name;
  info.label = session.request.label;
  info.pid = session.request.pid;
  info.attached = session.request.attached;
  info.state = session.state;
  info.devices = session.devices;
  info.live_tensors = session.live_tensors;
  info.live_graphs = session.live_graphs;
  info.staging_bytes = session.staging_bytes;
  info.commands = session.next_sequence - 1;
  info.lease_left = session.request.attached
                        ? absl::InfiniteDuration()
                        : std::max(absl::ZeroDuration(), session.lease_until - now);
  return info;
}

WorldInfo LocalNode::Impl::Describe(const World& world, absl::Time now) const {
  WorldInfo info;
  info.id = world.id;
  info.tenant = world.tenant;
  info.name = world.name;
  info.size = world.size();
  info.agree_timeout = world.options.agree_timeout;
  for (int rank = 0; rank < world.size(); ++rank) {
    const World::Member& member = world.members[static_cast<size_t>(rank)];
    WorldInfo::Member view;
    view.rank = Rank(rank);
    if (member.session != nullptr) view.session = member.session->id;
    view.device = member.device;
    view.pid = member.pid;
    view.joined = member.state != World::Member::State::kMissing;
    view.alive = member.state == World::Member::State::kJoined;
    info.members.push_back(view);
  }
  if (world.formed) {
    info.epoch = world.sequencer->epoch();
    for (WorldInfo::Member& member : info.members) {
      member.next = world.sequencer->NextCall(GroupId(0), member.rank);
    }
    for (int group = 0; group < world.sequencer->num_groups(); ++group) {
      const auto members = world.sequencer->GroupMembers(GroupId(group));
      info.groups.emplace_back();
      if (members.ok()) info.groups.back().assign(members->begin(), members->end());
    }
  } else {
    info.waiting = now - world.first_joined;
  }
  return info;
}

std::vector<SessionInfo> LocalNode::Impl::Sessions(absl::string_view tenant, absl::Time now) const {
  std::vector<SessionInfo> found;
  for (const auto& entry : sessions_) {
    if (tenant.empty() || tenant == entry.second->tenant->name) {
      found.push_back(Describe(*entry.second, now));
    }
  }
  std::sort(found.begin(), found.end(),
            [](const SessionInfo& a, const SessionInfo& b) { return a.id < b.id; });
  return found;
}

std::vector<WorldInfo> LocalNode::Impl::Worlds(absl::string_view tenant, absl::Time now) const {
  std::vector<WorldInfo> found;
  for (const auto& entry : worlds_) {
    if (tenant.empty() || tenant == entry.second->tenant) {
      found.push_back(Describe(*entry.second, now));
    }
  }
  std::sort(found.begin(), found.end(),
            [](const WorldInfo& a, const WorldInfo& b) { return a.id < b.id; });
  return found;
}

std::vector<LocalNode::PendingView> LocalNode::Impl::Pending(absl::string_view tenant,
                                                             absl::Time now) const {
  std::vector<PendingView> found;
  for (const WorldInfo& info : Worlds(tenant, now)) {
    const World& world = *worlds_.at(info.id);
    if (!world.formed) {
      // Joining is pending as well: it waits for the ranks that are missing.
      PendingView view;
      view.world = world.id;
      view.world_name = world.name;
      view.instance.what = "join";
      view.instance.waiting = info.waiting;
      for (const WorldInfo::Member& member : info.members) {
        (member.joined ? view.instance.voted : view.instance.missing).push_back(member.rank);
      }
      found.push_back(std::move(view));
      continue;
    }
    PendingView reform;
    reform.world = world.id;
    reform.world_name = world.name;
    reform.instance.what = "reform";
    for (const WorldInfo::Member& member : info.members) {
      const World::Member& state = world.members[static_cast<size_t>(member.rank.value())];
      if (state.session == nullptr) continue;
      (state.on_reformed != nullptr ? reform.instance.voted : reform.instance.missing)
          .push_back(member.rank);
    }
    if (!reform.instance.voted.empty()) found.push_back(std::move(reform));
    for (PendingInstance& instance : world.sequencer->Pending(now)) {
      found.push_back({world.id, world.name, std::move(instance)});
    }
  }
  return found;
}

std::vector<FlightEvent> LocalNode::Impl::Flight(absl::string_view tenant, int64_t limit) const {
  if (limit <= 0) return {};
  std::vector<FlightEvent> events = flight_.Latest(static_cast<size_t>(limit));
  if (tenant.empty()) return events;
  absl::flat_hash_set<SessionId> sessions;
  absl::flat_hash_set<WorldId> worlds;
  for (const auto& entry : sessions_) {
    if (tenant == entry.second->tenant->name) sessions.insert(entry.first);
  }
  for (const auto& entry : worlds_) {
    if (tenant == entry.second->tenant) worlds.insert(entry.first);
  }
  events.erase(std::remove_if(events.begin(), events.end(),
                              [&](const FlightEvent& event) {
                                return !sessions.contains(event.session) &&
                                       !worlds.contains(event.world);
                              }),
               events.end());
  return events;
}

NodeStats LocalNode::Impl::Stats() const {
  NodeStats now = stats;
  now.memory_used_bytes = budget_.used();
  now.live_runs = runs_.live();
  for (const auto& entry : tenants_) {
    if (const auto tenant = entry.second.lock()) now.live_buffers += tenant->arenas->live_buffers();
  }
  for (const auto& set : device_sets_) now.live_buffers += set->live_buffers();
  now.loaded_plans = launcher_.loaded_plans();
  for (const auto& entry : worlds_) {
    const World& world = *entry.second;
    if (world.formed) now.agreement_rows += static_cast<int64_t>(world.sequencer->LiveRows());
  }
  return now;
}

}  // namespace chorus
