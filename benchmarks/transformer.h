// A transformer of any size that continues sequences of symbols: lesson 6's network, for tests and
// the benchmark. (The lesson has its own, so that it stays sixty lines in one file.)
//
// Threads: chorus/nn/module.h. Ownership: the model is the caller's. Errors: as nn's layers.
#ifndef CHORUS_BENCHMARKS_TRANSFORMER_H_
#define CHORUS_BENCHMARKS_TRANSFORMER_H_

#include <cstdint>
#include <memory>

#include "chorus/nn/nn.h"

namespace chorus {
namespace bench {

struct TransformerSizes {
  int64_t symbols = 128;
  int64_t context = 32;  // the most symbols of a sequence
  int64_t width = 64;
  int64_t heads = 4;
  int64_t blocks = 2;
};

// Symbols [n, length] to logits [n, length, symbols]. Nothing is dropped.
std::shared_ptr<nn::Module> Transformer(const TransformerSizes& sizes = {});

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_TRANSFORMER_H_
