// P5: graphs of explicit nodes, with a product of cuBLASLt captured among them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/gpu_probe/assumptions.h"
#include "tools/gpu_probe/gpu.h"
#include "tools/gpu_probe/matmul.h"
#include "tools/gpu_probe/stages.h"

namespace chorus {
namespace probe {
namespace {

constexpr int kNodes = 1000;
constexpr int kBranches = 8;

using OwnedGraph = Owned<cuda::Graph>;
using OwnedExec = Owned<cuda::GraphExec>;

// Chains of nodes that count up, each chain its own word.
class CountingGraph {
 public:
  CountingGraph(Gpu* gpu, int chains) : gpu_(*gpu), chains_(chains) {}

  // Without nodes.
  absl::Status Begin() {
    cuda::Graph graph = nullptr;
    CHORUS_CUDA(gpu_.api(), GraphCreate, &graph, 0);
    graph_ = OwnedGraph(graph, [this](cuda::Graph g) { gpu_.api().GraphDestroy(g); });
    return absl::OkStatus();
  }
  // Chain c counts words[c] up.
  absl::Status Build(uint32_t* words) {
    CHORUS_RETURN_IF_ERROR(Begin());
    for (int c = 0; c < chains_; ++c) {
      cuda::GraphNode last = nullptr;
      for (int n = 0; n < per_chain(); ++n) {
        CHORUS_RETURN_IF_ERROR(Add(words + c, static_cast<uint32_t>(n),
                                   last == nullptr ? nullptr : &last, last == nullptr ? 0 : 1));
        last = nodes_.back();
      }
    }
    return absl::OkStatus();
  }
  absl::Status Add(uint32_t* word, uint32_t expected, const cuda::GraphNode* after, size_t count) {
    CountUpArgs args;
    args.word = word;
    args.expected = expected;
    void* params[] = {&args};
    cuda::KernelNodeParams node = NodeParams(params);
    nodes_.push_back(nullptr);
    CHORUS_CUDA(gpu_.api(), GraphAddKernelNode, &nodes_.back(), graph_.get(), after, count, &node);
    return absl::OkStatus();
  }
  cuda::KernelNodeParams NodeParams(void** params) const {
    cuda::KernelNodeParams node;
    node.function = gpu_.kernel("count_up");
    node.block_x = 32;
    node.kernel_params = params;
    return node;
  }
  absl::StatusOr<OwnedExec> Instantiate() const {
    cuda::GraphExec exec = nullptr;
    CHORUS_CUDA(gpu_.api(), GraphInstantiate, &exec, graph_.get(), 0);
    return OwnedExec(exec, [this](cuda::GraphExec e) { gpu_.api().GraphExecDestroy(e); });
  }
  cuda::Graph get() const { return graph_.get(); }
  int per_chain() const { return kNodes / chains_; }
  const std::vector<cuda::GraphNode>& nodes() const { return nodes_; }

