#include "core/ops/norm/norm_host.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/long_sums.h"
#include "core/ops/norm/norm.h"

namespace chorus {
namespace {

// How many rows of one element, or weights, are computed side by side.
constexpr int64_t kLanes = 64;

// What an inner loop reads at i: a number of its own, or one for all.
template <typename T, bool kEach>
class Numbers {
 public:
  explicit Numbers(const T* at) : values_(at) {}
  T operator[](int64_t i) const { return values_[i]; }

 private:
  const T* const values_;
};
template <typename T>
class Numbers<T, false> {
 public:
  explicit Numbers(const T* at) : value_(*at) {}
  T operator[](int64_t) const { return value_; }

 private:
  const T value_;
};

// A part of x: elements [begin, begin + size). Element j of them belongs to row `row` + j (of those
// that are computed) and weight `weight` + j where EachRow, EachWeight are true_type, else to
// those.
struct Part {
  int64_t begin = 0;
  int64_t size = 0;
  int64_t row = 0;
  int64_t weight = 0;
};
template <typename T, typename EachNumber>
Numbers<T, EachNumber::value> At(const T* numbers, EachNumber) {
  return Numbers<T, EachNumber::value>(numbers);
}

// Calls f(true_type) or f(false_type).
template <typename F>
void WithConstant(bool value, const F& f) {
  if (value) {
    f(std::true_type());
  } else {
    f(std::false_type());
  }
}

// Adds the sum of f(0), ..., f(n - 1) to `totals`, where f(i, terms) gives kSums numbers: as many
// elements side by side as vector registers hold.
template <typename T, int kSums, typename F>
void AddUp(int64_t n, const F& f, double* totals) {
  constexpr int kWidth = 16;
  for (int64_t begin = 0; begin < n; begin += kMostTerms) {
    const int64_t end = std::min(n, begin + kMostTerms);
    T sums[kSums][kWidth] = {};
    const auto add = [&](int64_t i, int lane) {
      T terms[kSums];
      f(i, terms);
      for (int s = 0; s < kSums; ++s) sums[s][lane] += terms[s];
    };
    int64_t i = begin;
    for (; i + kWidth <= end; i += kWidth) {
      for (int lane = 0; lane < kWidth; ++lane) add(i + lane, lane);
    }
    for (int lane = 0; i < end; ++i, ++lane) add(i, lane);
    for (int s = 0; s < kSums; ++s) {
      for (int width = kWidth / 2; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) sums[s][lane] += sums[s][lane + width];
      }
      totals[s] += static_cast<double>(sums[s][0]);
    }
  }
}

// A kernel whose units are rows: one, or, where each has one element at a time, kLanes of them.
template <typename T>
class RowKernel : public HostKernel {
 public:
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const final {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit * lanes_;
      RunRows(buffers, first, std::min(lanes_, s_.rows - first));
    }
    return absl::OkStatus();
  }

 protected:
  RowKernel(const NormSizes& s, int64_t bytes_per_element)
      : HostKernel((s.rows + LanesOf(s) - 1) / LanesOf(s),
                   std::max<int64_t>(1, s.row_size()) * LanesOf(s) * bytes_per_element),
        s_(s),
        lanes_(LanesOf(s)) {}

  virtual void RunRows(const HostBuffers& buffers, int64_t first, int64_t count) const = 0;

