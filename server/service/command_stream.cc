#include "server/service/command_stream.h"

#include <deque>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "chorus/v1/log.pb.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/node/node.h"
#include "core/node/node_loop.h"
#include "proto/convert/convert.h"
#include "proto/convert/errors_convert.h"
#include "server/service/call.h"
#include "server/service/submit.h"
#include "server/service/unread_alarm.h"

namespace chorus::server {
namespace {

// What an outcome takes, as a status with the task that brings it, and then with gRPC's slice and
// buffer; and a frame, with the task that has it.
constexpr int64_t kOverhead = 256;
int64_t BytesOf(const absl::Status& outcome) {
  if (outcome.ok()) return kOverhead;
  // Beside the texts: their names in the message, and what a status is made of.
  constexpr int64_t kError = 512;
  auto bytes = kOverhead + kError + static_cast<int64_t>(outcome.message().size());
  outcome.ForEachPayload([&bytes](absl::string_view, const absl::Cord& payload) {
    bytes += static_cast<int64_t>(payload.size());
  });
  return bytes;
}
int64_t BytesOf(const std::string& frame) { return kOverhead + static_cast<int64_t>(frame.size()); }

// Messages after which the table of connections is told that they have been taken.
constexpr int kTakenAtATime = 64;

// What an outcome is counted as, from when the node tells it until it is written.
struct OutcomeRoom {
  int64_t bytes = 0;
  SharedRoom::Part part;  // where it is beyond what every stream may have
};
// One that the worker has not come to.
struct ToldOutcome {
  int64_t sequence = 0;
  absl::Status status;
  OutcomeRoom room;
};
// One that is to be written.
struct Outcome {
  grpc::ByteBuffer message;
  OutcomeRoom room;
};

class CommandStream : public ByteStream, public std::enable_shared_from_this<CommandStream> {
 public:
  CommandStream(const ServiceContext* service, grpc::CallbackServerContext* context)
      : service_(service), context_(context) {}

  void Start() {
    self_ = shared_from_this();
    const absl::Status admitted = Admit();
    if (!admitted.ok()) return End(admitted);
    // By the worker, behind the outcomes that came before.
    farewell_id_ = service_->farewell->Add([service = service_, tenant = caller_.tenant,
                                            weak = weak_from_this()](const absl::Status& why) {
      service->worker->Post(tenant, [weak, why] {
        if (const auto stream = weak.lock()) stream->EndWhenTold(why);
      });
    });
    // The farewell may have come meanwhile.
    MutexLock lock(&mutex_);
    ReadMore();
  }

 private:
  absl::Status Admit() {
    CHORUS_ASSIGN_OR_RETURN(PeerTable::Admitted admitted, service_->peers->Admit(context_->peer()));
    caller_ = std::move(admitted.caller);
    slot_ = std::move(admitted.slot);
    CHORUS_ASSIGN_OR_RETURN(room_, service_->streams->Take(caller_.tenant, kMaxMessageBytes));
    return absl::OkStatus();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      MutexLock lock(&mutex_);
      half_closed_ = true;
      EndIfDone();
      return;
    }
    {
      // Commands that come behind the farewell are not taken: the stream's end tells why.
      MutexLock lock(&mutex_);
      CountMessage();
      if (!farewell_.ok()) return;
    }
    if (!TakeCommand()) return;
    MutexLock lock(&mutex_);
    ReadMore();
  }

  int64_t UnwrittenBytes() {
    MutexLock lock(&told_mutex_);
    return unwritten_bytes_;
  }
  void CountMessage() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (std::exchange(has_message_, true) && !ended_ && ++taken_ == kTakenAtATime) TellTaken();
  }
  void TellTaken() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { slot_.Took(std::exchange(taken_, 0)); }

