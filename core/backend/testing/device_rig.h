// A backend with a stream on each device and blocking transfers, for tests and benchmarks.
//
// Threads: thread-compatible. Ownership: owns the backend, and what is allocated through it.
// Errors: Synchronize gives the stream's; what else cannot be done, or stands still, ends the
// process.
#ifndef CHORUS_CORE_BACKEND_TESTING_DEVICE_RIG_H_
#define CHORUS_CORE_BACKEND_TESTING_DEVICE_RIG_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "core/backend/backend.h"
#include "core/base/mutex.h"

namespace chorus {

// All devices share an address space.
inline bool InOneDomain(const Backend& backend) {
  for (int i = 0; i < backend.device_count(); ++i) {
    if (backend.domain(i) != backend.domain(0)) return false;
  }
  return true;
}

// Threads: Synchronize may come from any thread; the rest belongs to one. Any wait that takes
// longer than a minute, and any transfer that fails, ends in DEADLINE_EXCEEDED or aborts the test.
class DeviceRig {
 public:
  explicit DeviceRig(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {
    for (int i = 0; i < backend_->device_count(); ++i) {
      streams_.push_back(backend_->device(i)->CreateStream());
      transfers_.push_back(backend_->device(i)->CreateStream());
    }
  }
  ~DeviceRig() { FreeAll(); }

  Backend* backend() { return backend_.get(); }
  Stream* stream(int device) { return streams_[device].get(); }

  // Every member of a communicator of all devices.
  std::vector<std::unique_ptr<Communicator>> OpenAll(uint64_t id) {
    std::vector<int> devices(streams_.size());
    std::iota(devices.begin(), devices.end(), 0);
    std::vector<std::unique_ptr<Communicator>> members;
    for (const int device : devices) {
      auto member = backend_->OpenCommunicator(id, devices, device);
      if (!member.ok()) Die("OpenCommunicator", member.status());
      members.push_back(*std::move(member));
    }
    return members;
  }

  static CollectiveCall AllReduceCall(DType dtype, int64_t count, DeviceAddress input,
                                      DeviceAddress output) {
    CollectiveCall call;
    call.kind = CollectiveKind::kAllReduce;
    call.reduction = Reduction::kSum;
    call.dtype = dtype;
    call.count = count;
    call.inputs = {input};
    call.outputs = {output};
    return call;
  }

  DeviceAddress Allocate(int device, int64_t bytes) {
    auto address = backend_->device(device)->Allocate(bytes);
    if (!address.ok()) Die("Allocate", address.status());
    allocated_.emplace_back(device, *address);
    return *address;
  }
  template <typename T>
  DeviceAddress Upload(int device, const std::vector<T>& data) {
    // An empty result has an address as well, as in a run.
    const DeviceAddress address =
        Allocate(device, std::max<int64_t>(1, static_cast<int64_t>(data.size() * sizeof(T))));
    Write(device, address, data);
    return address;
  }
  template <typename T>
  void Write(int device, DeviceAddress to, const std::vector<T>& data) {
    transfers_[device]->CopyFromHost(to, data.data(), data.size() * sizeof(T));
    Check(device, "Write");
  }
  template <typename T>
  std::vector<T> Download(int device, DeviceAddress from, int64_t count) {
    std::vector<T> data(count);
    transfers_[device]->CopyToHost(data.data(), from, count * sizeof(T));
    Check(device, "Download");
    return data;
  }
  void FreeAll() {
    for (const auto& block : allocated_) backend_->device(block.first)->Free(block.second);
    allocated_.clear();
  }

  // Waits until everything on the device's stream has passed: the status of its callback.
  absl::Status Synchronize(int device) { return SynchronizeStream(stream(device)); }
  static absl::Status SynchronizeStream(Stream* stream) {
    struct Passed {
      Mutex mutex;
      CondVar changed;
      bool passed ABSL_GUARDED_BY(mutex) = false;
      absl::Status status ABSL_GUARDED_BY(mutex);
    };
    auto state = std::make_shared<Passed>();
    stream->Callback([state](absl::Status status) {
      MutexLock lock(&state->mutex);
      state->passed = true;
      state->status = std::move(status);
      state->changed.SignalAll();
    });
    MutexLock lock(&state->mutex);
    for (int i = 0; i < 600 && !state->passed; ++i) {
      state->changed.WaitFor(&state->mutex, absl::Milliseconds(100));
    }
    if (!state->passed) return absl::DeadlineExceededError("the stream stands still");
    return std::move(state->status);  // not shared with the thread that lets go of `state`
  }

 private:
  void Check(int device, const char* what) {
    const absl::Status status = SynchronizeStream(transfers_[device].get());
    if (!status.ok()) Die(what, status);
  }
  [[noreturn]] static void Die(const char* what, const absl::Status& status) {
    std::fprintf(stderr, "DeviceRig::%s: %s\n", what, status.ToString().c_str());
    std::abort();
  }

  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::unique_ptr<Stream>> transfers_;
  std::vector<std::pair<int, DeviceAddress>> allocated_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_TESTING_DEVICE_RIG_H_
