// Handlers of chorus.v1.Graphs; the proto says what each RPC does.
//
// Threads: gRPC's. Handlers convert and post; nothing here waits.
#ifndef CHORUS_SERVER_SERVICE_GRAPHS_SERVICE_H_
#define CHORUS_SERVER_SERVICE_GRAPHS_SERVICE_H_

#include "chorus/v1/graphs.grpc.pb.h"
#include "server/service/context.h"

namespace chorus {

class GraphsService : public v1::Graphs::CallbackService {
 public:
  // `service` outlives it.
  explicit GraphsService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Register(grpc::CallbackServerContext* context,
                                     const v1::RegisterGraphRequest* request,
                                     v1::RegisterGraphResponse* response) override;
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context,
                                const v1::RunGraphRequest* request,
                                v1::RunGraphResponse* response) override;
  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context,
                                    const v1::ReleaseGraphsRequest* request,
                                    v1::ReleaseGraphsResponse* response) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_GRAPHS_SERVICE_H_
