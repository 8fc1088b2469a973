#include "tests/model/oracle.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/bytes.h"
#include "core/collective/test_run.h"

namespace chorus {
namespace {

bool SameError(const Error& a, const Error& b) {
  return a.code == b.code && a.reason == b.reason && a.message == b.message &&
         a.culprit == b.culprit;
}

}  // namespace

void Oracle::Submitted(int64_t run, Run what) {
  if (what.epoch == open_) {
    for (const Part& part : what.parts) {
      votes_[part.key][part.rank] = run;
      Tape tape;
      tape.live = part.wants_grad && left_.count(part.rank) == 0;
      tape.leads_to_collective = part.leads_to_collective;
      tape.leads_to_leaf = part.leads_to_leaf;
      tapes_[part.key][part.rank] = tape;
    }
    // A run that takes the gradient itself has used the entry up.
    for (const Part& part : what.parts) {
      if (!part.key.is_gradient()) continue;
      for (const Part& forward : what.parts) {
        if (forward.rank != part.rank || forward.key != part.key.Parent()) continue;
        Dropped(part.rank, forward.key, /*consumed=*/true, what.epoch);
      }
    }
  }
  // Late or not, the calls count.
  for (const Part& part : what.parts) Count(part, what.goes_on, what.epoch);
  if (what.epoch == open_) submitted_.insert(run);
  runs_[run] = std::move(what);
}

Oracle::Line Oracle::LineOf(const InstanceKey& key, bool is_recv) {
  return {key.group, key.source, key.destination, key.tag, key.is_pair() && is_recv};
}

void Oracle::BeginStep(int32_t rank, int64_t step) {
  moved_.insert(rank);
  Position& position = positions_[rank];
  if (step <= position.step) return;
  position.step = step;
  position.left_rest = false;
  position.next.clear();
}

void Oracle::Count(const Part& part, bool goes_on, Epoch epoch) {
  BeginStep(part.rank, part.key.step());
  Position& position = positions_[part.rank];
  if (part.key.is_gradient()) {
    const InstanceKey::Request& request = part.key.path.back();
    position.requests[part.key.Parent()] = {request.step, request.number + 1};
    const auto tape = tapes_.find(part.key.Parent());
    if (tape != tapes_.end() && tape->second.count(part.rank) > 0) {
      tape->second[part.rank].asked_in = epoch;
    }
    return;
  }
  const CallPosition& at = part.key.at;
  position.next[LineOf(part.key, part.is_recv)] = goes_on && !part.key.is_pair()
                                                      ? CallPosition{at.step, at.call, at.part + 1}
                                                      : CallPosition{at.step, at.call + 1, 0};
}

bool Oracle::IsBehind(const InstanceKey& key, int32_t rank, bool is_recv) const {
  const auto found = positions_.find(rank);
  static const auto* nowhere = new Position;
  const Position& position = found == positions_.end() ? *nowhere : found->second;
  if (key.is_gradient()) {
    const auto tape = tapes_.find(key.Parent());
    if (tape != tapes_.end()) {
      const auto entry = tape->second.find(rank);
      if (entry != tape->second.end() && entry->second.refused) return true;
    }
    const auto next = position.requests.find(key.Parent());
    if (next != position.requests.end() && key.path.back() < next->second) return true;
    return position.step > key.step() || (position.step == key.step() && position.left_rest);
  }
  if (position.step > key.step()) return true;
  if (position.step < key.step()) return false;
  if (position.left_rest) return true;
  const auto next = position.next.find(LineOf(key, is_recv));
  return next != position.next.end() && key.at < next->second;
}

void Oracle::Refused(const std::vector<RefusedMember>& members, Epoch epoch, bool alone,
                     const std::vector<InstanceKey>& gradients) {
  const auto passed_by_another = [&](const InstanceKey& key, int32_t rank,
                                     const std::vector<int32_t>& all, bool other_receives) {
    const auto votes = votes_.find(key);
    for (const int32_t other : all) {
      if (other == rank || !IsBehind(key, other, other_receives) || IsAbsent(key, other)) continue;
      if (votes == votes_.end() || votes->second.count(other) == 0) return true;
    }
    return false;
  };
  // Whether a rank that is needed has passed the first of the calls, by kind of call.
  size_t calls = 0;
  size_t passed = 0;
  for (const RefusedMember& member : members) {
    const int32_t rank = member.rank.value();
    if (member.step < positions_[rank].step) continue;
    for (const RefusedCalls& refused : member.calls) {
      InstanceKey key;
      key.group = refused.group;
      key.since = Epoch(1);
      key.source = refused.source;
      key.destination = refused.destination;
      key.tag = refused.tag;
      const CallPosition first{member.step, refused.first, 0};
      key.at = first;
      if (member.step == positions_[rank].step) {
        const auto next = positions_[rank].next.find(LineOf(key, refused.is_recv));
        if (next != positions_[rank].next.end()) key.at = std::max(first, next->second);
      }
      if (!(key.at < CallPosition{member.step, refused.next, 0})) continue;
      ++calls;
      std::vector<int32_t> all = groups_.at(refused.group);
      if (key.is_pair()) {
        all = {all[(refused.is_recv ? key.source : key.destination).value()]};
      }
      passed += passed_by_another(key, rank, all, !refused.is_recv);
    }
  }
  for (const InstanceKey& key : gradients) {
    if (tapes_.count(key.Parent()) == 0) continue;
    ++calls;
    std::vector<int32_t> all = groups_.at(key.group);
    if (key.is_pair()) all = {all[key.source.value()], all[key.destination.value()]};
    passed += passed_by_another(key, members[0].rank.value(), all, false);
  }
  const bool ends = epoch == open_ && !alone && passed == 0 && !members.empty();
  // Where some of the calls have been passed and others have not, either is right.
  ends_ = ends                                         ? Ends::kMust
          : passed == calls || alone || epoch != open_ ? Ends::kMustNot
                                                       : Ends::kAnything;
  for (const RefusedMember& member : members) {
    const int32_t rank = member.rank.value();
    BeginStep(rank, member.step);
    Position& position = positions_[rank];
    for (const RefusedCalls& refused : member.calls) {
      if (member.step < position.step) continue;
      InstanceKey key;
      key.group = refused.group;
      key.source = refused.source;
      key.destination = refused.destination;
      key.tag = refused.tag;
      CallPosition& next = position.next[LineOf(key, refused.is_recv)];
      next = std::max(next, CallPosition{member.step, refused.next, 0});
    }
    for (const InstanceKey& key : gradients) {
      InstanceKey::Request& next = position.requests[key.Parent()];
      const InstanceKey::Request asked{key.path.back().step, key.path.back().number + 1};
      if (asked < next) continue;
      next = asked;
      const auto tape = tapes_.find(key.Parent());
      if (tape != tapes_.end() && tape->second.count(rank) > 0) {
        tape->second[rank].asked_in = Epoch();
      }
    }
    if (member.rest_of_step && member.step == position.step) position.left_rest = true;
    if (!member.drops_tapes) continue;
    for (auto& tape : tapes_) {
      const auto entry = tape.second.find(rank);
      if (entry == tape.second.end() || !entry->second.live) continue;
      entry->second.live = false;
      entry->second.refused = true;
    }
  }
}

void Oracle::Dropped(int32_t rank, const InstanceKey& key, bool consumed, Epoch epoch) {
  const auto found = tapes_.find(key);
  if (found == tapes_.end() || found->second.count(rank) == 0) return;
  Tape& tape = found->second[rank];
  if (!tape.live) return;
  tape.live = false;
  tape.consumed = consumed;
  tape.consumed_in = epoch;
}

void Oracle::Left(int32_t rank) {
  left_.insert(rank);
  for (auto& tape : tapes_) {
    const auto entry = tape.second.find(rank);
    if (entry != tape.second.end()) entry->second.live = false;
  }
}

void Oracle::Finished(int64_t ticket, bool ok) {
  for (const int64_t run : unfinished_.at(ticket)) {
    if (ok) runs_[run].status = Status::kPublished;
  }
  if (!ok) failed_gangs_[ticket] = unfinished_.at(ticket);
  unfinished_.erase(ticket);
}

bool Oracle::AnyPending() const { return !votes_.empty() || !Pending().empty(); }

std::vector<int64_t> Oracle::Pending() const {
  std::vector<int64_t> result;
  for (const auto& run : runs_) {
    if (run.second.status == Status::kPending) result.push_back(run.first);
  }
  return result;
}

std::vector<int64_t> Oracle::Unfinished() const {
  std::vector<int64_t> result;
  for (const auto& gang : unfinished_) result.push_back(gang.first);
  return result;
}

const Error* Oracle::Cause(Epoch epoch) const {
  const auto found = causes_.find(epoch.value());
  return found == causes_.end() ? nullptr : &found->second;
}

// A rank gives zeros to a gradient when it has voted for the forward instance, holds no entry for
// it (any more), and has not asked for this gradient itself.
bool Oracle::IsAbsent(const InstanceKey& key, int32_t rank) const {
  if (!key.is_gradient()) return false;
  const auto tape = tapes_.find(key.Parent());
  if (tape == tapes_.end()) return false;
  const auto entry = tape->second.find(rank);
  if (entry == tape->second.end()) {
    // It gave zeros to the forward instance, a gradient itself.
    return IsAbsent(key.Parent(), rank);
  }
  if (entry->second.live || entry->second.refused) return false;
  if (entry->second.used_in_vain(open_)) return false;
  const auto position = positions_.find(rank);
  if (position == positions_.end()) return true;
  const auto next = position->second.requests.find(key.Parent());
  return next == position->second.requests.end() || !(key.path.back() < next->second);
}

// `rank` is one of those that must vote for `key`.
void Oracle::AddPassed(const InstanceKey& key, int32_t rank, std::set<int64_t>* runs) const {
  const auto& votes = votes_.at(key);
  if (votes.count(rank) > 0 || IsAbsent(key, rank)) return;
  const auto& first = *votes.begin();
  for (const Part& part : runs_.at(first.second).parts) {
    // Of a pair the rank is at the other end.
    if (part.key != key || part.rank != first.first || !IsBehind(key, rank, !part.is_recv))
      continue;
    for (const auto& vote : votes) runs->insert(vote.second);
    return;
  }
}

std::set<int64_t> Oracle::MustFailAlone() const {
  std::set<int64_t> result;
  for (const std::set<int64_t>* runs : {&withdrawn_, &late_}) {
    for (const int64_t run : *runs) {
      if (runs_.at(run).status == Status::kPending) result.insert(run);
    }
  }
  for (const auto& votes : votes_) {
    if (!check_pending_ && moved_.empty()) break;
    const Run& run = runs_.at(votes.second.begin()->second);
    for (const Part& part : run.parts) {
      if (part.key != votes.first) continue;
      for (const int32_t rank : part.all) {
        if (check_pending_ || moved_.count(rank) > 0) AddPassed(part.key, rank, &result);
      }
      break;
    }
  }
  for (const int64_t run : submitted_) {
    for (const Part& part : runs_.at(run).parts) {
      for (const int32_t rank : part.all) AddPassed(part.key, rank, &result);
    }
  }
  if (result.empty()) return result;
  std::map<int64_t, std::vector<int64_t>> consumers;
  std::map<InstanceKey, std::set<int64_t>> gradients;  // by what they are gradients of
  for (const auto& entry : runs_) {
    const Run& run = entry.second;
    if (run.status != Status::kPending || run.epoch != open_) continue;
    for (const int64_t producer : run.producers) consumers[producer].push_back(entry.first);
    for (const Part& part : run.parts) {
      if (part.key.is_gradient()) gradients[part.key.Parent()].insert(entry.first);
    }
  }
  std::vector<int64_t> open(result.begin(), result.end());
  const auto add = [&](int64_t run) {
    if (result.insert(run).second) open.push_back(run);
  };
  while (!open.empty()) {
    const int64_t run = open.back();
    open.pop_back();
    for (const int64_t other : Sharers(run)) add(other);
    for (const int64_t other : consumers[run]) add(other);
    for (const Part& part : runs_.at(run).parts) {
      for (const int64_t other : gradients[part.key]) add(other);
    }
  }
  return result;
}

Oracle::Tape Oracle::PartBehind(const InstanceKey& key, int32_t rank) const {
  const auto tape = tapes_.find(key.Parent());
  if (tape == tapes_.end()) return Tape();
  const auto entry = tape->second.find(rank);
  return entry == tape->second.end() ? Tape() : entry->second;
}

bool Oracle::AnyLost(int32_t rank) const {
  for (const auto& vote : votes_) {
    if (!vote.first.is_gradient()) continue;
    const auto forward = tapes_.find(vote.first.Parent());
    if (forward == tapes_.end()) continue;
    for (const auto& entry : forward->second) {
      if (rank >= 0 && entry.first != rank) continue;
      if (entry.second.leads_to_collective && vote.second.count(entry.first) == 0 &&
          IsAbsent(vote.first, entry.first)) {
        return true;
      }
    }
  }
  return false;
}

std::vector<int64_t> Oracle::Sharers(int64_t run) const {
  std::vector<int64_t> result;
  for (const Part& part : runs_.at(run).parts) {
    for (const auto& vote : votes_.at(part.key)) {
      if (vote.second != run) result.push_back(vote.second);
    }
  }
  return result;
}

std::vector<int64_t> Oracle::Needs(int64_t id) const {
  std::vector<int64_t> result = Sharers(id);
  const Run& run = runs_.at(id);
  for (const int64_t producer : run.producers) {
    const auto found = runs_.find(producer);
    if (found != runs_.end() && found->second.status == Status::kPending) {
      result.push_back(producer);
    }
  }
  for (const Part& part : run.parts) {
    if (!part.key.is_gradient()) continue;
    const auto forward = votes_.find(part.key.Parent());
    if (forward == votes_.end()) continue;
    for (const auto& vote : forward->second) {
      if (vote.second != id) result.push_back(vote.second);
    }
  }
  return result;
}

bool Oracle::Closed(int64_t run) const {
  for (const Part& part : runs_.at(run).parts) {
    const auto& votes = votes_.at(part.key);
    for (const int32_t rank : part.all) {
      if (votes.count(rank) == 0 && !IsAbsent(part.key, rank)) return false;
    }
    for (const auto& vote : votes) {
      for (const Part& other : runs_.at(vote.second).parts) {
        if (other.key == part.key && other.shape != part.shape) return false;
      }
    }
  }
  return true;
}

bool Oracle::LacksVotes(int64_t run) const {
  std::set<int64_t> seen = {run};
  std::vector<int64_t> open = {run};
  while (!open.empty()) {
    const int64_t at = open.back();
    open.pop_back();
    if (!Closed(at)) return true;
    for (const int64_t other : Sharers(at)) {
      if (seen.insert(other).second) open.push_back(other);
    }
  }
  return false;
}

std::string Oracle::Reserve(const SequencerAction& action) {
  const std::string name = absl::StrCat("reserve for run ", action.run.value(), ": ");
  const auto found = runs_.find(action.run.value());
  if (found == runs_.end() || found->second.status != Status::kPending) {
    return absl::StrCat(name, "it is not pending");
  }
  Run& run = found->second;
  if (!run.order.empty()) return absl::StrCat(name, "it was asked before");
  if (LacksVotes(found->first)) return absl::StrCat(name, "its gang is not closed");
  std::vector<int32_t> sorted = action.order;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] != static_cast<int32_t>(i)) return absl::StrCat(name, "its order is none");
  }
  if (sorted.size() != run.parts.size()) return absl::StrCat(name, "its order is not of its parts");
  if (sorted == action.order) return absl::StrCat(name, "the order is its own");
  run.order = action.order;
  run.reserving = true;
  return "";
}

