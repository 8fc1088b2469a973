// The probe's tables, as Markdown that reads well on a terminal, and its records as lines of JSON.
//
// Threads: pure functions. Ownership: plain values. Errors: none.
#ifndef CHORUS_TOOLS_GPU_PROBE_REPORT_H_
#define CHORUS_TOOLS_GPU_PROBE_REPORT_H_

#include <string>
#include <vector>

#include "tools/gpu_probe/schedule.h"

namespace chorus {
namespace probe {

// The verdict of a stage's assumption: what it said, or why it said nothing. Of a stage that ended
// badly afterwards the verdict stands, and says so.
Verdict VerdictOf(const Outcome& outcome);

// The assumption, what was measured, the verdict, and what follows from it.
std::string StageText(const Outcome& outcome);
// A row an assumption: those of stages that did not run, too.
std::string SummaryText(const std::vector<Outcome>& outcomes);
// A line a record, with its stage; and one a stage, of how it ended.
std::string JsonLines(const std::vector<Outcome>& outcomes);

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_REPORT_H_
