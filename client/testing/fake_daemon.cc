#include "client/testing/fake_daemon.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/internal/access.h"
#include "client/internal/session_core.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/ops/specialize.h"
#include "core/ops/testing/evaluator.h"
#include "core/ops/testing/value.h"
#include "core/ops/validate.h"

namespace chorus {
namespace testing {
namespace {

struct FakeTensor {
  uint32_t generation = 0;
  bool alive = false;
  bool done = false;
  absl::Status status;
  Value value;
};

struct FakeLinkState {
  int64_t next_sequence = 1;
  // Runs keep what they name: a name may be released and used again before they are over.
  std::map<int32_t, std::shared_ptr<FakeTensor>> tensors;

  FakeTensor& Tensor(int32_t slot) {
    std::shared_ptr<FakeTensor>& tensor = tensors[slot];
    if (tensor == nullptr) tensor = std::make_shared<FakeTensor>();
    return *tensor;
  }
  std::map<int32_t, std::pair<uint32_t, std::shared_ptr<const Graph>>> graphs;
  std::map<int64_t, absl::Status> outcomes;
  std::map<int32_t, std::unique_ptr<std::vector<char>>> arenas;
  int32_t next_arena = 0;
  int index = 0;  // among the links
  bool closed = false;
};

// One end of a pair: group, source, destination, tag, whether it receives.
using PairEnd = std::tuple<int32_t, int32_t, int32_t, int64_t, bool>;

// How far a rank has counted in its step.
struct Member {
  FakeLinkState* link = nullptr;
  int64_t step = 0;
  std::map<int32_t, CallPosition> calls;  // by group: the next one
  std::map<PairEnd, int64_t> pair_calls;
  bool left_rest = false;

  void Begin(int64_t next) {
    if (next <= step) return;
    step = next;
    calls.clear();
    pair_calls.clear();
    left_rest = false;
  }
  CallPosition Next(int32_t group) const {
    const auto row = calls.find(group);
    return row == calls.end() ? CallPosition{step, 0, 0} : row->second;
  }
};

struct FakeTape {
  enum State { kNone, kLive, kAbandoned, kConsumed, kRefused };
  State state = kNone;
  bool leads_to_collective = false;
  std::string source;
  std::map<int64_t, int64_t> next_request;  // by step
};

struct FakeWorld {
  int64_t id = 0;
  int size = 0;
  int64_t epoch = 1;
  std::map<int64_t, absl::Status> causes;
  std::map<int, Member> members;
  std::vector<std::vector<int>> groups;
  // By list, step and number.
  std::map<std::tuple<std::vector<int>, int64_t, int64_t>, int> groups_by_request;
  // Key's text -> member's world rank -> entry.
  std::map<std::string, std::map<int, FakeTape>> tapes;
};

struct PendingRun {
  FakeLinkState* link = nullptr;
  int64_t sequence = 0;
  std::shared_ptr<const Graph> graph;
  Run run;
  FakeWorld* world = nullptr;
  int64_t epoch = 0;
  std::vector<std::shared_ptr<FakeTensor>> operands;  // by input; null: not a tensor
  std::vector<std::shared_ptr<FakeTensor>> results;   // by output
  std::vector<InstanceKey> keys;                      // by node
  std::vector<int> ranks;                             // by node: whose it is, in the world
  std::vector<bool> posted;                           // by node
  std::vector<bool> finished;                         // by node
  std::vector<bool> have;                             // by value
  std::vector<Value> values;
  bool over = false;
};

struct Contribution {
  std::shared_ptr<PendingRun> run;
  int node = 0;
  std::vector<Value> inputs;
};

struct FakeInstance {
  InstanceKey key;
  std::map<int, Contribution> parts;  // by world rank
};

}  // namespace

class FakeDaemon::Impl {
 public:
  Mutex mutex;
  CondVar changed;
  Counts counts ABSL_GUARDED_BY(mutex);
  std::vector<std::unique_ptr<FakeLinkState>> links ABSL_GUARDED_BY(mutex);
  std::map<std::string, std::unique_ptr<FakeWorld>> worlds ABSL_GUARDED_BY(mutex);
  std::map<int64_t, FakeWorld*> worlds_by_id ABSL_GUARDED_BY(mutex);
  std::deque<std::shared_ptr<PendingRun>> pending ABSL_GUARDED_BY(mutex);
  std::map<std::pair<int64_t, std::string>, FakeInstance> instances ABSL_GUARDED_BY(mutex);
  int64_t next_error ABSL_GUARDED_BY(mutex) = 1;
  int failing_registrations ABSL_GUARDED_BY(mutex) = 0;
  int sound_tensors ABSL_GUARDED_BY(mutex) = 0;  // before those
  int failing_tensors ABSL_GUARDED_BY(mutex) = 0;

  absl::Status Record(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Error error = ErrorOf(status);
    if (error.id.value() == 0) error.id = ErrorId(next_error++);
    return ToStatus(error);
  }

  // `status` says which epoch of the world is open.
  absl::Status WithOpen(const FakeWorld& world, const absl::Status& status) {
    Error error = ErrorOf(status);
    error.ended = {{WorldId(world.id), Epoch(world.epoch)}};
    return ToStatus(error);
  }

  void EndEpoch(FakeWorld* world, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    ++counts.ended_epochs;
    const int64_t ended = world->epoch++;
    const absl::Status cause = WithOpen(*world, why);
    world->causes[ended] = cause;
    for (const auto& run : pending) {
      if (run->world == world && run->epoch == ended && !run->over) Finish(run.get(), cause);
    }
    for (auto it = instances.begin(); it != instances.end();) {
      it = it->first.first == world->id ? instances.erase(it) : std::next(it);
    }
  }

