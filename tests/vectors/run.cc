#include "tests/vectors/run.h"

#include <utility>

#include "core/base/error.h"

namespace chorus {
namespace vectors {
namespace {

// Roots of a gradient, each with its seed; undefined: one.
struct Roots {
  std::vector<Tensor> tensors;
  std::vector<Tensor> seeds;
  void Add(Tensor tensor, Tensor seed) {
    tensors.push_back(std::move(tensor));
    seeds.push_back(std::move(seed));
  }
};

bool Differentiable(const Tensor& tensor) {
  return tensor.defined() && !tensor.absent() && tensor.requires_grad();
}

std::vector<Tensor> AllDifferentiable(const Tensors& tensors) {
  std::vector<Tensor> all;
  for (const std::vector<Tensor>& mine : tensors) {
    for (const Tensor& tensor : mine) {
      if (Differentiable(tensor)) all.push_back(tensor);
    }
  }
  return all;
}

absl::StatusOr<std::vector<Tensor>> Gradients(const Roots& roots, const std::vector<Tensor>& inputs,
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

class Run {
 public:
  Run(const Vector& v, Pass pass, Caller* caller, std::vector<RankResults>* out)
      : v_(v), pass_(pass), caller_(caller), out_(out) {}

  absl::Status First() {
    const Tensors x = caller_->Inputs(v_.requires_grad);
    const Tensors y = caller_->Call(x);
    CHORUS_RETURN_IF_ERROR(ReadOutputs(y, &RankResults::y));
    if (!AsksFirst(v_, rank(0), pass_)) return absl::OkStatus();  // its tape goes with its results
    Roots roots;
    for (size_t index = 0; index < y.size(); ++index) {
      const Row g = Upstream(v_.first->g, rank(index));
      for (size_t k = 0; k < y[index].size() && k < g.size(); ++k) {
        if (!g[k].has_value()) continue;
        AddRoot(y[index][k], caller_->Upload(index, *g[k], v_.g_layout[rank(index)]), &roots);
      }
    }
    AddAbsent(y, &roots);
    const std::vector<Tensor> inputs = AllDifferentiable(x);
    std::vector<Tensor> xbar;
    // In one process nothing is recorded, and nothing to ask, where no input wants a gradient.
    if (!v_.one_process() || !inputs.empty()) {
      CHORUS_ASSIGN_OR_RETURN(xbar, Gradients(roots, inputs, false));
    }
    return ReadGradients(x, xbar, &RankResults::xbar);
  }

  // L = sum(w phi(y)), G = dL/dx; S = sum(v G), dS/dx.
  absl::Status Second() {
    // S depends on a rank's part of the loss even where its inputs want no gradient. It holds on to
    // that part by the gradient of something, so here its inputs want one; nobody looks at it.
    const Tensors x = caller_->Inputs(std::vector<bool>(v_.group.size(), true));
    const Tensors y = caller_->Call(x);
    CHORUS_RETURN_IF_ERROR(ReadOutputs(y, &RankResults::y_again));
    if (!AsksSecond(v_, rank(0), pass_)) return absl::OkStatus();

    Roots roots;
    for (size_t index = 0; index < y.size(); ++index) {
      const Row w = Upstream(v_.second->w, rank(index));
      for (size_t k = 0; k < y[index].size() && k < w.size(); ++k) {
        if (!w[k].has_value()) continue;
        const Tensor& z = y[index][k];
        const Tensor weights = caller_->Upload(index, *w[k], v_.g_layout[rank(index)]);
        AddRoot(Sum(weights * (z + z * z + z * z * z)), Tensor(), &roots);
      }
    }
    AddAbsent(y, &roots);
    const std::vector<Tensor> inputs = AllDifferentiable(x);
    // A rank without inputs (scatter off its source) takes part in the gradient of the gradient by
    // that of its outputs.
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> G,
                            Gradients(roots, inputs.empty() ? AllDifferentiable(y) : inputs, true));
    CHORUS_RETURN_IF_ERROR(ReadGradients(x, G, &RankResults::G));

    Roots again;
    // That S depends on a collective on some rank does not mean that it does here: all name it,
    // with weight zero.
    const auto add_without_weight = [&again](const Tensor& tensor) {
      if (!Differentiable(tensor)) return;
      again.Add(tensor, Zeros(tensor.device(), tensor.dtype(), tensor.shape()));
    };
    size_t next = 0;
    for (size_t index = 0; index < x.size() && !inputs.empty(); ++index) {
      RankResults& mine = (*out_)[rank(index)];
      const absl::optional<Row>& v = v_.second->v[rank(index)];
      for (size_t k = 0; k < x[index].size(); ++k) {
        if (!Differentiable(x[index][k])) continue;
        const Tensor& gradient = G[next++];
        if (!v.has_value() || !(*v)[k].has_value()) {
          add_without_weight(gradient);
          continue;
        }
        const Tensor part = Sum(caller_->Upload(index, *(*v)[k], Layout::kContiguous) * gradient);
        CHORUS_ASSIGN_OR_RETURN(const Array value, Download(part));
        mine.S += FloatAt(value, 0);
        if (part.requires_grad()) again.Add(part, Tensor());
      }
    }
    if (inputs.empty()) {
      for (const Tensor& gradient : G) add_without_weight(gradient);
    }
    for (const Tensor& result : AllDifferentiable(y)) add_without_weight(result);
    AddAbsent(y, &again);
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> dS, Gradients(again, inputs, false));
    return ReadGradients(x, dS, &RankResults::dS);
  }

