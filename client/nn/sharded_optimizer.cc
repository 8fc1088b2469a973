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
#include "client/internal/errors.h"
#include "client/internal/local.h"
#include "client/internal/member.h"
#include "client/internal/trace.h"
#include "client/nn/refused.h"
#include "client/nn/same_on_ranks.h"
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

namespace {

int64_t ReformsOf(const Group& ranks) {
  const internal::GroupCore* const core = internal::CoreOf(ranks);
  return core == nullptr ? 0 : core->generation.load(std::memory_order_relaxed);
}

}  // namespace

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

std::vector<Tensor> ShardedOptimizer::Parts(const Flat& flat, const Tensor& joined) const {
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

std::vector<Tensor> ShardedOptimizer::Call(const Collective& collective,
                                           std::vector<Tensor> operands,
                                           absl::Status* status) const {
  if (!status->ok()) operands = {FailedIn(ranks_, *status)};
  std::vector<Tensor> results = collective(operands);
  // As it was recorded, where it was known before: so the next call does not end another epoch.
  if (!status->ok() && !results[0].status().ok()) *status = results[0].status();
  for (const Tensor& result : results) status->Update(result.status());
  return results;
}

std::vector<Tensor> ShardedOptimizer::AllGatherPieces(std::vector<Tensor> pieces,
                                                      absl::Status* status) const {
  const auto all_gather = [this](const std::vector<Tensor>& xs) {
    return AllGatherIntoTensorCoalesced(xs, ranks_);
  };
  return Call(all_gather, std::move(pieces), status);
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

absl::StatusOr<std::vector<Optimizer::ParameterState>> ShardedOptimizer::StateAfter(
    const absl::Status& status) const {
  CHORUS_RETURN_IF_ERROR(status);
  return optimizer_->State();
}

absl::Status ShardedOptimizer::CheckRanks() const {
  if (optimizer_ == nullptr || reforms_ == ReformsOf(ranks_)) return absl::OkStatus();
  return MakeError(Reason::kWrongState,
                   "ShardedOptimizer: its ranks were reformed since it made their pieces, of which "
                   "some are gone; make it anew, and Scatter what was gathered before");
}

absl::Status ShardedOptimizer::Start(CallSite site) {
  if (optimizer_ != nullptr) return absl::OkStatus();
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  CHORUS_RETURN_IF_ERROR(CheckEachOnce(groups_));
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
  reforms_ = ReformsOf(ranks_);
  optimizer_ = make_(groups);
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::Compare(const absl::Status& status, CallSite site) {
  if (!status.ok()) {
    return AllGatherIntoTensor(FailedIn(ranks_, status), ranks_, {}, 0, site).status();
  }
  std::vector<std::string> lines;
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (const Variable& parameter : groups_[g].parameters) {
      lines.push_back(absl::StrCat("parameter ", lines.size(), ", of group ", g, ", ",
                                   internal::TypeText(parameter())));
    }
  }
  CHORUS_RETURN_IF_ERROR(CheckSameOnRanks("ShardedOptimizer", lines, ranks_, site));
  compared_ = true;
  return absl::OkStatus();
}

// Both calls are made, whatever has failed: they count, and the other ranks make them. Where ranks
// have not compared yet that alone is made, of which all are told.
absl::Status ShardedOptimizer::Step(CallSite site) {
  CHORUS_RETURN_IF_ERROR(CheckRanks());
  CHORUS_RETURN_IF_ERROR(internal::WithSource(
      internal::FailInTrace("ShardedOptimizer::Step", "call it behind the function"),
      internal::SourceOf(site)));
  absl::Status status = Start(site);
  for (const Flat& flat : flats_) {
    for (size_t i = 0; i < flat.parameters.size(); ++i) {
      status.Update(CheckIsTrained(flat.parameters[i], flat.indices[i]));
    }
  }
  if (!compared_) CHORUS_RETURN_IF_ERROR(Compare(status, site));
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  std::vector<Tensor> rows;
  for (Flat& flat : flats_) {
    if (!status.ok()) break;
    TakePiece(&flat);
    std::vector<Tensor> local_gradients;
    for (const Variable& parameter : flat.parameters) {
      const Tensor value = parameter();
      const Tensor gradient = parameter.grad();
      local_gradients.push_back(
          gradient.defined() ? gradient : Zeros(value.device(), value.dtype(), value.shape()));
    }
    rows.push_back(Join(flat, local_gradients));
  }
  if (status.ok() && rows.empty()) return status;  // there are no parameters
  const auto reduce_scatter = [this](const std::vector<Tensor>& xs) {
    return ReduceScatterTensorCoalesced(xs, ranks_, Reduction::kAvg);
  };
  const std::vector<Tensor> gradients = Call(reduce_scatter, std::move(rows), &status);
  absl::StatusOr<std::vector<Optimizer::ParameterState>> before = StateAfter(status);
  status.Update(before.status());
  if (status.ok()) status = optimizer_->Step(gradients, site);
  std::vector<Tensor> pieces;
  for (const Flat& flat : flats_) pieces.push_back(flat.own_piece());
  const std::vector<Tensor> joined = AllGatherPieces(std::move(pieces), &status);
  std::vector<std::vector<Tensor>> parts;
  for (size_t f = 0; status.ok() && f < flats_.size(); ++f) {
    parts.push_back(Parts(flats_[f], joined[f]));
    for (const Tensor& part : parts.back()) status.Update(part.status());
  }
  for (size_t f = 0; f < flats_.size(); ++f) {
    Flat& flat = flats_[f];
    if (status.ok()) {
      for (size_t i = 0; i < parts[f].size(); ++i) flat.parameters[i].Set(parts[f][i]);
      NoteSources(&flat);
    } else if (before.ok()) {
      // All of the step or nothing: the next one begins with the parameters, which have not moved.
      flat.sources.clear();
      optimizer_->SetState(f, std::move((*before)[f]));
    }
  }
  return status;
}

void ShardedOptimizer::ClearGrads() const {
  for (const ParameterGroup& group : groups_) {
    for (const Variable& parameter : group.parameters) parameter.ClearGrad();
  }
}

absl::Status ShardedOptimizer::FindIn(const Optimizer& whole,
                                      std::vector<size_t>* index_in_whole) const {
  const std::vector<Variable>& all = whole.parameters();
  size_t parameters = 0;
  for (const Flat& flat : flats_) parameters += flat.parameters.size();
  if (all.size() != parameters || whole.slots() != optimizer_->slots()) {
    return BadType(absl::StrCat("ShardedOptimizer: expected an optimizer of ", parameters,
                                " parameters with ", optimizer_->slots(),
                                " tensors each, got one of ", all.size(), " with ", whole.slots()));
  }
  index_in_whole->resize(parameters);
  for (const Flat& flat : flats_) {
    for (size_t i = 0; i < flat.parameters.size(); ++i) {
      const auto at = std::find(all.begin(), all.end(), flat.parameters[i]);
      if (at == all.end()) {
        return BadType(absl::StrCat("ShardedOptimizer: parameter ", flat.indices[i],
                                    " is none of the other optimizer's"));
      }
      (*index_in_whole)[flat.indices[i]] = static_cast<size_t>(at - all.begin());
    }
  }
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::Gather(Optimizer* whole, CallSite site) {
  CHORUS_RETURN_IF_ERROR(CheckRanks());
  absl::Status status = Start(site);
  std::vector<size_t> index_in_whole;
  if (status.ok()) status = FindIn(*whole, &index_in_whole);
  if (!compared_) CHORUS_RETURN_IF_ERROR(Compare(status, site));
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  // The other ranks' are of the kind of this one's pieces; before there are any, of `whole`.
  const int num_slots = optimizer_ != nullptr ? optimizer_->slots() : whole->slots();
  absl::StatusOr<std::vector<Optimizer::ParameterState>> state = StateAfter(status);
  status.Update(state.status());
  std::vector<Tensor> slots;  // by flat
  for (size_t f = 0; status.ok() && f < flats_.size(); ++f) {
    slots.insert(slots.end(), (*state)[f].slots.begin(), (*state)[f].slots.end());
  }
  std::vector<Tensor> joined;
  if (status.ok() ? !slots.empty() : num_slots > 0) {
    joined = AllGatherPieces(std::move(slots), &status);
  }
  std::vector<Optimizer::ParameterState> all;  // by parameter, flats in order
  size_t next = 0;
  for (size_t f = 0; status.ok() && f < flats_.size(); ++f) {
    const size_t first = all.size();
    all.resize(first + flats_[f].parameters.size(), {{}, (*state)[f].steps, (*state)[f].skipped});
    for (int s = 0; s < num_slots; ++s) {
      const std::vector<Tensor> parts = Parts(flats_[f], joined[next++]);
      for (size_t i = 0; i < parts.size(); ++i) {
        status.Update(parts[i].status());
        all[first + i].slots.push_back(parts[i]);
      }
    }
  }
  CHORUS_RETURN_IF_ERROR(status);
  next = 0;
  for (const Flat& flat : flats_) {
    for (const size_t i : flat.indices) whole->SetState(index_in_whole[i], std::move(all[next++]));
  }
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::Scatter(Optimizer* whole, CallSite site) {
  CHORUS_RETURN_IF_ERROR(CheckRanks());
  CHORUS_RETURN_IF_ERROR(Start(site));
  std::vector<size_t> index_in_whole;
  CHORUS_RETURN_IF_ERROR(FindIn(*whole, &index_in_whole));
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  CHORUS_ASSIGN_OR_RETURN(const std::vector<Optimizer::ParameterState> state, whole->State());
  for (const Flat& flat : flats_) {
    for (const size_t i : flat.indices) {
      if (whole->HaveEqualSteps(index_in_whole[i], index_in_whole[flat.indices[0]])) continue;
      return MakeError(Reason::kWrongState,
                       absl::StrCat("ShardedOptimizer: parameters ", flat.indices[0], " and ", i,
                                    ", of one group and dtype, have had different numbers of "
                                    "steps"));
    }
  }
  std::vector<Optimizer::ParameterState> scattered;  // by flat
  for (const Flat& flat : flats_) {
    const Optimizer::ParameterState& first = state[index_in_whole[flat.indices[0]]];
    std::vector<Tensor> pieces;
    for (size_t s = 0; s < first.slots.size(); ++s) {
      std::vector<Tensor> parts;
      for (const size_t i : flat.indices) parts.push_back(state[index_in_whole[i]].slots[s]);
      pieces.push_back(OwnPiece(flat, Join(flat, parts)));
      CHORUS_RETURN_IF_ERROR(pieces.back().status());
    }
    scattered.push_back({std::move(pieces), first.steps, first.skipped});
  }
  for (size_t f = 0; f < flats_.size(); ++f) optimizer_->SetState(f, std::move(scattered[f]));
  return absl::OkStatus();
}

}  // namespace nn
}  // namespace chorus
