#include "benchmarks/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "benchmarks/collective_case.h"
#include "benchmarks/gradients.h"
#include "benchmarks/pattern.h"
#include "benchmarks/timed_loop.h"
#include "chorus/chorus.h"
#include "chorus/user_memory.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

constexpr absl::string_view kGradients = "gradients_";

class Trainer {
 public:
  Trainer(int index, std::string address) : rank_(index), address_(std::move(address)) {}

  Outcome Handle(const Task& task) {
    Outcome outcome;
    if (task.op == "join") {
      outcome.status = Join(task.text, static_cast<int>(task.number));
      return outcome;
    }
    // Open MPI keeps no tape either.
    const NoGrad no_grad;
    if (task.op == "await_failure") return AwaitFailure();
    if (task.op == "forget") {
      Forget();
    } else if (task.op == "compute") {
      return Computes(task);
    } else if (task.op == "all_reduce_mapped") {
      return MappedAllReduces(task);
    } else if (task.op == "all_reduce_user") {
      return UserAllReduces(task);
    } else if (task.op == "all_reduces") {
      Gradients tensors;
      tensors.shapes.assign(task.number, {task.bytes / static_cast<int64_t>(sizeof(float))});
      return ManyAllReduces(task, tensors, task.text, Reduction::kSum, /*reads=*/false);
    } else if (absl::StartsWith(task.op, kGradients)) {
      return GradientAllReduces(task);
    } else if (task.op == "nodes") {
      return RunsOfNodes(task);
    } else if (task.op == "register") {
      return Registrations(task);
    } else {
      return Collectives(task);
    }
    return outcome;
  }

 private:
  absl::Status Join(const std::string& name, int size) {
    if (!session_.is_open()) {
      SessionOptions options;
      options.address = address_;
      options.transport = Transport::kRing;
      CHORUS_ASSIGN_OR_RETURN(session_, Session::Open(options));
    }
    Forget();
    WorldOptions options;
    options.name = name;
    options.rank = rank_;
    options.size = size;
    // A world that has lost a rank cannot be left in order; its handle just goes.
    CHORUS_ASSIGN_OR_RETURN(world_, session_.Join(options));
    return absl::OkStatus();
  }

  void Forget() {
    operand_ = "";
    mapped_ = MappedTensor<float>();
    owned_.clear();
    results_.clear();
    compiled_ = Compiled();
    user_in_ = std::vector<float>();
    user_out_ = std::vector<float>();
  }

  // True when the operands of that name are there from the task before; else they have all gone.
  bool HasOperand(const std::string& name) {
    if (operand_ == name) return true;
    Forget();
    operand_ = name;
    return false;
  }

  absl::Status PrepareMapped(int64_t count) {
    if (HasOperand(absl::StrCat("mapped ", count)) || count == 0) return absl::OkStatus();
    CHORUS_ASSIGN_OR_RETURN(mapped_, Map<float>(world_, {count}));
    FillPattern(rank_, mapped_.data(), count);
    return absl::OkStatus();
  }

  // A tensor of the daemon's with what `fill` writes.
  template <typename Fill>
  absl::StatusOr<Tensor> Owned(int64_t count, const Fill& fill) {
    std::vector<float> values(static_cast<size_t>(count));
    fill(values.data());
    Tensor owned = FromHost(world_, values, {count});
    CHORUS_RETURN_IF_ERROR(owned.Wait());
    return owned;
  }

  absl::Status PrepareOwned(const CollectiveCase& c) {
    if (HasOperand(absl::StrCat(c.op, " ", c.count))) return absl::OkStatus();
    if (TakesOneTensor(c.op)) {
      CHORUS_ASSIGN_OR_RETURN(
          Tensor all, Owned(c.InputPieces(rank_) * c.count, [&](float* to) { c.Fill(rank_, to); }));
      owned_.push_back(std::move(all));
      return absl::OkStatus();
    }
    // Off a broadcast's root only the type counts.
    const int pieces = c.op == "broadcast" ? 1 : c.InputPieces(rank_);
    for (int k = 0; k < pieces; ++k) {
      CHORUS_ASSIGN_OR_RETURN(Tensor piece,
                              Owned(c.count, [&](float* to) { c.FillPiece(rank_, k, to); }));
      owned_.push_back(std::move(piece));
    }
    return absl::OkStatus();
  }

