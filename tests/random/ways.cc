#include "tests/random/ways.h"

#include <fcntl.h>
#include <unistd.h>

#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "benchmarks/daemon.h"
#include "benchmarks/process.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "tests/conformance/daemon_cluster.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/messages.h"
#include "tests/random/generate.h"

namespace chorus {
namespace random_programs {

using conformance::ReadMessage;
using conformance::WriteMessage;

namespace {

std::vector<Way> MakeWays() {
  std::vector<Way> ways;
  const auto add = [&ways](const char* name, Reach reach, const char* backend, bool shares,
                           Mode mode) {
    Way way;
    way.name = name;
    way.reach = reach;
    way.backend = backend;
    way.shares = shares;
    way.host_bits = way.backend != "cuda";
    way.mode = mode;
    ways.push_back(std::move(way));
  };
  Mode eager;
  Mode waits;
  waits.waits = true;
  Mode shuffled;
  shuffled.shuffled = true;
  Mode coalesced;
  coalesced.coalesce = true;
  Mode compiled;
  compiled.compiled = true;
  Mode all;
  all.compiled = all.coalesce = all.shuffled = true;
  Mode donated = compiled;
  donated.donate = true;
  Mode donated_all = all;
  donated_all.donate = true;
  Mode mixed = coalesced;
  mixed.shuffled = true;
  Mode by_trainer = donated;
  by_trainer.by_trainer = true;
  Mode by_trainer_shuffled = by_trainer;
  by_trainer_shuffled.shuffled = true;
  const char* const host = "host";
  const char* const sim = "sim";
  const char* const sim_shared = "sim_shared";
  const char* const sim_pairs = "sim_pairs";
  const char* const cuda = "cuda";
  add("direct_host_eager", Reach::kDirect, host, true, eager);
  add("direct_host_eager_waits", Reach::kDirect, host, true, waits);
  add("direct_host_eager_shuffled", Reach::kDirect, host, true, shuffled);
  add("direct_host_eager_coalesced", Reach::kDirect, host, true, coalesced);
  add("direct_host_compiled", Reach::kDirect, host, true, compiled);
  add("direct_host_compiled_donated", Reach::kDirect, host, true, donated);
  add("direct_host_compiled_all", Reach::kDirect, host, true, all);
  add("direct_host_by_trainer", Reach::kDirect, host, true, by_trainer);
  add("direct_sim_by_trainer", Reach::kDirect, sim, true, by_trainer_shuffled);
  add("direct_unshared_eager", Reach::kDirect, host, false, mixed);
  add("direct_unshared_compiled", Reach::kDirect, host, false, donated_all);
  add("direct_sim_eager", Reach::kDirect, sim, true, eager);
  add("direct_sim_eager_mixed", Reach::kDirect, sim, true, mixed);
  add("direct_sim_compiled", Reach::kDirect, sim, true, donated_all);
  add("direct_sim_shared_eager", Reach::kDirect, sim_shared, true, mixed);
  add("direct_sim_shared_compiled", Reach::kDirect, sim_shared, true, donated_all);
  add("direct_sim_pairs_eager", Reach::kDirect, sim_pairs, true, eager);
  add("direct_sim_pairs_compiled", Reach::kDirect, sim_pairs, true, donated);
  add("direct_cuda_eager", Reach::kDirect, cuda, true, eager);
  add("direct_cuda_eager_mixed", Reach::kDirect, cuda, true, mixed);
  add("direct_cuda_compiled", Reach::kDirect, cuda, true, donated);
  add("direct_cuda_compiled_all", Reach::kDirect, cuda, true, donated_all);
  add("ring_host_eager", Reach::kRing, host, true, mixed);
  add("ring_host_compiled", Reach::kRing, host, true, donated);
  add("ring_sim_compiled", Reach::kRing, sim, true, all);
  add("ring_host_by_trainer", Reach::kRing, host, true, by_trainer);
  add("stream_host_eager", Reach::kStream, host, true, eager);
  add("stream_sim_compiled", Reach::kStream, sim, true, donated_all);
  add("unary_host_eager", Reach::kUnary, host, true, mixed);
  add("unary_host_compiled", Reach::kUnary, host, true, compiled);
  add("processes_host_eager", Reach::kProcesses, host, true, shuffled);
  add("processes_host_compiled", Reach::kProcesses, host, true, donated);
  return ways;
}

// What is done with a deadline, by threads that may be left behind.
class Gathering {
 public:
  explicit Gathering(int parts) : left_(parts) {}

