// A trainer that a fault test leads by the hand: one command a line comes in, one line goes out.
//
//   fault_trainer IN_FD OUT_FD
//
// Replies start with "ok" or "error"; both are followed by key=value words, an error also by its
// text after "message=". A line that starts with "at" says how far a long command has come. The end
// of the input ends the trainer.
//
// What every all_reduce gives is checked here, element by element: a test that sees no error has
// seen right numbers.

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "chorus/chorus.h"
#include "core/base/error.h"
#include "core/base/failpoint.h"
#include "core/base/mutex.h"
#include "tests/fault/hostile_client.h"

namespace chorus {
namespace fault {
namespace {

using Words = std::vector<std::string>;

int out_fd = STDOUT_FILENO;

// One write a line: also a failpoint's hook may say something.
void Say(absl::string_view line) {
  const std::string text = absl::StrCat(line, "\n");
  if (write(out_fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) _exit(3);
}

std::string ErrorWords(const absl::Status& status) {
  const Error error = ErrorOf(status);
  return absl::StrCat(" code=", absl::StatusCodeToString(error.code),
                      " reason=", ReasonName(error.reason), " rank=", error.culprit.rank,
                      " pid=", error.culprit.pid, " versions=", error.ranks.size(),
                      " source=", error.source.empty() ? "-" : error.source,
                      " message=", absl::StrReplaceAll(error.message, {{"\n", " "}}));
}

int64_t Number(const Words& words, size_t i, int64_t otherwise = -1) {
  int64_t value = otherwise;
  if (i < words.size() && !absl::SimpleAtoi(words[i], &value)) value = otherwise;
  return value;
}

const std::string& Text(const Words& words, size_t i) {
  static const auto* const none = new std::string();
  return i < words.size() ? words[i] : *none;
}

// What `rank` gives to `step`: whole numbers, so that sums are exact, other ones at each index.
float Part(int64_t step, int rank, int64_t i) {
  return static_cast<float>((step * 31 + rank * 7 + i * 3) % 101);
}

std::vector<float> Parts(int64_t step, int rank, int64_t elements) {
  std::vector<float> values(static_cast<size_t>(elements));
  for (int64_t i = 0; i < elements; ++i) values[static_cast<size_t>(i)] = Part(step, rank, i);
  return values;
}

absl::Status CheckSize(int64_t step, int64_t elements, const std::vector<float>& got) {
  if (static_cast<int64_t>(got.size()) == elements) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("step ", step, ": expected ", elements, " elements, got ", got.size()));
}

absl::Status CheckSum(int64_t step, int size, int64_t elements, const std::vector<float>& got) {
  CHORUS_RETURN_IF_ERROR(CheckSize(step, elements, got));
  for (size_t i = 0; i < got.size(); ++i) {
    float expected = 0;
    for (int r = 0; r < size; ++r) expected += Part(step, r, static_cast<int64_t>(i));
    if (got[i] == expected) continue;
    return absl::DataLossError(
        absl::StrCat("step ", step, ", element ", i, ": expected ", expected, ", got ", got[i]));
  }
  return absl::OkStatus();
}

uint64_t HashOf(const std::vector<float>& values, uint64_t hash) {
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    hash = (hash ^ bits) * 1099511628211u;
  }
  return hash;
}

// --- Failpoints ----------------------------------------------------------------------------------

// Constant while the hook is set, but for the count.
std::string trap_name;
int trap_signal = 0;  // 0: only say so
std::atomic<int> trap_count{0};

void Trap(absl::string_view name) {
  if (name != trap_name || trap_count.fetch_sub(1) != 1) return;
  Say(absl::StrCat("at ", name));
  if (trap_signal != 0) raise(trap_signal);
}

// --- A pair of ranks that runs by itself ---------------------------------------------------------

// Two ranks, each with a session and a thread, all_reduce until they are told to stop. They agree
// when: rank 0 says so in the last element.
class Pair {
 public:
  // `computes`: each step has local ops as well.
  Pair(const SessionOptions& options, const std::string& name, bool computes)
      : computes_(computes) {
    for (int rank = 0; rank < 2; ++rank) {
      threads_[rank] = std::thread([this, options, name, rank] {
        status_[rank] = Loop(options, name, rank);
        const MutexLock lock(&mutex_);
        ended_ = true;
        changed_.SignalAll();
      });
    }
  }