  static bool TakesOneTensor(const std::string& op) {
    return op == "reduce_scatter_tensor" || op == "all_to_all_single";
  }

  Outcome Collectives(const Task& task) {
    Outcome outcome;
    const absl::StatusOr<CollectiveCase> c = CollectiveCase::Of(task.op, world_.size(), task.bytes);
    outcome.status = c.ok() ? PrepareOwned(*c) : c.status();
    if (!outcome.status.ok()) {
      // The others need not wait for this rank, and learn why.
      world_.Abort(std::string(outcome.status.message())).IgnoreError();
      return outcome;
    }
    outcome = TimedLoop(task, [&]() -> absl::Status {
      Call(*c);
      for (const Tensor& result : results_) CHORUS_RETURN_IF_ERROR(result.Wait());
      if (task.number == 1) CHORUS_RETURN_IF_ERROR(ReadResults());
      return absl::OkStatus();
    });
    if (outcome.status.ok()) outcome.status = CheckResults(*c);
    return outcome;
  }

  // Asks for a collective; afterwards results_ are to be waited for.
  void Call(const CollectiveCase& c) {
    const std::string& op = c.op;
    if (op == "all_reduce") {
      results_ = {AllReduce(owned_[0], world_)};
    } else if (op == "broadcast") {
      results_ = {Broadcast(owned_[0], 0, world_)};
    } else if (op == "reduce") {
      results_ = {Reduce(owned_[0], 0, world_)};
    } else if (op == "reduce_scatter") {
      results_ = {ReduceScatter(owned_, world_)};
    } else if (op == "all_gather") {
      results_ = AllGather(owned_[0], world_);
    } else if (op == "reduce_scatter_tensor") {
      results_ = {ReduceScatterTensor(owned_[0], world_)};
    } else if (op == "all_gather_into_tensor") {
      results_ = {AllGatherIntoTensor(owned_[0], world_)};
    } else if (op == "gather") {
      results_ = Gather(owned_[0], 0, world_);
    } else if (op == "scatter") {
      results_ = {Scatter(owned_, DType::kF32, {c.count}, 0, world_)};
    } else if (op == "all_to_all") {
      results_ = AllToAll(owned_, world_);
    } else if (op == "all_to_all_single") {
      results_ = {AllToAllSingle(owned_[0], world_)};
    } else if (op == "send_recv") {
      const int other = c.Neighbour(rank_);
      if (other < 0) return;
      results_ = BatchSendRecv(
          {Transfer::Send(owned_[0], other), Transfer::Recv(DType::kF32, {c.count}, other)},
          world_);
    }
  }

  absl::Status ReadResults() {
    for (const Tensor& result : results_) {
      if (result.absent()) continue;
      CHORUS_ASSIGN_OR_RETURN(TensorView<float> view, result.View<float>());
      read_ ^= ReadAll(view.data(), static_cast<int64_t>(view.size() * sizeof(float)));
    }
    return absl::OkStatus();
  }

