#include "core/ops/testing/op_rows.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "core/ops/op.h"
#include "core/ops/registry.h"

namespace chorus {
namespace testing {
namespace {

using Ints = std::vector<int64_t>;
using Input = OpRow::Input;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kSmokeSize = 8;

constexpr DType kBF16 = DType::kBF16;
constexpr DType kF16 = DType::kF16;
constexpr DType kF32 = DType::kF32;
constexpr DType kF64 = DType::kF64;
constexpr DType kI64 = DType::kI64;

// What a window of a pool or a convolution is.
struct Window {
  int64_t kernel;
  int64_t stride;
  int64_t padding;
  int64_t PlacesOn(int64_t size) const { return (size + 2 * padding - kernel) / stride + 1; }
};
Ints Both(int64_t number) { return {number, number}; }

class Rows {
 public:
  explicit Rows(bool smoke) : smoke_(smoke) {}

  void AddElementwise();
  void AddCompare();
  void AddFills();
  void AddSums();
  void AddSoftmax();
  void AddCrossEntropy();
  void AddIndices();
  void AddSorts();
  void AddMoves();
  void AddRandom();
  void AddNorms();
  void AddPools();
  void AddConvolutions();
  void AddMatmuls();

  // With what follows from the steps.
  std::vector<OpRow> Finish() {
    for (OpRow& row : rows_) {
      if (row.attributes.empty()) row.attributes = row.steps.back().attributes;
      if (row.bytes == 0) row.bytes = BytesOf(row);
    }
    return std::move(rows_);
  }

 private:
  int64_t Size(int64_t size) const { return smoke_ ? std::min(size, kSmokeSize) : size; }
  Ints Sizes(Ints sizes) const {
    for (int64_t& size : sizes) size = Size(size);
    return sizes;
  }
  TensorType Type(DType dtype, const Ints& sizes) const {
    TensorType type(dtype, {});
    for (const int64_t size : Sizes(sizes)) type.dims.emplace_back(size);
    return type;
  }
  // As many elements as 64 MiB have.
  TensorType Large(DType dtype) const { return Type(dtype, {64 * kMiB / DTypeBytes(dtype)}); }

  static Input Of(TensorType type) { return {std::move(type), 0, absl::nullopt}; }
  Input Of(DType dtype, const Ints& sizes) const { return Of(Type(dtype, sizes)); }
  Input Below(int64_t below, DType dtype, const Ints& sizes) const {
    return {Type(dtype, sizes), Size(below), absl::nullopt};
  }
  static Input Constant(DType dtype, double value) { return {TensorType(dtype, {}), 0, value}; }

  // A row of steps, which are still to come.
  OpRow& Add(const std::string& family, const std::string& op, std::vector<Input> inputs) {
    rows_.emplace_back();
    rows_.back().family = family;
    rows_.back().op = op;
    rows_.back().inputs = std::move(inputs);
    return rows_.back();
  }
  // The next step, and its result.
  static size_t Do(OpRow* row, const std::string& op, const std::vector<size_t>& operands,
                   const Attributes& attributes = {}, bool prepares = false) {
    std::vector<const TensorType*> types;
    for (const size_t operand : operands) types.push_back(&row->TypeOf(operand));
    NodeView node;
    node.op = op;
    node.attributes = attributes;
    node.inputs = types;
    const auto outputs = InferTypes(node);
    if (!outputs.ok()) {
      std::fprintf(stderr, "%s: %s\n", row->op.c_str(), outputs.status().ToString().c_str());
      std::abort();
    }
    row->steps.push_back({op, operands, attributes, prepares, (*outputs)[0]});
    return row->inputs.size() + row->steps.size() - 1;
  }
  // A row of one step.
  OpRow& One(const std::string& family, const std::string& op, std::vector<Input> inputs,
             const Attributes& attributes = {}) {
    OpRow& row = Add(family, op, std::move(inputs));
    std::vector<size_t> operands(row.inputs.size());
    for (size_t i = 0; i < operands.size(); ++i) operands[i] = i;
    Do(&row, op, operands, attributes);
    return row;
  }
  static int64_t BytesOf(const OpRow& row);

