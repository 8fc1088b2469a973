#include "tests/conformance/direct_cluster.h"

#include <iostream>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "client/internal/access.h"
#include "client/internal/session_core.h"
#include "core/base/mutex.h"
#include "core/base/thread_pool.h"
#include "core/node/node_loop.h"
#include "core/runtime/devices.h"
#include "core/worker/worker_devices.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/direct_link.h"

namespace chorus {
namespace conformance {
namespace {

// Pids of the trainers that the sessions stand for: no process has such a one.
constexpr int kFirstPid = 1 << 23;

class Direct : public Cluster {
 public:
  Direct(const std::string& name, const ClusterOptions& options)
      : backend_(MakeBackend(name, options.devices, options.seed, &pool_)),
        host_addressable_(backend_->host_addressable()),
        loop_(OptionsOf(name, options), DevicesOf(backend_.get())) {}
  Direct(const std::string& name, const ClusterOptions& options,
         std::unique_ptr<worker::WorkerDevices> devices)
      : host_addressable_(devices->info().host_addressable),
        worker_(devices.get()),
        loop_(OptionsOf(name, options), std::move(devices)) {}

  absl::StatusOr<Session> Open(const std::vector<int>& devices) override {
    SessionId id;
    MutexLock lock(&mutex_);
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<internal::Link> link,
                            OpenDirectLink(&loop_, devices, next_pid_++, host_addressable_, &id));
    auto core = internal::SessionCore::Make(std::move(link), absl::FromChrono(kWaitTimeout));
    sessions_[core.get()] = id;
    return internal::SessionFrom(std::move(core));
  }

  void Kill(const Session& session) override {
    MutexLock lock(&mutex_);
    loop_.PostOwn([id = sessions_[internal::SessionOf(session).get()]](
                      node::LocalNode& node, absl::Time now) { node.SessionDied(id, now); });
  }

  ClusterCounts Counts() override {
    ClusterCounts counts;
    absl::Notification done;
    loop_.PostOwn([&](node::LocalNode& node, absl::Time) {
      const node::NodeStats stats = node.Stats("");
      // What its clients still map is theirs to give back.
      counts.memory_in_use = stats.memory_used_bytes - stats.client_held_bytes;
      counts.shared_kernels = stats.shared_kernels;
      counts.shared_bytes = stats.paths.shared_bytes;
      counts.donated_bytes = stats.paths.donated_bytes;
      counts.gradients_given_up = stats.gradients_given_up;
      const auto events = node.Flight("", 1000);
      for (const node::FlightEvent& event : *events) {
        if (event.kind != node::FlightKind::kGradientGivenUp) continue;
        const absl::StatusOr<Error> error = node.FindError(event.error, "");
        counts.given_up.push_back(error.ok() ? error->message : "");
      }
      done.Notify();
    });
    // A loop that does not answer cannot be left either: `done` is on this stack.
    done.WaitForNotification();
    return counts;
  }

  pid_t worker_pid() override { return worker_ == nullptr ? -1 : worker_->pid(); }

 private:
  static node::NodeOptions OptionsOf(const std::string& backend, const ClusterOptions& cluster) {
    node::NodeOptions options;
    if (backend != "host") options.DoLater();  // both ways are gone
    options.share_equal_work = cluster.share_equal_work;
    options.sequencer.exec_timeout = cluster.exec_timeout;
    options.kill_timeout = cluster.kill_timeout;
    return options;
  }

  ThreadPool pool_{2};
  const std::unique_ptr<Backend> backend_;  // null: a worker has it
  const bool host_addressable_;
  const worker::WorkerDevices* const worker_ = nullptr;  // the loop's
  Mutex mutex_;
  int next_pid_ ABSL_GUARDED_BY(mutex_) = kFirstPid;
  std::map<const internal::SessionCore*, SessionId> sessions_ ABSL_GUARDED_BY(mutex_);
  node::NodeLoop loop_;
};

}  // namespace

OpenCluster DirectCluster(const std::string& backend) {
  return [backend](const ClusterOptions& options) -> absl::StatusOr<std::unique_ptr<Cluster>> {
    return std::unique_ptr<Cluster>(std::make_unique<Direct>(backend, options));
  };
}

OpenCluster WorkerCluster(const std::string& backend) {
  return [backend](const ClusterOptions& options) -> absl::StatusOr<std::unique_ptr<Cluster>> {
    worker::WorkerOptions worker;
    worker.command = {"tests/conformance/worker_program", backend, absl::StrCat(options.devices),
                      absl::StrCat(options.seed), options.fault_script};
    worker.log = [](const std::string& line) { std::cerr << line << std::endl; };
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<worker::WorkerDevices> devices,
                            worker::WorkerDevices::Start(std::move(worker)));
    return std::unique_ptr<Cluster>(std::make_unique<Direct>(backend, options, std::move(devices)));
  };
}

}  // namespace conformance
}  // namespace chorus
