#include "chorus/nn/distributed_data_parallel.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "chorus/autograd.h"
#include "chorus/collectives.h"
#include "chorus/functional/math.h"
#include "chorus/math.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/gate.h"
#include "client/internal/local.h"
#include "client/internal/member.h"
#include "client/internal/tape.h"
#include "client/nn/compute_type.h"
#include "client/nn/refused.h"
#include "client/nn/same_on_ranks.h"
#include "core/base/error.h"

namespace chorus {
namespace nn {
namespace {

using internal::Gate;
using internal::GateRequest;
using internal::ImplOf;
using internal::kUnused;
using internal::LeafOfCast;
using internal::MemberOf;
using internal::SourceOf;
using internal::WithSource;
using parallel::Nest;

absl::Status FirstError(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) CHORUS_RETURN_IF_ERROR(tensor.status());
  return absl::OkStatus();
}

// What ranks must have in common of a variable: "encoder.weight f32[4,3], trained".
std::string TextOf(const NamedVariable& named) {
  const Variable& variable = named.variable;
  return absl::StrCat(named.name, " ", internal::TypeText(variable()),
                      !variable.is_parameter()   ? ", a buffer"
                      : variable.requires_grad() ? ", trained"
                                                 : ", frozen");
}

// That there is a tensor.
absl::Status CheckIsThere(const NamedVariable& named) {
  const Tensor tensor = named.variable();
  if (!tensor.defined()) {
    return MakeError(Reason::kWrongState, absl::StrCat("DistributedDataParallel: ", named.name,
                                                       " is not there yet: call Init"));
  }
  if (tensor.status().ok()) return absl::OkStatus();
  Error error = ErrorOf(tensor.status());
  error.message = absl::StrCat("DistributedDataParallel: ", named.name, ": ", error.message);
  return ToStatus(error);
}

}  // namespace

// --- What hooks there are -----------------------------------------------------------------------

GradientHook MeanInBf16() {
  return [](const std::vector<Tensor>& gradients,
            const Group& group) -> absl::StatusOr<std::vector<Tensor>> {
    std::vector<Tensor> short_ones;
    for (const Tensor& gradient : gradients) short_ones.push_back(Cast(gradient, DType::kBF16));
    std::vector<Tensor> means = AllReduceCoalesced(short_ones, group, Reduction::kAvg);
    for (size_t i = 0; i < means.size(); ++i) means[i] = Cast(means[i], gradients[i].dtype());
    return means;
  };
}

GradientHook KeepLocal() {
  return [](const std::vector<Tensor>& gradients, const Group& /*group*/) {
    return absl::StatusOr<std::vector<Tensor>>(gradients);
  };
}

absl::Status AverageParameters(const Module& module, const Group& group, CallSite site) {
  const NoGrad no_grad;
  const std::vector<Variable> parameters = module.parameters();
  std::vector<Tensor> values;
  for (const Variable& parameter : parameters) values.push_back(parameter());
  const std::vector<Tensor> means = AllReduceCoalesced(values, group, Reduction::kAvg, site);
  for (const Tensor& mean : means) CHORUS_RETURN_IF_ERROR(mean.Wait());
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].Set(means[i]);
  return absl::OkStatus();
}

// --- One call's gates ---------------------------------------------------------------------------

struct DistributedDataParallel::Bucket {
  std::vector<size_t> trained;  // indices of trained_
};

// What the rules of a call's gates have in common. The tape has it, so it has no tensor that came
// from a gate.
class DistributedDataParallel::Pass {
 public:
  Pass(DistributedDataParallel* model, std::vector<Tensor> leaves, CallSite site)
      : model_(model),
        buckets_(internal::Tracing() ? model->traced_buckets_ : model->buckets_),
        leaves_(std::move(leaves)),
        scale_(model->join_ == nullptr ? 1 : model->join_->scale()),
        site_(site) {}

