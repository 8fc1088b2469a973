// Builds one rank's graph in tests: a GraphBuilder with a name for each op, which ends the test
// with the error's text when an op is refused.
//
// Threads: thread-compatible. Ownership: it has the graph. Errors: end the process, as above.
#ifndef CHORUS_CORE_OPS_TESTING_RANK_BUILDER_H_
#define CHORUS_CORE_OPS_TESTING_RANK_BUILDER_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/graph/graph.h"
#include "core/ops/graph_builder.h"
#include "core/ops/op.h"

namespace chorus {
namespace testing {

// Rank `rank` of a group of `size` (group slot 0). Collectives are recorded with wants_grad (unless
// that is turned off), also those that gradients are made of.
class RankBuilder {
 public:
  explicit RankBuilder(int32_t rank = 0, int32_t size = 1, int32_t num_device_slots = 1);

  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  GraphBuilder& graph() { return builder_; }
  void set_wants_grad(bool wants_grad) { wants_grad_ = wants_grad; }

  ValueIndex Input(const TensorType& type, int32_t device_slot = 0);
  ValueIndex Op(const std::string& op, std::vector<ValueIndex> inputs, Attributes attributes = {},
                int32_t device_slot = 0);

  ValueIndex AllReduce(ValueIndex x);
  // `type` is used off the root, `x` on it.
  ValueIndex Broadcast(ValueIndex x, const TensorType& type, int32_t root);
  std::vector<ValueIndex> Reduce(ValueIndex x, int32_t root);  // empty off the root
  std::vector<ValueIndex> AllGather(ValueIndex x);
  ValueIndex ReduceScatter(const std::vector<ValueIndex>& xs);
  void Send(ValueIndex x, int32_t peer, int64_t tag = 0);
  ValueIndex Recv(const TensorType& type, int32_t peer, int64_t tag = 0);
  void Barrier();

  // Any collective op, on this rank of group slot 0.
  struct How {
    Reduction reduction = Reduction::kNone;  // kNone: SUM, where there has to be one
    int32_t root = -1;
    std::vector<int64_t> counts;
    // Counts at run time: the first input that holds them, and the output's rows.
    int32_t runtime_counts_input = -1;
    int64_t runtime_count_maximum = 0;
  };
  std::vector<ValueIndex> ApplyCollective(absl::string_view op, std::vector<ValueIndex> inputs,
                                          const How& how, Attributes attributes = {});
  std::vector<ValueIndex> ApplyCollective(absl::string_view op, std::vector<ValueIndex> inputs) {
    return ApplyCollective(op, std::move(inputs), How());
  }

  // A collective on this rank of group slot 0, with defaults for the rest.
  Collective MakeCollective(CollectiveKind kind) const;
  // `op` is the kind's own name unless it is given.
  std::vector<ValueIndex> Emit(const Collective& collective, std::vector<ValueIndex> inputs,
                               Attributes attributes = {}, absl::string_view op = "");

 private:
  const int32_t rank_;
  const int32_t size_;
  bool wants_grad_ = true;
  GraphBuilder builder_;
};

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_TESTING_RANK_BUILDER_H_
