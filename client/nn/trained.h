// What optimizers that do not step by grad() alone ask of their parameters.
//
// Threads: any. Ownership: nothing is kept. Errors: INVALID_ARGUMENT kBadType.
#ifndef CHORUS_CLIENT_NN_TRAINED_H_
#define CHORUS_CLIENT_NN_TRAINED_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "chorus/nn/module.h"
#include "core/base/error.h"

namespace chorus {
namespace nn {

// Refuses a frozen parameter, the one of that index: it would go on moving, by its momentum or as
// its weights decay.
inline absl::Status CheckIsTrained(const Variable& parameter, size_t index) {
  if (parameter.requires_grad()) return absl::OkStatus();
  return BadType(absl::StrCat("the optimizer's parameter ", index, " is frozen"));
}

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_TRAINED_H_
