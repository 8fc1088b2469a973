// The last variants of something that were asked for, by key, and who waits for what is being made.
//
// Threads: the node thread.
#ifndef CHORUS_CORE_NODE_VARIANTS_H_
#define CHORUS_CORE_NODE_VARIANTS_H_

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace chorus::node {

// Who waits for what is being made, by its key.
template <typename Key>
class Waits {
 public:
  // `made` is told with all that wait for the same. True: it is the first.
  using OnMade = std::function<void(const absl::Status&)>;
  bool Wait(const Key& key, OnMade made) {
    auto making = Find(key);
    const bool first = making == making_.end();
    if (first) making = making_.insert(making, {key, {}});
    making->second.push_back(std::move(made));
    return first;
  }
  void Tell(const Key& key, const absl::Status& status) {
    const auto making = Find(key);
    const std::vector<OnMade> waiting = std::move(making->second);
    making_.erase(making);
    for (const OnMade& made : waiting) made(status);
  }

 private:
  using Making = std::vector<std::pair<Key, std::vector<OnMade>>>;
  typename Making::iterator Find(const Key& key) {
    return std::find_if(making_.begin(), making_.end(),
                        [&](const auto& making) { return making.first == key; });
  }

  Making making_;
};

template <typename Key, typename T, size_t kMost>
class Variants {
 public:
  // It is the latest from now on. Null: it is not there.
  std::shared_ptr<T> Find(const Key& key) {
    for (size_t i = known_.size(); i-- > 0;) {
      if (!(known_[i].first == key)) continue;
      const auto at = known_.begin() + static_cast<ptrdiff_t>(i);
      std::rotate(at, at + 1, known_.end());
      return known_.back().second;
    }
    return nullptr;
  }
  // The one that nobody has asked for the longest goes; whoever uses it keeps it.
  void Add(Key key, std::shared_ptr<T> made) {
    if (known_.size() >= kMost) known_.erase(known_.begin());
    known_.emplace_back(std::move(key), std::move(made));
  }
  size_t size() const { return known_.size(); }
  Waits<Key>& waits() { return waits_; }

 private:
  std::vector<std::pair<Key, std::shared_ptr<T>>> known_;
  Waits<Key> waits_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_VARIANTS_H_
