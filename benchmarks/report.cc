#include "benchmarks/report.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"

namespace chorus {
namespace bench {
namespace {

const char* RoleName(Role role) {
  switch (role) {
    case Role::kOurs:
      return "ours";
    case Role::kFloor:
      return "floor";
    case Role::kPeer:
      return "peer";
    case Role::kPart:
      return "part";
  }
  return "";
}

const Measured* Best(const std::vector<Measured>& measured, Role role) {
  const Measured* best = nullptr;
  for (const Measured& one : measured) {
    if (one.role == role && (best == nullptr || one.summary.p50 < best->summary.p50)) best = &one;
  }
  return best;
}

const Measured* Named(const std::vector<Measured>& measured, const std::string& name) {
  for (const Measured& one : measured) {
    if (one.name == name) return &one;
  }
  return nullptr;
}

std::string RatioText(double ratio) {
  return ratio == 0 ? "" : absl::StrFormat("%.*fx", ratio < 10 ? 2 : 1, ratio);
}

// Left-aligned text columns, right-aligned numbers.
std::string Aligned(const std::vector<std::vector<std::string>>& rows, size_t text_columns) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t k = 0; k < row.size(); ++k) widths[k] = std::max(widths[k], row[k].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t k = 0; k < row.size(); ++k) {
      const std::string padding(widths[k] - row[k].size(), ' ');
      const bool left = k < text_columns || k + 1 == row.size();
      absl::StrAppend(&line, left ? row[k] : padding, left ? padding : row[k], "  ");
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

nlohmann::json JsonOf(const Measured& one) {
  nlohmann::json rounds = nlohmann::json::array();
  for (const RoundStats& round : one.summary.rounds) {
    rounds.push_back({{"samples", round.count},
                      {"min_ns", round.min},
                      {"p50_ns", round.p50},
                      {"p99_ns", round.p99},
                      {"max_ns", round.max}});
  }
  nlohmann::json tried = nlohmann::json::object();
  for (const auto& setting : one.tried) tried[setting.first] = setting.second;
  return {{"name", one.name},
          {"role", RoleName(one.role)},
          {"setting", one.setting},
          {"settings_tried_p50_ns", tried},
          {"iterations", one.iterations},
          {"p50_ns", one.summary.p50},
          {"p99_ns", one.summary.p99},
          {"p50_least_ns", one.summary.p50_least},
          {"p50_most_ns", one.summary.p50_most},
          {"rounds", rounds}};
}

}  // namespace

std::string TimeText(double nanos) {
  const char* const units[] = {"ns", "us", "ms", "s"};
  int unit = 0;
  while (nanos >= 999.5 && unit < 3) {
    nanos /= 1000;
    ++unit;
  }
  const int decimals = nanos < 10 ? 2 : nanos < 100 ? 1 : 0;
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : decimals, nanos, units[unit]);
}

std::string BytesText(int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB"};
  int unit = 0;
  while (bytes >= 1024 && bytes % 1024 == 0 && unit < 3) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrCat(bytes, " ", units[unit]);
}

double RatioTo(const std::vector<Measured>& measured, const std::string& name, Role role) {
  const Measured* const best = Best(measured, role);
  for (const Measured& one : measured) {
    if (one.name == name && best != nullptr && best->summary.p50 > 0) {
      return one.summary.p50 / best->summary.p50;
    }
  }
  return 0;
}

double RatioToNamed(const std::vector<Measured>& measured, const std::string& name) {
  const Measured* const other = Named(measured, name);
  return other == nullptr || other->summary.p50 <= 0
             ? 0
             : measured.front().summary.p50 / other->summary.p50;
}

void Report::Add(const Case& c, std::vector<Measured> measured) {
  entries_.push_back({c, std::move(measured)});
}

void Report::AddComparison(const Case& c, std::vector<Measured> measured,
                           std::vector<Measured> readings) {
  std::vector<std::string> head = {"what", "ranks", "size"};
  std::vector<std::string> row = {c.what, absl::StrCat(c.ranks), BytesText(c.bytes)};
  const auto add = [&](const std::string& title, const std::string& text) {
    head.push_back(title);
    row.push_back(text);
  };
  for (const Measured& one : measured) {
    add(one.name, TimeText(one.summary.p50));
    const Measured* const reading = Named(readings, one.name);
    if (reading != nullptr) add("+ read", TimeText(reading->summary.p50));
  }
  for (const Measured& one : measured) {
    if (one.role != Role::kPeer) continue;
    add(absl::StrCat("to ", one.name), RatioText(RatioToNamed(measured, one.name)));
    if (Named(readings, one.name) == nullptr) continue;
    add("+ read", RatioText(RatioToNamed(readings, one.name)));
  }
  // Rows of one table have equal columns: where a peer begins or ends to take part, so does a
  // table.
  if (comparisons_.empty() || last_head_ != head) comparisons_.push_back(head);
  last_head_ = std::move(head);
  comparisons_.push_back(std::move(row));
  entries_.push_back({c, std::move(measured), false});
  if (readings.empty()) return;
  Case reading_case = c;
  reading_case.what += ", all then read it";
  entries_.push_back({reading_case, std::move(readings), false});
}

void Report::AddNote(const std::string& note) {
  if (std::find(notes_.begin(), notes_.end(), note) == notes_.end()) notes_.push_back(note);
}

std::string Report::MachineText() const {
  std::string text;
  for (const auto& fact : machine_) absl::StrAppend(&text, fact.first, ": ", fact.second, "\n");
  return text;
}

std::string Report::TakeTable() {
  std::string comparisons;
  if (!comparisons_.empty()) comparisons = Aligned(std::exchange(comparisons_, {}), 1);
  std::vector<std::vector<std::string>> rows = {{"what", "ranks", "size", "contender", "median",
                                                 "p99", "spread of medians", "GB/s", "to floor",
                                                 "to peer", "setting"}};
  for (; printed_ < entries_.size(); ++printed_) {
    const Entry& entry = entries_[printed_];
    if (!entry.listed) continue;
    for (const Measured& one : entry.measured) {
      const Summary& s = one.summary;
      const bool compares = one.role == Role::kOurs || one.role == Role::kPeer;
      rows.push_back(
          {entry.c.what, entry.c.ranks == 0 ? "" : absl::StrCat(entry.c.ranks),
           entry.c.bytes < 0 ? "" : BytesText(entry.c.bytes), one.name, TimeText(s.p50),
           TimeText(s.p99), absl::StrCat(TimeText(s.p50_least), " .. ", TimeText(s.p50_most)),
           entry.c.moved_bytes == 0 ? "" : absl::StrFormat("%.1f", entry.c.moved_bytes / s.p50),
           compares ? RatioText(RatioTo(entry.measured, one.name, Role::kFloor)) : "",
           one.role == Role::kOurs ? RatioText(RatioTo(entry.measured, one.name, Role::kPeer)) : "",
           one.setting});
    }
  }
  return rows.size() == 1 ? comparisons : Aligned(rows, 1) + comparisons;
}

std::string Report::GoalsText() const {
  std::string text;
  for (const Goal& goal : goals_) {
    absl::StrAppend(&text, goal.met() ? "met     " : "MISSED  ", goal.what, " ",
                    goal.at_least ? ">= " : "<= ", absl::StrFormat("%.3g", goal.limit), goal.unit,
                    ": ", absl::StrFormat("%.3g", goal.value), goal.unit, "\n");
  }
  for (const std::string& note : notes_) absl::StrAppend(&text, "note: ", note, "\n");
  return text;
}

std::string Report::Json() const {
  nlohmann::json machine = nlohmann::json::object();
  for (const auto& fact : machine_) machine[fact.first] = fact.second;
  nlohmann::json results = nlohmann::json::array();
  for (const Entry& entry : entries_) {
    nlohmann::json contenders = nlohmann::json::array();
    for (const Measured& one : entry.measured) {
      nlohmann::json j = JsonOf(one);
      if (entry.c.moved_bytes > 0) j["bytes_per_ns"] = entry.c.moved_bytes / one.summary.p50;
      if (one.role == Role::kOurs) {
        j["ratio_to_floor"] = RatioTo(entry.measured, one.name, Role::kFloor);
        j["ratio_to_peer"] = RatioTo(entry.measured, one.name, Role::kPeer);
        for (const Measured& peer : entry.measured) {
          if (peer.role != Role::kPeer || peer.summary.p50 <= 0) continue;
          j["ratios_to_peers"][peer.name] = one.summary.p50 / peer.summary.p50;
        }
      }
      contenders.push_back(std::move(j));
    }
    results.push_back({{"benchmark", entry.c.benchmark},
                       {"what", entry.c.what},
                       {"ranks", entry.c.ranks},
                       {"bytes", entry.c.bytes},
                       {"contenders", contenders}});
  }
  nlohmann::json goals = nlohmann::json::array();
  for (const Goal& goal : goals_) {
    goals.push_back({{"what", goal.what},
                     {"limit", goal.limit},
                     {"value", goal.value},
                     {"unit", goal.unit},
                     {"at_least", goal.at_least},
                     {"met", goal.met()}});
  }
  return nlohmann::json(
             {{"machine", machine}, {"results", results}, {"goals", goals}, {"notes", notes_}})
      .dump(1);
}

absl::Status Report::WriteJson(const std::string& path) const {
  std::ofstream file(path);
  file << Json() << "\n";
  file.close();
  if (!file) return absl::PermissionDeniedError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