std::string Oracle::Launch(const SequencerAction& action) {
  const std::string name = absl::StrCat("launch of ticket ", action.ticket.value(), ": ");
  if (action.ticket.value() <= last_ticket_) {
    return absl::StrCat(name, "the last ticket was ", last_ticket_);
  }
  last_ticket_ = action.ticket.value();
  if (action.runs.empty()) return absl::StrCat(name, "no runs");
  std::set<int64_t> runs;
  for (const RunHandle handle : action.runs) {
    const auto found = runs_.find(handle.value());
    if (found == runs_.end() || found->second.status != Status::kPending) {
      return absl::StrCat(name, "run ", handle.value(), " is not pending");
    }
    if (!runs.insert(handle.value()).second) return absl::StrCat(name, "a run is listed twice");
  }
  // Nothing that it needs is outside, and none of it could go without the rest.
  std::map<int64_t, std::vector<int64_t>> needs;
  std::map<int64_t, std::vector<int64_t>> needed_by;
  for (const int64_t run : runs) {
    if (!Closed(run)) return absl::StrCat(name, "a member has not voted");
    if (runs_[run].reserving) return absl::StrCat(name, "run ", run, " is not ready for its order");
    if (runs_[run].externally_blocked) return absl::StrCat(name, "another world is not ready");
    needs[run] = Needs(run);
    for (const int64_t other : needs[run]) {
      if (runs.count(other) == 0) {
        return absl::StrCat(name, "run ", other, ", which run ", run, " needs, has no ticket");
      }
      needed_by[other].push_back(run);
    }
  }
  for (auto* edges : {&needs, &needed_by}) {
    std::set<int64_t> reached = {*runs.begin()};
    std::vector<int64_t> open = {*runs.begin()};
    while (!open.empty()) {
      const int64_t at = open.back();
      open.pop_back();
      for (const int64_t other : (*edges)[at]) {
        if (reached.insert(other).second) open.push_back(other);
      }
    }
    if (reached != runs) return absl::StrCat(name, "its runs are not the smallest closed set");
  }

  // Producers inside the gang stand before their consumers.
  std::set<int64_t> earlier;
  for (const RunHandle handle : action.runs) {
    for (const int64_t producer : runs_[handle.value()].producers) {
      if (runs.count(producer) > 0 && earlier.count(producer) == 0) {
        return absl::StrCat(name, "run ", handle.value(), " stands before its producer ", producer);
      }
    }
    earlier.insert(handle.value());
  }

  // Each vote is in the list once, each instance has every member once, and the order respects what
  // the ranks said.
  std::map<InstanceKey, size_t> position;
  size_t votes = 0;
  for (size_t i = 0; i < action.instances.size(); ++i) {
    const LaunchedInstance& instance = action.instances[i];
    if (!position.emplace(instance.key, i).second) {
      return absl::StrCat(name, instance.key.ToString(), " is listed twice");
    }
    const Part* sample = nullptr;
    int64_t point = -1;
    std::set<int32_t> members;
    GroupRank last(-1);
    for (const LaunchedInstance::Part& part : instance.parts) {
      ++votes;
      if (runs.count(part.run.value()) == 0) return absl::StrCat(name, "a part of another run");
      const std::vector<Part>& parts = runs_[part.run.value()].parts;
      if (part.participation < 0 || part.participation >= static_cast<int32_t>(parts.size()) ||
          parts[part.participation].key != instance.key) {
        return absl::StrCat(name, "a part that did not vote for ", instance.key.ToString());
      }
      sample = &parts[part.participation];
      if (point >= 0 && sample->point >= 0 && sample->point != point) {
        return absl::StrCat(name, "calls ", point, " and ", sample->point,
                            " of the programs meet in ", instance.key.ToString());
      }
      point = std::max(point, sample->point);
      if (part.member < last) return absl::StrCat(name, "parts are not in order of member");
      last = part.member;
      if (!members.insert(sample->rank).second) return absl::StrCat(name, "a member twice");
    }
    if (sample == nullptr) return absl::StrCat(name, instance.key.ToString(), " has no part");
    if (members.size() + instance.absent.size() != sample->all.size()) {
      return absl::StrCat(name, instance.key.ToString(), " has ", members.size(), " parts and ",
                          instance.absent.size(), " absent of ", sample->all.size());
    }
    for (const int32_t rank : sample->all) {
      if (members.count(rank) == 0 && !IsAbsent(instance.key, rank)) {
        return absl::StrCat(name, "rank ", rank, " is counted absent from ",
                            instance.key.ToString(), " though it holds its tape entry");
      }
    }
    // Nobody goes on with zeros that are wrong, and a rank that loses a number of its own is named.
    std::vector<int32_t> told;
    for (const LaunchedInstance::GivenUp& part : instance.given_up) {
      told.push_back(part.rank.value());
    }
    std::vector<int32_t> given_up;
    for (const int32_t rank : sample->all) {
      if (members.count(rank) > 0) continue;
      const Tape behind = PartBehind(instance.key, rank);
      if (behind.leads_to_collective) {
        return absl::StrCat(name, instance.key.ToString(), " lacks what rank ", rank,
                            " has given up");
      }
      if (behind.leads_to_leaf) given_up.push_back(rank);
    }
    if (told != given_up) {
      return absl::StrCat(name, instance.key.ToString(), " names other ranks than gave it up");
    }
  }
  size_t expected_votes = 0;
  for (const int64_t run : runs) {
    const std::vector<Part>& parts = runs_[run].parts;
    expected_votes += parts.size();
    for (const Part& part : parts) {
      if (part.key.is_gradient() && position.count(part.key.Parent()) > 0 &&
          position.at(part.key.Parent()) > position.at(part.key)) {
        return absl::StrCat(name, part.key.ToString(), " stands before its forward instance");
      }
      for (const int32_t before : part.after) {
        if (position.at(parts[before].key) >= position.at(part.key)) {
          return absl::StrCat(name, part.key.ToString(), " stands before what it depends on");
        }
      }
    }
  }
  if (votes != expected_votes) return absl::StrCat(name, "votes are missing from its instances");
  // A rank's runs are whole.
  std::map<int32_t, std::pair<int64_t, size_t>> at;  // by rank: run and last position
  for (const RunHandle handle : action.runs) {
    std::map<int32_t, std::pair<size_t, size_t>> range;
    for (const Part& part : runs_[handle.value()].parts) {
      const size_t here = position.at(part.key);
      const auto inserted = range.emplace(part.rank, std::make_pair(here, here));
      inserted.first->second.first = std::min(inserted.first->second.first, here);
      inserted.first->second.second = std::max(inserted.first->second.second, here);
    }
    for (const auto& entry : range) {
      const auto previous = at.find(entry.first);
      if (previous != at.end() && entry.second.first < previous->second.second) {
        return absl::StrCat(name, "runs of rank ", entry.first, " interleave");
      }
      at[entry.first] = {handle.value(), entry.second.second};
    }
  }

  // All of a run stands behind all that it consumes, also through local runs.
  std::map<int64_t, int64_t> end;  // by run: the last position of it and of what is ahead of it
  for (const RunHandle handle : action.runs) {
    const Run& run = runs_[handle.value()];
    int64_t ahead = -1;
    for (const int64_t producer : run.producers) {
      if (end.count(producer) > 0) ahead = std::max(ahead, end.at(producer));
    }
    int64_t last = ahead;
    for (const Part& part : run.parts) {
      const auto here = static_cast<int64_t>(position.at(part.key));
      if (here <= ahead) {
        return absl::StrCat(name, part.key.ToString(), " stands before what its run consumes");
      }
      last = std::max(last, here);
    }
    end[handle.value()] = last;
  }

  // Each run's instances come as its program has them, or as it was asked to follow.
  std::map<int64_t, std::vector<int32_t>> followed;
  for (const LaunchedInstance& instance : action.instances) {
    for (const LaunchedInstance::Part& part : instance.parts) {
      followed[part.run.value()].push_back(part.participation);
    }
  }
  for (const auto& entry : followed) {
    std::vector<int32_t> expected = runs_[entry.first].order;
    for (size_t i = 0; expected.size() < entry.second.size(); ++i) {
      expected.push_back(static_cast<int32_t>(i));
    }
    if (entry.second != expected) {
      return absl::StrCat(name, "run ", entry.first, " has got ready for another order");
    }
  }
  // The permission goes with the launch, and only to runs that gave it.
  std::set<int64_t> donating;
  for (const RunHandle run : action.donating) donating.insert(run.value());
  for (const int64_t run : runs) {
    if (runs_[run].donates != (donating.erase(run) > 0)) {
      return absl::StrCat(name, "run ", run, runs_[run].donates ? " donates" : " does not donate");
    }
    runs_[run].granted = runs_[run].donates;
  }
  if (!donating.empty()) return absl::StrCat(name, "it donates for a run of another gang");

  for (const int64_t run : runs) {
    runs_[run].status = Status::kLaunched;
    runs_[run].ticket = action.ticket.value();
    for (const Part& part : runs_[run].parts) votes_.erase(part.key);
  }
  unfinished_[action.ticket.value()].assign(runs.begin(), runs.end());
  return "";
}

