#include "core/runtime/testing/hostile_graphs.h"

#include <cstdint>
#include <string>
#include <vector>

#include "core/ops/testing/rank_builder.h"
#include "core/tensor/type.h"

namespace chorus {
namespace testing {
namespace {

const TensorType& Small() {
  static const TensorType* const type = new TensorType(DType::kF32, {Dim(1)});
  return *type;
}
const TensorType& ManyDims() {
  static const TensorType* const type =
      new TensorType(DType::kF32, std::vector<Dim>(TensorType::kMaxRank, Dim(1)));
  return *type;
}

void AddOutput(RankBuilder* b, ValueIndex v) {
  GraphOutput output;
  output.value = v;
  b->graph().AddOutput(output);
}

Graph Sums(int size, bool needed) {
  RankBuilder b(0, 2);
  b.set_wants_grad(false);
  const ValueIndex x = b.Input(Small());
  ValueIndex sum = b.AllReduce(x);
  std::vector<ValueIndex> sums = {sum};
  for (int i = 1; i < size; ++i) sums.push_back(sum = b.Op("add", {sum, b.AllReduce(x)}));
  for (int i = size - 1; i-- > 0;) sum = b.Op("add", {sum, sums[static_cast<size_t>(i)]});
  AddOutput(&b, needed ? b.AllReduce(sum) : sum);
  return b.graph().Build();
}

Graph AllAndOneMore(int size) {
  RankBuilder b(0, 2);
  b.set_wants_grad(false);
  const ValueIndex x = b.Input(Small());
  std::vector<ValueIndex> reduced;
  for (int i = 0; i < size; ++i) reduced.push_back(b.AllReduce(x));
  const ValueIndex product = b.Op("product", reduced);
  const ValueIndex one_more = b.AllReduce(x);
  std::vector<ValueIndex> sums;
  for (int i = 0; i < 2 * size; ++i) sums.push_back(b.Op("add", {product, one_more}));
  AddOutput(&b, b.AllReduce(b.Op("product", sums)));
  return b.graph().Build();
}

Graph SumFromTheEnd(int size) {
  RankBuilder b(0, 2);
  b.set_wants_grad(false);
  const ValueIndex x = b.Input(Small());
  std::vector<ValueIndex> reduced;
  for (int i = 0; i < size; ++i) reduced.push_back(b.AllReduce(x));
  ValueIndex sum = reduced.back();
  for (int i = size - 1; i-- > 0;) sum = b.Op("add", {sum, reduced[static_cast<size_t>(i)]});
  AddOutput(&b, b.AllReduce(sum));
  return b.graph().Build();
}

Graph AllAfterAll(int size) {
  RankBuilder b(0, 2);
  b.set_wants_grad(false);
  const ValueIndex x = b.Input(Small());
  ValueIndex sum = x;
  for (int i = 0; i < size; ++i) sum = b.Op("add", {sum, b.AllReduce(x)});
  for (int i = 0; i < size; ++i) AddOutput(&b, b.AllReduce(b.Op("neg", {sum})));
  return b.graph().Build();
}

Graph ManyPieces(int size) {
  constexpr int32_t kMembers = 1024;
  RankBuilder b(kMembers - 1, kMembers);
  b.set_wants_grad(false);
  const ValueIndex x = b.Input(TensorType(DType::kF32, {Dim(kMembers)}));
  for (int i = 0; i < size; ++i) b.ApplyCollective("all_to_all_single", {x});
  return b.graph().Build();
}

Graph WideNodes(int size) {
  constexpr size_t kInputs = 1000;
  RankBuilder b;
  const std::vector<ValueIndex> inputs(kInputs, b.Input(ManyDims()));
  for (int i = 0; i < size; ++i) {
    AddOutput(&b, b.Op("concat", inputs, {{"axis", int64_t{0}}}));
  }
  return b.graph().Build();
}

Graph OutputsOf(const TensorType& type, int chain, int outputs) {
  RankBuilder b;
  ValueIndex v = b.Input(type);
  for (int i = 0; i < chain; ++i) v = b.Op("reshape", {v}, {{"dims", type.sizes()}});
  for (int i = 0; i < outputs; ++i) AddOutput(&b, v);
  return b.graph().Build();
}

}  // namespace

absl::string_view NameOf(HostileGraph kind) {
  switch (kind) {
    case HostileGraph::kSums:
      return "sums";
    case HostileGraph::kAllAndOneMore:
      return "all_and_one_more";
    case HostileGraph::kUnneededSums:
      return "unneeded_sums";
    case HostileGraph::kSumFromTheEnd:
      return "sum_from_the_end";
    case HostileGraph::kAllAfterAll:
      return "all_after_all";
    case HostileGraph::kManyPieces:
      return "many_pieces";
    case HostileGraph::kWideNodes:
      return "wide_nodes";
    case HostileGraph::kOutputsOfAChain:
      return "outputs_of_a_chain";
    case HostileGraph::kOutputsOfOne:
      return "outputs_of_one";
  }
  return "";
}

Graph MakeHostileGraph(HostileGraph kind, int size) {
  switch (kind) {
    case HostileGraph::kSums:
      return Sums(size, true);
    case HostileGraph::kAllAndOneMore:
      return AllAndOneMore(size);
    case HostileGraph::kUnneededSums:
      return Sums(size, false);
    case HostileGraph::kSumFromTheEnd:
      return SumFromTheEnd(size);
    case HostileGraph::kAllAfterAll:
      return AllAfterAll(size);
    case HostileGraph::kManyPieces:
      return ManyPieces(size / 10);
    case HostileGraph::kWideNodes:
      return WideNodes(size / 20);
    case HostileGraph::kOutputsOfAChain:
      return OutputsOf(Small(), size, size);
    case HostileGraph::kOutputsOfOne:
      return OutputsOf(ManyDims(), 0, size);
  }
  return Graph();
}

}  // namespace testing
}  // namespace chorus
