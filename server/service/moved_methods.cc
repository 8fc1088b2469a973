#include "server/service/moved_methods.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "proto/convert/api_version.h"
#include "proto/convert/errors_convert.h"
#include "server/service/unread_alarm.h"

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
  void Start(const ServiceContext* service, grpc::GenericCallbackServerContext* context,
             const absl::Status& why) {
    self_ = shared_from_this();
    unread_.Start(service, context);
    Finish(ToGrpc(why));
  }

  void OnDone() override {
    unread_.Stop();
    self_.reset();
  }

 private:
  UnreadAlarm unread_;
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
  const auto refusal = std::make_shared<Refusal>();
  refusal->Start(service_, context, NoSuchMethod(context->method()));
  return refusal.get();
}

}  // namespace chorus::server
