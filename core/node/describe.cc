#include "core/node/describe.h"

#include <algorithm>

namespace chorus::node {

SessionInfo Describe(const Session& session, absl::Time now) {
  SessionInfo info;
  info.id = session.id;
  info.tenant = session.tenant->name;
  info.label = session.request.label;
  info.pid = session.request.pid;
  info.attached = session.request.attached;
  info.state = session.state;
  info.devices = session.devices;
  info.live_tensors = session.names.live_tensors();
  info.live_graphs = session.names.live_graphs();
  info.staging_bytes = session.staging_bytes;
  info.commands = session.log.taken();
  info.lease_left = session.request.attached
                        ? absl::InfiniteDuration()
                        : std::max(absl::ZeroDuration(), session.lease_until - now);
  return info;
}

WorldInfo Describe(const World& world, absl::Time now, int64_t* room) {
  WorldInfo info;
  info.id = world.id;
  info.tenant = world.tenant;
  info.name = world.name;
  info.size = world.size();
  *room -= world.size();
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
  if (world.formed()) {
    info.epoch = world.agreement->epoch();
    for (WorldInfo::Member& member : info.members) {
      member.next = world.agreement->NextCall(GroupId(0), member.rank);
    }
    for (int group = 0; group < world.agreement->num_groups() && *room > 0; ++group) {
      const auto members = world.agreement->GroupMembers(GroupId(group));
      info.groups.emplace_back();
      if (members.ok()) info.groups.back().assign(members->begin(), members->end());
      *room -= 1 + static_cast<int64_t>(info.groups.back().size());
    }
  } else {
    info.waiting = now - world.first_joined;
  }
  return info;
}

}  // namespace chorus::node
