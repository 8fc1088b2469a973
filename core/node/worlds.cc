#include "core/node/worlds.h"

#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/work.h"
#include "core/node/describe.h"

namespace chorus::node {
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

// To a call that waits where its session asks once more.
absl::Status AsksAgain(Rank rank) {
  return MakeError(Reason::kCancelled,
                   absl::StrCat("rank ", rank.value(), " has asked again, by another call"));
}

}  // namespace

absl::StatusOr<Worlds::MemberRef> Worlds::FindMember(const Session& session, WorldId world,
                                                     Rank rank) const {
  for (const Session::Membership& membership : session.memberships) {
    if (membership.world->id == world && membership.rank == rank) {
      return MemberRef{membership.world,
                       &membership.world->members[static_cast<size_t>(rank.value())]};
    }
  }
  return UnknownName(
      absl::StrCat("this session is not rank ", rank.value(), " of world ", world.value()));
}

// --- Joining ------------------------------------------------------------------------------------

absl::Status Worlds::CheckJoin(const Session& session, const JoinRequest& request) const {
  CHORUS_RETURN_IF_ERROR(request.Check());
  if (std::find(session.devices.begin(), session.devices.end(), *request.device) ==
      session.devices.end()) {
    return UnknownName(
        absl::StrCat("device ", request.device->value(), " is none of the session's"));
  }
  return absl::OkStatus();
}

std::shared_ptr<World> Worlds::FindByName(const Session& session, const std::string& name) const {
  const auto it = by_name_.find(std::make_pair(session.tenant->name, name));
  return it == by_name_.end() ? nullptr : it->second;
}

absl::StatusOr<std::shared_ptr<World>> Worlds::FindOrMake(const Session& session,
                                                          const JoinRequest& request,
                                                          absl::Time now) {
  if (auto world = FindByName(session, request.name)) return world;
  CHORUS_ASSIGN_OR_RETURN(Charge count_charge,
                          session.tenant->budget->Charge(Domain::kHost, Resource::kWorlds, 1));
  auto world = std::make_shared<World>(session.tenant->budget);
  world->count_charge = std::move(count_charge);
  world->id = WorldId(++last_world_);
  world->tenant = session.tenant->name;
  world->name = request.name;
  CHORUS_RETURN_IF_ERROR(world->MakeMembers(request.size));
  world->options = options_->sequencer;
  if (request.agree_timeout > absl::ZeroDuration()) {
    world->options.agree_timeout = request.agree_timeout;
  }
  if (request.exec_timeout > absl::ZeroDuration()) {
    world->options.exec_timeout = request.exec_timeout;
  }
  world->options.check_call_sites = request.check_call_sites;
  world->first_joined = now;
  worlds_[world->id] = world;
  by_name_[std::make_pair(world->tenant, world->name)] = world;
  return world;
}

// The first whose time is over ends it for all that wait: later it would be missing itself, and
// named beside those that are to blame.
void Worlds::LimitJoin(const std::shared_ptr<World>& joining, Rank joined_rank,
                       absl::Duration patience, absl::Time now) {
  const std::weak_ptr<World> weak = joining;
  TimerQueue::Id& timer = joining->members[static_cast<size_t>(joined_rank.value())].patience;
  timer = timers_->Add(now + patience, [this, weak, patience](absl::Time then) {
    const std::shared_ptr<World> world = weak.lock();
    if (world == nullptr) return;
    std::vector<int> missing;
    std::vector<Rank> joined_ranks;
    for (int rank = 0; rank < world->size(); ++rank) {
      if (world->members[static_cast<size_t>(rank)].state == World::Member::State::kJoined) {
        joined_ranks.push_back(Rank(rank));
      } else {
        missing.push_back(rank);
      }
    }
    const absl::Status timeout_error =
        MembersMissing(Reason::kJoinTimeout,
                       absl::StrCat("world \"", world->name, "\" of ", world->size(),
                                    " was not complete after ", absl::FormatDuration(patience)),
                       missing);
    for (Rank rank : joined_ranks) {
      OnJoined done = TakeJoiner(&world->members[static_cast<size_t>(rank.value())]);
      RemoveMember(world, rank, /*died=*/"", then);
      if (done != nullptr) done(timeout_error);
    }
  });
}