  void Finish(PendingRun* run, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    run->over = true;
    run->link->outcomes[run->sequence] = status;
    size_t o = 0;
    while (o < run->results.size()) {
      FakeTensor& tensor = *run->results[o];
      if (!tensor.done) {
        tensor.done = true;
        tensor.status = status;
        if (status.ok()) tensor.value = run->values[run->graph->outputs[o].value];
      }
      ++o;
    }
    changed.SignalAll();
  }

  // For a wait that was in vain.
  std::string Pending() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::string text;
    for (const auto& run : pending) {
      absl::StrAppend(&text, "\n  run ", run->sequence, " of session ", run->link->index, ":");
      for (size_t i = 0; i < run->run.inputs.size(); ++i) {
        if (!run->have[i]) absl::StrAppend(&text, " lacks input ", i, ";");
      }
      for (size_t n = 0; n < run->finished.size(); ++n) {
        if (run->finished[n]) continue;
        absl::StrAppend(&text, " ", run->graph->nodes[n].op, " ",
                        run->keys.empty() ? "" : run->keys[n].ToString(),
                        run->posted[n] ? " posted;" : " waits;");
      }
    }
    return text;
  }

  // A run's own instances, checked against the members' past; they count.
  absl::Status NameInstances(PendingRun* run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const Graph& graph = *run->graph;
    FakeWorld* const world = run->world;
    const bool late = run->epoch < world->epoch;
    run->keys.resize(graph.nodes.size());
    run->ranks.assign(graph.nodes.size(), -1);
    std::map<int, int64_t> steps;  // by rank
    for (size_t s = 0; s < graph.group_slots.size(); ++s) {
      const RunGroup& bound = run->run.groups[s];
      const GroupSlot& slot = graph.group_slots[s];
      if (bound.base.size() != slot.held.size()) return Malformed("a run without its positions");
      for (size_t held_index = 0; held_index < slot.held.size(); ++held_index) {
        const int rank = world->groups[bound.group.value()][slot.held[held_index].value()];
        Member& member = world->members[rank];
        if (member.link != run->link) return Malformed("a member of another session");
        const CallPosition& base = bound.base[held_index];
        if (base.step < member.step) return Malformed("a vote of a step that is over");
        member.Begin(base.step);
        steps[rank] = base.step;
        const CallPosition next = member.Next(bound.group.value());
        const bool rest = next.part > 0 && base == CallPosition{next.step, next.call + 1, 0};
        if (base != next && !rest) {
          return Malformed(
              absl::StrCat("expected position ", next.ToString(), ", got ", base.ToString()));
        }
      }
    }
    std::map<std::pair<int32_t, int>, CallPosition> last;  // group, rank
    std::map<std::pair<int, PairEnd>, int64_t> pairs;      // by rank: the next
    size_t next_pair = 0;
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      if (!graph.nodes[n].collective.has_value()) continue;
      const Collective& c = *graph.nodes[n].collective;
      const RunGroup& bound = run->run.groups[c.group_slot];
      const int32_t group = bound.group.value();
      const int rank = world->groups[group][c.rank.value()];
      Member& member = world->members[rank];
      run->ranks[n] = rank;
      InstanceKey key;
      key.group = bound.group;
      key.since = Epoch(1);
      key.at.step = steps[rank];
      if (c.instance.kind == InstanceRef::Kind::kNext) {
        if (HasPeer(c.kind)) {
          const bool send = c.kind == CollectiveKind::kSend;
          key.source = send ? c.rank : c.peer;
          key.destination = send ? c.peer : c.rank;
          key.tag = c.tag;
          const PairEnd end{group, key.source.value(), key.destination.value(), c.tag, !send};
          if (pairs.count({rank, end}) == 0) {
            if (next_pair == run->run.pair_calls.size())
              return Malformed("a pair without its number");
            const int64_t first = run->run.pair_calls[next_pair++];
            if (first != member.pair_calls[end]) {
              return Malformed(absl::StrCat("expected call ", member.pair_calls[end],
                                            " of the pair, got ", first));
            }
            pairs[{rank, end}] = first;
          }
          key.at.call = pairs[{rank, end}]++;
          member.pair_calls[end] = key.at.call + 1;
        } else {
          const auto before = last.find({group, rank});
          if (before == last.end()) {
            const GroupSlot& slot = graph.group_slots[c.group_slot];
            const auto held = std::find(slot.held.begin(), slot.held.end(), c.rank);
            key.at = bound.base[static_cast<size_t>(held - slot.held.begin())];
          } else if (c.part == 0) {
            key.at = {key.at.step, before->second.call + 1, 0};
          } else {
            key.at = {key.at.step, before->second.call, before->second.part + 1};
          }
          last[{group, rank}] = key.at;
          member.calls[group] = {key.at.step, key.at.call + 1, 0};
          if (run->run.call_goes_on) {
            member.calls[group] = {key.at.step, key.at.call, key.at.part + 1};
          }
        }
      } else {
        InstanceKey parent;
        if (c.instance.kind == InstanceRef::Kind::kGradient) {
          parent = run->keys[c.instance.node];
          key = parent.Gradient({steps[rank], c.instance.request});
        } else {
          key = run->run.instances[c.instance.slot];
          parent = key.Parent();
        }
        FakeTape& tape = world->tapes[parent.ToString()][rank];
        const InstanceKey::Request request = key.path.back();
        if (request.step != steps[rank]) return Malformed("a request of another step");
        if (request.number != tape.next_request[request.step]++) {
          return Malformed(
              absl::StrCat("wrong request ", request.number, " of ", parent.ToString()));
        }
        if (tape.state != FakeTape::kLive && !late) {
          return Malformed(absl::StrCat("rank ", rank, " holds no tape for ", parent.ToString()));
        }
      }
      run->keys[n] = key;
      // A member that was told that nobody asks is told nothing more.
      FakeTape& tape = world->tapes[key.ToString()][rank];
      tape.state = c.wants_grad ? FakeTape::kLive : FakeTape::kAbandoned;
      tape.leads_to_collective = c.leads_to_collective;
      tape.source = graph.nodes[n].source;
    }
    if (next_pair != run->run.pair_calls.size()) return Malformed("numbers of pairs too many");
    // A run that takes a gradient of what it has recorded itself uses the entry up.
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      const absl::optional<Collective>& c = graph.nodes[n].collective;
      if (!c.has_value() || c->instance.kind != InstanceRef::Kind::kGradient) continue;
      FakeTape& tape = world->tapes[run->keys[c->instance.node].ToString()][run->ranks[n]];
      if (tape.state == FakeTape::kLive) tape.state = FakeTape::kConsumed;
    }
    return absl::OkStatus();
  }

  bool HasVote(const FakeWorld* world, const InstanceKey& key, int rank)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    for (const auto& run : pending) {
      if (run->over || run->world != world || run->epoch != world->epoch) continue;
      for (size_t n = 0; n < run->keys.size(); ++n) {
        if (run->ranks[n] == rank && run->keys[n] == key) return true;
      }
    }
    return false;
  }

  // A member will not take part in `key` any more.
  bool HasPassed(FakeWorld* world, const InstanceKey& key, int rank)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (IsAbsent(world, key, rank) || HasVote(world, key, rank)) return false;
    Member& member = world->members[rank];
    FakeTape* const tape =
        key.is_gradient() ? &world->tapes[key.Parent().ToString()][rank] : nullptr;
    if (tape != nullptr && tape->state == FakeTape::kRefused) return true;
    if (member.step != key.step()) return member.step > key.step();
    if (member.left_rest) return true;
    if (tape != nullptr) return tape->next_request[key.step()] > key.path.back().number;
    if (!key.is_pair()) return key.at < member.Next(key.group.value());
    const int32_t source = key.source.value();
    const bool receives = world->groups[key.group.value()][source] != rank;
    return member.pair_calls[{key.group.value(), source, key.destination.value(), key.tag,
                              receives}] > key.at.call;
  }

  // Of the members that a run needs, the first that has passed it.
  absl::optional<absl::Status> PassedBy(PendingRun* run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    for (size_t n = 0; n < run->keys.size(); ++n) {
      if (run->ranks[n] < 0 || run->finished[n]) continue;
      const InstanceKey& key = run->keys[n];
      for (const int rank : Members(run->world, key)) {
        if (rank == run->ranks[n] || !HasPassed(run->world, key, rank)) continue;
        Error error(Reason::kMismatch);
        error.alone = true;
        error.message = absl::StrCat("rank ", rank, " has passed ", key.ToString(), ", for which ",
                                     run->graph->nodes[n].source, " waits");
        return Record(ToStatus(error));
      }
    }
    return absl::nullopt;
  }

  // Fails a run, what shares instances with it and what uses its results.
  void FailAlone(PendingRun* run, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Finish(run, status);
    for (const auto& other : pending) {
      if (other->over) continue;
      bool concerned = false;
      for (size_t n = 0; n < run->keys.size() && run->world == other->world; ++n) {
        if (run->ranks[n] < 0 || run->finished[n]) continue;
        for (size_t m = 0; m < other->keys.size(); ++m) {
          concerned |=
              other->ranks[m] >= 0 && !other->finished[m] && other->keys[m] == run->keys[n];
        }
      }
      for (const auto& operand : other->operands) {
        for (const auto& result : run->results)
          concerned |= operand != nullptr && operand == result;
      }
      if (concerned) FailAlone(other.get(), status);
    }
    for (size_t n = 0; n < run->keys.size(); ++n) {
      if (run->ranks[n] >= 0) instances.erase({run->world->id, run->keys[n].ToString()});
    }
  }

  void FailPassed(FakeWorld* world) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    for (const auto& run : pending) {
      if (run->over || run->world != world) continue;
      const absl::optional<absl::Status> passed = PassedBy(run.get());
      if (passed.has_value()) FailAlone(run.get(), *passed);
    }
  }

  // A run that cannot take part.
  void RefuseRun(PendingRun* run, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (run->world == nullptr || run->epoch != run->world->epoch) return Finish(run, status);
    FakeWorld* const world = run->world;
    if (ErrorOf(status).alone || PassedBy(run).has_value()) return FailAlone(run, status);
    EndEpoch(world, status);
  }

  // What members cannot call. Always an error.
  absl::Status TakeRefusal(FakeLinkState* link, const chorus::Refuse& refuse)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    ++counts.refusals;
    FakeWorld* const world = worlds_by_id[refuse.world.value()];
    if (refuse.epoch.value() > world->epoch || refuse.members.empty()) {
      return Malformed("a refusal that cannot be");
    }
    bool passed = false;
    for (const RefusedMember& refused : refuse.members) {
      Member& member = world->members[refused.rank.value()];
      if (member.link != link || refused.step < member.step) return Malformed("not its step");
      member.Begin(refused.step);
      for (const RefusedCalls& calls : refused.calls) {
        InstanceKey key;
        key.group = calls.group;
        key.since = Epoch(1);
        key.source = calls.source;
        key.destination = calls.destination;
        key.tag = calls.tag;
        key.at = {refused.step, calls.first, 0};
        int64_t expected = 0;
        if (key.is_pair()) {
          int64_t& next = member.pair_calls[{calls.group.value(), calls.source.value(),
                                             calls.destination.value(), calls.tag, calls.is_recv}];
          expected = next;
          next = calls.next;
        } else {
          const CallPosition next = member.Next(calls.group.value());
          // Of a call that has begun it is the rest.
          expected = next.call;
          if (next.part > 0 && calls.first == next.call + 1) ++expected;
          member.calls[calls.group.value()] = {refused.step, calls.next, 0};
        }
        if (calls.first != expected || calls.next <= calls.first) {
          return Malformed(absl::StrCat("refused call ", calls.first, ", expected ", expected));
        }
        for (const int other : Members(world, key)) {
          if (other != refused.rank.value()) passed |= HasPassed(world, key, other);
        }
      }
      member.left_rest = member.left_rest || refused.rest_of_step;
      if (!refused.drops_tapes) continue;
      for (auto& entries : world->tapes) {
        FakeTape& tape = entries.second[refused.rank.value()];
        if (tape.state == FakeTape::kLive) tape.state = FakeTape::kRefused;
      }
    }
    Error own_error(refuse.why.reason, refuse.why.message);
    own_error.source = refuse.why.source;
    own_error.alone = refuse.why.alone && !refuse.by_hand;
    if (refuse.epoch.value() == world->epoch && !passed && !own_error.alone) {
      Error error = own_error;
      const int rank = refuse.members[0].rank.value();
      error.SetReason(refuse.by_hand ? Reason::kAborted : Reason::kPeerRefused);
      error.culprit.rank = rank;
      error.message = refuse.by_hand ? absl::StrCat("rank ", rank, " aborted: ", own_error.message)
                                     : absl::StrCat("the part of rank ", rank,
                                                    " was refused: ", own_error.message);
      EndEpoch(world, Record(ToStatus(error)));
    } else {
      FailPassed(world);
    }
    return WithOpen(*world, ToStatus(own_error));
  }

  std::vector<int> Members(FakeWorld* world, const InstanceKey& key) {
    const std::vector<int>& ranks = world->groups[key.group.value()];
    if (!key.is_pair()) return ranks;
    return {ranks[key.source.value()], ranks[key.destination.value()]};
  }

  bool IsAbsent(FakeWorld* world, const InstanceKey& key, int rank) {
    if (!key.is_gradient()) return false;
    const auto row = world->tapes.find(key.Parent().ToString());
    if (row == world->tapes.end()) return false;
    auto entry = row->second.find(rank);
    if (entry == row->second.end()) return false;
    FakeTape& tape = entry->second;
    // A vote stands, though its part may not be here yet.
    if (tape.next_request[key.step()] > key.path.back().number) return false;
    return tape.state == FakeTape::kAbandoned || tape.state == FakeTape::kConsumed;
  }

  // Why nobody's zeros are right for a rank that is absent from a gradient.
  absl::optional<absl::Status> Lost(FakeWorld* world, const InstanceKey& key, int rank) {
    const FakeTape& tape = world->tapes[key.Parent().ToString()][rank];
    if (!tape.leads_to_collective) return absl::nullopt;
    return MakeError(Reason::kGradientLost,
                     absl::StrCat("rank ", rank, " gave up its part at ", tape.source));
  }

  void Deliver(PendingRun* run, int node, std::vector<Value> results) {
    const ValueTable table(*run->graph);
    for (size_t o = 0; o < results.size(); ++o) {
      const ValueIndex v = table.first_output(node) + static_cast<int>(o);
      run->values[v] = std::move(results[o]);
      run->have[v] = true;
    }
    run->finished[node] = true;
  }

  // Gives all parts of an instance their results: the naive evaluator's, of graphs of one node
  // each. Members that are missing count as zeros: that they may be missing was checked.
  void Complete(FakeWorld* world, FakeInstance* instance) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::vector<Graph> graphs;
    graphs.reserve(instance->parts.size());
    std::vector<Session> sessions;
    for (auto& entry : instance->parts) {
      Contribution& part = entry.second;
      const Graph& whole = *part.run->graph;
      Graph graph;
      Session session;
      graph.num_device_slots = whole.num_device_slots;
      graph.group_slots = whole.group_slots;
      graph.num_instance_slots = 1;
      Node node = whole.nodes[part.node];
      for (ValueIndex& input : node.inputs) {
        const size_t input_index = graph.inputs.size();
        graph.inputs.emplace_back();
        graph.inputs.back().type = part.inputs[input_index].type;
        input = static_cast<ValueIndex>(input_index);
      }
      node.collective->instance.kind = InstanceRef::Kind::kBound;
      node.collective->instance.slot = 0;
      graph.nodes.push_back(std::move(node));
      graphs.push_back(std::move(graph));
      session.graph = &graphs.back();
      session.inputs = part.inputs;
      session.groups.assign(whole.group_slots.size(), 0);
      session.instances = {instance->key.ToString()};
      sessions.push_back(std::move(session));
    }
    absl::StatusOr<std::vector<std::vector<Value>>> values = Evaluate(sessions);
    if (!values.ok()) {
      Error error(Reason::kMismatch);
      const std::string message = ErrorOf(values.status()).message;
      error.message.assign(message.data(), message.size());
      EndEpoch(world, Record(ToStatus(error)));
      return;
    }
    size_t s = 0;
    for (auto& entry : instance->parts) {
      std::vector<Value>& all = (*values)[s++];
      all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(entry.second.inputs.size()));
      Deliver(entry.second.run.get(), entry.second.node, std::move(all));
    }
  }

  // Posts a node's part; true when something moved.
  bool Post(const std::shared_ptr<PendingRun>& run, int n) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const Node& node = run->graph->nodes[n];
    const Collective& c = *node.collective;
    const InstanceKey& key = run->keys[n];
    const int rank = run->world->groups[key.group.value()][c.rank.value()];
    FakeInstance& instance = instances[{run->world->id, key.ToString()}];
    instance.key = key;
    Contribution part;
    part.run = run;
    part.node = n;
    for (const ValueIndex v : node.inputs) part.inputs.push_back(run->values[v]);
    instance.parts[rank] = std::move(part);
    run->posted[n] = true;
    return true;
  }

  void Progress() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    bool moved = true;
    while (moved) {
      moved = false;
      const std::deque<std::shared_ptr<PendingRun>> now = pending;
      for (const auto& run : now) {
        if (run->over) continue;
        moved = Advance(run) || moved;
      }
      for (auto it = instances.begin(); it != instances.end();) {
        FakeWorld* const world = worlds_by_id[it->first.first];
        bool complete = true;
        absl::optional<absl::Status> lost;
        for (const int rank : Members(world, it->second.key)) {
          if (it->second.parts.count(rank) > 0) continue;
          if (!IsAbsent(world, it->second.key, rank)) {
            complete = false;
          } else if (!lost.has_value()) {
            lost = Lost(world, it->second.key, rank);
          }
        }
        if (lost.has_value()) {
          moved = true;
          EndEpoch(world, Record(*lost));
          break;  // instances are gone
        }
        if (complete && !it->second.parts.empty()) {
          FakeInstance instance = std::move(it->second);
          it = instances.erase(it);
          moved = true;
          const int64_t epoch = world->epoch;
          Complete(world, &instance);
          if (world->epoch != epoch) break;  // instances are gone
        } else {
          ++it;
        }
      }
      pending.erase(
          std::remove_if(pending.begin(), pending.end(), [](const auto& run) { return run->over; }),
          pending.end());
    }
  }

  bool Advance(const std::shared_ptr<PendingRun>& run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    bool moved = false;
    const Graph& graph = *run->graph;
    for (size_t i = 0; i < run->run.inputs.size(); ++i) {
      if (run->have[i]) continue;
      const TensorType& type = graph.inputs[i].type;
      Value value;
      value.type = type;
      const Binding& binding = run->run.inputs[i];
      if (absl::holds_alternative<InlineData>(binding)) {
        const auto& bytes = absl::get<InlineData>(binding).bytes;
        value.bytes.assign(bytes.begin(), bytes.end());
      } else if (absl::holds_alternative<ExternalRange>(binding)) {
        const ExternalRange& range = absl::get<ExternalRange>(binding);
        value.bytes.assign(run->link->arenas[range.arena.value()]->data() + range.offset,
                           static_cast<size_t>(type.num_bytes()));
      } else {
        const FakeTensor& tensor = *run->operands[i];
        if (!tensor.done) continue;
        if (!tensor.status.ok()) {
          const absl::Status status = tensor.status;
          RefuseRun(run.get(), status);
          return true;
        }
        value = tensor.value;
      }
      run->values[i] = std::move(value);
      run->have[i] = true;
      moved = true;
    }
    const ValueTable table(graph);
    bool all = true;
    for (size_t i = 0; i < run->run.inputs.size(); ++i) all = all && run->have[i];
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      if (run->finished[n]) continue;
      all = false;
      const Node& node = graph.nodes[n];
      bool ready = !run->posted[n];
      for (const ValueIndex v : node.inputs) ready = ready && run->have[v];
      if (!ready) continue;
      if (node.collective.has_value()) {
        moved = Post(run, static_cast<int>(n)) || moved;
        if (run->over) return true;
        continue;
      }
      NodeView view;
      view.op = node.op;
      view.attributes = node.attributes;
      std::vector<const TensorType*> types;
      std::vector<const Value*> inputs;
      for (const ValueIndex v : node.inputs) {
        types.push_back(&table.type(v));
        inputs.push_back(&run->values[v]);
      }
      view.inputs = types;
      absl::StatusOr<std::vector<Value>> results = EvaluateLocal(view, inputs, node.outputs);
      if (!results.ok()) {
        RefuseRun(run.get(), Record(results.status()));
        return true;
      }
      Deliver(run.get(), static_cast<int>(n), *std::move(results));
      moved = true;
    }
    if (all && !run->over) {
      bool finished = true;
      for (const bool f : run->finished) finished = finished && f;
      if (finished) {
        Finish(run.get(), absl::OkStatus());
        moved = true;
      }
    }
    return moved;
  }

  absl::Status Submit(FakeLinkState* link, const Command& original)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    // Through the frames, like everywhere.
    ByteWriter writer;
    EncodeFrame(original, &writer);
    CHORUS_ASSIGN_OR_RETURN(const Command command, DecodeFrame(writer.bytes()));
    if (command.sequence.value() != link->next_sequence) return Malformed("wrong sequence");
    ++link->next_sequence;
    const absl::Status status = Take(link, command);
    if (!absl::holds_alternative<Run>(command.body) || !status.ok()) {
      link->outcomes[command.sequence.value()] = status.ok() ? status : Record(status);
    }
    Progress();
    changed.SignalAll();
    return absl::OkStatus();
  }

  FakeTensor* Fresh(FakeLinkState* link, TensorId id) {
    std::shared_ptr<FakeTensor>& tensor = link->tensors[id.slot];
    const uint32_t last = tensor == nullptr ? 0 : tensor->generation;
    if ((tensor != nullptr && tensor->alive) || id.generation != last + 1) return nullptr;
    tensor = std::make_shared<FakeTensor>();
    tensor->generation = id.generation;
    tensor->alive = true;
    return tensor.get();
  }

  absl::Status Take(FakeLinkState* link, const Command& command)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (const auto* reg = absl::get_if<RegisterGraph>(&command.body)) {
      ++counts.registered;
      if (failing_registrations > 0) {
        --failing_registrations;
        return MakeError(Reason::kOutOfMemory, "no memory for a graph");
      }
      std::string bytes = reg->encoded;
      if (bytes.empty()) {
        bytes.assign(link->arenas[reg->staged.arena.value()]->data() + reg->staged.offset,
                     static_cast<size_t>(reg->staged_bytes));
      }
      CHORUS_ASSIGN_OR_RETURN(Graph graph, DecodeGraph(bytes));
      CHORUS_RETURN_IF_ERROR(ValidateGraph(graph, GraphLimits()));
      link->graphs[reg->graph.slot] = {reg->graph.generation,
                                       std::make_shared<const Graph>(std::move(graph))};
      return absl::OkStatus();
    }
    if (const auto* create = absl::get_if<CreateTensor>(&command.body)) {
      ++counts.created_tensors;
      FakeTensor* const tensor = Fresh(link, create->tensor);
      if (tensor == nullptr) return Malformed("a tensor's name is taken");
      tensor->done = true;
      if (failing_tensors > 0 && sound_tensors-- <= 0) {
        --failing_tensors;
        return tensor->status = Record(MakeError(Reason::kOutOfMemory, "no memory for a tensor"));
      }
      tensor->value.type = create->type;
      if (const auto* data = absl::get_if<InlineData>(&create->source)) {
        tensor->value.bytes.assign(data->bytes.begin(), data->bytes.end());
      } else {
        const ExternalRange& range = absl::get<ExternalRange>(create->source);
        tensor->value.bytes.assign(link->arenas[range.arena.value()]->data() + range.offset,
                                   static_cast<size_t>(create->type.num_bytes()));
      }
      return absl::OkStatus();
    }
    if (const auto* release = absl::get_if<Release>(&command.body)) {
      for (const TensorId id : release->tensors) {
        FakeTensor& tensor = link->Tensor(id.slot);
        if (!tensor.alive || tensor.generation != id.generation) {
          return Malformed("released a tensor that does not exist");
        }
        tensor.alive = false;
        ++counts.released_tensors;
      }
      for (const GraphId id : release->graphs) link->graphs.erase(id.slot);
      for (const ArenaId arena : release->arenas) {
        if (link->arenas.erase(arena.value()) == 0) return Malformed("released no arena");
      }
      return absl::OkStatus();
    }
    if (const auto* drop = absl::get_if<DropTape>(&command.body)) {
      for (const DropTape::Entry& entry : drop->entries) {
        FakeWorld* const world = worlds_by_id[entry.world.value()];
        const int rank = world->groups[entry.key.group.value()][entry.member.value()];
        FakeTape& tape = world->tapes[entry.key.ToString()][rank];
        if (tape.state == FakeTape::kRefused) continue;
        if (tape.state != FakeTape::kLive) return Malformed("dropped a tape that is not live");
        tape.state = entry.consumed ? FakeTape::kConsumed : FakeTape::kAbandoned;
        ++(entry.consumed ? counts.drops_consumed : counts.drops_abandoned);
      }
      return absl::OkStatus();
    }
    if (const auto* enter = absl::get_if<EnterEpoch>(&command.body)) {
      ++counts.entered_epochs;
      FakeWorld* const world = worlds_by_id[enter->world.value()];
      if (enter->epoch.value() > world->epoch) return Malformed("entered an epoch too early");
      return absl::OkStatus();
    }
    if (const auto* refuse = absl::get_if<chorus::Refuse>(&command.body)) {
      return TakeRefusal(link, *refuse);
    }
    const auto* body = absl::get_if<Run>(&command.body);
    if (body == nullptr) return absl::OkStatus();
    ++counts.runs;
    auto run = std::make_shared<PendingRun>();
    run->link = link;
    run->sequence = command.sequence.value();
    run->run = *body;
    const auto graph = link->graphs.find(body->graph.slot);
    if (graph == link->graphs.end() || graph->second.first != body->graph.generation) {
      return Malformed("a run of a graph that does not exist");
    }
    run->graph = graph->second.second;
    CHORUS_ASSIGN_OR_RETURN(std::vector<int64_t> sizes, CheckSymbols(*run->graph));
    for (size_t i = 0; i < body->inputs.size(); ++i) {
      const auto* id = absl::get_if<TensorId>(&body->inputs[i]);
      if (id == nullptr) continue;
      const std::vector<Dim>& dims = run->graph->inputs[i].type.dims;
      for (size_t d = 0; d < dims.size(); ++d) {
        // Of the test's own tensors, which are there at once.
        if (dims[d].is_symbolic()) {
          sizes[dims[d].symbol] = link->Tensor(id->slot).value.type.dims[d].size;
        }
      }
    }
    if (!sizes.empty()) {
      CHORUS_ASSIGN_OR_RETURN(Graph at_sizes, Specialize(*run->graph, sizes));
      CHORUS_RETURN_IF_ERROR(ValidateGraph(at_sizes, GraphLimits()));
      run->graph = std::make_shared<const Graph>(std::move(at_sizes));
    }
    for (const Binding& binding : body->inputs) {
      const auto* id = absl::get_if<TensorId>(&binding);
      run->operands.emplace_back();
      if (const auto* range = absl::get_if<ExternalRange>(&binding)) {
        if (link->arenas.count(range->arena.value()) == 0) {
          return Malformed("a run uses an arena that does not exist");
        }
      }
      if (id == nullptr) continue;
      const FakeTensor& tensor = link->Tensor(id->slot);
      if (!tensor.alive || tensor.generation != id->generation) {
        return Malformed("a run uses a tensor that does not exist");
      }
      run->operands.back() = link->tensors[id->slot];
    }
    for (const OutBinding& out : body->outputs) {
      if (Fresh(link, out.id) == nullptr) return Malformed("a result's name is taken");
      run->results.push_back(link->tensors[out.id.slot]);
    }
    run->have.assign(run->graph->num_values(), false);
    run->values.resize(run->graph->num_values());
    run->posted.assign(run->graph->nodes.size(), false);
    run->finished.assign(run->graph->nodes.size(), false);
    if (!body->groups.empty()) {
      run->world = worlds_by_id[body->groups[0].world.value()];
      run->epoch = body->groups[0].epoch.value();
      if (run->epoch > run->world->epoch) return Malformed("a vote for an epoch that is not open");
      const absl::Status named = NameInstances(run.get());
      if (run->epoch < run->world->epoch) {
        Finish(run.get(), WithOpen(*run->world, run->world->causes[run->epoch]));
        FailPassed(run->world);
        return absl::OkStatus();
      }
      if (!named.ok()) {
        const absl::Status cause = Record(named);
        EndEpoch(run->world, cause);
        Finish(run.get(), WithOpen(*run->world, cause));
        return absl::OkStatus();
      }
    }
    pending.push_back(run);
    if (run->world != nullptr) FailPassed(run->world);
    return absl::OkStatus();
  }
};

