#include "chorus/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "chorus/collectives.h"
#include "chorus/math.h"
#include "client/internal/access.h"
#include "client/internal/record.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/ops/registry.h"

namespace chorus {
namespace parallel {
namespace {

using internal::Access;
using internal::ApplyCollectives;
using internal::CallRequest;
using internal::Companions;
using internal::FailedTensor;
using internal::GradNodePtr;
using internal::ImplOf;
using internal::MemberCall;
using internal::MemberCore;
using internal::MemberOf;
using internal::OwnWorld;
using internal::Results;
using internal::SessionCore;
using internal::SessionOf;
using internal::SourceOf;
using internal::TensorDataPtr;
using internal::WithSource;

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
  std::string source;
  // What stands for it on the first device.
  Mutex mutex;
  Tensor stand_in ABSL_GUARDED_BY(mutex);
};

namespace {

// A run has at most so many inputs and results: a frame holds their names.
constexpr int64_t kMaxValues = 4096;

using Tensors = std::vector<Tensor>;

const std::shared_ptr<SessionCore>& SessionOf(const DeviceGroup& devices) {
  static const auto* const none = new std::shared_ptr<SessionCore>();
  return devices.size() == 0 ? *none : MemberOf(devices.world(0))->session;
}

absl::Status NoDevices(absl::string_view op) {
  return BadType(absl::StrCat(op, ": expected a group of devices, got an empty one"));
}

const TensorType& TypeOf(const Tensor& x) { return ImplOf(x)->data->info->type; }

// Where a tensor is in the group; what is wrong with it if it is nowhere there. Names it by `what`.
absl::StatusOr<int> PlaceOf(absl::string_view op, absl::string_view what, const Tensor& x,
                            const DeviceGroup& devices) {
  if (!x.defined()) return BadType(absl::StrCat(op, ": ", what, " is an undefined tensor"));
  CHORUS_RETURN_IF_ERROR(x.status());
  if (x.absent()) {
    return BadType(absl::StrCat(op, ": ", what, " is the absent result of another rank"));
  }
  const int place = devices.PlaceOf(x.device());
  if (place >= 0) return place;
  if (SessionOf(x.device()) != SessionOf(devices)) {
    return BadType(absl::StrCat(op, ": ", what, " is of another session than the devices"));
  }
  return BadType(absl::StrCat(op, ": ", what, " is on device ", x.device().slot(),
                              " of the session, which is not in the group; CopyTo moves it"));
}

absl::Status CheckDestination(absl::string_view op, int destination, const DeviceGroup& devices) {
  if (destination >= 0 && destination < devices.size()) return absl::OkStatus();
  return BadType(absl::StrCat(op, ": expected a destination among ", devices.size(),
                              " devices, got ", destination));
}

absl::Status CheckBuffer(absl::string_view op, int64_t buffer_size) {
  if (buffer_size > 0) return absl::OkStatus();
  return BadType(absl::StrCat(op, ": expected a buffer of at least 1 byte, got ", buffer_size));
}

absl::StatusOr<int64_t> AxisOf(absl::string_view op, const TensorType& type, int64_t dim) {
  const int64_t rank = static_cast<int64_t>(type.dims.size());
  if (rank == 0) {
    return BadType(absl::StrCat(op, ": expected at least one dimension, got ", type.ToString()));
  }
  if (dim < -rank || dim >= rank) {
    return BadType(absl::StrCat(op, ": expected a dimension from ", -rank, " to ", rank - 1, " of ",
                                type.ToString(), ", got ", dim));
  }
  return dim < 0 ? dim + rank : dim;
}

// The sizes of the chunks of `size`, one for each device; at the end of those of the chunk rule,
// devices without a chunk have -1.
absl::StatusOr<std::vector<int64_t>> ChunkSizes(absl::string_view op, int64_t size,
                                                const std::vector<int64_t>& sizes, int devices) {
  if (sizes.empty()) {
    std::vector<int64_t> chunks(static_cast<size_t>(devices), size == 0 ? 0 : -1);
    const int64_t chunk = (size + devices - 1) / devices;
    int64_t left = size;
    for (size_t i = 0; left > 0; ++i) {
      chunks[i] = std::min(chunk, left);
      left -= chunks[i];
    }
    return chunks;
  }
  if (sizes.size() != static_cast<size_t>(devices)) {
    return BadType(absl::StrCat(op, ": expected one size for each of ", devices, " devices, got ",
                                sizes.size()));
  }
  int64_t left = size;
  for (const int64_t chunk : sizes) {
    if (chunk < 0) {
      return BadType(absl::StrCat(op, ": expected sizes of 0 or more, got ", chunk));
    }
    left = chunk > left ? -1 : left - chunk;
    if (left < 0) break;
  }
  if (left != 0) {
    return BadType(absl::StrCat(op, ": expected sizes that make ", size, ", got ",
                                absl::StrJoin(sizes, " + ")));
  }
  return sizes;
}

int64_t CountChunks(const std::vector<int64_t>& chunks) {
  return std::count_if(chunks.begin(), chunks.end(), [](int64_t size) { return size >= 0; });
}

// The order of axes that brings `axis` to the front; and back.
std::vector<int64_t> ToFront(int64_t rank, int64_t axis) {
  std::vector<int64_t> order(static_cast<size_t>(rank));
  std::iota(order.begin(), order.end(), 0);
  std::rotate(order.begin(), order.begin() + axis, order.begin() + axis + 1);
  return order;
}
std::vector<int64_t> FromFront(int64_t rank, int64_t axis) {
  std::vector<int64_t> order(static_cast<size_t>(rank));
  std::iota(order.begin(), order.end(), 0);
  std::rotate(order.begin(), order.begin() + 1, order.begin() + axis + 1);
  return order;
}

// One collective of the whole group: a call of each member, in one run with others.
struct GroupCall {
  explicit GroupCall(const DeviceGroup& devices) : inputs(static_cast<size_t>(devices.size())) {}

