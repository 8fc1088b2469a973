#include "server/service/download.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "chorus/v1/tensors.pb.h"
#include "core/base/alarms.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "grpc/grpc.h"
#include "proto/convert/convert.h"
#include "proto/convert/errors_convert.h"
#include "server/service/call.h"
#include "server/service/parsed.h"

namespace chorus::server {
namespace {

class Download : public RequestCall {
 public:
  Download(const ServiceContext* service, grpc::CallbackServerContext* context)
      : RequestCall(service, context) {}

  void Start() { ReadRequest(); }

 private:
  using ViewRef = std::shared_ptr<const node::ReadableTensor>;

  std::shared_ptr<Download> self() {
    return std::static_pointer_cast<Download>(shared_from_this());
  }

  void HaveRequest(grpc::ByteBuffer* bytes) override {
    const Parsed<v1::DownloadTensorRequest> request(service_->parsing, bytes);
    if (!request.ok()) return End(request.status());
    const absl::StatusOr<TensorId> tensor = FromProto(request->tensor());
    if (!tensor.ok()) return End(tensor.status());
    asked_ = {*tensor, request->offset_bytes(), request->size_bytes()};
    const absl::Status checked = asked_.Check();
    if (!checked.ok()) return End(checked);
    ForSessionOf(
        *service_, caller(), request->session(),
        [download = self()](SessionId session, absl::Duration lease) {
          download->Hold(session, lease);
        },
        [download = self(), wait = Waits()](node::LocalNode& node, absl::Time, SessionId session) {
          node.ReadTensor(
              session, download->asked_.tensor, download->deadline(),
              [download](absl::StatusOr<node::ReadableTensor> view) {
                download->HaveTensor(std::move(view));
              },
              wait);
        },
        [download = self()](absl::Status status) { download->End(status); },
        [this](node::NodeLoop::Task task) { Post(std::move(task)); });
  }

  // On the node thread. The view's buffer belongs to that thread, so its end is sent back there.
  void HaveTensor(absl::StatusOr<node::ReadableTensor> view) {
    WaitIsOver();
    if (!view.ok()) {
      service_->worker->Post(
          caller().tenant, [download = self(), status = view.status()] { download->End(status); });
      return;
    }
    node::NodeLoop* const loop = service_->loop;
    ViewRef shared_view(new node::ReadableTensor(*std::move(view)),
                        [loop, tenant = caller().tenant](const node::ReadableTensor* done) {
                          loop->Post(tenant, [done](node::LocalNode& node, absl::Time) {
                            node.CountStreamed(done->bytes);
                            delete done;
                          });
                        });
    service_->worker->Post(caller().tenant,
                           [download = self(), shared_view = std::move(shared_view)]() mutable {
                             download->Begin(std::move(shared_view));
                           });
  }

  void Begin(ViewRef view) {
    const absl::StatusOr<int64_t> end = asked_.EndIn(view->bytes);
    if (!end.ok()) return End(end.status());
    offset_ = asked_.offset;
    end_ = *end;
    view_ = std::move(view);
    SendPart();
  }

  void SendPart() {
    const int64_t size = std::min(node::kMaxChunkBytes, end_ - offset_);
    v1::DownloadTensorResponse part;
    if (offset_ == asked_.offset) ToProto(view_->type, part.mutable_type());
    part.set_offset_bytes(offset_);
    part.set_data(view_->data + offset_, static_cast<size_t>(size));
    part_ = Serialized(part);
    offset_ += size;
    // Start* and Finish of one reactor may race with a cancel: the second does nothing.
    MutexLock lock(&mutex_);
    if (ended_) return;
    part_begin_ = offset_ - size;
    part_bytes_ = size;
    part_due_ = std::min(deadline(), SteadyNow() + service_->download_timeout);
    if (alarm_.serial == 0) WatchLocked();
    StartWrite(&part_);
  }

  // One alarm looks after all parts: it fires when the one that was on its way would be late.
  void WatchLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    alarm_ = service_->alarms->Set(part_due_, [weak = weak_from_this()] {
      const auto download = std::static_pointer_cast<Download>(weak.lock());
      if (download != nullptr) download->Look();
    });
  }

  void Look() {
    MutexLock lock(&mutex_);
    if (ended_) return;
    if (SteadyNow() < part_due_) return WatchLocked();
    ended_ = true;
    // Before it is cancelled: gRPC does not know the connection of one that has been.
    GiveUpLocked();
    const grpc::Status timeout_status = ToGrpc(MakeError(
        Reason::kTransportTimeout,
        absl::StrCat("the caller has not taken the ", part_bytes_, " bytes of the tensor ",
                     "from byte ", part_begin_, " in time; expected at most ",
                     absl::FormatDuration(service_->download_timeout), " for each part and ",
                     absl::FormatDuration(service_->max_wait), " for all; read again from there")));
    // What Finish sends stands behind the part that nobody takes; this does not.
    grpc_call_cancel_with_status(context_->c_call(),
                                 static_cast<grpc_status_code>(timeout_status.error_code()),
                                 timeout_status.error_message().c_str(), nullptr);
    Finish(timeout_status);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      return End(
          MakeError(Reason::kCancelled, "the caller does not take the tensor's bytes any more"));
    }
    if (offset_ == end_) {
      // Before the caller hears of the end: its next download finds this one gone.
      view_.reset();
      return End(absl::OkStatus());
    }
    SendPart();
  }

  // Where there were parts it may stand behind the last one, which nobody takes.
  void End(const absl::Status& status) override {
    if (!MayEnd()) return;
    {
      MutexLock lock(&mutex_);
      if (alarm_.serial != 0) GiveUpLocked();
    }
    Finish(ToGrpc(status));
  }
  // The node, or the part that is on its way, ends it by then.
  void EndLate() override {}

  void Forget() override {
    MutexLock lock(&mutex_);
    service_->alarms->Cancel(alarm_);
  }

  node::DownloadRequest asked_;  // constant once it waits
  // Of one write after the other.
  int64_t offset_ = 0;
  int64_t end_ = 0;
  ViewRef view_;
  grpc::ByteBuffer part_;

  // Of the part that is on its way.
  int64_t part_begin_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t part_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time part_due_ ABSL_GUARDED_BY(mutex_);
  Alarms::Id alarm_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

ByteStream* StartDownload(const ServiceContext* service, grpc::CallbackServerContext* context) {
  auto download = std::make_shared<Download>(service, context);
  download->Start();
  return download.get();
}

}  // namespace chorus::server
