#include "client/link/grpc_links.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "client/internal/errors.h"
#include "client/link/outcomes.h"
#include "core/base/bytes.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/transport/command.h"
#include "core/transport/frame_format.h"
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
//
// A command is kept until the daemon says what became of it, and sent again where it says that the
// log has not taken it, or may not have: unary calls overtake each other, this process may be
// stopped between two of them for longer than the daemon waits for the one that is missing, and the
// daemon may have no room, for calls or for what waits in its log. A thread does so, half a second
// later, in the order of the log: what comes ahead of its turn takes room from the one whose turn
// it is. Where a command is refused for as long as others may wait for room the session is lost,
// for whatever comes later waits for its number.
class OutcomeLink : public RpcLink {
 public:
  using RpcLink::RpcLink;

  absl::Status Submit(const Command& command) override {
    CHORUS_RETURN_IF_ERROR(liveness());
    auto request = std::make_shared<v1::CommandsRequest>();
    request->set_session(this->opened().session);
    CHORUS_RETURN_IF_ERROR(ToMessage(command, request->mutable_command()));
    CHORUS_RETURN_IF_ERROR(Keep(command.sequence.value(), request));
    return Send(request);
  }
  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence sequence) override {
    CHORUS_ASSIGN_OR_RETURN(const absl::optional<absl::Status> outcome, outcomes_.Peek(sequence));
    if (!outcome.has_value()) return absl::optional<RunOutcome>();
    return absl::optional<RunOutcome>(RunOutcome{outcome->code(), ErrorOf(*outcome).id});
  }
  absl::Status WaitCommand(Sequence sequence, absl::Duration timeout) override {
    const absl::Status status = Named(outcomes_.Wait(sequence, timeout));
    if (ErrorOf(status).reason != Reason::kOutcomeForgotten) return status;
    // It is over, so that is answered at once.
    return WaitByRpc(sequence, std::max(timeout, this->opened().request_timeout));
  }
  absl::StatusOr<bool> WaitTensor(TensorId, Sequence producer, absl::Duration timeout) override {
    const absl::Status status = WaitCommand(producer, timeout);
    // Long ago, and the name is still held: a read of it tells what became of it.
    if (!status.ok() && ErrorOf(status).reason != Reason::kOutcomeForgotten) return status;
    return false;
  }

 protected:
  using Request = std::shared_ptr<const v1::CommandsRequest>;

  // The thread that sends again: at the end of the derived class's constructor, and stopped in its
  // destructor when no Send waits any more.
  void StartSendingAgain() {
    sender_ = std::thread([this] { SendAgain(); });
  }
  void StopSendingAgain() {
    {
      MutexLock lock(&mutex_);
      stop_ = true;
      refused_.SignalAll();
    }
    sender_.join();
  }

  // Sends it once; HaveAnswer gets the answer. Not OK: the session is lost. May wait for as long as
  // the daemon does not read.
  virtual absl::Status Send(const Request& request) = 0;

  // The daemon's word on a command that was sent. One that it refuses to read is none of the log's
  // to it: there its number is the next one's, and whatever came after would wait for that. Here it
  // is the number of the command that failed, so a command that does nothing takes it there. (One
  // that was read and failed is not done again: a number that was taken has its outcome.)
  void HaveAnswer(int64_t sequence, const absl::Status& status) {
    const bool is_over = !IsNoOutcome(status);
    const absl::Time now = SteadyNow();
    {
      MutexLock lock(&mutex_);
      const auto it = kept_.find(sequence);
      // Told before, or none that was sent.
      if (it == kept_.end()) return;
      Kept& kept = it->second;
      // The first counts.
      if (is_over) outcomes_.Set(Sequence(sequence), status);
      // A call that ran out of time was not refused.
      kept.refused_since =
          is_over || IsTimeout(status) ? absl::InfiniteFuture() : std::min(kept.refused_since, now);
      if (is_over && (kept.is_filler || ErrorOf(status).reason != Reason::kMalformed)) {
        kept_.erase(it);
        return room_.SignalAll();
      }
      if (is_over) kept = {Filler(sequence), /*is_filler=*/true, absl::InfiniteFuture()};
      if (now - kept.refused_since < this->opened().submit_timeout) {
        again_.insert(sequence);
        return refused_.SignalAll();
      }
    }
    GiveUp(NotTaken(sequence, status));
  }

  // The session is of no more use.
  virtual void GiveUp(const absl::Status& why) { Lose(why); }

 private:
  // Commands that a daemon would refuse wait in Submit. Ten ranks of one user whose calls these are
  // have room beside each other (--max_calls of chorusd), a few more where their calls give way to
  // each other.
  static constexpr size_t kMaxUntaken = 64;
  // Before commands are sent again.
  static constexpr absl::Duration kPause = absl::Milliseconds(500);

  struct Kept {
    Request request;
    bool is_filler = false;
    absl::Time refused_since = absl::InfiniteFuture();  // each time that it came
  };

  void OnLost() override { outcomes_.Lose(liveness()); }

  // How many commands the log has not taken, as far as is known, of `kept` that have no outcome, of
  // which `refused` are to be sent again.
  virtual size_t CountUntaken(size_t kept, size_t refused) const = 0;

  // DEADLINE_EXCEEDED kTransportTimeout: there is no room for one more.
  absl::Status Keep(int64_t sequence, const Request& request) {
    const absl::Time deadline = SteadyNow() + this->opened().submit_timeout;
    MutexLock lock(&mutex_);
    while (CountUntaken(kept_.size(), again_.size()) >= kMaxUntaken && liveness().ok()) {
      const absl::Duration left = deadline - SteadyNow();
      if (left <= absl::ZeroDuration()) {
        return MakeError(
            Reason::kTransportTimeout,
            absl::StrCat("the daemon at ", this->opened().address, " has done none of ",
                         CountUntaken(kept_.size(), again_.size()),
                         " commands in time; this one was not sent"));
      }
      room_.WaitFor(&mutex_, std::min(left, absl::Seconds(1)));
    }
    kept_[sequence] = {request, /*is_filler=*/false, absl::InfiniteFuture()};
    return absl::OkStatus();
  }

  Request Filler(int64_t sequence) const {
    auto request = std::make_shared<v1::CommandsRequest>();
    request->set_session(this->opened().session);
    request->mutable_command()->set_sequence(sequence);
    request->mutable_command()->mutable_release();
    return request;
  }

  void SendAgain() {
    while (liveness().ok()) {
      std::vector<int64_t> refused;
      {
        MutexLock lock(&mutex_);
        while (!stop_ && again_.empty()) refused_.Wait(&mutex_);
        const absl::Time due = SteadyNow() + kPause;
        while (!stop_ && SteadyNow() < due) refused_.WaitFor(&mutex_, due - SteadyNow());
        if (stop_) return;
        refused.assign(again_.begin(), again_.end());
      }
      for (const int64_t sequence : refused) {
        Request request;
        {
          MutexLock lock(&mutex_);
          if (stop_) return;
          const auto it = kept_.find(sequence);
          if (again_.erase(sequence) == 0 || it == kept_.end()) continue;
          request = it->second.request;
          room_.SignalAll();
        }
        if (!Send(request).ok()) return;
      }
    }
  }

  absl::Status NotTaken(int64_t sequence, const absl::Status& why) const {
    Error error = ErrorOf(why);
    error.message =
        absl::StrCat("the daemon at ", this->opened().address, " has not taken command ", sequence,
                     " for ", absl::FormatDuration(this->opened().submit_timeout),
                     ", and later ones wait for it: ", error.message);
    return ToStatus(error);
  }

  Outcomes outcomes_;
  std::thread sender_;
  Mutex mutex_;
  CondVar refused_;  // one is to be sent again
  CondVar room_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_map<int64_t, Kept> kept_ ABSL_GUARDED_BY(mutex_);  // have no outcome, or fill
  std::set<int64_t> again_ ABSL_GUARDED_BY(mutex_);  // of these, those that are to be sent again
};

