#include "tests/random/local_ops.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace chorus {
namespace random_programs {
namespace {

// A shape after a reduction.
Dims Without(const Dims& shape, const std::vector<int64_t>& axes, bool all, bool keep) {
  Dims result;
  for (size_t d = 0; d < shape.size(); ++d) {
    const bool reduced = all || std::count(axes.begin(), axes.end(), static_cast<int64_t>(d)) > 0;
    if (!reduced) result.push_back(shape[d]);
    if (reduced && keep) result.push_back(1);
  }
  return result;
}

}  // namespace

bool LocalOps::Add() {
  const int rank = random_->Between(0, program_->ranks() - 1);
  switch (random_->Between(0, 20)) {
    case 0:
    case 1:
      return Unary(rank);
    case 2:
    case 3:
    case 4:
    case 5:
      return Binary(rank);
    case 6:
      return Number(rank);
    case 7:
    case 8:
      return Reduction1(rank);
    case 9:
    case 10:
    case 11:
      return View(rank);
    case 12:
      return Model(rank);
    case 13:
      return Indexed(rank);
    case 14:
      return Select(rank);
    case 15:
      return Ordered(rank);
    case 16:
      return random_->Chance(0.5) ? Layer(rank) : NormOfChannels(rank);
    case 17:
    case 18:
      return Convolution(rank);
    case 19:
      return Pool(rank);
    default: {
      const int x = draft_->SomeNumbers(rank);
      const Value value = program_->value(x);
      if (random_->Chance(0.3))
        return draft_->Try(draft_->Of(Op::kDetach, rank, {x}, value.dtype, value.shape));
      const DType to = draft_->SomeDType();
      return draft_->Try(draft_->Of(Op::kCast, rank, {x}, to, value.shape));
    }
  }
}

bool LocalOps::Unary(int rank) {
  const Op op =
      static_cast<Op>(random_->Between(static_cast<int>(Op::kNeg), static_cast<int>(Op::kCeil)));
  const bool any = op == Op::kNeg || op == Op::kAbs || op == Op::kRelu || op == Op::kSign;
  const int x = any ? draft_->SomeNumbers(rank) : draft_->SomeFloat(rank);
  return draft_->Try(draft_->Of(op, rank, {x}, program_->value(x).dtype, program_->value(x).shape));
}

bool LocalOps::Binary(int rank) {
  const Op op = random_->AnyOf({Op::kAdd, Op::kAdd, Op::kSub, Op::kSub, Op::kMul, Op::kMul,
                                Op::kMul, Op::kDiv, Op::kMaximum, Op::kMinimum, Op::kPow});
  const int x = op == Op::kPow ? draft_->SomeFloat(rank) : draft_->SomeNumbers(rank);
  const Value a = program_->value(x);
  int y = -1;
  if (random_->Chance(0.2)) {
    // Of a shape that stretches.
    Dims shape = a.shape;
    for (int64_t& n : shape) {
      if (random_->Chance(0.4)) n = 1;
    }
    if (!shape.empty() && random_->Chance(0.4)) shape.erase(shape.begin());
    y = draft_->Operand(rank, a.dtype, shape);
  } else if (random_->Chance(0.8)) {
    y = draft_->Existing(rank,
                         [&](const Value& v) { return v.dtype == a.dtype && v.shape == a.shape; });
  }
  if (y < 0) y = draft_->Operand(rank, a.dtype, a.shape);
  Dims shape = a.shape;
  if (program_->value(y).shape.size() == shape.size()) {
    for (size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] == 1) shape[d] = program_->value(y).shape[d];
    }
  }
  std::vector<int> in = {x, y};
  if (random_->Chance(0.3)) std::swap(in[0], in[1]);
  return draft_->Try(draft_->Of(op, rank, in, a.dtype, shape));
}

