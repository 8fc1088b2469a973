#include "core/collective/sequencer.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/source_line.h"
#include "core/base/work.h"

namespace chorus {
namespace {

// Of a counter's line its end, which tells lines apart: rows are charged as if they were of one
// size.
constexpr size_t kLineBytes = 128;
// Of the words in which a member that is out of line is spoken of.
constexpr size_t kWhyBytes = 512;
// To let go of an entry, and of its tape.
constexpr int64_t kWorkPerTape = 4;
// So much is looked at in one piece of work: pending instances, or runs by their handles; runs of a
// list; what differs and is in its grace; for what fails, who consumes it; of a producer's
// consumers, whether they have failed.
constexpr int64_t kLooksOfWork = 4;
constexpr int64_t kHandlesOfWork = 8;
constexpr int64_t kDifferingOfWork = 8;
constexpr int64_t kConsumersOfWork = 16;
constexpr int64_t kLeaversOfWork = 32;
// To enter an instance into instance_by_sort_key_.
constexpr int64_t kWorkToIndex = 3;
// To say which rank has passed a call, and to fail an instance or a run.
constexpr int64_t kWorkPerError = 32;
constexpr int64_t kWorkPerFailed = 4;
constexpr int64_t kWorkPerRefused = 4;      // a call of a group, or a gradient
constexpr int64_t kWorkPerRefusedPair = 8;  // which may add a counter
constexpr int64_t kRefusedSeatsOfWork = 8;
constexpr int32_t kSeatsOfWork = 4;  // of an instance that is made
// Of a vote whose rows are compared: for each that it is compared with, and rows of its own lists.
constexpr int64_t kWorkPerCompared = 2;
constexpr int64_t kRowsOfWork = 32;

// Of a row of a list that grows by doubling; of a row of a tree, whose nodes have room for three at
// least and are a third full; of a row of a table, which is at least a third full once it has
// grown, and has a byte more for each slot.
template <typename T>
constexpr int64_t kInList = 2 * sizeof(T);
template <typename Tree>
constexpr int64_t kInTree = 3 * (sizeof(typename Tree::value_type) + 16);
template <typename Table>
constexpr int64_t kInTable = 3 * (sizeof(typename Table::value_type) + 1);

// Steps below are over for the member.
int64_t OverUntil(const sequencer_tables::Member& member) {
  return member.step + (member.left_rest ? 1 : 0);
}

// The end of the line of the member's last call.
void KeepLine(const std::string& source, sequencer_tables::Counter* counter) {
  const size_t size = source.size();
  counter->last.assign(source, size - std::min(size, kLineBytes), kLineBytes);
}

// Of a row that is free from now on; `counted` has the bytes of it.
void LetGoOfPath(InstanceKey* key, int64_t* counted) {
  *counted -= HeapBytesOf(*key);
  key->path.clear();
  key->path.shrink_to_fit();
}

// What a run adds to its gang's.
int64_t SizeOf(const Vote& vote) {
  return static_cast<int64_t>(vote.what->participations.size()) + vote.results;
}

}  // namespace

Sequencer::Sequencer(int world_size, SequencerOptions options) : options_(options) {
  members_.resize(std::max(world_size, 0));
  groups_.push_back(GroupOfAll());
  group_members_ = size();
}

// --- Membership ---------------------------------------------------------------------------------

void Sequencer::SetMember(Rank rank, MemberInfo info) {
  if (IsRank(rank)) members_[rank.value()].info = std::move(info);
}

absl::StatusOr<GroupId> Sequencer::AddGroup(Rank rank, absl::Span<const Rank> members,
                                            absl::optional<InstanceKey::Request> request,
                                            ReserveGroup reserve) {
  if (members.empty()) return Malformed("a group needs at least one member; got none");
  std::vector<int32_t> list;
  std::vector<bool> seen(members_.size(), false);
  for (const Rank member : members) {
    if (!IsRank(member)) {
      return Malformed(absl::StrCat("group member ", member.value(), " is no rank of a world of ",
                                    size(), "; expected 0 to ", size() - 1));
    }
    if (seen[member.value()]) {
      return Malformed(absl::StrCat("rank ", member.value(), " is twice in the group's list"));
    }
    seen[member.value()] = true;
    list.push_back(member.value());
  }
  if (!IsRank(rank) || !seen[rank.value()]) {
    return Malformed(absl::StrCat("rank ", rank.value(), " asked for a group of ranks ",
                                  absl::StrJoin(list, ","), " and is not one of them"));
  }
  if (request.has_value() && (request->step < 0 || request->step >= kMaxCallNumber ||
                              request->number < 0 || request->number >= kMaxCallNumber)) {
    return Malformed(absl::StrCat("request ", request->number, " for a group in step ",
                                  request->step, ": expected numbers from 0 to 2^48 - 1"));
  }
  const InstanceKey::Request first{members_[rank.value()].step, 0};
  InstanceKey::Request wanted_request = first;
  bool is_new = true;
  const auto requests_of_list = group_requests_.find(list);
  if (requests_of_list != group_requests_.end()) {
    const auto next = requests_of_list->second.next.find(rank.value());
    if (next != requests_of_list->second.next.end())
      wanted_request = std::max(wanted_request, next->second);
    if (request.has_value()) wanted_request = *request;
    is_new = requests_of_list->second.groups.count(wanted_request) == 0;
  } else if (request.has_value()) {
    wanted_request = *request;
  }
  if (is_new && num_groups() >= options_.max_groups) {
    return MakeError(Reason::kQuota,
                     absl::StrCat("the world has been given ", num_groups(),
                                  " groups, as many as it may in its life: ask for a group once, "
                                  "and keep it"));
  }
  if (is_new) CHORUS_RETURN_IF_ERROR(reserve());
  GroupRequests& requests = group_requests_[list];
  InstanceKey::Request& next = requests.next[rank.value()];
  next = std::max(next, InstanceKey::Request{wanted_request.step, wanted_request.number + 1});
  if (is_new) {
    Group group(std::vector<Rank>(members.begin(), members.end()));
    for (const Rank member : members) {
      if (members_[member.value()].state == Member::State::kDead && group.dead.value() < 0) {
        group.dead = member;
      }
    }
    group.not_members = dead_.size();
    group_members_ += static_cast<int64_t>(members.size());
    requests.groups.emplace(wanted_request, GroupId(num_groups()));
    ++requested_groups_;
    groups_.push_back(std::move(group));
  }
  return requests.groups.at(wanted_request);
}

Sequencer::Group Sequencer::GroupOfAll() const {
  std::vector<Rank> ranks;
  for (int32_t rank = 0; rank < size(); ++rank) ranks.push_back(Rank(rank));
  return Group(std::move(ranks));
}

// Absent: all members are alive. Each that has died is looked for when somebody asks for the first
// time: a world may have thousands of groups that nobody uses any more.
absl::optional<Rank> Sequencer::FirstDead(Group* group) {
  for (; group->dead.value() < 0 && group->not_members < dead_.size(); ++group->not_members) {
    CountWork(1);
    const Rank rank = dead_[group->not_members];
    if (group->SeatOf(rank) != kNone) group->dead = rank;
  }
  return group->dead.value() < 0 ? absl::nullopt : absl::make_optional(group->dead);
}

absl::StatusOr<absl::Span<const Rank>> Sequencer::GroupMembers(GroupId group) const {
  if (group.value() < 0 || group.value() >= num_groups() ||
      groups_[group.value()].members.empty()) {
    return UnknownName(absl::StrCat("no group ", group.value(), " in this world"));
  }
  return absl::MakeConstSpan(groups_[group.value()].members);
}

// --- Submit: what a vote names ------------------------------------------------------------------

absl::Status Sequencer::CheckGroups(const Vote& vote) const {
  const size_t slots = vote.slots == nullptr ? 0 : vote.slots->size();
  if (vote.groups.size() != slots) {
    return Malformed(
        absl::StrCat("the graph has ", slots, " group slots; the run binds ", vote.groups.size()));
  }
  for (size_t s = 0; s < slots; ++s) {
    const GroupBinding& binding = vote.groups[s];
    const GroupSlot& slot = (*vote.slots)[s];
    const int32_t id = binding.group.value();
    if (id < 0 || id >= num_groups() || groups_[id].members.empty()) {
      return Malformed(absl::StrCat("group slot ", s, " is bound to group ", id,
                                    ", which this world does not have"));
    }
    if (!binding.base.empty() && binding.base.size() != slot.held.size()) {
      return Malformed(absl::StrCat("group slot ", s, " holds ", slot.held.size(),
                                    " members; the run gives ", binding.base.size(), " positions"));
    }
    for (const CallPosition& base : binding.base) {
      if (base.step >= 0 && base.step < kMaxCallNumber && base.call >= 0 &&
          base.call < kMaxCallNumber && base.part >= 0) {
        continue;
      }
      return Malformed(absl::StrCat("group slot ", s, " is bound at ", base.ToString(),
                                    "; expected numbers from 0 to 2^48 - 1"));
    }
    for (const GroupRank held : slot.held) {
      if (held.value() < 0 || held.value() >= static_cast<int32_t>(groups_[id].members.size())) {
        return Malformed(absl::StrCat("group slot ", s, " holds member ", held.value(), "; group ",
                                      id, " has ", groups_[id].members.size()));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Sequencer::ResolveKeys(const Vote& vote, bool late) {
  ForgetKeys();
  absl::Status resolved = ResolveAll(vote, late);
  if (!resolved.ok()) ForgetKeys();
  return resolved;
}

absl::Status Sequencer::ResolveAll(const Vote& vote, bool late) {
  CHORUS_RETURN_IF_ERROR(CheckGroups(vote));
  const size_t n = vote.what->participations.size();
  keys_.resize(n);
  seats_.resize(n);
  asked_.assign(n, 0);
  size_t held = 0;
  for (const GroupBinding& binding : vote.groups) {
    held += (*vote.slots)[&binding - vote.groups.data()].held.size();
  }
  moves_of_.assign(held, kNone);
  moves_.clear();
  steps_.clear();
  pair_moves_.clear();
  requests_.clear();
  newest_request_.clear();
  size_t list_index = 0;
  for (size_t i = 0; i < n;) {
    const CallList list = vote.what->lists.empty() ? CallList{static_cast<int32_t>(i)}
                                                   : vote.what->lists[list_index++];
    CHORUS_ASSIGN_OR_RETURN(Move* const move, ResolveOne(vote, i, late));
    if (list.count > 1) ResolveRest(vote, list, move);
    i += static_cast<size_t>(list.count);
  }
  if (!vote.pair_calls.empty() && vote.pair_calls.size() != pair_moves_.size()) {
    return Malformed(absl::StrCat("the run's send/recv use ", pair_moves_.size(),
                                  " ends of pairs; it gives ", vote.pair_calls.size(),
                                  " numbers of calls"));
  }
  for (Move& move : moves_) {
    const CallPosition last = move.next;
    move.next = vote.call_goes_on && !move.is_pair
                    ? CallPosition{last.step, last.call, last.part + 1}
                    : CallPosition{last.step, last.call + 1, 0};
  }
  return late ? absl::OkStatus() : CheckRoom(vote);
}

// What follows the first of a list stands behind it, and is like it otherwise.
void Sequencer::ResolveRest(const Vote& vote, const CallList& list, Move* move) {
  const auto first = static_cast<size_t>(list.first);
  const InstanceKey& key = keys_[first];
  for (int32_t call = 1; call < list.count; ++call) {
    InstanceKey& other = keys_[first + static_cast<size_t>(call)];
    other.group = key.group;
    other.since = key.since;
    other.at = key.at.Behind(call, list.by_parts);
    seats_[first + static_cast<size_t>(call)] = seats_[first];
  }
  const Participation& last =
      vote.what->participations[first + static_cast<size_t>(list.count - 1)];
  move->next = key.at.Behind(list.count - 1, list.by_parts);
  move->part = last.part;
  move->source = &last.source;
}

// They may be long, and a world that has nothing to do for a while has no use for them.
void Sequencer::ForgetKeys() {
  keys_.clear();
  vote_path_bytes_ = 0;
}

// A vote for what others have brought makes nothing, and always has room: so those that are behind
// catch up whatever those that are ahead have left.
absl::Status Sequencer::CheckRoom(const Vote& vote) const {
  const auto fits = [this](size_t instances, size_t tapes) {
    return pending_calls_ + instances <= options_.max_pending &&
           tapes_.size() - gone_tapes_ + tapes <= options_.max_tapes;
  };
  if (fits(keys_.size(), keys_.size())) return absl::OkStatus();
  size_t instances = 0;
  size_t tapes = 0;
  for (size_t i = 0; i < keys_.size(); ++i) {
    instances += FindCall(keys_[i]) == kNone ? 1 : 0;
    const bool wants_grad = vote.what->participations[i].wants_grad;
    tapes += wants_grad && tape_by_key_.Find(keys_[i], tapes_) == nullptr ? 1 : 0;
  }
  if (fits(instances, tapes)) return absl::OkStatus();
  if (pending_calls_ + instances > options_.max_pending) {
    return MakeError(
        Reason::kQuota,
        absl::StrCat("the world has ", pending_calls_, " collectives pending, the run brings ",
                     instances, " more; at most ", options_.max_pending,
                     " may wait for other ranks: wait for results before going on"));
  }
  return MakeError(Reason::kQuota,
                   absl::StrCat("the world has ", tapes_.size() - gone_tapes_,
                                " collectives that may still be differentiated, the run brings ",
                                tapes, " more; at most ", options_.max_tapes,
                                " may be kept: drop results that have a history, or make calls "
                                "under NoGrad"));
}

// A gang is launched in one piece: what the vote would bring together must not be too much for
// that.
absl::Status Sequencer::CheckGang(const Vote& vote) const {
  // If all take part that may.
  int64_t seats = 0;
  for (const InstanceKey& key : keys_) seats += SeatCount(key);
  if (seats > options_.max_gang_size) return ToStatus(GangTooLarge(seats, kNone));
  int64_t size = SizeOf(vote);
  if (pending_size_ + size <= options_.max_gang_size) return absl::OkStatus();
  CountWork(static_cast<int64_t>(keys_.size()));
  std::vector<int32_t> gangs;
  for (const InstanceKey& key : keys_) {
    const int32_t instance = FindCall(key);
    if (instance == kNone) continue;
    const int32_t gang = instances_[instance].component;
    if (gangs.empty() || gangs.back() != gang) gangs.push_back(gang);
  }
  std::sort(gangs.begin(), gangs.end());
  gangs.erase(std::unique(gangs.begin(), gangs.end()), gangs.end());
  for (const int32_t gang : gangs) size += components_[gang].size;
  return size <= options_.max_gang_size ? absl::OkStatus() : ToStatus(GangTooLarge(size, kNone));
}

// `instance`: one of the gang's; kNone: none is known.
Error Sequencer::GangTooLarge(int64_t size, int32_t instance) const {
  Error error(Reason::kQuota);
  if (instance != kNone) error = MakeInstanceError(error.reason, instance);
  error.message = absl::StrCat(
      "a run, with those that it can only be launched together with, for they share collectives or "
      "wait for each other, has ",
      size, " collectives and results over all ranks; at most ", options_.max_gang_size,
      " may be launched at once (--max_gang_size): compile less into one function");
  return error;
}

// The move that this call belongs to, with `next` the call's own position. `held`: which member of
// the slot it is.
absl::Status Sequencer::MoveFor(const Vote& vote, const Participation& part, size_t held,
                                Move** result) {
  const auto refuse = [&part](const std::string& why) {
    return Malformed(absl::StrCat(part.descriptor.ToString(), " (", part.source, "): ", why));
  };
  const GroupBinding& binding = vote.groups[part.group_slot];
  const Group& group = groups_[binding.group.value()];
  const Rank rank = group.members[part.member.value()];
  const Member& member = members_[rank.value()];
  const int64_t step = binding.base.empty() ? member.step : binding.base[held].step;
  int32_t* index = nullptr;
  PairEnd end;
  if (HasPeer(part.descriptor.kind)) {
    end.group = binding.group;
    end.source = part.is_recv ? part.peer : part.member;
    end.destination = part.is_recv ? part.member : part.peer;
    end.tag = part.tag;
    end.is_recv = part.is_recv;
    index = &pair_moves_.emplace(end, kNone).first->second;
  } else {
    // Slots that are bound to one group share their members' counts.
    size_t offset = 0;
    for (int32_t s = 0; index == nullptr; offset += (*vote.slots)[s++].held.size()) {
      if (vote.groups[s].group != binding.group) continue;
      const std::vector<GroupRank>& members = (*vote.slots)[s].held;
      const auto same = std::find(members.begin(), members.end(), part.member);
      if (same == members.end()) continue;
      index = &moves_of_[offset + (same - members.begin())];
      const absl::InlinedVector<CallPosition, 1>& base = vote.groups[s].base;
      const bool alike = base.empty() == binding.base.empty() &&
                         (base.empty() || base[same - members.begin()] == binding.base[held]);
      if (!alike) {
        return refuse(absl::StrCat("slots ", s, " and ", part.group_slot, " are bound to group ",
                                   binding.group.value(), " at different positions"));
      }
    }
  }
  if (*index != kNone) {
    Move& move = moves_[*index];
    move.source = &part.source;
    if (part.part == 0) {
      move.next = {move.next.step, move.next.call + 1, 0};
    } else if (part.part == move.part + 1 && !move.is_pair) {
      ++move.next.part;
    } else {
      return refuse(absl::StrCat("part ", part.part, " of a call follows part ", move.part));
    }
    move.part = part.part;
    *result = &move;
    return absl::OkStatus();
  }
  if (part.part != 0) {
    return refuse(absl::StrCat("part ", part.part, " of a call follows no other part"));
  }
  *index = static_cast<int32_t>(moves_.size());
  moves_.emplace_back();
  Move& move = moves_.back();
  move.rank = rank;
  move.group = binding.group;
  move.member = part.member;
  move.is_pair = HasPeer(part.descriptor.kind);
  move.end = end;
  move.source = &part.source;
  CallPosition next{step, 0, 0};
  if (const Counter* counter = CounterOf(move)) {
    if (counter->next.step >= step) next = NextOf(rank, *counter);
  }
  move.first = next;
  if (move.is_pair && !vote.pair_calls.empty()) {
    const size_t index = pair_moves_.size() - 1;
    if (index >= vote.pair_calls.size()) {
      return refuse(absl::StrCat("the run gives numbers of calls for ", vote.pair_calls.size(),
                                 " ends of pairs; this is a further one"));
    }
    move.first.call = vote.pair_calls[index];
    if (move.first.call < 0 || move.first.call >= kMaxCallNumber) {
      return refuse(absl::StrCat("its call has number ", move.first.call));
    }
  } else if (!move.is_pair && !binding.base.empty()) {
    move.first = binding.base[held];
  }
  if (move.first < next) {
    return refuse(absl::StrCat(RankText(rank), " is at ", next.ToString(), " of ",
                               move.is_pair ? "this pair in " : "", "group ", binding.group.value(),
                               "; the run goes back to ", move.first.ToString()));
  }
  if (move.first.part >= kMaxCallPart) {
    return refuse(absl::StrCat("the run begins with ", move.first.ToString(),
                               "; expected parts from 0 to 2^30 - 1"));
  }
  move.next = move.first;
  *result = &move;
  return absl::OkStatus();
}

absl::StatusOr<Sequencer::Move*> Sequencer::ResolveOne(const Vote& vote, size_t i, bool late) {
  Move* move = nullptr;
  const Participation& part = vote.what->participations[i];
  const auto refuse = [&part](const std::string& why) {
    return Malformed(absl::StrCat(part.descriptor.ToString(), " (", part.source, "): ", why));
  };
  if (part.group_slot < 0 || part.group_slot >= static_cast<int32_t>(vote.groups.size())) {
    return refuse(absl::StrCat("group slot ", part.group_slot, " does not exist"));
  }
  const GroupBinding& binding = vote.groups[part.group_slot];
  const Group& group = groups_[binding.group.value()];
  const int32_t group_size = static_cast<int32_t>(group.members.size());
  const std::vector<GroupRank>& held = (*vote.slots)[part.group_slot].held;
  size_t slot = 0;
  while (slot < held.size() && held[slot] != part.member) ++slot;
  if (slot == held.size()) {
    return refuse(absl::StrCat("this session does not hold member ", part.member.value(),
                               " of group ", binding.group.value()));
  }
  InstanceKey& key = keys_[i];
  const bool is_pair = HasPeer(part.descriptor.kind);
  const Rank rank = group.members[part.member.value()];
  const int64_t member_step = members_[rank.value()].step;
  const int64_t step = binding.base.empty() ? member_step : binding.base[slot].step;
  const auto it = std::find_if(steps_.begin(), steps_.end(),
                               [rank](const Stepped& s) { return s.rank == rank; });
  if (it == steps_.end()) {
    steps_.push_back({rank, step});
  } else if (it->step != step) {
    return refuse(absl::StrCat(RankText(rank), " makes calls of steps ", it->step, " and ", step,
                               " in one run"));
  }
  if (step < member_step) {
    return refuse(absl::StrCat(RankText(rank), " has begun step ", member_step,
                               "; the run goes back to step ", step));
  }

  switch (part.instance.kind) {
    case InstanceRef::Kind::kNext: {
      if (is_pair && (part.peer.value() < 0 || part.peer.value() >= group_size)) {
        return refuse(
            absl::StrCat("peer ", part.peer.value(), " is no member of a group of ", group_size));
      }
      CHORUS_RETURN_IF_ERROR(MoveFor(vote, part, slot, &move));
      key.group = binding.group;
      key.since = since_;
      key.at = move->next;
      if (is_pair) {
        key.source = move->end.source;
        key.destination = move->end.destination;
        key.tag = part.tag;
      }
      break;
    }
    case InstanceRef::Kind::kGradient: {
      const int32_t node = part.instance.node;
      if (node < 0 || node >= static_cast<int32_t>(i)) {
        return refuse(absl::StrCat("it is the gradient of participation ", node,
                                   ", which does not come before it"));
      }
      const Participation& forward = vote.what->participations[node];
      if (forward.member != part.member || forward.group_slot != part.group_slot) {
        return refuse("its forward collective speaks for another member");
      }
      if (part.instance.request != asked_[node]) {
        return refuse(absl::StrCat("the next gradient of ", keys_[node].ToString(), " is request ",
                                   asked_[node], "; this is request ", part.instance.request));
      }
      ++asked_[node];
      if (keys_[node].path.size() >= kMaxGradientOrder) {
        return refuse(absl::StrCat("gradients go up to order ", kMaxGradientOrder));
      }
      key = keys_[node].Gradient({step, part.instance.request});
      vote_path_bytes_ += HeapBytesOf(key);
      break;
    }
    case InstanceRef::Kind::kBound: {
      const int32_t slot = part.instance.slot;
      if (slot < 0 || slot >= static_cast<int32_t>(vote.bound.size())) {
        return refuse(absl::StrCat("instance slot ", slot, " is not bound"));
      }
      key = vote.bound[slot];
      vote_path_bytes_ += HeapBytesOf(key);
      if (!key.is_gradient() || key.path.size() > kMaxGradientOrder) {
        return refuse(absl::StrCat("instance slot ", slot, " is bound to ", key.ToString(),
                                   "; expected a gradient of order 1 to ", kMaxGradientOrder));
      }
      if (key.step() != step) {
        return refuse(absl::StrCat(key.ToString(), " is asked for in step ", key.step(),
                                   "; the run is of step ", step));
      }
      if (key.group != binding.group) {
        return refuse(absl::StrCat(key.ToString(), " is bound where group ", binding.group.value(),
                                   " is used"));
      }
      break;
    }
  }

  if (key.is_pair() != is_pair) {
    return refuse(absl::StrCat(key.ToString(), is_pair ? " is no pair's" : " is a pair's"));
  }
  if (is_pair && (key.source.value() >= group_size || key.destination.value() >= group_size)) {
    return refuse(absl::StrCat(key.ToString(), " is no pair of a group of ", group_size));
  }
  const int32_t seat = SeatOf(key, part);
  seats_[i] = seat;
  if (is_pair && key.is_gradient() && MemberAt(key, seat) != part.member) {
    return refuse(absl::StrCat("member ", part.member.value(), " cannot be the ",
                               part.is_recv ? "receiving" : "sending", " end of ", key.ToString()));
  }
  // The plan moves between these two. (Of a gradient in one graph that is known already.)
  if (is_pair && key.is_gradient() &&
      (MemberAt(key, 1 - seat) != part.peer || key.tag != part.tag)) {
    return refuse(absl::StrCat("member ", part.peer.value(), " with tag ", part.tag,
                               " is not the other end of ", key.ToString()));
  }
  if (part.instance.kind != InstanceRef::Kind::kBound) return move;

  const int32_t tape = FindTape(key.Parent());
  const int32_t forward = tape == kNone ? kNone : tapes_[tape].instance;
  const bool is_about_to_fail = forward >= 0 && IsPassed(instances_[forward], seat);
  if (tape == kNone || is_about_to_fail) {
    if (late) return move;
    // Nobody can wait for a gradient of it. A rank that runs ahead asks for one where the
    // collective has failed alone: so does this.
    Error error =
        ErrorOf(refuse(absl::StrCat("no rank holds a tape entry for ", key.Parent().ToString(),
                                    ": it has failed, or has no gradient any more")));
    error.SetReason(Reason::kMismatch);
    error.alone = true;
    return ToStatus(error);
  }
  const TapeEntry& entry = EntryAt({tape, seat});
  if (StateOf({tape, seat}) != TapeEntry::State::kLive) {
    if (late) return move;
    if (entry.state == TapeEntry::State::kConsumed) {
      return MakeError(Reason::kTapeConsumed,
                       absl::StrCat(part.descriptor.ToString(), " (", part.source,
                                    "): ", RankText(RankAt(key, seat)),
                                    " has consumed its tape entry for ", key.Parent().ToString()));
    }
    return refuse(absl::StrCat(RankText(RankAt(key, seat)), " holds no tape entry for ",
                               key.Parent().ToString()));
  }
  CountWork(1);
  const InstanceKey::Request request = key.path.back();
  const auto newest = newest_request_.emplace(EntryRef{tape, seat}, requests_.size());
  const InstanceKey::Request next =
      newest.second ? entry.next : requests_[newest.first->second].next;
  if (request < next) {
    return refuse(absl::StrCat("request ", request.number, " of step ", request.step,
                               " for a gradient of ", key.Parent().ToString(),
                               " goes back; the next one is ", next.number, " of step ",
                               next.step));
  }
  newest.first->second = requests_.size();
  requests_.push_back({tape, seat, {request.step, request.number + 1}});
  return move;
}

absl::StatusOr<absl::Span<const InstanceKey>> Sequencer::Resolve(const Vote& vote) {
  resolved_ = RunHandle();
  CHORUS_RETURN_IF_ERROR(ResolveKeys(vote, /*late=*/false));
  resolved_ = vote.run;
  return absl::MakeConstSpan(keys_);
}

// --- Positions ----------------------------------------------------------------------------------

// Null: an end of a pair that has made no call in its member's step.
Sequencer::Counter* Sequencer::CounterOf(const Move& move) {
  if (!move.is_pair) return &groups_[move.group.value()].counters[move.member.value()];
  return members_[move.rank.value()].pairs.Find(move.end);
}

CallPosition Sequencer::NextOf(Rank rank, const Counter& counter) const {
  const int64_t step = members_[rank.value()].step;
  return counter.next.step < step ? CallPosition{step, 0, 0} : counter.next;
}

// They may be many: those go a part at a time (ForgetSome).
void Sequencer::LetGoOfPairs(Member* member) {
  member_pairs_ -= member->pairs.size();
  if (member->pairs.size() > options_.rows_per_event) {
    gone_pairs_.push_back(std::exchange(member->pairs, {}));
  } else {
    member->pairs.Clear();
  }
}

bool Sequencer::BeginMoves() {
  bool skipped = false;
  for (Stepped& stepped : steps_) {
    Member& member = members_[stepped.rank.value()];
    stepped.over = OverUntil(member);
    if (stepped.step <= member.step) continue;
    member.step = stepped.step;
    member.left_rest = false;
    member.left_rest_text.clear();
    // What is sent in a step is received in it.
    LetGoOfPairs(&member);
    skipped |= member.lacking > 0;
  }
  for (Move& move : moves_) {
    Counter* const counter = CounterOf(move);
    move.from = counter == nullptr ? CallPosition{members_[move.rank.value()].step, 0, 0}
                                   : NextOf(move.rank, *counter);
    skipped |= move.from < move.first && members_[move.rank.value()].lacking > 0;
    if (counter != nullptr) counter->next = move.first;
  }
  for (Asked& request : requests_) {
    const Tape& tape = tapes_[request.tape];
    const InstanceKey::Request& next = tape.entries[request.seat].next;
    request.from = next.step < request.next.step ? 0 : next.number;
    skipped |= request.next.number > request.from + 1 &&
               members_[RankAt(tape.key, request.seat).value()].lacking > 0;
  }
  return skipped;
}

void Sequencer::EndMoves(Epoch asked_in) {
  for (const Move& move : moves_) {
    Counter* counter = CounterOf(move);
    if (counter == nullptr) {
      if (move.next.call == 0) continue;  // where every end of a pair begins
      counter = members_[move.rank.value()].pairs.Emplace(move.end, Counter()).first;
      ++member_pairs_;
    }
    counter->next = move.next;
    if (move.source != nullptr) KeepLine(*move.source, counter);
  }
  for (const Asked& request : requests_) {
    TapeEntry& entry = tapes_[request.tape].entries[request.seat];
    if (request.next < entry.next) continue;
    entry.next = request.next;
    entry.asked_in = asked_in;
  }
}

bool Sequencer::HasPassed(const InstanceKey& key, int32_t seat) const {
  return HasPassed(key, seat, key.is_gradient() ? FindTape(key.Parent()) : kNone);
}

bool Sequencer::HasPassed(const InstanceKey& key, int32_t seat, int32_t tape) const {
  const Rank rank = RankAt(key, seat);
  const Member& member = members_[rank.value()];
  const bool over = member.step > key.step() || (member.step == key.step() && member.left_rest);
  if (key.is_gradient()) {
    if (tape == kNone) return over;
    if (key.path.back() < EntryAt({tape, seat}).next) return true;
    const TapeEntry::State state = StateOf({tape, seat});
    if (state == TapeEntry::State::kRefused) return true;
    // A member that has given the entry up gives zeros, wherever it is.
    return over && (state == TapeEntry::State::kLive || state == TapeEntry::State::kNotVoted);
  }
  if (over) return true;
  if (member.step < key.step()) return false;
  const Counter* counter = nullptr;
  if (key.is_pair()) {
    counter = member.pairs.Find({key.group, key.source, key.destination, key.tag, seat == 1});
    if (counter == nullptr) return false;
  } else {
    counter = &groups_[key.group.value()].counters[MemberAt(key, seat).value()];
  }
  return key.at < NextOf(rank, *counter);
}

bool Sequencer::AnotherHasPassed(const InstanceKey& key, int32_t seat) const {
  // Where somebody waits, nobody has passed, but for what is about to fail for it.
  const int32_t row = FindCall(key);
  if (row != kNone && !passing()) return false;
  bool passed = false;
  for (int32_t other = 0; other < SeatCount(key); ++other) {
    if (other == seat) continue;
    if (row == kNone) {
      passed |= HasPassed(key, other);
    } else {
      passed |= !HasVoted(instances_[row], other) && HasPassed(key, other, instances_[row].parent);
    }
  }
  return passed;
}

std::string Sequencer::PositionText(const InstanceKey& key, int32_t seat, std::string* position,
                                    std::string* source) const {
  const Rank rank = RankAt(key, seat);
  const Member& member = members_[rank.value()];
  position->clear();
  source->clear();
  std::string text = RankText(rank);
  if (member.left_rest && member.step == key.step()) {
    *position = absl::StrCat("the end of step ", member.step);
    return absl::StrCat(text, " takes part in nothing more of step ", member.step, ": ",
                        member.left_rest_text);
  }
  if (key.is_gradient()) {
    const int32_t tape = FindTape(key.Parent());
    if (tape != kNone) {
      const TapeEntry& entry = EntryAt({tape, seat});
      if (StateOf({tape, seat}) == TapeEntry::State::kRefused) {
        *position = "no gradient";
        return absl::StrCat(text,
                            " could not take a gradient since, and what it recorded before has "
                            "none any more");
      }
      if (key.path.back() < entry.next) {
        *position = absl::StrCat("request ", entry.next.number, " of step ", entry.next.step);
        return absl::StrCat(text, " is at request ", entry.next.number,
                            " of this gradient in step ", entry.next.step);
      }
    }
    *position = absl::StrCat("step ", member.step);
    return absl::StrCat(text, " has begun step ", member.step);
  }
  const Counter* counter = nullptr;
  if (key.is_pair()) {
    counter = member.pairs.Find({key.group, key.source, key.destination, key.tag, seat == 1});
  } else {
    counter = &groups_[key.group.value()].counters[MemberAt(key, seat).value()];
  }
  const CallPosition next =
      counter == nullptr ? CallPosition{member.step, 0, 0} : NextOf(rank, *counter);
  *position = next.ToString();
  absl::StrAppend(&text, " is at ", next.ToString(), " there");
  if (counter != nullptr && !counter->last.empty()) {
    *source = counter->last;
    absl::StrAppend(&text, ", its last call at ", counter->last);
  }
  return text;
}

Error Sequencer::PassedError(const InstanceKey& key, const Participation& part, int32_t seat,
                             int32_t passed_by) const {
  Error error(Reason::kMismatch);
  error.instance = key.ToString();
  error.op = std::string(CollectiveKindName(part.descriptor.kind));
  error.source = part.source;
  std::string source;
  const std::string stands = PositionText(key, passed_by, &error.got, &source);
  error.expected = key.is_gradient() ? key.ToString() : key.at.ToString();
  error.message =
      absl::StrCat(PartText(part), " (", error.instance, ") of ", RankText(RankAt(key, seat)),
                   " at ", part.source, " cannot meet its others any more: ", stands,
                   "; nothing was launched. Ranks that make the same calls in each World::Step are "
                   "in line again "
                   "in the next one");
  error.ranks.push_back({RankAt(key, seat).value(), PartText(part), part.source});
  error.ranks.push_back({RankAt(key, passed_by).value(), error.got, source});
  return error;
}

sequencer_tables::SortKey Sequencer::SortKeyOf(const Instance& instance) {
  const InstanceKey& key = instance.key;
  SortKey result;
  result.step = key.step();
  if (key.is_gradient()) {
    result.is_gradient = true;
    result.tape = instance.parent;
    result.number = key.path.back().number;
    return result;
  }
  result.group = key.group;
  result.source = key.source;
  result.destination = key.destination;
  result.tag = key.tag;
  result.number = key.at.call;
  result.part = key.at.part;
  return result;
}

void Sequencer::FindPassed() {
  std::vector<Stretch> new_stretches;
  const auto add = [&](Rank rank, const SortKey& first, const SortKey& end) {
    const bool awaited = members_[rank.value()].lacking > 0;
    if (awaited && first < end) new_stretches.push_back({rank, first, end});
  };
  for (const Stepped& stepped : steps_) {
    for (const bool is_gradient : {false, true}) {
      SortKey first;
      first.is_gradient = is_gradient;
      SortKey end = first;
      first.step = stepped.over;
      end.step = OverUntil(members_[stepped.rank.value()]);
      if (is_gradient && stepped.drops_tapes) {
        first.step = 0;
        end.step = kMaxCallNumber;
      }
      add(stepped.rank, first, end);
    }
  }
  for (const Move& move : moves_) {
    SortKey first;
    first.step = move.from.step;
    first.group = move.group;
    if (move.is_pair) {
      first.source = move.end.source;
      first.destination = move.end.destination;
      first.tag = move.end.tag;
    }
    SortKey end = first;
    std::tie(first.number, first.part) = std::tie(move.from.call, move.from.part);
    std::tie(end.number, end.part) = std::tie(move.next.call, move.next.part);
    add(move.rank, first, end);
  }
  for (const Asked& request : requests_) {
    SortKey first;
    first.is_gradient = true;
    first.step = request.next.step;
    first.tape = request.tape;
    SortKey end = first;
    first.number = request.from;
    end.number = request.next.number;
    add(RankAt(tapes_[request.tape].key, request.seat), first, end);
  }
  if (new_stretches.empty()) return;
  std::sort(new_stretches.begin(), new_stretches.end(), [](const Stretch& a, const Stretch& b) {
    return a.rank != b.rank ? a.rank < b.rank : a.first < b.first;
  });
  size_t ranks = 0;
  for (size_t i = 0; i < new_stretches.size(); ++i) {
    ranks += i == 0 || new_stretches[i].rank != new_stretches[i - 1].rank ? 1 : 0;
  }
  // Each rank looks at all that is not indexed.
  IndexSome(options_.newest_pending / ranks);
  for (size_t i = 0; i < new_stretches.size(); ++i) {
    Stretch& stretch = new_stretches[i];
    if (i == 0 || stretch.rank != new_stretches[i - 1].rank) {
      Chair chair{stretch.rank};
      for (int32_t id = first_unindexed_; id != kNone; id = instances_[id].next) {
        LookAt(id, &chair);
      }
      CountWork(static_cast<int64_t>(unindexed_) / kLooksOfWork);
    } else if (stretch.first < new_stretches[i - 1].end) {
      // What is in several stretches of a rank is looked at once.
      stretch.first = new_stretches[i - 1].end;
      stretch.end = std::max(stretch.end, new_stretches[i - 1].end);
    }
    if (stretch.first < stretch.end) stretches_.push_back(stretch);
  }
  LookForPassed();
}

void Sequencer::LookAt(int32_t id, Chair* chair) {
  const Instance& instance = instances_[id];
  const InstanceKey& key = instance.key;
  if (!key.is_pair() && key.group != chair->group) {
    CountWork(1);
    chair->group = key.group;
    chair->seat = groups_[key.group.value()].SeatOf(chair->rank);
  }
  for (int32_t end = 0; end < (key.is_pair() ? 2 : 1); ++end) {
    const int32_t seat = key.is_pair() ? end : chair->seat;
    if (seat == kNone || RankAt(key, seat) != chair->rank) continue;
    if (!IsPassed(instance, seat)) continue;
    passed_.emplace_back(key, seat);
    passed_path_bytes_ += HeapBytesOf(passed_.back().first);
    break;
  }
}

bool Sequencer::IsPassed(const Instance& instance, int32_t seat) const {
  // A list's first call is passed before the others.
  return !HasVoted(instance, seat) && HasPassed(instance.key, seat, instance.parent);
}

void Sequencer::LookForPassed() {
  constexpr int64_t kMostLooks = 1024;
  constexpr size_t kMostPassed = 128;
  int64_t looks = 0;
  const auto goes_on = [&] { return looks < kMostLooks && passed_.size() < kMostPassed; };
  while (!stretches_.empty() && goes_on()) {
    Stretch& stretch = stretches_.back();
    Chair chair{stretch.rank};
    auto at = stretch.is_begun ? instance_by_sort_key_.upper_bound(stretch.first)
                               : instance_by_sort_key_.lower_bound(stretch.first);
    const auto is_over = [&] {
      return at == instance_by_sort_key_.end() || !(at->first < stretch.end);
    };
    for (; !is_over() && goes_on(); ++at) {
      ++looks;
      LookAt(at->second, &chair);
      stretch.first = at->first;
      stretch.is_begun = true;
    }
    if (is_over()) stretches_.pop_back();
  }
  CountWork(looks / kLooksOfWork);
  // By name, so that texts do not depend on which rank voted first; the first one is the last.
  std::sort(passed_.begin(), passed_.end(), [](const auto& a, const auto& b) { return b < a; });
}

void Sequencer::FailPassed(Actions* actions) {
  FindPassed();
  FailSomePassed(actions);
}

void Sequencer::FailSomePassed(Actions* actions) {
  while (passing() && SliceHasTime()) {
    if (passed_.empty()) {
      LookForPassed();
      continue;
    }
    const std::pair<InstanceKey, int32_t> passed = std::move(passed_.back());
    passed_.pop_back();
    passed_path_bytes_ -= HeapBytesOf(passed.first);
    CountWork(1);
    const int32_t row = FindInstance(passed.first);
    // Failed with another one, or it got zeros since.
    if (row == kNone || !IsPassed(instances_[row], passed.second)) continue;
    const Instance& instance = instances_[row];
    CountWork(kWorkPerError);
    FailAlone(
        instance.component,
        PassedError(passed.first, PartAt(instance, instance.first), instance.first, passed.second),
        actions);
  }
}

std::vector<RefusedMember> Sequencer::CallsOf(const Vote& vote) {
  resolved_ = RunHandle();
  std::vector<RefusedMember> members;
  if (vote.what == nullptr || !ResolveKeys(vote, /*late=*/true).ok()) return members;
  ForgetKeys();
  for (const auto& step : steps_) {
    members.emplace_back();
    members.back().rank = step.rank;
    members.back().step = step.step;
  }
  for (const Move& move : moves_) {
    const auto member =
        std::find_if(members.begin(), members.end(),
                     [&move](const RefusedMember& m) { return m.rank == move.rank; });
    RefusedCalls calls;
    calls.group = move.group;
    if (move.is_pair) {
      calls.source = move.end.source;
      calls.destination = move.end.destination;
      calls.tag = move.end.tag;
      calls.is_recv = move.end.is_recv;
    }
    calls.first = move.first.call;
    // A call that would have gone on ends with its refusal.
    calls.next = move.next.call + (move.next.part > 0 ? 1 : 0);
    member->calls.push_back(calls);
  }
  for (const Asked& request : requests_) {
    const InstanceKey& forward = tapes_[request.tape].key;
    for (RefusedMember& member : members) {
      if (member.rank != RankAt(forward, request.seat)) continue;
      member.gradients.push_back(forward.Gradient({request.next.step, request.next.number - 1}));
    }
  }
  return members;
}

// --- Submit: recording it -----------------------------------------------------------------------

// A vote that is well formed but can never be launched: its epoch ends.
absl::optional<Error> Sequencer::FindRefusal(const Vote& vote) {
  for (size_t s = 0; s < vote.groups.size(); ++s) {
    const GroupBinding& binding = vote.groups[s];
    Group& group = groups_[binding.group.value()];
    const GroupSlot& slot = (*vote.slots)[s];
    const int32_t group_size = static_cast<int32_t>(group.members.size());
    if (slot.size != group_size) {
      Error error(Reason::kMismatch);
      const Rank rank = slot.held.empty() ? Rank(-1) : group.members[slot.held[0].value()];
      error.culprit = CulpritOf(rank);
      error.expected = absl::StrCat(group_size, " members");
      error.got = absl::StrCat(slot.size, " members");
      error.message = absl::StrCat("group ", binding.group.value(), " has ", group_size,
                                   " members; the graph of ", RankText(rank),
                                   " was registered for a group of ", slot.size);
      return error;
    }
    if (const absl::optional<Rank> dead = FirstDead(&group)) {
      Error error(Reason::kNeedsReform);
      error.culprit = CulpritOf(*dead);
      error.message = absl::StrCat("group ", binding.group.value(), " has lost ", RankText(*dead),
                                   ": ", members_[dead->value()].how_dead, "; reform the world");
      return error;
    }
  }
  if (!somebody_gone_) return absl::nullopt;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i].is_gradient()) continue;  // a member that left has abandoned its gradients
    for (int32_t p = 0; p < SeatCount(keys_[i]); ++p) {
      const Rank rank = RankAt(keys_[i], p);
      if (members_[rank.value()].state != Member::State::kLeft) continue;
      const Participation& part = vote.what->participations[i];
      Error error(Reason::kNeedsReform);
      error.culprit = CulpritOf(rank);
      error.instance = keys_[i].ToString();
      error.op = std::string(CollectiveKindName(part.descriptor.kind));
      error.source = part.source;
      error.message = absl::StrCat(PartText(part), " (", error.instance, "): ", RankText(rank),
                                   " has left the world");
      return error;
    }
  }
  return absl::nullopt;
}

int32_t Sequencer::AddRun(const Vote& vote) {
  const int32_t r = runs_.New();
  PendingRun& run = runs_[r];
  run.handle = vote.run;
  run.what = vote.what;
  run.order = next_order_++;
  run.externally_blocked = vote.externally_blocked;
  run.donates = vote.donates;
  run.size = SizeOf(vote);
  run.launch_work = vote.launch_work;
  run.has_dependents = false;
  run.reserve = PendingRun::Reserve::kNotAsked;
  run.component = kNone;
  run.uncompared = kNone;
  run.instances.clear();
  run.producers.clear();
  run.consumers.clear();
  run.ranks.clear();
  for (const RunHandle producer : vote.producers) {
    const int32_t* const row = run_by_handle_.Find(producer);
    if (row == nullptr) continue;
    runs_[*row].has_dependents = true;
    runs_[*row].consumers.push_back(r);
    run.producers.push_back(producer);
  }
  for (const Participation& part : vote.what->participations) {
    const Rank rank =
        groups_[vote.groups[part.group_slot].group.value()].members[part.member.value()];
    if (std::find(run.ranks.begin(), run.ranks.end(), rank) == run.ranks.end()) {
      run.ranks.push_back(rank);
    }
  }
  run_by_handle_.Emplace(vote.run, r);
  runs_.Append(&pending_, r);
  pending_size_ += run.size;
  run.due = absl::InfiniteFuture();
  if (run.externally_blocked) {
    HoldUp(r, clock_ + options_.agree_timeout + options_.exec_timeout);
  }
  return r;
}

// The run waits for more than votes: at most until then, and its gang with it.
void Sequencer::HoldUp(int32_t r, absl::Time due) {
  runs_[r].due = due;
  held_up_.emplace(std::make_pair(due, runs_[r].order), r);
}

void Sequencer::EndHoldUp(PendingRun* run) {
  held_up_.erase(std::make_pair(run->due, run->order));
  run->due = absl::InfiniteFuture();
}

void Sequencer::ForgetRun(int32_t r) {
  pending_size_ -= runs_[r].size;
  if (first_uncompared_ == r) first_uncompared_ = runs_[r].next;
  if (runs_[r].uncompared != kNone) --uncompared_;
  runs_[r].what.reset();
  runs_.Remove(&pending_, r);
  runs_.Free(r);
}

absl::Status Sequencer::Submit(const Vote& vote, absl::Time now, Actions* actions) {
  absl::Status status = Take(vote, now, actions);
  ForgetKeys();
  return status;
}

absl::Status Sequencer::Take(const Vote& vote, absl::Time now, Actions* actions) {
  const bool resolved = resolved_ == vote.run && vote.run != RunHandle();
  BeginEvent(now);
  if (vote.what == nullptr) return Malformed("a vote without a template");
  if (vote.epoch > epoch_) {
    return Malformed(absl::StrCat("the run is for epoch ", vote.epoch.value(), "; epoch ",
                                  epoch_.value(), " is open"));
  }
  if (run_by_handle_.Contains(vote.run)) {
    return Malformed(absl::StrCat("run ", vote.run.value(), " has voted already"));
  }
  if (vote.epoch < epoch_) {
    // Its calls count all the same: nobody needs to wait for them any more.
    if (vote.epoch >= since_ && ResolveKeys(vote, /*late=*/true).ok()) {
      BeginMoves();
      EndMoves(vote.epoch);
      FailPassed(actions);
    }
    FailRun(vote.run, vote.epoch, epoch_, CauseOrForgotten(vote.epoch), actions);
    return absl::OkStatus();
  }
  if (!resolved) CHORUS_RETURN_IF_ERROR(ResolveKeys(vote, /*late=*/false));
  CHORUS_RETURN_IF_ERROR(CheckGang(vote));
  const bool skipped = BeginMoves();
  const int32_t run = AddRun(vote);
  absl::optional<Error> fault = FindRefusal(vote);
  absl::optional<Error> passed;
  if (!fault.has_value()) RecordVote(run, vote, &fault, &passed, actions);
  EndMoves(epoch_);
  if (fault.has_value()) {
    EndEpoch(*fault, actions);
    return absl::OkStatus();
  }
  if (passed.has_value()) FailAlone(runs_[run].component, *passed, actions);
  if (passed.has_value() || skipped || further_parts_ > 0) FailPassed(actions);
  LaunchReady(actions);
  IndexSome(options_.newest_pending);
  ForgetSome();
  return absl::OkStatus();
}

absl::optional<MetGang> Sequencer::Meet(GroupId group, absl::Span<const MetCall> calls,
                                        int64_t results, absl::Time now) {
  const int32_t id = group.value();
  if (!IsQuiet() || id < 0 || id >= num_groups()) return absl::nullopt;
  Group& row = groups_[id];
  const auto count = static_cast<int64_t>(row.members.size());
  if (calls.size() != row.members.size() || calls.empty() || options_.max_pending == 0 ||
      count + results > options_.max_gang_size) {
    return absl::nullopt;
  }
  CallPosition at;
  for (size_t m = 0; m < calls.size(); ++m) {
    const CallPosition next = NextOf(row.members[m], row.counters[m]);
    if (m == 0) at = next;
    const bool is_there = next == at && (calls[m].at == nullptr || *calls[m].at == at);
    if (!is_there || members_[row.members[m].value()].left_rest) return absl::nullopt;
  }
  if (at.part != 0 || at.call >= kMaxCallNumber) return absl::nullopt;
  BeginEvent(now);
  for (size_t m = 0; m < calls.size(); ++m) {
    Counter& counter = row.counters[m];
    counter.next = {at.step, at.call + 1, 0};
    KeepLine(*calls[m].source, &counter);
  }
  next_order_ += count;
  MetGang met;
  met.key.group = group;
  met.key.since = since_;
  met.key.at = at;
  met.ticket = next_ticket_;
  next_ticket_ = Ticket(next_ticket_.value() + 1);
  if (id == 0) NotePublished(met.key);
  return met;
}

// Enters a resolved vote into its instances. `fault` is set when the epoch must end, `passed` when
// the run must fail alone: a member that it needs has passed one of its calls.
void Sequencer::RecordVote(int32_t r, const Vote& vote, absl::optional<Error>* fault,
                           absl::optional<Error>* passed, Actions* actions) {
  const std::vector<Participation>& parts = vote.what->participations;
  PendingRun& run = runs_[r];
  int32_t component = kNone;
  const std::vector<CallList>& lists = vote.what->lists;
  size_t list = 0;
  while (run.instances.size() < parts.size()) {
    const auto next = static_cast<int32_t>(run.instances.size());
    CallList calls{next};
    if (!lists.empty()) {
      while (lists[list].first + lists[list].count <= next) ++list;
      calls = {next, lists[list].first + lists[list].count - next, lists[list].by_parts};
      // The rest of a call that an earlier run has begun is by itself: another member of this run
      // may have called what follows it, and not it, and its counter does not say so yet
      // (CountFree).
      if (!calls.by_parts && keys_[next].at.part > 0) calls.count = 1;
    }
    EnterCalls(r, vote, calls, &component, fault, passed, actions);
  }
  if (component == kNone) component = components_.New();  // a local run
  run.component = component;
  Component& gang = components_[component];
  gang.runs.push_back(r);
  gang.size += run.size;
  gang.awaited += static_cast<int64_t>(run.producers.size()) + (run.externally_blocked ? 1 : 0);
  ready_.push_back(component);
  // Only now is it known which gradients this run asks for itself. Those use their entries up.
  for (const Participation& part : parts) {
    if (part.instance.kind != InstanceRef::Kind::kGradient) continue;
    const int32_t forward = part.instance.node;
    const EntryRef at{instances_[run.instances[forward]].tape, seats_[forward]};
    if (EntryAt(at).state != TapeEntry::State::kLive) continue;
    LetGo(at, TapeEntry::State::kConsumed);
    EntryAt(at).consumed_in = epoch_;
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const int32_t tape = instances_[run.instances[i]].tape;
    if (tape == kNone || tapes_[tape].entries[seats_[i]].state == TapeEntry::State::kLive) continue;
    MarkAbandoned(tape, seats_[i]);
  }
  absl::optional<Error> lost_gradient = MarkSome();
  if (lost_gradient.has_value() && !fault->has_value()) *fault = std::move(lost_gradient);
}

// Enters as many of these calls as are one instance, at least the first.
void Sequencer::EnterCalls(int32_t r, const Vote& vote, CallList calls, int32_t* component,
                           absl::optional<Error>* fault, absl::optional<Error>* passed,
                           Actions* actions) {
  PendingRun& run = runs_[r];
  const int32_t i = calls.first;
  const InstanceKey& key = keys_[i];
  const int32_t seat = seats_[i];
  const Participation& part = vote.what->participations[i];
  int32_t id = FindCalls(&calls);
  if (id == kNone) {
    id = NewInstance(key, SeatCount(key), calls, r, fault);
    if (*component == kNone) *component = components_.New();
    Instance& instance = instances_[id];
    instance.component = *component;
    Component& gang = components_[*component];
    gang.instances.push_back(id);
    gang.missing += instance.missing;
    const int32_t parent = instance.parent;
    gang.awaited += parent != kNone && tapes_[parent].instance != kNone ? 1 : 0;
    // Only here: where somebody waits already, nobody has passed. Of a list the first call is
    // passed before the others.
    const int32_t count = static_cast<int32_t>(instance.seats.size());
    for (int32_t other = 0; other < count && !passed->has_value(); ++other) {
      if (other == seat || instance.seats[other].absent) continue;
      if (HasPassed(key, other, instance.parent)) {
        *passed = PassedError(key, part, seat, other);
      }
    }
  } else {
    Merge(component, instances_[id].component);
  }
  run.instances.insert(run.instances.end(), static_cast<size_t>(calls.count), id);
  Instance& instance = instances_[id];
  instance.seats[seat].run = r;
  instance.seats[seat].participation = i;
  instance.rows_differ |= part.descriptor.RowsDiffer();
  CountVote(id, seat);
  if (instance.first == kNone) {
    instance.first = seat;
  } else {
    if (options_.check_call_sites == CheckCallSites::kWarn) {
      for (int32_t call = 0; call < calls.count; ++call) {
        WarnOfCallSites(instance, call, seat, actions);
      }
    }
    const bool has_rows_to_compare = instance.rows_differ && instance.differing == kNone;
    if (calls.count > 1) {
      CompareList(id, seat, fault);
    } else if (!has_rows_to_compare || (!comparing() && SliceHasTime())) {
      if (CompareVote(id, seat) && !fault->has_value()) *fault = MismatchError(id);
    } else if (run.uncompared == kNone) {
      run.uncompared = i;
      if (uncompared_++ == 0) first_uncompared_ = r;
      ++components_[instance.component].missing;
    }
  }
  // A reference does not outlive that a list is cut.
  const int32_t parent = instances_[id].parent;
  if (parent != kNone) {
    Tape& tape = tapes_[parent];
    const InstanceKey::Request& request = key.path.back();
    tape.entries[seat].next = {request.step, request.number + 1};
    tape.entries[seat].asked_in = epoch_;
    if (tape.instance != kNone) {
      // A member that asks for a gradient has asked for the forward instance before.
      runs_[instances_[tape.instance].seats[seat].run].has_dependents = true;
    }
  }
  if (part.wants_grad) EnsureTape(id);
  if (instances_[id].tape != kNone) {
    SetEntry(instances_[id].tape, seat, part);
    if (part.wants_grad) Hold({instances_[id].tape, seat});
  }
}

int32_t Sequencer::NewInstance(const InstanceKey& key, int32_t seats, const CallList& calls,
                               int32_t run, absl::optional<Error>* fault) {
  int32_t parent = kNone;
  if (key.is_gradient()) {
    const InstanceKey forward = key.Parent();
    parent = FindTape(forward);
    // Without a tape the forward instance is of this very vote: Resolve has seen to that.
    if (parent == kNone) parent = EnsureTape(FindInstance(forward));
  }
  const int32_t id = instances_.New();
  Instance& instance = instances_[id];
  instance.key = key;
  instance_path_bytes_ += HeapBytesOf(instance.key);
  instance.count = calls.count;
  instance.by_parts = calls.by_parts;
  pending_calls_ += static_cast<size_t>(calls.count);
  instance_by_key_.Add(instance_by_key_.HashOf(key), id);
  if (calls.count > 1) lists_.emplace(ListKeyOf(instance), id);
  instance.missing = seats;
  instance.tape = kNone;
  instance.parent = parent;
  instance.first = kNone;
  instance.rows_differ = false;
  instance.differing = kNone;
  instance.against = kNone;
  instance.first_vote = clock_;
  instance.seats.assign(seats, Seat());
  if (parent != kNone) {
    BeginPending(parent);
    Tape& tape = tapes_[parent];
    instance.child = static_cast<int32_t>(tape.children.size());
    tape.children.push_back(id);
    ++children_;
    for (int32_t p = 0; p < seats; ++p) {
      const TapeEntry& entry = tape.entries[p];
      const TapeEntry::State state = StateOf({parent, p});
      if ((state != TapeEntry::State::kAbandoned && state != TapeEntry::State::kConsumed) ||
          key.path.back() < entry.next) {
        continue;
      }
      // The run at hand may still ask for it itself; RecordVote settles that at its end.
      if (tape.instance != kNone && instances_[tape.instance].seats[p].run == run) continue;
      if (entry.UsedInVain(epoch_) && !fault->has_value()) *fault = InVainError(key, tape, p);
      absl::optional<Error> lost_gradient = LostGradientError(key, tape, p);
      if (lost_gradient.has_value() && !fault->has_value()) *fault = std::move(lost_gradient);
      instance.seats[p].absent = true;
      --instance.missing;
    }
  }
  CountWork(seats / kSeatsOfWork);
  for (int32_t p = 0; p < seats; ++p) {
    if (!instance.seats[p].absent) CountLacking(key, p, 1);
  }
  if (instance.HasFurtherParts()) ++further_parts_;
  Enlist(id);
  return id;
}

void Sequencer::Enlist(int32_t id) {
  Instance& instance = instances_[id];
  instance.timed = true;
  instance.indexed = false;
  instances_.Append(&timed_, id);
  if (unindexed_++ == 0) first_unindexed_ = id;
}

void Sequencer::Unlist(int32_t id) {
  Instance& instance = instances_[id];
  if (!instance.timed) return;
  instance.timed = false;
  if (instance.indexed) {
    instance_by_sort_key_.erase(SortKeyOf(instance));
  } else {
    --unindexed_;
    if (first_unindexed_ == id) first_unindexed_ = instance.next;
  }
  instances_.Remove(&timed_, id);
}

void Sequencer::IndexSome(size_t most) {
  for (; unindexed_ > most; --unindexed_) {
    CountWork(kWorkToIndex);
    Instance& instance = instances_[first_unindexed_];
    instance.indexed = true;
    instance_by_sort_key_.emplace(SortKeyOf(instance), first_unindexed_);
    first_unindexed_ = instance.next;
  }
}

// Joins `other` into `*into`; kNone is the empty component.
void Sequencer::Merge(int32_t* into, int32_t other) {
  if (*into == kNone || *into == other) {
    *into = other;
    return;
  }
  int32_t keep = *into;
  if (components_[keep].runs.size() + components_[keep].instances.size() <
      components_[other].runs.size() + components_[other].instances.size()) {
    std::swap(keep, other);
  }
  Component& a = components_[keep];
  Component& b = components_[other];
  for (const int32_t run : b.runs) runs_[run].component = keep;
  for (const int32_t instance : b.instances) instances_[instance].component = keep;
  a.runs.insert(a.runs.end(), b.runs.begin(), b.runs.end());
  a.instances.insert(a.instances.end(), b.instances.begin(), b.instances.end());
  a.missing += b.missing;
  a.size += b.size;
  a.awaited += b.awaited;
  // What the one waited for may be in the other.
  a.inner = 0;
  a.counted_to = a.searched_to = Way();
  a.counted = false;
  ForgetComponent(other);
  *into = keep;
}

void Sequencer::ForgetComponent(int32_t component) {
  Component& row = components_[component];
  row.runs.clear();
  row.instances.clear();
  row.missing = row.size = row.awaited = row.inner = 0;
  row.counted_to = Way();
  row.counted = false;
  row.mark = 0;
  components_.Free(component);
}

void Sequencer::CountVote(int32_t id, int32_t seat) {
  Instance& instance = instances_[id];
  --components_[instance.component].missing;
  --instance.missing;
  CountLacking(instance.key, seat, -1);
}

void Sequencer::CountLacking(const InstanceKey& key, int32_t seat, int change) {
  Member& member = members_[RankAt(key, seat).value()];
  member.lacking += change;
  if (key.is_gradient()) member.lacking_gradients += change;
}

void Sequencer::CountAbsent(int32_t id, int32_t seat) {
  instances_[id].seats[seat].absent = true;
  CountVote(id, seat);
  if (components_[instances_[id].component].missing == 0) {
    ready_.push_back(instances_[id].component);
  }
  // Others hold tape entries of the gradient: a member that is absent from it has none, so nobody
  // waits for its part in the gradient's own gradients.
  const int32_t tape = instances_[id].tape;
  if (tape == kNone) return;
  // Its part was zeros, which lead nowhere.
  tapes_[tape].entries[seat].state = TapeEntry::State::kAbandoned;
  MarkAbandoned(tape, seat);
}

int32_t Sequencer::EnsureTape(int32_t id) {
  if (instances_[id].tape != kNone) return instances_[id].tape;
  const InstanceKey& key = instances_[id].key;
  const uint64_t hash = tape_by_key_.HashOf(key);
  const int32_t* const old_tape =
      tape_by_key_.Find(hash, key, tapes_);  // of a member that is behind
  if (old_tape != nullptr) ForgetGone(*old_tape);
  const int32_t t = tapes_.New();
  instances_[id].tape = t;
  Tape& tape = tapes_[t];
  tape.key = key;
  tape_path_bytes_ += HeapBytesOf(tape.key);
  tape_by_key_.Add(hash, t);
  tape.instance = id;
  ++tape.incarnation;
  ++waiting_tapes_;
  BeginPending(t);
  tape.live = 0;
  tape.entries.assign(instances_[id].seats.size(), TapeEntry());
  for (size_t p = 0; p < tape.entries.size(); ++p) {
    // Had one of these wanted a gradient, the tape would be there already.
    const Seat& seat = instances_[id].seats[p];
    if (seat.run != kNone) {
      SetEntry(t, static_cast<int32_t>(p), PartAt(instances_[id], static_cast<int32_t>(p)));
    } else if (seat.absent) {
      tape.entries[p].state = TapeEntry::State::kAbandoned;
    }
  }
  return t;
}

// The entry that a vote leaves behind, which is not held yet.
void Sequencer::SetEntry(int32_t t, int32_t seat, const Participation& part) {
  TapeEntry& entry = tapes_[t].entries[seat];
  entry.state = TapeEntry::State::kAbandoned;
  entry.recorded = part.wants_grad;
  entry.leads_to_collective = part.leads_to_collective;
  entry.leads_to_leaf = part.leads_to_leaf;
  if (!part.leads_to_collective && !part.leads_to_leaf) return;
  SetLabel(&entry, part.label != nullptr ? part.label : LabelOf(part));
}

void Sequencer::SetLabel(TapeEntry* entry, std::shared_ptr<const PartLabel> label) {
  if (entry->label == label) return;
  if (label != nullptr) {
    const auto uses = label_uses_.Emplace(label.get(), 0);
    if (uses.second) label_bytes_ += BytesOf(*label);
    ++*uses.first;
  }
  entry->label.swap(label);
  if (label == nullptr) return;
  int64_t* const uses = label_uses_.Find(label.get());
  if (--*uses > 0) return;
  label_uses_.Erase(label.get());
  label_bytes_ -= BytesOf(*label);
}

// The seat has no entry (any more): it gives zeros to what it has not asked for itself. MarkSome()
// does that.
void Sequencer::MarkAbandoned(int32_t t, int32_t seat) {
  const size_t children = ChildrenOf(tapes_[t]).size();
  if (children > 0) abandoned_.push_back({t, seat, tapes_[t].incarnation, children});
}

// All that the member holds, for it has left.
void Sequencer::AbandonSome(Leaving* leaving) {
  const Member& member = members_[leaving->rank.value()];
  for (; abandoned_.empty() && SliceHasTime(); ++leaving->next_tape) {
    if (member.lacking_gradients == 0) leaving->next_tape = tapes_.end();
    if (leaving->next_tape >= tapes_.end()) return;
    CountWork(1);
    const Tape& tape = tapes_[leaving->next_tape];
    if (IsGone(tape) || ChildrenOf(tape).empty()) continue;
    const auto seats = static_cast<int32_t>(tape.entries.size());
    CountWork(seats / kSeatsOfWork);
    for (int32_t p = 0; p < seats; ++p) {
      // Whether the entry itself has been let go of (ForgetSome) or not.
      const bool gave_up = RankAt(tape.key, p) == leaving->rank &&
                           StateOf({leaving->next_tape, p}) == TapeEntry::State::kAbandoned;
      if (gave_up) MarkAbandoned(leaving->next_tape, p);
    }
  }
}

// Ends with what was abandoned, or with the slice, or with the error of a gradient that zeros are
// wrong for.
absl::optional<Error> Sequencer::MarkSome() {
  while (marking() && SliceHasTime()) {
    if (abandoned_.empty()) {
      AbandonSome(&leaving_.back());
      if (leaving_.back().next_tape >= tapes_.end() && abandoned_.empty()) leaving_.pop_back();
      continue;
    }
    Abandoned& at = abandoned_.back();
    const Tape& tape = tapes_[at.tape];
    // From the last to the first: where one is launched or fails meanwhile the last takes its
    // index, and those that come are behind.
    const absl::Span<const int32_t> children =
        tape.incarnation == at.incarnation ? ChildrenOf(tape) : absl::Span<const int32_t>();
    at.left = std::min(at.left, children.size());
    if (at.left == 0) {
      abandoned_.pop_back();
      continue;
    }
    CountWork(1);
    const int32_t child = children[--at.left];
    const int32_t seat = at.seat;
    const Seat& vote = instances_[child].seats[seat];
    const bool has_asked = instances_[child].key.path.back() < tape.entries[seat].next;
    if (vote.run != kNone || vote.absent || has_asked) continue;
    absl::optional<Error> lost_gradient = LostGradientError(instances_[child].key, tape, seat);
    CountAbsent(child, seat);
    if (lost_gradient.has_value()) return lost_gradient;
  }
  return absl::nullopt;
}

// Of `gradient`, of `tape`, to which the member at `position` was to give what it has used up in
// vain.
Error Sequencer::InVainError(const InstanceKey& gradient, const Tape& tape,
                             int32_t position) const {
  const TapeEntry& entry = tape.entries[position];
  const Epoch epoch = std::min(entry.consumed_in, entry.asked_in);
  Error error(Reason::kTapeConsumed);
  error.culprit = CulpritOf(RankAt(gradient, position));
  error.instance = gradient.ToString();
  error.message = absl::StrCat(
      RankText(RankAt(gradient, position)), " consumed its tape entry for ", tape.key.ToString(),
      epoch == Epoch() ? std::string(" for a gradient that has failed")
                       : absl::StrCat(" in epoch ", epoch.value(), ", which has failed"),
      ": it cannot be had again");
  return error;
}

// What a member gave to a gradient has failed since others were to get zeros in its place.
absl::optional<Error> Sequencer::FindInVain(absl::Span<const int32_t> instances) const {
  for (const int32_t id : instances) {
    const Instance& instance = instances_[id];
    if (instance.parent == kNone) continue;
    const Tape& tape = tapes_[instance.parent];
    for (size_t p = 0; p < instance.seats.size(); ++p) {
      if (!instance.seats[p].absent || !tape.entries[p].UsedInVain(epoch_)) continue;
      return InVainError(instance.key, tape, static_cast<int32_t>(p));
    }
  }
  return absl::nullopt;
}

// What is wrong with `gradient`, of `tape`, where the member at `position` gives zeros to it:
// nothing, as long as no other collective lies behind its part. What that one would have got was to
// come from the member's local ops, which are gone.
absl::optional<Error> Sequencer::LostGradientError(const InstanceKey& gradient, const Tape& tape,
                                                   int32_t position) const {
  const TapeEntry& entry = tape.entries[position];
  if (!entry.leads_to_collective) return absl::nullopt;
  const PartLabel& part = *entry.label;
  const Rank rank = RankAt(gradient, position);
  // A gradient that was not recorded is given up from the start.
  const bool recorded = entry.recorded || !tape.key.is_gradient();
  Error error(Reason::kGradientLost);
  error.culprit = CulpritOf(rank);
  error.instance = gradient.ToString();
  error.op = part.op;
  error.source = part.source;
  error.message = absl::StrCat(
      "a gradient was asked for that leads through ", part.what, " (", tape.key.ToString(), ") of ",
      RankText(rank), " at ", part.source, ", where ",
      entry.state == TapeEntry::State::kConsumed ? "it was used up"
      : recorded                                 ? "the result was dropped or not recorded"
                                                 : "it was taken without create_graph",
      "; other collectives lie behind it, and what they would get from there cannot be had any "
      "more. ",
      recorded
          ? "On that rank call Backward on the result with a zero seed, or make the call under "
            "NoGrad (or on Detach of its operand) if its part is a constant"
          : "Take it there with create_graph as well, or make the forward call under NoGrad if "
            "its part is a constant");
  return error;
}

void Sequencer::Hold(EntryRef at) {
  Member& member = members_[RankAt(tapes_[at.tape].key, at.seat).value()];
  TapeEntry& entry = EntryAt(at);
  entry.state = TapeEntry::State::kLive;
  entry.refusals = member.refusals;
  entry.newer = EntryRef();
  entry.older = member.newest_entry;
  if (entry.older.tape != kNone) EntryAt(entry.older).newer = at;
  member.newest_entry = at;
  ++tapes_[at.tape].live;
}

void Sequencer::LetGo(EntryRef at, TapeEntry::State to) {
  Member& member = members_[RankAt(tapes_[at.tape].key, at.seat).value()];
  TapeEntry& entry = EntryAt(at);
  entry.state = to;
  if (entry.older.tape != kNone) EntryAt(entry.older).newer = entry.newer;
  if (entry.newer.tape != kNone) {
    EntryAt(entry.newer).older = entry.older;
  } else {
    member.newest_entry = entry.older;
  }
  if (member.newest_refused == at) {
    member.newest_refused = entry.older;
    if (entry.older.tape == kNone) --refused_members_;
  }
  --tapes_[at.tape].live;
}

// Of an instance that is never launched: it has no gradient.
void Sequencer::LetGoOfAll(int32_t t) {
  for (int32_t seat = 0; seat < static_cast<int32_t>(tapes_[t].entries.size()); ++seat) {
    if (EntryAt({t, seat}).state == TapeEntry::State::kLive) {
      LetGo({t, seat}, TapeEntry::State::kAbandoned);
    }
  }
}

// A gradient that is pending no more.
void Sequencer::LeaveParent(int32_t id) {
  const int32_t parent = instances_[id].parent;
  if (parent == kNone) return;
  auto& children = tapes_[parent].children;
  const int32_t last = children.back();
  children[instances_[id].child] = last;
  instances_[last].child = instances_[id].child;
  children.pop_back();
  --children_;
  // What ended_children_ and InstanceBytes() say that a list takes.
  if (children.capacity() > 4 * children.size()) children.shrink_to_fit();
  ForgetTapeIfUnused(parent);
}

void Sequencer::ForgetTapeIfUnused(int32_t t) {
  Tape& tape = tapes_[t];
  if (tape.instance != kNone || !ChildrenOf(tape).empty()) return;
  if (tape.listed) {
    tapes_.Remove(tape.pending_in == epoch_ ? &pending_tapes_ : &ended_tapes_, t);
    tape.listed = false;
    tape.children.clear();
  }
  if (tape.live > 0) return;
  tape_by_key_.Erase(t, tapes_);
  for (TapeEntry& entry : tape.entries) SetLabel(&entry, nullptr);
  tape.entries.clear();
  LetGoOfPath(&tape.key, &tape_path_bytes_);
  tapes_.Free(t);
}

int32_t Sequencer::FindInstance(const InstanceKey& key) const {
  const int32_t* const row = instance_by_key_.Find(key, instances_);
  return row == nullptr ? kNone : *row;
}

int32_t Sequencer::FindTape(const InstanceKey& forward) const {
  const int32_t* const row = tape_by_key_.Find(forward, tapes_);
  if (row == nullptr) return kNone;
  const Tape& tape = tapes_[*row];
  if (tape.instance != kNone) return IsGone(tape) ? kNone : *row;
  if (!ChildrenOf(tape).empty()) return *row;
  if (tape.live > 0 && !somebody_gone_ && refused_members_ == 0) return *row;
  for (int32_t seat = 0; seat < static_cast<int32_t>(tape.entries.size()); ++seat) {
    if (StateOf({*row, seat}) == TapeEntry::State::kLive) return *row;
  }
  return kNone;
}

sequencer_tables::TapeEntry::State Sequencer::StateOf(EntryRef at) const {
  const Tape& tape = tapes_[at.tape];
  const TapeEntry::State state = tape.entries[at.seat].state;
  if (state != TapeEntry::State::kLive) return state;
  if (IsRefused(at)) return TapeEntry::State::kRefused;
  if (!somebody_gone_) return state;
  const Member& member = members_[RankAt(tape.key, at.seat).value()];
  return member.state == Member::State::kHere ? state : TapeEntry::State::kAbandoned;
}

// Of a live entry.
bool Sequencer::IsRefused(EntryRef at) const {
  return refused_members_ > 0 &&
         EntryAt(at).refusals != members_[RankAt(tapes_[at.tape].key, at.seat).value()].refusals;
}

void Sequencer::ForgetGone(int32_t t) {
  LetGoOfAll(t);
  if (IsGone(tapes_[t])) {
    tapes_[t].instance = kNone;
    --gone_tapes_;
  }
  ForgetTapeIfUnused(t);
}

absl::Span<const int32_t> Sequencer::ChildrenOf(const Tape& tape) const {
  return tape.pending_in == epoch_ ? absl::MakeConstSpan(tape.children)
                                   : absl::Span<const int32_t>();
}

// The tape's instance is pending, or a gradient of it.
void Sequencer::BeginPending(int32_t t) {
  Tape& tape = tapes_[t];
  if (tape.listed && tape.pending_in == epoch_) return;
  if (tape.listed) tapes_.Remove(&ended_tapes_, t);
  tape.children.clear();
  tape.listed = true;
  tape.pending_in = epoch_;
  tapes_.Append(&pending_tapes_, t);
}

void Sequencer::ForgetSome() {
  while (!gone_pairs_.empty() && SliceHasTime()) {
    auto& pairs = gone_pairs_.back();
    const size_t before = pairs.size();
    pairs.ForgetPart();
    CountWork(static_cast<int64_t>(before - pairs.size()));
    if (pairs.size() == 0) gone_pairs_.pop_back();
  }
  if (ended_tapes_.head == kNone) ended_children_ = 0;
  if (ended_tapes_.head == kNone && !somebody_gone_ && refused_members_ == 0) return;
  size_t left = options_.rows_per_event;
  for (; left > 0 && ended_tapes_.head != kNone; --left) {
    const int32_t t = ended_tapes_.head;
    if (IsGone(tapes_[t])) {
      ForgetGone(t);
    } else {
      ForgetTapeIfUnused(t);
    }
  }
  for (Member& member : members_) {
    const EntryRef& newest =
        member.state == Member::State::kHere ? member.newest_refused : member.newest_entry;
    for (; left > 0 && newest.tape != kNone; --left) {
      const EntryRef at = newest;
      LetGo(at, IsRefused(at) ? TapeEntry::State::kRefused : TapeEntry::State::kAbandoned);
      ForgetTapeIfUnused(at.tape);
    }
  }
  CountWork(kWorkPerTape * static_cast<int64_t>(options_.rows_per_event - left));
}

absl::optional<Difference> Sequencer::DifferenceOf(const Instance& instance, int32_t a, int32_t b,
                                                   int32_t call) const {
  const Participation& one = PartAt(instance, a, call);
  const Participation& other = PartAt(instance, b, call);
  absl::optional<Difference> difference = FirstDifference(
      MemberAt(instance.key, a), one.descriptor, MemberAt(instance.key, b), other.descriptor);
  // The ends of a pair stand in lines of their own.
  if (!difference.has_value() && options_.check_call_sites == CheckCallSites::kRefuse &&
      !instance.key.is_pair() && one.source != other.source) {
    // Both are to be in an error as it is told, of which a client may get a thousand bytes.
    constexpr size_t kMostOfLine = 256;
    difference = Difference{"line", std::string(ShortSourceLine(one.source, kMostOfLine)),
                            std::string(ShortSourceLine(other.source, kMostOfLine))};
  }
  return difference;
}

// Whether the vote at `seat` contradicts one that came before it: none of those contradicts
// another, so on all but rows it agrees with each of them if it does with the first. Where rows
// differ each has pieces of its own for each.
bool Sequencer::Contradicts(const Instance& instance, int32_t seat) const {
  if (DifferenceOf(instance, instance.first, seat).has_value()) return true;
  if (!instance.rows_differ) return false;
  const Seat& vote = instance.seats[seat];
  const Descriptor& asked = PartAt(instance, seat).descriptor;
  RowsCheck rows(MemberAt(instance.key, seat), asked);
  if (rows.is_silent()) return false;
  const auto came_before = [&](const Seat& other) {
    const int64_t order = runs_[vote.run].order;
    const int64_t of_other = runs_[other.run].order;
    return of_other != order ? of_other < order : other.participation < vote.participation;
  };
  const auto seats = static_cast<int32_t>(instance.seats.size());
  for (int32_t p = 0; p < seats; ++p) {
    if (instance.seats[p].run != kNone) rows.Expect(PartAt(instance, p).descriptor);
  }
  bool contradicts = false;
  int64_t compared = 0;
  for (int32_t p = 0; p < seats && !contradicts; ++p) {
    const Seat& other = instance.seats[p];
    if (other.run == kNone || !came_before(other)) continue;
    contradicts = rows.Contradicts(MemberAt(instance.key, p), PartAt(instance, p).descriptor);
    ++compared;
  }
  CountWork(kWorkPerCompared * compared +
            static_cast<int64_t>(asked.sends.size() + asked.receives.size()) / kRowsOfWork);
  return contradicts;
}

// Compares a vote with those that came before it. True: the ranks are to be told now that they
// differ.
bool Sequencer::CompareVote(int32_t id, int32_t seat) {
  const Instance& instance = instances_[id];
  if (instance.differing == kNone && Contradicts(instance, seat)) DelayMismatch(id, seat);
  return instance.differing != kNone &&
         (instance.missing == 0 || differing_[instance.differing].until <= clock_);
}

// Votes in the order in which they came, each with those before it: so what the ranks are told does
// not depend on slices. Ends with them, or with the slice, or with an error that is told now.
absl::optional<Error> Sequencer::CompareSome() {
  while (comparing() && SliceHasTime()) {
    CountWork(1);
    PendingRun& run = runs_[first_uncompared_];
    if (run.uncompared == kNone) {
      first_uncompared_ = run.next;
      continue;
    }
    if (run.uncompared == static_cast<int32_t>(run.instances.size())) {
      run.uncompared = kNone;
      --uncompared_;
      if (--components_[run.component].missing == 0) ready_.push_back(run.component);
      continue;
    }
    const int32_t id = run.instances[run.uncompared];
    const Instance& instance = instances_[id];
    const int32_t seat = SeatOf(instance.key, run.what->participations[run.uncompared]);
    ++run.uncompared;
    if (!instance.rows_differ || instance.differing != kNone || seat == instance.first) continue;
    if (CompareVote(id, seat)) return MismatchError(id);
  }
  return absl::nullopt;
}

// Members that have not voted yet are given a while, so that the error says what all of them ask
// for, and which one differs. The instance counts as one that lacks a vote.
void Sequencer::DelayMismatch(int32_t id, int32_t seat) {
  Instance& instance = instances_[id];
  instance.differing = differing_.New();
  instance.against = seat;
  Differing& row = differing_[instance.differing];
  row.instance = id;
  row.until =
      std::min(clock_ + options_.mismatch_grace, instance.first_vote + options_.agree_timeout);
  differing_.Append(&in_grace_, instance.differing);
  ++components_[instance.component].missing;
}

// The first of which the ranks are told now; kNone: there is none. Before the first of all only
// such are told as would be late.
int32_t Sequencer::OutOfGrace() const {
  int32_t d = in_grace_.head;
  if (d == kNone || (differing_[d].until > clock_ && !IsLate())) return kNone;
  int64_t looks = 0;
  for (; d != kNone && differing_[d].until > clock_; d = differing_[d].next) ++looks;
  CountWork(looks / kDifferingOfWork);
  return d == kNone ? kNone : differing_[d].instance;
}

// Equal versions together: "ranks 0-2,4: all_reduce SUM f32[10] at a.cc:7; rank 3: ... at a.cc:9".
std::string Sequencer::VersionsText(const Instance& instance) const {
  // Of one version: errors hold at most 4 KiB, and many ranks may take turns.
  constexpr size_t kMostRanges = 32;
  struct Version {
    std::string text;
    std::vector<int32_t> ranks;
  };
  std::vector<Version> versions;
  absl::flat_hash_map<std::string, size_t> version_of;  // by text
  for (int32_t p = 0; p < static_cast<int32_t>(instance.seats.size()); ++p) {
    if (instance.seats[p].run == kNone) continue;
    const Participation& part = PartAt(instance, p);
    const std::string text = absl::StrCat(PartText(part), " at ", part.source);
    const auto version = version_of.emplace(text, versions.size());
    if (version.second) versions.push_back({text, {}});
    versions[version.first->second].ranks.push_back(RankAt(instance.key, p).value());
  }
  std::vector<std::string> texts;
  for (Version& version : versions) {
    if (texts.size() == Error::kMaxRanks) {
      texts.push_back(absl::StrCat("and ", versions.size() - Error::kMaxRanks, " more versions"));
      break;
    }
    std::vector<int32_t>& ranks = version.ranks;
    std::sort(ranks.begin(), ranks.end());
    std::vector<std::string> ranges;
    for (size_t begin = 0; begin < ranks.size();) {
      if (ranges.size() == kMostRanges) {
        ranges.push_back("...");
        break;
      }
      size_t end = begin + 1;
      while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
      ranges.push_back(end - begin > 1 ? absl::StrCat(ranks[begin], "-", ranks[end - 1])
                                       : absl::StrCat(ranks[begin]));
      begin = end;
    }
    texts.push_back(absl::StrCat(ranks.size() > 1 ? "ranks " : "rank ", absl::StrJoin(ranges, ","),
                                 ": ", version.text));
  }
  return absl::StrJoin(texts, "; ");
}

// Of `voted`, ascending, those that are compared with all of it: so many that it is seen which two
// differ, and whether one rank is against all others. Two that differ are enough where rows are
// alike, for then equal votes contradict the same ones; where rows differ each has pieces of its
// own, and the first of many are compared as well.
std::vector<int32_t> Sequencer::ComparedSeats(const Instance& instance,
                                              const std::vector<int32_t>& voted) const {
  constexpr size_t kMostOfRows = 64;
  constexpr size_t kMostPairs = 4096;  // in one piece; beside those of the two that differ
  std::vector<int32_t> compared = {instance.against};
  for (const int32_t seat : voted) {
    if (seat == instance.against || !DifferenceOf(instance, seat, instance.against).has_value()) {
      continue;
    }
    compared.push_back(seat);
    break;
  }
  if (instance.rows_differ) {
    const size_t first = std::min({voted.size(), kMostOfRows, kMostPairs / voted.size()});
    compared.insert(compared.end(), voted.begin(), voted.begin() + static_cast<ptrdiff_t>(first));
  }
  std::sort(compared.begin(), compared.end());
  compared.erase(std::unique(compared.begin(), compared.end()), compared.end());
  return compared;
}

Error Sequencer::MismatchError(int32_t id) const {
  const Instance& instance = instances_[id];
  std::vector<int32_t> voted;
  for (int32_t p = 0; p < static_cast<int32_t>(instance.seats.size()); ++p) {
    if (instance.seats[p].run != kNone) voted.push_back(p);
  }
  const std::vector<int32_t> compared = ComparedSeats(instance, voted);
  std::vector<int32_t> contradicts(instance.seats.size(), 0);
  int64_t looks = 0;
  int32_t pairs = 0;
  int32_t expected = kNone;  // seat
  int32_t got = kNone;
  for (const int32_t one : compared) {
    for (const int32_t other : voted) {
      if (other == one) continue;
      // It has been compared with all already.
      if (other < one && std::binary_search(compared.begin(), compared.end(), other)) continue;
      const int32_t low = std::min(one, other);
      const int32_t high = std::max(one, other);
      ++looks;
      if (!DifferenceOf(instance, low, high).has_value()) continue;
      ++contradicts[low];
      ++contradicts[high];
      ++pairs;
      // The first that differs from one before it.
      if (expected == kNone || high < got || (high == got && low < expected)) {
        std::tie(expected, got) = std::make_pair(low, high);
      }
    }
  }
  CountWork(kWorkPerCompared * looks);
  // One rank against at least two is to blame; of two alone nobody can say which is wrong.
  int32_t culprit = kNone;
  for (const int32_t seat : voted) {
    if (contradicts[seat] >= 2 && contradicts[seat] == pairs) culprit = seat;
  }
  for (const int32_t seat : voted) {
    if (culprit == kNone) break;
    if (seat == culprit || !DifferenceOf(instance, seat, culprit).has_value()) continue;
    std::tie(expected, got) = std::make_pair(seat, culprit);
    break;
  }
  Error error = MakeInstanceError(Reason::kMismatch, id);
  const Difference difference = *DifferenceOf(instance, expected, got);
  error.source = PartAt(instance, got).source;
  error.expected = difference.expected;
  error.got = difference.got;
  error.message = absl::StrCat("the ranks ask for different things in ", instance.key.ToString(),
                               ": ", difference.what, " is ", difference.expected, " on ",
                               RankText(RankAt(instance.key, expected)), " and ", difference.got,
                               " on ", RankText(RankAt(instance.key, got)), ". ",
                               VersionsText(instance), "; nothing was launched");
  // The differing one first, then the others in order of rank.
  error.ranks.push_back({RankAt(instance.key, got).value(), PartText(PartAt(instance, got)),
                         PartAt(instance, got).source});
  AddVersions(instance, &error);
  if (culprit != kNone) error.culprit = CulpritOf(RankAt(instance.key, culprit));
  return error;
}

// One line once for each pair of lines, so far as their hashes tell.
void Sequencer::WarnOfCallSites(const Instance& instance, int32_t call, int32_t seat,
                                Actions* actions) {
  constexpr size_t kMostWarned = 1024;
  const Participation& first = PartAt(instance, instance.first, call);
  const Participation& part = PartAt(instance, seat, call);
  if (first.source == part.source || instance.key.is_pair() ||
      warned_sites_.size() >= kMostWarned ||
      !warned_sites_.insert(absl::HashOf(std::minmax(first.source, part.source))).second) {
    return;
  }
  actions->emplace_back();
  SequencerAction& action = actions->back();
  action.kind = SequencerAction::Kind::kWarn;
  auto error = std::make_shared<Error>(Reason::kMismatch);
  error->instance = instance.KeyAt(call).ToString();
  error->op = std::string(CollectiveKindName(part.descriptor.kind));
  error->source = part.source;
  error->message = absl::StrCat(
      PartText(part), " (", error->instance, ") is called in different lines: ", first.source,
      " on ", RankText(RankAt(instance.key, instance.first)), ", ", part.source, " on ",
      RankText(RankAt(instance.key, seat)), "; it was taken for one call");
  action.error = std::move(error);
}

// --- Lists ---------------------------------------------------------------------------------------

// The pending instance that a call is, or that has it in its list; kNone: none. `call`, unless it
// is null, gets which of the list's it is.
int32_t Sequencer::FindCall(const InstanceKey& key, int32_t* call) const {
  if (call != nullptr) *call = 0;
  const int32_t row = FindInstance(key);
  if (row != kNone || lists_.empty() || key.is_gradient() || key.is_pair()) return row;
  const ListKey at{key.at.part > 0, key.group, key.at};
  auto list = lists_.upper_bound(at);
  if (list == lists_.begin()) return kNone;
  --list;
  const CallPosition& first = list->first.at;
  if (list->first.by_parts != at.by_parts || list->first.group != key.group ||
      first.step != key.at.step || (at.by_parts && first.call != key.at.call)) {
    return kNone;
  }
  const int64_t behind = at.by_parts ? key.at.part - first.part : key.at.call - first.call;
  if (behind >= instances_[list->second].count) return kNone;
  if (call != nullptr) *call = static_cast<int32_t>(behind);
  return list->second;
}

// The pending instance of the first of these calls of the vote at hand; kNone: there is none.
// Leaves in `calls` as many as that has, or as have none.
int32_t Sequencer::FindCalls(CallList* calls) {
  int32_t call = 0;
  int32_t id = FindCall(keys_[calls->first], &call);
  if (id == kNone) {
    if (calls->count > 1) calls->count = CountFree(*calls);
    return kNone;
  }
  if (call > 0) id = CutList(id, call).second;
  const int32_t most = instances_[id].by_parts == calls->by_parts ? calls->count : 1;
  if (instances_[id].count > most) id = CutList(id, most).first;
  calls->count = instances_[id].count;
  return id;
}

// Of these calls, of which the first is not pending, how many are not until one is.
int32_t Sequencer::CountFree(const CallList& calls) const {
  const InstanceKey& key = keys_[calls.first];
  const Group& group = groups_[key.group.value()];
  bool is_last = true;  // nobody has called what is behind it
  for (size_t seat = 0; seat < group.members.size() && is_last; ++seat) {
    is_last = static_cast<int32_t>(seat) == seats_[calls.first] ||
              !(key.at < NextOf(group.members[seat], group.counters[seat]));
  }
  if (is_last) return calls.count;
  int32_t count = 1;
  while (count < calls.count && FindCall(keys_[calls.first + count]) == kNone) ++count;
  CountWork(count / kLooksOfWork);
  return count;
}

// Cuts a list behind so many of its calls. The shorter part gets a row of its own: what that takes
// is little even if a list is cut call by call.
Sequencer::Cut Sequencer::CutList(int32_t id, int32_t count) {
  const int32_t row = instances_.New();
  Instance& list = instances_[id];
  Instance& part = instances_[row];
  const CallPosition at = list.PositionAt(count);
  const int32_t left = list.count - count;
  const bool is_first = count < left;
  further_parts_ -= list.HasFurtherParts() ? 1 : 0;
  lists_.erase(ListKeyOf(list));
  if (is_first) {
    instance_by_key_.Erase(id, instances_);
    if (list.indexed) instance_by_sort_key_.erase(SortKeyOf(list));
  }
  part = list;
  Instance& first = is_first ? part : list;
  Instance& second = is_first ? list : part;
  first.count = count;
  second.count = left;
  second.key.at = at;
  for (Seat& seat : second.seats) {
    if (seat.run != kNone) seat.participation += count;
  }
  Component& gang = components_[part.component];
  gang.instances.push_back(row);
  gang.missing += part.missing;
  CountWork(1 + (part.count + 2 * static_cast<int64_t>(part.seats.size())) / kSeatsOfWork);
  for (int32_t p = 0; p < static_cast<int32_t>(part.seats.size()); ++p) {
    const Seat& seat = part.seats[p];
    if (seat.run != kNone) {
      const auto from = runs_[seat.run].instances.begin() + seat.participation;
      std::fill(from, from + part.count, row);
    } else if (!seat.absent) {
      CountLacking(part.key, p, 1);
    }
  }
  if (part.timed) {
    instances_.Insert(&timed_, is_first ? list.previous : id, is_first ? id : list.next, row);
    if (!part.indexed) {
      ++unindexed_;
      if (is_first && first_unindexed_ == id) first_unindexed_ = row;
    }
  }
  for (const int32_t one : {id, row}) {
    const Instance& instance = instances_[one];
    further_parts_ += instance.HasFurtherParts() ? 1 : 0;
    if (instance.count > 1) lists_.emplace(ListKeyOf(instance), one);
    if (one == id && !is_first) continue;  // its name is the list's
    instance_by_key_.Add(instance_by_key_.HashOf(instance.key), one);
    if (instance.timed && instance.indexed) {
      CountWork(kWorkToIndex);
      instance_by_sort_key_.emplace(SortKeyOf(instance), one);
    }
  }
  return is_first ? Cut{row, id} : Cut{id, row};
}

// Whether there was one.
bool Sequencer::CutAllLists(int32_t component) {
  bool had_lists = false;
  // What comes of it stands behind these.
  const size_t count = components_[component].instances.size();
  for (size_t i = 0; i < count; ++i) {
    const int32_t id = components_[component].instances[i];
    had_lists |= instances_[id].count > 1;
    while (instances_[id].count > 1) CutList(id, instances_[id].count - 1);
  }
  return had_lists;
}

// Compares each call with the first vote for it. What differs is by itself from then on.
void Sequencer::CompareList(int32_t id, int32_t seat, absl::optional<Error>* fault) {
  while (id != kNone) {
    const Instance& instance = instances_[id];
    int32_t call = 0;
    while (call < instance.count &&
           !DifferenceOf(instance, instance.first, seat, call).has_value()) {
      ++call;
    }
    CountWork(call / kLooksOfWork);
    if (call == instance.count) return;
    if (call > 0) id = CutList(id, call).second;
    Cut cut{id, kNone};
    if (instances_[id].count > 1) cut = CutList(id, 1);
    if (CompareVote(cut.first, seat) && !fault->has_value()) *fault = MismatchError(cut.first);
    id = cut.second;
  }
}

sequencer_tables::ListKey Sequencer::ListKeyOf(const Instance& instance) {
  return {instance.by_parts, instance.key.group, instance.key.at};
}

// --- Launching ----------------------------------------------------------------------------------

// What the slice has no time for is tried by Advance(), which is due at once.
void Sequencer::LaunchReady(Actions* actions) {
  do {
    while (!ready_.empty() && SliceHasTime()) {
      const int32_t component = ready_.back();
      const Component& gang = components_[component];
      const bool closed = !gang.runs.empty() && gang.missing == 0;
      if (closed && !CountInner(component)) break;  // there it stays
      ready_.pop_back();
      if (!closed || gang.awaited > gang.inner) continue;
      absl::optional<Error> why;
      if (gang.size > options_.max_gang_size) {
        // A circle has made it so.
        why = GangTooLarge(gang.size, gang.instances.empty() ? kNone : gang.instances[0]);
      } else {
        why = OrderComponent(component, &gang_runs_, &gang_instances_);
      }
      if (!why.has_value()) why = FindInVain(gang_instances_);
      if (why.has_value()) {
        EndEpoch(*why, actions);
        return;
      }
      if (AwaitReserves(component, actions)) continue;
      Launch(gang_runs_, gang_instances_, actions);
    }
  } while (MergeCircle());
}

// One piece further through what the component's runs and gradients wait for: the components, it
// may be itself, with results that they consume, and with the forward instances that they are
// gradients of. kNone: this piece has come to none that is pending. False: there is no more.
bool Sequencer::NextAwaited(int32_t c, Way* way, int32_t* awaited) const {
  const Component& component = components_[c];
  CountWork(1);
  *awaited = kNone;
  for (int64_t looks = 0; *awaited == kNone && looks < kLooksOfWork; ++looks) {
    if (way->run < component.runs.size()) {
      const PendingRun& run = runs_[component.runs[way->run]];
      if (way->index == run.producers.size()) {
        *way = {way->run + 1, 0};
        continue;
      }
      const int32_t* const row = run_by_handle_.Find(run.producers[way->index++]);
      if (row != nullptr) *awaited = runs_[*row].component;
    } else {
      if (way->index == component.instances.size()) return false;
      const int32_t parent = instances_[component.instances[way->index++]].parent;
      if (parent == kNone || tapes_[parent].instance == kNone) continue;
      *awaited = instances_[tapes_[parent].instance].component;
    }
  }
  return true;
}

// A closed component is held up by other worlds and by what is not launched: what that is does not
// get more, so it is tried again when all of it has let go. What is its own stays, whatever is
// launched meanwhile, and is counted once. False: the slice has no time for the rest of that.
bool Sequencer::CountInner(int32_t c) {
  Component& component = components_[c];
  if (component.counted) return true;
  if (component.awaited > 0) {
    int32_t awaited = kNone;
    while (NextAwaited(c, &component.counted_to, &awaited)) {
      component.inner += awaited == c ? 1 : 0;
      if (!SliceHasTime()) return false;
    }
  }
  component.counted = true;
  // Only now, and only by what waits itself, a circle may be closed.
  if (component.awaited > component.inner) {
    unsearched_.push_back(runs_[component.runs[0]].handle);
  }
  return true;
}

// One of those that the component waits for has let go of it.
void Sequencer::LetGoOn(int32_t c) {
  Component& component = components_[c];
  --component.awaited;
  if (component.counted && component.awaited == component.inner) ready_.push_back(c);
}

// Components that wait for each other in a circle can only be launched together: one of them may be
// compiled on a rank that has no part in what lies between. They become one; whether their
// collectives have an order is then FindOrder's to say. True: there was a circle, and ready_ has
// what it has become. Else none is left, or the slice has no time to look for more.
//
// A circle is looked for from the last of its components that was closed, so others than closed
// ones are not gone through; and these stay as they are until they are launched, those first that
// others wait for: so what stands in path_ when the next slice goes on is the beginning of what
// stood there.
bool Sequencer::MergeCircle() {
  const auto enter = [this](int32_t component) {
    components_[component].circle = circle_;
    path_.push_back({component, Way()});
  };
  while (searching() && SliceHasTime()) {
    if (path_.empty()) {
      const int32_t* const start = run_by_handle_.Find(unsearched_.back());
      unsearched_.pop_back();
      if (start == nullptr) continue;
      const int32_t component = runs_[*start].component;
      const auto& runs = components_[component].runs;
      CountWork(static_cast<int64_t>(runs.size()) / kHandlesOfWork);
      if (std::none_of(runs.begin(), runs.end(),
                       [this](int32_t r) { return runs_[r].has_dependents; })) {
        continue;
      }
      ++circle_;
      enter(component);
    }
    Awaiting& last = path_.back();
    int32_t awaited = kNone;
    if (!NextAwaited(last.component, &last.way, &awaited)) {
      path_.pop_back();
    } else if (awaited == kNone || awaited == last.component) {
      continue;
    } else if (awaited == path_.front().component) {
      int32_t merged = awaited;
      for (const Awaiting& at : path_) Merge(&merged, at.component);
      path_.clear();
      ready_.push_back(merged);
      return true;
    } else if (components_[awaited].missing == 0 && components_[awaited].circle != circle_) {
      enter(awaited);
    }
  }
  return false;
}

absl::optional<Error> Sequencer::OrderComponent(int32_t component, std::vector<int32_t>* runs,
                                                std::vector<int32_t>* instances) {
  const Component& gang = components_[component];
  runs->assign(gang.runs.begin(), gang.runs.end());
  std::sort(runs->begin(), runs->end(),
            [this](int32_t a, int32_t b) { return runs_[a].order < runs_[b].order; });
  instances->clear();
  reordered_.clear();
  bool trivial = gang.instances.size() <= 1;
  for (const int32_t r : *runs) {
    const PendingRun& run = runs_[r];
    trivial &= run.producers.empty() &&
               (run.instances.empty() ||
                run.instances.size() == static_cast<size_t>(instances_[run.instances[0]].count));
  }
  if (trivial) {
    instances->assign(gang.instances.begin(), gang.instances.end());
    return absl::nullopt;
  }

  for (const int32_t id : gang.instances) instances_[id].mark = kNone;
  for (size_t i = 0; i < runs->size(); ++i) runs_[(*runs)[i]].mark = static_cast<int32_t>(i);
  Sign(*runs, instances);
  const GangOrder* order = known_orders_.Find(signature_.bytes());
  if (order == nullptr) {
    if (HasManyNeeds(*runs) && CutAllLists(component)) {
      return OrderComponent(component, runs, instances);
    }
    GangOrder new_order;
    absl::optional<Error> conflict = FindOrder(*runs, *instances, &new_order);
    // One by one they may have an order.
    if (conflict.has_value() && CutAllLists(component)) {
      return OrderComponent(component, runs, instances);
    }
    if (conflict.has_value()) return conflict;
    order = known_orders_.Keep(signature_.bytes(), std::move(new_order));
  }
  const std::vector<int32_t> by_first_use = *instances;
  const std::vector<int32_t> by_submission = *runs;
  for (size_t i = 0; i < by_first_use.size(); ++i) {
    (*instances)[i] = by_first_use[order->instances[i]];
  }
  for (size_t i = 0; i < by_submission.size(); ++i) {
    (*runs)[i] = by_submission[order->runs[i]];
    if (order->reordered[i].empty()) continue;
    reordered_.emplace_back(by_submission[i], &order->reordered[i]);
  }
  return absl::nullopt;
}

// Fills signature_ with all that the order of these runs depends on, and `instances` by first use.
void Sequencer::Sign(const std::vector<int32_t>& runs, std::vector<int32_t>* instances) {
  signature_.Clear();
  signature_.PutVarint(runs.size());
  SignatureWriter out(&signature_);
  for (const int32_t r : runs) {
    const PendingRun& run = runs_[r];
    out.PutFingerprint(run.what->fingerprint);
    for (const Rank rank : run.ranks) out.Put(rank.value());
    out.End();
    for (size_t i = 0; i < run.instances.size();) {
      const int32_t id = run.instances[i];
      Instance& instance = instances_[id];
      if (instance.mark == kNone) {
        instance.mark = static_cast<int32_t>(instances->size());
        instances->push_back(id);
      }
      out.Put(instance.mark);
      i += static_cast<size_t>(instance.count);
    }
    out.End();
    for (const RunHandle producer : run.producers) {
      const int32_t* const row = run_by_handle_.Find(producer);
      if (row != nullptr) out.Put(runs_[*row].mark);
    }
    out.End();
  }
  // Of the keys, how they stand to each other, and which end of a pair is which.
  const auto by_key = [this](int32_t a, int32_t b) {
    return instances_[a].key < instances_[b].key;
  };
  if (!std::is_sorted(instances->begin(), instances->end(), by_key)) {
    std::vector<int32_t> sorted = *instances;
    std::sort(sorted.begin(), sorted.end(), by_key);
    for (const int32_t id : sorted) out.Put(instances_[id].mark);
  }
  out.End();
  for (const int32_t id : *instances) {
    if (instances_[id].count == 1) continue;
    out.Put(instances_[id].mark);
    out.Put(instances_[id].count);
  }
  out.End();
  for (const int32_t id : *instances) {
    const Instance& instance = instances_[id];
    const bool reversed = instance.key.is_pair() && instance.key.path.size() % 2 == 1;
    const int32_t forward = instance.parent == kNone ? kNone : tapes_[instance.parent].instance;
    if (forward == kNone && !reversed) continue;
    out.Put(instance.mark);
    out.Put(forward == kNone ? kNone : instances_[forward].mark);
    out.Put(reversed ? 1 : 0);
  }
  out.End();
}

// `instances` by first use: instances_[id].mark is the index, as runs_[r].mark is in `runs`.
absl::optional<Error> Sequencer::FindOrder(const std::vector<int32_t>& runs,
                                           const std::vector<int32_t>& instances,
                                           GangOrder* order) const {
  GangView gang;
  std::deque<std::vector<Participation>> as_lists;  // of runs that have some
  gang.runs.reserve(runs.size());
  for (const int32_t r : runs) {
    const PendingRun& run = runs_[r];
    gang.runs.emplace_back();
    GangView::Run& view = gang.runs.back();
    view.parts = run.what->participations;
    view.ranks = run.ranks;
    const std::vector<int32_t> firsts = FirstsOf(run);
    for (const int32_t first : firsts) {
      view.instances.push_back(instances_[run.instances[first]].mark);
    }
    if (firsts.size() < view.parts.size()) {
      as_lists.push_back(PartsAsLists(run, firsts));
      view.parts = as_lists.back();
    }
    for (const RunHandle producer : run.producers) {
      const int32_t* const row = run_by_handle_.Find(producer);
      if (row != nullptr) view.producers.push_back(runs_[*row].mark);
    }
  }
  for (const int32_t id : instances) {
    const Instance& instance = instances_[id];
    gang.instances.push_back({&instance.key, -1});
    if (instance.parent == kNone || tapes_[instance.parent].instance == kNone) continue;
    gang.instances.back().forward = instances_[tapes_[instance.parent].instance].mark;
  }
  const absl::optional<GangConflict> conflict = FindGangOrder(gang, order);
  if (!conflict.has_value()) return absl::nullopt;
  return ConflictError(runs, instances, *conflict);
}

// More than are looked at for each list of calls.
bool Sequencer::HasManyNeeds(const std::vector<int32_t>& runs) const {
  size_t calls = 0;
  size_t needs = 0;
  for (const int32_t r : runs) {
    const std::vector<Participation>& parts = runs_[r].what->participations;
    calls += parts.size();
    for (const Participation& part : parts) needs += part.after.size();
  }
  return needs > kMostNeeds + kMostNeedsPerCall * calls;
}

// The run's participations that its instances begin with.
std::vector<int32_t> Sequencer::FirstsOf(const PendingRun& run) const {
  std::vector<int32_t> firsts;
  for (size_t i = 0; i < run.instances.size();) {
    firsts.push_back(static_cast<int32_t>(i));
    i += static_cast<size_t>(instances_[run.instances[i]].count);
  }
  return firsts;
}

// Of each of the run's instances what its order depends on: it needs what its calls need.
std::vector<Participation> Sequencer::PartsAsLists(const PendingRun& run,
                                                   const std::vector<int32_t>& firsts) const {
  const std::vector<Participation>& parts = run.what->participations;
  std::vector<int32_t> list_of(parts.size());
  std::vector<Participation> result(firsts.size());
  for (size_t l = 0; l < firsts.size(); ++l) {
    const auto first = static_cast<size_t>(firsts[l]);
    const size_t end = l + 1 < firsts.size() ? static_cast<size_t>(firsts[l + 1]) : parts.size();
    Participation& list = result[l];
    list.member = parts[first].member;
    list.is_recv = parts[first].is_recv;
    for (size_t i = first; i < end; ++i) {
      list_of[i] = static_cast<int32_t>(l);
      for (const int32_t before : parts[i].after) {
        if (before < firsts[l]) list.after.push_back(list_of[before]);
      }
    }
    std::sort(list.after.begin(), list.after.end());
    list.after.erase(std::unique(list.after.begin(), list.after.end()), list.after.end());
  }
  return result;
}

Error Sequencer::ConflictError(const std::vector<int32_t>& runs,
                               const std::vector<int32_t>& instances,
                               const GangConflict& conflict) const {
  Error error(Reason::kOrderCycle);
  if (conflict.instance >= 0) {
    error = MakeInstanceError(error.reason, instances[conflict.instance]);
  }
  if (conflict.interleaved) {
    error.message = absl::StrCat(
        "no order of collectives lets ", RankText(conflict.rank),
        " execute its runs one after the other: ", RunText(runs[conflict.run]), " and ",
        RunText(runs[conflict.other_run]),
        " would have to be interleaved. Compile the same collectives together on every rank");
    return error;
  }
  const auto instance_text = [&](int32_t index) {
    const Instance& instance = instances_[instances[index]];
    const Participation& part = PartAt(instance, instance.first);
    return absl::StrCat(PartText(part), " (", instance.key.ToString(), ")");
  };
  std::vector<std::string> texts;
  for (const GangConflict::Wait& wait : conflict.circle) {
    if (wait.of_runs) {
      texts.push_back(
          absl::StrCat(RunText(runs[wait.after]), " waits for ", RunText(runs[wait.before])));
      continue;
    }
    std::string waiter = "autograd";
    if (wait.run >= 0) {
      const Participation& part = runs_[runs[wait.run]].what->participations[wait.participation];
      const InstanceKey& key = instances_[instances[wait.after]].key;
      waiter = absl::StrCat(RankText(RankAt(key, SeatOf(key, part))), ", ", part.source);
    }
    texts.push_back(absl::StrCat(instance_text(wait.after), " waits for ",
                                 instance_text(wait.before), " (", waiter, ")"));
  }
  if (conflict.waits_left_out > 0) {
    texts.push_back(absl::StrCat("and ", conflict.waits_left_out, " more"));
  }
  error.message =
      absl::StrCat("the ranks' data dependences order these collectives in a circle: ",
                   absl::StrJoin(texts, "; "), ". Use them in the same order on every rank");
  return error;
}

// A closed component that nothing blocks does not change any more, and its order is a function of
// its signature: so it stands while its runs get ready for it. Nothing may be lacking once it is
// launched.
bool Sequencer::AwaitReserves(int32_t component, Actions* actions) {
  for (const auto& run_and_order : reordered_) {
    PendingRun& run = runs_[run_and_order.first];
    if (run.reserve == PendingRun::Reserve::kDone) continue;
    run.reserve = PendingRun::Reserve::kAsked;
    HoldUp(run_and_order.first, clock_ + options_.agree_timeout);
    ++components_[component].awaited;
    actions->emplace_back();
    SequencerAction& action = actions->back();
    action.kind = SequencerAction::Kind::kReserve;
    action.run = run.handle;
    const std::vector<int32_t> firsts = FirstsOf(run);
    for (const int32_t index : *run_and_order.second) {
      const int32_t first = firsts[index];
      for (int32_t call = 0; call < instances_[run.instances[first]].count; ++call) {
        action.order.push_back(first + call);
      }
    }
    action.epoch = epoch_;
  }
  return components_[component].awaited > components_[component].inner;
}

void Sequencer::Launch(const std::vector<int32_t>& runs, const std::vector<int32_t>& instances,
                       Actions* actions) {
  const int32_t component = runs_[runs[0]].component;
  for (const int32_t id : instances) CountWork(instances_[id].count);
  for (const int32_t r : runs) CountWork(runs_[r].launch_work);
  LetGoOfWaiting(component);
  actions->emplace_back();
  SequencerAction& action = actions->back();
  action.kind = SequencerAction::Kind::kLaunch;
  action.ticket = next_ticket_;
  action.epoch = epoch_;
  next_ticket_ = Ticket(next_ticket_.value() + 1);

  const int32_t g = gangs_.New();
  OpenGang& gang = gangs_[g];
  gang.ticket = action.ticket;
  gang.epoch = epoch_;
  gang.launched = clock_;
  gang.last_of_world.reset();
  gang.runs.clear();
  gangs_.Append(&launched_, g);
  gang_by_ticket_.Emplace(action.ticket, g);

  action.instances.resize(instances.size());
  for (size_t i = 0; i < instances.size(); ++i) {
    const Instance& instance = instances_[instances[i]];
    LaunchedInstance& out = action.instances[i];
    out.parts.reserve(instance.seats.size());
    for (int32_t p = 0; p < static_cast<int32_t>(instance.seats.size()); ++p) {
      const Seat& seat = instance.seats[p];
      const GroupRank member = MemberAt(instance.key, p);
      if (seat.absent) {
        out.absent.push_back(member);
        const TapeEntry& entry = tapes_[instance.parent].entries[p];
        if (entry.leads_to_leaf) {
          out.given_up.push_back({RankAt(instance.key, p), entry.label});
        }
      } else {
        out.parts.push_back({runs_[seat.run].handle, seat.participation, member});
      }
    }
    if (instance.key.is_pair() && out.parts.size() == 2 &&
        out.parts[1].member < out.parts[0].member) {
      std::swap(out.parts[0], out.parts[1]);
    }
    if (instance.key.is_pair() && out.absent.size() == 2 && out.absent[1] < out.absent[0]) {
      std::swap(out.absent[0], out.absent[1]);
    }
    if (i == 0) {
      const Seat& first = instance.seats[instance.first];
      gang.what = runs_[first.run].what;
      gang.participation = first.participation;
    }
    // Of the ranks' calls, whatever the gang's order is.
    if (instance.key.group == GroupId(0) && !instance.key.is_pair() &&
        !instance.key.is_gradient()) {
      const InstanceKey last = instance.KeyAt(instance.count - 1);
      if (!gang.last_of_world.has_value() || *gang.last_of_world < last) gang.last_of_world = last;
    }
    out.key = instance.key;
    out.count = instance.count;
    out.by_parts = instance.by_parts;
  }

  action.runs.reserve(runs.size());
  for (const int32_t r : runs) {
    PendingRun& run = runs_[r];
    action.runs.push_back(run.handle);
    if (run.donates) action.donating.push_back(run.handle);
    gang.runs.push_back(run.handle);
    run_by_handle_.Erase(run.handle);
    ForgetRun(r);
  }
  for (const int32_t id : instances) {
    LeaveParent(id);
    Instance& instance = instances_[id];
    if (instance.tape != kNone) {
      tapes_[instance.tape].instance = kNone;
      --waiting_tapes_;
      ForgetTapeIfUnused(instance.tape);
    }
    ForgetInstance(id);
  }
  if (!path_.empty() && path_.back().component == component) path_.pop_back();
  ForgetComponent(component);
}

// It is pending no more; its tape, its parent and its component know.
void Sequencer::ForgetInstance(int32_t id) {
  Instance& instance = instances_[id];
  Unlist(id);
  if (instance.count > 1) lists_.erase(ListKeyOf(instance));
  if (instance.HasFurtherParts()) --further_parts_;
  pending_calls_ -= static_cast<size_t>(instance.count);
  instance_by_key_.Erase(id, instances_);
  instance.seats.clear();
  LetGoOfPath(&instance.key, &instance_path_bytes_);
  instances_.Free(id);
}

// The component is launched: what waits for it goes on.
void Sequencer::LetGoOfWaiting(int32_t component) {
  const auto let_go_on = [&](int32_t waiter) {
    CountWork(1);
    if (waiter != component) LetGoOn(waiter);
  };
  for (const int32_t r : components_[component].runs) {
    for (const int32_t consumer : runs_[r].consumers) let_go_on(runs_[consumer].component);
  }
  for (const int32_t id : components_[component].instances) {
    if (instances_[id].tape == kNone) continue;
    for (const int32_t child : tapes_[instances_[id].tape].children) {
      let_go_on(instances_[child].component);
    }
  }
}

// --- Other events -------------------------------------------------------------------------------

void Sequencer::Unblock(RunHandle run, absl::Time now, Actions* actions) {
  BeginEvent(now);
  const int32_t* const row = run_by_handle_.Find(run);
  if (row == nullptr) return;
  PendingRun& pending_run = runs_[*row];
  if (!pending_run.externally_blocked) return;
  pending_run.externally_blocked = false;
  EndHoldUp(&pending_run);
  LetGoOn(pending_run.component);
  LaunchReady(actions);
}

void Sequencer::Reserved(RunHandle run, absl::Time now, Actions* actions) {
  BeginEvent(now);
  const int32_t* const row = run_by_handle_.Find(run);
  if (row == nullptr) return;
  PendingRun& pending_run = runs_[*row];
  if (pending_run.reserve != PendingRun::Reserve::kAsked) return;
  pending_run.reserve = PendingRun::Reserve::kDone;
  EndHoldUp(&pending_run);
  LetGoOn(pending_run.component);
  LaunchReady(actions);
}

void Sequencer::Cancel(RunHandle run, Rank rank, absl::Time now, Actions* actions) {
  BeginEvent(now);
  const int32_t* const row = run_by_handle_.Find(run);
  if (row == nullptr) return;
  Error error(Reason::kCancelled);
  if (!runs_[*row].instances.empty()) {
    error = MakeInstanceError(error.reason, runs_[*row].instances[0]);
  }
  error.culprit = CulpritOf(rank);
  error.message =
      absl::StrCat(RankText(rank), " cancelled ", RunText(*row), " before it was launched");
  EndEpoch(error, actions);
}

void Sequencer::Refuse(absl::Span<const RefusedMember> members, Epoch epoch, const Error& why,
                       absl::Time now, Actions* actions) {
  BeginEvent(now);
  // Of members that have other numbers by now, and begin anew.
  if (epoch < since_) return;
  moves_.clear();
  steps_.clear();
  requests_.clear();
  CountWork(SeatsOf(members) / kRefusedSeatsOfWork);
  bool passed = false;
  for (const RefusedMember& refused : members) {
    if (!IsRank(refused.rank) || refused.step < members_[refused.rank.value()].step) continue;
    steps_.push_back({refused.rank, refused.step});
    CountWork(kWorkPerRefused * static_cast<int64_t>(refused.gradients.size()));
    for (const RefusedCalls& calls : refused.calls) {
      InstanceKey key;
      key.group = calls.group;
      key.since = since_;
      key.source = calls.source;
      key.destination = calls.destination;
      key.tag = calls.tag;
      CountWork(key.is_pair() ? kWorkPerRefusedPair : kWorkPerRefused);
      const int32_t seat = SeatOfRefused(refused.rank, key, calls.is_recv);
      if (seat == kNone) continue;
      Move move;
      move.rank = refused.rank;
      move.group = calls.group;
      move.member = MemberAt(key, seat);
      move.is_pair = key.is_pair();
      move.end = {calls.group, calls.source, calls.destination, calls.tag, calls.is_recv};
      move.first = {refused.step, calls.first, 0};
      move.next = {refused.step, calls.next, 0};
      if (const Counter* counter = CounterOf(move)) {
        if (counter->next.step == refused.step) move.first = std::max(move.first, counter->next);
      }
      if (move.next < move.first) continue;
      if (!why.source.empty()) move.source = &why.source;
      moves_.push_back(move);
      key.at = move.first;
      if (move.next == move.first) continue;
      passed |= AnotherHasPassed(key, seat);
    }
    for (const InstanceKey& key : refused.gradients) {
      if (!key.is_gradient() || key.step() != refused.step) continue;
      const int32_t tape = FindTape(key.Parent());
      if (tape == kNone) continue;  // it has no gradient any more, for anybody
      const InstanceKey::Request request = key.path.back();
      for (int32_t seat = 0; seat < SeatCount(key); ++seat) {
        if (RankAt(key, seat) != refused.rank || request.number >= kMaxCallNumber) continue;
        requests_.push_back({tape, seat, {request.step, request.number + 1}});
        passed |= AnotherHasPassed(key, seat);
        break;
      }
    }
  }
  BeginMoves();
  EndMoves(/*asked_in=*/Epoch());
  for (const RefusedMember& refused : members) {
    if (!IsRank(refused.rank)) continue;
    Member& member = members_[refused.rank.value()];
    if (refused.rest_of_step && refused.step == member.step) {
      member.left_rest = true;
      member.left_rest_text = why.message.substr(0, kWhyBytes);
    }
    if (!refused.drops_tapes) continue;
    if (!RefuseTapes(refused.rank)) continue;
    steps_.push_back({refused.rank, member.step, OverUntil(member), /*drops_tapes=*/true});
  }
  if (epoch == epoch_ && !passed && !why.alone && !members.empty()) {
    const Rank rank = members[0].rank;
    Error error = why;
    // A device that is lost is nobody's fault.
    if (why.reason != Reason::kDeviceLost) error.SetReason(Reason::kPeerRefused);
    error.id = ErrorId();
    error.culprit = CulpritOf(rank);
    error.ended.clear();  // the rank's own worlds
    error.message = absl::StrCat("the part of ", RankText(rank), " was refused: ", why.message);
    if (why.message.find(why.source) == std::string::npos) {
      absl::StrAppend(&error.message, " (", why.source, ")");
    }
    EndEpoch(error, actions);
    return;
  }
  FailPassed(actions);
  LaunchReady(actions);
  ForgetSome();
}

void Sequencer::Withdraw(RunHandle run, const Error& why, absl::Time now, Actions* actions) {
  BeginEvent(now);
  const int32_t* const row = run_by_handle_.Find(run);
  if (row == nullptr) return;
  FailAlone(runs_[*row].component, why, actions);
}

int64_t Sequencer::SeatsOf(absl::Span<const RefusedMember> members) const {
  const auto size = [this](GroupId group, bool is_pair) -> int64_t {
    if (group.value() < 0 || group.value() >= num_groups()) return 0;
    return is_pair ? 2 : static_cast<int64_t>(groups_[group.value()].members.size());
  };
  int64_t seats = 0;
  for (const RefusedMember& refused : members) {
    for (const RefusedCalls& calls : refused.calls) {
      seats += size(calls.group, calls.source.value() >= 0);
    }
    for (const InstanceKey& key : refused.gradients) seats += size(key.group, key.is_pair());
  }
  return seats;
}

size_t Sequencer::NewPairs(absl::Span<const RefusedMember> members) const {
  size_t count = 0;
  for (const RefusedMember& refused : members) {
    if (!IsRank(refused.rank)) continue;
    const Member& member = members_[refused.rank.value()];
    for (const RefusedCalls& calls : refused.calls) {
      if (calls.source.value() < 0 || calls.next == 0) continue;
      const PairEnd end{calls.group, calls.source, calls.destination, calls.tag, calls.is_recv};
      if (refused.step > member.step || !member.pairs.Contains(end)) ++count;
    }
  }
  return count;
}

// kNone: the rank does not sit there.
int32_t Sequencer::SeatOfRefused(Rank rank, const InstanceKey& key, bool is_recv) const {
  if (key.group.value() < 0 || key.group.value() >= num_groups()) return kNone;
  const Group& group = groups_[key.group.value()];
  const auto size = static_cast<int32_t>(group.members.size());
  if (key.is_pair()) {
    if (key.source.value() >= size || key.destination.value() < 0 ||
        key.destination.value() >= size) {
      return kNone;
    }
    const int32_t seat = is_recv ? 1 : 0;
    return RankAt(key, seat) == rank ? seat : kNone;
  }
  return group.SeatOf(rank);
}

// Which of its entries the rank would have used is not known: none has a gradient any more.
// False: it has recorded nothing since the last time.
bool Sequencer::RefuseTapes(Rank rank) {
  Member& member = members_[rank.value()];
  if (member.newest_refused == member.newest_entry) return false;
  if (member.newest_refused.tape == kNone) ++refused_members_;
  member.newest_refused = member.newest_entry;
  ++member.refusals;
  return true;
}

void Sequencer::Abort(const Error& cause, absl::Time now, Actions* actions) {
  BeginEvent(now);
  EndEpoch(cause, actions);
}

void Sequencer::Dead(Rank rank, absl::string_view how, absl::Time now, Actions* actions) {
  BeginEvent(now);
  if (!IsRank(rank) || members_[rank.value()].state != Member::State::kHere) return;
  members_[rank.value()].state = Member::State::kDead;
  members_[rank.value()].how_dead = std::string(how);
  somebody_gone_ = true;
  dead_.push_back(rank);
  // What waits for it is what the waiting ranks want to read about.
  Error error(Reason::kPeerDied);
  std::string waiting_text;
  const bool is_awaited = members_[rank.value()].lacking > 0;
  for (int32_t id = is_awaited ? timed_.head : kNone; id != kNone && waiting_text.empty();
       id = instances_[id].next) {
    const Instance& instance = instances_[id];
    CountWork(1 + static_cast<int64_t>(instance.seats.size()) / 8);
    for (int32_t p = 0; p < static_cast<int32_t>(instance.seats.size()); ++p) {
      if (instance.seats[p].run != kNone || instance.seats[p].absent ||
          RankAt(instance.key, p) != rank) {
        continue;
      }
      error = MakeInstanceError(error.reason, id);
      const Participation& first = PartAt(instance, instance.first);
      waiting_text =
          absl::StrCat("; ", RankText(RankAt(instance.key, instance.first)), " waits for it in ",
                       PartText(first), " (", instance.key.ToString(), ") at ", first.source);
      break;
    }
  }
  error.culprit = CulpritOf(rank);
  error.message = absl::StrCat(RankText(rank), " is dead: ", how, waiting_text);
  EndEpoch(error, actions);
  ForgetSome();
}

void Sequencer::Left(Rank rank, absl::Time now, Actions* actions) {
  BeginEvent(now);
  if (!IsRank(rank) || members_[rank.value()].state != Member::State::kHere) return;
  Member& member = members_[rank.value()];
  member.state = Member::State::kLeft;
  somebody_gone_ = true;
  // Whatever is pending, of that which nobody waits for it in nothing is looked through.
  const bool is_awaited = member.lacking > member.lacking_gradients;
  int32_t needs_it = kNone;
  for (int32_t r = pending_.head; r != kNone && needs_it == kNone; r = runs_[r].next) {
    const PendingRun& run = runs_[r];
    if (!is_awaited && std::find(run.ranks.begin(), run.ranks.end(), rank) == run.ranks.end()) {
      continue;
    }
    for (size_t i = 0; i < run.instances.size();) {
      const int32_t id = run.instances[i];
      const Instance& instance = instances_[id];
      i += static_cast<size_t>(instance.count);
      CountWork(1);
      for (int32_t p = 0; p < static_cast<int32_t>(instance.seats.size()); ++p) {
        if (RankAt(instance.key, p) != rank) continue;
        // Its own votes go with it; a gradient that it has not voted for gets zeros.
        const bool needs = instance.seats[p].run != kNone || !instance.key.is_gradient();
        if (needs && needs_it == kNone) needs_it = id;
      }
    }
  }
  if (needs_it != kNone) {
    const Instance& instance = instances_[needs_it];
    Error error = MakeInstanceError(Reason::kPeerLeft, needs_it);
    error.culprit = CulpritOf(rank);
    error.message = absl::StrCat(RankText(rank), " left the world while ",
                                 PartText(PartAt(instance, instance.first)), " (",
                                 instance.key.ToString(), ") was pending");
    EndEpoch(error, actions);
  }
  if (member.lacking_gradients > 0) leaving_.push_back({rank});
  const absl::optional<Error> lost_gradient = MarkSome();
  if (lost_gradient.has_value()) {
    EndEpoch(*lost_gradient, actions);
    return;
  }
  LaunchReady(actions);
  ForgetSome();
}

void Sequencer::DropTape(Rank rank, const InstanceKey& key, bool consumed, Epoch epoch,
                         absl::Time now, Actions* actions) {
  BeginEvent(now);
  const int32_t t = FindTape(key);
  if (t == kNone) return;
  const int32_t seats = static_cast<int32_t>(tapes_[t].entries.size());
  for (int32_t p = 0; p < seats; ++p) {
    Tape& tape = tapes_[t];
    TapeEntry& entry = tape.entries[p];
    if (RankAt(tape.key, p) != rank || entry.state != TapeEntry::State::kLive ||
        IsRefused({t, p})) {
      continue;
    }
    LetGo({t, p}, consumed ? TapeEntry::State::kConsumed : TapeEntry::State::kAbandoned);
    entry.consumed_in = std::min(epoch, epoch_);
    if (entry.UsedInVain(epoch_)) {
      // Ranks that ask again in this epoch cannot get its share.
      CountWork(static_cast<int64_t>(ChildrenOf(tape).size()) / kLooksOfWork);
      for (const int32_t child : ChildrenOf(tape)) {
        const Seat& vote = instances_[child].seats[p];
        if (vote.run != kNone || instances_[child].key.path.back() < entry.next) continue;
        EndEpoch(InVainError(instances_[child].key, tape, p), actions);
        return;
      }
    }
    MarkAbandoned(t, p);
  }
  const absl::optional<Error> lost_gradient = MarkSome();
  if (lost_gradient.has_value()) {
    EndEpoch(*lost_gradient, actions);
    return;
  }
  ForgetTapeIfUnused(t);
  LaunchReady(actions);
}

void Sequencer::Finished(Ticket ticket, const absl::Status& status, absl::Time now,
                         Actions* actions) {
  BeginEvent(now);
  const int32_t* const gang = gang_by_ticket_.Find(ticket);
  if (gang == nullptr) return;
  const int32_t g = *gang;
  if (status.ok()) {
    if (gangs_[g].last_of_world.has_value()) NotePublished(*gangs_[g].last_of_world);
    ForgetGang(g);
    ForgetSome();
    return;
  }
  Error error = ErrorOf(status);
  if (error.reason == Reason::kUnspecified) error.SetReason(Reason::kExecFailed);
  NameGang(gangs_[g], &error);
  FailGang(g, error, actions);
}

// Gangs may finish in another order than they were launched in.
void Sequencer::NotePublished(const InstanceKey& key) {
  if (!last_published_.has_value() || *last_published_ < key) last_published_ = key;
}

void Sequencer::Advance(absl::Time now, Actions* actions) {
  BeginEvent(now);
  if (const absl::optional<Error> lost_gradient = MarkSome()) EndEpoch(*lost_gradient, actions);
  FailSomePassed(actions);
  if (const absl::optional<Error> mismatch = CompareSome()) EndEpoch(*mismatch, actions);
  if (passing() || marking() || comparing()) return;  // nothing of that is late
  ForgetSome();
  LaunchReady(actions);
  for (bool first = true; launched_.head != kNone &&
                          gangs_[launched_.head].launched + options_.exec_timeout <= clock_ &&
                          (first || SliceHasTime());
       first = false) {
    const OpenGang& gang = gangs_[launched_.head];
    Error error(Reason::kExecTimeout);
    NameGang(gang, &error);
    error.message = absl::StrCat(error.op, " (", error.source, ", ticket ", gang.ticket.value(),
                                 ") was launched and has not finished within ",
                                 absl::FormatDuration(options_.exec_timeout));
    FailGang(launched_.head, error, actions);
  }
  const int32_t due = OutOfGrace();
  if (due != kNone) EndEpoch(MismatchError(due), actions);
  FailLate(actions);
  if (!held_up_.empty() && held_up_.begin()->first.first <= clock_) {
    EndEpoch(HeldUpError(held_up_.begin()->second), actions);
  }
}

// Of a run that is due though all have asked.
Error Sequencer::HeldUpError(int32_t r) const {
  const PendingRun& run = runs_[r];
  Error error(Reason::kAgreeTimeout);
  if (!run.instances.empty()) {
    error = MakeInstanceError(error.reason, run.instances[0]);
    error.culprit = CulpritOf(run.ranks[0]);
  }
  error.message =
      run.externally_blocked
          ? absl::StrCat(RunText(r), " has waited for results of another world for ",
                         absl::FormatDuration(options_.agree_timeout + options_.exec_timeout))
          : absl::StrCat(RunText(r), " has not got ready for its gang's order within ",
                         absl::FormatDuration(options_.agree_timeout), "; nothing was launched");
  return error;
}

bool Sequencer::IsLate() const {
  return timed_.head != kNone &&
         instances_[timed_.head].first_vote + options_.agree_timeout <= clock_;
}

// Ends the epoch if what is late, or what it waits for, lacks a vote. What the slice has no time
// for is done by the next Advance(): what is late stays in timed_, and so is due.
void Sequencer::FailLate(Actions* actions) {
  while (IsLate()) {
    const int32_t late = timed_.head;
    // What was late has been launched or has failed: what is now may wait for something else.
    if (!awaited_.empty() && !run_by_handle_.Contains(awaited_.front())) EndLateSearch();
    if (awaited_.empty()) {
      // One search for all that is late: what it has come to lacks nothing.
      if (late_search_ == 0) late_search_ = ++search_;
      ComeTo(instances_[late].component);
    }
    int32_t lacking = kNone;
    if (!SearchLate(&lacking)) return;
    if (lacking != kNone) {
      EndEpoch(AgreeTimeout(late, lacking), actions);
    } else {
      // Everybody has asked: the deadline of a run that holds it up counts (HoldUp). Or it is in
      // ready_.
      CountWork(kWorkToIndex);
      Unlist(late);
      awaited_.clear();
      searched_ = 0;
    }
    if (IsLate() && !SliceHasTime()) return;
  }
  EndLateSearch();
}

// The search for what is late has come to this component.
void Sequencer::ComeTo(int32_t c) {
  Component& component = components_[c];
  if (component.mark == late_search_) return;
  component.mark = late_search_;
  component.searched_to = Way();
  awaited_.push_back(runs_[component.runs[0]].handle);
}

// Goes through what is in awaited_ and what that waits for, up to the first that lacks votes: then
// `lacking` is the oldest of its instances that do. False: the slice has no time for the rest.
bool Sequencer::SearchLate(int32_t* lacking) {
  while (searched_ < awaited_.size()) {
    const int32_t* const row = run_by_handle_.Find(awaited_[searched_]);
    const int32_t c = row == nullptr ? kNone : runs_[*row].component;
    CountWork(1);
    if (c != kNone) ComeTo(c);  // it may have become part of another one
    int32_t awaited = kNone;
    if (c == kNone) {
      ++searched_;  // it has been launched meanwhile
    } else if (components_[c].missing > 0) {
      *lacking = FindLacking(c);
      return true;
    } else if (NextAwaited(c, &components_[c].searched_to, &awaited)) {
      if (awaited != kNone) ComeTo(awaited);
    } else {
      ++searched_;
    }
    if (!SliceHasTime()) return false;
  }
  return true;
}

void Sequencer::EndLateSearch() {
  awaited_.clear();
  searched_ = 0;
  late_search_ = 0;
}

// The oldest instance that lacks votes, of a component that has one.
int32_t Sequencer::FindLacking(int32_t component) const {
  int32_t oldest = kNone;
  for (const int32_t id : components_[component].instances) {
    if (instances_[id].missing > 0 && (oldest == kNone || IsOlder(id, oldest))) oldest = id;
  }
  return oldest;
}

// Whether it was asked for before the other.
bool Sequencer::IsOlder(int32_t id, int32_t other_id) const {
  const Instance& one = instances_[id];
  const Instance& other = instances_[other_id];
  if (one.first_vote != other.first_vote) return one.first_vote < other.first_vote;
  const Seat& vote = one.seats[one.first];
  const Seat& of_other = other.seats[other.first];
  return std::make_pair(runs_[vote.run].order, vote.participation) <
         std::make_pair(runs_[of_other.run].order, of_other.participation);
}

// `late` is due; `lacking` is why: the same, or what it has to wait for.
Error Sequencer::AgreeTimeout(int32_t late, int32_t lacking) const {
  const Instance& instance = instances_[lacking];
  const Participation& first = PartAt(instance, instance.first);
  Error error = MakeInstanceError(Reason::kAgreeTimeout, lacking);
  std::vector<std::string> missing;
  for (int32_t p = 0; p < static_cast<int32_t>(instance.seats.size()); ++p) {
    if (instance.seats[p].run != kNone || instance.seats[p].absent) continue;
    const Rank rank = RankAt(instance.key, p);
    if (missing.empty()) error.culprit = CulpritOf(rank);
    if (missing.size() == Error::kMaxRanks) {
      missing.push_back(absl::StrCat("and ", instance.missing - Error::kMaxRanks, " more"));
      break;
    }
    missing.push_back(RankText(rank));
  }
  AddVersions(instance, &error);
  error.message = absl::StrCat(
      PartText(first), " (", instance.key.ToString(), "): missing after ",
      absl::FormatDuration(clock_ - instance.first_vote), ": ", absl::StrJoin(missing, ", "), "; ",
      RankText(RankAt(instance.key, instance.first)), " asked first, at ", first.source);
  if (late != lacking) {
    const Instance& due = instances_[late];
    const Participation& part = PartAt(due, due.first);
    absl::StrAppend(&error.message, "; ", PartText(part), " (", due.key.ToString(), ", ",
                    part.source, ") has waited for it for ",
                    absl::FormatDuration(clock_ - due.first_vote));
  }
  absl::StrAppend(&error.message, "; nothing was launched");
  return error;
}

absl::Time Sequencer::NextDeadline() const {
  if (passing() || marking() || comparing() || searching() || !ready_.empty() ||
      !gone_pairs_.empty()) {
    return clock_;
  }
  absl::Time next = absl::InfiniteFuture();
  // Whoever came later is told later, or with what is late first: it is in timed_.
  if (in_grace_.head != kNone) next = std::min(next, differing_[in_grace_.head].until);
  if (timed_.head != kNone) {
    next = std::min(next, instances_[timed_.head].first_vote + options_.agree_timeout);
  }
  if (launched_.head != kNone) {
    next = std::min(next, gangs_[launched_.head].launched + options_.exec_timeout);
  }
  if (!held_up_.empty()) next = std::min(next, held_up_.begin()->first.first);
  // What a slice had no time for is not due before what other worlds have left over.
  return std::max(next, clock_);
}

std::vector<int32_t> Sequencer::Shrink(absl::Time now, Actions* actions) {
  BeginEvent(now);
  Error error(Reason::kEpochEnded);
  error.message = "the world was reformed with the ranks that are left";
  SequencerAction* const action = EndEpoch(error, actions);
  since_ = epoch_;
  std::vector<int32_t> new_rank(members_.size(), -1);
  std::vector<Member> survivors;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    LetGoOfPairs(&members_[rank]);
    if (members_[rank].state != Member::State::kHere) continue;
    new_rank[rank] = static_cast<int32_t>(survivors.size());
    survivors.emplace_back();
    survivors.back().info = std::move(members_[rank].info);
  }
  members_ = std::move(survivors);
  somebody_gone_ = false;
  dead_.clear();
  for (Group& group : groups_) group = Group();
  groups_[0] = GroupOfAll();
  group_members_ = size();
  group_requests_.clear();
  requested_groups_ = 0;
  struct Remains {
    std::shared_ptr<void> of_epoch;
    Pool<Tape> tapes;
    SplitHashIndex<InstanceKey> tape_by_key;
  };
  action->remaining_rows += static_cast<int64_t>(tapes_.size());
  action->remains = std::make_shared<Remains>(Remains{
      std::move(action->remains), std::exchange(tapes_, {}), std::exchange(tape_by_key_, {})});
  label_uses_.Clear();
  label_bytes_ = 0;
  tape_path_bytes_ = 0;
  ended_tapes_ = {};
  ended_children_ = 0;
  gone_tapes_ = 0;
  refused_members_ = 0;
  return new_rank;
}

// --- Ending -------------------------------------------------------------------------------------

SequencerAction& Sequencer::FailRun(RunHandle run, Epoch epoch, Epoch open_epoch,
                                    std::shared_ptr<const Error> error, Actions* actions) {
  actions->emplace_back();
  SequencerAction& action = actions->back();
  action.kind = SequencerAction::Kind::kFail;
  action.run = run;
  action.epoch = epoch;
  action.open_epoch = open_epoch;
  action.error = std::move(error);
  return action;
}

void Sequencer::FailAlone(int32_t component, const Error& error, Actions* actions) {
  auto shared_error = std::make_shared<Error>(error);
  shared_error->alone = true;
  ++search_;
  std::vector<int32_t> failed;
  const auto add = [&](int32_t c) {
    if (components_[c].mark == search_) return;
    components_[c].mark = search_;
    failed.push_back(c);
  };
  add(component);
  std::vector<int32_t> runs;
  std::vector<int32_t> instances;
  size_t waiting = 0;
  for (size_t at = 0; at < failed.size(); ++at) {
    for (const int32_t r : components_[failed[at]].runs) {
      runs.push_back(r);
      waiting += runs_[r].consumers.size();
      for (const int32_t consumer : runs_[r].consumers) add(runs_[consumer].component);
    }
    for (const int32_t id : components_[failed[at]].instances) {
      instances.push_back(id);
      if (instances_[id].tape == kNone) continue;
      waiting += tapes_[instances_[id].tape].children.size();
      for (const int32_t child : tapes_[instances_[id].tape].children) {
        add(instances_[child].component);
      }
    }
  }
  CountWork(kWorkPerFailed * static_cast<int64_t>(runs.size() + instances.size()) +
            static_cast<int64_t>(waiting) / kConsumersOfWork);
  std::sort(runs.begin(), runs.end(),
            [this](int32_t a, int32_t b) { return runs_[a].order < runs_[b].order; });
  for (const int32_t r : runs) {
    PendingRun& run = runs_[r];
    SequencerAction& action = FailRun(run.handle, epoch_, Epoch(), shared_error, actions);
    for (size_t i = 0; i < run.instances.size(); ++i) action.dropped.push_back(KeyOf(run, i));
    EndHoldUp(&run);
    run_by_handle_.Erase(run.handle);
  }
  LeaveProducers(runs);
  for (const int32_t r : runs) ForgetRun(r);
  for (const int32_t id : instances) {
    Instance& instance = instances_[id];
    for (int32_t p = 0; p < static_cast<int32_t>(instance.seats.size()); ++p) {
      const Seat& seat = instance.seats[p];
      if (seat.run == kNone && !seat.absent) CountLacking(instance.key, p, -1);
      if (seat.run != kNone && instance.parent != kNone) {
        const InstanceKey::Request& request = instance.key.path.back();
        TapeEntry& entry = EntryAt({instance.parent, p});
        if (entry.next == InstanceKey::Request{request.step, request.number + 1}) {
          entry.asked_in = Epoch();
        }
      }
    }
    LeaveParent(id);
  }
  for (const int32_t id : instances) {
    Instance& instance = instances_[id];
    if (instance.tape != kNone) {
      LetGoOfAll(instance.tape);
      tapes_[instance.tape].instance = kNone;
      --waiting_tapes_;
      ForgetTapeIfUnused(instance.tape);
    }
    if (instance.differing != kNone) {
      differing_.Remove(&in_grace_, instance.differing);
      differing_.Free(instance.differing);
    }
    ForgetInstance(id);
  }
  // What waits for any of it has failed as well.
  if (!path_.empty() && components_[path_.front().component].mark == search_) path_.clear();
  for (const int32_t c : failed) ForgetComponent(c);
}

// All of them at once: each producer's consumers are gone through once, not for each that leaves
// it.
void Sequencer::LeaveProducers(absl::Span<const int32_t> runs) {
  for (const int32_t r : runs) runs_[r].component = kNone;
  const auto has_failed = [this](int32_t consumer) { return runs_[consumer].component == kNone; };
  size_t looked_for = 0;
  size_t looked_at = 0;
  for (const int32_t r : runs) {
    looked_for += runs_[r].producers.size();
    for (const RunHandle handle : runs_[r].producers) {
      const int32_t* const row = run_by_handle_.Find(handle);
      if (row == nullptr) continue;
      PendingRun& producer = runs_[*row];
      if (std::exchange(producer.search, search_) == search_) continue;
      auto& consumers = producer.consumers;
      looked_at += consumers.size();
      consumers.erase(std::remove_if(consumers.begin(), consumers.end(), has_failed),
                      consumers.end());
    }
  }
  CountWork(static_cast<int64_t>(looked_for) / kLooksOfWork +
            static_cast<int64_t>(looked_at) / kLeaversOfWork);
}

SequencerAction* Sequencer::EndEpoch(const Error& why, Actions* actions) {
  auto copy = std::make_shared<Error>(why);
  copy->alone = false;
  const std::shared_ptr<const Error> cause = std::move(copy);
  const Epoch open_epoch(epoch_.value() + 1);
  actions->emplace_back();
  SequencerAction& action = actions->back();
  action.kind = SequencerAction::Kind::kEpochEnded;
  action.epoch = epoch_;
  action.open_epoch = open_epoch;
  action.error = cause;
  action.runs.reserve(runs_.size());
  for (int32_t r = pending_.head; r != kNone; r = runs_[r].next) {
    action.runs.push_back(runs_[r].handle);
  }
  CountWork(static_cast<int64_t>(action.runs.size()) / kHandlesOfWork);

  KeepCause(cause);
  epoch_ = open_epoch;

  // Forward instances that were never launched have no gradients, and pending gradients are none
  // any more.
  tapes_.Splice(&ended_tapes_, &pending_tapes_);
  gone_tapes_ += std::exchange(waiting_tapes_, 0);
  ended_children_ += std::exchange(children_, 0);
  struct Remains {
    Pool<PendingRun> runs;
    Pool<Instance> instances;
    SplitHashIndex<InstanceKey> instance_by_key;
    absl::btree_map<SortKey, int32_t> instance_by_sort_key;
    absl::btree_map<ListKey, int32_t> lists;
    Pool<Differing> differing;
    Pool<Component> components;
  };
  auto remains = std::make_shared<Remains>();
  remains->runs = std::exchange(runs_, {});
  remains->instances = std::exchange(instances_, {});
  instance_path_bytes_ = 0;
  remains->instance_by_key = std::exchange(instance_by_key_, {});
  remains->instance_by_sort_key = std::exchange(instance_by_sort_key_, {});
  remains->lists = std::exchange(lists_, {});
  pending_calls_ = 0;
  remains->differing = std::exchange(differing_, {});
  remains->components = std::exchange(components_, {});
  action.remaining_rows = static_cast<int64_t>(remains->instances.size());
  action.remains = std::move(remains);
  pending_ = {};
  pending_size_ = 0;
  run_by_handle_.Clear();
  timed_ = {};
  first_unindexed_ = kNone;
  unindexed_ = 0;
  held_up_.clear();
  ready_.clear();
  unsearched_.clear();
  path_.clear();
  abandoned_.clear();
  leaving_.clear();
  first_uncompared_ = kNone;
  uncompared_ = 0;
  EndLateSearch();
  in_grace_ = {};
  stretches_.clear();
  passed_.clear();
  passed_path_bytes_ = 0;
  further_parts_ = 0;
  for (Member& member : members_) member.lacking = member.lacking_gradients = 0;
  ForgetSome();
  return &action;
}

// Of the open epoch, which ends with it.
void Sequencer::KeepCause(std::shared_ptr<const Error> cause) {
  // A text of one byte takes a block, too.
  constexpr int64_t kMostBytes = int64_t{2} * Error::kMaxBytes;
  if (BytesOf(*cause) > kMostBytes) {
    cause = std::make_shared<const Error>(DecodeError(EncodeError(*cause)));
  }
  cause_bytes_ += BytesOf(*cause);
  causes_.emplace_back(epoch_, std::move(cause));
  while (static_cast<int>(causes_.size()) > std::max(options_.kept_causes, 0) ||
         cause_bytes_ > kMostCauseBytes) {
    cause_bytes_ -= BytesOf(*causes_.front().second);
    causes_.pop_front();
  }
}

// The runs of a gang that did not finish fail. What is pending may need their results, unless it
// was asked for in a later epoch: then they were launched before.
void Sequencer::FailGang(int32_t g, const Error& error, Actions* actions) {
  const std::vector<RunHandle> failed = gangs_[g].runs;
  CountWork(static_cast<int64_t>(failed.size()));
  const Epoch epoch = gangs_[g].epoch;
  const bool ends = epoch == epoch_;
  ForgetGang(g);
  // Where a later epoch is open already, its ranks have gone on.
  const Epoch open_epoch = ends ? Epoch(epoch_.value() + 1) : epoch_;
  const auto shared_error = std::make_shared<const Error>(error);
  for (const RunHandle run : failed) FailRun(run, epoch, open_epoch, shared_error, actions);
  if (ends) EndEpoch(error, actions);
}

void Sequencer::ForgetGang(int32_t g) {
  gang_by_ticket_.Erase(gangs_[g].ticket);
  gangs_[g].what.reset();
  gangs_.Remove(&launched_, g);
  gangs_.Free(g);
}

std::shared_ptr<const Error> Sequencer::CauseOrForgotten(Epoch epoch) const {
  for (const auto& cause : causes_) {
    if (cause.first == epoch) return cause.second;
  }
  return std::make_shared<const Error>(
      Reason::kEpochEnded,
      absl::StrCat("epoch ", epoch.value(), " ended long ago; epoch ", epoch_.value(), " is open"));
}

// --- Views --------------------------------------------------------------------------------------

Epoch Sequencer::epoch() const { return epoch_; }
int Sequencer::size() const { return static_cast<int>(members_.size()); }
CallPosition Sequencer::NextCall(GroupId group, Rank rank) const {
  if (group.value() < 0 || group.value() >= num_groups() || !IsRank(rank)) return CallPosition();
  const Group& row = groups_[group.value()];
  const int32_t seat = row.SeatOf(rank);
  return seat == kNone ? CallPosition() : NextOf(rank, row.counters[seat]);
}
int Sequencer::num_groups() const { return static_cast<int>(groups_.size()); }
bool Sequencer::IsQuiet() const {
  return pending_.head == kNone && launched_.head == kNone && ready_.empty() &&
         gone_pairs_.empty() && !passing() && !marking() && !searching() && !somebody_gone_;
}
bool Sequencer::IsPending(RunHandle run) const { return run_by_handle_.Contains(run); }
absl::Span<const Rank> Sequencer::RanksOf(RunHandle run) const {
  const int32_t* const row = run_by_handle_.Find(run);
  return row == nullptr ? absl::Span<const Rank>() : absl::MakeConstSpan(runs_[*row].ranks);
}

std::vector<PendingInstance> Sequencer::Pending(absl::Time now, int64_t* room) const {
  std::vector<PendingInstance> result;
  for (int32_t r = pending_.head; r != kNone; r = runs_[r].next) {
    for (size_t i = 0; i < runs_[r].instances.size(); ++i) {
      if (*room <= 0) return result;
      *room -= 8;
      const Instance& instance = instances_[runs_[r].instances[i]];
      if (instance.seats[instance.first].run != r) continue;  // the first voter lists it
      PendingInstance pending;
      pending.key = KeyOf(runs_[r], i);
      const Participation& first = runs_[r].what->participations[i];
      pending.what = first.descriptor.ToString();
      pending.source = first.source;
      pending.waiting = std::max(now - instance.first_vote, absl::ZeroDuration());
      *room -= static_cast<int64_t>(instance.seats.size());
      for (int32_t p = 0; p < static_cast<int32_t>(instance.seats.size()); ++p) {
        const Rank rank = RankAt(instance.key, p);
        if (instance.seats[p].run != kNone) {
          pending.voted.push_back(rank);
        } else if (!instance.seats[p].absent) {
          pending.missing.push_back(rank);
        }
      }
      result.push_back(std::move(pending));
    }
  }
  return result;
}

absl::optional<InstanceKey> Sequencer::LastPublished(Rank rank) const {
  if (!IsRank(rank)) return absl::nullopt;
  return last_published_;
}

absl::optional<Error> Sequencer::Cause(Epoch epoch) const {
  for (const auto& cause : causes_) {
    if (cause.first == epoch) return *cause.second;
  }
  return absl::nullopt;
}

absl::Status Sequencer::CheckMembership(Epoch epoch) const {
  return epoch < since_ ? ToStatus(*CauseOrForgotten(epoch)) : absl::OkStatus();
}

size_t Sequencer::HeldPairs() const {
  size_t count = member_pairs_;
  for (const auto& pairs : gone_pairs_) count += pairs.size();
  return count;
}

size_t Sequencer::HeldRows() const { return tapes_.size() + HeldPairs(); }

int64_t Sequencer::SeatBytes(size_t bytes_per_seat) const {
  constexpr int kInRow = 4;  // so many a row has itself
  if (size() <= kInRow) return 0;
  return std::max(size(), 2 * kInRow) * static_cast<int64_t>(bytes_per_seat);
}

int64_t Sequencer::TapeBytes() const {
  return kInList<Tape> + kInTable<decltype(tape_by_key_)> + kInList<int32_t>;
}

int64_t Sequencer::InstanceBytes() const {
  return kInList<Instance> + kInTable<decltype(instance_by_key_)> +
         kInTree<decltype(instance_by_sort_key_)> + kInTree<decltype(lists_)> + kInList<Differing> +
         kInList<Component> + 8 * kInList<int32_t> + SeatBytes(sizeof(Seat));
}

// Rows that were used once are there for the next ones; what an entry of theirs has is not. A
// table that keeps something by the name of what is pending has that name once more.
int64_t Sequencer::HeldBytes() const {
  constexpr int64_t kPair = kInTable<decltype(Member::pairs)> + kLineBytes + 16;
  // A list has rows for all of its calls: it may be taken apart.
  const int64_t instances = std::max<int64_t>(instances_.end(), pending_calls_);
  int64_t bytes = tapes_.end() * TapeBytes() + instances * InstanceBytes();
  bytes += static_cast<int64_t>(tapes_.size()) * SeatBytes(sizeof(TapeEntry));
  bytes += static_cast<int64_t>(ended_children_) * 2 * kInList<int32_t>;
  bytes += static_cast<int64_t>(HeldPairs()) * kPair;
  bytes += tape_path_bytes_ + 2 * instance_path_bytes_ + passed_path_bytes_ + vote_path_bytes_;
  const auto list = [](const auto& rows) {
    return static_cast<int64_t>(rows.capacity() * sizeof(rows[0]));
  };
  bytes += list(keys_) + list(seats_) + list(moves_) + list(moves_of_) + list(stretches_) +
           list(passed_) + list(asked_) + list(requests_) + list(ready_) + list(unsearched_) +
           list(path_) + list(abandoned_) + list(leaving_) + list(awaited_) + list(gang_runs_) +
           list(gang_instances_) + list(reordered_);
  bytes +=
      label_bytes_ + static_cast<int64_t>(label_uses_.size()) * kInTable<decltype(label_uses_)>;
  bytes +=
      static_cast<int64_t>(signature_.bytes().capacity() + known_orders_.bytes() +
                           pair_moves_.capacity() * (sizeof(PairEnd) + sizeof(int64_t) + 1) +
                           newest_request_.capacity() * (sizeof(EntryRef) + sizeof(size_t) + 1) +
                           warned_sites_.capacity() * (sizeof(uint64_t) + 1));
  return bytes;
}

int64_t Sequencer::BytesPerCall() const {
  constexpr int64_t kScratch = kInList<InstanceKey> + kInList<Move> + kInList<Asked> +
                               kInList<Stretch> + kInTable<decltype(pair_moves_)> +
                               kInTable<decltype(newest_request_)>;
  // A vote brings labels for its own seats.
  constexpr int64_t kLabel = kMostLabelBytes + kInTable<decltype(label_uses_)>;
  return TapeBytes() + SeatBytes(sizeof(TapeEntry)) + InstanceBytes() + kLabel + kScratch;
}

absl::StatusOr<int64_t> Sequencer::PathBytes(const Vote& vote) {
  if (vote.run == RunHandle() || resolved_ != vote.run) {
    CHORUS_RETURN_IF_ERROR(Resolve(vote).status());
  }
  // A tape has the name, and what is pending, twice (HeldBytes).
  return 3 * vote_path_bytes_;
}

size_t Sequencer::LiveRows() const {
  return groups_.size() + requested_groups_ + member_pairs_ + runs_.size() + run_by_handle_.size() +
         instances_.size() + instance_by_key_.size() + differing_.size() + components_.size() +
         tapes_.size() + tape_by_key_.size() + gangs_.size() + gang_by_ticket_.size() +
         held_up_.size() + ready_.size();
}

std::string Sequencer::CanonicalState() const {
  ByteWriter out;
  // Positions are relative to those of the member that is furthest behind: what all have done is no
  // part of the state.
  int64_t least_step = kMaxCallNumber;
  for (const Member& member : members_) {
    if (member.state == Member::State::kHere) least_step = std::min(least_step, member.step);
  }
  const auto put = [&](const CallPosition& at, int64_t least_call) {
    out.PutSigned(at.step - least_step);
    out.PutSigned(at.step == least_step ? at.call - least_call : at.call);
    out.PutSigned(at.part);
  };
  std::vector<int64_t> least_calls;  // by group
  for (const Group& group : groups_) {
    int64_t least = kMaxCallNumber;
    for (size_t m = 0; m < group.members.size(); ++m) {
      const CallPosition next = NextOf(group.members[m], group.counters[m]);
      if (next.step == least_step) least = std::min(least, next.call);
    }
    least_calls.push_back(least == kMaxCallNumber ? 0 : least);
  }
  const auto pair_call = [this](const InstanceKey& pair, bool is_recv) {
    const Member& member = members_[RankAt(pair, is_recv ? 1 : 0).value()];
    const Counter* const counter =
        member.pairs.Find({pair.group, pair.source, pair.destination, pair.tag, is_recv});
    return std::make_pair(member.step, counter == nullptr ? int64_t{0} : counter->next.call);
  };
  const auto least_of = [&](const InstanceKey& key) {
    if (!key.is_pair()) return least_calls[key.group.value()];
    const auto sent = pair_call(key, false);
    const auto received = pair_call(key, true);
    if (sent.first != received.first) return int64_t{0};
    return std::min(sent.second, received.second);
  };
  const auto put_key = [&](const InstanceKey& key) {
    out.PutSigned(key.group.value());
    out.PutSigned(key.source.value());
    out.PutSigned(key.destination.value());
    out.PutSigned(key.tag);
    put(key.at, least_of(key));
    out.PutVarint(key.path.size());
    for (const InstanceKey::Request& request : key.path) {
      out.PutSigned(request.step - least_step);
      out.PutSigned(request.number);
    }
  };
  for (const Member& member : members_) {
    out.Put(member.state);
    out.PutSigned(member.step - least_step);
    out.Put<uint8_t>(member.left_rest);
  }
  out.Put<uint8_t>(last_published_.has_value());
  if (last_published_.has_value()) put_key(*last_published_);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    out.PutVarint(group.members.size());
    for (size_t m = 0; m < group.members.size(); ++m) {
      out.PutSigned(group.members[m].value());
      put(NextOf(group.members[m], group.counters[m]), least_calls[g]);
    }
  }
  std::vector<std::pair<InstanceKey, bool>> ends;
  for (const Member& member : members_) {
    member.pairs.ForEach([&](const PairEnd& end, const Counter&) {
      InstanceKey pair;
      pair.group = end.group;
      pair.source = end.source;
      pair.destination = end.destination;
      pair.tag = end.tag;
      if (pair_call(pair, end.is_recv).second != least_of(pair)) {
        ends.emplace_back(pair, end.is_recv);
      }
    });
  }
  std::sort(ends.begin(), ends.end());
  out.PutVarint(ends.size());
  for (auto& end : ends) {
    const auto at = pair_call(end.first, end.second);
    end.first.at = {at.first, at.second, 0};
    put_key(end.first);
    out.Put<uint8_t>(end.second);
  }
  // Pending runs by handle. Their order of submission settles a rank's own order inside a gang and
  // the order of texts; a checker that lets each rank submit in order may leave it out.
  std::map<int64_t, int32_t> runs;
  for (int32_t r = pending_.head; r != kNone; r = runs_[r].next) {
    runs.emplace(runs_[r].handle.value(), r);
  }
  out.PutVarint(runs.size());
  for (const auto& entry : runs) {
    const PendingRun& run = runs_[entry.second];
    out.PutSigned(run.handle.value());
    out.Put<uint8_t>(run.externally_blocked + 2 * run.donates);
    out.Put(run.reserve);
    out.PutSigned(run.uncompared);
    out.PutVarint(run.producers.size());
    for (const RunHandle producer : run.producers) {
      out.PutSigned(run_by_handle_.Contains(producer) ? producer.value() : 0);
    }
    for (size_t i = 0; i < run.instances.size(); ++i) {
      const Instance& instance = instances_[run.instances[i]];
      put_key(KeyOf(run, i));
      for (const Seat& seat : instance.seats) {
        out.PutSigned(seat.run == kNone ? (seat.absent ? -2 : -1) : runs_[seat.run].handle.value());
      }
    }
  }
  std::map<InstanceKey, int32_t> tapes;
  tape_by_key_.ForEach([&](int32_t tape) {
    const InstanceKey& key = tapes_[tape].key;
    if (FindTape(key) != kNone) tapes.emplace(key, tape);
  });
  out.PutVarint(tapes.size());
  for (const auto& entry : tapes) {
    put_key(entry.first);
    for (int32_t seat = 0; seat < SeatCount(entry.first); ++seat) {
      const TapeEntry& tape = EntryAt({entry.second, seat});
      out.Put(StateOf({entry.second, seat}));
      out.PutSigned(tape.next.step - least_step);
      out.PutSigned(tape.next.number);
      out.Put<uint8_t>((tape.consumed_in == epoch_) + 2 * tape.leads_to_collective +
                       4 * tape.leads_to_leaf + 8 * (tape.asked_in < epoch_));
    }
  }
  // Instances expire in the order of their first votes.
  for (int32_t id = timed_.head; id != kNone; id = instances_[id].next) {
    for (int32_t call = 0; call < instances_[id].count; ++call) put_key(instances_[id].KeyAt(call));
  }
  out.PutSigned(-1);
  for (int32_t d = in_grace_.head; d != kNone; d = differing_[d].next) {
    put_key(instances_[differing_[d].instance].key);
  }
  out.PutSigned(-1);
  for (int32_t g = launched_.head; g != kNone; g = gangs_[g].next) {
    out.Put<uint8_t>(gangs_[g].epoch == epoch_);
    for (const RunHandle run : gangs_[g].runs) out.PutSigned(run.value());
    out.PutSigned(-1);
  }
  return out.Take();
}

