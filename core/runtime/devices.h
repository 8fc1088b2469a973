// The devices of a node and the way to them, in this process or in another.
//
// Threads: said at Devices. Ownership: its executors must not outlive it. Errors: said at each
// function.
#ifndef CHORUS_CORE_RUNTIME_DEVICES_H_
#define CHORUS_CORE_RUNTIME_DEVICES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/runtime/executor.h"

namespace chorus {

struct DevicesInfo {
  std::string backend;            // Backend::name
  std::vector<int> domains;       // of each device: Backend::domain
  int cores_per_device = 1;       // Backend::cores_per_device
  bool host_addressable = false;  // Backend::host_addressable
  int64_t at_once_bytes = 0;      // Backend::at_once_bytes
  // They belong to another process: WorkspaceBytes waits for its answer.
  bool is_far = false;

  int count() const { return static_cast<int>(domains.size()); }
};

// Threads: one thread makes all calls, but info() and WorkspaceBytes, which any may.
class Devices {
 public:
  virtual ~Devices() = default;
  virtual const DevicesInfo& info() const = 0;
  // Backend::WorkspaceBytes.
  virtual absl::StatusOr<int64_t> WorkspaceBytes(const NodeView& node,
                                                 absl::Span<const TensorType> outputs) const = 0;
  // Device::Allocate and Free. Memory of devices that are lost is gone, and is still to be freed.
  virtual absl::StatusOr<DeviceAddress> Allocate(int device, int64_t bytes) = 0;
  // 0: it is free. Another process is told of it later: then the number of this call, of which
  // freed() says when that has been done. Until then something waits that takes memory here.
  virtual int64_t Free(int device, DeviceAddress address) = 0;
  // What has such a number up to this one is free; numbers ascend.
  virtual int64_t freed() const = 0;
  // At most one for each device at a time.
  virtual std::unique_ptr<Executor> OpenExecutor(int device, Executor::OnEvent on_event,
                                                 DeviceExecutorOptions options) = 0;
};

// The devices of a backend in this process, which must outlive them.
std::unique_ptr<Devices> DevicesOf(Backend* backend);

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_DEVICES_H_
