#include "core/ops/window.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"

namespace chorus {

absl::StatusOr<std::array<int64_t, 2>> PairAttribute(const NodeView& node, absl::string_view name,
                                                     int64_t least, int64_t most,
                                                     int64_t otherwise) {
  if (FindAttribute(node.attributes, name) == nullptr) {
    return std::array<int64_t, 2>{otherwise, otherwise};
  }
  const std::vector<int64_t> pair = IntsAttribute(node.attributes, name);
  const auto fits = [&](int64_t x) { return x >= least && x <= most; };
  if (pair.size() != 2 || !fits(pair[0]) || !fits(pair[1])) {
    return ShapeError(node,
                      absl::StrCat("two numbers from ", least, " to ", most, " as '", name, "'"),
                      absl::StrCat("[", absl::StrJoin(pair, ","), "]"));
  }
  return std::array<int64_t, 2>{pair[0], pair[1]};
}

absl::StatusOr<Windows> WindowsOf(const NodeView& node, const std::array<int64_t, 2>& kernel) {
  CHORUS_ASSIGN_OR_RETURN(const auto stride, PairAttribute(node, "stride", 1, kMostOfWindow, 1));
  CHORUS_ASSIGN_OR_RETURN(const auto padding, PairAttribute(node, "padding", 0, kMostOfWindow, 0));
  CHORUS_ASSIGN_OR_RETURN(const auto dilation,
                          PairAttribute(node, "dilation", 1, kMostOfWindow, 1));
  Windows windows;
  for (size_t d = 0; d < windows.size(); ++d) {
    windows[d] = {kernel[d], stride[d], padding[d], dilation[d]};
  }
  return windows;
}

}  // namespace chorus
