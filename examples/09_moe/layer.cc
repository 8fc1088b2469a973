#include "examples/09_moe/layer.h"

#include <algorithm>
#include <string>

#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/functional/shape.h"
#include "chorus/functional/sort.h"

namespace moe {

namespace nn = chorus::nn;
using chorus::Tensor;

Expert::Expert(int64_t width, int64_t hidden)
    : Sequential({nn::Make<nn::Linear>(width, hidden), nn::ReluLayer(),
                  nn::Make<nn::Linear>(hidden, width)}) {}

Moe::Moe(int64_t width, int64_t hidden, const chorus::Group& group)
    : Module("Moe"),
      group_(group),
      gate_(Add<nn::Linear>("gate", width, group.size(), /*bias=*/false)),
      experts_(Add<nn::ModuleMap>("experts")),
      expert_(experts_.Insert<Expert>(std::to_string(group.rank()), width, hidden)) {}

// As in Forward: of shares, of which two may be equal where what they come from is not.
Tensor Moe::ExpertOf(const Tensor& x) { return ArgMax(Softmax(gate_(x))); }

Tensor Moe::Forward(const Tensor& x) {
  // A tensor that has failed has no shape. Others wait for both exchanges, and are told.
  const int64_t n = x.shape().empty() ? 0 : x.shape()[0];
  const Tensor shares = Softmax(gate_(x));
  const Tensor expert = ArgMax(shares, -1, /*keep_dims=*/true);
  // Rows in the order of their experts, and how many each gets.
  const chorus::Sorted by_expert = Sort(Squeeze(expert, -1));
  const Tensor counts = Sum(OneHot(by_expert.values, group_.size(), chorus::DType::kI64), 0);
  // There: at most everybody's rows. And back: as many as came from each.
  const chorus::Ragged there =
      AllToAllRagged(Take(x, by_expert.indices), counts, n * group_.size(), group_);
  const chorus::Ragged back = AllToAllRagged(expert_(there.values), there.counts, n, group_);
  return TakeAlong(shares, expert, -1) * ScatterAdd(back.values, by_expert.indices, n);
}

Tensor Moe::Balance(const Tensor& x) {
  const Tensor shares = Softmax(gate_(x));
  const Tensor chosen = Mean(OneHot(ArgMax(shares), group_.size(), x.dtype()), 0);
  return Sum(chosen * Mean(shares, 0)) * static_cast<double>(group_.size());
}

std::function<void(std::vector<Tensor>*)> AddShared(const std::vector<nn::Variable>& parameters,
                                                    const std::vector<nn::Variable>& expert,
                                                    const chorus::Group& group) {
  return [=](std::vector<Tensor>* gradients) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (std::find(expert.begin(), expert.end(), parameters[i]) != expert.end()) continue;
      (*gradients)[i] = AllReduce((*gradients)[i], group);
    }
  };
}

}  // namespace moe
