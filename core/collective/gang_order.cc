#include "core/collective/gang_order.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>
#include <utility>

#include "core/base/work.h"
#include "core/collective/order.h"

namespace chorus {
namespace {

// The order as a graph: a node for each instance, by its index, then those for what calls need in
// common, and those at which runs begin and end.
class OrderGraph {
 public:
  explicit OrderGraph(const GangView& gang)
      : gang_(gang), num_instances_(static_cast<int32_t>(gang.instances.size())) {
    RankByKey();
    AddNeeds();
    begins_.assign(gang_.runs.size(), kNone);
    ends_.assign(gang_.runs.size(), kNone);
    // A run starts when its inputs are there: all of it comes after all of its producers.
    for (int32_t r = 0; r < num_runs(); ++r) {
      for (const int32_t producer : gang_.runs[r].producers) PutBehind(producer, r);
    }
  }

  // A rank's runs in the order of its log, if the data allows; else in whatever order it does.
  // False: not even that; `sorted` is a circle.
  bool Sort(std::vector<int32_t>* sorted) {
    const size_t data_edges = edges_.size();
    const size_t data_nodes = rank_.size();
    std::map<Rank, int32_t> last_of_rank;
    for (int32_t r = 0; r < num_runs(); ++r) {
      for (const Rank member : gang_.runs[r].ranks) {
        const auto inserted = last_of_rank.emplace(member, r);
        if (inserted.second) continue;
        PutBehind(inserted.first->second, r);
        inserted.first->second = r;
      }
    }
    if (TopologicalOrder(rank_, edges_, sorted)) return true;
    if (edges_.size() == data_edges) return false;
    rank_.resize(data_nodes);
    edges_.resize(data_edges);
    return TopologicalOrder(rank_, edges_, sorted);
  }

  bool IsInstance(int32_t node) const { return node < num_instances_; }

  GangConflict Describe(std::vector<int32_t> circle) const {
    // What needs have in common is nobody's to wait for: the one behind it waits for the one ahead.
    circle.erase(
        std::remove_if(circle.begin(), circle.end(),
                       [this](int32_t node) { return !IsInstance(node) && RunOf(node) == kNone; }),
        circle.end());
    GangConflict conflict;
    conflict.instance = 0;
    for (size_t i = 0; i < circle.size(); ++i) {
      const int32_t before = circle[i];
      const int32_t after = circle[(i + 1) % circle.size()];
      if (IsInstance(before)) conflict.instance = before;
      const bool full = conflict.circle.size() == GangConflict::kMostWaits;
      // Between a run's instances, and where it begins or ends, nothing waits for another.
      if (IsInstance(before) != IsInstance(after)) continue;
      if (full) {
        ++conflict.waits_left_out;
      } else if (IsInstance(after)) {
        conflict.circle.push_back(WaitOf(after, before));
      } else {
        GangConflict::Wait wait;
        wait.of_runs = true;
        wait.after = RunOf(after);
        wait.before = RunOf(before);
        conflict.circle.push_back(wait);
      }
    }
    return conflict;
  }

  int64_t work() const {
    return num_instances_ * 3 + static_cast<int64_t>(edges_.size()) / 8 + needs_looked_at_ / 32;
  }

 private:
  static constexpr int32_t kNone = -1;

  int32_t num_runs() const { return static_cast<int32_t>(gang_.runs.size()); }
  int32_t RunOf(int32_t node) const { return run_of_[node - num_instances_]; }

  void RankByKey() {
    std::vector<int32_t> by_key(gang_.instances.size());
    std::iota(by_key.begin(), by_key.end(), 0);
    const auto less = [this](int32_t a, int32_t b) {
      return *gang_.instances[a].key < *gang_.instances[b].key;
    };
    // Most often they are, for programs call in the order of their positions.
    if (!std::is_sorted(by_key.begin(), by_key.end(), less)) {
      std::sort(by_key.begin(), by_key.end(), less);
    }
    rank_.resize(by_key.size());
    // 0 is for other nodes: these are taken as soon as they are free.
    for (int32_t i = 0; i < num_instances_; ++i) rank_[by_key[i]] = i + 1;
  }

  void AddNeeds() {
    first_use_.assign(gang_.instances.size(), kNone);
    size_t room = kMostNeeds;
    for (const GangView::Run& run : gang_.runs) {
      const size_t edges = edges_.size();
      const size_t nodes = rank_.size();
      const size_t most = kMostNeedsPerCall * run.parts.size();
      in_program_order_.push_back(!AddNeedsOf(run, edges + most + room));
      if (in_program_order_.back()) {
        edges_.resize(edges);
        rank_.resize(nodes);
        run_of_.resize(nodes - static_cast<size_t>(num_instances_));
        AddProgram(run);
      } else if (edges_.size() > edges + most) {
        room -= edges_.size() - edges - most;
      }
    }
    for (int32_t i = 0; i < num_instances_; ++i) {
      if (gang_.instances[i].forward >= 0) edges_.push_back({gang_.instances[i].forward, i});
    }
  }