 private:
  Gpu& gpu_;
  const int chains_;
  OwnedGraph graph_;
  std::vector<cuda::GraphNode> nodes_;
};

double MicrosSince(double start) { return 1e6 * (NowSeconds() - start); }

// A graph of chains, and where it counts.
struct Replayed {
  Replayed(Gpu* gpu, int chains) : graph(gpu, chains), chains(chains) {
    which = chains == 1 ? absl::StrCat("a chain of ", kNodes, " nodes")
                        : absl::StrCat(chains, " chains of ", kNodes / chains, " nodes");
  }
  CountingGraph graph;
  const int chains;
  std::string which;
  Memory words;
  OwnedExec exec;
};

// Whether a replay counts each chain to its end in `words`: out of order, it would not.
absl::StatusOr<bool> CountsAll(const Gpu& gpu, const Replayed& replayed, const Memory& words,
                               cuda::Stream stream) {
  const cuda::Api& api = gpu.api();
  CHORUS_CUDA(api, MemsetD8Async, words.get(), 0, 4096, stream);
  CHORUS_CUDA(api, GraphLaunch, replayed.exec.get(), stream);
  std::vector<uint32_t> values(static_cast<size_t>(replayed.chains));
  CHORUS_CUDA(api, MemcpyDtoHAsync, values.data(), words.get(), 4 * values.size(), stream);
  CHORUS_RETURN_IF_ERROR(gpu.Synchronize(stream));
  return std::all_of(values.begin(), values.end(), [&](uint32_t value) {
    return value == static_cast<uint32_t>(replayed.graph.per_chain());
  });
}

absl::Status MeasureReplay(Gpu* gpu, cuda::Stream stream, Replayed* replayed, Judge* judge,
                           Recorder* recorder) {
  const cuda::Api& api = gpu->api();
  const std::string& which = replayed->which;
  CHORUS_ASSIGN_OR_RETURN(replayed->words, gpu->Allocate(4096));
  double start = NowSeconds();
  CHORUS_RETURN_IF_ERROR(replayed->graph.Build(replayed->words.as<uint32_t>()));
  recorder->Number("add a node: " + which, MicrosSince(start) / kNodes, "us");
  start = NowSeconds();
  CHORUS_ASSIGN_OR_RETURN(replayed->exec, replayed->graph.Instantiate());
  recorder->Number("instantiate, a node: " + which, MicrosSince(start) / kNodes, "us");
  start = NowSeconds();
  CHORUS_CUDA(api, GraphUpload, replayed->exec.get(), stream);
  CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream));
  recorder->Number("upload, a node: " + which, MicrosSince(start) / kNodes, "us");
  CHORUS_ASSIGN_OR_RETURN(const bool right, CountsAll(*gpu, *replayed, replayed->words, stream));
  judge->True("nodes run in their order: " + which, right);
  CHORUS_ASSIGN_OR_RETURN(auto micros, gpu->TimeMicros(stream, 9, 10, [&]() -> absl::Status {
    CHORUS_CUDA(api, GraphLaunch, replayed->exec.get(), stream);
    return absl::OkStatus();
  }));
  for (double& m : micros) m /= kNodes;
  const double node = recorder->Numbers("replay, a node: " + which, micros, "us");
  judge->AtMost("a node at replay, " + which, node, kMostGraphNodeMicros, " us");
  return absl::OkStatus();
}

// The same graph over other addresses, node by node, and over the first ones again as a whole.
absl::Status MeasureUpdates(Gpu* gpu, cuda::Stream stream, Replayed* replayed, Judge* judge,
                            Recorder* recorder) {
  const cuda::Api& api = gpu->api();
  const std::string& which = replayed->which;
  const int per_chain = replayed->graph.per_chain();
  CHORUS_ASSIGN_OR_RETURN(const Memory other_words, gpu->Allocate(4096));
  double start = NowSeconds();
  for (int n = 0; n < replayed->chains * per_chain; ++n) {
    CountUpArgs args;
    args.word = other_words.as<uint32_t>() + n / per_chain;
    args.expected = static_cast<uint32_t>(n % per_chain);
    void* params[] = {&args};
    const cuda::KernelNodeParams of_node = replayed->graph.NodeParams(params);
    CHORUS_CUDA(api, GraphExecKernelNodeSetParams, replayed->exec.get(),
                replayed->graph.nodes()[static_cast<size_t>(n)], &of_node);
  }
  recorder->Number("new parameters of a node: " + which, MicrosSince(start) / kNodes, "us");
  CHORUS_ASSIGN_OR_RETURN(bool right, CountsAll(*gpu, *replayed, other_words, stream));
  judge->True("a graph runs with its nodes' new parameters: " + which, right);
  start = NowSeconds();
  cuda::ExecUpdateResultInfo info;
  CHORUS_CUDA(api, GraphExecUpdate, replayed->exec.get(), replayed->graph.get(), &info);
  recorder->Number("cuGraphExecUpdate, a node: " + which, MicrosSince(start) / kNodes, "us");
  CHORUS_ASSIGN_OR_RETURN(right, CountsAll(*gpu, *replayed, replayed->words, stream));
  judge->True("an updated graph runs over its new addresses: " + which, right);
  return absl::OkStatus();
}

// A product that was captured behind an explicit node, and another node behind it.
absl::Status MeasureCapture(Gpu* gpu, const StageContext& context, cuda::Stream stream,
                            Judge* judge) {
  const cuda::Api& api = gpu->api();
  CHORUS_ASSIGN_OR_RETURN(const auto matmul, Matmul::Open(gpu, context.libraries));
  context.recorder->Fact("cuBLASLt", matmul->VersionText());
  const MatmulShape shape = {cuda::BlasType::kF32, 256, 256, 256};
  const int64_t bytes = shape.m * shape.n * shape.element_bytes();
  CHORUS_RETURN_IF_ERROR(matmul->Set(shape));
  CHORUS_ASSIGN_OR_RETURN(const auto algorithm, matmul->Choose(256));
  CHORUS_ASSIGN_OR_RETURN(const Memory operands, gpu->Allocate(4 * bytes));
  const cuda::DevicePtr a = operands.get();
  const cuda::DevicePtr b = a + bytes;
  const cuda::DevicePtr direct = b + bytes;
  const cuda::DevicePtr replayed = direct + bytes;
  const auto values = PatternMatrix(shape.type, 2 * shape.m * shape.n, 5);
  CHORUS_CUDA(api, MemcpyHtoDAsync, a, values.data(), values.size(), stream);
  CHORUS_RETURN_IF_ERROR(matmul->Run(algorithm, a, b, direct, stream));
  CHORUS_CUDA(api, MemsetD8Async, replayed, 0xff, bytes, stream);
  CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream));

  CHORUS_ASSIGN_OR_RETURN(const Memory word, gpu->Allocate(4096));
  CHORUS_CUDA(api, MemsetD8Async, word.get(), 0, 4096, stream);
  CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream));
  CountingGraph graph(gpu, 1);
  CHORUS_RETURN_IF_ERROR(graph.Begin());
  CHORUS_RETURN_IF_ERROR(graph.Add(word.as<uint32_t>(), 0, nullptr, 0));
  const cuda::GraphNode first = graph.nodes().back();
  CHORUS_CUDA(api, StreamBeginCaptureToGraph, stream, graph.get(), &first, nullptr, 1,
              cuda::CaptureMode::kThreadLocal);
  const absl::Status captured = matmul->Run(algorithm, a, b, replayed, stream);
  cuda::Graph ended = nullptr;
  CHORUS_CUDA(api, StreamEndCapture, stream, &ended);
  CHORUS_RETURN_IF_ERROR(captured);
  judge->True("a capture ends in the graph that it was begun in", ended == graph.get());
  size_t count = 0;
  CHORUS_CUDA(api, GraphGetNodes, graph.get(), nullptr, &count);
  std::vector<cuda::GraphNode> all(count);
  CHORUS_CUDA(api, GraphGetNodes, graph.get(), all.data(), &count);
  std::vector<cuda::GraphNode> added;
  for (const cuda::GraphNode node : all) {
    if (node != first) added.push_back(node);
  }
  context.recorder->Number("nodes of a captured product", static_cast<double>(added.size()), "");
  judge->True("a product of cuBLASLt is captured as nodes", !added.empty());
  if (added.empty()) return absl::OkStatus();
  CHORUS_RETURN_IF_ERROR(graph.Add(word.as<uint32_t>(), 1, added.data(), added.size()));
  CHORUS_ASSIGN_OR_RETURN(const OwnedExec exec, graph.Instantiate());
  CHORUS_CUDA(api, GraphLaunch, exec.get(), stream);
  std::vector<char> expected(bytes);
  std::vector<char> got(bytes);
  uint32_t counted = 0;
  CHORUS_CUDA(api, MemcpyDtoHAsync, expected.data(), direct, bytes, stream);
  CHORUS_CUDA(api, MemcpyDtoHAsync, got.data(), replayed, bytes, stream);
  CHORUS_CUDA(api, MemcpyDtoHAsync, &counted, word.get(), 4, stream);
  CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream));
  judge->True("replayed, it gives the same bits as called", expected == got);
  judge->True("nodes before and behind it run", counted == 2);
  return absl::OkStatus();
}

}  // namespace

