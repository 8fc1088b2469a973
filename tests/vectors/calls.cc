#include "tests/vectors/calls.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>

#include "core/base/error.h"
#include "core/tensor/half.h"

namespace chorus {
namespace vectors {
namespace {

// Calls `function` with a value of the C++ type of `dtype`.
template <typename Function>
auto WithTypeOf(DType dtype, const Function& function) -> decltype(function(double())) {
  switch (dtype) {
    case DType::kF16:
      return function(F16());
    case DType::kBF16:
      return function(BF16());
    case DType::kF32:
      return function(float());
    case DType::kI8:
      return function(int8_t());
    case DType::kU8:
      return function(uint8_t());
    case DType::kI16:
      return function(int16_t());
    case DType::kI32:
      return function(int32_t());
    case DType::kI64:
      return function(int64_t());
    case DType::kBool:
      return function(bool());
    default:  // vectors have no others
      return function(double());
  }
}

Tensor UploadLeaf(const DeviceRef& device, const Array& array, bool requires_grad) {
  Tensor tensor = WithTypeOf(array.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto size = static_cast<size_t>(array.size());
    const auto values = std::make_unique<T[]>(size);
    std::memcpy(values.get(), array.bytes.data(), array.bytes.size());
    return FromHost<T>(device, values.get(), size, array.shape);
  });
  if (requires_grad && array.floating()) tensor.RequireGrad();
  return tensor;
}

template <typename T>
Array ArrayOf(const Shape& shape, const std::vector<T>& values) {
  Array array;
  array.dtype = DTypeOf<T>();
  array.shape = shape;
  for (const T value : values) {
    array.bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  return array;
}

// Another layout than contiguous: the result of an op that turns or stretches what was uploaded.
// `requires_grad` is of the uploaded leaf, so the result has a gradient too.
Tensor UploadAs(const DeviceRef& device, const Array& array, Layout layout, bool requires_grad) {
  switch (layout) {
    case Layout::kTransposed: {
      std::vector<int64_t> reversed(array.shape.size());
      std::iota(reversed.rbegin(), reversed.rend(), 0);
      return Transpose(UploadLeaf(device, Transposed(array), requires_grad), reversed);
    }
    case Layout::kExpanded:
      return Expand(UploadLeaf(device, Unexpanded(array), requires_grad), array.shape);
    case Layout::kContiguous:
      break;
  }
  return UploadLeaf(device, array, requires_grad);
}

// Sizes along `dim` of each rank's `piece`-th input; empty where all are equal, or of no
// dimensions.
std::vector<int64_t> RowsOf(const Vector& v, size_t piece, int64_t dim) {
  std::vector<int64_t> rows;
  for (const std::vector<Array>& mine : v.inputs) {
    const std::vector<int64_t>& shape = mine[piece].shape;
    if (shape.empty()) return {};
    rows.push_back(
        shape[static_cast<size_t>(dim < 0 ? dim + static_cast<int64_t>(shape.size()) : dim)]);
  }
  return rows;
}

bool AllEqual(const std::vector<int64_t>& rows) {
  return std::adjacent_find(rows.begin(), rows.end(), std::not_equal_to<>()) == rows.end();
}

// What the SDK is told: nothing where all are equal, which it takes for granted.
std::vector<int64_t> WhereUneven(std::vector<int64_t> rows) {
  if (AllEqual(rows)) rows.clear();
  return rows;
}

// Whether all pieces of all ranks have as many rows.
bool EvenPieces(const Vector& v) {
  std::vector<int64_t> all;
  for (size_t k = 0; k < v.group.size(); ++k) {
    const std::vector<int64_t> rows = RowsOf(v, k, 0);
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return AllEqual(all);
}

std::vector<Tensor> CallAllToAllSingle(const Vector& v, int rank, const Group& group,
                                       const Tensor& x) {
  std::vector<int64_t> all;
  std::vector<int64_t> receive;
  for (const std::vector<int64_t>& from : v.attributes.splits) {
    all.insert(all.end(), from.begin(), from.end());
    receive.push_back(from[static_cast<size_t>(rank)]);
  }
  if (AllEqual(all)) return {AllToAllSingle(x, group)};
  return {AllToAllSingle(x, group, v.attributes.splits[static_cast<size_t>(rank)], receive)};
}

std::vector<Tensor> CallAsRank(const Vector& v, int rank, const Group& group,
                               const std::vector<Tensor>& x) {
  const Attributes& a = v.attributes;
  const auto r = static_cast<size_t>(rank);
  const ReduceOp reduce =
      a.premul.empty() ? ReduceOp(a.reduction) : ReduceOp::PremulSum(a.premul[r]);
  switch (v.op) {
    case Op::kBroadcast:
      return {Broadcast(x[0], a.root, group)};
    case Op::kReduce:
      return {Reduce(x[0], a.root, group, reduce)};
    case Op::kAllReduce:
      return {AllReduce(x[0], group, reduce)};
    case Op::kReduceScatter:
      return {ReduceScatter(x, group, reduce)};
    case Op::kReduceScatterTensor:
      return {ReduceScatterTensor(x[0], group, reduce, WhereUneven(a.splits[0]), a.dim)};
    case Op::kAllGather:
      return AllGather(x[0], group, WhereUneven(RowsOf(v, 0, 0)));
    case Op::kAllGatherIntoTensor:
      return {AllGatherIntoTensor(x[0], group, WhereUneven(RowsOf(v, 0, a.dim)), a.dim)};
    case Op::kGather:
      return Gather(x[0], a.root, group, WhereUneven(RowsOf(v, 0, 0)));
    case Op::kScatter: {
      const Array& piece = v.outputs[r][0];
      return {Scatter(x, piece.dtype, piece.shape, a.root, group)};
    }
    case Op::kAllToAll:
      return AllToAll(x, group, EvenPieces(v) ? std::vector<int64_t>() : RowsOf(v, r, 0));
    case Op::kAllToAllSingle:
      return CallAllToAllSingle(v, rank, group, x[0]);
    case Op::kBroadcastCoalesced:
    case Op::kReduceAddCoalesced:
    case Op::kParallelScatter:
    case Op::kParallelGather:
      break;
  }
  return {};
}

class RankCaller : public Caller {
 public:
  RankCaller(const Vector& v, int rank, const Group& group, const DeviceRef& device)
      : Caller(v, {rank}), group_(group), device_(device) {}

  DeviceRef device(size_t) const override { return device_; }
  Tensors Call(const Tensors& x) override { return {CallAsRank(v_, ranks_[0], group_, x[0])}; }

 private:
  const Group& group_;
  const DeviceRef device_;
};

class DevicesCaller : public Caller {
 public:
  DevicesCaller(const Vector& v, const parallel::DeviceGroup& devices)
      : Caller(v, v.group), devices_(devices) {}

  DeviceRef device(size_t index) const override { return devices_.device(static_cast<int>(index)); }

  Tensors Inputs(const std::vector<bool>& requires_grad) override {
    if (v_.op != Op::kParallelScatter || !v_.attributes.host) return Caller::Inputs(requires_grad);
    const Array& array = v_.inputs[0][0];
    host_ = WithTypeOf(array.dtype, [&](auto zero) {
      using T = decltype(zero);
      std::vector<T> values;
      for (int64_t i = 0; i < array.size(); ++i) {
        T value;
        std::memcpy(&value, array.element(i).data(), sizeof(value));
        values.push_back(value);
      }
      return parallel::HostTensor::Of<T>(std::move(values), array.shape);
    });
    if (requires_grad[0] && array.floating()) host_.RequireGrad(devices_);
    Tensors x(v_.group.size());
    x[0].push_back(host_.tensor());
    return x;
  }

  Tensors Call(const Tensors& x) override {
    const Attributes& a = v_.attributes;
    const auto root = static_cast<size_t>(a.root);
    Tensors y(v_.group.size());
    const auto by_device = [&y](const std::vector<Tensor>& chunks) {
      for (size_t r = 0; r < chunks.size(); ++r) y[r].push_back(chunks[r]);
    };
    std::vector<Tensor> pieces;
    for (const std::vector<Tensor>& mine : x) pieces.insert(pieces.end(), mine.begin(), mine.end());
    switch (v_.op) {
      case Op::kBroadcastCoalesced:
        return parallel::BroadcastCoalesced(x[root], devices_, a.buffer_size);
      case Op::kReduceAddCoalesced:
        y[root] = parallel::ReduceAddCoalesced(x, devices_, a.root, a.buffer_size);
        break;
      case Op::kParallelScatter: {
        const std::vector<int64_t> sizes = a.sizes.value_or(std::vector<int64_t>());
        by_device(a.host ? parallel::Scatter(host_, devices_, sizes, a.dim)
                         : parallel::Scatter(x[root][0], devices_, sizes, a.dim));
        break;
      }
      default:  // the last of the four
        if (a.host) {
          host_ = parallel::GatherToHost(pieces, devices_, a.dim);
          y[0].push_back(host_.tensor());
        } else {
          y[root].push_back(parallel::Gather(pieces, devices_, a.root, a.dim));
        }
        break;
    }
    return y;
  }

  absl::StatusOr<std::vector<Array>> Outputs(size_t index, const std::vector<Tensor>& y) override {
    if (v_.op != Op::kParallelGather || !v_.attributes.host || index != 0) {
      return Caller::Outputs(index, y);
    }
    CHORUS_RETURN_IF_ERROR(host_.status());
    CHORUS_RETURN_IF_ERROR(y[0].Wait());  // what gradients go through
    CHORUS_ASSIGN_OR_RETURN(Array array,
                            WithTypeOf(host_.dtype(), [&](auto zero) -> absl::StatusOr<Array> {
                              using T = decltype(zero);
                              CHORUS_ASSIGN_OR_RETURN(const std::vector<T> values, host_.Read<T>());
                              return ArrayOf(host_.shape(), values);
                            }));
    return std::vector<Array>{std::move(array)};
  }

 private:
  const parallel::DeviceGroup devices_;
  parallel::HostTensor host_;  // what is scattered from or gathered to the CPU
};

}  // namespace

Tensor Caller::Upload(size_t index, const Array& array, Layout layout) const {
  return UploadAs(device(index), array, layout, false);
}

Tensors Caller::Inputs(const std::vector<bool>& requires_grad) {
  Tensors x(ranks_.size());
  for (size_t index = 0; index < ranks_.size(); ++index) {
    const auto r = static_cast<size_t>(ranks_[index]);
    for (const Array& array : v_.inputs[r]) {
      x[index].push_back(UploadAs(device(index), array, v_.x_layout[r], requires_grad[r]));
    }
  }
  return x;
}

absl::StatusOr<std::vector<Array>> Caller::Outputs(size_t, const std::vector<Tensor>& y) {
  std::vector<Array> arrays;
  for (const Tensor& result : y) {
    if (result.absent()) continue;
    CHORUS_ASSIGN_OR_RETURN(Array array, Download(result));
    arrays.push_back(std::move(array));
  }
  return arrays;
}

absl::StatusOr<Array> Download(const Tensor& tensor) {
  CHORUS_RETURN_IF_ERROR(tensor.Wait());
  return WithTypeOf(tensor.dtype(), [&](auto zero) -> absl::StatusOr<Array> {
    using T = decltype(zero);
    CHORUS_ASSIGN_OR_RETURN(const std::vector<T> values, tensor.Read<T>());
    return ArrayOf(tensor.shape(), values);
  });
}

std::unique_ptr<Caller> MakeRankCaller(const Vector& v, int rank, const Group& group,
                                       const DeviceRef& device) {
  return std::make_unique<RankCaller>(v, rank, group, device);
}

std::unique_ptr<Caller> MakeDevicesCaller(const Vector& v, const parallel::DeviceGroup& devices) {
  return std::make_unique<DevicesCaller>(v, devices);
}

}  // namespace vectors
}  // namespace chorus
