// What tensors and calls of a session have in common, each once: equal ones are equal pointers.
//
// Threads: the session's lock guards an Interner; what it hands out does not change.
// Ownership: a type lives as long as anybody has it; a line of the program until ForgetSources.
// Errors: none.
#ifndef CHORUS_CLIENT_INTERNAL_INTERNER_H_
#define CHORUS_CLIENT_INTERNAL_INTERNER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include "absl/container/flat_hash_map.h"
#include "absl/hash/hash.h"
#include "chorus/tensor.h"
#include "core/tensor/type.h"

namespace chorus {
namespace internal {

// A type that tensors share.
struct TensorInfo {
  TensorType type;
  Shape shape;
  int64_t elements = 0;
  int64_t bytes = 0;
};
using TensorInfoPtr = std::shared_ptr<const TensorInfo>;

struct TensorTypeHash {
  size_t operator()(const TensorType& type) const {
    using Part = std::tuple<size_t, int64_t, int32_t>;
    size_t hash = static_cast<size_t>(type.dtype);
    for (const Dim& dim : type.dims) hash = absl::Hash<Part>()(Part(hash, dim.size, dim.symbol));
    return hash;
  }
};

// One object for all keys that are equal, as long as anybody has it: rows that nobody has any more
// go once they may be as many as the others.
template <typename Key, typename T, typename Hash = absl::Hash<Key>>
class InternTable {
 public:
  // `make` gives the T of a key that has none.
  template <typename Make>
  std::shared_ptr<const T> Get(const Key& key, const Make& make) {
    const auto row = rows_.find(key);
    if (row != rows_.end()) return row->second;
    if (rows_.size() >= trim_at_) {
      absl::erase_if(rows_, [](const auto& row) { return row.second.use_count() == 1; });
      trim_at_ = std::max(kLeast, 2 * rows_.size());
    }
    return rows_.emplace(key, make()).first->second;
  }
  size_t size() const { return rows_.size(); }

 private:
  static constexpr size_t kLeast = 256;
  absl::flat_hash_map<Key, std::shared_ptr<const T>, Hash> rows_;
  size_t trim_at_ = kLeast;
};

class Interner {
 public:
  TensorInfoPtr Type(const TensorType& type);
  const std::string* Source(const std::string& source);
  // So many lines that keys of calls should be forgotten with them.
  bool HasManySources() const { return sources_.size() >= kMaxSources; }
  void ForgetSources() { sources_.clear(); }

  size_t types() const { return types_.size(); }
  size_t sources() const { return sources_.size(); }

 private:
  static constexpr size_t kMaxSources = 4096;  // lines of the program

  // Bounded by what tensors, tape entries, calls and programs have that live, twice.
  InternTable<TensorType, TensorInfo, TensorTypeHash> types_;
  absl::flat_hash_map<std::string, std::unique_ptr<std::string>> sources_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_INTERNER_H_
