// Trainings in files: a module's variables, an optimizer's state and what the caller counts, in
// safetensors (safetensors.h). A resumed training is bitwise the one that was never interrupted.
//
// Variables have their names ("encoder.2.weight"); an optimizer's state of a parameter is
// "optimizer.NAME.SLOT". Files with the right names and types open, whoever wrote them: a module's
// variables from PyTorch's, where the layers have its names.
//
// Threads: any; the module and the optimizer do not change meanwhile. Ownership: nothing is kept.
// Errors: returned; a load that fails has changed nothing. INVALID_ARGUMENT kBadType: the file is
// of
//   another model, naming what is missing, not expected, or of another type; and as safetensors.h.
#ifndef CHORUS_CLIENT_NN_CHECKPOINT_H_
#define CHORUS_CLIENT_NN_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/nn/module.h"
#include "chorus/nn/optim.h"

namespace chorus {
namespace nn {

// What the caller goes on from: "step", "epoch", "seed", the sampler's place, ...
using Progress = std::map<std::string, std::string>;

// Waits for all of it, and writes it in one piece (SaveTensors). One rank's is enough where ranks
// have the same. `optimizer` may be null.
absl::Status SaveCheckpoint(const std::string& path, const Module& module,
                            Optimizer* optimizer = nullptr, const Progress& progress = {});
// Into a module that has its variables (Init), on its device; `optimizer`, unless it is null, is of
// the same kind as when it was saved. Returns the progress that was saved.
absl::StatusOr<Progress> LoadCheckpoint(const std::string& path, Module* module,
                                        Optimizer* optimizer = nullptr);

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_CHECKPOINT_H_
