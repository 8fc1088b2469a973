#include "tests/random/evaluate_tensors.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "core/base/error.h"

namespace chorus {
namespace random_programs {
namespace {

// The indices of `shape`, row-major.
std::vector<Dims> IndicesOf(const Dims& shape) {
  std::vector<Dims> all;
  const int64_t n = Elements(shape);
  for (int64_t i = 0; i < n; ++i) {
    Dims index(shape.size());
    int64_t rest = i;
    for (size_t d = shape.size(); d-- > 0;) {
      index[d] = rest % shape[d];
      rest /= shape[d];
    }
    all.push_back(std::move(index));
  }
  return all;
}

size_t Offset(const Dims& shape, const Dims& index) {
  int64_t offset = 0;
  for (size_t d = 0; d < shape.size(); ++d) offset = offset * shape[d] + index[d];
  return static_cast<size_t>(offset);
}

// The index in an operand of shape `from` that stands at `index` where shapes are broadcast.
Dims Stretched(const Dims& from, const Dims& index) {
  Dims result(from.size());
  for (size_t d = 0; d < from.size(); ++d) {
    result[d] = from[d] == 1 ? 0 : index[index.size() - from.size() + d];
  }
  return result;
}

bool BroadcastShapes(const Dims& a, const Dims& b, Dims* out) {
  const size_t rank = std::max(a.size(), b.size());
  out->assign(rank, 1);
  for (size_t d = 0; d < rank; ++d) {
    const int64_t x = d < rank - a.size() ? 1 : a[d - (rank - a.size())];
    const int64_t y = d < rank - b.size() ? 1 : b[d - (rank - b.size())];
    if (x != y && x != 1 && y != 1) return false;
    (*out)[d] = x == 1 ? y : x;
  }
  return true;
}

void ForEachLine(const Dims& shape, int64_t axis,
                 const std::function<void(const std::vector<size_t>&)>& body) {
  Dims rest = shape;
  rest[static_cast<size_t>(axis)] = 1;
  for (Dims index : IndicesOf(rest)) {
    std::vector<size_t> line;
    for (int64_t i = 0; i < shape[static_cast<size_t>(axis)]; ++i) {
      index[static_cast<size_t>(axis)] = i;
      line.push_back(Offset(shape, index));
    }
    body(line);
  }
}

absl::Status Append(const absl::StatusOr<int>& node, std::vector<int>* nodes) {
  if (node.ok()) nodes->push_back(*node);
  return node.status();
}

}  // namespace

int64_t Axis(int64_t axis, const Dims& shape) {
  return axis < 0 ? axis + static_cast<int64_t>(shape.size()) : axis;
}

Array TensorOps::Mapped(const Array& x, const Dims& shape,
                        const std::function<Dims(const Dims&)>& from) {
  Array result{x.dtype, shape, {}};
  for (const Dims& index : IndicesOf(shape)) {
    result.nodes.push_back(graph_->Copy(x.nodes[Offset(x.shape, from(index))]));
  }
  return result;
}

Array TensorOps::Copied(const Array& x) {
  Array result{x.dtype, x.shape, {}};
  for (const int n : x.nodes) result.nodes.push_back(graph_->Copy(n));
  return result;
}

Array TensorOps::DetachedArray(const Array& x) {
  Array result{x.dtype, x.shape, {}};
  for (const int n : x.nodes) result.nodes.push_back(graph_->Detached(n));
  return result;
}

Array TensorOps::ZerosOf(DType dtype, const Dims& shape) {
  Array result{dtype, shape, {}};
  for (int64_t i = 0; i < Elements(shape); ++i) result.nodes.push_back(graph_->Constant(dtype, 0));
  return result;
}

Array TensorOps::Counts(const std::vector<int64_t>& counts) {
  Array result{DType::kI64, {static_cast<int64_t>(counts.size())}, {}};
  for (const int64_t n : counts) {
    result.nodes.push_back(graph_->Constant(DType::kI64, static_cast<double>(n)));
  }
  return result;
}

Array TensorOps::Sliced(const Array& x, int64_t axis, int64_t begin, int64_t end) {
  Dims shape = x.shape;
  shape[static_cast<size_t>(axis)] = end - begin;
  return Mapped(x, shape, [&](Dims index) {
    index[static_cast<size_t>(axis)] += begin;
    return index;
  });
}

absl::StatusOr<Arrays> TensorOps::Split(const Array& x, int64_t axis, std::vector<int64_t> rows,
                                        size_t pieces) {
  axis = Axis(axis, x.shape);
  if (axis < 0 || axis >= static_cast<int64_t>(x.shape.size())) return No("split: that axis");
  const int64_t size = x.shape[static_cast<size_t>(axis)];
  if (rows.empty()) {
    if (size % static_cast<int64_t>(pieces) != 0) return No("split: not evenly");
    rows.assign(pieces, size / static_cast<int64_t>(pieces));
  }
  int64_t at = 0;
  Arrays result;
  for (const int64_t n : rows) {
    if (n < 0 || at + n > size) return No("split: rows");
    result.push_back(Sliced(x, axis, at, at + n));
    at += n;
  }
  if (at != size || rows.size() != pieces) return No("split: rows");
  return result;
}

absl::StatusOr<Array> TensorOps::Joined(const Arrays& pieces, int64_t axis) {
  if (pieces.empty()) return No("join: nothing");
  Dims shape = pieces[0].shape;
  if (shape.empty()) shape = {1};
  axis = Axis(axis, shape);
  if (axis < 0 || axis >= static_cast<int64_t>(shape.size())) return No("join: that axis");
  const auto a = static_cast<size_t>(axis);
  shape[a] = 0;
  std::vector<std::pair<const Array*, int64_t>> owner;  // by row
  for (const Array& piece : pieces) {
    Dims mine = piece.shape.empty() ? Dims{1} : piece.shape;
    if (mine.size() != shape.size() || piece.dtype != pieces[0].dtype) return No("join: types");
    const int64_t rows = mine[a];
    for (int64_t r = 0; r < rows; ++r) owner.emplace_back(&piece, r);
    mine[a] = shape[a];
    if (mine != shape) return No("join: shapes");
    shape[a] += rows;
  }
  Array result{pieces[0].dtype, shape, {}};
  for (Dims index : IndicesOf(shape)) {
    const auto& [piece, row] = owner[static_cast<size_t>(index[a])];
    index[a] = row;
    result.nodes.push_back(
        graph_->Copy(piece->nodes[piece->shape.empty() ? 0 : Offset(piece->shape, index)]));
  }
  return result;
}

absl::StatusOr<std::vector<int64_t>> TensorOps::Whole(const Array& x) const {
  std::vector<int64_t> result;
  for (const int n : x.nodes) {
    if (graph_->at(n).error != 0) return No("indices that are not known");
    result.push_back(static_cast<int64_t>(graph_->at(n).value));
  }
  return result;
}

absl::StatusOr<Array> TensorOps::Local(const Statement& s, const Arrays& in, const Value& out) {
  const DType dtype = in[0].dtype;
  const auto axis_of = [&](size_t i) { return Axis(s.ints[i], in[0].shape); };
  const auto has_axis = [&](int64_t axis, const Dims& shape) {
    return axis >= 0 && axis < static_cast<int64_t>(shape.size());
  };
  Array result{out.dtype, {}, {}};
  switch (s.op) {
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kDiv:
    case Op::kMaximum:
    case Op::kMinimum:
    case Op::kPow:
    case Op::kLess:
    case Op::kEqual:
    case Op::kLogicalAnd:
      if (in[1].dtype != dtype || !BroadcastShapes(in[0].shape, in[1].shape, &result.shape)) {
        return No("two of different types");
      }
      for (const Dims& index : IndicesOf(result.shape)) {
        const int a = in[0].nodes[Offset(in[0].shape, Stretched(in[0].shape, index))];
        const int b = in[1].nodes[Offset(in[1].shape, Stretched(in[1].shape, index))];
        CHORUS_RETURN_IF_ERROR(Append(graph_->Binary(s.op, dtype, a, b), &result.nodes));
      }
      return result;
    case Op::kWhere: {
      Dims shape;
      if (in[0].dtype != DType::kBool || in[1].dtype != in[2].dtype ||
          !BroadcastShapes(in[1].shape, in[2].shape, &shape) ||
          !BroadcastShapes(in[0].shape, shape, &result.shape)) {
        return No("where: types");
      }
      for (const Dims& index : IndicesOf(result.shape)) {
        const auto pick = [&](size_t i) {
          return in[i].nodes[Offset(in[i].shape, Stretched(in[i].shape, index))];
        };
        const Node condition = graph_->at(pick(0));
        const int a = pick(1);
        const int b = pick(2);
        const int taken = condition.value != 0 ? a : b;
        if (condition.error == 0) {
          result.nodes.push_back(graph_->Chosen(in[1].dtype, graph_->at(taken).value,
                                                graph_->at(taken).error, {{taken, 1}}));
        } else {
          result.nodes.push_back(graph_->Chosen(in[1].dtype, graph_->at(taken).value, kUnknown,
                                                {{a, kNoShare}, {b, kNoShare}}));
        }
      }
      return result;
    }
    case Op::kCast:
      result.shape = in[0].shape;
      for (const int n : in[0].nodes) result.nodes.push_back(graph_->Converted(n, out.dtype));
      return result;
    case Op::kSum:
    case Op::kMean:
    case Op::kMax:
    case Op::kMin:
    case Op::kProduct:
    case Op::kArgMax:
      return Reduction1(s, in[0], out);
    case Op::kExpand: {
      const Dims& shape = s.ints;
      Dims check;
      if (!BroadcastShapes(in[0].shape, shape, &check) || check != shape) return No("expand");
      return Mapped(in[0], shape, [&](const Dims& p) { return Stretched(in[0].shape, p); });
    }
    case Op::kReshape:
      if (Elements(s.ints) != Elements(in[0].shape)) return No("reshape");
      result = Copied(in[0]);
      result.shape = s.ints;
      return result;
    case Op::kTranspose: {
      if (s.ints.size() != in[0].shape.size()) return No("transpose");
      Dims shape;
      for (const int64_t p : s.ints) {
        if (!has_axis(p, in[0].shape)) return No("transpose");
        shape.push_back(in[0].shape[static_cast<size_t>(p)]);
      }
      return Mapped(in[0], shape, [&](const Dims& index) {
        Dims from(index.size());
        for (size_t d = 0; d < index.size(); ++d) from[static_cast<size_t>(s.ints[d])] = index[d];
        return from;
      });
    }
    case Op::kSlice: {
      const int64_t axis = axis_of(0);
      if (!has_axis(axis, in[0].shape) || s.ints[1] < 0 || s.ints[2] < s.ints[1] ||
          s.ints[2] > in[0].shape[static_cast<size_t>(axis)]) {
        return No("slice");
      }
      return Sliced(in[0], axis, s.ints[1], s.ints[2]);
    }
    case Op::kConcat:
      if (in[0].shape.empty()) return No("concat");
      return Joined(in, s.ints[0]);
    case Op::kMatMul:
      return MatMul(in[0], in[1]);
    case Op::kSoftmax:
    case Op::kLogSoftmax: {
      const int64_t axis = axis_of(0);
      if (!has_axis(axis, in[0].shape) || !IsFloating(dtype)) return No("softmax");
      result = in[0];
      ForEachLine(in[0].shape, axis, [&](const std::vector<size_t>& line) {
        std::vector<int> x;
        for (const size_t i : line) x.push_back(in[0].nodes[i]);
        const std::vector<int> y = graph_->Softmax(dtype, x, s.op == Op::kLogSoftmax);
        for (size_t i = 0; i < line.size(); ++i) result.nodes[line[i]] = y[i];
      });
      return result;
    }
    case Op::kCrossEntropy: {
      if (in[0].shape.empty() || !IsFloating(dtype)) return No("cross_entropy");
      Dims rows = in[0].shape;
      rows.pop_back();
      if (rows != in[1].shape || in[0].shape.back() == 0) return No("cross_entropy: labels");
      CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> labels, Whole(in[1]));
      result.shape = rows;
      size_t row = 0;
      bool wrong = false;
      ForEachLine(
          in[0].shape, static_cast<int64_t>(in[0].shape.size()) - 1,
          [&](const std::vector<size_t>& line) {
            std::vector<int> x;
            for (const size_t i : line) x.push_back(in[0].nodes[i]);
            const int64_t label = labels[row++];
            wrong = wrong || label < 0 || label >= static_cast<int64_t>(x.size());
            if (wrong) return;
            const std::vector<int> y = graph_->Softmax(dtype, x, true);
            result.nodes.push_back(graph_->Linear(dtype, {{y[static_cast<size_t>(label)], -1}}));
          });
      if (wrong) return No("cross_entropy: a label out of range");
      return result;
    }
    case Op::kOneHot: {
      CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> indices, Whole(in[0]));
      result.shape = in[0].shape;
      result.shape.push_back(s.ints[0]);
      for (const int64_t i : indices) {
        if (i < 0 || i >= s.ints[0]) return No("one_hot: an index out of range");
        for (int64_t k = 0; k < s.ints[0]; ++k) {
          result.nodes.push_back(graph_->Constant(out.dtype, k == i ? 1 : 0));
        }
      }
      return result;
    }
    case Op::kTake: {
      const int64_t axis = axis_of(0);
      if (!has_axis(axis, in[0].shape)) return No("take");
      CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> indices, Whole(in[1]));
      const auto a = static_cast<size_t>(axis);
      for (const int64_t i : indices) {
        if (i < 0 || i >= in[0].shape[a]) return No("take: an index out of range");
      }
      Dims shape(in[0].shape.begin(), in[0].shape.begin() + axis);
      shape.insert(shape.end(), in[1].shape.begin(), in[1].shape.end());
      shape.insert(shape.end(), in[0].shape.begin() + axis + 1, in[0].shape.end());
      const size_t n = in[1].shape.size();
      return Mapped(in[0], shape, [&](const Dims& index) {
        const Dims at(index.begin() + axis, index.begin() + axis + static_cast<int64_t>(n));
        Dims from(index.begin(), index.begin() + axis);
        from.push_back(indices[Offset(in[1].shape, at)]);
        from.insert(from.end(), index.begin() + axis + static_cast<int64_t>(n), index.end());
        return from;
      });
    }
    case Op::kScatterAdd: {
      const int64_t size = s.ints[0];
      const int64_t axis = s.ints[1];
      CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> indices, Whole(in[1]));
      for (const int64_t i : indices) {
        if (i < 0 || i >= size) return No("scatter_add: an index out of range");
      }
      const auto n = static_cast<int64_t>(in[1].shape.size());
      if (axis < 0 || axis + n > static_cast<int64_t>(in[0].shape.size())) return No("scatter_add");
      if (Dims(in[0].shape.begin() + axis, in[0].shape.begin() + axis + n) != in[1].shape) {
        return No("scatter_add");
      }
      result.shape.assign(in[0].shape.begin(), in[0].shape.begin() + axis);
      result.shape.push_back(size);
      result.shape.insert(result.shape.end(), in[0].shape.begin() + axis + n, in[0].shape.end());
      std::vector<Edges> sums(static_cast<size_t>(Elements(result.shape)));
      size_t i = 0;
      for (const Dims& index : IndicesOf(in[0].shape)) {
        const Dims at(index.begin() + axis, index.begin() + axis + n);
        Dims to(index.begin(), index.begin() + axis);
        to.push_back(indices[Offset(in[1].shape, at)]);
        to.insert(to.end(), index.begin() + axis + n, index.end());
        sums[Offset(result.shape, to)].push_back({in[0].nodes[i++], 1});
      }
      return Summed(result, sums);
    }
    case Op::kTakeAlong: {
      const int64_t axis = axis_of(0);
      Dims check = in[1].shape;
      if (!has_axis(axis, in[0].shape) || check.size() != in[0].shape.size()) {
        return No("take_along");
      }
      const auto a = static_cast<size_t>(axis);
      check[a] = in[0].shape[a];
      if (check != in[0].shape) return No("take_along");
      CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> indices, Whole(in[1]));
      for (const int64_t i : indices) {
        if (i < 0 || i >= in[0].shape[a]) return No("take_along: an index out of range");
      }
      return Mapped(in[0], in[1].shape, [&](Dims index) {
        index[a] = indices[Offset(in[1].shape, index)];
        return index;
      });
    }
    case Op::kScatterAddAlong: {
      const int64_t size = s.ints[0];
      const int64_t axis = s.ints[1];
      if (!has_axis(axis, in[0].shape) || in[1].shape != in[0].shape)
        return No("scatter_add_along");
      CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> indices, Whole(in[1]));
      for (const int64_t i : indices) {
        if (i < 0 || i >= size) return No("scatter_add_along: an index out of range");
      }
      result.shape = in[0].shape;
      result.shape[static_cast<size_t>(axis)] = size;
      std::vector<Edges> sums(static_cast<size_t>(Elements(result.shape)));
      size_t i = 0;
      for (Dims index : IndicesOf(in[0].shape)) {
        index[static_cast<size_t>(axis)] = indices[i];
        sums[Offset(result.shape, index)].push_back({in[0].nodes[i++], 1});
      }
      return Summed(result, sums);
    }
    case Op::kSort:
    case Op::kArgSort:
      return Sorted(s, in[0], out);
    case Op::kCumSum: {
      const int64_t axis = axis_of(0);
      if (!has_axis(axis, in[0].shape) || dtype == DType::kBool) return No("cum_sum");
      result.shape = in[0].shape;
      std::vector<Edges> sums(in[0].nodes.size());
      ForEachLine(in[0].shape, axis, [&](std::vector<size_t> line) {
        if (s.flag) std::reverse(line.begin(), line.end());
        Edges sum;
        for (const size_t i : line) {
          sum.push_back({in[0].nodes[i], 1});
          sums[i] = sum;
        }
      });
      return Summed(result, sums);
    }
    case Op::kConv2d:
    case Op::kConvTranspose2d:
      return Convolved(s, in[0], in[1], out.shape);
    case Op::kMaxPool2d:
    case Op::kAvgPool2d:
    case Op::kAdaptiveAvgPool2d:
      return Pooled(s, in[0], out.shape);
    case Op::kLinear:
      return Linear(in[0], in[1], in[2]);
    case Op::kLayerNorm:
    case Op::kGroupNorm:
    case Op::kBatchNorm:
      return Normalized(s, in[0], in[1], in[2]);
    default:
      result.shape = in[0].shape;
      for (const int n : in[0].nodes)
        CHORUS_RETURN_IF_ERROR(Append(graph_->Unary(s, dtype, n), &result.nodes));
      return result;
  }
}

