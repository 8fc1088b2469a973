#include "client/link/grpc_links.h"

#include <list>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/link/outcomes.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "proto/convert/convert.h"
#include "proto/convert/errors_convert.h"

namespace chorus {
inline namespace sdk {
namespace {

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
    const absl::Status status = outcomes_.Wait(sequence, timeout);
    if (ErrorOf(status).reason != Reason::kOutcomeForgotten) return status;
    return WaitByRpc(sequence, timeout);
  }
  absl::StatusOr<bool> WaitTensor(TensorId, Sequence producer, absl::Duration timeout) override {
    const absl::Status status = WaitCommand(producer, timeout);
    // Long ago, and the name is still held: whoever reads it learns what became of it.
    if (!status.ok() && ErrorOf(status).reason != Reason::kOutcomeForgotten) return status;
    return false;
  }

 protected:
  void OnLost() override { outcomes_.Lose(liveness()); }

  Outcomes outcomes_;
};

class StreamLink : public OutcomeLink {
 public:
  explicit StreamLink(OpenedSession opened)
      : OutcomeLink(std::move(opened)), stream_(graphs()->Commands(&context_)) {
    reader_ = std::thread([this] { ReadOutcomes(); });
    StartWatching();
  }
  ~StreamLink() override {
    StopWatching();
    context_.TryCancel();
    reader_.join();
  }

  Transport transport() const override { return Transport::kStream; }

  absl::Status Submit(const Command& command) override {
    CHORUS_RETURN_IF_ERROR(liveness());
    v1::CommandsRequest request;
    request.set_session(this->opened().session);
    CHORUS_RETURN_IF_ERROR(ToProto(command, request.mutable_command()));
    if (stream_->Write(request)) return absl::OkStatus();
    // The reader learns why.
    const absl::Status lost = liveness();
    if (!lost.ok()) return lost;
    return MakeError(absl::StatusCode::kUnavailable, Reason::kDaemonLost,
                     absl::StrCat("the stream of commands to the daemon at ",
                                  this->opened().address, " has broken"));
  }

 private:
  void ReadOutcomes() {
    v1::CommandsResponse response;
    while (stream_->Read(&response)) {
      outcomes_.Set(Sequence(response.sequence()), FromRpcStatus(response.error()));
    }
    absl::Status status = AtAddress(this->opened().address, stream_->Finish());
    if (status.ok()) {
      status = MakeError(absl::StatusCode::kUnavailable, Reason::kDaemonLost,
                         absl::StrCat("the daemon at ", this->opened().address,
                                      " has ended the stream of commands"));
    }
    Lose(status);
  }

  grpc::ClientContext context_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::CommandsRequest, v1::CommandsResponse>>
      stream_;
  std::thread reader_;
};

class UnaryLink : public OutcomeLink {
 public:
  explicit UnaryLink(OpenedSession opened) : OutcomeLink(std::move(opened)) { StartWatching(); }
  ~UnaryLink() override {
    StopWatching();
    MutexLock lock(&mutex_);
    for (Call& call : calls_) call.context.TryCancel();
    while (!calls_.empty()) ended_.Wait(&mutex_);
  }

  Transport transport() const override { return Transport::kUnary; }

  absl::Status Submit(const Command& command) override {
    CHORUS_RETURN_IF_ERROR(liveness());
    std::list<Call> made(1);
    Call& call = made.front();
    call.request.set_session(this->opened().session);
    CHORUS_RETURN_IF_ERROR(ToProto(command, call.request.mutable_command()));
    std::list<Call>::iterator place;
    {
      MutexLock lock(&mutex_);
      // What the daemon would refuse waits here.
      while (calls_.size() >= kMaxCalls && liveness().ok()) {
        ended_.WaitFor(&mutex_, absl::Seconds(1));
      }
      calls_.splice(calls_.end(), made);
      place = std::prev(calls_.end());
    }
    const Sequence sequence = command.sequence;
    graphs()->async()->Submit(
        &call.context, &call.request, &call.response,
        [this, sequence, place](grpc::Status status) { End(sequence, place, Done(status)); });
    return absl::OkStatus();
  }

  absl::Status WaitCommand(Sequence sequence, absl::Duration timeout) override {
    const absl::Time deadline = absl::Now() + timeout;
    absl::Status status = OutcomeLink::WaitCommand(sequence, timeout);
    // The daemon ends calls that last too long; the command goes on.
    while (ErrorOf(status).reason == Reason::kTransportTimeout && absl::Now() < deadline) {
      status = WaitByRpc(sequence, deadline - absl::Now());
    }
    return status;
  }

 private:
  static constexpr size_t kMaxCalls = 512;
  struct Call {
    grpc::ClientContext context;
    v1::SubmitRequest request;
    v1::SubmitResponse response;
  };

  void End(Sequence sequence, std::list<Call>::iterator place, const absl::Status& status) {
    outcomes_.Set(sequence, status);
    MutexLock lock(&mutex_);
    calls_.erase(place);
    ended_.SignalAll();
  }

  Mutex mutex_;
  CondVar ended_;
  std::list<Call> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Link> MakeStreamLink(OpenedSession opened) {
  return std::make_unique<StreamLink>(std::move(opened));
}
std::unique_ptr<Link> MakeUnaryLink(OpenedSession opened) {
  return std::make_unique<UnaryLink>(std::move(opened));
}

}  // namespace sdk
}  // namespace chorus
