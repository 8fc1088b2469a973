// Handlers of chorus.v1.Tensors; the proto says what each RPC does.
//
// Threads: gRPC's. Handlers convert and post; nothing here waits.
#ifndef CHORUS_SERVER_SERVICE_TENSORS_SERVICE_H_
#define CHORUS_SERVER_SERVICE_TENSORS_SERVICE_H_

#include "chorus/v1/tensors.grpc.pb.h"
#include "server/service/context.h"

namespace chorus {

class TensorsService : public v1::Tensors::CallbackService {
 public:
  // `service` outlives it.
  explicit TensorsService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Create(grpc::CallbackServerContext* context,
                                   const v1::CreateTensorRequest* request,
                                   v1::CreateTensorResponse* response) override;
  grpc::ServerUnaryReactor* MakeReadable(grpc::CallbackServerContext* context,
                                         const v1::MakeReadableRequest* request,
                                         v1::MakeReadableResponse* response) override;
  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context,
                                    const v1::ReleaseTensorsRequest* request,
                                    v1::ReleaseTensorsResponse* response) override;
  grpc::ServerUnaryReactor* CreateStaging(grpc::CallbackServerContext* context,
                                          const v1::CreateStagingRequest* request,
                                          v1::CreateStagingResponse* response) override;
  grpc::ServerUnaryReactor* WriteStaging(grpc::CallbackServerContext* context,
                                         const v1::WriteStagingRequest* request,
                                         v1::WriteStagingResponse* response) override;
  grpc::ServerUnaryReactor* ReleaseStaging(grpc::CallbackServerContext* context,
                                           const v1::ReleaseStagingRequest* request,
                                           v1::ReleaseStagingResponse* response) override;
  grpc::ServerWriteReactor<v1::DownloadTensorResponse>* Download(
      grpc::CallbackServerContext* context, const v1::DownloadTensorRequest* request) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_TENSORS_SERVICE_H_