absl::StatusOr<Array> TensorOps::Summed(Array result, const std::vector<Edges>& sums) {
  for (const Edges& sum : sums) {
    if (IsFloating(result.dtype)) {
      result.nodes.push_back(graph_->Linear(result.dtype, sum));
      continue;
    }
    uint64_t bits = 0;
    double error = 0;
    for (const Edge& edge : sum) {
      bits += Bits(graph_->at(edge.node));
      error = std::max(error, graph_->at(edge.node).error);
    }
    result.nodes.push_back(graph_->Integer(result.dtype, error, bits));
  }
  return result;
}

absl::StatusOr<Array> TensorOps::Reduction1(const Statement& s, const Array& x, const Value& out) {
  const DType dtype = x.dtype;
  std::vector<bool> reduced(x.shape.size(), s.number == 1);
  if (s.number != 1) {
    for (const int64_t axis : s.ints) {
      const int64_t a = Axis(axis, x.shape);
      if (a < 0 || a >= static_cast<int64_t>(x.shape.size())) return No("reduce: axis");
      if (reduced[static_cast<size_t>(a)]) return No("reduce: axis twice");
      reduced[static_cast<size_t>(a)] = true;
    }
  }
  Dims kept;
  Array result{out.dtype, {}, {}};
  for (size_t d = 0; d < x.shape.size(); ++d) {
    kept.push_back(reduced[d] ? 1 : x.shape[d]);
    if (!reduced[d] || s.flag) result.shape.push_back(kept.back());
  }
  std::vector<std::vector<int>> sets(static_cast<size_t>(Elements(kept)));
  size_t i = 0;
  for (Dims index : IndicesOf(x.shape)) {
    for (size_t d = 0; d < index.size(); ++d) {
      if (reduced[d]) index[d] = 0;
    }
    sets[Offset(kept, index)].push_back(x.nodes[i++]);
  }
  if (dtype == DType::kBool && s.op != Op::kArgMax) return No("reduce: bool");
  for (const std::vector<int>& set : sets) {
    if (s.op == Op::kArgMax) {
      if (set.empty()) return No("arg_max of nothing");
      size_t best = 0;
      for (size_t k = 1; k < set.size(); ++k) {
        if (graph_->at(set[k]).value > graph_->at(set[best]).value) best = k;
      }
      bool known = true;
      for (size_t k = 0; k < set.size(); ++k) {
        const double error = graph_->at(set[k]).error + graph_->at(set[best]).error;
        if (k != best && error > 0 &&
            graph_->at(set[best]).value - graph_->at(set[k]).value <= error)
          known = false;
      }
      result.nodes.push_back(
          graph_->Constant(DType::kI64, static_cast<double>(best), known ? 0 : kUnknown));
      continue;
    }
    if (s.op == Op::kMean && (set.empty() || !IsFloating(dtype))) return No("mean of nothing");
    if (set.empty()) {
      if (s.op == Op::kMax || s.op == Op::kMin) return No("max of nothing");
      result.nodes.push_back(graph_->Constant(dtype, s.op == Op::kProduct ? 1 : 0));
      continue;
    }
    const Reduction reduction = s.op == Op::kSum    ? Reduction::kSum
                                : s.op == Op::kMean ? Reduction::kAvg
                                : s.op == Op::kMax  ? Reduction::kMax
                                : s.op == Op::kMin  ? Reduction::kMin
                                                    : Reduction::kProduct;
    CHORUS_RETURN_IF_ERROR(Append(graph_->Reduced(reduction, dtype, set, {}), &result.nodes));
  }
  return result;
}

