// Membership: joining, groups, leaving, reforming.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/node/node_impl.h"

namespace chorus {
namespace {

std::string MissingRanks(const std::vector<int>& ranks) {
  const size_t shown = std::min(ranks.size(), Error::kMaxRanks);
  std::string text =
      absl::StrJoin(ranks.begin(), ranks.begin() + static_cast<ptrdiff_t>(shown), ", ");
  if (shown < ranks.size()) absl::StrAppend(&text, " and ", ranks.size() - shown, " more");
  return text;
}

absl::Status MembersMissing(Reason reason, absl::string_view what, const std::vector<int>& ranks) {
  Error error(reason);
  error.message =
      absl::StrCat(what, ": missing ", ranks.size() == 1 ? "rank " : "ranks ", MissingRanks(ranks));
  if (!ranks.empty()) error.culprit.rank = ranks[0];
  return ToStatus(error);
}

}  // namespace

absl::Status NotFormed(const World& world) {
  return MakeError(Reason::kWrongState,
                   absl::StrCat("world \"", world.name, "\" is not complete yet"));
}

absl::StatusOr<LocalNode::Impl::MemberRef> LocalNode::Impl::FindMember(Session* session,
                                                                       WorldId world, Rank rank) {
  for (const Session::Membership& membership : session->memberships) {
    if (membership.world->id == world && membership.rank == rank) {
      return MemberRef{membership.world,
                       &membership.world->members[static_cast<size_t>(rank.value())]};
    }
  }
  return UnknownName(
      absl::StrCat("this session is not rank ", rank.value(), " of world ", world.value()));
}

void LocalNode::Impl::JoinWorld(const std::shared_ptr<Session>& session, const JoinRequest& request,
                                absl::Time now, OnJoined done) {
  const auto refuse = [&done](Reason reason, const std::string& text) {
    done(MakeError(reason, text));
  };
  if (draining) {
    return refuse(Reason::kDraining, "the daemon is shutting down and takes no new worlds");
  }
  constexpr int32_t kMaxWorldSize = 1024;
  if (request.name.empty() || request.name.size() > 256) {
    return refuse(Reason::kMalformed,
                  absl::StrCat("a world's name has 1 to 256 bytes, not ", request.name.size()));
  }
  if (request.size < 1 || request.size > kMaxWorldSize) {
    return refuse(Reason::kMalformed,
                  absl::StrCat("a world has 1 to ", kMaxWorldSize, " ranks, not ", request.size));
  }
  if (request.rank.value() < 0 || request.rank.value() >= request.size) {
    return refuse(Reason::kMalformed,
                  absl::StrCat("ranks of a world of ", request.size, " go from 0 to ",
                               request.size - 1, ", not ", request.rank.value()));
  }
  if (std::find(session->devices.begin(), session->devices.end(), request.device) ==
      session->devices.end()) {
    return refuse(Reason::kUnknownName,
                  absl::StrCat("device ", request.device.value(), " is none of the session's"));
  }

  const auto key = std::make_pair(session->tenant->name, request.name);
  std::shared_ptr<World>& known = worlds_by_name_[key];
  if (known == nullptr) {
    if (static_cast<int64_t>(worlds_.size()) >= options.max_worlds) {
      worlds_by_name_.erase(key);
      return refuse(Reason::kQuota, absl::StrCat("all ", options.max_worlds, " worlds are in use"));
    }
    auto world = std::make_shared<World>();
    world->id = WorldId(++last_world_);
    world->tenant = session->tenant->name;
    world->name = request.name;
    world->members.resize(static_cast<size_t>(request.size));
    world->options = options.sequencer;
    world->options.max_groups = options.max_groups_per_world;
    if (request.agree_timeout > absl::ZeroDuration()) {
      world->options.agree_timeout = request.agree_timeout;
    }
    if (request.exec_timeout > absl::ZeroDuration()) {
      world->options.exec_timeout = request.exec_timeout;
    }
    world->options.check_call_sites = request.check_call_sites;
    world->first_joined = now;
    const absl::Duration patience =
        request.join_timeout > absl::ZeroDuration() ? request.join_timeout : options.join_timeout;
    const std::weak_ptr<World> weak = world;
    world->join_timer = timers.Add(now + patience, [this, weak, patience](absl::Time then) {
      const std::shared_ptr<World> world = weak.lock();
      if (world == nullptr || world->formed) return;
      std::vector<int> missing;
      std::vector<Rank> joined;
      for (int rank = 0; rank < world->size(); ++rank) {
        if (world->members[static_cast<size_t>(rank)].state == World::Member::State::kJoined) {
          joined.push_back(Rank(rank));
        } else {
          missing.push_back(rank);
        }
      }
      const absl::Status late =
          MembersMissing(Reason::kJoinTimeout,
                         absl::StrCat("world \"", world->name, "\" of ", world->size(),
                                      " was not complete after ", absl::FormatDuration(patience)),
                         missing);
      for (Rank rank : joined) {
        OnJoined done = std::move(world->members[static_cast<size_t>(rank.value())].on_joined);
        RemoveMember(world, rank, /*died=*/"", then);
        if (done != nullptr) done(late);
      }
    });
    worlds_[world->id] = world;
    known = world;
  }
  const std::shared_ptr<World> world = known;
  if (world->size() != request.size) {
    const absl::Status why =
        MakeError(Reason::kWorldSize,
                  absl::StrCat("world \"", request.name, "\" has ", world->size(), " ranks; rank ",
                               request.rank.value(), " asked for ", request.size));
    RefuseJoined(world, request.rank, *session, why, now);
    return done(why);
  }
  if (world->options.check_call_sites != request.check_call_sites) {
    int other = 0;
    while (world->members[static_cast<size_t>(other)].state == World::Member::State::kMissing) {
      ++other;
    }
    return refuse(
        Reason::kMismatch,
        absl::StrCat("rank ", request.rank.value(), " joins world \"", request.name,
                     "\" with check_call_sites ", CheckCallSitesName(request.check_call_sites),
                     "; rank ", other, " has joined it with ",
                     CheckCallSitesName(world->options.check_call_sites)));
  }
  World::Member& member = world->members[static_cast<size_t>(request.rank.value())];
  if (member.state == World::Member::State::kJoined) {
    return refuse(Reason::kDuplicateRank,
                  absl::StrCat("rank ", request.rank.value(), " of world \"", request.name,
                               "\" is taken by pid ", member.pid));
  }
  if (world->formed) {
    return refuse(Reason::kNeedsReform,
                  absl::StrCat("world \"", request.name, "\" has lost rank ", request.rank.value(),
                               " and is still in use by others; a world does not grow again: let "
                               "the others leave or reform, or choose another name"));
  }
  for (int rank = 0; rank < world->size(); ++rank) {
    const World::Member& other = world->members[static_cast<size_t>(rank)];
    if (other.state == World::Member::State::kJoined && other.device == request.device) {
      const absl::Status why =
          MakeError(Reason::kQuota,
                    absl::StrCat("device ", request.device.value(), " is rank ", rank,
                                 "'s in world \"", request.name,
                                 "\"; each rank of a world needs a device of its own (start the "
                                 "daemon with more: --host_devices)"));
      RefuseJoined(world, request.rank, *session, why, now);
      return done(why);
    }
  }
  member.session = session;
  member.device = request.device;
  member.pid = session->request.pid;
  member.state = World::Member::State::kJoined;
  member.on_joined = std::move(done);
  session->memberships.push_back({world, request.rank, Epoch(1)});
  const bool complete =
      std::all_of(world->members.begin(), world->members.end(),
                  [](const World::Member& m) { return m.state == World::Member::State::kJoined; });
  if (complete) FormWorld(world, now);
}

void LocalNode::Impl::RefuseJoined(const std::shared_ptr<World>& world, Rank rank,
                                   const Session& session, const absl::Status& why,
                                   absl::Time now) {
  // Of a rank that is there already nobody waits for another.
  if (world->formed || rank.value() >= world->size() ||
      world->members[static_cast<size_t>(rank.value())].state != World::Member::State::kMissing) {
    return;
  }
  Error error = ErrorOf(why);
  error.culprit.rank = rank.value();
  error.culprit.pid = session.request.pid;
  error.message = absl::StrCat("rank ", rank.value(), " (pid ", session.request.pid,
                               ") was not let in: ", error.message);
  for (int other = 0; other < world->size(); ++other) {
    OnJoined done = std::exchange(world->members[static_cast<size_t>(other)].on_joined, nullptr);
    RemoveMember(world, Rank(other), /*died=*/"", now);
    if (done != nullptr) done(ToStatus(error));
  }
}

void LocalNode::Impl::FormWorld(const std::shared_ptr<World>& world, absl::Time now) {
  timers.Cancel(world->join_timer);
  world->formed = true;
  world->sequencer = std::make_unique<Sequencer>(world->size(), world->options);
  for (int rank = 0; rank < world->size(); ++rank) {
    MemberInfo info;
    info.pid = world->members[static_cast<size_t>(rank)].pid;
    world->sequencer->SetMember(Rank(rank), info);
  }
  Note(FlightKind::kWorldFormed, now, nullptr, world.get());
  const WorldInfo info = Describe(*world, now);
  for (World::Member& member : world->members) {
    OnJoined done = std::move(member.on_joined);
    member.on_joined = nullptr;
    if (done != nullptr) done(info);
  }
}

absl::StatusOr<GroupId> LocalNode::Impl::CreateGroup(Session* session, WorldId world, Rank rank,
                                                     absl::Span<const Rank> members,
                                                     absl::optional<InstanceKey::Request> request) {
  CHORUS_ASSIGN_OR_RETURN(const MemberRef member, FindMember(session, world, rank));
  if (!member.world->formed) {
    return NotFormed(*member.world);
  }
  return member.world->sequencer->AddGroup(rank, members, request);
}

absl::Status LocalNode::Impl::LeaveWorld(Session* session, WorldId world, Rank rank,
                                         absl::Time now) {
  CHORUS_ASSIGN_OR_RETURN(const MemberRef member, FindMember(session, world, rank));
  OnJoined done = std::move(member.member->on_joined);
  RemoveMember(member.world, rank, /*died=*/"", now);
  if (done != nullptr) {
    done(MakeError(Reason::kCancelled,
                   absl::StrCat("rank ", rank.value(), " left before the world was complete")));
  }
  return absl::OkStatus();
}

void LocalNode::Impl::RemoveMember(const std::shared_ptr<World>& world, Rank rank,
                                   const std::string& died, absl::Time now) {
  World::Member& member = world->members[static_cast<size_t>(rank.value())];
  const std::shared_ptr<Session> session = member.session;
  if (session == nullptr) return;
  auto& memberships = session->memberships;
  memberships.erase(std::remove_if(memberships.begin(), memberships.end(),
                                   [&](const Session::Membership& m) {
                                     return m.world == world && m.rank == rank;
                                   }),
                    memberships.end());
  member.session = nullptr;
  // Who still waits is told: a callback runs once, whatever ends the membership.
  const absl::Status ended = MakeError(
      Reason::kSessionLost, absl::StrCat("rank ", rank.value(), " of world \"", world->name,
                                         "\" has left, or its session has ended"));
  if (OnReformed done = std::exchange(member.on_reformed, nullptr)) done(ended);
  if (OnJoined done = std::exchange(member.on_joined, nullptr)) done(ended);
  if (!world->formed) {
    member.state = World::Member::State::kMissing;
    DropWorldIfEmpty(world);
    return;
  }
  member.state = died.empty() ? World::Member::State::kLeft : World::Member::State::kDead;
  Actions actions;
  if (!died.empty()) {
    world->sequencer->Dead(rank, died, now, &actions);
  } else {
    // Its own pending runs end first: an orderly leaver does not leave votes behind.
    std::vector<RunHandle> pending;
    runs_.ForEach([&](RunState* run) {
      if (run->world == world && run->session == session && run->phase == RunState::Phase::kVoted) {
        pending.push_back(run->handle);
      }
    });
    for (RunHandle handle : pending) world->sequencer->Cancel(handle, rank, now, &actions);
    world->sequencer->Left(rank, now, &actions);
  }
  Apply(world, &actions, now);
  TryReform(world, now);
  DropWorldIfEmpty(world);
}

void LocalNode::Impl::DropWorldIfEmpty(const std::shared_ptr<World>& world) {
  for (const World::Member& member : world->members) {
    if (member.session != nullptr) return;
  }
  timers.Cancel(world->join_timer);
  timers.Cancel(world->reform_timer);
  timers.Cancel(world->timer);
  world->timer_due = absl::InfiniteFuture();
  world->shared.clear();
  worlds_.erase(world->id);
  const auto it = worlds_by_name_.find(std::make_pair(world->tenant, world->name));
  if (it != worlds_by_name_.end() && it->second == world) worlds_by_name_.erase(it);
}

absl::Status LocalNode::Impl::AbortWorld(Session* session, WorldId world, Rank rank, Epoch epoch,
                                         absl::string_view message, absl::Time now) {
  CHORUS_ASSIGN_OR_RETURN(const MemberRef member, FindMember(session, world, rank));
  if (!member.world->formed) {
    return NotFormed(*member.world);
  }
  Error error(Reason::kAborted);
  error.culprit.rank = rank.value();
  error.culprit.pid = session->request.pid;
  error.message = absl::StrCat("rank ", rank.value(), " aborted the world's epoch: ", message);
  const std::shared_ptr<World> kept = member.world;
  if (epoch != Epoch() && epoch != kept->sequencer->epoch()) return absl::OkStatus();
  Actions actions;
  kept->sequencer->Abort(error, now, &actions);
  Apply(kept, &actions, now);
  return absl::OkStatus();
}

// Never OK: the session gets its own error back, recorded, with the epoch that is open.
absl::Status LocalNode::Impl::DoRefuse(Session* session, const Refuse& command, absl::Time now) {
  std::shared_ptr<World> world;
  for (const RefusedMember& member : command.members) {
    CHORUS_ASSIGN_OR_RETURN(const MemberRef found, FindMember(session, command.world, member.rank));
    world = found.world;
  }
  if (world == nullptr)
    return Malformed("a refusal names the members whose calls are meant; got none");
  if (!world->formed) {
    return NotFormed(*world);
  }
  if (command.epoch > world->sequencer->epoch()) {
    return Malformed(absl::StrCat("a refusal for epoch ", command.epoch.value(), "; epoch ",
                                  world->sequencer->epoch().value(), " is open"));
  }
  Error error(command.why.reason, command.why.message);
  if (error.reason == Reason::kUnspecified) error.code = command.why.code;
  error.source = command.why.source;
  error.alone = command.why.alone && !command.by_hand;
  if (command.by_hand) {
    CHORUS_RETURN_IF_ERROR(AbortWorld(session, command.world, command.members[0].rank,
                                      command.epoch, command.why.message, now));
  } else {
    Actions actions;
    world->sequencer->Refuse(command.members, command.epoch, error, now, &actions);
    Apply(world, &actions, now);
  }
  // In any case the rank goes on in the open epoch.
  const bool alone = std::exchange(error.alone, false);
  SayOpenEpoch(*world, world->sequencer->epoch(), &error);
  error.alone = alone;
  return ToStatus(error);
}

void LocalNode::Impl::ReformWorld(Session* session, WorldId world, Rank rank,
                                  absl::Duration timeout, absl::Time now, OnReformed done) {
  absl::StatusOr<MemberRef> found = FindMember(session, world, rank);
  if (!found.ok()) return done(found.status());
  const std::shared_ptr<World> kept = found->world;
  if (stopped) return done(DrainingError());
  if (!kept->formed) {
    return done(NotFormed(*kept));
  }
  if (found->member->on_reformed != nullptr) {
    return done(MakeError(Reason::kDuplicateRank,
                          absl::StrCat("rank ", rank.value(), " has asked already")));
  }
  const bool first =
      std::none_of(kept->members.begin(), kept->members.end(),
                   [](const World::Member& member) { return member.on_reformed != nullptr; });
  found->member->on_reformed = std::move(done);
  if (first) {
    const absl::Duration patience =
        timeout > absl::ZeroDuration() ? timeout : kept->options.agree_timeout;
    const std::weak_ptr<World> weak = kept;
    kept->reform_timer = timers.Add(now + patience, [weak, patience](absl::Time) {
      const std::shared_ptr<World> world = weak.lock();
      if (world == nullptr) return;
      std::vector<int> missing;
      std::vector<OnReformed> asked;
      for (int i = 0; i < world->size(); ++i) {
        World::Member& member = world->members[static_cast<size_t>(i)];
        if (member.on_reformed != nullptr) {
          asked.push_back(std::move(member.on_reformed));
          member.on_reformed = nullptr;
        } else if (member.session != nullptr) {
          missing.push_back(i);
        }
      }
      const absl::Status late =
          MembersMissing(Reason::kAgreeTimeout,
                         absl::StrCat("world \"", world->name, "\" was not reformed after ",
                                      absl::FormatDuration(patience)),
                         missing);
      for (OnReformed& done : asked) done(late);
    });
  }
  TryReform(kept, now);
}

void LocalNode::Impl::TryReform(const std::shared_ptr<World>& world, absl::Time now) {
  int survivors = 0;
  for (const World::Member& member : world->members) {
    if (member.session == nullptr) continue;
    if (member.on_reformed == nullptr) return;
    ++survivors;
  }
  if (survivors == 0) return;
  timers.Cancel(world->reform_timer);
  ReformResult result;
  for (int rank = 0; rank < world->size(); ++rank) {
    if (world->members[static_cast<size_t>(rank)].session == nullptr) continue;
    result.survivors.push_back({Rank(rank), world->sequencer->LastPublished(Rank(rank))});
  }
  Actions actions;
  const std::vector<int32_t> moved = world->sequencer->Shrink(now, &actions);
  Apply(world, &actions, now);
  std::vector<World::Member> members(static_cast<size_t>(survivors));
  std::vector<OnReformed> callbacks(static_cast<size_t>(survivors));
  for (size_t old_rank = 0; old_rank < world->members.size(); ++old_rank) {
    World::Member& member = world->members[old_rank];
    if (member.session == nullptr) continue;
    const Rank rank(moved[old_rank]);
    for (Session::Membership& membership : member.session->memberships) {
      if (membership.world == world && membership.rank.value() == static_cast<int>(old_rank)) {
        membership.rank = rank;
        membership.epoch = world->sequencer->epoch();
      }
    }
    callbacks[static_cast<size_t>(rank.value())] = std::move(member.on_reformed);
    member.on_reformed = nullptr;
    members[static_cast<size_t>(rank.value())] = std::move(member);
  }
  world->members = std::move(members);
  world->communicators.clear();
  result.size = survivors;
  result.epoch = world->sequencer->epoch();
  Note(FlightKind::kReformed, now, nullptr, world.get());
  for (size_t rank = 0; rank < callbacks.size(); ++rank) {
    result.rank = Rank(static_cast<int32_t>(rank));
    if (callbacks[rank] != nullptr) callbacks[rank](result);
  }
}

void LocalNode::Impl::AbortAll(absl::Time now) {
  stopped = true;
  const Error error = ErrorOf(DrainingError());
  std::vector<std::shared_ptr<World>> all;
  for (const auto& entry : worlds_) all.push_back(entry.second);
  for (const std::shared_ptr<World>& world : all) {
    for (World::Member& member : world->members) {
      if (OnReformed done = std::exchange(member.on_reformed, nullptr)) done(ToStatus(error));
      if (OnJoined done = std::exchange(member.on_joined, nullptr)) done(ToStatus(error));
    }
    if (!world->formed) continue;
    Actions actions;
    world->sequencer->Abort(error, now, &actions);
    Apply(world, &actions, now);
  }
  // What is left is of one session, or launched.
  std::vector<RunHandle> left;
  runs_.ForEach([&left](RunState* run) { left.push_back(run->handle); });
  for (RunHandle handle : left) {
    if (RunState* run = runs_.Find(handle)) FailRun(run, error, now);
  }
  // And who waits for commands that have not come.
  for (const auto& entry : sessions_) {
    const auto held = std::exchange(entry.second->held, {});
    for (const auto& frame : held) {
      for (const OnOutcome& done : frame.second.done) {
        done({Sequence(frame.first), ToStatus(error)});
      }
    }
    auto waiters = std::exchange(entry.second->outcome_waiters, {});
    for (auto& waiter : waiters) waiter.second.Call({Sequence(waiter.first), ToStatus(error)});
  }
}

void LocalNode::Impl::ArmWorldTimer(const std::shared_ptr<World>& world) {
  const absl::Time due = world->sequencer->NextDeadline();
  if (due >= world->timer_due) return;
  timers.Cancel(world->timer);
  world->timer_due = due;
  const std::weak_ptr<World> weak = world;
  world->timer = timers.Add(due, [this, weak](absl::Time now) {
    const std::shared_ptr<World> world = weak.lock();
    if (world == nullptr) return;
    world->timer_due = absl::InfiniteFuture();
    Actions actions;
    world->sequencer->Advance(now, &actions);
    Apply(world, &actions, now);
    ArmWorldTimer(world);
  });
}

}  // namespace chorus