std::string Oracle::FailOf(const SequencerAction& action, std::set<int64_t>* may_fail,
                           std::set<int64_t>* passed) {
  const int64_t run = action.run.value();
  const Error& error = *action.error;
  const auto found = runs_.find(run);
  if (found == runs_.end()) return absl::StrCat("run ", run, " failed and was never submitted");
  Run& record = found->second;
  if (record.status == Status::kPublished)
    return absl::StrCat("run ", run, " failed after it was published");
  if (record.status == Status::kFailed) return absl::StrCat("run ", run, " failed twice");
  if (error.code == absl::StatusCode::kOk || error.message.empty()) {
    return absl::StrCat("run ", run, " failed without an error");
  }
  if (record.status == Status::kPending && record.granted) {
    return absl::StrCat("run ", run, " was refused after its donation was granted");
  }
  if (record.status == Status::kLaunched) {
    if (may_fail->erase(run) == 0) return absl::StrCat("run ", run, " failed after its launch");
    if (action.open_epoch <= record.epoch) {
      return absl::StrCat("run ", run, " failed in execution and is told that epoch ",
                          action.open_epoch.value(), " is open");
    }
  } else if (record.epoch == open_ && action.open_epoch == Epoch()) {
    if (passed->erase(run) == 0) {
      return absl::StrCat("run ", run, " failed alone, and nobody has passed it: ", error.message);
    }
    if (!error.alone) return absl::StrCat("run ", run, " is not told that it failed alone");
    std::set<InstanceKey> dropped(action.dropped.begin(), action.dropped.end());
    std::set<InstanceKey> voted;
    for (const Part& part : record.parts) voted.insert(part.key);
    if (dropped != voted) return absl::StrCat("run ", run, " dropped other votes than its own");
    for (const Part& part : record.parts) {
      votes_.erase(part.key);
      tapes_.erase(part.key);  // never launched: it has no gradient
      if (!part.key.is_gradient()) continue;
      const InstanceKey::Request& request = part.key.path.back();
      const auto tape = tapes_.find(part.key.Parent());
      if (tape == tapes_.end() || tape->second.count(part.rank) == 0) continue;
      if (positions_[part.rank].requests[part.key.Parent()] ==
          InstanceKey::Request{request.step, request.number + 1}) {
        tape->second[part.rank].asked_in = Epoch();
      }
    }
    record.failed_alone = true;
    ++failed_alone_;
  } else if (record.epoch == open_) {
    if (action.open_epoch.value() != open_.value() + 1 || error.alone) {
      return absl::StrCat("run ", run, " failed with its epoch and is told that epoch ",
                          action.open_epoch.value(), " is open");
    }
  } else if (record.epoch < open_) {
    if (action.open_epoch != open_ || error.alone) {
      return absl::StrCat("late run ", run, " is told that epoch ", action.open_epoch.value(),
                          " is open");
    }
    const Error* cause = Cause(record.epoch);
    const bool forgotten = error.reason == Reason::kEpochEnded &&
                           record.epoch.value() + SequencerOptions().kept_causes < open_.value();
    if (!forgotten && (cause == nullptr || !SameError(*cause, error))) {
      return absl::StrCat("run ", run, " of ended epoch ", record.epoch.value(),
                          " was not told that epoch's cause but: ", error.message);
    }
  }
  record.status = Status::kFailed;
  return "";
}

