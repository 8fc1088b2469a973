// Commands of a session's log that come as messages.
//
// Threads: any. Ownership: copies. Errors: end the call: FrameOf()'s, ForSessionOf()'s and the
// command's.
#ifndef CHORUS_SERVER_SERVICE_SUBMIT_H_
#define CHORUS_SERVER_SERVICE_SUBMIT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "core/transport/command.h"
#include "server/service/call.h"

namespace chorus::server {

// The frame of a command. INVALID_ARGUMENT: larger than a frame may be, or a sequence below 1.
absl::StatusOr<std::string> FrameOf(int64_t sequence, absl::StatusOr<CommandBody> body);

// Ends `call` with the outcome of the command, or before where its slot is needed, or at its
// deadline: the log has the command then, and it may be sent again, or waited for. Nothing of the
// call stays with the node.
template <typename Response>
void SubmitCommand(const std::shared_ptr<Call<Response>>& call, int64_t session, int64_t sequence,
                   absl::StatusOr<CommandBody> body) {
  absl::StatusOr<std::string> frame = FrameOf(sequence, std::move(body));
  if (!frame.ok()) return call->Reply(frame.status());
  call->CanBeSpared();
  call->ForSession(session, [call, frame = *std::move(frame), wait = call->Waits()](
                                node::LocalNode& node, absl::Time now, SessionId id) {
    node.Submit(
        id, frame, now, [call](node::Outcome outcome) { call->Reply(outcome.status); }, wait);
  });
}

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_SUBMIT_H_
