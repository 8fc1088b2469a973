// chorusd: the daemon.

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "core/backend/backends.h"
#include "core/backend/fault/fault_backend.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/shared_file.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/devices.h"
#include "core/worker/worker_devices.h"
#include "glog/logging.h"
#include "server/daemon.h"
#include "server/flags.h"
#include "server/heap.h"
#include "server/listen_address.h"
#include "server/log_writer.h"
#include "server/peers.h"
#include "server/service/context.h"
#include "server/watchdog.h"

namespace chorus::server {
namespace {

// The backend that only a worker has.
constexpr absl::string_view kCuda = "cuda";

// An attached client takes 6 descriptors, a connection that is counted up to 8.
void RaiseDescriptorLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, kMostDescriptors);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    LOG(WARNING) << "only " << limit.rlim_cur << " descriptors: " << strerror(errno);
  }
}

absl::StatusOr<std::unique_ptr<Backend>> MakeSoundBackend(const Flags& flags, ThreadPool* pool) {
  BackendOptions options;
  options.devices = flags.host_devices;
  options.pool = pool;
  options.make_kernel = MakeHostKernel;
  options.seed = flags.sim_seed;
  absl::StatusOr<std::unique_ptr<Backend>> backend = OpenBackend(flags.backend, options);
  if (backend.ok()) return backend;
  return Malformed(absl::StrCat("--backend=", flags.backend, " --host_devices=", options.devices,
                                ": ", ErrorOf(backend.status()).message));
}

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const Flags& flags, ThreadPool* pool) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Backend> sound, MakeSoundBackend(flags, pool));
  absl::StatusOr<std::unique_ptr<Backend>> backend =
      WithFaults(std::move(sound), flags.fault_script,
                 [](const std::string& fault) { LOG(WARNING) << fault; });
  if (backend.ok()) return backend;
  return Malformed(absl::StrCat("--fault_script: ", backend.status().message()));
}

bool HasWorker(const Flags& flags) { return flags.worker_processes || flags.backend == kCuda; }

absl::Status CheckBackend(const std::string& name) {
  const absl::Span<const absl::string_view> names = BackendNames();
  if (name == kCuda || std::find(names.begin(), names.end(), name) != names.end()) {
    return absl::OkStatus();
  }
  return Malformed(absl::StrCat("--backend: expected ", absl::StrJoin(names, ", "), " or ", kCuda,
                                ", got \"", Printable(name), "\""));
}

// What the process ends with whose flags are refused. Not to standard error, which may be a full
// pipe: the log's end waits for that a second only.
int Refused(const absl::Status& why) {
  LOG(ERROR) << "chorusd: " << ErrorOf(why).message;
  return 2;
}

std::string WorkerProgram(const std::string& given) {
  if (!given.empty()) return given;
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/exe", ignored)
      .replace_filename("chorus-worker")
      .string();
}

absl::StatusOr<std::unique_ptr<Devices>> StartWorker(const Flags& flags) {
  worker::WorkerOptions options;
  options.command = {WorkerProgram(flags.worker), absl::StrCat("--backend=", flags.backend),
                     absl::StrCat("--seed=", flags.sim_seed),
                     absl::StrCat("--fault_script=", flags.fault_script)};
  if (flags.backend == kCuda) {
    options.command.push_back(absl::StrCat("--gpu=", flags.gpu));
    options.command.push_back(absl::StrCat("--devices=", flags.logical_devices_per_gpu));
  } else {
    options.command.push_back(absl::StrCat("--devices=", flags.host_devices));
  }
  options.kill_timeout = flags.daemon.node.kill_timeout;
  options.log = [](const std::string& line) { LOG(ERROR) << line; };
  return worker::WorkerDevices::Start(std::move(options));
}

std::string StartLine(const Daemon& daemon, const DevicesInfo& devices) {
  std::vector<std::string> addresses;
  for (const ListenAddress& address : daemon.addresses()) addresses.push_back(address.ToString());
  return absl::StrCat(kDaemonVersion, " serves ", devices.count(), " ", devices.backend,
                      " devices on ", absl::StrJoin(addresses, ", "), " (incarnation ",
                      daemon.incarnation(), ")");
}

// A line on standard output, which may be a full pipe as well: nobody waits for it.
void Print(const std::string& line) {
  std::thread([text = absl::StrCat(line, "\n")] {
    // Not by a stream, which would be locked when the process ends.
    if (write(STDOUT_FILENO, text.data(), text.size()) < 0) {
      LOG(WARNING) << "standard output: " << strerror(errno);
    }
  }).detach();
}

