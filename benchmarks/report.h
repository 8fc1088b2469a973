// The tables that a benchmark prints, and the JSON with everything behind them.
#ifndef CHORUS_BENCHMARKS_REPORT_H_
#define CHORUS_BENCHMARKS_REPORT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "benchmarks/interleave.h"

namespace chorus {
namespace bench {

// What a group of rows that were measured in turns has in common.
struct Case {
  std::string benchmark;  // "small"
  std::string what;       // "all_reduce", "all_reduce, then read"
  int ranks = 0;
  int64_t bytes = -1;      // -1: says nothing here
  double moved_bytes = 0;  // per iteration, for the bandwidth column; 0: none
};

// A target of docs/performance.md and what came out.
struct Goal {
  std::string what;  // "small, 2 ranks: p50"
  double limit = 0;
  double value = 0;
  std::string unit;       // "us", "x"
  bool at_least = false;  // value >= limit; otherwise value <= limit
  bool met() const { return at_least ? value >= limit : value <= limit; }
};

// "17.3 us", "4 KiB": three digits and a unit.
std::string TimeText(double nanos);
std::string BytesText(int64_t bytes);

class Report {
 public:
  explicit Report(std::vector<std::pair<std::string, std::string>> machine)
      : machine_(std::move(machine)) {}

  // `ours` over the others of the same case: the floor with the least median, and each peer.
  void Add(const Case& c, std::vector<Measured> measured);
  // The same as one line of a table of its own: the first of `measured` is ours, peers follow; in
  // `readings` are those of them, by name, that were measured also with every rank reading its
  // whole result.
  void AddComparison(const Case& c, std::vector<Measured> measured, std::vector<Measured> readings);
  void AddGoal(const Goal& goal) { goals_.push_back(goal); }
  // A line of text for readers of the table, such as a peer that is missing; said once.
  void AddNote(const std::string& note);

  std::string MachineText() const;
  // The rows added since the last call. Empty when there are none.
  std::string TakeTable();
  std::string GoalsText() const;
  std::string Json() const;
  absl::Status WriteJson(const std::string& path) const;

 private:
  struct Entry {
    Case c;
    std::vector<Measured> measured;
    bool listed = true;  // in the table with a row for each of them
  };
  const std::vector<std::pair<std::string, std::string>> machine_;
  std::vector<Entry> entries_;
  size_t printed_ = 0;
  std::vector<std::vector<std::string>> comparisons_;  // lines not printed yet, heads among them
  std::vector<std::string> last_head_;
  std::vector<Goal> goals_;
  std::vector<std::string> notes_;
};

// The ratio of medians of the contender `name` to the one of that role with the least median; 0
// when one of the two is not there.
double RatioTo(const std::vector<Measured>& measured, const std::string& name, Role role);
// The ratio of the first one's median to that of the one called `name`; 0 when it is not there.
double RatioToNamed(const std::vector<Measured>& measured, const std::string& name);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_REPORT_H_
