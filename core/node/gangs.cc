#include "core/node/gangs.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/failpoint.h"
#include "core/base/work.h"
#include "core/collective/order.h"
#include "core/node/session.h"

namespace chorus::node {
namespace {

// A kernel's failure as all ranks are told it: with the rank that it is of, where that is known. A
// device that is lost is nobody's fault.
absl::Status FailureOf(const RunState& run, const absl::Status& status) {
  if (ErrorOf(status).reason == Reason::kDeviceLost) return status;
  const Session::Membership* member = nullptr;
  for (const Session::Membership& membership : run.session->memberships) {
    // Of a local run: the session's only rank, where it has one.
    if (run.world != nullptr && membership.world != run.world) continue;
    if (member != nullptr) return status;
    member = &membership;
  }
  if (member == nullptr) return status;
  Error error = ErrorOf(status);
  error.message = absl::StrCat("rank ", member->rank.value(), ": ", error.message);
  error.culprit.rank = static_cast<int32_t>(member->rank.value());
  error.culprit.pid = run.session->request.pid;
  return ToStatus(error);
}

DeviceIndex DeviceOf(const RunState& run, int32_t participation) {
  const Participation& part =
      run.plan->plan.votes->participations[static_cast<size_t>(participation)];
  const GroupSlot& group = run.graph->graph.group_slots[static_cast<size_t>(part.group_slot)];
  const auto member = std::find(group.held.begin(), group.held.end(), part.member);
  const auto index = static_cast<size_t>(member - group.held.begin());
  return run.devices[static_cast<size_t>(group.device_slots[index])];
}

// Which of the instance's calls that participation of the run is.
int32_t CallOf(const LaunchedInstance& instance, const RunState& run, int32_t participation) {
  const auto part = std::find_if(
      instance.parts.begin(), instance.parts.end(), [&](const LaunchedInstance::Part& one) {
        return one.run == run.handle && one.participation <= participation &&
               participation < one.participation + instance.count;
      });
  return participation - part->participation;
}

}  // namespace

int32_t Gangs::New() {
  if (free_.empty()) {
    gangs_.push_back(std::make_unique<Gang>());
    return static_cast<int32_t>(gangs_.size()) - 1;
  }
  const int32_t index = free_.back();
  free_.pop_back();
  std::unique_ptr<Gang>& gang = gangs_[static_cast<size_t>(index)];
  if (gang == nullptr) gang = std::make_unique<Gang>();
  return index;
}

void Gangs::Recycle(int32_t index) {
  Gang& gang = at(index);
  for (const LaunchId launch : gang.launches) {
    const auto it = launches_.find(launch);
    // Runs that follow are told of a launch only while its results are on their way.
    if (!gang.status.ok()) launcher_->executor(it->second.device)->Settled(launch);
    launches_.erase(it);
  }
  if (launches_.empty() && launches_.capacity() > kKeptLaunches) {
    launches_ = decltype(launches_)();
  }
  timers_->Cancel(gang.watch);
  if (free_.size() < kKeptGangs) {
    gang.Recycle();
  } else {
    gangs_[static_cast<size_t>(index)].reset();
  }
  free_.push_back(index);
}

// --- Launch: the point of no return -------------------------------------------------------------

int32_t Gangs::Launch(const std::shared_ptr<World>& world, const SequencerAction& action,
                      absl::Time now) {
  CHORUS_FAILPOINT("node.before_launch");
  const int32_t index = New();
  Gang& gang = at(index);
  gang.world = world;
  gang.launched = now;
  gang.ticket = action.ticket;
  gang.runs.assign(action.runs.begin(), action.runs.end());
  absl::InlinedVector<RunState*, 8> members;
  for (RunHandle handle : action.runs) {
    RunState* const run = runs_->Find(handle);
    run->phase = RunState::Phase::kLaunched;
    run->ticket = action.ticket;
    run->gang = index;
    run->instances.assign(run->plan->plan.votes->participations.size(), nullptr);
    members.push_back(run);
  }
  for (const LaunchedInstance& instance : action.instances) {
    for (const LaunchedInstance::Part& part : instance.parts) {
      const auto first = runs_->Find(part.run)->instances.begin() + part.participation;
      std::fill(first, first + instance.count, &instance);
    }
    for (int32_t call = 0; call < instance.count; ++call) world->shared.Erase(instance.KeyAt(call));
  }
  if (at_once_.Takes(action, members)) {
    gang.status = RunAtOnce(action, members);
  } else {
    LaunchOnDevices(action, members, &gang);
  }
  CHORUS_FAILPOINT("node.after_launch");
  for (RunState* run : members) run->instances.clear();
  return index;
}

void Gangs::LaunchOnDevices(const SequencerAction& action, absl::Span<RunState* const> members,
                            Gang* gang) {
  gang->status = PrepareGang(action, members, gang);
  // From here on every device gets its part, in ticket order. A failure so far launches nothing.
  if (gang->status.ok()) {
    for (RunHandle handle : action.donating) donations_->Take(runs_->Find(handle));
    for (RunState* run : members) gang->launches_left += run->launches_left;
    for (RunState* run : members) LaunchRun(run);
    gang->fails_unseen |= gang->launches.size() > 1 && gang->commit == CommunicatorId();
  } else {
    for (RunState* run : members) run->launches_left = 0;
  }
}

absl::Status Gangs::RunAtOnce(const SequencerAction& action, absl::Span<RunState* const> members) {
  CHORUS_RETURN_IF_ERROR(FindBytes(action, members));
  for (const RunState* run : members) launcher_->CountLaunch(run->devices.front());
  return at_once_.Run(action);
}

// Everything that may fail before the devices hear of the gang.
absl::Status Gangs::PrepareGang(const SequencerAction& action, absl::Span<RunState* const> members,
                                Gang* gang) {
  gang->lease = LeaseFor(*members.front());
  CHORUS_RETURN_IF_ERROR(CheckMeetings(members));
  CHORUS_RETURN_IF_ERROR(equal_work_->Deal(members, gang->lease.get()));
  CHORUS_RETURN_IF_ERROR(FindBytes(action, members));
  if (!action.donating.empty()) {
    CHORUS_RETURN_IF_ERROR(JoinCommit(members, gang));
  }
  for (RunState* run : members) {
    CHORUS_RETURN_IF_ERROR(PrepareLaunch(run, gang));
  }
  return absl::OkStatus();
}

int32_t Gangs::LaunchLocal(RunState* run, absl::Time now) {
  const int32_t index = New();
  Gang& gang = at(index);
  gang.launched = now;
  gang.runs.push_back(run->handle);
  run->phase = RunState::Phase::kLaunched;
  run->gang = index;
  if (run->devices.size() > 1) gang.lease = LeaseFor(*run);
  gang.status = BindInputs(run);
  if (gang.status.ok()) {
    PlaceOutputs(run);
    gang.status = PrepareLaunch(run, &gang);
  }
  if (gang.status.ok()) {
    donations_->Take(run);
    gang.launches_left = run->launches_left;
    LaunchRun(run);
    gang.fails_unseen |= gang.launches.size() > 1;
  } else {
    run->launches_left = 0;
  }
  return index;
}

// A device does one run after the other. Where it has several of a gang, and values are copied
// between the devices of one of them, an order of the gang's instances does not yet say that all
// get through: a copy may have to wait for a run behind its own.
absl::Status Gangs::CheckMeetings(absl::Span<RunState* const> members) const {
  const auto copies = [](const RunState* run) { return !run->plan->plan.meetings.empty(); };
  if (members.size() < 2 || std::none_of(members.begin(), members.end(), copies) ||
      !DevicesOf(members).empty()) {
    return absl::OkStatus();
  }
  // An instance, and which of its calls; or of a run: from which slot to which, the how-many-th
  // copy.
  using Meeting = std::tuple<const void*, int32_t, int32_t, int32_t>;
  absl::flat_hash_map<Meeting, int32_t> meeting_index;
  std::vector<std::vector<int32_t>> calls(static_cast<size_t>(launcher_->device_count()));
  for (const RunState* run : members) {
    const Plan& plan = run->plan->plan;
    for (size_t slot = 0; slot < run->devices.size(); ++slot) {
      const auto device = static_cast<size_t>(run->devices[slot].value());
      const std::vector<Plan::CollectiveSlot>& collectives = plan.collectives[slot];
      std::vector<int32_t> order(collectives.size());
      std::iota(order.begin(), order.end(), 0);
      if (copies(run)) order = plan.meetings[slot];
      std::vector<int32_t> num_copies(collectives.size(), 0);
      for (const int32_t b : order) {
        const Plan::CollectiveSlot& call = collectives[static_cast<size_t>(b)];
        if (call.equal_work) continue;
        Meeting meeting(run, call.from_slot, call.to_slot, 0);
        if (call.participation >= 0) {
          const LaunchedInstance* const instance =
              run->instances[static_cast<size_t>(call.participation)];
          meeting = Meeting(instance, -1, -1, CallOf(*instance, *run, call.participation));
        } else {
          std::get<3>(meeting) = num_copies[static_cast<size_t>(b)]++;
        }
        const auto next = static_cast<int32_t>(meeting_index.size());
        const int32_t index = meeting_index.emplace(meeting, next).first->second;
        // A rank that sends to itself takes part once.
        const bool is_again =
            call.participation >= 0 && !calls[device].empty() && calls[device].back() == index;
        if (!is_again) calls[device].push_back(index);
      }
    }
  }
  const int32_t stuck = FindStuck(calls);
  if (stuck < 0) return absl::OkStatus();
  return MakeError(
      Reason::kOrderCycle,
      absl::StrCat("no order lets device ", stuck,
                   " execute its runs one after the other: a compiled function copies values "
                   "between devices that have other calls of the same collectives before or behind "
                   "it. Compile the same collectives together"));
}

// What one device of the gang finds wrong keeps all of them from writing where donated inputs
// stand. (Where a device has two runs of the gang each knows of its own failures alone.)
absl::Status Gangs::JoinCommit(absl::Span<RunState* const> members, Gang* gang) {
  absl::InlinedVector<DeviceIndex, 8> devices = DevicesOf(members);
  if (devices.size() < 2) return absl::OkStatus();
  // Descending, so that it is most often no group's: a veto breaks the one that it is spoken in.
  std::reverse(devices.begin(), devices.end());
  CHORUS_ASSIGN_OR_RETURN(gang->commit, gang->lease->Of(devices));
  gang->communicators.push_back(gang->commit);
  return absl::OkStatus();
}

// Finds the bytes of a gang's runs. Instances come in launch order, and a run that consumes what
// another one of its gang computes has its instances behind that one's, local runs in between stand
// between: so when an instance's turn comes, all that its operands may stand in has been found.
absl::Status Gangs::FindBytes(const SequencerAction& action, absl::Span<RunState* const> members) {
  size_t next = 0;
  for (const LaunchedInstance& instance : action.instances) {
    for (const LaunchedInstance::Part& part : instance.parts) {
      const RunState* const run = runs_->Find(part.run);
      while (run != nullptr && !run->inputs_bound) {
        CHORUS_RETURN_IF_ERROR(BindInputs(members[next++]));
      }
    }
    CHORUS_RETURN_IF_ERROR(ResolvePeers(instance));
  }
  for (; next < members.size(); ++next) CHORUS_RETURN_IF_ERROR(BindInputs(members[next]));
  for (RunState* run : members) PlaceOutputs(run);
  return absl::OkStatus();
}

// Not where it is to fail, and its session is told later: when others have had their turn, or,
// where its gang has failed, when its inputs are there. Its results may have no bytes then, or be
// where what it was to take over still stands.
bool Gangs::IsLaunched(const RunState& run) {
  return run.phase == RunState::Phase::kLaunched && at(run.gang).status.ok();
}

// Fails where an input has, or will have: its run was launched, or was about to be, when this one's
// turn came.
absl::Status Gangs::BindInputs(RunState* run) {
  if (run->inputs_bound) return absl::OkStatus();
  run->inputs_bound = true;
  for (size_t i = 0; i < run->inputs.size(); ++i) {
    const Cell* cell = run->inputs[i].get();
    if (cell == nullptr) continue;
    if (cell->state == Cell::State::kFailed) return ToStatus(*cell->error);
    RunState* const producer = cell->settled() ? nullptr : runs_->Find(cell->producer);
    if (producer != nullptr && !IsLaunched(*producer)) {
      return MakeError(Reason::kPeerRefused, "a run whose result it reads was not launched");
    }
    if (producer != nullptr && cell->state == Cell::State::kPending) PlaceOutputs(producer);
    run->addresses[i] = cell->address();
    run->refs[i] = cell->buffer;
  }
  return absl::OkStatus();
}

// Finds the bytes that stand with other ranks.
absl::Status Gangs::ResolvePeers(const LaunchedInstance& instance) {
  absl::InlinedVector<RunState*, 16> runs;  // by part
  for (const LaunchedInstance::Part& part : instance.parts) runs.push_back(runs_->Find(part.run));
  for (int32_t call = 0; call < instance.count; ++call) {
    CHORUS_RETURN_IF_ERROR(ResolvePeers(instance, call, runs));
  }
  return absl::OkStatus();
}

absl::Status Gangs::ResolvePeers(const LaunchedInstance& instance, int32_t call,
                                 absl::Span<RunState* const> runs) {
  absl::InlinedVector<int, 1> written_in;                            // domains
  absl::InlinedVector<const LaunchedInstance::Part*, 16> by_member;  // once it is wanted
  for (size_t p = 0; p < instance.parts.size(); ++p) {
    RunState* const run = runs[p];
    if (run == nullptr) continue;
    const int32_t participation = instance.parts[p].participation + call;
    const Plan::Written& written = run->plan->plan.written[static_cast<size_t>(participation)];
    const int domain = domains_->of(DeviceOf(*run, participation));
    const bool is_first =
        std::find(written_in.begin(), written_in.end(), domain) == written_in.end();
    if (is_first) written_in.push_back(domain);
    stats_->paths.reduced_bytes += written.own.reduced;
    stats_->paths.copied_bytes += written.own.copied;
    if (is_first) {
      stats_->paths.reduced_bytes += written.shared.reduced;
      stats_->paths.copied_bytes += written.shared.copied;
    }
    const auto& peers = run->plan->peer_buffers[static_cast<size_t>(participation)];
    if (!peers.empty() && by_member.empty()) {
      for (const LaunchedInstance::Part& other : instance.parts) {
        const auto member = static_cast<size_t>(other.member.value());
        if (member >= by_member.size()) by_member.resize(member + 1);
        by_member[member] = &other;
      }
    }
    for (int32_t buffer : peers) {
      const BufferSpec& spec = run->plan->plan.buffers[static_cast<size_t>(buffer)];
      if (spec.bytes == 0) continue;
      const auto member = static_cast<size_t>(spec.list_member);
      const LaunchedInstance::Part* const peer =
          member < by_member.size() ? by_member[member] : nullptr;
      RunState* owner = peer == nullptr ? nullptr : runs_->Find(peer->run);
      if (owner == nullptr) {
        // A member that abandoned this gradient gives zeros: the launch writes them.
        CHORUS_ASSIGN_OR_RETURN(
            const BufferRef zeros,
            storage_->Allocate(run->session->tenant.get(),
                               run->devices[static_cast<size_t>(spec.device_slot)], spec.bytes));
        run->SetBuffer(static_cast<size_t>(buffer), zeros);
        continue;
      }
      const Plan::Operand& operand =
          owner->plan->plan.operands[static_cast<size_t>(peer->participation + call)]
                                    [static_cast<size_t>(spec.list_index)];
      const size_t from = static_cast<size_t>(operand.buffer);
      run->addresses[static_cast<size_t>(buffer)] =
          owner->addresses[from] + static_cast<DeviceAddress>(operand.offset);
      run->refs[static_cast<size_t>(buffer)] = owner->refs[from];
      stats_->paths.aliased_bytes += spec.bytes;
    }
  }
  return absl::OkStatus();
}

void Gangs::PlaceOutputs(RunState* run) {
  if (run->outputs_bound) return;
  run->outputs_bound = true;
  const Plan& plan = run->plan->plan;
  for (size_t i = 0; i < run->outputs.size(); ++i) {
    Cell* cell = run->outputs[i].get();
    if (cell == nullptr) continue;
    const Plan::Output& output = plan.outputs[i];
    cell->state = Cell::State::kLaunched;
    if (output.bytes == 0) continue;
    const size_t buffer = static_cast<size_t>(output.buffer);
    cell->buffer = run->refs[buffer];
    // An address says where in its buffer it lies: an alias may start anywhere in it.
    cell->offset =
        static_cast<int64_t>(run->addresses[buffer] - cell->buffer->address()) + output.offset;
  }
}

// Everything that may fail before the devices hear of the run.
absl::Status Gangs::PrepareLaunch(RunState* run, Gang* gang) {
  const Plan& plan = run->plan->plan;
  run->launches.resize(run->devices.size());
  for (size_t slot = 0; slot < run->devices.size(); ++slot) {
    LaunchMessage& message = run->launches[slot];
    message.commit = gang->commit;
    CHORUS_ASSIGN_OR_RETURN(
        message.plan, launcher_->PlanOn(*run->plan, static_cast<int>(slot), run->devices[slot]));
    for (const Plan::CollectiveSlot& collective : plan.collectives[slot]) {
      message.collectives.emplace_back();
      LaunchMessage::CollectiveBinding& binding = message.collectives.back();
      CHORUS_RETURN_IF_ERROR(BindCommunicator(*run, collective, gang->lease.get(), &binding));
      std::vector<CommunicatorId>& communicators = gang->communicators;
      if (binding.communicator != CommunicatorId() &&
          (communicators.empty() || communicators.back() != binding.communicator)) {
        communicators.push_back(binding.communicator);
      }
    }
  }
  run->launches_left = static_cast<int32_t>(run->devices.size());
  return absl::OkStatus();
}

absl::Status Gangs::BindCommunicator(const RunState& run, const Plan::CollectiveSlot& collective,
                                     CommunicatorLease* lease,
                                     LaunchMessage::CollectiveBinding* binding) {
  absl::InlinedVector<DeviceIndex, 8> devices;
  if (collective.equal_work) {
    binding->communicator = run.equal_communicator;
    return absl::OkStatus();
  }
  if (collective.participation < 0) {
    devices = {run.devices[static_cast<size_t>(collective.from_slot)],
               run.devices[static_cast<size_t>(collective.to_slot)]};
  } else {
    const LaunchedInstance& instance =
        *run.instances[static_cast<size_t>(collective.participation)];
    if (!instance.key.is_pair()) {
      CHORUS_ASSIGN_OR_RETURN(const absl::Span<const Rank> ranks,
                              run.world->agreement->GroupMembers(instance.key.group));
      const Participation& part =
          run.plan->plan.votes->participations[static_cast<size_t>(collective.participation)];
      binding->rank = static_cast<int32_t>(ranks[static_cast<size_t>(part.member.value())].value());
      if (!instance.absent.empty()) {
        for (const LaunchedInstance::Part& part : instance.parts) {
          binding->present.push_back(part.member.value());
        }
      }
      CHORUS_ASSIGN_OR_RETURN(binding->communicator,
                              GroupCommunicator(*run.world, instance.key.group, lease));
      return absl::OkStatus();
    }
    CHORUS_ASSIGN_OR_RETURN(const absl::Span<const Rank> members,
                            run.world->agreement->GroupMembers(instance.key.group));
    // The lower group rank is the pair's member 0.
    const GroupRank low = std::min(instance.key.source, instance.key.destination);
    const GroupRank high = std::max(instance.key.source, instance.key.destination);
    if (!instance.absent.empty()) {
      for (const LaunchedInstance::Part& part : instance.parts) {
        binding->present.push_back(part.member == low ? 0 : 1);
      }
    }
    for (GroupRank end : {low, high}) {
      const Rank rank = members[static_cast<size_t>(end.value())];
      devices.push_back(run.world->members[static_cast<size_t>(rank.value())].device);
    }
  }
  CHORUS_ASSIGN_OR_RETURN(binding->communicator, lease->Of(devices));
  return absl::OkStatus();
}

// Of what the run's communicators must not be shared beyond: its world, or its session.
std::shared_ptr<CommunicatorLease> Gangs::LeaseFor(const RunState& run) {
  std::shared_ptr<CommunicatorLease>& lease =
      run.world != nullptr ? run.world->communicators : run.session->communicators;
  if (lease == nullptr) {
    lease = launcher_->LeaseCommunicators(run.world != nullptr ? run.session->tenant->budget
                                                               : run.session->budget);
  }
  return lease;
}

absl::StatusOr<CommunicatorId> Gangs::GroupCommunicator(const World& world, GroupId group,
                                                        CommunicatorLease* lease) {
  if (const CommunicatorId communicator = lease->OfGroup(group); communicator != CommunicatorId()) {
    return communicator;
  }
  CHORUS_ASSIGN_OR_RETURN(const absl::Span<const Rank> members,
                          world.agreement->GroupMembers(group));
  std::vector<DeviceIndex> devices;
  for (Rank rank : members) {
    devices.push_back(world.members[static_cast<size_t>(rank.value())].device);
  }
  CHORUS_ASSIGN_OR_RETURN(const CommunicatorId communicator, lease->Of(devices));
  lease->OfGroup(group) = communicator;
  return communicator;
}

void Gangs::LaunchRun(RunState* run) {
  const GraphRecord& graph = *run->graph;
  for (size_t slot = 0; slot < run->devices.size(); ++slot) {
    LaunchMessage& message = run->launches[slot];
    message.launch = launcher_->NextLaunchId();
    message.lane = run->session->tenant->lane;
    message.hold_back = run->donated;
    message.left_out.assign(run->left_out.begin(), run->left_out.end());
    message.buffers.assign(run->addresses.begin(), run->addresses.end());
    const auto is_here = [&](size_t input) {
      return graph.graph.inputs[input].device_slot == static_cast<int32_t>(slot);
    };
    for (const LaunchMessage::Inline& in_line : run->inlines) {
      if (is_here(static_cast<size_t>(in_line.buffer))) message.inlines.push_back(in_line);
    }
    for (size_t i = 0; i < run->inputs.size(); ++i) {
      const Cell* cell = run->inputs[i].get();
      if (cell == nullptr || cell->state != Cell::State::kLaunched || !is_here(i)) continue;
      const RunState* const producer = runs_->Find(cell->producer);
      at(run->gang).fails_unseen |= producer != nullptr && at(producer->gang).fails_unseen;
      if (cell->launch != LaunchId()) message.after.push_back(cell->launch);
      if (cell->upload != TransferId()) message.uploads.push_back(cell->upload);
    }
    for (const auto& upload : run->uploads) {
      if (is_here(static_cast<size_t>(upload.first))) message.uploads.push_back(upload.second);
    }
    for (size_t i = 0; i < run->outputs.size(); ++i) {
      if (run->outputs[i] != nullptr &&
          run->plan->plan.outputs[i].device_slot == static_cast<int32_t>(slot)) {
        run->outputs[i]->launch = message.launch;
      }
    }
    launches_.emplace(message.launch, Launched{run->handle, run->devices[slot]});
    at(run->gang).launches.push_back(message.launch);
    launcher_->Launch(run->devices[slot], message);
  }
}

// --- Completion ---------------------------------------------------------------------------------

absl::optional<int32_t> Gangs::Complete(const CompletionMessage& completion, absl::Time now) {
  const auto it = launches_.find(completion.launch);
  if (it == launches_.end()) return absl::nullopt;
  Launched& launched = it->second;
  RunState* const run = runs_->Find(launched.run);
  if (run == nullptr || std::exchange(launched.complete, true)) return absl::nullopt;
  const auto device = static_cast<size_t>(launched.device.value());
  if (ended_.size() <= device) ended_.resize(device + 1);
  ended_[device][static_cast<size_t>(run->session->tenant->lane)] = {completion.launch, now};
  --run->launches_left;
  run->held_back = run->held_back && completion.held_back;
  Gang& gang = at(run->gang);
  if (completion.is_origin && !completion.status.ok()) Fail(*run, completion.status);
  gang.status.Update(completion.status);
  if (--gang.launches_left > 0) return absl::nullopt;
  return run->gang;
}

// Of launches on this device that may stand in front of this one: what lanes have in common (a
// GPU's streams) is the backend's.
absl::Time Gangs::LastEndInFrontOf(DeviceIndex device, LaunchId launch) const {
  absl::Time at = absl::InfinitePast();
  const auto index = static_cast<size_t>(device.value());
  if (index >= ended_.size()) return at;
  for (const Ended& last : ended_[index]) {
    if (last.launch < launch) at = std::max(at, last.at);
  }
  return at;
}

void Gangs::Abandon(RunState* run) {
  if (run->launches_left == 0 || std::exchange(run->abandoned, true)) return;
  for (const LaunchMessage& message : run->launches) {
    const Launched& launched = launches_.find(message.launch)->second;
    if (!launched.complete) launcher_->executor(launched.device)->Abandon(message.launch);
  }
}

// But for what others still want: a collective with members that live, and what it may read, which
// is what the runs before it make.
void Gangs::AbandonAllOf(const Session& session) {
  const auto lives = [this](RunHandle handle) {
    const RunState* const run = runs_->Find(handle);
    return run != nullptr && !run->session->dead();
  };
  CountWork(static_cast<int64_t>(session.runs.size()));
  const int64_t look = runs_->BeginLook();
  Sequence last_wanted;
  for (const RunHandle handle : session.runs) {
    const RunState& run = *runs_->Find(handle);
    bool is_wanted = run.phase == RunState::Phase::kVoted;
    if (run.phase == RunState::Phase::kLaunched) {
      Gang& gang = at(run.gang);
      if (std::exchange(gang.looked_at, look) != look) {
        CountWork(static_cast<int64_t>(gang.runs.size()));
        gang.is_wanted = std::any_of(gang.runs.begin(), gang.runs.end(), lives);
      }
      is_wanted = gang.is_wanted;
    }
    if (is_wanted) last_wanted = std::max(last_wanted, run.sequence);
  }
  for (const RunHandle handle : session.runs) {
    RunState* const run = runs_->Find(handle);
    if (run->phase == RunState::Phase::kLaunched && run->sequence > last_wanted) Abandon(run);
  }
}

void Gangs::Fail(const RunState& run, const absl::Status& why) {
  Gang& gang = at(run.gang);
  if (std::exchange(gang.knows_origin, true)) return;
  gang.status = FailureOf(run, why);
}

void Gangs::Abort(int32_t index, const absl::Status& why, absl::Time now) {
  Gang& gang = at(index);
  // Where nothing was launched others may be at work in them.
  if (gang.launches.empty()) return;
  for (CommunicatorId id : gang.communicators) gang.lease->Drop(id, why);
  if (gang.launches_left == 0 || gang.watch.serial != 0) return;
  for (const RunHandle handle : gang.runs) {
    if (RunState* run = runs_->Find(handle)) Abandon(run);
  }
  Watch(index,
        std::max(now, gang.launched + options_->sequencer.exec_timeout) + options_->kill_timeout);
}

void Gangs::Watch(int32_t index, absl::Time due) {
  at(index).watch = timers_->Add(due, [this, index](absl::Time now) {
    absl::Time next = absl::InfiniteFuture();
    for (const RunHandle handle : at(index).runs) {
      if (const RunState* run = runs_->Find(handle)) {
        next = std::min(next, KillDevicesOf(*run, now));
      }
    }
    if (next < absl::InfiniteFuture()) Watch(index, next);
  });
}

// Of those that have had their time. Returns when the next of the others will have had it. Where
// the device has just ended one in front of this, it works.
absl::Time Gangs::KillDevicesOf(const RunState& run, absl::Time now) {
  const absl::Duration patience = options_->sequencer.exec_timeout + options_->kill_timeout;
  absl::Time next = absl::InfiniteFuture();
  for (const LaunchMessage& message : run.launches) {
    const Launched& launched = launches_.find(message.launch)->second;
    if (launched.complete) continue;
    const absl::Time ended_at = LastEndInFrontOf(launched.device, message.launch);
    if (ended_at + patience > now) {
      next = std::min(next, ended_at + patience);
      continue;
    }
    launcher_->executor(launched.device)
        ->Kill(absl::StrCat("aborted work has not ended within ", absl::FormatDuration(patience),
                            " of its turn"));
  }
  return next;
}

}  // namespace chorus::node
