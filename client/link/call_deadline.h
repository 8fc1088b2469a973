// Ends a call of gRPC when its time is over, whatever is done to the wall clock.
//
// gRPC's deadlines are not enough: the thread that fires them sleeps until a time of the wall
// clock, and where that is set back an hour they come an hour late. A daemon that lives ends its
// clients' calls itself; one that is stopped, or gone without a word, does not.
//
// One thread a process fires those that gRPC has left over. A forked child has none: its sessions
// are inert, and calls of its own start another.
//
// Threads: thread-compatible. Ownership: said at the constructor. Errors: none.
#ifndef CHORUS_CLIENT_LINK_CALL_DEADLINE_H_
#define CHORUS_CLIENT_LINK_CALL_DEADLINE_H_

#include <memory>

#include "absl/time/time.h"
#include "core/base/alarms.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/status.h"

namespace chorus {
namespace internal {

class CallDeadline {
 public:
  // Of the call that is to be made with `context`, which outlives this.
  CallDeadline(grpc::ClientContext* context, absl::Duration timeout);
  ~CallDeadline();
  CallDeadline(const CallDeadline&) = delete;
  CallDeadline& operator=(const CallDeadline&) = delete;

  // What the call has come to, of which gRPC says `status`: a call that was ended here was late.
  grpc::Status Of(const grpc::Status& status) const;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the alarm
  Alarms* const alarms_;
  const Alarms::Id alarm_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_LINK_CALL_DEADLINE_H_
