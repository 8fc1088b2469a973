// In which order a gang's collectives are launched, and its runs.
//
// A gang is a set of runs that share instances; each rank gave its own runs in its own order, and
// streams are queues, so all ranks must follow one order. It is a function of what the runs ask for
// alone: equal gangs get equal orders, on every rank and in every life of the daemon.
//
// Threads: any; a pure function. Ownership: a GangView refers to memory of the caller.
// Errors: none; where there is no order a GangConflict says why.
#ifndef CHORUS_CORE_COLLECTIVE_GANG_ORDER_H_
#define CHORUS_CORE_COLLECTIVE_GANG_ORDER_H_

#include <cstdint>
#include <vector>

#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/base/ids.h"
#include "core/collective/instance.h"
#include "core/collective/vote.h"

namespace chorus {

// A gang, as far as its order is concerned; runs and instances are named by their index here. It
// refers to memory of the caller.
struct GangView {
  struct Run {
    absl::Span<const Participation> parts;
    std::vector<int32_t> instances;  // by participation
    absl::Span<const Rank> ranks;    // that it speaks for
    std::vector<int32_t> producers;  // whose results it consumes
  };
  struct Instance {
    const InstanceKey* key = nullptr;
    int32_t forward = -1;  // of a gradient: the instance that it is of, if that is in the gang
  };
  std::vector<Run> runs;  // as they were submitted
  std::vector<Instance> instances;
};

struct GangOrder {
  std::vector<int32_t> instances;
  std::vector<int32_t> runs;
  // By run: its participations, where they do not stand in the order of its program. Else empty.
  std::vector<std::vector<int32_t>> reordered;
};

// Why there is none.
struct GangConflict {
  // Of two runs, or of two instances: `after` cannot be launched before `before`.
  struct Wait {
    bool of_runs = false;
    int32_t after = -1;
    int32_t before = -1;
    // Of instances: the call that needs the other's result, or that a run of many needs makes
    // behind the other. -1: it is its gradient.
    int32_t run = -1;
    int32_t participation = -1;
  };
  int32_t instance = -1;  // to name first; -1: there is none to name
  // Data dependences that go in a circle: the first kMostWaits of them, and how many more it has.
  static constexpr size_t kMostWaits = 8;
  std::vector<Wait> circle;
  size_t waits_left_out = 0;
  // Or two runs of one rank that would have to be interleaved.
  bool interleaved = false;
  Rank rank;
  int32_t run = -1;
  int32_t other_run = -1;
};

// Instances stand behind what they need, and a run's behind those of its producers; a rank's runs
// stand in the order of its log, if the data allows; among those that are free the least key comes
// first. Runs come in the order of their first instances, local ones right behind their producers.
// Returns why it cannot be, else fills `order`.
//
// What that takes grows with the gang's calls and not with the pairs of which one needs the other,
// of which a run of 2,048 calls may have a million: calls in a row that need the same, or that and
// what comes behind it, have that in common. A run whose calls need each something else (more than
// kMostNeedsPerCall for each call, where a gang's runs have more than kMostNeeds beyond that)
// stands in the order in which its program first comes to its instances, which is one that they
// allow.
inline constexpr size_t kMostNeeds = 16384;
inline constexpr size_t kMostNeedsPerCall = 16;
absl::optional<GangConflict> FindGangOrder(const GangView& gang, GangOrder* order);

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_GANG_ORDER_H_
