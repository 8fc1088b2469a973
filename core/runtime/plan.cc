#include "core/runtime/plan.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/base/memory_account.h"
#include "core/collective/order.h"
#include "core/graph/encoding.h"
#include "core/ops/op.h"
#include "core/ops/registry.h"
#include "core/runtime/collective_pieces.h"
#include "core/runtime/dependences.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/size_class.h"

namespace chorus {
namespace {

using StreamId = DevicePlan::StreamId;
using Place = DevicePlan::Place;
using Step = DevicePlan::Step;

// --- What the run votes for ---

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

absl::Status TooManyDependences(const Node& node, size_t n, int64_t most, int64_t got) {
  Error error(Reason::kQuota);
  error.op = Printable(node.op);
  error.source = Printable(node.source);
  error.message =
      absl::StrCat("node ", n, " (", error.op, error.source.empty() ? "" : " at ", error.source,
                   "): which of the graph's collectives need which others: expected at most ", most,
                   " pairs, got ", got, " or more");
  return ToStatus(error);
}

absl::StatusOr<std::shared_ptr<const VoteTemplate>> MakeVotes(
    const Graph& graph, const ValueTable& values, const std::vector<CollectivePieces>& pieces,
    const PlanOptions& options, std::vector<int32_t>* participation_of) {
  auto votes = std::make_shared<VoteTemplate>();
  participation_of->assign(graph.nodes.size(), -1);
  Dependences dependences(graph, values, options.max_dependence_steps);
  int64_t kept = 0;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    const auto number = static_cast<int32_t>(n);
    if (!dependences.IsNeeded(number)) continue;
    CHORUS_ASSIGN_OR_RETURN(Dependences::Set needs,
                            dependences.Take(number, votes->participations));
    if (!node.collective.has_value()) {
      dependences.Give(number, std::move(needs));
      continue;
    }
    if (needs != nullptr) kept += static_cast<int64_t>(needs->size());
    if (kept > options.max_dependences) {
      return TooManyDependences(node, n, options.max_dependences, kept);
    }
    const Collective& c = *node.collective;
    const auto index = static_cast<int32_t>(votes->participations.size());
    (*participation_of)[n] = index;
    Participation p;
    p.descriptor = DescriptorOf(node, pieces[n]);
    p.group_slot = c.group_slot;
    p.member = c.rank;
    p.instance = c.instance;
    if (p.instance.kind == InstanceRef::Kind::kGradient) {
      p.instance.node = (*participation_of)[static_cast<size_t>(c.instance.node)];
    }
    p.peer = c.peer;
    p.tag = c.tag;
    p.is_recv = c.kind == CollectiveKind::kRecv;
    p.part = c.part;
    p.wants_grad = c.wants_grad;
    p.leads_to_collective = c.leads_to_collective;
    p.leads_to_leaf = c.leads_to_leaf;
    if (needs != nullptr) p.after.assign(needs->begin(), needs->end());
    p.node = number;
    p.source = node.source;
    if (p.leads_to_collective || p.leads_to_leaf) p.label = LabelOf(p);
    votes->participations.push_back(std::move(p));
    dependences.GiveOwn(number, index);
  }
  votes->fingerprint = FingerprintOf(votes->participations);
  return std::shared_ptr<const VoteTemplate>(std::move(votes));
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
        name = {kind, instances[static_cast<size_t>(p.instance.node)], p.instance.request};
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

// --- Scratch memory ---

// The last step of each stream that touches a piece of memory; steps of one slot are numbered
// across both streams.
struct LastTouch {
  int32_t step[DevicePlan::kStreams] = {-1, -1};
};

// The workspace of one device slot: offsets for values that live for some steps only.
class Workspace {
 public:
  struct Block {
    int64_t offset = 0;
    int size_class = 0;
    LastTouch touched;
  };

  // A block that a step of `stream` may write, which knows that the other stream has passed step
  // `known`.
  Block Allocate(int64_t bytes, StreamId stream, int32_t known) {
    constexpr size_t kLook = 8;
    const SizeClass wanted = SizeClass::Of(bytes);
    const int other = 1 - static_cast<int>(stream);
    const int last_class = std::min(wanted.index + SizeClass::kPerDoubling, SizeClass::kCount - 1);
    for (int c = wanted.index; c <= last_class && c < static_cast<int>(free_.size()); ++c) {
      std::vector<Block>& blocks = free_[static_cast<size_t>(c)];
      for (size_t i = 0; i < std::min(kLook, blocks.size()); ++i) {
        Block& candidate = blocks[blocks.size() - 1 - i];
        if (candidate.touched.step[other] > known) continue;
        const Block block = candidate;
        candidate = blocks.back();
        blocks.pop_back();
        return block;
      }
    }
    Block block;
    block.offset = bytes_;
    block.size_class = wanted.index;
    bytes_ += wanted.bytes;
    return block;
  }

  void Free(const Block& block) {
    if (free_.size() <= static_cast<size_t>(block.size_class)) {
      free_.resize(static_cast<size_t>(block.size_class) + 1);
    }
    free_[static_cast<size_t>(block.size_class)].push_back(block);
  }

  int64_t bytes() const { return bytes_; }

 private:
  std::vector<std::vector<Block>> free_;  // by size class
  int64_t bytes_ = 0;
};

// --- The plan ---

class Compiler {
 public:
  Compiler(const Graph& graph, const PlanOptions& options)
      : graph_(graph), options_(options), values_(graph) {}

  absl::StatusOr<Plan> Run() {
    CHORUS_RETURN_IF_ERROR(CheckSlots());
    CHORUS_RETURN_IF_ERROR(FindDefinitions());
    CHORUS_ASSIGN_OR_RETURN(plan_.votes,
                            MakeVotes(graph_, values_, pieces_, options_, &participation_of_));
    CHORUS_RETURN_IF_ERROR(ChooseOrder());
    FindLive();
    FindStorage();
    PlaceOperandsInResults();
    FindEqualWork();
    FindLifetimes();
    ChooseDonors();
    PlaceValues();
    for (size_t at = 0; at < order_.size(); ++at) {
      if (live_[static_cast<size_t>(order_[at])]) Schedule(order_[at], static_cast<int32_t>(at));
    }
    if (!plan_.equal_groups.empty()) ScheduleEqualBarrier();
    PlaceOutputs();
    Finish();
    return std::move(plan_);
  }

 private:
  // How a node is executed.
  enum class Form : uint8_t {
    kKernel,
    kCollective,
    kAlias,  // its output is its input: nothing to do
    kCopy,   // a value crosses to another device slot
  };

  // What is known of a value. Values that share memory have one root, which stands for it.
  struct Value {
    ValueIndex root = -1;
    int64_t offset = 0;  // in its root, bytes; of a root: in its buffer
    // The member whose operand it is, and which of them (share_results); then it stands there.
    int32_t list_member = -1;
    int32_t list_index = 0;
    // The result of whose slice it is an operand: it is produced there.
    ValueIndex slice_of = -1;
    int32_t ready_step = -1;  // of its slot, by which it is computed; -1: from the start
    StreamId ready_stream = StreamId::kCompute;
    bool used = false;  // by a live node or as an output
    // Of roots:
    bool counted = false;  // must not stand in a workspace
    bool is_output = false;
    bool takes_over = false;   // an output that may stand where its donor does
    int32_t equal_group = -1;  // whose result `equal_place` it is
    int32_t equal_place = 0;
    int32_t last_use = -1;  // place in the order of the last node that touches it
    int32_t buffer = -1;
    Workspace::Block block;
    bool in_workspace = false;
  };

  struct Slot {
    DevicePlan plan;
    Workspace workspace;
    int32_t workspace_buffer = -1;
    // The last step of the other stream that each stream has waited for.
    int32_t known[DevicePlan::kStreams] = {-1, -1};
    std::vector<int32_t> waits_for;  // by step: a step of the other stream, or -1
  };

