#include "core/ops/testing/kernel_cases.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "core/ops/op.h"
#include "core/ops/registry.h"
#include "core/ops/testing/near.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {

using Ints = std::vector<int64_t>;

TensorType WithDType(DType dtype, const Ints& sizes) {
  TensorType type(dtype, {});
  for (const int64_t size : sizes) type.dims.emplace_back(size);
  return type;
}

std::vector<DType> AllDTypes() {
  std::vector<DType> all;
  for (int i = 0; i < 32; ++i) {
    if (IsSupported(static_cast<DType>(i))) all.push_back(static_cast<DType>(i));
  }
  return all;
}

namespace {

// What goes along one axis: those elements, in both directions; of a sort also the first so many.
void AppendOrderCases(const Ints& sizes, int64_t axis, std::vector<KernelCase>* cases) {
  for (const int64_t flag : {0, 1}) {
    cases->push_back({"cum_sum", {sizes}, {{"axis", axis}, {"reverse", flag}}});
    const Attributes order = {{"axis", axis}, {"descending", flag}};
    cases->push_back({"arg_sort", {sizes}, order});
    for (const int64_t k : std::set<int64_t>{0, 1, sizes[axis] / 3, sizes[axis]}) {
      if (k > sizes[axis]) continue;
      cases->push_back({"arg_sort", {sizes}, order});
      cases->back().attributes.push_back({"k", k});
    }
  }
}

// softmax, cross_entropy, what goes by index and in order.
void AppendRowCases(std::vector<KernelCase>* cases) {
  const auto axis_is = [](int64_t axis) { return Attributes{{"axis", axis}}; };
  for (const Ints& sizes : {Ints{5}, Ints{1}, Ints{0}, Ints{3, 7}, Ints{2, 5, 131}, Ints{2, 0, 3},
                            Ints{0, 4}, Ints{130, 3}}) {
    for (int64_t axis = 0; axis < static_cast<int64_t>(sizes.size()); ++axis) {
      cases->push_back({"softmax", {sizes}, axis_is(axis)});
      cases->push_back({"log_softmax", {sizes}, axis_is(axis)});
      cases->push_back({"center", {sizes, sizes}, axis_is(axis)});
      cases->push_back({"center_grad", {sizes, sizes}, axis_is(axis)});
      cases->push_back({"softmax_grad", {sizes, sizes}, axis_is(axis)});
      AppendOrderCases(sizes, axis, cases);
      if (sizes[axis] == 0) continue;
      for (const int64_t keep_dims : {0, 1}) {
        for (const char* op : {"arg_max", "arg_min"}) {
          cases->push_back({op, {sizes}, {{"axis", axis}, {"keep_dims", keep_dims}}});
        }
      }
    }
  }
  const DType index_dtypes[] = {DType::kI8, DType::kU8, DType::kI16, DType::kI32, DType::kI64};
  for (const DType dtype : index_dtypes) {
    for (const Ints& rows : {Ints{}, Ints{7}, Ints{0}, Ints{3, 5}}) {
      const int64_t classes = 10;
      Ints logits = rows;
      logits.push_back(classes);
      // That one of the labels is ignored does not make it less of a label.
      for (const Attributes& attributes :
           {Attributes{}, Attributes{{"ignore_index", int64_t{3}}}}) {
        cases->push_back({"cross_entropy", {logits, rows}, attributes, 1, classes, dtype});
        cases->push_back(
            {"cross_entropy_grad", {logits, rows, rows}, attributes, 1, classes, dtype});
        for (const char* to : {"f16", "bf16", "f32", "f64", "u8", "i64", "bool"}) {
          Attributes all = {{"depth", classes}, {"dtype", std::string(to)}};
          all.insert(all.end(), attributes.begin(), attributes.end());
          cases->push_back({"one_hot", {rows}, all, 0, classes, dtype});
        }
      }
    }
    cases->push_back(
        {"one_hot", {{0}}, {{"depth", int64_t{0}}, {"dtype", std::string("f32")}}, 0, 1, dtype});
  }
  int next = 0;
  for (const Ints& sizes : {Ints{5}, Ints{4, 3}, Ints{2, 7, 131}, Ints{3, 2, 0}, Ints{300, 2}}) {
    for (int64_t axis = 0; axis < static_cast<int64_t>(sizes.size()); ++axis) {
      const int64_t size = sizes[axis];
      for (const Ints& indices : {Ints{}, Ints{9}, Ints{0}, Ints{2, 3}}) {
        if (size == 0 && indices != Ints{0}) continue;
        const DType dtype = size > 127 ? DType::kI16 : index_dtypes[next++ % 5];
        cases->push_back({"take", {sizes, indices}, axis_is(axis), 1, size, dtype});
        Ints updates = sizes;
        updates.erase(updates.begin() + axis);
        updates.insert(updates.begin() + axis, indices.begin(), indices.end());
        cases->push_back(
            {"scatter_add", {updates, indices}, {{"axis", axis}, {"size", size}}, 1, size, dtype});
      }
      for (const int64_t count : {0, 1, 11}) {
        if (size == 0 && count > 0) continue;
        const DType dtype = size > 127 ? DType::kI16 : index_dtypes[next++ % 5];
        Ints index_sizes = sizes;
        index_sizes[axis] = count;
        cases->push_back({"take_along", {sizes, index_sizes}, axis_is(axis), 1, size, dtype});
        cases->push_back({"scatter_add_along",
                          {index_sizes, index_sizes},
                          {{"axis", axis}, {"size", size}},
                          1,
                          size,
                          dtype});
      }
    }
  }
  // The counts are drawn: from none to all rows of a part.
  for (const Ints& sizes : {Ints{6}, Ints{12, 5}, Ints{0, 3}, Ints{4, 0}, Ints{30, 2, 3}}) {
    for (const int64_t parts : {1, 2, 3}) {
      if (sizes[0] % parts != 0) continue;
      for (const int64_t limit : {int64_t{1}, sizes[0] / parts + 1}) {
        for (const char* op : {"pack_rows", "unpack_rows"}) {
          cases->push_back({op, {sizes, {1}}, {{"parts", parts}}, 1, limit, DType::kI64});
        }
      }
    }
  }
  // More rows than half types add up at once: 256 of 64 columns, 16384 of one.
  cases->push_back({"scatter_add",
                    {{600, 70}, {600}},
                    {{"axis", int64_t{0}}, {"size", int64_t{520}}},
                    1,
                    520,
                    DType::kI32});
  cases->push_back({"scatter_add",
                    {{600}, {600}},
                    {{"axis", int64_t{0}}, {"size", int64_t{40000}}},
                    1,
                    40000,
                    DType::kI32});
  cases->push_back({"scatter_add_along",
                    {{600, 70}, {600, 70}},
                    {{"axis", int64_t{0}}, {"size", int64_t{520}}},
                    1,
                    520,
                    DType::kI32});
}

// Convolutions of x by w, and their gradients.
void AppendConvolutionCases(std::vector<KernelCase>* cases) {
  struct Sizes {
    Ints x, w;
    Ints stride, padding, dilation;
    int64_t groups;
  };
  const std::vector<Sizes> all = {
      {{2, 3, 7, 5}, {4, 3, 3, 2}, {1, 1}, {0, 0}, {1, 1}, 1},
      {{3, 4, 8, 9}, {6, 2, 3, 3}, {2, 3}, {1, 2}, {2, 1}, 2},
      {{1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1}, {0, 0}, {1, 1}, 1},
      {{2, 17, 6, 6}, {33, 17, 1, 1}, {2, 2}, {0, 0}, {1, 1}, 1},
      {{2, 6, 7, 6}, {4, 3, 1, 1}, {2, 3}, {0, 0}, {1, 1}, 2},
      {{2, 3, 4, 4}, {4, 3, 1, 1}, {2, 3}, {0, 1}, {1, 1}, 1},
      // Depthwise; more padding than weights; what the last place leaves over.
      {{2, 5, 6, 7}, {10, 1, 3, 3}, {1, 2}, {1, 1}, {1, 1}, 5},
      {{1, 2, 4, 4}, {3, 2, 2, 2}, {3, 3}, {3, 3}, {1, 1}, 1},
      {{1, 2, 9, 10}, {2, 2, 2, 2}, {4, 3}, {0, 0}, {1, 1}, 1},
      // Slices of channels, on either side; of groups.
      {{2, 64, 3, 3}, {128, 64, 3, 3}, {1, 1}, {1, 1}, {1, 1}, 1},
      {{2, 128, 3, 3}, {64, 128, 3, 3}, {1, 1}, {1, 1}, {1, 1}, 1},
      {{1, 64, 5, 5}, {64, 1, 3, 3}, {1, 1}, {1, 1}, {1, 1}, 64},
      // Several blocks of samples, of which the last is smaller, with slices and without.
      {{3, 1, 30, 60}, {128, 1, 3, 3}, {2, 2}, {1, 1}, {1, 1}, 1},
      {{3, 128, 12, 16}, {2, 128, 3, 3}, {1, 1}, {1, 1}, {1, 1}, 1},
      // Nothing on one side or the other.
      {{0, 3, 4, 4}, {2, 3, 2, 2}, {1, 1}, {0, 0}, {1, 1}, 1},
      {{2, 0, 4, 4}, {3, 0, 2, 2}, {1, 1}, {0, 0}, {1, 1}, 1},
      {{2, 3, 4, 4}, {0, 3, 2, 2}, {1, 1}, {0, 0}, {1, 1}, 1},
      {{2, 3, 0, 1}, {2, 3, 2, 2}, {1, 1}, {1, 1}, {1, 1}, 1},
  };
  for (const Sizes& s : all) {
    Attributes attributes = {{"dilation", s.dilation},
                             {"groups", s.groups},
                             {"padding", s.padding},
                             {"stride", s.stride}};
    Ints y = {s.x[0], s.w[0]};
    for (size_t d = 0; d < 2; ++d) {
      const int64_t extent = (s.w[2 + d] - 1) * s.dilation[d] + 1;
      y.push_back((s.x[2 + d] + 2 * s.padding[d] - extent) / s.stride[d] + 1);
    }
    cases->push_back({"convolution", {s.x, s.w}, attributes});
    const auto with_size = [&](const Ints& like) {
      Attributes sized = attributes;
      sized.insert(sized.end() - 1, {"size", Ints{like[2], like[3]}});
      return sized;
    };
    cases->push_back({"convolution_data_grad", {y, s.w}, with_size(s.x)});
    cases->push_back({"convolution_weight_grad", {s.x, y}, with_size(s.w)});
  }
}

void AppendPoolCases(std::vector<KernelCase>* cases) {
  struct Sizes {
    Ints x, kernel, stride, padding;
  };
  // Rows of more columns than are computed at a time; what the last place leaves over; places
  // further apart than windows are wide; nothing.
  const std::vector<Sizes> all = {
      {{2, 3, 6, 7}, {2, 3}, {1, 1}, {0, 0}},  {{1, 2, 7, 8}, {3, 3}, {2, 2}, {1, 1}},
      {{1, 1, 1, 1}, {1, 1}, {1, 1}, {0, 0}},  {{3, 1, 3, 300}, {2, 5}, {1, 2}, {1, 2}},
      {{1, 2, 9, 11}, {2, 3}, {4, 5}, {1, 0}}, {{2, 2, 5, 5}, {5, 5}, {1, 1}, {2, 2}},
      {{0, 3, 4, 4}, {2, 2}, {2, 2}, {0, 0}},  {{2, 0, 4, 4}, {2, 2}, {2, 2}, {0, 0}},
  };
  for (const Sizes& s : all) {
    const auto with = [&s](const Attribute& first) {
      return Attributes{first, {"kernel", s.kernel}, {"padding", s.padding}, {"stride", s.stride}};
    };
    for (const Ints& dilation : {Ints{1, 1}, Ints{1, 2}}) {
      const int64_t extent = dilation[1] * (s.kernel[1] - 1) + 1;
      if (s.x[3] + 2 * s.padding[1] < extent) continue;
      const Attributes attributes = with({"dilation", dilation});
      cases->push_back({"max_pool_index", {s.x}, attributes});
      Ints y = s.x;
      for (size_t d = 0; d < 2; ++d) {
        const int64_t reach = dilation[d] * (s.kernel[d] - 1) + 1;
        y[2 + d] = (s.x[2 + d] + 2 * s.padding[d] - reach) / s.stride[d] + 1;
      }
      // Indices of all of a channel and of what is beside it: few are under their windows.
      for (const int64_t limit : {s.x[2] * s.x[3] + 3, s.kernel[1] + 2}) {
        cases->push_back({"max_pool_take", {s.x, y}, attributes, 1, limit, DType::kI32});
        Attributes sized = attributes;
        sized.insert(sized.end() - 1, {"size", Ints{s.x[2], s.x[3]}});
        cases->push_back({"max_pool_grad", {y, y}, sized, 1, limit, DType::kI32});
      }
    }
    Ints y = s.x;
    for (size_t d = 0; d < 2; ++d) {
      y[2 + d] = (s.x[2 + d] + 2 * s.padding[d] - s.kernel[d]) / s.stride[d] + 1;
    }
    for (const int64_t count_padding : {0, 1}) {
      Attributes attributes = with({"count_padding", count_padding});
      cases->push_back({"avg_pool", {s.x}, attributes});
      attributes.insert(attributes.end() - 1, {"size", Ints{s.x[2], s.x[3]}});
      cases->push_back({"avg_pool_grad", {y}, attributes});
    }
  }
}

// Normalisation, with what has moments and what has weights of its own.
void AppendNormCases(std::vector<KernelCase>* cases) {
  struct Sizes {
    Ints x, rows, weights;
  };
  const std::vector<Sizes> all = {
      // Batch norms, of planes and of single elements, few and more than stand side by side.
      {{3, 5, 7, 4}, {1, 2}, {1, 2}},
      {{2, 3, 9000}, {1, 2}, {1, 2}},
      {{9, 5}, {1, 2}, {1, 2}},
      {{9, 131}, {1, 2}, {1, 2}},
      // Layer norms over one dimension, two, all, one element.
      {{6, 131}, {0, 1}, {1, 2}},
      {{4, 3, 5, 2}, {0, 2}, {2, 4}},
      {{37}, {0, 0}, {0, 1}},
      {{70, 1}, {0, 1}, {1, 2}},
      {{200, 3}, {0, 1}, {1, 2}},
      // Group and instance norms.
      {{2, 3, 4, 5, 2}, {0, 2}, {1, 3}},
      {{2, 3, 4, 1}, {0, 2}, {1, 3}},
      {{3, 4, 6}, {0, 2}, {1, 2}},
      // Weights of more dimensions than rows have, of fewer, and one for all.
      {{2, 3, 4, 5}, {1, 2}, {1, 4}},
      {{2, 3, 4, 5}, {1, 3}, {2, 3}},
      {{5, 6, 3}, {0, 1}, {2, 3}},
      {{70, 4, 3}, {2, 3}, {1, 2}},
      {{4, 80}, {1, 2}, {0, 1}},
      {{4, 6}, {0, 1}, {2, 2}},
      // Nothing.
      {{0, 3, 4}, {1, 2}, {1, 2}},
      {{2, 0, 4}, {1, 2}, {1, 2}},
      {{2, 3, 0}, {0, 1}, {1, 2}},
      {{2, 3, 0}, {1, 2}, {1, 2}},
  };
  for (const Sizes& s : all) {
    for (const int64_t center : {0, 1}) {
      Ints moments(s.x.begin() + s.rows[0], s.x.begin() + s.rows[1]);
      moments.insert(moments.begin(), 2);
      const Ints weights(s.x.begin() + s.weights[0], s.x.begin() + s.weights[1]);
      cases->push_back({"moments", {s.x}, {{"center", center}, {"rows", s.rows}}});
      const Attributes attributes = {
          {"center", center}, {"epsilon", 0.25}, {"rows", s.rows}, {"weights", s.weights}};
      cases->push_back({"normalize", {s.x, moments, weights, weights}, attributes});
      cases->push_back({"normalize_grad", {s.x, moments, weights, s.x}, attributes});
      cases->push_back({"normalize_weight_grad", {s.x, moments, s.x}, attributes});
    }
  }
}

}  // namespace