  CallRequest call;               // of a member that gives inputs
  std::vector<Tensors> inputs;    // by place
  std::vector<TensorType> types;  // by place: of what a member without inputs gets; empty: nothing
};

CallRequest CallOf(const char* op, bool record, CallSite site) {
  CallRequest call(FindOp(op), site);
  call.record = record;
  return call;
}

// Their results, by [place][call]. Whoever differentiates one result of a call takes part in its
// gradient for all devices.
std::vector<std::vector<Results>> Apply(const std::vector<GroupCall>& calls,
                                        const DeviceGroup& devices) {
  const size_t places = static_cast<size_t>(devices.size());
  std::vector<std::vector<CallRequest>> variants(places);
  std::vector<MemberCall> members;
  for (size_t p = 0; p < places; ++p) {
    const std::shared_ptr<MemberCore>& member = MemberOf(devices.world(static_cast<int>(p)));
    variants[p].reserve(calls.size());
    for (const GroupCall& call : calls) {
      variants[p].push_back(call.call);
      CallRequest& own = variants[p].back();
      if (call.inputs[p].empty()) {
        own.spec.collective.counts.clear();
        if (!call.types.empty()) own.spec.type = &call.types[p];
      }
      members.push_back({&own, call.inputs[p], &member, member->everybody});
    }
  }
  std::vector<Results> flat = ApplyCollectives(members);
  std::vector<std::vector<Results>> results(places);
  for (size_t p = 0; p < places; ++p) {
    for (size_t c = 0; c < calls.size(); ++c) {
      results[p].push_back(std::move(flat[p * calls.size() + c]));
    }
  }
  for (size_t c = 0; c < calls.size(); ++c) {
    auto nodes = std::make_shared<std::vector<GradNodePtr>>();
    for (const auto& own : results) {
      if (ImplOf(own[c][0])->node != nullptr) nodes->push_back(ImplOf(own[c][0])->node);
    }
    if (nodes->empty()) continue;
    const Companions companions = std::move(nodes);
    for (auto& own : results) {
      for (Tensor& result : own[c]) {
        if (ImplOf(result)->node != nullptr) ImplOf(result)->companions = companions;
      }
    }
  }
  return results;
}

// The same in as few runs as may be.
std::vector<std::vector<Results>> ApplyAll(std::vector<GroupCall> calls,
                                           const DeviceGroup& devices) {
  const size_t places = static_cast<size_t>(devices.size());
  const size_t most = std::max<size_t>(1, static_cast<size_t>(kMaxValues) / (2 * places));
  std::vector<std::vector<Results>> results(places);
  for (size_t begin = 0; begin < calls.size(); begin += most) {
    const size_t end = std::min(calls.size(), begin + most);
    std::vector<GroupCall> some(std::make_move_iterator(calls.begin() + begin),
                                std::make_move_iterator(calls.begin() + end));
    std::vector<std::vector<Results>> made = Apply(some, devices);
    for (size_t p = 0; p < places; ++p) {
      std::move(made[p].begin(), made[p].end(), std::back_inserter(results[p]));
    }
  }
  return results;
}

Tensor Failed(const DeviceGroup& devices, const absl::Status& status, CallSite site) {
  return FailedTensor(SessionOf(devices), WithSource(status, SourceOf(site)));
}
Tensors FailedEverywhere(const DeviceGroup& devices, const absl::Status& status, CallSite site) {
  return Tensors(static_cast<size_t>(std::max(1, devices.size())), Failed(devices, status, site));
}

bool AnyRequiresGrad(const Tensors& xs) {
  return std::any_of(xs.begin(), xs.end(), [](const Tensor& x) { return x.requires_grad(); });
}

}  // namespace

// --- DeviceGroup --------------------------------------------------------------------------------

absl::StatusOr<DeviceGroup> DeviceGroup::Create(const Session& session,
                                                const std::vector<int>& devices) {
  std::vector<int> places = devices;
  if (places.empty()) {
    places.resize(static_cast<size_t>(session.device_count()));
    std::iota(places.begin(), places.end(), 0);
  }
  if (places.empty()) {
    return MakeError(Reason::kWrongState,
                     "DeviceGroup: expected a session with devices, got an empty one");
  }
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i] < 0 || places[i] >= session.device_count()) {
      return BadType(absl::StrCat("DeviceGroup: device ", places[i], " is none of the session's ",
                                  session.device_count()));
    }
    if (std::find(places.begin(), places.begin() + static_cast<int64_t>(i), places[i]) !=
        places.begin() + static_cast<int64_t>(i)) {
      return BadType(absl::StrCat("DeviceGroup: device ", places[i], " is named twice"));
    }
  }
  // Of nobody else's: sessions of one tenant share the names of worlds.
  std::random_device random;
  WorldOptions options;
  options.name = absl::StrCat("devices-", getpid(), "-", absl::Hex(random()), absl::Hex(random()));
  options.size = static_cast<int>(places.size());
  // A join waits for the others.
  std::vector<absl::StatusOr<World>> joined(places.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < places.size(); ++i) {
    WorldOptions own = options;
    own.rank = static_cast<int>(i);
    own.device = places[i];
    threads.emplace_back([&session, &joined, own, i] { joined[i] = session.Join(own); });
  }
  for (std::thread& thread : threads) thread.join();
  // What has joined leaves again, also where the group does not come about.
  const auto own_world = std::make_shared<OwnWorld>(SessionOf(session));
  DeviceGroup group;
  absl::Status status;
  for (absl::StatusOr<World>& world : joined) {
    status.Update(world.status());
    if (!world.ok()) continue;
    MemberOf(*world)->in_device_group = true;
    MemberOf(*world)->own_world = own_world;
    group.worlds_.push_back(*std::move(world));
  }
  if (!status.ok()) return status;
  return group;
}

