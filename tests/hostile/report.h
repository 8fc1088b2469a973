// What became of an attack. Plain data.
#ifndef CHORUS_TESTS_HOSTILE_REPORT_H_
#define CHORUS_TESTS_HOSTILE_REPORT_H_

#include <cstdint>

#include "absl/status/status.h"

namespace chorus {
namespace hostile {

// What it was told at last, and how often it was not refused before.
struct Report {
  absl::Status refused;  // OK: it was never refused
  int64_t done = 0;
};

}  // namespace hostile
}  // namespace chorus

#endif  // CHORUS_TESTS_HOSTILE_REPORT_H_
