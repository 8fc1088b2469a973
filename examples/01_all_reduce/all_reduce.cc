// Lesson 1: one rank of a world that sums, differentiates, and is told what it did wrong.
//
// Start as many of these as the world has ranks, with RANK and WORLD_SIZE in the environment (as
// launchers set them) and CHORUS_ADDRESS naming the daemon. Each prints what it saw, line by line,
// and exits non-zero when a number is not what it must be.
#include <cmath>
#include <cstdio>
#include <vector>

#include "chorus/chorus.h"

namespace {

using chorus::Tensor;

int Fail(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  return 1;
}

bool Equal(const std::vector<double>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) return false;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::abs(got[i] - want[i]) > 1e-9) return false;
  }
  return true;
}

}  // namespace

int main() {
  absl::StatusOr<chorus::Session> session = chorus::Session::Open();
  if (!session.ok()) return Fail("open", session.status());
  absl::StatusOr<chorus::World> joined = session->Join();
  if (!joined.ok()) return Fail("join", joined.status());
  chorus::World& world = *joined;
  const double rank = world.rank();
  const double size = world.size();

  // Rank r holds x = (1, 2) + r. Y = sum over ranks of x.
  Tensor x = chorus::FromHost<double>(world, {1 + rank, 2 + rank}, {2});
  x.RequireGrad();
  const Tensor y = chorus::AllReduce(x, world);
  const double ranks_sum = size * (size - 1) / 2;
  const std::vector<double> want = {size + ranks_sum, 2 * size + ranks_sum};
  const absl::StatusOr<std::vector<double>> sum = y.Read<double>();
  if (!sum.ok()) return Fail("all_reduce", sum.status());
  if (!Equal(*sum, want)) {
    return Fail("all_reduce", absl::InternalError("the sum is wrong"));
  }
  std::printf("rank %d: all_reduce=ok (%g, %g)\n", world.rank(), (*sum)[0], (*sum)[1]);

  // Rank r's loss is sum(y^3). What is differentiated is the sum of all ranks' losses, so
  // dL/dx = sum over ranks of 3 y^2 = 3 W y^2, the same on every rank.
  const absl::StatusOr<std::vector<Tensor>> gradient =
      chorus::Grad({chorus::Sum(y * y * y)}, {x}, {{}, false, /*create_graph=*/true});
  if (!gradient.ok()) return Fail("gradient", gradient.status());
  const absl::StatusOr<std::vector<double>> first = (*gradient)[0].Read<double>();
  if (!first.ok()) return Fail("gradient", first.status());
  if (!Equal(*first, {3 * size * want[0] * want[0], 3 * size * want[1] * want[1]})) {
    return Fail("gradient", absl::InternalError("the gradient is wrong"));
  }

  // Differentiated once more: S = sum over ranks of sum(3 W y^2), and every y depends on every x:
  // dS/dx = W * 6 W y.
  absl::Status backward = chorus::Backward(chorus::Sum((*gradient)[0]));
  if (!backward.ok()) return Fail("second gradient", backward);
  const absl::StatusOr<std::vector<double>> second = x.grad().Read<double>();
  if (!second.ok()) return Fail("second gradient", second.status());
  if (!Equal(*second, {6 * size * size * want[0], 6 * size * size * want[1]})) {
    return Fail("second gradient", absl::InternalError("the second gradient is wrong"));
  }
  std::printf("rank %d: gradient=ok (%g, %g), second (%g, %g)\n", world.rank(), (*first)[0],
              (*first)[1], (*second)[0], (*second)[1]);

  // Rank 0 brings one element more: a mistake. Nobody hangs; every rank is told the same.
  if (world.size() > 1) {
    const chorus::NoGrad no_grad;
    const int64_t elements = world.rank() == 0 ? 3 : 2;
    const Tensor wrong =
        chorus::AllReduce(chorus::Zeros(world, chorus::DType::kF64, {elements}), world);
    const absl::Status status = wrong.Wait();
    const chorus::Error error = chorus::ErrorOf(status);
    if (error.reason != chorus::Reason::kMismatch) return Fail("expected a mismatch", status);
    std::printf("rank %d: mismatch=reported %s\n", world.rank(), error.message.c_str());

    // And goes on: the next epoch is open.
    const absl::Status after = chorus::Barrier(world).Wait();
    if (!after.ok()) return Fail("barrier after the mismatch", after);
  }
  return 0;
}
