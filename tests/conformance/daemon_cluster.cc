#include "tests/conformance/daemon_cluster.h"

#include <stdlib.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/runtime/devices.h"
#include "server/daemon.h"
#include "tests/conformance/backends.h"

namespace chorus {
namespace conformance {
namespace {

class DaemonInProcess : public Cluster {
 public:
  static absl::StatusOr<std::unique_ptr<Cluster>> Start(const std::string& name,
                                                        Transport transport, Wire wire,
                                                        const ClusterOptions& options) {
    std::unique_ptr<DaemonInProcess> cluster(new DaemonInProcess(name, transport, options));
    // Short: the path of a Unix socket has at most 107 characters.
    char directory[] = "/tmp/chorus_XXXXXX";
    if (::mkdtemp(directory) == nullptr) {
      return MakeError(Reason::kInternal, "mkdtemp");
    }
    cluster->directory_ = directory;
    server::DaemonOptions daemon;
    daemon.node.share_equal_work = options.share_equal_work;
    if (options.memory_limit_bytes > 0) {
      daemon.node.memory_limit_bytes = options.memory_limit_bytes;
    }
    const std::string address =
        wire == Wire::kUnix ? "unix:" + cluster->directory_ + "/s" : "127.0.0.1:0";
    CHORUS_ASSIGN_OR_RETURN(const server::ListenAddress listen,
                            server::ParseListenAddress(address));
    daemon.listen = {listen};
    daemon.insecure_loopback = wire == Wire::kTcp;
    CHORUS_ASSIGN_OR_RETURN(cluster->daemon_,
                            server::Daemon::Start(daemon, DevicesOf(cluster->backend_.get())));
    return std::unique_ptr<Cluster>(std::move(cluster));
  }

  ~DaemonInProcess() override {
    daemon_.reset();
    // What a daemon may leave: its lock.
    for (const char* name : {"/s", "/s.attach", "/s.lock"}) {
      ::unlink((directory_ + name).c_str());
    }
    ::rmdir(directory_.c_str());
  }

  absl::StatusOr<Session> Open(const std::vector<int>& devices) override {
    SessionOptions options;
    options.address = daemon_->addresses()[0].ToString();
    options.transport = transport_;
    options.devices = devices;
    options.open_timeout = kWaitTimeout;
    options.wait_timeout = kWaitTimeout;
    options.label = "conformance";
    return Session::Open(options);
  }

 private:
  DaemonInProcess(const std::string& name, Transport transport, const ClusterOptions& options)
      : transport_(transport), backend_(MakeBackend(name, options.devices, options.seed, &pool_)) {}

  const Transport transport_;
  ThreadPool pool_{2};
  const std::unique_ptr<Backend> backend_;
  std::string directory_;
  std::unique_ptr<server::Daemon> daemon_;
};

}  // namespace

OpenCluster DaemonCluster(const std::string& backend, Transport transport, Wire wire) {
  return [=](const ClusterOptions& options) {
    return DaemonInProcess::Start(backend, transport, wire, options);
  };
}

}  // namespace conformance
}  // namespace chorus
