// A client to be killed: ring_kill_test starts it with CHORUS_FAILPOINT in its environment.
//
//   ring_victim MEMORY_FD DOORBELL_FD EVENT_FD fill    submits frames until the ring is full, and
//   on ring_victim MEMORY_FD DOORBELL_FD EVENT_FD wait    submits one and waits for its outcome
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "core/transport/completion.h"
#include "core/transport/doorbell.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"
#include "core/transport/test_frame.h"

namespace chorus {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

absl::Status Main(int memory_fd, int doorbell_fd, int event_fd, bool fill) {
  const absl::Time deadline = SteadyNow() + kPatience;
  CHORUS_ASSIGN_OR_RETURN(const auto memory, MapSessionMemory(memory_fd));
  CHORUS_ASSIGN_OR_RETURN(const auto doorbell, DoorbellView::Map(doorbell_fd));
  WaitOptions options;
  options.look_around = absl::Milliseconds(1);
  Submitter submitter(memory.get(), doorbell.get(), UniqueFd(event_fd), options);
  for (int64_t sequence = 1;; ++sequence) {
    CHORUS_RETURN_IF_ERROR(submitter.Submit(MakeTestFrame(sequence, 1000), kPatience));
    if (!fill) break;
  }
  CompletionWaiter waiter(memory.get(), options);
  return waiter.WaitForRun(Sequence(1), deadline).status();
}

}  // namespace
}  // namespace chorus

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const absl::Status status = chorus::Main(std::atoi(argv[1]), std::atoi(argv[2]),
                                           std::atoi(argv[3]), std::strcmp(argv[4], "fill") == 0);
  std::fprintf(stderr, "not killed: %s\n", status.ToString().c_str());
  return 1;
}
