// The call of a DataParallel that is under way, for layers whose replicas have something in common.
//
// Threads: a scope is its thread's. Ownership: it refers to the group, which must outlive it.
// Errors: none.
#ifndef CHORUS_CLIENT_NN_REPLICAS_H_
#define CHORUS_CLIENT_NN_REPLICAS_H_

#include <utility>

#include "chorus/parallel.h"
#include "client/internal/trace.h"

namespace chorus {
namespace nn {

// While one lives the first `count` devices' replicas are called on this thread, in that order.
// Nobody else calls for the other devices.
class ReplicaScope {
 public:
  ReplicaScope(const parallel::DeviceGroup& devices, int count)
      : devices_(devices),
        count_(count),
        trace_(internal::IdOf(internal::Trace::Current())),
        outer_(std::exchange(innermost_, this)) {}
  ~ReplicaScope() { innermost_ = outer_; }
  ReplicaScope(const ReplicaScope&) = delete;
  ReplicaScope& operator=(const ReplicaScope&) = delete;

  static ReplicaScope* Innermost() { return innermost_; }

  const parallel::DeviceGroup& devices() const { return devices_; }
  int count() const { return count_; }
  // In a function that a replica compiles for itself: its graph would be used again where there are
  // other replicas.
  bool IsOutsideOfTrace() const { return trace_ != internal::IdOf(internal::Trace::Current()); }
  // Replicas have called collectives of the group's members: if one of them cannot go on, the
  // members' next calls must not meet these.
  void NoteCall() { called_ = true; }
  bool called() const { return called_; }

 private:
  static thread_local ReplicaScope* innermost_;

  const parallel::DeviceGroup& devices_;
  const int count_;
  const internal::TraceId trace_;
  bool called_ = false;
  ReplicaScope* const outer_;
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_REPLICAS_H_
