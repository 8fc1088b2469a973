#include "chorus/nn/loss.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/functional/shape.h"
#include "chorus/math.h"
#include "client/internal/local.h"
#include "client/nn/compute_type.h"
#include "core/base/error.h"

namespace chorus {
namespace nn {
namespace {

using internal::BroadcastShapes;
using internal::Fail;
using internal::IsUsable;
using internal::TypeText;

// OK too where one of them has no type to look at: ops carry its error on.
absl::Status CheckOneShape(const char* name, const Tensor& x, const Tensor& y) {
  if (!IsUsable(x) || !IsUsable(y) || x.shape() == y.shape()) return absl::OkStatus();
  return BadType(absl::StrCat(name, ": expected two tensors of one shape, got ", TypeText(x),
                              " and ", TypeText(y)));
}

Tensor Reduced(const Tensor& losses, Reduce reduce) {
  switch (reduce) {
    case Reduce::kNone:
      return losses;
    case Reduce::kMean:
      return Mean(losses);
    case Reduce::kSum:
      break;
  }
  return Sum(losses);
}

// The same of a function of x - y, in the compute type.
template <typename Function>
Tensor OfDifference(const char* name, const Tensor& x, const Tensor& y, Reduce reduce,
                    CallSite site, Function function) {
  const CallSiteScope lines(site);
  const absl::Status fits = CheckOneShape(name, x, y);
  if (!fits.ok()) return Fail(x, fits, site);
  return InComputeType(
      x, y, [&](const Tensor& a, const Tensor& b) { return Reduced(function(a - b), reduce); });
}

Tensor IsIgnored(const Tensor& labels, const ClassOptions& options) {
  return Equal(Cast(labels, DType::kI64), options.ignored);
}

// Of rows: their losses, and their weights in a mean. Of the compute type: a half type has no room
// for the sum of many, nor for how many they are.
struct Rows {
  Tensor losses;
  Tensor weights;
};

// -log p[label] w[label] and w[label], 0 where the label is ignored. `spread`: of each row the sum
// of -log p w over the classes, the part of smoothing; undefined without.
Rows OfLabels(const Tensor& nll, const Tensor& labels, const Tensor& spread,
              const ClassOptions& options, double classes) {
  const Tensor ignored = IsIgnored(labels, options);
  Rows rows;
  const Tensor losses = AsComputeType(nll);
  const Tensor ones = Full(nll.device(), losses.dtype(), {}, 1);
  rows.weights = Where(ignored, 0,
                       options.weights.defined() ? Take(AsType(options.weights, losses.dtype()),
                                                        Where(ignored, 0, labels))
                                                 : Expand(ones, nll.shape()));
  rows.losses = options.weights.defined() ? losses * rows.weights : losses;
  if (spread.defined()) {
    rows.losses = rows.losses * (1 - options.label_smoothing) +
                  Where(ignored, 0, spread) * (options.label_smoothing / classes);
  }
  return rows;
}

Tensor Reduced(const Rows& rows, Reduce reduce, DType dtype) {
  const bool weighted = reduce == Reduce::kMean;
  return AsType(weighted ? Sum(rows.losses) / Sum(rows.weights) : Reduced(rows.losses, reduce),
                dtype);
}

absl::Status CheckClasses(const char* name, const Tensor& x, const Tensor& labels,
                          const ClassOptions& options) {
  const auto refuse = [&](const std::string& expected, const std::string& got) {
    return BadType(absl::StrCat(name, ": expected ", expected, ", got ", got));
  };
  if (x.shape().empty()) return refuse("[..., classes]", TypeText(x));
  if (options.weights.defined() && IsUsable(options.weights) &&
      options.weights.shape() != Shape{x.shape().back()}) {
    return refuse(absl::StrCat("a weight for each of ", x.shape().back(), " classes"),
                  TypeText(options.weights));
  }
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
    return refuse("label_smoothing from 0 to 1", absl::StrCat(options.label_smoothing));
  }
  const Shape rows(x.shape().begin(), x.shape().end() - 1);
  if (labels.dtype() == x.dtype() ? labels.shape() != x.shape() : labels.shape() != rows) {
    return refuse("labels of the rows' shape, or probabilities of the logits' type",
                  absl::StrCat(TypeText(labels), " for ", TypeText(x)));
  }
  return absl::OkStatus();
}

}  // namespace

Tensor CrossEntropyLoss(const Tensor& logits, const Tensor& labels, const ClassOptions& options,
                        CallSite site) {
  const CallSiteScope lines(site);
  if (!IsUsable(logits) || !IsUsable(labels)) return CrossEntropy(logits, labels);
  const absl::Status fits = CheckClasses("CrossEntropyLoss", logits, labels, options);
  if (!fits.ok()) return Fail(logits, fits, site);
  const double classes = static_cast<double>(logits.shape().back());
  const bool smooth = options.label_smoothing > 0;
  const bool of_classes = labels.dtype() != logits.dtype();
  Tensor log_p;
  if (smooth || !of_classes) {
    Tensor x = AsComputeType(logits);
    if (of_classes) {
      // Whatever stands in a row that does not count: 0 times NaN would be its gradient.
      const Tensor ignored = IsIgnored(labels, options);
      x = Where(Unsqueeze(ignored, -1), 0, x);
    }
    log_p = LogSoftmax(x);
    if (options.weights.defined()) log_p = log_p * AsType(options.weights, log_p.dtype());
  }
  if (!of_classes) {
    const Tensor p = AsComputeType(labels);
    const Tensor target =
        smooth ? p * (1 - options.label_smoothing) + options.label_smoothing / classes : p;
    return AsType(Reduced(-Sum(target * log_p, {-1}), options.reduce), logits.dtype());
  }
  const Tensor spread = smooth ? -Sum(log_p, {-1}) : Tensor();
  const Tensor nll = CrossEntropy(smooth ? AsComputeType(logits) : logits, labels, options.ignored);
  return Reduced(OfLabels(nll, labels, spread, options, classes), options.reduce, logits.dtype());
}

Tensor NllLoss(const Tensor& log_probabilities, const Tensor& labels, const ClassOptions& options,
               CallSite site) {
  const CallSiteScope lines(site);
  const Tensor& x = log_probabilities;
  if (!IsUsable(x) || !IsUsable(labels)) return CrossEntropy(x, labels);
  absl::Status fits = CheckClasses("NllLoss", x, labels, options);
  if (fits.ok() && options.label_smoothing != 0) {
    fits = BadType("NllLoss: expected no label_smoothing");
  }
  if (fits.ok() && labels.dtype() == x.dtype()) {
    fits =
        BadType(absl::StrCat("NllLoss: expected labels of an integer dtype, "
                             "got ",
                             TypeText(labels)));
  }
  if (!fits.ok()) return Fail(x, fits, site);
  const Tensor ignored = IsIgnored(labels, options);
  const Tensor safe = Unsqueeze(Where(ignored, 0, labels), -1);
  const Tensor nll = Where(ignored, 0, -Reshape(TakeAlong(x, safe, -1), labels.shape()));
  return Reduced(OfLabels(nll, labels, Tensor(), options, 1), options.reduce, x.dtype());
}

Tensor MseLoss(const Tensor& x, const Tensor& y, Reduce reduce, CallSite site) {
  return OfDifference("MseLoss", x, y, reduce, site, [](const Tensor& d) { return d * d; });
}

Tensor L1Loss(const Tensor& x, const Tensor& y, Reduce reduce, CallSite site) {
  return OfDifference("L1Loss", x, y, reduce, site, [](const Tensor& d) { return Abs(d); });
}

Tensor HuberLoss(const Tensor& x, const Tensor& y, double delta, Reduce reduce, CallSite site) {
  if (!(delta <= std::numeric_limits<float>::max() && static_cast<float>(delta) > 0)) {
    return Fail(
        x, BadType(absl::StrCat("HuberLoss: expected a delta above 0 that f32 has, got ", delta)),
        site);
  }
  return OfDifference("HuberLoss", x, y, reduce, site, [delta](const Tensor& d) {
    const Tensor size = Abs(d);
    const Tensor is_small = size <= delta;
    // Of a square that is not taken no gradient may be infinite.
    const Tensor small = Where(is_small, d, 0);
    return Where(is_small, small * small * 0.5, (size - delta / 2) * delta);
  });
}

Tensor BceWithLogitsLoss(const Tensor& x, const Tensor& y, const Tensor& positive_weight,
                         Reduce reduce, CallSite site) {
  const CallSiteScope lines(site);
  const absl::Status fits = CheckOneShape("BceWithLogitsLoss", x, y);
  if (!fits.ok()) return Fail(x, fits, site);
  if (IsUsable(x) && IsUsable(positive_weight)) {
    Shape shape = x.shape();
    if (!BroadcastShapes(positive_weight.shape(), &shape) || shape != x.shape()) {
      return Fail(
          x,
          BadType(absl::StrCat("BceWithLogitsLoss: expected a positive_weight that stretches "
                               "to ",
                               TypeText(x), ", got ", TypeText(positive_weight))),
          site);
    }
  }
  return InComputeType(x, y, [&](const Tensor& a, const Tensor& b) {
    // -log sigmoid(a) = softplus(-a), -log(1 - sigmoid(a)) = softplus(a): a + softplus(-a) would be
    // the difference of large numbers where a is, and so would its gradient.
    Tensor positive = b * Softplus(-a);
    if (positive_weight.defined()) positive = positive * AsComputeType(positive_weight);
    return Reduced(positive + (1 - b) * Softplus(a), reduce);
  });
}

Tensor KlDivLoss(const Tensor& x, const Tensor& y, Reduce reduce, CallSite site) {
  const CallSiteScope lines(site);
  const absl::Status fits = CheckOneShape("KlDivLoss", x, y);
  if (!fits.ok()) return Fail(x, fits, site);
  return InComputeType(x, y, [&](const Tensor& a, const Tensor& b) {
    const Tensor is_none = Equal(b, 0);
    // Where b is 0 neither its logarithm counts nor a, which may be -infinity there as well: nor
    // may either make a gradient.
    return Reduced(b * Where(is_none, 0, Log(Where(is_none, 1, b)) - a), reduce);
  });
}

// The loss of label 0 of two classes, which is exact to any order at both ends; logits of infinity
// have none.
Tensor Softplus(const Tensor& x, CallSite site) {
  const CallSiteScope lines(site);
  if (!IsUsable(x)) return Exp(x);
  return InComputeType(x, [](const Tensor& v) {
    const Tensor is_infinite = Equal(v, std::numeric_limits<double>::infinity());
    const Tensor zeros = Zeros(v.device(), v.dtype(), v.shape());
    const Tensor logits = Stack({zeros, Where(is_infinite, 0, v)}, -1);
    const Tensor losses = CrossEntropy(logits, Zeros(v.device(), DType::kI32, v.shape()));
    return Where(is_infinite, v, losses);
  });
}

}  // namespace nn
}  // namespace chorus