// --- Small things -------------------------------------------------------------------------------

// Time never runs backwards in here: the lists by time stay sorted whatever the caller's clock
// does.
// Every event begins with it.
void Sequencer::BeginEvent(absl::Time now) {
  clock_ = std::max(clock_, now);
  resolved_ = RunHandle();
}

bool Sequencer::IsRank(Rank rank) const { return rank.value() >= 0 && rank.value() < size(); }

Rank Sequencer::RankAt(const InstanceKey& key, int32_t seat) const {
  return groups_[key.group.value()].members[MemberAt(key, seat).value()];
}

int32_t Sequencer::SeatCount(const InstanceKey& key) const {
  return key.is_pair() ? 2 : static_cast<int32_t>(groups_[key.group.value()].members.size());
}

const Participation& Sequencer::PartAt(const Instance& instance, int32_t seat, int32_t call) const {
  const Seat& vote = instance.seats[seat];
  return runs_[vote.run].what->participations[vote.participation + call];
}

// The instance that the run votes for by that participation, in a list the call.
InstanceKey Sequencer::KeyOf(const PendingRun& run, size_t participation) const {
  const Instance& instance = instances_[run.instances[participation]];
  if (instance.count == 1) return instance.key;
  const int32_t seat = SeatOf(instance.key, run.what->participations[participation]);
  return instance.KeyAt(static_cast<int32_t>(participation) - instance.seats[seat].participation);
}

