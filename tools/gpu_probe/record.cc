#include "tools/gpu_probe/record.h"

#include <unistd.h>

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "benchmarks/stats.h"
#include "nlohmann/json.hpp"

namespace chorus {
namespace probe {
namespace {

using Json = nlohmann::json;

constexpr const char* kDecisions[] = {"holds", "does not hold", "not decided"};
constexpr const char* kKinds[] = {"fact", "number", "verdict"};

// JSON knows no NaN.
double Finite(double value) { return std::isfinite(value) ? value : -1; }

}  // namespace

const char* DecisionText(Decision decision) { return kDecisions[static_cast<int>(decision)]; }

std::string Record::Json() const {
  probe::Json json;
  json["kind"] = kKinds[static_cast<int>(kind)];
  json["what"] = what;
  if (kind == Kind::kNumber) {
    json["value"] = Finite(value);
    json["least"] = Finite(least);
    json["most"] = Finite(most);
    json["samples"] = samples;
    json["unit"] = unit;
  } else {
    json["text"] = text;
  }
  if (kind == Kind::kVerdict) json["verdict"] = DecisionText(decision);
  // Texts come from drivers and libraries too, whose encoding nobody promises.
  return json.dump(-1, ' ', true, probe::Json::error_handler_t::replace);
}

bool ParseRecord(absl::string_view line, Record* record) {
  const Json json = Json::parse(line.begin(), line.end(), nullptr, false);
  if (!json.is_object()) return false;
  const auto text = [&](const char* name, std::string* to) {
    const auto field = json.find(name);
    if (field == json.end() || !field->is_string()) return false;
    *to = field->get<std::string>();
    return true;
  };
  const auto number = [&](const char* name, auto* to) {
    const auto field = json.find(name);
    if (field == json.end() || !field->is_number()) return false;
    field->get_to(*to);
    return true;
  };
  std::string kind;
  Record result;
  if (!text("kind", &kind) || !text("what", &result.what)) return false;
  if (kind == "number") {
    result.kind = Record::Kind::kNumber;
    if (!number("value", &result.value) || !number("least", &result.least) ||
        !number("most", &result.most) || !number("samples", &result.samples) ||
        !text("unit", &result.unit)) {
      return false;
    }
  } else if (kind == "fact") {
    result.kind = Record::Kind::kFact;
    if (!text("text", &result.text)) return false;
  } else if (kind == "verdict") {
    result.kind = Record::Kind::kVerdict;
    std::string decision;
    if (!text("text", &result.text) || !text("verdict", &decision)) return false;
    int n = 0;
    while (n < 3 && decision != kDecisions[n]) ++n;
    if (n == 3) return false;
    result.decision = static_cast<Decision>(n);
  } else {
    return false;
  }
  *record = result;
  return true;
}

void Recorder::Write(const Record& record) {
  const std::string line = record.Json() + "\n";
  // One call: a line is there or not, whenever this process is killed.
  (void)!write(fd_, line.data(), line.size());
}

void Recorder::Fact(absl::string_view what, absl::string_view text) {
  Record record;
  record.kind = Record::Kind::kFact;
  record.what = std::string(what);
  record.text = std::string(text);
  Write(record);
}

void Recorder::Number(absl::string_view what, double value, absl::string_view unit) {
  Numbers(what, {value}, unit);
}

double Recorder::Numbers(absl::string_view what, std::vector<double> samples,
                         absl::string_view unit) {
  if (samples.empty()) return std::numeric_limits<double>::quiet_NaN();
  const bench::RoundStats stats = bench::StatsOf(std::move(samples));
  Record record;
  record.kind = Record::Kind::kNumber;
  record.what = std::string(what);
  record.value = stats.p50;
  record.least = stats.min;
  record.most = stats.max;
  record.samples = stats.count;
  record.unit = std::string(unit);
  Write(record);
  return stats.p50;
}

void Recorder::Say(absl::string_view id, const Verdict& verdict) {
  Record record;
  record.kind = Record::Kind::kVerdict;
  record.what = std::string(id);
  record.text = verdict.why;
  record.decision = verdict.decision;
  Write(record);
  has_verdict_ = true;
}

void Judge::AtLeast(const std::string& what, double value, double limit, const std::string& unit) {
  if (std::isnan(value)) return Unknown(what);
  (value >= limit ? held_ : failed_)
      .push_back(absl::StrCat(what, " ", NumberText(value), unit, value >= limit ? " >= " : " < ",
                              NumberText(limit), unit));
}

void Judge::AtMost(const std::string& what, double value, double limit, const std::string& unit) {
  if (std::isnan(value)) return Unknown(what);
  (value <= limit ? held_ : failed_)
      .push_back(absl::StrCat(what, " ", NumberText(value), unit, value <= limit ? " <= " : " > ",
                              NumberText(limit), unit));
}

void Judge::True(const std::string& what, bool is_true) {
  if (is_true) {
    held_.push_back(what);
  } else {
    failed_.push_back("not so: " + what);
  }
}

void Judge::Unknown(const std::string& what) { unknown_.push_back(what); }

Verdict Judge::verdict() const {
  if (!failed_.empty()) return {Decision::kDoesNotHold, absl::StrJoin(failed_, "; ")};
  if (!unknown_.empty()) {
    std::string why = "unknown: " + absl::StrJoin(unknown_, "; ");
    if (!held_.empty()) absl::StrAppend(&why, "; true: ", absl::StrJoin(held_, "; "));
    return {Decision::kNotDecided, why};
  }
  if (held_.empty()) return {Decision::kNotDecided, "nothing was measured"};
  return {Decision::kHolds, absl::StrJoin(held_, "; ")};
}

std::string NumberText(double value) {
  if (!std::isfinite(value)) return "?";
  const double size = std::fabs(value);
  if (size >= 100 || value == std::floor(value)) return absl::StrFormat("%.0f", value);
  if (size >= 10) return absl::StrFormat("%.1f", value);
  if (size >= 1) return absl::StrFormat("%.2f", value);
  if (size >= 0.1) return absl::StrFormat("%.3f", value);
  if (size >= 0.01) return absl::StrFormat("%.4f", value);
  return absl::StrFormat("%.5f", value);
}

}  // namespace probe
}  // namespace chorus
