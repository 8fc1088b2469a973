// Writes the corpus of executor_bytes_fuzz anew, for a new format, and the graphs with sizes or
// bound collectives of that of graph_fuzz:
//   bazel run //core/runtime/testing:write_fuzz_corpus -- $PWD
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/graph/encoding.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/validate.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/messages.h"
#include "core/runtime/plan/plan.h"

namespace chorus {
namespace testing {
namespace {

class Corpus {
 public:
  explicit Corpus(std::string directory) : directory_(std::move(directory)) {}

  void Write(const std::string& name, const std::string& bytes) const {
    std::ofstream file(absl::StrCat(directory_, "/", name), std::ios::binary);
    file << bytes;
    if (file.good()) return;
    std::cerr << "cannot write " << name << " in " << directory_ << "\n";
    std::exit(1);
  }
  // `format` is what the fuzz target's first byte chooses.
  void Write(const std::string& name, char format, const std::string& bytes) const {
    Write(name, absl::StrCat(std::string(1, format), bytes));
  }

  // Every value that is no input and that no op reads is an output.
  void WritePlan(const std::string& name, RankBuilder* b, const std::vector<ValueIndex>& outputs,
                 bool share = true) const {
    for (const ValueIndex v : outputs) {
      GraphOutput output;
      output.value = v;
      b->graph().AddOutput(output);
    }
    PlanOptions options;
    options.share_results = share;
    options.least_equal_bytes = 0;
    options.workspace_bytes = [](const NodeView& node, absl::Span<const TensorType>) {
      return int64_t{node.op == "matmul" ? 4096 : 0};
    };
    const absl::StatusOr<Plan> plan = CompilePlan(b->graph().Build(), options);
    if (!plan.ok()) {
      std::cerr << name << ": " << plan.status() << "\n";
      std::exit(1);
    }
    for (size_t slot = 0; slot < plan->device_plans.size(); ++slot) {
      Write(slot == 0 ? name : absl::StrCat(name, "_", slot), 0, plan->device_plans[slot]);
    }
  }