  int64_t steps() const {
    const MutexLock lock(&mutex_);
    return steps_;
  }
  // Until they have done so many more. False: one of the two has ended, so has or will the other.
  bool AwaitSteps(int64_t more) {
    const MutexLock lock(&mutex_);
    const int64_t until = steps_ + more;
    while (!ended_ && steps_ < until) changed_.Wait(&mutex_);
    return !ended_;
  }

  absl::Status Stop() {
    stop_.store(true);
    for (std::thread& thread : threads_) thread.join();
    return status_[0].ok() ? status_[1] : status_[0];
  }

 private:
  absl::Status Loop(const SessionOptions& options, const std::string& name, int rank) {
    CHORUS_ASSIGN_OR_RETURN(const Session session, Session::Open(options));
    WorldOptions world_options;
    world_options.name = name;
    world_options.rank = rank;
    world_options.size = 2;
    // The test lets hours pass.
    world_options.agree_timeout = world_options.exec_timeout = std::chrono::hours(10000);
    CHORUS_ASSIGN_OR_RETURN(const World world, session.Join(world_options));
    const NoGrad no_grad;
    constexpr int64_t kElements = 64;
    for (int64_t step = 0;; ++step) {
      const float last = rank == 0 && stop_.load() ? 1 : 0;
      std::vector<float> values = Parts(step, rank, kElements);
      values.push_back(last);
      Tensor part = FromHost<float>(world, values, {kElements + 1});
      if (computes_) part = -(-part);
      const Tensor sum = AllReduce(part, world);
      absl::StatusOr<std::vector<float>> read = sum.Read<float>();
      // What others of this user have may leave no room for a copy of what a device has computed.
      while (ErrorOf(read.status()).reason == Reason::kOutOfMemory && sum.Wait().ok()) {
        read = sum.Read<float>();
      }
      CHORUS_ASSIGN_OR_RETURN(std::vector<float> got, std::move(read));
      CHORUS_RETURN_IF_ERROR(CheckSize(step, kElements + 1, got));
      const bool end = got.back() != 0;
      got.pop_back();
      CHORUS_RETURN_IF_ERROR(CheckSum(step, 2, kElements, got));
      if (rank == 0) {
        const MutexLock lock(&mutex_);
        steps_ = step + 1;
        changed_.SignalAll();
      }
      if (end) return session.Close();
    }
  }

  const bool computes_;
  std::atomic<bool> stop_{false};
  mutable Mutex mutex_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t steps_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_[2];
  std::thread threads_[2];
};

// --- The trainer ---------------------------------------------------------------------------------

class Trainer {
 public:
  std::string Obey(const Words& words) {
    const auto command = Commands().find(words[0]);
    if (command == Commands().end()) return absl::StrCat("error code=USAGE message=", words[0]);
    answer_.clear();
    const absl::Status status = (this->*command->second)(words);
    return absl::StrCat(status.ok() ? "ok" : "error", answer_,
                        status.ok() ? "" : ErrorWords(status));
  }

 private:
  static constexpr int64_t kFlood = 17;  // floats: more than travel in a command

  using Command = absl::Status (Trainer::*)(const Words&);

  // What this rank gives to `step`.
  Tensor Given(int64_t step, int64_t elements) {
    return FromHost<float>(world_, Parts(step, world_.rank(), elements), {elements});
  }

  absl::Status ForEachStep(
      const Words& words, const std::function<absl::Status(int64_t step, int64_t elements)>& take) {
    const int64_t say = Number(words, 4);
    int64_t done = 0;
    for (; done < Number(words, 1); ++done) {
      if (done == say) Say(absl::StrCat("at ", done));
      CHORUS_RETURN_IF_ERROR(take(Number(words, 3) + done, Number(words, 2)));
    }
    Tell("done=", done, " epoch=", world_.epoch());
    return absl::OkStatus();
  }

  Tensor OperandOf(const Words& words) {
    const int64_t elements = Number(words, 3);
    return Full(world_, Text(words, 2) == "f64" ? DType::kF64 : DType::kF32, {elements}, 1);
  }