  void Give(const Outcomes& outcomes, const std::vector<World>& worlds) {
    MutexLock lock(&mutex_);
    worlds_.insert(worlds_.end(), worlds.begin(), worlds.end());
    outcomes_.insert(outcomes.begin(), outcomes.end());
    if (--left_ == 0) changed_.SignalAll();
  }
  // False: not all have come.
  bool Wait(absl::Duration patience) {
    const absl::Time deadline = absl::Now() + patience;
    MutexLock lock(&mutex_);
    while (left_ > 0) {
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) return false;
      changed_.WaitFor(&mutex_, left);
    }
    return true;
  }
  Outcomes Take() {
    MutexLock lock(&mutex_);
    for (const World& world : worlds_) world.Leave().IgnoreError();
    worlds_.clear();
    return outcomes_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int left_ ABSL_GUARDED_BY(mutex_);
  Outcomes outcomes_ ABSL_GUARDED_BY(mutex_);
  std::vector<World> worlds_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

const std::vector<Way>& AllWays() {
  static const std::vector<Way>& ways = *new std::vector<Way>(MakeWays());
  return ways;
}

std::vector<Way> WaysNamed(const std::string& part) {
  std::vector<Way> ways;
  for (const Way& way : AllWays()) {
    if (ways.empty() || way.name.find(part) != std::string::npos) ways.push_back(way);
  }
  return ways;
}

// Somewhere programs run.
class Runner::Deployment {
 public:
  virtual ~Deployment() = default;
  virtual absl::StatusOr<Outcomes> Run(const Program& program, const Mode& mode,
                                       const std::string& world, Timeout patience) = 0;
};

// Trainers that are threads of this process.
class Runner::Threads : public Runner::Deployment {
 public:
  static absl::StatusOr<std::shared_ptr<Deployment>> Make(const Way& way, uint64_t seed) {
    conformance::ClusterOptions options;
    options.devices = kMostRanks;
    options.seed = seed;
    options.share_equal_work = way.shares;
    const conformance::OpenCluster open =
        way.reach == Reach::kDirect ? conformance::DirectCluster(way.backend)
        : way.reach == Reach::kRing
            ? conformance::DaemonCluster(way.backend, Transport::kRing, conformance::Wire::kUnix)
        : way.reach == Reach::kStream
            ? conformance::DaemonCluster(way.backend, Transport::kStream, conformance::Wire::kUnix)
            : conformance::DaemonCluster(way.backend, Transport::kUnary, conformance::Wire::kTcp);
    auto deployment = std::make_shared<Threads>();
    CHORUS_ASSIGN_OR_RETURN(deployment->cluster_, open(options));
    return std::shared_ptr<Deployment>(deployment);
  }

  absl::StatusOr<Outcomes> Run(const Program& program, const Mode& mode, const std::string& world,
                               Timeout patience) override {
    std::vector<Session> sessions;
    for (int t = 0; t < program.trainers(); ++t) {
      Session& session = sessions_[program.RanksOf(t)];
      if (!session.is_open()) {
        CHORUS_ASSIGN_OR_RETURN(session, cluster_->Open(program.RanksOf(t)));
      }
      sessions.push_back(session);
    }
    // Shared with trainers that hang.
    const auto shared = std::make_shared<const Program>(program);
    const auto gathering = std::make_shared<Gathering>(program.trainers());
    std::vector<std::thread> threads;
    for (int t = 0; t < program.trainers(); ++t) {
      Part part;
      part.session = sessions[static_cast<size_t>(t)];
      part.world = world;
      part.mode = mode;
      part.patience = patience;
      threads.emplace_back([shared, gathering, t, part = std::move(part)]() mutable {
        std::vector<World> worlds;
        const Outcomes outcomes = RunPart(*shared, t, part, &worlds);
        part.session = Session();
        gathering->Give(outcomes, worlds);
      });
    }
    if (!gathering->Wait(8 * absl::FromChrono(patience) + absl::Seconds(120))) {
      for (std::thread& thread : threads) thread.detach();
      // They use it for good.
      cluster_.release();  // NOLINT(bugprone-unused-return-value)
      for (auto& session : sessions_) new Session(session.second);
      return absl::DeadlineExceededError("a trainer hangs for good");
    }
    for (std::thread& thread : threads) thread.join();
    return gathering->Take();
  }

 private:
  std::unique_ptr<conformance::Cluster> cluster_;
  std::map<std::vector<int>, Session> sessions_;  // by devices
};

namespace {

// --- Processes ----------------------------------------------------------------------------------

std::string OutcomesText(const Outcomes& outcomes) {
  std::ostringstream out;
  for (const auto& [v, outcome] : outcomes) {
    out << v << " " << static_cast<int>(outcome.status.code()) << " "
        << absl::StrCat(
               "x", absl::BytesToHexString(outcome.status.ok() ? absl::string_view(outcome.bytes)
                                                               : outcome.status.message()))
        << "\n";
  }
  return out.str();
}

// INTERNAL: that is no such text.
absl::StatusOr<Outcomes> OutcomesOf(const std::string& text) {
  Outcomes outcomes;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    int v = 0;
    int code = 0;
    if (words.size() != 3 || !absl::SimpleAtoi(words[0], &v) ||
        !absl::SimpleAtoi(words[1], &code) || words[2].empty() || words[2].size() % 2 == 0) {
      return absl::InternalError(absl::StrCat("a trainer's process says \"", line, "\""));
    }
    Outcome& outcome = outcomes[v];
    const std::string bytes = absl::HexStringToBytes(words[2].substr(1));
    if (code == 0) {
      outcome.bytes = bytes;
    } else {
      outcome.status = absl::Status(static_cast<absl::StatusCode>(code), bytes);
    }
  }
  return outcomes;
}

struct Child {
  bench::Process process;
  int to = -1;
  int from = -1;
  ~Child() {
    if (to >= 0) close(to);
    if (from >= 0) close(from);
  }
};

}  // namespace

// Trainers that are processes, over the ring to a chorusd of their own.
class Runner::Processes : public Runner::Deployment {
 public:
  static absl::StatusOr<std::shared_ptr<Deployment>> Make(const RunnerOptions& options) {
    if (options.daemon.empty() || options.trainer.empty()) {
      return absl::FailedPreconditionError("processes: no program for them was given");
    }
    auto deployment = std::make_shared<Processes>();
    CHORUS_ASSIGN_OR_RETURN(deployment->daemon_,
                            bench::Daemon::Start(options.daemon, deployment->scratch_,
                                                 {absl::StrCat("--host_devices=", kMostRanks)}));
    deployment->trainer_ = options.trainer;
    return std::shared_ptr<Deployment>(deployment);
  }