// What remains after everything that must wait has been struck out, and all that needs it, could be
// launched.
std::string Oracle::NothingLaunchable() const {
  std::map<int64_t, std::vector<int64_t>> needed_by;
  std::set<int64_t> remaining;
  std::vector<int64_t> struck;
  for (const int64_t run : Pending()) {
    remaining.insert(run);
    for (const int64_t other : Needs(run)) needed_by[other].push_back(run);
    const Run& at = runs_.at(run);
    if (at.externally_blocked || at.reserving || !Closed(run)) struck.push_back(run);
  }
  while (!struck.empty()) {
    const int64_t run = struck.back();
    struck.pop_back();
    if (remaining.erase(run) == 0) continue;
    for (const int64_t other : needed_by[run]) struck.push_back(other);
  }
  if (remaining.empty()) return "";
  return absl::StrCat("run ", *remaining.begin(), " could be launched and was not");
}

std::string Oracle::ApplyActions(const Sequencer::Actions& decided, Epoch open, bool goes_on) {
  const Sequencer::Actions actions = OneByOne(decided);
  std::set<int64_t> may_fail;  // launched runs whose gang has not finished well
  for (const auto& gang : failed_gangs_) may_fail.insert(gang.second.begin(), gang.second.end());
  failed_gangs_.clear();
  std::set<int64_t> passed = MustFailAlone();
  withdrawn_.clear();
  moved_.clear();
  submitted_.clear();
  const Ends ends = std::exchange(ends_, Ends::kAnything);
  const Epoch before = open_;
  std::vector<const Error*> failures;
  for (const SequencerAction& action : actions) {
    std::string fault;
    if (action.kind != SequencerAction::Kind::kLaunch && !action.donating.empty()) {
      return "a donation was granted without a launch";
    }
    switch (action.kind) {
      case SequencerAction::Kind::kReserve:
        fault = Reserve(action);
        break;
      case SequencerAction::Kind::kLaunch:
        fault = Launch(action);
        break;
      case SequencerAction::Kind::kFail: {
        // An execution timeout fails a gang without Finished.
        const auto found = runs_.find(action.run.value());
        if (action.error->reason == Reason::kExecTimeout && found != runs_.end() &&
            found->second.status == Status::kLaunched) {
          const auto gang = unfinished_.find(found->second.ticket);
          if (gang != unfinished_.end()) {
            may_fail.insert(gang->second.begin(), gang->second.end());
            unfinished_.erase(gang);
          }
        }
        const bool of_open_epoch = found != runs_.end() && found->second.epoch == open_ &&
                                   found->second.status == Status::kPending &&
                                   action.open_epoch != Epoch();
        fault = FailOf(action, &may_fail, &passed);
        if (of_open_epoch) failures.push_back(action.error.get());
        break;
      }
      case SequencerAction::Kind::kWarn:
        break;
      case SequencerAction::Kind::kEpochEnded:
        if (action.epoch != open_) {
          fault =
              absl::StrCat("epoch ", action.epoch.value(), " ended; ", open_.value(), " was open");
          break;
        }
        if (action.error->reason == Reason::kGradientLost && !AnyLost(action.error->culprit.rank)) {
          fault = absl::StrCat("rank ", action.error->culprit.rank,
                               " has given up nothing: ", action.error->message);
        }
        for (const Error* error : failures) {
          if (!SameError(*error, *action.error)) {
            fault = absl::StrCat("one epoch, two causes: ", error->message, " and ",
                                 action.error->message);
          }
        }
        failures.clear();
        for (const auto& run : runs_) {
          if (run.second.status == Status::kPending && run.second.epoch == open_) {
            fault = absl::StrCat("run ", run.first, " is still pending after its epoch ended");
          }
        }
        causes_[open_.value()] = *action.error;
        open_ = Epoch(open_.value() + 1);
        if (action.open_epoch != open_) fault = "an epoch ended and another one was opened";
        // What was never launched has no gradients.
        for (const auto& vote : votes_) tapes_.erase(vote.first);
        votes_.clear();
        passed.clear();  // they have failed with the others
        break;
    }
    if (!fault.empty()) return fault;
  }
  if (!failures.empty()) return "runs of the open epoch failed, and it did not end";
  late_.clear();
  if (goes_on) late_.swap(passed);
  if (!passed.empty()) {
    return absl::StrCat("run ", *passed.begin(), " needs somebody who has passed it, and waits");
  }
  if (ends == Ends::kMust && open_ == before) return "a refusal did not end the epoch";
  if (ends == Ends::kMustNot && open_ != before) {
    return "a refusal of what others have passed, or of an ended epoch, ended the open one";
  }
  if (!may_fail.empty()) {
    return absl::StrCat("run ", *may_fail.begin(), " did not finish and was not failed");
  }
  if (open != open_) {
    return absl::StrCat("epoch ", open.value(), " is open; by its actions it is ", open_.value());
  }
  return check_pending_ ? CheckPending(goes_on) : "";
}

