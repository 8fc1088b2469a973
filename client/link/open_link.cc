#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "chorus/v1/capabilities.grpc.pb.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "client/attach/attach_client.h"
#include "client/internal/link.h"
#include "client/link/grpc_links.h"
#include "client/link/ring_link.h"
#include "client/link/rpc_link.h"
#include "core/base/error.h"
#include "core/transport/attach/protocol.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "proto/convert/errors_convert.h"

namespace chorus {
inline namespace sdk {
namespace {

// Of the API, as the daemon's server/service/context.h has it.
constexpr int32_t kApiVersion = 2;
constexpr size_t kMaxLabelBytes = 256;

std::string AddressOf(const SessionOptions& options) {
  if (!options.address.empty()) return options.address;
  const char* const given = std::getenv("CHORUS_ADDRESS");
  if (given != nullptr && *given != '\0') return given;
  return absl::StrCat("unix:", DefaultSocketPath());
}

std::string LabelOf(const SessionOptions& options) {
  std::string label = options.label;
  if (label.empty()) {
    label = absl::StrCat(::program_invocation_short_name, " pid ", ::getpid());
  }
  return label.substr(0, kMaxLabelBytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Link>> OpenLink(const SessionOptions& options) {
  const absl::Time deadline = absl::Now() + absl::FromChrono(options.open_timeout);
  OpenedSession opened;
  opened.address = AddressOf(options);
  absl::string_view path = opened.address;
  const bool local = absl::StartsWith(path, "unix:");
  if (local) path.remove_prefix(5);
  if (!local && options.transport == Transport::kRing) {
    return MakeError(absl::StatusCode::kUnauthenticated, Reason::kNotAttached,
                     absl::StrCat("the ring needs a daemon on this machine, at unix:PATH; got ",
                                  opened.address));
  }
  if (local) {
    // The credentials are its; without it a session of another user could only read.
    CHORUS_ASSIGN_OR_RETURN(opened.attach, AttachClient::Connect(AttachPath(path), deadline));
  }
  grpc::ChannelArguments arguments;
  // Two sessions of one process share nothing, not even a connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  opened.channel =
      grpc::CreateCustomChannel(opened.address, grpc::InsecureChannelCredentials(), arguments);

  v1::GetCapabilitiesResponse capabilities;
  {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    CHORUS_RETURN_IF_ERROR(
        FromGrpc(v1::Capabilities::NewStub(opened.channel)
                     ->Get(&context, v1::GetCapabilitiesRequest(), &capabilities)));
  }
  if (kApiVersion < capabilities.oldest_api_version() ||
      kApiVersion > capabilities.newest_api_version()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, Reason::kVersion,
        absl::StrCat("this client speaks version ", kApiVersion, " of the API, the daemon at ",
                     opened.address, " (", capabilities.daemon_version(), ") versions ",
                     capabilities.oldest_api_version(), " to ", capabilities.newest_api_version()));
  }
  opened.max_tensors = capabilities.max_tensors();
  // One that does not say tells whoever comes there.
  opened.max_graphs = capabilities.max_graphs() > 0 ? capabilities.max_graphs()
                                                    : std::numeric_limits<int32_t>::max();

  v1::OpenSessionRequest request;
  v1::OpenSessionResponse response;
  request.set_api_version(kApiVersion);
  request.set_label(LabelOf(options));
  if (opened.attach != nullptr) request.set_attach_token(opened.attach->token());
  for (const int device : options.devices) request.add_devices(device);
  request.set_device_count(options.device_count);
  {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    CHORUS_RETURN_IF_ERROR(
        FromGrpc(v1::Sessions::NewStub(opened.channel)->Open(&context, request, &response)));
  }
  opened.session = response.session();
  for (const int32_t device : response.devices()) opened.devices.push_back(DeviceIndex(device));
  opened.lease =
      absl::Seconds(response.lease().seconds()) + absl::Nanoseconds(response.lease().nanos());

  switch (options.transport) {
    case Transport::kUnary:
      return MakeUnaryLink(std::move(opened));
    case Transport::kStream:
      return MakeStreamLink(std::move(opened));
    case Transport::kAuto:
      if (!local) return MakeStreamLink(std::move(opened));
      break;
    case Transport::kRing:
      break;
  }
  return MakeRingLink(std::move(opened), deadline);
}

}  // namespace sdk
}  // namespace chorus
