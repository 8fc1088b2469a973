// A table of hashes that grows a part at a time: however much is in it, one more entry moves no
// more than a part's, and many more move about as many as they are. A table in one piece that is
// full moves all that it has, a quarter of a million entries in tens of milliseconds.
//
// It has one part as long as that has room for all, and costs no more than absl::flat_hash_map
// then. After that parts become two one after the other, as entries come (linear hashing), and not
// when they are full: all are at about the same time. An entry keeps its hash, so that to move it
// is cheap.
//
// Threads: as absl::flat_hash_map. Ownership: it has its entries; a copy has its own. Pointers to
// values end at the next Emplace() or Erase(). Errors: none.
#ifndef CHORUS_CORE_BASE_SPLIT_HASH_MAP_H_
#define CHORUS_CORE_BASE_SPLIT_HASH_MAP_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "core/base/work.h"

namespace chorus {

// What the maps below are made of. An Entry has its `hash`, and is equal to itself alone.
template <typename Entry>
class SplitHashTable {
 public:
  // As many as 1,023 slots have room for.
  static constexpr size_t kMostOfPart = 895;
  // On average, if there are several: those whose turn to be split comes last have twice as many.
  static constexpr size_t kUsualOfPart = 400;
  // Of so many parts an empty table keeps the room: what comes may be as much as what has gone.
  static constexpr size_t kKeptParts = 8;

  // Null: there is none with that hash that `is_it`.
  template <typename IsIt>
  Entry* Find(uint64_t hash, const IsIt& is_it) {
    Part& part = PartOf(hash);
    const auto it = part.find(Sought<IsIt>{hash, is_it});
    return it == part.end() ? nullptr : const_cast<Entry*>(&*it);
  }
  template <typename IsIt>
  const Entry* Find(uint64_t hash, const IsIt& is_it) const {
    return const_cast<SplitHashTable*>(this)->Find(hash, is_it);
  }
  // The one that there is now, and whether it is the one that `make` has just made.
  template <typename IsIt, typename Make>
  std::pair<Entry*, bool> Emplace(uint64_t hash, const IsIt& is_it, const Make& make) {
    if (size_ >= (others_.empty() ? kMostOfPart : kUsualOfPart * (others_.size() + 2))) SplitNext();
    bool is_new = false;
    const auto it =
        PartOf(hash).lazy_emplace(Sought<IsIt>{hash, is_it}, [&](const auto& construct) {
          is_new = true;
          construct(make());
        });
    size_ += is_new ? 1 : 0;
    return {const_cast<Entry*>(&*it), is_new};
  }
  template <typename IsIt>
  void Erase(uint64_t hash, const IsIt& is_it) {
    size_ -= PartOf(hash).erase(Sought<IsIt>{hash, is_it});
    if (size_ > 0 || others_.size() < kKeptParts) return;
    CountWork(static_cast<int64_t>(others_.size()));
    Clear();
  }
  void Clear() {
    first_.clear();
    others_ = {};
    round_ = 1;
    size_ = 0;
  }
  // Lets go of what one part has. After that there are only this and size(), until nothing is left:
  // when it has been called as often as there were parts.
  void ForgetPart() {
    if (others_.empty()) return Clear();
    size_ -= others_.back().size();
    others_.pop_back();
  }
  // By no order that means anything.
  template <typename Fn>
  void ForEach(Fn fn) const {
    for (const Entry& entry : first_) fn(entry);
    for (const Part& part : others_) {
      for (const Entry& entry : part) fn(entry);
    }
  }
  size_t size() const { return size_; }
  size_t parts() const { return others_.size() + 1; }

 private:
  // So many entries are moved in the time of a piece of work.
  static constexpr size_t kMovedOfWork = 2;

  template <typename IsIt>
  struct Sought {
    uint64_t hash;
    const IsIt& is_it;
  };
  struct HashOf {
    using is_transparent = void;
    template <typename T>
    size_t operator()(const T& of) const {
      return static_cast<size_t>(of.hash);
    }
  };
  struct IsEqual {
    using is_transparent = void;
    bool operator()(const Entry& a, const Entry& b) const { return a.hash == b.hash && a == b; }
    template <typename IsIt>
    bool operator()(const Entry& entry, const Sought<IsIt>& sought) const {
      return entry.hash == sought.hash && sought.is_it(entry);
    }
  };
  using Part = absl::flat_hash_set<Entry, HashOf, IsEqual>;

