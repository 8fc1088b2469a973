#include "server/service/moved_methods.h"

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "grpcpp/alarm.h"
#include "proto/convert/api_version.h"
#include "proto/convert/errors_convert.h"
#include "server/peers.h"

namespace chorus::server {
namespace {

struct Moved {
  absl::string_view from;
  absl::string_view to;
  int32_t since;  // version of the API
};

constexpr Moved kMoved[] = {
    {"chorus.v1.Graphs/Submit", "chorus.v1.Log/Submit", 3},
    {"chorus.v1.Graphs/Wait", "chorus.v1.Log/Wait", 3},
    {"chorus.v1.Graphs/Commands", "chorus.v1.Log/Commands", 3},
};

class Refusal : public grpc::ServerGenericBidiReactor,
                public std::enable_shared_from_this<Refusal> {
 public:
  Refusal(const ServiceContext* service, absl::optional<int> connection)
      : service_(service), connection_(connection) {}

  void Start(const absl::Status& why) {
    self_ = shared_from_this();
    unread_alarm_.Set(absl::ToChronoTime(absl::Now() + service_->download_timeout),
                      [weak = weak_from_this()](bool fired) {
                        const auto unread = weak.lock();
                        if (fired && unread != nullptr) unread->GiveUp();
                      });
    Finish(ToGrpc(why));
  }

  void OnDone() override {
    {
      MutexLock lock(&mutex_);
      done_ = true;
    }
    unread_alarm_.Cancel();
    self_.reset();
  }

 private:
  void GiveUp() {
    MutexLock lock(&mutex_);
    if (!done_ && connection_.has_value()) service_->peers->End(*connection_);
  }

  const ServiceContext* const service_;
  const absl::optional<int> connection_;
  Mutex mutex_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;  // then the number may be another's
  grpc::Alarm unread_alarm_;
  std::shared_ptr<Refusal> self_;  // gRPC's reference, until OnDone
};

}  // namespace

absl::Status NoSuchMethod(absl::string_view method) {
  const absl::string_view name = method.substr(method.empty() ? 0 : 1);
  for (const Moved& moved : kMoved) {
    if (name != moved.from) continue;
    return MakeError(Reason::kVersion,
                     absl::StrCat(moved.from, " is ", moved.to, " since version ", moved.since,
                                  " of the API; this daemon speaks ", "version ", kApiVersion));
  }
  return Unsupported(absl::StrCat("this daemon has no method ", name));
}

grpc::ServerGenericBidiReactor* MovedMethods::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  const auto refusal = std::make_shared<Refusal>(service_, PeerTable::NumberOf(context->peer()));
  refusal->Start(NoSuchMethod(context->method()));
  return refusal.get();
}

}  // namespace chorus::server
