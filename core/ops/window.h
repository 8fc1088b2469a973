// Windows that slide over the last two dimensions of a tensor: what convolution and pooling have in
// common.
//
// Threads: plain values and pure functions. Ownership: values. Errors: INVALID_ARGUMENT kBadType
// for attributes that make no window (ShapeError).
#ifndef CHORUS_CORE_OPS_WINDOW_H_
#define CHORUS_CORE_OPS_WINDOW_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/ops/node_spec.h"

namespace chorus {

// Along one dimension: `kernel` taps, `dilation` apart, at places that are `stride` apart. The
// first place begins `padding` before the first element, and the last ends at most that far behind
// the last one.
struct Window {
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t dilation = 1;

  // From the first tap to the last.
  int64_t extent() const { return dilation * (kernel - 1) + 1; }
  // How many places there are over `size` elements; 0: it does not fit once.
  int64_t PlacesOver(int64_t size) const {
    const int64_t room = size + 2 * padding - extent();
    return room < 0 ? 0 : room / stride + 1;
  }
  // The element under a tap at a place; one that is not within the size is padding.
  int64_t ElementAt(int64_t place, int64_t tap) const {
    return place * stride - padding + tap * dilation;
  }
  // The places at which a tap is over one of `size` elements: [begin, end).
  struct Range {
    int64_t begin;
    int64_t end;
  };
  Range PlacesOfTap(int64_t tap, int64_t size) const {
    const int64_t first = ElementAt(0, tap);
    const int64_t begin = first >= 0 ? 0 : (-first + stride - 1) / stride;
    const int64_t end = first >= size ? 0 : (size - 1 - first) / stride + 1;
    return {begin, std::max(begin, std::min(end, PlacesOver(size)))};
  }
  // The places whose first tap is at or before an element of `size` and whose last one at or behind
  // it: [begin, end).
  Range PlacesReaching(int64_t element, int64_t size) const {
    const int64_t last = element + padding;
    const int64_t before = last - extent();  // the last first tap that is too early
    const int64_t begin = before < 0 ? 0 : before / stride + 1;
    return {begin, std::min(last / stride + 1, PlacesOver(size))};
  }
};
using Windows = std::array<Window, 2>;  // over height and width

// The most of what is no size of a tensor: keeps products of them and of sizes within 64 bits.
inline constexpr int64_t kMostOfWindow = int64_t{1} << 20;
// Two numbers within [least, most], or `otherwise` twice where the attribute is absent.
absl::StatusOr<std::array<int64_t, 2>> PairAttribute(const NodeView& node, absl::string_view name,
                                                     int64_t least, int64_t most,
                                                     int64_t otherwise);

// With attributes stride, padding and dilation, whose defaults are Window's. `kernel`: two numbers
// from 1 on, of 2^40 at most.
absl::StatusOr<Windows> WindowsOf(const NodeView& node, const std::array<int64_t, 2>& kernel);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_WINDOW_H_
