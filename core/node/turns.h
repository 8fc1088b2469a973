// Whose turn it is, of those that share something: the one for which the least work will have been
// done with its next turn.
//
// Work is compared within a whole, and a part may be a whole itself: sessions are in processes,
// these in tenants, these in the node. Nobody saves up what it has not asked for: one that comes
// back is where those are whose turn it is. But one that asks for little at a time is before those
// that ask for much, or it would wait for a turn of each that comes at the same time.
//
// Threads: one, whichever. Ownership: plain data; a part belongs to one whole. Errors: none.
#ifndef CHORUS_CORE_NODE_TURNS_H_
#define CHORUS_CORE_NODE_TURNS_H_

#include <algorithm>
#include <cstdint>

#include "core/base/work.h"

namespace chorus::node {

class Turns {
 public:
  // It wants a turn in `whole`; said in each round, by numbers that ascend, until it has had it.
  void Enter(int64_t round, const Turns& whole) {
    const bool comes_back = round > round_ + 1;
    if (comes_back) used_ = std::max(used_, whole.clock_);
    round_ = round;
  }
  // Work done for it by the end of its next turn, about: of those that want one the least has it.
  int64_t work_after_turn() const { return used_ + usual_; }
  // It has had one.
  void Leave(int64_t work, Turns* whole) {
    whole->clock_ = std::max(whole->clock_, used_);
    used_ += work;
    usual_ += (std::min(work, kTurnWork) - usual_) / 4;
  }

 private:
  int64_t used_ = 0;           // work done for it, about
  int64_t usual_ = kTurnWork;  // in a turn, as far as that is known
  int64_t round_ = 0;          // in which it wanted a turn last
  int64_t clock_ = 0;          // what the one of its parts had had whose turn it was last
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_TURNS_H_