absl::StatusOr<Array> TensorOps::Sorted(const Statement& s, const Array& x, const Value& out) {
  const int64_t axis = Axis(s.ints[0], x.shape);
  if (axis < 0 || axis >= static_cast<int64_t>(x.shape.size())) return No("sort: that axis");
  const auto a = static_cast<size_t>(axis);
  if (s.ints[1] < 0 || s.ints[1] > x.shape[a]) return No("sort: so many");
  Array result{out.dtype, x.shape, {}};
  // All are sorted, and the first so many are taken.
  result.nodes.resize(x.nodes.size());
  ForEachLine(x.shape, axis, [&](const std::vector<size_t>& line) {
    const auto value = [&](int64_t i) {
      return graph_->at(x.nodes[line[static_cast<size_t>(i)]]).value;
    };
    const auto error = [&](int64_t i) {
      return graph_->at(x.nodes[line[static_cast<size_t>(i)]]).error;
    };
    std::vector<int64_t> order;
    for (size_t i = 0; i < line.size(); ++i) order.push_back(static_cast<int64_t>(i));
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
      return s.flag ? value(i) > value(j) : value(i) < value(j);
    });
    bool known = true;
    double largest = 0;
    Edges shares;
    for (size_t i = 0; i < order.size(); ++i) {
      largest = std::max(largest, error(order[i]));
      shares.push_back({x.nodes[line[i]], kNoShare});
      if (i == 0) continue;
      const double both = error(order[i]) + error(order[i - 1]);
      if (both > 0 && std::fabs(value(order[i]) - value(order[i - 1])) <= both) known = false;
    }
    for (size_t i = 0; i < order.size(); ++i) {
      int& node = result.nodes[line[i]];
      if (s.op == Op::kArgSort) {
        node = graph_->Constant(DType::kI64, static_cast<double>(order[i]), known ? 0 : kUnknown);
      } else if (known) {
        node = graph_->Copy(x.nodes[line[static_cast<size_t>(order[i])]]);
      } else if (IsFloating(x.dtype)) {
        // Whichever it is, it is no further off than any of them.
        node = graph_->Chosen(x.dtype, value(order[i]), largest, shares);
      } else {
        node = graph_->Constant(x.dtype, value(order[i]), largest);
      }
    }
  });
  return Sliced(result, axis, 0, s.ints[1]);
}

