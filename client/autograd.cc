#include "chorus/autograd.h"

#include <memory>
#include <vector>

#include "client/internal/gradients.h"
#include "client/internal/tape.h"

namespace chorus {
namespace {

using internal::GradientRequest;
using internal::GradMode;
using internal::TakeGradients;

}  // namespace

NoGrad::NoGrad() : mode_(std::make_unique<GradMode>(false)) {}
NoGrad::~NoGrad() = default;

absl::Status Backward(const Tensor& root, const BackwardOptions& options, CallSite site) {
  return Backward(std::vector<Tensor>{root}, options, site);
}

absl::Status Backward(const std::vector<Tensor>& roots, const BackwardOptions& options,
                      CallSite site) {
  GradientRequest request;
  request.roots = roots;
  request.seeds = options.seeds;
  request.leaves = true;
  request.retain = options.retain_graph;
  request.create = options.create_graph;
  return TakeGradients(request, site).status();
}

absl::StatusOr<std::vector<Tensor>> Grad(const std::vector<Tensor>& outputs,
                                         const std::vector<Tensor>& inputs,
                                         const BackwardOptions& options, CallSite site) {
  GradientRequest request;
  request.roots = outputs;
  request.seeds = options.seeds;
  request.wanted = inputs;
  request.retain = options.retain_graph;
  request.create = options.create_graph;
  return TakeGradients(request, site);
}

}  // namespace chorus
