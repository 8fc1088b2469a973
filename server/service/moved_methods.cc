#include "server/service/moved_methods.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "proto/convert/api_version.h"
#include "proto/convert/errors_convert.h"

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

class Refusal : public grpc::ServerGenericBidiReactor {
 public:
  explicit Refusal(const absl::Status& why) { Finish(ToGrpc(why)); }
  void OnDone() override { delete this; }
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
  return new Refusal(NoSuchMethod(context->method()));
}

}  // namespace chorus::server
