// What optimizers ask of their parameters.
//
// Threads: any. Ownership: nothing is kept. Errors: INVALID_ARGUMENT kBadType.
#ifndef CHORUS_CLIENT_NN_TRAINED_H_
#define CHORUS_CLIENT_NN_TRAINED_H_

#include <algorithm>
#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "chorus/nn/module.h"
#include "chorus/nn/optim.h"
#include "core/base/error.h"

namespace chorus {
namespace nn {

// Refuses a parameter that is given twice: it would have two states, or the last group's update.
inline absl::Status CheckEachOnce(const std::vector<ParameterGroup>& groups) {
  std::vector<Variable> all;
  for (const ParameterGroup& group : groups) {
    for (const Variable& parameter : group.parameters) {
      if (std::find(all.begin(), all.end(), parameter) != all.end()) {
        return BadType("an optimizer expects each parameter once, got one twice");
      }
      all.push_back(parameter);
    }
  }
  return absl::OkStatus();
}

// Of optimizers that do not step by grad() alone. Refuses a frozen parameter, the one of that
// index: it would go on moving, by its momentum or as its weights decay.
inline absl::Status CheckIsTrained(const Variable& parameter, size_t index) {
  if (parameter.requires_grad()) return absl::OkStatus();
  return BadType(absl::StrCat("the optimizer's parameter ", index, " is frozen"));
}

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_TRAINED_H_
