#include "server/daemon.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/optional.h"
#include "core/base/alarms.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/base/unique_fd.h"
#include "core/node/node_loop.h"
#include "core/runtime/memory_guard.h"
#include "core/transport/attach/protocol.h"
#include "glog/logging.h"
#include "grpc/grpc.h"
#include "grpc/health/v1/health.pb.h"
#include "grpcpp/ext/channelz_service_plugin.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "server/acceptor.h"
#include "server/admin/capabilities_service.h"
#include "server/admin/diagnostics_service.h"
#include "server/attach/attach_server.h"
#include "server/call_guard.h"
#include "server/cgroups.h"
#include "server/grpc_defaults.h"
#include "server/lock_file.h"
#include "server/own_memory.h"
#include "server/peers.h"
#include "server/service/context.h"
#include "server/service/farewell.h"
#include "server/service/graphs_service.h"
#include "server/service/log_service.h"
#include "server/service/moved_methods.h"
#include "server/service/room.h"
#include "server/service/sessions_service.h"
#include "server/service/tensors_service.h"
#include "server/service/worker.h"
#include "server/service/worlds_service.h"
#include "server/tcp_listener.h"

namespace chorus::server {
namespace {

// Of each call, before its request is read.
constexpr int kLookaheadBytes = 16 << 10;

// How often a drain looks whether the node has become idle, or calls have ended.
constexpr absl::Duration kDrainLook = absl::Milliseconds(5);

// From 1 to kMaxIncarnation.
int64_t NewIncarnation() {
  uint32_t number = 0;
  const ssize_t size = getrandom(&number, sizeof(number), 0);
  CHECK_EQ(size, static_cast<ssize_t>(sizeof(number))) << "getrandom: " << strerror(errno);
  return std::max<int64_t>(number & kMaxIncarnation, 1);
}

// In which a stream of commands hears that its session has ended, also one that has no lease.
constexpr absl::Duration kRenewPeriod = absl::Seconds(5);

// "/" for what stands there.
std::string DirectoryOf(const std::string& path) {
  return path.substr(0, std::max<size_t>(path.rfind('/'), 1));
}

// Makes the directory of `path` and notes it in `created_directories`, unless it is there.
absl::Status MakeDirectory(const std::string& path, std::vector<std::string>* created_directories) {
  const std::string directory = DirectoryOf(path);
  if (mkdir(directory.c_str(), 0755) == 0) {
    created_directories->push_back(directory);
    return absl::OkStatus();
  }
  if (errno == EEXIST) return absl::OkStatus();
  return MakeError(Reason::kCannotServe,
                   absl::StrCat("directory ", directory, ": ", strerror(errno)));
}

// Nobody but the operator says where else a daemon listens: there it is only told.
absl::Status CheckDirectory(const std::string& path, uid_t uid) {
  const absl::Status status = CheckSocketDirectory(DirectoryOf(path), uid);
  if (status.ok() || path == DefaultSocketPath()) return status;
  LOG(WARNING) << ErrorOf(status).message << ": another user may put a socket in place of this one";
  return absl::OkStatus();
}

// Null: nobody could tell the daemon's memory from others'. Says which in the log.
std::unique_ptr<MemoryGuard> MakeMemoryGuard(const DaemonOptions& options) {
  const auto off = [](absl::string_view why) {
    LOG(INFO) << "memory guard: off: " << why;
    return nullptr;
  };
  if (!options.guards_memory) return off("these devices have host memory that is in no account");
  const absl::optional<ProcessCgroup> cgroup = ProcessCgroup::Find();
  if (!cgroup.has_value()) return off("no cgroup tells how much memory this process has");
  const std::string others = cgroup->Others();
  if (!others.empty()) {
    return off(absl::StrCat("the cgroup ", cgroup->folder(), " has ", others, " as well"));
  }
  const int64_t own_bytes = OwnBytes(options.max_connections, options.max_calls,
                                     options.max_streams, options.node.max_sessions);
  const int64_t most_bytes = GuardedBytes(options.node.memory_limit_bytes, own_bytes);
  LOG(INFO) << "memory guard: on: no arena is made for which " << cgroup->folder()
            << " would have more than " << most_bytes << " bytes";
  MemoryGuard::Cgroup reads;
  reads.usage = [cgroup = *cgroup] { return cgroup.UsageBytes(); };
  reads.fixed = [cgroup = *cgroup]() -> absl::optional<int64_t> {
    if (!cgroup.Others().empty()) return absl::nullopt;
    return cgroup.FixedBytes();
  };
  return std::make_unique<MemoryGuard>(most_bytes, std::move(reads));
}

node::NodeOptions ForDaemon(node::NodeOptions options, TenantLog* log, MemoryGuard* guard) {
  // What is neither a connection's nor a client's: listeners, threads' wake-ups, files.
  constexpr int64_t kOwnDescriptors = 128;
  options.max_descriptors = std::min(
      options.max_descriptors, std::max<int64_t>(DescriptorLimit() / 2 - kOwnDescriptors, 64));
  options.memory_guard = guard;
  if (options.log_failure == nullptr) {
    options.log_failure = [log](absl::string_view tenant, absl::string_view line) {
      log->Say(google::GLOG_WARNING, tenant, line);
    };
  }
  return options;
}

// Runs `look` on the node thread, behind all that calls have asked of it by now: what it gives.
template <typename Look>
std::future<bool> PostLook(node::NodeLoop* loop, Look look) {
  auto promise = std::make_shared<std::promise<bool>>();
  std::future<bool> seen = promise->get_future();
  loop->PostBehindAll([promise, look](node::LocalNode& node, absl::Time now) {
    promise->set_value(look(node, now));
  });
  return seen;
}
// What it gave, by `deadline`. False: the node thread has not come to it.
bool AwaitLook(std::future<bool> seen, absl::Time deadline) {
  const absl::Duration left = std::min(deadline - SteadyNow(), absl::Hours(1));
  if (seen.wait_for(absl::ToChronoNanoseconds(left)) != std::future_status::ready) return false;
  return seen.get();
}

}  // namespace

// Members are destroyed from the last to the first: what uses something stands below it.
struct Daemon::Impl {
  Impl(const DaemonOptions& options, std::unique_ptr<Devices> devices)
      : options(options),
        max_connections(std::min(options.max_connections, DescriptorLimit() / 8)),
        tenant_log(options.write_line),
        peers(options.trusted_uid, max_connections,
              {options.max_calls, kMaxOtherCalls, kMaxEndingCalls},
              [this](absl::string_view tenant, absl::string_view why) {
                tenant_log.Say(google::GLOG_WARNING, tenant,
                               absl::StrCat("a connection of ", tenant, " is ended: ", why));
              }),
        worker([this](std::vector<SessionId> sessions) { Renew(std::move(sessions)); },
               kRenewPeriod),
        backend(devices->info().backend),
        memory_guard(MakeMemoryGuard(options)),
        loop(ForDaemon(options.node, &tenant_log, memory_guard.get()), std::move(devices)) {
    context.loop = &loop;
    context.worker = &worker;
    context.alarms = &alarms;
    context.farewell = &farewell;
    context.peers = &peers;
    context.log = &tenant_log;
    context.parsing = &parsing;
    context.answers = &answers;
    context.streams = &streams;
    context.reads = &reads;
    context.answering = &answering;
    context.incarnation = NewIncarnation();
    context.max_wait = options.max_wait;
    context.read_timeout = options.read_timeout;
    context.download_timeout = options.download_timeout;
    context.backend = backend;
    context.max_tensors = options.node.max_tensors;
    context.max_graphs = options.node.max_graphs;
  }

