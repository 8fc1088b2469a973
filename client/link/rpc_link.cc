#include "client/link/rpc_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/link/call_deadline.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "proto/convert/convert.h"
#include "proto/convert/errors_convert.h"

namespace chorus {
namespace internal {
namespace {

// What the daemon's own deadlines may be late.
constexpr absl::Duration kMargin = absl::Seconds(10);
// Of one without a deadline of its own: the daemon's decides.
constexpr absl::Duration kDaemonsTimeout = absl::Hours(1);
// Of one message. Every daemon takes as much (Capabilities.max_chunk_bytes).
constexpr size_t kChunkBytes = 256 << 10;
constexpr size_t kMaxErrors = 256;
// Of what a report of a long wait asks, and shows.
constexpr absl::Duration kReportTimeout = absl::Seconds(5);
constexpr size_t kMaxReportedWaits = 4;
// Of a farewell to a daemon that may be gone.
constexpr absl::Duration kFarewellTimeout = absl::Seconds(1);

google::protobuf::Duration ProtoDuration(absl::Duration duration) {
  google::protobuf::Duration message;
  message.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  message.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
  return message;
}

// A request of a rank.
template <typename Request>
Request RequestOf(WorldId world, Rank rank) {
  Request request;
  request.set_world(world.value());
  request.set_rank(rank.value());
  return request;
}

}  // namespace

absl::Status AtAddress(absl::string_view address, const absl::Status& status) {
  if (status.ok()) return status;
  Error error = ErrorOf(status);
  const bool lost = error.reason == Reason::kDaemonLost;
  if (error.reason == Reason::kDraining) {
    error.message = absl::StrCat("the daemon at ", address, " is shutting down");
    return ToStatus(error);
  }
  if (!lost && error.reason != Reason::kTransportTimeout) return status;
  // The path alone is what errors of the attach socket have.
  if (absl::StrContains(error.message, absl::StripPrefix(address, "unix:"))) return status;
  error.message =
      absl::StrCat("the daemon at ", address, lost ? " is gone: " : ": ", error.message);
  return ToStatus(error);
}

absl::Status AtAddress(absl::string_view address, const grpc::Status& status) {
  Error error = ErrorOf(FromGrpc(status));
  // Then the daemon has said nothing, and gRPC only that the time is over.
  if (error.reason == Reason::kTransportTimeout && status.error_details().empty()) {
    error.message = "it did not answer in time";
  }
  return AtAddress(address, ToStatus(error));
}

RpcLink::RpcLink(OpenedSession opened)
    : opened_(std::move(opened)),
      sessions_(v1::Sessions::NewStub(opened_.channel)),
      worlds_(v1::Worlds::NewStub(opened_.channel)),
      tensors_(v1::Tensors::NewStub(opened_.channel)),
      log_(v1::Log::NewStub(opened_.channel)),
      diagnostics_(v1::Diagnostics::NewStub(opened_.channel)) {}

RpcLink::~RpcLink() = default;

// --- The daemon's life --------------------------------------------------------------------------

void RpcLink::StartWatching() {
  if (opened_.attach != nullptr) {
    watch_ = WatchForHangup(opened_.attach->socket_fd(), [this] {
      Lose(MakeError(Reason::kDaemonLost, absl::StrCat("the daemon at ", opened_.address,
                                                       " is gone: its process has "
                                                       "ended, or it has closed the connection")));
    });
  }
  if (opened_.attach == nullptr && opened_.lease > absl::ZeroDuration()) {
    renewer_ = std::thread([this] { RenewLease(); });
  }
}

void RpcLink::StopWatching() {
  watch_.reset();
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    stopped_.SignalAll();
  }
  if (renewer_.joinable()) renewer_.join();
}

void RpcLink::RenewLease() {
  const absl::Duration period = opened_.lease / 3;
  while (true) {
    {
      const absl::Time due = SteadyNow() + period;
      MutexLock lock(&mutex_);
      while (!stop_ && SteadyNow() < due) stopped_.WaitFor(&mutex_, due - SteadyNow());
      if (stop_) return;
    }
    const absl::Status status = Renew(period);
    // Lost, and everybody knows.
    if (ErrorOf(status).reason == Reason::kSessionLost) Lose(status);
    if (lost_.load(std::memory_order_acquire)) return;
  }
}

absl::Status RpcLink::Goodbye() {
  if (draining_.load(std::memory_order_acquire)) return MakeError(Reason::kDraining, "");
  return opened_.attach != nullptr ? opened_.attach->Goodbye() : absl::OkStatus();
}

void RpcLink::Lose(const absl::Status& why) {
  Error error = ErrorOf(why);
  if (error.reason == Reason::kDaemonLost && !lost_.load(std::memory_order_acquire)) {
    const absl::Status goodbye = Goodbye();
    if (!goodbye.ok()) error = ErrorOf(goodbye);
  }
  {
    MutexLock lock(&mutex_);
    if (!why_lost_.ok()) return;
    why_lost_ = Named(ToStatus(error));
    lost_.store(true, std::memory_order_release);
  }
  OnLost();
}

absl::Status RpcLink::liveness() const {
  if (!lost_.load(std::memory_order_acquire)) return absl::OkStatus();
  MutexLock lock(&mutex_);
  return why_lost_;
}

absl::Status RpcLink::Done(const grpc::Status& status) {
  const absl::Status converted = AtAddress(opened_.address, status);
  const Reason reason = ErrorOf(converted).reason;
  if (reason == Reason::kDraining) draining_.store(true, std::memory_order_release);
  if (reason != Reason::kDaemonLost) return converted;
  Lose(converted);
  // What the daemon has said meanwhile, if it has.
  const absl::Status lost = liveness();
  return ErrorOf(lost).reason == Reason::kDraining ? lost : converted;
}

template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> RpcLink::Ask(const std::unique_ptr<Stub>& stub,
                                      grpc::Status (Stub::*method)(grpc::ClientContext*,
                                                                   const Request&, Response*),
                                      Request request, absl::Duration timeout) {
  CHORUS_RETURN_IF_ERROR(liveness());
  grpc::ClientContext context;
  const CallDeadline deadline(&context, timeout);
  request.set_session(opened_.session);
  Response response;
  CHORUS_RETURN_IF_ERROR(Done(deadline.Of(((*stub).*method)(&context, request, &response))));
  return response;
}

template <typename Request, typename Response>
absl::StatusOr<Response> RpcLink::AskForOthers(
    grpc::Status (v1::Worlds::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
    Request request, google::protobuf::Duration* (Request::*field)(), absl::Duration timeout) {
  const absl::Time end = SteadyNow() + timeout;
  for (bool is_last = false;;) {
    *(request.*field)() = ProtoDuration(timeout);
    const absl::StatusOr<Response> response = Ask(worlds_, method, request, timeout + kMargin);
    timeout = end - SteadyNow();
    const bool is_early = ErrorOf(response.status()).reason == Reason::kTransportTimeout;
    if (!is_early || is_last || timeout <= -kMargin) return response;
    // A daemon that has ended a call too late for another one says who is missing all the same.
    is_last = timeout <= absl::ZeroDuration();
    if (is_last) timeout = absl::Milliseconds(1);
  }
}

absl::Status RpcLink::FetchError(absl::StatusCode code, ErrorId id) {
  if (code == absl::StatusCode::kOk) return absl::OkStatus();
  {
    MutexLock lock(&mutex_);
    const auto row = errors_.find(id.value());
    if (row != errors_.end()) return row->second;
  }
  Error error;
  error.code = code;
  error.id = id;
  error.message = absl::StrCat("error ", id.value(), " of the daemon");
  if (id.value() != 0) {
    grpc::ClientContext context;
    const CallDeadline deadline(&context, opened_.request_timeout);
    v1::GetErrorRequest request;
    v1::GetErrorResponse response;
    request.set_error_id(id.value());
    const grpc::Status got = deadline.Of(diagnostics_->GetError(&context, request, &response));
    // By which its calls end too.
    const bool gone = got.error_code() == grpc::StatusCode::UNAVAILABLE ||
                      got.error_code() == grpc::StatusCode::CANCELLED;
    if (gone && code == absl::StatusCode::kUnavailable) {
      // It fails what is under way when it drains, and takes no more calls then.
      error.SetReason(Reason::kDraining);
      return Named(ToStatus(error));
    }
    if (!got.ok()) {
      error.message = absl::StrCat(
          error.message, " at ", opened_.address,
          gone ? ", which has ended before it could tell more: " : ", which does not tell more: ",
          ErrorOf(AtAddress(opened_.address, got)).message);
      return ToStatus(error);
    }
    error = FromProto(response.error());
  }
  const absl::Status status = Named(ToStatus(error));
  MutexLock lock(&mutex_);
  if (errors_.size() >= kMaxErrors) errors_.clear();
  errors_[id.value()] = status;
  return status;
}

absl::Status RpcLink::Renew(absl::Duration timeout) {
  return Ask(sessions_, &v1::Sessions::Stub::Renew, v1::RenewSessionRequest(), timeout).status();
}

absl::Status RpcLink::WaitByRpc(Sequence sequence, absl::Duration timeout) {
  v1::WaitRequest request;
  request.set_sequence(sequence.value());
  return Ask(log_, &v1::Log::Stub::Wait, std::move(request), timeout).status();
}

// --- Bytes --------------------------------------------------------------------------------------

absl::Status RpcLink::Read(TensorId tensor, Sequence, char* out, int64_t bytes,
                           absl::Duration timeout) {
  CHORUS_RETURN_IF_ERROR(liveness());
  grpc::ClientContext context;
  const CallDeadline deadline(&context, timeout);
  v1::DownloadTensorRequest request;
  request.set_session(opened_.session);
  ToProto(tensor, request.mutable_tensor());
  const auto reader = tensors_->Download(&context, request);
  v1::DownloadTensorResponse part;
  int64_t have = 0;
  while (reader->Read(&part)) {
    const int64_t size = static_cast<int64_t>(part.data().size());
    if (part.offset_bytes() != have || size > bytes - have) {
      context.TryCancel();
      reader->Finish();
      return MakeError(Reason::kInternal,
                       absl::StrCat("download: expected byte ", have, " of ", bytes, ", got ", size,
                                    " bytes at ", part.offset_bytes()));
    }
    std::memcpy(out + have, part.data().data(), part.data().size());
    have += size;
  }
  CHORUS_RETURN_IF_ERROR(Done(deadline.Of(reader->Finish())));
  if (have != bytes) {
    return MakeError(Reason::kInternal,
                     absl::StrCat("download: expected ", bytes, " bytes, got ", have));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const char>> RpcLink::MapTensor(TensorId, Sequence, int64_t,
                                                               absl::Duration) {
  return Unsupported("View: this transport shares no memory with the daemon; use Read");
}

absl::StatusOr<Link::Staging> RpcLink::CreateStaging(int64_t bytes) {
  v1::CreateStagingRequest request;
  request.set_size_bytes(bytes);
  CHORUS_ASSIGN_OR_RETURN(const v1::CreateStagingResponse response,
                          Ask(tensors_, &v1::Tensors::Stub::CreateStaging, std::move(request),
                              opened_.request_timeout));
  Staging staging;
  staging.arena = ArenaId(response.arena());
  return staging;
}

absl::Status RpcLink::WriteStaging(ArenaId arena, int64_t offset, absl::string_view bytes) {
  while (!bytes.empty()) {
    const absl::string_view chunk = bytes.substr(0, kChunkBytes);
    v1::WriteStagingRequest request;
    request.set_arena(arena.value());
    request.set_offset_bytes(offset);
    request.set_data(chunk.data(), chunk.size());
    CHORUS_RETURN_IF_ERROR(
        Ask(tensors_, &v1::Tensors::Stub::WriteStaging, std::move(request), opened_.request_timeout)
            .status());
    offset += static_cast<int64_t>(chunk.size());
    bytes.remove_prefix(chunk.size());
  }
  return absl::OkStatus();
}

// --- Worlds -------------------------------------------------------------------------------------

absl::StatusOr<JoinedWorld> RpcLink::Join(const WorldOptions& options, DeviceIndex device) {
  const absl::Duration join = absl::FromChrono(options.join_timeout);
  v1::JoinWorldRequest request;
  request.set_name(options.name);
  request.set_size(options.size);
  request.set_rank(options.rank);
  request.set_device(device.value());
  if (options.agree_timeout > Timeout::zero()) {
    *request.mutable_agree_timeout() = ProtoDuration(absl::FromChrono(options.agree_timeout));
  }
  if (options.exec_timeout > Timeout::zero()) {
    *request.mutable_exec_timeout() = ProtoDuration(absl::FromChrono(options.exec_timeout));
  }
  request.set_check_call_sites(static_cast<v1::CheckCallSites>(options.check_call_sites));
  {
    MutexLock lock(&mutex_);
    memberships_.push_back({options.name, WorldId(), options.rank});
  }
  const absl::StatusOr<v1::JoinWorldResponse> joined =
      join == absl::ZeroDuration()
          ? Ask(worlds_, &v1::Worlds::Stub::Join, std::move(request), kDaemonsTimeout)
          : AskForOthers(&v1::Worlds::Stub::Join, std::move(request),
                         &v1::JoinWorldRequest::mutable_join_timeout, join);
  {
    MutexLock lock(&mutex_);
    const auto membership =
        std::find_if(memberships_.begin(), memberships_.end(), [&options](const Membership& m) {
          return m.name == options.name && m.rank == options.rank && m.world == WorldId();
        });
    if (joined.ok()) {
      membership->world = WorldId(joined->world().world());
    } else {
      memberships_.erase(membership);
    }
  }
  CHORUS_RETURN_IF_ERROR(joined.status());
  return JoinedWorld{WorldId(joined->world().world()), Epoch(joined->world().epoch())};
}

absl::StatusOr<GroupId> RpcLink::CreateGroup(WorldId world, Rank rank,
                                             absl::Span<const int> members,
                                             InstanceKey::Request which) {
  auto request = RequestOf<v1::CreateGroupRequest>(world, rank);
  for (const int member : members) request.add_ranks(member);
  request.set_step(which.step);
  request.set_number(which.number);
  CHORUS_ASSIGN_OR_RETURN(
      const v1::CreateGroupResponse response,
      Ask(worlds_, &v1::Worlds::Stub::CreateGroup, std::move(request), opened_.request_timeout));
  return GroupId(response.group());
}

absl::Status RpcLink::Leave(WorldId world, Rank rank) {
  const absl::Status status =
      Ask(worlds_, &v1::Worlds::Stub::Leave, RequestOf<v1::LeaveWorldRequest>(world, rank),
          opened_.request_timeout)
          .status();
  MutexLock lock(&mutex_);
  memberships_.erase(std::remove_if(memberships_.begin(), memberships_.end(),
                                    [&](const Membership& m) {
                                      return m.world == world && m.rank == rank.value();
                                    }),
                     memberships_.end());
  return status;
}

absl::StatusOr<ReformedWorld> RpcLink::Reform(WorldId world, Rank rank, Timeout timeout) {
  auto request = RequestOf<v1::ReformWorldRequest>(world, rank);
  CHORUS_ASSIGN_OR_RETURN(
      const v1::ReformWorldResponse response,
      AskForOthers(&v1::Worlds::Stub::Reform, std::move(request),
                   &v1::ReformWorldRequest::mutable_timeout, absl::FromChrono(timeout)));
  // The session makes a list of the ranks.
  if (response.size() != response.survivors_size() || response.rank() < 0 ||
      response.rank() >= response.size()) {
    return MakeError(Reason::kInternal,
                     absl::StrCat("reform: rank ", response.rank(), " of ", response.size(),
                                  ", of ", response.survivors_size(), " survivors"));
  }
  {
    MutexLock lock(&mutex_);
    for (Membership& membership : memberships_) {
      if (membership.world != world || membership.rank != rank.value()) continue;
      membership.rank = response.rank();
      break;
    }
  }
  ReformedWorld result;
  result.rank = response.rank();
  result.size = response.size();
  result.epoch = Epoch(response.epoch());
  for (const v1::ReformWorldResponse::Survivor& survivor : response.survivors()) {
    World::Survivor entry;
    entry.old_rank = survivor.old_rank();
    if (survivor.has_last_published()) {
      CHORUS_ASSIGN_OR_RETURN(const InstanceKey key, FromProto(survivor.last_published()));
      entry.last_published = key.ToString();
    }
    result.survivors.push_back(std::move(entry));
  }
  return result;
}

absl::StatusOr<std::vector<std::string>> RpcLink::Waits() {
  CHORUS_RETURN_IF_ERROR(liveness());
  v1::ListPendingResponse pending;
  v1::DescribeWorldsResponse worlds;
  {
    grpc::ClientContext context;
    const CallDeadline deadline(&context, kReportTimeout);
    CHORUS_RETURN_IF_ERROR(
        Done(deadline.Of(diagnostics_->ListPending(&context, v1::ListPendingRequest(), &pending))));
  }
  {
    grpc::ClientContext context;
    const CallDeadline deadline(&context, kReportTimeout);
    CHORUS_RETURN_IF_ERROR(
        Done(deadline.Of(worlds_->Describe(&context, v1::DescribeWorldsRequest(), &worlds))));
  }
  const auto rank_text = [&worlds](int64_t world, int32_t rank) {
    for (const v1::World& described : worlds.worlds()) {
      if (described.world() != world || rank < 0 || rank >= described.members_size()) continue;
      const v1::World::Member& member = described.members(rank);
      if (member.has_pid()) return absl::StrCat("rank ", rank, " (pid ", member.pid(), ")");
    }
    return absl::StrCat("rank ", rank);
  };
  std::vector<Membership> mine;
  {
    MutexLock lock(&mutex_);
    mine = memberships_;
  }
  std::vector<std::string> lines;
  for (const v1::ListPendingResponse::Pending& wait : pending.pending()) {
    const auto waits = [&wait](const Membership& m) {
      return m.name == wait.world_name() &&
             (m.world == WorldId() || m.world.value() == wait.world()) &&
             std::count(wait.voted_ranks().begin(), wait.voted_ranks().end(), m.rank) > 0;
    };
    const auto membership = std::find_if(mine.begin(), mine.end(), waits);
    if (membership == mine.end() || wait.missing_ranks().empty()) continue;
    if (lines.size() == kMaxReportedWaits) {
      lines.push_back("and others");
      break;
    }
    std::vector<std::string> missing;
    for (const int32_t rank : wait.missing_ranks()) {
      if (missing.size() == Error::kMaxRanks) break;
      missing.push_back(rank_text(wait.world(), rank));
    }
    const int unnamed = wait.missing_ranks_size() - static_cast<int>(missing.size());
    lines.push_back(absl::StrCat(
        wait.what(), wait.source().empty() ? "" : absl::StrCat(" at ", wait.source()), " (rank ",
        membership->rank, " of world \"", wait.world_name(), "\"): missing ",
        absl::StrJoin(missing, ", "), unnamed > 0 ? absl::StrCat(" and ", unnamed, " more") : ""));
  }
  return lines;
}

absl::Status RpcLink::Close() {
  if (closed_.exchange(true)) return absl::OkStatus();
  // A link may be lost whose daemon lives, and has the session.
  const absl::Status lost = liveness();
  const Reason why = ErrorOf(lost).reason;
  if (why == Reason::kSessionLost) return absl::OkStatus();
  const bool may_be_gone = why == Reason::kDaemonLost || why == Reason::kDraining;
  grpc::ClientContext context;
  const CallDeadline deadline(&context, may_be_gone ? kFarewellTimeout : opened_.request_timeout);
  v1::CloseSessionRequest request;
  v1::CloseSessionResponse response;
  request.set_session(opened_.session);
  const absl::Status status = FromGrpc(deadline.Of(sessions_->Close(&context, request, &response)));
  Lose(MakeError(Reason::kSessionLost, "the session is closed"));
  const bool is_ended = !lost.ok() && ErrorOf(status).reason == Reason::kSessionLost;
  return may_be_gone || is_ended ? absl::OkStatus() : status;
}

}  // namespace internal
}  // namespace chorus
