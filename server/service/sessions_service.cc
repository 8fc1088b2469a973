#include "server/service/sessions_service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "core/base/error.h"
#include "glog/logging.h"
#include "proto/convert/api_version.h"
#include "server/service/call.h"
#include "server/service/durations.h"
#include "server/service/methods.h"

namespace chorus::server {
namespace {

absl::Status CheckVersion(int32_t version) {
  if (version == 0 || version == kApiVersion) return absl::OkStatus();
  return MakeError(Reason::kVersion,
                   absl::StrCat("the client speaks version ", version, " of the API, this daemon (",
                                kDaemonVersion, ") version ", kApiVersion));
}

absl::StatusOr<node::OpenSessionRequest> RequestFrom(const Caller& caller,
                                                     const v1::OpenSessionRequest& message) {
  CHORUS_RETURN_IF_ERROR(CheckVersion(message.api_version()));
  node::OpenSessionRequest request;
  request.tenant = caller.tenant;
  request.may_open = caller.may_write();
  request.attached = !message.attach_token().empty();
  request.label = message.label();
  CHORUS_ASSIGN_OR_RETURN(request.lease, DurationFrom(message.lease(), "lease"));
  for (int32_t device : message.devices()) request.devices.push_back(DeviceIndex(device));
  request.device_count = message.device_count();
  // A token is good once: a request that is refused anyway does not take it.
  CHORUS_RETURN_IF_ERROR(request.Check());
  return request;
}

// The process whose token it is, with its pidfd; nobody where there is none.
absl::StatusOr<AttachServer::Client> Claim(const ServiceContext& service, const Caller& caller,
                                           const std::string& token) {
  if (token.empty()) return AttachServer::Client();
  if (service.attach == nullptr || !caller.is_unix) {
    return MakeError(Reason::kNotAttached, "attach_token: only good on a Unix socket");
  }
  return service.attach->Claim(token, caller.uid);
}

void ResponseTo(const ServiceContext& service, const node::SessionInfo& info,
                v1::OpenSessionResponse* response) {
  response->set_session(WireSession(service.incarnation, info.id));
  for (DeviceIndex device : info.devices) response->add_devices(device.value());
  if (!info.attached) DurationTo(info.lease_left, response->mutable_lease());
  response->set_api_version(kApiVersion);
  response->set_daemon_version(kDaemonVersion);
}

void OnOpen(const CallRef<v1::OpenSessionResponse>& call, const v1::OpenSessionRequest& request) {
  const ServiceContext* const service = call->service();
  const Caller& caller = call->caller();
  absl::StatusOr<node::OpenSessionRequest> open = RequestFrom(caller, request);
  absl::StatusOr<AttachServer::Client> client =
      open.ok() ? Claim(*service, caller, request.attach_token()) : open.status();
  if (!client.ok()) {
    call->Post([call, status = client.status()](node::LocalNode& node, absl::Time) {
      call->Reply(node.Refused(call->caller().tenant, /*pid=*/-1, status));
    });
    return;
  }
  open->pid = client->pid;
  call->Post([service, call, open = *std::move(open),
              client = std::make_shared<AttachServer::Client>(*std::move(client))](
                 node::LocalNode& node, absl::Time now) {
    const absl::StatusOr<node::SessionInfo> info = node.OpenSession(open, now);
    if (!info.ok()) return call->Reply(info.status());
    if (open.attached) {
      service->loop->WatchProcess(info->tenant, info->id, client->pidfd.Release());
      if (!service->attach->Bind(client->connection, info->id)) {
        node.SetDetached(info->id, true, now);
      }
    }
    call->Reply(absl::OkStatus(), [service, info = *info](v1::OpenSessionResponse* to) {
      service->log->Say(google::GLOG_INFO, info.tenant,
                        absl::StrCat("session ", info.id.value(), " opened: ", info.tenant, " pid ",
                                     info.pid, info.attached ? " attached" : " by lease", " \"",
                                     absl::Utf8SafeCEscape(info.label), "\""));
      ResponseTo(*service, info, to);
    });
  });
}

void OnClose(const CallRef<v1::CloseSessionResponse>& call,
             const v1::CloseSessionRequest& request) {
  const ServiceContext* const service = call->service();
  call->ForSession(request.session(), [log = service->log, call, tenant = call->caller().tenant](
                                          node::LocalNode& node, absl::Time now,
                                          SessionId session) {
    const absl::Status status = node.CloseSession(session, now);
    // A client that opens the next one has the memory of this one.
    node.AfterReleases(tenant, [log, call, tenant, session, status] {
      call->Reply(status, [log, tenant, session](v1::CloseSessionResponse*) {
        log->Say(google::GLOG_INFO, tenant, absl::StrCat("session ", session.value(), " closed"));
      });
    });
  });
}

void OnRenew(const CallRef<v1::RenewSessionResponse>& call,
             const v1::RenewSessionRequest& request) {
  call->ForSession(
      request.session(), [call](node::LocalNode& node, absl::Time now, SessionId session) {
        const absl::StatusOr<node::SessionInfo> info = node.Describe(session, now);
        if (!info.ok()) return call->Reply(info.status());
        call->Reply(absl::OkStatus(), [left = info->lease_left](v1::RenewSessionResponse* to) {
          if (left != absl::InfiniteDuration()) DurationTo(left, to->mutable_lease_left());
        });
      });
}

}  // namespace

std::unique_ptr<grpc::Service> MakeSessionsService(const ServiceContext* context) {
  auto service = std::make_unique<Methods<v1::Sessions>>(context);
  (*service).Unary("Open", &OnOpen).Unary("Close", &OnClose).Unary("Renew", &OnRenew);
  return service;
}

}  // namespace chorus::server
