#include "core/collective/order.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace chorus {

bool TopologicalOrder(const std::vector<int32_t>& rank, const std::vector<OrderEdge>& edges,
                      std::vector<int32_t>* order) {
  const int32_t n = static_cast<int32_t>(rank.size());
  // Edges by their start, in one array.
  std::vector<int32_t> first(n + 1, 0);
  std::vector<int32_t> waits_for(n, 0);
  for (const OrderEdge& edge : edges) {
    ++first[edge.before + 1];
    ++waits_for[edge.after];
  }
  for (int32_t i = 0; i < n; ++i) first[i + 1] += first[i];
  std::vector<int32_t> fill = first;
  std::vector<int32_t> target(edges.size());
  for (const OrderEdge& edge : edges) target[fill[edge.before]++] = edge.after;

  using Entry = std::pair<int32_t, int32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> free;
  for (int32_t i = 0; i < n; ++i) {
    if (waits_for[i] == 0) free.emplace(rank[i], i);
  }
  order->clear();
  while (!free.empty()) {
    const int32_t i = free.top().second;
    free.pop();
    order->push_back(i);
    for (int32_t e = first[i]; e < first[i + 1]; ++e) {
      if (--waits_for[target[e]] == 0) free.emplace(rank[target[e]], target[e]);
    }
  }
  if (static_cast<int32_t>(order->size()) == n) return true;

  // Everything left waits for something left: walking back must come round.
  std::vector<int32_t> waits_on(n, -1);
  for (const OrderEdge& edge : edges) {
    if (waits_for[edge.before] > 0 && waits_for[edge.after] > 0) {
      waits_on[edge.after] = edge.before;
    }
  }
  int32_t at = 0;
  while (waits_for[at] == 0) ++at;
  std::vector<bool> seen(n, false);
  while (!seen[at]) {
    seen[at] = true;
    at = waits_on[at];
  }
  order->clear();
  const int32_t start = at;
  do {
    order->push_back(at);
    at = waits_on[at];
  } while (at != start);
  std::reverse(order->begin(), order->end());
  return false;
}

int32_t FindStuck(const std::vector<std::vector<int32_t>>& calls) {
  const auto count = static_cast<int32_t>(calls.size());
  struct Meeting {
    size_t members = 0;
    std::vector<int32_t> arrivals;
  };
  std::vector<Meeting> meetings;
  for (const std::vector<int32_t>& calls_of_one : calls) {
    for (const int32_t m : calls_of_one) {
      if (static_cast<size_t>(m) >= meetings.size()) meetings.resize(static_cast<size_t>(m) + 1);
      ++meetings[static_cast<size_t>(m)].members;
    }
  }
  std::vector<size_t> at(calls.size(), 0);
  std::vector<int32_t> moving(calls.size());
  std::iota(moving.begin(), moving.end(), 0);
  while (!moving.empty()) {
    const auto participant = static_cast<size_t>(moving.back());
    moving.pop_back();
    if (at[participant] == calls[participant].size()) continue;
    Meeting& meeting = meetings[static_cast<size_t>(calls[participant][at[participant]])];
    meeting.arrivals.push_back(static_cast<int32_t>(participant));
    if (meeting.arrivals.size() < meeting.members) continue;
    for (const int32_t member : meeting.arrivals) {
      ++at[static_cast<size_t>(member)];
      moving.push_back(member);
    }
  }
  for (int32_t participant = 0; participant < count; ++participant) {
    const auto i = static_cast<size_t>(participant);
    if (at[i] < calls[i].size()) return participant;
  }
  return -1;
}

}  // namespace chorus
