// The devices of one session as a group, and what goes between them.
//
// Threads: chorus/parallel.h, which also says what is recorded.
// Ownership: a DeviceGroup is a handle. Errors: chorus/parallel.h; Create returns its own.
#ifndef CHORUS_CLIENT_PARALLEL_DEVICE_GROUP_H_
#define CHORUS_CLIENT_PARALLEL_DEVICE_GROUP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {
namespace parallel {

// Devices of one session, in an order: indices 0 to size() - 1. A handle; copies are the same
// group. Its world goes when nobody has it any more: no handle of the group or of a member, no
// result that has history there, no function compiled with it. What was called before still comes.
class DeviceGroup {
 public:
  DeviceGroup() = default;  // of no devices: calls are refused

  // `devices`: slots of the session, each once; empty: all of them, in order. Joins a world
  // of its own, with a member on each. INVALID_ARGUMENT: a device that is none, or twice.
  static absl::StatusOr<DeviceGroup> Create(const Session& session,
                                            const std::vector<int>& devices = {});

  int size() const { return static_cast<int>(worlds_.size()); }
  DeviceRef device(int index) const { return worlds_[static_cast<size_t>(index)].device(); }
  // The member on a device, for collectives of chorus.h: there, all members have to call.
  const World& world(int index) const { return worlds_[static_cast<size_t>(index)]; }
  int IndexOf(const DeviceRef& device) const;  // -1: not in the group

 private:
  std::vector<World> worlds_;  // by index
};

// What coalescing takes together, in bytes, where somebody asks. It has no influence on results.
inline constexpr int64_t kBufferSize = 10485760;

// A copy of `x`, which is on a device of the group, on each device, by index. Gradient: ReduceAdd
// to x's device.
std::vector<Tensor> Broadcast(const Tensor& x, const DeviceGroup& devices,
                              CallSite site = CallSite::Here());
// The same of several tensors, all on one device: [index][tensor]. A tensor that requires no
// gradient gives results that require none.
std::vector<std::vector<Tensor>> BroadcastCoalesced(const std::vector<Tensor>& xs,
                                                    const DeviceGroup& devices,
                                                    int64_t buffer_size = kBufferSize,
                                                    CallSite site = CallSite::Here());

// The sum of `xs`, one tensor on each device, of one dtype and shape, on the device of index
// `destination`. Added in the one tree over the indices of all devices (chorus.h), so bits do not
// depend on the destination. Gradient: Broadcast.
Tensor ReduceAdd(const std::vector<Tensor>& xs, const DeviceGroup& devices, int destination = 0,
                 CallSite site = CallSite::Here());
// The same of several: `xs` by [index][tensor].
std::vector<Tensor> ReduceAddCoalesced(const std::vector<std::vector<Tensor>>& xs,
                                       const DeviceGroup& devices, int destination = 0,
                                       int64_t buffer_size = kBufferSize,
                                       CallSite site = CallSite::Here());

// Chunks of `x` along `dim` (negative: from the end), chunk i on device i. `sizes`: of each
// device's chunk, zeros allowed, `dim`'s size in all; empty: chunks of ceil(size / devices), so
// that there may be fewer chunks than devices, or as many empty ones as devices where the size is
// 0. `x` has at least one dimension. Gradient: Gather to x's device.
std::vector<Tensor> Scatter(const Tensor& x, const DeviceGroup& devices,
                            const std::vector<int64_t>& sizes = {}, int64_t dim = 0,
                            CallSite site = CallSite::Here());

// `xs`, on different devices of the group, one after the other along `dim`, on the device of index
// `destination`. Of one dtype, and of one shape but for `dim`. Tensors of no dimensions make a
// vector where `dim` is 0, and `warnings` says so where it is given. Gradient: Scatter by their
// sizes.
Tensor Gather(const std::vector<Tensor>& xs, const DeviceGroup& devices, int destination = 0,
              int64_t dim = 0, std::vector<std::string>* warnings = nullptr,
              CallSite site = CallSite::Here());

}  // namespace parallel
}  // namespace chorus

#endif  // CHORUS_CLIENT_PARALLEL_DEVICE_GROUP_H_
