#include "core/node/node.h"

#include <utility>

#include "core/node/node_impl.h"

namespace chorus {
namespace {

absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// Runs `fn` with the session, or gives the reason why there is none. What `fn` refuses is recorded.
template <typename Impl, typename Fn>
auto WithSession(Impl& impl, SessionId id, Fn fn) -> decltype(fn(*impl.FindSession(id))) {
  const auto session = impl.FindSession(id);
  if (!session.ok()) return session.status();
  auto result = fn(*session);
  if (!result.ok()) return impl.Told(session->get(), StatusOf(result));
  return result;
}

}  // namespace

LocalNode::LocalNode(NodeOptions options, Backend* backend, std::function<void()> wake)
    : impl_(std::make_unique<Impl>(std::move(options), backend, std::move(wake))) {}
LocalNode::~LocalNode() = default;

bool LocalNode::Poll(absl::Time now) { return impl_->Poll(now); }
absl::Time LocalNode::NextDeadline() const { return impl_->timers.Next(); }
bool LocalNode::Busy() const { return impl_->HasRuns(); }

absl::StatusOr<SessionInfo> LocalNode::OpenSession(const OpenSessionRequest& request,
                                                   absl::Time now) {
  absl::StatusOr<SessionInfo> info = impl_->OpenSession(request, now);
  if (!info.ok()) return Refused(request.tenant, request.pid, info.status());
  return info;
}
absl::Status LocalNode::CloseSession(SessionId id, absl::Time now) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) {
    impl_->EndSession(session, /*died=*/"", now);
    return absl::OkStatus();
  });
}
void LocalNode::SessionDied(SessionId id, absl::Time now) {
  const auto session = impl_->FindSession(id);
  if (session.ok()) impl_->EndSession(*session, "its process ended", now);
}
void LocalNode::SetDetached(SessionId id, bool detached, absl::Time now) {
  const auto session = impl_->FindSession(id);
  if (session.ok()) impl_->SetDetached(*session, detached, now);
}
void LocalNode::OnSessionEnded(std::function<void(SessionId)> ended) {
  impl_->on_session_ended = std::move(ended);
}
absl::Status LocalNode::RenewLease(SessionId id, absl::Time now) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) {
    impl_->RenewLease(session.get(), now);
    return absl::OkStatus();
  });
}

absl::StatusOr<LocalNode::SessionDescriptors> LocalNode::AttachMemory(SessionId id) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) {
    return impl_->AttachMemory(session.get());
  });
}
absl::StatusOr<LocalNode::StagingArena> LocalNode::CreateStaging(SessionId id, int64_t bytes) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) {
    return impl_->CreateStaging(session.get(), bytes);
  });
}
absl::Status LocalNode::ConfirmStaging(SessionId id, ArenaId arena) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) -> absl::Status {
    CHORUS_ASSIGN_OR_RETURN(const std::shared_ptr<Arena> found,
                            impl_->FindStaging(session.get(), arena));
    return found->ConfirmMapped();
  });
}
absl::Status LocalNode::ReleaseStaging(SessionId id, ArenaId arena) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) {
    return impl_->ReleaseStaging(session.get(), arena);
  });
}
absl::Status LocalNode::WriteStaging(SessionId id, ArenaId arena, int64_t offset,
                                     absl::string_view bytes) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) {
    return impl_->WriteStaging(session.get(), arena, offset, bytes);
  });
}
absl::StatusOr<int> LocalNode::ResultArenaFd(SessionId id, ArenaId arena) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) {
    return impl_->ResultArenaFd(session.get(), arena);
  });
}

