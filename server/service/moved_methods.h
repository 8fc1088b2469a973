// Methods that have another name since an older version of the API: a client that calls the old one
// is told the new one, instead of gRPC's empty UNIMPLEMENTED.
//
// Threads: gRPC's. Ownership: a call that is refused owns itself; a refusal that is not read is
// given up (unread_alarm.h). Errors: said at NoSuchMethod().
#ifndef CHORUS_SERVER_SERVICE_MOVED_METHODS_H_
#define CHORUS_SERVER_SERVICE_MOVED_METHODS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/generic/async_generic_service.h"
#include "server/service/context.h"

namespace chorus::server {

// What a call of `method` ("/chorus.v1.Graphs/Submit"), which no service here has, ends with.
// UNIMPLEMENTED: kVersion, with both names, for one that has moved; kUnsupported for any other.
absl::Status NoSuchMethod(absl::string_view method);

// Ends every call that no other service takes, before it reads any message of it.
class MovedMethods : public grpc::CallbackGenericService {
 public:
  // `service` outlives it.
  explicit MovedMethods(const ServiceContext* service) : service_(service) {}
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_MOVED_METHODS_H_