  void ReadMore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ended_ || !farewell_.ok()) return;
    read_paused_ = under_way_ >= kMaxCommandsUnderWay || UnwrittenBytes() > kMaxUnwrittenBytes ||
                   posted_bytes_ > kMaxPostedBytes;
    if (!read_paused_) StartRead(&request_);
  }

  // False: the stream ends.
  bool TakeCommand() {
    const Parsed<v1::CommandsRequest> request(service_->parsing, &request_,
                                              kMaxCommandMessageBytes);
    if (!request.ok()) {
      End(request.status());
      return false;
    }
    if (request->session() != 0 && session_ != 0 && request->session() != session_) {
      End(Malformed(
          absl::StrCat("session: the stream is for ", session_, ", got ", request->session())));
      return false;
    }
    if (request->session() != 0) session_ = request->session();
    const int64_t sequence = request->command().sequence();
    {
      MutexLock lock(&mutex_);
      ++under_way_;
    }
    absl::StatusOr<Command> command = FromProto(request->command());
    absl::StatusOr<std::string> frame =
        command.ok() ? FrameOf(sequence, std::move(command->body)) : command.status();
    // Not a command of the log then: the next one may be the right one with the same sequence.
    if (!frame.ok()) {
      PostOutcome(sequence, frame.status());
      return true;
    }
    const int64_t bytes = BytesOf(*frame);
    {
      MutexLock lock(&mutex_);
      posted_bytes_ += bytes;
    }
    const auto wait = std::make_shared<node::Wait>();
    {
      MutexLock lock(&told_mutex_);
      waits_.insert(wait);
    }
    ForSessionOf(
        *service_, caller_, session_,
        [stream = self_](SessionId session, absl::Duration lease) { stream->Hold(session, lease); },
        [stream = self_, sequence, wait, frame = *std::move(frame)](
            node::LocalNode& node, absl::Time now, SessionId session) {
          const auto tell = [stream, sequence, wait](node::Outcome outcome) {
            stream->WaitIsOver(wait);
            stream->PostOutcome(sequence, outcome.status);
          };
          node.Submit(session, frame, now, tell, wait);
        },
        [stream = self_](absl::Status status) {
          stream->service_->worker->Post(stream->caller_.tenant,
                                         [stream, status] { stream->End(status); });
        },
        [this, bytes](node::NodeLoop::Task task) {
          service_->loop->Post(caller_.tenant, [stream = self_, bytes, task = std::move(task)](
                                                   node::LocalNode& node, absl::Time now) {
            task(node, now);
            stream->Taken(bytes);
          });
        });
    return true;
  }

  // The node has come to `bytes` of what was posted.
  void Taken(int64_t bytes) {
    MutexLock lock(&mutex_);
    posted_bytes_ -= bytes;
    if (!read_paused_) return;
    // Reading is not for the node thread.
    service_->worker->Post(caller_.tenant, [stream = shared_from_this()] {
      MutexLock again(&stream->mutex_);
      if (stream->read_paused_) stream->ReadMore();
    });
  }

  void WaitIsOver(const node::WaitRef& wait) {
    MutexLock lock(&told_mutex_);
    waits_.erase(wait);
  }

  // It counts from now on: the worker may be far behind. Mostly the node thread's, of which nobody
  // knows how long gRPC takes under the other mutex.
  void PostOutcome(int64_t sequence, absl::Status status) {
    OutcomeRoom room{BytesOf(status), SharedRoom::Part()};
    MutexLock lock(&told_mutex_);
    if (takes_no_more_) return;
    if (unwritten_bytes_ > kMaxUnwrittenBytes) {
      absl::StatusOr<SharedRoom::Part> part = service_->answers->Take(caller_.tenant, room.bytes);
      if (!part.ok()) {
        takes_no_more_ = true;
        return service_->worker->Post(caller_.tenant, [stream = shared_from_this(),
                                                       why = part.status()] { stream->End(why); });
      }
      room.part = *std::move(part);
    }
    unwritten_bytes_ += room.bytes;
    told_.push_back({sequence, std::move(status), std::move(room)});
    service_->worker->Post(caller_.tenant,
                           [stream = shared_from_this()] { stream->WriteNextOutcome(); });
  }

  // The worker's: the first of those that it has not come to.
  void WriteNextOutcome() {
    ToldOutcome told;
    {
      MutexLock lock(&told_mutex_);
      if (told_.empty()) return;
      told = std::move(told_.front());
      told_.pop_front();
    }
    v1::CommandsResponse response;
    response.set_sequence(told.sequence);
    if (!told.status.ok()) *response.mutable_error() = ToRpcStatus(told.status);
    Outcome outcome{Serialized(response), std::move(told.room)};
    MutexLock lock(&mutex_);
    if (ended_) return;
    outcomes_.push_back(std::move(outcome));
    if (outcomes_.size() == 1) StartWrite(&outcomes_.front().message);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      return End(MakeError(Reason::kCancelled, "the caller does not take outcomes any more"));
    }
    MutexLock lock(&mutex_);
    if (ended_) return;
    {
      MutexLock told_lock(&told_mutex_);
      unwritten_bytes_ -= outcomes_.front().room.bytes;
    }
    outcomes_.pop_front();
    --under_way_;
    if (!outcomes_.empty()) {
      StartWrite(&outcomes_.front().message);
    } else if (!farewell_.ok()) {
      return EndLocked(ToGrpc(farewell_));
    }
    if (read_paused_) ReadMore();
    EndIfDone();
  }

  void EndIfDone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!half_closed_ || under_way_ > 0) return;
    EndLocked(grpc::Status::OK);
  }

  void End(const absl::Status& status) {
    MutexLock lock(&mutex_);
    EndLocked(ToGrpc(status));
  }

  // An end that the client does not take is given up, and all that the stream holds.
  void EndLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (std::exchange(ended_, true)) return;
    {
      MutexLock lock(&told_mutex_);
      takes_no_more_ = true;
    }
    TellTaken();
    Finish(status);
    unread_.Start(service_, context_);
  }

  // The same when the outcomes that are there have been written, for which the client has the same
  // time. Nothing more is read: a client that goes on sending would put the end off, until gRPC
  // cancels the stream without our word.
  void EndWhenTold(const absl::Status& status) {
    MutexLock lock(&mutex_);
    if (ended_) return;
    farewell_ = status;
    if (outcomes_.empty()) return EndLocked(ToGrpc(status));
    unread_.Start(service_, context_);
  }

  // The session's lease does not run out while the stream is open, and where it ends otherwise so
  // does the stream: its client may say nothing more.
  void Hold(SessionId session, absl::Duration lease) {
    {
      MutexLock lock(&mutex_);
      if (done_ || held_.value() != 0) return;
      held_ = session;
      service_->worker->Hold(session, lease);
    }
    service_->farewell->SetSession(farewell_id_, session);
  }

  void OnCancel() override { End(MakeError(Reason::kCancelled, "the caller has cancelled")); }
  void OnDone() override {
    service_->farewell->Remove(farewell_id_);
    std::deque<Outcome> unread;
    {
      MutexLock lock(&mutex_);
      done_ = true;
      unread.swap(outcomes_);
      unread_.Stop();
      if (held_.value() != 0) service_->worker->Drop(held_);
    }
    WithdrawWaits();
    // The node may have commands of it that it has not come to.
    slot_ = PeerTable::Slot();
    room_ = SharedRoom::Part();
    self_.reset();
  }

  // Nobody hears of these outcomes any more: else the node would hold the stream, which is counted
  // no more, for as long as its commands take.
  void WithdrawWaits() {
    std::set<node::WaitRef> waits;
    {
      MutexLock lock(&told_mutex_);
      waits.swap(waits_);
    }
    if (waits.empty()) return;
    // Behind what has made them wait.
    service_->loop->Post(caller_.tenant,
                         [waits = std::move(waits)](node::LocalNode& node, absl::Time now) {
                           for (const node::WaitRef& wait : waits) node.Withdraw(wait, now);
                         });
  }

  const ServiceContext* const service_;
  grpc::CallbackServerContext* const context_;
  Caller caller_;             // constant once it reads
  PeerTable::Slot slot_;      // until OnDone
  SharedRoom::Part room_;     // for one message, until OnDone
  uint64_t farewell_id_ = 0;  // constant once it reads
  grpc::ByteBuffer request_;  // of the read under way
  int64_t session_ = 0;       // by OnReadDone alone

  // What the node tells.
  Mutex told_mutex_;
  std::deque<ToldOutcome> told_ ABSL_GUARDED_BY(told_mutex_);  // the worker comes to each
  int64_t unwritten_bytes_ ABSL_GUARDED_BY(told_mutex_) = 0;   // and what is to be written
  bool takes_no_more_ ABSL_GUARDED_BY(told_mutex_) = false;    // there is no room, or it has ended
  // For each command whose outcome has not been told.
  std::set<node::WaitRef> waits_ ABSL_GUARDED_BY(told_mutex_);

  // The others: gRPC is called under it.
  Mutex mutex_ ABSL_ACQUIRED_BEFORE(told_mutex_);
  std::deque<Outcome> outcomes_ ABSL_GUARDED_BY(mutex_);  // the first is being written
  int64_t posted_bytes_ ABSL_GUARDED_BY(mutex_) = 0;      // that the node has not come to
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  bool has_message_ ABSL_GUARDED_BY(mutex_) = false;  // its first
  int taken_ ABSL_GUARDED_BY(mutex_) = 0;  // messages behind it that nobody has been told of
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool read_paused_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status farewell_
      ABSL_GUARDED_BY(mutex_);              // why it ends once all is written; OK: it does not
  SessionId held_ ABSL_GUARDED_BY(mutex_);  // 0: none
  UnreadAlarm unread_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<CommandStream> self_;  // gRPC's reference, until OnDone
};

}  // namespace

ByteStream* StartCommandStream(const ServiceContext* service,
                               grpc::CallbackServerContext* context) {
  auto stream = std::make_shared<CommandStream>(service, context);
  stream->Start();
  return stream.get();
}

}  // namespace chorus::server
