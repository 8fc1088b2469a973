#include "core/node/equal_work.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "core/base/bytes.h"
#include "core/base/work.h"
#include "core/node/session.h"
#include "core/node/world.h"

namespace chorus::node {
namespace {

// A run lets go of so many of its shares in the time of a piece of work.
constexpr int64_t kSharesOfWork = 8;

// Ids of one kind never equal those of another.
enum class IdKind : uint8_t { kInstance, kMemory, kBytes, kGroup, kResult };

Hash128 HashOf(const void* bytes, size_t size) {
  const XXH128_hash_t hash = XXH3_128bits(bytes, size);
  return {hash.high64, hash.low64};
}
Hash128 HashOf(const ByteWriter& encoded) {
  return HashOf(encoded.bytes().data(), encoded.bytes().size());
}

void Put(Hash128 id, ByteWriter* out) {
  out->Put(id.hi);
  out->Put(id.lo);
}

Hash128 IdOfOutput(WorldId world, const InstanceKey& key, int32_t index) {
  // Of each result of each collective: in memory that it has at hand.
  absl::InlinedVector<int64_t, 16> words = {static_cast<int64_t>(IdKind::kInstance),
                                            world.value(),
                                            index,
                                            key.group.value(),
                                            key.since.value(),
                                            key.at.step,
                                            key.at.call,
                                            key.at.part,
                                            key.source.value(),
                                            key.destination.value(),
                                            key.tag};
  for (const InstanceKey::Request& request : key.path) {
    words.push_back(request.step);
    words.push_back(request.number);
  }
  return HashOf(words.data(), words.size() * sizeof(words[0]));
}

Hash128 IdOfResult(Hash128 group, int32_t index) {
  ByteWriter encoded;
  encoded.Put(IdKind::kResult);
  Put(group, &encoded);
  encoded.Put(index);
  return HashOf(encoded);
}

// Of an input, wherever another rank has it from; `domain`: whose memory it is in. Absent: no other
// rank can have it.
absl::optional<Hash128> IdOfInput(const CellRef& cell, const Binding& binding, int domain) {
  ByteWriter encoded;
  if (const InlineData* data = absl::get_if<InlineData>(&binding)) {
    encoded.Put(IdKind::kBytes);
    encoded.PutString(absl::string_view(data->bytes.data(), data->bytes.size()));
    return HashOf(encoded);
  }
  if (cell == nullptr) return absl::nullopt;
  if (cell->value_id != Hash128()) return cell->value_id;
  // It has its memory, which the run that reads it keeps: what stands there is one value.
  if (!cell->buffer) return absl::nullopt;
  encoded.Put(IdKind::kMemory);
  encoded.Put(domain);
  encoded.Put(cell->address());
  return HashOf(encoded);
}

// Whether `results` are as large as those of `group`. Value ids are of a hash against which a
// client may have made others: then ranks compute for themselves, and nobody writes out of bounds.
bool Fit(const std::vector<BufferRef>& results, const Plan::EqualGroup& group, const Plan& plan) {
  return std::equal(results.begin(), results.end(), group.results.begin(), group.results.end(),
                    [&plan](const BufferRef& result, int32_t buffer) {
                      const int64_t bytes = plan.buffers[static_cast<size_t>(buffer)].bytes;
                      return (result ? result->bytes() : 0) == bytes;
                    });
}

}  // namespace

absl::Status EqualWork::Find(const Run& command, absl::Span<const InstanceKey> instances,
                             RunState* run) {
  const Plan& plan = run->plan->plan;
  if (instances.empty()) return absl::OkStatus();
  run->equal_work.resize(plan.equal_groups.size());
  CountWork(static_cast<int64_t>(plan.equal_groups.size()));
  // Groups of equal work are of graphs with one device slot.
  const int domain = domains_->of(run->devices.front());
  for (size_t g = 0; g < plan.equal_groups.size(); ++g) {
    const Plan::EqualGroup& group = plan.equal_groups[g];
    // What takes over this rank's own memory is this rank's alone.
    bool exclusive = false;
    for (const int32_t buffer : group.results) {
      exclusive |= static_cast<bool>(run->refs[static_cast<size_t>(buffer)]);
    }
    ByteWriter encoded;
    encoded.Put(IdKind::kGroup);
    encoded.Put(domain);  // in which others can read the results
    Put(group.hash, &encoded);
    for (const Plan::EqualGroup::Leaf& leaf : group.leaves) {
      if (leaf.input < 0) {
        Put(IdOfOutput(run->world->id, instances[static_cast<size_t>(leaf.participation)],
                       leaf.index),
            &encoded);
        continue;
      }
      const auto input = static_cast<size_t>(leaf.input);
      const absl::optional<Hash128> value_id =
          IdOfInput(run->inputs[input], command.inputs[input], domain);
      exclusive |= !value_id.has_value();
      if (value_id.has_value()) Put(*value_id, &encoded);
    }
    if (exclusive) continue;
    const Hash128 value_id = HashOf(encoded);
    std::shared_ptr<std::vector<BufferRef>>& shared =
        *run->world->equal_work.Emplace(value_id, nullptr).first;
    if (shared == nullptr) {
      absl::StatusOr<std::vector<BufferRef>> results = Reserve(group, run);
      if (!results.ok() || !Fit(*results, group, plan)) {
        run->world->equal_work.Erase(value_id);
        CHORUS_RETURN_IF_ERROR(results.status());
        continue;  // the run is prepared again when there is all of them
      }
      shared = std::make_shared<std::vector<BufferRef>>(*std::move(results));
    }
    if (!Fit(*shared, group, plan)) continue;
    for (size_t i = 0; i < group.results.size(); ++i) {
      run->SetBuffer(static_cast<size_t>(group.results[i]), (*shared)[i]);
    }
    run->equal_work[g] = {value_id, shared};
  }
  for (size_t i = 0; i < run->outputs.size(); ++i) {
    Cell* const cell = run->outputs[i].get();
    if (cell == nullptr) continue;
    const Plan::Output& output = plan.outputs[i];
    if (output.participation >= 0) {
      cell->value_id = IdOfOutput(
          run->world->id, instances[static_cast<size_t>(output.participation)], output.index);
    } else if (output.equal_group >= 0) {
      const Hash128 group = run->equal_work[static_cast<size_t>(output.equal_group)].value_id;
      if (group != Hash128()) cell->value_id = IdOfResult(group, output.index);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<BufferRef>> EqualWork::Reserve(const Plan::EqualGroup& group,
                                                          RunState* run) {
  std::vector<BufferRef> results(group.results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const BufferSpec& spec = run->plan->plan.buffers[static_cast<size_t>(group.results[i])];
    if (spec.bytes == 0) continue;
    CHORUS_ASSIGN_OR_RETURN(
        results[i],
        storage_->Reserve(run->session.get(), run->devices[static_cast<size_t>(spec.device_slot)],
                          spec.bytes));
    run->SetBuffer(static_cast<size_t>(group.results[i]), results[i]);
  }
  return results;
}

void EqualWork::Leave(RunState* run) {
  if (run->world == nullptr) return;
  World& world = *run->world;
  CountWork(static_cast<int64_t>(run->equal_work.size()) / kSharesOfWork);
  for (RunState::EqualShare& share : run->equal_work) {
    share.results.reset();
    const auto* const shared = world.equal_work.Find(share.value_id);
    if (shared != nullptr && shared->use_count() == 1) world.equal_work.Erase(share.value_id);
  }
  run->equal_work.clear();
}

void EqualWork::ForgetInstances(const RunState* run) {
  if (run->world == nullptr) return;
  const auto instances = run->world->agreement->Resolve(run->vote);
  if (!instances.ok()) return;
  for (const InstanceKey& key : *instances) run->world->shared.Erase(key);
}

absl::Status EqualWork::Deal(absl::Span<RunState* const> members, CommunicatorLease* lease) {
  struct Holder {
    Hash128 value_id;
    RunState* run;
    int32_t group;
  };
  std::vector<Holder> holders;
  for (RunState* run : members) {
    for (size_t g = 0; g < run->equal_work.size(); ++g) {
      const Hash128 value_id = run->equal_work[g].value_id;
      if (value_id == Hash128()) continue;
      holders.push_back({value_id, run, static_cast<int32_t>(g)});
      run->world->equal_work.Erase(value_id);
    }
  }
  if (holders.size() < 2) return absl::OkStatus();
  std::stable_sort(holders.begin(), holders.end(), [](const Holder& a, const Holder& b) {
    return std::make_pair(a.value_id.hi, a.value_id.lo) <
           std::make_pair(b.value_id.hi, b.value_id.lo);
  });
  // Else each rank does its own work.
  const bool may_share = !DevicesOf(members).empty();
  std::vector<RunState*> sharing;
  for (size_t begin = 0; begin < holders.size();) {
    size_t end = begin + 1;
    while (end < holders.size() && holders[end].value_id == holders[begin].value_id) ++end;
    const size_t worker = begin + static_cast<size_t>(holders[begin].group) % (end - begin);
    for (size_t i = begin; end - begin > 1 && i < end; ++i) {
      RunState* const run = holders[i].run;
      if (may_share) sharing.push_back(run);
      if (i == worker) continue;
      const Plan& plan = run->plan->plan;
      const auto group = static_cast<size_t>(holders[i].group);
      for (const int32_t buffer : plan.equal_groups[group].results) {
        const BufferSpec& spec = plan.buffers[static_cast<size_t>(buffer)];
        if (may_share) stats_->paths.shared_bytes += spec.bytes;
        if (may_share || spec.bytes == 0) continue;
        CHORUS_ASSIGN_OR_RETURN(
            const BufferRef copy,
            storage_->Allocate(run->session->tenant.get(), run->devices[0], spec.bytes));
        run->SetBuffer(static_cast<size_t>(buffer), copy);
      }
      if (!may_share) continue;
      run->left_out.push_back(holders[i].group);
      stats_->shared_kernels += plan.equal_groups[group].kernels;
    }
    begin = end;
  }
  if (sharing.empty()) return absl::OkStatus();
  std::vector<DeviceIndex> devices;
  for (const RunState* run : sharing) devices.push_back(run->devices[0]);
  std::sort(devices.begin(), devices.end());
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  CHORUS_ASSIGN_OR_RETURN(const CommunicatorId communicator, lease->Of(devices));
  for (RunState* run : sharing) run->equal_communicator = communicator;
  return absl::OkStatus();
}

}  // namespace chorus::node
