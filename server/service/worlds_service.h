// Handlers of chorus.v1.Worlds; the proto says what each RPC does.
//
// Threads: gRPC's. Handlers convert and post; nothing here waits.
#ifndef CHORUS_SERVER_SERVICE_WORLDS_SERVICE_H_
#define CHORUS_SERVER_SERVICE_WORLDS_SERVICE_H_

#include "chorus/v1/worlds.grpc.pb.h"
#include "server/service/context.h"

namespace chorus {

class WorldsService : public v1::Worlds::CallbackService {
 public:
  // `service` outlives it.
  explicit WorldsService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context,
                                 const v1::JoinWorldRequest* request,
                                 v1::JoinWorldResponse* response) override;
  grpc::ServerUnaryReactor* CreateGroup(grpc::CallbackServerContext* context,
                                        const v1::CreateGroupRequest* request,
                                        v1::CreateGroupResponse* response) override;
  grpc::ServerUnaryReactor* Leave(grpc::CallbackServerContext* context,
                                  const v1::LeaveWorldRequest* request,
                                  v1::LeaveWorldResponse* response) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortWorldRequest* request,
                                  v1::AbortWorldResponse* response) override;
  grpc::ServerUnaryReactor* Reform(grpc::CallbackServerContext* context,
                                   const v1::ReformWorldRequest* request,
                                   v1::ReformWorldResponse* response) override;
  grpc::ServerUnaryReactor* Describe(grpc::CallbackServerContext* context,
                                     const v1::DescribeWorldsRequest* request,
                                     v1::DescribeWorldsResponse* response) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_WORLDS_SERVICE_H_