int DeviceGroup::PlaceOf(const DeviceRef& device) const {
  for (int place = 0; place < size(); ++place) {
    const DeviceRef own = this->device(place);
    if (SessionOf(own) == SessionOf(device) && own.slot() == device.slot()) return place;
  }
  return -1;
}

// --- HostTensor ---------------------------------------------------------------------------------

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
  if (!impl_->stand_in.defined() && !impl_->pieces.empty()) {
    impl_->stand_in = Gather(impl_->pieces, impl_->devices, 0, impl_->dim);
  }
  return impl_->stand_in;
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
    // Several blocks come by way of a place of their own.
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

// --- Broadcast and ReduceAdd --------------------------------------------------------------------

Tensors Broadcast(const Tensor& x, const DeviceGroup& devices, CallSite site) {
  std::vector<Tensors> results = BroadcastCoalesced({x}, devices, kBufferSize, site);
  Tensors each;
  for (Tensors& own : results) each.push_back(std::move(own[0]));
  return each;
}

std::vector<Tensors> BroadcastCoalesced(const Tensors& xs, const DeviceGroup& devices,
                                        int64_t buffer_size, CallSite site) {
  const auto refuse = [&](const absl::Status& status) {
    return std::vector<Tensors>(static_cast<size_t>(std::max(1, devices.size())),
                                Tensors(xs.size(), Failed(devices, status, site)));
  };
  if (devices.size() == 0) return refuse(NoDevices("broadcast"));
  const absl::Status buffer = CheckBuffer("broadcast", buffer_size);
  if (!buffer.ok()) return refuse(buffer);
  std::vector<GroupCall> calls;
  int root = -1;
  for (size_t i = 0; i < xs.size(); ++i) {
    const absl::StatusOr<int> place =
        PlaceOf("broadcast", absl::StrCat("tensor ", i), xs[i], devices);
    if (!place.ok()) return refuse(place.status());
    if (i == 0) root = *place;
    if (*place != root) {
      return refuse(BadType(absl::StrCat("broadcast: expected tensors on one device, place ", root,
                                         ", got tensor ", i, " at place ", *place)));
    }
    calls.emplace_back(devices);
    calls.back().call = CallOf("broadcast", xs[i].requires_grad(), site);
    calls.back().call.spec.collective.root = GroupRank(root);
    calls.back().inputs[static_cast<size_t>(root)] = {xs[i]};
    calls.back().types.assign(static_cast<size_t>(devices.size()), TypeOf(xs[i]));
  }
  std::vector<Tensors> results;
  for (std::vector<Results>& own : ApplyAll(std::move(calls), devices)) {
    results.emplace_back();
    for (Results& result : own) results.back().push_back(std::move(result[0]));
  }
  return results;
}