std::string Oracle::CheckPending(bool goes_on) const {
  for (const auto& run : runs_) {
    if (run.second.status == Status::kPending && run.second.epoch < open_) {
      return absl::StrCat("run ", run.first, " of an ended epoch was not failed");
    }
  }
  // A slice may end before it has looked at all that a rank has given up.
  if (goes_on) return "";
  if (AnyLost(-1)) return "a gradient is pending that lacks what a rank has given up";
  return NothingLaunchable();
}

void Oracle::Forget() {
  for (auto& position : positions_) {
    auto& requests = position.second.requests;
    for (auto it = requests.begin(); it != requests.end();) {
      it = tapes_.count(it->first) == 0 ? requests.erase(it) : std::next(it);
    }
  }
  for (auto it = runs_.begin(); it != runs_.end();) {
    const bool ended =
        it->second.status == Status::kPublished || it->second.status == Status::kFailed;
    it = ended ? runs_.erase(it) : std::next(it);
  }
  for (auto it = causes_.begin(); it != causes_.end() && it->first + 100 < open_.value();) {
    it = causes_.erase(it);
  }
}

std::string Oracle::Canonical() const {
  ByteWriter out;
  for (const auto& run : runs_) {
    out.PutSigned(run.first);
    out.Put(run.second.status);
    out.PutSigned(open_.value() - run.second.epoch.value());
    if (run.second.status != Status::kPending) continue;
    out.Put<uint8_t>(run.second.externally_blocked + 2 * run.second.reserving +
                     4 * !run.second.order.empty());
  }
  for (const auto& tape : tapes_) {
    EncodeInstanceKey(tape.first, &out);
    for (const auto& entry : tape.second) {
      out.PutSigned(entry.first);
      out.Put<uint8_t>(entry.second.live + 2 * entry.second.consumed + 4 * entry.second.refused +
                       8 * entry.second.leads_to_collective + 16 * entry.second.leads_to_leaf);
      out.Put<uint8_t>((entry.second.consumed && entry.second.consumed_in == open_) +
                       2 * (entry.second.asked_in < open_));
    }
  }
  for (const int32_t rank : left_) out.PutSigned(rank);
  for (const auto& entry : positions_) {
    const Position& position = entry.second;
    out.PutSigned(entry.first);
    out.PutSigned(position.step);
    out.Put<uint8_t>(position.left_rest);
    for (const auto& next : position.next) {
      out.PutSigned(next.first.group.value());
      out.PutSigned(next.first.source.value());
      out.PutSigned(next.first.destination.value());
      out.PutSigned(next.first.tag);
      out.Put<uint8_t>(next.first.is_recv);
      out.PutSigned(next.second.step);
      out.PutSigned(next.second.call);
      out.PutSigned(next.second.part);
    }
    for (const auto& request : position.requests) {
      if (tapes_.count(request.first) == 0) continue;
      EncodeInstanceKey(request.first, &out);
      out.PutSigned(request.second.step);
      out.PutSigned(request.second.number);
    }
  }
  return out.Take();
}

}  // namespace chorus
