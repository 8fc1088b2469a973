#include "tests/vectors/rank_run.h"

#include <utility>

#include "core/base/error.h"
#include "tests/vectors/calls.h"

namespace chorus {
namespace vectors {
namespace {

class RankRun {
 public:
  RankRun(const Vector& v, int rank, Pass pass, const Group& group, const DeviceRef& device)
      : v_(v),
        r_(static_cast<size_t>(rank)),
        rank_(rank),
        pass_(pass),
        group_(group),
        device_(device) {}

  absl::Status Run(RankResults* out) {
    CHORUS_RETURN_IF_ERROR(First(out));
    return v_.second.has_value() ? Second(out) : absl::OkStatus();
  }

 private:
  std::vector<Tensor> Inputs(bool requires_grad) const {
    std::vector<Tensor> x;
    for (const Array& array : v_.inputs[r_]) {
      x.push_back(Upload(device_, array, v_.x_layout[r_], requires_grad));
    }
    return x;
  }

  // `row` if it is there, else zeros like `like`; null where there is no gradient.
  static Row OrZeros(const absl::optional<Row>& row, const std::vector<Array>& like) {
    if (row.has_value()) return *row;
    Row zeros;
    for (const Array& array : like) {
      zeros.emplace_back();
      if (array.floating()) zeros.back() = ZerosLike(array);
    }
    return zeros;
  }

  // Roots of a gradient, each with its seed; undefined: one.
  struct Roots {
    std::vector<Tensor> tensors;
    std::vector<Tensor> seeds;
    void Add(Tensor tensor, Tensor seed) {
      tensors.push_back(std::move(tensor));
      seeds.push_back(std::move(seed));
    }
  };

  // A result that this rank does not get still has it take part.
  static void AddAbsent(const std::vector<Tensor>& y, Roots* roots) {
    for (const Tensor& result : y) {
      if (result.absent()) roots->Add(result, Tensor());
    }
  }

  static std::vector<Tensor> Present(const std::vector<Tensor>& y) {
    std::vector<Tensor> present;
    for (const Tensor& result : y) {
      if (!result.absent()) present.push_back(result);
    }
    return present;
  }

  static absl::StatusOr<std::vector<Tensor>> Gradients(const Roots& roots,
                                                       const std::vector<Tensor>& inputs,
                                                       bool create_graph) {
    BackwardOptions options;
    options.seeds = roots.seeds;
    options.create_graph = create_graph;
    if (inputs.empty()) {
      CHORUS_RETURN_IF_ERROR(Backward(roots.tensors, options));
      return std::vector<Tensor>();
    }
    return Grad(roots.tensors, inputs, options);
  }

  static std::vector<Tensor> Differentiable(const std::vector<Tensor>& x) {
    std::vector<Tensor> inputs;
    for (const Tensor& tensor : x) {
      if (tensor.requires_grad()) inputs.push_back(tensor);
    }
    return inputs;
  }

  // Gradients of the differentiable ones of `x`, at their places.
  static absl::StatusOr<Row> DownloadGradients(const std::vector<Tensor>& x,
                                               const std::vector<Tensor>& gradients) {
    Row row;
    size_t next = 0;
    for (const Tensor& tensor : x) {
      row.emplace_back();
      if (!tensor.requires_grad()) continue;
      CHORUS_ASSIGN_OR_RETURN(row.back(), Download(gradients[next++]));
    }
    return row;
  }

  static absl::Status DownloadAll(const std::vector<Tensor>& y, std::vector<Array>* out) {
    for (const Tensor& result : Present(y)) {
      CHORUS_ASSIGN_OR_RETURN(Array array, Download(result));
      out->push_back(std::move(array));
    }
    return absl::OkStatus();
  }

