#include "server/service/download.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "proto/convert/convert.h"
#include "proto/convert/errors_convert.h"
#include "server/service/call.h"

namespace chorus {
namespace {

class Download : public grpc::ServerWriteReactor<v1::DownloadTensorResponse>,
                 public std::enable_shared_from_this<Download> {
 public:
  Download(const ServiceContext* service, grpc::CallbackServerContext* context)
      : service_(service), context_(context) {}

  void Start(const v1::DownloadTensorRequest& request) {
    self_ = shared_from_this();
    const absl::StatusOr<TensorId> tensor = FromProto(request.tensor());
    if (!tensor.ok()) return End(tensor.status());
    offset_ = request.offset_bytes();
    size_ = request.size_bytes();
    if (offset_ < 0 || size_ < 0) {
      return End(Malformed(absl::StrCat("offset_bytes, size_bytes: expected numbers >= 0, got ",
                                        offset_, " and ", size_)));
    }
    const absl::Time deadline =
        std::min(absl::FromChrono(context_->deadline()), absl::Now() + service_->max_wait);
    PostForSession(
        *service_, context_->peer(), request.session(),
        [download = self_, id = *tensor, deadline](LocalNode& node, absl::Time, SessionId session) {
          node.ReadTensor(session, id, deadline, [download](absl::StatusOr<ReadableTensor> view) {
            download->HaveTensor(std::move(view));
          });
        },
        [download = self_](absl::Status status) { download->End(status); });
  }

 private:
  using ViewRef = std::shared_ptr<const ReadableTensor>;

  // On the node thread. The view's buffer belongs to that thread, so its end is sent back there.
  void HaveTensor(absl::StatusOr<ReadableTensor> view) {
    if (!view.ok()) {
      service_->worker->Post(
          [download = shared_from_this(), status = view.status()] { download->End(status); });
      return;
    }
    NodeLoop* const loop = service_->loop;
    ViewRef shared(new ReadableTensor(*std::move(view)), [loop](const ReadableTensor* done) {
      loop->Post([done](LocalNode& node, absl::Time) {
        node.CountStreamed(done->bytes);
        delete done;
      });
    });
    service_->worker->Post([download = shared_from_this(), shared = std::move(shared)]() mutable {
      download->Begin(std::move(shared));
    });
  }

  void Begin(ViewRef view) {
    if (offset_ > view->bytes) {
      return End(Malformed(absl::StrCat("offset_bytes: expected at most the tensor's ", view->bytes,
                                        " bytes, got ", offset_)));
    }
    end_ = size_ == 0 ? view->bytes : offset_ + std::min(size_, view->bytes - offset_);
    ToProto(view->type, part_.mutable_type());
    view_ = std::move(view);
    SendPart();
  }

  void SendPart() {
    const int64_t size = std::min(kMaxChunkBytes, end_ - offset_);
    part_.set_offset_bytes(offset_);
    part_.set_data(view_->data + offset_, static_cast<size_t>(size));
    offset_ += size;
    // Start* and Finish of one reactor may race with a cancel: whoever is second does nothing.
    MutexLock lock(&mutex_);
    if (!ended_) StartWrite(&part_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      return End(
          MakeError(Reason::kCancelled, "the caller does not take the tensor's bytes any more"));
    }
    if (offset_ == end_) return End(absl::OkStatus());
    part_.clear_type();
    SendPart();
  }

  void End(const absl::Status& status) {
    MutexLock lock(&mutex_);
    if (std::exchange(ended_, true)) return;
    Finish(ToGrpc(status));
  }

  void OnCancel() override { End(MakeError(Reason::kCancelled, "the caller has cancelled")); }
  void OnDone() override { self_.reset(); }

  const ServiceContext* const service_;
  grpc::CallbackServerContext* const context_;
  // Of Start, then of one write after the other.
  int64_t offset_ = 0;
  int64_t size_ = 0;
  int64_t end_ = 0;
  ViewRef view_;
  v1::DownloadTensorResponse part_;

  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<Download> self_;  // gRPC's reference, until OnDone
};

}  // namespace

grpc::ServerWriteReactor<v1::DownloadTensorResponse>* StartDownload(
    const ServiceContext* service, grpc::CallbackServerContext* context,
    const v1::DownloadTensorRequest& request) {
  auto download = std::make_shared<Download>(service, context);
  download->Start(request);
  return download.get();
}

}  // namespace chorus