  absl::Status CheckSlots() {
    for (size_t g = 0; g < graph_.group_slots.size(); ++g) {
      std::vector<int32_t> slots = graph_.group_slots[g].device_slots;
      std::sort(slots.begin(), slots.end());
      if (std::adjacent_find(slots.begin(), slots.end()) != slots.end()) {
        return Unsupported(
            absl::StrCat("group slot ", g,
                         ": two of its members are held on one device slot, where a collective "
                         "of both would wait for itself; give each its own"));
      }
    }
    return absl::OkStatus();
  }

  // Counts what is about to be made.
  absl::Status Take(int64_t bytes) {
    taken_ += bytes;
    if (taken_ <= options_.max_bytes) return absl::OkStatus();
    return TooMuchMemory("the graph's plan", options_.max_bytes, taken_);
  }

  // What is made of a part of the graph at most, with the room that growing lists have: a count
  // from above. Types that go into a plan are copied, and encoded, which takes no more.
  static int64_t MemoryOfType(const TensorType& type) {
    return 2 * (static_cast<int64_t>(sizeof(TensorType)) + MemoryBehind(type));
  }
  // As a leaf of equal work, or as the operand of a step.
  static int64_t MemoryToRead(const TensorType& type) {
    return MemoryOfType(type) +
           static_cast<int64_t>(2 * sizeof(Place) + sizeof(Plan::EqualGroup::Leaf) + 64);
  }
  static constexpr int64_t kBytesOfValue =
      sizeof(Value) + 2 * sizeof(BufferSpec) + 2 * sizeof(Place) + 64;
  // Rows, the places in a step and as the plan's operands, and the step's bytes.
  static constexpr int64_t kBytesOfPiece =
      4 * sizeof(int64_t) + 2 * sizeof(Place) + 2 * sizeof(Plan::Operand) + 32;

  int64_t MemoryToPlan(const Node& node, const OpDef& def) const {
    // Copied for equal work or as a kernel, again to be encoded, and as bytes.
    int64_t bytes = 3 * (static_cast<int64_t>(sizeof(Node)) + MemoryBehind(node)) +
                    static_cast<int64_t>(2 * sizeof(Step) + sizeof(CollectivePieces) + 128) +
                    static_cast<int64_t>(node.outputs.size()) * kBytesOfValue;
    for (const ValueIndex v : node.inputs) bytes += MemoryToRead(values_.type(v));
    if (!node.collective.has_value()) return bytes;
    const int64_t members =
        graph_.group_slots[static_cast<size_t>(node.collective->group_slot)].size;
    const int64_t pieces = (def.one_input ? members : static_cast<int64_t>(node.inputs.size())) +
                           (def.one_output ? members : static_cast<int64_t>(node.outputs.size()));
    return bytes + pieces * kBytesOfPiece +
           static_cast<int64_t>(2 * sizeof(Participation) + sizeof(PartLabel) +
                                2 * sizeof(DevicePlan::CollectiveStep) +
                                2 * sizeof(Plan::CollectiveSlot) + 1024);
  }

  // Of what does not stand in a node.
  int64_t MemoryToPlanEnds() const {
    int64_t bytes = 0;
    for (const GraphInput& input : graph_.inputs) {
      bytes += kBytesOfValue + MemoryOfType(input.type);
    }
    // Who publishes an output keeps its type beside it.
    for (const GraphOutput& output : graph_.outputs) {
      bytes += static_cast<int64_t>(2 * sizeof(Plan::Output) + 64) +
               MemoryOfType(values_.type(output.value));
    }
    return bytes;
  }

  absl::Status FindDefinitions() {
    CHORUS_RETURN_IF_ERROR(Take(MemoryToPlanEnds()));
    defs_.resize(graph_.nodes.size());
    forms_.resize(graph_.nodes.size());
    pieces_.resize(graph_.nodes.size());
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      const OpDef* def =
          n > 0 && graph_.nodes[n - 1].op == node.op ? defs_[n - 1] : FindOp(node.op);
      if (def == nullptr) return Unsupported(absl::StrCat("op '", node.op, "' is not run"));
      defs_[n] = def;
      CHORUS_RETURN_IF_ERROR(Take(MemoryToPlan(node, *def)));
      if (node.collective.has_value()) {
        forms_[n] = Form::kCollective;
        pieces_[n] =
            FindPieces(node, *def, values_,
                       graph_.group_slots[static_cast<size_t>(node.collective->group_slot)].size);
      } else if (def->alias == OutputAlias::kInput && !node.inputs.empty()) {
        forms_[n] =
            values_.device_slot(node.inputs[0]) == node.device_slot ? Form::kAlias : Form::kCopy;
      } else {
        forms_[n] = Form::kKernel;
      }
    }
    return absl::OkStatus();
  }

  absl::Status ChooseOrder() {
    CHORUS_RETURN_IF_ERROR(FindInstances());
    CHORUS_RETURN_IF_ERROR(OrderCollectives());
    PutOffWriters();
    return absl::OkStatus();
  }

  // A donated input is not written before everything else is complete: the last collective, and
  // whatever may fail. So what may be written there, and what needs it, comes at the very end,
  // unless a collective needs it.
  void PutOffWriters() {
    if (graph_.num_device_slots != 1 ||
        std::none_of(graph_.outputs.begin(), graph_.outputs.end(),
                     [](const GraphOutput& output) { return output.may_alias >= 0; })) {
      return;
    }
    std::vector<bool> needed(graph_.nodes.size(), false);  // by a collective
    for (size_t n = graph_.nodes.size(); n-- > 0;) {
      const Node& node = graph_.nodes[n];
      if (!needed[n] && !node.collective.has_value()) continue;
      needed[n] = true;
      for (const ValueIndex v : node.inputs) {
        if (values_.producer(v) >= 0) needed[static_cast<size_t>(values_.producer(v))] = true;
      }
    }
    put_off_.assign(graph_.nodes.size(), false);
    for (const GraphOutput& output : graph_.outputs) {
      const int32_t producer = values_.producer(output.value);
      if (output.may_alias < 0 || producer < 0 || needed[static_cast<size_t>(producer)]) continue;
      put_off_[static_cast<size_t>(producer)] = true;
    }
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      for (const ValueIndex v : graph_.nodes[n].inputs) {
        if (values_.producer(v) < 0 || needed[n]) continue;
        if (put_off_[static_cast<size_t>(values_.producer(v))]) put_off_[n] = true;
      }
    }
    const auto middle = std::stable_partition(order_.begin(), order_.end(), [this](int32_t n) {
      return !put_off_[static_cast<size_t>(n)];
    });
    std::sort(middle, order_.end());  // one order, whatever that of the collectives
  }

  // Which participations are of one instance, where something may come between them.
  absl::Status FindInstances() {
    const std::vector<Participation>& participations = plan_.votes->participations;
    if (!options_.instances.empty() && options_.instances.size() != participations.size()) {
      return Malformed(absl::StrCat("the instances of ", options_.instances.size(),
                                    " collectives for a run of ", participations.size()));
    }
    if (std::find(forms_.begin(), forms_.end(), Form::kCopy) == forms_.end()) {
      return absl::OkStatus();
    }
    plan_.meetings.resize(static_cast<size_t>(graph_.num_device_slots));
    if (options_.instances.empty()) {
      plan_.instances = InstancesOf(participations);
      return absl::OkStatus();
    }
    absl::flat_hash_map<int32_t, int32_t> first_of;
    for (const int32_t number : options_.instances) {
      const auto next = static_cast<int32_t>(plan_.instances.size());
      plan_.instances.push_back(first_of.emplace(number, next).first->second);
    }
    return absl::OkStatus();
  }
  bool AreOne(int32_t a, int32_t b) const {
    return a == b || (!plan_.instances.empty() && plan_.instances[static_cast<size_t>(a)] ==
                                                      plan_.instances[static_cast<size_t>(b)]);
  }

