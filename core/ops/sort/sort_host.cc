#include "core/ops/sort/sort_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_rows.h"
#include "core/ops/sort/sort_keys.h"

namespace chorus {
namespace {

// How a key and its index lie in memory. Equal keys differ by their indices: there is one order,
// however it is found.
template <typename Key>
struct Packed : PackedEntry<Key> {
  using Entry = uint64_t;
  static int64_t IndexOf(Entry entry) {
    return static_cast<int64_t>(entry & PackedEntry<Key>::kIndexMask);
  }
};
template <typename Key>
struct Pair {
  struct Entry {
    Key key;
    int64_t index;
    bool operator<(const Entry& other) const {
      return key != other.key ? key < other.key : index < other.index;
    }
  };
  static Entry Make(Key key, int64_t index) { return {key, index}; }
  static int64_t IndexOf(const Entry& entry) { return entry.index; }
};

// How rows are cut into units, and whether entries stand where the result does.
struct SortCut {
  static constexpr int64_t kMostUnits = 64;

  SortCut(const HostRows& x, int64_t k, bool packed)
      : in_place(packed && x.stride == 1),
        rows(in_place ? 1 : (x.count() + kMostUnits - 1) / kMostUnits),
        units(k == 0 || rows == 0 ? 0 : (x.count() + rows - 1) / rows) {}

  bool in_place;
  int64_t rows;  // of a unit
  int64_t units;
};

// `x` are x's rows along the axis.
template <typename T, typename Entries>
class ArgSort : public HostKernel {
 public:
  ArgSort(const HostRows& x, int64_t k, bool descending)
      : ArgSort(x, k, descending, SortCut(x, k, std::is_same<Entry, uint64_t>::value)) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const in = static_cast<const T*>(buffers.inputs[0]);
    int64_t* const out = static_cast<int64_t*>(buffers.outputs[0]);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t last = std::min((unit + 1) * cut_.rows, x_.count());
      for (int64_t row = unit * cut_.rows; row < last; ++row) {
        int64_t* const indices = out + row / x_.stride * x_.stride * k_ + row % x_.stride;
        Entry* const entries = cut_.in_place
                                   ? reinterpret_cast<Entry*>(indices)
                                   : reinterpret_cast<Entry*>(buffers.workspace.data()) + unit * k_;
        Select(in + x_.FirstOf(row), entries);
        std::sort(entries, entries + k_);
        for (int64_t i = 0; i < k_; ++i) indices[i * x_.stride] = Entries::IndexOf(entries[i]);
      }
    }
    return absl::OkStatus();
  }

 private:
  using Key = KeyType<T>;
  using Entry = typename Entries::Entry;

  ArgSort(const HostRows& x, int64_t k, bool descending, const SortCut& cut)
      : HostKernel(cut.units, CostOf(x, k, cut),
                   cut.in_place ? 0 : cut.units * k * int64_t{sizeof(Entry)}),
        x_(x),
        k_(k),
        descending_(descending),
        cut_(cut) {}

  // A comparison takes as long as some bytes.
  static int64_t CostOf(const HostRows& x, int64_t k, const SortCut& cut) {
    int64_t steps = 1;
    while (int64_t{1} << steps < k) ++steps;
    return cut.rows * (x.size * int64_t{sizeof(T) + 8} + k * 16 * steps);
  }

  // The k_ first entries of a row, in any order.
  void Select(const T* x, Entry* entries) const {
    const auto make = [&](int64_t i) {
      const Key key = KeyOf(x[i * x_.stride]);
      return Entries::Make(descending_ ? static_cast<Key>(~key) : key, i);
    };
    for (int64_t i = 0; i < k_; ++i) entries[i] = make(i);
    if (k_ == x_.size) return;
    std::make_heap(entries, entries + k_);
    for (int64_t i = k_; i < x_.size; ++i) {
      const Entry entry = make(i);
      if (!(entry < entries[0])) continue;
      std::pop_heap(entries, entries + k_);
      entries[k_ - 1] = entry;
      std::push_heap(entries, entries + k_);
    }
  }

  const HostRows x_;
  const int64_t k_;
  const bool descending_;
  const SortCut cut_;
};

HostKernelOrError MakeArgSort(const NodeView& node, absl::Span<const TensorType> outputs) {
  const int64_t axis = IntAttribute(node.attributes, "axis");
  const HostRows x(node.input(0), axis);
  const int64_t k = outputs[0].dims[axis].size;
  const bool descending = IntAttribute(node.attributes, "descending") == 1;
  const auto make = [&](auto t) -> HostKernelOrError {
    using T = decltype(t);
    using Key = KeyType<T>;
    if constexpr (sizeof(Key) < sizeof(uint64_t)) {
      if (x.size <= int64_t{1} << Packed<Key>::kIndexBits) {
        return std::make_unique<ArgSort<T, Packed<Key>>>(x, k, descending);
      }
    }
    return std::make_unique<ArgSort<T, Pair<Key>>>(x, k, descending);
  };
  if (node.input(0).dtype == DType::kBool) return make(Bool());
  return VisitNumbers(node.input(0).dtype, make,
                      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {{"arg_sort", MakeArgSort}};

}  // namespace

absl::Span<const HostKernelEntry> SortHostKernels() { return kEntries; }

}  // namespace chorus
