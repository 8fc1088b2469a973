#include "tests/random/run.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "chorus/functional/conv.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/functional/sort.h"
#include "chorus/nn/batch_norm.h"
#include "chorus/nn/data_parallel.h"
#include "chorus/nn/layers.h"
#include "chorus/nn/module.h"
#include "chorus/parallel.h"
#include "core/base/error.h"

namespace chorus {
namespace random_programs {
namespace {

using Tensors = std::vector<Tensor>;

// Of a compiled function, and of what stands for one.
constexpr int kRuns = 2;

template <typename T>
Tensor Uploaded(const DeviceRef& device, const Statement& s, const Dims& shape) {
  std::vector<T> values;
  for (const double x : s.data) {
    if constexpr (std::is_same_v<T, F16> || std::is_same_v<T, BF16>) {
      values.push_back(T(static_cast<float>(x)));
    } else {
      values.push_back(static_cast<T>(x));
    }
  }
  return FromHost<T>(device, values, shape);
}

template <typename T>
Outcome ReadAs(const Tensor& x) {
  Outcome outcome;
  const absl::StatusOr<std::vector<T>> values = x.Read<T>();
  outcome.status = values.status();
  if (!values.ok()) return outcome;
  if constexpr (std::is_same_v<T, bool>) {
    for (const bool b : *values) outcome.bytes.push_back(b ? 1 : 0);
  } else {
    outcome.bytes.assign(reinterpret_cast<const char*>(values->data()), values->size() * sizeof(T));
  }
  return outcome;
}

// Calls `f` with a value of the dtype's C++ type.
template <typename F>
auto OfDType(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF64:
      return f(double{});
    case DType::kF16:
      return f(F16{});
    case DType::kBF16:
      return f(BF16{});
    case DType::kI64:
      return f(int64_t{});
    case DType::kI32:
      return f(int32_t{});
    case DType::kI16:
      return f(int16_t{});
    case DType::kI8:
      return f(int8_t{});
    case DType::kU8:
      return f(uint8_t{});
    case DType::kBool:
      return f(bool{});
    default:
      return f(float{});
  }
}

class Trainer {
 public:
  Trainer(const Program& program, int trainer, const Part& part)
      : program_(program), trainer_(trainer), part_(part), ranks_(program.RanksOf(trainer)) {}

