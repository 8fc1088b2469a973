#include "server/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"

namespace chorus::server {
namespace {

constexpr int64_t kWithoutKnowledge = int64_t{8} << 30;

// Empty: it cannot be read.
std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A number of bytes; none for "max", and for what is no number.
absl::optional<int64_t> BytesIn(absl::string_view text) {
  int64_t bytes = 0;
  if (!absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &bytes) || bytes <= 0) {
    return absl::nullopt;
  }
  return bytes;
}

absl::optional<int64_t> MemTotal(const std::string& meminfo) {
  for (absl::string_view line : absl::StrSplit(meminfo, '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.size() != 3 || words[0] != "MemTotal:" || words[2] != "kB") continue;
    const absl::optional<int64_t> kib = BytesIn(words[1]);
    if (kib.has_value() && *kib <= std::numeric_limits<int64_t>::max() / 1024) return *kib * 1024;
  }
  return absl::nullopt;
}

// Where a cgroup's bound is: the file `name` of `path`, below `mount`.
struct Cgroup {
  absl::string_view mount;
  absl::string_view name;
  std::string path;
};

// Of what /proc/self/cgroup has, those that bound memory: lines "0::PATH" (v2) and
// "N:CONTROLLERS:PATH" (v1).
std::vector<Cgroup> CgroupsIn(const std::string& text) {
  std::vector<Cgroup> cgroups;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    if (parts[0] == "0" && parts[1].empty()) {
      cgroups.push_back({"/sys/fs/cgroup", "memory.max", std::string(parts[2])});
    } else if (std::count(controllers.begin(), controllers.end(), "memory") > 0) {
      cgroups.push_back({"/sys/fs/cgroup/memory", "memory.limit_in_bytes", std::string(parts[2])});
    }
  }
  return cgroups;
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
  look(MemTotal(ReadFile(absl::StrCat(root, "/proc/meminfo"))),
       "this machine has (MemTotal of /proc/meminfo)");
  for (const Cgroup& cgroup : CgroupsIn(ReadFile(absl::StrCat(root, "/proc/self/cgroup")))) {
    // Also those above it, up to the mount: there a container sees its own, whatever path is told.
    std::string path = cgroup.path;
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      const std::string file = absl::StrCat(cgroup.mount, path, "/", cgroup.name);
      look(BytesIn(ReadFile(root + file)), absl::StrCat("its cgroup may have (", file, ")"));
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
