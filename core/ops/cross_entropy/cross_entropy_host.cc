#include "core/ops/cross_entropy/cross_entropy_host.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_indices.h"
#include "core/ops/host_rows.h"
#include "core/ops/long_sums.h"

namespace chorus {
namespace {

// What both kernels do with a row.
template <typename T>
class RowKernel : public HostKernel {
 protected:
  using A = Arithmetic<T>;

  RowKernel(const NodeView& node, int64_t outputs_per_row)
      : HostKernel(outputs_per_row == 0 ? 0 : node.input(1).num_elements(),
                   // exp takes as long as several bytes.
                   node.input(0).dims.back().size * static_cast<int64_t>(4 * sizeof(T) + 16) + 16),
        labels_(node, 1, node.input(0).dims.back().size) {}

  int64_t classes() const { return labels_.limit(); }

  // Of a row exp(x - most): the label's, and the sum of the others', so that 1 - p of a label that
  // is all but certain is not taken from 1.
  struct Exps {
    A most;
    A of_label;
    A others;
  };
  Exps ExpsOf(const T* row, int64_t label) const {
    Exps exps = {MostOf(row, classes()), A{}, A{}};
    const auto exp = [&](int64_t i) { return std::exp(static_cast<A>(row[i]) - exps.most); };
    LongSums<A> others;
    for (int64_t i = 0; i < label; ++i) *others.Next() += exp(i);
    exps.of_label = exp(label);
    for (int64_t i = label + 1; i < classes(); ++i) *others.Next() += exp(i);
    exps.others = others.At(0);
    return exps;
  }

  const HostIndices labels_;
};

template <typename T>
class CrossEntropy : public RowKernel<T> {
 public:
  explicit CrossEntropy(const NodeView& node) : RowKernel<T>(node, 1) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    T* const out = static_cast<T*>(buffers.outputs[0]);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t label = this->labels_.At(buffers.inputs[1], row);
      if (this->labels_.IsIgnored(label)) {
        out[row] = T{};
        continue;
      }
      if (!this->labels_.IsWithin(label)) return this->labels_.OutOfRange(row, label);
      const T* const x = static_cast<const T*>(buffers.inputs[0]) + row * this->classes();
      const auto exps = this->ExpsOf(x, label);
      const auto score = static_cast<typename RowKernel<T>::A>(x[label]);
      out[row] = static_cast<T>(score == exps.most
                                    ? std::log1p(exps.others / exps.of_label)
                                    : std::log(exps.of_label + exps.others) + (exps.most - score));
    }
    return absl::OkStatus();
  }
};

template <typename T>
class CrossEntropyGrad : public RowKernel<T> {
 public:
  explicit CrossEntropyGrad(const NodeView& node)
      : RowKernel<T>(node, node.input(0).dims.back().size) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    using A = typename RowKernel<T>::A;
    const int64_t classes = this->classes();
    for (int64_t row = begin; row < end; ++row) {
      T* const out = static_cast<T*>(buffers.outputs[0]) + row * classes;
      const int64_t label = this->labels_.At(buffers.inputs[1], row);
      if (this->labels_.IsIgnored(label)) {
        std::fill_n(out, classes, T{});
        continue;
      }
      if (!this->labels_.IsWithin(label)) return this->labels_.OutOfRange(row, label);
      const T* const x = static_cast<const T*>(buffers.inputs[0]) + row * classes;
      const A g = static_cast<A>(static_cast<const T*>(buffers.inputs[2])[row]);
      const auto exps = this->ExpsOf(x, label);
      const A sum = exps.of_label + exps.others;
      for (int64_t i = 0; i < classes; ++i) {
        const A exp = i == label ? -exps.others : std::exp(static_cast<A>(x[i]) - exps.most);
        out[i] = static_cast<T>(g * (exp / sum));
      }
    }
    return absl::OkStatus();
  }
};

template <template <typename> class Kernel>
HostKernelOrError Make(const NodeView& node, absl::Span<const TensorType> outputs) {
  return VisitFloating(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError { return std::make_unique<Kernel<decltype(t)>>(node); },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {{"cross_entropy", Make<CrossEntropy>},
                                        {"cross_entropy_grad", Make<CrossEntropyGrad>}};

}  // namespace

absl::Span<const HostKernelEntry> CrossEntropyHostKernels() { return kEntries; }

}  // namespace chorus
