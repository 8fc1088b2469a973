// How long a caller that was refused memory for now (IsForNow, core/runtime/budget.h) waits for it.
//
// Threads: one. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_NODE_PATIENCE_H_
#define CHORUS_CORE_NODE_PATIENCE_H_

#include <algorithm>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/runtime/budget.h"

namespace chorus::node {

class Patience {
 public:
  // The kernel takes some 3 GiB of pages back in a second.
  static constexpr absl::Duration kLongest = absl::Seconds(10);

  // What came of asking at `now`. True: wait, and ask again by until(). False: that was the answer,
  // and the next question is another one.
  bool Waits(const absl::Status& answer, absl::Time now) {
    until_ = std::min(until_, now + kLongest);
    const bool waits = IsForNow(answer) && now < until_;
    if (!waits) until_ = absl::InfiniteFuture();
    return waits;
  }
  absl::Time until() const { return until_; }

 private:
  absl::Time until_ = absl::InfiniteFuture();
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_PATIENCE_H_