  Tensor Called(const Words& words, const Tensor& x) {
    const std::string& op = Text(words, 1);
    const int peer = static_cast<int>(Number(words, 4, 0));
    if (op == "all_reduce") return AllReduce(x, world_);
    if (op == "broadcast") return Broadcast(x, peer, world_);
    if (op == "reduce") return Reduce(x, peer, world_);
    if (op == "all_gather") return AllGather(x, world_)[0];
    if (op == "reduce_scatter") {
      return ReduceScatter(std::vector<Tensor>(static_cast<size_t>(world_.size()), x), world_);
    }
    if (op == "send") return Send(x, peer, world_);
    if (op == "recv") return Recv(x.dtype(), x.shape(), peer, world_);
    return Barrier(world_);
  }

  static const std::map<std::string, Command>& Commands() {
    static const auto* const commands = new std::map<std::string, Command>{
        {"open", &Trainer::Open},
        {"join", &Trainer::Join},
        {"step", &Trainer::Step},
        {"steps", &Trainer::Steps},
        {"call", &Trainer::Call},
        {"compiled-steps", &Trainer::CompiledSteps},
        {"compiled-call", &Trainer::CompiledCall},
        {"circle", &Trainer::Circle},
        {"vote", &Trainer::Vote},
        {"vote-blocked", &Trainer::VoteBlocked},
        {"outcome", &Trainer::Outcome},
        {"train", &Trainer::Train},
        {"flood", &Trainer::Flood},
        {"flooded", &Trainer::Flooded},
        {"cancel", &Trainer::Cancel},
        {"leave", &Trainer::Leave},
        {"reform", &Trainer::Reform},
        {"close", &Trainer::Close},
        {"trap", &Trainer::SetTrap},
        {"fork", &Trainer::Fork},
        {"mapped", &Trainer::Mapped},
        {"hog", &Trainer::Hog},
        {"drop", &Trainer::Drop},
        {"pair", &Trainer::StartPair},
        {"pair-steps", &Trainer::WaitPair},
        {"pair-stop", &Trainer::StopPair},
        {"hostile", &Trainer::Hostile},
        {"leased", &Trainer::Hostile},
        {"hostile-join", &Trainer::HostileJoin},
        {"attack", &Trainer::Attack},
        {"prepare", &Trainer::Prepare},
        {"reduce", &Trainer::ReducePrepared},
    };
    return *commands;
  }

  template <typename... Args>
  void Tell(const Args&... args) {
    absl::StrAppend(&answer_, " ", args...);
  }

  // open ADDRESS [ring|stream|unary]
  absl::Status Open(const Words& words) {
    SessionOptions options;
    options.address = Text(words, 1);
    if (Text(words, 2) == "stream") options.transport = Transport::kStream;
    if (Text(words, 2) == "unary") options.transport = Transport::kUnary;
    CHORUS_ASSIGN_OR_RETURN(session_, Session::Open(options));
    return absl::OkStatus();
  }

  // join NAME RANK SIZE [AGREE_SECONDS] (0: the daemon's)
  absl::Status Join(const Words& words) {
    WorldOptions options;
    options.name = Text(words, 1);
    options.rank = static_cast<int>(Number(words, 2));
    options.size = static_cast<int>(Number(words, 3));
    options.agree_timeout = std::chrono::seconds(Number(words, 4, 0));
    CHORUS_ASSIGN_OR_RETURN(world_, session_.Join(options));
    return absl::OkStatus();
  }

  // step NUMBER: the ranks' calls count from 0 again, whatever each of them has left out.
  absl::Status Step(const Words& words) { return world_.Step(Number(words, 1)); }

  // steps COUNT ELEMENTS FIRST [SAY]: all_reduces in turn; after SAY of them "at N".
  absl::Status Steps(const Words& words) {
    const NoGrad no_grad;
    return ForEachStep(words, [this](int64_t step, int64_t elements) {
      CHORUS_ASSIGN_OR_RETURN(const std::vector<float> got,
                              AllReduce(Given(step, elements), world_).Read<float>());
      return CheckSum(step, world_.size(), elements, got);
    });
  }

