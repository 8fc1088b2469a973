#include "benchmarks/burner.h"

#include <iostream>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace chorus {
namespace bench {

absl::StatusOr<Process> StartBurner(const std::vector<double>& busy) {
  return Process::Start(
      {"/proc/self/exe", "--helper=burner", absl::StrCat("--busy=", absl::StrJoin(busy, ","))}, {});
}

int RunBurnerHelper(const std::vector<std::string>& busy) {
  constexpr int64_t kPeriod = 20000000;  // as long as work comes in one piece
  std::vector<std::thread> threads;
  for (const std::string& text : busy) {
    double part = 0;
    if (!absl::SimpleAtod(text, &part) || part < 0 || part > 1) {
      std::cerr << "--busy: expected numbers from 0 to 1, got " << text << "\n";
      return 2;
    }
    if (part == 0) continue;
    threads.emplace_back([part] {
      const auto busy_for = static_cast<int64_t>(part * kPeriod);
      while (true) {
        const int64_t begin = NowNanos();
        while (NowNanos() < begin + busy_for) {
        }
        if (const int64_t left = begin + kPeriod - NowNanos(); left > 0) Pause(left);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // namespace bench
}  // namespace chorus
