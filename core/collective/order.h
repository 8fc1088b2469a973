// A deterministic topological order, or the circle that makes it impossible; and what such orders
// are for.
//
// Threads: pure functions. Ownership: plain values; nothing is kept. Errors: none; that there is no
// order is an answer. `calls`, ranks and edges must be in bounds.
#ifndef CHORUS_CORE_COLLECTIVE_ORDER_H_
#define CHORUS_CORE_COLLECTIVE_ORDER_H_

#include <cstdint>
#include <vector>

namespace chorus {

struct OrderEdge {
  int32_t before = 0;
  int32_t after = 0;
};

// Orders 0..n-1 so that every edge's `before` comes first; among those that are free the one with
// the least rank[i] is taken, so equal input gives equal output. False: there is a circle; `order`
// then holds one, each element before the next and the last before the first.
bool TopologicalOrder(const std::vector<int32_t>& rank, const std::vector<OrderEdge>& edges,
                      std::vector<int32_t>* order);

// Each participant comes to its `calls` (meetings, numbered from 0, none twice) one after the
// other, and a meeting begins when every participant that has it is there. Returns the first
// participant that does not get through all of its calls, or -1.
int32_t FindStuck(const std::vector<std::vector<int32_t>>& calls);

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_ORDER_H_