  absl::Status OrderCollectives() {
    order_.reserve(graph_.nodes.size());
    emitted_.assign(graph_.nodes.size(), false);
    if (!options_.order.empty()) return FollowOrder();
    if (!plan_.instances.empty() && FollowProgram()) return absl::OkStatus();
    order_.resize(graph_.nodes.size());
    std::iota(order_.begin(), order_.end(), 0);
    return absl::OkStatus();
  }

  // Program order, but that nothing stands between the members' calls of one instance: what they
  // need comes before all of them. False: they wait for each other in a circle, and a run in which
  // they are of one instance is refused when it votes.
  bool FollowProgram() {
    const auto count = static_cast<int32_t>(graph_.nodes.size());
    // A node, or for calls the first of their instance, stands for all of them.
    std::vector<int32_t> stands_for(static_cast<size_t>(count));
    std::iota(stands_for.begin(), stands_for.end(), 0);
    std::vector<std::vector<int32_t>> members(plan_.instances.size());
    for (size_t p = 0; p < plan_.instances.size(); ++p) {
      const auto first = static_cast<size_t>(plan_.instances[p]);
      members[first].push_back(static_cast<int32_t>(p));
      const std::vector<Participation>& participations = plan_.votes->participations;
      stands_for[static_cast<size_t>(participations[p].node)] = participations[first].node;
    }
    std::vector<OrderEdge> edges;
    for (int32_t n = 0; n < count; ++n) {
      for (const ValueIndex v : graph_.nodes[static_cast<size_t>(n)].inputs) {
        if (values_.producer(v) < 0) continue;
        edges.push_back({stands_for[static_cast<size_t>(values_.producer(v))],
                         stands_for[static_cast<size_t>(n)]});
      }
    }
    std::vector<int32_t> rank(static_cast<size_t>(count));
    std::iota(rank.begin(), rank.end(), 0);
    std::vector<int32_t> sorted;
    if (!TopologicalOrder(rank, edges, &sorted)) return false;
    for (const int32_t n : sorted) {
      if (stands_for[static_cast<size_t>(n)] != n) continue;
      const int32_t p = participation_of_[static_cast<size_t>(n)];
      if (p < 0) {
        EmitNode(n);
        continue;
      }
      for (const int32_t member : members[static_cast<size_t>(p)]) {
        EmitNode(plan_.votes->participations[static_cast<size_t>(member)].node);
      }
    }
    return true;
  }

  absl::Status FollowOrder() {
    const std::vector<int32_t>& order = options_.order;
    const std::vector<Participation>& participations = plan_.votes->participations;
    if (order.size() != participations.size()) {
      return Malformed(absl::StrCat("an order of ", order.size(), " collectives for a run of ",
                                    participations.size()));
    }
    std::vector<bool> chosen(participations.size(), false);
    for (const int32_t p : order) {
      if (p < 0 || static_cast<size_t>(p) >= participations.size()) {
        return Malformed(
            absl::StrCat("participation ", p, " in an order of ", participations.size()));
      }
      if (chosen[static_cast<size_t>(p)]) {
        return Malformed(absl::StrCat("participation ", p, " is twice in the order"));
      }
      chosen[static_cast<size_t>(p)] = true;
    }
    std::vector<bool> complete(participations.size(), false);  // by the instance's first
    for (size_t begin = 0; begin < order.size();) {
      size_t end = begin + 1;
      while (end < order.size() && AreOne(order[begin], order[end])) ++end;
      if (!plan_.instances.empty()) {
        const auto instance =
            static_cast<size_t>(plan_.instances[static_cast<size_t>(order[begin])]);
        if (complete[instance]) {
          return Malformed(absl::StrCat("the order parts participation ", order[begin], " from ",
                                        instance, ", which is of the same instance"));
        }
        complete[instance] = true;
      }
      CHORUS_RETURN_IF_ERROR(EmitInstance(absl::MakeSpan(order).subspan(begin, end - begin)));
      begin = end;
    }
    for (int32_t n = 0; n < static_cast<int32_t>(graph_.nodes.size()); ++n) {
      if (!emitted_[static_cast<size_t>(n)]) EmitNode(n);
    }
    return absl::OkStatus();
  }

  void EmitNode(int32_t n) {
    emitted_[static_cast<size_t>(n)] = true;
    order_.push_back(n);
  }

  // The calls of one instance, with nothing between them.
  absl::Status EmitInstance(absl::Span<const int32_t> participations) {
    for (const int32_t p : participations) CHORUS_RETURN_IF_ERROR(EmitNeedsOf(p));
    for (const int32_t p : participations) {
      EmitNode(plan_.votes->participations[static_cast<size_t>(p)].node);
    }
    return absl::OkStatus();
  }

  // What a call needs and is not there yet.
  absl::Status EmitNeedsOf(int32_t p) {
    const int32_t wanted = plan_.votes->participations[static_cast<size_t>(p)].node;
    std::vector<std::pair<int32_t, size_t>> stack;  // node, next input to look at
    stack.emplace_back(wanted, 0);
    while (!stack.empty()) {
      auto& [n, next] = stack.back();
      const Node& node = graph_.nodes[static_cast<size_t>(n)];
      if (next < node.inputs.size()) {
        const int32_t producer = values_.producer(node.inputs[next++]);
        if (producer < 0 || emitted_[static_cast<size_t>(producer)]) continue;
        if (graph_.nodes[static_cast<size_t>(producer)].collective.has_value()) {
          return Malformed(absl::StrCat("the order puts participation ", p, " before ",
                                        participation_of_[static_cast<size_t>(producer)],
                                        ", whose result it needs"));
        }
        stack.emplace_back(producer, 0);
      } else {
        if (n != wanted && !emitted_[static_cast<size_t>(n)]) EmitNode(n);
        stack.pop_back();
      }
    }
    return absl::OkStatus();
  }

  // Local ops that nothing needs are left out. Collectives never are: other ranks wait for them.
  void FindLive() {
    table_.resize(static_cast<size_t>(values_.size()));
    live_.assign(graph_.nodes.size(), false);
    for (const GraphOutput& output : graph_.outputs) table_[output.value].used = true;
    for (size_t n = graph_.nodes.size(); n-- > 0;) {
      const Node& node = graph_.nodes[n];
      bool live = node.collective.has_value();
      const ValueIndex first = values_.first_output(static_cast<int32_t>(n));
      for (size_t i = 0; i < node.outputs.size(); ++i) {
        live |= table_[first + static_cast<ValueIndex>(i)].used;
      }
      live_[n] = live;
      if (!live) continue;
      for (const ValueIndex v : node.inputs) table_[v].used = true;
    }
  }

  // --- Operands of collectives ---

  static int NumVisible(const Node& node) {
    return NumVisibleOutputs(*node.collective, static_cast<int>(node.outputs.size()));
  }
  // Of a PRODUCT: output `i` is a member's operand, kept for backward.
  static bool IsFactor(const Node& node, size_t i) {
    return node.collective->reduction == Reduction::kProduct &&
           static_cast<int>(i) >= NumVisible(node);
  }
  // Other ranks may read its operands where they stand, and keep them: those of moves; and of a
  // PRODUCT, of which another rank may want a gradient though this one does not.
  bool GivesOperands(const Node& node) const {
    if (!IsReducing(node.collective->kind)) return true;
    return node.collective->reduction == Reduction::kProduct && !node.inputs.empty() &&
           IsFloating(values_.type(node.inputs[0]).dtype);
  }
  // Each element is read once. Backward needs more of the others, and of the same bytes.
  static bool ReadsOnce(const Node& node) {
    switch (node.collective->reduction) {
      case Reduction::kSum:
      case Reduction::kAvg:
      case Reduction::kPremulSum:
        return true;
      default:
        return false;
    }
  }

