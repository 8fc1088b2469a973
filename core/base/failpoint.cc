#include "core/base/failpoint.h"

#include <signal.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/numbers.h"

namespace chorus {

namespace failpoint_internal {
std::atomic<FailpointHook> hook{nullptr};
}  // namespace failpoint_internal

namespace {

constexpr char kVariable[] = "CHORUS_FAILPOINT";

// What the environment asked for; written once, before main.
absl::string_view armed_name;
std::atomic<int> hits_left{0};

void KillWhenDue(absl::string_view name) {
  if (name == armed_name && hits_left.fetch_sub(1, std::memory_order_relaxed) == 1) {
    raise(SIGKILL);
  }
}

bool ArmFromEnvironment() {
  const char* text = std::getenv(kVariable);
  if (text == nullptr) return false;
  int count = 0;
  if (!ParseFailpoint(text, &armed_name, &count)) {
    std::fprintf(stderr, "%s: expected name[:count]=kill with a name that exists, got '%s'\n",
                 kVariable, text);
    std::_Exit(2);
  }
  hits_left.store(count, std::memory_order_relaxed);
  SetFailpointHook(&KillWhenDue);
  return true;
}

// Before main, so that no failpoint is passed unarmed.
const bool armed_from_environment = ArmFromEnvironment();

}  // namespace

void SetFailpointHook(FailpointHook hook) {
  failpoint_internal::hook.store(hook, std::memory_order_relaxed);
}

bool ParseFailpoint(absl::string_view text, absl::string_view* name, int* count) {
  const size_t equals = text.find('=');
  if (equals == absl::string_view::npos || text.substr(equals + 1) != "kill") return false;
  text = text.substr(0, equals);
  *count = 1;
  const size_t colon = text.find(':');
  if (colon != absl::string_view::npos) {
    if (!absl::SimpleAtoi(text.substr(colon + 1), count) || *count < 1) return false;
    text = text.substr(0, colon);
  }
  for (const char* listed : kFailpoints) {
    if (text == listed) {
      *name = listed;
      return true;
    }
  }
  return false;
}

}  // namespace chorus