 private:
  size_t rank(size_t index) const { return static_cast<size_t>(caller_->ranks()[index]); }

  // What comes to a rank's outputs: zeros like these where a rank that skips joins all the same;
  // null where there is no gradient.
  Row Upstream(const Rows& rows, size_t rank) const {
    if (rows[rank].has_value()) return *rows[rank];
    Row row;
    for (const Array& array : v_.outputs[rank]) {
      row.emplace_back();
      if (array.floating() && pass_ == Pass::kAllJoin) row.back() = ZerosLike(array);
    }
    return row;
  }

  // In one process a result has no history where none of its inputs wants a gradient.
  void AddRoot(const Tensor& tensor, const Tensor& seed, Roots* roots) const {
    if (v_.one_process() && tensor.status().ok() && !tensor.requires_grad()) return;
    roots->Add(tensor, seed);
  }

  // A result that a rank does not get still has it take part.
  static void AddAbsent(const Tensors& y, Roots* roots) {
    for (const std::vector<Tensor>& mine : y) {
      for (const Tensor& result : mine) {
        if (result.absent()) roots->Add(result, Tensor());
      }
    }
  }

  absl::Status ReadOutputs(const Tensors& y, std::vector<Array> RankResults::*into) {
    for (size_t index = 0; index < y.size(); ++index) {
      CHORUS_ASSIGN_OR_RETURN((*out_)[rank(index)].*into, caller_->Outputs(index, y[index]));
    }
    return absl::OkStatus();
  }

  // `gradients` are of those of `x` that have one, in order.
  absl::Status ReadGradients(const Tensors& x, const std::vector<Tensor>& gradients,
                             absl::optional<Row> RankResults::*into) {
    size_t next = 0;
    for (size_t index = 0; index < x.size(); ++index) {
      Row row;
      for (const Tensor& tensor : x[index]) {
        row.emplace_back();
        if (!Differentiable(tensor)) continue;
        CHORUS_ASSIGN_OR_RETURN(row.back(), Download(gradients[next++]));
      }
      (*out_)[rank(index)].*into = std::move(row);
    }
    return absl::OkStatus();
  }

  const Vector& v_;
  const Pass pass_;
  Caller* const caller_;
  std::vector<RankResults>* const out_;
};

}  // namespace

absl::Status RunVector(const Vector& v, Pass pass, Caller* caller, std::vector<RankResults>* out) {
  Run run(v, pass, caller, out);
  CHORUS_RETURN_IF_ERROR(run.First());
  return v.second.has_value() ? run.Second() : absl::OkStatus();
}

}  // namespace vectors
}  // namespace chorus
