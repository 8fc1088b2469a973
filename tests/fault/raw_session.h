// A session opened by the daemon's protocols themselves, for clients that then keep to nothing.
//
// Threads: one at a time.
#ifndef CHORUS_TESTS_FAULT_RAW_SESSION_H_
#define CHORUS_TESTS_FAULT_RAW_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/attach/attach_client.h"
#include "core/base/unique_fd.h"
#include "core/transport/doorbell.h"
#include "core/transport/session_memory.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

namespace chorus {
namespace fault {

struct RawSession {
  // Of every call: far beyond anything that is meant to happen.
  static constexpr absl::Duration kPatience = absl::Seconds(60);
  static absl::Time Deadline();
  static void SetDeadline(grpc::ClientContext* context);

  // "unix:PATH". With the attach protocol it gets a ring; without, it lives by a lease.
  static absl::StatusOr<RawSession> Open(const std::string& address, bool attached);
  // Waits until the world is complete. `agree_seconds`: 0: the daemon's.
  absl::Status Join(const std::string& name, int rank, int size, int64_t agree_seconds) const;

  std::shared_ptr<grpc::Channel> channel;
  int64_t session = 0;
  int32_t device = 0;  // the one that it got
  // Of an attached one.
  std::unique_ptr<AttachClient> attach;
  std::unique_ptr<DoorbellView> doorbell;
  std::unique_ptr<SessionMemory> memory;
  UniqueFd wake;
};

}  // namespace fault
}  // namespace chorus

#endif  // CHORUS_TESTS_FAULT_RAW_SESSION_H_
