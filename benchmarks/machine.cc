#include "benchmarks/machine.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "benchmarks/process.h"
#include "core/base/thread_pool.h"

namespace chorus {
namespace bench {
namespace {

// The value of the first line of a /proc file that begins with `name`.
std::string ProcValue(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, name.size(), name) != 0) continue;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::string OutputOf(const char* command) {
  std::string output;
  FILE* const pipe = popen(command, "r");
  if (pipe == nullptr) return output;
  char buffer[4096];
  while (fgets(buffer, sizeof(buffer), pipe) != nullptr) output += buffer;
  pclose(pipe);
  while (!output.empty() && output.back() == '\n') output.pop_back();
  return output;
}

std::string Caches() {
  std::string caches;
  for (int index = 0; index < 8; ++index) {
    const std::string folder = absl::StrCat("/sys/devices/system/cpu/cpu0/cache/index", index);
    std::string level = FileText(folder + "/level");
    std::string size = FileText(folder + "/size");
    if (level.empty() || size.empty()) break;
    level.pop_back();
    size.pop_back();
    absl::StrAppend(&caches, caches.empty() ? "" : ", ", "L", level, " ", size);
  }
  return caches;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> DescribeMachine(const std::string& commit) {
  utsname system{};
  uname(&system);
  std::vector<std::pair<std::string, std::string>> facts;
  facts.emplace_back("commit", commit.empty() ? "unknown" : commit);
  facts.emplace_back("processor", ProcValue("/proc/cpuinfo", "model name"));
  facts.emplace_back(
      "cores", absl::StrCat(UsableCpus(), " usable of ", std::thread::hardware_concurrency()));
  facts.emplace_back("caches", Caches());
  facts.emplace_back("memory", ProcValue("/proc/meminfo", "MemTotal"));
  facts.emplace_back("kernel",
                     absl::StrCat(system.sysname, " ", system.release, " ", system.machine));
  facts.emplace_back("compiler", __VERSION__);
  facts.emplace_back(
      "packages",
      OutputOf("dpkg-query -W -f '${Package} ${Version}; ' libgrpc++1.51 libdnnl-dev openmpi-bin "
               "libc6 2>/dev/null"));
  std::string load = FileText("/proc/loadavg");
  facts.emplace_back("load at start", load.substr(0, load.find(' ')));
  return facts;
}

int64_t AvailableMemoryBytes() {
  return std::strtoll(ProcValue("/proc/meminfo", "MemAvailable").c_str(), nullptr, 10) * 1024;
}

}  // namespace bench
}  // namespace chorus
