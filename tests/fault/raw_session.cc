#include "tests/fault/raw_session.h"

#include <utility>

#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "chorus/v1/worlds.grpc.pb.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/transport/attach/protocol.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "proto/convert/errors_convert.h"

namespace chorus {
namespace fault {

absl::Time RawSession::Deadline() { return SteadyNow() + kPatience; }

void RawSession::SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
}

absl::StatusOr<RawSession> RawSession::Open(const std::string& address, bool attached) {
  RawSession raw;
  const absl::Time deadline = Deadline();
  const absl::string_view path = absl::string_view(address).substr(5);
  if (attached) {
    CHORUS_ASSIGN_OR_RETURN(raw.attach, AttachClient::Connect(AttachPath(path), deadline));
  }
  // It takes little that it does not read: a window that grows would take whole tensors.
  grpc::ChannelArguments window;
  window.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  raw.channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), window);
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::OpenSessionRequest request;
  v1::OpenSessionResponse response;
  if (attached) request.set_attach_token(raw.attach->token());
  request.set_label("hostile");
  CHORUS_RETURN_IF_ERROR(
      FromGrpc(v1::Sessions::NewStub(raw.channel)->Open(&context, request, &response)));
  raw.session = response.session();
  raw.device = response.devices(0);
  if (!attached) return raw;
  CHORUS_ASSIGN_OR_RETURN(raw.doorbell, DoorbellView::Map(raw.attach->doorbell_fd()));
  CHORUS_ASSIGN_OR_RETURN(AttachClient::SessionMemoryFds fds, raw.attach->SessionMemory(deadline));
  CHORUS_ASSIGN_OR_RETURN(raw.memory, MapSessionMemory(fds.memory.get()));
  CHORUS_RETURN_IF_ERROR(raw.attach->ConfirmMemory(deadline));
  raw.wake = std::move(fds.wake);
  return raw;
}

absl::Status RawSession::Join(const std::string& name, int rank, int size,
                              int64_t agree_seconds) const {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::JoinWorldRequest request;
  v1::JoinWorldResponse response;
  request.set_session(session);
  request.set_name(name);
  request.set_rank(rank);
  request.set_size(size);
  request.mutable_agree_timeout()->set_seconds(agree_seconds);
  return FromGrpc(v1::Worlds::NewStub(channel)->Join(&context, request, &response));
}

}  // namespace fault
}  // namespace chorus
