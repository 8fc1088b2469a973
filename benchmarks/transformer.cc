#include "benchmarks/transformer.h"

#include "chorus/chorus.h"

namespace chorus {
namespace bench {
namespace {

class Block : public nn::Module {
 public:
  Block(int64_t width, int64_t heads)
      : Module("Block"),
        norm1_(Add<nn::LayerNorm>("norm1", width)),
        attention_(Add<nn::MultiheadAttention>("attention", width, heads)),
        norm2_(Add<nn::LayerNorm>("norm2", width)),
        up_(Add<nn::Linear>("up", width, 4 * width)),
        down_(Add<nn::Linear>("down", 4 * width, width)) {}
  Tensor Forward(const Tensor& x) override {
    const Tensor h = x + attention_(norm1_(x), nn::CausalMask(x));
    return h + down_(nn::Gelu(up_(norm2_(h))));
  }

 private:
  nn::LayerNorm& norm1_;
  nn::MultiheadAttention& attention_;
  nn::LayerNorm& norm2_;
  nn::Linear& up_;
  nn::Linear& down_;
};

}  // namespace

std::shared_ptr<nn::Module> Transformer(const TransformerSizes& sizes) {
  nn::Modules layers = {nn::Make<nn::Embedding>(sizes.symbols, sizes.width),
                        nn::Make<nn::PositionEmbedding>(sizes.context, sizes.width)};
  for (int64_t i = 0; i < sizes.blocks; ++i) {
    layers.push_back(nn::Make<Block>(sizes.width, sizes.heads));
  }
  layers.push_back(nn::Make<nn::LayerNorm>(sizes.width));
  layers.push_back(nn::Make<nn::Linear>(sizes.width, sizes.symbols));
  return nn::Make<nn::Sequential>(layers);
}

}  // namespace bench
}  // namespace chorus
