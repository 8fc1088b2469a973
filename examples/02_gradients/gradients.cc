// Lesson 2: gradients through collectives, where the original ones are wrong.
//
// Needs two ranks or more. Each rank prints what it got, and exits non-zero where that is not what
// mathematics says.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "chorus/chorus.h"

namespace {

using chorus::Tensor;

// Whether it is OK. Prints what is not.
bool Ok(const chorus::World& world, const char* what, const absl::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "rank %d: %s: %s\n", world.rank(), what, status.ToString().c_str());
  }
  return status.ok();
}

// Prints a line, and tells whether the tensor's values are those.
bool Check(const chorus::World& world, const char* what, const Tensor& tensor,
           const std::vector<double>& want) {
  const absl::StatusOr<std::vector<double>> got = tensor.Read<double>();
  if (!Ok(world, what, got.status())) return false;
  bool equal = got->size() == want.size();
  std::string text;
  for (size_t i = 0; i < got->size(); ++i) {
    equal = equal && std::abs((*got)[i] - want[i]) <= 1e-12 * std::max(1.0, std::abs(want[i]));
    text += (i > 0 ? ", " : "") + std::to_string((*got)[i]);
  }
  std::printf("rank %d: %s (%s)%s\n", world.rank(), what, text.c_str(), equal ? "" : " WRONG");
  return equal;
}

// MAX: the gradient goes to the ranks that hold the maximum, and is split evenly where several do.
bool Maximum(const chorus::World& world) {
  const double rank = world.rank();
  const double ranks = world.size();
  // Element 0 is largest on the last rank; of element 1 all ranks have the same.
  Tensor x = chorus::FromHost<double>(world, {rank, 5}, {2}).RequireGrad();
  const Tensor y = chorus::AllReduce(x, world, chorus::Reduction::kMax);
  if (!Ok(world, "backward of max", chorus::Backward(chorus::Sum(y)))) return false;
  const bool holds = world.rank() == world.size() - 1;
  // Every rank's loss counts: `ranks` of them look at each element.
  return Check(world, "gradient of max", x.grad(), {holds ? ranks : 0.0, 1});
}

// PRODUCT: each factor's gradient is the product of the others, also where one of them is 0; and
// the gradient of the gradient is not 0 between two zeros.
bool Product(const chorus::World& world) {
  // Rank 0 and rank 1 have a 0 in element 1; element 0 has no zeros.
  const int rank = world.rank();
  Tensor x = chorus::FromHost<double>(world, {2, rank < 2 ? 0.0 : 3.0}, {2}).RequireGrad();
  const Tensor y = chorus::AllReduce(x, world, chorus::Reduction::kProduct);
  const absl::StatusOr<std::vector<Tensor>> first =
      chorus::Grad({chorus::Sum(y)}, {x}, {{}, false, /*create_graph=*/true});
  if (!Ok(world, "gradient of product", first.status())) return false;
  const double ranks = world.size();
  if (!Check(world, "gradient of product", (*first)[0], {ranks * std::pow(2, ranks - 1), 0})) {
    return false;
  }
  // S = sum over ranks r of W prod_{k != r} x_k, so dS/dx_r = W sum_{s != r} prod_{k != r, s} x_k.
  if (!Ok(world, "second backward of product", chorus::Backward(chorus::Sum((*first)[0])))) {
    return false;
  }
  const double others = std::pow(3, std::max(0.0, ranks - 2));
  return Check(world, "second gradient of product", x.grad(),
               {ranks * (ranks - 1) * std::pow(2, ranks - 2), rank < 2 ? ranks * others : 0.0});
}

// A rank that does not take part in a gradient counts as zeros; nobody waits for it.
bool Absent(const chorus::World& world) {
  Tensor x = chorus::FromHost<double>(world, {1}, {1}).RequireGrad();
  const Tensor y = chorus::AllReduce(x, world);
  if (world.rank() == 0) return Check(world, "takes no part", y.Detach(), {1.0 * world.size()});
  if (!Ok(world, "backward without rank 0", chorus::Backward(chorus::Sum(y)))) return false;
  return Check(world, "gradient without rank 0", x.grad(), {world.size() - 1.0});
}

}  // namespace

int main() {
  absl::StatusOr<chorus::Session> session = chorus::Session::Open();
  if (!session.ok()) {
    std::fprintf(stderr, "open: %s\n", session.status().ToString().c_str());
    return 1;
  }
  absl::StatusOr<chorus::World> world = session->Join();
  if (!world.ok()) {
    std::fprintf(stderr, "join: %s\n", world.status().ToString().c_str());
    return 1;
  }
  if (world->size() < 2) {
    std::fprintf(stderr, "expected two ranks or more\n");
    return 1;
  }
  const bool right = Maximum(*world) && Product(*world) && Absent(*world);
  // Nobody leaves while others are still at work.
  return right && Ok(*world, "barrier", chorus::Barrier(*world).Wait()) ? 0 : 1;
}
