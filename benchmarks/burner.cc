#include "benchmarks/burner.h"

#include <sys/prctl.h>

#include <iostream>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace chorus {
namespace bench {

absl::StatusOr<Process> StartBurner(const std::vector<Burn>& burns) {
  const auto text = [](std::string* out, const Burn& burn) {
    absl::StrAppend(out, burn.part, "/", burn.period_ns);
  };
  return Process::Start({"/proc/self/exe", "--helper=burner",
                         absl::StrCat("--burn=", absl::StrJoin(burns, ",", text))},
                        {});
}

int RunBurnerHelper(const std::vector<std::string>& burns) {
  std::vector<std::thread> threads;
  for (const std::string& text : burns) {
    const std::vector<std::string> fields = absl::StrSplit(text, '/');
    Burn burn;
    if (fields.size() != 2 || !absl::SimpleAtod(fields[0], &burn.part) || burn.part < 0 ||
        burn.part > 1 || !absl::SimpleAtoi(fields[1], &burn.period_ns) || burn.period_ns <= 0) {
      std::cerr
          << "--burn: expected a part of the time (0 to 1), '/' and a period in nanoseconds, got "
          << text << "\n";
      return 2;
    }
    if (burn.part == 0) continue;
    threads.emplace_back([burn] {
      prctl(PR_SET_TIMERSLACK, 1);  // sleeps are as short as a microsecond
      const auto busy_for = static_cast<int64_t>(burn.part * static_cast<double>(burn.period_ns));
      while (true) {
        const int64_t begin = NowNanos();
        while (NowNanos() < begin + busy_for) {
        }
        if (const int64_t left = begin + burn.period_ns - NowNanos(); left > 0) Pause(left);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // namespace bench
}  // namespace chorus
