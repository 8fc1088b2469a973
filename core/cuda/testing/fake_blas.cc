#include "core/cuda/testing/fake_blas.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <limits>

#include "core/cuda/testing/fake_blas_structs.h"
#include "core/cuda/testing/fake_driver.h"
#include "core/tensor/half.h"

namespace chorus {
namespace cuda {

namespace {

std::atomic<int64_t> handles_made{0};
std::atomic<int64_t> products{0};
std::atomic<int64_t> alive{0};

template <typename T>
BlasStatus Make(T** to, T value) {
  *to = new T(value);
  ++alive;
  return BlasStatus::kSuccess;
}
template <typename T>
BlasStatus Destroy(T* object) {
  delete object;
  --alive;
  return BlasStatus::kSuccess;
}

template <typename T>
BlasStatus Take(const void* value, size_t bytes, T* to) {
  if (bytes != sizeof(T)) return BlasStatus::kInvalidValue;
  std::memcpy(to, value, sizeof(T));
  return BlasStatus::kSuccess;
}

// What a BlasAlgorithm holds.
struct Configuration {
  uint32_t magic = 0;
  uint32_t parts = 1;  // of each sum
  uint32_t alignments[4] = {};
  uint64_t sides[3] = {};  // what it was made for
  uint32_t batch = 0;
  uint32_t unused = 0;
};
static_assert(sizeof(Configuration) <= sizeof(BlasAlgorithm));
constexpr uint32_t kMagic = 0xb1a5;

// An operand as it is multiplied.
struct Matrix {
  uint64_t rows = 0;
  uint64_t columns = 0;
  uint64_t row_step = 0;  // elements
  uint64_t column_step = 0;
  uint64_t stride = 0;
};
Matrix MatrixOf(BlasOperation operation, const BlasLayoutStruct& layout) {
  const auto leading = static_cast<uint64_t>(layout.leading);
  const auto stride = static_cast<uint64_t>(layout.stride);
  if (operation == BlasOperation::kAsIs) {
    return {layout.rows, layout.columns, 1, leading, stride};
  }
  return {layout.columns, layout.rows, leading, 1, stride};
}

bool IsSound(const BlasLayoutStruct& layout) {
  constexpr uint64_t kMost = std::numeric_limits<int32_t>::max();
  const uint64_t bytes = static_cast<uint64_t>(layout.leading) * layout.columns;
  return layout.rows > 0 && layout.columns > 0 && layout.rows <= kMost && layout.columns <= kMost &&
         layout.leading >= static_cast<int64_t>(layout.rows) && layout.batch > 0 &&
         (layout.batch == 1 || layout.stride == 0 || static_cast<uint64_t>(layout.stride) >= bytes);
}

// Whether these are what products are made of, the result's matrices apart from each other.
bool IsProduct(const BlasMatmulStruct& matmul, const BlasLayoutStruct& a, const BlasLayoutStruct& b,
               const BlasLayoutStruct& c, const BlasLayoutStruct& d) {
  for (const BlasLayoutStruct* layout : {&a, &b, &c, &d}) {
    if (!IsSound(*layout) || layout->type != d.type || layout->batch != d.batch) return false;
  }
  const Matrix left = MatrixOf(matmul.a, a);
  const Matrix right = MatrixOf(matmul.b, b);
  const bool wide = d.type == BlasType::kF64;
  return matmul.compute == (wide ? BlasCompute::kF64 : BlasCompute::kF32) &&
         matmul.scale == (wide ? BlasType::kF64 : BlasType::kF32) && left.columns == right.rows &&
         left.rows == d.rows && right.columns == d.columns && c.rows == d.rows &&
         c.columns == d.columns && (d.batch == 1 || d.stride != 0);
}

uint64_t WorkspaceBytes(const Configuration& configuration, const BlasLayoutStruct& d) {
  if (configuration.parts == 1) return 0;
  const uint64_t sum_bytes = d.type == BlasType::kF64 ? sizeof(double) : sizeof(float);
  return configuration.parts * static_cast<uint64_t>(d.batch) * d.rows * d.columns * sum_bytes;
}

// Column by column, matrix by matrix, part by part: what stands in the workspace.
template <typename T, typename Sum>
void Multiply(const Matrix& left, const void* a, const Matrix& right, const void* b,
              const BlasLayoutStruct& result, void* d, bool adds, uint32_t parts, void* workspace) {
  const auto* const from_a = static_cast<const T*>(a);
  const auto* const from_b = static_cast<const T*>(b);
  auto* const between = static_cast<Sum*>(workspace);
  const uint64_t depth = left.columns;
  const uint64_t elements = result.rows * result.columns * static_cast<uint64_t>(result.batch);
  const auto each = [&](auto visit) {
    uint64_t index = 0;
    for (uint64_t n = 0; n < static_cast<uint64_t>(result.batch); ++n) {
      for (uint64_t column = 0; column < result.columns; ++column) {
        for (uint64_t row = 0; row < result.rows; ++row) visit(n, row, column, index++);
      }
    }
  };
  const auto sum = [&](uint64_t n, uint64_t row, uint64_t column, uint64_t begin, uint64_t end) {
    Sum total = 0;
    for (uint64_t k = begin; k < end; ++k) {
      total +=
          static_cast<Sum>(from_a[n * left.stride + row * left.row_step + k * left.column_step]) *
          static_cast<Sum>(
              from_b[n * right.stride + k * right.row_step + column * right.column_step]);
    }
    return total;
  };
  for (uint64_t part = 0; parts > 1 && part < parts; ++part) {
    each([&](uint64_t n, uint64_t row, uint64_t column, uint64_t index) {
      between[part * elements + index] =
          sum(n, row, column, part * depth / parts, (part + 1) * depth / parts);
    });
  }
  auto* const to = static_cast<T*>(d);
  each([&](uint64_t n, uint64_t row, uint64_t column, uint64_t index) {
    Sum total = 0;
    if (parts == 1) {
      total = sum(n, row, column, 0, depth);
    } else {
      for (uint64_t part = 0; part < parts; ++part) total += between[part * elements + index];
    }
    T& element = to[n * static_cast<uint64_t>(result.stride) +
                    column * static_cast<uint64_t>(result.leading) + row];
    element = static_cast<T>(adds ? total + static_cast<Sum>(element) : total);
  });
}

size_t GetVersion() { return 130000; }
const char* GetStatusName(BlasStatus /*status*/) { return "FAKE"; }
BlasStatus Create(BlasHandle* handle) {
  if (!FakeDriver::HasContext()) return BlasStatus::kInvalidValue;
  ++handles_made;
  return Make(handle, BlasHandleStruct());
}
BlasStatus MatmulDescCreate(BlasMatmul* matmul, BlasCompute compute, BlasType scale) {
  BlasMatmulStruct fields;
  fields.compute = compute;
  fields.scale = scale;
  return Make(matmul, fields);
}
BlasStatus MatmulDescSetAttribute(BlasMatmul matmul, BlasMatmulAttribute attribute,
                                  const void* value, size_t bytes) {
  return Take(value, bytes,
              attribute == BlasMatmulAttribute::kTransposeA ? &matmul->a : &matmul->b);
}
BlasStatus MatrixLayoutCreate(BlasLayout* layout, BlasType type, uint64_t rows, uint64_t columns,
                              int64_t leading) {
  BlasLayoutStruct fields;
  fields.type = type;
  fields.rows = rows;
  fields.columns = columns;
  fields.leading = leading;
  return Make(layout, fields);
}
BlasStatus MatrixLayoutSetAttribute(BlasLayout layout, BlasLayoutAttribute attribute,
                                    const void* value, size_t bytes) {
  return attribute == BlasLayoutAttribute::kBatchCount ? Take(value, bytes, &layout->batch)
                                                       : Take(value, bytes, &layout->stride);
}
BlasStatus MatmulPreferenceCreate(BlasChoice* choice) { return Make(choice, BlasChoiceStruct()); }
BlasStatus MatmulPreferenceSetAttribute(BlasChoice choice, BlasPreference attribute,
                                        const void* value, size_t bytes) {
  switch (attribute) {
    case BlasPreference::kMaxWorkspaceBytes:
      return Take(value, bytes, &choice->workspace_bytes);
    case BlasPreference::kReductionSchemes:
      return Take(value, bytes, &choice->reduction_schemes);
    default:
      return Take(value, bytes,
                  &choice->alignments[static_cast<int>(attribute) -
                                      static_cast<int>(BlasPreference::kMinAlignmentA)]);
  }
}
BlasStatus MatmulAlgoGetHeuristic(BlasHandle handle, BlasMatmul matmul, BlasLayout a, BlasLayout b,
                                  BlasLayout c, BlasLayout d, BlasChoice choice, int wanted,
                                  BlasHeuristic* results, int* count) {
  *count = 0;
  if (handle == nullptr || wanted < 1 || !FakeDriver::HasContext() ||
      !IsProduct(*matmul, *a, *b, *c, *d)) {
    return BlasStatus::kInvalidValue;
  }
  Configuration chosen;
  chosen.magic = kMagic;
  std::memcpy(chosen.alignments, choice->alignments, sizeof(chosen.alignments));
  const Matrix left = MatrixOf(matmul->a, *a);
  chosen.sides[0] = d->rows;
  chosen.sides[1] = d->columns;
  chosen.sides[2] = left.columns;
  chosen.batch = static_cast<uint32_t>(d->batch);
  const auto in_workspace = static_cast<uint32_t>(BlasReduction::kComputeType);
  if ((choice->reduction_schemes & in_workspace) != 0) chosen.parts = 2;
  if (WorkspaceBytes(chosen, *d) > choice->workspace_bytes) chosen.parts = 1;
  results[0] = BlasHeuristic();
  std::memcpy(results[0].algorithm.data, &chosen, sizeof(chosen));
  results[0].workspace_bytes = WorkspaceBytes(chosen, *d);
  *count = 1;
  return BlasStatus::kSuccess;
}
BlasStatus MatmulAlgoInit(BlasHandle /*handle*/, BlasCompute /*compute*/, BlasType /*scale*/,
                          BlasType /*a*/, BlasType /*b*/, BlasType /*c*/, BlasType /*d*/,
                          int /*id*/, BlasAlgorithm* /*algorithm*/) {
  return BlasStatus::kNotSupported;
}
BlasStatus MatmulAlgoConfigSetAttribute(BlasAlgorithm* /*algorithm*/,
                                        BlasAlgorithmAttribute /*attribute*/, const void* /*value*/,
                                        size_t /*bytes*/) {
  return BlasStatus::kNotSupported;
}
BlasStatus MatmulAlgoConfigGetAttribute(const BlasAlgorithm* /*algorithm*/,
                                        BlasAlgorithmAttribute /*attribute*/, void* /*value*/,
                                        size_t /*bytes*/, size_t* /*written*/) {
  return BlasStatus::kNotSupported;
}
BlasStatus Matmul(BlasHandle handle, BlasMatmul matmul, const void* alpha, const void* a,
                  BlasLayout a_layout, const void* b, BlasLayout b_layout, const void* beta,
                  const void* c, BlasLayout c_layout, void* d, BlasLayout d_layout,
                  const BlasAlgorithm* algorithm, void* workspace, size_t workspace_bytes,
                  Stream stream) {
  if (handle == nullptr || algorithm == nullptr || !FakeDriver::HasContext() ||
      !IsProduct(*matmul, *a_layout, *b_layout, *c_layout, *d_layout)) {
    return BlasStatus::kInvalidValue;
  }
  const BlasLayoutStruct result = *d_layout;
  const bool wide = result.type == BlasType::kF64;
  const auto scale = [wide](const void* at) {
    return wide ? *static_cast<const double*>(at) : double{*static_cast<const float*>(at)};
  };
  const bool adds = scale(beta) == 1 && c == d;
  if (scale(alpha) != 1 || (scale(beta) != 0 && !adds)) return BlasStatus::kNotSupported;
  Configuration configuration;
  std::memcpy(static_cast<void*>(&configuration), algorithm->data, sizeof(configuration));
  const Matrix left = MatrixOf(matmul->a, *a_layout);
  const Matrix right = MatrixOf(matmul->b, *b_layout);
  const uint64_t sides[3] = {result.rows, result.columns, left.columns};
  if (configuration.magic != kMagic ||
      std::memcmp(configuration.sides, sides, sizeof(sides)) != 0 ||
      configuration.batch != static_cast<uint32_t>(result.batch) ||
      workspace_bytes < WorkspaceBytes(configuration, result) ||
      reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
    return BlasStatus::kInvalidValue;
  }
  const void* const operands[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    if (reinterpret_cast<uintptr_t>(operands[i]) % configuration.alignments[i] != 0) {
      return BlasStatus::kNotSupported;
    }
  }
  const auto run = [=, parts = configuration.parts, type = result.type] {
    switch (type) {
      case BlasType::kF16:
        return Multiply<F16, float>(left, a, right, b, result, d, adds, parts, workspace);
      case BlasType::kBF16:
        return Multiply<BF16, float>(left, a, right, b, result, d, adds, parts, workspace);
      case BlasType::kF32:
        return Multiply<float, float>(left, a, right, b, result, d, adds, parts, workspace);
      case BlasType::kF64:
        return Multiply<double, double>(left, a, right, b, result, d, adds, parts, workspace);
    }
  };
  std::vector<DevicePtr> uses;
  for (const void* operand : {a, b, static_cast<const void*>(d)}) {
    uses.push_back(reinterpret_cast<DevicePtr>(operand));
  }
  if (configuration.parts > 1) uses.push_back(reinterpret_cast<DevicePtr>(workspace));
  ++products;
  return FakeDriver::Enqueue(stream, "a product", run, uses) == Result::kSuccess
             ? BlasStatus::kSuccess
             : BlasStatus::kInvalidValue;
}

}  // namespace

BlasApi FakeBlasApi() {
  BlasApi api;
  api.GetVersion = GetVersion;
  api.GetStatusName = GetStatusName;
  api.Create = Create;
  api.Destroy = Destroy<BlasHandleStruct>;
  api.MatmulDescCreate = MatmulDescCreate;
  api.MatmulDescDestroy = Destroy<BlasMatmulStruct>;
  api.MatmulDescSetAttribute = MatmulDescSetAttribute;
  api.MatrixLayoutCreate = MatrixLayoutCreate;
  api.MatrixLayoutDestroy = Destroy<BlasLayoutStruct>;
  api.MatrixLayoutSetAttribute = MatrixLayoutSetAttribute;
  api.MatmulPreferenceCreate = MatmulPreferenceCreate;
  api.MatmulPreferenceDestroy = Destroy<BlasChoiceStruct>;
  api.MatmulPreferenceSetAttribute = MatmulPreferenceSetAttribute;
  api.MatmulAlgoGetHeuristic = MatmulAlgoGetHeuristic;
  api.MatmulAlgoInit = MatmulAlgoInit;
  api.MatmulAlgoConfigSetAttribute = MatmulAlgoConfigSetAttribute;
  api.MatmulAlgoConfigGetAttribute = MatmulAlgoConfigGetAttribute;
  api.Matmul = Matmul;
  api.path = "a stand-in";
  return api;
}

FakeBlasCounts CountsOfFakeBlas() { return {handles_made, products, alive}; }

}  // namespace cuda
}  // namespace chorus
