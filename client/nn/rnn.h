// Recurrent layers: long short-term memory (Hochreiter and Schmidhuber 1997) and gated recurrent
// units (Cho et al. 2014), with torch's formulas, names and layout of parameters.
//
// The projections of the inputs of all steps are one matrix product a layer and direction. What
// depends on the step before is unrolled, one small product and some twenty ops a step, layer and
// direction: calls record it so, and a compiled function is the graph of all steps, whose number is
// part of it; the gradient adds a few times as many. A daemon takes graphs of --max_graph_nodes
// (2^20 unless it was told otherwise): long sequences are cut, and go on from the state that the
// last piece has left (detached).
//
// Threads: chorus/nn/module.h. Ownership: a layer owns its variables. Errors: in the results; sizes
//   that make no sense in a constructor come with Init and with every call.
#ifndef CHORUS_CLIENT_NN_RNN_H_
#define CHORUS_CLIENT_NN_RNN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/nn/module.h"
#include "chorus/parallel/nest.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

struct RnnOptions {
  int64_t layers = 1;
  bool bias = true;
  // [batch, steps, width], else [steps, batch, width].
  bool batch_first = false;
  double dropout = 0;  // between layers, in training (Dropout)
  // A second one that reads from the last step to the first, beside the results of the first.
  bool bidirectional = false;
};

// What a recurrent layer gives: `output` of the last layer at each step, [steps, batch, directions
// hidden] (by batch first, where the options say so); of each layer and direction, layers outside,
// what the last step left: `hidden` [layers directions, batch, hidden], and `cell` of an LSTM.
struct RnnResult {
  Tensor output;
  Tensor hidden;
  Tensor cell;
};

// What LSTM and GRU have in common. Of layer l there are weight_ih_l0 [gates hidden, in],
// weight_hh_l0 [gates hidden, hidden], bias_ih_l0 and bias_hh_l0 [gates hidden], and the same with
// _reverse of the other direction; all begin evenly within 1 / sqrt(hidden) of 0.
class Recurrent : public Module {
 public:
  using Module::operator();
  // `hidden` and `cell` are those before the first step, zeros where they are undefined. A GRU has
  // no cell.
  RnnResult operator()(const Tensor& x, const Tensor& hidden, const Tensor& cell = Tensor(),
                       CallSite site = CallSite::Here());
  // The output alone: for Sequential.
  Tensor Forward(const Tensor& x) override;
  // Of x, or of x and a state, that is hidden, or of an LSTM a tuple (hidden, cell). Gives a tuple
  // (output, state). What DataParallel calls: it scatters and gathers all of them along one axis,
  // which is the batch's of x and of the states unless it is first.
  absl::StatusOr<parallel::Nest> Call(const parallel::Nest::Items& inputs,
                                      const parallel::Nest::Fields& keywords) override;
  std::string description() const override;

 protected:
  // States of one layer and direction.
  struct State {
    Tensor hidden;
    Tensor cell;
  };
  Recurrent(std::string kind, int64_t gates, bool has_cell, int64_t in, int64_t hidden,
            const RnnOptions& options);
  // One step: of the projected input [batch, gates hidden], with bias_ih.
  virtual State Step(const Tensor& projected, const State& before, const Tensor& weight,
                     const Tensor& bias) const = 0;

 private:
  struct Direction {
    Variable weight_ih;
    Variable weight_hh;
    Variable bias_ih;  // undefined without bias
    Variable bias_hh;
  };
  size_t directions() const { return options_.bidirectional ? 2 : 1; }
  RnnResult Run(const Tensor& x, const Tensor& hidden, const Tensor& cell);
  // All steps of x [steps, batch, in], from the first on or from the last: outputs by step.
  std::vector<Tensor> Unroll(const Tensor& x, const Direction& direction, bool backwards,
                             State* state) const;

  const int64_t gates_;
  const bool has_cell_;
  const int64_t in_;
  const int64_t hidden_;
  const RnnOptions options_;
  std::vector<Direction> parts_;  // by layer, then direction
};

// i, f, g, o of W_ih x + b_ih + W_hh h + b_hh:
// c' = sigmoid(f) c + sigmoid(i) tanh(g);  h' = sigmoid(o) tanh(c').
class Lstm : public Recurrent {
 public:
  Lstm(int64_t in, int64_t hidden, const RnnOptions& options = RnnOptions())
      : Recurrent("Lstm", 4, true, in, hidden, options) {}

 protected:
  State Step(const Tensor& projected, const State& before, const Tensor& weight,
             const Tensor& bias) const override;
};

// r, z, n of W_ih x + b_ih and of W_hh h + b_hh, r and z of their sum:
// n' = tanh(n_x + sigmoid(r) n_h);  h' = (1 - sigmoid(z)) n' + sigmoid(z) h.
class Gru : public Recurrent {
 public:
  Gru(int64_t in, int64_t hidden, const RnnOptions& options = RnnOptions())
      : Recurrent("Gru", 3, false, in, hidden, options) {}

 protected:
  State Step(const Tensor& projected, const State& before, const Tensor& weight,
             const Tensor& bias) const override;
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_RNN_H_
