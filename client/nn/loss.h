// Losses, with PyTorch's definitions. What it calls classes is the last axis here, as in
// CrossEntropy.
//
// Threads: any. Ownership: results are handles. Errors: in the results, with the line of the call:
//   INVALID_ARGUMENT kBadType where shapes, dtypes or options do not fit.
#ifndef CHORUS_CLIENT_NN_LOSS_H_
#define CHORUS_CLIENT_NN_LOSS_H_

#include <cstdint>

#include "chorus/call_site.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

// What becomes of the elements' losses. The mean of nothing is NaN.
enum class Reduce { kNone, kMean, kSum };

struct ClassOptions {
  Tensor weights;              // [classes], of any floating type; undefined: ones
  int64_t ignored = -100;      // rows with this label lose 0 and have no gradient
  double label_smoothing = 0;  // that share of each label goes to all classes alike
  Reduce reduce = Reduce::kMean;
};
// -log softmax(logits)[label], of logits [..., classes] and labels [...] of an integer dtype; the
// mean is weighted by the weights of the labels that are not ignored. Labels of the logits' own
// shape and dtype are probabilities of the classes; then the mean is that over rows, and nothing is
// ignored.
Tensor CrossEntropyLoss(const Tensor& logits, const Tensor& labels,
                        const ClassOptions& options = {}, CallSite site = CallSite::Here());
// The same of logarithms of probabilities, of which nothing is known but that. No smoothing.
Tensor NllLoss(const Tensor& log_probabilities, const Tensor& labels,
               const ClassOptions& options = {}, CallSite site = CallSite::Here());

// Of x and y of one shape, with d = x - y, element by element:
// d^2
Tensor MseLoss(const Tensor& x, const Tensor& y, Reduce reduce = Reduce::kMean,
               CallSite site = CallSite::Here());
// |d|
Tensor L1Loss(const Tensor& x, const Tensor& y, Reduce reduce = Reduce::kMean,
              CallSite site = CallSite::Here());
// d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2); delta is above 0, in f32 as well
Tensor HuberLoss(const Tensor& x, const Tensor& y, double delta = 1, Reduce reduce = Reduce::kMean,
                 CallSite site = CallSite::Here());
// -p y log sigmoid(x) - (1 - y) log(1 - sigmoid(x)), finite for every finite x. `positive_weight`,
// p, is broadcast to x; undefined: ones.
Tensor BceWithLogitsLoss(const Tensor& x, const Tensor& y, const Tensor& positive_weight = Tensor(),
                         Reduce reduce = Reduce::kMean, CallSite site = CallSite::Here());
// y (log y - x) of x, logarithms of probabilities, and probabilities y; 0 where y is 0, and NaN
// where it is negative or NaN. The sum over a row is the Kullback-Leibler divergence, so a mean
// over rows is kSum over their number.
Tensor KlDivLoss(const Tensor& x, const Tensor& y, Reduce reduce = Reduce::kMean,
                 CallSite site = CallSite::Here());

// log(1 + e^x), without overflow; infinity, with the gradient 1, at infinity.
Tensor Softplus(const Tensor& x, CallSite site = CallSite::Here());

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_LOSS_H_
