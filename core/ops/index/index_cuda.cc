#include "core/ops/index/index_cuda.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/cuda_indices.h"
#include "core/ops/cuda_rows.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/index/index_kernels.h"

namespace chorus {
namespace {

// Elements of a part at least: of those that only move, and of those that are compared.
constexpr int64_t kLeastMoved = 4;
constexpr int64_t kLeastCompared = 16;

int64_t AxisOf(const NodeView& node) { return IntAttribute(node.attributes, "axis"); }

cuda::CheckedIndices Checked(const NodeView& node, int input, int64_t limit) {
  cuda::CheckedIndices checked;
  checked.indices = IndicesOf(node, input, limit);
  return checked;
}
void Bind(const KernelCall& call, const KernelFault& fault, size_t input,
          cuda::CheckedIndices* to) {
  to->indices.memory = InputAs<void>(call, input);
  to->fault_word = reinterpret_cast<uint64_t*>(fault.word);
  to->fault_first = fault.first;
}

// The bits of 1.
template <typename T>
T OneOf(DType dtype) {
  T bits = 0;
  const auto keep = [&bits](auto one) { std::memcpy(&bits, &one, sizeof(bits)); };
  VisitNumbers(
      dtype,
      [&](auto t) {
        if constexpr (sizeof(t) == sizeof(T)) keep(static_cast<decltype(t)>(1.0f));
      },
      [&] { bits = 1; });
  return bits;
}

CudaKernelOrError MakeOneHot(const CudaGpu& gpu, const NodeView& node,
                             absl::Span<const TensorType> outputs) {
  const DType dtype = outputs[0].dtype;
  const int64_t depth = outputs[0].dims.back().size;
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs),
                                                 OutOfRangeOf(node, 0, depth));
  if (outputs[0].num_elements() == 0) return std::unique_ptr<CudaKernel>(std::move(kernel));
  CHORUS_RETURN_IF_ERROR(VisitWidth(
      dtype,
      [&](auto t) {
        using T = decltype(t);
        cuda::OneHotArgs<T> args;
        args.checked = Checked(node, 0, depth);
        args.rows = CutRows(node.input(0).num_elements(), depth, kLeastMoved);
        args.one = OneOf<T>(dtype);
        return kernel->Add(
            gpu, absl::StrCat("one_hot_", sizeof(T)), args.rows.count(), args,
            +[](const KernelCall& call, const KernelFault& fault, cuda::OneHotArgs<T>* to) {
              to->out = OutputAs<T>(call, 0);
              Bind(call, fault, 0, &to->checked);
            });
      },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

template <bool along>
CudaKernelOrError MakeTake(const CudaGpu& gpu, const NodeView& node,
                           absl::Span<const TensorType> outputs) {
  const HostRows x(node.input(0), AxisOf(node));
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs),
                                                 OutOfRangeOf(node, 1, x.size));
  if (outputs[0].num_elements() == 0) return std::unique_ptr<CudaKernel>(std::move(kernel));
  CHORUS_RETURN_IF_ERROR(VisitWidth(
      outputs[0].dtype,
      [&](auto t) {
        using T = decltype(t);
        cuda::TakeArgs<T> args;
        args.checked = Checked(node, 1, x.size);
        args.count = node.input(1).num_elements();
        args.size = x.size;
        args.rows = along ? CutRows(HostRows(outputs[0], AxisOf(node)), kLeastMoved)
                          : CutRows(x.outer * args.count, x.stride, kLeastMoved);
        return kernel->Add(
            gpu, absl::StrCat(node.op, "_", sizeof(T)), args.rows.count(), args,
            +[](const KernelCall& call, const KernelFault& fault, cuda::TakeArgs<T>* to) {
              to->x = InputAs<T>(call, 0);
              to->out = OutputAs<T>(call, 0);
              Bind(call, fault, 1, &to->checked);
            });
      },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

// So many indices each thread looks at before blocks of them are merged.
constexpr int64_t kSortedBlock = 256;

// Adds the launches that sort the positions of indices, in `rows` as they lie. Blocks are merged
// from one of the two offsets to the other and back; `sorted_offset` is the one where they end.
absl::Status AddSort(const CudaGpu& gpu, const NodeView& node, const HostRows& rows, int64_t limit,
                     bool wide, int64_t offsets[2], int64_t* sorted_offset,
                     LaunchedKernel* kernel) {
  cuda::SortPositionsArgs args;
  args.checked = Checked(node, 1, limit);
  args.rows = {rows.outer, rows.size, rows.stride, rows.size};
  args.from.wide = args.to.wide = wide;
  args.block = kSortedBlock;
  const auto bind =
      +[](const KernelCall& call, const KernelFault& fault, cuda::SortPositionsArgs* to) {
        Bind(call, fault, 1, &to->checked);
        Place(call, &to->from.memory);
        Place(call, &to->to.memory);
      };
  int at = 0;
  args.from.memory = args.to.memory = Offset<void>(offsets[at]);
  CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, "scatter_add_sort", args.rows.count(), args, bind));
  for (; args.block < rows.size; args.block *= 2) {
    args.from.memory = Offset<void>(offsets[at]);
    at = 1 - at;
    args.to.memory = Offset<void>(offsets[at]);
    CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, "scatter_add_merge", args.rows.count(), args, bind));
  }
  *sorted_offset = offsets[at];
  return absl::OkStatus();
}

