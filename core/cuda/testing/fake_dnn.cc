#include "core/cuda/testing/fake_dnn.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "core/cuda/testing/fake_driver.h"

namespace chorus {
namespace cuda {

struct DnnHandleStruct {
  Stream stream = nullptr;
  std::thread::id user;  // the thread that set it
  std::atomic<bool> used{false};
};

namespace {

using A = DnnAttribute;
using T = DnnAttributeType;

std::atomic<int64_t> handles_made{0};
std::atomic<int64_t> convolutions{0};
std::atomic<int64_t> alive{0};

struct Value {
  T type;
  int64_t count = 0;
  std::vector<char> bytes;
};

struct Descriptor {
  DnnDescriptorType type;
  bool finalized = false;
  std::map<A, Value> values;
  FakeDnnEngine engine = FakeDnnEngine::kSound;  // of a configuration
  const Descriptor* graph = nullptr;             // of a configuration

  bool Has(A attribute) const { return values.count(attribute) > 0; }
  template <typename V>
  V At(A attribute, size_t index = 0) const {
    V value;
    std::memcpy(&value, values.at(attribute).bytes.data() + index * sizeof(V), sizeof(V));
    return value;
  }
  const Descriptor& To(A attribute) const {
    return *static_cast<const Descriptor*>(At<void*>(attribute));
  }
};

size_t BytesOf(T type) {
  switch (type) {
    case T::kInt64:
    case T::kDouble:
    case T::kHandle:
    case T::kPointer:
    case T::kDescriptor:
      return 8;
    default:
      return 4;
  }
}

// What a kind of descriptor must have before it is finalized: of which type and how many. Scales
// have the type of what is computed in.
struct Wanted {
  T type;
  int64_t count;
};
std::map<A, Wanted> WantedOf(DnnDescriptorType type) {
  const auto operation = [](A alpha, A beta, A convolution, A x, A w, A y) {
    return std::map<A, Wanted>{
        {alpha, {T::kFloat, 1}},  {beta, {T::kFloat, 1}},   {convolution, {T::kDescriptor, 1}},
        {x, {T::kDescriptor, 1}}, {w, {T::kDescriptor, 1}}, {y, {T::kDescriptor, 1}}};
  };
  switch (type) {
    case DnnDescriptorType::kConvolution:
      return {{A::kConvolutionComputeType, {T::kDataType, 1}},
              {A::kConvolutionMode, {T::kConvolutionMode, 1}},
              {A::kConvolutionSpatialDims, {T::kInt64, 1}},
              {A::kConvolutionDilations, {T::kInt64, 2}},
              {A::kConvolutionStrides, {T::kInt64, 2}},
              {A::kConvolutionPrePaddings, {T::kInt64, 2}},
              {A::kConvolutionPostPaddings, {T::kInt64, 2}}};
    case DnnDescriptorType::kTensor:
      return {{A::kTensorType, {T::kDataType, 1}},
              {A::kTensorDimensions, {T::kInt64, 4}},
              {A::kTensorStrides, {T::kInt64, 4}},
              {A::kTensorId, {T::kInt64, 1}},
              {A::kTensorAlignment, {T::kInt64, 1}}};
    case DnnDescriptorType::kConvolutionForward:
      return operation(A::kForwardAlpha, A::kForwardBeta, A::kForwardConvolution, A::kForwardX,
                       A::kForwardW, A::kForwardY);
    case DnnDescriptorType::kConvolutionBackwardData:
      return operation(A::kDataAlpha, A::kDataBeta, A::kDataConvolution, A::kDataX, A::kDataW,
                       A::kDataY);
    case DnnDescriptorType::kConvolutionBackwardFilter:
      return operation(A::kFilterAlpha, A::kFilterBeta, A::kFilterConvolution, A::kFilterX,
                       A::kFilterW, A::kFilterY);
    case DnnDescriptorType::kOperationGraph:
      return {{A::kGraphHandle, {T::kHandle, 1}}, {A::kGraphOperations, {T::kDescriptor, 1}}};
    case DnnDescriptorType::kEngineHeuristic:
      return {{A::kHeuristicGraph, {T::kDescriptor, 1}}, {A::kHeuristicMode, {T::kHeuristic, 1}}};
    case DnnDescriptorType::kExecutionPlan:
      return {{A::kPlanHandle, {T::kHandle, 1}}, {A::kPlanConfig, {T::kDescriptor, 1}}};
    case DnnDescriptorType::kVariantPack:
      return {{A::kPackIds, {T::kInt64, 3}},
              {A::kPackPointers, {T::kPointer, 3}},
              {A::kPackWorkspace, {T::kPointer, 1}}};
    case DnnDescriptorType::kEngine:
    case DnnDescriptorType::kEngineConfig:
      break;
  }
  return {};
}

// A graph's one operation, read.
struct Convolution {
  DnnDescriptorType operation;
  bool wide = false;  // f64
  std::array<int64_t, 4> x{}, w{}, y{};
  std::array<int64_t, 2> stride{}, padding{}, dilation{};
  int64_t ids[3] = {};  // of x, w, y
  int64_t alignment = 0;

