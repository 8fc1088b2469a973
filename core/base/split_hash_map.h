// A table of hashes that grows a part at a time: however much is in it, one more entry moves no
// more than a part's. A table in one piece that is full moves all that it has, a quarter of a
// million entries in tens of milliseconds.
//
// It has one part as long as that has room for all, and costs no more than absl::flat_hash_map
// then. A part that is full becomes two, by the next bit of the hashes; those before, from the
// highest on, say which part an entry is in.
//
// Threads: as absl::flat_hash_map. Ownership: it has its entries; a copy has its own. Pointers to
// values end at the next Emplace() or Erase(). Errors: none.
#ifndef CHORUS_CORE_BASE_SPLIT_HASH_MAP_H_
#define CHORUS_CORE_BASE_SPLIT_HASH_MAP_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace chorus {

template <typename Key, typename Value>
class SplitHashMap {
  using Map = absl::flat_hash_map<Key, Value>;

 public:
  using value_type = typename Map::value_type;

  // As many as 1,023 places have room for.
  static constexpr size_t kMostOfPart = 895;

  // Null: there is none.
  Value* Find(const Key& key) { return ValueIn(&MapOf(key), key); }
  const Value* Find(const Key& key) const { return const_cast<SplitHashMap*>(this)->Find(key); }
  bool Contains(const Key& key) const { return Find(key) != nullptr; }
  // The value that there is now, and whether it is the new one.
  std::pair<Value*, bool> Emplace(const Key& key, Value value) {
    Map* map = &MapOf(key);
    while (map->size() >= kMostOfPart && !map->contains(key) && SplitPartOf(key)) {
      map = &MapOf(key);
    }
    const auto emplaced = map->emplace(key, std::move(value));
    return {&emplaced.first->second, emplaced.second};
  }
  void Erase(const Key& key) { MapOf(key).erase(key); }
  void Clear() {
    whole_.clear();
    parts_ = {};
    part_of_ = {};
    bits_ = 0;
  }
  // Lets go of what one part has. After that there are only this and size(), until nothing is left.
  void ForgetPart() {
    if (parts_.size() <= 1) return Clear();
    parts_.pop_back();
  }
  // By no order that means anything.
  template <typename Fn>
  void ForEach(Fn fn) const {
    for (const value_type& entry : whole_) fn(entry.first, entry.second);
    for (const Part& part : parts_) {
      for (const value_type& entry : part.map) fn(entry.first, entry.second);
    }
  }
  size_t size() const {
    size_t size = whole_.size();
    for (const Part& part : parts_) size += part.map.size();
    return size;
  }

 private:
  // Whatever the hashes are: a part of so many bits is not split any more.
  static constexpr int kMostBits = 20;

  struct Part {
    Map map;
    int bits = 0;  // of the hash that its entries have in common
  };

  static Value* ValueIn(Map* map, const Key& key) {
    const auto it = map->find(key);
    return it == map->end() ? nullptr : &it->second;
  }
  static uint64_t FirstBits(uint64_t hash, int bits) { return bits == 0 ? 0 : hash >> (64 - bits); }
  static uint64_t HashOf(const Key& key) { return typename Map::hasher()(key); }
  Map& MapOf(const Key& key) {
    return bits_ == 0 ? whole_ : parts_[part_of_[HashOf(key) >> (64 - bits_)]].map;
  }
  // False: it stays one.
  bool SplitPartOf(const Key& key) {
    if (parts_.empty()) {
      parts_.push_back({std::exchange(whole_, {}), 0});
      part_of_ = {0};
    }
    const uint64_t hash = HashOf(key);
    const uint32_t index = part_of_[FirstBits(hash, bits_)];
    const int bits = parts_[index].bits + 1;
    if (bits > kMostBits) return false;
    if (bits > bits_) {
      std::vector<uint32_t> twice;
      twice.reserve(2 * part_of_.size());
      for (const uint32_t part : part_of_) twice.insert(twice.end(), 2, part);
      part_of_ = std::move(twice);
      ++bits_;
    }
    const auto other = static_cast<uint32_t>(parts_.size());
    parts_.push_back({Map(), bits});
    Part& part = parts_[index];
    part.bits = bits;
    Map all = std::exchange(part.map, {});
    part.map.reserve(kMostOfPart);
    parts_[other].map.reserve(kMostOfPart);
    for (value_type& entry : all) {
      const bool is_other = (FirstBits(HashOf(entry.first), bits) & 1) != 0;
      parts_[is_other ? other : index].map.insert(std::move(entry));
    }
    // The second half of the places that the part had.
    const uint64_t places = uint64_t{1} << (bits_ - bits);
    const uint64_t begin = (FirstBits(hash, bits) | 1) * places;
    for (uint64_t place = begin; place < begin + places; ++place) part_of_[place] = other;
    return true;
  }

  Map whole_;  // as long as there are no parts
  std::vector<Part> parts_;
  std::vector<uint32_t> part_of_;  // by the hash's first bits
  int bits_ = 0;                   // 0: there are no parts
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_SPLIT_HASH_MAP_H_
