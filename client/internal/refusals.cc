#include "client/internal/refusals.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "client/internal/errors.h"
#include "client/internal/session_core.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

RefusedMember* RefusedOf(MemberCore* member, Refusals* refusals) {
  Refuse* refuse = nullptr;
  for (Refuse& one : *refusals) {
    if (one.world == member->world) refuse = &one;
  }
  if (refuse == nullptr) {
    refusals->emplace_back();
    refuse = &refusals->back();
    refuse->world = member->world;
    refuse->epoch = member->epoch.load(std::memory_order_relaxed);
  }
  const Rank rank(member->rank.load(std::memory_order_relaxed));
  for (RefusedMember& one : refuse->members) {
    if (one.rank == rank) return &one;
  }
  RefusedMember refused;
  refused.rank = rank;
  refused.step = member->step.load(std::memory_order_relaxed);
  refuse->members.push_back(std::move(refused));
  return &refuse->members.back();
}

void AddRefused(absl::Span<const CallPart> parts, Refusals* refusals) {
  for (const CallPart& part : parts) {
    RefusedMember* const member = RefusedOf(part.group->member, refusals);
    const InstanceKey& key = part.instance;
    RefusedCalls calls;
    calls.group = key.group;
    calls.source = key.source;
    calls.destination = key.destination;
    calls.tag = key.tag;
    const Collective& collective = part.key.spec.collective;
    calls.is_recv = IsReceiver(collective.kind);
    calls.first = key.at.call;
    calls.next = key.at.call + 1;
    // A peer that is no member waits for nothing.
    const int32_t size = static_cast<int32_t>(part.group->ranks.size());
    const int32_t peer = collective.peer.value();
    if (HasPeer(collective.kind) && (peer < 0 || peer >= size)) continue;
    // Parts of one call count once.
    const bool again = std::any_of(
        member->calls.begin(), member->calls.end(), [&calls](const RefusedCalls& other) {
          return other.group == calls.group && other.source == calls.source &&
                 other.destination == calls.destination && other.tag == calls.tag &&
                 other.first == calls.first;
        });
    if (!again) member->calls.push_back(calls);
  }
}

void PutOutOfLine(const MemberTable& members, const absl::Status& why, Refusals* refusals) {
  for (const std::shared_ptr<MemberCore>& member : members.members()) {
    PutOutOfLine(member.get(), why, refusals);
  }
}

void PutOutOfLine(MemberCore* member, const absl::Status& why, Refusals* refusals) {
  if (!member->out_of_line.ok()) return;
  Error error = ErrorOf(why);
  error.SetReason(Reason::kOutOfLine);
  error.message = absl::StrCat(
      "this rank is out of line: a call could not be made here, and what would have followed from "
      "it is not known, so it takes part in nothing more until its next World::Step (or Reform); "
      "the call: ",
      error.message);
  member->out_of_line = ToStatus(error);
  RefusedOf(member, refusals)->rest_of_step = true;
}

absl::Status BringInLine(absl::Span<MemberCore* const> members) {
  for (MemberCore* const member : members) {
    if (member->out_of_line.ok()) continue;
    absl::flat_hash_set<MemberCore*> of_world;
    for (MemberCore* const other : members) {
      if (other->world == member->world) of_world.insert(other);
    }
    const int64_t step = member->step.load(std::memory_order_relaxed);
    const bool are_all =
        of_world.size() == static_cast<size_t>(member->size.load(std::memory_order_relaxed)) &&
        step + 1 < kMaxCallNumber &&
        // Else some would be behind others in every step to come.
        std::all_of(of_world.begin(), of_world.end(), [step](const MemberCore* other) {
          return other->step.load(std::memory_order_relaxed) == step;
        });
    if (!are_all) return Detached(member->out_of_line);
    for (MemberCore* const other : of_world) other->BeginOwnStep();
  }
  return absl::OkStatus();
}

absl::Status BeginOwnSteps(absl::Span<const std::shared_ptr<MemberCore>> members) {
  SessionLock lock(members[0]->session.get());
  CHORUS_RETURN_IF_ERROR(lock.status());
  for (const std::shared_ptr<MemberCore>& member : members) member->BeginOwnStep();
  return absl::OkStatus();
}

void LoseTapes(MemberCore* member, uint64_t order, const absl::Status& why, Refusals* refusals) {
  Error error = ErrorOf(why);
  error.SetReason(Reason::kTapeConsumed);
  error.message = absl::StrCat(
      "what was recorded before has no gradient any more: a call for gradients was refused here, "
      "and which it would have asked for is not known; record anew; the call: ",
      error.message);
  member->why_tapes_lost = ToStatus(error);
  member->gates_lost_before.store(order, std::memory_order_relaxed);
  // Out of line nobody waits for it in this step, and requests of entries count anew in the next.
  // (What gates call does not.)
  if (!member->out_of_line.ok()) return;
  member->tapes_lost_before.store(order, std::memory_order_relaxed);
  RefusedOf(member, refusals)->drops_tapes = true;
}