absl::StatusOr<Array> TensorOps::MatMul(const Array& a, const Array& b) {
  if (a.shape.size() < 2 || b.shape.size() < 2 || a.dtype != b.dtype) return No("matmul");
  const int64_t m = a.shape[a.shape.size() - 2];
  const int64_t k = a.shape.back();
  const int64_t n = b.shape.back();
  if (b.shape[b.shape.size() - 2] != k) return No("matmul");
  const Dims left(a.shape.begin(), a.shape.end() - 2);
  const Dims right(b.shape.begin(), b.shape.end() - 2);
  Array result{a.dtype, {}, {}};
  if (!BroadcastShapes(left, right, &result.shape)) return No("matmul");
  const Dims leading = result.shape;
  result.shape.push_back(m);
  result.shape.push_back(n);
  for (const Dims& index : IndicesOf(leading)) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        Edges sum;
        uint64_t bits = 0;
        for (int64_t l = 0; l < k; ++l) {
          Dims x = Stretched(left, index);
          Dims y = Stretched(right, index);
          x.insert(x.end(), {i, l});
          y.insert(y.end(), {l, j});
          const int p = a.nodes[Offset(a.shape, x)];
          const int q = b.nodes[Offset(b.shape, y)];
          if (IsFloating(a.dtype)) {
            sum.push_back({graph_->Mul(a.dtype, p, q), 1});
          } else {
            bits += Bits(graph_->at(p)) * Bits(graph_->at(q));
          }
        }
        result.nodes.push_back(IsFloating(a.dtype) ? graph_->Linear(a.dtype, sum)
                                                   : graph_->Integer(a.dtype, 0, bits));
      }
    }
  }
  return result;
}