  absl::StatusOr<Outcomes> Run(const Program& program, const Mode& mode, const std::string& world,
                               Timeout patience) override {
    const int64_t patience_ms = absl::ToInt64Milliseconds(absl::FromChrono(patience));
    for (int t = 0; t < program.trainers(); ++t) {
      if (t == static_cast<int>(children_.size())) CHORUS_RETURN_IF_ERROR(Start());
      const std::string task =
          absl::StrCat(daemon_->address(), " ", world, " ", t, " ", patience_ms, " ", mode.compiled,
                       " ", mode.donate, " ", mode.coalesce, " ", mode.shuffled, " ", mode.waits,
                       " ", mode.by_trainer, "\n", ToText(program));
      if (!WriteMessage(children_[static_cast<size_t>(t)]->to, task)) {
        return absl::UnavailableError("a trainer's process has ended");
      }
    }
    const absl::Time deadline = absl::Now() + 8 * absl::FromChrono(patience) + absl::Seconds(120);
    Outcomes outcomes;
    for (int t = 0; t < program.trainers(); ++t) {
      std::string text;
      if (!ReadMessage(children_[static_cast<size_t>(t)]->from, deadline, &text)) {
        return absl::DeadlineExceededError("a trainer's process hangs or has ended");
      }
      CHORUS_ASSIGN_OR_RETURN(const Outcomes mine, OutcomesOf(text));
      outcomes.insert(mine.begin(), mine.end());
    }
    return outcomes;
  }

