// When the end of a call is given up that its client does not take.
//
// It is cancelled ServiceContext::download_timeout after Start(), with whatever is on its way. gRPC
// has done with no call whose answer stands in a write that its socket does not take, not even with
// one that is cancelled: so where it has not as long again after that, the call's connection is
// ended. That of a process that is stopped stays: it has the whole time to read when it goes on.
//
// Threads: one at a time; what is given up on that of Alarms. Ownership: its owner's, for one
// call. Errors: none.
#ifndef CHORUS_SERVER_SERVICE_UNREAD_ALARM_H_
#define CHORUS_SERVER_SERVICE_UNREAD_ALARM_H_

#include <memory>

#include "grpcpp/server_context.h"
#include "server/service/context.h"

namespace chorus::server {

class UnreadAlarm {
 public:
  UnreadAlarm() = default;
  ~UnreadAlarm() { Stop(); }
  UnreadAlarm(const UnreadAlarm&) = delete;
  UnreadAlarm& operator=(const UnreadAlarm&) = delete;

  // At the first of several. Until Stop() has been called `context` is gRPC's.
  void Start(const ServiceContext* service, grpc::CallbackServerContext* context);
  // gRPC has done with the call. It waits for what is being given up.
  void Stop();

 private:
  struct Call;
  std::shared_ptr<Call> call_;  // null: it has not been started
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_UNREAD_ALARM_H_