  // compiled-steps, as steps: each is a whole graph with its Backward. The loss is the square of
  // the weighted sum over ranks; the gradient of each rank's weights, and so what their sum is, has
  // one right value.
  absl::Status CompiledSteps(const Words& words) {
    constexpr int64_t kWeights = 3;
    const Compiled function = Compile([this](const std::vector<Tensor>& in) {
      const Tensor sum = AllReduce(in[0] * in[1], world_);
      if (!Backward(Sum(sum * sum)).ok()) return std::vector<Tensor>{Tensor(), Tensor()};
      return std::vector<Tensor>{sum, AllReduce(in[0].grad(), world_)};
    });
    return ForEachStep(words, [this, &function](int64_t step, int64_t elements) -> absl::Status {
      const float weight = static_cast<float>(1 + step % kWeights);
      Tensor weights = Full(world_, DType::kF32, {elements}, weight);
      CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> out,
                              function.Run({weights.RequireGrad(), Given(step, elements)}));
      if (out.size() != 2) {
        return absl::DataLossError(
            absl::StrCat("step ", step, ": expected 2 outputs, got ", out.size()));
      }
      for (size_t i = 0; i < out.size(); ++i) {
        CHORUS_ASSIGN_OR_RETURN(const std::vector<float> got, out[i].Read<float>());
        CHORUS_RETURN_IF_ERROR(CheckSize(step, elements, got));
        const auto size = static_cast<float>(world_.size());
        for (size_t k = 0; k < got.size(); ++k) {
          float sum = 0;
          for (int r = 0; r < world_.size(); ++r) sum += Part(step, r, static_cast<int64_t>(k));
          const float expected = i == 0 ? weight * sum : 2 * size * weight * sum * sum;
          if (got[k] == expected) continue;
          return absl::DataLossError(absl::StrCat("step ", step, ", output ", i, ", element ", k,
                                                  ": expected ", expected, ", got ", got[k]));
        }
      }
      return absl::OkStatus();
    });
  }

  // train STEPS ELEMENTS COMMON [SAY]: as many steps of descent with momentum, from where the last
  // ones ended; four are under way, each given the state of the one before, of which all ranks have
  // one copy when COMMON is 1. After SAY of them "at N". Ends, also when it fails, with how many
  // steps the last whole state is worth, and with a hash of its bits.
  absl::Status Train(const Words& words) {
    constexpr size_t kUnderWay = 4;
    const NoGrad no_grad;
    const int64_t elements = Number(words, 2);
    if (states_.empty()) {
      states_.emplace_back();
      for (const double value : {1.0, 0.0}) {
        const Tensor start = Full(world_, DType::kF32, {elements}, value);
        states_.back().push_back(Number(words, 3) == 1 ? Broadcast(start, 0, world_) : start);
      }
      // A step can only fall back on a state that is there, on all ranks.
      for (const Tensor& tensor : states_.back()) CHORUS_RETURN_IF_ERROR(tensor.Wait());
      CHORUS_RETURN_IF_ERROR(Barrier(world_).Wait());
    }
    CompileOptions options;
    options.donate = {0, 1};
    const Compiled step = Compile(
        [this](const std::vector<Tensor>& in) {
          const Tensor gradient = AllReduce(in[0] * in[2], world_);
          const Tensor momentum = in[1] * 0.5 + gradient;
          return std::vector<Tensor>{in[0] - momentum * in[3], momentum, Sum(gradient)};
        },
        options);
    absl::Status status;
    std::deque<Tensor> pending;
    for (int64_t i = 0; i < Number(words, 1) && status.ok(); ++i) {
      if (i == Number(words, 4)) Say(absl::StrCat("at ", i));
      std::vector<Tensor> in = states_.back();
      in.push_back(Given(trained_, elements));
      in.push_back(Scalar<float>(world_, 0.001f));
      CHORUS_ASSIGN_OR_RETURN(std::vector<Tensor> out, step.Run(in));
      pending.push_back(out.back());
      out.pop_back();
      states_.push_back(std::move(out));
      ++trained_;
      if (states_.size() > 2 * kUnderWay) states_.pop_front();
      if (pending.size() < kUnderWay) continue;
      status = pending.front().Wait();
      pending.pop_front();
    }
    if (status.ok()) status = states_.back()[0].Wait();
    while (!states_.empty() && !(states_.back()[0].Wait().ok() && states_.back()[1].Wait().ok())) {
      states_.pop_back();
      --trained_;
    }
    if (states_.empty()) return absl::DataLossError("no state is left");
    uint64_t hash = 14695981039346656037u;
    for (const Tensor& tensor : states_.back()) {
      CHORUS_ASSIGN_OR_RETURN(const std::vector<float> bits, tensor.Read<float>());
      hash = HashOf(bits, hash);
    }
    Tell("trained=", trained_, " hash=", hash);
    return status;
  }

