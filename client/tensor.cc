#include "chorus/tensor.h"

#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "client/internal/access.h"
#include "client/internal/local.h"
#include "client/internal/record.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "client/internal/trace.h"
#include "client/internal/values_text.h"
#include "core/base/error.h"
#include "core/ops/node_spec.h"

namespace chorus {
namespace {

using internal::ApplyLocal;
using internal::CheckDevice;
using internal::DeviceFrom;
using internal::FailedTensor;
using internal::ForkedError;
using internal::Link;
using internal::MakeTensor;
using internal::SessionCore;
using internal::SessionLock;
using internal::SessionOf;
using internal::SourceOf;
using internal::Spec;
using internal::TensorData;
using internal::TensorDataPtr;
using internal::TensorImpl;
using internal::Trace;
using internal::TypeText;
using internal::ValuesText;
using internal::WholeOf;
using internal::WithSource;

absl::Status Undefined() { return MakeError(Reason::kWrongState, "an undefined tensor"); }

// The type of a tensor that a caller describes, checked.
absl::StatusOr<TensorType> TypeOf(DType dtype, const Shape& shape) {
  TensorType type(dtype, {});
  for (const int64_t size : shape) type.dims.emplace_back(size);
  CHORUS_RETURN_IF_ERROR(type.Validate(kMaxValueBytes));
  return type;
}

}  // namespace

// --- What it is ---------------------------------------------------------------------------------

DType Tensor::dtype() const {
  if (impl_ == nullptr || impl_->data->info == nullptr) return DType::kUnspecified;
  return impl_->data->info->type.dtype;
}

const Shape& Tensor::shape() const {
  static const auto* const none = new Shape();
  return impl_ == nullptr || impl_->data->info == nullptr ? *none : impl_->data->info->shape;
}

int64_t Tensor::num_elements() const {
  return impl_ == nullptr || impl_->data->info == nullptr ? 0 : impl_->data->info->elements;
}

DeviceRef Tensor::device() const {
  if (impl_ == nullptr) return DeviceRef();
  return DeviceFrom(impl_->data->session, impl_->data->device_slot);
}

bool Tensor::absent() const {
  return impl_ != nullptr &&
         impl_->data->state.load(std::memory_order_acquire) == TensorData::State::kAbsent;
}

absl::Status Tensor::status() const {
  if (impl_ == nullptr) return Undefined();
  const TensorData& data = *impl_->data;
  if (data.state.load(std::memory_order_acquire) != TensorData::State::kFailed) {
    return absl::OkStatus();
  }
  return data.failure->status;
}

// --- Waiting and reading ------------------------------------------------------------------------

namespace {

// As SessionCore::Wait. No timeout: the session's.
absl::StatusOr<bool> Await(const std::shared_ptr<TensorImpl>& impl,
                           absl::optional<Timeout> timeout = absl::nullopt) {
  if (impl == nullptr) return Undefined();
  const TensorDataPtr& data = impl->data;
  if (data->session == nullptr) return data->failure->status;
  return data->session->Wait(
      data, timeout.has_value() ? absl::FromChrono(*timeout) : data->session->wait_timeout());
}

// That a tensor that was waited for has elements of `dtype`.
absl::Status CheckIs(const TensorData& data, DType dtype, absl::string_view call) {
  if (data.info == nullptr) {
    return MakeError(Reason::kWrongState,
                     absl::StrCat(call, ": this rank gets no result of that collective"));
  }
  if (data.info->type.dtype == dtype) return absl::OkStatus();
  return BadType(absl::StrCat(call, ": expected a tensor of ", DTypeName(dtype), ", got ",
                              data.info->type.ToString()));
}

}  // namespace

absl::Status Tensor::Wait() const { return Await(impl_).status(); }
absl::Status Tensor::Wait(Timeout timeout) const { return Await(impl_, timeout).status(); }

absl::Status Tensor::ReadInto(DType dtype, std::function<char*(int64_t elements)> allocate) const {
  CHORUS_ASSIGN_OR_RETURN(const bool on_device, Await(impl_));
  // Kept meanwhile: what only one handle has may be given to a run of another thread.
  const TensorDataPtr kept = impl_->data;
  const TensorData& data = *kept;
  CHORUS_RETURN_IF_ERROR(CheckIs(data, dtype, "read"));
  return data.session->Read(kept, on_device, allocate(data.info->elements));
}

absl::StatusOr<std::pair<std::shared_ptr<const void>, const char*>> Tensor::Map(DType dtype) const {
  CHORUS_ASSIGN_OR_RETURN(const bool on_device, Await(impl_));
  const TensorDataPtr& data = impl_->data;
  CHORUS_RETURN_IF_ERROR(CheckIs(*data, dtype, "view"));
  std::pair<std::shared_ptr<const void>, const char*> mapped(data, nullptr);
  switch (data->state.load(std::memory_order_acquire)) {
    case TensorData::State::kInline:
      mapped.second = data->inline_data.bytes.data();
      break;
    case TensorData::State::kExternal:
      mapped.second = data->staging;
      break;
    default:
      if (data->info->bytes == 0) break;
      CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<const char> bytes,
                              data->session->Map(data, on_device));
      mapped.second = bytes.get();
      mapped.first = std::move(bytes);
  }
  return mapped;
}

