#include "core/node/prepare.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/node/world.h"

namespace chorus::node {
namespace {

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

GraphStore::Client ClientOf(const RunState& run) {
  return {run.session->tenant->name, run.session->budget};
}

PlanVariant VariantOf(const RunState& run, const std::vector<int32_t>& order) {
  return {order, {run.instance_of.begin(), run.instance_of.end()}, run.one_domain};
}

// What is bound and written for each by itself.
constexpr size_t kMaxTransfers = 4096;
size_t TransfersOf(const Run& command) {
  const auto inputs =
      std::count_if(command.inputs.begin(), command.inputs.end(),
                    [](const Binding& input) { return !absl::holds_alternative<TensorId>(input); });
  const auto outputs = std::count_if(
      command.outputs.begin(), command.outputs.end(),
      [](const OutBinding& output) { return output.kind == OutBinding::Kind::kInto; });
  return static_cast<size_t>(inputs + outputs);
}

// Few bytes of a frame may say much of this: 7 are an instance's key.
int64_t BytesOfFrame(const Vote& vote) {
  size_t bytes = vote.bound.size() * sizeof(vote.bound[0]) +
                 vote.groups.size() * sizeof(vote.groups[0]) +
                 vote.pair_calls.size() * sizeof(vote.pair_calls[0]);
  for (const InstanceKey& key : vote.bound) {
    // What does not stand in the key itself has at least twice that room.
    if (key.is_gradient()) bytes += (2 + key.path.size()) * sizeof(key.path[0]);
  }
  for (const GroupBinding& group : vote.groups) {
    bytes += group.base.size() * sizeof(group.base[0]);
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace

int64_t MemoryOfRun(const Graph& graph, const Plan& plan) {
  constexpr int64_t kPerRow = 4096;
  constexpr int64_t kPerInput = 192;  // bytes that come along, or their upload, too
  static_assert(sizeof(LaunchMessage::Inline) + 2 * sizeof(RunState::uploads[0]) + 64 <= kPerInput);
  constexpr int64_t kPerOutput = 320;  // its cell, too, which has a name of its own for a while
  static_assert(sizeof(Cell) + sizeof(CellRef) + sizeof(TensorId) + 64 <= kPerOutput);
  constexpr int64_t kPerBuffer = 64;
  constexpr int64_t kPerBufferAndDevice = 16;
  constexpr int64_t kPerParticipation = 1024;  // its vote, too; what it makes there is its world's
  // A step that waits, by the bytes of the device's part: launcher_test has what they are.
  constexpr int64_t kTimesQueued = 6;
  const auto buffers = static_cast<int64_t>(plan.buffers.size());
  int64_t bytes = kPerRow + kPerInput * static_cast<int64_t>(graph.inputs.size()) +
                  kPerOutput * static_cast<int64_t>(graph.outputs.size()) + kPerBuffer * buffers +
                  kPerParticipation * static_cast<int64_t>(plan.votes->participations.size());
  for (const std::string& part : plan.device_plans) {
    bytes += kPerBufferAndDevice * buffers + kTimesQueued * static_cast<int64_t>(part.size());
  }
  return bytes;
}

Rank RankOn(const World& world, const Session& session, absl::Span<const DeviceIndex> devices) {
  Rank rank(-1);
  auto device = devices.end();
  for (const Session::Membership& membership : session.memberships) {
    if (membership.world.get() != &world) continue;
    const auto index = static_cast<size_t>(membership.rank.value());
    const auto own_device = std::find(devices.begin(), device, world.members[index].device);
    if (rank.value() >= 0 && own_device == device) continue;
    rank = membership.rank;
    device = own_device;
  }
  return rank;
}

std::vector<NamedWorld> WorldsNamed(const Run& command, const Session& session) {
  absl::Span<const DeviceIndex> devices = session.devices;
  // More of them than the session holds are refused.
  if (!command.devices.empty()) {
    devices = absl::MakeConstSpan(command.devices).subspan(0, session.devices.size());
  }
  std::vector<NamedWorld> named;
  absl::InlinedVector<WorldId, kMaxNamedWorlds> seen;
  for (const RunGroup& group : command.groups) {
    if (std::find(seen.begin(), seen.end(), group.world) != seen.end()) continue;
    if (seen.size() == kMaxNamedWorlds) break;
    seen.push_back(group.world);
    for (const Session::Membership& membership : session.memberships) {
      if (membership.world->id != group.world) continue;
      named.push_back({membership.world, RankOn(*membership.world, session, devices), group.epoch});
      break;
    }
  }
  return named;
}

absl::StatusOr<bool> Preparer::Prepare(const Run& command, const GraphStore::Waiting& waiting,
                                       RunState* run) {
  CHORUS_ASSIGN_OR_RETURN(const bool planned, FindPlan(command, waiting, run));
  if (!planned) return false;
  CHORUS_RETURN_IF_ERROR(MakeOutputs(command, run));
  if (run->session->reservation.takes_turns()) return false;
  // Late for an epoch that has ended: the vote gets its cause, which an error of its own here (no
  // memory, say, for the very reason that ended the epoch) must not hide. It needs no bytes but for
  // the ends of pairs at which it counts.
  if (run->world != nullptr && run->vote.epoch < run->world->agreement->epoch()) {
    const size_t pairs = run->world->agreement->NewPairs(run->world->agreement->CallsOf(run->vote));
    if (pairs > 0) CHORUS_RETURN_IF_ERROR(run->world->ReserveCalls(pairs));
    return true;
  }
  CHORUS_RETURN_IF_ERROR(ChargeRows(run));
  CHORUS_RETURN_IF_ERROR(FindInputs(command, run));
  CHORUS_RETURN_IF_ERROR(donations_->Promise(command, run));
  absl::Span<const InstanceKey> instances;  // by participation; valid until the vote
  if (run->world != nullptr) {
    CHORUS_ASSIGN_OR_RETURN(instances, run->world->agreement->Resolve(run->vote));
  }
  CHORUS_RETURN_IF_ERROR(equal_work_->Find(command, instances, run));
  CHORUS_RETURN_IF_ERROR(ReserveBuffers(instances, run));
  std::vector<BufferRef> copies;
  CHORUS_RETURN_IF_ERROR(ReserveCopies(command, run, &copies));
  if (run->session->reservation.takes_turns()) {
    run->session->reservation.buffers = std::move(copies);
    return false;
  }
  copies.clear();
  // Last: bytes that are on their way keep their memory, though the run may be refused.
  CHORUS_RETURN_IF_ERROR(BindBytes(command, run));
  return true;
}

absl::StatusOr<bool> Preparer::FindPlan(const Run& command, const GraphStore::Waiting& waiting,
                                        RunState* run) {
  CHORUS_ASSIGN_OR_RETURN(const bool has_graph, FindGraph(command, waiting, run));
  if (!has_graph) return false;
  CHORUS_RETURN_IF_ERROR(FindDevices(command, run));
  CHORUS_RETURN_IF_ERROR(FindWorld(command, run));
  CHORUS_ASSIGN_OR_RETURN(const bool chosen, ChoosePlan(waiting, run));
  if (!chosen) return false;
  return launcher_->LoadPlan(run->graph, run->own_plan, run->devices, ClientOf(*run), waiting);
}

absl::StatusOr<bool> Preparer::FindGraph(const Run& command, const GraphStore::Waiting& waiting,
                                         RunState* run) {
  CHORUS_ASSIGN_OR_RETURN(run->graph, run->session->names.FindGraph(command.graph));
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
  const size_t transfers = TransfersOf(command);
  if (transfers > kMaxTransfers) {
    return Malformed(absl::StrCat(
        "a run may have ", kMaxTransfers,
        " inputs that come as bytes and outputs that go into client memory, this one has ",
        transfers, "; make tensors of the others"));
  }
  if (!run->graph->maxima.empty()) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes, SizesOf(command, *run));
    CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<GraphRecord> at_sizes,
                            graphs_->AtSizes(run->graph, sizes, ClientOf(*run), waiting));
    if (at_sizes == nullptr) return false;
    run->graph = std::move(at_sizes);
  }
  run->plan = &run->graph->main;
  return true;
}

absl::Status Preparer::Charge(RunState* run, int64_t bytes) {
  Session& session = *run->session;
  CHORUS_RETURN_IF_ERROR(session.run_charge.Cover(session.run_bytes + bytes));
  session.run_bytes += bytes;
  run->bytes += bytes;
  return absl::OkStatus();
}

// The names of its outputs and what its ranks may still ask of its calls, too.
absl::Status Preparer::ChargeRows(RunState* run) {
  int32_t top_slot = -1;
  for (const TensorId& id : run->output_ids) top_slot = std::max(top_slot, id.slot);
  CHORUS_RETURN_IF_ERROR(run->session->names.Reserve(run->outputs.size(), top_slot));
  if (run->world != nullptr) {
    CHORUS_RETURN_IF_ERROR(run->world->ReserveCalls(run->plan->plan.votes->participations.size()));
  }
  const int64_t to_write = Storage::kBytesToCopyLater * static_cast<int64_t>(run->intos.size());
  return Charge(
      run, MemoryOfRun(run->graph->graph, run->plan->plan) + BytesOfFrame(run->vote) + to_write);
}

absl::Status Preparer::FindDevices(const Run& command, RunState* run) {
  const std::vector<DeviceIndex>& session_devices = run->session->devices;
  const size_t slots = static_cast<size_t>(run->graph->graph.num_device_slots);
  if (command.devices.empty()) {
    if (slots > session_devices.size()) {
      return Malformed(absl::StrCat("the graph uses ", slots, " devices, the session holds ",
                                    session_devices.size()));
    }
    run->devices.assign(session_devices.begin(),
                        session_devices.begin() + static_cast<ptrdiff_t>(slots));
  } else {
    for (DeviceIndex device : command.devices) {
      if (std::find(session_devices.begin(), session_devices.end(), device) ==
          session_devices.end()) {
        return Malformed(absl::StrCat("device ", device.value(), " is none of the session's"));
      }
      if (std::find(run->devices.begin(), run->devices.end(), device) != run->devices.end()) {
        return Malformed(absl::StrCat("device ", device.value(), " is bound to two slots"));
      }
      run->devices.push_back(device);
    }
  }
  return absl::OkStatus();
}

// The sizes that the run fixes: its tensors have them. That all agree is seen when they are bound.
// One that has failed may have none, and the run is refused for it once its calls are known, which
// are the same at every size.
absl::StatusOr<std::vector<int64_t>> Preparer::SizesOf(const Run& command,
                                                       const RunState& run) const {
  const GraphRecord& graph = *run.graph;
  std::vector<int64_t> sizes(graph.maxima.size(), -1);
  bool will_fail = false;
  for (size_t i = 0; i < command.inputs.size(); ++i) {
    const TensorType& type = graph.graph.inputs[i].type;
    if (type.is_static() || !absl::holds_alternative<TensorId>(command.inputs[i])) continue;
    const TensorId id = absl::get<TensorId>(command.inputs[i]);
    CHORUS_ASSIGN_OR_RETURN(const CellRef cell, run.session->names.FindTensor(id));
    if (cell->state == Cell::State::kFailed) {
      will_fail = true;
      continue;
    }
    if (cell->type->dims.size() != type.dims.size()) {
      return BadType(absl::StrCat("input ", i, " of the graph is ", type.ToString(), ", tensor ",
                                  id.slot, ".", id.generation, " is ", cell->type->ToString()));
    }
    for (size_t d = 0; d < type.dims.size(); ++d) {
      if (type.dims[d].is_symbolic()) {
        sizes[static_cast<size_t>(type.dims[d].symbol)] = cell->type->dims[d].size;
      }
    }
  }
  for (size_t s = 0; s < sizes.size(); ++s) {
    if (sizes[s] >= 0) continue;
    if (will_fail) {
      sizes[s] = graph.maxima[s];
      continue;
    }
    return Malformed(absl::StrCat("symbol ", s,
                                  " of the graph has no size: one of the inputs that "
                                  "have it must be a tensor"));
  }
  return sizes;
}

// Finds the world of the run's groups and checks that the session holds the ranks that the graph
// says it does.
absl::Status Preparer::FindWorld(const Run& command, RunState* run) {
  const Session& session = *run->session;
  const Graph& graph = run->graph->graph;
  run->vote.run = run->handle;
  run->vote.what = run->plan->plan.votes;
  run->vote.slots = &graph.group_slots;
  for (size_t slot = 0; slot < command.groups.size(); ++slot) {
    const RunGroup& bound = command.groups[slot];
    const GroupSlot& group_slot = graph.group_slots[slot];
    if (run->world == nullptr) {
      std::shared_ptr<World> world;
      for (const Session::Membership& membership : session.memberships) {
        if (membership.world->id == bound.world) world = membership.world;
      }
      if (world == nullptr) {
        return UnknownName(
            absl::StrCat("this session is no member of world ", bound.world.value()));
      }
      if (!world->formed()) return NotFormed(*world);
      run->world = std::move(world);
      CHORUS_RETURN_IF_ERROR(run->world->agreement->CheckMembership(bound.epoch));
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
                            run->world->agreement->GroupMembers(bound.group));
    if (static_cast<int32_t>(members.size()) != group_slot.size) {
      return Malformed(absl::StrCat("group ", bound.group.value(), " has ", members.size(),
                                    " members; group slot ", slot, " is for ", group_slot.size));
    }
    if (!bound.base.empty() && bound.base.size() != group_slot.held.size()) {
      return Malformed(absl::StrCat("group slot ", slot, " holds ", group_slot.held.size(),
                                    " members; the run gives ", bound.base.size(), " positions"));
    }
    for (size_t i = 0; i < group_slot.held.size(); ++i) {
      const Rank rank = members[static_cast<size_t>(group_slot.held[i].value())];
      const World::Member& member = run->world->members[static_cast<size_t>(rank.value())];
      if (member.session.get() != &session) {
        return Malformed(absl::StrCat("rank ", rank.value(), " is not held by this session"));
      }
      const DeviceIndex device = run->devices[static_cast<size_t>(group_slot.device_slots[i])];
      if (member.device != device) {
        return Malformed(absl::StrCat("rank ", rank.value(), " joined with device ",
                                      member.device.value(), "; the run puts it on device ",
                                      device.value()));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Preparer::MakeOutputs(const Run& command, RunState* run) {
  const GraphRecord& graph = *run->graph;
  run->outputs.resize(command.outputs.size());
  run->output_ids.resize(command.outputs.size());
  for (size_t i = 0; i < command.outputs.size(); ++i) {
    const OutBinding& binding = command.outputs[i];
    if (binding.kind == OutBinding::Kind::kInto) {
      CHORUS_ASSIGN_OR_RETURN(
          ClientTarget target,
          storage_->FindTarget(run->session.get(), binding.into, *graph.output_types[i]));
      run->intos.push_back({static_cast<int32_t>(i), std::move(target)});
      continue;
    }
    if (binding.kind == OutBinding::Kind::kDiscard) continue;
    CHORUS_RETURN_IF_ERROR(run->session->names.CheckFresh(binding.id));
    auto cell = std::make_shared<Cell>();
    cell->type = graph.output_types[i];
    cell->bytes = run->plan->plan.outputs[i].bytes;
    cell->producer = run->handle;
    cell->output = static_cast<int32_t>(i);
    cell->device = run->devices[static_cast<size_t>(run->plan->plan.outputs[i].device_slot)];
    run->outputs[i] = std::move(cell);
    run->output_ids[i] = binding.id;
  }
  return command.outputs.size() > 1 ? CheckDistinct(*run) : absl::OkStatus();
}

void Preparer::Await(const CellRef& cell, RunState* run) {
  ++run->blockers;
  const auto on_settled = [this, handle = run->handle](const CellRef& tensor) {
    const bool failed = tensor->state == Cell::State::kFailed;
    arrived_(handle, Storage::Arrival::kLater,
             failed ? ToStatus(*tensor->error) : absl::OkStatus());
  };
  run->awaited.emplace_back(cell, cell->on_settled.Add(on_settled));
}

absl::Status Preparer::FindInputs(const Run& command, RunState* run) {
  const GraphRecord& graph = *run->graph;
  run->inputs.resize(command.inputs.size());
  run->refs.resize(run->plan->plan.buffers.size());
  run->addresses.resize(run->plan->plan.buffers.size());
  for (size_t i = 0; i < command.inputs.size(); ++i) {
    const GraphInput& input = graph.graph.inputs[i];
    const DeviceIndex device = run->devices[static_cast<size_t>(input.device_slot)];
    if (const TensorId* id = absl::get_if<TensorId>(&command.inputs[i])) {
      CHORUS_ASSIGN_OR_RETURN(CellRef cell, run->session->names.FindTensor(*id));
      if (cell->state == Cell::State::kFailed) return ToStatus(*cell->error);
      if (*cell->type != input.type) {
        return BadType(absl::StrCat("input ", i, " of the graph is ", input.type.ToString(),
                                    ", tensor ", id->slot, ".", id->generation, " is ",
                                    cell->type->ToString()));
      }
      if (cell->device != device) {
        return Malformed(absl::StrCat("input ", i, " of the graph is on device ", device.value(),
                                      ", tensor ", id->slot, ".", id->generation, " on device ",
                                      cell->device.value(), "; copy it first"));
      }
      if (cell->being_made()) Await(cell, run);
      run->inputs[i] = std::move(cell);
    }
  }
  CountWork(static_cast<int64_t>(command.inputs.size()) / kInputsOfWork);
  return absl::OkStatus();
}

absl::Status Preparer::ReserveCopies(const Run& command, RunState* run,
                                     std::vector<BufferRef>* copies) {
  for (size_t i = 0; i < command.inputs.size(); ++i) {
    const auto* const range = absl::get_if<ExternalRange>(&command.inputs[i]);
    if (range == nullptr) continue;
    CHORUS_RETURN_IF_ERROR(
        storage_->ReserveCopy(run->session.get(), *range, run->graph->graph.inputs[i].type,
                              /*stable=*/!run->plan->plan.input_may_be_staging[i], copies));
  }
  return absl::OkStatus();
}

absl::Status Preparer::BindBytes(const Run& command, RunState* run) {
  std::shared_ptr<Storage::Moves> moves;
  for (size_t i = 0; i < command.inputs.size(); ++i) {
    if (absl::holds_alternative<TensorId>(command.inputs[i])) continue;
    const GraphInput& input = run->graph->graph.inputs[i];
    const DeviceIndex device = run->devices[static_cast<size_t>(input.device_slot)];
    const auto* const data = absl::get_if<InlineData>(&command.inputs[i]);
    if (data != nullptr && !storage_->host()) {
      CHORUS_ASSIGN_OR_RETURN(const BufferRef buffer,
                              storage_->BindInline(*run->session, *data, input.type, device));
      run->SetBuffer(i, buffer);
      if (buffer) run->inlines.push_back({static_cast<int32_t>(i), data->bytes});
      continue;
    }
    const RunHandle handle = run->handle;
    CHORUS_ASSIGN_OR_RETURN(
        Storage::Bound bound,
        storage_->Bind(
            *run->session, command.inputs[i], input.type, device,
            /*stable=*/!run->plan->plan.input_may_be_staging[i],
            [this, handle](Storage::Arrival arrival, const absl::Status& status) {
              arrived_(handle, arrival, status);
            },
            &moves));
    run->addresses[i] = bound.address;
    run->refs[i] = std::move(bound.buffer);
    if (bound.arrival == Storage::Arrival::kLater) ++run->blockers;
    if (bound.arrival == Storage::Arrival::kInOrder) {
      run->uploads.emplace_back(static_cast<int32_t>(i), bound.upload);
    }
  }
  storage_->MakeMoves(std::move(moves));
  return absl::OkStatus();
}

// Reserves every byte that the run will write: nothing is allocated after commit.
absl::Status Preparer::ReserveBuffers(absl::Span<const InstanceKey> instances, RunState* run) {
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
    bool disagrees = false;
    if (spec.kind == BufferSpec::Kind::kShared && !instances.empty()) {
      shared = SharedResult(run->world.get(), instances[static_cast<size_t>(spec.index)],
                            spec.list_index, device);
      buffer = *shared;
      // Another rank's is of another size where the two disagree, and where counts are known at
      // run time alone: there each rank says how many rows its own result has, with zeros behind
      // those that come. This rank's kernels may write all of a result of its own size.
      if (buffer && buffer->bytes() != spec.bytes) {
        const std::vector<Participation>& parts = plan.votes->participations;
        disagrees = !parts[static_cast<size_t>(spec.index)].descriptor.runtime_counts;
        buffer = BufferRef();
        shared = nullptr;
      }
    }
    if (!buffer) {
      absl::StatusOr<BufferRef> reserved =
          storage_->Reserve(run->session.get(), device, spec.bytes);
      if (!reserved.ok() && disagrees) {
        // The vote says that the ranks disagree, whatever memory there is. A blocker that nothing
        // takes away keeps the run, which has none, from its launch.
        ++run->blockers;
        continue;
      }
      CHORUS_RETURN_IF_ERROR(reserved.status());
      buffer = *std::move(reserved);
      if (shared != nullptr) *shared = buffer;
    }
    run->SetBuffer(i, buffer);
  }
  return absl::OkStatus();
}

BufferRef* Preparer::SharedResult(World* world, const InstanceKey& instance, int32_t output,
                                  DeviceIndex device) {
  const int domain = domains_->of(device);
  auto& results = *world->shared.Emplace(instance, {}).first;
  for (World::SharedResult& result : results) {
    if (result.domain == domain && result.output == output) return &result.buffer;
  }
  results.push_back({domain, output, BufferRef()});
  return &results.back().buffer;
}

// The graph's main plan is for members that have called equally often before. Where they have not,
// other calls of the run meet. And it is for devices that are all of one domain, if any are.
absl::StatusOr<bool> Preparer::ChoosePlan(const GraphStore::Waiting& waiting, RunState* run) {
  CHORUS_RETURN_IF_ERROR(FindInstances(run));
  CHORUS_RETURN_IF_ERROR(FindOneDomain(run));
  const bool as_planned =
      run->instance_of.empty() ||
      absl::MakeConstSpan(run->instance_of) == absl::MakeConstSpan(run->plan->plan.instances);
  if (as_planned && !run->one_domain.has_value()) return true;
  CHORUS_ASSIGN_OR_RETURN(
      run->own_plan, graphs_->PlanOf(run->graph, VariantOf(*run, {}), ClientOf(*run), waiting));
  if (run->own_plan == nullptr) return false;
  run->plan = run->own_plan.get();
  return true;
}

absl::Status Preparer::FindInstances(RunState* run) {
  if (run->plan->plan.instances.empty() || run->world == nullptr) return absl::OkStatus();
  CHORUS_ASSIGN_OR_RETURN(const absl::Span<const InstanceKey> instances,
                          run->world->agreement->Resolve(run->vote));
  absl::flat_hash_map<InstanceKey, int32_t> first_of;
  for (const InstanceKey& key : instances) {
    const auto next = static_cast<int32_t>(run->instance_of.size());
    run->instance_of.push_back(first_of.emplace(key, next).first->second);
  }
  return absl::OkStatus();
}

absl::Status Preparer::FindOneDomain(RunState* run) {
  if (!domains_->mixed()) return absl::OkStatus();
  OneDomain one_domain;
  one_domain.slots = domains_->AllOne(run->devices);
  bool all_one = one_domain.slots;
  std::vector<DeviceIndex> devices;
  for (const auto& binding : run->vote.groups) {
    CHORUS_ASSIGN_OR_RETURN(const absl::Span<const Rank> members,
                            run->world->agreement->GroupMembers(binding.group));
    devices.clear();
    for (const Rank rank : members) {
      devices.push_back(run->world->members[static_cast<size_t>(rank.value())].device);
    }
    one_domain.groups.push_back(domains_->AllOne(devices));
    all_one &= one_domain.groups.back();
  }
  if (!all_one) run->one_domain = std::move(one_domain);
  return absl::OkStatus();
}

// The gang has agreed on another order than this rank's program has: its streams are queues, so its
// plan must follow. Where values stand is the same in every order but for those that live in a
// workspace.
absl::StatusOr<bool> Preparer::FollowOrder(RunState* run, const std::vector<int32_t>& order,
                                           const GraphStore::Waiting& waiting) {
  CHORUS_ASSIGN_OR_RETURN(
      std::shared_ptr<LoadedPlan> plan,
      graphs_->PlanOf(run->graph, VariantOf(*run, order), ClientOf(*run), waiting));
  if (plan == nullptr) return false;
  CHORUS_ASSIGN_OR_RETURN(const bool loaded, launcher_->LoadPlan(run->graph, plan, run->devices,
                                                                 ClientOf(*run), waiting));
  if (!loaded) return false;
  const auto& before = run->plan->plan.buffers;
  const auto& after = plan->plan.buffers;
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
        CHORUS_ASSIGN_OR_RETURN(
            refs[i], storage_->Allocate(run->session->tenant.get(), device, after[i].bytes));
        addresses[i] = refs[i]->address();
        continue;
      }
      if (from == before.size()) continue;  // none was needed and none is
    }
    refs[i] = run->refs[from];
    addresses[i] = run->addresses[from];
  }
  run->plan = plan.get();
  run->own_plan = std::move(plan);
  run->refs = std::move(refs);
  run->addresses = std::move(addresses);
  return true;
}

}  // namespace chorus::node
