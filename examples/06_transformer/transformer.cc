// Lesson 6: a transformer learns to continue a text, character by character, on any number of
// ranks.
#include <cstdio>
#include <fstream>
#include <random>

#include "chorus/chorus.h"
#include "chorus/nn/nn.h"
#include "core/base/error.h"

namespace {

namespace nn = chorus::nn;
using chorus::Tensor;
constexpr int64_t kWidth = 64, kHeads = 4, kContext = 32, kBatch = 8, kSteps = 150, kChars = 128;

struct Block : nn::Module {
  Block() : Module("Block") {}
  Tensor Forward(const Tensor& x) override {
    const Tensor h = x + attention(norm1(x), nn::CausalMask(x));
    return h + down(nn::Gelu(up(norm2(h))));
  }
  nn::LayerNorm& norm1 = Add<nn::LayerNorm>("norm1", kWidth);
  nn::MultiheadAttention& attention = Add<nn::MultiheadAttention>("attention", kWidth, kHeads);
  nn::LayerNorm& norm2 = Add<nn::LayerNorm>("norm2", kWidth);
  nn::Linear& up = Add<nn::Linear>("up", kWidth, 4 * kWidth);
  nn::Linear& down = Add<nn::Linear>("down", 4 * kWidth, kWidth);
};

absl::Status Run(const char* path) {
  CHORUS_ASSIGN_OR_RETURN(const chorus::Session session, chorus::Session::Open());
  CHORUS_ASSIGN_OR_RETURN(const chorus::World world, session.Join());
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.size() <= kContext + 1) return absl::NotFoundError(path);
  nn::Sequential model({nn::Make<nn::Embedding>(kChars, kWidth),
                        nn::Make<nn::PositionEmbedding>(kContext, kWidth), nn::Make<Block>(),
                        nn::Make<Block>(), nn::Make<nn::LayerNorm>(kWidth),
                        nn::Make<nn::Linear>(kWidth, kChars)});
  CHORUS_RETURN_IF_ERROR(model.Init(world, /*seed=*/1));
  nn::AdamW optimizer(model.parameters(), {});
  optimizer.SetSchedule(nn::WarmUp(20, nn::CosineDecay(kSteps - 20, 0.1)));
  const auto loss_of = [&](const auto& in) { return nn::CrossEntropyLoss(model(in[0]), in[1]); };
  nn::TrainStep step(&model, &optimizer, loss_of, {world.group()});
  std::mt19937 random(static_cast<unsigned>(world.rank()));
  for (int64_t i = 1; i <= kSteps; ++i) {
    CHORUS_RETURN_IF_ERROR(world.Step(i));
    std::vector<int8_t> now, next;
    for (int64_t b = 0; b < kBatch; ++b) {
      const auto at = text.begin() + static_cast<int64_t>(random() % (text.size() - kContext - 1));
      now.insert(now.end(), at, at + kContext);
      next.insert(next.end(), at + 1, at + kContext + 1);
    }
    const std::vector<Tensor> batch = {FromHost(world, now, {kBatch, kContext}),
                                       FromHost(world, next, {kBatch, kContext})};
    CHORUS_ASSIGN_OR_RETURN(const Tensor loss, step(batch));
    CHORUS_ASSIGN_OR_RETURN(const float value, loss.Item<float>());
    if (world.rank() == 0 && i % 10 == 0) std::printf("step %3d: loss %.3f\n", int(i), value);
  }
  return chorus::Barrier(world).Wait();
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Run(argc > 1 ? argv[1] : "/usr/share/common-licenses/GPL-3");
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