Tensor ReduceAdd(const Tensors& xs, const DeviceGroup& devices, int destination, CallSite site) {
  std::vector<Tensors> each;
  for (const Tensor& x : xs) each.push_back({x});
  return std::move(ReduceAddCoalesced(each, devices, destination, kBufferSize, site)[0]);
}

Tensors ReduceAddCoalesced(const std::vector<Tensors>& xs, const DeviceGroup& devices,
                           int destination, int64_t buffer_size, CallSite site) {
  const size_t count = xs.empty() ? 0 : xs[0].size();
  const auto refuse = [&](const absl::Status& status) {
    return Tensors(std::max<size_t>(1, count), Failed(devices, status, site));
  };
  if (devices.size() == 0) return refuse(NoDevices("reduce_add"));
  absl::Status status = CheckBuffer("reduce_add", buffer_size);
  if (status.ok()) status = CheckDestination("reduce_add", destination, devices);
  if (status.ok() && xs.size() != static_cast<size_t>(devices.size())) {
    status = BadType(absl::StrCat("reduce_add: expected tensors on each of ", devices.size(),
                                  " devices, got those of ", xs.size()));
  }
  if (!status.ok()) return refuse(status);
  std::vector<GroupCall> calls;
  for (size_t i = 0; i < count; ++i) {
    calls.emplace_back(devices);
    GroupCall& call = calls.back();
    bool record = false;
    for (size_t d = 0; d < xs.size(); ++d) {
      if (xs[d].size() != count) {
        return refuse(
            BadType(absl::StrCat("reduce_add: expected ", count, " tensors on every device, got ",
                                 xs[d].size(), " in list ", d)));
      }
      const std::string what = absl::StrCat("tensor ", i, " of list ", d);
      const absl::StatusOr<int> place = PlaceOf("reduce_add", what, xs[d][i], devices);
      if (!place.ok()) return refuse(place.status());
      Tensors& own = call.inputs[static_cast<size_t>(*place)];
      if (!own.empty()) {
        return refuse(BadType(absl::StrCat("reduce_add: expected one tensor on each device, got ",
                                           what, " on the device of another")));
      }
      if (TypeOf(xs[d][i]) != TypeOf(xs[0][i])) {
        return refuse(
            BadType(absl::StrCat("reduce_add: expected tensors like ", TypeOf(xs[0][i]).ToString(),
                                 ", got ", TypeOf(xs[d][i]).ToString(), " as ", what)));
      }
      own = {xs[d][i]};
      record = record || xs[d][i].requires_grad();
    }
    call.call = CallOf("reduce", record, site);
    call.call.spec.collective.root = GroupRank(destination);
    call.call.spec.collective.reduction = Reduction::kSum;
  }
  Tensors sums;
  std::vector<std::vector<Results>> results = ApplyAll(std::move(calls), devices);
  for (Results& result : results[static_cast<size_t>(destination)]) {
    sums.push_back(std::move(result[0]));
  }
  return sums;
}