void Worlds::Join(const std::shared_ptr<Session>& session, const JoinRequest& original,
                  absl::Time now, OnJoined done) {
  JoinRequest request = original;
  if (!request.device.has_value()) request.device = session->devices[0];
  const absl::Status checked = CheckJoin(*session, request);
  if (!checked.ok()) {
    const std::shared_ptr<World> world = FindByName(*session, request.name);
    if (world != nullptr) RefuseJoined(world, request.rank, *session, checked, now);
    return done(checked);
  }
  if (const std::shared_ptr<World> existing_world = FindByName(*session, request.name)) {
    RemoveEnded(existing_world, now);
  }
  // Its client has seen the end of a call that has not been withdrawn here yet.
  if (OnJoined before = EndJoin(*session, request.name, request.rank, now)) {
    before(AsksAgain(request.rank));
  }
  absl::StatusOr<std::shared_ptr<World>> world_or = FindOrMake(*session, request, now);
  if (!world_or.ok()) return done(world_or.status());
  const std::shared_ptr<World> world = *std::move(world_or);
  const auto needs_reform = [&] {
    return MakeError(
        Reason::kNeedsReform,
        absl::StrCat("world \"", request.name, "\" has lost rank ", request.rank.value(),
                     " and is still in use by others; a world does not grow again: let the others "
                     "leave, or choose another name"));
  };
  const bool has_shrunk = world->size() != world->first_size;
  if (has_shrunk && request.size == world->first_size) return done(needs_reform());
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
    const absl::Status why = MakeError(
        Reason::kMismatch,
        absl::StrCat("rank ", request.rank.value(), " joins world \"", request.name,
                     "\" with check_call_sites ", CheckCallSitesName(request.check_call_sites),
                     "; rank ", other, " has joined it with ",
                     CheckCallSitesName(world->options.check_call_sites)));
    RefuseJoined(world, request.rank, *session, why, now);
    return done(why);
  }
  World::Member& member = world->members[static_cast<size_t>(request.rank.value())];
  if (member.state == World::Member::State::kJoined) {
    return done(MakeError(Reason::kDuplicateRank,
                          absl::StrCat("rank ", request.rank.value(), " of world \"", request.name,
                                       "\" is taken by pid ", member.pid)));
  }
  if (world->formed()) return done(needs_reform());
  for (int rank = 0; rank < world->size(); ++rank) {
    const World::Member& other = world->members[static_cast<size_t>(rank)];
    if (other.state == World::Member::State::kJoined && other.device == *request.device) {
      const absl::Status why =
          MakeError(Reason::kQuota,
                    absl::StrCat("device ", request.device->value(), " is rank ", rank,
                                 "'s in world \"", request.name,
                                 "\"; each rank of a world needs a device of its own (start the "
                                 "daemon with more: --host_devices)"));
      RefuseJoined(world, request.rank, *session, why, now);
      return done(why);
    }
  }
  member.session = session;
  member.device = *request.device;
  member.pid = session->request.pid;
  member.state = World::Member::State::kJoined;
  member.on_joined = std::move(done);
  LimitJoin(
      world, request.rank,
      request.join_timeout > absl::ZeroDuration() ? request.join_timeout : options_->join_timeout,
      now);
  session->memberships.push_back({world, request.rank, Epoch(1)});
  const bool complete =
      std::all_of(world->members.begin(), world->members.end(),
                  [](const World::Member& m) { return m.state == World::Member::State::kJoined; });
  if (complete) Form(world, now);
}

OnJoined Worlds::EndJoin(const Session& session, const std::string& name, Rank rank,
                         absl::Time now) {
  const std::shared_ptr<World> world = FindByName(session, name);
  if (world == nullptr || world->formed() || rank.value() >= world->size()) return nullptr;
  World::Member& member = world->members[static_cast<size_t>(rank.value())];
  if (member.session.get() != &session) return nullptr;
  OnJoined done = TakeJoiner(&member);
  RemoveMember(world, rank, /*died=*/"", now);
  return done;
}

OnJoined Worlds::TakeJoiner(World::Member* member) {
  timers_->Cancel(member->patience);
  return std::exchange(member->on_joined, nullptr);
}

