#include "core/ops/sum/sum_cuda.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/long_sums.h"
#include "core/ops/sum/sum_kernels.h"

namespace chorus {
namespace {

// A dimension, and whether it is reduced: by a reduction, or repeated.
struct Extent {
  int64_t size = 1;
  bool reduced = false;
};

// A launch: the sizes of its ReduceArgs. The parts of one are the terms of the next.
struct Level {
  int64_t count = 0;
  int64_t columns = 1;
  int64_t parts = 1;
  int64_t terms = 1;
  cuda::Loops rows;
  cuda::Loops reduced;
  bool packed = false;
};

// The launches of a reduction, of which the last one has one part. Terms are packed, so many in
// one, where that comes out even: they are loaded at the memory's rate, and what has to be divided
// to find them is done once for all of them.
std::vector<Level> LevelsOf(const std::vector<Extent>& dims, int64_t packed) {
  Level first;
  first.packed = !dims.empty() && dims.back().reduced && dims.back().size % packed == 0;
  // Of a part, at least: so much smaller than the input is the workspace.
  constexpr int64_t kLeastTerms = 64;
  const int64_t least = first.packed ? 16 : kLeastTerms;
  // Few results have parts for as many threads as keep a GPU's memory busy.
  const int64_t threads = int64_t{1} << (first.packed ? 17 : 16);
  // Many have parts where terms are neighbours and results are not, for threads to be neighbours.
  const int64_t neighbours = first.packed ? 16 : 8;
  // None is longer than so many terms: a thread counts those that are not packed modulo eight.
  const int64_t most = first.packed ? kMostTerms : 8 * kMostTerms;
  int64_t results = 1;
  int64_t stride = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    const Extent& dim = dims[i];
    if (dim.reduced) {
      const int64_t in_one = first.packed && i + 1 == dims.size() ? packed : 1;
      first.reduced.Append(dim.size / in_one, stride * in_one);
      first.terms *= dim.size / in_one;
    } else {
      // Behind the last reduced dimension are the columns.
      if (first.reduced.count == 0 && !first.packed) {
        first.columns *= dim.size;
      } else {
        first.rows.Append(dim.size, stride);
      }
      results *= dim.size;
    }
    stride *= dim.size;
  }
  std::vector<Level> levels = {first};
  if (results == 0) return levels;
  const auto ratio = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t parts = std::max(
      {ratio(threads, results), ratio(neighbours, first.columns), ratio(first.terms, most)});
  while (true) {
    Level& level = levels.back();
    level.parts = std::max<int64_t>(
        1, std::min(parts, level.terms / (levels.size() == 1 ? least : kLeastTerms)));
    level.count = results * level.parts;
    if (level.parts == 1) return levels;
    Level next;
    next.columns = level.columns;
    next.terms = level.parts;
    next.rows.Append(results / level.columns, level.parts * level.columns);
    next.reduced.Append(level.parts, level.columns);
    levels.push_back(next);
  }
}

template <typename In, typename Out>
absl::Status AddLevel(const CudaGpu& gpu, const std::string& name,
                      const cuda::ReduceArgs<In, Out>& args, LaunchedKernel* kernel) {
  return kernel->Add(
      gpu, name, args.count, args,
      +[](const KernelCall& call, const KernelFault&, cuda::ReduceArgs<In, Out>* to) {
        const auto part_at = [&call](int64_t at) {
          return call.workspace + static_cast<uint64_t>(at);
        };
        to->in =
            to->in_at < 0 ? InputAs<In>(call, 0) : reinterpret_cast<const In*>(part_at(to->in_at));
        to->out =
            to->out_at < 0 ? OutputAs<Out>(call, 0) : reinterpret_cast<Out*>(part_at(to->out_at));
      });
}

// What a reduction's kernels are called, of elements in T whose parts are in P.
struct Names {
  std::string whole;   // T to T
  std::string parts;   // T to P
  std::string middle;  // P to P
  std::string finish;  // P to T
};

// In the workspace are the results of all launches but the last, one behind the other.
template <typename T, typename P>
CudaKernelOrError MakeLevels(const CudaGpu& gpu, const NodeView& node,
                             absl::Span<const TensorType> outputs, const Names& names,
                             const std::vector<Level>& levels) {
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  constexpr auto kBytes = static_cast<int64_t>(sizeof(P));
  for (size_t i = 0; i + 1 < levels.size(); ++i) facts.workspace_bytes += levels[i].count * kBytes;
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  const int64_t results = levels.back().count;
  const int64_t size = node.input(0).num_elements() / std::max<int64_t>(results, 1);
  int64_t written = 0;
  for (size_t i = 0; i < levels.size(); ++i) {
    const Level& level = levels[i];
    const bool first = i == 0;
    const bool last = i + 1 == levels.size();
    const auto add = [&](const std::string& name, auto in, auto out) {
      cuda::ReduceArgs<decltype(in), decltype(out)> args;
      args.in_at = first ? -1 : written - levels[i - 1].count * kBytes;
      args.out_at = last ? -1 : written;
      args.count = level.count;
      args.columns = level.columns;
      args.parts = level.parts;
      args.terms = level.terms;
      args.size = size;
      args.rows = level.rows;
      args.reduced = level.reduced;
      args.packed = level.packed;
      return AddLevel(gpu, name, args, kernel.get());
    };
    CHORUS_RETURN_IF_ERROR(first && last ? add(names.whole, T(), T())
                           : first       ? add(names.parts, T(), P())
                           : last        ? add(names.finish, P(), T())
                                         : add(names.middle, P(), P()));
    written += level.count * kBytes;
  }
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

std::vector<Extent> ReducedExtents(const NodeView& node) {
  const std::vector<int64_t> axes = IntsAttribute(node.attributes, "axes");
  std::vector<Extent> dims;
  for (const Dim& dim : node.input(0).dims) dims.push_back({dim.size, axes.empty()});
  for (const int64_t axis : axes) dims[axis].reduced = true;
  return dims;
}

// sum, mean and prod. A mean's parts are sums.
CudaKernelOrError MakeSum(const CudaGpu& gpu, const NodeView& node,
                          absl::Span<const TensorType> outputs) {
  const std::string op(node.op);
  const std::string of_parts = op == "mean" ? "sum" : op;
  const DType dtype = outputs[0].dtype;
  return VisitNumbers(
      dtype,
      [&](auto t) {
        using T = decltype(t);
        const std::vector<Level> levels = LevelsOf(ReducedExtents(node), cuda::kPacked<T>);
        if constexpr (std::is_integral<T>::value) {
          const std::string name = absl::StrCat(op, "_", sizeof(T));
          return MakeLevels<std::make_unsigned_t<T>, std::make_unsigned_t<T>>(
              gpu, node, outputs, {name, name, name, name}, levels);
        } else {
          const std::string whole = absl::StrCat(op, "_", DTypeName(dtype));
          const std::string parts = absl::StrCat(of_parts, "_", DTypeName(dtype));
          if constexpr (std::is_same<Arithmetic<T>, T>::value) {
            return MakeLevels<T, T>(gpu, node, outputs, {whole, parts, parts, whole}, levels);
          } else {
            return MakeLevels<T, float>(
                gpu, node, outputs,
                {whole, absl::StrCat(of_parts, "_parts_", DTypeName(dtype)),
                 absl::StrCat(of_parts, "_f32"), absl::StrCat(op, "_finish_", DTypeName(dtype))},
                levels);
          }
        }
      },
      [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

// max and min.
CudaKernelOrError MakeExtreme(const CudaGpu& gpu, const NodeView& node,
                              absl::Span<const TensorType> outputs) {
  const std::string name = absl::StrCat(node.op, "_", DTypeName(outputs[0].dtype));
  return VisitNumbers(
      outputs[0].dtype,
      [&](auto t) {
        using T = decltype(t);
        return MakeLevels<T, T>(gpu, node, outputs, {name, name, name, name},
                                LevelsOf(ReducedExtents(node), cuda::kPacked<T>));
      },
      [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

// Where the elements of expand and spread come from, and how often each comes.
struct Repetition {
  Repetition(const TensorType& input, const TensorType& output) {
    const size_t added = output.dims.size() - input.dims.size();
    int64_t stride = 1;
    for (size_t i = output.dims.size(); i-- > 0;) {
      const int64_t size = output.dims[i].size;
      const bool repeated = i < added || input.dims[i - added].size == 1;
      from.Append(size, repeated ? 0 : stride);
      (repeated ? times : stride) *= size;
    }
  }
  cuda::Loops from;
  int64_t times = 1;
};

CudaKernelOrError MakeExpand(const CudaGpu& gpu, const NodeView& node,
                             absl::Span<const TensorType> outputs) {
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  CHORUS_RETURN_IF_ERROR(VisitWidth(
      outputs[0].dtype,
      [&](auto t) {
        using T = decltype(t);
        cuda::LoopedMoveArgs<T> args;
        args.count = outputs[0].num_elements();
        args.from = Repetition(node.input(0), outputs[0]).from;
        return kernel->Add(
            gpu, absl::StrCat("expand_", sizeof(T)), cuda::ThreadsFor(args.count), args,
            +[](const KernelCall& call, const KernelFault&, cuda::LoopedMoveArgs<T>* to) {
              to->in = InputAs<T>(call, 0);
              to->out = OutputAs<T>(call, 0);
            });
      },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

CudaKernelOrError MakeSpread(const CudaGpu& gpu, const NodeView& node,
                             absl::Span<const TensorType> outputs) {
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  const DType dtype = outputs[0].dtype;
  CHORUS_RETURN_IF_ERROR(VisitFloating(
      dtype,
      [&](auto t) {
        using T = decltype(t);
        const Repetition repetition(node.input(0), outputs[0]);
        cuda::SpreadArgs<T> args;
        args.count = outputs[0].num_elements();
        args.times = repetition.times;
        args.from = repetition.from;
        return kernel->Add(
            gpu, absl::StrCat("spread_", DTypeName(dtype)), cuda::ThreadsFor(args.count), args,
            +[](const KernelCall& call, const KernelFault&, cuda::SpreadArgs<T>* to) {
              to->in = InputAs<T>(call, 0);
              to->out = OutputAs<T>(call, 0);
            });
      },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

constexpr CudaKernelEntry kEntries[] = {
    {"expand", MakeExpand}, {"max", MakeExtreme},   {"mean", MakeSum}, {"min", MakeExtreme},
    {"prod", MakeSum},      {"spread", MakeSpread}, {"sum", MakeSum},
};

}  // namespace

absl::Span<const CudaKernelEntry> SumCudaKernels() { return kEntries; }

}  // namespace chorus