absl::StatusOr<Array> TensorOps::Linear(const Array& x, const Array& weight, const Array& bias) {
  const Dims& of = weight.shape;
  if (!IsFloating(x.dtype) || weight.dtype != x.dtype || bias.dtype != x.dtype || of.size() != 2 ||
      x.shape.empty() || x.shape.back() != of[1] || bias.shape != Dims{of[0]}) {
    return No("linear: types");
  }
  Array result{x.dtype, x.shape, {}};
  result.shape.back() = of[0];
  for (const Dims& at : IndicesOf(result.shape)) {
    Edges sum;
    for (int64_t k = 0; k < of[1]; ++k) {
      Dims from = at;
      from.back() = k;
      const int product = graph_->Mul(x.dtype, x.nodes[Offset(x.shape, from)],
                                      weight.nodes[Offset(of, {at.back(), k})]);
      sum.push_back({product, 1});
    }
    const int shift = bias.nodes[static_cast<size_t>(at.back())];
    CHORUS_RETURN_IF_ERROR(Append(
        graph_->Binary(Op::kAdd, x.dtype, graph_->Linear(x.dtype, sum), shift), &result.nodes));
  }
  return result;
}

absl::StatusOr<Array> TensorOps::Normalized(const Statement& s, const Array& x, const Array& weight,
                                            const Array& bias) {
  constexpr double kEpsilon = 1e-5;  // the layers'
  const bool over_last = s.op == Op::kLayerNorm;
  if (!IsFloating(x.dtype) || weight.dtype != x.dtype || bias.dtype != x.dtype ||
      x.shape.size() < (over_last ? 1 : 2)) {
    return No("norm: types");
  }
  // How many elements of x, one behind the other, have one weight.
  const int64_t weights = over_last ? x.shape.back() : x.shape[1];
  const int64_t plane = over_last ? 1 : Elements(Dims(x.shape.begin() + 2, x.shape.end()));
  if (weight.shape != Dims{weights} || bias.shape != weight.shape) return No("norm: weights");
  if (Elements(x.shape) == 0) return No("norm: of nothing");
  const auto weight_of = [&](size_t i) {
    return static_cast<size_t>(static_cast<int64_t>(i) / plane % weights);
  };
  const int64_t of_row = over_last ? weights : plane * weights / (s.ints.empty() ? 1 : s.ints[0]);
  std::map<size_t, std::vector<size_t>> rows;
  for (size_t i = 0; i < x.nodes.size(); ++i) {
    const size_t row = s.op == Op::kBatchNorm ? weight_of(i) : i / static_cast<size_t>(of_row);
    rows[row].push_back(i);
  }
  if (s.op == Op::kBatchNorm && rows.begin()->second.size() < 2) return No("batch_norm: of one");

  Array result = x;
  absl::Status status;
  const auto keep = [&status](const absl::StatusOr<int>& node) {
    status.Update(node.status());
    return node.ok() ? *node : 0;
  };
  const auto mean = [&](const std::vector<int>& of) {
    return keep(graph_->Reduced(Reduction::kAvg, x.dtype, of, {}));
  };
  for (const auto& [number, elements] : rows) {
    std::vector<int> row, squares;
    for (const size_t i : elements) row.push_back(x.nodes[i]);
    const int middle = mean(row);
    for (int& node : row) {
      node = keep(graph_->Binary(Op::kSub, x.dtype, node, middle));
      squares.push_back(graph_->Mul(x.dtype, node, node));
    }
    Statement step;
    step.op = Op::kAddNumber;
    step.number = kEpsilon;
    const int shifted = keep(graph_->Unary(step, x.dtype, mean(squares)));
    step.op = Op::kRsqrt;
    const int scale = keep(graph_->Unary(step, x.dtype, shifted));
    for (size_t i = 0; i < elements.size(); ++i) {
      const size_t w = weight_of(elements[i]);
      const int y = graph_->Mul(x.dtype, graph_->Mul(x.dtype, row[i], scale), weight.nodes[w]);
      result.nodes[elements[i]] = keep(graph_->Binary(Op::kAdd, x.dtype, y, bias.nodes[w]));
    }
  }
  if (!status.ok()) return status;
  return result;
}

