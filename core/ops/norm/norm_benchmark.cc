// One thread's batch and layer norms in f32, forward and backward, by the kernels and by oneDNN's
// primitives (created once). Each checks its result.
#include <cmath>
#include <cstdint>
#include <dnnl.hpp>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "core/ops/host_onednn.h"
#include "core/ops/norm/norm_host.h"
#include "core/ops/op.h"
#include "core/ops/sum/sum_host.h"

namespace chorus {
namespace {

using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;

constexpr double kEpsilon = 1e-5;

// Arguments: whether it is a batch norm; its sizes, [n, channels, h w] or [rows, columns, 1].
struct Sizes {
  explicit Sizes(const benchmark::State& state)
      : batch(state.range(0) != 0), a(state.range(1)), b(state.range(2)), c(state.range(3)) {
    UseOneThread();
  }
  Ints x() const { return batch ? Ints{a, b, c} : Ints{a, b}; }
  int64_t rows() const { return batch ? b : a; }
  int64_t weights() const { return b; }
  size_t size() const { return static_cast<size_t>(a * b * c); }
  void Finish(benchmark::State& state, const Floats& mean, const Floats& dx) const {
    // Of the numbers that Data has, in a row; of a gradient the sum vanishes.
    double sum = 0;
    for (const float value : dx) sum += static_cast<double>(value);
    if (std::abs(mean[0] - 3) > 1 || std::abs(sum) > 1) state.SkipWithError("wrong result");
    state.counters["GB/s"] = benchmark::Counter(static_cast<double>(size() * sizeof(float)) * 1e-9,
                                                benchmark::Counter::kIsIterationInvariantRate);
  }

  const bool batch;
  const int64_t a, b, c;
};

struct Data {
  explicit Data(const Sizes& s)
      : x(s.size()),
        g(s.size()),
        y(s.size()),
        dx(s.size()),
        moments(static_cast<size_t>(2 * s.rows())),
        weight(static_cast<size_t>(s.weights()), 1.5f),
        bias(weight.size(), 0.5f),
        dweight(weight.size()),
        dbias(weight.size()) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7919 % 101) / 16;
    for (size_t i = 0; i < g.size(); ++i) g[i] = static_cast<float>(i * 104729 % 97) / 16;
  }
  Floats x, g, y, dx, moments, weight, bias, dweight, dbias;
};

class Kernel {
 public:
  Kernel(absl::Span<const HostKernelEntry> entries, const std::string& op,
         const std::vector<Ints>& inputs, const Ints& output, const Attributes& attributes) {
    std::vector<TensorType> types;
    for (const Ints& sizes : inputs) types.push_back(Type(sizes));
    std::vector<const TensorType*> pointers;
    for (const TensorType& type : types) pointers.push_back(&type);
    NodeView node;
    node.op = op;
    node.attributes = attributes;
    node.inputs = pointers;
    for (const HostKernelEntry& entry : entries) {
      if (entry.op == op) kernel_ = *entry.make(node, {Type(output)});
    }
  }
  void Run(const std::vector<const void*>& inputs, void* output) const {
    const std::vector<void*> outputs = {output};
    static_cast<void>(kernel_->RunAll({inputs, outputs, {}}).ok());
  }

 private:
  static TensorType Type(const Ints& sizes) {
    TensorType type(DType::kF32, {});
    for (const int64_t size : sizes) type.dims.emplace_back(size);
    return type;
  }
  std::unique_ptr<HostKernel> kernel_;
};

void Ours(benchmark::State& state, bool backward) {
  const Sizes s(state);
  Data d(s);
  const Attributes rows = {{"rows", s.batch ? Ints{1, 2} : Ints{0, 1}}};
  const Attributes all = {{"epsilon", kEpsilon}, rows[0], {"weights", Ints{1, 2}}};
  const Ints x = s.x(), moments = {2, s.rows()}, weights = {s.weights()};
  const auto norms = NormHostKernels();
  const Kernel find(norms, "moments", {x}, moments, rows);
  const Kernel normalize(norms, "normalize", {x, moments, weights, weights}, x, all);
  const Kernel grad(norms, "normalize_grad", {x, moments, weights, x}, x, all);
  const Kernel weight_grad(norms, "normalize_weight_grad", {x, moments, x}, weights, all);
  const Kernel sum(SumHostKernels(), "sum", {x}, weights,
                   {{"axes", s.batch ? Ints{0, 2} : Ints{0}}});
  const auto run = [&](bool forward, bool back) {
    if (forward) {
      find.Run({d.x.data()}, d.moments.data());
      normalize.Run({d.x.data(), d.moments.data(), d.weight.data(), d.bias.data()}, d.y.data());
    }
    if (back) {
      grad.Run({d.x.data(), d.moments.data(), d.weight.data(), d.g.data()}, d.dx.data());
      weight_grad.Run({d.x.data(), d.moments.data(), d.g.data()}, d.dweight.data());
      sum.Run({d.g.data()}, d.dbias.data());
    }
  };
  run(true, true);
  for (auto _ : state) {
    run(!backward, backward);
    benchmark::ClobberMemory();
  }
  s.Finish(state, d.moments, d.dx);
}

