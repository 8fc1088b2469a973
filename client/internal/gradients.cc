#include "client/internal/gradients.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "chorus/math.h"
#include "client/internal/access.h"
#include "client/internal/gate.h"
#include "client/internal/gradients_refused.h"
#include "client/internal/record.h"
#include "client/internal/refusals.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "client/internal/tape_emitter.h"
#include "client/internal/tape_part.h"
#include "client/internal/trace.h"
#include "core/autograd/backward.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

namespace {

absl::Status Precondition(absl::string_view message) {
  return MakeError(Reason::kWrongState, message);
}

Tensor FillLike(const Tensor& like, double value, const std::string& source) {
  const TensorData& data = *ImplOf(like)->data;
  NodeSpec spec;
  spec.op = "fill";
  spec.attributes = TypeAttributes(data.info->type);
  spec.attributes.push_back({"value", value});
  spec.device_slot = data.device_slot;
  spec.source = source;
  const DeviceRef device = DeviceFrom(data.session, data.device_slot);
  return ApplyLocal(std::move(spec), {}, &device);
}

// What a root leads to is known to this trace, or to the tape outside of any: inside a compiled
// function a captured tensor is a constant, unless it is a leaf.
bool HasHistoryIn(TraceId trace, const Tensor& root) {
  const Edge edge = EdgeTo(root, trace, false);
  return edge.node != nullptr || edge.companions != nullptr ||
         (edge.leaf != nullptr && edge.leaf->leaf_requires_grad);
}

// Other ranks count on this one's part of the gradient of a collective, to which a call outside
// would go on. A function's own gradients end at what it has from outside, so that is for its
// caller to go on from, and has to be asked for. `tape`: of the roots.
absl::Status CheckNothingIsCutOff(absl::Span<const Tensor> roots, absl::Span<const Tensor> wanted,
                                  TraceId trace, const TapePart& tape) {
  absl::flat_hash_set<const TensorImpl*> wanted_leaves;
  for (const Tensor& tensor : wanted) wanted_leaves.insert(EdgeTo(tensor, trace, false).leaf.get());
  // `reader`: null for a root.
  const auto check = [&](const Edge& edge, const GradNode* reader) {
    if (!edge.cut_off() || wanted_leaves.contains(edge.leaf.get())) return absl::OkStatus();
    return Precondition(absl::StrCat(
        "backward: the gradient leads through what comes from a collective outside of the compiled "
        "function",
        reader == nullptr
            ? ""
            : absl::StrCat(" and is read by ", reader->spec->op, " at ", reader->spec->source),
        ", and other ranks count on this one's part there: ask for its gradient too (Grad) and go "
        "on from it outside, or Detach it"));
  };
  for (const Tensor& root : roots) {
    CHORUS_RETURN_IF_ERROR(check(EdgeTo(root, trace, false), nullptr));
  }
  for (const GradNodePtr& node : tape.nodes()) {
    for (const Edge& edge : node->inputs) CHORUS_RETURN_IF_ERROR(check(edge, node.get()));
    for (const Edge& edge : node->behind) CHORUS_RETURN_IF_ERROR(check(edge, node.get()));
  }
  return absl::OkStatus();
}

// Of a tensor that the function gets and captures as well the two are apart to it: the gradient of
// the one would lack what it has read of the other.
absl::Status CheckInputsAreNotCaptured(absl::Span<const Tensor> wanted, const TapePart& tape) {
  for (const Tensor& tensor : wanted) {
    for (const Tensor& outside : CallInputs::StoodForBy(tensor)) {
      if (tape.FindAll(outside).empty()) continue;
      return Precondition(absl::StrCat(
          "backward: a compiled function has a tensor, ",
          ImplOf(tensor)->data->info->type.ToString(),
          ", as an input and reads it as one that it captures too, which its gradient would not "
          "see: use the input alone, or Detach what is captured"));
    }
  }
  return absl::OkStatus();
}

// `seed` as it is now: it may become the gradient itself, which is not to change with the
// trainer's own memory.
Tensor Settled(const Tensor& seed, const std::string& source) {
  if (ImplOf(seed)->data->state.load(std::memory_order_acquire) != TensorData::State::kExternal) {
    return seed;
  }
  NodeSpec copy;
  copy.op = "reshape";
  copy.attributes.push_back({"dims", seed.shape()});
  copy.source = source;
  return ApplyLocal(std::move(copy), {seed});
}

absl::StatusOr<std::vector<Tensor>> GradientsOf(const GradientRequest& request, CallSite site) {
  const std::string source = SourceOf(site);
  const auto refuse = [&source](const absl::Status& status) {
    return status.ok() ? status : WithSource(status, source);
  };
  const TraceId trace = IdOf(Trace::Current());
  std::shared_ptr<SessionCore> session;
  if (request.roots.empty()) return refuse(BadType("backward: expected a root, got none"));
  if (!request.seeds.empty() && request.seeds.size() != request.roots.size()) {
    return refuse(
        BadType(absl::StrCat("backward: expected one seed for each of ", request.roots.size(),
                             " roots, got ", request.seeds.size())));
  }
  for (const Tensor& root : request.roots) {
    if (!root.defined())
      return refuse(BadType("backward: expected a tensor, got an undefined one"));
    CHORUS_RETURN_IF_ERROR(root.status());
    if (session == nullptr) session = ImplOf(root)->data->session;
    if (ImplOf(root)->data->session != session) {
      return refuse(BadType("backward: expected roots of one session, got one of another"));
    }
    if (!root.requires_grad()) {
      return refuse(Precondition(
          "backward: a root has no history: nothing that it was computed from requires a gradient, "
          "or it comes from under NoGrad, Detach or a compiled function (differentiate inside "
          "it)"));
    }
    CHORUS_RETURN_IF_ERROR(refuse(CheckTrace("backward", *ImplOf(root)->data, trace)));
    if (!HasHistoryIn(trace, root)) {
      return refuse(Precondition(
          "backward: a root was computed outside of the compiled function, which sees a constant; "
          "differentiate it there, or compute it inside"));
    }
  }
  for (const Tensor& wanted : request.wanted) {
    if (!wanted.defined()) return refuse(BadType("grad: expected a tensor, got an undefined one"));
    CHORUS_RETURN_IF_ERROR(wanted.status());
    if (ImplOf(wanted)->data->session != session) {
      return refuse(BadType("grad: expected inputs of the outputs' session, got one of another"));
    }
    if (wanted.absent()) return refuse(BadType("grad: an absent result has no gradient"));
    CHORUS_RETURN_IF_ERROR(refuse(CheckTrace("grad", *ImplOf(wanted)->data, trace)));
    if (!wanted.requires_grad()) {
      return refuse(Precondition("grad: an input does not require a gradient; RequireGrad first"));
    }
  }
  if (session->Forked()) return ForkedError();

  const GradMode mode(request.create);
  const GradientScope computing;
  TapeEmitter emitter(session, source);
  LeafChanges changes;
  TapePart tape(&emitter, trace, request.leaves ? &changes : nullptr);
  for (const Tensor& root : request.roots) {
    const absl::Status gathered = tape.Gather(root);
    if (!gathered.ok()) return refuse(gathered);
  }
  CHORUS_RETURN_IF_ERROR(refuse(tape.AssignIds()));
  if (trace == TraceId()) {
    // Its requests are made one by one: of all members of a world together it is a call of them
    // all.
    const std::vector<MemberCore*> members = tape.Members();
    SessionLock lock(session.get());
    CHORUS_RETURN_IF_ERROR(refuse(lock.status()));
    BringInLine(members).IgnoreError();
  }

  std::vector<BackwardRoot> roots;
  for (size_t i = 0; i < request.roots.size(); ++i) {
    const Tensor& root = request.roots[i];
    if (root.absent()) {
      roots.push_back(BackwardRoot::AbsentResult(tape.IndexOf(ImplOf(root)->node.get())));
      continue;
    }
    Tensor seed;
    if (!request.seeds.empty() && request.seeds[i].defined()) {
      seed = request.seeds[i];
      CHORUS_RETURN_IF_ERROR(seed.status());
      if (ImplOf(seed)->data->session != session || seed.absent()) {
        return refuse(BadType("backward: a seed must be a tensor of the roots' session"));
      }
      if (ImplOf(seed)->data->device_slot != ImplOf(root)->data->device_slot) {
        return refuse(BadType(absl::StrCat(
            "backward: expected a seed on the root's device, ", ImplOf(root)->data->device_slot,
            " of the session's, got one on ", ImplOf(seed)->data->device_slot)));
      }
      CHORUS_RETURN_IF_ERROR(refuse(CheckTrace("backward", *ImplOf(seed)->data, trace)));
      seed = Settled(seed, source);
      CHORUS_RETURN_IF_ERROR(seed.status());
    } else if (root.num_elements() == 1) {
      seed = FillLike(root, 1, source);
      CHORUS_RETURN_IF_ERROR(seed.status());
    } else {
      return refuse(
          BadType(absl::StrCat("backward: expected a root of one element, or a seed, got ",
                               ImplOf(root)->data->info->type.ToString())));
    }
    const ValueIndex value = tape.FindOrAddRoot(root);
    roots.push_back(BackwardRoot::Value(value, emitter.AddTensor(seed)));
  }

  std::vector<Tensor> wanted(request.wanted.begin(), request.wanted.end());
  if (request.leaves) {
    for (const std::shared_ptr<TensorImpl>& leaf : tape.Leaves())
      wanted.push_back(TensorFrom(leaf));
    for (const Tensor& root : request.roots) {
      // A leaf may be a root itself.
      const std::shared_ptr<TensorImpl>& leaf =
          ImplOf(root)->leaf != nullptr ? ImplOf(root)->leaf : ImplOf(root);
      if (leaf->leaf_requires_grad && tape.Find(root) >= 0 &&
          std::find_if(wanted.begin(), wanted.end(),
                       [&leaf](const Tensor& w) { return ImplOf(w) == leaf; }) == wanted.end()) {
        wanted.push_back(TensorFrom(leaf));
      }
    }
    for (const Tensor& leaf : wanted) {
      if (trace != TraceId() &&
          ImplOf(leaf)->data->state.load(std::memory_order_acquire) != TensorData::State::kTraced) {
        return refuse(Precondition(
            "backward: inside a compiled function, the gradient of a captured tensor has no place "
            "to stay; make it an input of the function, or use Grad"));
      }
    }
  }
  if (trace != TraceId()) {
    // Backward asks for none to go on from: what it leaves in an input's grad() goes no further.
    CHORUS_RETURN_IF_ERROR(
        refuse(CheckNothingIsCutOff(request.roots, request.wanted, trace, tape)));
    CHORUS_RETURN_IF_ERROR(refuse(CheckInputsAreNotCaptured(wanted, tape)));
  }
  std::vector<ValueIndex> wanted_values;
  std::vector<size_t> values_end;  // of each wanted tensor, in `wanted_values`
  for (const Tensor& tensor : wanted) {
    for (const ValueIndex value : tape.FindAll(tensor)) wanted_values.push_back(value);
    values_end.push_back(wanted_values.size());
  }

  std::vector<const RecordedNode*> record;
  for (const RecordedNode& node : tape.record()) record.push_back(&node);
  const absl::StatusOr<BackwardResult> built =
      BuildBackward(record, roots, wanted_values, &emitter);
  if (!built.ok()) return refuse(built.status());
  std::vector<absl::optional<ValueIndex>> sums(wanted.size());
  for (size_t i = 0, v = 0; i < wanted.size(); ++i) {
    for (; v < values_end[i]; ++v) {
      const absl::optional<ValueIndex>& gradient = built->gradients[v];
      if (!gradient.has_value()) continue;
      if (!sums[i].has_value()) {
        sums[i] = gradient;
        continue;
      }
      NodeSpec add;
      add.op = "add";
      add.inputs = {*sums[i], *gradient};
      add.device_slot = emitter.DeviceOf(*gradient);
      add.source = source;
      const absl::StatusOr<std::vector<ValueIndex>> sum = emitter.Emit(std::move(add));
      if (!sum.ok()) return refuse(sum.status());
      sums[i] = (*sum)[0];
    }
  }

  Companions companions;
  std::vector<GradNodePtr> took_part = emitter.TakeCompanions();
  for (size_t i = 0; request.create && i < built->visited.size(); ++i) {
    const GradNodePtr& node = tape.nodes()[built->visited[i].node];
    if (node->member != nullptr || node->gates != nullptr) took_part.push_back(node);
  }
  if (!took_part.empty()) {
    companions = std::make_shared<const std::vector<GradNodePtr>>(std::move(took_part));
  }
  // Gradients that are the seeds themselves, or one value for two inputs, get handles of their own,
  // with the history of the value: a seed's, where the call is recorded.
  const auto handle_of = [&](const Tensor& gradient) {
    auto impl = std::make_shared<TensorImpl>();
    const std::shared_ptr<TensorImpl>& of = ImplOf(gradient);
    impl->data = of->data;
    if (!request.create) return TensorFrom(std::move(impl));
    impl->node = of->node;
    impl->output = of->output;
    const Companions before = CompanionsIn(trace, *of);
    impl->companions = of->companions;
    impl->outer_collective = of->outer_collective;
    impl->outer_companions =
        of->outer_companions || (of->companions != nullptr && before == nullptr);
    // A constant that came of collectives may be asked for, too, as a leaf is.
    if (of->node == nullptr && of->requires_grad()) {
      impl->leaf = of->leaf != nullptr ? of->leaf : of;
      impl->leaf_requires_grad = of->leaf_requires_grad;
    }
    if (companions == nullptr) return TensorFrom(std::move(impl));
    impl->companions = companions;
    if (before != nullptr) {  // a seed's
      auto both = std::make_shared<std::vector<GradNodePtr>>(*before);
      both->insert(both->end(), companions->begin(), companions->end());
      impl->companions = std::move(both);
    }
    return TensorFrom(std::move(impl));
  };
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (sums[i].has_value()) {
      gradients.push_back(handle_of(emitter.tensor(*sums[i])));
    } else if (request.leaves) {
      gradients.emplace_back();
    } else {
      const Tensor zeros = FillLike(wanted[i], 0, source);
      CHORUS_RETURN_IF_ERROR(zeros.status());
      gradients.push_back(handle_of(zeros));
    }
  }
  for (size_t i = 0; request.leaves && i < wanted.size(); ++i) {
    const std::shared_ptr<TensorImpl>& leaf = ImplOf(wanted[i]);
    if (!gradients[i].defined() || !leaf->grad.defined()) continue;
    if (!changes.replaced.contains(leaf.get())) {
      gradients[i] = Add(leaf->grad, gradients[i], site);
    }
  }
  if (trace == TraceId()) {
    SessionLock lock(session.get());
    CHORUS_RETURN_IF_ERROR(lock.status());
    session->Flush();
  }
  // Nothing has changed up to here: a caller may try again.
  for (const Tensor& gradient : gradients) {
    if (gradient.defined()) CHORUS_RETURN_IF_ERROR(refuse(gradient.status()));
  }
  for (size_t i = 0; request.leaves && i < wanted.size(); ++i) {
    if (gradients[i].defined()) ImplOf(wanted[i])->grad = gradients[i];
  }
  for (const std::function<void()>& change : changes.on_success) change();
  if (!request.retain && !request.create) {
    // What was only taken part in with zeros may be asked for by another loss.
    const GateMembers through = tape.MembersOfGates();
    auto left = std::make_shared<std::vector<std::weak_ptr<GradNode>>>();
    for (const BackwardResult::Visited& visited : built->visited) {
      const GradNodePtr& node = tape.nodes()[visited.node];
      const bool is_of_others = node->member != nullptr || node->gates != nullptr;
      if (!visited.reached && is_of_others) left->push_back(node);
    }
    if (left->empty()) left = nullptr;
    for (const BackwardResult::Visited& visited : built->visited) {
      if (!visited.reached) continue;
      GradNode* const node = tape.nodes()[visited.node].get();
      node->Consume();
      node->consumed_through = through;
      node->left_live = left;
    }
  }
  return gradients;
}

}  // namespace

absl::StatusOr<std::vector<Tensor>> TakeGradients(const GradientRequest& request, CallSite site) {
  absl::StatusOr<std::vector<Tensor>> gradients = std::vector<Tensor>();
  try {
    gradients = GradientsOf(request, site);
  } catch (...) {
    // Of a hook: it may lack calls that others make.
    const absl::Status thrown =
        MakeError(Reason::kCancelled, "backward: a hook threw an exception");
    RefusedGradients(request, WithSource(thrown, SourceOf(site))).IgnoreError();
    throw;
  }
  if (gradients.ok()) return gradients;
  return RefusedGradients(request, gradients.status());
}

}  // namespace internal
}  // namespace chorus
