#include "core/cuda/blas.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/cuda/room.h"

namespace chorus {
namespace {

using cuda::BlasStatus;
using cuda::BlasType;

// What NVIDIA recommends for the GPUs that want most (sm_90). A kernel is charged with what its
// algorithm wants.
constexpr uint64_t kMostAlgorithmBytes = uint64_t{32} << 20;

// More than that no algorithm asks for.
constexpr int64_t kMostAlignment = 16;

// Calls a function that returns a BlasStatus, and returns it from the function around if it failed.
#define CHORUS_BLAS(call)                                                   \
  do {                                                                      \
    if (const BlasStatus status = (call); status != BlasStatus::kSuccess) { \
      return status;                                                        \
    }                                                                       \
  } while (false)

}  // namespace

std::string BlasProblem::Text() const {
  return absl::StrCat(batch == 1 ? "a product" : absl::StrCat(batch, " products"), " of ",
                      NameOf(type), " ", rows, " x ", columns, " x ", depth,
                      transpose_a ? ", A^T" : "", one_a ? ", one A" : "",
                      transpose_b ? ", B^T" : "");
}

BlasProduct::~BlasProduct() {
  for (const Operand* operand : {&a_, &b_, &c_}) {
    if (operand->layout != nullptr) api_->MatrixLayoutDestroy(operand->layout);
  }
  if (matmul_ != nullptr) api_->MatmulDescDestroy(matmul_);
}

// Of a matrix that lies in so many rows. cuBLASLt's lie column by column: it sees the transpose.
BlasStatus BlasProduct::DescribeOperand(const BlasProblem& problem, int64_t rows, int64_t columns,
                                        Operand* operand) {
  const int64_t element_bytes = ElementBytes(problem.type);
  CHORUS_BLAS(api_->MatrixLayoutCreate(&operand->layout, problem.type,
                                       static_cast<uint64_t>(columns), static_cast<uint64_t>(rows),
                                       columns));
  auto alignment = static_cast<uint32_t>(element_bytes);
  while (alignment < kMostAlignment && columns * element_bytes % (2 * alignment) == 0) {
    alignment *= 2;
  }
  operand->memory = {(operand->one ? 1 : problem.batch) * rows * columns * element_bytes,
                     alignment};
  if (problem.batch == 1) return BlasStatus::kSuccess;
  const auto count = static_cast<int32_t>(problem.batch);
  const int64_t stride = operand->one ? 0 : rows * columns;
  CHORUS_BLAS(api_->MatrixLayoutSetAttribute(
      operand->layout, cuda::BlasLayoutAttribute::kBatchCount, &count, sizeof(count)));
  return api_->MatrixLayoutSetAttribute(operand->layout, cuda::BlasLayoutAttribute::kBatchStride,
                                        &stride, sizeof(stride));
}

BlasStatus BlasProduct::Describe(const BlasProblem& problem) {
  wide_ = problem.type == BlasType::kF64;
  CHORUS_BLAS(api_->MatmulDescCreate(&matmul_,
                                     wide_ ? cuda::BlasCompute::kF64 : cuda::BlasCompute::kF32,
                                     wide_ ? BlasType::kF64 : BlasType::kF32));
  const auto transpose = [&](cuda::BlasMatmulAttribute which, bool transposed) {
    const auto operation =
        transposed ? cuda::BlasOperation::kTransposed : cuda::BlasOperation::kAsIs;
    return api_->MatmulDescSetAttribute(matmul_, which, &operation, sizeof(operation));
  };
  // It sees c^T = op(b)^T op(a)^T, of which our b is the left factor.
  CHORUS_BLAS(transpose(cuda::BlasMatmulAttribute::kTransposeA, problem.transpose_b));
  CHORUS_BLAS(transpose(cuda::BlasMatmulAttribute::kTransposeB, problem.transpose_a));
  const auto operand = [&](int64_t rows, int64_t columns, bool transposed, Operand* to) {
    if (transposed) std::swap(rows, columns);
    return DescribeOperand(problem, rows, columns, to);
  };
  a_.one = problem.one_a;
  b_.aligned = problem.aligned_b;
  c_.aligned = problem.aligned_c;
  CHORUS_BLAS(operand(problem.rows, problem.depth, problem.transpose_a, &a_));
  CHORUS_BLAS(operand(problem.depth, problem.columns, problem.transpose_b, &b_));
  return operand(problem.rows, problem.columns, false, &c_);
}

BlasStatus BlasProduct::Choose() {
  cuda::BlasChoice choice = nullptr;
  CHORUS_BLAS(api_->MatmulPreferenceCreate(&choice));
  const std::unique_ptr<cuda::BlasChoiceStruct, BlasStatus (*)(cuda::BlasChoice)> owned(
      choice, api_->MatmulPreferenceDestroy);
  const auto prefer = [&](cuda::BlasPreference attribute, auto value) {
    return api_->MatmulPreferenceSetAttribute(choice, attribute, &value, sizeof(value));
  };
  CHORUS_BLAS(prefer(cuda::BlasPreference::kMaxWorkspaceBytes, kMostAlgorithmBytes));
  CHORUS_BLAS(prefer(cuda::BlasPreference::kReductionSchemes, cuda::BlasReduction::kComputeType));
  CHORUS_BLAS(prefer(cuda::BlasPreference::kMinAlignmentA, b_.memory.alignment()));
  CHORUS_BLAS(prefer(cuda::BlasPreference::kMinAlignmentB, a_.memory.alignment()));
  CHORUS_BLAS(prefer(cuda::BlasPreference::kMinAlignmentC, c_.memory.alignment()));
  CHORUS_BLAS(prefer(cuda::BlasPreference::kMinAlignmentD, c_.memory.alignment()));
  cuda::BlasHeuristic best;
  int count = 0;
  CHORUS_BLAS(api_->MatmulAlgoGetHeuristic(handle_, matmul_, b_.layout, a_.layout, c_.layout,
                                           c_.layout, choice, 1, &best, &count));
  if (count == 0) return BlasStatus::kNotSupported;
  CHORUS_BLAS(best.state);
  algorithm_ = best.algorithm;
  algorithm_bytes_ = best.workspace_bytes;
  return BlasStatus::kSuccess;
}

void BlasProduct::MakeRoom(int64_t element_bytes) {
  workspace_bytes_ = static_cast<int64_t>(algorithm_bytes_);
  for (Operand* operand : {&a_, &b_, &c_}) {
    // It never lies badly.
    if (operand->memory.alignment() <= element_bytes || operand->aligned) continue;
    operand->memory.KeepRoom(&workspace_bytes_);
  }
  workspace_bytes_ = WorkspaceOf(workspace_bytes_);
}

absl::Status BlasProduct::Enqueue(const cuda::Api& driver, cuda::DevicePtr a, cuda::DevicePtr b,
                                  cuda::DevicePtr c, cuda::DevicePtr workspace, cuda::Stream stream,
                                  bool adds) const {
  const auto rooms = static_cast<cuda::DevicePtr>(RoomFrom(static_cast<int64_t>(workspace)));
  if ((b_.aligned && b_.memory.LiesBadly(b)) || (c_.aligned && c_.memory.LiesBadly(c))) {
    return MakeError(Reason::kInternal, "a product's operand lies where it was not to");
  }
  const auto bring = [&](const Operand& operand, cuda::DevicePtr* at) {
    const cuda::DevicePtr from = *at;
    *at = operand.memory.LocationOf(from, rooms);
    return operand.memory.Copy(driver, *at, from, stream);
  };
  CHORUS_RETURN_IF_ERROR(bring(a_, &a));
  CHORUS_RETURN_IF_ERROR(bring(b_, &b));
  const cuda::DevicePtr result = c_.memory.LocationOf(c, rooms);
  if (adds) CHORUS_RETURN_IF_ERROR(c_.memory.Copy(driver, result, c, stream));
  static constexpr float kOne = 1;
  static constexpr float kZero = 0;
  static constexpr double kWideOne = 1;
  static constexpr double kWideZero = 0;
  const void* const one = wide_ ? static_cast<const void*>(&kWideOne) : &kOne;
  const void* const zero = wide_ ? static_cast<const void*>(&kWideZero) : &kZero;
  const void* const beta = adds ? one : zero;
  const auto pointer = [](cuda::DevicePtr at) { return reinterpret_cast<void*>(at); };
  const BlasStatus status =
      api_->Matmul(handle_, matmul_, one, pointer(b), b_.layout, pointer(a), a_.layout, beta,
                   pointer(result), c_.layout, pointer(result), c_.layout, &algorithm_,
                   algorithm_bytes_ == 0 ? nullptr : pointer(rooms), algorithm_bytes_, stream);
  if (status != BlasStatus::kSuccess) {
    return MakeError(Reason::kExecFailed,
                     absl::StrCat("cublasLtMatmul: ", StatusText(*api_, status)));
  }
  return c_.memory.Copy(driver, c, result, stream);
}

std::unique_ptr<BlasProduct> CudaBlas::Make(const BlasProblem& problem) {
  if (problem.batch == 0 || problem.rows == 0 || problem.columns == 0 || problem.depth == 0 ||
      problem.batch > std::numeric_limits<int32_t>::max()) {
    return nullptr;
  }
  const cuda::BlasHandle handle = library_.Open();
  if (handle == nullptr) return nullptr;
  std::unique_ptr<BlasProduct> product(new BlasProduct(&library_.api(), handle));
  BlasStatus status = product->Describe(problem);
  if (status == BlasStatus::kSuccess) status = product->Choose();
  if (status == BlasStatus::kSuccess) {
    product->MakeRoom(ElementBytes(problem.type));
    return product;
  }
  library_.TellOnce(absl::StrCat("not by cuBLASLt, as perhaps others: ", problem.Text(), ": ",
                                 StatusText(library_.api(), status)));
  return nullptr;
}

}  // namespace chorus
