#include "server/flags.h"

#include <sys/types.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/marshalling.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/types/optional.h"
#include "core/base/error.h"
#include "core/node/options.h"
#include "core/transport/attach/protocol.h"
#include "server/listen_address.h"
#include "server/own_memory.h"

namespace chorus::server {

// --listen, given once for each address. Without it: DefaultSocketPath().
struct ListenFlag {
  std::vector<std::string> addresses;
};

// absl::Flags calls this for each occurrence, with a fresh value.
std::vector<std::string>& ListenOccurrences() {
  static auto* const occurrences = new std::vector<std::string>;
  return *occurrences;
}

bool AbslParseFlag(absl::string_view text, ListenFlag* flag, std::string* error) {
  for (absl::string_view part : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const absl::StatusOr<ListenAddress> address = ParseListenAddress(part);
    if (!address.ok()) {
      *error = std::string(address.status().message());
      return false;
    }
    ListenOccurrences().push_back(std::string(part));
  }
  flag->addresses = ListenOccurrences();
  return true;
}

std::string AbslUnparseFlag(const ListenFlag& flag) { return absl::StrJoin(flag.addresses, ","); }

// A file mode: octal digits.
struct ModeFlag {
  mode_t mode = 0;
};

bool AbslParseFlag(absl::string_view text, ModeFlag* flag, std::string* error) {
  uint32_t mode = 0;
  for (char digit : text) {
    if (digit < '0' || digit > '7' || mode > 0777) {
      mode = 01000;
      break;
    }
    mode = mode * 8 + static_cast<uint32_t>(digit - '0');
  }
  if (text.empty() || mode > 0777) {
    *error = absl::StrCat("expected octal digits of 0 to 0777, got \"", text, "\"");
    return false;
  }
  flag->mode = mode;
  return true;
}

std::string AbslUnparseFlag(const ModeFlag& flag) {
  return absl::StrCat("0", absl::Hex(flag.mode >> 6 & 7), absl::Hex(flag.mode >> 3 & 7),
                      absl::Hex(flag.mode & 7));
}

// A positive duration.
struct DurationFlag {
  absl::Duration value;
};

bool AbslParseFlag(absl::string_view text, DurationFlag* flag, std::string* error) {
  if (absl::ParseDuration(text, &flag->value) && flag->value > absl::ZeroDuration()) return true;
  *error =
      absl::StrCat("expected a positive duration such as 500ms, 10s or 1h30m, got \"", text, "\"");
  return false;
}

std::string AbslUnparseFlag(const DurationFlag& flag) { return absl::FormatDuration(flag.value); }

// A positive number of bytes, perhaps with a unit of powers of 1,024.
struct BytesFlag {
  int64_t value = 0;
};

bool AbslParseFlag(absl::string_view text, BytesFlag* flag, std::string* error) {
  absl::string_view digits = text;
  int64_t unit = 1;
  for (const auto& [suffix, bytes] : {std::pair<const char*, int64_t>{"KiB", int64_t{1} << 10},
                                      {"MiB", int64_t{1} << 20},
                                      {"GiB", int64_t{1} << 30},
                                      {"TiB", int64_t{1} << 40}}) {
    if (absl::ConsumeSuffix(&digits, suffix)) unit = bytes;
  }
  int64_t count = 0;
  if (!absl::SimpleAtoi(digits, &count) || count <= 0 ||
      count > std::numeric_limits<int64_t>::max() / unit) {
    *error = absl::StrCat(
        "expected a positive number of bytes such as 8589934592, 512MiB or 8GiB, "
        "got \"",
        text, "\"");
    return false;
  }
  flag->value = count * unit;
  return true;
}

std::string AbslUnparseFlag(const BytesFlag& flag) { return absl::StrCat(flag.value); }

// The same, or "auto".
struct MemoryFlag {
  absl::optional<BytesFlag> bytes;
};

bool AbslParseFlag(absl::string_view text, MemoryFlag* flag, std::string* error) {
  flag->bytes.reset();
  if (text == "auto") return true;
  flag->bytes.emplace();
  return AbslParseFlag(text, &*flag->bytes, error);
}

std::string AbslUnparseFlag(const MemoryFlag& flag) {
  return flag.bytes.has_value() ? AbslUnparseFlag(*flag.bytes) : "auto";
}

// Flags that say nothing else leave what they are for as it is.
const DaemonOptions& Defaults() {
  static const auto* const options = new DaemonOptions;
  return *options;
}

}  // namespace chorus::server