void LocalOps::Burst() {
  const int rank = random_->Between(0, program_->ranks() - 1);
  const Value like = program_->value(draft_->SomeFloat(rank));
  const auto fits = [&](const Value& v) { return v.dtype == like.dtype && v.shape == like.shape; };
  for (int i = random_->Between(5, 12); i > 0; --i) {
    const Op op = random_->AnyOf({Op::kAdd, Op::kAdd, Op::kSub, Op::kSub, Op::kMul});
    const std::vector<int> in = {draft_->Existing(rank, fits), draft_->Existing(rank, fits)};
    draft_->Try(draft_->Of(op, rank, in, like.dtype, like.shape));
  }
}

bool LocalOps::Number(int rank) {
  const int x = draft_->SomeNumbers(rank);
  Statement s = draft_->Of(random_->Chance(0.5) ? Op::kAddNumber : Op::kMulNumber, rank, {x},
                           program_->value(x).dtype, program_->value(x).shape);
  s.number = random_->AnyOf({2.0, -1.0, 3.0, 1.0});
  if (program_->value(x).dtype == DType::kU8) s.number = std::fabs(s.number);
  if (IsFloating(program_->value(x).dtype) && random_->Chance(0.5))
    s.number = random_->AnyOf({0.5, -0.25, 1.5});
  return draft_->Try(std::move(s));
}

bool LocalOps::Reduction1(int rank) {
  const Op op = random_->AnyOf({Op::kSum, Op::kSum, Op::kMean, Op::kMax, Op::kMin, Op::kProduct});
  const int x = op == Op::kMean ? draft_->SomeFloat(rank) : draft_->SomeNumbers(rank);
  const Value a = program_->value(x);
  std::vector<int64_t> axes;
  const bool all = random_->Chance(0.4);
  for (size_t d = 0; d < a.shape.size() && !all; ++d) {
    if (random_->Chance(0.5)) axes.push_back(static_cast<int64_t>(d));
  }
  const bool keep = random_->Chance(0.3);
  Statement s = draft_->Of(op, rank, {x}, a.dtype, Without(a.shape, axes, all, keep));
  s.ints = axes;
  s.number = all ? 1 : 0;
  s.flag = keep;
  return draft_->Try(std::move(s));
}

