#include "client/internal/gate.h"

#include <utility>

#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/tape.h"
#include "client/internal/trace.h"

namespace chorus {
namespace internal {

bool Tracing() { return Trace::Current() != nullptr; }

std::vector<std::vector<Tensor>> PassGates(const std::vector<Gate>& gates,
                                           const std::shared_ptr<MemberCore>& member,
                                           const std::string& name, CallSite site) {
  std::vector<std::vector<Tensor>> passed;
  for (const Gate& gate : gates) passed.push_back(gate.tensors);
  if (!GradEnabled()) return passed;

  auto set = std::make_shared<GateSet>();
  set->member = member;
  for (const Gate& gate : gates) {
    set->rules.push_back(gate.rule);
    set->sizes.push_back(static_cast<int>(gate.tensors.size()));
  }
  NodeSpec spec;
  spec.op = name;
  spec.source = SourceOf(site);
  const auto shared_spec = std::make_shared<const NodeSpec>(std::move(spec));
  const TraceId trace = IdOf(Trace::Current());
  auto nodes = std::make_shared<std::vector<GradNodePtr>>();
  // The walk comes from the end of the tape: the first gate is recorded last.
  for (size_t g = gates.size(); g-- > 0;) {
    auto node = std::make_shared<GradNode>();
    node->spec = shared_spec;
    node->session = member->session;
    node->trace = trace;
    node->gates = set;
    node->gate = static_cast<int>(g);
    node->leads = LeadsOf(gates[g].tensors);
    // A rule is of all ranks, as a collective is: of what others lack it makes a mean.
    node->leads.to_collective = true;
    AddEdges(node.get(), gates[g].tensors, trace, {static_cast<int>(gates[g].tensors.size()), 0});
    for (const Tensor& tensor : gates[g].tensors) {
      node->device_slot = ImplOf(tensor)->data->device_slot;
      node->outputs.push_back(ImplOf(tensor)->data->info);
    }
    node->order = TakeOrder();
    nodes->push_back(std::move(node));
  }
  const Companions companions = nodes;
  for (size_t g = 0; g < gates.size(); ++g) {
    for (size_t i = 0; i < passed[g].size(); ++i) {
      if (!passed[g][i].requires_grad()) continue;
      Tensor behind = MakeTensor(ImplOf(passed[g][i])->data);
      Attach((*nodes)[gates.size() - 1 - g], i, &behind);
      ImplOf(behind)->companions = companions;
      passed[g][i] = behind;
    }
  }
  return passed;
}

Tensor LeafOfCast(const Tensor& tensor) {
  const Edge edge = EdgeTo(tensor, IdOf(Trace::Current()), false);
  if (edge.node == nullptr || edge.node->spec->op != "cast" || edge.node->inputs.empty()) return {};
  const std::shared_ptr<TensorImpl>& leaf = edge.node->inputs[0].leaf;
  return leaf == nullptr || !leaf->leaf_requires_grad ? Tensor() : TensorFrom(leaf);
}

}  // namespace internal
}  // namespace chorus