  const std::vector<Bucket>& buckets() const { return buckets_; }

  // The gradients of bucket `b`, for all ranks.
  absl::StatusOr<std::vector<Tensor>> Rule(size_t b, const GateRequest& request) {
    if (b == 0) CHORUS_RETURN_IF_ERROR(Begin(request));
    const std::vector<size_t>& trained = buckets_[b].trained;
    std::vector<Tensor> local_gradients;
    for (size_t i = 0; i < trained.size(); ++i) {
      if (!used_anywhere_[trained[i]]) continue;
      Tensor gradient = request.gradients[i];
      const Tensor& leaf = leaves_[trained[i]];
      if (!IsAskedFor(leaf)) {
        // Of no elements: where another rank asks for it the calls do not match.
        local_gradients.push_back(Zeros(leaf.device(), leaf.dtype(), {0}, site_));
        continue;
      }
      if (HasGrad(request, leaf)) {
        gradient = gradient.defined() ? leaf.grad() + gradient : leaf.grad();
        request.leaves->replaced.insert(ImplOf(leaf).get());
      }
      local_gradients.push_back(
          gradient.defined() ? gradient : Zeros(leaf.device(), leaf.dtype(), leaf.shape(), site_));
    }
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> reduced,
                            model_->Reduce(local_gradients, scale_, site_));
    std::vector<Tensor> gradients(trained.size());
    for (size_t i = 0, next = 0; i < trained.size(); ++i) {
      if (!used_anywhere_[trained[i]]) continue;
      if (IsAskedFor(leaves_[trained[i]])) gradients[i] = reduced[next];
      ++next;
    }
    return gradients;
  }

 private:
  // What is there goes with this Backward's: what this rank alone has added up, and what the last
  // mean has left. That is the same everywhere, and so in the mean what it was, if every rank gives
  // it: none knows whether another has added to it.
  static bool HasGrad(const GateRequest& request, const Tensor& leaf) {
    return request.leaves != nullptr && !internal::Tracing() && leaf.grad().defined() &&
           !request.leaves->replaced.contains(ImplOf(leaf).get());
  }

  // Not a parameter that a compiled step does not train: the tape does not lead to it, so whether
  // the loss depends on it is not known.
  static bool IsAskedFor(const Tensor& leaf) {
    return !internal::Tracing() || leaf.requires_grad();
  }

  // Which parameters have gradients.
  absl::Status Begin(const GateRequest& request) {
    std::vector<bool> used(leaves_.size());
    std::vector<bool> added_up(leaves_.size());
    const bool notes = !internal::Tracing();
    for (size_t b = 0; b < buckets_.size(); ++b) {
      for (size_t i = 0; i < buckets_[b].trained.size(); ++i) {
        const size_t t = buckets_[b].trained[i];
        const uint64_t use = (*request.uses)[b][i];
        used[t] = use != kUnused || !IsAskedFor(leaves_[t]);
        added_up[t] = model_->adds_up_ && HasGrad(request, leaves_[t]);
        if (notes) model_->first_uses_[t] = use;
      }
    }
    CHORUS_ASSIGN_OR_RETURN(used_anywhere_, model_->UsedAnywhere(used, added_up, site_));
    return absl::OkStatus();
  }

  DistributedDataParallel* const model_;
  const std::vector<Bucket> buckets_;
  const std::vector<Tensor> leaves_;  // by trained_: what the gates are for
  const double scale_;
  const CallSite site_;
  std::vector<bool> used_anywhere_;  // by trained_; of the request that is under way
};

// --- DistributedDataParallel --------------------------------------------------------------------

DistributedDataParallel::DistributedDataParallel(std::shared_ptr<Module> module, const Group& group,
                                                 const DistributedDataParallelOptions& options)
    : Module("DistributedDataParallel"),
      module_(module.get()),
      group_(group),
      options_(options),
      variables_(module->named_variables()) {
  AddModule("module", std::move(module));
  MemberOf(group_)->gated_modules.fetch_add(1, std::memory_order_relaxed);
}

