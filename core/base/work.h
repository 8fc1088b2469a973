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

class WorkSlice {
 public:
  WorkSlice();
  // What was done meanwhile is no part of the slice that it began in.
  ~WorkSlice();
  WorkSlice(const WorkSlice&) = delete;
  WorkSlice& operator=(const WorkSlice&) = delete;

 private:
  friend void CountWork(int64_t work);
  friend int64_t SliceWork();

  WorkSlice* const outer_;
  int64_t work_ = 0;
};

// In the slice that this thread is in; nothing where it is in none.
void CountWork(int64_t work);
// So far, of the slice that this thread is in; 0 where it is in none.
int64_t SliceWork();
// Of all slices that have ended on this thread.
int64_t LargestSliceWork();

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_WORK_H_
