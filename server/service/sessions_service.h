// Handlers of chorus.v1.Sessions; the proto says what each RPC does.
//
// Threads: gRPC's. Handlers convert and post; nothing here waits.
#ifndef CHORUS_SERVER_SERVICE_SESSIONS_SERVICE_H_
#define CHORUS_SERVER_SERVICE_SESSIONS_SERVICE_H_

#include "chorus/v1/sessions.grpc.pb.h"
#include "server/service/context.h"

namespace chorus {

class SessionsService : public v1::Sessions::CallbackService {
 public:
  // `service` outlives it.
  explicit SessionsService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Open(grpc::CallbackServerContext* context,
                                 const v1::OpenSessionRequest* request,
                                 v1::OpenSessionResponse* response) override;
  grpc::ServerUnaryReactor* Close(grpc::CallbackServerContext* context,
                                  const v1::CloseSessionRequest* request,
                                  v1::CloseSessionResponse* response) override;
  grpc::ServerUnaryReactor* Renew(grpc::CallbackServerContext* context,
                                  const v1::RenewSessionRequest* request,
                                  v1::RenewSessionResponse* response) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_SESSIONS_SERVICE_H_
