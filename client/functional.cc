#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/chorus.h"
#include "client/internal/core.h"
#include "client/internal/tape.h"
#include "core/base/error.h"

namespace chorus {
inline namespace sdk {
namespace {

NodeSpec Spec(const char* op, CallSite site, Attributes attributes = {}) {
  NodeSpec spec;
  spec.op = op;
  spec.attributes = std::move(attributes);
  spec.source = SourceOf(site);
  return spec;
}

Tensor Fail(const Tensor& like, const absl::Status& status, CallSite site) {
  return FailedTensor(like.defined() ? like.impl()->data->session : nullptr,
                      WithSource(status, SourceOf(site)));
}

bool IsUsable(const Tensor& x) { return x.defined() && !x.absent() && x.status().ok(); }

// The shape to which both stretch; an error where they do not meet.
absl::StatusOr<Shape> Broadcasted(const char* op, const Tensor& a, const Tensor& b) {
  const Shape& x = a.shape();
  const Shape& y = b.shape();
  Shape shape(std::max(x.size(), y.size()));
  for (size_t i = 0; i < shape.size(); ++i) {
    const size_t from_end = shape.size() - i;
    const int64_t m = from_end <= x.size() ? x[x.size() - from_end] : 1;
    const int64_t n = from_end <= y.size() ? y[y.size() - from_end] : 1;
    if (m != n && m != 1 && n != 1) {
      return BadType(absl::StrCat(op, ": expected shapes that broadcast, got ",
                                  a.impl()->data->info->type.ToString(), " and ",
                                  b.impl()->data->info->type.ToString()));
    }
    shape[i] = m == 1 ? n : m;
  }
  return shape;
}

Tensor Binary(const char* op, const Tensor& a, const Tensor& b, CallSite site) {
  if (!IsUsable(a) || !IsUsable(b) || a.shape() == b.shape()) {
    return ApplyLocal(Spec(op, site), {a, b});
  }
  const absl::StatusOr<Shape> shape = Broadcasted(op, a, b);
  if (!shape.ok()) return Fail(a, shape.status(), site);
  return ApplyLocal(Spec(op, site), {a.shape() == *shape ? a : Expand(a, *shape, site),
                                     b.shape() == *shape ? b : Expand(b, *shape, site)});
}

// A number beside a tensor: it travels with the run, so that another number is no other graph.
Tensor NumberLike(double value, const Tensor& like, CallSite site) {
  if (!IsUsable(like)) return like;
  InlineData bytes;
  const auto put = [&bytes](auto number) {
    const char* const begin = reinterpret_cast<const char*>(&number);
    bytes.bytes.assign(begin, begin + sizeof(number));
  };
  switch (like.dtype()) {
    case DType::kF32:
      put(static_cast<float>(value));
      break;
    case DType::kF64:
      put(value);
      break;
    case DType::kI64:
      if (value != static_cast<double>(static_cast<int64_t>(value))) {
        return Fail(
            like,
            BadType(absl::StrCat("expected a whole number beside a tensor of i64, got ", value)),
            site);
      }
      put(static_cast<int64_t>(value));
      break;
    default:
      return Fail(like,
                  Unsupported(absl::StrCat("numbers beside tensors of ",
                                           like.impl()->data->info->type.ToString())),
                  site);
  }
  const std::shared_ptr<SessionCore>& session = like.impl()->data->session;
  auto data = std::make_shared<TensorData>(session);
  {
    SessionLock lock(session.get());
    if (!lock.status().ok()) return FailedTensor(session, lock.status());
    data->info = session->Intern(TensorType(like.dtype(), {}));
  }
  data->device_slot = like.impl()->data->device_slot;
  data->inline_data = std::move(bytes);
  data->state.store(TensorData::State::kInline, std::memory_order_release);
  return MakeTensor(std::move(data));
}

template <typename Op>
Tensor Operate(const Operand& a, const Operand& b, const Op& op) {
  const CallSite site = a.is_value() ? b.site() : a.site();
  if (a.is_value()) return op(NumberLike(a.value(), b.tensor(), site), b.tensor(), site);
  if (b.is_value()) return op(a.tensor(), NumberLike(b.value(), a.tensor(), site), site);
  return op(a.tensor(), b.tensor(), site);
}

absl::StatusOr<int64_t> Axis(const char* op, const Tensor& x, int64_t axis) {
  const int64_t rank = static_cast<int64_t>(x.shape().size());
  if (axis < -rank || axis >= rank) {
    return BadType(absl::StrCat(op, ": expected an axis from ", -rank, " to ", rank - 1, " of ",
                                x.impl()->data->info->type.ToString(), ", got ", axis));
  }
  return axis < 0 ? axis + rank : axis;
}

absl::Span<const Tensor> Only(const Tensor& x) { return absl::MakeConstSpan(&x, 1); }
Tensor One(absl::InlinedVector<Tensor, 1> results) { return std::move(results[0]); }

}  // namespace

// --- Collectives --------------------------------------------------------------------------------

Tensor AllReduce(const Tensor& x, const Group& group, Reduction reduction, CallSite site) {
  CollectiveCall call;
  call.kind = CollectiveKind::kAllReduce;
  call.reduction = reduction;
  call.site = site;
  return One(ApplyCollective(call, Only(x), group.member(), group.core()));
}

Tensor Broadcast(const Tensor& x, int root, const Group& group, CallSite site) {
  CollectiveCall call;
  call.kind = CollectiveKind::kBroadcast;
  call.root = root;
  call.site = site;
  // Off the root only the type counts.
  if (IsUsable(x) && group.rank() != root) {
    call.type = &x.impl()->data->info->type;
    return One(ApplyCollective(call, {}, group.member(), group.core()));
  }
  return One(ApplyCollective(call, Only(x), group.member(), group.core()));
}

Tensor Reduce(const Tensor& x, int root, const Group& group, Reduction reduction, CallSite site) {
  CollectiveCall call;
  call.kind = CollectiveKind::kReduce;
  call.root = root;
  call.reduction = reduction;
  call.site = site;
  return One(ApplyCollective(call, Only(x), group.member(), group.core()));
}

std::vector<Tensor> AllGather(const Tensor& x, const Group& group, CallSite site) {
  CollectiveCall call;
  call.kind = CollectiveKind::kAllGather;
  call.site = site;
  absl::InlinedVector<Tensor, 1> results =
      ApplyCollective(call, Only(x), group.member(), group.core());
  // A refused call carries its error in every place.
  if (!results[0].status().ok()) {
    return std::vector<Tensor>(std::max<size_t>(1, static_cast<size_t>(group.size())), results[0]);
  }
  return std::vector<Tensor>(std::make_move_iterator(results.begin()),
                             std::make_move_iterator(results.end()));
}

Tensor ReduceScatter(const std::vector<Tensor>& xs, const Group& group, Reduction reduction,
                     CallSite site) {
  CollectiveCall call;
  call.kind = CollectiveKind::kReduceScatter;
  call.reduction = reduction;
  call.site = site;
  return One(ApplyCollective(call, xs, group.member(), group.core()));
}

Tensor Send(const Tensor& x, int to, const Group& group, int64_t tag, CallSite site) {
  CollectiveCall call;
  call.kind = CollectiveKind::kSend;
  call.peer = to;
  call.tag = tag;
  call.site = site;
  return One(ApplyCollective(call, Only(x), group.member(), group.core()));
}

Tensor Recv(DType dtype, const Shape& shape, int from, const Group& group, int64_t tag,
            CallSite site) {
  CollectiveCall call;
  call.kind = CollectiveKind::kRecv;
  call.peer = from;
  call.tag = tag;
  call.site = site;
  TensorType type(dtype, {});
  for (const int64_t size : shape) type.dims.emplace_back(size);
  call.type = &type;
  return One(ApplyCollective(call, {}, group.member(), group.core()));
}

Tensor Barrier(const Group& group, CallSite site) {
  CollectiveCall call;
  call.kind = CollectiveKind::kBarrier;
  call.site = site;
  return One(ApplyCollective(call, {}, group.member(), group.core()));
}

// --- Local ops ----------------------------------------------------------------------------------

Tensor Full(const DeviceRef& device, DType dtype, const Shape& shape, double value, CallSite site) {
  TensorType type(dtype, {});
  for (const int64_t size : shape) type.dims.emplace_back(size);
  Attributes attributes = TypeAttributes(type);
  if (IsFloating(dtype)) {
    attributes.push_back({"value", value});
  } else {
    attributes.push_back({"value", static_cast<int64_t>(value)});
  }
  NodeSpec spec = Spec("fill", site, std::move(attributes));
  spec.device_slot = device.slot();
  return ApplyLocal(std::move(spec), {}, &device);
}

Tensor Zeros(const DeviceRef& device, DType dtype, const Shape& shape, CallSite site) {
  return Full(device, dtype, shape, 0, site);
}

Tensor Add(const Tensor& a, const Tensor& b, CallSite site) { return Binary("add", a, b, site); }
Tensor Sub(const Tensor& a, const Tensor& b, CallSite site) { return Binary("sub", a, b, site); }
Tensor Mul(const Tensor& a, const Tensor& b, CallSite site) { return Binary("mul", a, b, site); }
Tensor Neg(const Tensor& x, CallSite site) { return ApplyLocal(Spec("neg", site), {x}); }
Tensor MatMul(const Tensor& a, const Tensor& b, CallSite site) {
  return ApplyLocal(Spec("matmul", site), {a, b});
}
Tensor Relu(const Tensor& x, CallSite site) { return ApplyLocal(Spec("relu", site), {x}); }
Tensor Sin(const Tensor& x, CallSite site) { return ApplyLocal(Spec("sin", site), {x}); }
Tensor Cos(const Tensor& x, CallSite site) { return ApplyLocal(Spec("cos", site), {x}); }
Tensor Sum(const Tensor& x, CallSite site) { return ApplyLocal(Spec("sum", site), {x}); }

Tensor Sum(const Tensor& x, const std::vector<int64_t>& axes, bool keep_dims, CallSite site) {
  if (!IsUsable(x)) return ApplyLocal(Spec("sum", site), {x});
  // To the op, no axes mean all of them.
  if (axes.empty()) return Reshape(x, x.shape(), site);
  std::vector<int64_t> sorted;
  for (const int64_t axis : axes) {
    const absl::StatusOr<int64_t> checked = Axis("sum", x, axis);
    if (!checked.ok()) return Fail(x, checked.status(), site);
    sorted.push_back(*checked);
  }
  std::sort(sorted.begin(), sorted.end());
  Attributes attributes = {{"axes", std::move(sorted)}};
  if (keep_dims) attributes.push_back({"keep_dims", int64_t{1}});
  return ApplyLocal(Spec("sum", site, std::move(attributes)), {x});
}

Tensor Expand(const Tensor& x, const Shape& shape, CallSite site) {
  return ApplyLocal(Spec("expand", site, {{"dims", shape}}), {x});
}

Tensor Reshape(const Tensor& x, const Shape& shape, CallSite site) {
  return ApplyLocal(Spec("reshape", site, {{"dims", shape}}), {x});
}

Tensor Transpose(const Tensor& x, CallSite site) {
  std::vector<int64_t> permutation(x.shape().size());
  for (size_t i = 0; i < permutation.size(); ++i) permutation[i] = static_cast<int64_t>(i);
  if (IsUsable(x) && permutation.size() < 2) {
    return Fail(x,
                BadType(absl::StrCat("transpose: expected at least two dimensions, got ",
                                     x.impl()->data->info->type.ToString())),
                site);
  }
  if (permutation.size() >= 2) std::swap(permutation.end()[-1], permutation.end()[-2]);
  return Transpose(x, permutation, site);
}

Tensor Transpose(const Tensor& x, const std::vector<int64_t>& permutation, CallSite site) {
  return ApplyLocal(Spec("transpose", site, {{"perm", permutation}}), {x});
}

Tensor Slice(const Tensor& x, int64_t axis, int64_t begin, int64_t end, CallSite site) {
  if (!IsUsable(x)) return ApplyLocal(Spec("slice", site), {x});
  const absl::StatusOr<int64_t> checked = Axis("slice", x, axis);
  if (!checked.ok()) return Fail(x, checked.status(), site);
  return ApplyLocal(Spec("slice", site, {{"axis", *checked}, {"begin", begin}, {"end", end}}), {x});
}

Tensor Concat(const std::vector<Tensor>& xs, int64_t axis, CallSite site) {
  int64_t place = axis;
  if (!xs.empty() && IsUsable(xs[0])) {
    const absl::StatusOr<int64_t> checked = Axis("concat", xs[0], axis);
    if (!checked.ok()) return Fail(xs[0], checked.status(), site);
    place = *checked;
  }
  return ApplyLocal(Spec("concat", site, {{"axis", place}}), xs);
}

Tensor CopyTo(const Tensor& x, const DeviceRef& device, CallSite site) {
  NodeSpec spec = Spec("copy", site);
  spec.device_slot = device.slot();
  if (IsUsable(x) && (device.session() != x.impl()->data->session || device.slot() < 0 ||
                      device.slot() >= device.session()->device_count())) {
    return Fail(x, BadType("copy: expected a device of the tensor's session"), site);
  }
  return ApplyLocal(std::move(spec), {x}, &device);
}

Tensor operator+(const Operand& a, const Operand& b) {
  return Operate(a, b, [](const Tensor& x, const Tensor& y, CallSite s) { return Add(x, y, s); });
}
Tensor operator-(const Operand& a, const Operand& b) {
  return Operate(a, b, [](const Tensor& x, const Tensor& y, CallSite s) { return Sub(x, y, s); });
}
Tensor operator*(const Operand& a, const Operand& b) {
  return Operate(a, b, [](const Tensor& x, const Tensor& y, CallSite s) { return Mul(x, y, s); });
}
Tensor operator-(const Operand& x) { return Neg(x.tensor(), x.site()); }

// --- Gradients ----------------------------------------------------------------------------------

absl::Status Backward(const Tensor& root, const BackwardOptions& options, CallSite site) {
  return Backward(std::vector<Tensor>{root}, options, site);
}

absl::Status Backward(const std::vector<Tensor>& roots, const BackwardOptions& options,
                      CallSite site) {
  GradientRequest request;
  request.roots = roots;
  request.seeds = options.seeds;
  request.leaves = true;
  request.retain = options.retain_graph;
  request.create = options.create_graph;
  return TakeGradients(request, site).status();
}

absl::StatusOr<std::vector<Tensor>> Grad(const std::vector<Tensor>& outputs,
                                         const std::vector<Tensor>& inputs,
                                         const BackwardOptions& options, CallSite site) {
  GradientRequest request;
  request.roots = outputs;
  request.seeds = options.seeds;
  request.wanted = inputs;
  request.retain = options.retain_graph;
  request.create = options.create_graph;
  return TakeGradients(request, site);
}

}  // namespace sdk
}  // namespace chorus
