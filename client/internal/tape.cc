#include "client/internal/tape.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "client/internal/access.h"
#include "client/internal/session_core.h"

namespace chorus {
namespace internal {

namespace {

thread_local bool grad_enabled = true;
thread_local bool computes_gradients = false;
thread_local const CallInputs* innermost_call = nullptr;
std::atomic<uint64_t> next_order{1};

// Entries that die while another one dies: long tapes are taken down without recursion.
struct Graveyard {
  // Those of a few stand where it does: a short tape is taken down without memory of its own.
  absl::InlinedVector<absl::InlinedVector<Edge, 2>, 4> edges;
  absl::InlinedVector<std::shared_ptr<SessionCore>, 1> sessions;

  void Take(GradNode* node) {
    edges.push_back(std::move(node->inputs));
    for (Edge& edge : node->behind) {
      edges.emplace_back();
      edges.back().push_back(std::move(edge));
    }
    if (sessions.empty() || sessions.back() != node->session) sessions.push_back(node->session);
  }
};
// That of the outermost destructor, which stands on the stack: an entry may die when the objects of
// its thread are gone (a tensor that the program keeps to its end).
thread_local Graveyard* graveyard = nullptr;

}  // namespace

GradNode::~GradNode() {
  if (member != nullptr && trace == TraceId() && !consumed) {
    DropEntry(/*was_consumed=*/false);
  }
  if (graveyard != nullptr) {
    graveyard->Take(this);
    return;
  }
  Graveyard local_graveyard;
  graveyard = &local_graveyard;
  local_graveyard.Take(this);
  while (!local_graveyard.edges.empty()) {
    const absl::InlinedVector<Edge, 2> edges = std::move(local_graveyard.edges.back());
    local_graveyard.edges.pop_back();
  }
  graveyard = nullptr;
  for (const auto& s : local_graveyard.sessions) s->releases().DrainIfUrgent();
}

void GradNode::Consume() {
  if (consumed) return;
  consumed = true;
  if (member != nullptr && trace == TraceId()) {
    DropEntry(/*was_consumed=*/true);
  }
  const absl::InlinedVector<Edge, 2> edges = std::move(inputs);
  const std::vector<Edge> rest = std::move(behind);
  inputs.clear();
  behind.clear();
  saved.clear();
}

void GradNode::DropEntry(bool was_consumed) {
  session->releases().Add(
      DropTape::Entry{member->world, GroupRank(group->rank), key, was_consumed});
}

bool GradEnabled() { return grad_enabled; }

GradMode::GradMode(bool enabled) : before_(grad_enabled) { grad_enabled = enabled; }
GradMode::~GradMode() { grad_enabled = before_; }

CallInputs::CallInputs(absl::Span<const Tensor> inputs, absl::Span<const Tensor> placeholders)
    : inputs_(inputs), placeholders_(placeholders), outer_(std::exchange(innermost_call, this)) {}
CallInputs::~CallInputs() { innermost_call = outer_; }

std::vector<Tensor> CallInputs::StoodForBy(const Tensor& placeholder) {
  std::vector<Tensor> outside = {placeholder};
  for (const CallInputs* call = innermost_call; call != nullptr; call = call->outer_) {
    const auto is_it = [&](const Tensor& t) { return ImplOf(t) == ImplOf(outside.back()); };
    const auto at = std::find_if(call->placeholders_.begin(), call->placeholders_.end(), is_it);
    if (at == call->placeholders_.end()) continue;
    outside.push_back(call->inputs_[static_cast<size_t>(at - call->placeholders_.begin())]);
  }
  outside.erase(outside.begin());
  return outside;
}

GradientScope::GradientScope() : before_(computes_gradients) { computes_gradients = true; }
GradientScope::~GradientScope() { computes_gradients = before_; }
bool ComputesGradients() { return computes_gradients; }

Tensor MakeTensor(TensorDataPtr data) {
  auto impl = std::make_shared<TensorImpl>();
  impl->data = std::move(data);
  return TensorFrom(std::move(impl));
}

uint64_t TakeOrder() { return next_order.fetch_add(1, std::memory_order_relaxed); }
uint64_t NextOrder() { return next_order.load(std::memory_order_relaxed); }

Tensor FailedTensor(const std::shared_ptr<SessionCore>& session,
                    std::shared_ptr<const Failure> failure) {
  auto data = std::make_shared<TensorData>(session);
  data->failure = std::move(failure);
  data->state.store(TensorData::State::kFailed, std::memory_order_release);
  return MakeTensor(std::move(data));
}

Tensor FailedTensor(const std::shared_ptr<SessionCore>& session, absl::Status status) {
  return FailedTensor(session, std::make_shared<Failure>(Failure{std::move(status)}));
}

std::vector<std::shared_ptr<SessionCore>> SessionsOf(absl::Span<const Tensor> tensors) {
  std::vector<std::shared_ptr<SessionCore>> sessions;
  for (const Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    const std::shared_ptr<SessionCore>& session = ImplOf(tensor)->data->session;
    const bool is_new = std::find(sessions.begin(), sessions.end(), session) == sessions.end();
    if (session != nullptr && is_new) sessions.push_back(session);
  }
  return sessions;
}

namespace {

// But for its own companions.
Leads LeadsOf(const TensorImpl& impl) {
  Leads leads;
  if (impl.node == nullptr) {
    const TensorImpl& leaf = impl.leaf != nullptr ? *impl.leaf : impl;
    leads.to_leaf = leaf.leaf_requires_grad;
    leads.to_collective = leaf.outer_collective || impl.outer_collective;
    leads.to_companions = leaf.outer_companions || impl.outer_companions;
    return leads;
  }
  const GradNode& node = *impl.node;
  const bool local = node.member == nullptr;
  leads.to_collective = !local || node.leads.to_collective;
  leads.to_leaf = local && node.leads.to_leaf;
  leads.to_companions = node.leads.to_companions;
  return leads;
}

}  // namespace

Companions CompanionsIn(TraceId trace, const TensorImpl& impl) {
  if (impl.companions == nullptr || impl.companions->front()->trace != trace) return nullptr;
  return impl.companions;
}

Edge EdgeTo(const Tensor& x, TraceId trace, bool keep_data) {
  const TensorImpl& impl = *ImplOf(x);
  Edge edge;
  edge.info = impl.data->info;
  edge.device_slot = impl.data->device_slot;
  if (keep_data) edge.data = impl.data;
  // What an outer tape says about a captured tensor is not the function's business.
  const bool of_trace = impl.node == nullptr || impl.node->trace == trace;
  if (impl.node != nullptr && of_trace) {
    edge.node = impl.node;
    edge.output = impl.output;
  } else if (impl.leaf != nullptr) {
    edge.leaf = impl.leaf;
  } else if (impl.requires_grad()) {
    edge.leaf = ImplOf(x);
  }
  if (of_trace) edge.companions = CompanionsIn(trace, impl);
  if (trace != TraceId() && edge.node == nullptr) {
    edge.outer = LeadsOf(impl);
    edge.outer.to_companions |= impl.companions != nullptr && edge.companions == nullptr;
  }
  return edge;
}

Leads LeadsOf(absl::Span<const Tensor> inputs) {
  Leads leads;
  for (const Tensor& input : inputs) {
    const TensorImpl& impl = *ImplOf(input);
    const Leads of = LeadsOf(impl);
    leads.to_collective = leads.to_collective || of.to_collective;
    leads.to_leaf = leads.to_leaf || of.to_leaf;
    leads.to_companions = leads.to_companions || of.to_companions || impl.companions != nullptr;
  }
  return leads;
}

void AddEdges(GradNode* node, absl::Span<const Tensor> inputs, TraceId trace, Saved saved) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    node->inputs.push_back(EdgeTo(inputs[i], trace, static_cast<int>(i) >= saved.inputs_from));
  }
}

void Attach(const GradNodePtr& node, size_t output, Tensor* result) {
  const TensorInfo* const info = ImplOf(*result)->data->info.get();
  if (info != nullptr && !IsFloating(info->type.dtype)) return;
  ImplOf(*result)->node = node;
  ImplOf(*result)->output = static_cast<int>(output);
}

}  // namespace internal
}  // namespace chorus