std::vector<KernelCase> KernelCases() {
  std::vector<KernelCase> cases;
  AppendRowCases(&cases);
  AppendConvolutionCases(&cases);
  AppendPoolCases(&cases);
  AppendNormCases(&cases);
  for (const Ints& sizes : {Ints{}, Ints{0}, Ints{1}, Ints{7}, Ints{16}, Ints{1031}, Ints{3, 5}}) {
    for (const char* op :
         {"abs", "ceil", "copy", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "neg",
          "relu", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "logical_not", "tanh"}) {
      cases.push_back({op, {sizes}, {}});
    }
    for (const DType dtype : AllDTypes()) {
      cases.push_back({"cast", {sizes}, {{"dtype", std::string(DTypeName(dtype))}}});
    }
    for (const char* op :
         {"add",         "div",        "eq",          "ge",           "gt",      "holds",    "le",
          "logical_and", "logical_or", "logical_xor", "lt",           "maximum", "minimum",  "mul",
          "ne",          "pow",        "relu_grad",   "sigmoid_grad", "sub",     "tanh_grad"}) {
      cases.push_back({op, {sizes, sizes}, {}});
      cases.push_back({op, {{}, sizes}, {}});
      cases.push_back({op, {sizes, {}}, {}});
    }
    for (const Ints& condition : {sizes, Ints{}}) {
      cases.push_back({"where", {condition, sizes, sizes}, {}});
      cases.push_back({"where", {condition, {}, sizes}, {}});
      cases.push_back({"where", {condition, sizes, {}}, {}});
    }
    cases.push_back({"where", {sizes, {}, {}}, {}});
    cases.push_back({"share", {sizes, sizes}, {}});
    cases.push_back({"scale", {sizes, {}}, {}});
    for (const size_t n : {1, 2, 5}) {
      cases.push_back({"product", std::vector<Ints>(n, sizes), {}});
    }
  }
  // m, n, k around the row block, the tiles of half types and Eigen's own small sizes; then what is
  // in front of the matrices.
  for (const Ints& mnk :
       {Ints{0, 3, 2}, Ints{3, 0, 2}, Ints{3, 2, 0}, Ints{1, 1, 1}, Ints{2, 3, 4}, Ints{17, 19, 23},
        Ints{256, 5, 31}, Ints{257, 5, 31}, Ints{513, 64, 13}, Ints{3, 300, 520}, Ints{2, 3, 4, 3},
        Ints{258, 5, 7, 2, 1, 3}, Ints{2, 3, 4, 0, 2}, Ints{2, 3, 0, 2}}) {
    for (int flags = 0; flags < 4; ++flags) {
      Ints a(mnk.begin() + 3, mnk.end()), b = a;
      Attributes attributes;
      const auto append = [](int64_t rows, int64_t columns, bool transposed, Ints* sizes) {
        sizes->push_back(transposed ? columns : rows);
        sizes->push_back(transposed ? rows : columns);
      };
      append(mnk[0], mnk[2], flags & 1, &a);
      append(mnk[2], mnk[1], flags & 2, &b);
      if (flags & 1) attributes.push_back({"transpose_a", int64_t{1}});
      if (flags & 2) attributes.push_back({"transpose_b", int64_t{1}});
      cases.push_back({"matmul", {a, b}, attributes});
    }
  }
  // Every subset of the axes.
  for (const Ints& sizes : {Ints{}, Ints{37}, Ints{0}, Ints{2, 3, 5, 7}, Ints{1, 31, 1, 2},
                            Ints{3, 0, 2}, Ints{5, 1031}, Ints{1031, 5}}) {
    for (uint32_t subset = 0; subset < 1u << sizes.size(); ++subset) {
      Ints axes;
      for (size_t i = 0; i < sizes.size(); ++i) {
        if (subset >> i & 1) axes.push_back(static_cast<int64_t>(i));
      }
      for (const char* op : {"max", "mean", "min", "prod", "sum"}) {
        for (const int64_t keep_dims : {0, 1}) {
          cases.push_back({op, {sizes}, {{"axes", axes}, {"keep_dims", keep_dims}}});
        }
      }
      Ints from = sizes;
      for (const int64_t axis : axes) from[axis] = 1;
      cases.push_back({"expand", {from}, {{"dims", sizes}}});
      cases.push_back({"spread", {from}, {{"dims", sizes}}});
    }
  }
  for (const char* op : {"random_bits", "random_normal", "random_uniform"}) {
    for (const Ints& sizes : {Ints{}, Ints{0}, Ints{7}, Ints{3, 5}, Ints{1031}}) {
      for (const DType dtype : AllDTypes()) {
        cases.push_back({op, {{}, {}}, TypeAttributes(WithDType(dtype, sizes))});
      }
    }
  }
  cases.push_back({"expand", {{}}, {{"dims", Ints{3, 4}}}});
  cases.push_back({"expand", {{4}}, {{"dims", Ints{3, 4}}}});
  cases.push_back({"expand", {{1}}, {{"dims", Ints{0}}}});
  cases.push_back({"expand", {{3, 1, 5}}, {{"dims", Ints{2, 3, 4, 5}}}});
  for (const Ints& sizes : {Ints{3, 4}, Ints{12}, Ints{2, 1, 6}}) {
    cases.push_back({"reshape", {sizes}, {{"dims", Ints{4, 3}}}});
  }
  cases.push_back({"reshape", {{0, 3}}, {{"dims", Ints{0}}}});
  for (const Ints& sizes : {Ints{2, 3, 5}, Ints{1, 7, 1}, Ints{0, 2, 3}, Ints{13, 1, 11}}) {
    Ints perm = {0, 1, 2};
    do {
      cases.push_back({"transpose", {sizes}, {{"perm", perm}}});
    } while (std::next_permutation(perm.begin(), perm.end()));
  }
  cases.push_back({"transpose", {{}}, {{"perm", Ints{}}}});
  cases.push_back({"transpose", {{2, 3, 4, 5}}, {{"perm", Ints{2, 3, 0, 1}}}});
  for (int64_t axis = 0; axis < 3; ++axis) {
    const Ints sizes = {3, 5, 7};
    for (const auto& range : {Ints{0, 3}, Ints{1, 3}, Ints{2, 2}, Ints{0, 1}}) {
      cases.push_back({"slice", {sizes}, {{"axis", axis}, {"begin", range[0]}, {"end", range[1]}}});
      cases.push_back(
          {"pad", {sizes}, {{"after", range[0]}, {"axis", axis}, {"before", range[1]}}});
    }
    Ints other = sizes, empty = sizes;
    other[axis] = 2;
    empty[axis] = 0;
    cases.push_back({"concat", {sizes}, {{"axis", axis}}});
    cases.push_back({"concat", {sizes, empty, other, sizes}, {{"axis", axis}}});
    cases.push_back({"concat", {empty, empty}, {{"axis", axis}}});
    cases.push_back(
        {"pad", {empty}, {{"after", int64_t{1}}, {"axis", axis}, {"before", int64_t{2}}}});
  }
  return cases;
}

