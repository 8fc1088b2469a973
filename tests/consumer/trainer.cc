// A trainer of somebody else's: least squares by data-parallel descent, through the SDK alone.
//
// RANK, WORLD_SIZE and CHORUS_ADDRESS come from the environment. Prints the fitted line.
#include <cstdio>
#include <string>
#include <vector>

#include "chorus/chorus.h"

namespace {

int Fail(const std::string& what, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", what.c_str(), std::string(status.message()).c_str());
  return 1;
}

// slope and offset of y = 3 x - 1 from this rank's points.
int Train() {
  const absl::StatusOr<chorus::Session> session = chorus::Session::Open();
  if (!session.ok()) return Fail("open", session.status());
  const absl::StatusOr<chorus::World> world = session->Join();
  if (!world.ok()) return Fail("join", world.status());

  const std::vector<double> xs = {1.0 * world->rank(), 1.0 * world->rank() + 0.5};
  std::vector<double> ys;
  for (const double x : xs) ys.push_back(3 * x - 1);
  const chorus::Tensor x = chorus::FromHost(*world, xs, {2});
  const chorus::Tensor y = chorus::FromHost(*world, ys, {2});

  chorus::Tensor slope = chorus::Scalar<double>(*world, 0).RequireGrad();
  chorus::Tensor offset = chorus::Scalar<double>(*world, 0).RequireGrad();
  for (int step = 0; step < 400; ++step) {
    const chorus::Tensor error = slope * x + offset - y;
    const absl::Status status = chorus::Backward(chorus::Sum(error * error));
    if (!status.ok()) return Fail("backward", status);
    const chorus::NoGrad no_grad;
    const double rate = 0.1 / world->size();
    slope = slope - rate * chorus::AllReduce(slope.grad(), *world);
    offset = offset - rate * chorus::AllReduce(offset.grad(), *world);
    slope.RequireGrad();
    offset.RequireGrad();
  }
  const absl::StatusOr<double> a = slope.Item<double>();
  if (!a.ok()) return Fail("slope", a.status());
  const absl::StatusOr<double> b = offset.Item<double>();
  if (!b.ok()) return Fail("offset", b.status());
  // Nobody leaves before the last rank has its part.
  const absl::Status all = chorus::Barrier(*world).Wait();
  if (!all.ok()) return Fail("barrier", all);
  std::printf("rank %d: y = %.4f x %+.4f\n", world->rank(), *a, *b);
  return 0;
}

}  // namespace

int main() { return Train(); }