void LocalNode::JoinWorld(SessionId id, const JoinRequest& request, absl::Time now, OnJoined done) {
  const auto session = impl_->FindSession(id);
  if (!session.ok()) return done(session.status());
  const int32_t rank = static_cast<int32_t>(request.rank.value());
  const auto tell = [impl = impl_.get(), session = *session, job = request.name, rank,
                     done = std::move(done)](absl::StatusOr<WorldInfo> info) {
    if (info.ok()) return done(std::move(info));
    const Culprit culprit = ErrorOf(info.status()).culprit;
    FailureOrigin failure{job, rank, session->request.pid};
    if (culprit.rank >= 0) failure = {job, culprit.rank, culprit.pid};
    done(impl->Told(session->tenant->name, failure, info.status()));
  };
  impl_->JoinWorld(*session, request, now, tell);
}
absl::StatusOr<GroupId> LocalNode::CreateGroup(SessionId id, WorldId world, Rank rank,
                                               absl::Span<const Rank> members,
                                               absl::optional<InstanceKey::Request> request) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) {
    return impl_->CreateGroup(session.get(), world, rank, members, request);
  });
}
absl::Status LocalNode::LeaveWorld(SessionId id, WorldId world, Rank rank, absl::Time now) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) {
    return impl_->LeaveWorld(session.get(), world, rank, now);
  });
}
absl::Status LocalNode::AbortWorld(SessionId id, WorldId world, Rank rank, Epoch epoch,
                                   absl::string_view message, absl::Time now) {
  return WithSession(*impl_, id, [&](const std::shared_ptr<Session>& session) {
    return impl_->AbortWorld(session.get(), world, rank, epoch, message, now);
  });
}
void LocalNode::ReformWorld(SessionId id, WorldId world, Rank rank, absl::Duration timeout,
                            absl::Time now, OnReformed done) {
  const auto session = impl_->FindSession(id);
  if (!session.ok()) return done(session.status());
  impl_->ReformWorld(session->get(), world, rank, timeout, now,
                     [impl = impl_.get(), session = *session,
                      done = std::move(done)](absl::StatusOr<ReformResult> result) {
                       if (result.ok()) return done(std::move(result));
                       done(impl->Told(session.get(), result.status()));
                     });
}

void LocalNode::Submit(SessionId id, std::string frame, absl::Time now, OnOutcome done) {
  const auto session = impl_->FindSession(id);
  if (!session.ok()) return done({Sequence(), session.status()});
  impl_->TakeFrame(*session, frame, now,
                   [impl = impl_.get(), weak = std::weak_ptr<Session>(*session),
                    done = std::move(done)](Outcome out) {
                     // The session holds what waits for its outcomes.
                     const std::shared_ptr<Session> session = weak.lock();
                     if (session != nullptr) out.status = impl->Told(session.get(), out.status);
                     done(std::move(out));
                   });
}
void LocalNode::WaitOutcome(SessionId id, Sequence sequence, absl::Time deadline, OnOutcome done) {
  const auto session = impl_->FindSession(id);
  if (!session.ok()) return done({sequence, session.status()});
  impl_->WaitOutcome(*session, sequence, deadline, std::move(done));
}

void LocalNode::ReadTensor(SessionId id, TensorId tensor, absl::Time deadline, OnTensor done) {
  const auto session = impl_->FindSession(id);
  if (!session.ok()) return done(session.status());
  impl_->ReadTensor(*session, tensor, deadline, std::move(done));
}
void LocalNode::CountStreamed(int64_t bytes) { impl_->stats.paths.streamed_bytes += bytes; }

std::vector<DeviceInfo> LocalNode::Devices() const { return impl_->Devices(); }
std::vector<SessionInfo> LocalNode::Sessions(absl::string_view tenant, absl::Time now) const {
  return impl_->Sessions(tenant, now);
}
std::vector<WorldInfo> LocalNode::Worlds(absl::string_view tenant, absl::Time now) const {
  return impl_->Worlds(tenant, now);
}
std::vector<LocalNode::PendingView> LocalNode::Pending(absl::string_view tenant,
                                                       absl::Time now) const {
  return impl_->Pending(tenant, now);
}
absl::Status LocalNode::Refused(absl::string_view tenant, int32_t pid, const absl::Status& status) {
  FailureOrigin failure;
  failure.pid = pid;
  return impl_->Told(std::string(tenant), failure, status);
}
absl::optional<Error> LocalNode::FindError(ErrorId id, absl::string_view tenant) const {
  return impl_->errors.Find(id, tenant);
}
std::vector<FlightEvent> LocalNode::Flight(absl::string_view tenant, int64_t limit) const {
  return impl_->Flight(tenant, limit);
}
NodeStats LocalNode::Stats() const { return impl_->Stats(); }
absl::StatusOr<std::string> LocalNode::TenantOf(SessionId id) const { return impl_->TenantOf(id); }

void LocalNode::StartDraining() { impl_->draining = true; }
bool LocalNode::Idle() const { return !impl_->HasRuns(); }
void LocalNode::AbortAll(absl::Time now) { impl_->AbortAll(now); }

int LocalNode::doorbell_fd() const { return impl_->doorbell->fd(); }
bool LocalNode::SleepUnlessBusy(const std::function<void()>& sleep) {
  return impl_->SleepUnlessBusy(sleep);
}
int LocalNode::wake_epoll_fd() const { return impl_->wake_epoll.get(); }

}  // namespace chorus