  // The operand whose bytes output `i` of a collective has: of which member, and which of its
  // pieces. -1: it has bytes of its own.
  struct Source {
    int32_t member = -1;
    int32_t piece = 0;
  };
  Source SourceOf(const Node& node, const OpDef& def, size_t i) const {
    Source source;
    const Collective& c = *node.collective;
    // Where a piece stands is then only known when the collective runs.
    if (!options_.share_results || HasRuntimeCounts(c)) return source;
    if (IsFactor(node, i)) {
      source.member = static_cast<int32_t>(i) - NumVisible(node);
    } else if (def.alias != OutputAlias::kMember || def.one_output) {
      return source;
    } else if (AtRoot(FactsOf(c.kind).in)) {
      source.member = c.root.value();
    } else if (HasPeer(c.kind)) {
      source.member = c.peer.value();
    } else {
      source.member = static_cast<int32_t>(i);
    }
    if (OfEach(FactsOf(c.kind).in)) source.piece = c.rank.value();
    return source;
  }

  // Which values share memory, and which of it must be counted.
  void FindStorage() {
    for (ValueIndex v = 0; v < values_.size(); ++v) table_[v].root = v;
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      const ValueIndex first = values_.first_output(static_cast<int32_t>(n));
      switch (forms_[n]) {
        case Form::kAlias:
          AliasInput(node, first);
          break;
        case Form::kCopy:
          if (options_.share_results) AliasInput(node, first);
          break;
        case Form::kCollective:
          for (size_t i = 0; i < node.outputs.size(); ++i) {
            const Source source = SourceOf(node, *defs_[n], i);
            if (source.member < 0) continue;
            Value& value = table_[first + static_cast<ValueIndex>(i)];
            if (source.member != node.collective->rank.value()) {
              value.list_member = source.member;
              value.list_index = source.piece;
              continue;
            }
            const auto piece = static_cast<size_t>(source.piece);
            const bool one = defs_[n]->one_input;
            const Value& own = table_[node.inputs[one ? 0 : piece]];
            value.root = own.root;
            value.offset = own.offset + (one ? pieces_[n].InputOffset(piece) : 0);
          }
          break;
        case Form::kKernel:
          break;
      }
      // Other ranks, or other slots, read it where it stands and may keep it.
      const bool moves =
          forms_[n] == Form::kCopy || (forms_[n] == Form::kCollective && GivesOperands(node));
      if (moves && live_[n] && options_.share_results) {
        for (const ValueIndex v : node.inputs) table_[table_[v].root].counted = true;
      }
    }
    for (const GraphOutput& output : graph_.outputs) {
      Value& root = table_[table_[output.value].root];
      root.counted = true;
      root.is_output = true;
    }
  }

  void AliasInput(const Node& node, ValueIndex output) {
    const Value& input = table_[node.inputs[0]];
    table_[output].root = input.root;
    table_[output].offset = input.offset;
  }

  // Operands that local ops make for a single tensor of all ranks' pieces are made in their place
  // in it: nothing is left to be moved. Outputs of the graph are not: they would keep all of it.
  void PlaceOperandsInResults() {
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (!live_[n] || forms_[n] != Form::kCollective || !defs_[n]->one_output ||
          node.collective->kind != CollectiveKind::kAllGather ||
          HasRuntimeCounts(*node.collective)) {
        continue;
      }
      const ValueIndex result = values_.first_output(static_cast<int32_t>(n));
      const ValueIndex input = node.inputs[0];
      const int32_t producer = values_.producer(input);
      Value& operand = table_[input];
      if (!table_[result].used || producer < 0 ||
          forms_[static_cast<size_t>(producer)] != Form::kKernel || operand.root != input ||
          operand.is_output || operand.slice_of >= 0 || values_.type(input).num_bytes() == 0) {
        continue;
      }
      operand.slice_of = result;
      operand.offset = pieces_[n].OutputOffset(static_cast<size_t>(node.collective->rank.value()));
      table_[result].counted = true;
    }
  }

  // --- Equal work ---

  // Output `i` of collective `n`: whoever is a member has the same.
  bool IsEqualResult(size_t n, size_t i) const {
    const Node& node = graph_.nodes[n];
    if (HasRuntimeCounts(*node.collective) || static_cast<int>(i) >= NumVisible(node)) return false;
    return GivesEqualResults(node.collective->kind);
  }

  // Local ops whose value other ranks may have as well, in sets that are connected: which node
  // stands for each node's set; -1: it is in none.
  std::vector<int32_t> FindEqualSets() const {
    std::vector<bool> equal(static_cast<size_t>(values_.size()), false);
    std::fill_n(equal.begin(), graph_.inputs.size(), true);
    std::vector<int32_t> set_of(graph_.nodes.size(), -1);
    const auto find = [&set_of](int32_t n) {
      while (set_of[static_cast<size_t>(n)] != n) {
        n = set_of[static_cast<size_t>(n)] =
            set_of[static_cast<size_t>(set_of[static_cast<size_t>(n)])];
      }
      return n;
    };
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      const auto first = static_cast<size_t>(values_.first_output(static_cast<int32_t>(n)));
      if (forms_[n] == Form::kCollective) {
        for (size_t i = 0; i < node.outputs.size(); ++i) equal[first + i] = IsEqualResult(n, i);
        continue;
      }
      if (!live_[n] || std::any_of(node.inputs.begin(), node.inputs.end(),
                                   [&](ValueIndex v) { return !equal[static_cast<size_t>(v)]; })) {
        continue;
      }
      set_of[n] = static_cast<int32_t>(n);
      std::fill_n(equal.begin() + static_cast<ptrdiff_t>(first), node.outputs.size(), true);
      for (const ValueIndex v : node.inputs) {
        const int32_t producer = values_.producer(v);
        if (producer < 0 || set_of[static_cast<size_t>(producer)] < 0) continue;
        set_of[static_cast<size_t>(find(producer))] = find(static_cast<int32_t>(n));
      }
    }
    for (size_t n = 0; n < set_of.size(); ++n) {
      if (set_of[n] >= 0) set_of[n] = find(static_cast<int32_t>(n));
    }
    return set_of;
  }

  // Sees which of the nodes in `set_of` lead to nothing but each other and outputs.
  std::vector<bool> FindSharable(const std::vector<int32_t>& set_of) const {
    std::vector<bool> sharable(graph_.nodes.size(), false);
    std::vector<bool> used_elsewhere(static_cast<size_t>(values_.size()), false);
    for (size_t n = graph_.nodes.size(); n-- > 0;) {
      if (!live_[n]) continue;
      const Node& node = graph_.nodes[n];
      const auto first = used_elsewhere.begin() + values_.first_output(static_cast<int32_t>(n));
      sharable[n] = set_of[n] >= 0 &&
                    std::find(first, first + static_cast<ptrdiff_t>(node.outputs.size()), true) ==
                        first + static_cast<ptrdiff_t>(node.outputs.size());
      if (sharable[n]) continue;
      for (const ValueIndex v : node.inputs) used_elsewhere[static_cast<size_t>(v)] = true;
    }
    return sharable;
  }

  // A group as it is collected: a graph of its own, whose inputs are the leaves.
  struct EqualCandidate {
    Graph graph;
    std::vector<Plan::EqualGroup::Leaf> leaves;
    absl::flat_hash_map<ValueIndex, ValueIndex> numbers;  // in `graph`; of leaves: ~place
    ValueIndex next_number = 0;
    std::vector<ValueIndex> results;
    std::vector<int32_t> kernels;  // nodes that may be left out
    bool after_collective = false;
    int64_t bytes = 0;  // that the kernels read and write
  };

  void FindEqualWork() {
    group_of_.assign(graph_.nodes.size(), -1);
    if (!options_.share_equal_work || !options_.share_results || graph_.num_device_slots != 1 ||
        plan_.votes->participations.empty()) {
      return;
    }
    const std::vector<int32_t> set_of = FindEqualSets();
    const std::vector<bool> sharable = FindSharable(set_of);
    std::vector<EqualCandidate> candidates;
    absl::flat_hash_map<int32_t, size_t> candidate_of;  // by set
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!sharable[n] || forms_[n] != Form::kKernel) continue;
      if (candidate_of.emplace(set_of[n], candidates.size()).second) candidates.emplace_back();
    }
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const auto found = candidate_of.find(set_of[n]);
      if (found != candidate_of.end()) AddToCandidate(n, sharable[n], &candidates[found->second]);
    }
    for (EqualCandidate& candidate : candidates) TakeCandidate(&candidate);
  }

  void AddToCandidate(size_t n, bool sharable, EqualCandidate* candidate) {
    const Node& node = graph_.nodes[n];
    const ValueIndex first = values_.first_output(static_cast<int32_t>(n));
    Node copy = node;
    for (ValueIndex& v : copy.inputs) {
      const auto added =
          candidate->numbers.emplace(v, ~static_cast<ValueIndex>(candidate->leaves.size()));
      if (added.second) AddLeaf(v, candidate);
      v = added.first->second;
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      candidate->numbers.emplace(first + static_cast<ValueIndex>(i), candidate->next_number++);
    }
    candidate->graph.nodes.push_back(std::move(copy));
    if (!sharable || forms_[n] != Form::kKernel) return;
    candidate->kernels.push_back(static_cast<int32_t>(n));
    for (const ValueIndex v : node.inputs) candidate->bytes += values_.type(v).num_bytes();
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const ValueIndex v = first + static_cast<ValueIndex>(i);
      candidate->bytes += node.outputs[i].num_bytes();
      if (table_[v].is_output) candidate->results.push_back(v);
    }
  }

  void AddLeaf(ValueIndex v, EqualCandidate* candidate) const {
    Plan::EqualGroup::Leaf leaf;
    const int32_t producer = values_.producer(v);
    if (producer < 0) {
      leaf.input = v;
    } else {
      leaf.participation = participation_of_[static_cast<size_t>(producer)];
      leaf.place = v - values_.first_output(producer);
      candidate->after_collective = true;
    }
    GraphInput input;
    input.type = values_.type(v);
    candidate->graph.inputs.push_back(std::move(input));
    candidate->leaves.push_back(leaf);
  }

  void TakeCandidate(EqualCandidate* candidate) {
    if (!candidate->after_collective || candidate->results.empty() ||
        candidate->bytes < options_.least_equal_bytes) {
      return;
    }
    const auto leaves = static_cast<ValueIndex>(candidate->leaves.size());
    for (Node& node : candidate->graph.nodes) {
      for (ValueIndex& v : node.inputs) v = v < 0 ? ~v : v + leaves;
    }
    const auto index = static_cast<int32_t>(plan_.equal_groups.size());
    Plan::EqualGroup group;
    for (const ValueIndex v : candidate->results) {
      GraphOutput output;
      output.value = candidate->numbers[v] + leaves;
      candidate->graph.outputs.push_back(output);
      table_[v].equal_group = index;
      table_[v].equal_place = static_cast<int32_t>(group.results.size());
      group.results.push_back(v);  // its buffer, once it has one
    }
    for (const int32_t n : candidate->kernels) group_of_[static_cast<size_t>(n)] = index;
    group.hash = HashGraph(candidate->graph);
    group.leaves = std::move(candidate->leaves);
    group.kernels = static_cast<int64_t>(candidate->kernels.size());
    plan_.equal_groups.push_back(std::move(group));
  }

  void FindLifetimes() {
    for (size_t at = 0; at < order_.size(); ++at) {
      const auto n = static_cast<size_t>(order_[at]);
      if (!live_[n] || forms_[n] == Form::kAlias) continue;
      const ValueIndex first = values_.first_output(order_[at]);
      for (const ValueIndex v : graph_.nodes[n].inputs) Touch(v, at);
      for (size_t i = 0; i < graph_.nodes[n].outputs.size(); ++i) {
        Touch(first + static_cast<ValueIndex>(i), at);
      }
    }
  }
  void Touch(ValueIndex v, size_t at) {
    table_[table_[v].root].last_use = static_cast<int32_t>(at);
  }

  // Whether an output may be written where the input stands that it may alias.
  bool MayTakeOver(const GraphOutput& output) const {
    if (output.may_alias < 0 || graph_.num_device_slots != 1) return false;
    const Value& value = table_[output.value];
    const Value& input = table_[output.may_alias];
    const TensorType& type = values_.type(output.value);
    const int32_t producer = values_.producer(output.value);
    // Counted inputs are read by others, who may keep them, or are outputs themselves.
    if (value.root != output.value || value.takes_over || producer < 0 || input.counted ||
        forms_[static_cast<size_t>(producer)] != Form::kKernel ||
        type.num_bytes() != values_.type(output.may_alias).num_bytes()) {
      return false;
    }
    if (!put_off_[static_cast<size_t>(producer)]) return false;
    // Local ops run in their order: whoever else reads the input must come before.
    const int32_t writes = place_of_[static_cast<size_t>(producer)];
    if (input.last_use < writes) return true;
    const Node& writer = graph_.nodes[static_cast<size_t>(producer)];
    if (input.last_use > writes || !defs_[static_cast<size_t>(producer)]->elementwise) {
      return false;
    }
    for (const ValueIndex v : writer.inputs) {
      if (table_[v].root == output.may_alias && values_.type(v) != type) return false;
    }
    return true;
  }

  void ChooseDonors() {
    place_of_.resize(graph_.nodes.size());
    for (size_t at = 0; at < order_.size(); ++at) {
      place_of_[static_cast<size_t>(order_[at])] = static_cast<int32_t>(at);
    }
    for (const GraphOutput& output : graph_.outputs) {
      const bool takes_over = MayTakeOver(output);
      donors_.push_back(takes_over ? output.may_alias : -1);
      if (takes_over) table_[output.value].takes_over = true;
    }
  }

  int32_t AddBuffer(BufferSpec spec) {
    plan_.buffers.push_back(spec);
    return static_cast<int32_t>(plan_.buffers.size()) - 1;
  }

  BufferSpec SpecOf(BufferSpec::Kind kind, ValueIndex v) const {
    BufferSpec spec;
    spec.kind = kind;
    spec.device_slot = values_.device_slot(v);
    spec.bytes = values_.type(v).num_bytes();
    return spec;
  }

  // Gives every value that stands in a buffer of its own its entry; the rest lives in a workspace,
  // where Schedule() finds room for it.
  void PlaceValues() {
    slots_.resize(static_cast<size_t>(graph_.num_device_slots));
    plan_.collectives.resize(slots_.size());
    for (size_t i = 0; i < graph_.inputs.size(); ++i) {
      BufferSpec spec = SpecOf(BufferSpec::Kind::kInput, static_cast<ValueIndex>(i));
      spec.index = static_cast<int32_t>(i);
      table_[i].buffer = AddBuffer(spec);
    }
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!live_[n]) continue;
      const Node& node = graph_.nodes[n];
      const ValueIndex first = values_.first_output(static_cast<int32_t>(n));
      for (size_t i = 0; i < node.outputs.size(); ++i) {
        const ValueIndex v = first + static_cast<ValueIndex>(i);
        Value& value = table_[v];
        if (value.root != v || value.slice_of >= 0) continue;
        if (value.list_member >= 0) {
          if (!value.used) continue;
          BufferSpec spec = SpecOf(BufferSpec::Kind::kPeer, v);
          spec.index = participation_of_[n];
          spec.list_member = value.list_member;
          spec.list_index = value.list_index;
          value.buffer = AddBuffer(spec);
        } else if (value.used && IsShared(n, i)) {
          BufferSpec spec = SpecOf(BufferSpec::Kind::kShared, v);
          spec.index = participation_of_[n];
          value.buffer = AddBuffer(spec);
        } else if (value.counted) {
          value.buffer = AddBuffer(SpecOf(BufferSpec::Kind::kOwned, v));
        } else if (value.used || forms_[n] != Form::kCollective || MustBeWritten(node, i)) {
          value.in_workspace = true;
        }
      }
    }
    for (Value& value : table_) {
      if (value.slice_of >= 0) value.buffer = table_[value.slice_of].buffer;
    }
    for (Plan::EqualGroup& group : plan_.equal_groups) {
      for (int32_t& result : group.results) result = table_[result].buffer;
    }
    plan_.operands.resize(plan_.votes->participations.size());
    plan_.written.resize(plan_.votes->participations.size());
    plan_.input_may_be_staging.resize(graph_.inputs.size());
    std::vector<StagingUse> uses(graph_.inputs.size());
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (live_[n]) CountStagingUses(n, &uses);
    }
    for (size_t i = 0; i < uses.size(); ++i) {
      const StagingUse& use = uses[i];
      plan_.input_may_be_staging[i] = !table_[i].is_output && !use.other &&
                                      (use.copies == 0 || (use.copies == 1 && !use.reduced));
    }
  }

  // Whether output `i` of node `n` is one for all ranks of the node: the result alone.
  bool IsShared(size_t n, size_t i) const {
    return i == 0 && options_.share_results && forms_[n] == Form::kCollective &&
           GivesEqualResults(graph_.nodes[n].collective->kind);
  }
  // Reductions are computed whether or not this rank uses them; what only moves, and extras, are
  // not asked for.
  static bool MustBeWritten(const Node& node, size_t i) {
    return IsReducing(node.collective->kind) && static_cast<int>(i) < NumVisible(node);
  }

  struct StagingUse {
    bool reduced = false;
    bool other = false;
    int32_t copies = 0;
  };
  void CountStagingUses(size_t n, std::vector<StagingUse>* uses) const {
    const Node& node = graph_.nodes[n];
    if (forms_[n] == Form::kAlias) return;  // those who read the alias count
    for (const ValueIndex v : node.inputs) {
      const ValueIndex root = table_[v].root;
      if (static_cast<size_t>(root) >= uses->size()) continue;
      StagingUse& use = (*uses)[static_cast<size_t>(root)];
      if (defs_[n]->input_use == InputUse::kReductionOperand && IsFloating(values_.type(v).dtype) &&
          ReadsOnce(node)) {
        use.reduced = true;
      } else if (forms_[n] == Form::kCopy && !options_.share_results) {
        ++use.copies;
      } else {
        use.other = true;
      }
    }
  }

  // --- Steps ---

  Place PlaceOf(ValueIndex v) {
    const Value& root = table_[table_[v].root];
    Place place;
    if (root.in_workspace) {
      Slot& slot = slots_[static_cast<size_t>(values_.device_slot(table_[v].root))];
      place.buffer = slot.workspace_buffer;
      place.offset = root.block.offset;
    } else {
      place.buffer = root.buffer;
    }
    place.offset += root.offset;
    if (table_[v].root != v) place.offset += table_[v].offset;
    return place;
  }

  // Begins a step: what it reads, and the wait that this takes.
  Step Begin(int32_t slot_index, StreamId stream, absl::Span<const ValueIndex> inputs,
             int32_t also_after = -1) {
    Slot& slot = slots_[static_cast<size_t>(slot_index)];
    Step step;
    step.stream = stream;
    int32_t needed = also_after;
    for (const ValueIndex v : inputs) {
      const Value& value = table_[v];
      if (value.ready_step >= 0 && value.ready_stream != stream) {
        needed = std::max(needed, value.ready_step);
      }
      step.inputs.push_back(PlaceOf(v));
    }
    int32_t& known = slot.known[static_cast<int>(stream)];
    if (needed > known) {
      slot.waits_for.push_back(needed);
      known = needed;
    } else {
      slot.waits_for.push_back(-1);
    }
    for (const ValueIndex v : inputs) TouchBlock(v, slot_index, stream);
    return step;
  }

  int32_t CurrentStep(int32_t slot_index) const {
    return static_cast<int32_t>(slots_[static_cast<size_t>(slot_index)].plan.steps.size());
  }

  void TouchBlock(ValueIndex v, int32_t slot_index, StreamId stream) {
    Value& root = table_[table_[v].root];
    if (root.in_workspace) {
      root.block.touched.step[static_cast<int>(stream)] = CurrentStep(slot_index);
    }
  }

  // Finds room for an output of the step that was begun.
  Place PlaceOutput(ValueIndex v, int32_t slot_index, StreamId stream) {
    Value& value = table_[v];
    Slot& slot = slots_[static_cast<size_t>(slot_index)];
    if (value.root == v && value.in_workspace) {
      if (slot.workspace_buffer < 0) {
        BufferSpec spec;
        spec.kind = BufferSpec::Kind::kWorkspace;
        spec.device_slot = slot_index;
        slot.workspace_buffer = AddBuffer(spec);
      }
      value.block = slot.workspace.Allocate(values_.type(v).num_bytes(), stream,
                                            slot.known[static_cast<int>(stream)]);
      TouchBlock(v, slot_index, stream);
    }
    Place place;
    if (value.root == v) {
      place = PlaceOf(v);
      place.producer = value.list_member;
    }
    value.ready_step = CurrentStep(slot_index);
    value.ready_stream = stream;
    return place;
  }

  void Push(int32_t slot_index, Step step) {
    slots_[static_cast<size_t>(slot_index)].plan.steps.push_back(std::move(step));
  }

  // Gives back what nobody touches after the node at place `at` of the order.
  void FreeAfter(ValueIndex v, int32_t at) {
    Value& root = table_[table_[v].root];
    if (!root.in_workspace || root.last_use != at) return;
    root.last_use = -1;  // once
    slots_[static_cast<size_t>(values_.device_slot(table_[v].root))].workspace.Free(root.block);
  }

  void Schedule(int32_t n, int32_t at) {
    const Node& node = graph_.nodes[static_cast<size_t>(n)];
    const ValueIndex first = values_.first_output(n);
    switch (forms_[static_cast<size_t>(n)]) {
      case Form::kAlias: {
        const Value& from = table_[node.inputs[0]];
        table_[first].ready_step = from.ready_step;
        table_[first].ready_stream = from.ready_stream;
        return;
      }
      case Form::kKernel:
        ScheduleKernel(n, at);
        break;
      case Form::kCollective:
        ScheduleCollective(n);
        break;
      case Form::kCopy:
        ScheduleCopy(n);
        break;
    }
    for (const ValueIndex v : node.inputs) FreeAfter(v, at);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      FreeAfter(first + static_cast<ValueIndex>(i), at);
    }
  }

  void ScheduleKernel(int32_t n, int32_t at) {
    const Node& node = graph_.nodes[static_cast<size_t>(n)];
    const ValueIndex first = values_.first_output(n);
    Step step = Begin(node.device_slot, StreamId::kCompute, node.inputs);
    // In place, where the op allows it and the input is not needed any more.
    if (defs_[static_cast<size_t>(n)]->elementwise && node.outputs.size() == 1) {
      for (const ValueIndex v : node.inputs) {
        if (values_.type(v) == node.outputs[0]) FreeAfter(v, at);
      }
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      step.outputs.push_back(
          PlaceOutput(first + static_cast<ValueIndex>(i), node.device_slot, StreamId::kCompute));
      step.held_back |= table_[first + static_cast<ValueIndex>(i)].takes_over;
    }
    DevicePlan& plan = slots_[static_cast<size_t>(node.device_slot)].plan;
    step.node = static_cast<int32_t>(plan.nodes.size());
    step.equal_group = group_of_[static_cast<size_t>(n)];
    if (step.equal_group >= 0) last_equal_step_ = static_cast<int32_t>(plan.steps.size());
    DevicePlan::Kernel kernel;
    kernel.node = node;
    kernel.node.inputs.clear();
    for (const ValueIndex v : node.inputs) kernel.input_types.push_back(values_.type(v));
    plan.nodes.push_back(std::move(kernel));
    Push(node.device_slot, std::move(step));
  }

  void ScheduleCollective(int32_t n) {
    const Node& node = graph_.nodes[static_cast<size_t>(n)];
    const OpDef& def = *defs_[static_cast<size_t>(n)];
    const CollectivePieces& pieces = pieces_[static_cast<size_t>(n)];
    const Collective& c = *node.collective;
    const ValueIndex first = values_.first_output(n);
    const int32_t participation = participation_of_[static_cast<size_t>(n)];
    Slot& slot = slots_[static_cast<size_t>(node.device_slot)];
    Step step = Begin(node.device_slot, StreamId::kCommunication, node.inputs);
    const bool runtime = HasRuntimeCounts(c);
    // A tensor that holds pieces of so many rows, as the places of all of them.
    const auto push_pieces = [&pieces](Place place, const std::vector<int64_t>& rows, DType dtype,
                                       auto* to) {
      for (const int64_t n : rows) {
        to->push_back(place);
        place.offset += n * pieces.row_elements * DTypeBytes(dtype);
      }
    };
    if (def.one_input && !runtime && !node.inputs.empty()) {
      const auto operands = step.inputs;
      step.inputs.clear();
      push_pieces(operands[0], pieces.inputs, pieces.dtype, &step.inputs);
      step.inputs.insert(step.inputs.end(), operands.begin() + 1, operands.end());
    }
    for (size_t i = 0; i < pieces.inputs.size(); ++i) {
      const Place& place = step.inputs[i];
      plan_.operands[static_cast<size_t>(participation)].push_back({place.buffer, place.offset});
    }
    // The peer's place in the pair's communicator.
    const int32_t peer = c.peer.value() < c.rank.value() ? 0 : 1;
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const Place place = PlaceOutput(first + static_cast<ValueIndex>(i), node.device_slot,
                                      StreamId::kCommunication);
      const bool holders = static_cast<int>(i) >= NumVisible(node) && !IsFactor(node, i);
      if (def.one_output && !runtime && i == 0) {
        push_pieces(place, pieces.outputs, pieces.dtype, &step.outputs);
        continue;
      }
      if (def.one_input && !runtime && holders) {
        push_pieces(place, pieces.inputs, DType::kF32, &step.outputs);
        continue;
      }
      step.outputs.push_back(place);
      if (HasPeer(c.kind) && place.producer >= 0) step.outputs.back().producer = peer;
    }
    plan_.written[static_cast<size_t>(participation)] = WrittenBy(n);
    DevicePlan::CollectiveStep collective;
    collective.kind = c.kind;
    collective.reduction = c.reduction;
    collective.root = HasPeer(c.kind) ? peer : c.root.value();
    collective.dtype = pieces.dtype;
    collective.num_inputs = static_cast<int32_t>(pieces.inputs.size());
    collective.num_outputs = static_cast<int32_t>(pieces.outputs.size());
    if (runtime) {
      collective.runtime = RuntimeOf(node, pieces);
    } else {
      SetCounts(pieces, &collective);
    }
    Plan::CollectiveSlot binding;
    binding.participation = participation;
    auto& bindings = plan_.collectives[static_cast<size_t>(node.device_slot)];
    collective.binding = static_cast<int32_t>(bindings.size());
    bindings.push_back(binding);
    step.collective = static_cast<int32_t>(slot.plan.collectives.size());
    NoteMeeting(node.device_slot, collective.binding);
    slot.plan.collectives.push_back(std::move(collective));
    Push(node.device_slot, std::move(step));
  }

  static DevicePlan::RuntimeCounts RuntimeOf(const Node& node, const CollectivePieces& pieces) {
    const Collective& c = *node.collective;
    DevicePlan::RuntimeCounts runtime;
    runtime.row_elements = pieces.row_elements;
    if (!pieces.inputs.empty()) runtime.input_rows = pieces.inputs[0];
    if (!pieces.outputs.empty()) runtime.output_rows = pieces.outputs[0];
    const int counts = static_cast<int>(node.inputs.size()) - c.runtime_counts_input -
                       (c.reduction == Reduction::kPremulSum ? 1 : 0);
    runtime.sends = !pieces.inputs.empty();
    runtime.receives = counts > (runtime.sends ? 1 : 0);
    runtime.received = !pieces.outputs.empty();
    runtime.source = node.source;
    return runtime;
  }

  Plan::Written WrittenBy(int32_t n) const {
    const Node& node = graph_.nodes[static_cast<size_t>(n)];
    Plan::Written written;
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const ValueIndex v = values_.first_output(n) + static_cast<ValueIndex>(i);
      const Value& value = table_[v];
      if (value.root != v || value.list_member >= 0) continue;
      if (value.buffer < 0 && !value.in_workspace) continue;
      const bool reduces = IsReducing(node.collective->kind) && !IsFactor(node, i);
      (reduces ? written.reduced : written.copied) += node.outputs[i].num_bytes();
      written.shared |= IsShared(static_cast<size_t>(n), i);
      if (!node.inputs.empty() && table_[node.inputs[0]].slice_of == v) {
        written.copied -= values_.type(node.inputs[0]).num_bytes();
      }
    }
    return written;
  }

  static void SetCounts(const CollectivePieces& pieces, DevicePlan::CollectiveStep* collective) {
    collective->count = pieces.dims.empty() ? 1 : pieces.dims[0] * pieces.row_elements;
    const auto differ = [&](const std::vector<int64_t>& rows) {
      return std::any_of(rows.begin(), rows.end(), [&](int64_t n) { return n != pieces.dims[0]; });
    };
    const auto elements = [&](const std::vector<int64_t>& rows) {
      std::vector<int64_t> counts;
      for (const int64_t n : rows) counts.push_back(n * pieces.row_elements);
      return counts;
    };
    if (pieces.dims.empty()) return;
    if (differ(pieces.inputs)) collective->input_counts = elements(pieces.inputs);
    if (differ(pieces.outputs)) collective->output_counts = elements(pieces.outputs);
  }

  // A send on the one slot, a recv on the other. With shared memory the value stays where it is and
  // the two only order.
  void ScheduleCopy(int32_t n) {
    const Node& node = graph_.nodes[static_cast<size_t>(n)];
    const ValueIndex input = node.inputs[0];
    const ValueIndex output = values_.first_output(n);
    const int32_t from = values_.device_slot(input);
    const int32_t to = node.device_slot;
    Step send = Begin(from, StreamId::kCommunication, node.inputs);
    Step recv = Begin(to, StreamId::kCommunication, {});
    recv.outputs.push_back(PlaceOutput(output, to, StreamId::kCommunication));
    for (const bool sends : {true, false}) {
      const int32_t here = sends ? from : to;
      Slot& slot = slots_[static_cast<size_t>(here)];
      DevicePlan::CollectiveStep collective;
      collective.kind = sends ? CollectiveKind::kSend : CollectiveKind::kRecv;
      collective.root = sends ? 1 : 0;
      collective.dtype = values_.type(input).dtype;
      collective.count = values_.type(input).num_elements();
      (sends ? collective.num_inputs : collective.num_outputs) = 1;
      collective.binding = PairBinding(here, from, to);
      NoteMeeting(here, collective.binding);
      Step& step = sends ? send : recv;
      step.collective = static_cast<int32_t>(slot.plan.collectives.size());
      slot.plan.collectives.push_back(collective);
      Push(here, std::move(step));
    }
  }

  // No rank ends before the others have done what they do for it.
  void ScheduleEqualBarrier() {
    Slot& slot = slots_[0];
    Step step = Begin(0, StreamId::kCommunication, {}, last_equal_step_);
    DevicePlan::CollectiveStep barrier;
    barrier.kind = CollectiveKind::kBarrier;
    barrier.binding = static_cast<int32_t>(plan_.collectives[0].size());
    Plan::CollectiveSlot binding;
    binding.equal_work = true;
    plan_.collectives[0].push_back(binding);
    step.collective = static_cast<int32_t>(slot.plan.collectives.size());
    slot.plan.collectives.push_back(std::move(barrier));
    Push(0, std::move(step));
    slot.plan.num_equal_groups = static_cast<int32_t>(plan_.equal_groups.size());
  }

  void NoteMeeting(int32_t slot, int32_t binding) {
    if (!plan_.meetings.empty()) plan_.meetings[static_cast<size_t>(slot)].push_back(binding);
  }

  int32_t PairBinding(int32_t here, int32_t from, int32_t to) {
    auto& bindings = plan_.collectives[static_cast<size_t>(here)];
    std::vector<int32_t>& known = pair_bindings_[PairIndex(here == from ? 0 : 1, from, to)];
    if (known.empty()) {
      known.push_back(static_cast<int32_t>(bindings.size()));
      Plan::CollectiveSlot binding;
      binding.from_slot = from;
      binding.to_slot = to;
      bindings.push_back(binding);
    }
    return known[0];
  }
  size_t PairIndex(int end, int32_t from, int32_t to) {
    const auto slots = static_cast<size_t>(graph_.num_device_slots);
    pair_bindings_.resize(2 * slots * slots);
    return (static_cast<size_t>(end) * slots + static_cast<size_t>(from)) * slots +
           static_cast<size_t>(to);
  }

  void PlaceOutputs() {
    FindOrigins();
    for (const GraphOutput& output : graph_.outputs) {
      Plan::Output place;
      const Place at = PlaceOf(output.value);
      place.buffer = at.buffer;
      place.offset = at.offset;
      place.bytes = values_.type(output.value).num_bytes();
      place.device_slot = values_.device_slot(output.value);
      place.donor = donors_[plan_.outputs.size()];
      FindOrigin(output.value, &place);
      plan_.outputs.push_back(place);
    }
    // Whoever reads or names a buffer behind the run: outputs, and other ranks its operands.
    std::vector<int32_t> readers(plan_.buffers.size(), 0);
    const auto count = [&readers](int32_t buffer) {
      if (buffer >= 0) ++readers[static_cast<size_t>(buffer)];
    };
    for (const Plan::Output& output : plan_.outputs) count(output.buffer);
    for (const std::vector<Plan::Operand>& operands : plan_.operands) {
      for (const Plan::Operand& operand : operands) count(operand.buffer);
    }
    for (Plan::Output& output : plan_.outputs) {
      const auto buffer = static_cast<size_t>(output.buffer);
      output.sole = output.buffer >= 0 && output.offset == 0 && readers[buffer] == 1 &&
                    plan_.buffers[buffer].kind == BufferSpec::Kind::kOwned;
    }
  }

  // Which value each one is, if it is nothing but another one's alias.
  void FindOrigins() {
    origin_.resize(static_cast<size_t>(values_.size()));
    std::iota(origin_.begin(), origin_.end(), 0);
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (forms_[n] != Form::kAlias) continue;
      const ValueIndex input = graph_.nodes[n].inputs[0];
      const ValueIndex output = values_.first_output(static_cast<int32_t>(n));
      origin_[static_cast<size_t>(output)] = origin_[static_cast<size_t>(input)];
    }
  }

  // Whether other ranks may have the same value.
  void FindOrigin(ValueIndex v, Plan::Output* output) const {
    v = origin_[static_cast<size_t>(v)];
    const int32_t producer = values_.producer(v);
    if (producer < 0) return;
    const auto n = static_cast<size_t>(producer);
    const int32_t place = v - values_.first_output(producer);
    if (table_[v].equal_group >= 0) {
      output->equal_group = table_[v].equal_group;
      output->place = table_[v].equal_place;
    } else if (forms_[n] == Form::kCollective && options_.share_results &&
               IsEqualResult(n, static_cast<size_t>(place))) {
      output->participation = participation_of_[n];
      output->place = place;
    }
  }

  // Numbers the events: one for each step that another stream waits for, free again after that
  // wait.
  void Finish() {
    for (Slot& slot : slots_) {
      std::vector<int32_t> event_of(slot.plan.steps.size(), -1);
      std::vector<bool> waited_for(slot.plan.steps.size(), false);
      for (const int32_t step : slot.waits_for) {
        if (step >= 0) waited_for[static_cast<size_t>(step)] = true;
      }
      std::vector<int32_t> free;
      for (size_t s = 0; s < slot.plan.steps.size(); ++s) {
        Step& step = slot.plan.steps[s];
        if (slot.waits_for[s] >= 0) {
          step.wait = event_of[static_cast<size_t>(slot.waits_for[s])];
          free.push_back(step.wait);
        }
        if (waited_for[s]) {
          if (free.empty()) free.push_back(slot.plan.num_events++);
          step.record = event_of[s] = free.back();
          free.pop_back();
        }
      }
    }
    for (size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      const int64_t bytes = slot.workspace.bytes();
      if (slot.workspace_buffer >= 0) {
        plan_.buffers[static_cast<size_t>(slot.workspace_buffer)].bytes = bytes;
      }
      plan_.workspace_bytes.push_back(bytes);
      slot.plan.num_buffers = static_cast<int32_t>(plan_.buffers.size());
      slot.plan.num_bindings = static_cast<int32_t>(plan_.collectives[i].size());
      plan_.device_plans.push_back(EncodeDevicePlan(slot.plan));
    }
  }

  const Graph& graph_;
  const PlanOptions& options_;
  const ValueTable values_;
  int64_t taken_ = 0;  // of options_.max_bytes
  Plan plan_;
  std::vector<const OpDef*> defs_;         // by node
  std::vector<Form> forms_;                // by node
  std::vector<CollectivePieces> pieces_;   // by node; of collectives
  std::vector<int32_t> participation_of_;  // by node
  std::vector<bool> live_;                 // by node
  std::vector<int32_t> group_of_;          // by node: of equal work, or -1
  std::vector<int32_t> order_;             // nodes, as they are enqueued
  std::vector<bool> emitted_;              // by node: it is in `order_`
  std::vector<int32_t> place_of_;          // by node: its place in `order_`
  std::vector<bool> put_off_;              // by node; empty: nothing may take over
  std::vector<int32_t> donors_;            // by output
  int32_t last_equal_step_ = -1;
  std::vector<Value> table_;        // by value
  std::vector<ValueIndex> origin_;  // by value
  std::vector<Slot> slots_;
  std::vector<std::vector<int32_t>> pair_bindings_;
};