  int64_t groups() const { return x[1] / w[1]; }
};

std::array<int64_t, 4> SizesOf(const Descriptor& tensor) {
  std::array<int64_t, 4> sizes{};
  for (size_t i = 0; i < 4; ++i) sizes[i] = tensor.At<int64_t>(A::kTensorDimensions, i);
  return sizes;
}
int64_t ElementsOf(const std::array<int64_t, 4>& sizes) {
  return sizes[0] * sizes[1] * sizes[2] * sizes[3];
}

bool IsSound(const Descriptor& tensor) {
  const auto sizes = SizesOf(tensor);
  int64_t elements = 1;
  for (size_t i = 4; i-- > 0; elements *= sizes[i]) {
    if (sizes[i] < 1 || tensor.At<int64_t>(A::kTensorStrides, i) != elements) return false;
  }
  const auto type = tensor.At<DnnType>(A::kTensorType);
  return (type == DnnType::kF32 || type == DnnType::kF64) &&
         tensor.At<int64_t>(A::kTensorAlignment) >= (type == DnnType::kF64 ? 8 : 4);
}

Convolution Read(const Descriptor& operation) {
  Convolution c;
  c.operation = operation.type;
  const bool forward = operation.type == DnnDescriptorType::kConvolutionForward;
  const bool data = operation.type == DnnDescriptorType::kConvolutionBackwardData;
  const auto one_of = [&](A of_forward, A of_data, A of_filter) {
    return forward ? of_forward : data ? of_data : of_filter;
  };
  const Descriptor& convolution =
      operation.To(one_of(A::kForwardConvolution, A::kDataConvolution, A::kFilterConvolution));
  const Descriptor* const tensors[] = {&operation.To(one_of(A::kForwardX, A::kDataX, A::kFilterX)),
                                       &operation.To(one_of(A::kForwardW, A::kDataW, A::kFilterW)),
                                       &operation.To(one_of(A::kForwardY, A::kDataY, A::kFilterY))};
  c.x = SizesOf(*tensors[0]);
  c.w = SizesOf(*tensors[1]);
  c.y = SizesOf(*tensors[2]);
  for (int i = 0; i < 3; ++i) c.ids[i] = tensors[i]->At<int64_t>(A::kTensorId);
  c.alignment = tensors[0]->At<int64_t>(A::kTensorAlignment);
  c.wide = convolution.At<DnnType>(A::kConvolutionComputeType) == DnnType::kF64;
  for (size_t i = 0; i < 2; ++i) {
    c.stride[i] = convolution.At<int64_t>(A::kConvolutionStrides, i);
    c.padding[i] = convolution.At<int64_t>(A::kConvolutionPrePaddings, i);
    c.dilation[i] = convolution.At<int64_t>(A::kConvolutionDilations, i);
  }
  return c;
}

bool Fits(const Descriptor& operation) {
  const Convolution c = Read(operation);
  const T scale = c.wide ? T::kDouble : T::kFloat;
  const bool forward = operation.type == DnnDescriptorType::kConvolutionForward;
  const bool data = operation.type == DnnDescriptorType::kConvolutionBackwardData;
  const A alpha = forward ? A::kForwardAlpha : data ? A::kDataAlpha : A::kFilterAlpha;
  const A beta = forward ? A::kForwardBeta : data ? A::kDataBeta : A::kFilterBeta;
  if (operation.values.at(alpha).type != scale || operation.values.at(beta).type != scale) {
    return false;
  }
  const auto number = [&](A attribute) {
    return c.wide ? operation.At<double>(attribute) : double{operation.At<float>(attribute)};
  };
  if (number(alpha) != 1 || number(beta) != 0) return false;
  for (size_t i = 0; i < 2; ++i) {
    const int64_t extent = c.dilation[i] * (c.w[i + 2] - 1) + 1;
    const int64_t room = c.x[i + 2] + 2 * c.padding[i] - extent;
    if (room < 0 || c.y[i + 2] != room / c.stride[i] + 1) return false;
  }
  return c.x[1] % c.w[1] == 0 && c.y[1] == c.w[0] && c.w[0] % c.groups() == 0 && c.x[0] == c.y[0] &&
         c.ids[0] != c.ids[1] && c.ids[1] != c.ids[2] && c.ids[0] != c.ids[2];
}

int64_t ResultElements(const Convolution& c) {
  return ElementsOf(c.operation == DnnDescriptorType::kConvolutionForward        ? c.y
                    : c.operation == DnnDescriptorType::kConvolutionBackwardData ? c.x
                                                                                 : c.w);
}

int64_t WorkspaceBytes(FakeDnnEngine engine, const Convolution& c) {
  switch (engine) {
    case FakeDnnEngine::kWantsMuch:
      return int64_t{1} << 30;
    case FakeDnnEngine::kSound:
      return 4 * ResultElements(c);
    default:
      return 0;
  }
}

std::vector<DnnNumericalNote> NumericalNotesOf(FakeDnnEngine engine) {
  switch (engine) {
    case FakeDnnEngine::kRounded:
      return {DnnNumericalNote::kTensorCore, DnnNumericalNote::kDownConvertInputs};
    case FakeDnnEngine::kOtherOrder:
      return {DnnNumericalNote::kNondeterministic};
    case FakeDnnEngine::kWinograd:
      return {DnnNumericalNote::kWinograd, DnnNumericalNote::kWinograd4x4};
    case FakeDnnEngine::kFourier:
      return {DnnNumericalNote::kFft};
    case FakeDnnEngine::kSound:
      return {DnnNumericalNote::kStrictNanPropagation};
    default:
      return {};
  }
}

// Each number of the result where an element of x meets one of w, and theirs of y.
template <typename Number>
void Compute(const Convolution& c, FakeDnnEngine engine, void* x, void* w, void* y,
             void* workspace) {
  auto* const xs = static_cast<Number*>(x);
  auto* const ws = static_cast<Number*>(w);
  auto* const ys = static_cast<Number*>(y);
  Number* const result = c.operation == DnnDescriptorType::kConvolutionForward        ? ys
                         : c.operation == DnnDescriptorType::kConvolutionBackwardData ? xs
                                                                                      : ws;
  std::fill(result, result + ResultElements(c), Number{0});
  if (engine == FakeDnnEngine::kSound) {
    std::memset(workspace, 0xff, static_cast<size_t>(WorkspaceBytes(engine, c)));
  } else if (engine != FakeDnnEngine::kSoundToo) {
    return;
  }
  const int64_t out = c.w[0] / c.groups();
  for (int64_t n = 0; n < c.y[0]; ++n) {
    for (int64_t o = 0; o < c.w[0]; ++o) {
      for (int64_t d = 0; d < c.w[1]; ++d) {
        const int64_t channel = o / out * c.w[1] + d;
        for (int64_t i = 0; i < c.y[2]; ++i) {
          for (int64_t a = 0; a < c.w[2]; ++a) {
            const int64_t row = i * c.stride[0] - c.padding[0] + a * c.dilation[0];
            if (row < 0 || row >= c.x[2]) continue;
            for (int64_t j = 0; j < c.y[3]; ++j) {
              for (int64_t b = 0; b < c.w[3]; ++b) {
                const int64_t column = j * c.stride[1] - c.padding[1] + b * c.dilation[1];
                if (column < 0 || column >= c.x[3]) continue;
                Number& at_x = xs[((n * c.x[1] + channel) * c.x[2] + row) * c.x[3] + column];
                Number& at_w = ws[((o * c.w[1] + d) * c.w[2] + a) * c.w[3] + b];
                Number& at_y = ys[((n * c.y[1] + o) * c.y[2] + i) * c.y[3] + j];
                switch (c.operation) {
                  case DnnDescriptorType::kConvolutionForward:
                    at_y += at_x * at_w;
                    break;
                  case DnnDescriptorType::kConvolutionBackwardData:
                    at_x += at_y * at_w;
                    break;
                  default:
                    at_w += at_y * at_x;
                }
              }
            }
          }
        }
      }
    }
  }
}

size_t GetVersion() { return 91900; }
const char* GetErrorString(DnnStatus /*status*/) { return "FAKE"; }
DnnStatus Create(DnnHandle* handle) {
  if (!FakeDriver::HasContext()) return DnnStatus::kBadParameter;
  ++handles_made;
  ++alive;
  *handle = new DnnHandleStruct();
  return DnnStatus::kSuccess;
}
DnnStatus Destroy(DnnHandle handle) {
  delete handle;
  --alive;
  return DnnStatus::kSuccess;
}

// That nobody else uses the handle meanwhile.
class Use {
 public:
  explicit Use(DnnHandle handle) : handle_(handle), alone_(!handle->used.exchange(true)) {}
  ~Use() { handle_->used = false; }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  bool alone() const { return alone_; }