// --- Scatter ------------------------------------------------------------------------------------

Tensors Scatter(const Tensor& x, const DeviceGroup& devices, const std::vector<int64_t>& sizes,
                int64_t dim, CallSite site) {
  const auto refuse = [&](const absl::Status& status) {
    return FailedEverywhere(devices, status, site);
  };
  if (devices.size() == 0) return refuse(NoDevices("scatter"));
  const absl::StatusOr<int> root = PlaceOf("scatter", "the tensor", x, devices);
  if (!root.ok()) return refuse(root.status());
  const absl::StatusOr<int64_t> axis = AxisOf("scatter", TypeOf(x), dim);
  if (!axis.ok()) return refuse(axis.status());
  const int64_t rank = static_cast<int64_t>(x.shape().size());
  const absl::StatusOr<std::vector<int64_t>> chunks =
      ChunkSizes("scatter", x.shape()[static_cast<size_t>(*axis)], sizes, devices.size());
  if (!chunks.ok()) return refuse(chunks.status());

  const Tensor whole = *axis == 0 ? x : Transpose(x, ToFront(rank, *axis), site);
  if (!whole.status().ok()) return refuse(whole.status());
  GroupCall call(devices);
  call.call = CallOf("scatter_tensor", x.requires_grad(), site);
  call.call.spec.collective.root = GroupRank(*root);
  call.inputs[static_cast<size_t>(*root)] = {whole};
  std::vector<int64_t> rows;
  for (const int64_t chunk : *chunks) {
    rows.push_back(std::max<int64_t>(chunk, 0));
    call.types.push_back(TypeOf(whole));
    call.types.back().dims[0] = Dim(rows.back());
  }
  const bool even = std::all_of(rows.begin(), rows.end(), [&](int64_t n) { return n == rows[0]; });
  if (!even) call.call.spec.collective.counts = rows;
  std::vector<std::vector<Results>> results = Apply({call}, devices);
  Tensors pieces;
  for (int64_t i = 0; i < CountChunks(*chunks); ++i) {
    Tensor& piece = results[static_cast<size_t>(i)][0][0];
    pieces.push_back(*axis == 0 ? piece : Transpose(piece, FromFront(rank, *axis), site));
  }
  return pieces;
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

// --- Gather -------------------------------------------------------------------------------------

namespace {

// What is gathered, checked; tensors of no dimensions have become rows.
struct ToGather {
  Tensors xs;
  int64_t axis = 0;
  TensorType type;  // of the whole
};

absl::StatusOr<ToGather> CheckGather(const Tensors& xs, const DeviceGroup& devices, int64_t dim,
                                     std::vector<std::string>* warnings, CallSite site) {
  if (devices.size() == 0) return NoDevices("gather");
  if (xs.empty()) return BadType("gather: expected at least one tensor, got none");
  ToGather to;
  to.xs = xs;
  std::vector<bool> taken(static_cast<size_t>(devices.size()), false);
  bool scalars = true;
  for (size_t i = 0; i < xs.size(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int place,
                            PlaceOf("gather", absl::StrCat("tensor ", i), xs[i], devices));
    if (taken[static_cast<size_t>(place)]) {
      return BadType(absl::StrCat("gather: expected tensors on different devices, got tensor ", i,
                                  " on the device of another"));
    }
    taken[static_cast<size_t>(place)] = true;
    scalars = scalars && xs[i].shape().empty();
  }
  if (scalars && (dim == 0 || dim == -1)) {
    if (warnings != nullptr) {
      warnings->push_back(absl::StrCat(
          "gather: all tensors have no dimensions and are to be gathered along dimension 0: the "
          "result is a vector of ",
          xs.size(), " (", SourceOf(site), ")"));
    }
    for (Tensor& x : to.xs) x = Reshape(x, {1}, site);
  }
  for (const Tensor& x : to.xs) CHORUS_RETURN_IF_ERROR(x.status());
  to.type = TypeOf(to.xs[0]);
  CHORUS_ASSIGN_OR_RETURN(to.axis, AxisOf("gather", to.type, dim));
  const size_t axis = static_cast<size_t>(to.axis);
  int64_t size = 0;
  for (size_t i = 0; i < to.xs.size(); ++i) {
    TensorType type = TypeOf(to.xs[i]);
    if (axis < type.dims.size()) {
      size += type.dims[axis].size;
      type.dims[axis] = to.type.dims[axis];
    }
    if (type != to.type) {
      return BadType(absl::StrCat("gather: expected tensors like ", to.type.ToString(),
                                  " but for dimension ", to.axis, ", got ",
                                  TypeOf(to.xs[i]).ToString(), " as tensor ", i));
    }
  }
  to.type.dims[axis] = Dim(size);
  return to;
}

}  // namespace

Tensor Gather(const Tensors& xs, const DeviceGroup& devices, int destination, int64_t dim,
              std::vector<std::string>* warnings, CallSite site) {
  absl::StatusOr<ToGather> checked = CheckGather(xs, devices, dim, warnings, site);
  if (!checked.ok()) return Failed(devices, checked.status(), site);
  const absl::Status status = CheckDestination("gather", destination, devices);
  if (!status.ok()) return Failed(devices, status, site);
  const int64_t axis = checked->axis;
  const int64_t rank = static_cast<int64_t>(checked->type.dims.size());
  GroupCall call(devices);
  std::vector<int64_t> rows(call.inputs.size(), 0);
  std::vector<size_t> order;  // places of the tensors
  for (const Tensor& x : checked->xs) {
    const size_t place = static_cast<size_t>(devices.PlaceOf(x.device()));
    const Tensor piece = axis == 0 ? x : Transpose(x, ToFront(rank, axis), site);
    if (!piece.status().ok()) return piece;
    call.inputs[place] = {piece};
    rows[place] = piece.shape()[0];
    order.push_back(place);
  }
  // A device without a tensor gives one of no rows.
  Shape nothing = call.inputs[order[0]][0].shape();
  nothing[0] = 0;
  for (size_t p = 0; p < call.inputs.size(); ++p) {
    if (!call.inputs[p].empty()) continue;
    call.inputs[p] = {
        Zeros(devices.device(static_cast<int>(p)), checked->type.dtype, nothing, site)};
  }
  const bool in_order = std::is_sorted(order.begin(), order.end());
  call.call =
      CallOf(in_order ? "gather_into_tensor" : "gather", AnyRequiresGrad(checked->xs), site);
  call.call.spec.collective.root = GroupRank(destination);
  const bool even = std::all_of(rows.begin(), rows.end(), [&](int64_t n) { return n == rows[0]; });
  if (!even) call.call.spec.collective.counts = rows;
  std::vector<std::vector<Results>> results = Apply({call}, devices);
  Results& gathered = results[static_cast<size_t>(destination)][0];
  Tensor whole = gathered[0];
  if (!in_order && whole.status().ok()) {
    Tensors pieces;
    for (const size_t place : order) pieces.push_back(gathered[place]);
    whole = Concat(pieces, 0, site);
  }
  if (axis == 0 || !whole.status().ok()) return whole;
  return Transpose(whole, FromFront(rank, axis), site);
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
  } else {
    host->status = WithSource(checked.status(), SourceOf(site));
  }
  return Access::Make<HostTensor>(std::move(host));
}

