#include "server/testing/test_daemon.h"

#include <stdlib.h>

#include <filesystem>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/backend/host/host_backend.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/devices.h"
#include "core/transport/attach/protocol.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

namespace chorus::server {

TestDaemon::TestDaemon(const std::function<void(DaemonOptions*)>& change) : pool_(2) {
  // Not TEST_TMPDIR: a socket's path has at most 107 bytes.
  std::string pattern = "/tmp/chorus-test-XXXXXX";
  if (mkdtemp(&pattern[0]) == nullptr) abort();
  folder_ = pattern;
  path_ = absl::StrCat(folder_, "/chorusd.sock");
  ListenAddress address;
  address.path = path_;
  options_.listen.push_back(address);
  options_.node.memory_limit_bytes = int64_t{1} << 30;
  if (change) change(&options_);
  HostBackendOptions host;
  host.devices = 4;
  host.pool = &pool_;
  host.make_kernel = MakeHostKernel;
  backend_ = CreateHostBackend(host);
  Start();
}

TestDaemon::~TestDaemon() {
  daemon_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void TestDaemon::Start() {
  absl::StatusOr<std::unique_ptr<Daemon>> daemon =
      Daemon::Start(options_, DevicesOf(backend_.get()));
  if (!daemon.ok()) {
    std::cerr << daemon.status() << std::endl;
    abort();
  }
  daemon_ = *std::move(daemon);
}

void TestDaemon::Restart() {
  daemon_.reset();
  Start();
}

std::string TestDaemon::attach_path() const { return AttachPath(path_); }

std::shared_ptr<grpc::Channel> TestDaemon::Connect() const {
  return ConnectTo(absl::StrCat("unix:", path_));
}

std::shared_ptr<grpc::Channel> TestDaemon::ConnectTo(const std::string& address) const {
  grpc::ChannelArguments arguments;
  // Else gRPC gives channels to one address the same connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // And lets a client take more than 64 KiB that it does not read, where it has measured that the
  // connection would bring as much in a round trip: a sanitizer's round trips are long.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace chorus::server
