// Convolutions and their adjoints by cuDNN, where the machine has it: an engine is chosen when a
// convolution is made, and runs at every call.
//
// Bits. What is chosen depends on the problem, the library and the GPU's model alone: the first
// engine that the heuristic names and that is sound, and neither on what is measured nor on where
// operands lie. Sound is one
// that gives the same bits always, and sums of the products as they stand: no TF32 or other shorter
// numbers, no Winograd's or Fourier's forms, in which a number reaches results that it is no part
// of. None is compiled when it is wanted, which takes seconds. So the next engine is taken, or
// none, for what a library says of the problem, and never for what it says of the moment: where it
// has no memory, or the GPU fails, the convolution is not made.
//
// Alignment. Engines are promised addresses of 16 bytes. Promised those of an element, some read 16
// bytes at a time all the same (9.19 on an H100: the weights' gradient of f32 3x1024x2x2 for a
// kernel of 2 x 2, whose y is aligned to 4), and the context was lost. So an operand that has less,
// a part of a scattered tensor, say, goes by way of the workspace, in which there is room for all
// three, since where they will lie is not known when a convolution is made.
//
// Threads: any. Ownership: the functions of `load` and a convolution's CudaDnn must outlive it.
// Errors: where cuDNN cannot be had, or does not do a convolution, there is none, and the first
// time of either is told on the standard error; RESOURCE_EXHAUSTED kOutOfMemory and INTERNAL
// kExecFailed: of the moment; else as cuda_api.h says.
#ifndef CHORUS_CORE_CUDA_DNN_H_
#define CHORUS_CORE_CUDA_DNN_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/mutex.h"
#include "core/cuda/aligned_operand.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/cudnn_api.h"
#include "core/cuda/lazy_library.h"

namespace chorus {

// x [batch, channels, height, width], w [channels of y, channels of a group of x, kernel], y. All
// lie row by row.
struct DnnProblem {
  enum class Gives { kY, kX, kW };  // of the other two
  Gives gives = Gives::kY;
  cuda::DnnType type = cuda::DnnType::kF32;
  std::array<int64_t, 4> x{};
  std::array<int64_t, 4> w{};
  std::array<int64_t, 4> y{};
  // Over height and width.
  std::array<int64_t, 2> stride{1, 1};
  std::array<int64_t, 2> padding{};  // on both sides
  std::array<int64_t, 2> dilation{1, 1};

  std::string Text() const;  // "y of a convolution of f32 64x3x224x224 and 64x3x7x7, stride 2x2"
};

class CudaDnn;

// A problem with its engine.
class DnnConvolution {
 public:
  DnnConvolution(const DnnConvolution&) = delete;
  DnnConvolution& operator=(const DnnConvolution&) = delete;

  // Of the driver at a call, about: an engine's kernels, and copies of what lies badly.
  static constexpr int64_t kCalls = 8;
  int64_t workspace_bytes() const { return workspace_bytes_; }
  // On a stream of `driver`, whose context is the thread's. The workspace is aligned to 64 bytes,
  // operands to their elements; what the problem gives is written.
  absl::Status Enqueue(const cuda::Api& driver, cuda::DevicePtr x, cuda::DevicePtr w,
                       cuda::DevicePtr y, cuda::DevicePtr workspace, cuda::Stream stream) const;

 private:
  friend class CudaDnn;

  // A descriptor, and the first thing that went wrong with it.
  class Descriptor {
   public:
    Descriptor(const cuda::DnnApi* api, cuda::DnnDescriptorType type);
    ~Descriptor();
    Descriptor(Descriptor&& other) noexcept;
    Descriptor& operator=(Descriptor&&) = delete;

    template <typename T>
    void Set(cuda::DnnAttribute attribute, cuda::DnnAttributeType type, absl::Span<const T> values);
    template <typename T>
    void SetOne(cuda::DnnAttribute attribute, cuda::DnnAttributeType type, const T& value);
    void SetInts(cuda::DnnAttribute attribute, absl::Span<const int64_t> values);
    void Refer(cuda::DnnAttribute attribute, const Descriptor& to);
    // Those that it has, at most as many as there is room for.
    template <typename T>
    int64_t Get(cuda::DnnAttribute attribute, cuda::DnnAttributeType type, absl::Span<T> to);
    void Finalize();

    const cuda::DnnApi& api() const { return *api_; }
    cuda::DnnDescriptor raw() const { return raw_; }
    cuda::DnnStatus status() const { return status_; }
    bool ok() const { return status_ == cuda::DnnStatus::kSuccess; }

   private:
    const cuda::DnnApi* api_;
    cuda::DnnDescriptor raw_ = nullptr;
    cuda::DnnStatus status_;
  };

  DnnConvolution(CudaDnn* dnn, cuda::DnnHandle handle) : dnn_(dnn), handle_(handle) {}
  // Of one that uses the handle: nobody else does meanwhile.
  void FinalizeAlone(Descriptor* descriptor);
  cuda::DnnStatus Describe(const DnnProblem& problem);
  Descriptor Tensor(const DnnProblem& problem, size_t operand, const std::array<int64_t, 4>& sizes);
  cuda::DnnStatus Choose(cuda::DnnType type);
  // kNotSupported: it is not sound; else what the library says of it.
  cuda::DnnStatus Examine(Descriptor* config, cuda::DnnType type);
  // Success: its engine is the one.
  cuda::DnnStatus Take(std::unique_ptr<Descriptor> config, cuda::DnnType type);

  CudaDnn* const dnn_;
  const cuda::DnnHandle handle_;
  // What a plan is made of stays, for its sake.
  std::vector<Descriptor> parts_;
  std::unique_ptr<Descriptor> graph_;
  std::unique_ptr<Descriptor> config_;
  std::unique_ptr<Descriptor> plan_;
  std::array<AlignedOperand, 3> operands_;  // x, w and y
  size_t result_ = 0;                       // which of them is written
  int64_t plan_bytes_ = 0;                  // of workspace, which stand first in ours
  int64_t workspace_bytes_ = 0;
};

// One GPU's cuDNN. It is loaded and opened when the first convolution is made.
class CudaDnn {
 public:
  using Library = LazyLibrary<cuda::DnnApi, cuda::DnnHandle>;
  using Load = Library::Load;

  // Null: there is none, and nothing is told of it.
  explicit CudaDnn(Load load) : library_(std::move(load), "convolutions without cuDNN") {}
  // In the GPU's context, as all that follows.
  ~CudaDnn() = default;
  CudaDnn(const CudaDnn&) = delete;
  CudaDnn& operator=(const CudaDnn&) = delete;

  // Null: not by cuDNN, which is so for problems without any element or term.
  absl::StatusOr<std::unique_ptr<DnnConvolution>> Make(const DnnProblem& problem)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class DnnConvolution;

  Library library_;
  // Held where the handle is used, and for no more than one step of what is made: a caller that
  // runs a convolution waits for it, and with it all callers that want the GPU.
  Mutex mutex_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_DNN_H_
