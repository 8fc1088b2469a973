// Lesson 4: a whole step as one graph.
//
// Ranks fit a line to points of their own. A step (forward, loss, gradients, their sum, update) is
// a C++ function that is traced once; from then on a step is one small message to the daemon.
#include <cmath>
#include <cstdio>
#include <deque>
#include <vector>

#include "chorus/chorus.h"
#include "core/base/error.h"

namespace {

using chorus::Tensor;
using Tensors = std::vector<Tensor>;

// Inputs: slope and offset, x, y, learning rate. Results: the new slope and offset, the loss.
Tensors Step(const chorus::World& world, const Tensors& in) {
  const Tensor line = in[0].Detach().RequireGrad();
  const Tensor error = chorus::Slice(line, 0, 0, 1) * in[1] + chorus::Slice(line, 0, 1, 2) - in[2];
  const Tensor loss = chorus::Sum(error * error);
  const absl::StatusOr<Tensors> gradient = chorus::Grad({loss}, {line});
  if (!gradient.ok()) return {chorus::FromError(world, gradient.status())};
  return {in[0] - chorus::AllReduce((*gradient)[0], world) * in[3],
          chorus::AllReduce(loss.Detach(), world)};
}

absl::Status Run() {
  CHORUS_ASSIGN_OR_RETURN(const chorus::Session session, chorus::Session::Open());
  CHORUS_ASSIGN_OR_RETURN(const chorus::World world, session.Join());
  const int ranks = world.size();

  // This rank's points of y = 3 x - 1, all of them between -1 and 1.
  constexpr int kPoints = 32;
  std::vector<double> x, y;
  for (int i = 0; i < kPoints; ++i) {
    x.push_back(2.0 * (i * ranks + world.rank()) / (kPoints * ranks - 1) - 1);
    y.push_back(3 * x.back() - 1);
  }
  const Tensor xs = chorus::FromHost(world, x, {kPoints});
  const Tensor ys = chorus::FromHost(world, y, {kPoints});

  chorus::CompileOptions options;
  options.donate = {0};  // the new line may take the old one's memory
  const chorus::Compiled step =
      chorus::Compile([world](const Tensors& in) { return Step(world, in); }, options);
  Tensor line = chorus::Zeros(world, chorus::DType::kF64, {2});
  std::deque<Tensor> losses;
  double loss = 0;
  for (int i = 0; i < 200; ++i) {
    CHORUS_RETURN_IF_ERROR(world.Step(i + 1));
    // A number that changes is no other graph: it travels with the step.
    const double rate = 0.5 / (kPoints * ranks) / (1 + i / 100);
    CHORUS_ASSIGN_OR_RETURN(const Tensors results,
                            step.Run({line, xs, ys, chorus::Scalar<double>(world, rate)}));
    line = results[0];
    losses.push_back(results[1]);
    // Steps are asked for without waiting; this rank is at most eight of them ahead.
    if (losses.size() <= 8) continue;
    CHORUS_ASSIGN_OR_RETURN(loss, losses.front().Item<double>());
    losses.pop_front();
  }
  CHORUS_ASSIGN_OR_RETURN(const std::vector<double> fitted, line.Read<double>());
  std::printf("rank %d: y = %.3f x + %.3f, loss %.2g, traced %d time\n", world.rank(), fitted[0],
              fitted[1], loss, step.traces());
  if (std::abs(fitted[0] - 3) > 1e-3 || std::abs(fitted[1] + 1) > 1e-3 || step.traces() != 1) {
    return absl::InternalError("that is not the line");
  }
  return chorus::Barrier(world).Wait();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
