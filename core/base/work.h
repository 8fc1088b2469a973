// How much work a thread does at a time: counted, so that tests can look at it whatever the machine
// does meanwhile.
//
// A slice is what a thread does before others have their turn: for the node thread what it takes
// from one ring, one posted closure, one completion, and what a turn goes on with. Its work is in
// pieces of some tens of nanoseconds: a node that is decoded or planned, a step of a launch that is
// enqueued, a command, a name, a vote, a row of a list; of bytes that are read and
// written kBytesOfWork are one.
//
// Threads: each counts its own. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_BASE_WORK_H_
#define CHORUS_CORE_BASE_WORK_H_

#include <cstdint>

namespace chorus {

// No slice of the node thread has more: about a millisecond. The longest lists have 16,384 rows.
inline constexpr int64_t kMaxSliceWork = 18000;
// What goes on as long as there is more, such as frames that wait, ends a turn here: its last piece
// may be long.
inline constexpr int64_t kTurnWork = kMaxSliceWork / 8;
inline constexpr int64_t kBytesOfWork = 128;

// Inline: a small run has dozens of these.
class WorkSlice {
 public:
  WorkSlice() : outer_(current_) { current_ = this; }
  // What was done meanwhile is no part of the slice that it began in.
  ~WorkSlice() {
    current_ = outer_;
    if (work_ > largest_) largest_ = work_;
  }
  WorkSlice(const WorkSlice&) = delete;
  WorkSlice& operator=(const WorkSlice&) = delete;

 private:
  friend void CountWork(int64_t work);
  friend int64_t SliceWork();
  friend int64_t LargestSliceWork();
  friend void ForgetLargestSlice();

  static inline thread_local WorkSlice* current_ = nullptr;
  static inline thread_local int64_t largest_ = 0;

  WorkSlice* const outer_;
  int64_t work_ = 0;
};

// In the slice that this thread is in; nothing where it is in none.
inline void CountWork(int64_t work) {
  if (WorkSlice::current_ != nullptr) WorkSlice::current_->work_ += work;
}
// So far, of the slice that this thread is in; 0 where it is in none.
inline int64_t SliceWork() {
  return WorkSlice::current_ == nullptr ? 0 : WorkSlice::current_->work_;
}
// Whether that is not more than a turn's: what can wait for another turn does.
inline bool SliceHasTime() { return SliceWork() <= kTurnWork; }
// Of all slices that have ended on this thread, or since these were forgotten.
inline int64_t LargestSliceWork() { return WorkSlice::largest_; }
// For tests: each is about its own.
inline void ForgetLargestSlice() { WorkSlice::largest_ = 0; }

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_WORK_H_
