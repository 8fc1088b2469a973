#include "client/link/grpc_links.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/internal/errors.h"
#include "client/link/outcomes.h"
#include "core/base/bytes.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/transport/command.h"
#include "core/transport/frame_format.h"
#include "grpcpp/alarm.h"
#include "proto/convert/convert.h"
#include "proto/convert/errors_convert.h"

namespace chorus {
namespace internal {
namespace {

// The message of a command, checked as the daemon does: what it would not take must not take a
// number of the log. INVALID_ARGUMENT kMalformed.
absl::Status ToMessage(const Command& command, v1::Command* message) {
  const absl::Status converted = ToProto(command, message);
  if (!converted.ok()) {
    return Malformed(
        absl::StrCat("command ", command.sequence.value(), ": ", ErrorOf(converted).message));
  }
  ByteWriter frame;
  EncodeFrame(command, &frame);
  if (frame.size() <= kMaxFrameBytes) return absl::OkStatus();
  return Malformed(absl::StrCat("command ", command.sequence.value(), ": expected at most ",
                                kMaxFrameBytes, " bytes as a frame, got ", frame.size()));
}

// Outcomes that come by themselves; a tensor's is its producer's.
class OutcomeLink : public RpcLink {
 public:
  using RpcLink::RpcLink;

  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence sequence) override {
    CHORUS_ASSIGN_OR_RETURN(const absl::optional<absl::Status> outcome, outcomes_.Peek(sequence));
    if (!outcome.has_value()) return absl::optional<RunOutcome>();
    return absl::optional<RunOutcome>(RunOutcome{outcome->code(), ErrorOf(*outcome).id});
  }
  absl::Status WaitCommand(Sequence sequence, absl::Duration timeout) override {
    const absl::Status status = Named(outcomes_.Wait(sequence, timeout));
    if (ErrorOf(status).reason != Reason::kOutcomeForgotten) return status;
    return WaitByRpc(sequence, timeout);
  }
  absl::StatusOr<bool> WaitTensor(TensorId, Sequence producer, absl::Duration timeout) override {
    const absl::Status status = WaitCommand(producer, timeout);
    // Long ago, and the name is still held: a read of it tells what became of it.
    if (!status.ok() && ErrorOf(status).reason != Reason::kOutcomeForgotten) return status;
    return false;
  }

 protected:
  struct Call {
    grpc::ClientContext context;
    v1::SubmitRequest request;
    v1::SubmitResponse response;
    grpc::Alarm pause;  // before it is sent
    // Since when the daemon has refused its command, whenever it came.
    absl::Time refused_since = absl::InfiniteFuture();
  };
  using Calls = std::list<Call>;

  void OnLost() override { outcomes_.Lose(liveness()); }

  // The daemon's word on a command. One that it refuses to read is none of the log's to it: there
  // its number is the next one's, and whatever came after would wait for that. Here it is the
  // number of the command that failed, so a command that does nothing takes it there. (One that
  // was read and failed is not done again: a number that was taken has its outcome.)
  void HaveOutcome(Sequence sequence, const absl::Status& status) {
    outcomes_.Set(sequence, status);
    if (ErrorOf(status).reason != Reason::kMalformed) return;
    Calls calls(1);
    Command nothing{sequence, Release()};
    if (!ToMessage(nothing, calls.front().request.mutable_command()).ok()) return;
    SendUntilTold(&calls, [](const absl::Status&) {});
  }

  // Sends the one call of `calls` as a unary one until the daemon says what became of its command:
  // `told` gets that, on a thread of gRPC's. Such calls overtake each other, this process may be
  // stopped between two of them for longer than the daemon waits for the one that is missing, and
  // a user's calls may be too many. Where a command is refused for as long as others may wait for
  // room the session is lost, for whatever comes later waits for its number.
  using Told = std::function<void(const absl::Status&)>;
  void SendUntilTold(Calls* calls, const Told& told) {
    calls->front().request.set_session(this->opened().session);
    if (const auto call = Enlist(calls)) Send(*call, told);
  }

  // Among those under way. Absent: the link ends.
  absl::optional<Calls::iterator> Enlist(Calls* calls) {
    MutexLock lock(&mutex_);
    if (ending_) return absl::nullopt;
    calls_.splice(calls_.end(), *calls);
    return std::prev(calls_.end());
  }
  void Forget(Calls::iterator call) {
    MutexLock lock(&mutex_);
    calls_.erase(call);
    ended_.SignalAll();
  }

