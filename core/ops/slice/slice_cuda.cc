#include "core/ops/slice/slice_cuda.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/cuda_indices.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/slice/slice_kernels.h"

namespace chorus {
namespace {

// A tensor as rows along an axis, in elements.
struct Rows {
  Rows(const TensorType& type, int64_t axis) {
    for (int64_t d = 0; d < axis; ++d) count *= type.dims[d].size;
    for (size_t d = axis + 1; d < type.dims.size(); ++d) step *= type.dims[d].size;
    size = step * type.dims[axis].size;
  }
  int64_t count = 1;
  int64_t step = 1;  // of one index of the axis
  int64_t size = 0;  // of a row
};

// Calls add(T(), kernel) with an unsigned T as wide as an element.
template <typename Add>
CudaKernelOrError Make(const NodeView& node, absl::Span<const TensorType> outputs,
                       std::unique_ptr<LaunchedKernel> kernel, const Add& add) {
  CHORUS_RETURN_IF_ERROR(VisitWidth(
      outputs[0].dtype, [&](auto t) { return add(t, kernel.get()); },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

// Rows that begin so many indices of the axis further on in the input's.
CudaKernelOrError MakeShifted(const CudaGpu& gpu, const NodeView& node,
                              absl::Span<const TensorType> outputs, int64_t begin) {
  const int64_t axis = IntAttribute(node.attributes, "axis");
  const Rows in(node.input(0), axis);
  const Rows out(outputs[0], axis);
  const auto add = [&](auto t, LaunchedKernel* kernel) {
    using T = decltype(t);
    cuda::ShiftedRowsArgs<T> args;
    args.count = outputs[0].num_elements();
    args.row = out.size;
    args.in_row = in.size;
    args.offset = begin * in.step;
    return kernel->Add(
        gpu, absl::StrCat("slice_", sizeof(T)), cuda::ThreadsFor(args.count), args,
        +[](const KernelCall& call, const KernelFault&, cuda::ShiftedRowsArgs<T>* to) {
          to->in = InputAs<T>(call, 0);
          to->out = OutputAs<T>(call, 0);
        });
  };
  return Make(node, outputs, std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs)),
              add);
}

CudaKernelOrError MakeSlice(const CudaGpu& gpu, const NodeView& node,
                            absl::Span<const TensorType> outputs) {
  return MakeShifted(gpu, node, outputs, IntAttribute(node.attributes, "begin"));
}

CudaKernelOrError MakePad(const CudaGpu& gpu, const NodeView& node,
                          absl::Span<const TensorType> outputs) {
  return MakeShifted(gpu, node, outputs, -IntAttribute(node.attributes, "before"));
}

// The inputs that have elements, in launches of so many as one takes.
CudaKernelOrError MakeConcat(const CudaGpu& gpu, const NodeView& node,
                             absl::Span<const TensorType> outputs) {
  const int64_t axis = IntAttribute(node.attributes, "axis");
  const Rows out(outputs[0], axis);
  const auto add = [&](auto t, LaunchedKernel* kernel) {
    using T = decltype(t);
    cuda::ConcatArgs<T> args;
    args.row = out.size;
    const auto launch = [&]() -> absl::Status {
      if (args.inputs == 0) return absl::OkStatus();
      const int64_t width = args.end[args.inputs - 1];
      args.count = out.count * width;
      CHORUS_RETURN_IF_ERROR(kernel->Add(
          gpu, absl::StrCat("concat_", sizeof(T)), args.count, args,
          +[](const KernelCall& call, const KernelFault&, cuda::ConcatArgs<T>* to) {
            for (int32_t k = 0; k < to->inputs; ++k) {
              to->in[k] = InputAs<T>(call, static_cast<size_t>(to->number[k]));
            }
            to->out = OutputAs<T>(call, 0);
          }));
      args.begin += width;
      args.inputs = 0;
      return absl::OkStatus();
    };
    for (int i = 0; i < node.num_inputs(); ++i) {
      const Rows in(node.input(i), axis);
      if (in.size == 0) continue;
      args.end[args.inputs] = in.size + (args.inputs == 0 ? 0 : args.end[args.inputs - 1]);
      args.number[args.inputs++] = i;
      if (args.inputs == cuda::ConcatArgs<T>::kMost) CHORUS_RETURN_IF_ERROR(launch());
    }
    return launch();
  };
  return Make(node, outputs, std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs)),
              add);
}

// pack_rows and unpack_rows.
CudaKernelOrError MakePackedRows(const CudaGpu& gpu, const NodeView& node,
                                 absl::Span<const TensorType> outputs) {
  const TensorType& type = node.input(0);
  const int64_t parts = IntAttribute(node.attributes, "parts");
  const int64_t part = type.dims[0].size / parts;
  const std::string op(node.op);
  const auto add = [&](auto t, LaunchedKernel* kernel) {
    using T = decltype(t);
    cuda::PackedRowsArgs<T> args;
    args.count = type.num_elements();
    args.row = Rows(type, 0).step;
    args.part = part;
    args.parts = parts;
    return kernel->Add(
        gpu, absl::StrCat(op, "_", sizeof(T)), cuda::ThreadsFor(args.count), args,
        +[](const KernelCall& call, const KernelFault& fault, cuda::PackedRowsArgs<T>* to) {
          to->in = InputAs<T>(call, 0);
          to->rows_that_count = InputAs<int64_t>(call, 1);
          to->out = OutputAs<T>(call, 0);
          to->fault_word = reinterpret_cast<uint64_t*>(fault.word);
          to->fault_first = fault.first;
        });
  };
  return Make(node, outputs,
              std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs),
                                               OutOfRangeOf(node, 1, part + 1)),
              add);
}

constexpr CudaKernelEntry kEntries[] = {{"concat", MakeConcat},
                                        {"pack_rows", MakePackedRows},
                                        {"pad", MakePad},
                                        {"slice", MakeSlice},
                                        {"unpack_rows", MakePackedRows}};

}  // namespace

absl::Span<const CudaKernelEntry> SliceCudaKernels() { return kEntries; }

}  // namespace chorus