 private:
  const std::string directory_;
};

void WriteExecutorBytes(const Corpus& corpus) {
  corpus.Write("plan_empty", 0, EncodeDevicePlan(DevicePlan()));
  const TensorType x(DType::kF32, {6});
  {
    RankBuilder b(1, 4);
    corpus.WritePlan("plan_all_reduce", &b, {b.AllReduce(b.Input(x))});
  }
  {
    RankBuilder b(0, 2);
    const ValueIndex data = b.Input(x);
    const ValueIndex state = b.Input(x);
    corpus.WritePlan("plan_equal_work", &b,
                     {b.Op("sub", {state, b.AllReduce(b.Op("mul", {data, state}))})});
  }
  for (const bool share : {false, true}) {
    RankBuilder b(1, 3);
    const ValueIndex data = b.Input(TensorType(DType::kF32, {6, 4}));
    const ValueIndex turned = b.Op("transpose", {data}, {{"perm", std::vector<int64_t>{1, 0}}});
    RankBuilder::How root;
    root.root = 1;
    std::vector<ValueIndex> outputs = b.ApplyCollective("gather", {turned}, root);
    RankBuilder::How counts;
    counts.counts = {2, 4, 0};
    outputs.push_back(b.ApplyCollective("all_gather_into_tensor", {turned}, counts)[0]);
    RankBuilder::How product;
    product.reduction = Reduction::kProduct;
    outputs.push_back(b.ApplyCollective("all_reduce", {b.Op("neg", {data})}, product)[0]);
    RankBuilder::How ragged;
    ragged.runtime_counts_input = 1;
    ragged.runtime_count_maximum = 9;
    const ValueIndex rows = b.Input(TensorType(DType::kI64, {3}));
    for (const ValueIndex v : b.ApplyCollective("all_to_all_single", {data, rows}, ragged)) {
      outputs.push_back(v);
    }
    b.Barrier();
    corpus.WritePlan(share ? "plan_mixed_shared" : "plan_mixed", &b, outputs, share);
  }
  {
    RankBuilder b;
    const ValueIndex m = b.Input(TensorType(DType::kF16, {6, 6}));
    corpus.WritePlan("plan_workspace", &b, {b.Op("matmul", {b.Op("matmul", {m, m}), m})});
  }
  {
    RankBuilder b(0, 1, 2);
    corpus.WritePlan("plan_copy_to", &b, {b.Op("copy", {b.Input(x)}, {}, 1)}, false);
  }

  LaunchMessage launch;
  ByteWriter empty;
  EncodeLaunch(launch, &empty);
  corpus.Write("launch_empty", 1, empty.bytes());
  launch.launch = LaunchId(300);
  launch.plan = PlanId(7);
  launch.buffers = {0, 4096, ~uint64_t{0}};
  launch.collectives.resize(2);
  launch.collectives[0].communicator = CommunicatorId(9);
  launch.collectives[0].present = {0, 2};
  launch.after = {LaunchId(298), LaunchId(299)};
  launch.uploads = {TransferId(8)};
  launch.left_out = {1};
  launch.hold_back = true;
  launch.inlines = {{2, {'r', 'a', 't', 'e'}}};
  ByteWriter full;
  EncodeLaunch(launch, &full);
  corpus.Write("launch", 1, full.bytes());

  const auto write_event = [&corpus](const std::string& name, const EventMessage& event) {
    ByteWriter bytes;
    EncodeEvent(event, &bytes);
    corpus.Write(name, 2, bytes.bytes());
  };
  const absl::Status died = MakeError(Reason::kPeerDied, "rank 1 (pid 77) died");
  write_event("completion_ok", CompletionMessage{LaunchId(300), absl::OkStatus()});
  write_event("completion_aborted", CompletionMessage{LaunchId(300), died, /*held_back=*/true});
  write_event("loaded", LoadedMessage{PlanId(7), absl::OkStatus()});
  write_event("opened", OpenedMessage{CommunicatorId(9), died});
  write_event("transferred", TransferredMessage{TransferId(8), absl::OkStatus()});
}

// `varying`: what the first dimensions of the inputs are. `rules`: which numbers in nodes follow.
// `bound`: each collective has an instance slot.
void WriteGraph(const Corpus& corpus, const std::string& name, RankBuilder* b,
                const std::vector<ValueIndex>& outputs, const std::vector<Dim>& varying,
                const std::vector<SizeRule>& rules, bool bound = false) {
  for (const ValueIndex v : outputs) {
    GraphOutput output;
    output.value = v;
    b->graph().AddOutput(output);
  }
  Graph graph = b->graph().Build();
  for (size_t i = 0; i < varying.size(); ++i) graph.inputs[i].type.dims[0] = varying[i];
  graph.sizes = rules;
  for (Node& node : graph.nodes) {
    if (!bound || !node.collective.has_value()) continue;
    node.collective->instance.kind = InstanceRef::Kind::kBound;
    node.collective->instance.slot = graph.num_instance_slots++;
  }
  const absl::Status valid = ValidateGraph(graph, GraphLimits());
  if (!valid.ok()) {
    std::cerr << name << ": " << valid << "\n" << DebugString(graph);
    std::exit(1);
  }
  corpus.Write(name, EncodeGraph(graph));
}

SizeRule Rule(int32_t node, SizeRule::Field field, int32_t attribute, int32_t element,
              int32_t symbol, int64_t scale, int64_t offset) {
  SizeRule rule;
  rule.node = node;
  rule.field = field;
  rule.attribute = attribute;
  rule.element = element;
  rule.symbol = symbol;
  rule.scale = scale;
  rule.offset = offset;
  return rule;
}

void WriteGraphs(const Corpus& corpus) {
  using Field = SizeRule::Field;
  constexpr int64_t kRows = 6;
  const TensorType x(DType::kF32, {kRows, 4});
  {
    // All types follow from the input's.
    RankBuilder b(0, 2);
    const ValueIndex rows = b.Op("sum", {b.Input(x)}, {{"axes", std::vector<int64_t>{0}}});
    WriteGraph(corpus, "size_without_rules", &b, {b.AllReduce(rows)}, {Dim::Symbol(0, kRows)}, {});
  }
  {
    RankBuilder b(0, 2);
    const ValueIndex flat =
        b.Op("reshape", {b.Input(x)}, {{"dims", std::vector<int64_t>{4 * kRows}}});
    const ValueIndex more =
        b.Op("pad", {flat}, {{"after", kRows}, {"axis", int64_t{0}}, {"before", int64_t{2}}});
    const ValueIndex less = b.Op(
        "slice", {more}, {{"axis", int64_t{0}}, {"begin", int64_t{2}}, {"end", 4 * kRows + 2}});
    WriteGraph(
        corpus, "size_attributes", &b, {less}, {Dim::Symbol(0, kRows)},
        {Rule(0, Field::kAttribute, 0, 0, 0, 4, 0), Rule(1, Field::kAttribute, 0, 0, 0, 1, 0),
         Rule(2, Field::kAttribute, 2, 0, 0, 4, 2)});
  }
  {
    RankBuilder b(0, 2);
    RankBuilder::How counts;
    counts.counts = {kRows, 2 * kRows};
    const ValueIndex all = b.ApplyCollective("all_gather_into_tensor", {b.Input(x)}, counts)[0];
    RankBuilder::How ragged;
    ragged.runtime_counts_input = 1;
    ragged.runtime_count_maximum = 9;
    const ValueIndex other = b.Input(TensorType(DType::kF32, {5, 4}));
    const ValueIndex rows = b.Input(TensorType(DType::kI64, {2}));
    std::vector<ValueIndex> outputs = b.ApplyCollective("all_to_all_single", {other, rows}, ragged);
    outputs.push_back(all);
    WriteGraph(corpus, "two_sizes_of_counts", &b, outputs,
               {Dim::Symbol(0, kRows), Dim::Symbol(1, 5)},
               {Rule(0, Field::kCount, 0, 0, 0, 1, 0), Rule(0, Field::kCount, 0, 1, 0, 2, 0),
                Rule(1, Field::kRuntimeCountMaximum, 0, 0, 1, 2, -1)});
  }
  {
    // A sum, and its gradient by hand: all sizes in it are the input's.
    RankBuilder b;
    const ValueIndex data = b.Input(x);
    const ValueIndex products = b.Op("matmul", {data, data}, {{"transpose_b", int64_t{1}}});
    const ValueIndex sums =
        b.Op("sum", {b.Op("sin", {products})}, {{"axes", std::vector<int64_t>{0}}});
    const ValueIndex row = b.Op("reshape", {sums}, {{"dims", std::vector<int64_t>{1, kRows}}});
    const ValueIndex g = b.Op("expand", {row}, {{"dims", std::vector<int64_t>{kRows, kRows}}});
    const ValueIndex slopes = b.Op("mul", {g, b.Op("cos", {products})});
    WriteGraph(
        corpus, "symbolic", &b, {b.Op("matmul", {slopes, data})}, {Dim::Symbol(0, kRows)},
        {Rule(3, Field::kAttribute, 0, 1, 0, 1, 0), Rule(4, Field::kAttribute, 0, 0, 0, 1, 0),
         Rule(4, Field::kAttribute, 0, 1, 0, 1, 0)});
  }
  {
    // As gradients of another graph's collectives are.
    RankBuilder b(1, 3);
    const ValueIndex data = b.Input(x);
    RankBuilder::How counts;
    counts.counts = {kRows, 0, 2 * kRows};
    const ValueIndex mine =
        b.Op("slice", {b.AllReduce(data)},
             {{"axis", int64_t{0}}, {"begin", int64_t{0}}, {"end", int64_t{0}}});
    const std::vector<ValueIndex> all = b.ApplyCollective("all_gather_into_tensor", {mine}, counts);
    WriteGraph(corpus, "bound_and_counts", &b, all, {}, {}, /*bound=*/true);
  }
}

}  // namespace
}  // namespace testing
}  // namespace chorus

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: write_fuzz_corpus ROOT\n";
    return 2;
  }
  const std::string root = argv[1];
  chorus::testing::WriteExecutorBytes(chorus::testing::Corpus(root + "/core/runtime/fuzz_corpus"));
  chorus::testing::WriteGraphs(chorus::testing::Corpus(root + "/core/ops/fuzz_corpus"));
  return 0;
}
