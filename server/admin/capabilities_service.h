// Handler of chorus.v1.Capabilities.
//
// Threads: gRPC's.
#ifndef CHORUS_SERVER_ADMIN_CAPABILITIES_SERVICE_H_
#define CHORUS_SERVER_ADMIN_CAPABILITIES_SERVICE_H_

#include "chorus/v1/capabilities.grpc.pb.h"
#include "server/service/context.h"
#include "server/service/parsed.h"

namespace chorus {

class CapabilitiesService
    : public Raw<v1::Capabilities::Service, v1::Capabilities::WithRawCallbackMethod_Get> {
 public:
  // `service` outlives it.
  explicit CapabilitiesService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                grpc::ByteBuffer* response) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_ADMIN_CAPABILITIES_SERVICE_H_
