// Handlers of chorus.v1.Log; the proto says what each RPC does.
//
// Threads: gRPC's. Handlers convert and post; nothing here waits.
#ifndef CHORUS_SERVER_SERVICE_LOG_SERVICE_H_
#define CHORUS_SERVER_SERVICE_LOG_SERVICE_H_

#include "chorus/v1/log.grpc.pb.h"
#include "server/service/context.h"

namespace chorus {

class LogService : public v1::Log::CallbackService {
 public:
  // `service` outlives it.
  explicit LogService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Submit(grpc::CallbackServerContext* context,
                                   const v1::SubmitRequest* request,
                                   v1::SubmitResponse* response) override;
  grpc::ServerUnaryReactor* Wait(grpc::CallbackServerContext* context,
                                 const v1::WaitRequest* request,
                                 v1::WaitResponse* response) override;
  grpc::ServerBidiReactor<v1::CommandsRequest, v1::CommandsResponse>* Commands(
      grpc::CallbackServerContext* context) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_LOG_SERVICE_H_