  void Send(Calls::iterator call, const Told& told) {
    log()->async()->Submit(&call->context, &call->request, &call->response,
                           [this, call, told](const grpc::Status& status) {
                             HaveAnswer(&*call, Done(status), told);
                             Forget(call);
                           });
  }

  void HaveAnswer(Call* call, const absl::Status& status, const Told& told) {
    if (!IsNoOutcome(status)) return told(status);
    const absl::Time now = SteadyNow();
    // A call that ran out of time was not refused.
    const absl::Time refused_since =
        IsTimeout(status) ? absl::InfiniteFuture() : std::min(call->refused_since, now);
    if (now - refused_since >= this->opened().submit_timeout) {
      return Lose(NotTaken(call->request.command().sequence(), status));
    }
    Calls again(1);
    again.front().request.Swap(&call->request);
    again.front().refused_since = refused_since;
    const auto next = Enlist(&again);
    if (!next.has_value()) return;
    (*next)->pause.Set(absl::ToChronoTime(absl::Now() + kPause),
                       [this, next = *next, told](bool) { SendAfterPause(next, told); });
  }

  void SendAfterPause(Calls::iterator call, const Told& told) {
    if (IsEnding() || !liveness().ok()) return Forget(call);
    Send(call, told);
  }

  absl::Status NotTaken(int64_t sequence, const absl::Status& why) const {
    Error error = ErrorOf(why);
    error.message =
        absl::StrCat("the daemon at ", this->opened().address, " has not taken command ", sequence,
                     " for ", absl::FormatDuration(this->opened().submit_timeout),
                     ", and later ones wait for it: ", error.message);
    return ToStatus(error);
  }

  // What a daemon would refuse waits here. DEADLINE_EXCEEDED kTransportTimeout: no call has ended.
  absl::Status WaitForRoom() {
    const absl::Time deadline = SteadyNow() + this->opened().submit_timeout;
    MutexLock lock(&mutex_);
    while (calls_.size() >= kMaxCalls && liveness().ok()) {
      const absl::Duration left = deadline - SteadyNow();
      if (left <= absl::ZeroDuration()) {
        return MakeError(
            Reason::kTransportTimeout,
            absl::StrCat("the daemon at ", this->opened().address, " has answered none of ",
                         calls_.size(), " commands in time; this one was not sent"));
      }
      ended_.WaitFor(&mutex_, std::min(left, absl::Seconds(1)));
    }
    return absl::OkStatus();
  }

  // Before anything that a call's end may use is gone.
  void EndCalls() {
    MutexLock lock(&mutex_);
    ending_ = true;
    for (Call& call : calls_) {
      call.context.TryCancel();
      call.pause.Cancel();
    }
    while (!calls_.empty()) ended_.Wait(&mutex_);
  }

  Outcomes outcomes_;

 private:
  // Ten ranks of one user have room beside each other (--max_calls of chorusd), a few more where
  // their calls give way to each other.
  static constexpr size_t kMaxCalls = 64;
  // Before a command is sent again.
  static constexpr absl::Duration kPause = absl::Milliseconds(500);

  bool IsEnding() const {
    MutexLock lock(&mutex_);
    return ending_;
  }

  mutable Mutex mutex_;
  CondVar ended_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  Calls calls_ ABSL_GUARDED_BY(mutex_);  // under way
};

class StreamLink : public OutcomeLink {
 public:
  explicit StreamLink(OpenedSession opened)
      : OutcomeLink(std::move(opened)), stream_(log()->Commands(&context_)) {
    reader_ = std::thread([this] { ReadOutcomes(); });
    limiter_ = std::thread([this] { LimitWrites(); });
    StartWatching();
  }
  ~StreamLink() override {
    StopWatching();
    context_.TryCancel();
    reader_.join();
    {
      MutexLock lock(&mutex_);
      stop_ = true;
      stopped_.SignalAll();
    }
    limiter_.join();
    EndCalls();
  }

  Transport transport() const override { return Transport::kStream; }

