#include "tools/gpu_probe/report.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "nlohmann/json.hpp"
#include "tools/gpu_probe/assumptions.h"

namespace chorus {
namespace probe {
namespace {

// In a cell of a table.
std::string Cell(const std::string& text) {
  return absl::StrReplaceAll(text, {{"|", "\\|"}, {"\n", " "}});
}

std::string Quantity(const Record& record) {
  return record.unit.empty() ? NumberText(record.value)
                             : absl::StrCat(NumberText(record.value), " ", record.unit);
}

std::string Indented(const std::string& text) {
  return "    " + absl::StrReplaceAll(text, {{"\n", "\n    "}}) + "\n";
}

}  // namespace

Verdict VerdictOf(const Outcome& outcome) {
  std::string ending;
  if (outcome.how != Outcome::How::kEnded) {
    ending = absl::StrCat("the stage ", HowText(outcome.how), ": ", outcome.how_text);
  }
  if (outcome.garbage_lines > 0) {
    absl::StrAppend(&ending, ending.empty() ? "" : "; ", outcome.garbage_lines,
                    " lines that are no records");
  }
  Verdict verdict;
  bool said = false;
  for (const Record& record : outcome.records) {
    if (record.kind != Record::Kind::kVerdict || record.what != outcome.stage.name) continue;
    verdict = {record.decision, record.text};
    said = true;
  }
  if (!said) return {Decision::kNotDecided, ending.empty() ? "it said nothing" : ending};
  if (!ending.empty()) absl::StrAppend(&verdict.why, " (but ", ending, ")");
  return verdict;
}

std::string StageText(const Outcome& outcome) {
  const Assumption* const assumption = FindAssumption(outcome.stage.name);
  std::string text =
      absl::StrCat("### ", outcome.stage.name, ": ",
                   assumption != nullptr ? assumption->text : outcome.stage.title, "\n\n");
  bool any = false;
  for (const Record& record : outcome.records) {
    if (record.kind == Record::Kind::kVerdict) continue;
    if (!any) text += "| what | median | least to most | samples |\n|---|---|---|---|\n";
    any = true;
    if (record.kind == Record::Kind::kFact) {
      absl::StrAppend(&text, "| ", Cell(record.what), " | ", Cell(record.text), " | | |\n");
    } else if (record.samples == 1) {
      absl::StrAppend(&text, "| ", Cell(record.what), " | ", Quantity(record), " | | 1 |\n");
    } else {
      absl::StrAppend(&text, "| ", Cell(record.what), " | ", Quantity(record), " | ",
                      NumberText(record.least), " to ", NumberText(record.most), " | ",
                      record.samples, " |\n");
    }
  }
  if (any) text += "\n";
  if (assumption != nullptr) {
    const Verdict verdict = VerdictOf(outcome);
    absl::StrAppend(&text, "**", outcome.stage.name, " ", DecisionText(verdict.decision),
                    "**: ", verdict.why, "\n");
    if (verdict.decision != Decision::kHolds) {
      absl::StrAppend(&text, "If it is false: ", assumption->if_false, "\n");
    }
  } else {
    for (const Record& record : outcome.records) {
      if (record.kind == Record::Kind::kVerdict) {
        absl::StrAppend(&text, "**", outcome.stage.name, " stopped**: ", record.text, "\n");
      }
    }
    if (outcome.how != Outcome::How::kEnded) {
      absl::StrAppend(&text, "**", outcome.stage.name, " ", HowText(outcome.how),
                      "**: ", outcome.how_text, "\n");
    }
  }
  const bool bad = outcome.how != Outcome::How::kEnded && outcome.how != Outcome::How::kLeftOut;
  if (bad && !outcome.log_tail.empty()) {
    absl::StrAppend(&text, "\nThe last that it printed:\n\n", Indented(outcome.log_tail));
  }
  return text + "\n";
}

std::string SummaryText(const std::vector<Outcome>& outcomes) {
  std::string text = "| | assumption | verdict | why | if false |\n|---|---|---|---|---|\n";
  for (const Assumption& assumption : Assumptions()) {
    Verdict verdict = {Decision::kNotDecided, "not asked for"};
    for (const Outcome& outcome : outcomes) {
      if (outcome.stage.name == assumption.id) verdict = VerdictOf(outcome);
    }
    absl::StrAppend(&text, "| ", assumption.id, " | ", Cell(assumption.text), " | ",
                    DecisionText(verdict.decision), " | ", Cell(verdict.why), " | ",
                    Cell(assumption.if_false), " |\n");
  }
  return text;
}

std::string JsonLines(const std::vector<Outcome>& outcomes) {
  std::string lines;
  for (const Outcome& outcome : outcomes) {
    for (const Record& record : outcome.records) {
      nlohmann::json line = nlohmann::json::parse(record.Json());
      line["stage"] = outcome.stage.name;
      absl::StrAppend(&lines, line.dump(), "\n");
    }
    nlohmann::json end;
    end["stage"] = outcome.stage.name;
    end["kind"] = "end";
    end["how"] = HowText(outcome.how);
    end["text"] = outcome.how_text;
    end["seconds"] = outcome.seconds;
    absl::StrAppend(&lines, end.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace),
                    "\n");
  }
  return lines;
}

}  // namespace probe
}  // namespace chorus