std::string Tensor::ToString() const {
  if (impl_ == nullptr) return "undefined tensor";
  if (!status().ok()) return absl::StrCat("failed tensor: ", std::string(status().message()));
  const std::string device = absl::StrCat(" on device ", impl_->data->device_slot);
  if (absent()) return absl::StrCat("absent result", device);
  const std::string what = absl::StrCat(TypeText(*this), device);
  if (impl_->data->state.load(std::memory_order_acquire) == TensorData::State::kTraced) {
    return absl::StrCat(what, ", of a compiled function");
  }
  std::string copy;
  auto mapped = Map(dtype());
  absl::Status status = mapped.status();
  if (status.code() == absl::StatusCode::kUnimplemented) {
    status = ReadInto(dtype(), [&](int64_t elements) {
      copy.resize(static_cast<size_t>(elements * DTypeBytes(dtype())));
      return &copy[0];
    });
  }
  if (!status.ok()) return absl::StrCat(what, ": ", std::string(status.message()));
  return absl::StrCat(what, shape().size() < 2 ? ": " : ":\n",
                      ValuesText(dtype(), shape(), mapped.ok() ? mapped->second : copy.data()));
}

std::ostream& operator<<(std::ostream& out, const Tensor& x) { return out << x.ToString(); }

// --- Gradients ----------------------------------------------------------------------------------

Tensor& Tensor::RequireGrad() {
  if (impl_ == nullptr || !status().ok()) return *this;
  absl::Status error;
  if (impl_->data->info == nullptr || !IsFloating(impl_->data->info->type.dtype)) {
    error = BadType(absl::StrCat(
        "RequireGrad: expected a floating-point tensor, got ",
        impl_->data->info == nullptr ? "an absent result" : impl_->data->info->type.ToString()));
  } else if (impl_->node != nullptr) {
    error = BadType(
        "RequireGrad: expected a leaf, got a result, which has a gradient already; "
        "Detach it first");
  }
  if (!error.ok()) {
    *this = FailedTensor(impl_->data->session, std::move(error));
  } else {
    // What was a constant is a leaf of its own from now on.
    if (impl_->leaf != nullptr && !impl_->leaf->leaf_requires_grad) impl_->leaf = nullptr;
    impl_->leaf_requires_grad = true;
  }
  return *this;
}

bool Tensor::requires_grad() const { return impl_ != nullptr && impl_->requires_grad(); }
Tensor Tensor::grad() const { return impl_ == nullptr ? Tensor() : impl_->grad; }
void Tensor::ClearGrad() const {
  if (impl_ != nullptr) impl_->grad = Tensor();
}
Tensor Tensor::Detach() const { return impl_ == nullptr ? Tensor() : MakeTensor(impl_->data); }

// --- From the host ------------------------------------------------------------------------------

