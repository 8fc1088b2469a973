#include "client/internal/local.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "chorus/math.h"
#include "client/internal/access.h"
#include "core/base/error.h"
#include "core/tensor/rounding.h"

namespace chorus {
namespace internal {

NodeSpec Spec(const char* op, CallSite site, Attributes attributes) {
  NodeSpec spec;
  spec.op = op;
  spec.attributes = std::move(attributes);
  spec.source = SourceOf(site);
  return spec;
}

Tensor Fail(const Tensor& like, const absl::Status& status, CallSite site) {
  return FailedTensor(like.defined() ? ImplOf(like)->data->session : nullptr,
                      WithSource(status, SourceOf(site)));
}

bool IsUsable(const Tensor& x) { return x.defined() && !x.absent() && x.status().ok(); }

std::string TypeText(const Tensor& x) { return ImplOf(x)->data->info->type.ToString(); }

bool BroadcastShapes(const Shape& other, Shape* shape) {
  if (shape->size() < other.size()) shape->insert(shape->begin(), other.size() - shape->size(), 1);
  const size_t added = shape->size() - other.size();
  for (size_t i = 0; i < other.size(); ++i) {
    int64_t& size = (*shape)[added + i];
    if (size != other[i] && size != 1 && other[i] != 1) return false;
    if (size == 1) size = other[i];
  }
  return true;
}

namespace {

// The bytes of a number as an element of that dtype; an error where it is none of its values.
absl::StatusOr<InlineData> ElementOf(DType dtype, const Number& value) {
  InlineData data;
  const auto put = [&data](auto number) {
    const char* const begin = reinterpret_cast<const char*>(&number);
    data.bytes.assign(begin, begin + sizeof(number));
    return data;
  };
  switch (dtype) {
    case DType::kF16:
      return put(RoundTo<F16>(value.value()));
    case DType::kBF16:
      return put(RoundTo<BF16>(value.value()));
    case DType::kF32:
      return put(RoundTo<float>(value.value()));
    case DType::kF64:
      return put(value.value());
    default:
      break;
  }
  CHORUS_ASSIGN_OR_RETURN(const int64_t whole, WholeOf(dtype, value));
  switch (DTypeBytes(dtype)) {
    case 1:
      return put(static_cast<uint8_t>(whole));
    case 2:
      return put(static_cast<uint16_t>(whole));
    case 4:
      return put(static_cast<uint32_t>(whole));
    default:
      return put(whole);
  }
}

// The numbers of an integer dtype, or of bool.
absl::optional<std::pair<int64_t, int64_t>> RangeOf(DType dtype) {
  const auto of = [](auto zero) {
    using Limits = std::numeric_limits<decltype(zero)>;
    return std::make_pair(int64_t{Limits::min()}, int64_t{Limits::max()});
  };
  switch (dtype) {
    case DType::kI8:
      return of(int8_t());
    case DType::kU8:
      return of(uint8_t());
    case DType::kI16:
      return of(int16_t());
    case DType::kI32:
      return of(int32_t());
    case DType::kI64:
      return of(int64_t());
    case DType::kBool:
      return std::make_pair(int64_t{0}, int64_t{1});
    default:
      return absl::nullopt;
  }
}

Tensor InlineTensor(const TensorType& type, InlineData bytes,
                    const std::shared_ptr<SessionCore>& session, int32_t device_slot) {
  auto data = std::make_shared<TensorData>(session);
  {
    SessionLock lock(session.get());
    if (!lock.status().ok()) return FailedTensor(session, lock.status());
    data->info = session->interner().Type(type);
  }
  data->device_slot = device_slot;
  data->inline_data = std::move(bytes);
  data->state.store(TensorData::State::kInline, std::memory_order_release);
  return MakeTensor(std::move(data));
}

}  // namespace

std::string TextOf(const Number& value) {
  return value.is_whole() ? absl::StrCat(value.whole()) : absl::StrCat(value.value());
}

absl::Status CheckNumber(DType dtype, const Number& value) {
  return ElementOf(dtype, value).status();
}

absl::StatusOr<int64_t> WholeOf(DType dtype, const Number& value) {
  const auto range = RangeOf(dtype);
  if (!range.has_value()) return Unsupported(absl::StrCat("numbers of ", DTypeName(dtype)));
  absl::optional<int64_t> whole;
  if (value.is_whole()) {
    whole = value.whole();
  } else if (value.value() >= -0x1p63 && value.value() < 0x1p63 &&
             value.value() == std::trunc(value.value())) {  // not of NaN
    whole = static_cast<int64_t>(value.value());
  }
  if (whole.has_value() && *whole >= range->first && *whole <= range->second) return *whole;
  return BadType(
      absl::StrCat("expected a whole number that ", DTypeName(dtype), " has, got ", TextOf(value)));
}

Tensor Elementwise(const char* op, absl::Span<const Tensor> inputs, CallSite site) {
  const Shape* first = nullptr;
  bool fit = true;
  for (const Tensor& input : inputs) {
    if (!IsUsable(input)) return ApplyLocal(Spec(op, site), inputs);
    if (input.shape().empty()) continue;
    if (first == nullptr) first = &input.shape();
    fit = fit && input.shape() == *first;
  }
  if (fit) return ApplyLocal(Spec(op, site), inputs);

  Shape shape;
  for (const Tensor& input : inputs) {
    if (BroadcastShapes(input.shape(), &shape)) continue;
    std::string types;
    for (const Tensor& each : inputs) {
      absl::StrAppend(&types, types.empty() ? "" : " and ", TypeText(each));
    }
    return Fail(input, BadType(absl::StrCat(op, ": expected shapes that broadcast, got ", types)),
                site);
  }
  absl::InlinedVector<Tensor, 3> stretched(inputs.begin(), inputs.end());
  for (Tensor& x : stretched) {
    if (x.shape().empty() || x.shape() == shape) continue;
    x = ApplyLocal(Spec("expand", site, {{"dims", shape}}), {x});
  }
  return ApplyLocal(Spec(op, site), stretched);
}

Tensor NumberOf(DType dtype, const Number& value, const std::shared_ptr<SessionCore>& session,
                int32_t device_slot, CallSite site) {
  absl::StatusOr<InlineData> bytes = ElementOf(dtype, value);
  if (!bytes.ok()) return FailedTensor(session, WithSource(bytes.status(), SourceOf(site)));
  return InlineTensor(TensorType(dtype, {}), *std::move(bytes), session, device_slot);
}

Tensor IntegerOf(int64_t value, const std::shared_ptr<SessionCore>& session, int32_t device_slot) {
  InlineData data;
  const char* const begin = reinterpret_cast<const char*>(&value);
  data.bytes.assign(begin, begin + sizeof(value));
  return InlineTensor(TensorType(DType::kI64, {}), std::move(data), session, device_slot);
}

Tensor NumberLike(const Number& value, const Tensor& like, CallSite site) {
  if (!IsUsable(like)) return like;
  const TensorData& data = *ImplOf(like)->data;
  return NumberOf(data.info->type.dtype, value, data.session, data.device_slot, site);
}

absl::StatusOr<int64_t> Axis(const char* op, const Tensor& x, int64_t axis) {
  const int64_t rank = static_cast<int64_t>(x.shape().size());
  if (axis < -rank || axis >= rank) {
    return BadType(absl::StrCat(op, ": expected an axis from ", -rank, " to ", rank - 1, " of ",
                                TypeText(x), ", got ", axis));
  }
  return axis < 0 ? axis + rank : axis;
}

Tensor Along(const char* op, absl::Span<const Tensor> inputs, int64_t axis, Attributes others,
             CallSite site) {
  int64_t axis_index = axis;
  if (IsUsable(inputs[0])) {
    const absl::StatusOr<int64_t> checked = Axis(op, inputs[0], axis);
    if (!checked.ok()) return Fail(inputs[0], checked.status(), site);
    axis_index = *checked;
  }
  others.insert(others.begin(), {"axis", axis_index});
  return ApplyLocal(Spec(op, site, std::move(others)), inputs);
}

Tensor ReduceAxes(const char* op, const Tensor& x, const Axes& axes, bool keep_dims,
                  CallSite site) {
  std::vector<int64_t> sorted;
  if (IsUsable(x) && !axes.all()) {
    // To the op, no axes mean all of them.
    if (axes.list().empty()) return ApplyLocal(Spec("reshape", site, {{"dims", x.shape()}}), {x});
    for (const int64_t axis : axes.list()) {
      const absl::StatusOr<int64_t> checked = Axis(op, x, axis);
      if (!checked.ok()) return Fail(x, checked.status(), site);
      sorted.push_back(*checked);
    }
    std::sort(sorted.begin(), sorted.end());
  }
  Attributes attributes;
  if (!sorted.empty()) attributes.push_back({"axes", std::move(sorted)});
  if (keep_dims) attributes.push_back({"keep_dims", int64_t{1}});
  return ApplyLocal(Spec(op, site, std::move(attributes)), {x});
}

}  // namespace internal
}  // namespace chorus
