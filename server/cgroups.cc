#include "server/cgroups.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace chorus::server {
namespace {

// Of the text of /proc/PID/stat, "12 (name) S 1 ..."; -1: it has none.
pid_t ParentIn(absl::string_view stat) {
  const size_t name_end = stat.rfind(')');  // a name may have such, too
  if (name_end == absl::string_view::npos) return -1;
  const std::vector<absl::string_view> words =
      absl::StrSplit(stat.substr(name_end + 1), ' ', absl::SkipEmpty());
  pid_t parent = -1;
  return words.size() >= 2 && absl::SimpleAtoi(words[1], &parent) ? parent : -1;
}

// Of lines "NAME BYTES" those of these names; none: one is not there.
absl::optional<int64_t> SumIn(const std::string& text,
                              const std::vector<absl::string_view>& names) {
  int64_t sum = 0;
  size_t num_found = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    int64_t bytes = 0;
    if (words.size() != 2 || std::count(names.begin(), names.end(), words[0]) == 0) continue;
    if (!absl::SimpleAtoi(words[1], &bytes)) return absl::nullopt;
    sum += bytes;
    ++num_found;
  }
  if (num_found != names.size()) return absl::nullopt;
  return sum;
}

}  // namespace

std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

absl::optional<int64_t> BytesIn(absl::string_view text) {
  int64_t bytes = 0;
  if (!absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &bytes) || bytes <= 0) {
    return absl::nullopt;
  }
  return bytes;
}

std::vector<MemoryCgroup> MemoryCgroupsIn(const std::string& text) {
  std::vector<MemoryCgroup> cgroups;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    if (parts[0] == "0" && parts[1].empty()) {
      cgroups.push_back({"/sys/fs/cgroup", std::string(parts[2]), 2});
    } else if (std::count(controllers.begin(), controllers.end(), "memory") > 0) {
      cgroups.push_back({"/sys/fs/cgroup/memory", std::string(parts[2]), 1});
    }
  }
  return cgroups;
}

absl::optional<ProcessCgroup> ProcessCgroup::Find(const std::string& root, pid_t pid) {
  for (const MemoryCgroup& cgroup : MemoryCgroupsIn(TextOf(root + "/proc/self/cgroup"))) {
    // At the mount a container sees its own, whatever path is told.
    for (const std::string& path : {cgroup.path, std::string()}) {
      const ProcessCgroup own_cgroup(root, pid, absl::StrCat(cgroup.mount, path == "/" ? "" : path),
                                     cgroup.version);
      const std::vector<std::string> pids = absl::StrSplit(own_cgroup.Text("cgroup.procs"), '\n');
      const bool is_in = std::count(pids.begin(), pids.end(), absl::StrCat(pid)) > 0;
      // Of version 1 that of the whole machine has such files as well.
      const bool is_root = cgroup.version == 1 && cgroup.path == "/";
      if (is_in && !is_root && own_cgroup.FixedBytes().has_value()) return own_cgroup;
    }
  }
  return absl::nullopt;
}

std::string ProcessCgroup::Text(absl::string_view name) const {
  return TextOf(absl::StrCat(root_, folder_, "/", name));
}

std::string ProcessCgroup::Others() const {
  constexpr size_t kMostPids = 16;  // that are looked at
  const std::string text = Text("cgroup.procs");
  const std::vector<absl::string_view> pids = absl::StrSplit(text, '\n', absl::SkipEmpty());
  if (pids.size() > kMostPids) return absl::StrCat(pids.size(), " processes");
  bool is_in = false;
  for (const absl::string_view word : pids) {
    pid_t pid = 0;  // what another namespace of processes has
    if (absl::SimpleAtoi(word, &pid) && pid == pid_) {
      is_in = true;
      continue;
    }
    const std::string stat = pid == 0 ? "" : TextOf(absl::StrCat(root_, "/proc/", pid, "/stat"));
    if (pid != 0 && stat.empty()) continue;  // it has ended meanwhile
    if (ParentIn(stat) != pid_) return absl::StrCat("process ", word);
  }
  if (!is_in) return "others than this process";
  // What is below is counted here as well.
  std::error_code error;
  for (std::filesystem::directory_iterator it(root_ + folder_, error), end; !error && it != end;
       it.increment(error)) {
    if (it->is_directory(error)) return absl::StrCat("the cgroup ", it->path().filename().string());
  }
  return error ? error.message() : "";
}

absl::optional<int64_t> ProcessCgroup::UsageBytes() const {
  return BytesIn(Text(version_ == 2 ? "memory.current" : "memory.usage_in_bytes"));
}

absl::optional<int64_t> ProcessCgroup::FixedBytes() const {
  std::vector<absl::string_view> reclaimable = {"active_file", "inactive_file"};
  if (version_ == 2) reclaimable.push_back("slab_reclaimable");
  const absl::optional<int64_t> usage = UsageBytes();
  const absl::optional<int64_t> less = SumIn(Text("memory.stat"), reclaimable);
  if (!usage.has_value() || !less.has_value()) return absl::nullopt;
  return std::max<int64_t>(*usage - *less, 0);
}

}  // namespace chorus::server
