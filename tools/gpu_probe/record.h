// What a stage tells: facts, numbers, and a verdict on its assumption; each a line of JSON in a
// file that outlives the stage. What was told before a crash is kept.
//
// Threads: a Recorder is used by one. Ownership: it does not own its descriptor. Errors: a line
// that cannot be written is lost; a line that is no record is counted by its reader.
#ifndef CHORUS_TOOLS_GPU_PROBE_RECORD_H_
#define CHORUS_TOOLS_GPU_PROBE_RECORD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace chorus {
namespace probe {

enum class Decision { kHolds, kDoesNotHold, kNotDecided };
// "holds", "does not hold", "not decided".
const char* DecisionText(Decision decision);

struct Verdict {
  Decision decision = Decision::kNotDecided;
  std::string why;  // a sentence's part: the numbers that decided, or what is missing
};

struct Record {
  enum class Kind { kFact, kNumber, kVerdict };
  Kind kind = Kind::kFact;
  std::string what;  // of a verdict: the assumption's id
  std::string text;  // of a fact; of a verdict: why
  // A number: the median, or the one value, and what lies around it.
  double value = 0;
  double least = 0;
  double most = 0;
  int64_t samples = 0;
  std::string unit;
  Decision decision = Decision::kNotDecided;

  std::string Json() const;
};
// False: it is no record.
bool ParseRecord(absl::string_view line, Record* record);

class Recorder {
 public:
  explicit Recorder(int fd) : fd_(fd) {}

  void Fact(absl::string_view what, absl::string_view text);
  void Number(absl::string_view what, double value, absl::string_view unit);
  // The median of `samples` with the least and the most; returns it. NaN, and no line, for none.
  double Numbers(absl::string_view what, std::vector<double> samples, absl::string_view unit);
  void Say(absl::string_view id, const Verdict& verdict);
  bool has_verdict() const { return has_verdict_; }

 private:
  void Write(const Record& record);

  const int fd_;
  bool has_verdict_ = false;
};

// Collects what an assumption depends on.
class Judge {
 public:
  // A value that is NaN was not measured.
  void AtLeast(const std::string& what, double value, double limit, const std::string& unit = "");
  void AtMost(const std::string& what, double value, double limit, const std::string& unit = "");
  void True(const std::string& what, bool is_true);
  void Unknown(const std::string& what);

  // Does not hold: something is false (and the text says what); not decided: something is unknown,
  // or nothing was asked; holds: all is true.
  Verdict verdict() const;

 private:
  std::vector<std::string> held_;
  std::vector<std::string> failed_;
  std::vector<std::string> unknown_;
};

// "3.02", "0.0153", "12300": at most three digits that say something, never an exponent.
std::string NumberText(double value);

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_RECORD_H_
