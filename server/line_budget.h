// Bounds the lines of the log that somebody may cause: so many a second, and what is more is
// counted. (How long one may be is log_writer.h's to say.)
//
// Threads: one at a time. Ownership: plain values. Errors: none.
#ifndef CHORUS_SERVER_LINE_BUDGET_H_
#define CHORUS_SERVER_LINE_BUDGET_H_

#include <cstdint>
#include <utility>

#include "absl/time/time.h"

namespace chorus::server {

class LineBudget {
 public:
  static constexpr int kLinesPerSecond = 100;

  // Nobody has said anything for so long: but for left_out() it is as a new one.
  bool IsIdle(absl::Time now) const { return now - since_ >= absl::Seconds(1); }
  int64_t left_out() const { return left_out_; }

  // Whether a line may be written now; then *left_out says how many were not since the last one.
  bool Take(absl::Time now, int64_t* left_out) {
    if (IsIdle(now)) {
      since_ = now;
      lines_ = 0;
    }
    if (lines_ >= kLinesPerSecond) {
      ++left_out_;
      return false;
    }
    ++lines_;
    *left_out = std::exchange(left_out_, 0);
    return true;
  }

 private:
  absl::Time since_ = absl::InfinitePast();
  int lines_ = 0;
  int64_t left_out_ = 0;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_LINE_BUDGET_H_
