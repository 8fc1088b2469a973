#include "core/runtime/devices.h"

#include <utility>

namespace chorus {
namespace {

class LocalDevices final : public Devices {
 public:
  explicit LocalDevices(Backend* backend) : backend_(backend) {
    info_.backend = std::string(backend->name());
    for (int i = 0; i < backend->device_count(); ++i) info_.domains.push_back(backend->domain(i));
    info_.cores_per_device = backend->cores_per_device();
    info_.host_addressable = backend->host_addressable();
    info_.at_once_bytes = backend->at_once_bytes();
  }

  const DevicesInfo& info() const override { return info_; }
  absl::StatusOr<int64_t> WorkspaceBytes(const NodeView& node,
                                         absl::Span<const TensorType> outputs) const override {
    return backend_->WorkspaceBytes(node, outputs);
  }
  absl::StatusOr<DeviceAddress> Allocate(int device, int64_t bytes) override {
    return backend_->device(device)->Allocate(bytes);
  }
  int64_t Free(int device, DeviceAddress address) override {
    backend_->device(device)->Free(address);
    return 0;
  }
  int64_t freed() const override { return 0; }
  std::unique_ptr<Executor> OpenExecutor(int device, Executor::OnEvent on_event,
                                         DeviceExecutorOptions options) override {
    return CreateDeviceExecutor(backend_, device, std::move(on_event), std::move(options));
  }

 private:
  Backend* const backend_;
  DevicesInfo info_;
};

}  // namespace

std::unique_ptr<Devices> DevicesOf(Backend* backend) {
  return std::make_unique<LocalDevices>(backend);
}

}  // namespace chorus
