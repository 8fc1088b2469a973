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
      for (int64_t begin = NowNanos();; begin += kPeriod) {
        const int64_t until = begin + static_cast<int64_t>(part * kPeriod);
        // Processor time, as far as it gets it: what it has missed it does not make up for.
        if (NowNanos() > begin + kPeriod) begin = NowNanos();
        while (NowNanos() < until) {
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