void Worlds::RefuseJoined(const std::shared_ptr<World>& world, Rank rank, const Session& session,
                          const absl::Status& why, absl::Time now) {
  // No rank waits for a second one of a rank that is there already.
  if (world->formed() || rank.value() < 0 || rank.value() >= world->size() ||
      world->members[static_cast<size_t>(rank.value())].state != World::Member::State::kMissing) {
    return;
  }
  Error error = ErrorOf(why);
  error.culprit.rank = rank.value();
  error.culprit.pid = session.request.pid;
  const std::string pid =
      session.request.pid >= 0 ? absl::StrCat(" (pid ", session.request.pid, ")") : "";
  error.message = absl::StrCat("rank ", rank.value(), pid, " was not let in: ", error.message);
  for (int other = 0; other < world->size(); ++other) {
    OnJoined done = TakeJoiner(&world->members[static_cast<size_t>(other)]);
    RemoveMember(world, Rank(other), /*died=*/"", now);
    if (done != nullptr) done(ToStatus(error));
  }
}

void Worlds::Form(const std::shared_ptr<World>& world, absl::Time now) {
  world->agreement =
      std::make_unique<Agreement>(world.get(), world->options, queue_, timers_, background_);
  failures_->Note(FlightKind::kWorldFormed, now, nullptr, world.get());
  int64_t room = kMaxListed;
  const WorldInfo info = Describe(*world, now, &room);
  CountWork(kMaxListed - room);
  for (World::Member& member : world->members) {
    OnJoined done = TakeJoiner(&member);
    if (done == nullptr) continue;
    CountWork(world->size());  // each is told of all
    done(info);
  }
}

// --- Members ------------------------------------------------------------------------------------

absl::StatusOr<GroupId> Worlds::CreateGroup(const Session& session,
                                            const CreateGroupRequest& request) {
  CHORUS_RETURN_IF_ERROR(request.Check());
  CHORUS_ASSIGN_OR_RETURN(const MemberRef member, FindMember(session, request.world, request.rank));
  if (!member.world->formed()) {
    return NotFormed(*member.world);
  }
  absl::optional<InstanceKey::Request> position;
  if (request.step.has_value()) position = InstanceKey::Request{*request.step, *request.number};
  return member.world->agreement->AddGroup(request.rank, request.members, position, [&] {
    return member.world->ReserveGroup(request.members.size());
  });
}

absl::Status Worlds::Leave(const Session& session, WorldId world, Rank rank, absl::Time now) {
  CHORUS_ASSIGN_OR_RETURN(const MemberRef member, FindMember(session, world, rank));
  OnJoined done = TakeJoiner(member.member);
  RemoveMember(member.world, rank, /*died=*/"", now);
  if (done != nullptr) {
    done(MakeError(Reason::kCancelled,
                   absl::StrCat("rank ", rank.value(), " left before the world was complete")));
  }
  return absl::OkStatus();
}

void Worlds::RemoveMember(const std::shared_ptr<World>& world, Rank rank, const std::string& died,
                          absl::Time now) {
  World::Member& member = world->members[static_cast<size_t>(rank.value())];
  const std::shared_ptr<Session> session = member.session;
  if (session == nullptr) return;
  constexpr int64_t kWork = 64;  // its peers are told, or the world ends with it
  CountWork(kWork);
  auto& memberships = session->memberships;
  memberships.erase(std::remove_if(memberships.begin(), memberships.end(),
                                   [&](const Session::Membership& m) {
                                     return m.world == world && m.rank == rank;
                                   }),
                    memberships.end());
  member.session = nullptr;
  // A call that still waits is told: a callback runs once, whatever ends the membership.
  const absl::Status status = MakeError(
      Reason::kSessionLost, absl::StrCat("rank ", rank.value(), " of world \"", world->name,
                                         "\" has left, or its session has ended"));
  if (OnReformed done = TakeReformer(&member)) done(status);
  if (OnJoined done = TakeJoiner(&member)) done(status);
  if (!world->formed()) {
    member.state = World::Member::State::kMissing;
    DropIfEmpty(world);
    return;
  }
  member.state = died.empty() ? World::Member::State::kLeft : World::Member::State::kDead;
  if (!died.empty()) {
    world->agreement->Dead(rank, died, now);
  } else {
    world->agreement->Left(rank, voted_runs_(*world, *session, rank), now);
  }
  TryReform(world, now);
  DropIfEmpty(world);
}

void Worlds::DropIfEmpty(const std::shared_ptr<World>& world) {
  for (const World::Member& member : world->members) {
    if (member.session != nullptr) return;
  }
  world->shared.Clear();
  world->count_charge = Charge();
  worlds_.erase(world->id);
  const auto it = by_name_.find(std::make_pair(world->tenant, world->name));
  if (it != by_name_.end() && it->second == world) by_name_.erase(it);
}

