#include "tools/gpu_probe/matmul.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace chorus {
namespace probe {

using cuda::BlasType;

int64_t MatmulShape::element_bytes() const { return cuda::ElementBytes(type); }

std::string MatmulShape::Text() const {
  return absl::StrCat(cuda::NameOf(type), " ", m, " x ", n, " x ", k, transpose_a ? ", A^T" : "",
                      transpose_b ? ", B^T" : "");
}

absl::StatusOr<std::unique_ptr<Matmul>> Matmul::Open(Gpu* gpu,
                                                     const std::vector<std::string>& libraries) {
  std::unique_ptr<Matmul> matmul(new Matmul);
  auto api = cuda::LoadBlasApi(libraries);
  if (!api.ok()) return absl::UnavailableError(ErrorOf(api.status()).message);
  matmul->api_ = *std::move(api);
  CHORUS_ASSIGN_OR_RETURN(matmul->workspace_, gpu->Allocate(kWorkspaceBytes));
  cuda::BlasHandle handle = nullptr;
  CHORUS_RETURN_IF_ERROR(matmul->Check(matmul->api_.Create(&handle), "cublasLtCreate"));
  matmul->handle_ =
      Owned<cuda::BlasHandle>(handle, [api = matmul->api_](cuda::BlasHandle h) { api.Destroy(h); });
  return matmul;
}

absl::Status Matmul::Set(const MatmulShape& shape) {
  shape_ = shape;
  cuda::BlasMatmul matmul = nullptr;
  CHORUS_RETURN_IF_ERROR(
      Check(api_.MatmulDescCreate(&matmul, compute(), scale()), "cublasLtMatmulDescCreate"));
  matmul_ =
      Owned<cuda::BlasMatmul>(matmul, [this](cuda::BlasMatmul m) { api_.MatmulDescDestroy(m); });
  const auto transpose = [&](cuda::BlasMatmulAttribute which, bool transposed) {
    const auto operation =
        transposed ? cuda::BlasOperation::kTransposed : cuda::BlasOperation::kAsIs;
    return Check(api_.MatmulDescSetAttribute(matmul_.get(), which, &operation, sizeof(operation)),
                 "cublasLtMatmulDescSetAttribute");
  };
  CHORUS_RETURN_IF_ERROR(transpose(cuda::BlasMatmulAttribute::kTransposeA, shape.transpose_a));
  CHORUS_RETURN_IF_ERROR(transpose(cuda::BlasMatmulAttribute::kTransposeB, shape.transpose_b));
  const auto layout = [&](int64_t rows, int64_t columns, bool transposed,
                          Owned<cuda::BlasLayout>* to) {
    if (transposed) std::swap(rows, columns);
    cuda::BlasLayout handle = nullptr;
    CHORUS_RETURN_IF_ERROR(Check(api_.MatrixLayoutCreate(&handle, shape.type, rows, columns, rows),
                                 "cublasLtMatrixLayoutCreate"));
    *to = Owned<cuda::BlasLayout>(handle,
                                  [this](cuda::BlasLayout l) { api_.MatrixLayoutDestroy(l); });
    return absl::OkStatus();
  };
  CHORUS_RETURN_IF_ERROR(layout(shape.m, shape.k, shape.transpose_a, &a_));
  CHORUS_RETURN_IF_ERROR(layout(shape.k, shape.n, shape.transpose_b, &b_));
  return layout(shape.m, shape.n, false, &d_);
}

absl::StatusOr<cuda::BlasAlgorithm> Matmul::Choose(uint32_t alignment_bytes) const {
  cuda::BlasChoice choice = nullptr;
  CHORUS_RETURN_IF_ERROR(
      Check(api_.MatmulPreferenceCreate(&choice), "cublasLtMatmulPreferenceCreate"));
  const Owned<cuda::BlasChoice> owned(
      choice, [this](cuda::BlasChoice c) { api_.MatmulPreferenceDestroy(c); });
  const uint64_t workspace = kWorkspaceBytes;
  CHORUS_RETURN_IF_ERROR(
      Check(api_.MatmulPreferenceSetAttribute(choice, cuda::BlasPreference::kMaxWorkspaceBytes,
                                              &workspace, sizeof(workspace)),
            "cublasLtMatmulPreferenceSetAttribute"));
  for (const auto attribute :
       {cuda::BlasPreference::kMinAlignmentA, cuda::BlasPreference::kMinAlignmentB,
        cuda::BlasPreference::kMinAlignmentC, cuda::BlasPreference::kMinAlignmentD}) {
    CHORUS_RETURN_IF_ERROR(Check(api_.MatmulPreferenceSetAttribute(
                                     choice, attribute, &alignment_bytes, sizeof(alignment_bytes)),
                                 "cublasLtMatmulPreferenceSetAttribute"));
  }
  cuda::BlasHeuristic result;
  int count = 0;
  CHORUS_RETURN_IF_ERROR(
      Check(api_.MatmulAlgoGetHeuristic(handle_.get(), matmul_.get(), a_.get(), b_.get(), d_.get(),
                                        d_.get(), choice, 1, &result, &count),
            "cublasLtMatmulAlgoGetHeuristic"));
  if (count == 0) return absl::InternalError("the heuristic offers no algorithm");
  CHORUS_RETURN_IF_ERROR(Check(result.state, "cublasLtMatmulAlgoGetHeuristic, its result"));
  return result.algorithm;
}

absl::Status Matmul::Run(const cuda::BlasAlgorithm& algorithm, cuda::DevicePtr a, cuda::DevicePtr b,
                         cuda::DevicePtr d, cuda::Stream stream) const {
  const float one = 1;
  const float zero = 0;
  const double wide_one = 1;
  const double wide_zero = 0;
  const bool wide = scale() == BlasType::kF64;
  const auto pointer = [](cuda::DevicePtr p) { return reinterpret_cast<void*>(p); };
  return Check(
      api_.Matmul(handle_.get(), matmul_.get(), wide ? static_cast<const void*>(&wide_one) : &one,
                  pointer(a), a_.get(), pointer(b), b_.get(),
                  wide ? static_cast<const void*>(&wide_zero) : &zero, pointer(d), d_.get(),
                  pointer(d), d_.get(), &algorithm, pointer(workspace_.get()), kWorkspaceBytes,
                  stream),
      "cublasLtMatmul");
}

Algorithm Matmul::Describe(const cuda::BlasAlgorithm& algorithm) const {
  Algorithm described;
  described.structure = algorithm;
  for (size_t i = 0; i < Algorithm::kFields; ++i) {
    const AlgorithmField& field = AlgorithmFields()[i];
    uint32_t value = 0;  // of 2 or 4 bytes, the lowest first
    size_t written = 0;
    const cuda::BlasStatus status = api_.MatmulAlgoConfigGetAttribute(
        &algorithm, field.attribute, &value, field.bytes, &written);
    described.values[i] =
        status == cuda::BlasStatus::kSuccess ? int64_t{value} : Algorithm::kNotKnown;
  }
  return described;
}

absl::StatusOr<cuda::BlasAlgorithm> Matmul::Rebuild(const Algorithm& like) const {
  cuda::BlasAlgorithm rebuilt;
  CHORUS_RETURN_IF_ERROR(Check(
      api_.MatmulAlgoInit(handle_.get(), compute(), scale(), shape_.type, shape_.type, shape_.type,
                          shape_.type, static_cast<int>(like.values[0]), &rebuilt),
      "cublasLtMatmulAlgoInit"));
  const Algorithm fresh = Describe(rebuilt);
  for (size_t i = 0; i < Algorithm::kFields; ++i) {
    // An algorithm need not take what it has no use for.
    if (like.values[i] == fresh.values[i] || like.values[i] == Algorithm::kNotKnown) continue;
    const AlgorithmField& field = AlgorithmFields()[i];
    const auto value = static_cast<uint32_t>(like.values[i]);
    CHORUS_RETURN_IF_ERROR(
        Check(api_.MatmulAlgoConfigSetAttribute(&rebuilt, field.attribute, &value, field.bytes),
              absl::StrCat("cublasLtMatmulAlgoConfigSetAttribute, ", field.name).c_str()));
  }
  return rebuilt;
}

std::string Matmul::VersionText() const {
  return absl::StrCat("cuBLASLt ", api_.GetVersion(), " from ", api_.path);
}

cuda::BlasCompute Matmul::compute() const {
  return shape_.type == BlasType::kF64 ? cuda::BlasCompute::kF64 : cuda::BlasCompute::kF32;
}

BlasType Matmul::scale() const {
  return shape_.type == BlasType::kF64 ? BlasType::kF64 : BlasType::kF32;
}

absl::Status Matmul::Check(cuda::BlasStatus status, const char* call) const {
  if (status == cuda::BlasStatus::kSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(call, ": ", cuda::StatusText(api_, status)));
}

std::vector<unsigned char> PatternMatrix(BlasType type, int64_t count, uint64_t seed) {
  std::vector<unsigned char> bytes(
      static_cast<size_t>(count * MatmulShape{type, 1, 1, 1}.element_bytes()));
  unsigned char* at = bytes.data();
  const auto put = [&](auto bits) {
    std::memcpy(at, &bits, sizeof(bits));
    at += sizeof(bits);
  };
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t word = PatternWord(seed, static_cast<uint64_t>(i));
    const uint32_t sign = word >> 31;
    const uint32_t low_bit = word >> 30 & 1;  // of the exponent: 2^-1 or 2^0
    switch (type) {
      case BlasType::kF32:
        put(sign << 31 | (126 + low_bit) << 23 | (word & 0x7fffff));
        break;
      case BlasType::kF64:
        put(uint64_t{sign} << 63 | uint64_t{1022 + low_bit} << 52 |
            uint64_t{PatternWord(seed + 1, static_cast<uint64_t>(i))} << 20 | (word & 0xfffff));
        break;
      case BlasType::kF16:
        put(static_cast<uint16_t>(sign << 15 | (14 + low_bit) << 10 | (word & 0x3ff)));
        break;
      case BlasType::kBF16:
        put(static_cast<uint16_t>(sign << 15 | (126 + low_bit) << 7 | (word & 0x7f)));
        break;
    }
  }
  return bytes;
}

}  // namespace probe
}  // namespace chorus
