// Trainings in files: a module's variables, an optimizer's state and what the caller counts, in
// safetensors (safetensors.h). A resumed training is bitwise the one that was never interrupted.
//
// In one file (SaveCheckpoint), or shared out among the ranks that have the same, a file each
// (SaveShardedCheckpoint, shards.h); any number of ranks may load it, however many saved it.
// A ShardedOptimizer goes by way of one of all parameters (Gather, Scatter). Ranks that each hold a
// part of their own (layers in shards) write it by SaveShard and read the rows that they need by
// TensorFiles.
//
// Variables have their names ("encoder.2.weight"); an optimizer's state of a parameter is
// "optimizer.NAME.SLOT". Files with the right names and types open, whoever wrote them: a module's
// variables from PyTorch's, where the layers have its names.
//
// Threads: any; the module and the optimizer do not change meanwhile. Ownership: nothing is kept.
// Errors: returned; a load that fails has changed nothing. INVALID_ARGUMENT kBadType: the file is
//   of another model, naming what is missing, not expected, or of another type; and as
//   safetensors.h.
#ifndef CHORUS_CLIENT_NN_CHECKPOINT_H_
#define CHORUS_CLIENT_NN_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/nn/module.h"
#include "chorus/nn/optim.h"
#include "chorus/session.h"

namespace chorus {
namespace nn {

// What the caller goes on from: "step", "epoch", "seed", the sampler's state, ... A file also says
// "format": "pt", unless there is another "format" here: Hugging Face's loaders want it. Words that
// begin with "optimizer.steps." or "optimizer.skipped.", and "optimizer.learning_rate", are the
// optimizer's: kBadType.
using Progress = std::map<std::string, std::string>;

// Waits for all of it, and writes it in one piece (SaveTensors). One rank's is enough where ranks
// have the same. `optimizer` may be null.
absl::Status SaveCheckpoint(const std::string& path, const Module& module,
                            Optimizer* optimizer = nullptr, const Progress& progress = {});
// All of `ranks` call it, with equal arguments: the first one writes all buffers, its own, for
// ranks may have others (a BatchNorm's that shares no batch); parameters, each with its state of
// the optimizer, which all have alike, are shared out so that each writes about as many bytes, of
// whole tensors; and one writes the index, ShardIndexPath(name). Returns on all when that is there,
// or on all an error: ABORTED kPeerRefused names a rank that could not write, which has its own. A
// name is used once: put the step in it. Where ranks have parameters or moments of their own (what
// the loss of a TrainStep Sets of its rows, local SGD) they would be some of each: there
// SaveCheckpoint of one rank. What is behind its last slash is UTF-8, for the index has it: else
// INVALID_ARGUMENT kBadType on every rank.
absl::Status SaveShardedCheckpoint(const std::string& name, const Group& ranks,
                                   const Module& module, Optimizer* optimizer = nullptr,
                                   const Progress& progress = {});
// From a file or an index, into a module that has its variables (Init), on its device; `optimizer`,
// unless it is null, is of the same kind as when it was saved. Waits until all of it is there,
// beside what it replaces: RESOURCE_EXHAUSTED kOutOfMemory where that does not fit. A variable that
// has failed is whole again; of one that failed at once, and has no dtype, the file's is taken, and
// the device of all that have one. FAILED_PRECONDITION kWrongState: Init is to be called before;
// also where one has failed at once and those that have not are on several devices, or there are
// none and the session has several. The optimizer has the learning rate that was saved
// (SetLearningRate), where the file has one. Returns the progress that was saved.
absl::StatusOr<Progress> LoadCheckpoint(const std::string& path, Module* module,
                                        Optimizer* optimizer = nullptr);

// A LossScaler's state beside what else the caller goes on from: "scaler.scale", "scaler.streak"
// and "scaler.skipped". The first one waits for it.
absl::Status SaveScaler(const DeviceRef& device, LossScaler* scaler, Progress* progress);
// INVALID_ARGUMENT kBadType: one of them is missing, or cannot be.
absl::Status LoadScaler(const Progress& progress, const DeviceRef& device, LossScaler* scaler);

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_CHECKPOINT_H_
