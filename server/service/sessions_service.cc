#include "server/service/sessions_service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "glog/logging.h"
#include "proto/convert/api_version.h"
#include "server/service/call.h"
#include "server/service/durations.h"

namespace chorus {
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

}  // namespace

grpc::ServerUnaryReactor* SessionsService::Open(grpc::CallbackServerContext* context,
                                                const grpc::ByteBuffer* bytes,
                                                grpc::ByteBuffer* response) {
  auto call = Call<v1::OpenSessionResponse>::Start(service_, context, response);
  const Parsed<v1::OpenSessionRequest> request(service_, context, bytes);
  if (!request.ok()) return call->Refuse(request.status());
  const absl::StatusOr<Caller> caller = call->caller();
  absl::StatusOr<node::OpenSessionRequest> open =
      caller.ok() ? RequestFrom(*caller, *request) : caller.status();
  absl::StatusOr<AttachServer::Client> client =
      open.ok() ? Claim(*service_, *caller, request->attach_token()) : open.status();
  if (client.ok()) open->pid = client->pid;
  if (const absl::Status status = client.status(); !status.ok()) {
    const std::string tenant = caller.ok() ? caller->tenant : "";
    service_->loop->Post([call, tenant, status](node::LocalNode& node, absl::Time) {
      call->Reply(node.Refused(tenant, /*pid=*/-1, status));
    });
    return call.get();
  }
  service_->loop->Post([service = service_, call, open = *std::move(open),
                        client = std::make_shared<AttachServer::Client>(*std::move(client))](
                           node::LocalNode& node, absl::Time now) {
    const absl::StatusOr<node::SessionInfo> info = node.OpenSession(open, now);
    if (!info.ok()) return call->Reply(info.status());
    if (open.attached) {
      service->loop->WatchProcess(info->id, client->pidfd.Release());
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
  return call.get();
}

grpc::ServerUnaryReactor* SessionsService::Close(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* bytes,
                                                 grpc::ByteBuffer* response) {
  auto call = Call<v1::CloseSessionResponse>::Start(service_, context, response);
  const Parsed<v1::CloseSessionRequest> request(service_, context, bytes);
  if (!request.ok()) return call->Refuse(request.status());
  const absl::StatusOr<Caller> caller = call->caller();
  if (!caller.ok()) return call->Refuse(caller.status());
  call->ForSession(
      request->session(), [log = service_->log, call, tenant = caller->tenant](
                              node::LocalNode& node, absl::Time now, SessionId session) {
        const absl::Status status = node.CloseSession(session, now);
        call->Reply(status, [log, tenant, session](v1::CloseSessionResponse*) {
          log->Say(google::GLOG_INFO, tenant, absl::StrCat("session ", session.value(), " closed"));
        });
      });
  return call.get();
}

grpc::ServerUnaryReactor* SessionsService::Renew(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* bytes,
                                                 grpc::ByteBuffer* response) {
  auto call = Call<v1::RenewSessionResponse>::Start(service_, context, response);
  const Parsed<v1::RenewSessionRequest> request(service_, context, bytes);
  if (!request.ok()) return call->Refuse(request.status());
  call->ForSession(
      request->session(), [call](node::LocalNode& node, absl::Time now, SessionId session) {
        const absl::StatusOr<node::SessionInfo> info = node.Describe(session, now);
        if (!info.ok()) return call->Reply(info.status());
        call->Reply(absl::OkStatus(), [left = info->lease_left](v1::RenewSessionResponse* to) {
          if (left != absl::InfiniteDuration()) DurationTo(left, to->mutable_lease_left());
        });
      });
  return call.get();
}

}  // namespace chorus
