// The cgroups that account for this process's memory.
//
// Threads: any. Ownership: none. Errors: none; what cannot be read is empty, or none.
#ifndef CHORUS_SERVER_CGROUPS_H_
#define CHORUS_SERVER_CGROUPS_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/optional.h"

namespace chorus::server {

// Empty: it cannot be read.
std::string TextOf(const std::string& path);
// A number of bytes; none for "max", and for what is no number.
absl::optional<int64_t> BytesIn(absl::string_view text);

// The folder `path`, "/a/b", below `mount`.
struct MemoryCgroup {
  absl::string_view mount;
  std::string path;
  int version = 2;
};
// Of what /proc/self/cgroup has, those for memory: lines "0::PATH" (v2) and "N:CONTROLLERS:PATH"
// (v1).
std::vector<MemoryCgroup> MemoryCgroupsIn(const std::string& text);

// The one of them that this process is in.
class ProcessCgroup {
 public:
  // `root` stands in front of every path, `pid` is this process ("" and its own but in tests).
  // None: it cannot be told, or is the one of the whole machine.
  static absl::optional<ProcessCgroup> Find(const std::string& root = "", pid_t pid = getpid());

  const std::string& folder() const { return folder_; }
  // Whose memory in it is not this process's or that of processes which it has started, in words:
  // "process 12". Empty: nobody's.
  std::string Others() const;
  // All bytes that it has.
  absl::optional<int64_t> UsageBytes() const;
  // Without what the kernel takes back before it ends anybody: the cache of files, which whoever
  // reads or writes them here fills, and (version 2) its own tables that it can make again. Pages
  // of memfds are no such. They are not summed up by kinds (anon, shmem, kernel), for a page whose
  // file is gone is of no kind any more, and still there.
  absl::optional<int64_t> FixedBytes() const;

 private:
  ProcessCgroup(const std::string& root, pid_t pid, const std::string& folder, int version)
      : root_(root), pid_(pid), folder_(folder), version_(version) {}
  std::string Text(absl::string_view name) const;

  std::string root_;
  pid_t pid_;
  std::string folder_;
  int version_;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_CGROUPS_H_