std::vector<Refuse> InFrames(Refuse refuse) {
  std::vector<RefusedMember> members = std::exchange(refuse.members, {});
  std::vector<Refuse> frames = {refuse};
  size_t room = Refuse::kMaxCalls;
  // As many of `from` as there is room for, from the first.
  const auto move = [&room](auto* from, auto* to) {
    const auto end = from->begin() + static_cast<ptrdiff_t>(std::min(room, from->size()));
    room -= static_cast<size_t>(end - from->begin());
    to->assign(std::make_move_iterator(from->begin()), std::make_move_iterator(end));
    from->erase(from->begin(), end);
  };
  for (RefusedMember& member : members) {
    if (frames.back().members.size() == Refuse::kMaxMembers) {
      frames.push_back(refuse);
      room = Refuse::kMaxCalls;
    }
    while (true) {
      RefusedMember part;
      part.rank = member.rank;
      part.step = member.step;
      move(&member.calls, &part.calls);
      move(&member.gradients, &part.gradients);
      const bool is_last = member.calls.empty() && member.gradients.empty();
      part.rest_of_step = is_last && member.rest_of_step;
      part.drops_tapes = is_last && member.drops_tapes;
      frames.back().members.push_back(std::move(part));
      if (is_last) break;
      frames.push_back(refuse);
      room = Refuse::kMaxCalls;
    }
  }
  return frames;
}

Error InShort(const Error& why) { return DecodeError(EncodeError(why)); }

std::vector<Sequence> SubmitRefusals(Log* log, Refusals refusals, const absl::Status& why) {
  std::vector<Sequence> sent;
  for (Refuse& refuse : refusals) {
    refuse.why = InShort(ErrorOf(why));
    // Where it comes of a failure that has ended an epoch the others have been told.
    for (const Error::EndedEpoch& ended : refuse.why.ended) {
      refuse.why.alone |= ended.world == refuse.world;
    }
    for (Refuse& frame : InFrames(std::move(refuse))) {
      const absl::optional<Sequence> sequence = log->SubmitOrKeep(std::move(frame));
      if (sequence.has_value()) sent.push_back(*sequence);
    }
  }
  return sent;
}

absl::Status AwaitRefused(SessionCore* session, const std::vector<Sequence>& sent,
                          const absl::Status& why) {
  absl::Status recorded = why;
  for (const Sequence sequence : sent) {
    const absl::Status outcome = session->link().WaitCommand(sequence, session->wait_timeout());
    session->OnError(outcome);
    const Error error = ErrorOf(outcome);
    // It is `why` with its number, unless the command itself was not understood or not answered.
    if (error.reason == ErrorOf(why).reason && outcome.code() == why.code() &&
        ErrorOf(recorded).id.value() == ErrorOf(why).id.value()) {
      recorded = outcome;
    }
  }
  return recorded;
}

absl::Status RefuseOn(SessionCore* session, const absl::Status& why,
                      absl::FunctionRef<absl::Status(Refusals*)> collect) {
  std::vector<Sequence> sent;
  {
    SessionLock lock(session);
    CHORUS_RETURN_IF_ERROR(lock.status());
    Refusals refusals;
    CHORUS_RETURN_IF_ERROR(collect(&refusals));
    sent = SubmitRefusals(&session->log(), std::move(refusals), why);
  }
  return AwaitRefused(session, sent, why);
}

absl::Status RefuseOnAll(absl::Span<const std::shared_ptr<SessionCore>> sessions,
                         const absl::Status& why,
                         absl::FunctionRef<absl::Status(SessionCore*, Refusals*)> collect) {
  absl::Status recorded = why;
  for (const std::shared_ptr<SessionCore>& session : sessions) {
    if (session->Forked()) continue;
    const absl::Status refused = RefuseOn(
        session.get(), why, [&](Refusals* refusals) { return collect(session.get(), refusals); });
    // One that is lost has nobody to tell.
    if (sessions.size() == 1 || ErrorOf(refused).reason == ErrorOf(why).reason) recorded = refused;
  }
  return recorded;
}

absl::Status RefuseRest(GroupCore* group, CallInRuns* call, const absl::Status& why) {
  if (IsLost(why)) return why;
  MemberCore* const member = group->member;
  return RefuseOn(member->session.get(), why, [&](Refusals* refusals) {
    member->session->AssertLocked();
    if (!member->out_of_line.ok()) return Detached(member->out_of_line);
    if (!call->begun) {
      call->begun = true;
      call->next = {member->step.load(std::memory_order_relaxed), group->counters.Count(1), 0};
    }
    // A call of a step that is over is passed.
    if (call->next.step != member->step.load(std::memory_order_relaxed)) return why;
    RefusedCalls calls;
    calls.group = group->id;
    calls.first = call->next.call;
    calls.next = calls.first + 1;
    RefusedOf(member, refusals)->calls.push_back(calls);
    return absl::OkStatus();
  });
}

}  // namespace internal
}  // namespace chorus