namespace {

using internal::JoinedWorld;
using internal::Link;
using internal::ReformedWorld;

class FakeLink : public Link {
 public:
  FakeLink(std::shared_ptr<FakeDaemon::Impl> daemon, FakeLinkState* state, int devices,
           const std::vector<DeviceInfo>& infos)
      : daemon_(std::move(daemon)), state_(state), devices_(devices), infos_(infos) {}

  Transport transport() const override { return Transport::kRing; }
  std::vector<DeviceIndex> devices() const override {
    std::vector<DeviceIndex> devices;
    for (int i = 0; i < devices_; ++i) devices.push_back(DeviceIndex(i));
    return devices;
  }
  std::vector<DeviceInfo> device_infos() const override { return infos_; }
  int32_t max_tensors() const override { return FakeDaemon::kMaxTensors; }
  int32_t max_graphs() const override { return 16384; }

  absl::Status Submit(const Command& command) override {
    MutexLock lock(&daemon_->mutex);
    return daemon_->Submit(state_, command);
  }
  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence sequence) override {
    MutexLock lock(&daemon_->mutex);
    const auto row = state_->outcomes.find(sequence.value());
    if (row == state_->outcomes.end()) return absl::optional<RunOutcome>();
    return absl::optional<RunOutcome>(RunOutcome{row->second.code(), ErrorOf(row->second).id});
  }
  absl::Status WaitCommand(Sequence sequence, absl::Duration timeout) override {
    {
      MutexLock lock(&daemon_->mutex);
      ++daemon_->counts.command_waits;
    }
    return Await(timeout, [&](FakeLinkState& state) -> absl::optional<absl::Status> {
      const auto row = state.outcomes.find(sequence.value());
      if (row == state.outcomes.end()) return absl::nullopt;
      return row->second;
    });
  }
  absl::StatusOr<bool> WaitTensor(TensorId id, Sequence producer, absl::Duration timeout) override {
    {
      MutexLock lock(&daemon_->mutex);
      ++daemon_->counts.tensor_waits;
    }
    const absl::Status status =
        Await(timeout, [&](FakeLinkState& state) -> absl::optional<absl::Status> {
          const FakeTensor& tensor = state.Tensor(id.slot);
          if (tensor.generation == id.generation && tensor.done) return tensor.status;
          const auto row = state.outcomes.find(producer.value());
          if (row != state.outcomes.end()) return row->second;
          return absl::nullopt;
        });
    CHORUS_RETURN_IF_ERROR(status);
    return false;
  }
  absl::Status Read(TensorId id, Sequence, char* out, int64_t bytes, absl::Duration) override {
    MutexLock lock(&daemon_->mutex);
    const FakeTensor& tensor = state_->Tensor(id.slot);
    if (static_cast<int64_t>(tensor.value.bytes.size()) != bytes) return Malformed("wrong size");
    std::memcpy(out, tensor.value.bytes.data(), tensor.value.bytes.size());
    return absl::OkStatus();
  }
  absl::StatusOr<std::shared_ptr<const char>> MapTensor(TensorId id, Sequence, int64_t,
                                                        absl::Duration) override {
    MutexLock lock(&daemon_->mutex);
    const char* const bytes = state_->Tensor(id.slot).value.bytes.data();
    return std::shared_ptr<const char>(state_->tensors[id.slot], bytes);
  }
  absl::StatusOr<Staging> CreateStaging(int64_t bytes) override {
    MutexLock lock(&daemon_->mutex);
    Staging staging;
    staging.arena = ArenaId(state_->next_arena++);
    auto arena = std::make_unique<std::vector<char>>(static_cast<size_t>(bytes));
    staging.data = arena->data();
    state_->arenas[staging.arena.value()] = std::move(arena);
    return staging;
  }
  absl::Status WriteStaging(ArenaId, int64_t, absl::string_view) override {
    return Unsupported("mapped memory is written in place");
  }
  void UnmapStaging(ArenaId) override {}

