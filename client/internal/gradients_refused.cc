#include "client/internal/gradients_refused.h"

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"
#include "client/internal/access.h"
#include "client/internal/gate.h"
#include "client/internal/living_sessions.h"
#include "client/internal/refusals.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "client/internal/tape_part.h"
#include "client/internal/trace.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

namespace {

// The members that would have taken part in gradients of collectives if a call for those of `roots`
// had not been refused. Those of device groups too: it may have asked for a part, which the next
// call would lack, and a member that calls by itself would meet others' requests for another loss.
struct Asked {
  absl::flat_hash_set<std::shared_ptr<MemberCore>> members;
  // Of those the ones that gates would have called collectives with, also where the tape is used
  // up or lost: what is left out is no request of an entry, of which the daemon would know, but
  // calls that others make, and count.
  absl::flat_hash_set<std::shared_ptr<MemberCore>> of_gates;
};
Asked MembersAsked(absl::Span<const Tensor> roots, TraceId trace) {
  Asked asked;
  const auto add_gates_of = [&asked](const std::shared_ptr<MemberCore>& member) {
    asked.members.insert(member);
    asked.of_gates.insert(member);
  };
  absl::flat_hash_set<const void*> seen;
  std::vector<GradNodePtr> stack;
  const auto push = [&](const Edge& edge) {
    if (edge.node != nullptr) stack.push_back(edge.node);
    if (edge.companions == nullptr || !seen.insert(edge.companions.get()).second) return;
    stack.insert(stack.end(), edge.companions->begin(), edge.companions->end());
  };
  for (const Tensor& root : roots) push(EdgeTo(root, trace, false));
  while (!stack.empty()) {
    const GradNodePtr node = std::move(stack.back());
    stack.pop_back();
    if (!seen.insert(node.get()).second) continue;
    if (node->consumed) {
      if (node->consumed_through != nullptr) {
        for (const auto& member : *node->consumed_through) add_gates_of(member);
      }
      if (node->left_live != nullptr) {
        for (const std::weak_ptr<GradNode>& left : *node->left_live) {
          if (GradNodePtr live = left.lock()) stack.push_back(std::move(live));
        }
      }
      continue;
    }
    if (node->gates != nullptr) {
      add_gates_of(node->gates->member);
    } else if (node->member != nullptr && !IsLostEntry(*node)) {
      asked.members.insert(node->member);
    }
    for (const Edge& edge : node->inputs) push(edge);
    for (const Edge& edge : node->behind) push(edge);
  }
  return asked;
}

}  // namespace

absl::Status RefusedGradients(const GradientRequest& request, const absl::Status& why) {
  if (IsLost(why)) return why;
  Trace* const trace = Trace::Current();
  std::vector<Tensor> defined;
  bool failed = request.roots.empty();  // where such a root would have led to nobody knows
  bool untold = failed;                 // and others have not heard of it
  for (const Tensor& root : request.roots) {
    if (!root.defined()) {
      failed = untold = true;
      continue;
    }
    defined.push_back(root);
    const TensorData& data = *ImplOf(root)->data;
    if (data.state.load(std::memory_order_acquire) != TensorData::State::kFailed) continue;
    failed = true;
    untold = untold || !data.failure->told;
  }
  const Asked asked = MembersAsked(defined, IdOf(trace));
  if (!failed && asked.members.empty()) return why;
  if (trace != nullptr) {
    trace->Fail(why);
    return why;
  }
  // Roots that are undefined, or were made of such, are of no session.
  std::vector<std::shared_ptr<SessionCore>> sessions = SessionsOf(request.roots);
  if (sessions.empty()) sessions = SessionsOf(request.wanted);
  if (sessions.empty()) sessions = SessionsOf(request.seeds);
  if (sessions.empty()) sessions = LivingSessions();
  const bool others_know = !untold && asked.members.empty();
  return RefuseOnAll(sessions, why, [&](SessionCore* session, Refusals* refusals) {
    session->AssertLocked();
    for (const std::shared_ptr<MemberCore>& member : session->members().members()) {
      if (!failed && !asked.members.contains(member)) continue;
      LoseTapes(member.get(), NextOrder(), why, refusals);
      const bool may_have_called =
          failed && member->gated_modules.load(std::memory_order_relaxed) > 0;
      if (may_have_called || asked.of_gates.contains(member)) {
        PutOutOfLine(member.get(), why, refusals);
      }
    }
    // The epoch before the member's own is over then.
    for (Refuse& refuse : *refusals) {
      if (others_know) refuse.epoch = Epoch(refuse.epoch.value() - 1);
    }
    return absl::OkStatus();
  });
}

}  // namespace internal
}  // namespace chorus
