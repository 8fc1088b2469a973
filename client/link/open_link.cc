#include "client/link/open_link.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "chorus/v1/capabilities.grpc.pb.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "client/attach/attach_client.h"
#include "client/attach/daemon_socket.h"
#include "client/link/call_deadline.h"
#include "client/link/find_daemon.h"
#include "client/link/grpc_links.h"
#include "client/link/ring_link.h"
#include "client/link/rpc_link.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "core/base/utf8.h"
#include "grpc/grpc.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/create_channel_posix.h"
#include "grpcpp/security/credentials.h"
#include "proto/convert/api_version.h"
#include "proto/convert/errors_convert.h"

namespace chorus {
namespace internal {
namespace {

constexpr size_t kMaxLabelBytes = 256;
constexpr absl::string_view kUnix = "unix:";

std::string LabelOf(const SessionOptions& options) {
  std::string label = options.label;
  if (label.empty()) {
    label = absl::StrCat(::program_invocation_short_name, " pid ", ::getpid());
  }
  return OneLine(label, kMaxLabelBytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Link>> OpenLink(const SessionOptions& options) {
  const absl::Duration patience = absl::FromChrono(options.open_timeout);
  const absl::Time deadline = SteadyNow() + patience;
  OpenedSession opened;
  CHORUS_ASSIGN_OR_RETURN(std::vector<std::string> paths, AddressesFor(options.address));
  opened.address = paths[0];
  const bool local = absl::StartsWith(opened.address, kUnix);
  if (!local && options.transport == Transport::kRing) {
    return MakeError(Reason::kNotAttached,
                     absl::StrCat("the ring needs a daemon on this machine, at unix:PATH; got ",
                                  opened.address));
  }
  std::string path;
  if (local) {
    // The credentials are its; without it a session of another user could only read.
    for (std::string& path : paths) path.erase(0, kUnix.size());
    CHORUS_ASSIGN_OR_RETURN(FoundDaemon daemon,
                            FindDaemon(paths, options.daemon_uids, deadline, patience));
    opened.address = absl::StrCat(kUnix, daemon.path);
    opened.attach = std::move(daemon.attach);
    path = std::move(daemon.path);
  }
  // Once and for all: with the last channel of a process gRPC would shut itself down, and the
  // thread that closes a session would wait for its poller, for 10 s now and then (gRPC 1.51).
  static const bool kept = (grpc_init(), true);
  static_cast<void>(kept);
  grpc::ChannelArguments arguments;
  // Two sessions of one process share nothing, not even a connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // One that is starting is looked for at once.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(kFirstLook)));
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(kLastLook)));
  const auto connect = [&]() -> absl::StatusOr<std::shared_ptr<grpc::Channel>> {
    if (!local) {
      return grpc::CreateCustomChannel(opened.address, grpc::InsecureChannelCredentials(),
                                       arguments);
    }
    // gRPC would connect by itself, again and again, to the process that listens at the path then.
    CHORUS_ASSIGN_OR_RETURN(UniqueFd connection,
                            ConnectToDaemon(path, SOCK_STREAM, options.daemon_uids, deadline));
    return grpc::CreateCustomInsecureChannelFromFd("chorusd", connection.Release(), arguments);
  };
  const auto answer = WhenItServes(deadline, [&]() -> absl::StatusOr<v1::GetCapabilitiesResponse> {
    if (local || opened.channel == nullptr) {
      CHORUS_ASSIGN_OR_RETURN(opened.channel, connect());
    }
    const auto stub = v1::Capabilities::NewStub(opened.channel);
    grpc::ClientContext context;
    const CallDeadline in_time(&context, deadline - SteadyNow());
    v1::GetCapabilitiesResponse response;
    CHORUS_RETURN_IF_ERROR(
        FromGrpc(in_time.Of(stub->Get(&context, v1::GetCapabilitiesRequest(), &response))));
    return response;
  });
  const auto no_session = [&](const absl::Status& why) {
    if (ErrorOf(why).reason == Reason::kDraining) return AtAddress(opened.address, why);
    return NoAnswer(opened.address, why, patience);
  };
  if (!answer.ok()) return no_session(answer.status());
  const v1::GetCapabilitiesResponse& capabilities = *answer;
  if (kApiVersion < capabilities.oldest_api_version() ||
      kApiVersion > capabilities.newest_api_version()) {
    return MakeError(
        Reason::kVersion,
        absl::StrCat("this client speaks version ", kApiVersion, " of the API, the daemon at ",
                     opened.address, " (", capabilities.daemon_version(), ") versions ",
                     capabilities.oldest_api_version(), " to ", capabilities.newest_api_version()));
  }
  opened.max_tensors = capabilities.max_tensors();
  // A daemon that does not say so refuses a graph that is one too many.
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
    const CallDeadline in_time(&context, deadline - SteadyNow());
    const absl::Status open = FromGrpc(
        in_time.Of(v1::Sessions::NewStub(opened.channel)->Open(&context, request, &response)));
    if (!open.ok()) return no_session(open);
  }
  opened.session = response.session();
  for (const int32_t device : response.devices()) {
    opened.devices.push_back(DeviceIndex(device));
    opened.device_infos.emplace_back();
    for (const auto& info : capabilities.devices()) {
      if (info.device() != device) continue;
      opened.device_infos.back() = {info.name(), info.memory_bytes(), info.core_count()};
    }
  }
  opened.request_timeout = std::min(opened.request_timeout, absl::FromChrono(options.wait_timeout));
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

}  // namespace internal
}  // namespace chorus