template <typename Forward, typename Backward>
void OneDnn(benchmark::State& state, bool backward, const dnnl::memory::desc& type) {
  const Sizes s(state);
  Data d(s);
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const auto flags = dnnl::normalization_flags::use_scale | dnnl::normalization_flags::use_shift;
  const auto epsilon = static_cast<float>(kEpsilon);
  const typename Forward::primitive_desc forward(
      typename Forward::desc(dnnl::prop_kind::forward_training, type, epsilon, flags), engine);
  const typename Backward::primitive_desc back(
      typename Backward::desc(dnnl::prop_kind::backward, type, type, epsilon, flags), engine,
      forward);
  const auto memory = [&engine](const dnnl::memory::desc& desc, Floats* values) {
    return dnnl::memory(desc, engine, values->data());
  };
  Floats variance(static_cast<size_t>(s.rows()));
  const dnnl::memory::desc weights({s.weights()}, dnnl::memory::data_type::f32,
                                   dnnl::memory::format_tag::a);
  const dnnl::memory x = memory(type, &d.x), mean = memory(forward.mean_desc(), &d.moments),
                     var = memory(forward.variance_desc(), &variance),
                     weight = memory(weights, &d.weight);
  const Forward forward_primitive(forward);
  const Backward backward_primitive(back);
  const auto run = [&](bool there, bool return_) {
    if (there) {
      forward_primitive.execute(stream, {{DNNL_ARG_SRC, x},
                                         {DNNL_ARG_MEAN, mean},
                                         {DNNL_ARG_VARIANCE, var},
                                         {DNNL_ARG_SCALE, weight},
                                         {DNNL_ARG_SHIFT, memory(weights, &d.bias)},
                                         {DNNL_ARG_DST, memory(type, &d.y)}});
    }
    if (return_) {
      backward_primitive.execute(stream, {{DNNL_ARG_SRC, x},
                                          {DNNL_ARG_MEAN, mean},
                                          {DNNL_ARG_VARIANCE, var},
                                          {DNNL_ARG_SCALE, weight},
                                          {DNNL_ARG_SHIFT, memory(weights, &d.bias)},
                                          {DNNL_ARG_DIFF_DST, memory(type, &d.g)},
                                          {DNNL_ARG_DIFF_SRC, memory(type, &d.dx)},
                                          {DNNL_ARG_DIFF_SCALE, memory(weights, &d.dweight)},
                                          {DNNL_ARG_DIFF_SHIFT, memory(weights, &d.dbias)}});
    }
    stream.wait();
  };
  run(true, true);
  for (auto _ : state) {
    run(!backward, backward);
    benchmark::ClobberMemory();
  }
  s.Finish(state, d.moments, d.dx);
}

void OneDnnOfEither(benchmark::State& state, bool backward) {
  const Sizes s(state);
  using Tag = dnnl::memory::format_tag;
  constexpr auto kF32 = dnnl::memory::data_type::f32;
  if (s.batch) {
    OneDnn<dnnl::batch_normalization_forward, dnnl::batch_normalization_backward>(
        state, backward, dnnl::memory::desc({s.a, s.b, s.c, 1}, kF32, Tag::abcd));
  } else {
    OneDnn<dnnl::layer_normalization_forward, dnnl::layer_normalization_backward>(
        state, backward, dnnl::memory::desc({s.a, s.b}, kF32, Tag::ab));
  }
}

void Shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"batch", "", "", ""});
  // Lesson 7's, ResNet-18's, of an MLP; of a transformer's layers.
  for (const Ints& sizes : {Ints{32, 16, 784}, Ints{32, 64, 49}, Ints{16, 64, 3136},
                            Ints{16, 512, 49}, Ints{64, 256, 1}}) {
    b->Args({1, sizes[0], sizes[1], sizes[2]});
  }
  for (const Ints& sizes : {Ints{256, 128}, Ints{4096, 512}, Ints{512, 4096}}) {
    b->Args({0, sizes[0], sizes[1], 1});
  }
}

BENCHMARK_CAPTURE(Ours, forward, false)->Apply(Shapes);
BENCHMARK_CAPTURE(OneDnnOfEither, forward, false)->Apply(Shapes);
BENCHMARK_CAPTURE(Ours, backward, true)->Apply(Shapes);
BENCHMARK_CAPTURE(OneDnnOfEither, backward, true)->Apply(Shapes);

}  // namespace
}  // namespace chorus

BENCHMARK_MAIN();