ABSL_FLAG(chorus::server::ListenFlag, listen, {},
          "Where to listen: unix:/PATH or HOST:PORT; give it once for each address. Default: "
          "unix:/run/chorus/chorusd.sock for root, else unix:/run/user/UID/chorus/chorusd.sock, or "
          "unix:/tmp/chorus-UID/chorusd.sock where there is no /run/user/UID. The attach socket "
          "and the lock file lie beside it (PATH.attach, PATH.lock). TCP only on loopback, with "
          "--insecure_loopback.");
ABSL_FLAG(bool, insecure_loopback, chorus::server::Defaults().insecure_loopback,
          "Serve TCP on loopback addresses to every user of this machine, without TLS or "
          "credentials.");
ABSL_FLAG(chorus::server::ModeFlag, socket_mode, {chorus::server::Defaults().access.mode},
          "Mode of the Unix sockets (octal).");
ABSL_FLAG(std::string, socket_group, chorus::server::Defaults().access.group,
          "Group of the Unix sockets: name or number.");
ABSL_FLAG(std::string, backend, "host",
          "host: virtual devices on the CPU. sim: devices that run in an adversarial order in an "
          "address space of their own, for tests. cuda: logical devices of an NVIDIA GPU.");
ABSL_FLAG(int32_t, host_devices, 4,
          "Number of devices of host and sim; they may outnumber the cores.");
ABSL_FLAG(int32_t, gpu, 0, "With --backend=cuda: which one, as the driver counts them.");
ABSL_FLAG(int32_t, logical_devices_per_gpu, 4, "Number of devices of cuda; they share the GPU.");
ABSL_FLAG(bool, worker_processes, false,
          "A process of its own has the devices, so that what fails or hangs there does not take "
          "the daemon with it. Always so with --backend=cuda; not to be had with host, whose "
          "devices have the daemon's own memory.");
ABSL_FLAG(std::string, worker, "",
          "Program of the process that has the devices. Default: chorus-worker beside this one.");
ABSL_FLAG(chorus::server::DurationFlag, kill_timeout,
          {chorus::server::Defaults().node.kill_timeout},
          "For the process that has the devices to answer, and, beyond --exec_timeout, for what "
          "they do to end once it is aborted: then it is killed, and started again.");
ABSL_FLAG(uint64_t, sim_seed, 0, "Seed of --backend=sim; 0: another one at each start (printed).");
ABSL_FLAG(std::string, fault_script, "",
          "For tests: faults of the devices, as core/backend/fault/fault_script.h has them: "
          "\"collective lost device=1 skip=20\".");
ABSL_FLAG(bool, share_equal_work, chorus::server::Defaults().node.share_equal_work,
          "Do work that is the same on several ranks, such as an optimiser's update, once and keep "
          "its results once. Results are the same bits either way.");
ABSL_FLAG(chorus::server::MemoryFlag, memory_limit_bytes, {},
          "Of all tensors and arenas together; also 512MiB, 8GiB. auto: three quarters of the "
          "machine's memory or, where that is less, of what the daemon's cgroup may have; where "
          "that would leave the daemon itself less than its own may be, what this leaves, but at "
          "least a quarter. (Its own: 256 MiB and 64 KiB a session; more with more of --max_calls, "
          "--max_connections, --max_sessions or --max_streams.)");
ABSL_FLAG(int32_t, max_sessions, chorus::server::Defaults().node.max_sessions,
          "Sessions at a time.");
ABSL_FLAG(int32_t, max_worlds, chorus::server::Defaults().node.max_worlds, "Worlds at a time.");
ABSL_FLAG(int64_t, max_waits, chorus::server::Defaults().node.max_waits,
          "Calls at a time that wait for something.");
ABSL_FLAG(int64_t, max_downloads, chorus::server::Defaults().node.max_downloads,
          "Tensors at a time that clients read by gRPC; each takes up to 512 KiB.");
ABSL_FLAG(int64_t, max_session_downloads, chorus::server::Defaults().node.max_session_downloads,
          "Tensors at a time that one session's clients read by gRPC.");
