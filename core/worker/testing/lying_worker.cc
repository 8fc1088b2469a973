// A worker that speaks the protocol and lies, for tests: lying_worker LIE DEVICES. It has its
// devices, and answers the first message that the lie is of with that, again and again.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "absl/types/variant.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/runtime/messages.h"
#include "core/worker/channel.h"
#include "core/worker/protocol.h"
#include "core/worker/worker_process.h"

namespace chorus::worker {
namespace {

class Liar {
 public:
  Liar(std::string lie, int devices) : lie_(std::move(lie)), devices_(devices) {
    Channel::Descriptors own;
    int next = WorkerProcess::kFirstDescriptor;
    for (UniqueFd& fd : own) fd.Reset(next++);
    channel_ = *Channel::Open(std::move(own), kLongestToWorker);
  }

  // Until the daemon has gone, or ends it.
  void Run() {
    if (lie_ == "not_ready") Say(NotReady());
    Ready ready;
    ready.info.backend = "lie";
    ready.info.domains.resize(static_cast<size_t>(devices_));
    std::iota(ready.info.domains.begin(), ready.info.domains.end(), 0);
    ready.info.cores_per_device = 1;
    Say(ready);
    std::string bytes;
    for (;;) {
      const absl::StatusOr<bool> received = channel_->Receive(&bytes);
      if (!received.ok()) return;
      if (*received) Answer(*DecodeToWorker(bytes));
      if (!*received && !channel_->Wait(absl::Seconds(1)).ok()) return;
    }
  }

 private:
  void Say(const ToDaemon& message) {
    ByteWriter bytes;
    Encode(message, &bytes);
    // Where the daemon does not read, it ends this process.
    channel_->Send(bytes.bytes(), [] { return absl::OkStatus(); }).IgnoreError();
  }
  void SayEnded(const Download& asked) {
    ByteWriter event;
    EncodeEvent(TransferredMessage{asked.transfer, absl::OkStatus()}, &event);
    Say(Event{asked.device, event.bytes()});
  }

  // Until the daemon has gone, or ends it; faster than the daemon reads.
  void SayWithoutEnd(const ToDaemon& message) {
    ByteWriter bytes;
    Encode(message, &bytes);
    while (channel_->Send(bytes.bytes(), [] { return absl::OkStatus(); }).ok()) {
    }
  }

  void Answer(const ToWorker& message) {
    const auto* const download = absl::get_if<Download>(&message);
    if (lie_ == "talk" && absl::holds_alternative<LoadPlan>(message)) SayWithoutEnd(Pong());
    if (lie_ == "not_ready_later" && absl::holds_alternative<LoadPlan>(message)) Say(NotReady());
    if (lie_ == "gives_up" && absl::holds_alternative<LoadPlan>(message)) {
      Say(NotReady{MakeError(Reason::kDeviceLost, "its GPU is on fire")});
    }
    if (const auto* const ask = absl::get_if<AskWorkspace>(&message)) {
      const bool much = lie_ == "much_workspace";
      Say(Workspace{ask->question, absl::OkStatus(),
                    much ? std::numeric_limits<int64_t>::max() : int64_t{getpid()}});
    }
    if (download == nullptr) return;
    if (lie_ == "nothing_came") SayEnded(*download);
    if (lie_ == "empty_pieces") {
      SayWithoutEnd(
          Downloaded{download->device, download->transfer, /*slot=*/0, /*offset=*/0, /*bytes=*/0});
    }
  }

  const std::string lie_;
  const int devices_;
  std::unique_ptr<Channel> channel_;
};

}  // namespace
}  // namespace chorus::worker

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  chorus::worker::Liar(argv[1], std::atoi(argv[2])).Run();
}
