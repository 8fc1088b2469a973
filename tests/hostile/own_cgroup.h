// A memory cgroup for one process and those that it starts, which tells what they have had at most:
// pages of their own, of shared memory and of files that they were the first to touch.
//
// Threads: one at a time.
#ifndef CHORUS_TESTS_HOSTILE_OWN_CGROUP_H_
#define CHORUS_TESTS_HOSTILE_OWN_CGROUP_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace chorus {
namespace hostile {

class OwnCgroup {
 public:
  // Below this process's own, for whoever begins in it. UNAVAILABLE: none can be made here, which
  // takes root, and says why.
  static absl::StatusOr<std::unique_ptr<OwnCgroup>> Make();
  // With `pid` and its children in it, whose memory so far is not.
  static absl::StatusOr<std::unique_ptr<OwnCgroup>> Of(pid_t pid);
  // Who is in it goes to the one above.
  ~OwnCgroup();
  OwnCgroup(const OwnCgroup&) = delete;
  OwnCgroup& operator=(const OwnCgroup&) = delete;

  const std::string& folder() const { return folder_; }
  absl::StatusOr<int64_t> PeakBytes() const;

 private:
  OwnCgroup(std::string folder, std::string peak)
      : folder_(std::move(folder)), peak_(std::move(peak)) {}

  const std::string folder_;
  const std::string peak_;  // the file's name
};

}  // namespace hostile
}  // namespace chorus

#endif  // CHORUS_TESTS_HOSTILE_OWN_CGROUP_H_