  // Calls in a row often need the same, or that and what comes behind it: then that has a node of
  // its own, which stands for all of it. False: there would be more than so many edges.
  bool AddNeedsOf(const GangView::Run& run, size_t most_edges) {
    constexpr size_t kFew = 4;
    int32_t last = kNone;  // the node of `needs`
    absl::Span<const int32_t> needs;
    for (size_t i = 0; i < run.parts.size(); ++i) {
      const absl::Span<const int32_t> after = run.parts[i].after;
      int32_t node = run.instances[i];
      size_t num_common = 0;
      if (after.size() > kFew) {
        needs_looked_at_ += static_cast<int64_t>(after.size());
        const bool goes_on = last != kNone && needs == after.subspan(0, needs.size());
        if (!goes_on || needs.size() < after.size()) {
          const int32_t before = std::exchange(last, AddNode(kNone));
          if (goes_on) {
            edges_.push_back({before, last});
            num_common = needs.size();
          }
          needs = after;
        } else {
          num_common = after.size();
        }
        edges_.push_back({last, node});
        node = last;
      }
      if (edges_.size() + after.size() - num_common > most_edges) return false;
      for (const int32_t before : after.subspan(num_common)) {
        edges_.push_back({run.instances[before], node});
      }
    }
    return true;
  }

  // A run's instances one after the other, by first use. A call needs what its program has come to
  // before it; so only one whose instance another of the run's calls has used first, for another
  // member, can need what is behind that. Then there is no such order.
  void AddProgram(const GangView::Run& run) {
    int32_t last = kNone;
    for (size_t i = 0; i < run.parts.size(); ++i) {
      const int32_t instance = run.instances[i];
      int32_t& first_use = first_use_[instance];
      if (first_use == kNone) {
        first_use = static_cast<int32_t>(i);
        if (last != kNone) edges_.push_back({last, instance});
        last = instance;
        continue;
      }
      needs_looked_at_ += static_cast<int64_t>(run.parts[i].after.size());
      for (const int32_t before : run.parts[i].after) {
        if (first_use_[run.instances[before]] < first_use) continue;
        edges_.push_back({run.instances[before], instance});
        break;
      }
    }
    for (const int32_t instance : run.instances) first_use_[instance] = kNone;
  }

  // One that is no instance. `r`: the run that begins or ends there; kNone: it is of needs.
  int32_t AddNode(int32_t r) {
    rank_.push_back(0);
    run_of_.push_back(r);
    return static_cast<int32_t>(rank_.size()) - 1;
  }
  // All of a run stands behind the node at which it begins, and ahead of that at which it ends; of
  // a local run, which has nothing between, both are one.
  int32_t BeginOf(int32_t r) {
    if (begins_[r] != kNone) return begins_[r];
    begins_[r] = AddNode(r);
    for (const int32_t i : gang_.runs[r].instances) edges_.push_back({begins_[r], i});
    if (gang_.runs[r].instances.empty()) ends_[r] = begins_[r];
    return begins_[r];
  }
  int32_t EndOf(int32_t r) {
    if (ends_[r] != kNone) return ends_[r];
    if (gang_.runs[r].instances.empty()) return BeginOf(r);
    ends_[r] = AddNode(r);
    for (const int32_t i : gang_.runs[r].instances) edges_.push_back({i, ends_[r]});
    return ends_[r];
  }
  void PutBehind(int32_t before, int32_t after) {
    const int32_t end = EndOf(before);
    edges_.push_back({end, BeginOf(after)});
  }

  // Which rank says so?
  GangConflict::Wait WaitOf(int32_t after, int32_t before) const {
    GangConflict::Wait wait;
    wait.after = after;
    wait.before = before;
    for (int32_t r = 0; r < num_runs(); ++r) {
      const GangView::Run& run = gang_.runs[r];
      for (size_t p = 0; p < run.parts.size(); ++p) {
        if (run.instances[p] != after) continue;
        const auto says_so = [&] {
          wait.run = r;
          wait.participation = static_cast<int32_t>(p);
        };
        if (in_program_order_[r]) {
          const auto call = run.instances.begin() + static_cast<std::ptrdiff_t>(p);
          if (std::find(run.instances.begin(), call, before) != call) says_so();
          continue;
        }
        for (const int32_t needed : run.parts[p].after) {
          if (run.instances[needed] == before) says_so();
        }
      }
    }
    return wait;
  }