  ~Impl() {
    alarms.Stop();
    worker.Stop();
  }

  absl::Status Listen();
  absl::Status Serve();
  void Renew(std::vector<SessionId> sessions);
  // Takes back what a start that failed has made.
  void Undo();
  void Drain(absl::Time deadline);

  const DaemonOptions options;
  const int max_connections;
  SharedRoom streams{options.max_streams * kMaxMessageBytes,
                     "bytes of what comes on streams of commands"};
  std::vector<LockFile> locks;
  std::vector<Acceptor::Listener> grpc_listeners;  // until Serve
  std::vector<UniqueFd> attach_listeners;          // until Serve
  std::vector<std::string> paths;                  // made by Listen, for removal
  std::vector<std::string> directories;            // made by Listen
  std::vector<ListenAddress> addresses;

  ServiceContext context;
  Alarms alarms;  // calls cancel theirs when they end, whoever has them last
  TenantLog tenant_log;
  Room parsing{kMaxParsedBytes};
  SharedRoom answers{options.answer_bytes, "bytes of answers that have not been read"};
  CallTurns reads{kMaxReads / 8, kMaxReads};
  CallTurns answering{kMaxAnswering};
  SharedRoom blocking{kMaxBlockingCalls, "calls of reflection and channelz"};
  PeerTable peers;
  Farewell farewell;
  ServiceWorker worker;  // the node has outcomes for it as long as it lives
  // Stopped before the loop ends. A session that is opened by a node thread which was late for that
  // is still bound, or not.
  std::unique_ptr<AttachServer> attach;
  const std::string backend;                        // its name
  const std::unique_ptr<MemoryGuard> memory_guard;  // null: none
  node::NodeLoop loop;
  std::vector<std::unique_ptr<grpc::Service>> services;
  MovedMethods moved_methods{&context};
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<Acceptor> acceptor;
  bool drained = false;
};

absl::Status Daemon::Impl::Listen() {
  if (options.listen.empty()) return Malformed("--listen: expected at least one address");
  for (const ListenAddress& listen_address : options.listen) {
    CHORUS_RETURN_IF_ERROR(CheckListenAddress(listen_address, options.insecure_loopback));
    ListenAddress& address = addresses.emplace_back(listen_address);
    if (!address.is_unix()) {
      CHORUS_ASSIGN_OR_RETURN(std::vector<UniqueFd> listeners, ListenTcp(&address));
      for (UniqueFd& listener : listeners) {
        grpc_listeners.push_back({std::move(listener), /*is_unix=*/false});
      }
      continue;
    }
    CHORUS_RETURN_IF_ERROR(MakeDirectory(address.path, &directories));
    CHORUS_RETURN_IF_ERROR(CheckDirectory(address.path, geteuid()));
    CHORUS_ASSIGN_OR_RETURN(LockFile lock, TakeLockFile(address.path));
    locks.push_back(std::move(lock));
    // First the attach socket: a client that finds the gRPC socket finds the other one as well.
    const std::string attach_path = AttachPath(address.path);
    CHORUS_ASSIGN_OR_RETURN(UniqueFd attach_listener,
                            ListenUnix(attach_path, SOCK_SEQPACKET, options.access));
    paths.push_back(attach_path);
    attach_listeners.push_back(std::move(attach_listener));
    CHORUS_ASSIGN_OR_RETURN(UniqueFd listener,
                            ListenUnix(address.path, SOCK_STREAM, options.access));
    paths.push_back(address.path);
    grpc_listeners.push_back({std::move(listener), /*is_unix=*/true});
    if (context.attach_path.empty()) context.attach_path = attach_path;
  }
  return absl::OkStatus();
}

absl::Status Daemon::Impl::Serve() {
  if (!attach_listeners.empty()) {
    AttachOptions attach_options;
    attach_options.incarnation = context.incarnation;
    attach_options.daemon_version = kDaemonVersion;
    attach_options.open_timeout = options.attach_open_timeout;
    attach_options.max_connections = max_connections;
    attach = std::make_unique<AttachServer>(std::move(attach_listeners), std::move(attach_options),
                                            &loop, &tenant_log);
    context.attach = attach.get();
  }
  // Of one connection, before anybody has looked at them. Those that are refused count, too.
  const int max_connection_calls = options.max_calls;
  CHORUS_RETURN_IF_ERROR(
      SetHttpDefaults({kMaxHeaderBytes, static_cast<uint32_t>(max_connection_calls)}));
  // Once and for all: with its last server gRPC would shut itself down, and the drain wait for its
  // poller, for 10 s now and then (gRPC 1.51).
  static const bool kept = (grpc_init(), true);
  static_cast<void>(kept);
  grpc::EnableDefaultHealthCheckService(true);
  // gRPC serves health without its descriptor; naming it here links it, for reflection.
  grpc::health::v1::HealthCheckRequest::descriptor();
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::channelz::experimental::InitChannelzService();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // What comes before it is read: no more of one call, whatever its client's bandwidth. (Before it
  // has confirmed this, its window is what all have at first.)
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  // The limit is for bytes as they come. gRPC inflates without one, before anybody is authorised:
  // it inflates nothing here, and a client that compresses is told UNIMPLEMENTED.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  builder.SetResourceQuota(grpc::ResourceQuota("chorusd")
                               .SetMaxThreads(kBlockingThreads)
                               .Resize(static_cast<size_t>(ReadBytes(
                                   max_connections, options.max_calls, options.max_streams))));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, max_connection_calls);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxHeaderBytes);
  // Of pings it answers as many as there are. (A connection that sends too many would be ended once
  // its client has read what it is sent, and told so for each ping until then.)
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  // Nobody is asked by HTTP/2 whether it is there: a trainer in a debugger does not answer.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, std::numeric_limits<int>::max());
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(GuardCalls(&peers, &blocking));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  for (const auto make :
       {&MakeSessionsService, &MakeWorldsService, &MakeTensorsService, &MakeGraphsService,
        &MakeLogService, &MakeDiagnosticsService, &MakeCapabilitiesService}) {
    services.push_back(make(&context));
    builder.RegisterService(services.back().get());
  }
  builder.RegisterCallbackGenericService(&moved_methods);
  server = builder.BuildAndStart();
  if (server == nullptr) {
    return MakeError(Reason::kInternal, "gRPC does not start");
  }
  PeerTable::Idle idle;
  idle.first_call = options.attach_open_timeout;
  idle.next_call = std::max(options.idle_timeout, options.node.lease);
  idle.keeps = [this](const PeerCredentials& peer) {
    return attach != nullptr && attach->Attached(peer.pid);
  };
  acceptor =
      std::make_unique<Acceptor>(std::move(grpc_listeners), std::move(idle), &peers, server.get());
  return absl::OkStatus();
}