absl::Status Worlds::Abort(const Session& session, const AbortWorldRequest& request,
                           absl::Time now) {
  CHORUS_ASSIGN_OR_RETURN(const MemberRef member, FindMember(session, request.world, request.rank));
  if (!member.world->formed()) {
    return NotFormed(*member.world);
  }
  Error error(Reason::kAborted);
  error.culprit.rank = request.rank.value();
  error.culprit.pid = session.request.pid;
  error.message =
      absl::StrCat("rank ", request.rank.value(), " aborted the world's epoch: ", request.message);
  const std::shared_ptr<World> world = member.world;
  if (request.epoch != Epoch() && request.epoch != world->agreement->epoch()) {
    return absl::OkStatus();
  }
  world->agreement->Abort(error, now);
  return absl::OkStatus();
}

absl::Status Worlds::Refuse(const Session& session, const chorus::Refuse& command, absl::Time now) {
  if (command.members.empty()) {
    return Malformed("a refusal names the members whose calls are meant; got none");
  }
  const auto membership =
      std::find_if(session.memberships.begin(), session.memberships.end(),
                   [&](const Session::Membership& m) { return m.world->id == command.world; });
  if (membership == session.memberships.end()) {
    return FindMember(session, command.world, command.members[0].rank).status();
  }
  const std::shared_ptr<World> world = membership->world;
  if (!world->formed()) {
    return NotFormed(*world);
  }
  // It was on its way when the world was reformed: its members have other numbers, and count anew.
  const bool is_over =
      command.epoch != Epoch() && !world->agreement->CheckMembership(command.epoch).ok();
  for (const RefusedMember& member : command.members) {
    // A session may have a thousand memberships.
    const bool is_rank = member.rank.value() >= 0 && member.rank.value() < world->size();
    if (is_over ||
        (is_rank &&
         world->members[static_cast<size_t>(member.rank.value())].session.get() == &session)) {
      continue;
    }
    CHORUS_RETURN_IF_ERROR(FindMember(session, command.world, member.rank).status());
  }
  if (command.epoch > world->agreement->epoch()) {
    return Malformed(absl::StrCat("a refusal for epoch ", command.epoch.value(), "; epoch ",
                                  world->agreement->epoch().value(), " is open"));
  }
  Error error(command.why.reason, command.why.message);
  if (error.reason == Reason::kUnspecified) error.code = command.why.code;
  // A gap of another log, of which the rank was given something. As an outcome it would say that
  // this log has not taken the command.
  if (error.reason == Reason::kSequenceGap) error.SetReason(Reason::kAborted);
  error.source = command.why.source;
  error.alone = command.why.alone && !command.by_hand;
  if (command.by_hand && !is_over) {
    CHORUS_RETURN_IF_ERROR(
        Abort(session, {command.world, command.members[0].rank, command.epoch, command.why.message},
              now));
  } else if (!is_over) {
    world->agreement->Refuse(command.members, command.epoch, error, now).CarryOut(now);
  }
  // In any case the rank goes on in the open epoch.
  const bool alone = std::exchange(error.alone, false);
  SayOpenEpoch(*world, world->agreement->epoch(), &error);
  error.alone = alone;
  return ToStatus(error);
}

void Worlds::Reform(const Session& session, const ReformWorldRequest& request, absl::Time now,
                    OnReformed done) {
  const absl::Status checked = request.Check();
  if (!checked.ok()) return done(checked);
  absl::StatusOr<MemberRef> caller = FindMember(session, request.world, request.rank);
  if (!caller.ok()) return done(caller.status());
  const std::shared_ptr<World> world = caller->world;
  if (stopped_) return done(DrainingError());
  if (!world->formed()) {
    return done(NotFormed(*world));
  }
  if (OnReformed before = TakeReformer(caller->member)) before(AsksAgain(request.rank));
  caller->member->on_reformed = std::move(done);
  LimitReform(world, request.rank,
              request.timeout > absl::ZeroDuration() ? request.timeout
                                                     : ReformWorldRequest::kDefaultTimeout,
              now);
  TryReform(world, now);
}

void Worlds::WithdrawReform(const Session& session, WorldId world, Rank rank) {
  const absl::StatusOr<MemberRef> caller = FindMember(session, world, rank);
  if (caller.ok()) TakeReformer(caller->member);
}

