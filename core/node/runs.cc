#include "core/node/runs.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "core/base/failpoint.h"
#include "core/base/work.h"
#include "core/runtime/budget.h"
#include "core/runtime/executor.h"

namespace chorus::node {
namespace {

// To fail a run beside WorkOf() it, with its error told; and to refuse it, with its world's epoch.
constexpr int64_t kWorkPerFailure = 32;
constexpr int64_t kWorkPerRefusal = 128;
// To write down that ranks differ, in the log as well.
constexpr int64_t kWorkPerWarning = 64;

// So many runs of a session are looked at.
constexpr int64_t kRunsOfWork = 8;

// So many buffers that runs had in common are let go of in one turn.
constexpr size_t kLetGoAtOnce = 512;

// What the ranks are told of a device that failed.
absl::Status ExecFailure(const absl::Status& status) {
  Error error = ErrorOf(status);
  if (error.reason == Reason::kUnspecified) error.SetReason(Reason::kExecFailed);
  return ToStatus(error);
}

// The error as the world's sequencer must take it. Where the failure has ended an epoch of the
// world the other ranks have been told of it, and what comes of it fails alone: if each call that
// wants its result ended an epoch more, it would take others' calls with it, and what comes of
// those again, without end.
Error ForAgreement(const Failures& failures, const World& world, Error error) {
  error.alone |= failures.HasTold(world, error);
  return error;
}

// For an error of which the world has been told, in `epoch`: where it has ended that it is noted.
// Then it says which epoch is open.
void SayOutcome(Epoch epoch, const World& world, Failures* failures, Error* error) {
  const Epoch open_epoch = world.agreement->epoch();
  if (open_epoch != epoch) failures->NoteTold(world, *error);
  SayOpenEpoch(world, open_epoch, error);
}

// That a pending run speaks for first; of one that speaks for none, that its device is of.
Rank RankOf(const RunState& run) {
  const absl::Span<const Rank> ranks = run.world->agreement->RanksOf(run.handle);
  return ranks.empty() ? RankOn(*run.world, *run.session, run.devices) : ranks.front();
}

// The other ranks of the run's world learn that it cannot take part.
Agreement::Decision DecideRefusal(const RunState& run, const Error& why, absl::Time now) {
  Agreement* const agreement = run.world->agreement.get();
  if (run.vote_taken && !agreement->IsPending(run.handle)) {
    // It has failed there, and the action that says so is still to be carried out.
    return Agreement::Decision(agreement, {});
  }
  if (run.vote_taken && why.alone) return agreement->Withdraw(run.handle, why, now);
  // The calls of a vote that was taken have been counted: where they stand is not asked again, for
  // a call without a position would be the next one by now.
  std::vector<RefusedMember> members;
  if (!run.vote_taken) members = agreement->CallsOf(run.vote);
  if (members.empty()) members.emplace_back().rank = RankOf(run);
  return agreement->Refuse(members, run.vote.epoch, why, now);
}

// Of a run with a vote: its epoch has, and it fails with that in its turn.
bool HasEnded(const RunState& run) { return run.vote.epoch != run.world->agreement->epoch(); }

// One whose first run has not ended.
const std::string& TenantOf(const Gang& gang, RunTable* table) {
  if (gang.world != nullptr) return gang.world->tenant;
  return table->Find(gang.runs.front())->session->tenant->name;
}

// Writes it down.
void Warn(const World& world, Error warning, Failures* failures, absl::Time now) {
  CountWork(kWorkPerWarning);
  failures->Record(nullptr, &world, &warning);
  failures->Note(FlightKind::kCallSitesDiffer, now, nullptr, &world, Sequence(), Ticket(),
                 warning.id);
}

// Does `work`, which is true when that was all, in turns of the session that come, then calls
// `then`.
void DoInTurns(const InNextTurn& go_on_later, const std::shared_ptr<Session>& session,
               std::function<bool()> work, std::function<void()> then) {
  go_on_later(session, [&go_on_later, work = std::move(work),
                        then = std::move(then)](const std::shared_ptr<Session>& of) mutable {
    if (work()) return then();
    DoInTurns(go_on_later, of, std::move(work), std::move(then));
  });
}

// What an epoch's runs had in common, a table of results, goes in pieces, behind what fails by now.
template <typename Results>
void LetGoOf(const std::string& tenant, Results taken, Runs* runs) {
  if (taken.size() == 0) return;
  const auto results = std::make_shared<Results>(std::move(taken));
  for (size_t part = 0, parts = results->parts(); part < parts; ++part) {
    runs->AfterFailing(tenant, [results] {
      const size_t size_before = results->size();
      results->ForgetPart();
      CountWork(static_cast<int64_t>(size_before - results->size()));
    });
  }
}

}  // namespace

bool Runs::Submit(const std::shared_ptr<Session>& session, Sequence sequence, const Run& command,
                  const GraphStore::Waiting& waiting, absl::Time now) {
  // What was kept for it is its tenant's again, where it finds it.
  session->reservation = Session::Reservation();
  if (stopped_) {
    Refuse(session, sequence, command, nullptr, DrainingError(), now);
    return true;
  }
  if (!table_->HasRoom() ||
      static_cast<int64_t>(session->runs.size()) >= options_->max_pending_runs) {
    Refuse(session, sequence, command, nullptr,
           MakeError(Reason::kQuota, absl::StrCat("a session may have ", options_->max_pending_runs,
                                                  " runs under way; wait for some of them")),
           now);
    return true;
  }
  // Before it is prepared, which would have to be done again behind them.
  const absl::StatusOr<bool> adopted = AdoptProducers(session, command, waiting, now);
  if (!adopted.ok()) {
    Refuse(session, sequence, command, nullptr, adopted.status(), now);
    return true;
  }
  if (!*adopted) return false;
  RunState* run = table_->Add();
  run->session = session;
  run->sequence = sequence;
  run->index = session->runs.size();
  session->runs.push_back(run->handle);
  CHORUS_FAILPOINT("node.before_prepare");
  absl::StatusOr<bool> prepared = preparer_->Prepare(command, waiting, run);
  if (prepared.ok() && session->reservation.takes_turns()) {
    const absl::Status goes_on = ReserveInTurns(waiting, run);
    if (!goes_on.ok()) prepared = goes_on;
  }
  const bool awaits_memory = storage_->AwaitMemory(session.get(), prepared.status(), waiting.wait);
  if (awaits_memory || (prepared.ok() && !*prepared)) {
    // Others have not failed: what they and this run have in common stays as it is. While memory is
    // reserved in turns they would make it again, each for itself.
    if (awaits_memory) equal_work_->Leave(run);
    End(run);
    return false;
  }
  if (!prepared.ok()) {
    Refuse(session, sequence, command, run, prepared.status(), now);
    return true;
  }
  const bool late = run->world != nullptr && HasEnded(*run);
  const absl::Status awaited = AwaitProducers(run);
  if (!awaited.ok()) {
    Refuse(session, sequence, command, run, awaited, now);
    return true;
  }
  // For a late one nothing is reserved: those without a name are told to the session all the same.
  bool has_room = true;
  for (size_t i = 0; i < run->outputs.size(); ++i) {
    const CellRef& cell = run->outputs[i];
    if (cell == nullptr) continue;
    if (late) {
      has_room = has_room && session->names.NameIfRoom(run->output_ids[i], cell);
    } else {
      session->names.NameTensor(run->output_ids[i], cell);
    }
  }
  if (run->world == nullptr) {
    if (run->blockers == 0) LaunchLocal(run, now);
    return true;
  }
  CastVote(run, now);
  return true;
}

// --- Agreement ----------------------------------------------------------------------------------

// What this run waits for.
absl::Status Runs::AwaitProducers(RunState* run) {
  producers_.Find(run);
  // Each stands here, in the vote and in the sequencer.
  constexpr int64_t kPerProducer = 64;
  const int64_t num_producers = producers_.ThroughLocals(*run);
  CountWork(num_producers);
  CHORUS_RETURN_IF_ERROR(Preparer::Charge(run, kPerProducer * num_producers));
  producers_.Await(run);
  return absl::OkStatus();
}

// A local run between two runs of one world votes there as well. Another rank may have compiled
// what it stands between: then all of it is one gang, and is launched at once or never.
absl::StatusOr<bool> Runs::AdoptProducers(const std::shared_ptr<Session>& session,
                                          const Run& command, const GraphStore::Waiting& waiting,
                                          absl::Time now) {
  if (command.groups.empty()) return true;
  const RunGroup& group = command.groups.front();
  const auto it =
      std::find_if(session->memberships.begin(), session->memberships.end(),
                   [&](const Session::Membership& m) { return m.world->id == group.world; });
  if (it == session->memberships.end() || !it->world->formed()) return true;
  Adoption new_adoption = producers_.Adopt(session->names, command, it->world, group.epoch);
  if (new_adoption.done()) return true;
  const auto adoption = std::make_shared<Adoption>(std::move(new_adoption));
  // One step at least: each turn is nearer to the end.
  const auto adopt = [this, adoption](absl::Time at) {
    do {
      // In an epoch that has ended it will not be launched.
      if (adoption->done() || adoption->epoch() != adoption->world()->agreement->epoch()) {
        return true;
      }
      RunState* const local = adoption->Step();
      if (local == nullptr) continue;
      local->vote.epoch = adoption->epoch();
      CastVote(local, at);
    } while (SliceWork() <= options_->fail_work);
    return false;
  };
  if (adopt(now)) return true;
  CHORUS_ASSIGN_OR_RETURN(auto on_adopted, waiting.wait());
  DoInTurns(
      go_on_later_, session, [this, adopt] { return adopt(clock_->now); },
      [on_adopted = std::move(on_adopted), failed = waiting.failed] { on_adopted(failed); });
  return false;
}

// The run itself is not kept: what it has found out may be no longer so when its turn comes.
absl::Status Runs::ReserveInTurns(const GraphStore::Waiting& waiting, RunState* run) {
  Session& session = *run->session;
  Session::Reservation& reservation = session.reservation;
  const size_t num_buffers = run->refs.size() + run->intos.size() + reservation.buffers.size();
  const auto rows = static_cast<int64_t>(num_buffers * sizeof(BufferRef));
  CHORUS_ASSIGN_OR_RETURN(reservation.rows,
                          session.budget->Charge(Domain::kHost, Resource::kRunBytes, rows));
  CHORUS_ASSIGN_OR_RETURN(const auto prepare_again, waiting.wait());
  reservation.buffers.reserve(num_buffers);
  for (BufferRef& buffer : run->refs) {
    if (buffer) reservation.buffers.push_back(std::move(buffer));
  }
  for (auto& into : run->intos) {
    if (into.target.landing) reservation.buffers.push_back(std::move(into.target.landing));
  }
  prepare_again(waiting.failed);
  return absl::OkStatus();
}

void Runs::CastVote(RunState* run, absl::Time now) {
  const RunHandle handle = run->handle;
  const std::shared_ptr<World> world = run->world;
  Vote& vote = run->vote;
  for (RunHandle producer : run->voted_producers) {
    RunState* voted_producer = table_->Find(producer);
    if (voted_producer != nullptr && voted_producer->world == world &&
        voted_producer->phase == RunState::Phase::kVoted) {
      vote.producers.push_back(producer);
    }
  }
  vote.externally_blocked = run->blockers > 0;
  vote.results = static_cast<int64_t>(run->outputs.size()) + run->plan->looked_at;
  vote.launch_work = WorkOf(*run) + run->plan->looked_at +
                     std::min<int64_t>(Executor::kSliceSteps,
                                       static_cast<int64_t>(run->graph->graph.nodes.size()));
  run->phase = RunState::Phase::kVoted;
  failures_->Note(FlightKind::kVoted, now, run->session.get(), world.get(), run->sequence);
  run->vote_taken = true;  // what comes of it may end the run before Submit() returns
  const absl::Status status = world->agreement->Submit(vote, now);
  if (status.ok()) return;
  if (RunState* refused_run = table_->Find(handle)) {
    refused_run->vote_taken = false;
    RefuseVote(refused_run, status, now);
  }
}

// The run cannot take part: its own session gets `why`, the other ranks that it could not.
void Runs::Refuse(const std::shared_ptr<Session>& session, Sequence sequence, const Run& command,
                  RunState* run, const absl::Status& why, absl::Time now) {
  Error error = ErrorOf(why);
  holders_->Explain(*session, run, &error);
  if (run != nullptr) {
    equal_work_->ForgetInstances(run);
    equal_work_->Leave(run);
  }
  // Decided first: the session is told which epoch is open then.
  std::vector<std::pair<std::shared_ptr<World>, Agreement::Decision>> decisions;
  for (const NamedWorld& named : WorldsNamed(command, *session)) {
    const std::shared_ptr<World>& world = named.world;
    if (!world->formed()) continue;
    std::vector<RefusedMember> members;
    if (run != nullptr && run->world == world) members = world->agreement->CallsOf(run->vote);
    // Its calls are not known; its next vote shows how many they were.
    if (members.empty()) members.emplace_back().rank = named.rank;
    const Epoch epoch = world->agreement->epoch();
    decisions.emplace_back(world,
                           world->agreement->Refuse(members, named.epoch,
                                                    ForAgreement(*failures_, *world, error), now));
    SayOutcome(epoch, *world, failures_, &error);
  }
  failures_->Record(session.get(), run == nullptr ? nullptr : run->world.get(), &error);
  std::vector<TensorId> results;
  for (const OutBinding& binding : command.outputs) {
    if (binding.kind == OutBinding::Kind::kFresh) results.push_back(binding.id);
  }
  if (!results.empty()) session->names.NameFailed(results, session->names.Keep(error));
  if (run != nullptr) End(run);
  ++stats_->runs_failed;
  failures_->Note(FlightKind::kFailed, now, session.get(), nullptr, sequence, Ticket(), error.id);
  session->log.Finish(sequence, error);
  for (auto& decision : decisions) decision.second.CarryOut(now);
}

void Runs::RefuseVote(RunState* run, const absl::Status& why, absl::Time now) {
  CountWork(kWorkPerRefusal);
  const std::shared_ptr<World> world = run->world;
  Error error = ErrorOf(why);
  holders_->Explain(*run->session, run, &error);
  // Once its vote has been taken the world's actions say what is dropped.
  if (!run->vote_taken) equal_work_->ForgetInstances(run);
  const Epoch epoch = world->agreement->epoch();
  Agreement::Decision decision = DecideRefusal(*run, ForAgreement(*failures_, *world, error), now);
  SayOutcome(epoch, *world, failures_, &error);
  Fail(run, error, now);
  decision.CarryOut(now);
}

// At once, unless this slice has had its share: its world's epoch may end.
void Runs::RefuseAwaiting(RunState* run, std::shared_ptr<const Error> failed, absl::Time now) {
  if (SliceWork() <= options_->fail_work) return RefuseVote(run, ToStatus(*failed), now);
  FailTurns::HoldBack(run->session.get());
  auto refuse = [this, handle = run->handle, session = run->session, failed = std::move(failed)] {
    RunState* const later = table_->Find(handle);
    if (later != nullptr && later->phase == RunState::Phase::kVoted && !HasEnded(*later)) {
      RefuseVote(later, ToStatus(*failed), clock_->now);
    }
    fail_turns_.LetGoOn(session);
  };
  AfterFailing(run->session->tenant->name, std::move(refuse));
}

void Runs::Arrived(RunHandle handle, Storage::Arrival arrival, const absl::Status& status) {
  RunState* run = table_->Find(handle);
  if (run == nullptr) return;
  if (!status.ok()) {
    Follow({handle}, std::make_shared<const Error>(ErrorOf(status)), clock_->now);
  } else if (arrival == Storage::Arrival::kLater) {
    Follow({handle}, nullptr, clock_->now);
  }
}

void Runs::Unblock(RunHandle handle, absl::Time now) {
  RunState* run = table_->Find(handle);
  if (run == nullptr || --run->blockers > 0) return;
  if (run->phase == RunState::Phase::kWaiting) {
    LaunchLocal(run, now);
  } else if (run->phase == RunState::Phase::kVoted) {
    run->world->agreement->Unblock(handle, now);
  }
}

// --- What worlds have agreed on -----------------------------------------------------------------

void Runs::OnLaunch(const std::shared_ptr<World>& world, const SequencerAction& action,
                    absl::Time now) {
  stats_->gradients_given_up +=
      failures_->NoteGivenUp(world.get(), action.instances, action.ticket, now);
  const int32_t index = gangs_->Launch(world, action, now);
  for (RunHandle handle : action.runs) {
    const RunState& run = *table_->Find(handle);
    failures_->Note(FlightKind::kLaunched, now, run.session.get(), world.get(), run.sequence,
                    action.ticket);
  }
  if (!gangs_->at(index).status.ok()) return FinishGang(index, now);
  for (RunHandle handle : action.runs) {
    if (RunState* run = table_->Find(handle)) ReleaseConsumers(run, now);
  }
  if (gangs_->at(index).launches_left == 0) FinishGang(index, now);
}

bool Runs::AwaitsGangs(RunState* run) {
  if (run->donations.empty()) return false;
  CountWork(static_cast<int64_t>(run->inputs.size()));
  for (const CellRef& cell : run->inputs) {
    if (cell == nullptr || cell->settled()) continue;
    const RunState* const producer = table_->Find(cell->producer);
    if (producer == nullptr || producer->gang < 0) continue;
    if (gangs_->at(producer->gang).fails_unseen) preparer_->Await(cell, run);
  }
  return run->blockers > 0;
}

void Runs::LaunchLocal(RunState* run, absl::Time now) {
  if (AwaitsGangs(run)) return;
  CountWork(WorkOf(*run));
  const int32_t index = gangs_->LaunchLocal(run, now);
  failures_->Note(FlightKind::kLaunched, now, run->session.get(), nullptr, run->sequence);
  if (!gangs_->at(index).status.ok()) return FinishGang(index, now);
  ReleaseConsumers(run, now);
}

void Runs::OnReserve(const std::shared_ptr<World>&, const SequencerAction& action, absl::Time now) {
  FollowOrder(action.run, action.order, absl::OkStatus(), now);
}

// A gang that has closed stands still until its runs are ready: the order stays what it is.
void Runs::FollowOrder(RunHandle handle, const std::vector<int32_t>& order,
                       const absl::Status& planned, absl::Time now) {
  RunState* const run = table_->Find(handle);
  if (run == nullptr || run->phase != RunState::Phase::kVoted || HasEnded(*run)) return;
  const auto wait = [&]() -> absl::StatusOr<GraphStore::OnMade> {
    return GraphStore::OnMade([this, handle, order](const absl::Status& status) {
      FollowOrder(handle, order, status, clock_->now);
    });
  };
  const absl::StatusOr<bool> follows = preparer_->FollowOrder(run, order, {planned, wait});
  if (run->patience.Waits(follows.status(), now)) {
    return storage_->AwaitMemory(
        *run->session->tenant, run->patience.until(),
        [this, handle, order] { FollowOrder(handle, order, absl::OkStatus(), clock_->now); });
  }
  if (!follows.ok()) return RefuseVote(run, follows.status(), now);
  if (*follows) run->world->agreement->Reserved(handle, now);
}

void Runs::OnFail(const std::shared_ptr<World>& world, const SequencerAction& action,
                  absl::Time now) {
  for (const InstanceKey& key : action.dropped) world->shared.Erase(key);
  RunState* const run = table_->Find(action.run);
  if (run == nullptr) return;
  Error error = *action.error;
  if (action.open_epoch != Epoch()) SayOpenEpoch(*world, action.open_epoch, &error);
  if (run->launches_left > 0) gangs_->Abort(run->gang, ToStatus(error), now);
  std::shared_ptr<const Error> common;
  if (last_failed_.cause.lock() == action.error && last_failed_.open_epoch == action.open_epoch) {
    common = last_failed_.common.lock();
  }
  Fail(run, error, now, &common);
  last_failed_ = {action.error, action.open_epoch, common};
}

void Runs::OnWarn(const std::shared_ptr<World>& world, const SequencerAction& action,
                  absl::Time now) {
  // A vote may bring as many as a world may ever have.
  const bool writes_down = world->warns();
  if (!writes_down && SliceWork() <= options_->fail_work) {
    return Warn(*world, *action.error, failures_, now);
  }
  world->AddWarning(action.error);
  if (!writes_down) AfterFailing(world->tenant, [this, world] { WriteDown(world); });
}

void Runs::WriteDown(const std::shared_ptr<World>& world) {
  do {
    Warn(*world, *world->TakeWarning(), failures_, clock_->now);
  } while (world->warns() && SliceWork() <= options_->fail_work);
  if (world->warns()) return AfterFailing(world->tenant, [this, world] { WriteDown(world); });
  world->TakeBeyond();  // and gives it back
}

void Runs::OnEpochEnded(const std::shared_ptr<World>& world, SequencerAction* action,
                        absl::Time now) {
  if (action->remaining_rows > Agreement::kRowsAtOnce) {
    // Nobody makes more before this is gone, which is charged until then: a member may ask for
    // something that does not wait for its log.
    auto charge = std::make_shared<Charge>(world->TakeBeyond());
    background_->Do(
        /*tenant=*/"", [remains = std::move(action->remains)] {},
        [charge = std::move(charge), let_go_on = fail_turns_.HoldBackAll(*world)] {
          *charge = Charge();
          let_go_on();
        });
  }
  Error error = *action->error;
  SayOpenEpoch(*world, action->open_epoch, &error);
  const auto ended = std::make_shared<Ended>();
  ended->world = world;
  ended->epoch = action->epoch;
  ended->runs = std::move(action->runs);
  ended->error = error;
  const bool all_have_failed = FailThose(ended, /*goes_on=*/false, now);
  const bool fails_later =
      !all_have_failed || world->shared.size() > kLetGoAtOnce ||
      world->equal_work.size() > kLetGoAtOnce ||
      std::any_of(world->members.begin(), world->members.end(), [](const World::Member& m) {
        return m.session != nullptr && m.session->failing > 0;
      });
  if (fails_later) {
    // A rank that goes on in the next epoch has the ended epoch's memory, also what ranks had in
    // common.
    LetGoOf(world->tenant, std::exchange(world->shared, {}), this);
    LetGoOf(world->tenant, std::exchange(world->equal_work, {}), this);
    AfterFailing(world->tenant, fail_turns_.HoldBackAll(*world));
  }
  world->shared.Clear();
  world->equal_work.Clear();
  failures_->Record(nullptr, world.get(), &error);
  failures_->Note(FlightKind::kEpochEnded, now, nullptr, world.get(), Sequence(), Ticket(),
                  error.id);
}

// --- The end ------------------------------------------------------------------------------------

void Runs::Complete(const CompletionMessage& completion, absl::Time now) {
  const absl::optional<int32_t> gang = gangs_->Complete(completion, now);
  if (gang.has_value()) FinishGang(*gang, now);
}

void Runs::ReleaseConsumers(RunState* run, absl::Time now) {
  if (run->consumers.empty()) return;
  absl::InlinedVector<RunHandle, 2> consumers;
  consumers.swap(run->consumers);
  Follow(consumers, nullptr, now);
}

void Runs::Follow(absl::Span<const RunHandle> consumers, std::shared_ptr<const Error> failed,
                  absl::Time now) {
  for (RunHandle consumer : consumers) {
    const RunState* const run = table_->Find(consumer);
    if (run == nullptr) continue;
    if (failed != nullptr) {
      failed_next_.push_back({consumer, failed});
    } else {
      next_.Push(run->session->tenant->name, consumer);
    }
  }
  if (following_) return;
  following_ = true;
  while (!failed_next_.empty() || (!next_.empty() && SliceWork() <= options_->fail_work)) {
    CountWork(1);
    if (failed_next_.empty()) {
      Unblock(next_.Pop(), now);
      continue;
    }
    Next next = std::move(failed_next_.front());
    failed_next_.pop_front();
    RunState* const run = table_->Find(next.run);
    if (run == nullptr) continue;
    if (run->phase == RunState::Phase::kWaiting) {
      Fail(run, *next.failed, now, &next.failed);
    } else if (run->phase == RunState::Phase::kVoted && !HasEnded(*run)) {
      RefuseAwaiting(run, std::move(next.failed), now);
    } else if (run->phase == RunState::Phase::kLaunched) {
      gangs_->Fail(*run, ToStatus(*next.failed));
    }
  }
  following_ = false;
}

// A device may be done with a gang before others are with those whose results it reads, and with
// them it may have read what will have failed. True: the gang is finished later.
bool Runs::AwaitInputs(const Gang& gang, int32_t index) {
  for (RunHandle handle : gang.runs) {
    for (const CellRef& input : table_->Find(handle)->inputs) {
      if (input == nullptr || input->settled()) continue;
      const RunState* const producer = table_->Find(input->producer);
      if (producer != nullptr && producer->gang == index) continue;  // they are complete together
      input->on_settled.Add([this, index](const CellRef&) {
        finishing_.Push(TenantOf(gangs_->at(index), table_), index);
      });
      return true;
    }
  }
  return false;
}

void Runs::FinishGang(int32_t index, absl::Time now) {
  Gang& gang = gangs_->at(index);
  absl::Status status;
  if (gang.num_published == 0) {
    if (AwaitInputs(gang, index)) return;
    CHORUS_FAILPOINT("node.before_publish");
    // What was computed from a result that failed is no result either, and has failed for that
    // reason, whatever else its devices say.
    for (RunHandle handle : gang.runs) {
      for (const CellRef& input : table_->Find(handle)->inputs) {
        if (!status.ok()) break;
        if (input != nullptr && input->state == Cell::State::kFailed) {
          status = ToStatus(*input->error);
        }
      }
    }
    status.Update(gang.status);
  }
  const std::shared_ptr<World> world = gang.world;
  if (status.ok()) {
    // Before its runs, which may take more than a slice: it is not late any more.
    if (gang.num_published == 0 && world != nullptr) {
      world->agreement->Finished(gang.ticket, status, now);
    }
    do {
      RunState* const run = table_->Find(gang.runs[gang.num_published++]);
      if (run->failed || run->failing) continue;
      Publish(run, now);
      run->intos.empty() ? End(run) : WriteOut(run);
    } while (gang.num_published < gang.runs.size() && SliceWork() <= options_->fail_work);
    if (gang.num_published < gang.runs.size()) return finishing_.Push(world->tenant, index);
  } else {
    status = ExecFailure(status);
    gangs_->Abort(index, status, now);
    Error error = ErrorOf(status);
    if (world != nullptr) {
      const Epoch epoch = world->agreement->epoch();
      world->agreement->Finished(gang.ticket, status, now);
      // The sequencer's actions may be for later: its members enter the epoch by what they get
      // here.
      SayOutcome(epoch, *world, failures_, &error);
    }
    std::shared_ptr<const Error> common;
    for (RunHandle handle : gang.runs) Fail(table_->Find(handle), error, now, &common);
  }
  EndGang(index);
}

void Runs::EndGang(int32_t index) {
  const Gang& gang = gangs_->at(index);
  const auto of_it = [&](RunHandle handle) -> RunState* {
    RunState* const run = table_->Find(handle);
    return run != nullptr && run->gang == index ? run : nullptr;
  };
  for (RunHandle handle : gang.runs) {
    const RunState* const run = of_it(handle);
    if (run == nullptr || run->failed) continue;
    // Nobody wants its memory before.
    const std::string& tenant = run->session->tenant->name;
    std::function<void()> let_go_on;
    if (gang.world != nullptr) {
      let_go_on = fail_turns_.HoldBackAll(*gang.world);
    } else {
      FailTurns::HoldBack(run->session.get());
      let_go_on = [this, session = run->session] { fail_turns_.LetGoOn(session); };
    }
    return AfterFailing(tenant, [this, index, let_go_on = std::move(let_go_on)] {
      EndGang(index);
      let_go_on();
    });
  }
  for (RunHandle handle : gang.runs) {
    CountWork(kWorkPerRun);
    if (RunState* const run = of_it(handle)) End(run);
  }
  gangs_->Recycle(index);
  CHORUS_FAILPOINT("node.after_publish");
}

void Runs::Publish(RunState* run, absl::Time now) {
  Session* session = run->session.get();
  CountWork(WorkOf(*run));
  ++stats_->runs_published;
  for (const RunState::Donation& donation : run->donations) {
    stats_->paths.donated_bytes += run->inputs[static_cast<size_t>(donation.input)]->bytes;
  }
  run->donations.clear();
  for (size_t i = 0; i < run->outputs.size(); ++i) {
    Cell* cell = run->outputs[i].get();
    if (cell == nullptr) continue;
    cell->state = Cell::State::kReady;
    cell->launch = LaunchId();
    // The next step may have been given its memory already: then the name stands for that error.
    const bool name_replaced =
        cell->donated_to != Sequence() && !session->names.StandsFor(run->output_ids[i], *cell);
    if (!session->dead() && !name_replaced) session->names.Publish(run->output_ids[i], *cell);
  }
  failures_->Note(FlightKind::kPublished, now, session, run->world.get(), run->sequence,
                  run->ticket);
  if (!session->dead() && run->intos.empty()) session->log.Finish(run->sequence);
  for (const CellRef& cell : run->outputs) {
    if (cell != nullptr) Settled(cell, session->tenant->name);
  }
}

void Runs::Settled(const CellRef& cell, const std::string& tenant) {
  while (!cell->on_settled.empty() && SliceWork() <= options_->fail_work) {
    CountWork(kWorkPerWaiter);
    cell->on_settled.CallNext(cell);
  }
  if (!cell->on_settled.empty()) settled_.Push(tenant, {cell, tenant});
}

void Runs::WriteOut(RunState* run) {
  const RunHandle handle = run->handle;
  run->phase = RunState::Phase::kWriting;
  run->gang = -1;
  run->outputs.clear();  // whatever comes of the copies, these are there
  // The last one ends the run, perhaps at once: not before all have begun.
  run->writes_left = static_cast<int32_t>(run->intos.size()) + 1;
  storage_->InTurns([this, handle, next = size_t{0}]() mutable {
    const RunState* const writer = table_->Find(handle);
    if (writer == nullptr || next == writer->intos.size()) {
      Written(handle, absl::OkStatus());
      return false;
    }
    const RunState::Into& into = writer->intos[next++];
    const auto i = static_cast<size_t>(into.output);
    const Plan::Output& output = writer->plan->plan.outputs[i];
    if (output.bytes == 0) {
      Written(handle, absl::OkStatus());
      return true;
    }
    const DeviceAddress address = writer->addresses[static_cast<size_t>(output.buffer)] +
                                  static_cast<DeviceAddress>(output.offset);
    storage_->WriteOut(
        *writer->session->tenant, writer->devices[static_cast<size_t>(output.device_slot)], address,
        *writer->graph->output_types[i], into.target,
        // Another copy may fail and end the run: what this one reads stays until then.
        [this, handle, kept = writer->refs[static_cast<size_t>(output.buffer)]](
            const absl::Status& status) { Written(handle, status); });
    return true;
  });
}

void Runs::Written(RunHandle handle, const absl::Status& status) {
  RunState* const run = table_->Find(handle);
  if (run == nullptr) return;  // it has failed by another of its copies, or with the node
  if (!status.ok()) return Fail(run, ErrorOf(ExecFailure(status)), clock_->now);
  if (--run->writes_left > 0) return;
  if (!run->session->dead()) run->session->log.Finish(run->sequence);
  End(run);
}

void Runs::Fail(RunState* run, const Error& cause, absl::Time now,
                std::shared_ptr<const Error>* common) {
  if (run->failed || run->failing || run->phase == RunState::Phase::kFailing) return;
  if (run->session->failing == 0 && SliceWork() <= options_->fail_work) {
    return FailAtOnce(run, cause, now);
  }
  CountWork(kWorkPerRun);
  std::shared_ptr<const Error> run_error;
  if (common == nullptr) common = &run_error;
  if (*common == nullptr) {
    Error error = cause;
    // The record has its texts, also where there is no memory to keep them here.
    failures_->Record(run->session.get(), run->world.get(), &error);
    *common = run->session->names.Keep(std::move(error));
  }
  if (run->phase < RunState::Phase::kLaunched) {
    run->phase = RunState::Phase::kFailing;
  } else {
    run->failing = true;
  }
  FailTurns::HoldBack(run->session.get());
  auto fail = [this, handle = run->handle, session = run->session, kept = *common] {
    if (RunState* const later = table_->Find(handle)) FailAtOnce(later, *kept, clock_->now);
    fail_turns_.LetGoOn(session);
  };
  AfterFailing(run->session->tenant->name, std::move(fail));
}

// A launched run stays until its gang ends.
void Runs::FailAtOnce(RunState* run, const Error& cause, absl::Time now) {
  run->failed = true;
  CountWork(WorkOf(*run) + kWorkPerFailure);
  const std::shared_ptr<Session> session = run->session;
  Error error = cause;
  failures_->Record(session.get(), run->world.get(), &error);
  ++stats_->runs_failed;
  const std::shared_ptr<const Error> kept_error = session->names.Keep(error);
  if (run->launches_left == 0) donations_->Return(run);
  // What an epoch that has ended had in common has gone with it.
  if (run->gang < 0 && run->world != nullptr && !HasEnded(*run)) equal_work_->Leave(run);
  for (size_t i = 0; i < run->outputs.size(); ++i) {
    Cell* cell = run->outputs[i].get();
    if (cell == nullptr) continue;
    cell->state = Cell::State::kFailed;
    cell->error = kept_error;
    cell->buffer = BufferRef();
    if (!session->dead()) session->names.Publish(run->output_ids[i], *cell);
  }
  failures_->Note(FlightKind::kFailed, now, session.get(), run->world.get(), run->sequence,
                  run->ticket, error.id);
  if (!session->dead()) session->log.Finish(run->sequence, error);
  const absl::InlinedVector<CellRef, 2> outputs = run->outputs;
  absl::InlinedVector<RunHandle, 2> consumers;
  consumers.swap(run->consumers);
  if (run->gang < 0) End(run);
  for (const CellRef& cell : outputs) {
    if (cell != nullptr) Settled(cell, session->tenant->name);
  }
  Follow(consumers, kept_error, now);
}

bool Runs::FailThose(const std::shared_ptr<Ended>& ended, bool goes_on, absl::Time now) {
  const std::string& tenant = ended->world->tenant;
  bool has_time = goes_on || SliceWork() <= options_->fail_work;
  for (; ended->next < ended->runs.size() && has_time; ++ended->next) {
    CountWork(1);
    RunState* const run = table_->Find(ended->runs[ended->next]);
    // Others have failed by themselves, and nothing is kept for them.
    if (run != nullptr && run->world == ended->world && run->vote.epoch == ended->epoch &&
        run->phase == RunState::Phase::kVoted) {
      if (!goes_on && fail_turns_.Has(tenant)) break;
      FailAtOnce(run, ended->error, now);
    }
    has_time = SliceWork() <= options_->fail_work;
  }
  if (ended->next == ended->runs.size()) return true;
  const auto rest = [this, ended] { FailThose(ended, /*goes_on=*/true, clock_->now); };
  goes_on ? fail_turns_.AddRest(tenant, rest) : fail_turns_.Add(tenant, rest);
  return false;
}

bool Runs::Continue(absl::Time now) {
  const auto is_idle = [this] {
    return fail_turns_.empty() && next_.empty() && finishing_.empty() && settled_.empty();
  };
  if (is_idle()) return false;
  // Kinds take turns, so that none waits for all of another. One may be all that a slice has time
  // for, so each turn looks at the time.
  do {
    turn_ = (turn_ + 1) % 4;
    if (turn_ == 0 && !fail_turns_.empty()) {
      fail_turns_.Take();
    } else if (turn_ == 1 && !next_.empty()) {
      // Others behind it come in this slice as it has time.
      Unblock(next_.Pop(), now);
      Follow({}, nullptr, now);
    } else if (turn_ == 2 && !finishing_.empty()) {
      FinishGang(finishing_.Pop(), now);
    } else if (turn_ == 3 && !settled_.empty()) {
      const SettledCell settled = settled_.Pop();
      CountWork(kWorkPerWaiter);
      settled.cell->on_settled.CallNext(settled.cell);
      Settled(settled.cell, settled.tenant);
    }
  } while (!is_idle() && SliceWork() <= options_->fail_work);
  return true;
}

void Runs::End(RunState* run) {
  donations_->Return(run);
  for (const auto& tensor : run->awaited) tensor.first->on_settled.Remove(tensor.second);
  Session& session = *run->session;
  const RunHandle last = session.runs.back();
  session.runs[run->index] = last;
  table_->Find(last)->index = run->index;
  session.runs.pop_back();
  session.run_bytes -= run->bytes;
  // Less never fails.
  (void)session.run_charge.Cover(session.run_bytes);
  const std::shared_ptr<Session> dead_session = session.dead() ? run->session : nullptr;
  table_->Remove(run->handle);
  // What its other runs do may be wanted no more. Once for all that end together.
  if (dead_session == nullptr || std::exchange(dead_session->looks_for_unwanted, true)) return;
  AfterFailing(dead_session->tenant->name, [this, dead_session] {
    dead_session->looks_for_unwanted = false;
    gangs_->AbandonAllOf(*dead_session);
  });
}

// --- By the session or the node -----------------------------------------------------------------

void Runs::Cancel(const Session& session, Sequence sequence, absl::Time now) {
  RunState* target = nullptr;
  CountWork(static_cast<int64_t>(session.runs.size()) / kRunsOfWork);
  for (RunHandle handle : session.runs) {
    RunState* const run = table_->Find(handle);
    if (run->sequence == sequence) target = run;
  }
  // Ended, as good as ended, or launched: commit wins.
  if (target == nullptr || target->phase >= RunState::Phase::kFailing) return;
  if (target->phase == RunState::Phase::kWaiting) {
    Fail(target,
         ErrorOf(MakeError(Reason::kCancelled,
                           absl::StrCat("run ", sequence.value(), " was cancelled"))),
         now);
    return;
  }
  target->world->agreement->Cancel(target->handle, RankOf(*target), now);
}

void Runs::EndAllOf(const Session& session, const Error& why, absl::Time now) {
  const std::vector<RunHandle> runs = session.runs;
  std::shared_ptr<const Error> common;
  for (RunHandle handle : runs) {
    RunState* const run = table_->Find(handle);
    if (run != nullptr && run->phase == RunState::Phase::kWaiting) Fail(run, why, now, &common);
  }
  gangs_->AbandonAllOf(session);
}

std::vector<RunHandle> Runs::VotedFor(const World& world, const Session& session, Rank rank) {
  const bool was_last =
      std::none_of(session.memberships.begin(), session.memberships.end(),
                   [&world](const Session::Membership& m) { return m.world.get() == &world; });
  std::vector<RunHandle> voted;
  for (RunHandle handle : session.runs) {
    const RunState* const run = table_->Find(handle);
    if (run->world.get() != &world || run->phase != RunState::Phase::kVoted) continue;
    const absl::Span<const Rank> ranks = world.agreement->RanksOf(handle);
    const bool speaks_for_it = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    if (speaks_for_it || (ranks.empty() && was_last)) voted.push_back(handle);
  }
  return voted;
}

void Runs::FailAll(const Error& why, absl::Time now) {
  std::vector<RunHandle> handles;
  table_->ForEach([&handles](RunState* run) { handles.push_back(run->handle); });
  std::shared_ptr<const Error> common;
  for (RunHandle handle : handles) {
    if (RunState* run = table_->Find(handle)) Fail(run, why, now, &common);
  }
  while (!fail_turns_.empty() || !next_.empty()) Continue(now);
}

}  // namespace chorus::node
