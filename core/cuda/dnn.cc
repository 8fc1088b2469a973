#include "core/cuda/dnn.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"
#include "core/cuda/room.h"

namespace chorus {
namespace {

using cuda::DnnAttribute;
using cuda::DnnAttributeType;
using cuda::DnnBehaviorNote;
using cuda::DnnDescriptorType;
using cuda::DnnNumericalNote;
using cuda::DnnStatus;
using cuda::DnnType;

// A kernel is charged with what its engine wants.
constexpr int64_t kMostWorkspaceBytes = int64_t{256} << 20;

// So many of the engines that a heuristic names, the best first, are looked at.
constexpr size_t kMostEngines = 32;

// More notes than these no engine has.
constexpr size_t kMostNotes = 32;

// What tells a graph's tensors apart, and where each stands among the operands.
constexpr int64_t kIds[] = {'x', 'w', 'y'};
constexpr size_t kX = 0;
constexpr size_t kW = 1;
constexpr size_t kY = 2;

constexpr int64_t kAlignment = 16;  // of each

// What an operation calls its parts.
struct OperationNames {
  DnnDescriptorType type;
  DnnAttribute alpha;
  DnnAttribute beta;
  DnnAttribute convolution;
  DnnAttribute x;
  DnnAttribute w;
  DnnAttribute y;
};
OperationNames NamesOf(DnnProblem::Gives gives) {
  using A = DnnAttribute;
  switch (gives) {
    case DnnProblem::Gives::kY:
      return {DnnDescriptorType::kConvolutionForward,
              A::kForwardAlpha,
              A::kForwardBeta,
              A::kForwardConvolution,
              A::kForwardX,
              A::kForwardW,
              A::kForwardY};
    case DnnProblem::Gives::kX:
      return {DnnDescriptorType::kConvolutionBackwardData,
              A::kDataAlpha,
              A::kDataBeta,
              A::kDataConvolution,
              A::kDataX,
              A::kDataW,
              A::kDataY};
    case DnnProblem::Gives::kW:
      break;
  }
  return {DnnDescriptorType::kConvolutionBackwardFilter,
          A::kFilterAlpha,
          A::kFilterBeta,
          A::kFilterConvolution,
          A::kFilterX,
          A::kFilterW,
          A::kFilterY};
}

bool IsOfMemory(DnnStatus status) {
  return status == DnnStatus::kNoHostMemory || status == DnnStatus::kNoDeviceMemory;
}
// Says nothing of the problem: another time it may be otherwise.
bool IsOfTheMoment(DnnStatus status) {
  return IsOfMemory(status) || status >= DnnStatus::kExecutionFailed;
}

}  // namespace

std::string DnnProblem::Text() const {
  const auto text = [](const auto& sizes) { return absl::StrJoin(sizes, "x"); };
  return absl::StrCat(gives == Gives::kY   ? "y"
                      : gives == Gives::kX ? "x"
                                           : "w",
                      " of a convolution of ", type == DnnType::kF64 ? "f64 " : "f32 ", text(x),
                      " and ", text(w), ", stride ", text(stride), ", padding ", text(padding),
                      ", dilation ", text(dilation));
}

// --- Descriptors --------------------------------------------------------------------------------

DnnConvolution::Descriptor::Descriptor(const cuda::DnnApi* api, DnnDescriptorType type)
    : api_(api), status_(api->CreateDescriptor(type, &raw_)) {}

DnnConvolution::Descriptor::~Descriptor() {
  if (raw_ != nullptr) api_->DestroyDescriptor(raw_);
}

DnnConvolution::Descriptor::Descriptor(Descriptor&& other) noexcept
    : api_(other.api_), raw_(std::exchange(other.raw_, nullptr)), status_(other.status_) {}

template <typename T>
void DnnConvolution::Descriptor::Set(DnnAttribute attribute, DnnAttributeType type,
                                     absl::Span<const T> values) {
  if (!ok()) return;
  status_ =
      api_->SetAttribute(raw_, attribute, type, static_cast<int64_t>(values.size()), values.data());
}

template <typename T>
void DnnConvolution::Descriptor::SetOne(DnnAttribute attribute, DnnAttributeType type,
                                        const T& value) {
  Set(attribute, type, absl::MakeConstSpan(&value, 1));
}

void DnnConvolution::Descriptor::SetInts(DnnAttribute attribute, absl::Span<const int64_t> values) {
  Set(attribute, DnnAttributeType::kInt64, values);
}

void DnnConvolution::Descriptor::Refer(DnnAttribute attribute, const Descriptor& to) {
  if (ok()) status_ = to.status_;
  SetOne(attribute, DnnAttributeType::kDescriptor, to.raw_);
}

template <typename T>
int64_t DnnConvolution::Descriptor::Get(DnnAttribute attribute, DnnAttributeType type,
                                        absl::Span<T> to) {
  int64_t count = 0;
  if (ok()) {
    status_ = api_->GetAttribute(raw_, attribute, type, static_cast<int64_t>(to.size()), &count,
                                 to.data());
  }
  return ok() ? std::min(count, static_cast<int64_t>(to.size())) : 0;
}

void DnnConvolution::Descriptor::Finalize() {
  if (ok()) status_ = api_->Finalize(raw_);
}

// --- A convolution ------------------------------------------------------------------------------

DnnConvolution::Descriptor DnnConvolution::Tensor(const DnnProblem& problem, size_t operand,
                                                  const std::array<int64_t, 4>& sizes) {
  Descriptor tensor(&dnn_->library_.api(), DnnDescriptorType::kTensor);
  std::array<int64_t, 4> strides{};
  int64_t elements = 1;
  for (size_t axis = sizes.size(); axis-- > 0; elements *= sizes[axis]) strides[axis] = elements;
  tensor.SetOne(DnnAttribute::kTensorType, DnnAttributeType::kDataType, problem.type);
  tensor.SetInts(DnnAttribute::kTensorDimensions, sizes);
  tensor.SetInts(DnnAttribute::kTensorStrides, strides);
  tensor.SetInts(DnnAttribute::kTensorId, {kIds[operand]});
  tensor.SetInts(DnnAttribute::kTensorAlignment, {kAlignment});
  tensor.Finalize();
  operands_[operand] = {elements * (problem.type == DnnType::kF64 ? 8 : 4), kAlignment};
  return tensor;
}

void DnnConvolution::FinalizeAlone(Descriptor* descriptor) {
  MutexLock lock(&dnn_->mutex_);
  descriptor->Finalize();
}

DnnStatus DnnConvolution::Describe(const DnnProblem& problem) {
  const cuda::DnnApi* const api = &dnn_->library_.api();
  Descriptor convolution(api, DnnDescriptorType::kConvolution);
  convolution.SetOne(DnnAttribute::kConvolutionComputeType, DnnAttributeType::kDataType,
                     problem.type);
  convolution.SetOne(DnnAttribute::kConvolutionMode, DnnAttributeType::kConvolutionMode,
                     cuda::DnnConvolutionMode::kCrossCorrelation);
  convolution.SetInts(DnnAttribute::kConvolutionSpatialDims, {2});
  convolution.SetInts(DnnAttribute::kConvolutionStrides, problem.stride);
  convolution.SetInts(DnnAttribute::kConvolutionDilations, problem.dilation);
  convolution.SetInts(DnnAttribute::kConvolutionPrePaddings, problem.padding);
  convolution.SetInts(DnnAttribute::kConvolutionPostPaddings, problem.padding);
  convolution.Finalize();
  Descriptor x = Tensor(problem, kX, problem.x);
  Descriptor w = Tensor(problem, kW, problem.w);
  Descriptor y = Tensor(problem, kY, problem.y);

  result_ = problem.gives == DnnProblem::Gives::kY   ? kY
            : problem.gives == DnnProblem::Gives::kX ? kX
                                                     : kW;
  const OperationNames names = NamesOf(problem.gives);
  Descriptor operation(api, names.type);
  // Wide ones for f64 alone, as of what is computed in.
  const auto scale = [&](DnnAttribute attribute, double value) {
    if (problem.type == DnnType::kF64) {
      operation.SetOne(attribute, DnnAttributeType::kDouble, value);
    } else {
      operation.SetOne(attribute, DnnAttributeType::kFloat, static_cast<float>(value));
    }
  };
  operation.Refer(names.convolution, convolution);
  operation.Refer(names.x, x);
  operation.Refer(names.w, w);
  operation.Refer(names.y, y);
  scale(names.alpha, 1);
  scale(names.beta, 0);
  operation.Finalize();

  graph_ = std::make_unique<Descriptor>(api, DnnDescriptorType::kOperationGraph);
  graph_->SetOne(DnnAttribute::kGraphHandle, DnnAttributeType::kHandle, handle_);
  graph_->Refer(DnnAttribute::kGraphOperations, operation);
  FinalizeAlone(graph_.get());
  for (Descriptor* part : {&convolution, &x, &w, &y, &operation}) {
    parts_.push_back(std::move(*part));
  }
  return graph_->status();
}

DnnStatus DnnConvolution::Examine(Descriptor* config, DnnType type) {
  Descriptor engine(&config->api(), DnnDescriptorType::kEngine);
  if (!engine.ok()) return engine.status();
  cuda::DnnDescriptor raw = engine.raw();
  const int64_t engines = config->Get(DnnAttribute::kConfigEngine, DnnAttributeType::kDescriptor,
                                      absl::MakeSpan(&raw, 1));
  if (!config->ok()) return config->status();
  DnnNumericalNote numerical[kMostNotes];
  DnnBehaviorNote behavior[kMostNotes];
  const int64_t numbers = engine.Get(DnnAttribute::kEngineNumericalNotes,
                                     DnnAttributeType::kNumericalNote, absl::MakeSpan(numerical));
  const int64_t ways = engine.Get(DnnAttribute::kEngineBehaviorNotes,
                                  DnnAttributeType::kBehaviorNote, absl::MakeSpan(behavior));
  if (!engine.ok()) return engine.status();
  const auto is_harmless = [type](DnnNumericalNote note) {
    // The multiplication of doubles by these is that of doubles.
    return note == DnnNumericalNote::kStrictNanPropagation ||
           (note == DnnNumericalNote::kTensorCore && type == DnnType::kF64);
  };
  const bool is_sound =
      engines == 1 && std::all_of(numerical, numerical + numbers, is_harmless) &&
      std::find(behavior, behavior + ways, DnnBehaviorNote::kRuntimeCompilation) == behavior + ways;
  return is_sound ? DnnStatus::kSuccess : DnnStatus::kNotSupported;
}

DnnStatus DnnConvolution::Take(std::unique_ptr<Descriptor> config, DnnType type) {
  const DnnStatus sound = Examine(config.get(), type);
  if (sound != DnnStatus::kSuccess) return sound;
  auto plan = std::make_unique<Descriptor>(&config->api(), DnnDescriptorType::kExecutionPlan);
  plan->SetOne(DnnAttribute::kPlanHandle, DnnAttributeType::kHandle, handle_);
  plan->Refer(DnnAttribute::kPlanConfig, *config);
  FinalizeAlone(plan.get());
  int64_t bytes = 0;
  plan->Get(DnnAttribute::kPlanWorkspaceBytes, DnnAttributeType::kInt64, absl::MakeSpan(&bytes, 1));
  if (!plan->ok()) return plan->status();
  if (bytes > kMostWorkspaceBytes) return DnnStatus::kNotSupported;
  config_ = std::move(config);
  plan_ = std::move(plan);
  plan_bytes_ = bytes;
  for (AlignedOperand& operand : operands_) operand.KeepRoom(&bytes);
  workspace_bytes_ = WorkspaceOf(bytes);
  return DnnStatus::kSuccess;
}

DnnStatus DnnConvolution::Choose(DnnType type) {
  const cuda::DnnApi* const api = &dnn_->library_.api();
  for (const auto mode : {cuda::DnnHeuristic::kB, cuda::DnnHeuristic::kFallback}) {
    Descriptor heuristic(api, DnnDescriptorType::kEngineHeuristic);
    heuristic.Refer(DnnAttribute::kHeuristicGraph, *graph_);
    heuristic.SetOne(DnnAttribute::kHeuristicMode, DnnAttributeType::kHeuristic, mode);
    FinalizeAlone(&heuristic);
    std::vector<std::unique_ptr<Descriptor>> configs;
    std::vector<cuda::DnnDescriptor> raw;
    for (size_t i = 0; i < kMostEngines; ++i) {
      configs.push_back(std::make_unique<Descriptor>(api, DnnDescriptorType::kEngineConfig));
      if (!configs.back()->ok()) return configs.back()->status();
      raw.push_back(configs.back()->raw());
    }
    int64_t count = 0;
    {
      MutexLock lock(&dnn_->mutex_);
      count = heuristic.Get(DnnAttribute::kHeuristicResults, DnnAttributeType::kDescriptor,
                            absl::MakeSpan(raw));
    }
    if (IsOfTheMoment(heuristic.status())) return heuristic.status();
    for (int64_t i = 0; i < count; ++i) {
      const DnnStatus status = Take(std::move(configs[static_cast<size_t>(i)]), type);
      if (status == DnnStatus::kSuccess || IsOfTheMoment(status)) return status;
    }
  }
  return DnnStatus::kNotSupported;
}

absl::Status DnnConvolution::Enqueue(const cuda::Api& driver, cuda::DevicePtr x, cuda::DevicePtr w,
                                     cuda::DevicePtr y, cuda::DevicePtr workspace,
                                     cuda::Stream stream) const {
  const cuda::DnnApi& api = dnn_->library_.api();
  const auto rooms = static_cast<cuda::DevicePtr>(RoomFrom(static_cast<int64_t>(workspace)));
  const cuda::DevicePtr addresses[] = {x, w, y};
  cuda::DevicePtr locations[] = {x, w, y};
  void* pointers[std::size(addresses)];
  for (size_t i = 0; i < std::size(addresses); ++i) {
    locations[i] = operands_[i].LocationOf(addresses[i], rooms);
    pointers[i] = reinterpret_cast<void*>(locations[i]);
    if (i == result_) continue;
    CHORUS_RETURN_IF_ERROR(operands_[i].Copy(driver, locations[i], addresses[i], stream));
  }
  void* const scratch = plan_bytes_ == 0 ? nullptr : reinterpret_cast<void*>(rooms);
  Descriptor pack(&api, DnnDescriptorType::kVariantPack);
  pack.SetInts(DnnAttribute::kPackIds, kIds);
  pack.Set<void*>(DnnAttribute::kPackPointers, DnnAttributeType::kPointer, pointers);
  pack.SetOne(DnnAttribute::kPackWorkspace, DnnAttributeType::kPointer, scratch);
  pack.Finalize();
  DnnStatus status = pack.status();
  if (status == DnnStatus::kSuccess) {
    MutexLock lock(&dnn_->mutex_);
    status = api.SetStream(handle_, stream);
    if (status == DnnStatus::kSuccess) status = api.Execute(handle_, plan_->raw(), pack.raw());
  }
  if (status != DnnStatus::kSuccess) {
    return MakeError(Reason::kExecFailed,
                     absl::StrCat("cudnnBackendExecute: ", StatusText(api, status)));
  }
  return operands_[result_].Copy(driver, addresses[result_], locations[result_], stream);
}

absl::StatusOr<std::unique_ptr<DnnConvolution>> CudaDnn::Make(const DnnProblem& problem) {
  for (const auto& sizes : {problem.x, problem.w, problem.y}) {
    for (const int64_t size : sizes) {
      if (size == 0) return nullptr;
    }
  }
  const cuda::DnnHandle handle = library_.Open();
  if (handle == nullptr) return nullptr;
  std::unique_ptr<DnnConvolution> convolution(new DnnConvolution(this, handle));
  DnnStatus status = convolution->Describe(problem);
  if (status == DnnStatus::kSuccess) status = convolution->Choose(problem.type);
  if (status == DnnStatus::kSuccess) return convolution;
  const std::string why = absl::StrCat(problem.Text(), ": ", StatusText(library_.api(), status));
  if (IsOfTheMoment(status)) {
    return MakeError(IsOfMemory(status) ? Reason::kOutOfMemory : Reason::kExecFailed,
                     absl::StrCat("cuDNN chooses no engine now for ", why));
  }
  library_.TellOnce(absl::StrCat("not by cuDNN, as perhaps others: ", why));
  return nullptr;
}

}  // namespace chorus
