#include "server/memory_limit.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "server/cgroups.h"

namespace chorus::server {
namespace {

constexpr int64_t kWithoutKnowledge = int64_t{8} << 30;

absl::optional<int64_t> MemTotal(const std::string& meminfo) {
  for (absl::string_view line : absl::StrSplit(meminfo, '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.size() != 3 || words[0] != "MemTotal:" || words[2] != "kB") continue;
    const absl::optional<int64_t> kib = BytesIn(words[1]);
    if (kib.has_value() && *kib <= std::numeric_limits<int64_t>::max() / 1024) return *kib * 1024;
  }
  return absl::nullopt;
}

}  // namespace

MemoryLimit DefaultMemoryLimit(int64_t own_bytes, const std::string& root) {
  int64_t lowest = std::numeric_limits<int64_t>::max();
  std::string source;
  const auto look = [&](absl::optional<int64_t> bytes, absl::string_view what) {
    if (!bytes.has_value() || *bytes >= lowest) return;
    lowest = *bytes;
    source = std::string(what);
  };
  look(MemTotal(TextOf(absl::StrCat(root, "/proc/meminfo"))),
       "this machine has (MemTotal of /proc/meminfo)");
  for (const MemoryCgroup& cgroup :
       MemoryCgroupsIn(TextOf(absl::StrCat(root, "/proc/self/cgroup")))) {
    const absl::string_view name = cgroup.version == 2 ? "memory.max" : "memory.limit_in_bytes";
    // Also those above it, up to the mount: there a container sees its own, whatever path is told.
    std::string path = cgroup.path;
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      const std::string file = absl::StrCat(cgroup.mount, path, "/", name);
      look(BytesIn(TextOf(root + file)), absl::StrCat("its cgroup may have (", file, ")"));
      if (path.empty()) break;
      path.resize(std::min(path.rfind('/'), path.size()));
    }
  }
  if (source.empty()) {
    return {kWithoutKnowledge, "neither /proc/meminfo nor a cgroup says how much there is", ""};
  }
  const std::string there = absl::StrCat("the ", lowest, " bytes that ", source);
  const int64_t left = lowest - own_bytes;
  if (left >= lowest / 4 * 3) return {lowest / 4 * 3, "three quarters of " + there, ""};
  if (left >= lowest / 4) {
    return {left, absl::StrCat(there, ", less ", own_bytes, " for the daemon's own"), ""};
  }
  return {lowest / 4, "a quarter of " + there,
          absl::StrCat(there, " are too few: clients can make the daemon take ", own_bytes,
                       " beside its memory limit, and the system end it. Expected are at least ",
                       own_bytes + own_bytes / 3,
                       " bytes; fewer of --max_sessions, --max_calls, --max_streams and "
                       "--max_connections need less")};
}

}  // namespace chorus::server
