#include "chorus/nn/data_parallel.h"

#include <cstdio>
#include <functional>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "chorus/collectives.h"
#include "chorus/math.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/refusals.h"
#include "client/nn/refused.h"
#include "client/nn/replicas.h"
#include "core/base/error.h"
#include "core/base/mutex.h"

namespace chorus {
namespace nn {

thread_local ReplicaScope* ReplicaScope::innermost_ = nullptr;

namespace {

using internal::SourceOf;
using internal::WithSource;
using parallel::DeviceGroup;
using parallel::Nest;
using parallel::ScatteredInputs;

// `nest` with what `function` makes of each of its leaves.
Nest MapLeaves(const Nest& nest, const std::function<Nest(const Nest&)>& function) {
  switch (nest.kind()) {
    case Nest::Kind::kList:
    case Nest::Kind::kTuple: {
      Nest::Items items;
      for (const Nest& item : nest.items()) items.push_back(MapLeaves(item, function));
      return nest.kind() == Nest::Kind::kList ? Nest::List(std::move(items))
                                              : Nest::Tuple(std::move(items));
    }
    case Nest::Kind::kMap: {
      Nest::Fields fields;
      for (const auto& field : nest.fields()) {
        fields[field.first] = MapLeaves(field.second, function);
      }
      return Nest::Map(std::move(fields));
    }
    case Nest::Kind::kTensor:
    case Nest::Kind::kNothing:
    case Nest::Kind::kHost:
    case Nest::Kind::kOpaque:
      break;
  }
  return function(nest);
}

// The same of its tensors.
Nest MapTensors(const Nest& nest, const std::function<Tensor(const Tensor&)>& function) {
  return MapLeaves(nest, [&function](const Nest& leaf) {
    return leaf.kind() == Nest::Kind::kTensor ? Nest(function(leaf.tensor())) : leaf;
  });
}

// `nest` with its tensors on `device`; or the first error that one of them is known to carry.
absl::StatusOr<Nest> MoveTo(const DeviceRef& device, const Nest& nest, CallSite site) {
  absl::Status first;
  Nest moved = MapTensors(nest, [&](const Tensor& tensor) {
    const bool stays =
        !tensor.defined() || !tensor.status().ok() || tensor.absent() || tensor.device() == device;
    Tensor there = stays ? tensor : CopyTo(tensor, device, site);
    if (there.defined()) first.Update(there.status());
    return there;
  });
  if (!first.ok()) return first;
  return moved;
}

absl::Status FirstError(const Nest& nest) {
  absl::Status first;
  MapTensors(nest, [&first](const Tensor& tensor) {
    if (tensor.defined()) first.Update(tensor.status());
    return tensor;
  });
  return first;
}

// That every variable is there, on the first device.
absl::Status CheckDevice(const Module& module, const DeviceGroup& devices) {
  if (devices.size() == 0) {
    return BadType("replicate: expected a group of devices, got an empty one");
  }
  for (const NamedVariable& named : module.named_variables()) {
    const Tensor tensor = named.variable();
    if (!tensor.defined()) {
      return MakeError(Reason::kWrongState,
                       absl::StrCat(named.name, " is not there yet: call Init"));
    }
    CHORUS_RETURN_IF_ERROR(tensor.status());
    if (devices.IndexOf(tensor.device()) == 0) continue;
    const int expected = devices.device(0).slot();
    const int got = tensor.device().slot();
    return BadType(absl::StrCat("module must have its parameters and buffers on device ", expected,
                                " (devices[0]), but ", named.name, " is on device ", got,
                                got == expected ? " of another session" : ""));
  }
  return absl::OkStatus();
}

// Brings the members in line again; calls that only some of them have made fail alone: at once, by
// calls of the new step, for nobody hears of the step by itself, and other ranks may wait for what
// comes of those calls.
void BeginStep(const DeviceGroup& devices) {
  std::vector<std::shared_ptr<internal::MemberCore>> members;
  for (int d = 0; d < devices.size(); ++d) {
    members.push_back(internal::MemberOf(devices.world(d)));
  }
  // Of their own: the program's have numbers.
  if (!internal::BeginOwnSteps(members).ok()) return;
  for (int d = 0; d < devices.size(); ++d) Barrier(devices.world(d));
}

// Warnings of devices that others would have to wait for.
std::vector<std::string> Imbalance(const DeviceGroup& devices) {
  const auto label = [&](int index) {
    const DeviceRef device = devices.device(index);
    const std::string name = device.info().name;
    return absl::StrCat("device ", device.slot(),
                        name.empty() ? "" : absl::StrCat(" (", name, ")"));
  };
  std::vector<std::string> warnings;
  const auto compare = [&](const char* what, const std::function<int64_t(const DeviceInfo&)>& of) {
    int least = -1;
    int most = -1;
    for (int d = 0; d < devices.size(); ++d) {
      const int64_t size = of(devices.device(d).info());
      if (size <= 0) continue;  // not known
      if (least < 0 || size < of(devices.device(least).info())) least = d;
      if (most < 0 || size > of(devices.device(most).info())) most = d;
    }
    if (least < 0) return;
    const int64_t small = of(devices.device(least).info());
    const int64_t large = of(devices.device(most).info());
    if (static_cast<double>(small) >= 0.75 * static_cast<double>(large)) return;
    warnings.push_back(absl::StrCat(label(least), " has less than 75% of the ", what, " of ",
                                    label(most), ", ", small, " of ", large,
                                    ": each gets as many rows, so consider leaving it out"));
  };
  compare("memory", [](const DeviceInfo& info) { return info.memory_bytes; });
  compare("cores", [](const DeviceInfo& info) { return int64_t{info.core_count}; });
  return warnings;
}

}  // namespace

// --- Replicate ----------------------------------------------------------------------------------

absl::StatusOr<Modules> Replicate(Module& module, const DeviceGroup& devices, bool detach,
                                  CallSite site) {
  const absl::Status status = CheckDevice(module, devices);
  if (!status.ok()) return WithSource(status, SourceOf(site));
  const std::vector<Variable> variables = module.variables();
  std::vector<Tensor> values;
  for (const Variable& variable : variables) {
    values.push_back(detach ? variable().Detach() : variable());
  }
  std::vector<std::vector<Tensor>> copies =
      BroadcastCoalesced(values, devices, parallel::kBufferSize, site);
  Modules replicas;
  for (size_t d = 0; d < copies.size(); ++d) {
    for (size_t i = 0; i < variables.size(); ++i) {
      CHORUS_RETURN_IF_ERROR(copies[d][i].status());
      // Undefined: the module's own. One with a history is not for a caller that wants none.
      const bool keeps = d == 0 && !variables[i].is_parameter() &&
                         variables[i]().requires_grad() == values[i].requires_grad();
      if (keeps) copies[d][i] = Tensor();
    }
    replicas.push_back(module.WithTensors(copies[d]));
  }
  return replicas;
}

// --- ParallelApply ------------------------------------------------------------------------------

absl::StatusOr<std::vector<Nest>> ParallelApply(const Modules& modules,
                                                const std::vector<Nest::Items>& inputs,
                                                const std::vector<Nest::Fields>& keywords,
                                                const std::vector<DeviceRef>& devices,
                                                CallSite site) {
  const size_t count = modules.size();
  const auto check = [&](const char* what, size_t got) {
    if (got == count) return absl::OkStatus();
    return WithSource(BadType(absl::StrCat("parallel_apply: expected ", what, " for each of ",
                                           count, " modules, got ", got)),
                      SourceOf(site));
  };
  CHORUS_RETURN_IF_ERROR(check("inputs", inputs.size()));
  if (!keywords.empty()) CHORUS_RETURN_IF_ERROR(check("keywords", keywords.size()));
  if (!devices.empty()) CHORUS_RETURN_IF_ERROR(check("a device", devices.size()));
  for (size_t i = 0; i < count; ++i) {
    if (modules[i] != nullptr) continue;
    return WithSource(BadType(absl::StrCat("parallel_apply: replica ", i, " is no module")),
                      SourceOf(site));
  }
  std::vector<Nest> results;
  absl::Status first;
  for (size_t i = 0; i < count; ++i) {
    absl::StatusOr<Nest> result =
        modules[i]->CallAt(site, inputs[i], keywords.empty() ? Nest::Fields() : keywords[i]);
    if (result.ok() && !devices.empty()) result = MoveTo(devices[i], *result, site);
    const absl::Status status = result.ok() ? FirstError(*result) : result.status();
    if (result.ok()) results.push_back(*std::move(result));
    if (status.ok() || !first.ok()) continue;
    const absl::StatusOr<DeviceRef> device =
        devices.empty() ? modules[i]->device() : absl::StatusOr<DeviceRef>(devices[i]);
    Error error = ErrorOf(status);
    error.message = absl::StrCat("in replica ", i,
                                 device.ok() ? absl::StrCat(" on device ", device->slot()) : "",
                                 ": ", error.message);
    first = WithSource(ToStatus(error), SourceOf(site));
  }
  if (!first.ok()) return first;
  return results;
}

// --- DataParallel -------------------------------------------------------------------------------

struct DataParallel::Warned {
  Mutex mutex;
  std::set<std::string> texts ABSL_GUARDED_BY(mutex);
};

DataParallel::DataParallel(std::shared_ptr<Module> module, const DeviceGroup& devices,
                           const DataParallelOptions& options)
    : Module("DataParallel"),
      module_(module.get()),
      devices_(devices),
      options_(options),
      imbalance_(Imbalance(devices)),
      warned_(std::make_unique<Warned>()) {
  AddModule("module", std::move(module));
}

DataParallel::DataParallel(Module* module, const DeviceGroup& devices,
                           const DataParallelOptions& options, std::vector<std::string>* warnings)
    : Module("DataParallel"),
      module_(module),
      devices_(devices),
      options_(options),
      imbalance_(Imbalance(devices)),
      warnings_(warnings) {}

DataParallel::~DataParallel() = default;

absl::StatusOr<Nest> DataParallel::Call(const Nest::Items& inputs, const Nest::Fields& keywords) {
  bool called = false;
  absl::StatusOr<Nest> result = Run(inputs, keywords, &called);
  if (!result.ok() && !called) result = CallRefused(result.status(), inputs, keywords);
  if (!result.ok()) return WithSource(result.status(), SourceOf(site()));
  return result;
}

absl::Status DataParallel::CallRefused(const absl::Status& why, const Nest::Items& inputs,
                                       const Nest::Fields& keywords) {
  if (module_ == nullptr || devices_.size() == 0) return why;
  const Tensor failed = FromError(devices_.device(0), why);
  bool has_tensor = false;
  // Replicas get tensors for what is in the trainer's memory.
  const auto fail = [&](const Nest& leaf) {
    if (leaf.kind() != Nest::Kind::kTensor && leaf.kind() != Nest::Kind::kHost) return leaf;
    has_tensor = true;
    return Nest(failed);
  };
  const Nest failed_inputs = MapLeaves(Nest::Tuple(inputs), fail);
  const Nest failed_keywords = MapLeaves(Nest::Map(keywords), fail);
  if (!has_tensor) return why;  // the call would be made
  const StateScope scope(*module_, StateOfRefused(*module_, failed));
  const absl::StatusOr<Nest> result =
      module_->CallAt(site(), failed_inputs.items(), failed_keywords.fields());
  // Its error says whether others have been told of it.
  const absl::Status recorded = result.ok() ? FirstError(*result) : absl::OkStatus();
  return recorded.ok() ? why : recorded;
}

absl::StatusOr<Nest> DataParallel::Run(const Nest::Items& inputs, const Nest::Fields& keywords,
                                       bool* called) {
  if (module_ == nullptr) return BadType("DataParallel: expected a module, got none");
  CHORUS_RETURN_IF_ERROR(CheckDevice(*module_, devices_));
  WarnOnce(imbalance_);
  CHORUS_ASSIGN_OR_RETURN(ScatteredInputs arguments, Scatter(inputs, keywords));
  if (arguments.inputs.empty()) {
    arguments.inputs.emplace_back();
    arguments.keywords.emplace_back();
  }
  if (devices_.size() == 1) {
    *called = true;
    CHORUS_ASSIGN_OR_RETURN(const Nest result,
                            module_->CallAt(site(), arguments.inputs[0], arguments.keywords[0]));
    return MoveTo(output_device(), result, site());
  }
  CHORUS_ASSIGN_OR_RETURN(const Modules replicas,
                          Replicate(static_cast<int>(arguments.inputs.size())));
  const std::vector<Variable> buffers = module_->buffers();
  std::vector<Tensor> before;
  for (const Variable& buffer : buffers) before.push_back(buffer());
  absl::StatusOr<std::vector<Nest>> results;
  {
    *called = true;
    ReplicaScope scope(devices_, static_cast<int>(replicas.size()));
    const auto undo = [&] {
      if (!scope.called()) return;
      // What waits for replicas that have not come to it fails: it is not for the buffers.
      for (size_t i = 0; i < buffers.size(); ++i) buffers[i].Set(before[i]);
      // Members have made different calls. In a trace nothing was sent, and there are no steps.
      BeginStep(devices_);
    };
    try {
      results = ParallelApply(replicas, arguments);
    } catch (...) {
      undo();
      throw;
    }
    if (!results.ok()) undo();
  }
  CHORUS_RETURN_IF_ERROR(results.status());
  return Gather(*results);
}

Tensor DataParallel::Forward(const Tensor& x) { return ForwardByCall(x); }

std::string DataParallel::description() const {
  std::vector<int> slots;
  for (int d = 0; d < devices_.size(); ++d) slots.push_back(devices_.device(d).slot());
  return absl::StrCat("devices=[", absl::StrJoin(slots, ", "), "]");
}

DeviceRef DataParallel::output_device() const {
  return options_.output_device.has_value() ? *options_.output_device : devices_.device(0);
}

absl::StatusOr<ScatteredInputs> DataParallel::Scatter(const Nest::Items& inputs,
                                                      const Nest::Fields& keywords) {
  const auto bring = [this](const Tensor& tensor) {
    const bool stays = !tensor.defined() || !tensor.status().ok() || tensor.absent() ||
                       devices_.IndexOf(tensor.device()) >= 0;
    return stays ? tensor : CopyTo(tensor, devices_.device(0), site());
  };
  const Nest brought_inputs = MapTensors(Nest::Tuple(inputs), bring);
  const Nest brought_keywords = MapTensors(Nest::Map(keywords), bring);
  return ScatterInputs(brought_inputs.items(), brought_keywords.fields(), devices_, options_.dim,
                       site());
}

absl::StatusOr<Modules> DataParallel::Replicate(int count) {
  // The module itself: nothing has to go anywhere.
  if (count == 1)
    return Modules{module_->WithTensors(std::vector<Tensor>(module_->variables().size()))};
  CHORUS_ASSIGN_OR_RETURN(Modules replicas, nn::Replicate(*module_, devices_, false, site()));
  replicas.resize(static_cast<size_t>(count));
  return replicas;
}

absl::StatusOr<std::vector<Nest>> DataParallel::ParallelApply(const Modules& replicas,
                                                              const ScatteredInputs& arguments) {
  std::vector<DeviceRef> devices;
  for (int d = 0; d < devices_.size() && devices.size() < replicas.size(); ++d) {
    devices.push_back(devices_.device(d));
  }
  return nn::ParallelApply(replicas, arguments.inputs, arguments.keywords, devices, site());
}

absl::StatusOr<Nest> DataParallel::Gather(const std::vector<Nest>& results) {
  const int index = devices_.IndexOf(output_device());
  std::vector<std::string> warnings;
  absl::StatusOr<Nest> whole =
      GatherNest(results, devices_, index < 0 ? 0 : index, options_.dim, &warnings, site());
  WarnOnce(warnings);
  if (!whole.ok() || index >= 0) return whole;
  return MoveTo(output_device(), *whole, site());
}

void DataParallel::WarnOnce(const std::vector<std::string>& texts) {
  for (const std::string& text : texts) {
    if (warnings_ != nullptr) {
      warnings_->push_back(text);
      continue;
    }
    {
      const MutexLock lock(&warned_->mutex);
      if (!warned_->texts.insert(text).second) continue;
    }
    Warn(text);
  }
}

void DataParallel::Warn(const std::string& text) {
  std::fputs(absl::StrCat("chorus: ", text, "\n").c_str(), stderr);
}

// --- The functional form ------------------------------------------------------------------------

absl::StatusOr<Nest> DataParallelCall(Module& module, const Nest::Items& inputs,
                                      const Nest::Fields& keywords, const DeviceGroup& devices,
                                      const DataParallelOptions& options,
                                      std::vector<std::string>* warnings, CallSite site) {
  std::vector<std::string> unasked;
  DataParallel call(&module, devices, options, warnings == nullptr ? &unasked : warnings);
  return call.CallAt(site, inputs, keywords);
}

Tensor DataParallelCall(Module& module, const Tensor& x, const DeviceGroup& devices,
                        const DataParallelOptions& options, std::vector<std::string>* warnings,
                        CallSite site) {
  const absl::StatusOr<Nest> result =
      DataParallelCall(module, {Nest(x)}, {}, devices, options, warnings, site);
  if (!result.ok()) return FromError(x.device(), result.status());
  if (result->kind() == Nest::Kind::kTensor) return result->tensor();
  return FromError(
      x.device(),
      WithSource(BadType(absl::StrCat(module.label(), ": expected a module that gives one tensor")),
                 SourceOf(site)));
}

}  // namespace nn
}  // namespace chorus