absl::StatusOr<Array> TensorOps::Convolved(const Statement& s, const Array& x, const Array& weight,
                                           const Dims& shape) {
  if (x.shape.size() != 4 || weight.shape.size() != 4 || shape.size() != 4 ||
      x.dtype != weight.dtype || !IsFloating(x.dtype)) {
    return No("convolution: types");
  }
  // Each tap joins an element of the larger image, which is padded, to one of the smaller.
  const bool transposed = s.op == Op::kConvTranspose2d;
  const Dims& large = transposed ? shape : x.shape;
  const Dims& small = transposed ? x.shape : shape;
  const int64_t groups = s.ints[6];
  if (groups < 1 || large[0] != small[0] || large[1] != weight.shape[1] * groups ||
      small[1] != weight.shape[0] || small[1] % groups != 0) {
    return No("convolution: channels");
  }
  for (size_t d = 0; d < 2; ++d) {
    const int64_t stride = s.ints[d];
    const int64_t padded = large[2 + d] + 2 * s.ints[2 + d];
    const int64_t window = s.ints[4 + d] * (weight.shape[2 + d] - 1) + 1;
    const int64_t added = transposed ? s.ints[7 + d] : 0;
    const bool fits = transposed
                          ? padded == (small[2 + d] - 1) * stride + window + added && added < stride
                          : padded >= window && small[2 + d] == (padded - window) / stride + 1;
    if (!fits) return No("convolution: sizes");
  }
  std::vector<Edges> sums(static_cast<size_t>(Elements(shape)));
  for (const Dims& at : IndicesOf(small)) {
    for (const Dims& tap : IndicesOf({weight.shape[1], weight.shape[2], weight.shape[3]})) {
      const int64_t group = at[1] / (small[1] / groups);
      const Dims there = {at[0], group * weight.shape[1] + tap[0],
                          at[2] * s.ints[0] - s.ints[2] + tap[1] * s.ints[4],
                          at[3] * s.ints[1] - s.ints[3] + tap[2] * s.ints[5]};
      if (there[2] < 0 || there[2] >= large[2] || there[3] < 0 || there[3] >= large[3]) continue;
      const int factor = weight.nodes[Offset(weight.shape, {at[1], tap[0], tap[1], tap[2]})];
      const Dims& from = transposed ? at : there;
      const Dims& to = transposed ? there : at;
      const int product = graph_->Mul(x.dtype, x.nodes[Offset(x.shape, from)], factor);
      sums[Offset(shape, to)].push_back({product, 1});
    }
  }
  return Summed(Array{x.dtype, shape, {}}, sums);
}