// --- Nested values ------------------------------------------------------------------------------

namespace {

const char* KindName(Nest::Kind kind) {
  switch (kind) {
    case Nest::Kind::kNothing:
      return "nothing";
    case Nest::Kind::kTensor:
      return "a tensor";
    case Nest::Kind::kHost:
      return "a tensor of the host";
    case Nest::Kind::kList:
      return "a list";
    case Nest::Kind::kTuple:
      return "a tuple";
    case Nest::Kind::kMap:
      return "a map";
    case Nest::Kind::kOpaque:
      break;
  }
  return "an opaque value";
}

absl::Status FirstError(const Tensors& tensors) {
  for (const Tensor& tensor : tensors) CHORUS_RETURN_IF_ERROR(tensor.status());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Nest>> ScatterNest(const Nest& nest, const DeviceGroup& devices,
                                              int64_t dim, CallSite site) {
  if (devices.size() == 0) return WithSource(NoDevices("scatter"), SourceOf(site));
  const size_t everywhere = static_cast<size_t>(devices.size());
  std::vector<Nest> each;
  switch (nest.kind()) {
    case Nest::Kind::kTensor:
    case Nest::Kind::kHost: {
      Tensors chunks = nest.kind() == Nest::Kind::kTensor
                           ? Scatter(nest.tensor(), devices, {}, dim, site)
                           : Scatter(nest.host(), devices, {}, dim, site);
      CHORUS_RETURN_IF_ERROR(FirstError(chunks));
      each.assign(std::make_move_iterator(chunks.begin()), std::make_move_iterator(chunks.end()));
      return each;
    }
    case Nest::Kind::kList:
    case Nest::Kind::kTuple: {
      std::vector<Nest::Items> items(everywhere);
      for (const Nest& item : nest.items()) {
        CHORUS_ASSIGN_OR_RETURN(std::vector<Nest> parts, ScatterNest(item, devices, dim, site));
        items.resize(std::min(items.size(), parts.size()));
        for (size_t i = 0; i < items.size(); ++i) items[i].push_back(std::move(parts[i]));
      }
      for (Nest::Items& own : items) {
        each.push_back(nest.kind() == Nest::Kind::kList ? Nest::List(std::move(own))
                                                        : Nest::Tuple(std::move(own)));
      }
      return each;
    }
    case Nest::Kind::kMap: {
      std::vector<Nest::Fields> fields(everywhere);
      for (const auto& field : nest.fields()) {
        CHORUS_ASSIGN_OR_RETURN(std::vector<Nest> parts,
                                ScatterNest(field.second, devices, dim, site));
        fields.resize(std::min(fields.size(), parts.size()));
        for (size_t i = 0; i < fields.size(); ++i) fields[i][field.first] = std::move(parts[i]);
      }
      for (Nest::Fields& own : fields) each.push_back(Nest::Map(std::move(own)));
      return each;
    }
    case Nest::Kind::kNothing:
    case Nest::Kind::kOpaque:
      break;
  }
  each.assign(everywhere, nest);
  return each;
}

absl::StatusOr<ScatteredInputs> ScatterInputs(const Nest::Items& inputs,
                                              const Nest::Fields& keywords,
                                              const DeviceGroup& devices, int64_t dim,
                                              CallSite site) {
  if (devices.size() == 0) return WithSource(NoDevices("scatter"), SourceOf(site));
  ScatteredInputs scattered;
  if (!inputs.empty()) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Nest> each,
                            ScatterNest(Nest::Tuple(inputs), devices, dim, site));
    for (const Nest& own : each) scattered.inputs.push_back(own.items());
  }
  if (!keywords.empty()) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Nest> each,
                            ScatterNest(Nest::Map(keywords), devices, dim, site));
    for (const Nest& own : each) scattered.keywords.push_back(own.fields());
  }
  const size_t count = std::max(scattered.inputs.size(), scattered.keywords.size());
  scattered.inputs.resize(count);
  scattered.keywords.resize(count);
  return scattered;
}