Tensor FromBytes(const DeviceRef& device, DType dtype, const Shape& shape, const char* bytes,
                 int64_t elements, CallSite site) {
  const std::shared_ptr<SessionCore>& session = SessionOf(device);
  const auto fail = [&](const absl::Status& status) {
    return FailedTensor(session, WithSource(status, SourceOf(site)));
  };
  if (session == nullptr) return fail(Undefined());
  if (session->Forked()) return fail(ForkedError());
  const absl::StatusOr<TensorType> type = TypeOf(dtype, shape);
  if (!type.ok()) return fail(type.status());
  if (type->num_elements() != elements) {
    return fail(BadType(absl::StrCat("FromHost: expected ", type->num_elements(), " values for ",
                                     type->ToString(), ", got ", elements)));
  }
  const absl::Status of_session = CheckDevice("FromHost", device);
  if (!of_session.ok()) return fail(of_session);
  absl::StatusOr<TensorDataPtr> data = TensorDataPtr();
  {
    SessionLock lock(session.get());
    if (!lock.status().ok()) return fail(lock.status());
    data = session->FromHost(session->interner().Type(*type), device.slot(), bytes, site);
  }
  if (!data.ok()) return fail(data.status());
  Trace* const trace = Trace::Current();
  if (trace != nullptr && trace->session() == session && (*data)->producer != Sequence()) {
    trace->AddUpload((*data)->producer);
  }
  return MakeTensor(*std::move(data));
}

Tensor Full(const DeviceRef& device, DType dtype, const Shape& shape, const Number& value,
            CallSite site) {
  TensorType type(dtype, {});
  for (const int64_t size : shape) type.dims.emplace_back(size);
  Attributes attributes = TypeAttributes(type);
  if (IsFloating(dtype)) {
    attributes.push_back({"value", value.value()});
  } else {
    const absl::StatusOr<int64_t> whole = WholeOf(dtype, value);
    if (!whole.ok()) {
      return FailedTensor(SessionOf(device), WithSource(whole.status(), SourceOf(site)));
    }
    attributes.push_back({"value", *whole});
  }
  NodeSpec spec = Spec("fill", site, std::move(attributes));
  spec.device_slot = device.slot();
  return ApplyLocal(std::move(spec), {}, &device);
}

Tensor Zeros(const DeviceRef& device, DType dtype, const Shape& shape, CallSite site) {
  return Full(device, dtype, shape, 0, site);
}

Tensor FromError(const DeviceRef& device, const absl::Status& error) {
  return FailedTensor(SessionOf(device),
                      error.ok() ? BadType("FromError: expected an error, got OK") : error);
}

absl::StatusOr<std::pair<Tensor, char*>> MapBytes(const DeviceRef& device, DType dtype,
                                                  const Shape& shape, CallSite site) {
  const std::shared_ptr<SessionCore>& session = SessionOf(device);
  if (session == nullptr) return Undefined();
  if (session->Forked()) return ForkedError();
  const absl::StatusOr<TensorType> type = TypeOf(dtype, shape);
  if (!type.ok()) return WithSource(type.status(), SourceOf(site));
  const absl::Status of_session = CheckDevice("Map", device);
  if (!of_session.ok()) return WithSource(of_session, SourceOf(site));
  absl::StatusOr<Link::Staging> staging =
      session->CreateStaging(std::max<int64_t>(type->num_bytes(), 1));
  if (!staging.ok()) return WithSource(staging.status(), SourceOf(site));
  if (staging->data == nullptr) {
    session->releases().Add(staging->arena);
    session->releases().DrainIfUrgent();
    return WithSource(Unsupported("Map: expected the ring, which alone shares memory with the "
                                  "daemon; use FromHost"),
                      SourceOf(site));
  }
  auto data = std::make_shared<TensorData>(session);
  data->device_slot = device.slot();
  data->external.arena = staging->arena;
  data->staging = staging->data;
  {
    SessionLock lock(session.get());
    CHORUS_RETURN_IF_ERROR(lock.status());
    data->info = session->interner().Type(*type);
  }
  data->state.store(TensorData::State::kExternal, std::memory_order_release);
  return std::make_pair(MakeTensor(std::move(data)), staging->data);
}

}  // namespace chorus
