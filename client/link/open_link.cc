#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "chorus/v1/capabilities.grpc.pb.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "client/attach/attach_client.h"
#include "client/internal/link.h"
#include "client/link/grpc_links.h"
#include "client/link/ring_link.h"
#include "client/link/rpc_link.h"
#include "core/base/error.h"
#include "core/transport/attach/protocol.h"
#include "grpc/grpc.h"
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

// How long to wait before the next look whether a daemon has started.
constexpr absl::Duration kFirstLook = absl::Milliseconds(10);
constexpr absl::Duration kLastLook = absl::Milliseconds(200);

absl::Status CheckAddress(absl::string_view address) {
  if (absl::StartsWith(address, "unix:")) return absl::OkStatus();
  if (absl::StrContains(address, '/')) {
    return Malformed(absl::StrCat("address \"", address,
                                  "\": a path needs unix: before it (unix:", address, ")"));
  }
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0 || colon + 1 == address.size()) {
    return Malformed(absl::StrCat("address \"", address, "\": expected unix:/PATH or HOST:PORT"));
  }
  return absl::OkStatus();
}

// What stands at `path` that no daemon will ever serve, or serves somebody else.
absl::Status CheckSocket(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) return absl::OkStatus();  // perhaps soon
  if (S_ISSOCK(info.st_mode)) return absl::OkStatus();
  return Malformed(absl::StrCat("unix:", path, ": expected a socket, found ",
                                S_ISDIR(info.st_mode) ? "a directory" : "another kind of file"));
}

// Of a socket that this user may not use.
absl::Status ForeignSocket(const std::string& path, const absl::Status& denied) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) {
    return MakeError(Reason::kNotAttached,
                     absl::StrCat("unix:", path, ": this process (uid ", geteuid(),
                                  ") may not look there: ", strerror(errno)));
  }
  return MakeError(
      Reason::kNotAttached,
      absl::StrCat("unix:", path, ": the socket of uid ", info.st_uid, " (mode ",
                   absl::StrFormat("%04o", info.st_mode & 07777), ") does not let uid ", geteuid(),
                   " in: use a daemon of your own, or have this one started with --socket_mode "
                   "and --socket_group (",
                   ErrorOf(denied).message, ")"));
}

// Calls `open` until it gives something else than DAEMON_LOST, or `deadline`: a daemon that is
// starting will be there.
template <typename Open>
auto WhenItServes(absl::Time deadline, const Open& open) -> decltype(open()) {
  absl::Duration look = kFirstLook;
  absl::Status why;
  for (;;) {
    auto result = open();
    if (result.ok()) return result;
    const Reason reason = ErrorOf(result.status()).reason;
    // The last look may have had no time: what the one before saw says more.
    if (reason == Reason::kTransportTimeout && !why.ok()) return why;
    const absl::Duration left = deadline - absl::Now();
    if (reason != Reason::kDaemonLost || left <= absl::ZeroDuration()) return result;
    why = result.status();
    absl::SleepFor(std::min(look, left));
    look = std::min(2 * look, kLastLook);
  }
}

// `status` with the address, where no daemon has made it.
absl::Status NoAnswer(absl::string_view address, const absl::Status& status,
                      absl::Duration patience) {
  Error error = ErrorOf(status);
  const std::string within = absl::StrCat(" within ", absl::FormatDuration(patience));
  if (error.reason == Reason::kDaemonLost) {
    error.message = absl::StrCat("no daemon serves at ", address, within, ": ", error.message);
  } else if (error.reason == Reason::kTransportTimeout) {
    error.message =
        absl::StrCat("the daemon at ", address, " did not answer", within, ": ", error.message);
  }
  return ToStatus(error);
}

absl::StatusOr<std::unique_ptr<AttachClient>> Attach(const std::string& path, absl::Time deadline,
                                                     absl::Duration patience) {
  auto attached = WhenItServes(deadline, [&]() -> absl::StatusOr<std::unique_ptr<AttachClient>> {
    CHORUS_RETURN_IF_ERROR(CheckSocket(path));
    return AttachClient::Connect(AttachPath(path), deadline);
  });
  if (attached.ok()) return attached;
  // Not the daemon's own word on who may attach.
  if (ErrorOf(attached.status()).reason == Reason::kNotAttached &&
      faccessat(AT_FDCWD, AttachPath(path).c_str(), W_OK, AT_EACCESS) != 0) {
    return ForeignSocket(path, attached.status());
  }
  return NoAnswer(absl::StrCat("unix:", path), attached.status(), patience);
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
  const absl::Duration patience = absl::FromChrono(options.open_timeout);
  const absl::Time deadline = absl::Now() + patience;
  OpenedSession opened;
  opened.address = AddressOf(options);
  CHORUS_RETURN_IF_ERROR(CheckAddress(opened.address));
  absl::string_view path = opened.address;
  const bool local = absl::StartsWith(path, "unix:");
  if (local) path.remove_prefix(5);
  if (!local && options.transport == Transport::kRing) {
    return MakeError(Reason::kNotAttached,
                     absl::StrCat("the ring needs a daemon on this machine, at unix:PATH; got ",
                                  opened.address));
  }
  if (local) {
    // The credentials are its; without it a session of another user could only read.
    CHORUS_ASSIGN_OR_RETURN(opened.attach, Attach(std::string(path), deadline, patience));
  }
  // Once and for all: with the last channel of a process gRPC would shut itself down, and whoever
  // closes a session would wait for its poller, for 10 s now and then (gRPC 1.51).
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
  opened.channel =
      grpc::CreateCustomChannel(opened.address, grpc::InsecureChannelCredentials(), arguments);

  const auto stub = v1::Capabilities::NewStub(opened.channel);
  const auto asked = WhenItServes(deadline, [&]() -> absl::StatusOr<v1::GetCapabilitiesResponse> {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    v1::GetCapabilitiesResponse response;
    CHORUS_RETURN_IF_ERROR(FromGrpc(stub->Get(&context, v1::GetCapabilitiesRequest(), &response)));
    return response;
  });
  if (!asked.ok()) return NoAnswer(opened.address, asked.status(), patience);
  const v1::GetCapabilitiesResponse& capabilities = *asked;
  if (kApiVersion < capabilities.oldest_api_version() ||
      kApiVersion > capabilities.newest_api_version()) {
    return MakeError(
        Reason::kVersion,
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
    const absl::Status open =
        FromGrpc(v1::Sessions::NewStub(opened.channel)->Open(&context, request, &response));
    if (!open.ok()) return NoAnswer(opened.address, open, patience);
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
