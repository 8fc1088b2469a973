// One thread's matrix products in f32 by the kernel and by what it could be made of: oneDNN's sgemm
// (which it is), oneDNN's matmul primitive (created once), and Eigen. Each checks its result.
#define EIGEN_NO_DEBUG
#include <cmath>
#include <cstdint>
#include <dnnl.hpp>
#include <eigen3/Eigen/Core>
#include <vector>

#include "benchmark/benchmark.h"
#include "core/ops/matmul/matmul_host.h"
#include "core/ops/op.h"

extern "C" void omp_set_num_threads(int);

namespace chorus {
namespace {

// Arguments: m, n, k, transpose_a, transpose_b.
struct Product {
  explicit Product(const benchmark::State& state)
      : m(state.range(0)),
        n(state.range(1)),
        k(state.range(2)),
        ta(state.range(3) != 0),
        tb(state.range(4) != 0),
        a(static_cast<size_t>(m * k)),
        b(static_cast<size_t>(k * n)),
        c(static_cast<size_t>(m * n)) {
    omp_set_num_threads(1);
    // Small whole numbers: sums are exact.
    for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 7) - 3;
    for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % 5) - 2;
  }
  int64_t lda() const { return ta ? m : k; }
  int64_t ldb() const { return tb ? k : n; }
  void Finish(benchmark::State& state) const {
    for (int64_t i = 0; i < m; i += 17) {
      for (int64_t j = 0; j < n; j += 3) {
        float sum = 0;
        for (int64_t p = 0; p < k; ++p) {
          sum += a[static_cast<size_t>(ta ? p * m + i : i * k + p)] *
                 b[static_cast<size_t>(tb ? j * k + p : p * n + j)];
        }
        if (c[static_cast<size_t>(i * n + j)] != sum) state.SkipWithError("wrong result");
      }
    }
    state.counters["GFLOP/s"] = benchmark::Counter(2e-9 * static_cast<double>(m * n * k),
                                                   benchmark::Counter::kIsIterationInvariantRate);
  }

  const int64_t m, n, k;
  const bool ta, tb;
  std::vector<float> a, b, c;
};

void Kernel(benchmark::State& state) {
  Product p(state);
  const TensorType a(DType::kF32, {p.ta ? p.k : p.m, p.ta ? p.m : p.k});
  const TensorType b(DType::kF32, {p.tb ? p.n : p.k, p.tb ? p.k : p.n});
  const std::vector<const TensorType*> types = {&a, &b};
  const Attributes flags = {{"transpose_a", int64_t{p.ta}}, {"transpose_b", int64_t{p.tb}}};
  NodeView node;
  node.op = "matmul";
  node.attributes = flags;
  node.inputs = types;
  const auto kernel = MatmulHostKernels()[0].make(node, {TensorType(DType::kF32, {p.m, p.n})});
  const std::vector<const void*> inputs = {p.a.data(), p.b.data()};
  const std::vector<void*> outputs = {p.c.data()};
  for (auto _ : state) {
    if (!(*kernel)->RunAll({inputs, outputs, {}}).ok()) state.SkipWithError("run");
    benchmark::ClobberMemory();
  }
  p.Finish(state);
}

void Sgemm(benchmark::State& state) {
  Product p(state);
  for (auto _ : state) {
    dnnl::sgemm(p.ta ? 'T' : 'N', p.tb ? 'T' : 'N', p.m, p.n, p.k, 1, p.a.data(), p.lda(),
                p.b.data(), p.ldb(), 0, p.c.data(), p.n);
    benchmark::ClobberMemory();
  }
  p.Finish(state);
}

void Primitive(benchmark::State& state) {
  Product p(state);
  using dnnl::memory;
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const auto describe = [](int64_t rows, int64_t columns, bool transposed) {
    return memory::desc({rows, columns}, memory::data_type::f32,
                        transposed ? memory::dims{1, rows} : memory::dims{columns, 1});
  };
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const dnnl::matmul::primitive_desc desc(
      dnnl::matmul::desc(describe(p.m, p.k, p.ta), describe(p.k, p.n, p.tb),
                         describe(p.m, p.n, false)),
      attributes, engine);
  const dnnl::matmul matmul(desc);
  state.SetLabel(desc.impl_info_str());
  memory scratch(desc.scratchpad_desc(), engine);
  for (auto _ : state) {
    matmul.execute(stream, {{DNNL_ARG_SRC, memory(desc.src_desc(), engine, p.a.data())},
                            {DNNL_ARG_WEIGHTS, memory(desc.weights_desc(), engine, p.b.data())},
                            {DNNL_ARG_DST, memory(desc.dst_desc(), engine, p.c.data())},
                            {DNNL_ARG_SCRATCHPAD, scratch}});
    benchmark::ClobberMemory();
  }
  p.Finish(state);
}

void Eigen3(benchmark::State& state) {
  Product p(state);
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Map = Eigen::Map<Matrix>;
  Map c(p.c.data(), p.m, p.n);
  for (auto _ : state) {
    if (p.ta) {
      c.noalias() = Map(p.a.data(), p.k, p.m).transpose() * Map(p.b.data(), p.k, p.n);
    } else if (p.tb) {
      c.noalias() = Map(p.a.data(), p.m, p.k) * Map(p.b.data(), p.n, p.k).transpose();
    } else {
      c.noalias() = Map(p.a.data(), p.m, p.k) * Map(p.b.data(), p.k, p.n);
    }
    benchmark::ClobberMemory();
  }
  p.Finish(state);
}

// A step of the trainer (784-256-10, 64 rows), its gradients, batch 1, and large ones.
void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Args({64, 256, 784, 0, 0})
      ->Args({64, 10, 256, 0, 0})
      ->Args({784, 256, 64, 1, 0})
      ->Args({256, 10, 64, 1, 0})
      ->Args({64, 256, 10, 0, 1})
      ->Args({1, 256, 784, 0, 0})
      ->Args({16, 16, 16, 0, 0})
      ->Args({256, 1024, 1024, 0, 0})
      ->Args({1024, 1024, 1024, 0, 0});
}
BENCHMARK(Kernel)->Apply(Shapes);
BENCHMARK(Sgemm)->Apply(Shapes);
BENCHMARK(Primitive)->Apply(Shapes);
BENCHMARK(Eigen3)->Apply(Shapes);

}  // namespace
}  // namespace chorus