DistributedDataParallel::~DistributedDataParallel() {
  MemberOf(group_)->gated_modules.fetch_sub(1, std::memory_order_relaxed);
}

absl::StatusOr<std::shared_ptr<DistributedDataParallel>> DistributedDataParallel::Create(
    std::shared_ptr<Module> module, const Group& group,
    const DistributedDataParallelOptions& options, CallSite site) {
  const auto refuse = [site](const absl::Status& status) {
    return WithSource(status, SourceOf(site));
  };
  if (module == nullptr) {
    return refuse(BadType("DistributedDataParallel: expected a module, got none"));
  }
  if (MemberOf(group) == nullptr) {
    return refuse(BadType("DistributedDataParallel: expected a group, got none"));
  }
  if (options.bucket_bytes <= 0 || options.first_bucket_bytes <= 0) {
    return refuse(BadType(absl::StrCat(
        "DistributedDataParallel: expected buckets of at least 1 byte, got ", options.bucket_bytes,
        " and, for the first one, ", options.first_bucket_bytes)));
  }
  std::shared_ptr<DistributedDataParallel> model(
      new DistributedDataParallel(std::move(module), group, options));
  const absl::Status started = model->Start(site);
  if (!started.ok()) return refuse(started);
  return model;
}

absl::Status DistributedDataParallel::Start(CallSite site) {
  const NoGrad no_grad;
  const DeviceRef device = DeviceOf(group_);
  std::vector<Tensor> values;
  std::vector<std::string> lines;
  for (size_t i = 0; i < variables_.size(); ++i) {
    CHORUS_RETURN_IF_ERROR(CheckIsThere(variables_[i]));
    const Tensor tensor = variables_[i].variable();
    if (tensor.device() != device) {
      return BadType(absl::StrCat("DistributedDataParallel: expected all variables on device ",
                                  device.slot(), ", the group's, got ", variables_[i].name,
                                  " on device ", tensor.device().slot()));
    }
    values.push_back(tensor);
    lines.push_back(TextOf(variables_[i]));
    if (!variables_[i].variable.requires_grad()) continue;
    trained_.push_back(i);
    bytes_.push_back(tensor.num_elements() * DTypeBytes(tensor.dtype()));
  }
  CHORUS_RETURN_IF_ERROR(CheckSameOnRanks("DistributedDataParallel", lines, group_, site));
  const std::vector<Tensor> first = BroadcastCoalesced(values, 0, group_, site);
  for (const Tensor& value : first) CHORUS_RETURN_IF_ERROR(value.Wait());
  for (size_t i = 0; i < first.size(); ++i) {
    variables_[i].variable.Set(first[i]);
    if (!variables_[i].variable.is_parameter()) sound_buffers_.push_back(first[i]);
  }
  // What is used last has its gradient first.
  std::vector<size_t> order(trained_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  MakeBuckets(order);
  traced_buckets_ = buckets_;
  first_uses_.assign(trained_.size(), kUnused);
  return absl::OkStatus();
}

void DistributedDataParallel::MakeBuckets(const std::vector<size_t>& order) {
  buckets_.clear();
  int64_t bytes = 0;
  int64_t limit = 0;
  for (const size_t t : order) {
    if (buckets_.empty() || bytes >= limit) {
      limit = buckets_.empty() ? options_.first_bucket_bytes : options_.bucket_bytes;
      bytes = 0;
      buckets_.emplace_back();
    }
    buckets_.back().trained.push_back(t);
    bytes += bytes_[t];
  }
}

absl::Status DistributedDataParallel::OrderBuckets(CallSite site) {
  std::vector<int64_t> order;
  for (const Bucket& bucket : buckets_) {
    order.insert(order.end(), bucket.trained.begin(), bucket.trained.end());
  }
  // What has not been used comes when all else has, as before.
  const auto last_use = [this](int64_t t) {
    const uint64_t use = first_uses_[static_cast<size_t>(t)];
    return use == kUnused ? 0 : use;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return last_use(a) > last_use(b); });
  const std::vector<int64_t> none(order.size(), -1);
  const DeviceRef device = DeviceOf(group_);
  CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> first,
                          Broadcast(FromHost(device, is_called_ ? order : none,
                                             {static_cast<int64_t>(order.size())}, site),
                                    0, group_, site)
                              .Read<int64_t>());
  is_called_ = true;
  if (first == none) return absl::OkStatus();
  // What a rank that has the order already gives to the others' asking is none.
  if (!std::is_permutation(first.begin(), first.end(), order.begin(), order.end())) {
    return MakeError(Reason::kMismatch, "what rank 0 has sent is no order of the parameters");
  }
  MakeBuckets(std::vector<size_t>(first.begin(), first.end()));
  ordered_ = true;
  return absl::OkStatus();
}