  // call OP DTYPE ELEMENTS PEER: one collective as this rank sees it.
  absl::Status Call(const Words& words) {
    const NoGrad no_grad;
    return Called(words, OperandOf(words)).Wait();
  }

  // compiled-call, as call: in a graph that has another collective and its gradient in front.
  absl::Status CompiledCall(const Words& words) {
    const Compiled function = Compile([this, &words](const std::vector<Tensor>& in) {
      const Tensor sum = AllReduce(in[0], world_);
      if (!Backward(sum * sum).ok()) return std::vector<Tensor>{Tensor()};
      return std::vector<Tensor>{in[0].grad(), Called(words, in[1])};
    });
    Tensor scalar = Scalar<float>(world_, 1);
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> out,
                            function.Run({scalar.RequireGrad(), OperandOf(words)}));
    return out[0].Wait();
  }

  // circle OTHER FIRST: two groups of this rank and another, one after the other; the two ranks use
  // them in different orders.
  absl::Status Circle(const Words& words) {
    const NoGrad no_grad;
    const int rank = world_.rank();
    const int other = static_cast<int>(Number(words, 1));
    const std::vector<int> pair = {std::min(rank, other), std::max(rank, other)};
    CHORUS_ASSIGN_OR_RETURN(const Group up, world_.NewGroup(pair));
    CHORUS_ASSIGN_OR_RETURN(const Group down, world_.NewGroup({pair[1], pair[0]}));
    const bool up_first = rank < other;
    const Tensor first = AllReduce(Scalar<float>(world_, 1), up_first ? up : down);
    return AllReduce(first, up_first ? down : up).Wait();
  }

  // vote: an all_reduce that is not waited for. vote-blocked OTHER FROM: one with OTHER alone, of
  // what rank FROM is to send; -1: of a number of its own. outcome [MILLISECONDS]: waits for the
  // last one, at most so long.
  absl::Status Vote(const Words&) {
    const NoGrad no_grad;
    voted_ = AllReduce(Scalar<float>(world_, 1), world_);
    return voted_.status();
  }
  absl::Status VoteBlocked(const Words& words) {
    const NoGrad no_grad;
    const int other = static_cast<int>(Number(words, 1));
    const int from = static_cast<int>(Number(words, 2));
    CHORUS_ASSIGN_OR_RETURN(const Group pair, world_.NewGroup({std::min(world_.rank(), other),
                                                               std::max(world_.rank(), other)}));
    voted_ =
        AllReduce(from < 0 ? Scalar<float>(world_, 1) : Recv(DType::kF32, {}, from, world_), pair);
    return voted_.status();
  }
  absl::Status Outcome(const Words& words) {
    const Tensor voted = std::exchange(voted_, Tensor());
    const int64_t within = Number(words, 1);
    return within < 0 ? voted.Wait() : voted.Wait(std::chrono::milliseconds(within));
  }

  // flood COUNT: sends so many commands that wait for nobody, and waits for none: tensors that are
  // too large to be part of the commands that use them.
  absl::Status Flood(const Words& words) {
    for (int64_t i = 0; i < Number(words, 1); ++i) {
      const auto step = static_cast<int64_t>(flood_.size());
      flood_.push_back(FromHost<float>(world_, Parts(step, world_.rank(), kFlood), {kFlood}));
      CHORUS_RETURN_IF_ERROR(flood_.back().status());
    }
    return absl::OkStatus();
  }

  // flooded: what came of it, checked.
  absl::Status Flooded(const Words&) {
    std::vector<Tensor> flood;
    flood.swap(flood_);
    for (size_t i = 0; i < flood.size(); ++i) {
      CHORUS_ASSIGN_OR_RETURN(const std::vector<float> got, flood[i].Read<float>());
      if (got == Parts(static_cast<int64_t>(i), world_.rank(), kFlood)) continue;
      return absl::DataLossError(absl::StrCat("tensor ", i, " is another"));
    }
    Tell("done=", flood.size());
    return absl::OkStatus();
  }

