#include "client/nn/same_on_ranks.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/error.h"
#include "core/base/mix_bits.h"

namespace chorus {
namespace nn {

absl::Status CheckSameOnRanks(const std::string& who, const std::vector<std::string>& lines,
                              const Group& group, CallSite site) {
  const NoGrad no_grad;
  const std::string text = absl::StrJoin(lines, "\n");
  const std::vector<int64_t> size_and_hash = {static_cast<int64_t>(text.size()),
                                              static_cast<int64_t>(HashOf(text))};
  CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                          GatherNumbers(size_and_hash, group, site));
  bool equal = true;
  std::vector<int64_t> sizes;
  for (int r = 0; r < group.size(); ++r) {
    const size_t at = static_cast<size_t>(r) * 2;
    sizes.push_back(all[at]);
    equal = equal && all[at] == all[0] && all[at + 1] == all[1];
  }
  if (equal) return absl::OkStatus();

  const Tensor bytes = FromHost(DeviceOf(group), reinterpret_cast<const uint8_t*>(text.data()),
                                text.size(), {size_and_hash[0]}, site);
  CHORUS_ASSIGN_OR_RETURN(const std::vector<uint8_t> texts,
                          AllGatherIntoTensor(bytes, group, sizes, 0, site).Read<uint8_t>());
  std::vector<std::string> first;
  for (int64_t r = 0, at = 0; r < group.size(); at += sizes[static_cast<size_t>(r)], ++r) {
    const std::string of_rank(texts.begin() + at,
                              texts.begin() + at + sizes[static_cast<size_t>(r)]);
    const std::vector<std::string> its = absl::StrSplit(of_rank, '\n', absl::SkipEmpty());
    if (r == 0) first = its;
    for (size_t i = 0; i < std::max(first.size(), its.size()); ++i) {
      const std::string expected = i < first.size() ? first[i] : "nothing more";
      const std::string got = i < its.size() ? its[i] : "nothing more";
      if (expected == got) continue;
      return MakeError(Reason::kMismatch, absl::StrCat(who, ": rank ", r, " of the group has ", got,
                                                       " where rank 0 has ", expected));
    }
  }
  return MakeError(Reason::kInternal, absl::StrCat(who, ": texts that differ, and do not"));
}

}  // namespace nn
}  // namespace chorus
