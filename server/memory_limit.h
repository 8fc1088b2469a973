// How much memory clients may make a daemon hold where nobody has said it: what this machine and
// the daemon's own cgroup have, less room for what is not charged (core/runtime/budget.h) and for
// others.
//
// Threads: any. Ownership: none. Errors: none; what cannot be read counts as no bound.
#ifndef CHORUS_SERVER_MEMORY_LIMIT_H_
#define CHORUS_SERVER_MEMORY_LIMIT_H_

#include <cstdint>
#include <string>

namespace chorus::server {

struct MemoryLimit {
  int64_t bytes = 0;
  std::string source;   // in words, for the log: where it comes from
  std::string warning;  // empty: none
};

// Of the lowest of: MemTotal of /proc/meminfo; memory.max (cgroup v2) or memory.limit_in_bytes (v1)
// of the process's cgroup and of each above it: three quarters or, where that is less, what
// `own_bytes` of the daemon's own leave; but a quarter, with a warning, where they leave less. 8
// GiB where none of them can be read. `root` stands in front of every path ("" but in tests).
MemoryLimit DefaultMemoryLimit(int64_t own_bytes, const std::string& root = "");

}  // namespace chorus::server

#endif  // CHORUS_SERVER_MEMORY_LIMIT_H_
