#include "client/link/grpc_links.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "client/internal/errors.h"
#include "client/link/call_deadline.h"
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
//
// A call that ends before its command, for others need its place here or there, leaves that to the
// log: what it comes to is asked for now and then, the longest ago first, a few at a time, and by
// whoever waits for it. Should the log not have it after all, that sends it.
class OutcomeLink : public RpcLink {
 public:
  using RpcLink::RpcLink;

  absl::Status Submit(const Command& command) override {
    CHORUS_RETURN_IF_ERROR(liveness());
    auto request = std::make_shared<v1::CommandsRequest>();
    request->set_session(this->opened().session);
    CHORUS_RETURN_IF_ERROR(ToMessage(command, request->mutable_command()));
    CHORUS_RETURN_IF_ERROR(Keep(command.sequence.value(), request));
    return Send(request, /*asks=*/false);
  }
  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence sequence) override {
    CHORUS_ASSIGN_OR_RETURN(const absl::optional<absl::Status> outcome, outcomes_.Peek(sequence));
    if (!outcome.has_value()) return absl::optional<RunOutcome>();
    return absl::optional<RunOutcome>(RunOutcome{outcome->code(), ErrorOf(*outcome).id});
  }
  absl::Status WaitCommand(Sequence sequence, absl::Duration timeout) override {
    const absl::Time deadline = SteadyNow() + timeout;
    // No call under way may tell it.
    bool asks = IsTaken(sequence);
    while (true) {
      const absl::Duration left = std::max(deadline - SteadyNow(), absl::ZeroDuration());
      const absl::Duration part = asks ? absl::ZeroDuration() : std::min(left, kPause);
      const absl::Status status = Named(outcomes_.Wait(sequence, part));
      if (ErrorOf(status).reason == Reason::kOutcomeForgotten) {
        // It is over, so that is answered at once.
        return WaitByRpc(sequence, std::max(timeout, this->opened().request_timeout));
      }
      if (!IsTimeout(status) || left == absl::ZeroDuration()) return status;
      asks = false;
      if (!IsTaken(sequence)) continue;
      const absl::Status told = WaitByRpc(sequence, left);
      if (!IsNoOutcome(told)) HaveAnswer(sequence.value(), told);
    }
  }
  absl::StatusOr<bool> WaitTensor(TensorId, Sequence producer, absl::Duration timeout) override {
    const absl::Status status = WaitCommand(producer, timeout);
    // Long ago, and the name is still held: a read of it tells what became of it.
    if (!status.ok() && ErrorOf(status).reason != Reason::kOutcomeForgotten) return status;
    return false;
  }

 protected:
  using Request = std::shared_ptr<const v1::CommandsRequest>;

  // Commands that the log has not taken, as far as is known, and what is asked for beside them, are
  // at most so many; for room for one more Submit waits. Ten ranks of one user whose calls these
  // are have room beside each other (--max_calls of chorusd), a few more where their calls give way
  // to each other.
  static constexpr size_t kMaxUntaken = 64;
  static constexpr size_t kMaxAsked = 8;
  // Before commands are sent again, and for an answer about one that is asked for.
  static constexpr absl::Duration kPause = absl::Milliseconds(500);

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

  // Sends it once; HaveAnswer gets the answer. `asks`: within kPause, and the log has it, as far as
  // is known. Not OK: the session is lost. May wait for as long as the daemon does not read.
  virtual absl::Status Send(const Request& request, bool asks) = 0;

  // What was asked for is answered, or not in time. Where it was told, the next are asked for at
  // once.
  void HaveAsked(bool is_told) {
    MutexLock lock(&mutex_);
    --asked_;
    if (is_told) asked_since_ = absl::InfinitePast();
    refused_.SignalAll();
  }

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
      if (std::exchange(kept.is_taken, false)) --taken_count_;
      // The first counts.
      if (is_over) outcomes_.Set(Sequence(sequence), status);
      if (is_over && (kept.is_filler || ErrorOf(status).reason != Reason::kMalformed)) {
        kept_.erase(it);
        return room_.SignalAll();
      }
      if (IsTimeout(status)) {
        kept.refused_since = absl::InfiniteFuture();
        kept.is_taken = true;
        ++taken_count_;
        taken_.push_back(sequence);
        refused_.SignalAll();
        return room_.SignalAll();
      }
      kept.refused_since = std::min(kept.refused_since, now);
      if (is_over) kept = {Filler(sequence), /*is_filler=*/true};
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
  struct Kept {
    Request request;
    bool is_filler = false;
    bool is_taken = false;                              // its last call has ended before it
    absl::Time refused_since = absl::InfiniteFuture();  // each time that it came
  };

  void OnLost() override { outcomes_.Lose(liveness()); }

  // Whether there is room for one more command. `untaken` have no outcome, and their last calls
  // have not ended before them; `refused` of these are to be sent again.
  virtual bool HasRoom(size_t untaken, size_t refused) const = 0;
  // There has been none for kPause, and nothing was refused.
  virtual void MakeRoom(absl::Duration) {}

  size_t CountUntaken() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return kept_.size() - taken_count_;
  }
  bool IsTaken(Sequence sequence) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    const auto it = kept_.find(sequence.value());
    return it != kept_.end() && it->second.is_taken;
  }

  // DEADLINE_EXCEEDED kTransportTimeout: there is no room for one more.
  absl::Status Keep(int64_t sequence, const Request& request) {
    const absl::Time deadline = SteadyNow() + this->opened().submit_timeout;
    while (true) {
      bool makes_room = false;
      {
        MutexLock lock(&mutex_);
        const absl::Time patience = std::min(deadline, SteadyNow() + kPause);
        bool has_room = HasRoom(CountUntaken(), again_.size());
        while (!has_room && liveness().ok() && SteadyNow() < patience) {
          room_.WaitFor(&mutex_, patience - SteadyNow());
          has_room = HasRoom(CountUntaken(), again_.size());
        }
        if (has_room || !liveness().ok()) {
          kept_[sequence].request = request;
          return absl::OkStatus();
        }
        if (SteadyNow() >= deadline) {
          return MakeError(
              Reason::kTransportTimeout,
              absl::StrCat("the daemon at ", this->opened().address, " has done none of ",
                           CountUntaken(), " commands in time; this one was not sent"));
        }
        makes_room = again_.empty();
      }
      if (makes_room) MakeRoom(deadline - SteadyNow());
    }
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
      size_t taken = 0;
      {
        MutexLock lock(&mutex_);
        while (!stop_ && again_.empty() && (taken_.empty() || asked_ >= kMaxAsked)) {
          refused_.Wait(&mutex_);
        }
        const absl::Time woken = SteadyNow();
        absl::Duration left;
        do {
          left = (again_.empty() ? asked_since_ : woken) + kPause - SteadyNow();
          if (left > absl::ZeroDuration()) refused_.WaitFor(&mutex_, left);
        } while (!stop_ && left > absl::ZeroDuration());
        if (stop_) return;
        asked_since_ = SteadyNow();
        refused.assign(again_.begin(), again_.end());
        taken = taken_.size();
      }
      for (const int64_t sequence : refused) {
        const Request request = TakeRefused(sequence);
        if (request != nullptr && !Send(request, /*asks=*/false).ok()) return;
      }
      for (; taken > 0; --taken) {
        const Request request = TakeTaken();
        if (request != nullptr && !Send(request, /*asks=*/true).ok()) return;
      }
    }
  }

  // That is to be sent again; null: no more.
  Request TakeRefused(int64_t sequence) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    const auto it = kept_.find(sequence);
    if (stop_ || again_.erase(sequence) == 0 || it == kept_.end()) return nullptr;
    room_.SignalAll();
    return it->second.request;
  }
  // The next to be asked for; null: it is over, or as many are asked for as may be.
  Request TakeTaken() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    if (stop_ || taken_.empty() || asked_ >= kMaxAsked) return nullptr;
    const auto it = kept_.find(taken_.front());
    taken_.pop_front();
    if (it == kept_.end()) return nullptr;
    ++asked_;
    return it->second.request;
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
  CondVar refused_;  // one is to be sent again, or asked for
  CondVar room_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_map<int64_t, Kept> kept_ ABSL_GUARDED_BY(mutex_);  // have no outcome, or fill
  std::set<int64_t> again_ ABSL_GUARDED_BY(mutex_);  // of these, those that are to be sent again
  size_t taken_count_ ABSL_GUARDED_BY(mutex_) = 0;   // of these, is_taken
  // Those of them that are not being asked for, the longest ago first; some may be over.
  std::deque<int64_t> taken_ ABSL_GUARDED_BY(mutex_);
  size_t asked_ ABSL_GUARDED_BY(mutex_) = 0;  // calls under way that ask
  // When it asked last, if nothing has been told since.
  absl::Time asked_since_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
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
  bool HasRoom(size_t, size_t refused) const override { return refused < kMaxUntaken; }

  absl::Status Send(const Request& request, bool) override {
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
    const absl::Time began = SteadyNow();
    absl::optional<CallDeadline> deadline;  // of one that asks
    bool ends_early = false;
  };
  using Calls = std::list<Call>;

  // A call lasts until its command is over, or until others need its place.
  bool HasRoom(size_t untaken, size_t) const override { return untaken + kMaxAsked < kMaxUntaken; }

  // The older half of the calls end, of those that have lasted for kPause: a daemon that answers a
  // call which comes now has read them by then, and has their commands.
  void MakeRoom(absl::Duration timeout) override {
    if (!Renew(timeout).ok()) return;
    MutexLock lock(&mutex_);
    const absl::Time now = SteadyNow();
    size_t left = kMaxUntaken / 2;
    for (Call& call : calls_) {
      if (left-- == 0 || now - call.began < kPause) return;
      call.ends_early = true;
      call.context.TryCancel();
    }
  }

  absl::Status Send(const Request& request, bool asks) override {
    Calls calls(1);
    const auto call = calls.begin();
    if (asks) call->deadline.emplace(&call->context, kPause);
    call->request.set_session(request->session());
    *call->request.mutable_command() = request->command();
    {
      MutexLock lock(&mutex_);
      calls_.splice(calls_.end(), calls);
    }
    log()->async()->Submit(&call->context, &call->request, &call->response,
                           [this, call](const grpc::Status& status) {
                             const absl::Status answer = AnswerOf(*call, status);
                             HaveAnswer(call->request.command().sequence(), answer);
                             if (call->deadline.has_value()) HaveAsked(!IsNoOutcome(answer));
                             MutexLock lock(&mutex_);
                             calls_.erase(call);
                             ended_.SignalAll();
                           });
    return absl::OkStatus();
  }

  absl::Status AnswerOf(const Call& call, const grpc::Status& status) {
    bool ended_early = false;
    {
      MutexLock lock(&mutex_);
      ended_early = call.ends_early;
    }
    // What a command comes to has details.
    if (!ended_early || status.error_code() != grpc::StatusCode::CANCELLED ||
        !status.error_details().empty()) {
      return Done(call.deadline.has_value() ? call.deadline->Of(status) : status);
    }
    return MakeError(Reason::kTransportTimeout, "other calls had to have this one's place");
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
