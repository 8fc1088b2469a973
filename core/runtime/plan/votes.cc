#include "core/runtime/plan/votes.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/base/utf8.h"
#include "core/collective/vote.h"
#include "core/runtime/plan/dependences.h"

namespace chorus::planning {
namespace {

Hash128 FingerprintOf(const std::vector<Participation>& participations) {
  ByteWriter out;
  for (const Participation& p : participations) {
    out.Put(static_cast<uint8_t>(p.descriptor.kind));
    out.Put(static_cast<uint8_t>(p.descriptor.reduction));
    out.Put(static_cast<uint8_t>(p.descriptor.dtype));
    out.PutSigned(p.descriptor.root.value());
    out.PutVarint(p.descriptor.dims.size());
    for (const int64_t d : p.descriptor.dims) out.PutSigned(d);
    for (const auto* rows : {&p.descriptor.sends, &p.descriptor.receives}) {
      out.PutVarint(rows->size());
      for (const int64_t n : *rows) out.PutSigned(n);
    }
    out.Put(static_cast<uint8_t>(p.descriptor.runtime_counts));
    out.PutSigned(p.group_slot);
    out.PutSigned(p.member.value());
    out.Put(static_cast<uint8_t>(p.instance.kind));
    out.PutSigned(p.instance.node);
    out.PutSigned(p.instance.request);
    out.PutSigned(p.instance.slot);
    out.PutSigned(p.peer.value());
    out.PutSigned(p.tag);
    out.Put(static_cast<uint8_t>(p.is_recv));
    out.PutSigned(p.part);
    out.Put(static_cast<uint8_t>(p.wants_grad | p.leads_to_collective << 1 | p.leads_to_leaf << 2));
    out.PutVarint(p.after.size());
    for (const int32_t a : p.after) out.PutSigned(a);
    out.PutSigned(p.node);
  }
  const XXH128_hash_t hash = XXH3_128bits(out.bytes().data(), out.bytes().size());
  return {hash.high64, hash.low64};
}

absl::Status TooManyDependences(const Node& node, NodeIndex n, int64_t most, int64_t got) {
  Error error(Reason::kQuota);
  error.op = Printable(node.op);
  error.source = OneLine(node.source);
  error.message = absl::StrCat(
      "node ", n.value(), " (", error.op, error.source.empty() ? "" : " at ", error.source,
      "): which of the graph's collectives need which others: expected at most ", most,
      " pairs, got ", got, " or more");
  return ToStatus(error);
}

Participation ParticipationOf(const PlanState& state, NodeIndex n, const Dependences::Set& needs) {
  const Node& node = state.node(n);
  const Collective& c = *node.collective;
  Participation p;
  p.descriptor = DescriptorOf(node, state.nodes[n].pieces);
  p.group_slot = c.group_slot;
  p.member = c.rank;
  p.instance = c.instance;
  if (p.instance.kind == InstanceRef::Kind::kGradient) {
    p.instance.node = state.nodes[c.instance.node].participation;
  }
  p.peer = c.peer;
  p.tag = c.tag;
  p.is_recv = IsReceiver(c.kind);
  p.part = c.part;
  p.wants_grad = c.wants_grad;
  p.leads_to_collective = c.leads_to_collective;
  p.leads_to_leaf = c.leads_to_leaf;
  if (needs != nullptr) p.after.assign(needs->begin(), needs->end());
  p.node = n;
  p.source = node.source;
  if (p.leads_to_collective || p.leads_to_leaf) p.label = LabelOf(p);
  return p;
}

// Numbers the participations' instances as they are where all members of a group slot have called
// equally often before the run: by participation, the first one of its instance.
std::vector<int32_t> InstancesOf(const std::vector<Participation>& participations) {
  using Name = std::array<int64_t, 6>;
  std::vector<int32_t> instances;
  absl::flat_hash_map<Name, int32_t> first_of;
  absl::flat_hash_map<Name, int64_t> calls;  // of a member in a group slot, or of an end of a pair
  for (const Participation& p : participations) {
    const auto kind = static_cast<int64_t>(p.instance.kind);
    Name name{};
    switch (p.instance.kind) {
      case InstanceRef::Kind::kNext: {
        const bool pair = HasPeer(p.descriptor.kind);
        const int64_t source = !pair ? -1 : (p.is_recv ? p.peer : p.member).value();
        const int64_t destination = !pair ? -1 : (p.is_recv ? p.member : p.peer).value();
        name = {kind, p.group_slot, source, destination, p.tag, 0};
        Name end = name;
        end[0] = p.member.value();
        end[5] = p.is_recv;
        name[5] = calls[end]++;
        break;
      }
      case InstanceRef::Kind::kGradient:
        name = {kind, instances[p.instance.node], p.instance.request};
        break;
      case InstanceRef::Kind::kBound:
        name = {kind, p.instance.slot};
        break;
    }
    instances.push_back(
        first_of.emplace(name, static_cast<int32_t>(instances.size())).first->second);
  }
  return instances;
}

}  // namespace

absl::Status FindVotes(PlanState* state) {
  auto votes = std::make_shared<VoteTemplate>();
  Dependences dependences(state->graph, state->table, state->options.limits.max_dependence_steps);
  const int64_t most = state->options.limits.max_dependences;
  int64_t kept = 0;
  for (NodeIndex n = 0; n < state->num_nodes(); ++n) {
    const Node& node = state->node(n);
    if (!dependences.IsNeeded(n)) continue;
    CHORUS_ASSIGN_OR_RETURN(Dependences::Set needs, dependences.Take(n, votes->participations));
    if (!node.collective.has_value()) {
      dependences.Give(n, std::move(needs));
      continue;
    }
    if (needs != nullptr) kept += static_cast<int64_t>(needs->size());
    if (kept > most) return TooManyDependences(node, n, most, kept);
    const auto index = static_cast<int32_t>(votes->participations.size());
    state->nodes[n].participation = index;
    votes->participations.push_back(ParticipationOf(*state, n, needs));
    dependences.GiveOwn(n, index);
  }
  votes->lists = FindLists(votes->participations);
  votes->fingerprint = FingerprintOf(votes->participations);
  state->plan.votes = std::move(votes);
  return absl::OkStatus();
}

absl::Status FindInstances(PlanState* state) {
  const std::vector<Participation>& participations = state->participations();
  const std::vector<int32_t>& instance_of = state->options.instances;
  Plan& plan = state->plan;
  if (!instance_of.empty() && instance_of.size() != participations.size()) {
    return Malformed(absl::StrCat("the instances of ", instance_of.size(),
                                  " collectives for a run of ", participations.size()));
  }
  const auto is_copy = [](const NodeState& node) { return node.form == Form::kCopy; };
  if (std::none_of(state->nodes.begin(), state->nodes.end(), is_copy)) return absl::OkStatus();
  plan.meetings.resize(static_cast<size_t>(state->graph.num_device_slots));
  if (instance_of.empty()) {
    plan.instances = InstancesOf(participations);
    return absl::OkStatus();
  }
  absl::flat_hash_map<int32_t, int32_t> first_of;
  for (const int32_t instance : instance_of) {
    const auto next = static_cast<int32_t>(plan.instances.size());
    plan.instances.push_back(first_of.emplace(instance, next).first->second);
  }
  return absl::OkStatus();
}

}  // namespace chorus::planning