int TensorOps::Largest(DType dtype, const std::vector<int>& of) {
  size_t best = 0;
  for (size_t i = 1; i < of.size(); ++i) {
    if (graph_->at(of[i]).value > graph_->at(of[best]).value) best = i;
  }
  bool known = true;
  double error = 0;
  Edges shares;
  for (size_t i = 0; i < of.size(); ++i) {
    const double both = graph_->at(of[i]).error + graph_->at(of[best]).error;
    const double distance = graph_->at(of[best]).value - graph_->at(of[i]).value;
    if (i != best && both > 0 && distance <= both) known = false;
    error = std::max(error, graph_->at(of[i]).error);
    shares.push_back({of[i], kNoShare});
  }
  if (known) return graph_->Copy(of[best]);
  const double value = graph_->at(of[best]).value;
  // Whichever it is, it is no further off than any of them.
  return IsFloating(dtype) ? graph_->Chosen(dtype, value, error, shares)
                           : graph_->Constant(dtype, value, error);
}

absl::StatusOr<Array> TensorOps::Pooled(const Statement& s, const Array& x, const Dims& shape) {
  const bool adaptive = s.op == Op::kAdaptiveAvgPool2d;
  const bool largest = s.op == Op::kMaxPool2d;
  if (x.shape.size() != 4 || shape.size() != 4 || shape[0] != x.shape[0] ||
      shape[1] != x.shape[1] || x.dtype == DType::kBool || (!largest && !IsFloating(x.dtype))) {
    return No("pool: types");
  }
  // By dimension and index of the result: the indices of x under the window; -1 is padding.
  std::vector<Dims> windows[2];
  for (size_t d = 0; d < 2; ++d) {
    const int64_t size = x.shape[2 + d];
    for (int64_t i = 0; i < shape[2 + d]; ++i) {
      windows[d].emplace_back();
      if (adaptive) {
        const int64_t to = shape[2 + d];
        for (int64_t at = i * size / to; at < ((i + 1) * size + to - 1) / to; ++at) {
          windows[d].back().push_back(at);
        }
        continue;
      }
      const int64_t dilation = largest ? s.ints[6 + d] : 1;
      for (int64_t tap = 0; tap < s.ints[d]; ++tap) {
        const int64_t at = i * s.ints[2 + d] - s.ints[4 + d] + tap * dilation;
        windows[d].back().push_back(at < size ? at : -1);
      }
      // Of no images, too.
      const Dims& window = windows[d].back();
      if (*std::max_element(window.begin(), window.end()) < 0)
        return No("pool: a window of padding");
    }
    if (adaptive) continue;
    const int64_t window = (largest ? s.ints[6 + d] : 1) * (s.ints[d] - 1) + 1;
    const int64_t padded = size + 2 * s.ints[4 + d];
    if (2 * s.ints[4 + d] > s.ints[d] || padded < window ||
        shape[2 + d] != (padded - window) / s.ints[2 + d] + 1) {
      return No("pool: sizes");
    }
  }
  Array result{x.dtype, shape, {}};
  for (const Dims& at : IndicesOf(shape)) {
    std::vector<int> under;
    for (const int64_t row : windows[0][static_cast<size_t>(at[2])]) {
      for (const int64_t column : windows[1][static_cast<size_t>(at[3])]) {
        if (row >= 0 && column >= 0) {
          under.push_back(x.nodes[Offset(x.shape, {at[0], at[1], row, column})]);
        } else if (!largest && s.flag) {
          under.push_back(graph_->Constant(x.dtype, 0));
        }
      }
    }
    if (largest) {
      result.nodes.push_back(Largest(x.dtype, under));
    } else {
      CHORUS_RETURN_IF_ERROR(
          Append(graph_->Reduced(Reduction::kAvg, x.dtype, under, {}), &result.nodes));
    }
  }
  return result;
}

absl::StatusOr<Array> TensorOps::Reduced(Reduction reduction, const Arrays& of,
                                         const std::vector<double>& factors) {
  Array result{of[0].dtype, of[0].shape, {}};
  for (const Array& x : of) {
    if (x.shape != of[0].shape || x.dtype != of[0].dtype) return No("reduce: types");
  }
  for (size_t e = 0; e < of[0].nodes.size(); ++e) {
    std::vector<int> elements;
    for (const Array& x : of) elements.push_back(x.nodes[e]);
    CHORUS_RETURN_IF_ERROR(
        Append(graph_->Reduced(reduction, of[0].dtype, elements, factors), &result.nodes));
  }
  return result;
}

}  // namespace random_programs
}  // namespace chorus
