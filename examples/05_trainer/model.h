// A perceptron with one hidden layer, and its whole training step as one function: forward, loss,
// gradients, their sum over the ranks, update. Compiled, a step is one request to the daemon.
//
// Threads: one trains. Ownership: parameters are handles of tensors. Errors: the statuses of the
//   steps.
#ifndef CHORUS_EXAMPLES_TRAINER_MODEL_H_
#define CHORUS_EXAMPLES_TRAINER_MODEL_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/chorus.h"
#include "examples/05_trainer/dataset.h"

namespace trainer {

struct ModelShape {
  int64_t pixels = 784;
  int64_t hidden = 256;
  int64_t classes = 10;
};

// What a step replaces: weights and biases of both layers, then the momentum of each.
constexpr size_t kParameters = 4;
using State = std::vector<chorus::Tensor>;  // 2 * kParameters

// Initial values that depend on the seed alone. Rank 0's reach everybody (Broadcast), so the ranks
// of a node hold one copy.
absl::StatusOr<State> InitialState(const chorus::World& world, const ModelShape& shape,
                                   uint64_t seed);

class Trainer {
 public:
  // No batch of this rank's has more than `max_batch` images, or none.
  Trainer(const chorus::World& world, const ModelShape& shape, float momentum, int64_t max_batch);

  // Replaces the state by that after a step with this rank's batch: SGD with momentum on the mean
  // loss over all ranks' images, of which there are `global_size`. Returns at once, with that loss
  // as a tensor that can be waited for; several steps may be under way.
  absl::StatusOr<chorus::Tensor> Step(const Batch& batch, int64_t global_size, float learning_rate,
                                      State* state);

  // How many of all ranks' images the model puts into their class; each gives its own batch.
  absl::StatusOr<chorus::Tensor> CountRight(const Batch& batch, const State& state);

  // How often the step was traced: once, whatever sizes and rates come.
  int traces() const { return step_.traces(); }

 private:
  chorus::World world_;
  ModelShape shape_;
  chorus::Compiled step_;
  chorus::Compiled count_;
};

}  // namespace trainer

#endif  // CHORUS_EXAMPLES_TRAINER_MODEL_H_