int64_t MemoryOf(const VoteTemplate& votes) {
  int64_t bytes = static_cast<int64_t>(sizeof(VoteTemplate)) + ListBytes(votes.participations);
  for (const Participation& p : votes.participations) {
    bytes += ListBytes(p.descriptor.dims) + ListBytes(p.descriptor.sends) +
             ListBytes(p.descriptor.receives) + ListBytes(p.after) + TextBytes(p.source.size());
    if (p.label == nullptr) continue;
    bytes += BlockBytes(sizeof(PartLabel)) + TextBytes(p.label->op.size()) +
             TextBytes(p.label->what.size()) + TextBytes(p.label->source.size());
  }
  return bytes;
}

}  // namespace

int64_t MemoryOf(const Plan& plan) {
  int64_t bytes = static_cast<int64_t>(sizeof(Plan)) + ListBytes(plan.buffers) +
                  ListBytes(plan.outputs) + ListBytes(plan.equal_groups) +
                  BlockBytes(static_cast<int64_t>(plan.input_may_be_staging.size()) / 8) +
                  ListBytes(plan.operands) + ListBytes(plan.instances) + ListBytes(plan.written) +
                  ListBytes(plan.collectives) + ListBytes(plan.meetings) +
                  ListBytes(plan.device_plans) + ListBytes(plan.workspace_bytes);
  for (const Plan::EqualGroup& group : plan.equal_groups) {
    bytes += ListBytes(group.leaves) + ListBytes(group.results);
  }
  for (const auto& operands : plan.operands) bytes += ListBytes(operands);
  for (const auto& slots : plan.collectives) bytes += ListBytes(slots);
  for (const auto& meetings : plan.meetings) bytes += ListBytes(meetings);
  for (const std::string& device_plan : plan.device_plans) bytes += TextBytes(device_plan.size());
  return bytes + (plan.votes == nullptr ? 0 : kBlockOverheadBytes + MemoryOf(*plan.votes));
}

absl::StatusOr<Plan> CompilePlan(const Graph& graph, const PlanOptions& options) {
  return Compiler(graph, options).Run();
}

}  // namespace chorus