  const bool smoke_;
  std::vector<OpRow> rows_;
};

// Read: what the measured steps take and none of them makes. Written: what they make and none
// takes.
int64_t Rows::BytesOf(const OpRow& row) {
  const size_t values = row.inputs.size() + row.steps.size();
  std::vector<bool> taken(values, false), made(values, false);
  for (size_t i = 0; i < row.steps.size(); ++i) {
    if (row.steps[i].prepares) continue;
    made[row.inputs.size() + i] = true;
    for (const size_t operand : row.steps[i].operands) taken[operand] = true;
  }
  int64_t bytes = 0;
  for (size_t i = 0; i < values; ++i) {
    if (taken[i] != made[i]) bytes += row.TypeOf(i).num_bytes();
  }
  return bytes;
}

void Rows::AddElementwise() {
  const std::string family = "elementwise";
  One(family, "add", {Of(kF32, {1024}), Of(kF32, {1024})}).note = "small";
  for (const DType dtype : {kF32, kBF16, kF64}) {
    One(family, "add", {Of(Large(dtype)), Of(Large(dtype))});
  }
  One(family, "mul", {Of(Large(kF32)), Of(Large(kF32))});
  for (const DType dtype : {kF32, kBF16, kF64}) One(family, "exp", {Of(Large(dtype))});
  One(family, "tanh", {Of(Large(kF32))});
  One(family, "relu_grad", {Of(Large(kF32)), Of(Large(kF32))});
  // As the SDK makes it.
  for (const DType dtype : {kF32, kBF16}) {
    OpRow& row = Add(family, "gelu",
                     {Of(Large(dtype)), Constant(dtype, 0.5), Constant(dtype, std::sqrt(0.5)),
                      Constant(dtype, 1)});
    const size_t half = Do(&row, "mul", {0, 1});
    const size_t scaled = Do(&row, "mul", {0, 2});
    const size_t erf = Do(&row, "erf", {scaled});
    const size_t above = Do(&row, "add", {erf, 3});
    Do(&row, "mul", {half, above});
  }
  // The momentum m and the parameter p, by the gradient g.
  OpRow& row = Add(family, "sgd_momentum",
                   {Of(Large(kF32)), Of(Large(kF32)), Of(Large(kF32)), Constant(kF32, 0.9),
                    Constant(kF32, 0.01)});
  const size_t kept = Do(&row, "mul", {1, 3});
  const size_t m = Do(&row, "add", {kept, 2});
  const size_t change = Do(&row, "mul", {m, 4});
  Do(&row, "sub", {0, change});
  row.bytes = 5 * row.TypeOf(0).num_bytes();
}

void Rows::AddCompare() {
  const std::string family = "compare";
  const auto cast = [&](DType from, DType to) {
    const int64_t elements = 64 * kMiB / std::max(DTypeBytes(from), DTypeBytes(to));
    One(family, "cast", {Of(from, {elements})}, {{"dtype", std::string(DTypeName(to))}}).note =
        absl::StrCat("to ", DTypeName(to));
  };
  cast(kF32, kBF16);
  cast(kBF16, kF32);
  cast(kF32, kF64);
  const TensorType x = Large(kF32);
  One(family, "gt", {Of(x), Of(x)});
  OpRow& row = Add(family, "where", {Of(x), Of(x), Below(2, DType::kBool, x.sizes())});
  Do(&row, "where", {2, 0, 1});
}

void Rows::AddFills() {
  Attributes attributes = TypeAttributes(Large(kF32));
  attributes.push_back({"value", 1.5});
  One("fill", "fill", {}, attributes);
  // What the gradient of a reduction multiplies by.
  One("reduction", "scale", {Of(Large(kF32)), Constant(kF32, 0.5)});
}

void Rows::AddSums() {
  const std::string family = "sum";
  const auto over = [&](const char* op, DType dtype, const Ints& sizes, const Ints& axes,
                        const char* note) {
    One(family, op, {Of(dtype, sizes)}, {{"axes", axes}}).note = note;
  };
  const Ints matrix = {8192, 2048};
  for (const DType dtype : {kF32, kBF16, kF64}) {
    over("sum", dtype, {64 * kMiB / DTypeBytes(dtype)}, {0}, "over all");
  }
  for (const DType dtype : {kF32, kBF16}) {
    over("sum", dtype, matrix, {1}, "over rows");
    over("sum", dtype, matrix, {0}, "over columns");
  }
  over("sum", kF32, {64, 256, 56, 56}, {0, 2, 3}, "over all but channels");
  over("mean", kF32, {16 * kMiB}, {0}, "over all");
  over("mean", kF32, matrix, {1}, "over rows");
  over("max", kF32, matrix, {1}, "over rows");
  One(family, "expand", {Of(kF32, {1, matrix[1]})}, {{"dims", Sizes(matrix)}}).note = "to rows";
  const auto cum_sum = [&](DType dtype, const Ints& sizes, int64_t axis) {
    One("cum_sum", "cum_sum", {Of(dtype, sizes)}, {{"axis", axis}}).note =
        absl::StrCat("along ", axis);
  };
  cum_sum(kF32, {8192, 1024}, 1);
  cum_sum(kF32, {8192, 1024}, 0);
  cum_sum(kF32, {kMiB}, 0);
}

void Rows::AddSoftmax() {
  const std::string family = "softmax";
  const Attributes along_rows = {{"axis", int64_t{1}}};
  const Ints attention = {8192, 1024}, vocabulary = {64, 50257};
  for (const char* op : {"softmax", "log_softmax"}) {
    for (const DType dtype : {kF32, kBF16}) One(family, op, {Of(dtype, attention)}, along_rows);
    One(family, op, {Of(kF32, vocabulary)}, along_rows);
  }
  OpRow& softmax = Add(family, "softmax_backward", {Of(kF32, attention), Of(kF32, attention)});
  const size_t y = Do(&softmax, "softmax", {0}, along_rows, /*prepares=*/true);
  Do(&softmax, "softmax_grad", {y, 1}, along_rows);
  OpRow& log_softmax =
      Add(family, "log_softmax_backward", {Of(kF32, attention), Of(kF32, attention)});
  const size_t weights = Do(&log_softmax, "softmax", {0}, along_rows);
  Do(&log_softmax, "center_grad", {weights, 1}, along_rows);
}

void Rows::AddCrossEntropy() {
  const std::string family = "cross_entropy";
  for (const Ints& logits : {Ints{64, 50257}, Ints{2048, 50257}, Ints{8192, 1024}}) {
    const Input labels = Below(logits[1], kI64, {logits[0]});
    One(family, "cross_entropy", {Of(kF32, logits), labels});
    One(family, "cross_entropy_grad", {Of(kF32, logits), labels, Of(kF32, {logits[0]})});
  }
}

void Rows::AddIndices() {
  const std::string family = "index";
  const int64_t vocabulary = 50257, width = 768, tokens = 16384;
  const Input indices = Below(vocabulary, kI64, {tokens});
  for (const DType dtype : {kF32, kBF16}) {
    OpRow& take =
        One(family, "take", {Of(dtype, {vocabulary, width}), indices}, {{"axis", int64_t{0}}});
    take.bytes = 2 * take.steps[0].output.num_bytes() + indices.type.num_bytes();
    One(family, "scatter_add", {Of(dtype, {tokens, width}), indices},
        {{"axis", int64_t{0}}, {"size", Size(vocabulary)}});
  }
  One(family, "one_hot", {Below(1024, kI64, {8192})},
      {{"depth", Size(1024)}, {"dtype", std::string("f32")}});
  One(family, "arg_max", {Of(kF32, {8192, 1024})}, {{"axis", int64_t{1}}});
  One(family, "arg_max", {Of(kF32, {64, 50257})}, {{"axis", int64_t{1}}});
}

void Rows::AddSorts() {
  const std::string family = "sort";
  One(family, "arg_sort", {Of(kF32, {kMiB})}, {{"axis", int64_t{0}}});
  One(family, "arg_sort", {Below(kMiB, kI64, {kMiB})}, {{"axis", int64_t{0}}});
  One(family, "arg_sort", {Of(kF32, {1024, 1024})}, {{"axis", int64_t{1}}});
  // As the SDK makes it.
  OpRow& row = Add(family, "top_k", {Of(kF32, {64, 50257})});
  const Attributes largest = {{"axis", int64_t{1}}, {"descending", int64_t{1}}, {"k", Size(50)}};
  const size_t indices = Do(&row, "arg_sort", {0}, largest);
  Do(&row, "take_along", {0, indices}, {{"axis", int64_t{1}}});
  row.attributes = largest;
  row.note = absl::StrCat("k ", Size(50));
}

// shape and slice.
void Rows::AddMoves() {
  const auto transpose = [&](DType dtype, const Ints& sizes, const Ints& perm) {
    One("shape", "transpose", {Of(dtype, sizes)}, {{"perm", perm}}).note =
        absl::StrCat("to ", absl::StrJoin(perm, " "));
  };
  transpose(kF32, {4096, 4096}, {1, 0});
  transpose(kBF16, {4096, 4096}, {1, 0});
  // Heads apart, for attention.
  transpose(kF32, {64, 512, 8, 64}, {0, 2, 1, 3});
  const int64_t columns = Size(2048);
  One("slice", "concat", {Of(kF32, {8192, 1024}), Of(kF32, {8192, 1024})}, {{"axis", int64_t{1}}});
  OpRow& slice = One("slice", "slice", {Of(kF32, {8192, 2048})},
                     {{"axis", int64_t{1}}, {"begin", columns / 4}, {"end", columns * 3 / 4}});
  slice.bytes = 2 * slice.steps[0].output.num_bytes();
  One("slice", "pad", {Of(kF32, {8192, 1024})},
      {{"after", columns / 4}, {"axis", int64_t{1}}, {"before", columns / 4}});
}

void Rows::AddRandom() {
  for (const char* op : {"random_uniform", "random_normal"}) {
    for (const DType dtype : {kF32, kBF16}) {
      One("random", op, {Constant(kI64, 7), Constant(kI64, 1)}, TypeAttributes(Large(dtype)));
    }
  }
}

void Rows::AddNorms() {
  const std::string family = "norm";
  // What has a mean of its own, and what a weight; what a bias's gradient is summed over.
  struct Kind {
    const char* name;
    Ints x, rows, weights, axes;
  };
  const Kind kinds[] = {{"layer_norm", {8192, 1024}, {0, 1}, {1, 2}, {0}},
                        {"batch_norm", {64, 256, 56, 56}, {1, 2}, {1, 2}, {0, 2, 3}}};
  for (const Kind& kind : kinds) {
    const std::string name = kind.name;
    const Attributes of_rows = {{"rows", kind.rows}};
    const Attributes all = {{"epsilon", 1e-5}, {"rows", kind.rows}, {"weights", kind.weights}};
    const Input x = Of(kF32, kind.x);
    const Input weight = Of(kF32, {kind.x[1]});
    One(family, "moments", {x}, of_rows).note = "of a " + name;
    OpRow& forward = Add(family, name, {x, weight, weight});
    const size_t moments = Do(&forward, "moments", {0}, of_rows);
    Do(&forward, "normalize", {0, moments, 1, 2}, all);
    OpRow& backward = Add(family, name + "_backward", {x, weight, x});
    const size_t kept = Do(&backward, "moments", {0}, of_rows, /*prepares=*/true);
    Do(&backward, "normalize_weight_grad", {0, kept, 2}, all);
    Do(&backward, "sum", {2}, {{"axes", kind.axes}});
    Do(&backward, "normalize_grad", {0, kept, 1, 2}, all);
  }
}

void Rows::AddPools() {
  const std::string family = "pool";
  const Window w = {3, 2, 1};
  const TensorType x = Type(kF32, {64, 64, 112, 112});
  const Ints sizes = x.sizes();
  const int64_t places = w.PlacesOn(sizes[2]);
  const Ints y = {sizes[0], sizes[1], places, places};
  const Attributes average = {{"count_padding", int64_t{1}},
                              {"kernel", Both(w.kernel)},
                              {"padding", Both(w.padding)},
                              {"stride", Both(w.stride)}};
  One(family, "avg_pool", {Of(x)}, average);
  Attributes of_gradient = average;
  of_gradient.insert(of_gradient.end() - 1, {"size", Ints{sizes[2], sizes[3]}});
  OpRow& average_backward = Add(family, "avg_pool_backward", {Of(x), Of(kF32, y)});
  Do(&average_backward, "avg_pool_grad", {1}, of_gradient);

  const Attributes largest = {{"dilation", Both(1)},
                              {"kernel", Both(w.kernel)},
                              {"padding", Both(w.padding)},
                              {"stride", Both(w.stride)}};
  OpRow& pool = Add(family, "max_pool", {Of(x)});
  const size_t index = Do(&pool, "max_pool_index", {0}, largest);
  Do(&pool, "max_pool_take", {0, index}, largest);
  pool.attributes = largest;
  OpRow& backward = Add(family, "max_pool_backward", {Of(x), Of(kF32, y)});
  const size_t kept = Do(&backward, "max_pool_index", {0}, largest, /*prepares=*/true);
  Attributes sized = largest;
  sized.insert(sized.end() - 1, {"size", Ints{sizes[2], sizes[3]}});
  Do(&backward, "max_pool_grad", {1, kept}, sized);
  backward.attributes = largest;
}

void Rows::AddConvolutions() {
  const std::string family = "convolution";
  struct Layer {
    Ints x;
    int64_t filters;
    Window window;
  };
  // Of a ResNet, and a small one.
  const Layer layers[] = {{{64, 64, 56, 56}, 64, {3, 1, 1}},  {{64, 128, 28, 28}, 128, {3, 1, 1}},
                          {{64, 512, 7, 7}, 512, {3, 1, 1}},  {{64, 256, 56, 56}, 64, {1, 1, 0}},
                          {{64, 3, 224, 224}, 64, {7, 2, 3}}, {{64, 16, 14, 14}, 32, {5, 1, 2}}};
  for (const Layer& layer : layers) {
    const TensorType x = Type(kF32, layer.x);
    const Ints sizes = x.sizes();
    const int64_t filters = Size(layer.filters), kernel = layer.window.kernel;
    const TensorType w = Type(kF32, {filters, sizes[1], kernel, kernel});
    const Attributes attributes = {{"dilation", Both(1)},
                                   {"groups", int64_t{1}},
                                   {"padding", Both(layer.window.padding)},
                                   {"stride", Both(layer.window.stride)}};
    OpRow& forward = One(family, "convolution", {Of(x), Of(w)}, attributes);
    forward.note = absl::StrCat("stride ", layer.window.stride);
    const TensorType y = forward.steps[0].output;
    const int64_t flops = 2 * y.num_elements() * sizes[1] * kernel * kernel;
    forward.flops = flops;
    const auto gradient = [&](const char* op, std::vector<size_t> operands, const Ints& size) {
      // Each has all three, of which another library wants to know the shapes.
      OpRow& row = Add(family, op, {Of(x), Of(w), Of(y)});
      Attributes sized = attributes;
      sized.insert(sized.end() - 1, {"size", size});
      Do(&row, op, operands, sized);
      row.flops = flops;
    };
    gradient("convolution_data_grad", {2, 1}, {sizes[2], sizes[3]});
    gradient("convolution_weight_grad", {0, 2}, {kernel, kernel});
  }
}

void Rows::AddMatmuls() {
  // [..., m, k] and [..., k, n], of which one may be stored transposed.
  const auto product = [&](DType dtype, const Ints& mkn, const char* transposed = "",
                           const Ints& before = {}) {
    const bool a_is = *transposed == 'a', b_is = *transposed == 'b';
    Ints a = before, b = before;
    for (const int64_t size : {mkn[a_is ? 1 : 0], mkn[a_is ? 0 : 1]}) a.push_back(size);
    for (const int64_t size : {mkn[b_is ? 2 : 1], mkn[b_is ? 1 : 2]}) b.push_back(size);
    Attributes attributes;
    if (a_is) attributes.push_back({"transpose_a", int64_t{1}});
    if (b_is) attributes.push_back({"transpose_b", int64_t{1}});
    OpRow& row = One("matmul", "matmul", {Of(dtype, a), Of(dtype, b)}, attributes);
    if (*transposed != 0) row.note = absl::StrCat(transposed, " transposed");
    row.flops = 2 * row.steps[0].output.num_elements() * Size(mkn[1]);
  };
  // A layer, and the gradient of its weights.
  for (const DType dtype : {kF32, kBF16}) {
    product(dtype, {64, 784, 256});
    product(dtype, {784, 64, 256}, "a");
  }
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) product(dtype, {1024, 1024, 1024});
  for (const DType dtype : {kF32, kBF16}) product(dtype, {4096, 4096, 4096});
  // Attention's scores, and what they are applied to.
  for (const DType dtype : {kF32, kBF16}) {
    product(dtype, {512, 64, 512}, "b", {64});
    product(dtype, {512, 512, 64}, "", {64});
  }
}

}  // namespace

const TensorType& OpRow::TypeOf(size_t value) const {
  return value < inputs.size() ? inputs[value].type : steps[value - inputs.size()].output;
}

DType OpRow::dtype() const {
  for (const Input& input : inputs) {
    if (!input.constant) return input.type.dtype;
  }
  return steps.back().output.dtype;
}

std::string OpRow::shape() const {
  std::vector<std::string> shapes;
  for (const Input& input : inputs) {
    if (!input.constant) shapes.push_back(absl::StrJoin(input.type.sizes(), "x"));
  }
  if (shapes.empty()) shapes.push_back(absl::StrJoin(steps.back().output.sizes(), "x"));
  return absl::StrJoin(shapes, ", ");
}

std::string OpRow::name() const {
  return absl::StrCat(op, " ", DTypeName(dtype()), " ", shape(), note.empty() ? "" : ", ", note);
}

std::vector<OpRow> OpRows(bool smoke) {
  Rows rows(smoke);
  rows.AddElementwise();
  rows.AddCompare();
  rows.AddFills();
  rows.AddSums();
  rows.AddSoftmax();
  rows.AddCrossEntropy();
  rows.AddIndices();
  rows.AddSorts();
  rows.AddMoves();
  rows.AddRandom();
  rows.AddNorms();
  rows.AddPools();
  rows.AddConvolutions();
  rows.AddMatmuls();
  return rows.Finish();
}

}  // namespace testing
}  // namespace chorus
