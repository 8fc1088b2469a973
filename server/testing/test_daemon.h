// A daemon in the test's own process, over the host backend, on a Unix socket of its own.
//
// Threads: one at a time. Ownership: it has its daemon, backend and folder. Errors: end the
// process.
#ifndef CHORUS_SERVER_TESTING_TEST_DAEMON_H_
#define CHORUS_SERVER_TESTING_TEST_DAEMON_H_

#include <functional>
#include <memory>
#include <string>

#include "core/backend/backend.h"
#include "core/base/thread_pool.h"
#include "grpcpp/channel.h"
#include "server/daemon.h"

namespace chorus::server {

class TestDaemon {
 public:
  // `change` may alter what the daemon is started with. Fails the process when it does not start.
  explicit TestDaemon(const std::function<void(DaemonOptions*)>& change = nullptr);
  ~TestDaemon();

  const std::string& folder() const { return folder_; }  // in /tmp, removed at the end
  const std::string& path() const { return path_; }      // of the gRPC socket
  std::string attach_path() const;
  Daemon& daemon() { return *daemon_; }
  Backend* backend() { return backend_.get(); }
  // Each call gives another connection.
  std::shared_ptr<grpc::Channel> Connect() const;
  std::shared_ptr<grpc::Channel> ConnectTo(const std::string& address) const;
  // Ends the daemon and starts another on the same path.
  void Restart();

 private:
  void Start();

  std::string folder_;
  std::string path_;
  DaemonOptions options_;
  ThreadPool pool_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Daemon> daemon_;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_TESTING_TEST_DAEMON_H_
