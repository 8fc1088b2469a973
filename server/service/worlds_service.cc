#include "server/service/worlds_service.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "chorus/v1/worlds.grpc.pb.h"
#include "core/base/error.h"
#include "proto/convert/convert.h"
#include "server/service/call.h"
#include "server/service/durations.h"
#include "server/service/methods.h"
#include "server/service/show.h"

namespace chorus::server {
namespace {

v1::MemberState StateOf(const node::WorldInfo::Member& member) {
  if (!member.joined) return v1::MEMBER_STATE_MISSING;
  return member.alive ? v1::MEMBER_STATE_ALIVE : v1::MEMBER_STATE_GONE;
}

void WorldTo(int64_t incarnation, const node::WorldInfo& info, v1::World* message) {
  message->set_world(info.id.value());
  message->set_name(info.name);
  message->set_size(info.size);
  message->set_epoch(info.epoch.value());
  for (const node::WorldInfo::Member& member : info.members) {
    v1::World::Member* to = message->add_members();
    to->set_rank(member.rank.value());
    to->set_session(WireSessionOrZero(incarnation, member.session));
    to->set_device(member.device.value());
    if (member.pid >= 0) to->set_pid(member.pid);
    to->set_state(StateOf(member));
    ToProto(member.next, to->mutable_next());
  }
  for (size_t group = 0; group < info.groups.size(); ++group) {
    v1::World::Group* to = message->add_groups();
    to->set_group(static_cast<int32_t>(group));
    for (Rank rank : info.groups[group]) to->add_ranks(rank.value());
  }
  DurationTo(info.agree_timeout, message->mutable_agree_timeout());
  if (info.waiting > absl::ZeroDuration()) DurationTo(info.waiting, message->mutable_waiting());
}

// INVALID_ARGUMENT kMalformed.
absl::Status OptionsFrom(const v1::JoinWorldRequest& message, node::JoinRequest* request) {
  CHORUS_ASSIGN_OR_RETURN(request->join_timeout,
                          DurationFrom(message.join_timeout(), "join_timeout"));
  CHORUS_ASSIGN_OR_RETURN(request->agree_timeout,
                          DurationFrom(message.agree_timeout(), "agree_timeout"));
  CHORUS_ASSIGN_OR_RETURN(request->exec_timeout,
                          DurationFrom(message.exec_timeout(), "exec_timeout"));
  if (!v1::CheckCallSites_IsValid(message.check_call_sites())) {
    return Malformed(absl::StrCat("check_call_sites: expected 0 to 2, got ",
                                  static_cast<int>(message.check_call_sites())));
  }
  request->check_call_sites = static_cast<CheckCallSites>(message.check_call_sites());
  return absl::OkStatus();
}

node::JoinRequest RequestFrom(const v1::JoinWorldRequest& message) {
  node::JoinRequest request;
  request.name = message.name();
  request.size = message.size();
  request.rank = Rank(message.rank());
  if (message.has_device()) request.device = DeviceIndex(message.device());
  request.not_understood = ErrorOf(OptionsFrom(message, &request)).message;
  return request;
}

node::CreateGroupRequest RequestFrom(const v1::CreateGroupRequest& message) {
  node::CreateGroupRequest request;
  request.world = WorldId(message.world());
  request.rank = Rank(message.rank());
  for (int32_t rank : message.ranks()) request.members.push_back(Rank(rank));
  if (message.has_step()) request.step = message.step();
  if (message.has_number()) request.number = message.number();
  return request;
}

absl::StatusOr<node::ReformWorldRequest> RequestFrom(const v1::ReformWorldRequest& message) {
  node::ReformWorldRequest request;
  request.world = WorldId(message.world());
  request.rank = Rank(message.rank());
  CHORUS_ASSIGN_OR_RETURN(request.timeout, DurationFrom(message.timeout(), "timeout"));
  if (message.has_grow_to()) request.grow_to = message.grow_to();
  return request;
}

void ResponseTo(const node::ReformResult& result, v1::ReformWorldResponse* response) {
  response->set_rank(result.rank.value());
  response->set_size(result.size);
  response->set_epoch(result.epoch.value());
  for (const node::ReformResult::Survivor& survivor : result.survivors) {
    v1::ReformWorldResponse::Survivor* to = response->add_survivors();
    to->set_old_rank(survivor.old_rank.value());
    if (survivor.last_published.has_value()) {
      ToProto(*survivor.last_published, to->mutable_last_published());
    }
  }
}

void OnJoin(const CallRef<v1::JoinWorldResponse>& call, const v1::JoinWorldRequest& request) {
  const ServiceContext* const service = call->service();
  call->ForSession(
      request.session(), [service, call, join = RequestFrom(request), wait = call->Waits()](
                             node::LocalNode& node, absl::Time now, SessionId session) {
        node.JoinWorld(
            session, join, now,
            [service, call](absl::StatusOr<node::WorldInfo> world) {
              if (!world.ok()) return call->Reply(world.status());
              call->Reply(absl::OkStatus(),
                          [service, world = *std::move(world)](v1::JoinWorldResponse* to) {
                            WorldTo(service->incarnation, world, to->mutable_world());
                          });
            },
            wait);
      });
}

void OnCreateGroup(const CallRef<v1::CreateGroupResponse>& call,
                   const v1::CreateGroupRequest& request) {
  call->ForSession(request.session(), [call, create = RequestFrom(request)](
                                          node::LocalNode& node, absl::Time, SessionId session) {
    const absl::StatusOr<GroupId> group = node.CreateGroup(session, create);
    if (!group.ok()) return call->Reply(group.status());
    call->Reply(absl::OkStatus(),
                [group = *group](v1::CreateGroupResponse* to) { to->set_group(group.value()); });
  });
}

void OnLeave(const CallRef<v1::LeaveWorldResponse>& call, const v1::LeaveWorldRequest& request) {
  call->ForSession(request.session(),
                   [call, world = WorldId(request.world()), rank = Rank(request.rank())](
                       node::LocalNode& node, absl::Time now, SessionId session) {
                     call->Reply(node.LeaveWorld(session, world, rank, now));
                   });
}

void OnAbort(const CallRef<v1::AbortWorldResponse>& call, const v1::AbortWorldRequest& request) {
  const node::AbortWorldRequest abort{WorldId(request.world()), Rank(request.rank()),
                                      Epoch(request.epoch()), request.message()};
  call->ForSession(request.session(),
                   [call, abort](node::LocalNode& node, absl::Time now, SessionId session) {
                     call->Reply(node.AbortWorld(session, abort, now));
                   });
}

void OnReform(const CallRef<v1::ReformWorldResponse>& call, const v1::ReformWorldRequest& request) {
  const absl::StatusOr<node::ReformWorldRequest> reform = RequestFrom(request);
  if (!reform.ok()) return call->Reply(reform.status());
  call->ForSession(request.session(), [call, reform = *reform, wait = call->Waits()](
                                          node::LocalNode& node, absl::Time now,
                                          SessionId session) {
    node.ReformWorld(
        session, reform, now,
        [call](absl::StatusOr<node::ReformResult> result) {
          if (!result.ok()) return call->Reply(result.status());
          call->Reply(absl::OkStatus(), [result = *std::move(result)](v1::ReformWorldResponse* to) {
            ResponseTo(result, to);
          });
        },
        wait);
  });
}

void OnDescribe(const CallRef<v1::DescribeWorldsResponse>& call,
                const v1::DescribeWorldsRequest& request) {
  const ServiceContext* const service = call->service();
  absl::optional<WorldId> one;
  if (request.has_world()) one = WorldId(request.world());
  ShowList(
      call,
      [one](node::LocalNode& node, absl::Time now, const std::string& sees) {
        return node.Worlds(sees, one, now);
      },
      [service](const absl::StatusOr<node::Listing<node::WorldInfo>>& worlds,
                v1::DescribeWorldsResponse* to) {
        for (const node::WorldInfo& info : worlds->rows) {
          WorldTo(service->incarnation, info, to->add_worlds());
        }
        to->set_truncated(worlds->truncated);
      });
}

}  // namespace

std::unique_ptr<grpc::Service> MakeWorldsService(const ServiceContext* context) {
  auto service = std::make_unique<Methods<v1::Worlds>>(context);
  (*service)
      .Unary("Join", &OnJoin)
      .Unary("CreateGroup", &OnCreateGroup)
      .Unary("Leave", &OnLeave)
      .Unary("Abort", &OnAbort)
      .Unary("Reform", &OnReform)
      .Unary("Describe", &OnDescribe);
  return service;
}

}  // namespace chorus::server