  // f(part, EachRow) for all of x that is of these rows; without weights.
  template <typename F>
  void ForEachRun(int64_t first, int64_t count, const F& f) const {
    for (int64_t a = 0; a < s_.before && s_.size > 0; ++a) {
      const Part part = {(a * s_.rows + first) * s_.run, count * s_.run, 0, 0};
      WithConstant(s_.run == 1, [&](auto each_row) { f(part, each_row); });
    }
  }
  // f(part, EachRow, EachWeight).
  template <typename F>
  void ForEachPart(int64_t first, int64_t count, const F& f) const {
    ForEachRun(first, count, [&](const Part& run, auto each_row) {
      for (int64_t at = 0; at < run.size;) {
        const int64_t begin = run.begin + at;
        const int64_t weight = begin / s_.stretch % s_.weights;
        const int64_t row = each_row ? at : 0;
        const int64_t left = run.size - at;
        const int64_t most =
            s_.stretch == 1 ? s_.weights - weight : s_.stretch - begin % s_.stretch;
        const Part part = {begin, std::min(left, most), row, weight};
        WithConstant(s_.stretch == 1, [&](auto each_weight) { f(part, each_row, each_weight); });
        at += part.size;
      }
    });
  }

  const NormSizes s_;

 private:
  static int64_t LanesOf(const NormSizes& s) {
    return s.run == 1 ? std::clamp<int64_t>(s.rows, 1, kLanes) : 1;
  }

  const int64_t lanes_;
};

// Mean and r of each row that is computed.
template <typename T>
struct RowMoments {
  RowMoments(const NormSizes& s, const void* moments, int64_t first, int64_t count)
      : mean(static_cast<const T*>(moments) + first) {
    const T* const variance = mean + s.rows;
    for (int64_t i = 0; i < count; ++i) {
      scale[i] = 1 / std::sqrt(variance[i] + static_cast<T>(s.epsilon));
    }
  }
  const T* const mean;
  T scale[kLanes];
};

template <typename T>
class Moments : public RowKernel<T> {
 public:
  explicit Moments(const NormSizes& s) : RowKernel<T>(s, static_cast<int64_t>(2 * sizeof(T))) {}

 private:
  using RowKernel<T>::s_;

  void RunRows(const HostBuffers& buffers, int64_t first, int64_t count) const override {
    const T* const x = static_cast<const T*>(buffers.inputs[0]);
    T* const means = static_cast<T*>(buffers.outputs[0]) + first;
    T centers[kLanes] = {};
    if (s_.center) {
      Mean(
          first, count, centers, [x](int64_t i, T) { return x[i]; }, centers);
    }
    Mean(
        first, count, means + s_.rows,
        [x](int64_t i, T center) { return (x[i] - center) * (x[i] - center); }, centers);
    std::copy_n(centers, count, means);
  }

  // The mean over each row of f(element, `centers` of its row).
  template <typename F>
  void Mean(int64_t first, int64_t count, T* out, const F& f, const T* centers) const {
    double sums[kLanes] = {};
    this->ForEachRun(first, count, [&](const Part& part, auto each_row) {
      const auto center = At(centers, each_row);
      if constexpr (each_row) {
        for (int64_t j = 0; j < part.size; ++j) {
          sums[j] += static_cast<double>(f(part.begin + j, center[j]));
        }
      } else {
        AddUp<T, 1>(
            part.size, [&](int64_t j, T* terms) { terms[0] = f(part.begin + j, center[j]); }, sums);
      }
    });
    for (int64_t j = 0; j < count; ++j) {
      out[j] = static_cast<T>(sums[j] / static_cast<double>(s_.row_size()));
    }
  }
};

template <typename T>
class Normalize : public RowKernel<T> {
 public:
  explicit Normalize(const NormSizes& s) : RowKernel<T>(s, static_cast<int64_t>(2 * sizeof(T))) {}

 private:
  using RowKernel<T>::s_;

  void RunRows(const HostBuffers& buffers, int64_t first, int64_t count) const override {
    const T* const x = static_cast<const T*>(buffers.inputs[0]);
    const RowMoments<T> moments(s_, buffers.inputs[1], first, count);
    const T* const weights = static_cast<const T*>(buffers.inputs[2]);
    const T* const biases = static_cast<const T*>(buffers.inputs[3]);
    T* const y = static_cast<T*>(buffers.outputs[0]);
    this->ForEachPart(first, count, [&](const Part& part, auto each_row, auto each_weight) {
      const auto mean = At(moments.mean + part.row, each_row);
      const auto scale = At(moments.scale + part.row, each_row);
      const auto weight = At(weights + part.weight, each_weight);
      const auto bias = At(biases + part.weight, each_weight);
      const T* const from = x + part.begin;
      T* const to = y + part.begin;
      for (int64_t j = 0; j < part.size; ++j) {
        to[j] = (from[j] - mean[j]) * scale[j] * weight[j] + bias[j];
      }
    });
  }
};