namespace {

// Conditions, holders and factors have dtypes of their own.
DType InputType(const std::string& op, size_t i, DType dtype) {
  if (op == "where" && i == 0) return DType::kBool;
  if (op.substr(0, 7) == "random_") return DType::kI64;
  if (op == "share" && i == 1) return DType::kF32;
  if (op == "scale" && i == 1) return FactorType(dtype);
  return dtype;
}

// Half types are rounded once, so they are as near as their own precision.
double ToleranceOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 1e-3;
    case DType::kBF16:
      return 8e-3;
    case DType::kF32:
      return 1e-4;
    case DType::kF64:
      return 1e-12;
    default:
      return 0;
  }
}

}  // namespace

void ExpectNear(const Value& got, const Value& expected, const std::string& what) {
  ASSERT_EQ(got.type, expected.type) << what;
  const double tolerance = ToleranceOf(got.type.dtype);
  const std::vector<double> x = ToDoubles(got);
  const std::vector<double> y = ToDoubles(expected);
  // Of thousands of terms that cancel the rounding is theirs, not the sum's.
  double least = 1;
  if (what.rfind("convolution", 0) == 0) {
    for (const double value : y) {
      if (std::isfinite(value)) least = std::max(least, std::abs(value));
    }
  }
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_TRUE(IsNear(x[i], y[i], tolerance * std::max(least, std::abs(y[i]))))
        << what << " at " << i;
  }
}

