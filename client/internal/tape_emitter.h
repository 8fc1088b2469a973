// Gradient rules give values ids; here a value is a tensor, or what is left of one on the tape.
//
// Threads: one. Ownership: keeps the session and the tensors. Errors: those of the calls that it
//   records, and of rules.
#ifndef CHORUS_CLIENT_INTERNAL_TAPE_EMITTER_H_
#define CHORUS_CLIENT_INTERNAL_TAPE_EMITTER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/tensor.h"
#include "client/internal/gate.h"
#include "client/internal/interner.h"
#include "client/internal/tape.h"
#include "core/autograd/backward.h"
#include "core/collective/instance.h"

namespace chorus {
namespace internal {

class TapeEmitter : public Emitter {
 public:
  // `source`: the line that asks for the gradients.
  TapeEmitter(std::shared_ptr<SessionCore> session, std::string source);

  ValueIndex AddTensor(const Tensor& tensor);
  ValueIndex AddType(const TensorInfoPtr& info, int32_t device_slot);
  // Gives a value that only had a type its tensor.
  void SetTensor(ValueIndex value, const Tensor& tensor) { values_[value].tensor = tensor; }
  bool HasTensor(ValueIndex value) const { return values_[value].tensor.defined(); }
  const Tensor& tensor(ValueIndex value) const { return values_[value].tensor; }

  // The slot of the group of a collective's entry.
  int32_t AddGroup(const GradNodePtr& node);
  // What BindGradient's forwards have as ids.
  void SetRecord(const std::vector<GradNodePtr>* record) { record_ = record; }

  absl::StatusOr<std::vector<ValueIndex>> Emit(NodeSpec spec) override;
  const TensorType& TypeOf(ValueIndex value) const override { return values_[value].info->type; }
  int32_t DeviceOf(ValueIndex value) const override { return values_[value].device_slot; }
  int32_t GroupSizeOf(int32_t group_slot) const override;
  void BindGradient(const RecordedNode& forward, Collective* gradient) override;

  // The rule of a gate, with the gradients that have come to it.
  absl::StatusOr<InputGradients> PassGate(const GradNode& gate, GateRequest request,
                                          const GradientContext& context);

  // The entries of the collectives that were emitted.
  std::vector<GradNodePtr> TakeCompanions() { return std::move(companions_); }

 private:
  // Those that `tensors` were computed with since the entry of that order.
  void AddCompanionsBehind(const std::vector<Tensor>& tensors, uint64_t first);

  struct Value {
    Tensor tensor;
    TensorInfoPtr info;
    int32_t device_slot = 0;
  };
  const std::shared_ptr<SessionCore> session_;
  const std::string source_;
  std::deque<Value> values_;
  std::vector<GradNodePtr> groups_;  // one entry of each group
  const std::vector<GradNodePtr>* record_ = nullptr;
  InstanceKey bound_;
  std::vector<GradNodePtr> companions_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_TAPE_EMITTER_H_
