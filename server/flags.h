// The flags of chorusd: what a command line says.
//
// Threads: one, which has parsed the command line. Ownership: none. Errors: said at ReadFlags().
#ifndef CHORUS_SERVER_FLAGS_H_
#define CHORUS_SERVER_FLAGS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/daemon.h"
#include "server/memory_limit.h"

namespace chorus::server {

// Each as --help says of the flag of its name.
struct Flags {
  DaemonOptions daemon;  // but for `write_line`; its memory is that of `memory`
  MemoryLimit memory;

  std::string backend;
  int32_t host_devices = 0;
  int32_t gpu = 0;
  int32_t logical_devices_per_gpu = 0;
  bool worker_processes = false;
  std::string worker;
  uint64_t sim_seed = 0;
  std::string fault_script;

  absl::Duration drain_timeout;
  absl::Duration exit_timeout;
};

// As they are now. INVALID_ARGUMENT (MALFORMED): a number has to be positive and is not.
absl::StatusOr<Flags> ReadFlags();

// Whether the flags of a file, as absl has its name, are these.
bool IsFileOfFlags(absl::string_view file);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_FLAGS_H_
