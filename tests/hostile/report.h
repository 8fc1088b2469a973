// What became of an attack.
//
// Threads: plain data and a pure function.
#ifndef CHORUS_TESTS_HOSTILE_REPORT_H_
#define CHORUS_TESTS_HOSTILE_REPORT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace chorus {
namespace hostile {

// What it was told at last, and how often it was not refused before.
struct Report {
  absl::Status refused;  // OK: it was never refused
  int64_t done = 0;
  // What it has really brought to the daemon, in bytes, of an attack by which all or nothing is
  // done.
  int64_t amount = 0;
};

// INTERNAL: `part` of an attack did not end with this code and all of these in its text.
absl::Status ExpectEnd(absl::string_view part, const absl::Status& end, absl::StatusCode code,
                       const std::vector<absl::string_view>& says);

}  // namespace hostile
}  // namespace chorus

#endif  // CHORUS_TESTS_HOSTILE_REPORT_H_