  absl::Status Cancel(const Words& words) { return world_.Abort(Text(words, 1)); }
  absl::Status Leave(const Words&) { return world_.Leave(); }

  absl::Status Reform(const Words&) {
    CHORUS_ASSIGN_OR_RETURN(const World::Reformed reformed, world_.Reform());
    Tell("rank=", reformed.rank, " size=", reformed.size, " epoch=", reformed.epoch,
         " survivors=", reformed.survivors.size());
    return absl::OkStatus();
  }

  absl::Status Close(const Words&) {
    flood_.clear();
    hog_.clear();
    states_.clear();
    trained_ = 0;
    prepared_ = voted_ = Tensor();
    // Not of a session that is closed already, or lost.
    const absl::Status status = session_.is_open() ? session_.Close() : absl::OkStatus();
    world_ = World();
    session_ = Session();
    return status;
  }

  // trap FAILPOINT kill|say COUNT
  absl::Status SetTrap(const Words& words) {
    SetFailpointHook(nullptr);
    trap_name = Text(words, 1);
    trap_signal = Text(words, 2) == "kill" ? SIGKILL : 0;
    trap_count.store(static_cast<int>(Number(words, 3, 1)));
    SetFailpointHook(&Trap);
    return absl::OkStatus();
  }

  // fork: a child that holds every descriptor of this process, and stays until the input ends.
  absl::Status Fork(const Words&) {
    int answer[2];
    if (pipe(answer) != 0) return absl::InternalError("pipe");
    const pid_t child = fork();
    if (child < 0) return absl::InternalError("fork");
    if (child == 0) {
      // It may get nothing but kForked from what was made before the fork.
      const absl::Status status = AllReduce(Scalar<float>(world_, 1), world_).Wait();
      const auto reason = static_cast<uint16_t>(ErrorOf(status).reason);
      if (write(answer[1], &reason, sizeof(reason)) != sizeof(reason)) _exit(3);
      // Reading would take the parent's commands away.
      pollfd input{in_fd, 0, 0};
      while (poll(&input, 1, -1) <= 0) {
      }
      _exit(0);
    }
    close(answer[1]);
    uint16_t reason = 0;
    const bool read_all = read(answer[0], &reason, sizeof(reason)) == sizeof(reason);
    close(answer[0]);
    if (!read_all) return absl::InternalError("the child said nothing");
    Tell("child=", child, " child_reason=", ReasonName(static_cast<Reason>(reason)));
    return absl::OkStatus();
  }

  // mapped COUNT ELEMENTS SCRIBBLE SEED: all_reduces of staging memory, which another thread writes
  // to all the time when SCRIBBLE is 1. What came out, as a hash.
  absl::Status Mapped(const Words& words) {
    const NoGrad no_grad;
    const int64_t elements = Number(words, 2);
    CHORUS_ASSIGN_OR_RETURN(MappedTensor<float> mapped, Map<float>(world_, {elements}));
    for (int64_t i = 0; i < elements; ++i) mapped[i] = Part(0, world_.rank(), i);
    std::atomic<bool> stop{false};
    std::thread scribbler;
    if (Number(words, 3) == 1) {
      scribbler = std::thread([&stop, &mapped, elements, seed = Number(words, 4)] {
        std::minstd_rand random(static_cast<uint32_t>(seed) + 1);
        // Any bits, NaNs too, wherever they fall.
        auto* const bits = reinterpret_cast<volatile uint32_t*>(mapped.data());
        while (!stop.load(std::memory_order_relaxed)) {
          bits[random() % static_cast<uint64_t>(elements)] = static_cast<uint32_t>(random()) * 3;
        }
      });
    }
    uint64_t hash = 14695981039346656037u;
    absl::Status status;
    for (int64_t i = 0; i < Number(words, 1) && status.ok(); ++i) {
      const absl::StatusOr<std::vector<float>> got = AllReduce(mapped, world_).Read<float>();
      status = got.status();
      if (got.ok()) status = CheckSize(i, elements, *got);
      if (status.ok()) hash = HashOf(*got, hash);
    }
    stop.store(true);
    if (scribbler.joinable()) scribbler.join();
    if (status.ok()) Tell("hash=", hash);
    return status;
  }

