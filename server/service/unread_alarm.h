// When the end of a call is given up that its client does not take.
//
// Threads: one at a time; what is given up on the alarm's own. Ownership: its owner's, for one
// call. Errors: none.
#ifndef CHORUS_SERVER_SERVICE_UNREAD_ALARM_H_
#define CHORUS_SERVER_SERVICE_UNREAD_ALARM_H_

#include <functional>
#include <memory>

#include "absl/time/time.h"

namespace chorus::server {

class UnreadAlarm {
 public:
  UnreadAlarm() = default;
  ~UnreadAlarm() { Stop(); }
  UnreadAlarm(const UnreadAlarm&) = delete;
  UnreadAlarm& operator=(const UnreadAlarm&) = delete;

  // Once: calls `give_up` after `time`, unless Stop() has been called.
  void Start(absl::Duration time, std::function<void()> give_up);
  // gRPC has done with the call. It waits for what is being given up.
  void Stop();

 private:
  struct Call;
  std::shared_ptr<Call> call_;  // null: it has not been started
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_UNREAD_ALARM_H_
