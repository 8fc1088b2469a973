// A run's life: prepared, voted, launched with its gang, published or failed.
#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "core/base/failpoint.h"
#include "core/collective/order.h"
#include "core/node/node_impl.h"

namespace chorus {
namespace {

// What the ranks are told of a device that failed.
absl::Status ExecFailure(const absl::Status& status) {
  Error error = ErrorOf(status);
  if (error.reason == Reason::kUnspecified) error.SetReason(Reason::kExecFailed);
  return ToStatus(error);
}

// A kernel's failure as all ranks are told it: with whose it was, where that is one rank's.
absl::Status FailureOf(const RunState& run, const absl::Status& status) {
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

}  // namespace

void SayOpenEpoch(const World& world, Epoch open, Error* error) {
  if (error->alone) return;
  auto ended = std::find_if(error->ended.begin(), error->ended.end(),
                            [&world](const Error::EndedEpoch& e) { return e.world == world.id; });
  if (ended == error->ended.end()) {
    if (error->ended.size() == Error::kMaxRanks) return;
    ended = error->ended.insert(ended, {world.id, Epoch()});
  }
  if (ended->open == open) return;
  ended->open = open;
  error->id = ErrorId();  // what was recorded does not say so
}

namespace {

// As the world's sequencer must take it. Where the failure has ended an epoch of the world the
// other ranks have been told of it, and what comes of it fails alone: if each call that wants its
// result ended an epoch more, it would take others' calls with it, and what comes of those again,
// without end.
Error AsTold(const World& world, const Error& error) {
  Error told = error;
  for (const Error::EndedEpoch& ended : error.ended) told.alone |= ended.world == world.id;
  return told;
}

// No two outputs have one name.
absl::Status CheckDistinct(const RunState& run) {
  absl::InlinedVector<int32_t, 16> slots;
  for (size_t i = 0; i < run.outputs.size(); ++i) {
    if (run.outputs[i] != nullptr) slots.push_back(run.output_ids[i].slot);
  }
  std::sort(slots.begin(), slots.end());
  const auto twice = std::adjacent_find(slots.begin(), slots.end());
  if (twice == slots.end()) return absl::OkStatus();
  return Malformed(absl::StrCat("tensor slot ", *twice, " is named by two outputs"));
}

}  // namespace

void LocalNode::Impl::SubmitRun(const std::shared_ptr<Session>& session, Sequence sequence,
                                const Run& command, absl::Time now) {
  if (stopped) {
    RefuseRun(session, sequence, command, nullptr, DrainingError(), now);
    return;
  }
  if (!runs_.HasRoom() || session->pending_runs >= options.max_pending_runs) {
    RefuseRun(
        session, sequence, command, nullptr,
        MakeError(Reason::kQuota, absl::StrCat("a session may have ", options.max_pending_runs,
                                               " runs under way; wait for some of them")),
        now);
    return;
  }
  RunState* run = runs_.Add();
  run->session = session;
  run->sequence = sequence;
  ++session->pending_runs;
  CHORUS_FAILPOINT("node.before_prepare");
  const absl::Status prepared = PrepareRun(session, command, run);
  if (!prepared.ok()) {
    RefuseRun(session, sequence, command, run, prepared, now);
    return;
  }
  FindProducers(run, now);
  for (size_t i = 0; i < run->outputs.size(); ++i) {
    if (run->outputs[i] != nullptr) NameTensor(session.get(), run->output_ids[i], run->outputs[i]);
  }
  if (run->world == nullptr) {
    if (run->blockers == 0) LaunchLocal(run, now);
    return;
  }
  VoteRun(run, now);
}

// --- Preparing: everything that can be wrong or missing is found here, before the vote
// -------------

absl::Status LocalNode::Impl::PrepareRun(const std::shared_ptr<Session>& session,
                                         const Run& command, RunState* run) {
  const GraphId id = command.graph;
  const bool known = id.slot >= 0 && static_cast<size_t>(id.slot) < session->graphs.size() &&
                     session->graphs[static_cast<size_t>(id.slot)].generation == id.generation;
  if (known) {
    const Session::GraphSlot& place = session->graphs[static_cast<size_t>(id.slot)];
    CHORUS_RETURN_IF_ERROR(place.refused);
    run->graph = place.record;
  }
  if (run->graph == nullptr) {
    return UnknownName(
        absl::StrCat("graph ", id.slot, ".", id.generation, " is not registered by this session"));
  }
  const Graph& graph = run->graph->graph;  // whatever its sizes
  const struct {
    const char* what;
    size_t expected;
    size_t got;
  } counts[] = {
      {"inputs", graph.inputs.size(), command.inputs.size()},
      {"outputs", graph.outputs.size(), command.outputs.size()},
      {"group slots", graph.group_slots.size(), command.groups.size()},
      {"instance slots", static_cast<size_t>(graph.num_instance_slots), command.instances.size()},
      {"inputs (donations)", command.donate.empty() ? 0 : graph.inputs.size(),
       command.donate.size()},
      {"device slots", command.devices.empty() ? 0 : static_cast<size_t>(graph.num_device_slots),
       command.devices.size()},
  };
  for (const auto& count : counts) {
    if (count.expected == count.got) continue;
    return Malformed(absl::StrCat("the graph has ", count.expected, " ", count.what,
                                  ", the run binds ", count.got));
  }
  if (!run->graph->maxima.empty()) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes, SizesOf(*session, command, *run));
    CHORUS_ASSIGN_OR_RETURN(run->graph, graphs_.AtSizes(run->graph.get(), sizes));
  }
  run->plan = &run->graph->main;
  const size_t slots = static_cast<size_t>(run->graph->graph.num_device_slots);
  if (command.devices.empty()) {
    if (slots > session->devices.size()) {
      return Malformed(absl::StrCat("the graph uses ", slots, " devices, the session holds ",
                                    session->devices.size()));
    }
    run->devices.assign(session->devices.begin(),
                        session->devices.begin() + static_cast<ptrdiff_t>(slots));
  } else {
    for (DeviceIndex device : command.devices) {
      if (std::find(session->devices.begin(), session->devices.end(), device) ==
          session->devices.end()) {
        return Malformed(absl::StrCat("device ", device.value(), " is none of the session's"));
      }
      if (std::find(run->devices.begin(), run->devices.end(), device) != run->devices.end()) {
        return Malformed(absl::StrCat("device ", device.value(), " is bound to two slots"));
      }
      run->devices.push_back(device);
    }
  }
  CHORUS_RETURN_IF_ERROR(PrepareWorld(session.get(), command, run));
  CHORUS_RETURN_IF_ERROR(PrepareOutputs(session.get(), command, run));
  // Late for an epoch that has ended: the vote gets its cause, which an error of its own here (no
  // memory, say, for the very reason that ended the epoch) must not hide. It needs no bytes.
  if (run->world != nullptr && run->vote.epoch < run->world->sequencer->epoch()) {
    return absl::OkStatus();
  }
  CHORUS_RETURN_IF_ERROR(PrepareInputs(session.get(), command, run));
  CHORUS_RETURN_IF_ERROR(PromiseDonations(command, run));
  CHORUS_ASSIGN_OR_RETURN(const absl::Span<const InstanceKey> instances, FindInstances(*run));
  CHORUS_RETURN_IF_ERROR(FindEqualWork(command, instances, run));
  CHORUS_RETURN_IF_ERROR(PrepareBuffers(session.get(), instances, run));
  return FollowInstances(instances, run);
}

