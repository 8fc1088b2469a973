#include "chorus/parallel/host_tensor.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/pieces.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "client/internal/trace.h"
#include "core/base/error.h"
#include "core/base/mutex.h"

namespace chorus {
namespace parallel {
namespace {

using internal::Access;
using internal::AnyRequiresGrad;
using internal::AxisOf;
using internal::CheckGather;
using internal::ChunkSizes;
using internal::CountChunks;
using internal::FailedEverywhere;
using internal::FailedTensor;
using internal::GradEnabled;
using internal::IdOf;
using internal::ImplOf;
using internal::NoDevices;
using internal::SessionOf;
using internal::SourceOf;
using internal::TensorData;
using internal::TensorDataPtr;
using internal::Tensors;
using internal::ToGather;
using internal::Trace;
using internal::TraceId;
using internal::WithSource;

// As far as is known without waiting.
bool HasFailed(const Tensor& tensor) {
  if (!tensor.status().ok()) return true;
  const TensorData& data = *ImplOf(tensor)->data;
  if (data.state.load(std::memory_order_acquire) != TensorData::State::kSent) return false;
  if (data.session->Forked()) return false;  // whoever waits for it hears that
  const auto outcome = data.session->link().Peek(data.producer);
  return outcome.ok() && outcome->has_value() && (*outcome)->code != absl::StatusCode::kOk;
}

}  // namespace

struct HostTensorImpl {
  absl::Status status;
  TensorType type;
  Shape shape;
  // Elements of the trainer's: kept by `keep` where it is not the trainer's business.
  std::shared_ptr<const void> keep;
  const char* data = nullptr;
  // Or the tensors, on devices of the group, that make it along `dim`.
  DeviceGroup devices;
  std::vector<Tensor> pieces;
  int64_t dim = 0;
  CallSite site;
  // What stands for it on the first device.
  Mutex mutex;
  Tensor stand_in ABSL_GUARDED_BY(mutex);
  Tensor traced ABSL_GUARDED_BY(mutex);  // of the pieces, in the last trace that asked
};

HostTensor::HostTensor(std::shared_ptr<const void> keep, DType dtype, const char* data,
                       size_t count, const Shape& shape)
    : impl_(std::make_shared<HostTensorImpl>()) {
  impl_->type.dtype = dtype;
  for (const int64_t size : shape) impl_->type.dims.emplace_back(size);
  impl_->shape = shape;
  impl_->keep = std::move(keep);
  impl_->data = data;
  impl_->status = impl_->type.Validate(kMaxValueBytes);
  if (impl_->status.ok() && impl_->type.num_elements() != static_cast<int64_t>(count)) {
    impl_->status = BadType(absl::StrCat("HostTensor: expected ", impl_->type.num_elements(),
                                         " values for ", impl_->type.ToString(), ", got ", count));
  }
}

DType HostTensor::dtype() const {
  return impl_ == nullptr ? DType::kUnspecified : impl_->type.dtype;
}

const Shape& HostTensor::shape() const {
  static const auto* const none = new Shape();
  return impl_ == nullptr ? *none : impl_->shape;
}

absl::Status HostTensor::status() const {
  if (impl_ != nullptr) return impl_->status;
  return MakeError(Reason::kWrongState, "an undefined tensor of the host");
}

const char* HostTensor::bytes() const { return status().ok() ? impl_->data : nullptr; }

HostTensor& HostTensor::RequireGrad(const DeviceGroup& devices, CallSite site) {
  if (!status().ok() || requires_grad()) return *this;
  const auto fail = [this](const absl::Status& error) -> HostTensor& {
    impl_->status = error;
    return *this;
  };
  if (devices.size() == 0) return fail(NoDevices("RequireGrad"));
  if (!impl_->pieces.empty()) {
    return fail(
        BadType("RequireGrad: expected memory of the trainer's, got what was gathered, "
                "which has its gradient from there"));
  }
  Tensor stand_in = FromBytes(devices.device(0), impl_->type.dtype, impl_->shape, impl_->data,
                              impl_->type.num_elements(), site);
  stand_in.RequireGrad();
  if (!stand_in.status().ok()) return fail(stand_in.status());
  MutexLock lock(&impl_->mutex);
  impl_->stand_in = std::move(stand_in);
  return *this;
}

bool HostTensor::requires_grad() const {
  if (impl_ == nullptr) return false;
  if (AnyRequiresGrad(impl_->pieces)) return true;
  MutexLock lock(&impl_->mutex);
  return impl_->pieces.empty() && impl_->stand_in.defined();
}

Tensor HostTensor::tensor() const {
  if (impl_ == nullptr) return Tensor();
  if (!impl_->status.ok()) return FailedTensor(SessionOf(impl_->devices), impl_->status);
  MutexLock lock(&impl_->mutex);
  if (impl_->pieces.empty()) return impl_->stand_in;
  const TraceId trace = IdOf(Trace::Current());
  // Apart: what a loss outside has used stays the one that Grad finds there.
  Tensor& gathered = trace == TraceId() ? impl_->stand_in : impl_->traced;
  const bool of_trace = gathered.defined() && ImplOf(gathered)->data->trace == trace;
  // It was gathered under NoGrad, and a loss of it would have no gradients.
  const bool lacks_history = of_trace && ImplOf(gathered)->node == nullptr && GradEnabled() &&
                             AnyRequiresGrad(impl_->pieces);
  if (!of_trace || lacks_history || HasFailed(gathered)) {
    gathered = Gather(impl_->pieces, impl_->devices, 0, impl_->dim, nullptr, impl_->site);
  }
  return gathered;
}

absl::Status HostTensor::ReadInto(DType dtype,
                                  std::function<char*(int64_t elements)> allocate) const {
  CHORUS_RETURN_IF_ERROR(status());
  const HostTensorImpl& host = *impl_;
  if (host.type.dtype != dtype) {
    return BadType(absl::StrCat("read: expected a tensor of ", DTypeName(dtype), ", got ",
                                host.type.ToString()));
  }
  char* const out = allocate(host.type.num_elements());
  if (host.type.num_bytes() == 0) return absl::OkStatus();
  if (host.pieces.empty()) {
    std::memcpy(out, host.data, static_cast<size_t>(host.type.num_bytes()));
    return absl::OkStatus();
  }
  // [before, dim, after]: each piece has a block in each of the `before` rows.
  int64_t before = 1;
  for (int64_t i = 0; i < host.dim; ++i) before *= host.shape[static_cast<size_t>(i)];
  const size_t row = static_cast<size_t>(host.type.num_bytes() / before);
  size_t offset = 0;
  for (const Tensor& piece : host.pieces) {
    const TensorDataPtr& data = ImplOf(piece)->data;
    CHORUS_ASSIGN_OR_RETURN(const bool on_device,
                            data->session->Wait(data, data->session->wait_timeout()));
    const size_t block = static_cast<size_t>(data->info->bytes / before);
    if (block == 0) continue;
    // Several blocks come by way of a buffer.
    std::string bytes(before == 1 ? 0 : static_cast<size_t>(data->info->bytes), '\0');
    char* const into = before == 1 ? out + offset : &bytes[0];
    CHORUS_RETURN_IF_ERROR(data->session->Read(data, on_device, into));
    for (int64_t r = 0; before > 1 && r < before; ++r) {
      std::memcpy(out + static_cast<size_t>(r) * row + offset,
                  bytes.data() + static_cast<size_t>(r) * block, block);
    }
    offset += block;
  }
  return absl::OkStatus();
}

Tensors Scatter(const HostTensor& x, const DeviceGroup& devices, const std::vector<int64_t>& sizes,
                int64_t dim, CallSite site) {
  const auto refuse = [&](const absl::Status& status) {
    return FailedEverywhere(devices, status, site);
  };
  if (devices.size() == 0) return refuse(NoDevices("scatter"));
  if (!x.status().ok()) return refuse(x.status());
  const Tensor stand_in = x.tensor();
  if (stand_in.defined()) return Scatter(stand_in, devices, sizes, dim, site);
  const HostTensorImpl& host = *Access::Impl(x);
  const absl::StatusOr<int64_t> axis = AxisOf("scatter", host.type, dim);
  if (!axis.ok()) return refuse(axis.status());
  const absl::StatusOr<std::vector<int64_t>> chunks =
      ChunkSizes("scatter", host.shape[static_cast<size_t>(*axis)], sizes, devices.size());
  if (!chunks.ok()) return refuse(chunks.status());
  // [before, dim, after]: each chunk has a block in each of the `before` rows.
  int64_t before = 1;
  for (int64_t i = 0; i < *axis; ++i) before *= host.shape[static_cast<size_t>(i)];
  const size_t bytes = static_cast<size_t>(host.type.num_bytes());
  const size_t row = before == 0 ? 0 : bytes / static_cast<size_t>(before);
  Tensors pieces;
  size_t offset = 0;
  std::string block;
  for (int64_t i = 0; i < CountChunks(*chunks); ++i) {
    TensorType type = host.type;
    type.dims[static_cast<size_t>(*axis)] = Dim((*chunks)[static_cast<size_t>(i)]);
    const size_t size = before == 0 ? 0 : static_cast<size_t>(type.num_bytes() / before);
    const char* from = host.data + offset;
    if (before > 1 && size > 0) {
      block.resize(size * static_cast<size_t>(before));
      for (size_t r = 0; r < static_cast<size_t>(before); ++r) {
        std::memcpy(&block[r * size], host.data + r * row + offset, size);
      }
      from = block.data();
    }
    pieces.push_back(FromBytes(devices.device(static_cast<int>(i)), type.dtype, type.sizes(), from,
                               type.num_elements(), site));
    offset += size;
  }
  return pieces;
}

HostTensor GatherToHost(const Tensors& xs, const DeviceGroup& devices, int64_t dim,
                        std::vector<std::string>* warnings, CallSite site) {
  auto host = std::make_shared<HostTensorImpl>();
  absl::StatusOr<ToGather> checked = CheckGather(xs, devices, dim, warnings, site);
  if (checked.ok()) {
    host->type = std::move(checked->type);
    host->shape = host->type.sizes();
    host->pieces = std::move(checked->xs);
    host->dim = checked->axis;
    host->devices = devices;
    host->site = site;
  } else {
    host->status = WithSource(checked.status(), SourceOf(site));
  }
  return Access::Make<HostTensor>(std::move(host));
}

}  // namespace parallel
}  // namespace chorus
