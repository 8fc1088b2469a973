// A module on several devices of one session, as torch.nn.parallel has it: every device works on a
// piece of the inputs with a replica of the module, which gets the sum of their gradients.
//
//   CHORUS_ASSIGN_OR_RETURN(auto devices, chorus::parallel::DeviceGroup::Create(session));
//   chorus::nn::DataParallel model(block, devices);  // `block` is on devices.device(0)
//   Tensor y = model(x);                             // all rows, on devices.device(0)
//
// It is made of chorus/parallel.h, and so are its gradients, of any order. In a compiled function
// all devices are one graph: one run a step.
//
// Threads: as chorus/nn/module.h; the calls on one DeviceGroup must be ordered by the caller.
// Ownership: replicas refer to the module that they are of (Module::WithTensors). A DataParallel
// has
//   its module for a part, "module".
// Errors: returned, or in the tensor that is; with the line of the call. INVALID_ARGUMENT kBadType:
//   a module with a variable elsewhere than on the first device, which both are named, or arguments
//   that do not fit. FAILED_PRECONDITION kWrongState: it has none yet. Whatever is known without
//   waiting when a replica has been called is an error of that replica (ParallelApply). What the
//   daemon alone finds out, such as a kernel that fails or no memory, the results carry: it comes
//   where they are waited for. An exception of a replica goes on to the caller; as behind an error,
//   the devices are in line.
#ifndef CHORUS_CLIENT_NN_DATA_PARALLEL_H_
#define CHORUS_CLIENT_NN_DATA_PARALLEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "chorus/call_site.h"
#include "chorus/nn/module.h"
#include "chorus/parallel.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

// A replica of `module`, which is on the first device, on each device, by index. Parameters, and
// buffers that are given a tensor with a history (StateScope), are broadcast with it: their
// gradients are added up in the module's own. The first replica has the module's buffers for its
// own, so what it Sets is kept; what the others Set goes with them. `detach`: without history.
absl::StatusOr<Modules> Replicate(Module& module, const parallel::DeviceGroup& devices,
                                  bool detach = false, CallSite site = CallSite::Here());

// What each module gives for its inputs and keywords (of none: for inputs alone), called in order
// on this thread: under its NoGrad, if any. Calls return at once, so that the devices compute at a
// time; a module that reads a tensor while it is called holds up those behind it. Where `devices`
// are given, tensors of result i that are elsewhere are copied to devices[i]. All are called, also
// when one fails; then the error is that of the first one that failed, with "in replica 1 on device
// 1". INVALID_ARGUMENT: lists of other lengths than `modules`, a null one.
absl::StatusOr<std::vector<parallel::Nest>> ParallelApply(
    const Modules& modules, const std::vector<parallel::Nest::Items>& inputs,
    const std::vector<parallel::Nest::Fields>& keywords = {},
    const std::vector<DeviceRef>& devices = {}, CallSite site = CallSite::Here());

struct DataParallelOptions {
  // Where results come; absent: the first device. Any of the session's.
  absl::optional<DeviceRef> output_device;
  int64_t dim = 0;  // along which inputs are scattered, and results gathered
};

class DataParallel : public Module {
 public:
  DataParallel(std::shared_ptr<Module> module, const parallel::DeviceGroup& devices,
               const DataParallelOptions& options = {});
  ~DataParallel() override;

  // Scatter, Replicate, ParallelApply and Gather. Inputs on a device outside the group go to its
  // first one before. Fewer pieces than devices: as many replicas. No argument at all: the first
  // device alone, without any. A group of one device: the module itself is called, and what it
  // gives is not gathered.
  absl::StatusOr<parallel::Nest> Call(const parallel::Nest::Items& inputs,
                                      const parallel::Nest::Fields& keywords) override;
  // Of one tensor, where the module gives one.
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

  Module& module() const { return *module_; }
  const parallel::DeviceGroup& devices() const { return devices_; }

 protected:
  virtual absl::StatusOr<parallel::ScatteredInputs> Scatter(const parallel::Nest::Items& inputs,
                                                            const parallel::Nest::Fields& keywords);
  // For the first `count` devices.
  virtual absl::StatusOr<Modules> Replicate(int count);
  virtual absl::StatusOr<std::vector<parallel::Nest>> ParallelApply(
      const Modules& replicas, const parallel::ScatteredInputs& arguments);
  virtual absl::StatusOr<parallel::Nest> Gather(const std::vector<parallel::Nest>& results);
  // Called with each warning once: a line on standard error, unless it is overridden.
  // Of results of no dimensions, which are gathered to a vector; of a device that has less than
  // three quarters of another one's memory or processors (DeviceRef::info).
  virtual void Warn(const std::string& text);

 private:
  friend absl::StatusOr<parallel::Nest> DataParallelCall(
      Module& module, const parallel::Nest::Items& inputs, const parallel::Nest::Fields& keywords,
      const parallel::DeviceGroup& devices, const DataParallelOptions& options,
      std::vector<std::string>* warnings, CallSite site);
  // Of a module that stays out of the tree, for one call; where its warnings go.
  DataParallel(Module* module, const parallel::DeviceGroup& devices,
               const DataParallelOptions& options, std::vector<std::string>* warnings);
  absl::StatusOr<parallel::Nest> Run(const parallel::Nest::Items& inputs,
                                     const parallel::Nest::Fields& keywords, bool* called);
  // What cannot come to the replicas: the module is called once, for this rank, with tensors that
  // have failed, since other ranks may wait for collectives in it. Gives `why`, as recorded.
  absl::Status CallRefused(const absl::Status& why, const parallel::Nest::Items& inputs,
                           const parallel::Nest::Fields& keywords);
  void WarnOnce(const std::vector<std::string>& texts);
  DeviceRef output_device() const;

  Module* const module_;
  const parallel::DeviceGroup devices_;
  const DataParallelOptions options_;
  const std::vector<std::string> imbalance_;
  std::vector<std::string>* const warnings_ = nullptr;
  struct Warned;
  const std::unique_ptr<Warned> warned_;  // of what it has, where the object stays
};

// A call of DataParallel, without an object that stays. `warnings` gets what would be warned of.
absl::StatusOr<parallel::Nest> DataParallelCall(Module& module, const parallel::Nest::Items& inputs,
                                                const parallel::Nest::Fields& keywords,
                                                const parallel::DeviceGroup& devices,
                                                const DataParallelOptions& options = {},
                                                std::vector<std::string>* warnings = nullptr,
                                                CallSite site = CallSite::Here());
// The same of one tensor, where the module gives one.
Tensor DataParallelCall(Module& module, const Tensor& x, const parallel::DeviceGroup& devices,
                        const DataParallelOptions& options = {},
                        std::vector<std::string>* warnings = nullptr,
                        CallSite site = CallSite::Here());

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_DATA_PARALLEL_H_
