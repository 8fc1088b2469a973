// A layer of experts, one on each rank (Fedus et al. 2022): a gate sends each row to the expert
// that it likes best, and weighs what comes back. How many rows go where is known only when it
// runs.
//
// Threads: chorus/nn/module.h. Ownership: a layer owns its variables, of the experts its rank's
//   alone. Errors: in the results.
#ifndef CHORUS_EXAMPLES_MOE_LAYER_H_
#define CHORUS_EXAMPLES_MOE_LAYER_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/nn/nn.h"

namespace moe {

// Two linear layers, [..., width] to [..., width].
class Expert : public chorus::nn::Sequential {
 public:
  Expert(int64_t width, int64_t hidden);
};

// [n, width] to [n, width], with the same n on all ranks of `group`; every rank calls it. The
// parameters of rank r's expert are called "experts.r...", and begin as their names say wherever
// that expert is.
class Moe : public chorus::nn::Module {
 public:
  Moe(int64_t width, int64_t hidden, const chorus::Group& group);
  chorus::Tensor Forward(const chorus::Tensor& x) override;
  // Each row's expert [n], an i64.
  chorus::Tensor ExpertOf(const chorus::Tensor& x);
  // A number to be added to the loss, a little of it: 1 where this rank's rows go to all experts
  // alike, and the more the fewer get them. Without it a gate soon has favourites.
  chorus::Tensor Balance(const chorus::Tensor& x);
  // What this rank alone has: what is left is equal on all ranks.
  std::vector<chorus::nn::Variable> expert_parameters() const { return expert_.parameters(); }

 private:
  const chorus::Group group_;
  chorus::nn::Linear& gate_;
  chorus::nn::ModuleMap& experts_;
  Expert& expert_;
};

// Adds up over `group` the gradients of the `parameters` that are equal on all ranks, all but
// `expert`, this rank's: those have come from all ranks already, by the way back of its rows. For
// TrainStep's on_gradients.
std::function<void(std::vector<chorus::Tensor>*)> AddShared(
    const std::vector<chorus::nn::Variable>& parameters,
    const std::vector<chorus::nn::Variable>& expert, const chorus::Group& group);

}  // namespace moe

#endif  // CHORUS_EXAMPLES_MOE_LAYER_H_