ABSL_FLAG(chorus::server::DurationFlag, download_timeout,
          {chorus::server::Defaults().download_timeout},
          "For a client to take a part (256 KiB) of a tensor that it reads by gRPC; also, from a "
          "call's deadline on, to take any other answer.");
ABSL_FLAG(int32_t, max_groups_per_world, chorus::server::Defaults().node.sequencer.max_groups,
          "Groups of one world, in its life.");
ABSL_FLAG(int32_t, max_tensors, chorus::server::Defaults().node.max_tensors,
          "Tensors of one session.");
ABSL_FLAG(int32_t, max_graphs, chorus::server::Defaults().node.max_graphs,
          "Registered graphs of one session.");
ABSL_FLAG(int64_t, max_node_graphs, chorus::server::Defaults().node.max_node_graphs,
          "Registered graphs of all sessions together.");
ABSL_FLAG(int32_t, max_graph_nodes, chorus::server::Defaults().node.max_graph_nodes,
          "Nodes of one graph.");
ABSL_FLAG(int64_t, max_gang_size, chorus::server::Defaults().node.sequencer.max_gang_size,
          "Collectives and results, of all ranks, of runs that can only be launched together.");
ABSL_FLAG(int32_t, max_graph_collectives, chorus::server::Defaults().node.max_graph_collectives,
          "Collectives of one graph.");
ABSL_FLAG(int32_t, max_graph_inputs, chorus::server::Defaults().node.max_graph_inputs,
          "Inputs of one graph, and so of one run.");
ABSL_FLAG(int32_t, max_graph_outputs, chorus::server::Defaults().node.max_graph_outputs,
          "Outputs of one graph, and so results of one run.");
ABSL_FLAG(chorus::server::BytesFlag, max_graph_bytes,
          {chorus::server::Defaults().node.max_graph_bytes},
          "Of one graph in the daemon's memory, and on its way there.");
ABSL_FLAG(chorus::server::BytesFlag, max_plan_bytes,
          {chorus::server::Defaults().node.plan.max_bytes},
          "Of memory that planning one graph may take.");
ABSL_FLAG(int64_t, max_plan_dependences, chorus::server::Defaults().node.plan.max_dependences,
          "Of one graph: pairs of collectives of which one needs the other's result.");
ABSL_FLAG(int64_t, max_plan_steps, chorus::server::Defaults().node.plan.max_dependence_steps,
          "Of one graph: steps to find the pairs of --max_plan_dependences.");
ABSL_FLAG(int32_t, max_pending_runs, chorus::server::Defaults().node.max_pending_runs,
          "Runs of one session that have not ended.");
ABSL_FLAG(int32_t, max_staging_arenas, chorus::server::Defaults().node.max_staging_arenas,
          "Staging arenas of one session.");
ABSL_FLAG(chorus::server::BytesFlag, max_staging_bytes,
          {chorus::server::Defaults().node.max_staging_bytes},
          "Bytes of one session's staging arenas together.");
ABSL_FLAG(chorus::server::DurationFlag, lease, {chorus::server::Defaults().node.lease},
          "How long a session that is not attached lives without a call; 200 ms at least.");
ABSL_FLAG(chorus::server::DurationFlag, max_lease, {chorus::server::Defaults().node.max_lease},
          "The longest lease that a session may ask for.");
ABSL_FLAG(chorus::server::DurationFlag, detach_grace,
          {chorus::server::Defaults().node.detach_grace},
          "How long the votes of a session stand that has lost its channel.");
ABSL_FLAG(chorus::server::DurationFlag, join_timeout,
          {chorus::server::Defaults().node.join_timeout},
          "For all ranks to join a world, unless a rank says otherwise.");
ABSL_FLAG(chorus::server::DurationFlag, agree_timeout,
          {chorus::server::Defaults().node.sequencer.agree_timeout},
          "For all ranks to ask for an instance, from the first one, unless its world says "
          "otherwise.");
ABSL_FLAG(chorus::server::DurationFlag, exec_timeout,
          {chorus::server::Defaults().node.sequencer.exec_timeout},
          "For a launched gang to finish, unless its world says otherwise.");
ABSL_FLAG(chorus::server::DurationFlag, gap_timeout, {chorus::server::Defaults().node.gap_timeout},
          "For a command whose predecessor is missing.");