  absl::Status Join() {
    worlds_.resize(static_cast<size_t>(program_.ranks()));
    std::vector<absl::Status> statuses(ranks_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      threads.emplace_back([this, i, &statuses] {
        WorldOptions join;
        join.name = part_.world;
        join.rank = ranks_[i];
        join.size = program_.ranks();
        join.device = static_cast<int>(i);
        join.agree_timeout = join.exec_timeout = part_.patience;
        join.join_timeout = 2 * part_.patience;
        absl::StatusOr<World> world = part_.session.Join(join);
        statuses[i] = world.status();
        if (world.ok()) worlds_[static_cast<size_t>(ranks_[i])] = *std::move(world);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : statuses) CHORUS_RETURN_IF_ERROR(status);
    for (size_t g = 0; g < program_.groups.size(); ++g) {
      const GroupOf& group = program_.groups[g];
      groups_.emplace_back(static_cast<size_t>(program_.ranks()));
      devices_.emplace_back();
      const bool here = !group.ranks.empty() && IsMine(group.ranks[0]);
      if (group.devices && here) {
        std::vector<int> device_indices;
        for (const int rank : group.ranks) {
          device_indices.push_back(
              static_cast<int>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin()));
        }
        CHORUS_ASSIGN_OR_RETURN(devices_.back(),
                                parallel::DeviceGroup::Create(part_.session, device_indices));
      }
      for (const int rank : group.ranks) {
        if (group.devices || !IsMine(rank)) continue;
        Group& mine = groups_.back()[static_cast<size_t>(rank)];
        if (g == 0) {
          mine = WorldOf(rank).group();
        } else {
          CHORUS_ASSIGN_OR_RETURN(mine, WorldOf(rank).NewGroup(group.ranks));
        }
      }
    }
    order_ = OrderOf(program_, trainer_, part_.mode.shuffled && !part_.mode.waits);
    return absl::OkStatus();
  }

  Outcomes Run() {
    if (Compiles() && CanCompile()) return RunCompiled();
    Outcomes outcomes;
    for (int run = 0; run < (part_.mode.compiled ? kRuns : 1); ++run) {
      Tensors values(program_.values.size());
      for (const int s : order_) {
        const Statement& statement = program_.statements[static_cast<size_t>(s)];
        if (statement.op == Op::kLeaf) MakeLeaf(statement, &values);
      }
      Execute(&values, part_.mode.waits);
      Outcomes read = Read(values);
      if (run == 0) outcomes.swap(read);
      if (run > 0) {
        for (const auto& [v, again] : read) AddRun(again, &outcomes[v]);
      }
    }
    return outcomes;
  }

  std::vector<World> Worlds() const {
    std::vector<World> worlds;
    for (const int rank : ranks_) {
      if (WorldOf(rank).size() > 0) worlds.push_back(WorldOf(rank));
    }
    for (const parallel::DeviceGroup& devices : devices_) {
      for (int rank = 0; rank < devices.size(); ++rank) worlds.push_back(devices.world(rank));
    }
    return worlds;
  }

  // In any case: of an error that all share.
  Outcomes AllFail(const absl::Status& status) const {
    Outcomes outcomes;
    for (const int v : Observed()) outcomes[v].status = status;
    if (outcomes.empty()) outcomes[-1 - trainer_].status = status;
    return outcomes;
  }

 private:
  bool Compiles() const {
    const bool is_turn = (program_.seed + static_cast<uint64_t>(trainer_)) % 2 == 0;
    return part_.mode.compiled && (!part_.mode.by_trainer || is_turn);
  }
  // A compiled function has the groups of one world, and a DeviceGroup is a world. Where one
  // trainer cannot compile its part nobody does: what lies between two of its collectives may go
  // through the other world, whose runs no gang of this one can have (docs/protocol.md).
  bool CanCompile() const {
    for (int trainer = 0; trainer < program_.trainers(); ++trainer) {
      int worlds = 0;
      bool own = false;
      std::vector<bool> seen(program_.groups.size(), false);
      for (const int s : OrderOf(program_, trainer, /*shuffled=*/false)) {
        const Statement& statement = program_.statements[static_cast<size_t>(s)];
        if (IsCollective(statement.op)) own = true;
        if (!IsOfDevices(statement.op) || seen[static_cast<size_t>(statement.group)]) continue;
        seen[static_cast<size_t>(statement.group)] = true;
        ++worlds;
      }
      if (worlds + (own ? 1 : 0) > 1) return false;
    }
    return true;
  }
  bool IsMine(int rank) const { return program_.trainer_of[static_cast<size_t>(rank)] == trainer_; }
  const World& WorldOf(int rank) const { return worlds_[static_cast<size_t>(rank)]; }
  DeviceRef DeviceOf(int rank) const { return WorldOf(rank).device(); }

  std::vector<int> Observed() const {
    std::vector<int> result;
    for (int v = 0; v < static_cast<int>(program_.values.size()); ++v) {
      const Value& value = program_.value(v);
      if (value.observed && !value.absent && IsMine(value.rank)) result.push_back(v);
    }
    return result;
  }

  Tensor NewLeaf(const Statement& s) const {
    const Call& call = s.calls[0];
    const Value& value = program_.value(call.out[0]);
    Tensor leaf = OfDType(value.dtype, [&](auto zero) {
      return Uploaded<decltype(zero)>(DeviceOf(value.rank), s, value.shape);
    });
    if (s.requires_grad) leaf.RequireGrad();
    return leaf;
  }
  void MakeLeaf(const Statement& s, Tensors* values) const {
    (*values)[static_cast<size_t>(s.calls[0].out[0])] = NewLeaf(s);
  }

  Outcome ReadOne(int v, const Tensor& x) const {
    Outcome outcome;
    if (!x.defined()) {
      outcome.status = absl::InternalError("no tensor");
      return outcome;
    }
    outcome.status = x.Wait(4 * part_.patience);
    if (!outcome.status.ok()) return outcome;
    const Value& value = program_.value(v);
    if (x.shape() != value.shape || x.dtype() != value.dtype) {
      outcome.status = absl::InternalError(
          absl::StrCat("of another type: ", DTypeName(x.dtype()), " of ", x.num_elements()));
      return outcome;
    }
    return OfDType(value.dtype, [&](auto zero) { return ReadAs<decltype(zero)>(x); });
  }
  Outcomes Read(const Tensors& values) const {
    Outcomes outcomes;
    for (const int v : Observed()) outcomes[v] = ReadOne(v, values[static_cast<size_t>(v)]);
    return outcomes;
  }

  // --- A compiled function ----------------------------------------------------------------------

  Outcomes RunCompiled() {
    std::vector<const Statement*> inputs;
    Tensors captured(program_.values.size());
    CompileOptions options;
    for (const int s : order_) {
      const Statement& statement = program_.statements[static_cast<size_t>(s)];
      if (statement.op != Op::kLeaf) continue;
      const int v = statement.calls[0].out[0];
      const bool donated =
          part_.mode.donate &&
          std::find(program_.donated.begin(), program_.donated.end(), v) != program_.donated.end();
      if (statement.captured && !donated) {
        MakeLeaf(statement, &captured);
        continue;
      }
      if (donated) options.donate.push_back(static_cast<int>(inputs.size()));
      inputs.push_back(&statement);
    }
    const std::vector<int> observed = Observed();
    const Compiled function = Compile(
        [&](const Tensors& in) {
          Tensors values = captured;
          for (size_t i = 0; i < inputs.size(); ++i) {
            values[static_cast<size_t>(inputs[i]->calls[0].out[0])] = in[i];
          }
          Execute(&values, false);
          Tensors out;
          for (const int v : observed) out.push_back(values[static_cast<size_t>(v)]);
          return out;
        },
        options);
    std::vector<Tensors> results;
    absl::Status status;
    for (int run = 0; run < kRuns; ++run) {
      Tensors in;
      // Behind them one that is always there: without any input a function has no session.
      for (const Statement* leaf : inputs) {
        in.push_back(NewLeaf(*leaf));
        // What a run returns as it came can be what the next one gets.
        const auto returned = std::find(observed.begin(), observed.end(), leaf->calls[0].out[0]);
        if (run > 0 && returned != observed.end() && !leaf->requires_grad && status.ok()) {
          in.back() = results.back()[static_cast<size_t>(returned - observed.begin())];
        }
      }
      in.push_back(Scalar<float>(part_.session, 0));
      absl::StatusOr<Tensors> out = function.Run(in);
      if (status.ok()) status = out.status();
      results.push_back(out.ok() ? *std::move(out) : Tensors());
    }
    if (!status.ok()) return AllFail(status);
    Outcomes outcomes;
    for (size_t i = 0; i < observed.size(); ++i) {
      outcomes[observed[i]] = ReadOne(observed[i], results[0][i]);
    }
    for (int run = 1; run < kRuns; ++run) {
      for (size_t i = 0; i < observed.size(); ++i) {
        // A donated input that comes back as it is moves on to the next run.
        Outcome& first = outcomes[observed[i]];
        const Outcome again = ReadOne(observed[i], results[static_cast<size_t>(run)][i]);
        if (first.status.code() == absl::StatusCode::kFailedPrecondition &&
            WasHandedOn(observed[i])) {
          first = again;
        } else {
          AddRun(again, &first);
        }
      }
    }
    return outcomes;
  }

  // A second run says what the first one did, or it has failed.
  static void AddRun(const Outcome& again, Outcome* first) {
    if (!first->status.ok()) return;
    if (!again.status.ok()) {
      first->status =
          absl::Status(again.status.code(), absl::StrCat("in run 2: ", again.status.message()));
    } else if (first->bytes != again.bytes) {
      first->status = absl::DataLossError("the second run has other bits");
    }
  }

  // A leaf that is returned as it came, given to the next run and donated to it is gone by right.
  bool WasHandedOn(int v) const {
    if (!part_.mode.donate) return false;
    if (std::find(program_.donated.begin(), program_.donated.end(), v) == program_.donated.end()) {
      return false;
    }
    for (const Statement& s : program_.statements) {
      if (s.op == Op::kLeaf && s.calls[0].out[0] == v) return !s.requires_grad;
    }
    return false;
  }

  // --- Statements -------------------------------------------------------------------------------

  void Execute(Tensors* values, bool wait) const {
    for (size_t i = 0; i < order_.size(); ++i) {
      std::vector<const Statement*> block = {&program_.statements[static_cast<size_t>(order_[i])]};
      if (block[0]->op == Op::kLeaf) continue;
      while (part_.mode.coalesce && i + 1 < order_.size() && AreJoined(order_[i], order_[i + 1])) {
        block.push_back(&program_.statements[static_cast<size_t>(order_[++i])]);
      }
      if (block.size() > 1) {
        Coalesced(block, values);
      } else {
        for (const Call& call : block[0]->calls) {
          const bool mine =
              block[0]->op == Op::kGradient ? call.rank == trainer_ : IsMine(call.rank);
          if (mine) Single(*block[0], call, values);
        }
      }
      if (!wait) continue;
      for (const Statement* s : block) {
        for (const Call& call : s->calls) {
          for (const int out : call.out) {
            const Tensor& x = (*values)[static_cast<size_t>(out)];
            if (x.defined()) x.Wait(4 * part_.patience).IgnoreError();
          }
        }
      }
    }
  }

  // Whether everything behind the first of them up to the second is one call with it. This trainer
  // may have no part in what is between.
  bool AreJoined(int first, int second) const {
    for (int s = first + 1; s <= second; ++s) {
      if (!program_.statements[static_cast<size_t>(s)].joined) return false;
    }
    return first < second;
  }

  Tensors Operands(const Call& call, const Tensors& values) const {
    Tensors in;
    for (const int v : call.in) in.push_back(v < 0 ? Tensor() : values[static_cast<size_t>(v)]);
    return in;
  }
  static void Give(const Call& call, const Tensors& results, Tensors* values) {
    for (size_t i = 0; i < call.out.size(); ++i) {
      (*values)[static_cast<size_t>(call.out[i])] = i < results.size() ? results[i] : Tensor();
    }
  }

  static ReduceOp OpOf(const Statement& s, const Call& call) {
    return s.reduction == Reduction::kPremulSum ? ReduceOp::PremulSum(call.factor)
                                                : ReduceOp(s.reduction);
  }

  void Single(const Statement& s, const Call& call, Tensors* values) const {
    std::unique_ptr<NoGrad> no_grad;
    if (call.no_grad) no_grad = std::make_unique<NoGrad>();
    const Tensors in = Operands(call, *values);
    if (s.op == Op::kGradient) {
      Give(call, Gradient(s, call, in, *values), values);
    } else if (IsLocal(s.op)) {
      Give(call, {Local(s, call, in)}, values);
    } else if (IsOfDevices(s.op)) {
      Give(call, OfDevices(s, in), values);
    } else {
      Give(call, Collective(s, call, in), values);
    }
  }

  Tensors Gradient(const Statement& s, const Call& call, const Tensors& in,
                   const Tensors& values) const {
    const size_t n = (in.size() - static_cast<size_t>(call.wanted)) / 2;
    const auto at = [&](size_t i) { return in.begin() + static_cast<std::ptrdiff_t>(i); };
    const Tensors roots(in.begin(), at(n));
    const Tensors wanted(at(2 * n), in.end());
    BackwardOptions options;
    options.create_graph = s.create;
    options.retain_graph = s.retain;
    bool seeds = false;
    for (size_t i = n; i < 2 * n; ++i) seeds = seeds || in[i].defined();
    if (seeds) options.seeds = Tensors(at(n), at(2 * n));
    if (!s.backward) {
      const absl::StatusOr<Tensors> gradients = Grad(roots, wanted, options);
      return gradients.ok() ? *gradients : Failed(call, gradients.status());
    }
    const absl::Status status = Backward(roots, options);
    if (!status.ok()) return Failed(call, status);
    Tensors gradients;
    for (const Tensor& x : wanted) {
      const Tensor g = x.grad();
      gradients.push_back(g.defined() ? g : Zeros(x.device(), x.dtype(), x.shape()));
    }
    // Of all leaves: what is not asked for now is not part of a later gradient.
    for (const Statement& leaf : program_.statements) {
      if (leaf.op != Op::kLeaf || !leaf.requires_grad || !IsMine(leaf.calls[0].rank)) continue;
      const Tensor& x = values[static_cast<size_t>(leaf.calls[0].out[0])];
      if (x.defined()) x.ClearGrad();
    }
    return gradients;
  }

  Tensors Failed(const Call& call, const absl::Status& status) const {
    return Tensors(call.out.size(), FromError(part_.session, status));
  }

  static HeightWidth Pair(const Statement& s, size_t i) { return {s.ints[i], s.ints[i + 1]}; }
  static Axes AxesOf(const Statement& s) { return s.number == 1 ? Axes() : Axes(s.ints); }

  // TopK's way where it is not all of them.
  Sorted SortOf(const Statement& s, const Call& call, const Tensor& x) const {
    const Dims& shape = program_.value(call.in[0]).shape;
    const bool all = s.ints[1] == shape[static_cast<size_t>(s.ints[0])];
    return all ? Sort(x, s.ints[0], s.flag) : TopK(x, s.ints[1], s.ints[0], s.flag);
  }

  Tensor Local(const Statement& s, const Call& call, const Tensors& in) const {
    const Tensor& x = in[0];
    switch (s.op) {
      case Op::kNeg:
        return Neg(x);
      case Op::kAbs:
        return Abs(x);
      case Op::kRelu:
        return Relu(x);
      case Op::kSin:
        return Sin(x);
      case Op::kCos:
        return Cos(x);
      case Op::kExp:
        return Exp(x);
      case Op::kLog:
        return Log(x);
      case Op::kLog1p:
        return Log1p(x);
      case Op::kExpm1:
        return Expm1(x);
      case Op::kSqrt:
        return Sqrt(x);
      case Op::kRsqrt:
        return Rsqrt(x);
      case Op::kSigmoid:
        return Sigmoid(x);
      case Op::kTanh:
        return Tanh(x);
      case Op::kErf:
        return Erf(x);
      case Op::kSign:
        return Sign(x);
      case Op::kFloor:
        return Floor(x);
      case Op::kCeil:
        return Ceil(x);
      case Op::kAdd:
        return x + in[1];
      case Op::kSub:
        return x - in[1];
      case Op::kMul:
        return x * in[1];
      case Op::kDiv:
        return Div(x, in[1]);
      case Op::kMaximum:
        return Maximum(x, in[1]);
      case Op::kMinimum:
        return Minimum(x, in[1]);
      case Op::kPow:
        return Pow(x, in[1]);
      case Op::kAddNumber:
        return x + s.number;
      case Op::kMulNumber:
        return x * s.number;
      case Op::kLess:
        return Less(x, in[1]);
      case Op::kEqual:
        return Equal(x, in[1]);
      case Op::kLogicalAnd:
        return LogicalAnd(x, in[1]);
      case Op::kLogicalNot:
        return LogicalNot(x);
      case Op::kWhere:
        return Where(x, in[1], in[2]);
      case Op::kCast:
        return Cast(x, program_.value(call.out[0]).dtype);
      case Op::kSum:
        return Sum(x, AxesOf(s), s.flag);
      case Op::kMean:
        return Mean(x, AxesOf(s), s.flag);
      case Op::kMax:
        return Max(x, AxesOf(s), s.flag);
      case Op::kMin:
        return Min(x, AxesOf(s), s.flag);
      case Op::kProduct:
        return Product(x, AxesOf(s), s.flag);
      case Op::kExpand:
        return Expand(x, s.ints);
      case Op::kReshape:
        return Reshape(x, s.ints);
      case Op::kTranspose:
        return Transpose(x, s.ints);
      case Op::kSlice:
        return Slice(x, s.ints[0], s.ints[1], s.ints[2]);
      case Op::kConcat:
        return Concat(in, s.ints[0]);
      case Op::kDetach:
        return x.Detach();
      case Op::kCopyTo:
        return CopyTo(x, DeviceOf(program_.value(call.out[0]).rank));
      case Op::kMatMul:
        return MatMul(x, in[1]);
      case Op::kSoftmax:
        return Softmax(x, s.ints[0]);
      case Op::kLogSoftmax:
        return LogSoftmax(x, s.ints[0]);
      case Op::kCrossEntropy:
        return CrossEntropy(x, in[1]);
      case Op::kOneHot:
        return OneHot(x, s.ints[0], program_.value(call.out[0]).dtype);
      case Op::kTake:
        return Take(x, in[1], s.ints[0]);
      case Op::kScatterAdd:
        return ScatterAdd(x, in[1], s.ints[0], s.ints[1]);
      case Op::kTakeAlong:
        return TakeAlong(x, in[1], s.ints[0]);
      case Op::kScatterAddAlong:
        return ScatterAddAlong(x, in[1], s.ints[0], s.ints[1]);
      case Op::kArgMax:
        return ArgMax(x, s.ints[0], s.flag);
      case Op::kSort:
        return SortOf(s, call, x).values;
      case Op::kArgSort:
        return SortOf(s, call, x).indices;
      case Op::kCumSum:
        return CumSum(x, s.ints[0], s.flag);
      case Op::kConv2d: {
        Conv2dOptions options;
        options.stride = Pair(s, 0);
        options.padding = Pair(s, 2);
        options.dilation = Pair(s, 4);
        options.groups = s.ints[6];
        return Conv2d(x, in[1], options);
      }
      case Op::kConvTranspose2d: {
        ConvTranspose2dOptions options;
        options.stride = Pair(s, 0);
        options.padding = Pair(s, 2);
        options.dilation = Pair(s, 4);
        options.groups = s.ints[6];
        options.output_padding = Pair(s, 7);
        return ConvTranspose2d(x, in[1], options);
      }
      case Op::kMaxPool2d: {
        MaxPool2dOptions options;
        options.stride = Pair(s, 2);
        options.padding = Pair(s, 4);
        options.dilation = Pair(s, 6);
        return MaxPool2d(x, Pair(s, 0), options);
      }
      case Op::kAvgPool2d: {
        AvgPool2dOptions options;
        options.stride = Pair(s, 2);
        options.padding = Pair(s, 4);
        options.count_padding = s.flag;
        return AvgPool2d(x, Pair(s, 0), options);
      }
      case Op::kAdaptiveAvgPool2d:
        return AdaptiveAvgPool2d(x, Pair(s, 0));
      case Op::kLinear: {
        nn::Linear layer(in[1].shape()[1], in[1].shape()[0]);
        const nn::StateScope scope(layer, {in[1], in[2]});
        return layer(x);
      }
      case Op::kLayerNorm: {
        nn::LayerNorm layer(x.shape().back());
        const nn::StateScope scope(layer, {in[1], in[2]});
        return layer(x);
      }
      case Op::kGroupNorm: {
        nn::GroupNorm layer(s.ints[0], x.shape()[1]);
        const nn::StateScope scope(layer, {in[1], in[2]});
        return layer(x);
      }
      case Op::kBatchNorm: {
        nn::BatchNorm layer(x.shape()[1]);
        const Tensor zeros = Zeros(x.device(), x.dtype(), {x.shape()[1]});
        const nn::StateScope scope(
            layer, {in[1], in[2], zeros, zeros, Zeros(x.device(), DType::kI64, {})});
        return layer(x);
      }
      default:
        return Tensor();
    }
  }

  Tensors OfDevices(const Statement& s, const Tensors& in) const {
    const parallel::DeviceGroup& devices = devices_[static_cast<size_t>(s.group)];
    switch (s.op) {
      case Op::kDevicesBroadcast:
        return parallel::Broadcast(in[0], devices);
      case Op::kDevicesReduceAdd:
        return {parallel::ReduceAdd(in, devices, s.root)};
      case Op::kDevicesScatter:
        return parallel::Scatter(in[0], devices, s.ints, s.dim);
      case Op::kDevicesLinear: {
        nn::Linear layer(in[1].shape()[1], in[1].shape()[0]);
        const nn::StateScope scope(layer, {in[1], in[2]});
        std::vector<std::string> warnings;
        return {nn::DataParallelCall(layer, in[0], devices, {}, &warnings)};
      }
      default:
        return {parallel::Gather(in, devices, s.root, s.dim)};
    }
  }

  Tensors Collective(const Statement& s, const Call& call, const Tensors& in) const {
    const Group& group = groups_[static_cast<size_t>(s.group)][static_cast<size_t>(call.rank)];
    const auto rank_in_group = static_cast<size_t>(group.rank());
    const auto size = static_cast<size_t>(group.size());
    const ReduceOp op = OpOf(s, call);
    const auto type = [&](size_t i) -> const Value& { return program_.value(call.out[i]); };
    // Of pieces between each two members.
    const auto rows = [&](bool sent) {
      std::vector<int64_t> result;
      for (size_t other = 0; other < size && !s.rows.empty(); ++other) {
        result.push_back(sent ? s.rows[rank_in_group * size + other]
                              : s.rows[other * size + rank_in_group]);
      }
      return result;
    };
    const int64_t max_rows = call.out.empty() || type(0).shape.empty()
                                 ? static_cast<int64_t>(s.number)
                                 : type(0).shape[0];
    const auto both = [](const Ragged& r) { return Tensors{r.values, r.counts}; };
    switch (s.op) {
      case Op::kAllReduce:
        return {AllReduce(in[0], group, op)};
      case Op::kBroadcast:
        return {Broadcast(in[0], s.root, group)};
      case Op::kReduce:
        return {Reduce(in[0], s.root, group, op)};
      case Op::kAllGather:
        return AllGather(in[0], group, s.rows);
      case Op::kAllGatherIntoTensor:
        return {AllGatherIntoTensor(in[0], group, s.rows, s.dim)};
      case Op::kGather:
        return Gather(in[0], s.root, group, s.rows);
      case Op::kGatherIntoTensor:
        return {GatherIntoTensor(in[0], s.root, group, s.rows, s.dim)};
      case Op::kScatter:
        return {Scatter(in, type(0).dtype, type(0).shape, s.root, group)};
      case Op::kScatterTensor:
        return {ScatterTensor(in.empty() ? Tensor() : in[0], type(0).dtype, type(0).shape, s.root,
                              group, s.rows, s.dim)};
      case Op::kReduceScatter:
        return {ReduceScatter(in, group, op)};
      case Op::kReduceScatterTensor:
        return {ReduceScatterTensor(in[0], group, op, s.rows, s.dim)};
      case Op::kAllToAll:
        return AllToAll(in, group, rows(false));
      case Op::kAllToAllSingle:
        return {AllToAllSingle(in[0], group, rows(true), rows(false))};
      case Op::kTransfer:
        if (!in.empty()) return {Send(in[0], static_cast<int>(s.ints[1]), group, s.ints[2])};
        return {Recv(type(0).dtype, type(0).shape, static_cast<int>(s.ints[0]), group, s.ints[2])};
      case Op::kBarrier:
        return {Barrier(group)};
      case Op::kAllToAllRagged:
        return both(AllToAllRagged(in[0], in[1], max_rows, group));
      case Op::kAllGatherRagged:
        return both(AllGatherRagged(in[0], in[1], max_rows, group));
      case Op::kGatherRagged:
        return both(GatherRagged(in[0], in[1], max_rows, s.root, group));
      case Op::kScatterRagged:
        return both(ScatterRagged(in.empty() ? Tensor() : in[0], in.empty() ? Tensor() : in[1],
                                  type(0).dtype, type(0).shape, s.root, group));
      case Op::kReduceScatterRagged:
        return both(ReduceScatterRagged(in[0], in[1], max_rows, group, op));
      default:
        return {};
    }
  }

  // The calls of each member of this trainer, or of a group of its devices, in one.
  void Coalesced(const std::vector<const Statement*>& block, Tensors* values) const {
    const Statement& s = *block[0];
    if (IsOfDevices(s.op)) {
      std::unique_ptr<NoGrad> no_grad;
      if (s.calls[0].no_grad) no_grad = std::make_unique<NoGrad>();
      const parallel::DeviceGroup& devices = devices_[static_cast<size_t>(s.group)];
      Tensors xs;
      std::vector<Tensors> parts(static_cast<size_t>(devices.size()));
      for (const Statement* one : block) {
        const Tensors in = Operands(one->calls[0], *values);
        xs.push_back(in[0]);
        for (size_t p = 0; p < in.size(); ++p) parts[p].push_back(in[p]);
      }
      if (s.op == Op::kDevicesBroadcast) {
        const std::vector<Tensors> out = parallel::BroadcastCoalesced(xs, devices);
        for (size_t i = 0; i < block.size(); ++i) {
          Tensors mine;
          for (const Tensors& of_device : out) mine.push_back(of_device[i]);
          Give(block[i]->calls[0], mine, values);
        }
      } else {
        const Tensors out = parallel::ReduceAddCoalesced(parts, devices, s.root);
        for (size_t i = 0; i < block.size(); ++i) Give(block[i]->calls[0], {out[i]}, values);
      }
      return;
    }
    if (s.op == Op::kTransfer) {
      for (const int rank : ranks_) Transfers(block, rank, values);
      return;
    }
    for (size_t c = 0; c < s.calls.size(); ++c) {
      const Call& first = s.calls[c];
      if (!IsMine(first.rank)) continue;
      std::unique_ptr<NoGrad> no_grad;
      if (first.no_grad) no_grad = std::make_unique<NoGrad>();
      const Group& group = groups_[static_cast<size_t>(s.group)][static_cast<size_t>(first.rank)];
      const ReduceOp op = OpOf(s, first);
      Tensors xs;
      std::vector<Tensors> lists;
      for (const Statement* one : block) {
        const Tensors in = Operands(one->calls[c], *values);
        xs.push_back(in[0]);
        lists.push_back(in);
      }
      std::vector<Tensors> out;
      const auto one_each = [&out](const Tensors& results) {
        for (const Tensor& x : results) out.push_back({x});
      };
      switch (s.op) {
        case Op::kAllReduce:
          one_each(AllReduceCoalesced(xs, group, op));
          break;
        case Op::kBroadcast:
          one_each(BroadcastCoalesced(xs, s.root, group));
          break;
        case Op::kReduce:
          one_each(ReduceCoalesced(xs, s.root, group, op));
          break;
        case Op::kAllGather:
          out = AllGatherCoalesced(xs, group);
          break;
        case Op::kAllGatherIntoTensor:
          one_each(AllGatherIntoTensorCoalesced(xs, group));
          break;
        case Op::kReduceScatter:
          out.clear();
          one_each(ReduceScatterCoalesced(lists, group, op));
          break;
        case Op::kReduceScatterTensor:
          one_each(ReduceScatterTensorCoalesced(xs, group, op));
          break;
        default:
          break;
      }
      for (size_t i = 0; i < block.size() && i < out.size(); ++i) {
        Give(block[i]->calls[c], out[i], values);
      }
    }
  }

  void Transfers(const std::vector<const Statement*>& block, int rank, Tensors* values) const {
    std::vector<Transfer> transfers;
    std::vector<const Call*> calls;
    const Group* group = nullptr;
    for (const Statement* s : block) {
      for (const Call& call : s->calls) {
        if (call.rank != rank) continue;
        group = &groups_[static_cast<size_t>(s->group)][static_cast<size_t>(rank)];
        calls.push_back(&call);
        if (!call.in.empty()) {
          transfers.push_back(
              Transfer::Send(Operands(call, *values)[0], static_cast<int>(s->ints[1]), s->ints[2]));
        } else {
          const Value& value = program_.value(call.out[0]);
          transfers.push_back(
              Transfer::Recv(value.dtype, value.shape, static_cast<int>(s->ints[0]), s->ints[2]));
        }
      }
    }
    if (transfers.empty()) return;
    const Tensors out = BatchSendRecv(transfers, *group);
    for (size_t i = 0; i < calls.size() && i < out.size(); ++i) Give(*calls[i], {out[i]}, values);
  }

  const Program& program_;
  const int trainer_;
  const Part& part_;
  const std::vector<int> ranks_;
  std::vector<World> worlds_;               // by rank; of this trainer's
  std::vector<std::vector<Group>> groups_;  // by group and rank
  std::vector<parallel::DeviceGroup> devices_;
  std::vector<int> order_;
};

}  // namespace

Outcomes RunPart(const Program& program, int trainer, const Part& part,
                 std::vector<World>* joined) {
  Trainer runs(program, trainer, part);
  const absl::Status status = runs.Join();
  const Outcomes outcomes = status.ok() ? runs.Run() : runs.AllFail(status);
  *joined = runs.Worlds();
  return outcomes;
}

}  // namespace random_programs
}  // namespace chorus
