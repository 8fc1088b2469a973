// What a daemon and a worker tell each other: messages both ways, through memory that both map.
//
// Each way is a ring of its own (core/transport/ring.h), so that whatever one end writes, the other
// reads nothing outside of it; a socket tells each end when the other's process has ended.
//
// Threads: one may send and another receive; Wake() any. Ownership: each end has its mappings and
// descriptors. Errors: UNAVAILABLE kDeviceLost, where nothing else is said: the other end is gone,
// or its bytes make no sense; the channel is of no more use.
#ifndef CHORUS_CORE_WORKER_CHANNEL_H_
#define CHORUS_CORE_WORKER_CHANNEL_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/adaptive_spin.h"
#include "core/base/unique_fd.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"

namespace chorus::worker {

class Channel {
 public:
  // What the other end is opened with, by another process: its own two rings, what wakes it and
  // what it wakes, and the socket.
  static constexpr int kDescriptors = 5;
  using Descriptors = std::array<UniqueFd, kDescriptors>;

  // This end, and what the other is made of. `longest`: of the messages that come from there.
  // RESOURCE_EXHAUSTED kOutOfMemory: what the system refuses.
  static absl::StatusOr<std::unique_ptr<Channel>> Create(size_t longest, Descriptors* other);
  // INVALID_ARGUMENT kMalformed, UNIMPLEMENTED kVersion: not what Create() made.
  static absl::StatusOr<std::unique_ptr<Channel>> Open(Descriptors descriptors, size_t longest);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // --- Sending: one thread at a time ---
  // False: there is no room now, or never in one piece.
  absl::StatusOr<bool> TrySend(absl::string_view message);
  // Waits for room, in as many pieces as it takes; `go_on` is asked now and then, and what it
  // refuses is returned.
  absl::Status Send(absl::string_view message, const std::function<absl::Status()>& go_on);

  // --- Receiving: one thread at a time ---
  // The next message, if one has come.
  absl::StatusOr<bool> Receive(std::string* message);
  // Waits until a message is there, Wake() was called since the last wait, the other end has gone,
  // or for so long. It may return early.
  absl::Status Wait(absl::Duration at_most);

  void Wake();

 private:
  Channel(std::unique_ptr<SessionMemory> out, std::unique_ptr<SessionMemory> in, UniqueFd own_event,
          UniqueFd other_event, UniqueFd socket, size_t longest);
  absl::StatusOr<bool> TrySendPiece(absl::string_view piece, bool is_last);
  // Sleeps until the other end has gone or, if `until_rung`, until this one was rung for.
  absl::Status Sleep(bool until_rung, int timeout_ms);

  const std::unique_ptr<SessionMemory> out_;
  const std::unique_ptr<SessionMemory> in_;
  const UniqueFd own_event_;
  const UniqueFd other_event_;
  const UniqueFd socket_;
  const size_t longest_;
  SubmissionRingWriter writer_;
  SubmissionRingReader reader_;
  std::string frame_;
  FrameBuffer received_;
  std::string pieces_;  // of a message that has not come whole
  std::atomic<bool> woken_{false};
  AdaptiveSpin spin_;
};

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_CHANNEL_H_