OnReformed Worlds::TakeReformer(World::Member* member) {
  timers_->Cancel(member->patience);
  return std::exchange(member->on_reformed, nullptr);
}

void Worlds::LimitReform(const std::shared_ptr<World>& reforming, Rank rank,
                         absl::Duration patience, absl::Time now) {
  const std::weak_ptr<World> weak = reforming;
  TimerQueue::Id& timer = reforming->members[static_cast<size_t>(rank.value())].patience;
  timer = timers_->Add(now + patience, [this, weak, patience](absl::Time) {
    const std::shared_ptr<World> world = weak.lock();
    if (world == nullptr) return;
    std::vector<int> missing;
    std::vector<OnReformed> callbacks;
    for (int i = 0; i < world->size(); ++i) {
      World::Member& member = world->members[static_cast<size_t>(i)];
      if (OnReformed done = TakeReformer(&member)) {
        callbacks.push_back(std::move(done));
      } else if (member.session != nullptr) {
        missing.push_back(i);
      }
    }
    const absl::Status timeout_error =
        MembersMissing(Reason::kAgreeTimeout,
                       absl::StrCat("world \"", world->name, "\" was not reformed after ",
                                    absl::FormatDuration(patience)),
                       missing);
    for (OnReformed& done : callbacks) done(timeout_error);
  });
}

void Worlds::TryReform(const std::shared_ptr<World>& world, absl::Time now) {
  int survivors = 0;
  for (const World::Member& member : world->members) {
    if (member.session == nullptr) continue;
    // One that has ended asks no more, and is going to leave.
    if (member.on_reformed == nullptr || member.session->dead()) return;
    ++survivors;
  }
  if (survivors == 0) return;
  ReformResult result;
  for (int rank = 0; rank < world->size(); ++rank) {
    if (world->members[static_cast<size_t>(rank)].session == nullptr) continue;
    result.survivors.push_back({Rank(rank), world->agreement->LastPublished(Rank(rank))});
  }
  const std::vector<int32_t> new_ranks = world->agreement->Shrink(now);
  std::vector<World::Member> members(static_cast<size_t>(survivors));
  std::vector<OnReformed> callbacks(static_cast<size_t>(survivors));
  for (size_t old_rank = 0; old_rank < world->members.size(); ++old_rank) {
    World::Member& member = world->members[old_rank];
    if (member.session == nullptr) continue;
    const Rank rank(new_ranks[old_rank]);
    for (Session::Membership& membership : member.session->memberships) {
      if (membership.world == world && membership.rank.value() == static_cast<int>(old_rank)) {
        membership.rank = rank;
        membership.epoch = world->agreement->epoch();
      }
    }
    callbacks[static_cast<size_t>(rank.value())] = TakeReformer(&member);
    members[static_cast<size_t>(rank.value())] = std::move(member);
  }
  world->members = std::move(members);
  world->communicators.reset();  // they have other devices; gangs under way keep theirs
  result.size = survivors;
  result.epoch = world->agreement->epoch();
  failures_->Note(FlightKind::kReformed, now, nullptr, world.get());
  for (size_t rank = 0; rank < callbacks.size(); ++rank) {
    result.rank = Rank(static_cast<int32_t>(rank));
    if (callbacks[rank] == nullptr) continue;
    CountWork(survivors);  // each is told of all
    callbacks[rank](result);
  }
}

// --- Commands -----------------------------------------------------------------------------------

