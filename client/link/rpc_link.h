// What all links share: a session opened by gRPC, requests outside the log, bytes by gRPC, and what
// happens when the daemon is gone.
//
// Threads: as Link.
// Ownership: it owns the opened session; a derived class starts and stops what watches the daemon.
// Errors: Link's; a message without the daemon's details names its address.
#ifndef CHORUS_CLIENT_LINK_RPC_LINK_H_
#define CHORUS_CLIENT_LINK_RPC_LINK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "chorus/v1/diagnostics.grpc.pb.h"
#include "chorus/v1/log.grpc.pb.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "chorus/v1/tensors.grpc.pb.h"
#include "chorus/v1/worlds.grpc.pb.h"
#include "client/attach/attach_client.h"
#include "client/internal/link.h"
#include "client/link/watcher.h"
#include "core/base/mutex.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

namespace chorus {
namespace internal {

// A session that Sessions.Open has made, and how to reach it.
struct OpenedSession {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<AttachClient> attach;  // null: not attached, it lives by its lease
  int64_t session = 0;
  std::vector<DeviceIndex> devices;
  std::vector<DeviceInfo> device_infos;
  int32_t max_tensors = 0;
  int32_t max_graphs = 0;
  absl::Duration lease;  // of a session that is not attached
  // Of a request that the daemon answers at once. One that is stopped holds nobody longer than the
  // session's own waits would.
  absl::Duration request_timeout = absl::Seconds(30);
  // For room for a command: the daemon takes commands without waiting for anybody.
  absl::Duration submit_timeout = absl::Seconds(60);
  std::string address;
};

// `status`, or what FromGrpc makes of it, with the daemon's address where it is gone, shuts down,
// or something has waited for it in vain.
absl::Status AtAddress(absl::string_view address, const absl::Status& status);
absl::Status AtAddress(absl::string_view address, const grpc::Status& status);

class RpcLink : public Link {
 public:
  explicit RpcLink(OpenedSession opened);
  ~RpcLink() override;

  std::vector<DeviceIndex> devices() const override { return opened_.devices; }
  std::vector<DeviceInfo> device_infos() const override { return opened_.device_infos; }
  int32_t max_tensors() const override { return opened_.max_tensors; }
  int32_t max_graphs() const override { return opened_.max_graphs; }

  absl::Status Read(TensorId tensor, Sequence producer, char* out, int64_t bytes,
                    absl::Duration timeout) override;
  absl::StatusOr<std::shared_ptr<const char>> MapTensor(TensorId tensor, Sequence producer,
                                                        int64_t bytes,
                                                        absl::Duration timeout) override;
  absl::StatusOr<Staging> CreateStaging(int64_t bytes) override;
  absl::Status WriteStaging(ArenaId arena, int64_t offset, absl::string_view bytes) override;
  void UnmapStaging(ArenaId) override {}  // it has mapped none

  absl::StatusOr<JoinedWorld> Join(const WorldOptions& options, DeviceIndex device) override;
  absl::StatusOr<GroupId> CreateGroup(WorldId world, Rank rank, absl::Span<const int> members,
                                      InstanceKey::Request which) override;
  absl::Status Leave(WorldId world, Rank rank) override;
  absl::StatusOr<ReformedWorld> Reform(WorldId world, Rank rank, Timeout timeout) override;
  absl::StatusOr<std::vector<std::string>> Waits() override;
  absl::Status Close() override;

 protected:
  // Starts watching the daemon: at the end of the derived class's constructor, and stopped at the
  // beginning of its destructor.
  void StartWatching();
  void StopWatching();

  // Once: all waits are to be told. Called on any thread.
  virtual void OnLost() = 0;
  // What the daemon has said before it went: kDraining, or OK where it has said nothing. Called on
  // any thread; waits no longer than it takes to read what has come.
  virtual absl::Status Goodbye();
  // The first `why` counts, but for a daemon that has said why it goes.
  void Lose(const absl::Status& why);
  // OK, or why the daemon is no longer to be had.
  absl::Status liveness() const;

  // The whole error behind an id, and the daemon's word for it when that cannot be had.
  absl::Status FetchError(absl::StatusCode code, ErrorId id);
  // OK: the daemon answers, and has the session.
  absl::Status Renew(absl::Duration timeout);
  // Asks for an outcome that is not told here.
  absl::Status WaitByRpc(Sequence sequence, absl::Duration timeout);

  // AtAddress of this daemon; a lost one is noted.
  absl::Status Done(const grpc::Status& status);
  // The same of a wait of any kind.
  absl::Status Named(const absl::Status& status) const {
    return AtAddress(opened_.address, status);
  }

  const OpenedSession& opened() const { return opened_; }
  v1::Log::Stub* log() { return log_.get(); }

 private:
  // Calls `method` of `stub` and waits for the answer; puts this session into `request`. Errors:
  // liveness()'s, nothing was sent; Done's.
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Ask(const std::unique_ptr<Stub>& stub,
                               grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                            Response*),
                               Request request, absl::Duration timeout);
  // The same for a request that waits for other ranks for `timeout`, its `field`. The daemon ends
  // each call after its --max_wait: then it is made again for the time that is left.
  template <typename Request, typename Response>
  absl::StatusOr<Response> AskForOthers(
      grpc::Status (v1::Worlds::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
      Request request, google::protobuf::Duration* (Request::*field)(), absl::Duration timeout);
  void RenewLease();

  OpenedSession opened_;
  const std::unique_ptr<v1::Sessions::Stub> sessions_;
  const std::unique_ptr<v1::Worlds::Stub> worlds_;
  const std::unique_ptr<v1::Tensors::Stub> tensors_;
  const std::unique_ptr<v1::Log::Stub> log_;
  const std::unique_ptr<v1::Diagnostics::Stub> diagnostics_;

  std::atomic<bool> closed_{false};
  std::atomic<bool> draining_{false};  // the daemon has said so in an answer
  std::atomic<bool> lost_{false};
  mutable Mutex mutex_;
  absl::Status why_lost_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<int64_t, absl::Status> errors_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  // This session's ranks: that have joined, or wait for others to join.
  struct Membership {
    std::string name;  // of the world
    WorldId world;     // 0: others are missing
    int rank = -1;
  };
  std::vector<Membership> memberships_ ABSL_GUARDED_BY(mutex_);
  CondVar stopped_;
  std::unique_ptr<Watch> watch_;
  std::thread renewer_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_LINK_RPC_LINK_H_