  absl::Status Submit(const Command& command) override {
    CHORUS_RETURN_IF_ERROR(liveness());
    v1::CommandsRequest request;
    request.set_session(this->opened().session);
    CHORUS_RETURN_IF_ERROR(ToMessage(command, request.mutable_command()));
    write_began_.store(absl::ToUnixNanos(SteadyNow()), std::memory_order_relaxed);
    const bool written = stream_->Write(request);
    write_began_.store(0, std::memory_order_relaxed);
    if (written) return absl::OkStatus();
    Lose(MakeError(Reason::kDaemonLost, absl::StrCat("the stream of commands to the daemon at ",
                                                     this->opened().address, " has broken")));
    return liveness();
  }

 private:
  // How long the thread that finds the daemon gone waits at most for the end of the stream to be
  // read: a broken stream has its end at once, one that only another connection has lost may have
  // none.
  static constexpr absl::Duration kFarewell = absl::Milliseconds(500);

  absl::Status Goodbye() override {
    const absl::Status attached = RpcLink::Goodbye();
    if (!attached.ok()) return attached;
    const absl::Time deadline = SteadyNow() + kFarewell;
    MutexLock lock(&mutex_);
    while (!end_.has_value() && SteadyNow() < deadline) {
      read_.WaitFor(&mutex_, deadline - SteadyNow());
    }
    return end_.has_value() && ErrorOf(*end_).reason == Reason::kDraining ? *end_
                                                                          : absl::OkStatus();
  }

  // A write waits for as long as the daemon does not read, and has no deadline of its own: ends the
  // stream where it takes too long. (A look now and then: a timer for each write costs more than
  // most of them.)
  void LimitWrites() {
    const absl::Duration most = this->opened().submit_timeout;
    while (true) {
      {
        MutexLock lock(&mutex_);
        const absl::Time next = SteadyNow() + most / 4;
        while (!stop_ && SteadyNow() < next) stopped_.WaitFor(&mutex_, next - SteadyNow());
        if (stop_) return;
      }
      const int64_t began = write_began_.load(std::memory_order_relaxed);
      if (began == 0 || absl::ToUnixNanos(SteadyNow()) - began < absl::ToInt64Nanoseconds(most))
        continue;
      Lose(MakeError(Reason::kDaemonLost,
                     absl::StrCat("the daemon at ", this->opened().address,
                                  " has read no command for ", absl::FormatDuration(most))));
      context_.TryCancel();
      return;
    }
  }

  void ReadOutcomes() {
    v1::CommandsResponse response;
    while (stream_->Read(&response)) {
      HaveOutcome(Sequence(response.sequence()), FromRpcStatus(response.error()));
    }
    absl::Status status = AtAddress(this->opened().address, stream_->Finish());
    if (status.ok()) {
      status = MakeError(Reason::kDaemonLost, absl::StrCat("the daemon at ", this->opened().address,
                                                           " has ended the stream of commands"));
    }
    {
      MutexLock lock(&mutex_);
      end_ = status;
      read_.SignalAll();
    }
    Lose(status);
  }

  grpc::ClientContext context_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::CommandsRequest, v1::CommandsResponse>>
      stream_;
  Mutex mutex_;
  CondVar read_;
  absl::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);  // of the stream
  CondVar stopped_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<int64_t> write_began_{0};  // the write under way; 0: there is none
  std::thread reader_;
  std::thread limiter_;
};

class UnaryLink : public OutcomeLink {
 public:
  explicit UnaryLink(OpenedSession opened) : OutcomeLink(std::move(opened)) { StartWatching(); }
  ~UnaryLink() override {
    StopWatching();
    EndCalls();
  }

  Transport transport() const override { return Transport::kUnary; }

  absl::Status Submit(const Command& command) override {
    CHORUS_RETURN_IF_ERROR(liveness());
    Calls calls(1);
    CHORUS_RETURN_IF_ERROR(ToMessage(command, calls.front().request.mutable_command()));
    CHORUS_RETURN_IF_ERROR(WaitForRoom());
    SendUntilTold(&calls, [this, sequence = command.sequence](const absl::Status& status) {
      HaveOutcome(sequence, status);
    });
    return absl::OkStatus();
  }
};

}  // namespace

std::unique_ptr<Link> MakeStreamLink(OpenedSession opened) {
  return std::make_unique<StreamLink>(std::move(opened));
}
std::unique_ptr<Link> MakeUnaryLink(OpenedSession opened) {
  return std::make_unique<UnaryLink>(std::move(opened));
}

}  // namespace internal
}  // namespace chorus
