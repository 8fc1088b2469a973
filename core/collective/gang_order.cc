#include "core/collective/gang_order.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "core/collective/order.h"

namespace chorus {
namespace {

// The order as a graph: a node for each instance, by its index, then one for each fence.
class OrderGraph {
 public:
  explicit OrderGraph(const GangView& gang)
      : gang_(gang), num_instances_(static_cast<int32_t>(gang.instances.size())) {
    RankByKey();
    AddNeeds();
    AddLocalRuns();
    // A run starts when its inputs are there: all of it comes after all of its producers.
    for (int32_t r = 0; r < num_runs(); ++r) {
      for (const int32_t producer : gang_.runs[r].producers) Fence(producer, r);
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
        Fence(inserted.first->second, r);
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

  GangConflict Describe(const std::vector<int32_t>& circle) const {
    GangConflict conflict;
    conflict.instance = 0;
    for (size_t i = 0; i < circle.size(); ++i) {
      const int32_t before = circle[i];
      const int32_t after = circle[(i + 1) % circle.size()];
      if (IsInstance(before)) conflict.instance = before;
      const bool full = conflict.circle.size() == GangConflict::kMostWaits;
      if (!IsInstance(after)) {
        const auto& fence = fences_[after - num_instances_];
        if (fence.first == fence.second) continue;  // a local run
        if (full) {
          ++conflict.more;
          continue;
        }
        GangConflict::Wait wait;
        wait.of_runs = true;
        wait.after = fence.second;
        wait.before = fence.first;
        conflict.circle.push_back(wait);
      } else if (IsInstance(before)) {
        if (full) {
          ++conflict.more;
        } else {
          conflict.circle.push_back(WaitOf(after, before));
        }
      }
    }
    return conflict;
  }

 private:
  int32_t num_runs() const { return static_cast<int32_t>(gang_.runs.size()); }

  void RankByKey() {
    std::vector<int32_t> by_key(gang_.instances.size());
    std::iota(by_key.begin(), by_key.end(), 0);
    std::sort(by_key.begin(), by_key.end(), [this](int32_t a, int32_t b) {
      return *gang_.instances[a].key < *gang_.instances[b].key;
    });
    rank_.resize(by_key.size());
    // 0 is for fences: these are taken as soon as they are free.
    for (int32_t i = 0; i < num_instances_; ++i) rank_[by_key[i]] = i + 1;
  }

  void AddNeeds() {
    for (const GangView::Run& run : gang_.runs) {
      for (size_t i = 0; i < run.parts.size(); ++i) {
        for (const int32_t before : run.parts[i].after) {
          edges_.push_back({run.instances[before], run.instances[i]});
        }
      }
    }
    for (int32_t i = 0; i < num_instances_; ++i) {
      if (gang_.instances[i].forward >= 0) edges_.push_back({gang_.instances[i].forward, i});
    }
  }

  // A fence is a node of its own: all of `before` stands ahead of it, all of `after` behind. So has
  // a local run one, through which its consumers come after its producers.
  int32_t AddFence(int32_t before, int32_t after) {
    rank_.push_back(0);
    fences_.emplace_back(before, after);
    return static_cast<int32_t>(rank_.size()) - 1;
  }
  void AddLocalRuns() {
    local_nodes_.assign(gang_.runs.size(), -1);
    for (int32_t r = 0; r < num_runs(); ++r) {
      if (gang_.runs[r].instances.empty()) local_nodes_[r] = AddFence(r, r);
    }
  }
  absl::Span<const int32_t> NodesOf(int32_t r) const {
    const std::vector<int32_t>& instances = gang_.runs[r].instances;
    return instances.empty() ? absl::MakeConstSpan(&local_nodes_[r], 1) : instances;
  }
  void Fence(int32_t before, int32_t after) {
    const int32_t node = AddFence(before, after);
    for (const int32_t ahead : NodesOf(before)) edges_.push_back({ahead, node});
    for (const int32_t behind : NodesOf(after)) edges_.push_back({node, behind});
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
        for (const int32_t needed : run.parts[p].after) {
          if (run.instances[needed] != before) continue;
          wait.run = r;
          wait.participation = static_cast<int32_t>(p);
        }
      }
    }
    return wait;
  }

  const GangView& gang_;
  const int32_t num_instances_;
  std::vector<int32_t> rank_;  // by node: the least is taken first
  std::vector<OrderEdge> edges_;
  std::vector<std::pair<int32_t, int32_t>> fences_;  // the runs before and after
  std::vector<int32_t> local_nodes_;                 // by run: its own fence, where it is local
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
      const int32_t here = position[run.instances[i]];
      ranges[r] = {std::min(ranges[r].first, here), std::max(ranges[r].last, here)};
      // A rank that sends to itself takes part twice, as the sender first.
      at.emplace_back(here, key.is_pair() ? SeatOf(key, run.parts[i]) : 0);
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
  if (!graph.Sort(&sorted)) return graph.Describe(sorted);
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