ABSL_FLAG(chorus::server::DurationFlag, max_wait, {chorus::server::Defaults().max_wait},
          "Of one call, whatever deadline its client has set; 10 s longer than --join_timeout at "
          "least.");
ABSL_FLAG(chorus::server::DurationFlag, read_timeout, {chorus::server::Defaults().read_timeout},
          "For the request of a call of gRPC to come whole, once the daemon reads it.");
ABSL_FLAG(chorus::server::DurationFlag, drain_timeout, {absl::Seconds(10)},
          "For what is under way when SIGTERM or SIGINT comes; the rest is aborted.");
ABSL_FLAG(chorus::server::DurationFlag, exit_timeout, {absl::Seconds(10)},
          "How long after that the daemon has to end: what hangs then is cut off, status 3.");
ABSL_FLAG(int32_t, max_connections, chorus::server::Defaults().max_connections,
          "Connections of each kind (attach, gRPC) at a time, 7/8 of them for one uid, or by TCP. "
          "Fewer where there are not eight descriptors for each.");
ABSL_FLAG(int32_t, max_streams, chorus::server::Defaults().max_streams,
          "Streams of commands by gRPC at a time, 7/8 of them of one uid, or by TCP; each takes up "
          "to 360 KiB.");
ABSL_FLAG(int32_t, max_calls, chorus::server::Defaults().max_calls,
          "Calls of gRPC under way at a time, 7/8 of them of one uid, or by TCP; each takes up to "
          "120 KiB.");
ABSL_FLAG(chorus::server::DurationFlag, idle_timeout, {chorus::server::Defaults().idle_timeout},
          "Of a connection of gRPC without a call, if its process is not attached; never shorter "
          "than --lease.");

