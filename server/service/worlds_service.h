// Handlers of chorus.v1.Worlds; the proto says what each RPC does.
//
// Threads: gRPC's. Handlers parse, convert and post; nothing here waits but for room to parse
// (parsed.h).
#ifndef CHORUS_SERVER_SERVICE_WORLDS_SERVICE_H_
#define CHORUS_SERVER_SERVICE_WORLDS_SERVICE_H_

#include "chorus/v1/worlds.grpc.pb.h"
#include "server/service/context.h"
#include "server/service/parsed.h"

namespace chorus {

class WorldsService
    : public Raw<v1::Worlds::Service, v1::Worlds::WithRawCallbackMethod_Join,
                 v1::Worlds::WithRawCallbackMethod_CreateGroup,
                 v1::Worlds::WithRawCallbackMethod_Leave, v1::Worlds::WithRawCallbackMethod_Abort,
                 v1::Worlds::WithRawCallbackMethod_Reform,
                 v1::Worlds::WithRawCallbackMethod_Describe> {
 public:
  // `service` outlives it.
  explicit WorldsService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* bytes,
                                 grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CreateGroup(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* bytes,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Leave(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* bytes,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* bytes,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Reform(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* bytes,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Describe(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* bytes,
                                     grpc::ByteBuffer* response) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_WORLDS_SERVICE_H_