size_t Worlds::DropTape(const Session& session, absl::Span<const chorus::DropTape::Entry> entries,
                        absl::Time now) {
  // A frame has thousands of entries, and a session may have as many memberships as there are
  // worlds.
  using WorldRank = std::pair<WorldId, Rank>;
  const auto world_rank_of = [](const Session::Membership* membership) {
    return WorldRank(membership->world->id, membership->rank);
  };
  absl::InlinedVector<const Session::Membership*, 8> memberships;
  for (const Session::Membership& membership : session.memberships) {
    if (membership.world->formed()) memberships.push_back(&membership);
  }
  std::sort(memberships.begin(), memberships.end(),
            [&](const auto* a, const auto* b) { return world_rank_of(a) < world_rank_of(b); });
  CountWork(static_cast<int64_t>(memberships.size()));
  size_t done = 0;
  while (done < entries.size() && (done == 0 || SliceHasTime())) {
    const chorus::DropTape::Entry& entry = entries[done++];
    const auto world = worlds_.find(entry.world);
    if (world == worlds_.end() || !world->second->formed()) continue;
    Agreement* const agreement = world->second->agreement.get();
    const absl::StatusOr<absl::Span<const Rank>> members = agreement->GroupMembers(entry.key.group);
    if (!members.ok() || entry.member.value() < 0 ||
        static_cast<size_t>(entry.member.value()) >= members->size()) {
      continue;
    }
    const WorldRank world_rank(entry.world, (*members)[static_cast<size_t>(entry.member.value())]);
    const auto membership =
        std::lower_bound(memberships.begin(), memberships.end(), world_rank,
                         [&](const auto* m, const WorldRank& to) { return world_rank_of(m) < to; });
    if (membership == memberships.end() || world_rank_of(*membership) != world_rank) continue;
    // The tape has a seat for each of the group; it is an event of the world's, too.
    constexpr int64_t kWorkPerEntry = 8;
    CountWork(kWorkPerEntry + static_cast<int64_t>(members->size()));
    agreement->DropTape(world_rank.second, entry.key, entry.consumed, (*membership)->epoch, now);
  }
  return done;
}

absl::Status Worlds::EnterEpoch(Session* session, const chorus::EnterEpoch& command) {
  bool is_member = false;
  for (Session::Membership& membership : session->memberships) {
    if (membership.world->id != command.world || !membership.world->formed()) continue;
    is_member = true;
    const Epoch open_epoch = membership.world->agreement->epoch();
    // It was on its way when the world was reformed, and the session is beyond it.
    if (!membership.world->agreement->CheckMembership(command.epoch).ok()) continue;
    if (command.epoch < membership.epoch || command.epoch > open_epoch) {
      return Malformed(absl::StrCat("epoch ", command.epoch.value(), " of world ",
                                    command.world.value(), " cannot be entered: the session is in ",
                                    membership.epoch.value(), ", open is ", open_epoch.value()));
    }
    membership.epoch = command.epoch;
  }
  if (is_member) return absl::OkStatus();
  return UnknownName(absl::StrCat("this session is no member of world ", command.world.value()));
}

// --- By the node --------------------------------------------------------------------------------

void Worlds::RemoveSession(const std::shared_ptr<Session>& session, const std::string& died,
                           absl::Time now) {
  leaving_.push_back({session, died, nullptr});
  Continue(now);
}

bool Worlds::Continue(absl::Time now) {
  if (leaving_.empty()) return false;
  do {
    const Leaving next = leaving_.front();
    if (next.session != nullptr && !next.session->memberships.empty()) {
      const Session::Membership membership = next.session->memberships.back();
      RemoveMember(membership.world, membership.rank, next.died, now);
      continue;
    }
    leaving_.pop_front();
    if (next.then != nullptr) next.then();
  } while (!leaving_.empty() && SliceHasTime());
  return true;
}

void Worlds::AfterLeaving(std::function<void()> then) {
  if (leaving_.empty()) return then();
  leaving_.push_back({nullptr, "", std::move(then)});
}

void Worlds::RemoveEnded(const std::shared_ptr<World>& world, absl::Time now) {
  std::vector<Leaving> ended_sessions;
  for (const Leaving& leaving : leaving_) {
    if (leaving.session == nullptr) continue;
    ended_sessions.push_back({leaving.session, leaving.died, nullptr});
  }
  for (const Leaving& leaving : ended_sessions) {
    const auto& memberships = leaving.session->memberships;
    const auto next = [&] {
      return std::find_if(memberships.begin(), memberships.end(),
                          [&](const Session::Membership& m) { return m.world == world; });
    };
    // Which ranks it has may change with each that goes (TryReform).
    for (auto m = next(); m != memberships.end(); m = next()) {
      RemoveMember(world, m->rank, leaving.died, now);
    }
  }
}

void Worlds::Stop(const Error& why, absl::Time now) {
  stopped_ = true;
  std::vector<std::shared_ptr<World>> worlds;
  for (const auto& entry : worlds_) worlds.push_back(entry.second);
  for (const std::shared_ptr<World>& world : worlds) {
    for (World::Member& member : world->members) {
      if (OnReformed done = TakeReformer(&member)) done(ToStatus(why));
      if (OnJoined done = TakeJoiner(&member)) done(ToStatus(why));
    }
    if (world->formed()) world->agreement->Abort(why, now);
  }
}

}  // namespace chorus::node
