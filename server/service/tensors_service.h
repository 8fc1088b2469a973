// Handlers of chorus.v1.Tensors; the proto says what each RPC does.
//
// Threads: gRPC's. Handlers parse, convert and post; nothing here waits but for room to parse
// (parsed.h).
#ifndef CHORUS_SERVER_SERVICE_TENSORS_SERVICE_H_
#define CHORUS_SERVER_SERVICE_TENSORS_SERVICE_H_

#include "chorus/v1/tensors.grpc.pb.h"
#include "server/service/context.h"
#include "server/service/parsed.h"

namespace chorus {

class TensorsService : public Raw<v1::Tensors::Service, v1::Tensors::WithRawCallbackMethod_Download,
                                  v1::Tensors::WithRawCallbackMethod_Create,
                                  v1::Tensors::WithRawCallbackMethod_MakeReadable,
                                  v1::Tensors::WithRawCallbackMethod_Release,
                                  v1::Tensors::WithRawCallbackMethod_CreateStaging,
                                  v1::Tensors::WithRawCallbackMethod_WriteStaging,
                                  v1::Tensors::WithRawCallbackMethod_ReleaseStaging> {
 public:
  // `service` outlives it.
  explicit TensorsService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Create(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* bytes,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* MakeReadable(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* bytes,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* bytes,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CreateStaging(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* bytes,
                                          grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* WriteStaging(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* bytes,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ReleaseStaging(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* bytes,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Download(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* bytes) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_TENSORS_SERVICE_H_