  // Every element of every piece, however many tensors there are.
  absl::Status CheckResults(const CollectiveCase& c) const {
    int piece = 0;
    for (const Tensor& result : results_) {
      if (result.absent()) continue;
      CHORUS_ASSIGN_OR_RETURN(TensorView<float> view, result.View<float>());
      if (static_cast<int64_t>(view.size()) % c.count != 0) {
        return absl::DataLossError("a result that is no whole number of pieces");
      }
      for (size_t i = 0; i < view.size(); i += c.count) {
        CHORUS_RETURN_IF_ERROR(c.CheckPiece(rank_, piece++, view.data() + i));
      }
    }
    if (piece == c.OutputPieces(rank_)) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("expected ", c.OutputPieces(rank_), " pieces, got ", piece));
  }

  Outcome MappedAllReduces(const Task& task) {
    Outcome outcome;
    const int64_t count = task.bytes / static_cast<int64_t>(sizeof(float));
    outcome.status = PrepareMapped(count);
    if (!outcome.status.ok()) return outcome;
    Tensor y;
    outcome = TimedLoop(task, [&]() -> absl::Status {
      y = AllReduce(mapped_, world_);
      if (task.number != 1) return y.Wait();
      CHORUS_ASSIGN_OR_RETURN(TensorView<float> view, y.View<float>());
      read_ ^= ReadAll(view.data(), task.bytes);
      return absl::OkStatus();
    });
    if (outcome.status.ok()) outcome.status = CheckSum(y, count);
    return outcome;
  }

  Outcome UserAllReduces(const Task& task) {
    const int64_t count = task.bytes / static_cast<int64_t>(sizeof(float));
    if (!HasOperand(absl::StrCat("user ", count))) {
      user_in_.resize(count);
      user_out_.resize(count);
      FillPattern(rank_, user_in_.data(), count);
      user_memory_ = std::make_unique<UserMemory>(world_);
    }
    const auto reduce = [&] {
      return user_memory_->AllReduce(user_in_.data(), user_out_.data(), user_in_.size());
    };
    Outcome outcome = TimedLoop(task, [&]() -> absl::Status {
      CHORUS_RETURN_IF_ERROR(reduce());
      if (task.number == 1) read_ ^= ReadAll(user_out_.data(), task.bytes);
      return absl::OkStatus();
    });
    // One more: all calls before have written the same.
    std::fill(user_out_.begin(), user_out_.end(), -1.0f);
    if (outcome.status.ok()) outcome.status = reduce();
    if (outcome.status.ok()) {
      outcome.status = CheckPatternSum(world_.size(), user_out_.data(), count);
    }
    return outcome;
  }

  Outcome Computes(const Task& task) {
    Outcome outcome;
    const int64_t count = task.bytes / static_cast<int64_t>(sizeof(float));
    outcome.status = PrepareMapped(count);
    if (!outcome.status.ok()) return outcome;
    Tensor y;
    outcome = TimedLoop(task, [&]() -> absl::Status {
      Compute(task.number);
      if (count == 0) return absl::OkStatus();
      y = AllReduce(mapped_, world_);
      return y.Wait();
    });
    if (outcome.status.ok() && count > 0) outcome.status = CheckSum(y, count);
    return outcome;
  }

  // The operands are pieces of one pattern, so that no two are equal.
  absl::Status PrepareMany(const Gradients& tensors, const ReduceOp& op) {
    if (HasOperand(absl::StrCat("many ", op.reduction(), " ", tensors.Encode())))
      return absl::OkStatus();
    user_in_.resize(static_cast<size_t>(tensors.total()));
    FillPattern(rank_, user_in_.data(), tensors.total());
    const float* from = user_in_.data();
    for (size_t k = 0; k < tensors.shapes.size(); ++k) {
      const int64_t count = tensors.count(k);
      CHORUS_ASSIGN_OR_RETURN(Tensor piece, Owned(count, [from, count](float* to) {
                                std::copy(from, from + count, to);
                              }));
      owned_.push_back(std::move(piece));
      from += count;
    }
    const World world = world_;
    compiled_ = Compile([world, op](const std::vector<Tensor>& xs) {
      std::vector<Tensor> reduced;
      for (const Tensor& x : xs) reduced.push_back(AllReduce(x, world, op));
      return reduced;
    });
    user_memory_ = std::make_unique<UserMemory>(world_);
    return absl::OkStatus();
  }

  // `how` is said in trainer.h.
  Outcome ManyAllReduces(const Task& task, const Gradients& tensors, absl::string_view how,
                         const ReduceOp& op, bool reads) {
    Outcome outcome;
    outcome.status = PrepareMany(tensors, op);
    if (!outcome.status.ok()) {
      world_.Abort(std::string(outcome.status.message())).IgnoreError();
      return outcome;
    }
    const bool user = how == "user" || how == "parts";
    if (user) user_out_.resize(user_in_.size());
    outcome = TimedLoop(task, [&]() -> absl::Status {
      if (user) {
        CHORUS_RETURN_IF_ERROR(ReduceUserMemory(tensors, how, op));
        if (reads) read_ ^= ReadAll(user_out_.data(), tensors.bytes());
        return absl::OkStatus();
      }
      if (how == "graph") {
        CHORUS_ASSIGN_OR_RETURN(results_, compiled_.Run(owned_));
      } else if (how == "coalesced") {
        results_ = AllReduceCoalesced(owned_, world_, op);
      } else {
        results_.clear();
        for (const Tensor& x : owned_) results_.push_back(AllReduce(x, world_, op));
      }
      for (const Tensor& result : results_) CHORUS_RETURN_IF_ERROR(result.Wait());
      return reads ? ReadResults() : absl::OkStatus();
    });
    if (outcome.status.ok() && !user) outcome.status = CopyResults(&user_out_);
    if (outcome.status.ok() && user) {
      // One more: all calls before have written the same.
      std::fill(user_out_.begin(), user_out_.end(), -1.0f);
      outcome.status = ReduceUserMemory(tensors, how, op);
    }
    if (outcome.status.ok()) outcome.status = CheckMany(tensors.total(), op);
    return outcome;
  }

  absl::Status ReduceUserMemory(const Gradients& tensors, absl::string_view how,
                                const ReduceOp& op) {
    std::vector<UserMemory::Part<float>> parts;
    size_t at = 0;
    for (size_t k = 0; k < tensors.shapes.size(); ++k) {
      const auto count = static_cast<size_t>(tensors.count(k));
      parts.push_back({user_in_.data() + at, user_out_.data() + at, count});
      at += count;
    }
    if (how == "parts") return user_memory_->AllReduceCoalesced(parts, op);
    for (const UserMemory::Part<float>& part : parts) {
      CHORUS_RETURN_IF_ERROR(user_memory_->AllReduce(part.in, part.out, part.count, op));
    }
    return absl::OkStatus();
  }

  Outcome GradientAllReduces(const Task& task) {
    const absl::StatusOr<Gradients> gradients = Gradients::Decode(task.text);
    if (gradients.ok()) {
      return ManyAllReduces(task, *gradients, absl::StripPrefix(task.op, kGradients),
                            Reduction::kAvg, task.number == 1);
    }
    Outcome outcome;
    outcome.status = gradients.status();
    return outcome;
  }

  // All results, one after the other.
  absl::Status CopyResults(std::vector<float>* to) const {
    to->clear();
    for (const Tensor& result : results_) {
      CHORUS_ASSIGN_OR_RETURN(TensorView<float> view, result.View<float>());
      to->insert(to->end(), view.begin(), view.end());
    }
    return absl::OkStatus();
  }

  absl::Status CheckMany(int64_t count, const ReduceOp& op) const {
    if (static_cast<int64_t>(user_out_.size()) != count) return absl::DataLossError("a wrong size");
    return op.reduction() == Reduction::kAvg
               ? CheckPatternMean(world_.size(), user_out_.data(), count)
               : CheckPatternSum(world_.size(), user_out_.data(), count);
  }

  static std::vector<Tensor> Chain(const std::vector<Tensor>& inputs, int64_t nodes) {
    Tensor x = inputs[0];
    for (int64_t i = 0; i < nodes; ++i) x = Neg(x);
    return {x};
  }

  absl::Status PrepareChain() {
    if (HasOperand("chain")) return absl::OkStatus();
    CHORUS_ASSIGN_OR_RETURN(Tensor one, Owned(1, [](float* to) { *to = 3; }));
    owned_.push_back(std::move(one));
    return absl::OkStatus();
  }

  absl::Status CheckChain(int64_t nodes) const {
    CHORUS_ASSIGN_OR_RETURN(const float value, results_[0].Item<float>());
    if (value == (nodes % 2 == 0 ? 3.0f : -3.0f)) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("3 negated ", nodes, " times became ", value));
  }

  Outcome RunsOfNodes(const Task& task) {
    Outcome outcome;
    const int64_t nodes = task.number;
    outcome.status = PrepareChain();
    if (!outcome.status.ok()) return outcome;
    const Compiled compiled =
        Compile([nodes](const std::vector<Tensor>& xs) { return Chain(xs, nodes); });
    outcome = TimedLoop(task, [&]() -> absl::Status {
      CHORUS_ASSIGN_OR_RETURN(results_, compiled.Run(owned_));
      return results_[0].Wait();
    });
    if (outcome.status.ok()) outcome.status = CheckChain(nodes);
    return outcome;
  }

  Outcome Registrations(const Task& task) {
    Outcome outcome;
    outcome.status = PrepareChain();
    for (int64_t i = 0; i < task.warm_up + task.iterations && outcome.status.ok(); ++i) {
      // Also behind the release of the graph before.
      outcome.status = AllReduce(Scalar<float>(world_, 1), world_).Wait();
      if (!outcome.status.ok()) break;
      int64_t traced = 0;
      const Compiled compiled = Compile([&](const std::vector<Tensor>& xs) {
        std::vector<Tensor> results = Chain(xs, task.number);
        traced = NowNanos();
        return results;
      });
      const int64_t start = NowNanos();
      absl::StatusOr<std::vector<Tensor>> results = compiled.Run(owned_);
      outcome.status = results.ok() ? (*results)[0].Wait() : results.status();
      const int64_t end = NowNanos();
      if (!outcome.status.ok()) break;
      results_ = *std::move(results);
      outcome.status = CheckChain(task.number);
      if (i < task.warm_up) continue;
      outcome.samples.push_back(
          static_cast<double>(task.text == "trace" ? traced - start : end - traced));
    }
    return outcome;
  }

  Outcome AwaitFailure() {
    Outcome outcome;
    const Tensor x = Scalar<float>(world_, 1);
    const absl::Status status = AllReduce(x, world_).Wait();
    outcome.end_ns = NowNanos();
    if (status.ok()) {
      outcome.status = absl::DataLossError("an all_reduce without all its ranks succeeded");
    }
    const Error error = ErrorOf(status);
    outcome.text =
        FailureText(std::string(ReasonName(error.reason)), error.culprit.rank, error.culprit.pid);
    return outcome;
  }

  absl::Status CheckSum(const Tensor& y, int64_t count) const {
    CHORUS_ASSIGN_OR_RETURN(TensorView<float> view, y.View<float>());
    if (static_cast<int64_t>(view.size()) != count) return absl::DataLossError("a wrong size");
    return CheckPatternSum(world_.size(), view.data(), count);
  }

  const int rank_;
  const std::string address_;
  Session session_;
  World world_;
  std::string operand_;  // of which task the operands are
  MappedTensor<float> mapped_;
  std::vector<Tensor> owned_;
  std::vector<Tensor> results_;
  Compiled compiled_;
  std::vector<float> user_in_;
  std::vector<float> user_out_;
  std::unique_ptr<UserMemory> user_memory_;
  uint64_t read_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Job>> Job::Start(const ScratchDirectory& scratch,
                                                const Daemon& daemon, int ranks) {
  auto job = std::make_unique<Job>();
  job->address_ = daemon.address();
  CHORUS_ASSIGN_OR_RETURN(job->helpers_,
                          HelperGroup::Create(scratch, absl::StrCat("trainers", ranks), ranks));
  CHORUS_RETURN_IF_ERROR(job->JoinAnew());
  return job;
}