  absl::StatusOr<JoinedWorld> Join(const WorldOptions& options, DeviceIndex) override {
    MutexLock lock(&daemon_->mutex);
    std::unique_ptr<FakeWorld>& world = daemon_->worlds[options.name];
    if (world == nullptr) {
      world = std::make_unique<FakeWorld>();
      world->id = static_cast<int64_t>(daemon_->worlds.size());
      world->size = options.size;
      world->groups.emplace_back();
      for (int r = 0; r < options.size; ++r) world->groups[0].push_back(r);
      daemon_->worlds_by_id[world->id] = world.get();
    }
    world->members[options.rank].link = state_;
    return JoinedWorld{WorldId(world->id), Epoch(world->epoch)};
  }
  absl::StatusOr<GroupId> CreateGroup(WorldId id, Rank, absl::Span<const int> members,
                                      InstanceKey::Request request) override {
    MutexLock lock(&daemon_->mutex);
    FakeWorld* const world = daemon_->worlds_by_id[id.value()];
    const std::vector<int> list(members.begin(), members.end());
    const auto inserted =
        world->groups_by_request.emplace(std::make_tuple(list, request.step, request.number),
                                         static_cast<int>(world->groups.size()));
    if (inserted.second) world->groups.push_back(list);
    return GroupId(inserted.first->second);
  }
  absl::Status Leave(WorldId, Rank) override { return absl::OkStatus(); }
  absl::StatusOr<ReformedWorld> Reform(WorldId, Rank, Timeout) override {
    return Unsupported("reform");
  }
  absl::StatusOr<std::vector<std::string>> Waits() override { return std::vector<std::string>(); }
  absl::Status Close() override {
    MutexLock lock(&daemon_->mutex);
    state_->closed = true;
    return absl::OkStatus();
  }

