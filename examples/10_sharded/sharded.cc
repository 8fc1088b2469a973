// Lesson 10: a network of which each rank keeps a piece of every layer, beside the same network
// whole on each rank. Both train alike.
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/nn/nn.h"
#include "core/base/error.h"

namespace {

namespace nn = chorus::nn;
using chorus::Tensor;
constexpr int64_t kIn = 16, kWidth = 64, kOut = 8, kRows = 32, kSteps = 60;

// A linear layer in equal pieces of its weight. A call gathers it; the gradient of that is a
// reduce-scatter, which gives each rank what its piece needs, added up over the ranks.
class ShardedLinear : public nn::Module {
 public:
  ShardedLinear(int64_t in, int64_t out, const chorus::Group& ranks)
      : Module("ShardedLinear"), shape_({out, in}), ranks_(ranks) {
    if (in * out % ranks.size() != 0) {
      RefuseAll(absl::StrCat("expected ranks that divide the weight's ", in * out, " numbers, got ",
                             ranks.size()));
    }
    const int64_t size = in * out / ranks.size();
    const int64_t begin = size * ranks.rank();
    // The numbers that the whole layer would have: a variable's seed goes by its name.
    piece_ = AddParameter("weight", {size},
                          [=, whole = nn::init::FanInUniform(in)](
                              const auto& device, auto dtype, const auto& /*shape*/, auto seed) {
                            const Tensor weight = whole(device, dtype, {out, in}, seed);
                            return Slice(Reshape(weight, {-1}), 0, begin, begin + size);
                          });
  }
  Tensor Forward(const Tensor& x) override {
    return MatMul(x, Transpose(Reshape(AllGatherIntoTensor(piece_(), ranks_), shape_)));
  }

 private:
  const chorus::Shape shape_;
  const chorus::Group ranks_;
  nn::Variable piece_;
};

template <typename Layer, typename... Ranks>
std::shared_ptr<nn::Module> Network(const Ranks&... ranks) {
  return nn::Make<nn::Sequential>(
      nn::Modules{nn::Make<Layer>(kIn, kWidth, ranks...), nn::TanhLayer(),
                  nn::Make<Layer>(kWidth, kWidth, ranks...), nn::TanhLayer(),
                  nn::Make<Layer>(kWidth, kOut, ranks...)});
}
struct PlainLinear : nn::Linear {
  PlainLinear(int64_t in, int64_t out) : Linear(in, out, /*bias=*/false) {}
};

absl::Status Run() {
  CHORUS_ASSIGN_OR_RETURN(const chorus::Session session, chorus::Session::Open());
  CHORUS_ASSIGN_OR_RETURN(const chorus::World world, session.Join());
  const auto sharded = Network<ShardedLinear>(world.group());
  const auto whole = Network<PlainLinear>();
  CHORUS_RETURN_IF_ERROR(sharded->Init(world, /*seed=*/1));
  CHORUS_RETURN_IF_ERROR(whole->Init(world, /*seed=*/1));
  CHORUS_ASSIGN_OR_RETURN(const auto replicated, nn::DistributedDataParallel::Create(whole, world));
  nn::AdamW::Options options;
  options.learning_rate = 1e-2;
  // Its state is of this rank's pieces alone.
  nn::AdamW of_pieces(sharded->parameters(), options);
  nn::AdamW of_whole(whole->parameters(), options);
  // The mean over ranks: what is differentiated is the sum of the ranks' losses.
  nn::TrainStep step(sharded.get(), &of_pieces, [&](const auto& in) {
    return nn::MseLoss((*sharded)(in[0]), in[1]) * (1.0 / world.size());
  });
  for (int64_t i = 1; i <= kSteps; ++i) {
    CHORUS_RETURN_IF_ERROR(world.Step(i));
    const auto draw = static_cast<uint64_t>(i * world.size() + world.rank());
    const Tensor x = nn::init::Normal()(world, chorus::DType::kF32, {kRows, kIn}, draw);
    const Tensor y = Tanh(Slice(x, 1, 0, kOut) - Slice(x, 1, kOut, 2 * kOut));
    CHORUS_ASSIGN_OR_RETURN(const Tensor of_sharded, step({x, y}));
    const Tensor of_replicated = nn::MseLoss((*replicated)(x), y);
    CHORUS_RETURN_IF_ERROR(Backward(of_replicated));
    CHORUS_RETURN_IF_ERROR(of_whole.Step());
    const chorus::NoGrad no_grad;
    const std::vector<Tensor> means =
        AllReduceCoalesced({of_sharded, of_replicated * (1.0 / world.size())}, world);
    CHORUS_ASSIGN_OR_RETURN(const float in_pieces, means[0].Item<float>());
    CHORUS_ASSIGN_OR_RETURN(const float at_whole, means[1].Item<float>());
    // Sums are taken in another order, so the last bits may differ.
    if (!(std::abs(in_pieces - at_whole) <= 1e-3F)) {
      return absl::InternalError(absl::StrCat("step ", i, ": expected the loss ", at_whole,
                                              " of the whole network, got ", in_pieces,
                                              " in pieces"));
    }
    if (world.rank() == 0 && i % 10 == 0) {
      std::printf("step %2d: loss %.3f in pieces, %.3f whole\n", static_cast<int>(i),
                  static_cast<double>(in_pieces), static_cast<double>(at_whole));
    }
  }
  int64_t elements = 0;
  for (const nn::Variable& piece : sharded->parameters()) elements += piece().num_elements();
  int64_t all = 0;
  for (const nn::Variable& parameter : whole->parameters()) all += parameter().num_elements();
  if (world.rank() == 0) {
    std::printf("each rank keeps %d of %d parameters\n", static_cast<int>(elements),
                static_cast<int>(all));
  }
  return chorus::Barrier(world).Wait();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
