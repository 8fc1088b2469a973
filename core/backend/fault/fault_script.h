// Which faults to inject, where and when.
//
// Threads: plain data and pure functions. Ownership: copies. Errors: said at ParseFaultScript().
#ifndef CHORUS_CORE_BACKEND_FAULT_FAULT_SCRIPT_H_
#define CHORUS_CORE_BACKEND_FAULT_FAULT_SCRIPT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace chorus {

struct FaultRule {
  enum class Site : uint8_t { kAllocate, kOpen, kLaunch, kCopy, kCollective };
  enum class Effect : uint8_t {
    kDelay,        // the work, and what is behind it on its stream, starts later
    kError,        // it fails; a collective fails on all members and breaks its communicator
    kOutOfMemory,  // allocations only
    kLost,         // it never completes; a collective does when its communicator is aborted
  };

  Site site = Site::kCollective;
  Effect effect = Effect::kError;
  int device = -1;         // -1: any
  int64_t skip = 0;        // so many calls that match are let through first,
  int64_t times = 1;       // then so many are hit, -1: all,
  double probability = 1;  // each with this probability, by the script's seed
  absl::Duration delay = absl::Milliseconds(1);
};

// The first rule that hits a call decides.
struct FaultScript {
  uint64_t seed = 1;
  std::vector<FaultRule> rules;
};

// Rules between semicolons: SITE EFFECT [key=value ...], and seed=N by itself. Sites: allocate,
// open, launch, copy, collective. Effects: delay, error, oom, lost. Keys: device, skip, times (a
// number or "all"), probability, for (of a delay: "5ms").
//   "seed=7; collective error device=1 skip=3; copy delay for=2ms times=all probability=0.1"
// INVALID_ARGUMENT names the rule and what was expected.
absl::StatusOr<FaultScript> ParseFaultScript(absl::string_view text);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_FAULT_FAULT_SCRIPT_H_
