#include "chorus/parallel/device_group.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "chorus/math.h"
#include "client/internal/access.h"
#include "client/internal/member.h"
#include "client/internal/pieces.h"
#include "client/internal/record.h"
#include "client/internal/run_draft.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "core/base/error.h"
#include "core/ops/registry.h"

namespace chorus {
namespace parallel {
namespace {

using internal::AnyRequiresGrad;
using internal::ApplyCollectives;
using internal::AxisOf;
using internal::CallRequest;
using internal::CheckGather;
using internal::ChunkSizes;
using internal::Companions;
using internal::CountChunks;
using internal::Failed;
using internal::FailedEverywhere;
using internal::GradNodePtr;
using internal::ImplOf;
using internal::IndexOf;
using internal::kMaxRunValues;
using internal::MemberCall;
using internal::MemberCore;
using internal::MemberOf;
using internal::NoDevices;
using internal::OwnWorld;
using internal::Results;
using internal::SessionOf;
using internal::Tensors;
using internal::ToGather;
using internal::TypeOf;

absl::Status CheckDestination(absl::string_view op, int destination, const DeviceGroup& devices) {
  if (destination >= 0 && destination < devices.size()) return absl::OkStatus();
  return BadType(absl::StrCat(op, ": expected a destination among ", devices.size(),
                              " devices, got ", destination));
}

absl::Status CheckBuffer(absl::string_view op, int64_t buffer_size) {
  if (buffer_size > 0) return absl::OkStatus();
  return BadType(absl::StrCat(op, ": expected a buffer of at least 1 byte, got ", buffer_size));
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
  std::vector<Tensors> inputs;    // by index
  std::vector<TensorType> types;  // by index: of what a member without inputs gets; empty: nothing
};

CallRequest CallOf(const char* op, bool record, CallSite site) {
  CallRequest call(FindOp(op), site);
  call.record = record;
  return call;
}

// The results of the calls, made in one run, by [index][call]. A caller that differentiates one
// result of a call takes part in its gradient for all devices.
std::vector<std::vector<Results>> ApplyGroupCalls(const std::vector<GroupCall>& calls,
                                                  const DeviceGroup& devices) {
  const size_t device_count = static_cast<size_t>(devices.size());
  std::vector<CallRequest> variants;
  variants.reserve(calls.size() * device_count);
  std::vector<MemberCall> members;
  // All devices of one call before the next call: gradients are asked for in that order, too, and
  // who asks for one waits for room, which comes when all of an earlier one's devices have asked.
  for (const GroupCall& call : calls) {
    for (size_t p = 0; p < device_count; ++p) {
      const std::shared_ptr<MemberCore>& member = MemberOf(devices.world(static_cast<int>(p)));
      CallRequest& variant = variants.emplace_back(call.call);
      if (call.inputs[p].empty()) {
        variant.spec.collective.counts.clear();
        if (!call.types.empty()) variant.spec.type = &call.types[p];
      }
      members.push_back({&variant, call.inputs[p], &member, member->everybody});
    }
  }
  std::vector<Results> flat = ApplyCollectives(members);
  std::vector<std::vector<Results>> results(device_count);
  for (size_t i = 0; i < flat.size(); ++i) {
    results[i % device_count].push_back(std::move(flat[i]));
  }
  for (size_t c = 0; c < calls.size(); ++c) {
    auto nodes = std::make_shared<std::vector<GradNodePtr>>();
    for (const auto& device_results : results) {
      const GradNodePtr& node = ImplOf(device_results[c][0])->node;
      if (node != nullptr) nodes->push_back(node);
    }
    if (nodes->empty()) continue;
    const Companions companions = std::move(nodes);
    for (auto& device_results : results) {
      for (Tensor& result : device_results[c]) {
        if (ImplOf(result)->node != nullptr) ImplOf(result)->companions = companions;
      }
    }
  }
  return results;
}

// The same in as few runs as may be.
std::vector<std::vector<Results>> ApplyGroupCallsInRuns(std::vector<GroupCall> calls,
                                                        const DeviceGroup& devices) {
  const size_t device_count = static_cast<size_t>(devices.size());
  const size_t most = std::max<size_t>(1, kMaxRunValues / (2 * device_count));
  std::vector<std::vector<Results>> results(device_count);
  for (size_t begin = 0; begin < calls.size(); begin += most) {
    const size_t end = std::min(calls.size(), begin + most);
    std::vector<GroupCall> chunk(std::make_move_iterator(calls.begin() + begin),
                                 std::make_move_iterator(calls.begin() + end));
    std::vector<std::vector<Results>> chunk_results = ApplyGroupCalls(chunk, devices);
    for (size_t p = 0; p < device_count; ++p) {
      std::move(chunk_results[p].begin(), chunk_results[p].end(), std::back_inserter(results[p]));
    }
  }
  return results;
}

}  // namespace

absl::StatusOr<DeviceGroup> DeviceGroup::Create(const Session& session,
                                                const std::vector<int>& devices) {
  std::vector<int> slots = devices;
  if (slots.empty()) {
    slots.resize(static_cast<size_t>(session.device_count()));
    std::iota(slots.begin(), slots.end(), 0);
  }
  if (slots.empty()) {
    return MakeError(Reason::kWrongState,
                     "DeviceGroup: expected a session with devices, got an empty one");
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0 || slots[i] >= session.device_count()) {
      return BadType(absl::StrCat("DeviceGroup: device ", slots[i], " is none of the session's ",
                                  session.device_count()));
    }
    if (std::find(slots.begin(), slots.begin() + static_cast<int64_t>(i), slots[i]) !=
        slots.begin() + static_cast<int64_t>(i)) {
      return BadType(absl::StrCat("DeviceGroup: device ", slots[i], " is named twice"));
    }
  }
  // Of nobody else's: sessions of one tenant share the names of worlds.
  std::random_device random;
  WorldOptions options;
  options.name = absl::StrCat("devices-", getpid(), "-", absl::Hex(random()), absl::Hex(random()));
  options.size = static_cast<int>(slots.size());
  // A join waits for the others.
  std::vector<absl::StatusOr<World>> joined(slots.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < slots.size(); ++i) {
    WorldOptions member_options = options;
    member_options.rank = static_cast<int>(i);
    member_options.device = slots[i];
    threads.emplace_back(
        [&session, &joined, member_options, i] { joined[i] = session.Join(member_options); });
  }
  for (std::thread& thread : threads) thread.join();
  // What has joined leaves again, also where the group does not come about.
  const auto own_world = std::make_shared<OwnWorld>(SessionOf(session));
  DeviceGroup group;
  absl::Status status;
  for (absl::StatusOr<World>& world : joined) {
    status.Update(world.status());
    if (!world.ok()) continue;
    MemberOf(*world)->own_world = own_world;
    group.worlds_.push_back(*std::move(world));
  }
  if (!status.ok()) return status;
  return group;
}

int DeviceGroup::IndexOf(const DeviceRef& device) const {
  for (int index = 0; index < size(); ++index) {
    if (this->device(index) == device) return index;
  }
  return -1;
}

// --- Broadcast and ReduceAdd --------------------------------------------------------------------

Tensors Broadcast(const Tensor& x, const DeviceGroup& devices, CallSite site) {
  std::vector<Tensors> results = BroadcastCoalesced({x}, devices, kBufferSize, site);
  Tensors each;
  for (Tensors& device_results : results) each.push_back(std::move(device_results[0]));
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
    const absl::StatusOr<int> index =
        IndexOf("broadcast", absl::StrCat("tensor ", i), xs[i], devices);
    if (!index.ok()) return refuse(index.status());
    if (i == 0) root = *index;
    if (*index != root) {
      return refuse(BadType(absl::StrCat("broadcast: expected tensors on one device, device index ",
                                         root, ", got tensor ", i, " at device index ", *index)));
    }
    calls.emplace_back(devices);
    calls.back().call = CallOf("broadcast", xs[i].requires_grad(), site);
    calls.back().call.spec.collective.root = GroupRank(root);
    calls.back().inputs[static_cast<size_t>(root)] = {xs[i]};
    calls.back().types.assign(static_cast<size_t>(devices.size()), TypeOf(xs[i]));
  }
  std::vector<Tensors> results;
  for (std::vector<Results>& call_results : ApplyGroupCallsInRuns(std::move(calls), devices)) {
    results.emplace_back();
    for (Results& result : call_results) results.back().push_back(std::move(result[0]));
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
  for (size_t d = 0; status.ok() && d < xs.size(); ++d) {
    if (xs[d].size() == count) continue;
    status = BadType(absl::StrCat("reduce_add: expected ", count, " tensors on every device, got ",
                                  xs[d].size(), " in list ", d));
  }
  if (!status.ok()) return refuse(status);
  std::vector<GroupCall> calls;
  for (size_t i = 0; i < count; ++i) {
    calls.emplace_back(devices);
    GroupCall& call = calls.back();
    bool record = false;
    for (size_t d = 0; d < xs.size(); ++d) {
      const std::string what = absl::StrCat("tensor ", i, " of list ", d);
      const absl::StatusOr<int> index = IndexOf("reduce_add", what, xs[d][i], devices);
      if (!index.ok()) return refuse(index.status());
      Tensors& operands = call.inputs[static_cast<size_t>(*index)];
      if (!operands.empty()) {
        return refuse(BadType(absl::StrCat("reduce_add: expected one tensor on each device, got ",
                                           what, " on the device of another")));
      }
      if (TypeOf(xs[d][i]) != TypeOf(xs[0][i])) {
        return refuse(
            BadType(absl::StrCat("reduce_add: expected tensors like ", TypeOf(xs[0][i]).ToString(),
                                 ", got ", TypeOf(xs[d][i]).ToString(), " as ", what)));
      }
      operands = {xs[d][i]};
      record = record || xs[d][i].requires_grad();
    }
    call.call = CallOf("reduce", record, site);
    call.call.spec.collective.root = GroupRank(destination);
    call.call.spec.collective.reduction = Reduction::kSum;
  }
  Tensors sums;
  std::vector<std::vector<Results>> results = ApplyGroupCallsInRuns(std::move(calls), devices);
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
  const absl::StatusOr<int> root = IndexOf("scatter", "the tensor", x, devices);
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
  std::vector<std::vector<Results>> results = ApplyGroupCalls({call}, devices);
  Tensors pieces;
  for (int64_t i = 0; i < CountChunks(*chunks); ++i) {
    Tensor& piece = results[static_cast<size_t>(i)][0][0];
    pieces.push_back(*axis == 0 ? piece : Transpose(piece, FromFront(rank, *axis), site));
  }
  return pieces;
}

// --- Gather -------------------------------------------------------------------------------------

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
  std::vector<size_t> order;  // indices of the tensors
  for (const Tensor& x : checked->xs) {
    const size_t index = static_cast<size_t>(devices.IndexOf(x.device()));
    const Tensor piece = axis == 0 ? x : Transpose(x, ToFront(rank, axis), site);
    if (!piece.status().ok()) return piece;
    call.inputs[index] = {piece};
    rows[index] = piece.shape()[0];
    order.push_back(index);
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
  std::vector<std::vector<Results>> results = ApplyGroupCalls({call}, devices);
  Results& gathered = results[static_cast<size_t>(destination)][0];
  Tensor whole = gathered[0];
  if (!in_order && whole.status().ok()) {
    Tensors pieces;
    for (const size_t index : order) pieces.push_back(gathered[index]);
    whole = Concat(pieces, 0, site);
  }
  if (axis == 0 || !whole.status().ok()) return whole;
  return Transpose(whole, FromFront(rank, axis), site);
}

}  // namespace parallel
}  // namespace chorus
