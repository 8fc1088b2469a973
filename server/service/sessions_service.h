// Handlers of chorus.v1.Sessions; the proto says what each RPC does.
//
// Threads: gRPC's. Handlers parse, convert and post; nothing here waits but for room to parse
// (parsed.h).
#ifndef CHORUS_SERVER_SERVICE_SESSIONS_SERVICE_H_
#define CHORUS_SERVER_SERVICE_SESSIONS_SERVICE_H_

#include "chorus/v1/sessions.grpc.pb.h"
#include "server/service/context.h"
#include "server/service/parsed.h"

namespace chorus {

class SessionsService : public Raw<v1::Sessions::Service, v1::Sessions::WithRawCallbackMethod_Open,
                                   v1::Sessions::WithRawCallbackMethod_Close,
                                   v1::Sessions::WithRawCallbackMethod_Renew> {
 public:
  // `service` outlives it.
  explicit SessionsService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Open(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* bytes,
                                 grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Close(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* bytes,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Renew(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* bytes,
                                  grpc::ByteBuffer* response) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_SESSIONS_SERVICE_H_