bool LocalOps::View(int rank) {
  const int x = draft_->SomeNumbers(rank);
  const Value a = program_->value(x);
  const auto dims = static_cast<int>(a.shape.size());
  switch (random_->Between(0, 5)) {
    case 0: {
      Dims shape = a.shape;
      for (int64_t& n : shape) {
        if (n == 1) n = random_->Between(1, 3);
      }
      if (random_->Chance(0.6)) shape.insert(shape.begin(), random_->Between(1, 3));
      if (Elements(shape) > 40) return false;
      Statement s = draft_->Of(Op::kExpand, rank, {x}, a.dtype, shape);
      s.ints = shape;
      return draft_->Try(std::move(s));
    }
    case 1: {
      Dims shape = {Elements(a.shape)};
      if (random_->Chance(0.3)) shape.push_back(1);
      if (Elements(a.shape) % 2 == 0 && Elements(a.shape) > 0 && random_->Chance(0.5)) {
        shape = {2, Elements(a.shape) / 2};
      }
      if (Elements(a.shape) == 1 && random_->Chance(0.5)) shape = {};
      Statement s = draft_->Of(Op::kReshape, rank, {x}, a.dtype, shape);
      s.ints = shape;
      return draft_->Try(std::move(s));
    }
    case 2: {
      if (dims < 2) return false;
      std::vector<int> order;
      for (int d = 0; d < dims; ++d) order.push_back(d);
      order = random_->Shuffled(order);
      Dims shape;
      for (const int d : order) shape.push_back(a.shape[static_cast<size_t>(d)]);
      Statement s = draft_->Of(Op::kTranspose, rank, {x}, a.dtype, shape);
      s.ints.assign(order.begin(), order.end());
      return draft_->Try(std::move(s));
    }
    case 3: {
      if (dims < 1) return false;
      const int axis = random_->Between(0, dims - 1);
      const auto size = static_cast<int>(a.shape[static_cast<size_t>(axis)]);
      const int begin = random_->Between(0, size);
      const int end = random_->Between(begin, size);
      Dims shape = a.shape;
      shape[static_cast<size_t>(axis)] = end - begin;
      Statement s = draft_->Of(Op::kSlice, rank, {x}, a.dtype, shape);
      s.ints = {axis, begin, end};
      return draft_->Try(std::move(s));
    }
    case 4: {
      if (dims < 1) return false;
      const int axis = random_->Between(0, dims - 1);
      std::vector<int> in = {x};
      Dims shape = a.shape;
      for (int i = random_->Between(0, 2); i > 0; --i) {
        Dims other = a.shape;
        other[static_cast<size_t>(axis)] = random_->Between(0, 3);
        in.push_back(random_->Chance(0.3) ? x : draft_->Operand(rank, a.dtype, other));
        shape[static_cast<size_t>(axis)] +=
            program_->value(in.back()).shape[static_cast<size_t>(axis)];
      }
      if (Elements(shape) > 60) return false;
      Statement s = draft_->Of(Op::kConcat, rank, in, a.dtype, shape);
      s.ints = {axis};
      return draft_->Try(std::move(s));
    }
    default: {
      std::vector<int> others;
      for (const int r : program_->RanksOf(program_->trainer_of[static_cast<size_t>(rank)])) {
        if (r != rank) others.push_back(r);
      }
      if (others.empty()) return false;
      return draft_->Try(
          draft_->Of(Op::kCopyTo, rank, {x}, a.dtype, a.shape, random_->Any(others)));
    }
  }
}

bool LocalOps::Model(int rank) {
  if (random_->Chance(0.4)) {
    const int m = random_->Between(1, 3);
    const int k = random_->Between(0, 3);
    const int n = random_->Between(1, 3);
    int x = draft_->Existing(rank, [](const Value& v) {
      return IsFloating(v.dtype) && v.shape.size() >= 2 && Elements(v.shape) <= 16;
    });
    if (x < 0) x = draft_->Operand(rank, settings_->dtype, {m, k});
    const Value a = program_->value(x);
    const int y = draft_->Operand(rank, a.dtype, {a.shape.back(), n});
    Dims shape = a.shape;
    shape.back() = n;
    return draft_->Try(draft_->Of(Op::kMatMul, rank, {x, y}, a.dtype, shape));
  }
  int x = draft_->Existing(rank, [](const Value& v) {
    return IsFloating(v.dtype) && !v.shape.empty() && v.shape.back() > 0;
  });
  if (x < 0)
    x = draft_->Operand(rank, settings_->dtype, {random_->Between(1, 3), random_->Between(1, 4)});
  const Value a = program_->value(x);
  if (random_->Chance(0.5)) {
    Dims rows = a.shape;
    rows.pop_back();
    const int labels = draft_->Indices(rank, rows, a.shape.back());
    return draft_->Try(draft_->Of(Op::kCrossEntropy, rank, {x, labels}, a.dtype, rows));
  }
  Statement s = draft_->Of(random_->Chance(0.5) ? Op::kSoftmax : Op::kLogSoftmax, rank, {x},
                           a.dtype, a.shape);
  s.ints = {random_->Between(0, static_cast<int>(a.shape.size()) - 1)};
  return draft_->Try(std::move(s));
}

