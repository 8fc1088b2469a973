// Handlers of chorus.v1.Log; the proto says what each RPC does.
//
// Threads: gRPC's. Handlers parse, convert and post; nothing here waits but for room to parse
// (parsed.h).
#ifndef CHORUS_SERVER_SERVICE_LOG_SERVICE_H_
#define CHORUS_SERVER_SERVICE_LOG_SERVICE_H_

#include "chorus/v1/log.grpc.pb.h"
#include "server/service/context.h"
#include "server/service/parsed.h"

namespace chorus {

class LogService
    : public Raw<v1::Log::Service, v1::Log::WithRawCallbackMethod_Commands,
                 v1::Log::WithRawCallbackMethod_Submit, v1::Log::WithRawCallbackMethod_Wait> {
 public:
  // `service` outlives it.
  explicit LogService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Submit(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* bytes,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Wait(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* bytes,
                                 grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Commands(
      grpc::CallbackServerContext* context) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_LOG_SERVICE_H_