TensorType TypeOfInput(const KernelCase& c, size_t i, DType dtype) {
  const bool is_index = static_cast<int>(i) == c.index_input;
  return WithDType(is_index ? c.index_dtype : InputType(c.op, i, dtype), c.inputs[i]);
}

// Whether the op takes that dtype.
bool Takes(const KernelCase& c, DType dtype) {
  std::vector<TensorType> types;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    types.push_back(TypeOfInput(c, i, dtype));
  }
  std::vector<const TensorType*> inputs;
  for (const TensorType& type : types) inputs.push_back(&type);
  NodeView node;
  node.op = c.op;
  node.attributes = c.attributes;
  node.inputs = inputs;
  return InferTypes(node).ok();
}

std::vector<Value> InputsOf(const KernelCase& c, DType dtype, std::mt19937_64* random) {
  std::vector<Value> inputs;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    const TensorType type = TypeOfInput(c, i, dtype);
    if (static_cast<int>(i) == c.index_input) {
      const int64_t last = std::max<int64_t>(c.limit - 1, 0);
      inputs.push_back(RandomWhole(type, 0, last, random));
      continue;
    }
    const bool holders = c.op == "share" && i == 1;
    const bool divisor = c.op == "div" && i == 1;
    inputs.push_back(type.dtype == DType::kBool      ? RandomWhole(type, 0, 2, random)
                     : holders                       ? RandomWhole(type, 0, 3, random)
                     : divisor && !IsFloating(dtype) ? RandomWhole(type, 1, 9, random)
                     : IsFloating(dtype)             ? RandomNormal(type, random)
                                                     : RandomWhole(type, -9, 9, random));
    if (i == 1 && c.op.rfind("normalize", 0) == 0) {
      std::vector<double> moments = ToDoubles(inputs.back());
      for (double& moment : moments) moment = std::abs(moment);
      inputs.back() = FromDoubles(type, moments);
    }
  }
  return inputs;
}

}  // namespace testing
}  // namespace chorus