 private:
  template <typename F>
  absl::Status Await(absl::Duration timeout, const F& done) {
    const absl::Time deadline = SteadyNow() + timeout;
    MutexLock lock(&daemon_->mutex);
    while (true) {
      const absl::optional<absl::Status> status = done(*state_);
      if (status.has_value()) return *status;
      const absl::Duration left = deadline - SteadyNow();
      if (left <= absl::ZeroDuration()) {
        return MakeError(Reason::kTransportTimeout,
                         absl::StrCat("not done in time; pending: ", daemon_->Pending()));
      }
      daemon_->changed.WaitFor(&daemon_->mutex, left);
    }
  }

  const std::shared_ptr<FakeDaemon::Impl> daemon_;
  FakeLinkState* const state_ ABSL_PT_GUARDED_BY(daemon_->mutex);
  const int devices_;
  const std::vector<DeviceInfo> infos_;
};

}  // namespace

FakeDaemon::FakeDaemon() : impl_(std::make_shared<Impl>()) {}
FakeDaemon::~FakeDaemon() = default;

chorus::Session FakeDaemon::Open(int devices, Timeout wait_timeout,
                                 const std::vector<DeviceInfo>& infos) {
  MutexLock lock(&impl_->mutex);
  impl_->links.push_back(std::make_unique<FakeLinkState>());
  impl_->links.back()->index = static_cast<int>(impl_->links.size()) - 1;
  return internal::SessionFrom(internal::SessionCore::Make(
      std::make_unique<FakeLink>(impl_, impl_->links.back().get(), devices, infos),
      absl::FromChrono(wait_timeout)));
}