// By participation. None for a vote of another epoch, which will not be launched. Valid until the
// vote.
absl::StatusOr<absl::Span<const InstanceKey>> LocalNode::Impl::FindInstances(const RunState& run) {
  if (run.world == nullptr || run.vote.epoch != run.world->sequencer->epoch()) {
    return absl::Span<const InstanceKey>();
  }
  return run.world->sequencer->Resolve(run.vote);
}

// The plan is for members that have called equally often before. Where they have not, other calls
// of the run meet.
absl::Status LocalNode::Impl::FollowInstances(absl::Span<const InstanceKey> instances,
                                              RunState* run) {
  const std::vector<int32_t>& planned = run->plan->plan.instances;
  if (planned.empty() || instances.empty()) return absl::OkStatus();
  absl::flat_hash_map<InstanceKey, int32_t> first_of;
  for (const InstanceKey& key : instances) {
    const auto next = static_cast<int32_t>(run->instance_of.size());
    run->instance_of.push_back(first_of.emplace(key, next).first->second);
  }
  if (absl::MakeConstSpan(run->instance_of) == absl::MakeConstSpan(planned)) {
    return absl::OkStatus();
  }
  return FollowOrder(run, {});
}

// The sizes that the run fixes: its tensors have them. That all agree is seen when they are bound.
absl::StatusOr<std::vector<int64_t>> LocalNode::Impl::SizesOf(const Session& session,
                                                              const Run& command,
                                                              const RunState& run) const {
  const GraphRecord& graph = *run.graph;
  std::vector<int64_t> sizes(graph.maxima.size(), -1);
  for (size_t i = 0; i < command.inputs.size(); ++i) {
    const TensorType& wanted = graph.graph.inputs[i].type;
    if (wanted.is_static() || !absl::holds_alternative<TensorId>(command.inputs[i])) continue;
    const TensorId id = absl::get<TensorId>(command.inputs[i]);
    CHORUS_ASSIGN_OR_RETURN(const CellRef cell, FindTensor(session, id));
    if (cell->state == Cell::State::kFailed) return ToStatus(*cell->error);
    if (cell->type->dims.size() != wanted.dims.size()) {
      return BadType(absl::StrCat("input ", i, " of the graph is ", wanted.ToString(), ", tensor ",
                                  id.slot, ".", id.generation, " is ", cell->type->ToString()));
    }
    for (size_t d = 0; d < wanted.dims.size(); ++d) {
      if (wanted.dims[d].is_symbolic()) {
        sizes[static_cast<size_t>(wanted.dims[d].symbol)] = cell->type->dims[d].size;
      }
    }
  }
  for (size_t s = 0; s < sizes.size(); ++s) {
    if (sizes[s] >= 0) continue;
    return Malformed(absl::StrCat("symbol ", s,
                                  " of the graph has no size: one of the inputs that "
                                  "have it must be a tensor"));
  }
  return sizes;
}

