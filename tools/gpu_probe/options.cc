#include "tools/gpu_probe/options.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace chorus {
namespace probe {

absl::StatusOr<Options> ParseOptions(const std::vector<std::string>& arguments,
                                     const std::vector<std::string>& names) {
  Options options;
  const auto is_stage = [&](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const std::string& argument : arguments) {
    absl::string_view value = argument;
    if (!options.child.empty() && !absl::StartsWith(value, "--libraries=")) {
      options.rest.push_back(argument);
    } else if (argument == "--help" || argument == "-h") {
      options.help = true;
    } else if (argument == "--list") {
      options.list = true;
    } else if (absl::ConsumePrefix(&value, "--only=")) {
      for (const absl::string_view name : absl::StrSplit(value, ',', absl::SkipEmpty())) {
        options.only.emplace_back(name);
        if (!is_stage(options.only.back())) {
          return absl::InvalidArgumentError(
              absl::StrCat("no stage ", name, "; there are ", absl::StrJoin(names, ", ")));
        }
      }
      if (options.only.empty()) return absl::InvalidArgumentError("--only= names no stage");
    } else if (absl::ConsumePrefix(&value, "--limit=")) {
      if (!absl::SimpleAtod(value, &options.limit_seconds) || !(options.limit_seconds > 0) ||
          options.limit_seconds > 86400) {
        return absl::InvalidArgumentError(absl::StrCat(argument, ": not a number of seconds"));
      }
    } else if (absl::ConsumePrefix(&value, "--out=")) {
      options.out = std::string(value);
      if (options.out.empty()) return absl::InvalidArgumentError("--out= names no file");
    } else if (absl::ConsumePrefix(&value, "--libraries=")) {
      for (const absl::string_view folder : absl::StrSplit(value, ':', absl::SkipEmpty())) {
        options.libraries.emplace_back(folder);
      }
    } else if (absl::ConsumePrefix(&value, "--stage=")) {
      options.stage = std::string(value);
    } else if (absl::ConsumePrefix(&value, "--child=")) {
      options.child = std::string(value);
    } else {
      return absl::InvalidArgumentError(absl::StrCat("unknown argument ", argument));
    }
  }
  return options;
}

std::string UsageText() {
  return "gpu_probe decides, on the first NVIDIA GPU, what the cuda backend assumes "
         "(docs/gpu.md).\n"
         "\n"
         "  --only=P1,P5       these stages (--list names them)\n"
         "  --limit=SECONDS    of everything, 240 unless set: what does not fit is left out\n"
         "  --out=FILE         the tables as Markdown; FILE.jsonl gets every number\n"
         "  --libraries=A:B    folders to look for NCCL, cuBLASLt and the driver in, first\n"
         "\n"
         "Exit status: 0 all that was asked has run, 1 a stage crashed or hung, 2 wrong "
         "arguments,\n"
         "3 no driver or no GPU here.\n";
}

}  // namespace probe
}  // namespace chorus