template <typename T>
class NormalizeGrad : public RowKernel<T> {
 public:
  explicit NormalizeGrad(const NormSizes& s)
      : RowKernel<T>(s, static_cast<int64_t>(5 * sizeof(T))) {}

 private:
  using RowKernel<T>::s_;

  void RunRows(const HostBuffers& buffers, int64_t first, int64_t count) const override {
    const T* const x = static_cast<const T*>(buffers.inputs[0]);
    const RowMoments<T> moments(s_, buffers.inputs[1], first, count);
    const T* const weights = static_cast<const T*>(buffers.inputs[2]);
    const T* const g = static_cast<const T*>(buffers.inputs[3]);
    T* const dx = static_cast<T*>(buffers.outputs[0]);
    // Of u, which is weight g, and of u (x - mean).
    double sums[kLanes][2] = {};
    this->ForEachPart(first, count, [&](const Part& part, auto each_row, auto each_weight) {
      const auto mean = At(moments.mean + part.row, each_row);
      const auto weight = At(weights + part.weight, each_weight);
      const auto terms_of = [&](int64_t j, T* terms) {
        terms[0] = g[part.begin + j] * weight[j];
        terms[1] = terms[0] * (x[part.begin + j] - mean[j]);
      };
      if constexpr (each_row) {
        for (int64_t j = 0; j < part.size; ++j) {
          T terms[2];
          terms_of(j, terms);
          for (int s = 0; s < 2; ++s) sums[part.row + j][s] += static_cast<double>(terms[s]);
        }
      } else {
        AddUp<T, 2>(part.size, terms_of, sums[0]);
      }
    });
    T mean_u[kLanes];
    T slope[kLanes];  // the mean of u z, times r
    for (int64_t j = 0; j < count; ++j) {
      const auto size = static_cast<double>(s_.row_size());
      const auto r = static_cast<double>(moments.scale[j]);
      mean_u[j] = s_.center ? static_cast<T>(sums[j][0] / size) : T{};
      slope[j] = static_cast<T>(sums[j][1] / size * r * r);
    }
    this->ForEachPart(first, count, [&](const Part& part, auto each_row, auto each_weight) {
      const auto mean = At(moments.mean + part.row, each_row);
      const auto scale = At(moments.scale + part.row, each_row);
      const auto less = At(mean_u + part.row, each_row);
      const auto slopes = At(slope + part.row, each_row);
      const auto weight = At(weights + part.weight, each_weight);
      const T* const from = x + part.begin;
      const T* const from_g = g + part.begin;
      T* const to = dx + part.begin;
      for (int64_t j = 0; j < part.size; ++j) {
        const T u = from_g[j] * weight[j];
        to[j] = scale[j] * (u - less[j] - (from[j] - mean[j]) * slopes[j]);
      }
    });
  }
};