  const GangView& gang_;
  const int32_t num_instances_;
  std::vector<int32_t> rank_;  // by node: the least is taken first
  std::vector<OrderEdge> edges_;
  std::vector<bool> in_program_order_;  // by run
  std::vector<int32_t> first_use_;      // by instance, of the run at hand: which of its calls
  int64_t needs_looked_at_ = 0;
  // By run: the nodes at which it begins and ends. kNone: nothing stands ahead, or behind, all of
  // it.
  std::vector<int32_t> begins_;
  std::vector<int32_t> ends_;
  std::vector<int32_t> run_of_;  // by node that is no instance; kNone: it is of needs
};

// Where each run's instances stand.
struct Range {
  int32_t first = 0;
  int32_t last = -1;
};

// Fills order->reordered; `position` by instance.
std::vector<Range> FindRanges(const GangView& gang, const std::vector<int32_t>& position,
                              GangOrder* order) {
  std::vector<Range> ranges(gang.runs.size());
  order->reordered.assign(gang.runs.size(), {});
  for (size_t r = 0; r < gang.runs.size(); ++r) {
    const GangView::Run& run = gang.runs[r];
    ranges[r] = {static_cast<int32_t>(position.size()), -1};
    if (run.instances.empty()) {
      // Right behind the last of its producers, which stand before it in `runs`.
      for (const int32_t producer : run.producers) {
        if (static_cast<size_t>(producer) >= r) continue;
        ranges[r].last = std::max(ranges[r].last, ranges[producer].last);
      }
      ranges[r].first = ranges[r].last;
    }
    std::vector<std::pair<int32_t, int32_t>> at;  // by participation
    for (size_t i = 0; i < run.instances.size(); ++i) {
      const InstanceKey& key = *gang.instances[run.instances[i]].key;
      const int32_t index = position[run.instances[i]];
      ranges[r] = {std::min(ranges[r].first, index), std::max(ranges[r].last, index)};
      // A rank that sends to itself takes part twice, as the sender first.
      at.emplace_back(index, key.is_pair() ? SeatOf(key, run.parts[i]) : 0);
    }
    if (std::is_sorted(at.begin(), at.end())) continue;
    std::vector<int32_t>& reordered = order->reordered[r];
    reordered.resize(at.size());
    std::iota(reordered.begin(), reordered.end(), 0);
    std::stable_sort(reordered.begin(), reordered.end(),
                     [&](int32_t a, int32_t b) { return at[a] < at[b]; });
  }
  return ranges;
}

// A device enqueues whole runs, so a rank's may not interleave.
absl::optional<GangConflict> FindInterleaved(const GangView& gang, const GangOrder& order,
                                             const std::vector<Range>& ranges) {
  std::map<Rank, int32_t> previous;
  for (const int32_t r : order.runs) {
    for (const Rank member : gang.runs[r].ranks) {
      const auto inserted = previous.emplace(member, r);
      if (inserted.second) continue;
      const int32_t before = inserted.first->second;
      if (ranges[r].first < ranges[before].last) {
        GangConflict conflict;
        conflict.interleaved = true;
        conflict.rank = member;
        conflict.run = r;
        conflict.other_run = before;
        for (const int32_t named : {before, r}) {
          const std::vector<int32_t>& instances = gang.runs[named].instances;
          if (!instances.empty()) conflict.instance = instances[0];
        }
        return conflict;
      }
      inserted.first->second = r;
    }
  }
  return absl::nullopt;
}

}  // namespace

absl::optional<GangConflict> FindGangOrder(const GangView& gang, GangOrder* order) {
  OrderGraph graph(gang);
  std::vector<int32_t> sorted;
  const bool has_order = graph.Sort(&sorted);
  CountWork(graph.work());
  if (!has_order) return graph.Describe(sorted);
  order->instances.clear();
  std::vector<int32_t> position(gang.instances.size());
  for (const int32_t node : sorted) {
    if (!graph.IsInstance(node)) continue;
    position[node] = static_cast<int32_t>(order->instances.size());
    order->instances.push_back(node);
  }
  const std::vector<Range> ranges = FindRanges(gang, position, order);
  order->runs.resize(gang.runs.size());
  std::iota(order->runs.begin(), order->runs.end(), 0);
  const auto begins = [&](int32_t r) {
    return std::make_pair(ranges[r].first, gang.runs[r].instances.empty());
  };
  std::stable_sort(order->runs.begin(), order->runs.end(),
                   [&](int32_t a, int32_t b) { return begins(a) < begins(b); });
  return FindInterleaved(gang, *order, ranges);
}

}  // namespace chorus
