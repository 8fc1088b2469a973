// What tensors of a session may have to wait for: runs with collectives, which other ranks may keep
// waiting.
//
// Local ops are sent together only where they wait for the same (fragments.h): an op never waits
// for a collective that it does not depend on. Such a one could itself be waiting, on another rank,
// for what comes after the op: ranks make the calls of different groups, and ask for gradients, in
// any order that their data allows. So it is runs that are told apart, and not groups.
//
// Threads: the session's lock guards the making; what was made does not change.
// Ownership: tensors and pending ops share an origin. It keeps nothing, so that long histories do
//   not live in it.
// Errors: none.
#ifndef CHORUS_CLIENT_INTERNAL_ORIGINS_H_
#define CHORUS_CLIENT_INTERNAL_ORIGINS_H_

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "core/base/ids.h"

namespace chorus {
namespace internal {

class MemberCore;

// Runs before one, by how far before: bit 0 is the last. As many as may be under way (log.h); what
// is further back is over, or would only be waited for twice.
using EarlierRuns = std::bitset<512>;

struct Origin {
  int64_t index = 0;  // among the session's runs with collectives, from 1
  Sequence run;
  const MemberCore* member = nullptr;  // one that calls there; to be compared only: it may be gone
  EarlierRuns waits_for;               // itself, directly or not
};
using OriginPtr = std::shared_ptr<const Origin>;

// By index, and none that another one of them waits for: so what comes of a chain of collectives
// waits for the last. Empty: nothing.
using Origins = absl::InlinedVector<OriginPtr, 1>;

class OriginTable {
 public:
  // Of a run that has been sent, whose operands wait for `operands`.
  OriginPtr Add(Sequence run, const MemberCore* member, const Origins& operands);

  // Makes *both what is waited for by what needs *both and `other`. Few are kept, and those beyond
  // only as long as they may be under way: `oldest_run` says the first run that may.
  static void Join(Origins* both, const Origins& other, absl::FunctionRef<Sequence()> oldest_run) {
    if (other.empty() || *both == other) return;
    if (both->empty()) {
      *both = other;
    } else {
      Unite(both, other, oldest_run);
    }
  }

 private:
  static constexpr size_t kMost = 8;  // but for those that may be under way

  static void Unite(Origins* both, const Origins& other, absl::FunctionRef<Sequence()> oldest_run);

  int64_t last_index_ = 0;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_ORIGINS_H_
