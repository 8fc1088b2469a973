// What ranks that train together tell each other before they rely on it.
//
// Threads: any; calls for one Group must be ordered by the caller. All wait for the other ranks.
// Ownership: nothing is kept. Errors: returned; INVALID_ARGUMENT kMismatch: ranks that differ, by
//   rank and line. One rank's is told to the others, as of any collective.
#ifndef CHORUS_CLIENT_NN_SAME_ON_RANKS_H_
#define CHORUS_CLIENT_NN_SAME_ON_RANKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/autograd.h"
#include "chorus/call_site.h"
#include "chorus/collectives.h"
#include "chorus/session.h"
#include "client/nn/refused.h"

namespace chorus {
namespace nn {

// Every rank's numbers, as many of each, by rank.
template <typename T>
absl::StatusOr<std::vector<T>> GatherNumbers(const std::vector<T>& values, const Group& group,
                                             CallSite site) {
  const NoGrad no_grad;
  return AllGatherIntoTensor(
             FromHost(DeviceOf(group), values, {static_cast<int64_t>(values.size())}, site), group,
             {}, 0, site)
      .template Read<T>();
}

// Whether `lines`, which have no line breaks, are the same on all ranks: one call, and one more to
// name what differs. `who` is named in the error.
absl::Status CheckSameOnRanks(const std::string& who, const std::vector<std::string>& lines,
                              const Group& group, CallSite site);

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_SAME_ON_RANKS_H_
