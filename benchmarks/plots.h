// What the suites' plots are made of: they hand over points as they measure, and each suite that
// did becomes one SVG file.
#ifndef CHORUS_BENCHMARKS_PLOTS_H_
#define CHORUS_BENCHMARKS_PLOTS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "benchmarks/interleave.h"
#include "chorus/data/plot.h"

namespace chorus {
namespace bench {

class Plots {
 public:
  enum class Along { kBytes, kRanks, kNodes, kSessions };
  enum class Value { kTime, kBandwidth, kRate };
  // One of a suite's charts.
  struct Which {
    std::string suite;  // names the file
    std::string title;
    Along along = Along::kBytes;
    Value value = Value::kTime;
  };

  // A point of each contender's curve, from its median; kBandwidth: of so many bytes an iteration.
  void Add(const Which& which, double x, const std::vector<Measured>& measured,
           double moved_bytes = 0);
  // A point of the curve called `curve`: nanoseconds, bytes a nanosecond or iterations a second.
  void AddPoint(const Which& which, const std::string& curve, double x, double y);

  // SUITE.svg for each suite, in `directory`, which is made if it is not there.
  absl::Status Write(const std::string& directory) const;

 private:
  std::map<std::string, std::vector<plot::Chart>> charts_;  // by suite
};

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_PLOTS_H_