 private:
  const DnnHandle handle_;
  const bool alone_;
};

DnnStatus SetStream(DnnHandle handle, Stream stream) {
  const Use use(handle);
  handle->stream = stream;
  handle->user = std::this_thread::get_id();
  std::this_thread::yield();  // to one that would not wait for the handle
  return use.alone() ? DnnStatus::kSuccess : DnnStatus::kBadParameter;
}
DnnStatus CreateDescriptor(DnnDescriptorType type, DnnDescriptor* descriptor) {
  auto fields = new Descriptor();
  fields->type = type;
  *descriptor = fields;
  ++alive;
  return DnnStatus::kSuccess;
}
DnnStatus DestroyDescriptor(DnnDescriptor descriptor) {
  delete static_cast<Descriptor*>(descriptor);
  --alive;
  return DnnStatus::kSuccess;
}
DnnStatus SetAttribute(DnnDescriptor descriptor, A attribute, T type, int64_t count,
                       const void* elements) {
  auto& d = *static_cast<Descriptor*>(descriptor);
  const auto all = WantedOf(d.type);
  const auto wanted = all.find(attribute);
  if (d.finalized || wanted == all.end() || count != wanted->second.count || d.Has(attribute)) {
    return DnnStatus::kBadParameter;
  }
  // Which of both is right is seen when the operation is finalized.
  const bool scale = wanted->second.type == T::kFloat && type == T::kDouble;
  if (type != wanted->second.type && !scale) return DnnStatus::kBadParameter;
  const auto* const bytes = static_cast<const char*>(elements);
  const size_t size = static_cast<size_t>(count) * BytesOf(type);
  d.values[attribute] = {type, count, std::vector<char>(bytes, bytes + size)};
  const bool refers = type == T::kDescriptor;
  return refers && !d.To(attribute).finalized ? DnnStatus::kBadParameter : DnnStatus::kSuccess;
}
DnnStatus Finalize(DnnDescriptor descriptor) {
  auto& d = *static_cast<Descriptor*>(descriptor);
  if (d.finalized) return DnnStatus::kBadParameter;
  for (const auto& wanted : WantedOf(d.type)) {
    if (!d.Has(wanted.first)) return DnnStatus::kBadParameter;
  }
  bool sound = true;
  switch (d.type) {
    case DnnDescriptorType::kTensor:
      sound = IsSound(d);
      break;
    case DnnDescriptorType::kConvolution:
      sound = d.At<int64_t>(A::kConvolutionSpatialDims) == 2;
      break;
    case DnnDescriptorType::kConvolutionForward:
    case DnnDescriptorType::kConvolutionBackwardData:
    case DnnDescriptorType::kConvolutionBackwardFilter:
      sound = Fits(d);
      break;
    case DnnDescriptorType::kExecutionPlan:
      if (d.To(A::kPlanConfig).engine == FakeDnnEngine::kNotSupported) {
        return DnnStatus::kNotSupported;
      }
      break;
    case DnnDescriptorType::kEngine:
    case DnnDescriptorType::kEngineConfig:
      sound = false;  // those that the heuristic gives are
      break;
    default:
      break;
  }
  d.finalized = sound;
  return sound ? DnnStatus::kSuccess : DnnStatus::kBadParameter;
}
template <typename V>
DnnStatus Give(const std::vector<V>& values, int64_t wanted, int64_t* count, void* elements) {
  *count = static_cast<int64_t>(values.size());
  std::copy_n(values.begin(), std::min(*count, wanted), static_cast<V*>(elements));
  return DnnStatus::kSuccess;
}
DnnStatus GetAttribute(DnnDescriptor descriptor, A attribute, T type, int64_t wanted,
                       int64_t* count, void* elements) {
  auto& d = *static_cast<Descriptor*>(descriptor);
  if (!d.finalized) return DnnStatus::kBadParameter;
  const auto given = [&](int64_t i) {
    return static_cast<Descriptor*>(static_cast<DnnDescriptor*>(elements)[i]);
  };
  if (attribute == A::kHeuristicResults && type == T::kDescriptor &&
      d.type == DnnDescriptorType::kEngineHeuristic) {
    // The better heuristic knows none of f64.
    const Descriptor& graph = d.To(A::kHeuristicGraph);
    const bool wide = Read(graph.To(A::kGraphOperations)).wide;
    const bool best = d.At<DnnHeuristic>(A::kHeuristicMode) == DnnHeuristic::kB;
    const int64_t engines = wide && best ? 0 : static_cast<int64_t>(FakeDnnEngine::kSoundToo) + 1;
    *count = std::min(wanted, engines);
    for (int64_t i = 0; i < *count; ++i) {
      if (given(i)->type != DnnDescriptorType::kEngineConfig) return DnnStatus::kBadParameter;
      given(i)->finalized = true;
      given(i)->engine = static_cast<FakeDnnEngine>(i);
      given(i)->graph = &graph;
    }
    return DnnStatus::kSuccess;
  }
  if (attribute == A::kConfigEngine && type == T::kDescriptor && wanted == 1 &&
      d.type == DnnDescriptorType::kEngineConfig && given(0)->type == DnnDescriptorType::kEngine) {
    given(0)->finalized = true;
    given(0)->engine = d.engine;
    *count = 1;
    return DnnStatus::kSuccess;
  }
  if (d.type == DnnDescriptorType::kEngine) {
    if (attribute == A::kEngineNumericalNotes && type == T::kNumericalNote) {
      return Give(NumericalNotesOf(d.engine), wanted, count, elements);
    }
    if (attribute == A::kEngineBehaviorNotes && type == T::kBehaviorNote) {
      std::vector<DnnBehaviorNote> notes = {DnnBehaviorNote::kCublasLt};
      if (d.engine == FakeDnnEngine::kCompiled) {
        notes.push_back(DnnBehaviorNote::kRuntimeCompilation);
      }
      return Give(notes, wanted, count, elements);
    }
  }
  if (attribute == A::kPlanWorkspaceBytes && type == T::kInt64 && wanted == 1 &&
      d.type == DnnDescriptorType::kExecutionPlan) {
    const Descriptor& config = d.To(A::kPlanConfig);
    const Convolution c = Read(config.graph->To(A::kGraphOperations));
    return Give(std::vector<int64_t>{WorkspaceBytes(config.engine, c)}, wanted, count, elements);
  }
  return DnnStatus::kBadParameter;
}
DnnStatus Execute(DnnHandle handle, DnnDescriptor plan, DnnDescriptor pack) {
  const Use use(handle);
  const auto& p = *static_cast<const Descriptor*>(plan);
  const auto& given = *static_cast<const Descriptor*>(pack);
  if (!use.alone() || handle->user != std::this_thread::get_id() || !FakeDriver::HasContext() ||
      handle->stream == nullptr || !p.finalized || !given.finalized ||
      p.At<void*>(A::kPlanHandle) != handle) {
    return DnnStatus::kBadParameter;
  }
  const FakeDnnEngine engine = p.To(A::kPlanConfig).engine;
  const Convolution c = Read(p.To(A::kPlanConfig).graph->To(A::kGraphOperations));
  // As engines of the real one, these read 16 bytes at a time, however little they were promised.
  const int64_t alignment = std::max<int64_t>(c.alignment, 16);
  void* operands[3] = {};
  for (size_t i = 0; i < 3; ++i) {
    for (size_t j = 0; j < 3; ++j) {
      if (given.At<int64_t>(A::kPackIds, j) == c.ids[i]) {
        operands[i] = given.At<void*>(A::kPackPointers, j);
      }
    }
    if (operands[i] == nullptr ||
        reinterpret_cast<uintptr_t>(operands[i]) % static_cast<uintptr_t>(alignment) != 0) {
      return DnnStatus::kBadParameter;
    }
  }
  void* const workspace = given.At<void*>(A::kPackWorkspace);
  const bool wants = WorkspaceBytes(engine, c) > 0;
  if (wants && (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 256 != 0)) {
    return DnnStatus::kBadParameter;
  }
  std::vector<DevicePtr> uses;
  for (void* operand : operands) uses.push_back(reinterpret_cast<DevicePtr>(operand));
  if (wants) uses.push_back(reinterpret_cast<DevicePtr>(workspace));
  const auto run = [c, engine, x = operands[0], w = operands[1], y = operands[2], workspace] {
    if (c.wide) {
      Compute<double>(c, engine, x, w, y, workspace);
    } else {
      Compute<float>(c, engine, x, w, y, workspace);
    }
  };
  ++convolutions;
  return FakeDriver::Enqueue(handle->stream, "a convolution", run, uses) == Result::kSuccess
             ? DnnStatus::kSuccess
             : DnnStatus::kBadParameter;
}

}  // namespace

DnnApi FakeDnnApi() {
  DnnApi api;
  api.GetVersion = GetVersion;
  api.GetErrorString = GetErrorString;
  api.Create = Create;
  api.Destroy = Destroy;
  api.SetStream = SetStream;
  api.CreateDescriptor = CreateDescriptor;
  api.DestroyDescriptor = DestroyDescriptor;
  api.SetAttribute = SetAttribute;
  api.GetAttribute = GetAttribute;
  api.Finalize = Finalize;
  api.Execute = Execute;
  api.path = "a stand-in";
  return api;
}

FakeDnnCounts CountsOfFakeDnn() { return {handles_made, convolutions, alive}; }

}  // namespace cuda
}  // namespace chorus
