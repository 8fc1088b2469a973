#include "core/backend/sim/sim_memory.h"

#include <unistd.h>

#include <fstream>
#include <iostream>
#include <vector>

#include "gtest/gtest.h"

namespace chorus {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// Of what is freed: what is not forgotten yet, and half as much that malloc has. (AddressSanitizer
// has its own, which keeps a quarter of a gigabyte more.)
#ifdef __SANITIZE_ADDRESS__
constexpr int64_t kMayKeep = 448 * kMiB;
#else
constexpr int64_t kMayKeep = 64 * kMiB;
#endif

// Of this process, in memory.
int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Whatever the pieces' sizes: large ones, which malloc has from the system one by one, teach it to
// keep those that are smaller.
TEST(SimMemoryTest, PagesOfWhatWasFreedGoBack) {
  constexpr int64_t kHeld = 768 * kMiB;
  SimMemory memory(1024 * kMiB, /*devices_per_domain=*/1);
  const int64_t before = ResidentBytes();
  for (const int64_t piece : {64 * kMiB, 16 * kMiB, kMiB}) {
    for (int round = 0; round < 2; ++round) {
      std::vector<DeviceAddress> pieces;
      for (int64_t i = 0; i < kHeld / piece; ++i) {
        const auto address = memory.Allocate(round, piece - 4096 * (i % 7));
        ASSERT_TRUE(address.ok()) << address.status();
        pieces.push_back(*address);
      }
      const int64_t held = ResidentBytes() - before;
      for (const DeviceAddress address : pieces) memory.Free(round, address);
      const int64_t kept = ResidentBytes() - before;
      std::cout << "pieces of " << piece / kMiB << " MiB: " << held / kMiB << " MiB held, "
                << kept / kMiB << " kept\n";
      EXPECT_GT(held, kHeld / 2);
      EXPECT_LT(kept, kMayKeep);
    }
  }
}

}  // namespace
}  // namespace chorus