std::string Sequencer::RankText(Rank rank) const {
  std::string text = absl::StrCat("rank ", rank.value());
  const Culprit culprit = CulpritOf(rank);
  if (culprit.pid < 0) return text;
  absl::StrAppend(&text, " (pid ", culprit.pid);
  if (!culprit.node.empty()) absl::StrAppend(&text, " on ", culprit.node);
  return absl::StrCat(text, ")");
}

Culprit Sequencer::CulpritOf(Rank rank) const {
  Culprit culprit;
  culprit.rank = rank.value();
  if (IsRank(rank)) {
    culprit.pid = members_[rank.value()].info.pid;
    culprit.node = members_[rank.value()].info.node;
  }
  return culprit;
}

void Sequencer::NameGang(const OpenGang& gang, Error* error) {
  if (gang.what == nullptr) return;
  const Participation& first = gang.what->participations[gang.participation];
  if (error->op.empty()) error->op = first.descriptor.ToString();
  if (error->source.empty()) error->source = first.source;
}

Error Sequencer::MakeInstanceError(Reason reason, int32_t id) const {
  const Instance& instance = instances_[id];
  const Participation& first = PartAt(instance, instance.first);
  Error error(reason);
  error.instance = instance.key.ToString();
  error.op = std::string(CollectiveKindName(first.descriptor.kind));
  error.source = first.source;
  return error;
}

// Adds what each rank has asked for, unless it is there already.
void Sequencer::AddVersions(const Instance& instance, Error* error) const {
  for (int32_t p = 0; p < static_cast<int32_t>(instance.seats.size()); ++p) {
    if (error->ranks.size() == Error::kMaxRanks) return;
    if (instance.seats[p].run == kNone) continue;
    const int32_t rank = RankAt(instance.key, p).value();
    if (!error->ranks.empty() && error->ranks[0].rank == rank) continue;
    const Participation& part = PartAt(instance, p);
    error->ranks.push_back({rank, PartText(part), part.source});
  }
}

std::string Sequencer::RunText(int32_t r) const {
  const PendingRun& run = runs_[r];
  if (run.instances.empty()) return "a local run";
  const Participation& part = run.what->participations[0];
  return absl::StrCat(
      part.descriptor.ToString(), " (", instances_[run.instances[0]].key.ToString(),
      run.instances.size() > 1 ? absl::StrCat(", and ", run.instances.size() - 1, " more") : "",
      ") of ", RankText(run.ranks[0]), " at ", part.source);
}

}  // namespace chorus