  Part& PartAt(size_t part) { return part == 0 ? first_ : others_[part - 1]; }
  // By other bits than those by which a part finds its slots.
  Part& PartOf(uint64_t hash) {
    if (others_.empty()) return first_;
    const size_t part = static_cast<size_t>(hash >> 32) & (2 * round_ - 1);
    return PartAt(part <= others_.size() ? part : part - round_);
  }
  void SplitNext() {
    if (others_.size() + 1 == 2 * round_) round_ *= 2;
    const size_t part = others_.size() + 1 - round_;
    others_.emplace_back();  // from here on it may be the part of an entry
    Part old_part = std::exchange(PartAt(part), {});
    PartAt(part).reserve(kMostOfPart);
    others_.back().reserve(kMostOfPart);
    CountWork(static_cast<int64_t>(old_part.size() / kMovedOfWork));
    for (const Entry& entry : old_part)
      PartOf(entry.hash).insert(std::move(const_cast<Entry&>(entry)));
  }

  Part first_;
  std::vector<Part> others_;
  size_t round_ = 1;  // a power of two; of so many parts those before the next one have been split
  size_t size_ = 0;
};

template <typename Key, typename Value>
class SplitHashMap {
  struct Entry {
    uint64_t hash;
    Key key;
    Value value;
    friend bool operator==(const Entry& a, const Entry& b) { return a.key == b.key; }
  };

 public:
  using value_type = Entry;

  // Null: there is none.
  Value* Find(const Key& key) {
    Entry* const entry = entries_.Find(HashOf(key), Is(key));
    return entry == nullptr ? nullptr : &entry->value;
  }
  const Value* Find(const Key& key) const { return const_cast<SplitHashMap*>(this)->Find(key); }
  bool Contains(const Key& key) const { return Find(key) != nullptr; }
  // The value that there is now, and whether it is the new one.
  std::pair<Value*, bool> Emplace(const Key& key, Value value) {
    const uint64_t hash = HashOf(key);
    const auto emplaced = entries_.Emplace(hash, Is(key), [&] {
      return Entry{hash, key, std::move(value)};
    });
    return {&emplaced.first->value, emplaced.second};
  }
  void Erase(const Key& key) { entries_.Erase(HashOf(key), Is(key)); }
  void Clear() { entries_.Clear(); }
  void ForgetPart() { entries_.ForgetPart(); }
  // By no order that means anything.
  template <typename Fn>
  void ForEach(Fn fn) const {
    entries_.ForEach([&fn](const Entry& entry) { fn(entry.key, entry.value); });
  }
  size_t size() const { return entries_.size(); }
  size_t parts() const { return entries_.parts(); }

 private:
  static uint64_t HashOf(const Key& key) { return absl::Hash<Key>()(key); }
  static auto Is(const Key& key) {
    return [&key](const Entry& entry) { return entry.key == key; };
  }

  SplitHashTable<Entry> entries_;
};

// Of rows that are numbered and have their keys themselves, `rows[row].key`: an entry is small. The
// rows of all entries are there, in whatever table is given.
template <typename Key>
class SplitHashIndex {
  struct Entry {
    uint64_t hash;
    int32_t row;
    friend bool operator==(const Entry& a, const Entry& b) { return a.row == b.row; }
  };

 public:
  using value_type = Entry;

  static uint64_t HashOf(const Key& key) { return absl::Hash<Key>()(key); }
  // Null: there is none. The hash is the key's.
  template <typename Rows>
  const int32_t* Find(uint64_t hash, const Key& key, const Rows& rows) const {
    const Entry* const entry =
        entries_.Find(hash, [&](const Entry& entry) { return rows[entry.row].key == key; });
    return entry == nullptr ? nullptr : &entry->row;
  }
  template <typename Rows>
  const int32_t* Find(const Key& key, const Rows& rows) const {
    return Find(HashOf(key), key, rows);
  }
  // A row whose key is that of none that is there.
  void Add(uint64_t hash, int32_t row) {
    entries_.Emplace(hash, Is(row), [&] { return Entry{hash, row}; });
  }
  template <typename Rows>
  void Erase(int32_t row, const Rows& rows) {
    entries_.Erase(HashOf(rows[row].key), Is(row));
  }
  // The rows, by no order that means anything.
  template <typename Fn>
  void ForEach(Fn fn) const {
    entries_.ForEach([&fn](const Entry& entry) { fn(entry.row); });
  }
  size_t size() const { return entries_.size(); }

 private:
  static auto Is(int32_t row) {
    return [row](const Entry& entry) { return entry.row == row; };
  }

  SplitHashTable<Entry> entries_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_SPLIT_HASH_MAP_H_