int Main() {
  BoundHeaps();
  // Every thread inherits the mask, so the signals come to sigtimedwait alone.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  InstallWatchdog();

  LogWriter log(STDERR_FILENO);
  absl::StatusOr<Flags> read = ReadFlags();
  if (!read.ok()) return Refused(read.status());
  Flags& flags = *read;
  flags.daemon.write_line = [&log](google::LogSeverity severity, absl::string_view tenant,
                                   absl::string_view line) { log.Say(severity, tenant, line); };
  LOG(INFO) << "memory limit: " << flags.memory.bytes << " bytes: " << flags.memory.source;
  if (!flags.memory.warning.empty()) LOG(WARNING) << flags.memory.warning;
  RaiseDescriptorLimit();
  if (!KernelGivesLeases()) {
    LOG(WARNING)
        << "the kernel gives no leases on files of memory (" << strerror(errno)
        << "; sysctl fs.leases-enable): memory that clients have had stays charged to them "
           "for good, for nobody can tell whether they hold it";
  }
  auto pool = std::make_unique<ThreadPool>(UsableCpus());
  const absl::Status checked = CheckBackend(flags.backend);
  if (!checked.ok()) return Refused(checked);
  std::unique_ptr<Backend> backend;  // none: a worker has it
  std::unique_ptr<Devices> devices;
  if (HasWorker(flags)) {
    auto started = StartWorker(flags);
    if (!started.ok()) {
      return Refused(Malformed(
          absl::StrCat("--backend=", flags.backend, ": ", ErrorOf(started.status()).message)));
    }
    devices = *std::move(started);
  } else {
    absl::StatusOr<std::unique_ptr<Backend>> backend_or = MakeBackend(flags, pool.get());
    if (!backend_or.ok()) return Refused(backend_or.status());
    backend = *std::move(backend_or);
    devices = DevicesOf(backend.get());
  }
  // What the GPU's driver keeps in the host's memory nobody is charged for.
  flags.daemon.guards_memory = flags.backend != kCuda;
  const DevicesInfo info = devices->info();
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(flags.daemon, std::move(devices));
  if (!daemon.ok()) {
    LOG(ERROR) << daemon.status().message();
    return 1;
  }
  const std::string line = StartLine(**daemon, info);
  LOG(INFO) << line;
  Print(line);

  HeapTrimmer heaps;
  int signal_number = 0;
  for (;;) {
    const timespec turn = absl::ToTimespec(heaps.Turn());
    signal_number = sigtimedwait(&signals, nullptr, &turn);
    if (signal_number < 0) continue;
    if (signal_number != SIGHUP) break;
    // The terminal that it was started from is gone, or somebody expects that it reads its flags
    // again: neither ends the jobs of this node.
    LOG(INFO) << strsignal(signal_number) << ": ignored; SIGTERM ends this daemon";
  }
  const absl::Duration patience = flags.drain_timeout;
  EndProcessWithin(patience + flags.exit_timeout);
  NowAt("ending the calls of clients");
  LOG(INFO) << strsignal(signal_number) << ": draining for at most "
            << absl::FormatDuration(patience);
  (*daemon)->Drain(SteadyNow() + patience);
  LOG(INFO) << "serves nobody any more";
  NowAt("ending sessions and the work that devices have");
  daemon->reset();
  NowAt("ending the devices");
  backend.reset();
  NowAt("ending the pool's threads");
  pool.reset();
  LOG(INFO) << "stopped";
  NowAt("the end");
  return 0;
}

}  // namespace
}  // namespace chorus::server

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "The Chorus daemon: owns this node's devices and runs collective graphs for its clients.\n"
      "It logs to standard error and stops on SIGTERM.");
  absl::FlagsUsageConfig config;
  config.contains_helpshort_flags = chorus::server::IsFileOfFlags;
  config.contains_help_flags = chorus::server::IsFileOfFlags;
  config.contains_helppackage_flags = chorus::server::IsFileOfFlags;
  config.version_string = [] { return absl::StrCat(chorus::server::kDaemonVersion, "\n"); };
  absl::SetFlagsUsageConfig(config);
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  if (rest.size() > 1) {
    std::cerr << "chorusd: expected flags only, got \"" << rest[1] << "\"\n";
    return 2;
  }
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  return chorus::server::Main();
}