template <typename T>
class NormalizeWeightGrad : public HostKernel {
 public:
  explicit NormalizeWeightGrad(const NormSizes& s)
      : HostKernel((s.weights + LanesOf(s) - 1) / LanesOf(s),
                   std::max<int64_t>(1, s.size / std::max<int64_t>(1, s.weights)) * LanesOf(s) *
                       static_cast<int64_t>(3 * sizeof(T))),
        s_(s),
        lanes_(LanesOf(s)) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit * lanes_;
      RunWeights(buffers, first, std::min(lanes_, s_.weights - first));
    }
    return absl::OkStatus();
  }

 private:
  static int64_t LanesOf(const NormSizes& s) {
    return s.stretch == 1 ? std::clamp<int64_t>(s.weights, 1, kLanes) : 1;
  }

  void RunWeights(const HostBuffers& buffers, int64_t first, int64_t count) const {
    const T* const x = static_cast<const T*>(buffers.inputs[0]);
    const T* const means = static_cast<const T*>(buffers.inputs[1]);
    const T* const g = static_cast<const T*>(buffers.inputs[2]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    const auto epsilon = static_cast<T>(s_.epsilon);
    // Few are added in their own type.
    T few[kLanes] = {};
    double sums[kLanes] = {};
    int64_t added = 0;
    const auto flush = [&] {
      for (int64_t j = 0; j < count; ++j) sums[j] += static_cast<double>(few[j]);
      std::fill_n(few, count, T{});
      added = 0;
    };
    const int64_t outer = s_.size == 0 ? 0 : s_.size / (s_.weights * s_.stretch);
    for (int64_t o = 0; o < outer; ++o) {
      ForEachPart((o * s_.weights + first) * s_.stretch, count * s_.stretch,
                  [&](const Part& part, auto each_row, auto each_weight) {
                    const auto mean = At(means + part.row, each_row);
                    const auto variance = At(means + s_.rows + part.row, each_row);
                    const auto z = [&](int64_t j, T scale) {
                      return (x[part.begin + j] - mean[j]) * scale * g[part.begin + j];
                    };
                    // Computed once where it is the same for all.
                    const T scale = 1 / std::sqrt(variance[0] + epsilon);
                    const auto scale_of = [&](int64_t j) {
                      return each_row ? 1 / std::sqrt(variance[j] + epsilon) : scale;
                    };
                    if constexpr (each_weight) {
                      T* const to = few + (part.weight - first);
                      for (int64_t j = 0; j < part.size; ++j) to[j] += z(j, scale_of(j));
                    } else {
                      AddUp<T, 1>(
                          part.size, [&](int64_t j, T* terms) { terms[0] = z(j, scale_of(j)); },
                          sums);
                    }
                  });
      if (++added == kLanes) flush();
    }
    flush();
    for (int64_t j = 0; j < count; ++j) out[first + j] = static_cast<T>(sums[j]);
  }

  // The elements [begin, begin + size), which are of the weights that are computed, in parts.
  template <typename F>
  void ForEachPart(int64_t begin, int64_t size, const F& f) const {
    const int64_t end = begin + size;
    while (begin < end) {
      const int64_t row = begin / s_.run % s_.rows;
      const int64_t weight = begin / s_.stretch % s_.weights;
      const int64_t most = s_.run == 1 ? s_.rows - row : s_.run - begin % s_.run;
      const Part part = {begin, std::min(end - begin, most), row, weight};
      WithConstant(s_.run == 1, [&](auto each_row) {
        WithConstant(s_.stretch == 1, [&](auto each_weight) { f(part, each_row, each_weight); });
      });
      begin += part.size;
    }
  }

  const NormSizes s_;
  const int64_t lanes_;
};

template <template <typename> class Kernel>
HostKernelOrError Make(const NodeView& node, absl::Span<const TensorType> outputs) {
  CHORUS_ASSIGN_OR_RETURN(const NormSizes sizes, SizesOfNorm(node));
  switch (node.input(0).dtype) {
    case DType::kF32:
      return std::make_unique<Kernel<float>>(sizes);
    case DType::kF64:
      return std::make_unique<Kernel<double>>(sizes);
    default:
      return NoHostKernel(node, outputs);
  }
}

constexpr HostKernelEntry kEntries[] = {
    {"moments", Make<Moments>},
    {"normalize", Make<Normalize>},
    {"normalize_grad", Make<NormalizeGrad>},
    {"normalize_weight_grad", Make<NormalizeWeightGrad>},
};

}  // namespace

absl::Span<const HostKernelEntry> NormHostKernels() { return kEntries; }

}  // namespace chorus