FakeDaemon::Counts FakeDaemon::counts() const {
  MutexLock lock(&impl_->mutex);
  return impl_->counts;
}

int FakeDaemon::live_tapes() const {
  MutexLock lock(&impl_->mutex);
  int live = 0;
  for (const auto& world : impl_->worlds) {
    for (const auto& key : world.second->tapes) {
      for (const auto& entry : key.second) live += entry.second.state == FakeTape::kLive ? 1 : 0;
    }
  }
  return live;
}

int FakeDaemon::live_arenas() const {
  MutexLock lock(&impl_->mutex);
  size_t live = 0;
  for (const auto& link : impl_->links) live += link->arenas.size();
  return static_cast<int>(live);
}

void FakeDaemon::FailRegistrations(int count) {
  MutexLock lock(&impl_->mutex);
  impl_->failing_registrations = count;
}

void FakeDaemon::FailTensors(int count, int after) {
  MutexLock lock(&impl_->mutex);
  impl_->sound_tensors = after;
  impl_->failing_tensors = count;
}

int FakeDaemon::live_graphs() const {
  MutexLock lock(&impl_->mutex);
  size_t live = 0;
  for (const auto& link : impl_->links) live += link->graphs.size();
  return static_cast<int>(live);
}

int FakeDaemon::live_tensors() const {
  MutexLock lock(&impl_->mutex);
  int live = 0;
  for (const auto& link : impl_->links) {
    for (const auto& tensor : link->tensors) live += tensor.second->alive ? 1 : 0;
  }
  return live;
}

}  // namespace testing
}  // namespace chorus