bool LocalOps::Indexed(int rank) {
  int x = draft_->Existing(rank, [](const Value& v) {
    return v.dtype != DType::kBool && !v.shape.empty() && Elements(v.shape) > 0;
  });
  if (x < 0) x = draft_->Operand(rank, settings_->dtype, {random_->Between(1, 4)});
  const Value a = program_->value(x);
  const auto dims = static_cast<int>(a.shape.size());
  const int axis = random_->Between(0, dims - 1);
  const int64_t size = a.shape[static_cast<size_t>(axis)];
  const int64_t to = random_->Between(1, 4);
  switch (random_->Between(0, 5)) {
    case 0: {
      const Dims indices = random_->Chance(0.2) ? Dims{} : Dims{random_->Between(0, 3)};
      Dims shape(a.shape.begin(), a.shape.begin() + axis);
      shape.insert(shape.end(), indices.begin(), indices.end());
      shape.insert(shape.end(), a.shape.begin() + axis + 1, a.shape.end());
      Statement s =
          draft_->Of(Op::kTake, rank, {x, draft_->Indices(rank, indices, size)}, a.dtype, shape);
      s.ints = {axis};
      return draft_->Try(std::move(s));
    }
    case 1: {
      Dims shape = a.shape;
      shape[static_cast<size_t>(axis)] = to;
      Statement s =
          draft_->Of(Op::kScatterAdd, rank, {x, draft_->Indices(rank, {size}, to)}, a.dtype, shape);
      s.ints = {to, axis};
      return draft_->Try(std::move(s));
    }
    case 2: {
      Dims shape = a.shape;
      shape[static_cast<size_t>(axis)] = random_->Between(0, 3);
      Statement s =
          draft_->Of(Op::kTakeAlong, rank, {x, draft_->Indices(rank, shape, size)}, a.dtype, shape);
      s.ints = {axis};
      return draft_->Try(std::move(s));
    }
    case 3: {
      Dims shape = a.shape;
      shape[static_cast<size_t>(axis)] = to;
      Statement s = draft_->Of(Op::kScatterAddAlong, rank, {x, draft_->Indices(rank, a.shape, to)},
                               a.dtype, shape);
      s.ints = {to, axis};
      return draft_->Try(std::move(s));
    }
    case 4: {
      const bool keep = random_->Chance(0.3);
      Statement s =
          draft_->Of(Op::kArgMax, rank, {x}, DType::kI64, Without(a.shape, {axis}, false, keep));
      s.ints = {axis};
      s.flag = keep;
      return draft_->Try(std::move(s));
    }
    default: {
      const int indices = draft_->Indices(rank, {random_->Between(0, 3)}, to);
      Dims shape = program_->value(indices).shape;
      shape.push_back(to);
      Statement s = draft_->Of(Op::kOneHot, rank, {indices}, settings_->dtype, shape);
      s.ints = {to};
      return draft_->Try(std::move(s));
    }
  }
}

bool LocalOps::Ordered(int rank) {
  int x = draft_->Existing(rank, [](const Value& v) {
    return v.dtype != DType::kBool && !v.shape.empty() && Elements(v.shape) <= 40;
  });
  if (x < 0) x = draft_->Operand(rank, settings_->dtype, {random_->Between(1, 4)});
  const Value a = program_->value(x);
  const int axis = random_->Between(0, static_cast<int>(a.shape.size()) - 1);
  const Op op = random_->AnyOf({Op::kSort, Op::kSort, Op::kArgSort, Op::kCumSum, Op::kCumSum});
  Dims shape = a.shape;
  int64_t& size = shape[static_cast<size_t>(axis)];
  if (op != Op::kCumSum && random_->Chance(0.5)) size = random_->Between(0, static_cast<int>(size));
  Statement s = draft_->Of(op, rank, {x}, op == Op::kArgSort ? DType::kI64 : a.dtype, shape);
  s.ints = {axis};
  if (op != Op::kCumSum) s.ints.push_back(size);
  s.flag = random_->Chance(0.5);
  return draft_->Try(std::move(s));
}

