#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/suites.h"
#include "benchmarks/timed_loop.h"
#include "chorus/chorus.h"
#include "chorus/functional/conv.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

constexpr int64_t kBatch = 16;
constexpr size_t kUnderWay = 4;

// Of square images and kernels, padded by half a kernel. Those of a network that are equal are
// measured once.
struct Conv {
  const char* network;
  int64_t in;
  int64_t size;
  int64_t out;
  int64_t kernel;
  int64_t stride;

  int64_t result() const { return (size + kernel / 2 * 2 - kernel) / stride + 1; }
  Shape x() const { return {kBatch, in, size, size}; }
  Shape weight() const { return {out, in, kernel, kernel}; }
  Shape y() const { return {kBatch, out, result(), result()}; }
};
constexpr const char* kLesson = "lesson 7";
constexpr const char* kResnet18 = "ResNet-18";
constexpr Conv kConvs[] = {{kLesson, 1, 28, 16, 3, 1},      {kLesson, 16, 28, 16, 3, 1},
                           {kLesson, 16, 28, 32, 3, 2},     {kLesson, 16, 28, 32, 1, 2},
                           {kLesson, 32, 14, 32, 3, 1},     {kLesson, 32, 14, 64, 3, 2},
                           {kLesson, 32, 14, 64, 1, 2},     {kLesson, 64, 7, 64, 3, 1},
                           {kResnet18, 3, 224, 64, 7, 2},   {kResnet18, 64, 56, 64, 3, 1},
                           {kResnet18, 64, 56, 128, 3, 2},  {kResnet18, 64, 56, 128, 1, 2},
                           {kResnet18, 128, 28, 128, 3, 1}, {kResnet18, 128, 28, 256, 3, 2},
                           {kResnet18, 128, 28, 256, 1, 2}, {kResnet18, 256, 14, 256, 3, 1},
                           {kResnet18, 256, 14, 512, 3, 2}, {kResnet18, 256, 14, 512, 1, 2},
                           {kResnet18, 512, 7, 512, 3, 1}};
// torch_rank.py numbers them too.
enum Pass { kForward, kGradientOfX, kGradientOfWeight };
constexpr Pass kPasses[] = {kForward, kGradientOfX, kGradientOfWeight};
constexpr const char* kPassNames[] = {"forward", "gradient of x", "gradient of weight"};

// Small whole numbers, so that sums are exact in any order.
float Value(int64_t i, int64_t salt) { return static_cast<float>((i * 7 + i / 5 + salt) % 5 - 2); }
std::vector<float> Values(const Shape& shape, int64_t salt) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = Value(i, salt);
  return values;
}
constexpr int64_t kSaltOfX = 0, kSaltOfWeight = 1, kSaltOfY = 2;

int64_t Index(const Shape& shape, int64_t a, int64_t b, int64_t c, int64_t d) {
  return ((a * shape[1] + b) * shape[2] + c) * shape[3] + d;
}

// Element `i` of what the pass gives, by plain loops: the sum over all products of the other two
// tensors that belong to it.
float Expected(const Conv& conv, Pass pass, int64_t i) {
  const Shape of = pass == kForward ? conv.y() : pass == kGradientOfX ? conv.x() : conv.weight();
  const int64_t at[] = {i / (of[1] * of[2] * of[3]), i / (of[2] * of[3]) % of[1], i / of[3] % of[2],
                        i % of[3]};
  double sum = 0;
  const auto add = [&](int64_t n, int64_t in, int64_t out, int64_t row, int64_t column, int64_t kh,
                       int64_t kw) {
    const int64_t y = row * conv.stride - conv.kernel / 2 + kh;
    const int64_t x = column * conv.stride - conv.kernel / 2 + kw;
    if (y < 0 || x < 0 || y >= conv.size || x >= conv.size) return;
    if (pass == kGradientOfX && (y != at[2] || x != at[3])) return;
    double product = 1;
    if (pass != kGradientOfX) product *= Value(Index(conv.x(), n, in, y, x), kSaltOfX);
    if (pass != kGradientOfWeight) {
      product *= Value(Index(conv.weight(), out, in, kh, kw), kSaltOfWeight);
    }
    if (pass != kForward) product *= Value(Index(conv.y(), n, out, row, column), kSaltOfY);
    sum += product;
  };
  const auto range = [](bool one, int64_t at, int64_t count) {
    return one ? std::pair<int64_t, int64_t>(at, at + 1) : std::pair<int64_t, int64_t>(0, count);
  };
  const auto images = range(pass != kGradientOfWeight, at[0], kBatch);
  const auto ins = range(pass != kForward, at[1], conv.in);
  const auto outs = range(pass != kGradientOfX, at[pass == kForward ? 1 : 0], conv.out);
  const auto rows = range(pass == kForward, at[2], conv.result());
  const auto columns = range(pass == kForward, at[3], conv.result());
  const auto taps_h = range(pass == kGradientOfWeight, at[2], conv.kernel);
  const auto taps_w = range(pass == kGradientOfWeight, at[3], conv.kernel);
  for (int64_t n = images.first; n < images.second; ++n) {
    for (int64_t in = ins.first; in < ins.second; ++in) {
      for (int64_t out = outs.first; out < outs.second; ++out) {
        for (int64_t row = rows.first; row < rows.second; ++row) {
          for (int64_t column = columns.first; column < columns.second; ++column) {
            for (int64_t kh = taps_h.first; kh < taps_h.second; ++kh) {
              for (int64_t kw = taps_w.first; kw < taps_w.second; ++kw) {
                add(n, in, out, row, column, kh, kw);
              }
            }
          }
        }
      }
    }
  }
  return static_cast<float>(sum);
}

