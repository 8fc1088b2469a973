// Lesson 3: what goes wrong in a job, and how a trainer goes on.
//
// Needs three ranks or more. Rank 1 asks for something else, has a bad batch, comes late, then
// dies; each rank prints what it was told.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "chorus/chorus.h"

namespace {

using chorus::DType;
using chorus::Reason;
using chorus::Tensor;

// Whether `tensor` fails for that reason. Prints what it says.
bool Expect(const chorus::World& world, const char* what, const Tensor& tensor, Reason reason) {
  const absl::Status status = tensor.Wait();
  std::printf("rank %d: %s: %s\n", world.rank(), what, std::string(status.message()).c_str());
  std::fflush(stdout);
  return chorus::ErrorOf(status).reason == reason;
}

// Whether it is OK. Prints what is not.
bool Ok(const chorus::World& world, const char* what, const absl::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "rank %d: %s: %s\n", world.rank(), what, status.ToString().c_str());
  }
  return status.ok();
}

bool Works(const chorus::World& world) {
  const Tensor sum = chorus::AllReduce(chorus::Scalar<double>(world, 1), world);
  const absl::StatusOr<double> value = sum.Item<double>();
  return Ok(world, "the next call", value.status()) && *value == world.size();
}

// A turn of a loop, which is left at the first error. Rank 1's batch of step 2 is a value short.
absl::Status Turn(const chorus::World& world, int step) {
  CHORUS_RETURN_IF_ERROR(world.Step(step));
  const size_t values = step == 2 && world.rank() == 1 ? 1 : 2;
  const Tensor batch = chorus::FromHost(world, std::vector<double>(values, 1), {2});
  const Tensor sum = chorus::AllReduce(batch, world);
  CHORUS_RETURN_IF_ERROR(sum.Wait());
  CHORUS_ASSIGN_OR_RETURN(const double all,
                          chorus::AllReduce(chorus::Sum(sum), world).Item<double>());
  return all == 2 * world.size() * world.size() ? absl::OkStatus()
                                                : absl::InternalError("that is not the sum");
}

bool Run(const chorus::Session& session) {
  chorus::WorldOptions options;
  options.agree_timeout = std::chrono::seconds(2);  // how late a rank may be; 60 s unless set
  absl::StatusOr<chorus::World> joined = session.Join(options);
  if (!joined.ok()) {
    std::fprintf(stderr, "join: %s\n", joined.status().ToString().c_str());
    return false;
  }
  chorus::World& world = *joined;
  if (world.size() < 3) {
    std::fprintf(stderr, "expected three ranks or more\n");
    return false;
  }
  const chorus::NoGrad no_grad;
  const int rank = world.rank();

  // 1. Another shape on one rank. Everybody is told the same, with each rank's version and line,
  // before anything has run, and the next collective works.
  const Tensor wrong =
      chorus::AllReduce(chorus::Zeros(world, DType::kF32, {rank == 1 ? 3 : 2}), world);
  if (!Expect(world, "mismatch", wrong, Reason::kMismatch) || !Works(world)) return false;

  // 2. A call that one rank cannot make. It has its own error, the others are told that and whose
  // it is, and with the next step all are in line again, wherever they left the last one.
  for (int step = 1; step <= 3; ++step) {
    const absl::Status turn = Turn(world, step);
    if (step != 2) {
      if (!Ok(world, "turn", turn)) return false;
      continue;
    }
    std::printf("rank %d: step %d: %s\n", rank, step, std::string(turn.message()).c_str());
    if (chorus::ErrorOf(turn).reason != (rank == 1 ? Reason::kBadType : Reason::kPeerRefused))
      return false;
  }

  // 3. A rank that does not come. The others are told who it was; so is rank 1, as soon as it asks.
  if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(3));
  if (!Expect(world, "late", chorus::Barrier(world), Reason::kAgreeTimeout)) return false;
  if (!Works(world)) return false;

  // 4. A rank that dies. The others know at once; with `Reform` those left become a world again.
  if (rank == 1) {
    std::fflush(stdout);
    ::raise(SIGKILL);
  }
  if (!Expect(world, "dead", chorus::Barrier(world), Reason::kPeerDied)) return false;
  const absl::StatusOr<chorus::World::Reformed> reformed = world.Reform();
  if (!Ok(world, "reform", reformed.status())) return false;
  std::printf("rank %d: goes on as rank %d of %d\n", rank, reformed->rank, reformed->size);
  return Works(world) && Ok(world, "barrier", chorus::Barrier(world).Wait());
}

}  // namespace

int main() {
  absl::StatusOr<chorus::Session> session = chorus::Session::Open();
  if (!session.ok()) {
    std::fprintf(stderr, "open: %s\n", session.status().ToString().c_str());
    return 1;
  }
  return Run(*session) ? 0 : 1;
}