// In the workspace: positions of the updates sorted by index, and where a row of indices is more
// than a block, a second array of them, from which and to which blocks are merged.
template <bool along>
CudaKernelOrError MakeScatterAdd(const CudaGpu& gpu, const NodeView& node,
                                 absl::Span<const TensorType> outputs) {
  const HostRows out(outputs[0], AxisOf(node));
  HostRows indices = along ? HostRows(node.input(1), AxisOf(node)) : out;
  if (!along) {
    indices.outer = indices.stride = 1;
    indices.size = node.input(1).num_elements();
  }
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  const bool wide = indices.size > int64_t{std::numeric_limits<uint32_t>::max()};
  // Without a row of the result nothing is to be added, and indices are not looked at; a row
  // without elements takes no index.
  const bool empty = out.count() == 0;
  int64_t offsets[2] = {};
  if (!empty) {
    const int64_t bytes = indices.count() * indices.size * (wide ? 8 : 4);
    offsets[1] = (bytes + 7) / 8 * 8;
    facts.workspace_bytes = indices.size > kSortedBlock ? offsets[1] + bytes : bytes;
  }
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts), OutOfRangeOf(node, 1, out.size));
  if (empty) return std::unique_ptr<CudaKernel>(std::move(kernel));
  int64_t sorted_offset = 0;
  CHORUS_RETURN_IF_ERROR(
      AddSort(gpu, node, indices, out.size, wide, offsets, &sorted_offset, kernel.get()));
  const auto add = [&](auto t, absl::string_view suffix) {
    using T = decltype(t);
    cuda::ScatterAddArgs<T> args;
    args.indices = IndicesOf(node, 1, out.size);
    args.positions = {Offset<void>(sorted_offset), wide};
    const int64_t parts =
        along ? out.stride : (out.stride + cuda::kScatterColumns - 1) / cuda::kScatterColumns;
    args.rows = {out.outer * out.size, out.stride, 1, parts};
    args.size = out.size;
    args.count = indices.size;
    args.along = along;
    return kernel->Add(
        gpu, absl::StrCat("scatter_add_", suffix), args.rows.count(), args,
        +[](const KernelCall& call, const KernelFault&, cuda::ScatterAddArgs<T>* to) {
          to->updates = InputAs<T>(call, 0);
          to->indices.memory = InputAs<void>(call, 1);
          to->out = OutputAs<T>(call, 0);
          Place(call, &to->positions.memory);
        });
  };
  CHORUS_RETURN_IF_ERROR(VisitNumbers(
      outputs[0].dtype,
      [&](auto t) {
        using T = decltype(t);
        if constexpr (std::is_integral<T>::value) {
          return add(std::make_unsigned_t<T>(), absl::StrCat(sizeof(T)));
        } else {
          return add(t, DTypeName(outputs[0].dtype));
        }
      },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

// In the workspace, if rows have several parts: the best element of each row, and of each part.
template <typename T>
CudaKernelOrError MakeArgOf(const CudaGpu& gpu, const NodeView& node,
                            absl::Span<const TensorType> outputs, bool largest,
                            absl::string_view suffix) {
  const cuda::RowParts rows = CutRows(HostRows(node.input(0), AxisOf(node)), kLeastCompared);
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  PartStates states;
  if (rows.parts > 1) {
    states = PlaceStates(rows, sizeof(cuda::BestElement), &facts.workspace_bytes);
  }
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  cuda::ArgArgs<T> args;
  args.states = Offset<cuda::BestElement>(states.first);
  args.rows = rows;
  args.largest = largest;
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat("arg_max_", suffix), rows.count(), args,
      +[](const KernelCall& call, const KernelFault&, cuda::ArgArgs<T>* to) {
        to->x = InputAs<T>(call, 0);
        Place(call, &to->states);
        to->out = OutputAs<int64_t>(call, 0);
      }));
  if (rows.parts == 1) return std::unique_ptr<CudaKernel>(std::move(kernel));
  CHORUS_RETURN_IF_ERROR(
      AddMerges<cuda::BestElement>(gpu, "arg_max_merge", rows, states, kernel.get()));
  cuda::BestArgs write;
  write.states = Offset<const cuda::BestElement>(states.result);
  write.count = outputs[0].num_elements();
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, "arg_max_write", write.count, write,
      +[](const KernelCall& call, const KernelFault&, cuda::BestArgs* to) {
        Place(call, &to->states);
        to->out = OutputAs<int64_t>(call, 0);
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

template <bool largest>
CudaKernelOrError MakeArg(const CudaGpu& gpu, const NodeView& node,
                          absl::Span<const TensorType> outputs) {
  const DType dtype = node.input(0).dtype;
  const auto make = [&](auto t) {
    return MakeArgOf<decltype(t)>(gpu, node, outputs, largest, DTypeName(dtype));
  };
  if (dtype == DType::kBool) return make(Bool());
  return VisitNumbers(dtype, make, [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

constexpr CudaKernelEntry kEntries[] = {
    {"arg_max", MakeArg<true>},
    {"arg_min", MakeArg<false>},
    {"one_hot", MakeOneHot},
    {"scatter_add", MakeScatterAdd<false>},
    {"scatter_add_along", MakeScatterAdd<true>},
    {"take", MakeTake<false>},
    {"take_along", MakeTake<true>},
};

}  // namespace

absl::Span<const CudaKernelEntry> IndexCudaKernels() { return kEntries; }

}  // namespace chorus