absl::Status Job::JoinAnew() {
  for (int i = 0; i < ranks(); ++i) {
    if (helpers_->pid(i) > 0) continue;
    CHORUS_ASSIGN_OR_RETURN(
        Process process,
        Process::Start(
            {"/proc/self/exe", "--helper=trainer", absl::StrCat("--control=", helpers_->path()),
             absl::StrCat("--index=", i), absl::StrCat("--address=", address_)},
            {}));
    helpers_->Own(std::move(process));
  }
  CHORUS_RETURN_IF_ERROR(helpers_->AwaitHellos());
  Task task;
  task.op = "join";
  task.number = ranks();
  task.text = absl::StrCat("bench-", getpid(), "-", ranks(), "-", ++worlds_);
  return Run(task).status();
}

std::vector<double> SlowestSamples(const std::vector<Outcome>& outcomes) {
  std::vector<double> slowest;
  for (const Outcome& outcome : outcomes) {
    slowest.resize(outcome.samples.size());
    for (size_t i = 0; i < slowest.size(); ++i) {
      slowest[i] = std::max(slowest[i], outcome.samples[i]);
    }
  }
  return slowest;
}

int RunTrainerHelper(const std::string& control_path, int index, const std::string& address) {
  Trainer trainer(index, address);
  return RunHelper(control_path, index,
                   [&trainer](const Task& task) { return trainer.Handle(task); });
}

std::string FailureText(const std::string& reason, int rank, pid_t pid) {
  return absl::StrCat(reason, " rank ", rank, " pid ", pid);
}

}  // namespace bench
}  // namespace chorus
