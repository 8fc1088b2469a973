// Handlers of chorus.v1.Graphs; the proto says what each RPC does.
//
// Threads: gRPC's. Handlers parse, convert and post; nothing here waits but for room to parse
// (parsed.h).
#ifndef CHORUS_SERVER_SERVICE_GRAPHS_SERVICE_H_
#define CHORUS_SERVER_SERVICE_GRAPHS_SERVICE_H_

#include "chorus/v1/graphs.grpc.pb.h"
#include "server/service/context.h"
#include "server/service/parsed.h"

namespace chorus {

class GraphsService
    : public Raw<v1::Graphs::Service, v1::Graphs::WithRawCallbackMethod_Register,
                 v1::Graphs::WithRawCallbackMethod_Run, v1::Graphs::WithRawCallbackMethod_Release> {
 public:
  // `service` outlives it.
  explicit GraphsService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Register(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* bytes,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* bytes,
                                    grpc::ByteBuffer* response) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_GRAPHS_SERVICE_H_