absl::StatusOr<Nest> GatherNest(const std::vector<Nest>& nests, const DeviceGroup& devices,
                                int destination, int64_t dim, std::vector<std::string>* warnings,
                                CallSite site) {
  const auto refuse = [&](const std::string& text) {
    return WithSource(BadType(absl::StrCat("gather: ", text)), SourceOf(site));
  };
  if (nests.empty()) return refuse("expected what at least one device gave, got none");
  const Nest& first = nests[0];
  for (size_t i = 1; i < nests.size(); ++i) {
    if (nests[i].kind() == first.kind()) continue;
    return refuse(absl::StrCat("expected ", KindName(first.kind()), " from every device, got ",
                               KindName(nests[i].kind()), " from device ", i));
  }
  switch (first.kind()) {
    case Nest::Kind::kNothing:
      return Nest();
    case Nest::Kind::kTensor: {
      Tensors xs;
      for (const Nest& nest : nests) xs.push_back(nest.tensor());
      Tensor whole = Gather(xs, devices, destination, dim, warnings, site);
      CHORUS_RETURN_IF_ERROR(whole.status());
      return Nest(std::move(whole));
    }
    case Nest::Kind::kList:
    case Nest::Kind::kTuple: {
      Nest::Items items;
      for (size_t i = 1; i < nests.size(); ++i) {
        if (nests[i].items().size() == first.items().size()) continue;
        return refuse(absl::StrCat("expected ", first.items().size(),
                                   " items from every device, got ", nests[i].items().size(),
                                   " from device ", i));
      }
      for (size_t k = 0; k < first.items().size(); ++k) {
        std::vector<Nest> parts;
        for (const Nest& nest : nests) parts.push_back(nest.items()[k]);
        CHORUS_ASSIGN_OR_RETURN(Nest item,
                                GatherNest(parts, devices, destination, dim, warnings, site));
        items.push_back(std::move(item));
      }
      return first.kind() == Nest::Kind::kList ? Nest::List(std::move(items))
                                               : Nest::Tuple(std::move(items));
    }
    case Nest::Kind::kMap: {
      Nest::Fields fields;
      for (const auto& field : first.fields()) {
        std::vector<Nest> parts;
        for (size_t i = 0; i < nests.size(); ++i) {
          const auto found = nests[i].fields().find(field.first);
          if (found == nests[i].fields().end() ||
              nests[i].fields().size() != first.fields().size()) {
            return refuse(absl::StrCat("expected maps of the same ", first.fields().size(),
                                       " keys from every device, got another one from device ", i));
          }
          parts.push_back(found->second);
        }
        CHORUS_ASSIGN_OR_RETURN(fields[field.first],
                                GatherNest(parts, devices, destination, dim, warnings, site));
      }
      return Nest::Map(std::move(fields));
    }
    case Nest::Kind::kHost:
    case Nest::Kind::kOpaque:
      break;
  }
  return refuse(absl::StrCat("expected tensors, lists, tuples, maps or nothing, got ",
                             KindName(first.kind())));
}

}  // namespace parallel
}  // namespace chorus
