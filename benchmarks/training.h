// The ranks of a job that trains models: helpers, each a process with a session of its own.
//
// Models: "perceptron", lesson 5's; "transformer", lesson 6's; "resnet", lesson 7's.
//
// Tasks of a rank:
//   join   join the world called `text`, of `number` ranks; and a world of its own
//   train  steps of the model `text`, a few under way; number 1: in its own world, so that nothing
//          is exchanged. The outcome's text is equal on ranks whose parameters are
#ifndef CHORUS_BENCHMARKS_TRAINING_H_
#define CHORUS_BENCHMARKS_TRAINING_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "benchmarks/daemon.h"
#include "benchmarks/helper.h"
#include "benchmarks/interleave.h"

namespace chorus {
namespace bench {

class Training {
 public:
  static absl::StatusOr<std::unique_ptr<Training>> Start(const ScratchDirectory& scratch,
                                                         const Daemon& daemon,
                                                         const std::string& name, int ranks);
  // Times of a step of all ranks together. DATA_LOSS: ranks that train together have other
  // parameters. It outlives the contender.
  absl::StatusOr<Contender> AsContender(const std::string& name, Role role,
                                        const std::string& model, bool together);

 private:
  std::unique_ptr<HelperGroup> ranks_;
};

int RunTrainingHelper(const std::string& control_path, int index, const std::string& address);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_TRAINING_H_