namespace chorus::server {
namespace {

// `value`; where that is not positive `refusal` says so, of the first.
template <typename Int>
Int Positive(const char* flag, Int value, absl::Status* refusal) {
  if (value <= 0 && refusal->ok()) {
    *refusal = Malformed(absl::StrCat("--", flag, ": expected a positive number, got ", value));
  }
  return value;
}
// Those that are parsed here are.
absl::Duration Positive(const char*, DurationFlag flag, absl::Status*) { return flag.value; }
int64_t Positive(const char*, BytesFlag flag, absl::Status*) { return flag.value; }

absl::StatusOr<DaemonOptions> DaemonOptionsFromFlags() {
  DaemonOptions options;
  absl::Status refusal;
  for (const std::string& text : absl::GetFlag(FLAGS_listen).addresses) {
    options.listen.push_back(*ParseListenAddress(text));  // checked when the flag was parsed
  }
  if (options.listen.empty()) {
    ListenAddress address;
    address.path = DefaultSocketPath();
    options.listen.push_back(address);
  }
  options.insecure_loopback = absl::GetFlag(FLAGS_insecure_loopback);
  options.access.mode = absl::GetFlag(FLAGS_socket_mode).mode;
  options.access.group = absl::GetFlag(FLAGS_socket_group);
  options.read_timeout = absl::GetFlag(FLAGS_read_timeout).value;
  options.download_timeout = absl::GetFlag(FLAGS_download_timeout).value;
  options.max_connections =
      Positive("max_connections", absl::GetFlag(FLAGS_max_connections), &refusal);
  options.max_calls = Positive("max_calls", absl::GetFlag(FLAGS_max_calls), &refusal);
  options.max_streams = Positive("max_streams", absl::GetFlag(FLAGS_max_streams), &refusal);
  options.idle_timeout = absl::GetFlag(FLAGS_idle_timeout).value;
  node::NodeOptions& node = options.node;
#define CHORUS_NODE_FLAG(flag, field) \
  node.field = Positive(#flag, absl::GetFlag(FLAGS_##flag), &refusal)
  CHORUS_NODE_FLAG(max_sessions, max_sessions);
  CHORUS_NODE_FLAG(max_worlds, max_worlds);
  CHORUS_NODE_FLAG(max_waits, max_waits);
  CHORUS_NODE_FLAG(max_downloads, max_downloads);
  CHORUS_NODE_FLAG(max_session_downloads, max_session_downloads);
  CHORUS_NODE_FLAG(max_groups_per_world, sequencer.max_groups);
  CHORUS_NODE_FLAG(max_tensors, max_tensors);
  CHORUS_NODE_FLAG(max_graphs, max_graphs);
  CHORUS_NODE_FLAG(max_graph_nodes, max_graph_nodes);
  CHORUS_NODE_FLAG(max_graph_collectives, max_graph_collectives);
  CHORUS_NODE_FLAG(max_graph_inputs, max_graph_inputs);
  CHORUS_NODE_FLAG(max_graph_outputs, max_graph_outputs);
  CHORUS_NODE_FLAG(max_gang_size, sequencer.max_gang_size);
  CHORUS_NODE_FLAG(max_node_graphs, max_node_graphs);
  CHORUS_NODE_FLAG(max_graph_bytes, max_graph_bytes);
  CHORUS_NODE_FLAG(max_plan_bytes, plan.max_bytes);
  CHORUS_NODE_FLAG(max_plan_dependences, plan.max_dependences);
  CHORUS_NODE_FLAG(max_plan_steps, plan.max_dependence_steps);
  CHORUS_NODE_FLAG(max_pending_runs, max_pending_runs);
  CHORUS_NODE_FLAG(max_staging_arenas, max_staging_arenas);
  CHORUS_NODE_FLAG(max_staging_bytes, max_staging_bytes);
  CHORUS_NODE_FLAG(lease, lease);
  node.max_lease = std::max(absl::GetFlag(FLAGS_max_lease).value, node.lease);
  CHORUS_NODE_FLAG(detach_grace, detach_grace);
  CHORUS_NODE_FLAG(join_timeout, join_timeout);
  // A call that waits for all ranks is to hear who is missing.
  options.max_wait =
      std::max(absl::GetFlag(FLAGS_max_wait).value, node.join_timeout + absl::Seconds(10));
  CHORUS_NODE_FLAG(gap_timeout, gap_timeout);
  CHORUS_NODE_FLAG(agree_timeout, sequencer.agree_timeout);
  CHORUS_NODE_FLAG(exec_timeout, sequencer.exec_timeout);
  CHORUS_NODE_FLAG(kill_timeout, kill_timeout);
#undef CHORUS_NODE_FLAG
  node.share_equal_work = absl::GetFlag(FLAGS_share_equal_work);
  CHORUS_RETURN_IF_ERROR(refusal);
  return options;
}

MemoryLimit MemoryLimitFromFlags() {
  const absl::optional<BytesFlag> bytes = absl::GetFlag(FLAGS_memory_limit_bytes).bytes;
  if (bytes.has_value()) return MemoryLimit{bytes->value, "--memory_limit_bytes", ""};
  return DefaultMemoryLimit(
      OwnBytes(absl::GetFlag(FLAGS_max_connections), absl::GetFlag(FLAGS_max_calls),
               absl::GetFlag(FLAGS_max_streams), absl::GetFlag(FLAGS_max_sessions)));
}

}  // namespace

absl::StatusOr<Flags> ReadFlags() {
  Flags flags;
  CHORUS_ASSIGN_OR_RETURN(flags.daemon, DaemonOptionsFromFlags());
  flags.memory = MemoryLimitFromFlags();
  flags.daemon.node.memory_limit_bytes = flags.memory.bytes;
  flags.backend = absl::GetFlag(FLAGS_backend);
  flags.host_devices = absl::GetFlag(FLAGS_host_devices);
  flags.gpu = absl::GetFlag(FLAGS_gpu);
  flags.logical_devices_per_gpu = absl::GetFlag(FLAGS_logical_devices_per_gpu);
  flags.worker_processes = absl::GetFlag(FLAGS_worker_processes);
  flags.worker = absl::GetFlag(FLAGS_worker);
  flags.sim_seed = absl::GetFlag(FLAGS_sim_seed);
  flags.fault_script = absl::GetFlag(FLAGS_fault_script);
  flags.drain_timeout = absl::GetFlag(FLAGS_drain_timeout).value;
  flags.exit_timeout = absl::GetFlag(FLAGS_exit_timeout).value;
  return flags;
}

bool IsFileOfFlags(absl::string_view file) { return absl::EndsWith(file, "server/flags.cc"); }

}  // namespace chorus::server
