// The last variants of something that were asked for, by key, and the callbacks that wait for those
// that are being made.
//
// Threads: the node thread. Ownership: shared with the users of each. Errors: that a variant cannot
// be made is passed to what waits for it.
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

// The callbacks that wait for what is being made, by its key.
template <typename Key>
class Waits {
 public:
  // `on_made` is called with all that wait for the same key. True: it is the first of them.
  using OnMade = std::function<void(const absl::Status&)>;
  bool Wait(const Key& key, OnMade on_made) {
    auto row = Find(key);
    const bool first = row == making_.end();
    if (first) row = making_.insert(row, {key, {}});
    row->second.push_back(std::move(on_made));
    return first;
  }
  bool Has(const Key& key) { return Find(key) != making_.end(); }
  void Tell(const Key& key, const absl::Status& status) { Tell(key, status, status); }
  // The first of those that wait may be told something else than the others.
  void Tell(const Key& key, const absl::Status& first, const absl::Status& others) {
    const auto row = Find(key);
    const std::vector<OnMade> callbacks = std::move(row->second);
    making_.erase(row);
    for (size_t i = 0; i < callbacks.size(); ++i) callbacks[i](i == 0 ? first : others);
  }

 private:
  using Making = std::vector<std::pair<Key, std::vector<OnMade>>>;
  typename Making::iterator Find(const Key& key) {
    return std::find_if(making_.begin(), making_.end(),
                        [&](const auto& row) { return row.first == key; });
  }

  Making making_;
};

template <typename Key, typename T, size_t kMost>
class Variants {
 public:
  // The variant of `key`, which is the latest from now on. Null: it is not there.
  std::shared_ptr<T> Find(const Key& key) {
    for (size_t i = entries_.size(); i-- > 0;) {
      if (!(entries_[i].first == key)) continue;
      const auto at = entries_.begin() + static_cast<ptrdiff_t>(i);
      std::rotate(at, at + 1, entries_.end());
      return entries_.back().second;
    }
    return nullptr;
  }
  // Drops the variant whose last request is the oldest where there are too many; its users keep it.
  void Add(Key key, std::shared_ptr<T> variant) {
    if (entries_.size() >= kMost) entries_.erase(entries_.begin());
    entries_.emplace_back(std::move(key), std::move(variant));
  }
  size_t size() const { return entries_.size(); }
  Waits<Key>& waits() { return waits_; }

 private:
  std::vector<std::pair<Key, std::shared_ptr<T>>> entries_;
  Waits<Key> waits_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_VARIANTS_H_