int LocalOps::Images(int rank, int64_t channels) {
  const int x = draft_->Existing(rank, [channels](const Value& v) {
    return IsFloating(v.dtype) && v.shape.size() == 4 && Elements(v.shape) <= 40 &&
           v.shape[1] % channels == 0;
  });
  if (x >= 0 && random_->Chance(0.6)) return x;
  return draft_->Operand(rank, settings_->dtype,
                         {random_->Between(0, 2), channels * random_->Between(1, 2),
                          random_->Between(1, 4), random_->Between(1, 3)});
}

bool LocalOps::Convolution(int rank) {
  const bool transposed = random_->Chance(0.4);
  const int64_t groups = random_->AnyOf({1, 1, 1, 2});
  const int x = Images(rank, groups);
  const Value a = program_->value(x);
  const int64_t other = groups * random_->Between(1, 2);
  Dims weight = {transposed ? a.shape[1] : other, (transposed ? other : a.shape[1]) / groups};
  Dims shape = {a.shape[0], other};
  std::vector<int64_t> strides, paddings, dilations, added;
  for (size_t d = 0; d < 2; ++d) {
    const int64_t size = a.shape[2 + d];
    weight.push_back(random_->Between(1, 3));
    strides.push_back(random_->AnyOf({1, 1, 2, 3}));
    paddings.push_back(random_->AnyOf({0, 0, 1, 2}));
    dilations.push_back(random_->AnyOf({1, 1, 1, 2}));
    added.push_back(random_->Between(0, static_cast<int>(strides[d]) - 1));
    const int64_t window = dilations[d] * (weight[2 + d] - 1) + 1;
    const int64_t room = transposed
                             ? (size - 1) * strides[d] - 2 * paddings[d] + window + added[d] - 1
                             : size + 2 * paddings[d] - window;
    if (size == 0 || room < 0) return false;
    shape.push_back(transposed ? room + 1 : room / strides[d] + 1);
  }
  // Of so many products.
  if (Elements(transposed ? a.shape : shape) * Elements(weight) > 600 * groups ||
      Elements(shape) > 60) {
    return false;
  }
  const int w = draft_->Operand(rank, a.dtype, weight);
  Statement s =
      draft_->Of(transposed ? Op::kConvTranspose2d : Op::kConv2d, rank, {x, w}, a.dtype, shape);
  for (const auto& pair : {strides, paddings, dilations}) {
    s.ints.insert(s.ints.end(), pair.begin(), pair.end());
  }
  s.ints.push_back(groups);
  if (transposed) s.ints.insert(s.ints.end(), added.begin(), added.end());
  return draft_->Try(std::move(s));
}

