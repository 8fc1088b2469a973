#include "tests/hostile/own_cgroup.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "benchmarks/process.h"
#include "core/base/error.h"

namespace chorus {
namespace hostile {
namespace {

absl::Status Write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << std::flush;
  if (file.good()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", path));
}

// Of this process: the folder of its memory cgroup, and the name of the file that has the peak.
struct Place {
  std::string folder;
  std::string peak;
};
absl::StatusOr<Place> OwnPlace() {
  // "4:memory:/a/b" of version 1, "0::/a/b" of version 2.
  const std::string text = bench::FileText("/proc/self/cgroup");
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    if (parts[1] == "memory") {
      return Place{absl::StrCat("/sys/fs/cgroup/memory", parts[2]), "memory.max_usage_in_bytes"};
    }
    const std::string folder = absl::StrCat("/sys/fs/cgroup", parts[2]);
    if (parts[1].empty() &&
        absl::StrContains(bench::FileText(folder + "/cgroup.subtree_control"), "memory")) {
      return Place{folder, "memory.peak"};
    }
  }
  return absl::UnavailableError("this process has no memory cgroup that others can be made in");
}

}  // namespace

absl::StatusOr<std::unique_ptr<OwnCgroup>> OwnCgroup::Make() {
  CHORUS_ASSIGN_OR_RETURN(const Place place, OwnPlace());
  static int made_before = 0;
  const std::string folder =
      absl::StrCat(place.folder, "/chorus-hostile-", getpid(), "-", made_before++);
  if (mkdir(folder.c_str(), 0755) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot make ", folder, ": ", strerror(errno)));
  }
  std::unique_ptr<OwnCgroup> made(new OwnCgroup(folder, place.peak));
  CHORUS_RETURN_IF_ERROR(made->PeakBytes().status());
  return made;
}

absl::StatusOr<std::unique_ptr<OwnCgroup>> OwnCgroup::Of(pid_t pid) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<OwnCgroup> made, Make());
  // First the parent: what it starts from now on begins there.
  const std::string procs = made->folder() + "/cgroup.procs";
  CHORUS_RETURN_IF_ERROR(Write(procs, absl::StrCat(pid)));
  for (const pid_t child : bench::ChildrenOf(pid)) {
    // One that has ended meanwhile has no memory.
    (void)Write(procs, absl::StrCat(child));
  }
  return made;
}

OwnCgroup::~OwnCgroup() {
  const std::string above = folder_.substr(0, folder_.rfind('/'));
  const std::string pids = bench::FileText(folder_ + "/cgroup.procs");
  for (const absl::string_view pid : absl::StrSplit(pids, '\n', absl::SkipEmpty())) {
    (void)Write(above + "/cgroup.procs", std::string(pid));
  }
  rmdir(folder_.c_str());
}

absl::StatusOr<int64_t> OwnCgroup::PeakBytes() const {
  const std::string text = bench::FileText(absl::StrCat(folder_, "/", peak_));
  int64_t bytes = 0;
  if (absl::SimpleAtoi(absl::StripSuffix(text, "\n"), &bytes)) return bytes;
  return absl::UnavailableError(absl::StrCat(folder_, "/", peak_, " has \"", text, "\""));
}

}  // namespace hostile
}  // namespace chorus
