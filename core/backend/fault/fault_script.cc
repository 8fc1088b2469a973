#include "core/backend/fault/fault_script.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/error.h"

namespace chorus {
namespace {

template <typename T>
struct Word {
  absl::string_view text;
  T value;
};

using Site = FaultRule::Site;
using FaultEffect = FaultRule::Effect;
constexpr Word<Site> kSites[] = {{"allocate", Site::kAllocate},
                                 {"open", Site::kOpen},
                                 {"launch", Site::kLaunch},
                                 {"copy", Site::kCopy},
                                 {"collective", Site::kCollective}};
constexpr Word<FaultEffect> kEffects[] = {{"delay", FaultEffect::kDelay},
                                          {"error", FaultEffect::kError},
                                          {"oom", FaultEffect::kOutOfMemory},
                                          {"lost", FaultEffect::kLost}};

template <typename T, size_t N>
bool Find(const Word<T> (&words)[N], absl::string_view text, T* value) {
  for (const Word<T>& word : words) {
    if (word.text == text) {
      *value = word.value;
      return true;
    }
  }
  return false;
}

absl::Status Wrong(absl::string_view rule, absl::string_view expected) {
  return Malformed(absl::StrCat("fault rule \"", rule, "\": expected ", expected));
}

absl::Status ParseSetting(absl::string_view rule_text, absl::string_view setting, FaultRule* rule) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(setting, absl::MaxSplits('=', 1));
  const absl::string_view key = parts.first;
  const absl::string_view value = parts.second;
  if (key == "device") {
    if (absl::SimpleAtoi(value, &rule->device) && rule->device >= 0) return absl::OkStatus();
    return Wrong(rule_text, "device=NUMBER");
  }
  if (key == "skip") {
    if (absl::SimpleAtoi(value, &rule->skip) && rule->skip >= 0) return absl::OkStatus();
    return Wrong(rule_text, "skip=NUMBER");
  }
  if (key == "times") {
    if (value == "all") {
      rule->times = -1;
      return absl::OkStatus();
    }
    if (absl::SimpleAtoi(value, &rule->times) && rule->times >= 0) return absl::OkStatus();
    return Wrong(rule_text, "times=NUMBER or times=all");
  }
  if (key == "probability") {
    if (absl::SimpleAtod(value, &rule->probability) && rule->probability >= 0 &&
        rule->probability <= 1) {
      return absl::OkStatus();
    }
    return Wrong(rule_text, "probability= a number from 0 to 1");
  }
  if (key == "for") {
    if (absl::ParseDuration(value, &rule->delay) && rule->delay >= absl::ZeroDuration()) {
      return absl::OkStatus();
    }
    return Wrong(rule_text, "for= a duration such as 5ms");
  }
  return Wrong(rule_text, "device=, skip=, times=, probability= or for=");
}

}  // namespace

absl::StatusOr<FaultScript> ParseFaultScript(absl::string_view text) {
  FaultScript script;
  for (absl::string_view rule_text : absl::StrSplit(text, ';', absl::SkipWhitespace())) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(rule_text, absl::ByAnyChar(" \t\n"), absl::SkipEmpty());
    if (words.size() == 1 && words[0].substr(0, 5) == "seed=") {
      if (!absl::SimpleAtoi(words[0].substr(5), &script.seed)) {
        return Wrong(rule_text, "seed=NUMBER");
      }
      continue;
    }
    FaultRule rule;
    if (words.size() < 2 || !Find(kSites, words[0], &rule.site)) {
      return Wrong(rule_text, "a site (allocate, open, launch, copy, collective) and an effect");
    }
    if (!Find(kEffects, words[1], &rule.effect)) {
      return Wrong(rule_text, "an effect: delay, error, oom or lost");
    }
    const bool on_stream = rule.site != Site::kAllocate && rule.site != Site::kOpen;
    if (!on_stream && (rule.effect == FaultEffect::kDelay || rule.effect == FaultEffect::kLost)) {
      return Wrong(rule_text, "launch, copy or collective for a delay or a loss");
    }
    if (rule.effect == FaultEffect::kOutOfMemory && rule.site != Site::kAllocate) {
      return Wrong(rule_text, "allocate for oom");
    }
    for (size_t i = 2; i < words.size(); ++i) {
      CHORUS_RETURN_IF_ERROR(ParseSetting(rule_text, words[i], &rule));
    }
    script.rules.push_back(rule);
  }
  return script;
}

}  // namespace chorus