class StreamLink : public OutcomeLink {
 public:
  explicit StreamLink(OpenedSession opened)
      : OutcomeLink(std::move(opened)), stream_(log()->Commands(&context_)) {
    reader_ = std::thread([this] { ReadOutcomes(); });
    limiter_ = std::thread([this] { LimitWrites(); });
    StartSendingAgain();
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
    StopSendingAgain();
  }

  Transport transport() const override { return Transport::kStream; }

 private:
  // How long the thread that finds the daemon gone waits at most for the end of the stream to be
  // read: a broken stream has its end at once, one that only another connection has lost may have
  // none.
  static constexpr absl::Duration kFarewell = absl::Milliseconds(500);

  // Whatever has been written is the daemon's, until it refuses it.
  size_t CountUntaken(size_t, size_t refused) const override { return refused; }

  absl::Status Send(const Request& request) override {
    bool written = false;
    {
      MutexLock lock(&write_mutex_);
      write_began_.store(absl::ToUnixNanos(SteadyNow()), std::memory_order_relaxed);
      written = stream_->Write(*request);
      write_began_.store(0, std::memory_order_relaxed);
    }
    if (written) return absl::OkStatus();
    Lose(MakeError(Reason::kDaemonLost, absl::StrCat("the stream of commands to the daemon at ",
                                                     this->opened().address, " has broken")));
    return liveness();
  }