bool LocalOps::Pool(int rank) {
  const Op op = random_->AnyOf({Op::kMaxPool2d, Op::kAvgPool2d, Op::kAdaptiveAvgPool2d});
  const int x = Images(rank, 1);
  const Value a = program_->value(x);
  if (a.shape[2] == 0 || a.shape[3] == 0) return false;
  Dims shape = {a.shape[0], a.shape[1]};
  if (op == Op::kAdaptiveAvgPool2d) {
    const Dims size = {random_->Between(1, 4), random_->Between(1, 4)};
    shape.insert(shape.end(), size.begin(), size.end());
    Statement s = draft_->Of(op, rank, {x}, a.dtype, shape);
    s.ints = size;
    return draft_->Try(std::move(s));
  }
  std::vector<int64_t> kernel, stride, padding, dilation;
  for (size_t d = 0; d < 2; ++d) {
    kernel.push_back(random_->Between(1, 3));
    stride.push_back(random_->Between(1, 3));
    padding.push_back(random_->Between(0, static_cast<int>(kernel[d]) / 2));
    dilation.push_back(op == Op::kMaxPool2d ? random_->AnyOf({1, 1, 2}) : 1);
    const int64_t room = a.shape[2 + d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1;
    if (room < 0) return false;
    shape.push_back(room / stride[d] + 1);
  }
  Statement s = draft_->Of(op, rank, {x}, a.dtype, shape);
  for (const auto& pair : {kernel, stride, padding}) {
    s.ints.insert(s.ints.end(), pair.begin(), pair.end());
  }
  if (op == Op::kMaxPool2d) s.ints.insert(s.ints.end(), dilation.begin(), dilation.end());
  s.flag = op == Op::kAvgPool2d && random_->Chance(0.5);
  return draft_->Try(std::move(s));
}

bool LocalOps::Layer(int rank) {
  int x = draft_->Existing(rank, [](const Value& v) {
    return IsFloating(v.dtype) && !v.shape.empty() && v.shape.back() > 0 && Elements(v.shape) <= 16;
  });
  if (x < 0) {
    x = draft_->Operand(rank, settings_->dtype, {random_->Between(0, 3), random_->Between(1, 4)});
  }
  const Value a = program_->value(x);
  const int64_t in = a.shape.back();
  const bool linear = random_->Chance(0.5);
  const int64_t out = linear ? random_->Between(1, 3) : in;
  const int weight = draft_->Operand(rank, a.dtype, linear ? Dims{out, in} : Dims{in});
  const int bias = draft_->Operand(rank, a.dtype, {out});
  Dims shape = a.shape;
  shape.back() = out;
  return draft_->Try(
      draft_->Of(linear ? Op::kLinear : Op::kLayerNorm, rank, {x, weight, bias}, a.dtype, shape));
}

bool LocalOps::NormOfChannels(int rank) {
  int x = draft_->Existing(rank, [](const Value& v) {
    return IsFloating(v.dtype) && v.shape.size() >= 2 && v.shape[1] > 0 &&
           Elements(v.shape) >= 2 * v.shape[1] && Elements(v.shape) <= 24;
  });
  if (x < 0) {
    x = draft_->Operand(
        rank, settings_->dtype,
        {random_->Between(2, 3), random_->AnyOf({1, 2, 4}), random_->Between(1, 2)});
  }
  const Value a = program_->value(x);
  const int64_t channels = a.shape[1];
  const int weight = draft_->Operand(rank, a.dtype, {channels});
  const int bias = draft_->Operand(rank, a.dtype, {channels});
  const bool batch = random_->Chance(0.6);
  Statement s = draft_->Of(batch ? Op::kBatchNorm : Op::kGroupNorm, rank, {x, weight, bias},
                           a.dtype, a.shape);
  if (!batch) s.ints = {channels % 2 == 0 ? random_->AnyOf({1, 2}) : 1};
  return draft_->Try(std::move(s));
}

bool LocalOps::Select(int rank) {
  const int x = draft_->SomeNumbers(rank);
  const Value a = program_->value(x);
  const int y = draft_->Operand(rank, a.dtype, a.shape);
  int condition = draft_->Existing(
      rank, [&](const Value& v) { return v.dtype == DType::kBool && v.shape == a.shape; });
  if (condition < 0 || random_->Chance(0.4)) {
    Statement s = draft_->Of(random_->Chance(0.6) ? Op::kLess : Op::kEqual, rank, {x, y},
                             DType::kBool, a.shape);
    condition = s.calls[0].out[0];
    if (!draft_->Try(std::move(s))) return false;
    if (random_->Chance(0.3)) return true;
  }
  if (random_->Chance(0.25)) {
    const int other = draft_->Operand(rank, DType::kBool, a.shape);
    Statement s = draft_->Of(Op::kLogicalAnd, rank, {condition, other}, DType::kBool, a.shape);
    condition = s.calls[0].out[0];
    if (!draft_->Try(std::move(s))) return false;
    if (random_->Chance(0.5)) return true;
  }
  if (random_->Chance(0.2)) {
    return draft_->Try(draft_->Of(Op::kLogicalNot, rank, {condition}, DType::kBool, a.shape));
  }
  return draft_->Try(draft_->Of(Op::kWhere, rank, {condition, x, y}, a.dtype, a.shape));
}

}  // namespace random_programs
}  // namespace chorus