// One convolution on a device of the daemon, of which each pass is a graph.
class Subject {
 public:
  Subject(const DeviceRef& device, const Conv& conv, Pass pass)
      : conv_(conv),
        pass_(pass),
        inputs_({FromHost(device, Values(conv.x(), kSaltOfX), conv.x()),
                 FromHost(device, Values(conv.weight(), kSaltOfWeight), conv.weight()),
                 FromHost(device, Values(conv.y(), kSaltOfY), conv.y())}) {
    Conv2dOptions options;
    options.stride = conv.stride;
    options.padding = conv.kernel / 2;
    compiled_ = Compile([options, pass](const std::vector<Tensor>& in) -> std::vector<Tensor> {
      if (pass == kForward) return {Conv2d(in[0], in[1], options)};
      Tensor x = in[0].Detach();
      Tensor weight = in[1].Detach();
      const Tensor& leaf = (pass == kGradientOfX ? x : weight).RequireGrad();
      BackwardOptions seeds;
      seeds.seeds = {in[2]};
      absl::StatusOr<std::vector<Tensor>> gradients =
          Grad({Conv2d(x, weight, options)}, {leaf}, seeds);
      if (!gradients.ok()) return {FromError(in[0].device(), gradients.status())};
      return *std::move(gradients);
    });
  }

  absl::StatusOr<std::vector<double>> Run(int64_t iterations) {
    Task task;
    task.iterations = iterations;
    task.warm_up = WarmUpFor(iterations);
    std::deque<Tensor> results;
    const auto drain = [&results](size_t under_way) -> absl::Status {
      while (results.size() > under_way) {
        CHORUS_RETURN_IF_ERROR(results.front().Wait());
        results.pop_front();
      }
      return absl::OkStatus();
    };
    Outcome outcome = TimedLoop(task, [&]() -> absl::Status {
      CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> result, compiled_.Run(inputs_));
      results.push_back(result[0]);
      return drain(kUnderWay);
    });
    CHORUS_RETURN_IF_ERROR(outcome.status);
    const Tensor last = results.back();
    CHORUS_RETURN_IF_ERROR(drain(0));
    // What was still under way belongs to the time.
    const double total = static_cast<double>(NowNanos() - outcome.start_ns);
    CHORUS_RETURN_IF_ERROR(Check(last));
    return std::vector<double>{total / static_cast<double>(iterations)};
  }

 private:
  absl::Status Check(const Tensor& result) {
    if (checked_) return absl::OkStatus();
    checked_ = true;
    CHORUS_ASSIGN_OR_RETURN(const std::vector<float> values, result.Read<float>());
    const auto count = static_cast<int64_t>(values.size());
    for (const int64_t i : {int64_t{0}, count / 3, count / 2, count - 1}) {
      const float expected = Expected(conv_, pass_, i);
      if (values[static_cast<size_t>(i)] != expected) {
        return absl::DataLossError(absl::StrCat(kPassNames[pass_], ", element ", i, ": expected ",
                                                expected, ", got ",
                                                values[static_cast<size_t>(i)]));
      }
    }
    return absl::OkStatus();
  }

  const Conv conv_;
  const Pass pass_;
  const std::vector<Tensor> inputs_;
  Compiled compiled_;
  bool checked_ = false;
};

}  // namespace

absl::Status RunConv(const Context& context) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> daemon, context.StartDaemon());
  SessionOptions open;
  open.address = daemon->address();
  CHORUS_ASSIGN_OR_RETURN(const Session session, Session::Open(open));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<TorchPeer> torch, context.StartTorch(1));
  double logarithms = 0;
  double least = INFINITY;
  int count = 0;
  for (const Conv& conv : kConvs) {
    // The least of each network.
    const bool small = &conv == &kConvs[0] || conv.size == 7;
    if (context.effort == Effort::kSmoke && !small) continue;
    for (const Pass pass : kPasses) {
      Subject subject(session, conv, pass);
      std::vector<Contender> contenders = {
          {"chorus", Role::kOurs, {{"one device", [&](int64_t n) { return subject.Run(n); }}}}};
      if (torch != nullptr) {
        Task task;
        task.op = "conv";
        task.number = pass;
        task.text = absl::StrCat(kBatch, ",", conv.in, ",", conv.size, ",", conv.out, ",",
                                 conv.kernel, ",", conv.stride);
        CHORUS_ASSIGN_OR_RETURN(Contender peer, torch->AsContender(task));
        // Nothing is exchanged: "c10d/Gloo 2.15.0" is only PyTorch here.
        peer.name = absl::StrCat("PyTorch", peer.name.substr(peer.name.find(' ')));
        contenders.push_back(std::move(peer));
      }
      CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                              MeasureInterleaved(contenders, context.Interleave()));
      if (torch != nullptr) {
        const double speed = measured[1].summary.p50 / measured[0].summary.p50;
        logarithms += std::log(speed);
        least = std::min(least, speed);
        ++count;
      }
      Case c;
      c.benchmark = "conv";
      c.what = absl::StrCat(conv.network, ", ", conv.in, "x", conv.size, "x", conv.size, " to ",
                            conv.out, ", ", conv.kernel, "x", conv.kernel, "/", conv.stride, ", ",
                            kPassNames[pass]);
      c.ranks = 1;
      context.report->Add(c, std::move(measured));
    }
    context.Show();
  }
  if (count == 0) return absl::OkStatus();
  Goal goal;
  goal.what = absl::StrCat("conv: geometric mean of ", count, " passes, speed over PyTorch's");
  goal.at_least = true;
  goal.limit = 0.95;
  goal.unit = "x";
  goal.value = std::exp(logarithms / count);
  context.report->AddGoal(goal);
  goal.what = "conv: the slowest of them, speed over PyTorch's";
  goal.limit = 0.8;
  goal.value = least;
  context.report->AddGoal(goal);
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