// Finds the world of the run's groups and shows that the session is who the graph says it speaks
// for.
absl::Status LocalNode::Impl::PrepareWorld(Session* session, const Run& command, RunState* run) {
  const Graph& graph = run->graph->graph;
  run->vote.run = run->handle;
  run->vote.what = run->plan->plan.votes;
  run->vote.slots = &graph.group_slots;
  for (size_t slot = 0; slot < command.groups.size(); ++slot) {
    const RunGroup& bound = command.groups[slot];
    const GroupSlot& wanted = graph.group_slots[slot];
    if (run->world == nullptr) {
      for (const Session::Membership& membership : session->memberships) {
        if (membership.world->id == bound.world) run->world = membership.world;
      }
      if (run->world == nullptr) {
        return UnknownName(
            absl::StrCat("this session is no member of world ", bound.world.value()));
      }
      if (!run->world->formed) {
        return NotFormed(*run->world);
      }
      run->vote.epoch = bound.epoch;
      run->vote.bound = command.instances;
      run->vote.pair_calls = command.pair_calls;
      run->vote.call_goes_on = command.call_goes_on;
    } else if (run->world->id != bound.world) {
      return Unsupported("a run whose groups belong to different worlds");
    } else if (run->vote.epoch != bound.epoch) {
      return Malformed("the groups of one run are bound in different epochs");
    }
    run->vote.groups.emplace_back();
    run->vote.groups.back().group = bound.group;
    run->vote.groups.back().base = bound.base;
    CHORUS_ASSIGN_OR_RETURN(const absl::Span<const Rank> members,
                            run->world->sequencer->GroupMembers(bound.group));
    if (static_cast<int32_t>(members.size()) != wanted.size) {
      return Malformed(absl::StrCat("group ", bound.group.value(), " has ", members.size(),
                                    " members; group slot ", slot, " is for ", wanted.size));
    }
    if (!bound.base.empty() && bound.base.size() != wanted.held.size()) {
      return Malformed(absl::StrCat("group slot ", slot, " holds ", wanted.held.size(),
                                    " members; the run gives ", bound.base.size(), " positions"));
    }
    for (size_t i = 0; i < wanted.held.size(); ++i) {
      const Rank rank = members[static_cast<size_t>(wanted.held[i].value())];
      const World::Member& member = run->world->members[static_cast<size_t>(rank.value())];
      if (member.session.get() != session) {
        return Malformed(absl::StrCat("rank ", rank.value(), " is not held by this session"));
      }
      const DeviceIndex device = run->devices[static_cast<size_t>(wanted.device_slots[i])];
      if (member.device != device) {
        return Malformed(absl::StrCat("rank ", rank.value(), " joined with device ",
                                      member.device.value(), "; the run puts it on device ",
                                      device.value()));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status LocalNode::Impl::PrepareOutputs(Session* session, const Run& command, RunState* run) {
  const GraphRecord& graph = *run->graph;
  run->outputs.resize(command.outputs.size());
  run->output_ids.resize(command.outputs.size());
  for (size_t i = 0; i < command.outputs.size(); ++i) {
    const OutBinding& binding = command.outputs[i];
    if (binding.kind == OutBinding::Kind::kInto) {
      return Unsupported("writing an output into client memory (Into)");
    }
    if (binding.kind == OutBinding::Kind::kDiscard) continue;
    CHORUS_RETURN_IF_ERROR(CheckFresh(*session, binding.id));
    auto cell = std::make_shared<Cell>();
    cell->type = graph.output_types[i];
    cell->bytes = run->plan->plan.outputs[i].bytes;
    cell->producer = run->handle;
    cell->device = run->devices[static_cast<size_t>(run->plan->plan.outputs[i].device_slot)];
    run->outputs[i] = std::move(cell);
    run->output_ids[i] = binding.id;
  }
  return command.outputs.size() > 1 ? CheckDistinct(*run) : absl::OkStatus();
}

absl::Status LocalNode::Impl::PrepareInputs(Session* session, const Run& command, RunState* run) {
  const GraphRecord& graph = *run->graph;
  run->inputs.resize(command.inputs.size());
  run->refs.resize(run->plan->plan.buffers.size());
  run->addresses.resize(run->plan->plan.buffers.size());
  for (size_t i = 0; i < command.inputs.size(); ++i) {
    const GraphInput& wanted = graph.graph.inputs[i];
    const DeviceIndex device = run->devices[static_cast<size_t>(wanted.device_slot)];
    if (const TensorId* id = absl::get_if<TensorId>(&command.inputs[i])) {
      CHORUS_ASSIGN_OR_RETURN(CellRef cell, FindTensor(*session, *id));
      if (cell->state == Cell::State::kFailed) return ToStatus(*cell->error);
      if (*cell->type != wanted.type) {
        return BadType(absl::StrCat("input ", i, " of the graph is ", wanted.type.ToString(),
                                    ", tensor ", id->slot, ".", id->generation, " is ",
                                    cell->type->ToString()));
      }
      if (cell->device != device) {
        return Malformed(absl::StrCat("input ", i, " of the graph is on device ", device.value(),
                                      ", tensor ", id->slot, ".", id->generation, " on device ",
                                      cell->device.value(), "; copy it first"));
      }
      run->inputs[i] = std::move(cell);
      continue;
    }
    bool upload = false;
    const RunHandle handle = run->handle;
    CHORUS_ASSIGN_OR_RETURN(
        Bound bound,
        BindBytes(
            session, command.inputs[i], wanted.type, device,
            /*stable=*/!run->plan->plan.input_may_be_staging[i],
            [this, handle](absl::Status status) { Uploaded(handle, status); }, &upload));
    run->addresses[i] = bound.address;
    run->refs[i] = std::move(bound.buffer);
    if (upload) ++run->blockers;
  }
  return absl::OkStatus();
}

// The memory of an input that nobody else has or can come to have, if it is known: of a tensor that
// is there, or of one that a run under way makes. Null: others may read it. It is the session's
// tenant's like all that the session names, and written by the daemon alone.
BufferRef LocalNode::Impl::SoleBufferOf(const CellRef& cell) {
  if (cell->state == Cell::State::kReady) {
    // The name's reference and its reader's; the cell's on the buffer. Who reads or writes it has
    // more; so has whoever shares its bytes.
    if (cell.use_count() != 2 || !cell->buffer || cell->buffer->references() != 1 ||
        cell->buffer->state() == Buffer::State::kStaging || cell->offset != 0) {
      return BufferRef();
    }
    return cell->buffer;
  }
  // And its producer's. That run reserved the memory for itself, or was promised it. Whoever waits
  // to read it does not count, and comes when the next run may have written there already.
  RunState* const producer = runs_.Find(cell->producer);
  if (cell->settled() || producer == nullptr || cell.use_count() != 3 ||
      cell->number != Hash128() || !cell->on_settled.empty()) {
    return BufferRef();
  }
  const auto found = std::find(producer->outputs.begin(), producer->outputs.end(), cell);
  if (found == producer->outputs.end()) return BufferRef();
  const auto index = static_cast<size_t>(found - producer->outputs.begin());
  const Plan::Output& place = producer->plan->plan.outputs[index];
  if (!place.sole) return BufferRef();
  return producer->refs[static_cast<size_t>(place.buffer)];
}

// Where the run gives the last reference to an input away, an output will stand in its place and
// nothing is reserved for it. From here on the name cannot be used, so that the reference stays the
// last; it can again if the run is not launched.
absl::Status LocalNode::Impl::PromiseDonations(const Run& command, RunState* run) {
  const std::vector<GraphInput>& inputs = run->graph->graph.inputs;
  for (size_t i = 0; i < command.donate.size(); ++i) {
    if (command.donate[i] && !inputs[i].donatable) {
      return Malformed(absl::StrCat("input ", i, " of the graph cannot be donated"));
    }
  }
  if (command.donate.empty()) return absl::OkStatus();
  const Plan& plan = run->plan->plan;
  for (size_t o = 0; o < plan.outputs.size(); ++o) {
    const Plan::Output& place = plan.outputs[o];
    if (place.donor < 0 || !command.donate[static_cast<size_t>(place.donor)] || place.bytes == 0 ||
        run->outputs[o] == nullptr) {
      continue;
    }
    const CellRef& cell = run->inputs[static_cast<size_t>(place.donor)];
    if (cell == nullptr) continue;
    BufferRef buffer = SoleBufferOf(cell);
    if (!buffer || buffer->bytes() != place.bytes) continue;
    cell->donated_to = run->sequence;
    const TensorId id = absl::get<TensorId>(command.inputs[static_cast<size_t>(place.donor)]);
    run->donations.push_back({place.donor, id});
    run->addresses[static_cast<size_t>(place.buffer)] = buffer->address();
    run->refs[static_cast<size_t>(place.buffer)] = std::move(buffer);
  }
  run->vote.donates = !run->donations.empty();
  return absl::OkStatus();
}

// The name of what was given away stands for an error.
void LocalNode::Impl::NameDonated(RunState* run, const RunState::Donation& donation,
                                  absl::string_view what) {
  const CellRef& given = run->inputs[static_cast<size_t>(donation.input)];
  Error error = ErrorOf(MakeError(
      Reason::kDonated, absl::StrCat("tensor ", donation.id.slot, ".", donation.id.generation,
                                     " was donated to run ", run->sequence.value(), ", ", what)));
  errors.Record(run->session->tenant->name, &error);
  auto gone = std::make_shared<Cell>();
  gone->state = Cell::State::kFailed;
  gone->error = std::make_shared<Error>(std::move(error));
  gone->type = given->type;
  gone->device = given->device;
  ReplaceTensor(run->session.get(), donation.id, std::move(gone));
}

// The run is being launched: the promise is kept.
void LocalNode::Impl::TakeDonations(RunState* run) {
  run->donated = !run->donations.empty();
  for (const RunState::Donation& donation : run->donations) {
    const Cell& given = *run->inputs[static_cast<size_t>(donation.input)];
    given.buffer->set_state(Buffer::State::kResult);
    given.buffer->set_mirror(BufferRef());  // of what stood there
    NameDonated(run, donation, "whose result has its memory");
  }
}

// The run has failed. Where nothing was written all is as before; else the name tells.
void LocalNode::Impl::ReturnDonations(RunState* run) {
  if (run->donations.empty()) return;
  for (const RunState::Donation& donation : run->donations) {
    const CellRef& given = run->inputs[static_cast<size_t>(donation.input)];
    if (run->donated && !run->held_back) {
      NameDonated(run, donation, "which failed after it had written there");
      continue;
    }
    given->donated_to = Sequence();
    if (run->donated) ReplaceTensor(run->session.get(), donation.id, given);
  }
  run->donations.clear();
}

// Reserves every byte that the run will write: nothing is allocated after commit.
absl::Status LocalNode::Impl::PrepareBuffers(Session* session,
                                             absl::Span<const InstanceKey> instances,
                                             RunState* run) {
  const Plan& plan = run->plan->plan;
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    const BufferSpec& spec = plan.buffers[i];
    if (spec.kind == BufferSpec::Kind::kInput || spec.kind == BufferSpec::Kind::kPeer ||
        spec.bytes == 0 || run->refs[i]) {  // donated, or of equal work
      continue;
    }
    const DeviceIndex device = run->devices[static_cast<size_t>(spec.device_slot)];
    BufferRef buffer;
    BufferRef* shared = nullptr;
    if (spec.kind == BufferSpec::Kind::kShared && !instances.empty()) {
      shared = &run->world->shared[instances[static_cast<size_t>(spec.index)]];
      // Of another size where the ranks disagree. The vote then says so, and nothing is launched:
      // equal descriptors have equal results, but where counts are known at run time alone: there
      // each rank says how many rows its own result has, with zeros behind those that come.
      buffer = *shared;
      const std::vector<Participation>& parts = plan.votes->participations;
      if (buffer && buffer->bytes() != spec.bytes &&
          parts[static_cast<size_t>(spec.index)].descriptor.runtime_counts) {
        buffer = BufferRef();
        shared = nullptr;
      }
    }
    if (!buffer) {
      CHORUS_ASSIGN_OR_RETURN(buffer, Allocate(session->tenant.get(), device, spec.bytes));
      if (shared != nullptr) *shared = buffer;
    }
    SetBuffer(i, buffer, run);
  }
  return absl::OkStatus();
}

// --- Agreement ----------------------------------------------------------------------------------

// What this run waits for. Producers that its own sequencer knows go into the vote, also those that
// it reaches through local runs, so that circles are seen; everything else blocks it from outside.
void LocalNode::Impl::FindProducers(RunState* run, absl::Time now) {
  if (run->world != nullptr) AdoptProducers(*run, now);
  for (const CellRef& cell : run->inputs) {
    RunState* const producer = PendingProducer(cell);
    if (producer == nullptr) continue;
    const bool voted = producer->phase == RunState::Phase::kVoted;
    if (voted) run->AddVotedProducer(producer->handle);
    if (producer->local()) {
      for (RunHandle handle : producer->voted_producers) run->AddVotedProducer(handle);
    }
    if (voted && producer->world == run->world) continue;
    producer->consumers.push_back(run->handle);
    ++run->blockers;
  }
}

// The run that is to compute the tensor and is not launched; null: there is none.
RunState* LocalNode::Impl::PendingProducer(const CellRef& cell) {
  if (cell == nullptr || cell->state != Cell::State::kPending) return nullptr;
  return runs_.Find(cell->producer);
}

// A local run between two runs of one world votes there as well. Another rank may have compiled
// what it stands between: then all of it is one gang, and is launched at once or never.
void LocalNode::Impl::AdoptProducers(const RunState& run, absl::Time now) {
  const std::shared_ptr<World>& world = run.world;
  if (run.vote.epoch != world->sequencer->epoch()) return;  // it will not be launched
  const auto lies_between = [&](const RunState* local) {
    return local->phase == RunState::Phase::kWaiting &&
           std::any_of(local->voted_producers.begin(), local->voted_producers.end(),
                       [&](RunHandle handle) {
                         const RunState* producer = runs_.Find(handle);
                         return producer != nullptr && producer->world == world &&
                                producer->phase == RunState::Phase::kVoted;
                       });
  };
  // A log names no tensor before it is made: by sequence producers come first. Nearly always empty.
  std::map<Sequence, RunState*> between;
  absl::InlinedVector<const RunState*, 8> consumers = {&run};
  while (!consumers.empty()) {
    const RunState* const consumer = consumers.back();
    consumers.pop_back();
    for (const CellRef& cell : consumer->inputs) {
      RunState* const producer = PendingProducer(cell);
      if (producer == nullptr || !lies_between(producer)) continue;
      if (between.emplace(producer->sequence, producer).second) consumers.push_back(producer);
    }
  }
  for (const auto& local : between) Adopt(world, local.second, now);
}

void LocalNode::Impl::Adopt(const std::shared_ptr<World>& world, RunState* local, absl::Time now) {
  local->world = world;
  local->vote.epoch = world->sequencer->epoch();
  for (const CellRef& cell : local->inputs) {
    RunState* const producer = PendingProducer(cell);
    if (producer == nullptr || producer->world != world ||
        producer->phase != RunState::Phase::kVoted) {
      continue;
    }
    // The sequencer waits for it now.
    auto& consumers = producer->consumers;
    consumers.erase(std::find(consumers.begin(), consumers.end(), local->handle));
    --local->blockers;
    local->AddVotedProducer(producer->handle);
  }
  VoteRun(local, now);
}

void LocalNode::Impl::VoteRun(RunState* run, absl::Time now) {
  const RunHandle handle = run->handle;
  const std::shared_ptr<World> world = run->world;
  Vote& vote = run->vote;
  for (RunHandle producer : run->voted_producers) {
    RunState* found = runs_.Find(producer);
    if (found != nullptr && found->world == world && found->phase == RunState::Phase::kVoted) {
      vote.producers.push_back(producer);
    }
  }
  vote.externally_blocked = run->blockers > 0;
  run->phase = RunState::Phase::kVoted;
  Note(FlightKind::kVoted, now, run->session.get(), world.get(), run->sequence);
  CHORUS_FAILPOINT("node.before_vote");
  Actions actions;
  const absl::Status voted = world->sequencer->Submit(vote, now, &actions);
  CHORUS_FAILPOINT("node.after_vote");
  Apply(world, &actions, now);
  if (!voted.ok()) {
    if (RunState* refused = runs_.Find(handle)) RefuseVote(refused, voted, now);
  }
  ArmWorldTimer(world);
}

// The run cannot take part: its own session gets `why`, the other ranks that it could not.
void LocalNode::Impl::RefuseRun(const std::shared_ptr<Session>& session, Sequence sequence,
                                const Run& command, RunState* run, const absl::Status& why,
                                absl::Time now) {
  Error error = ErrorOf(why);
  ExplainMemory(*session, run, &error);
  if (run != nullptr) ForgetCommon(run);
  // Decided first: the session is told which epoch is open then.
  std::vector<std::pair<std::shared_ptr<World>, Actions>> told;
  for (const RunGroup& group : command.groups) {
    for (const Session::Membership& membership : session->memberships) {
      const std::shared_ptr<World>& world = membership.world;
      if (world->id != group.world || !world->formed) continue;
      if (!told.empty() && told.back().first == world) break;
      std::vector<RefusedMember> members;
      if (run != nullptr && run->world == world) members = world->sequencer->CallsOf(run->vote);
      // Its calls are not known; its next vote shows how many they were.
      if (members.empty()) members.emplace_back().rank = membership.rank;
      told.emplace_back(world, Actions());
      world->sequencer->Refuse(members, group.epoch, AsTold(*world, error), now,
                               &told.back().second);
      SayOpenEpoch(*world, world->sequencer->epoch(), &error);
      break;
    }
  }
  RecordFailure(session.get(), run == nullptr ? nullptr : run->world.get(), &error);
  const auto shared_error = std::make_shared<Error>(error);
  for (const OutBinding& binding : command.outputs) {
    if (binding.kind != OutBinding::Kind::kFresh) continue;
    NameFailed(session.get(), binding.id, shared_error);
  }
  if (run != nullptr) EndRun(run);
  ++stats.runs_failed;
  Note(FlightKind::kFailed, now, session.get(), nullptr, sequence, Ticket(), error.id);
  FinishCommand(session.get(), sequence, error);
  for (auto& world : told) Apply(world.first, &world.second, now);
}

void LocalNode::Impl::RefuseVote(RunState* run, const absl::Status& why, absl::Time now) {
  const std::shared_ptr<World> world = run->world;
  Error error = ErrorOf(why);
  ExplainMemory(*run->session, run, &error);
  const Error told = AsTold(*world, error);
  ForgetCommon(run);
  Actions actions;
  if (told.alone && world->sequencer->IsPending(run->handle)) {
    world->sequencer->Withdraw(run->handle, told, now, &actions);
  } else {
    std::vector<RefusedMember> members = world->sequencer->CallsOf(run->vote);
    for (const Session::Membership& membership : run->session->memberships) {
      if (membership.world == world && members.empty()) {
        members.emplace_back().rank = membership.rank;
      }
    }
    world->sequencer->Refuse(members, run->vote.epoch, told, now, &actions);
  }
  SayOpenEpoch(*world, world->sequencer->epoch(), &error);
  FailRun(run, error, now);
  Apply(world, &actions, now);
}

void LocalNode::Impl::Uploaded(RunHandle handle, const absl::Status& status) {
  RunState* run = runs_.Find(handle);
  if (run == nullptr) return;
  if (status.ok()) {
    Unblock(handle, now_);
  } else if (run->phase == RunState::Phase::kVoted) {
    RefuseVote(run, status, now_);
  } else {
    FailRun(run, ErrorOf(status), now_);
  }
}

void LocalNode::Impl::Unblock(RunHandle handle, absl::Time now) {
  RunState* run = runs_.Find(handle);
  if (run == nullptr || --run->blockers > 0) return;
  if (run->phase == RunState::Phase::kWaiting) {
    LaunchLocal(run, now);
  } else if (run->phase == RunState::Phase::kVoted) {
    const std::shared_ptr<World> world = run->world;
    Actions actions;
    world->sequencer->Unblock(handle, now, &actions);
    Apply(world, &actions, now);
  }
}

// Actions are carried out in the order in which they were decided; those that follow from carrying
// out one come after all that were there.
void LocalNode::Impl::Apply(const std::shared_ptr<World>& world, Actions* actions, absl::Time now) {
  if (applying_) {
    for (SequencerAction& action : *actions) actions_.emplace_back(world, std::move(action));
    return;
  }
  applying_ = true;
  for (SequencerAction& action : *actions) ApplyOne(world, &action, now);
  while (!actions_.empty()) {
    std::pair<std::shared_ptr<World>, SequencerAction> next = std::move(actions_.front());
    actions_.pop_front();
    ApplyOne(next.first, &next.second, now);
  }
  applying_ = false;
}

void LocalNode::Impl::ApplyOne(const std::shared_ptr<World>& world, SequencerAction* action,
                               absl::Time now) {
  switch (action->kind) {
    case SequencerAction::Kind::kLaunch:
      LaunchGang(world, *action, now);
      break;
    case SequencerAction::Kind::kReserve:
      if (RunState* run = runs_.Find(action->run)) {
        const absl::Status reserved = FollowOrder(run, action->order);
        if (!reserved.ok()) {
          RefuseVote(run, reserved, now);
          break;
        }
        Actions actions;
        world->sequencer->Reserved(action->run, now, &actions);
        Apply(world, &actions, now);
      }
      break;
    case SequencerAction::Kind::kFail:
      for (const InstanceKey& key : action->dropped) world->shared.erase(key);
      if (RunState* run = runs_.Find(action->run)) {
        if (action->opened != Epoch()) {
          SayOpenEpoch(*world, action->opened, &action->error);
        } else {
          ForgetCommon(run);
        }
        if (run->launches_left > 0) AbortGang(run->gang, ToStatus(action->error));
        FailRun(run, action->error, now);
      }
      break;
    case SequencerAction::Kind::kWarn:
      RecordFailure(nullptr, world.get(), &action->error);
      Note(FlightKind::kCallSitesDiffer, now, nullptr, world.get(), Sequence(), Ticket(),
           action->error.id);
      break;
    case SequencerAction::Kind::kEpochEnded:
      world->shared.clear();
      world->equal_work.clear();
      SayOpenEpoch(*world, action->opened, &action->error);
      RecordFailure(nullptr, world.get(), &action->error);
      Note(FlightKind::kEpochEnded, now, nullptr, world.get(), Sequence(), Ticket(),
           action->error.id);
      break;
  }
}

// --- Launch: the point of no return
// ---------------------------------------------------------------

int32_t LocalNode::Impl::NewGang() {
  if (free_gangs_.empty()) {
    gangs_.emplace_back();
    return static_cast<int32_t>(gangs_.size()) - 1;
  }
  const int32_t place = free_gangs_.back();
  free_gangs_.pop_back();
  return place;
}

void LocalNode::Impl::LaunchGang(const std::shared_ptr<World>& world, const SequencerAction& action,
                                 absl::Time now) {
  CHORUS_FAILPOINT("node.before_launch");
  const int32_t place = NewGang();
  Gang& gang = gangs_[static_cast<size_t>(place)];
  gang.world = world;
  gang.ticket = action.ticket;
  gang.runs.assign(action.runs.begin(), action.runs.end());
  absl::InlinedVector<RunState*, 8> members;
  for (RunHandle handle : action.runs) {
    RunState* run = runs_.Find(handle);
    run->phase = RunState::Phase::kLaunched;
    run->ticket = action.ticket;
    run->gang = place;
    run->instances.assign(run->plan->plan.votes->participations.size(), nullptr);
    members.push_back(run);
  }
  for (const LaunchedInstance& instance : action.instances) {
    for (const LaunchedInstance::Part& part : instance.parts) {
      RunState* run = runs_.Find(part.run);
      run->instances[static_cast<size_t>(part.participation)] = &instance;
    }
    world->shared.erase(instance.key);
    if (!instance.given_up.empty()) NoteGivenUp(world.get(), instance, action.ticket, now);
  }
  absl::Status status = CheckMeetings(members);
  if (status.ok()) status = DealEqualWork(members);
  if (status.ok()) status = FindBytes(action, members);
  if (status.ok() && !action.donating.empty()) status = JoinCommit(members, &gang);
  for (RunState* run : members) {
    if (status.ok()) status = PrepareLaunch(run, &gang);
  }
  // From here on every device gets its part, in ticket order. A failure so far launches nothing.
  if (status.ok()) {
    for (RunHandle handle : action.donating) TakeDonations(runs_.Find(handle));
    for (RunState* run : members) gang.launches_left += run->launches_left;
    for (RunState* run : members) LaunchRun(run);
  } else {
    gang.status = status;
    for (RunState* run : members) run->launches_left = 0;
  }
  CHORUS_FAILPOINT("node.after_launch");
  for (RunState* run : members) {
    run->instances.clear();
    Note(FlightKind::kLaunched, now, run->session.get(), world.get(), run->sequence, action.ticket);
  }
  if (!status.ok()) return FinishGang(place, now);
  for (RunHandle handle : action.runs) {
    if (RunState* run = runs_.Find(handle)) ReleaseConsumers(run, now);
  }
}

// A device does one run after the other. Where it has several of a gang, and values are copied
// between the devices of one of them, an order of the gang's instances does not yet say that all
// get through: a copy may have to wait for a run behind its own.
absl::Status LocalNode::Impl::CheckMeetings(absl::Span<RunState* const> members) const {
  const auto copies = [](const RunState* run) { return !run->plan->plan.meetings.empty(); };
  if (members.size() < 2 || std::none_of(members.begin(), members.end(), copies) ||
      !DevicesOf(members).empty()) {
    return absl::OkStatus();
  }
  // An instance, or of a run: from which slot to which, the how-many-th copy.
  using Meeting = std::tuple<const void*, int32_t, int32_t, int32_t>;
  absl::flat_hash_map<Meeting, int32_t> number_of;
  std::vector<std::vector<int32_t>> calls(static_cast<size_t>(backend_->device_count()));
  std::vector<std::vector<const LaunchedInstance*>> instances(calls.size());
  for (const RunState* run : members) {
    const Plan& plan = run->plan->plan;
    for (size_t slot = 0; slot < run->devices.size(); ++slot) {
      const auto device = static_cast<size_t>(run->devices[slot].value());
      const std::vector<Plan::CollectiveSlot>& bound = plan.collectives[slot];
      std::vector<int32_t> order(bound.size());
      std::iota(order.begin(), order.end(), 0);
      if (copies(run)) order = plan.meetings[slot];
      std::vector<int32_t> copied(bound.size(), 0);
      for (const int32_t b : order) {
        const Plan::CollectiveSlot& call = bound[static_cast<size_t>(b)];
        if (call.equal_work) continue;
        Meeting meeting(run, call.from_slot, call.to_slot, 0);
        const LaunchedInstance* instance = nullptr;
        if (call.participation >= 0) {
          instance = run->instances[static_cast<size_t>(call.participation)];
          meeting = Meeting(instance, -1, -1, 0);
          // Who sends to itself is there once.
          if (!instances[device].empty() && instances[device].back() == instance) continue;
        } else {
          std::get<3>(meeting) = copied[static_cast<size_t>(b)]++;
        }
        const auto next = static_cast<int32_t>(number_of.size());
        calls[device].push_back(number_of.emplace(meeting, next).first->second);
        instances[device].push_back(instance);
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
absl::Status LocalNode::Impl::JoinCommit(absl::Span<RunState* const> members, Gang* gang) {
  absl::InlinedVector<DeviceIndex, 8> devices = DevicesOf(members);
  if (devices.size() < 2) return absl::OkStatus();
  // Descending, so that it is most often no group's: a veto breaks the one that it is spoken in.
  std::reverse(devices.begin(), devices.end());
  CHORUS_ASSIGN_OR_RETURN(gang->commit, launcher_.CommunicatorOf(devices));
  gang->communicators.push_back(gang->commit);
  return absl::OkStatus();
}

void LocalNode::Impl::LaunchLocal(RunState* run, absl::Time now) {
  const RunHandle handle = run->handle;
  const int32_t place = NewGang();
  Gang& gang = gangs_[static_cast<size_t>(place)];
  gang.runs.push_back(handle);
  run->phase = RunState::Phase::kLaunched;
  run->gang = place;
  gang.status = BindInputs(run);
  if (gang.status.ok()) {
    PlaceOutputs(run);
    gang.status = PrepareLaunch(run, &gang);
  }
  const bool launched = gang.status.ok();
  if (launched) {
    TakeDonations(run);
    gang.launches_left = run->launches_left;
    LaunchRun(run);
  } else {
    run->launches_left = 0;
  }
  Note(FlightKind::kLaunched, now, run->session.get(), nullptr, run->sequence);
  if (!launched) return FinishGang(place, now);
  ReleaseConsumers(run, now);
}

// The gang has agreed on another order than this rank's program has: its streams are queues, so its
// plan must follow. Where values stand is the same in every order but for those that live in a
// workspace.
absl::Status LocalNode::Impl::FollowOrder(RunState* run, const std::vector<int32_t>& order) {
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<LoadedPlan> follows,
                          graphs_.InOrder(run->graph.get(), order, run->instance_of));
  const std::vector<BufferSpec>& before = run->plan->plan.buffers;
  const std::vector<BufferSpec>& after = follows->plan.buffers;
  const auto is_workspace = [](const BufferSpec& spec) {
    return spec.kind == BufferSpec::Kind::kWorkspace;
  };
  absl::InlinedVector<BufferRef, 4> refs(after.size());
  absl::InlinedVector<DeviceAddress, 4> addresses(after.size());
  for (size_t i = 0; i < after.size(); ++i) {
    size_t from = i;
    if (is_workspace(after[i])) {
      from = 0;
      while (from < before.size() &&
             !(is_workspace(before[from]) && before[from].device_slot == after[i].device_slot)) {
        ++from;
      }
      if (after[i].bytes > (from < before.size() ? before[from].bytes : 0)) {
        const DeviceIndex device = run->devices[static_cast<size_t>(after[i].device_slot)];
        CHORUS_ASSIGN_OR_RETURN(refs[i],
                                Allocate(run->session->tenant.get(), device, after[i].bytes));
        addresses[i] = refs[i]->address();
        continue;
      }
      if (from == before.size()) continue;  // none was needed and none is
    }
    refs[i] = run->refs[from];
    addresses[i] = run->addresses[from];
  }
  run->plan = follows.get();
  run->own_plan = std::move(follows);
  run->refs = std::move(refs);
  run->addresses = std::move(addresses);
  return absl::OkStatus();
}

// Finds the bytes of a gang's runs. Instances come in launch order, and a run that consumes what
// another one of its gang computes has its instances behind that one's, local runs in between stand
// between: so when an instance's turn comes, all that its operands may stand in has been found.
absl::Status LocalNode::Impl::FindBytes(const SequencerAction& action,
                                        absl::Span<RunState* const> members) {
  size_t bound = 0;
  for (const LaunchedInstance& instance : action.instances) {
    for (const LaunchedInstance::Part& part : instance.parts) {
      const RunState* const run = runs_.Find(part.run);
      while (run != nullptr && !run->bound) CHORUS_RETURN_IF_ERROR(BindInputs(members[bound++]));
    }
    CHORUS_RETURN_IF_ERROR(ResolvePeers(instance));
  }
  for (; bound < members.size(); ++bound) CHORUS_RETURN_IF_ERROR(BindInputs(members[bound]));
  for (RunState* run : members) PlaceOutputs(run);
  return absl::OkStatus();
}

// Fails where an input has: its run was launched, or was about to be, when this one's turn came.
absl::Status LocalNode::Impl::BindInputs(RunState* run) {
  if (run->bound) return absl::OkStatus();
  run->bound = true;
  for (size_t i = 0; i < run->inputs.size(); ++i) {
    const Cell* cell = run->inputs[i].get();
    if (cell == nullptr) continue;
    if (cell->state == Cell::State::kFailed) return ToStatus(*cell->error);
    if (cell->state == Cell::State::kPending) {
      if (RunState* producer = runs_.Find(cell->producer)) PlaceOutputs(producer);
    }
    run->addresses[i] = cell->address();
    run->refs[i] = cell->buffer;
  }
  return absl::OkStatus();
}

// Finds the bytes that stand with other ranks.
absl::Status LocalNode::Impl::ResolvePeers(const LaunchedInstance& instance) {
  for (const LaunchedInstance::Part& part : instance.parts) {
    RunState* run = runs_.Find(part.run);
    if (run == nullptr) continue;
    const Plan::Written& written = run->plan->plan.written[static_cast<size_t>(part.participation)];
    if (!written.shared || &part == &instance.parts.front()) {
      stats.paths.reduced_bytes += written.reduced;
      stats.paths.copied_bytes += written.copied;
    }
    for (int32_t buffer : run->plan->peer_buffers[static_cast<size_t>(part.participation)]) {
      const BufferSpec& spec = run->plan->plan.buffers[static_cast<size_t>(buffer)];
      if (spec.bytes == 0) continue;
      const LaunchedInstance::Part* peer = nullptr;
      for (const LaunchedInstance::Part& other : instance.parts) {
        if (other.member.value() == spec.list_member) peer = &other;
      }
      RunState* owner = peer == nullptr ? nullptr : runs_.Find(peer->run);
      if (owner == nullptr) {
        // A member that abandoned this gradient gives zeros: the launch writes them.
        CHORUS_ASSIGN_OR_RETURN(
            const BufferRef zeros,
            Allocate(run->session->tenant.get(),
                     run->devices[static_cast<size_t>(spec.device_slot)], spec.bytes));
        SetBuffer(static_cast<size_t>(buffer), zeros, run);
        continue;
      }
      const Plan::Operand& operand =
          owner->plan->plan.operands[static_cast<size_t>(peer->participation)]
                                    [static_cast<size_t>(spec.list_index)];
      const size_t from = static_cast<size_t>(operand.buffer);
      run->addresses[static_cast<size_t>(buffer)] =
          owner->addresses[from] + static_cast<DeviceAddress>(operand.offset);
      run->refs[static_cast<size_t>(buffer)] = owner->refs[from];
      stats.paths.aliased_bytes += spec.bytes;
    }
  }
  return absl::OkStatus();
}

void LocalNode::Impl::PlaceOutputs(RunState* run) {
  if (run->placed) return;
  run->placed = true;
  const Plan& plan = run->plan->plan;
  for (size_t i = 0; i < run->outputs.size(); ++i) {
    Cell* cell = run->outputs[i].get();
    if (cell == nullptr) continue;
    const Plan::Output& place = plan.outputs[i];
    cell->state = Cell::State::kLaunched;
    if (place.bytes == 0) continue;
    const size_t buffer = static_cast<size_t>(place.buffer);
    cell->buffer = run->refs[buffer];
    // An address says where in its buffer it lies: an alias may start anywhere in it.
    cell->offset =
        static_cast<int64_t>(run->addresses[buffer] - cell->buffer->address()) + place.offset;
  }
}

// Everything that may fail before the devices hear of the run.
absl::Status LocalNode::Impl::PrepareLaunch(RunState* run, Gang* gang) {
  const Plan& plan = run->plan->plan;
  run->launches.resize(run->devices.size());
  for (size_t slot = 0; slot < run->devices.size(); ++slot) {
    LaunchMessage& message = run->launches[slot];
    message.commit = gang->commit;
    CHORUS_ASSIGN_OR_RETURN(
        message.plan, launcher_.PlanOn(run->plan, static_cast<int>(slot), run->devices[slot]));
    for (const Plan::CollectiveSlot& wanted : plan.collectives[slot]) {
      message.collectives.emplace_back();
      LaunchMessage::CollectiveBinding& binding = message.collectives.back();
      CHORUS_RETURN_IF_ERROR(BindCommunicator(*run, wanted, &binding));
      if (binding.communicator != 0) gang->communicators.push_back(binding.communicator);
    }
  }
  run->launches_left = static_cast<int32_t>(run->devices.size());
  return absl::OkStatus();
}

absl::Status LocalNode::Impl::BindCommunicator(const RunState& run,
                                               const Plan::CollectiveSlot& wanted,
                                               LaunchMessage::CollectiveBinding* binding) {
  absl::InlinedVector<DeviceIndex, 8> devices;
  if (wanted.equal_work) {
    binding->communicator = run.equal_communicator;
    return absl::OkStatus();
  }
  if (wanted.participation < 0) {
    devices = {run.devices[static_cast<size_t>(wanted.from_slot)],
               run.devices[static_cast<size_t>(wanted.to_slot)]};
  } else {
    const LaunchedInstance& instance = *run.instances[static_cast<size_t>(wanted.participation)];
    if (!instance.key.is_pair()) {
      CHORUS_ASSIGN_OR_RETURN(const absl::Span<const Rank> ranks,
                              run.world->sequencer->GroupMembers(instance.key.group));
      const Participation& part =
          run.plan->plan.votes->participations[static_cast<size_t>(wanted.participation)];
      binding->rank = static_cast<int32_t>(ranks[static_cast<size_t>(part.member.value())].value());
      if (!instance.absent.empty()) {
        for (const LaunchedInstance::Part& part : instance.parts) {
          binding->present.push_back(part.member.value());
        }
      }
      CHORUS_ASSIGN_OR_RETURN(binding->communicator,
                              GroupCommunicator(run.world.get(), instance.key.group));
      return absl::OkStatus();
    }
    CHORUS_ASSIGN_OR_RETURN(const absl::Span<const Rank> members,
                            run.world->sequencer->GroupMembers(instance.key.group));
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
  CHORUS_ASSIGN_OR_RETURN(binding->communicator, launcher_.CommunicatorOf(devices));
  return absl::OkStatus();
}

absl::StatusOr<CommunicatorId> LocalNode::Impl::GroupCommunicator(World* world, GroupId group) {
  const size_t place = static_cast<size_t>(group.value());
  if (world->communicators.size() <= place) world->communicators.resize(place + 1);
  CommunicatorId& known = world->communicators[place];
  if (known == 0) {
    CHORUS_ASSIGN_OR_RETURN(const absl::Span<const Rank> members,
                            world->sequencer->GroupMembers(group));
    std::vector<DeviceIndex> devices;
    for (Rank rank : members) {
      devices.push_back(world->members[static_cast<size_t>(rank.value())].device);
    }
    CHORUS_ASSIGN_OR_RETURN(known, launcher_.CommunicatorOf(devices));
  }
  return known;
}

void LocalNode::Impl::LaunchRun(RunState* run) {
  const GraphRecord& graph = *run->graph;
  for (size_t slot = 0; slot < run->devices.size(); ++slot) {
    LaunchMessage& message = run->launches[slot];
    message.launch = launcher_.NextLaunchId();
    message.hold_back = run->donated;
    message.left_out.assign(run->left_out.begin(), run->left_out.end());
    message.buffers.assign(run->addresses.begin(), run->addresses.end());
    for (size_t i = 0; i < run->inputs.size(); ++i) {
      const Cell* cell = run->inputs[i].get();
      if (cell != nullptr && cell->state == Cell::State::kLaunched &&
          graph.graph.inputs[i].device_slot == static_cast<int32_t>(slot)) {
        message.after.push_back(cell->launch);
      }
    }
    for (size_t i = 0; i < run->outputs.size(); ++i) {
      if (run->outputs[i] != nullptr &&
          run->plan->plan.outputs[i].device_slot == static_cast<int32_t>(slot)) {
        run->outputs[i]->launch = message.launch;
      }
    }
    launches_.push_back(run->handle);
    launcher_.Launch(run->devices[slot], message);
  }
}

void LocalNode::Impl::ReleaseConsumers(RunState* run, absl::Time now) {
  if (run->consumers.empty()) return;
  absl::InlinedVector<RunHandle, 2> consumers;
  consumers.swap(run->consumers);
  for (RunHandle consumer : consumers) Unblock(consumer, now);
}

// --- The end
// --------------------------------------------------------------------------------------

void LocalNode::Impl::OnCompletion(const CompletionMessage& completion, absl::Time now) {
  if (completion.launch < first_launch_ || completion.launch - first_launch_ >= launches_.size()) {
    return;
  }
  RunHandle& entry = launches_[static_cast<size_t>(completion.launch - first_launch_)];
  RunState* run = runs_.Find(entry);
  entry = RunHandle();
  while (!launches_.empty() && launches_.front() == RunHandle()) {
    launches_.pop_front();
    ++first_launch_;
  }
  if (run == nullptr) return;  // completed twice
  --run->launches_left;
  run->held_back = run->held_back && completion.held_back;
  const int32_t place = run->gang;
  Gang& gang = gangs_[static_cast<size_t>(place)];
  if (completion.is_origin && !completion.status.ok() && !gang.knows_origin) {
    gang.status = FailureOf(*run, completion.status);
    gang.knows_origin = true;
  }
  gang.status.Update(completion.status);
  if (--gang.launches_left == 0) FinishGang(place, now);
}

void LocalNode::Impl::FinishGang(int32_t place, absl::Time now) {
  CHORUS_FAILPOINT("node.before_publish");
  Gang& gang = gangs_[static_cast<size_t>(place)];
  // What was computed from a result that failed is no result either, and has failed for that
  // reason, whatever else its devices say.
  absl::Status status;
  for (RunHandle handle : gang.runs) {
    for (const CellRef& input : runs_.Find(handle)->inputs) {
      if (!status.ok()) break;
      if (input != nullptr && input->state == Cell::State::kFailed) {
        status = ToStatus(*input->error);
      }
    }
  }
  status.Update(gang.status);
  if (!status.ok()) status = ExecFailure(status);
  if (status.ok()) {
    for (RunHandle handle : gang.runs) {
      RunState* run = runs_.Find(handle);
      if (!run->failed) PublishRun(run, now);
      EndRun(run);
    }
  } else {
    AbortGang(place, status);
  }
  if (gang.world != nullptr) {
    const std::shared_ptr<World> world = gang.world;
    Actions actions;
    world->sequencer->Finished(gang.ticket, status, now, &actions);
    Apply(world, &actions, now);
  }
  if (!status.ok()) {
    Error error = ErrorOf(status);
    // The sequencer's actions may be for later: its members enter the epoch by what they get here.
    if (gang.world != nullptr) {
      SayOpenEpoch(*gang.world, gang.world->sequencer->epoch(), &error);
    }
    for (RunHandle handle : gang.runs) {
      RunState* run = runs_.Find(handle);
      FailRun(run, error, now);
      EndRun(run);
    }
  }
  gang.Recycle();
  free_gangs_.push_back(place);
  CHORUS_FAILPOINT("node.after_publish");
}

// Its devices have not finished in time: those that wait for each other would for ever. What holds
// its memory ends when they have.
void LocalNode::Impl::AbortGang(int32_t place, const absl::Status& why) {
  for (CommunicatorId id : gangs_[static_cast<size_t>(place)].communicators) {
    DropCommunicator(id, why);
  }
}

void LocalNode::Impl::DropCommunicator(CommunicatorId id, const absl::Status& why) {
  launcher_.DropCommunicator(id, why);
  for (const auto& entry : worlds_) {
    for (CommunicatorId& known : entry.second->communicators) {
      if (known == id) known = 0;
    }
  }
}

void LocalNode::Impl::PublishRun(RunState* run, absl::Time now) {
  Session* session = run->session.get();
  ++stats.runs_published;
  for (const RunState::Donation& donation : run->donations) {
    stats.paths.donated_bytes += run->inputs[static_cast<size_t>(donation.input)]->bytes;
  }
  run->donations.clear();
  for (size_t i = 0; i < run->outputs.size(); ++i) {
    Cell* cell = run->outputs[i].get();
    if (cell == nullptr) continue;
    cell->state = Cell::State::kReady;
    cell->launch = 0;
    // The next step may have been given its memory already: then the name tells that.
    const bool given =
        cell->donated_to != Sequence() && !StandsFor(*session, run->output_ids[i], *cell);
    if (!session->dead() && !given) PublishTensor(session, run->output_ids[i], *cell);
  }
  Note(FlightKind::kPublished, now, session, run->world.get(), run->sequence, run->ticket);
  if (!session->dead()) FinishCommand(session, run->sequence);
  for (const CellRef& cell : run->outputs) {
    if (cell != nullptr) Settle(cell);
  }
}

// Tells the session once that its run has failed. A launched run stays until its gang is done.
void LocalNode::Impl::FailRun(RunState* run, const Error& cause, absl::Time now) {
  if (run->failed) return;
  run->failed = true;
  const std::shared_ptr<Session> session = run->session;
  Error error = cause;
  RecordFailure(session.get(), run->world.get(), &error);
  ++stats.runs_failed;
  const auto shared_error = std::make_shared<Error>(error);
  if (run->launches_left == 0) ReturnDonations(run);
  for (size_t i = 0; i < run->outputs.size(); ++i) {
    Cell* cell = run->outputs[i].get();
    if (cell == nullptr) continue;
    cell->state = Cell::State::kFailed;
    cell->error = shared_error;
    cell->buffer = BufferRef();
    if (!session->dead()) PublishTensor(session.get(), run->output_ids[i], *cell);
  }
  Note(FlightKind::kFailed, now, session.get(), run->world.get(), run->sequence, run->ticket,
       error.id);
  if (!session->dead()) FinishCommand(session.get(), run->sequence, error);
  const absl::InlinedVector<CellRef, 2> outputs = run->outputs;
  absl::InlinedVector<RunHandle, 2> consumers;
  consumers.swap(run->consumers);
  if (run->gang < 0) EndRun(run);
  for (const CellRef& cell : outputs) {
    if (cell != nullptr) Settle(cell);
  }
  for (RunHandle handle : consumers) {
    RunState* consumer = runs_.Find(handle);
    if (consumer == nullptr) continue;
    if (consumer->phase == RunState::Phase::kWaiting) {
      FailRun(consumer, error, now);
    } else if (consumer->phase == RunState::Phase::kVoted) {
      RefuseVote(consumer, ToStatus(error), now);
    }
  }
}

void LocalNode::Impl::EndRun(RunState* run) {
  ReturnDonations(run);
  --run->session->pending_runs;
  runs_.Remove(run->handle);
}

// Ranks whose part of this gradient is gone: their own numbers are smaller than they could be. An
// error would hit each loop that drops a metric; but it is not silent.
void LocalNode::Impl::NoteGivenUp(World* world, const LaunchedInstance& instance, Ticket ticket,
                                  absl::Time now) {
  constexpr size_t kKept = 256;
  for (const LaunchedInstance::GivenUp& part : instance.given_up) {
    ++stats.gradients_given_up;
    if (world->given_up.size() >= kKept) world->given_up.clear();
    ErrorId& known = world->given_up[{part.rank.value(), part.what->source}];
    if (!errors.Find(known, "").has_value()) {
      Error error(Reason::kGradientLost);
      error.culprit.rank = part.rank.value();
      error.culprit.pid = world->members[static_cast<size_t>(part.rank.value())].pid;
      error.op = part.what->op;
      error.source = part.what->source;
      error.message = absl::StrCat(
          "rank ", part.rank.value(), " gave up its part of the gradient of ", part.what->what,
          " at ", part.what->source,
          " (dropped, used up or not recorded), and others asked for it: they have it without this "
          "rank's part of the loss, which is right for them, and what this rank differentiates "
          "there lacks theirs. Call Backward there as well, or make the call under NoGrad");
      errors.Record(world->tenant, &error);
      known = error.id;
    }
    Note(FlightKind::kGradientGivenUp, now, nullptr, world, Sequence(), ticket, known);
  }
}

void LocalNode::Impl::Note(FlightKind kind, absl::Time now, const Session* session,
                           const World* world, Sequence sequence, Ticket ticket, ErrorId error) {
  FlightEvent event;
  event.time = now;
  event.kind = kind;
  if (session != nullptr) event.session = session->id;
  if (world != nullptr) {
    event.world = world->id;
    if (world->sequencer != nullptr) event.epoch = world->sequencer->epoch();
  }
  event.sequence = sequence;
  event.ticket = ticket;
  event.error = error;
  flight_.Add(event);
}

}  // namespace chorus
