#include "chorus/functional/sort.h"

#include <utility>

#include "chorus/functional/nn.h"
#include "client/internal/local.h"

namespace chorus {
namespace {

using internal::Along;
using internal::IsUsable;

Attributes Direction(bool descending) {
  return descending ? Attributes{{"descending", int64_t{1}}} : Attributes();
}

Sorted Taken(const Tensor& x, const Tensor& indices, int64_t axis, CallSite site) {
  // An error is that of the sort.
  if (!IsUsable(indices)) return {indices, indices};
  return {TakeAlong(x, indices, axis, site), indices};
}

}  // namespace

Sorted Sort(const Tensor& x, int64_t axis, bool descending, CallSite site) {
  return Taken(x, ArgSort(x, axis, descending, site), axis, site);
}

Tensor ArgSort(const Tensor& x, int64_t axis, bool descending, CallSite site) {
  return Along("arg_sort", {x}, axis, Direction(descending), site);
}

Sorted TopK(const Tensor& x, int64_t k, int64_t axis, bool largest, CallSite site) {
  Attributes order = Direction(largest);
  order.push_back({"k", k});
  return Taken(x, Along("arg_sort", {x}, axis, std::move(order), site), axis, site);
}

}  // namespace chorus
