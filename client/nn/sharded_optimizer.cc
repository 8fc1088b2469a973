#include "chorus/nn/sharded_optimizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "chorus/autograd.h"
#include "chorus/collectives.h"
#include "chorus/functional/shape.h"
#include "chorus/math.h"
#include "chorus/nn/init.h"
#include "client/internal/access.h"
#include "client/nn/trained.h"
#include "core/base/error.h"

namespace chorus {
namespace nn {

// Parameters of one group and dtype, as one row of elements that is cut evenly.
struct ShardedOptimizer::Flat {
  size_t group = 0;
  DType dtype = DType::kUnspecified;
  std::vector<Variable> parameters;
  std::vector<size_t> indices;  // of each among all parameters, groups in order
  int64_t elements = 0;
  int64_t piece = 0;   // elements of each rank's
  Variable own_piece;  // this rank's
  // By parameter: the tensor whose elements are in `own_piece`. A caller that Sets the parameter
  // need not wait for a step to have its memory back.
  std::vector<std::weak_ptr<internal::TensorImpl>> sources;
};

class ShardedOptimizer::Pieces : public Module {
 public:
  Pieces() : Module("Pieces") {}
  Variable AddPiece(int64_t elements) {
    return AddParameter(absl::StrCat(variables().size()), {elements}, init::Zeros());
  }
};

ShardedOptimizer::ShardedOptimizer(const std::vector<ParameterGroup>& groups, const Group& ranks,
                                   Make make)
    : groups_(groups), ranks_(ranks), make_(std::move(make)) {}

ShardedOptimizer::~ShardedOptimizer() = default;

Tensor ShardedOptimizer::Join(const Flat& flat, const std::vector<Tensor>& tensors) const {
  std::vector<Tensor> rows;
  for (const Tensor& tensor : tensors) rows.push_back(Reshape(tensor, {-1}));
  const int64_t rest = flat.piece * ranks_.size() - flat.elements;
  if (rest > 0) rows.push_back(Zeros(tensors[0].device(), flat.dtype, {rest}));
  return Concat(rows, 0);
}

Tensor ShardedOptimizer::OwnPiece(const Flat& flat, const Tensor& joined) const {
  const int64_t begin = flat.piece * ranks_.rank();
  return Slice(joined, 0, begin, begin + flat.piece);
}

std::vector<Tensor> ShardedOptimizer::Parts(const Flat& flat, const Tensor& piece) const {
  const Tensor joined = AllGatherIntoTensor(piece, ranks_);
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (const Variable& parameter : flat.parameters) {
    const Tensor value = parameter();
    const int64_t end = begin + value.num_elements();
    parts.push_back(Reshape(Slice(joined, 0, begin, end), value.shape()));
    begin = end;
  }
  return parts;
}

void ShardedOptimizer::TakePiece(Flat* flat) const {
  std::vector<Tensor> values;
  for (const Variable& parameter : flat->parameters) values.push_back(parameter());
  const bool is_current =
      std::equal(values.begin(), values.end(), flat->sources.begin(), flat->sources.end(),
                 [](const Tensor& value, const auto& source) {
                   return internal::ImplOf(value) == source.lock();
                 });
  // A piece that could not be made is made again.
  if (is_current && flat->own_piece().status().ok()) return;
  flat->own_piece.Set(OwnPiece(*flat, Join(*flat, values)));
  NoteSources(flat);
}

void ShardedOptimizer::NoteSources(Flat* flat) const {
  flat->sources.clear();
  for (const Variable& parameter : flat->parameters) {
    flat->sources.push_back(internal::ImplOf(parameter()));
  }
}

absl::Status ShardedOptimizer::Start(CallSite site) {
  if (optimizer_ != nullptr) return absl::OkStatus();
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  std::vector<Flat> flats;
  size_t index = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (const Variable& parameter : groups_[g].parameters) {
      const Tensor value = parameter();
      if (!value.defined()) {
        return MakeError(Reason::kWrongState, "a parameter is not there yet: call Init first");
      }
      CHORUS_RETURN_IF_ERROR(value.status());
      auto flat = std::find_if(flats.begin(), flats.end(), [&](const Flat& f) {
        return f.group == g && f.dtype == value.dtype();
      });
      if (flat == flats.end()) {
        flat = flats.insert(flats.end(), Flat());
        flat->group = g;
        flat->dtype = value.dtype();
      }
      flat->parameters.push_back(parameter);
      flat->indices.push_back(index++);
      flat->elements += value.num_elements();
    }
  }
  auto pieces = std::make_unique<Pieces>();
  std::vector<ParameterGroup> groups;
  for (Flat& flat : flats) {
    flat.piece = (flat.elements + ranks_.size() - 1) / ranks_.size();
    flat.own_piece = pieces->AddPiece(flat.piece);
    TakePiece(&flat);
    groups.push_back(groups_[flat.group]);
    groups.back().parameters = {flat.own_piece};
  }
  flats_ = std::move(flats);
  pieces_ = std::move(pieces);
  optimizer_ = make_(groups);
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::Step(CallSite site) {
  CHORUS_RETURN_IF_ERROR(Start(site));
  for (const Flat& flat : flats_) {
    for (size_t i = 0; i < flat.parameters.size(); ++i) {
      CHORUS_RETURN_IF_ERROR(CheckIsTrained(flat.parameters[i], flat.indices[i]));
    }
  }
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  std::vector<Tensor> gradients;
  for (Flat& flat : flats_) {
    TakePiece(&flat);
    std::vector<Tensor> local_gradients;
    for (const Variable& parameter : flat.parameters) {
      const Tensor value = parameter();
      const Tensor gradient = parameter.grad();
      local_gradients.push_back(
          gradient.defined() ? gradient : Zeros(value.device(), value.dtype(), value.shape()));
    }
    gradients.push_back(ReduceScatterTensor(Join(flat, local_gradients), ranks_, Reduction::kAvg));
  }
  for (const Tensor& gradient : gradients) CHORUS_RETURN_IF_ERROR(gradient.status());
  CHORUS_ASSIGN_OR_RETURN(std::vector<Optimizer::ParameterState> before, optimizer_->State());
  absl::Status status = optimizer_->Step(gradients, site);
  std::vector<std::vector<Tensor>> parts;
  for (const Flat& flat : flats_) {
    if (!status.ok()) break;
    parts.push_back(Parts(flat, flat.own_piece()));
    for (const Tensor& part : parts.back()) status.Update(part.status());
  }
  for (size_t f = 0; f < flats_.size(); ++f) {
    Flat& flat = flats_[f];
    if (status.ok()) {
      for (size_t i = 0; i < parts[f].size(); ++i) flat.parameters[i].Set(parts[f][i]);
      NoteSources(&flat);
    } else {
      // All of the step or nothing: the next one begins with the parameters, which have not moved.
      flat.sources.clear();
      optimizer_->SetState(f, std::move(before[f]));
    }
  }
  return status;
}

void ShardedOptimizer::ClearGrads() const {
  for (const ParameterGroup& group : groups_) {
    for (const Variable& parameter : group.parameters) {
      if (parameter().defined()) parameter().ClearGrad();
    }
  }
}

absl::Status ShardedOptimizer::CheckKind(const Optimizer* whole) const {
  size_t parameters = 0;
  for (const Flat& flat : flats_) parameters += flat.parameters.size();
  if (whole->parameters().size() == parameters && whole->slots() == optimizer_->slots()) {
    return absl::OkStatus();
  }
  return BadType(absl::StrCat("ShardedOptimizer: expected an optimizer of ", parameters,
                              " parameters with ", optimizer_->slots(),
                              " tensors each, got one of ", whole->parameters().size(), " with ",
                              whole->slots()));
}

absl::Status ShardedOptimizer::Gather(Optimizer* whole, CallSite site) {
  CHORUS_RETURN_IF_ERROR(Start(site));
  CHORUS_RETURN_IF_ERROR(CheckKind(whole));
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  CHORUS_ASSIGN_OR_RETURN(const std::vector<Optimizer::ParameterState> state, optimizer_->State());
  for (size_t f = 0; f < flats_.size(); ++f) {
    std::vector<std::vector<Tensor>> of_parameter(flats_[f].parameters.size());
    for (const Tensor& slot : state[f].slots) {
      const std::vector<Tensor> parts = Parts(flats_[f], slot);
      for (size_t i = 0; i < parts.size(); ++i) {
        CHORUS_RETURN_IF_ERROR(parts[i].status());
        of_parameter[i].push_back(parts[i]);
      }
    }
    for (size_t i = 0; i < of_parameter.size(); ++i) {
      whole->SetState(flats_[f].indices[i],
                      {std::move(of_parameter[i]), state[f].steps, state[f].skipped});
    }
  }
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::Scatter(Optimizer* whole, CallSite site) {
  CHORUS_RETURN_IF_ERROR(Start(site));
  CHORUS_RETURN_IF_ERROR(CheckKind(whole));
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  CHORUS_ASSIGN_OR_RETURN(const std::vector<Optimizer::ParameterState> state, whole->State());
  for (const Flat& flat : flats_) {
    for (const size_t i : flat.indices) {
      if (whole->HaveEqualSteps(i, flat.indices[0])) continue;
      return MakeError(Reason::kWrongState,
                       absl::StrCat("ShardedOptimizer: parameters ", flat.indices[0], " and ", i,
                                    ", of one group and dtype, have had different numbers of "
                                    "steps"));
    }
  }
  for (size_t f = 0; f < flats_.size(); ++f) {
    const Flat& flat = flats_[f];
    const Optimizer::ParameterState& first = state[flat.indices[0]];
    std::vector<Tensor> pieces;
    for (size_t s = 0; s < first.slots.size(); ++s) {
      std::vector<Tensor> parts;
      for (const size_t i : flat.indices) parts.push_back(state[i].slots[s]);
      pieces.push_back(OwnPiece(flat, Join(flat, parts)));
    }
    optimizer_->SetState(f, {std::move(pieces), first.steps, first.skipped});
  }
  return absl::OkStatus();
}

}  // namespace nn
}  // namespace chorus