  absl::Status First(RankResults* out) const {
    const std::vector<Tensor> x = Inputs(v_.requires_grad[r_]);
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> y, Call(v_, rank_, group_, x));
    CHORUS_RETURN_IF_ERROR(DownloadAll(y, &out->y));
    if (!AsksFirst(v_, rank_, pass_)) return absl::OkStatus();  // its tape goes with its results
    Roots roots;
    const Row g = OrZeros(v_.first->g[r_], v_.outputs[r_]);
    const std::vector<Tensor> present = Present(y);
    for (size_t k = 0; k < present.size() && k < g.size(); ++k) {
      if (!g[k].has_value()) continue;
      roots.Add(present[k], Upload(device_, *g[k], v_.g_layout[r_], false));
    }
    AddAbsent(y, &roots);
    const std::vector<Tensor> inputs = Differentiable(x);
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> xbar, Gradients(roots, inputs, false));
    CHORUS_ASSIGN_OR_RETURN(out->xbar, DownloadGradients(x, xbar));
    return absl::OkStatus();
  }

  // L = sum(w phi(y)), G = dL/dx; S = sum(v G), dS/dx.
  absl::Status Second(RankResults* out) const {
    // S depends on this rank's part of the loss even where its inputs want no gradient. It holds on
    // to that part by the gradient of something, so here its inputs want one; nobody looks at it.
    const std::vector<Tensor> x = Inputs(true);
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> y, Call(v_, rank_, group_, x));
    CHORUS_RETURN_IF_ERROR(DownloadAll(y, &out->y_again));
    if (!AsksSecond(v_, rank_, pass_)) return absl::OkStatus();

    Roots roots;
    const Row w = OrZeros(v_.second->w[r_], v_.outputs[r_]);
    const std::vector<Tensor> present = Present(y);
    for (size_t k = 0; k < present.size() && k < w.size(); ++k) {
      if (!w[k].has_value()) continue;
      const Tensor& z = present[k];
      const Tensor weights = Upload(device_, *w[k], v_.g_layout[r_], false);
      roots.Add(Sum(weights * (z + z * z + z * z * z)), Tensor());
    }
    AddAbsent(y, &roots);
    const std::vector<Tensor> inputs = Differentiable(x);
    // A rank without inputs (scatter off its source) takes part in the gradient of the gradient by
    // that of its outputs.
    const std::vector<Tensor> wanted = inputs.empty() ? Differentiable(present) : inputs;
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> G, Gradients(roots, wanted, true));
    CHORUS_ASSIGN_OR_RETURN(out->G, DownloadGradients(x, G));

    Roots again;
    const Row v = OrZeros(v_.second->v[r_], v_.inputs[r_]);
    size_t next = 0;
    for (size_t k = 0; k < x.size() && !inputs.empty(); ++k) {
      if (!x[k].requires_grad()) continue;
      const Tensor& gradient = G[next++];
      const Array zeros = ZerosLike(v_.inputs[r_][k]);
      const Array& direction = v[k].has_value() ? *v[k] : zeros;
      const Tensor part = Sum(Upload(device_, direction, Layout::kContiguous, false) * gradient);
      CHORUS_ASSIGN_OR_RETURN(const Array value, Download(part));
      out->S += FloatAt(value, 0);
      if (part.requires_grad()) again.Add(part, Tensor());
    }
    // That S depends on a collective on some rank does not mean that it does here: all name it,
    // with weight zero.
    const auto add_without_weight = [&](const Tensor& tensor) {
      if (tensor.requires_grad()) {
        again.Add(tensor, Zeros(device_, tensor.dtype(), tensor.shape()));
      }
    };
    if (inputs.empty()) {
      for (const Tensor& gradient : G) add_without_weight(gradient);
    }
    for (const Tensor& result : present) add_without_weight(result);
    AddAbsent(y, &again);
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> dS, Gradients(again, inputs, false));
    CHORUS_ASSIGN_OR_RETURN(out->dS, DownloadGradients(x, dS));
    return absl::OkStatus();
  }

  const Vector& v_;
  const size_t r_;
  const int rank_;
  const Pass pass_;
  const Group& group_;
  const DeviceRef device_;
};

}  // namespace

absl::Status RunRank(const Vector& v, int rank, Pass pass, const Group& group,
                     const DeviceRef& device, RankResults* out) {
  return RankRun(v, rank, pass, group, device).Run(out);
}

}  // namespace vectors
}  // namespace chorus