absl::Status RunP5(StageContext* context) {
  Recorder* const recorder = context->recorder;
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  CHORUS_ASSIGN_OR_RETURN(const Memory word, gpu->Allocate(4096));
  CountUpArgs args;
  args.word = word.as<uint32_t>();
  CHORUS_ASSIGN_OR_RETURN(const auto launches, gpu->TimeMicros(stream.get(), 7, kNodes, [&] {
    return gpu->Launch(gpu->kernel("count_up"), args, 1, stream.get(), 32);
  }));
  recorder->Numbers("the same kernel, launched on a stream", launches, "us");
  Judge judge;
  // What one part cannot do takes nothing from the others.
  const auto unless = [&](const absl::Status& status, const std::string& what) {
    if (status.ok()) return;
    recorder->Fact("stopped: " + what, status.message());
    judge.Unknown(absl::StrCat(what, " (", status.message(), ")"));
  };
  for (const int chains : {1, kBranches}) {
    Replayed replayed(gpu.get(), chains);
    const absl::Status measured =
        MeasureReplay(gpu.get(), stream.get(), &replayed, &judge, recorder);
    unless(measured, "replay of " + replayed.which);
    if (!measured.ok()) continue;
    unless(MeasureUpdates(gpu.get(), stream.get(), &replayed, &judge, recorder),
           "updates of " + replayed.which);
  }
  const absl::Status captured = MeasureCapture(gpu.get(), *context, stream.get(), &judge);
  if (!captured.ok()) {
    recorder->Fact("captured product", captured.message());
    if (absl::IsUnavailable(captured)) {
      judge.Unknown("capture: " + std::string(captured.message()));
    } else {
      judge.True("cuBLASLt can be captured (" + std::string(captured.message()) + ")", false);
    }
  }
  recorder->Say("P5", judge.verdict());
  return absl::OkStatus();
}

}  // namespace probe
}  // namespace chorus