void Daemon::Impl::Renew(std::vector<SessionId> sessions) {
  loop.PostOwn([this, sessions = std::move(sessions)](node::LocalNode& node, absl::Time now) {
    for (const SessionId session : sessions) {
      const absl::Status status = node.RenewLease(session, now).status();
      // Its calls have been told; its streams wait for commands.
      if (!status.ok()) farewell.SayTo(session, status);
    }
  });
}

void Daemon::Impl::Drain(absl::Time deadline) {
  if (std::exchange(drained, true)) return;
  if (server != nullptr) {
    std::future<bool> draining = PostLook(&loop, [](node::LocalNode& node, absl::Time) {
      node.StartDraining();
      return true;
    });
    // Whoever sees that, and asks for something then, comes behind the drain; but for one whose
    // tenant has nothing under way here, which is drained later.
    server->GetHealthCheckService()->SetServingStatus(false);
    const absl::Time patience = std::max(deadline, SteadyNow() + options.drain_patience);
    AwaitLook(std::move(draining), patience);
    const auto is_idle = [this, patience] {
      return AwaitLook(
          PostLook(&loop, [](node::LocalNode& node, absl::Time) { return node.Idle(); }), patience);
    };
    while (!is_idle() && SteadyNow() < deadline) {
      absl::SleepFor(std::min(kDrainLook, deadline - SteadyNow()));
    }
    const bool has_aborted = AwaitLook(PostLook(&loop,
                                                [](node::LocalNode& node, absl::Time now) {
                                                  node.AbortAll(now);
                                                  return true;
                                                }),
                                       SteadyNow() + options.drain_patience);
    if (!has_aborted) {
      LOG(ERROR) << "the node thread hangs: what waits for it is not told why it ends";
    }
    // Behind the outcomes, before any connection closes.
    const absl::Status why = DrainingError();
    if (attach != nullptr) attach->SayGoodbye(why);
    farewell.Say(why);
    // gRPC closes a connection with its last call once it has said that it will, whatever is on its
    // way there; and a client that sends at this moment finds it broken before it has read why. So
    // the calls end first.
    const absl::Time patience_of_clients = SteadyNow() + options.farewell_patience;
    while (peers.calls() > 0 && SteadyNow() < patience_of_clients) absl::SleepFor(kDrainLook);
  }
  // gRPC closes them by then: this is for what it may keep.
  if (acceptor != nullptr) acceptor->Stop(2 * options.farewell_patience);
  if (server != nullptr) {
    // Calls that have their answer end well, the rest is cancelled.
    server->Shutdown(absl::ToChronoTime(absl::Now() + options.farewell_patience));
    server->Wait();
  }
  acceptor.reset();
  server.reset();
  if (attach != nullptr) attach->Stop();
  for (const std::string& path : paths) unlink(path.c_str());
  paths.clear();
}

void Daemon::Impl::Undo() {
  Drain(SteadyNow());
  locks.clear();
  // Only what is empty can be removed: others may have come to use it.
  for (auto path = directories.rbegin(); path != directories.rend(); ++path) rmdir(path->c_str());
}

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const DaemonOptions& options,
                                                      std::unique_ptr<Devices> devices) {
  std::unique_ptr<Daemon> daemon(new Daemon(std::make_unique<Impl>(options, std::move(devices))));
  absl::Status status = daemon->impl_->Listen();
  if (status.ok()) status = daemon->impl_->Serve();
  if (status.ok()) return daemon;
  daemon->impl_->Undo();
  return status;
}

Daemon::Daemon(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Daemon::~Daemon() { impl_->Drain(SteadyNow()); }

const std::vector<ListenAddress>& Daemon::addresses() const { return impl_->addresses; }
int64_t Daemon::incarnation() const { return impl_->context.incarnation; }
void Daemon::Drain(absl::Time deadline) { impl_->Drain(deadline); }

}  // namespace chorus::server
