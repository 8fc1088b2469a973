// Where the daemon listens: unix:PATH or host:port.
//
// Threads: any; plain data and pure functions. Ownership: copies. Errors: said at each function.
#ifndef CHORUS_SERVER_LISTEN_ADDRESS_H_
#define CHORUS_SERVER_LISTEN_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace chorus::server {

struct ListenAddress {
  std::string path;  // absolute; empty for TCP
  std::string host;  // without brackets
  int port = 0;      // 0: the system chooses

  bool is_unix() const { return !path.empty(); }
  bool is_loopback() const;      // TCP only: 127.0.0.0/8, ::1 or localhost
  std::string ToString() const;  // "unix:/run/chorus/chorusd.sock", "127.0.0.1:9440"
};

// INVALID_ARGUMENT: neither form, a relative or too long path, a port out of range.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text);

// FAILED_PRECONDITION: a TCP address that this build does not serve. Only loopback is, and only
// when the operator says that it may be insecure: TLS comes later.
absl::Status CheckListenAddress(const ListenAddress& address, bool insecure_loopback);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_LISTEN_ADDRESS_H_
