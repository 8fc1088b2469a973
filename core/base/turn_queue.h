// Queues of several owners that take turns: one that queues much waits behind its own.
//
// Threads: one at a time. Ownership: owns what waits. Errors: none.
#ifndef CHORUS_CORE_BASE_TURN_QUEUE_H_
#define CHORUS_CORE_BASE_TURN_QUEUE_H_

#include <algorithm>
#include <cstddef>
#include <deque>
#include <list>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

template <typename Item, typename Owner = std::string>
class TurnQueue {
 public:
  bool empty() const { return queues_.empty(); }
  size_t size() const { return size_; }
  // Those that have something.
  std::vector<Owner> Owners() const {
    std::vector<Owner> owners;
    for (const Queue& queue : queues_) owners.push_back(queue.owner);
    return owners;
  }
  bool Has(const Owner& owner) const {
    return std::any_of(queues_.begin(), queues_.end(),
                       [&](const Queue& queue) { return queue.owner == owner; });
  }
  // Behind what `owner` has here. Looks at each owner that has something.
  void Push(const Owner& owner, Item item) {
    QueueOf(owner)->items.push_back(std::move(item));
    ++size_;
  }
  // Before it, such as the rest of what was first; it is not `owner`'s turn any sooner.
  void PushFirst(const Owner& owner, Item item) {
    QueueOf(owner)->items.push_front(std::move(item));
    ++size_;
  }
  // The first of `owner`, out of turn. False: it has none.
  bool PopOf(const Owner& owner, Item* item) {
    const auto queue = std::find_if(queues_.begin(), queues_.end(),
                                    [&](const Queue& other) { return other.owner == owner; });
    if (queue == queues_.end()) return false;
    *item = std::move(queue->items.front());
    queue->items.pop_front();
    --size_;
    if (queue->items.empty()) queues_.erase(queue);
    return true;
  }
  // The first of the owner whose turn it is. Not of none.
  Item Pop() {
    std::deque<Item>& items = queues_.front().items;
    Item item = std::move(items.front());
    items.pop_front();
    --size_;
    if (items.empty()) {
      queues_.pop_front();
    } else {
      queues_.splice(queues_.end(), queues_, queues_.begin());
    }
    return item;
  }

 private:
  struct Queue {
    Owner owner;
    std::deque<Item> items;
  };
  typename std::list<Queue>::iterator QueueOf(const Owner& owner) {
    const auto queue = std::find_if(queues_.begin(), queues_.end(),
                                    [&](const Queue& other) { return other.owner == owner; });
    return queue != queues_.end() ? queue : queues_.insert(queue, {owner, {}});
  }
  std::list<Queue> queues_;  // none is empty; the first is next
  size_t size_ = 0;          // of all
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_TURN_QUEUE_H_