absl::Status DistributedDataParallel::BeginPass(bool here, CallSite site) {
  const NoGrad no_grad;
  int root = 0;
  if (join_ != nullptr) {
    CHORUS_RETURN_IF_ERROR(join_->Exchange(here, site));
    while (root < group_.size() && join_->here_[static_cast<size_t>(root)] == 0) ++root;
    if (root == group_.size()) return absl::OkStatus();
  }
  // At each call until it has come, the first one too, at which there is none: so it does not
  // matter how many of them a rank has left out. Ranks that have the order go on with it. Those
  // that it has not come to ask again and meet nobody; with their old order they would take means
  // of other parameters.
  if (!internal::Tracing() && !ordered_) {
    const absl::Status status = OrderBuckets(site);
    if (!is_called_) return status;
    if (!status.ok()) {
      Error error = ErrorOf(status);
      error.message = absl::StrCat(
          "DistributedDataParallel: the order in which rank 0 asks for gradients has not come "
          "here; if it has come to others, Create it anew: ",
          error.message);
      return ToStatus(error);
    }
  }
  return ShareBuffers(root, site);
}

absl::Status DistributedDataParallel::ShareBuffers(int root, CallSite site) {
  if (!options_.broadcast_buffers) return absl::OkStatus();
  const bool is_root = group_.rank() == root;
  std::vector<Variable> buffers;
  std::vector<Tensor> values;
  for (const NamedVariable& named : variables_) {
    if (named.variable.is_parameter()) continue;
    const Tensor own_value = named.variable().Detach();
    const Tensor& sound = sound_buffers_[buffers.size()];
    const bool is_like_own = !own_value.status().ok() || own_value.shape() == sound.shape();
    buffers.push_back(named.variable);
    values.push_back(is_root || internal::Tracing() || !is_like_own ? own_value : sound);
  }
  const std::vector<Tensor> shared = BroadcastCoalesced(values, root, group_, site);
  CHORUS_RETURN_IF_ERROR(FirstError(shared));
  // Where this call fails later, the root still has what the next one needs.
  for (size_t i = 0; i < buffers.size() && !is_root; ++i) buffers[i].Set(shared[i]);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Module>> DistributedDataParallel::Gated(CallSite site) {
  std::vector<Tensor> leaves;
  for (size_t v = 0; v < variables_.size(); ++v) {
    if (leaves.size() < trained_.size() && trained_[leaves.size()] == v) {
      const absl::Status there = CheckIsThere(variables_[v]);
      if (!there.ok()) return WithSource(there, SourceOf(site));
      const Tensor tensor = variables_[v].variable();
      const Tensor master = LeafOfCast(tensor);
      leaves.push_back(master.defined() ? master : tensor);
    } else if (variables_[v].variable.requires_grad()) {
      return WithSource(MakeError(Reason::kWrongState,
                                  absl::StrCat("DistributedDataParallel: ", variables_[v].name,
                                               " was frozen when it was created, and is not now")),
                        SourceOf(site));
    }
  }
  const auto pass = std::make_shared<Pass>(this, leaves, site);
  const std::vector<Bucket>& buckets = pass->buckets();
  std::vector<Gate> gates(buckets.size());
  for (size_t b = 0; b < buckets.size(); ++b) {
    for (const size_t t : buckets[b].trained) gates[b].tensors.push_back(leaves[t]);
    gates[b].rule = [pass, b](const GateRequest& request) { return pass->Rule(b, request); };
  }
  const std::vector<std::vector<Tensor>> passed =
      internal::PassGates(gates, MemberOf(group_), "DistributedDataParallel", site);
  std::vector<Tensor> tensors(variables_.size());
  for (size_t b = 0; b < buckets.size(); ++b) {
    for (size_t i = 0; i < passed[b].size(); ++i) {
      const size_t v = trained_[buckets[b].trained[i]];
      const DType dtype = variables_[v].variable().dtype();
      tensors[v] = passed[b][i].dtype() == dtype ? passed[b][i] : Cast(passed[b][i], dtype, site);
    }
  }
  return module_->WithTensors(tensors);
}

absl::StatusOr<std::vector<bool>> DistributedDataParallel::UsedAnywhere(
    const std::vector<bool>& used_here, const std::vector<bool>& added_up, CallSite site) {
  std::vector<bool> given = used_here;
  for (size_t t = 0; t < given.size(); ++t) given[t] = given[t] || added_up[t];
  const bool all = std::find(given.begin(), given.end(), false) == given.end();
  const bool may_leave_out = options_.find_unused_parameters || options_.static_graph;
  const auto names = [this](const std::vector<bool>& of, bool value) {
    std::vector<std::string> texts;
    for (size_t t = 0; t < of.size(); ++t) {
      if (of[t] == value) texts.push_back(variables_[trained_[t]].name);
    }
    return absl::StrJoin(texts, ", ");
  };
  if (!may_leave_out) {
    if (all) return given;
    return MakeError(Reason::kWrongState,
                     absl::StrCat("DistributedDataParallel: on rank ", group_.rank(),
                                  " of the group the loss does not depend on ", names(given, false),
                                  "; find_unused_parameters lets losses leave parameters out"));
  }
  if (internal::Tracing()) return std::vector<bool>(given.size(), true);
  if (options_.static_graph && !used_anywhere_.empty()) {
    std::vector<bool> changed;
    for (size_t t = 0; t < used_here.size(); ++t) {
      // The first loss of a rank that had no inputs when the others began may use what theirs do,
      // and each may have gradients of that.
      changed.push_back((given[t] && !used_anywhere_[t]) ||
                        (!used_here_.empty() && used_here[t] != used_here_[t]));
    }
    if (std::find(changed.begin(), changed.end(), true) == changed.end()) {
      used_here_ = used_here;
      return used_anywhere_;
    }
    return MakeError(Reason::kWrongState,
                     absl::StrCat("DistributedDataParallel: static_graph was asked for, and on "
                                  "rank ",
                                  group_.rank(), " of the group the loss depends on ",
                                  names(changed, true), " at one step and not at another"));
  }
  const NoGrad no_grad;
  const DeviceRef device = DeviceOf(group_);
  CHORUS_ASSIGN_OR_RETURN(
      const std::vector<bool> anywhere,
      AllReduce(FromHost(device, given, {static_cast<int64_t>(given.size())}, site), group_,
                Reduction::kMax, site)
          .Read<bool>());
  if (options_.static_graph) {
    used_here_ = used_here;
    used_anywhere_ = anywhere;
  }
  return anywhere;
}

absl::StatusOr<std::vector<Tensor>> DistributedDataParallel::Reduce(
    const std::vector<Tensor>& gradients, double scale, CallSite site) const {
  if (gradients.empty()) return std::vector<Tensor>();
  std::vector<Tensor> reduced;
  if (options_.hook == nullptr) {
    reduced = AllReduceCoalesced(gradients, group_, Reduction::kAvg, site);
    for (Tensor& gradient : reduced) {
      if (scale == 1) continue;
      gradient = InComputeType(gradient, [scale](const Tensor& wide) { return wide * scale; });
    }
  } else {
    CHORUS_ASSIGN_OR_RETURN(reduced, options_.hook(gradients, group_));
    if (reduced.size() != gradients.size()) {
      return BadType(absl::StrCat("DistributedDataParallel: expected ", gradients.size(),
                                  " gradients of the hook, got ", reduced.size()));
    }
  }
  CHORUS_RETURN_IF_ERROR(FirstError(reduced));
  return reduced;
}

absl::StatusOr<Nest> DistributedDataParallel::Call(const Nest::Items& inputs,
                                                   const Nest::Fields& keywords) {
  const CallSite site = this->site();
  const bool trains = std::any_of(trained_.begin(), trained_.end(), [this](size_t v) {
    return variables_[v].variable.requires_grad();
  });
  if (!trains || !internal::GradEnabled()) {
    return module_->CallAt(site, inputs, keywords);
  }
  if (!syncs_) {
    if (internal::Tracing()) {
      return WithSource(
          MakeError(Reason::kWrongState,
                    "DistributedDataParallel: NoSync is no part of a compiled function, whose "
                    "graph would take no mean at later calls either; call module() in it"),
          SourceOf(site));
    }
    adds_up_ = true;
    return module_->CallAt(site, inputs, keywords);
  }
  const absl::Status begun = BeginPass(/*here=*/true, site);
  if (!begun.ok()) return WithSource(begun, SourceOf(site));
  CHORUS_ASSIGN_OR_RETURN(const std::shared_ptr<Module> gated, Gated(site));
  return gated->CallAt(site, inputs, keywords);
}

Tensor DistributedDataParallel::Forward(const Tensor& x) { return ForwardByCall(x); }

std::string DistributedDataParallel::description() const {
  return absl::StrCat("rank=", group_.rank(), " of ", group_.size(), ", buckets=", buckets_.size());
}

std::vector<std::vector<std::string>> DistributedDataParallel::buckets() const {
  std::vector<std::vector<std::string>> names;
  for (const Bucket& bucket : buckets_) {
    names.emplace_back();
    for (const size_t t : bucket.trained) names.back().push_back(variables_[trained_[t]].name);
  }
  return names;
}

DistributedDataParallel::NoSync::NoSync(DistributedDataParallel* model)
    : model_(model), before_(std::exchange(model->syncs_, false)) {}
DistributedDataParallel::NoSync::~NoSync() { model_->syncs_ = before_; }

// --- Join ---------------------------------------------------------------------------------------

DistributedDataParallel::Join::Join(DistributedDataParallel* model, const Options& options)
    : model_(model), options_(options), here_(static_cast<size_t>(model->group_.size()), 1) {
  model_->join_ = this;
}
DistributedDataParallel::Join::~Join() { model_->join_ = nullptr; }

int DistributedDataParallel::Join::live() const {
  return std::accumulate(here_.begin(), here_.end(), 0);
}

double DistributedDataParallel::Join::scale() const {
  return options_.divide_by_all_ranks ? 1.0 : static_cast<double>(here_.size()) / live();
}

absl::Status DistributedDataParallel::Join::Exchange(bool here, CallSite site) {
  CHORUS_ASSIGN_OR_RETURN(here_, GatherNumbers<int32_t>({here ? 1 : 0}, model_->group_, site));
  const int left = live();
  if (!options_.stop_at_first || left == 0 || left == model_->group_.size()) {
    return absl::OkStatus();
  }
  std::vector<int> finished;
  for (size_t r = 0; r < here_.size(); ++r) {
    if (here_[r] == 0) finished.push_back(static_cast<int>(r));
  }
  return MakeError(Reason::kWrongState,
                   absl::StrCat("DistributedDataParallel: ranks ", absl::StrJoin(finished, ", "),
                                " of the group have no more inputs, and others have"));
}

absl::Status DistributedDataParallel::Join::Finish(Optimizer* optimizer, CallSite site) {
  const NoGrad no_grad;
  const Group& group = model_->group_;
  const World world = internal::WorldFrom(MemberOf(group));
  const auto refuse = [site](const absl::Status& status) {
    return status.ok() ? status : WithSource(status, SourceOf(site));
  };
  std::vector<int32_t> before;
  while (true) {
    before = here_;
    if (world.step() > 0) CHORUS_RETURN_IF_ERROR(refuse(world.Step(world.step() + 1, site)));
    CHORUS_RETURN_IF_ERROR(refuse(model_->BeginPass(/*here=*/false, site)));
    if (live() == 0) break;
    CHORUS_RETURN_IF_ERROR(refuse(model_->TakePart(site)));
  }
  const auto last = std::find(before.begin(), before.end(), 1);
  // All have come here after as many steps, or none has made one since all were here.
  if (last == before.end() || std::find(before.begin(), before.end(), 0) == before.end()) {
    return absl::OkStatus();
  }

  const int root = static_cast<int>(last - before.begin());
  std::vector<Tensor> values;
  for (const NamedVariable& named : model_->variables_) {
    values.push_back(named.variable().Detach());
  }
  std::vector<Optimizer::ParameterState> state;
  if (optimizer != nullptr) {
    CHORUS_ASSIGN_OR_RETURN(state, optimizer->State());
    std::vector<int64_t> counts;
    for (const Optimizer::ParameterState& of_parameter : state) {
      values.insert(values.end(), of_parameter.slots.begin(), of_parameter.slots.end());
      counts.insert(counts.end(), {of_parameter.steps, of_parameter.skipped});
    }
    values.push_back(FromHost(world.device(), counts, {static_cast<int64_t>(counts.size())}, site));
  }
  const std::vector<Tensor> shared = BroadcastCoalesced(values, root, group, site);
  for (const Tensor& value : shared) CHORUS_RETURN_IF_ERROR(refuse(value.Wait()));
  size_t next = 0;
  for (const NamedVariable& named : model_->variables_) named.variable.Set(shared[next++]);
  if (optimizer == nullptr) return absl::OkStatus();
  CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> counts, shared.back().Read<int64_t>());
  for (size_t i = 0; i < state.size(); ++i) {
    for (Tensor& slot : state[i].slots) slot = shared[next++];
    state[i].steps = counts[2 * i];
    state[i].skipped = counts[2 * i + 1];
    optimizer->SetState(i, std::move(state[i]));
  }
  return absl::OkStatus();
}

absl::Status DistributedDataParallel::TakePart(CallSite site) {
  std::vector<bool> anywhere(trained_.size(), true);
  if (options_.static_graph && !used_anywhere_.empty()) {
    anywhere = used_anywhere_;
  } else if (options_.static_graph || options_.find_unused_parameters) {
    const std::vector<bool> none(trained_.size(), false);
    CHORUS_ASSIGN_OR_RETURN(anywhere, UsedAnywhere(none, none, site));
    used_here_.clear();  // it has had no loss
  }
  for (const Bucket& bucket : buckets_) {
    std::vector<Tensor> zeros;
    for (const size_t t : bucket.trained) {
      if (!anywhere[t]) continue;
      const Tensor like = variables_[trained_[t]].variable();
      zeros.push_back(Zeros(like.device(), like.dtype(), like.shape(), site));
    }
    CHORUS_RETURN_IF_ERROR(Reduce(zeros, 1, site).status());
  }
  return absl::OkStatus();
}

}  // namespace nn
}  // namespace chorus