  // hog BYTES: that much of the daemon's memory.
  absl::Status Hog(const Words& words) {
    const int64_t elements = Number(words, 1) / static_cast<int64_t>(sizeof(float));
    const Tensor hog = Full(world_, DType::kF32, {elements}, 1);
    CHORUS_RETURN_IF_ERROR(hog.Wait());
    hog_.push_back(hog);
    return absl::OkStatus();
  }
  // prepare ELEMENTS: an operand in the daemon's memory; reduce: all_reduces it
  absl::Status Prepare(const Words& words) {
    const int64_t elements = Number(words, 1);
    prepared_ = FromHost<float>(world_, Parts(0, world_.rank(), elements), {elements});
    return prepared_.Wait();
  }
  absl::Status ReducePrepared(const Words&) {
    const NoGrad no_grad;
    CHORUS_ASSIGN_OR_RETURN(const std::vector<float> got,
                            AllReduce(prepared_, world_).Read<float>());
    CHORUS_RETURN_IF_ERROR(CheckSum(0, world_.size(), prepared_.num_elements(), got));
    Tell("epoch=", world_.epoch());
    return absl::OkStatus();
  }
  absl::Status Drop(const Words&) {
    hog_.clear();
    // What dropped handles leave is sent at the latest with the next op that is sent.
    return Full(world_, DType::kF32, {1}, 1).Wait();
  }

  // pair ADDRESS NAME [computes]; pair-steps COUNT: until so many more are done; pair-stop
  absl::Status StartPair(const Words& words) {
    SessionOptions options;
    options.address = Text(words, 1);
    pair_ = std::make_unique<Pair>(options, Text(words, 2), Text(words, 3) == "computes");
    return absl::OkStatus();
  }
  absl::Status WaitPair(const Words& words) {
    return pair_->AwaitSteps(Number(words, 1)) ? absl::OkStatus() : pair_->Stop();
  }
  absl::Status StopPair(const Words&) {
    const absl::Status status = pair_->Stop();
    Tell("done=", pair_->steps());
    return status;
  }

  // hostile ADDRESS, leased ADDRESS (which is not attached); hostile-join as join; attack KIND
  // SEED
  absl::Status Hostile(const Words& words) {
    CHORUS_ASSIGN_OR_RETURN(hostile_,
                            HostileClient::Open(Text(words, 1), Text(words, 0) == "hostile"));
    return absl::OkStatus();
  }
  absl::Status HostileJoin(const Words& words) {
    return hostile_->Join(Text(words, 1), static_cast<int>(Number(words, 2)),
                          static_cast<int>(Number(words, 3)), Number(words, 4, 0));
  }
  absl::Status Attack(const Words& words) {
    CHORUS_ASSIGN_OR_RETURN(
        const std::string what,
        hostile_->Attack(Text(words, 1), static_cast<uint64_t>(Number(words, 2))));
    Tell(what);
    return absl::OkStatus();
  }

 public:
  int in_fd = STDIN_FILENO;

 private:
  std::string answer_;
  Session session_;
  World world_;
  std::vector<Tensor> flood_;
  std::vector<Tensor> hog_;
  std::deque<std::vector<Tensor>> states_;  // of the last steps
  int64_t trained_ = 0;                     // steps that the last of them is worth
  Tensor prepared_;
  Tensor voted_;
  std::unique_ptr<Pair> pair_;
  std::unique_ptr<HostileClient> hostile_;
};

int Main(int argc, char** argv) {
  if (argc != 3 || !absl::SimpleAtoi(argv[2], &out_fd)) return 2;
  signal(SIGPIPE, SIG_IGN);
  Trainer trainer;
  if (!absl::SimpleAtoi(argv[1], &trainer.in_fd)) return 2;
  std::string pending;
  for (;;) {
    const size_t end = pending.find('\n');
    if (end == std::string::npos) {
      char bytes[512];
      const ssize_t size = read(trainer.in_fd, bytes, sizeof(bytes));
      if (size <= 0) return 0;
      pending.append(bytes, static_cast<size_t>(size));
      continue;
    }
    const Words words = absl::StrSplit(pending.substr(0, end), ' ', absl::SkipEmpty());
    pending.erase(0, end + 1);
    if (!words.empty()) Say(trainer.Obey(words));
  }
}

}  // namespace
}  // namespace fault
}  // namespace chorus

int main(int argc, char** argv) { return chorus::fault::Main(argc, argv); }