 private:
  absl::Status Start() {
    int down[2];
    int up[2];
    if (pipe2(down, O_CLOEXEC) != 0 || pipe2(up, O_CLOEXEC) != 0) {
      return absl::InternalError("pipe");
    }
    auto child = std::make_unique<Child>();
    child->to = down[1];
    child->from = up[0];
    bench::Process::Options options;
    options.keep_fds = {down[0], up[1]};
    absl::StatusOr<bench::Process> process =
        bench::Process::Start({trainer_, absl::StrCat("--serve=", down[0], ",", up[1])}, options);
    close(down[0]);
    close(up[1]);
    if (!process.ok()) return process.status();
    child->process = *std::move(process);
    children_.push_back(std::move(child));
    return absl::OkStatus();
  }

  bench::ScratchDirectory scratch_;
  std::unique_ptr<bench::Daemon> daemon_;
  std::string trainer_;
  std::vector<std::unique_ptr<Child>> children_;  // by trainer
};

int Serve(int in_fd, int out_fd) {
  Session session;
  std::vector<int> devices;
  std::string task;
  std::vector<World> worlds;  // of the last task
  while (ReadMessage(in_fd, absl::InfiniteFuture(), &task)) {
    for (const World& world : worlds) world.Leave().IgnoreError();
    worlds.clear();
    const size_t end = task.find('\n');
    std::istringstream head(task.substr(0, end));
    std::string address;
    Part part;
    int trainer = 0;
    int64_t patience_ms = 0;
    head >> address >> part.world >> trainer >> patience_ms >> part.mode.compiled >>
        part.mode.donate >> part.mode.coalesce >> part.mode.shuffled >> part.mode.waits >>
        part.mode.by_trainer;
    part.patience = std::chrono::milliseconds(patience_ms);
    const absl::StatusOr<Program> program = FromText(task.substr(end + 1));
    if (!program.ok()) return 2;
    if (!session.is_open() || devices != program->RanksOf(trainer)) {
      if (session.is_open()) session.Close().IgnoreError();
      devices = program->RanksOf(trainer);
      SessionOptions options;
      options.address = address;
      options.transport = Transport::kRing;
      options.devices = devices;
      options.open_timeout = 2 * part.patience;
      options.wait_timeout = 4 * part.patience;
      options.label = "random programs";
      absl::StatusOr<Session> opened = Session::Open(options);
      if (!opened.ok()) return 3;
      session = *std::move(opened);
    }
    part.session = session;
    if (!WriteMessage(out_fd, OutcomesText(RunPart(*program, trainer, part, &worlds)))) return 4;
  }
  return 0;
}

Runner::Runner(RunnerOptions options) : options_(std::move(options)) {}
Runner::~Runner() = default;

Outcomes Runner::Run(const Program& program, const Way& way) {
  const std::string key =
      absl::StrCat(static_cast<int>(way.reach), " ", way.backend, " ", way.shares);
  const std::string world = absl::StrCat("random-", getpid(), "-", ++worlds_);
  const auto all_fail = [&program](const absl::Status& status) {
    Outcomes outcomes;
    for (int v = 0; v < static_cast<int>(program.values.size()); ++v) {
      const Value& value = program.value(v);
      if (value.observed && !value.absent) outcomes[v].status = status;
    }
    return outcomes;
  };
  std::shared_ptr<Deployment>& deployment = deployments_[key];
  if (deployment == nullptr) {
    absl::StatusOr<std::shared_ptr<Deployment>> made = way.reach == Reach::kProcesses
                                                           ? Processes::Make(options_)
                                                           : Threads::Make(way, options_.seed);
    if (!made.ok()) return all_fail(made.status());
    deployment = *std::move(made);
  }
  absl::StatusOr<Outcomes> outcomes = deployment->Run(program, way.mode, world, options_.patience);
  if (!outcomes.ok()) {
    deployment.reset();
    return all_fail(outcomes.status());
  }
  for (const auto& [v, outcome] : *outcomes) {
    if (!outcome.status.ok()) {
      // What an error leaves there is not the next program's business.
      deployment.reset();
      break;
    }
  }
  return *std::move(outcomes);
}

}  // namespace random_programs
}  // namespace chorus