  // The session's lease would not run out while the stream is open.
  void GiveUp(const absl::Status& why) override {
    Lose(why);
    context_.TryCancel();
  }

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
      return GiveUp(
          MakeError(Reason::kDaemonLost,
                    absl::StrCat("the daemon at ", this->opened().address,
                                 " has read no command for ", absl::FormatDuration(most))));
    }
  }

  void ReadOutcomes() {
    v1::CommandsResponse response;
    while (stream_->Read(&response)) {
      HaveAnswer(response.sequence(), FromRpcStatus(response.error()));
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
  Mutex write_mutex_;                    // a stream takes one write at a time
  std::atomic<int64_t> write_began_{0};  // the write under way; 0: there is none
  std::thread reader_;
  std::thread limiter_;
};

class UnaryLink : public OutcomeLink {
 public:
  explicit UnaryLink(OpenedSession opened) : OutcomeLink(std::move(opened)) {
    StartSendingAgain();
    StartWatching();
  }
  ~UnaryLink() override {
    StopWatching();
    StopSendingAgain();
    // Before anything that a call's end may use is gone.
    MutexLock lock(&mutex_);
    for (Call& call : calls_) call.context.TryCancel();
    while (!calls_.empty()) ended_.Wait(&mutex_);
  }

  Transport transport() const override { return Transport::kUnary; }

 private:
  struct Call {
    grpc::ClientContext context;
    v1::SubmitRequest request;
    v1::SubmitResponse response;
  };
  using Calls = std::list<Call>;

  // A call lasts until its command is over.
  size_t CountUntaken(size_t kept, size_t) const override { return kept; }

  absl::Status Send(const Request& request) override {
    Calls calls(1);
    const auto call = calls.begin();
    call->request.set_session(request->session());
    *call->request.mutable_command() = request->command();
    {
      MutexLock lock(&mutex_);
      calls_.splice(calls_.end(), calls);
    }
    log()->async()->Submit(&call->context, &call->request, &call->response,
                           [this, call](const grpc::Status& status) {
                             HaveAnswer(call->request.command().sequence(), Done(status));
                             MutexLock lock(&mutex_);
                             calls_.erase(call);
                             ended_.SignalAll();
                           });
    return absl::OkStatus();
  }

  Mutex mutex_;
  CondVar ended_;
  Calls calls_ ABSL_GUARDED_BY(mutex_);  // under way
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
