// Handler of chorus.v1.Capabilities.
//
// Threads: gRPC's.
#ifndef CHORUS_SERVER_ADMIN_CAPABILITIES_SERVICE_H_
#define CHORUS_SERVER_ADMIN_CAPABILITIES_SERVICE_H_

#include "chorus/v1/capabilities.grpc.pb.h"
#include "server/service/context.h"

namespace chorus {

class CapabilitiesService : public v1::Capabilities::CallbackService {
 public:
  // `service` outlives it.
  explicit CapabilitiesService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context,
                                const v1::GetCapabilitiesRequest* request,
                                v1::GetCapabilitiesResponse* response) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_ADMIN_CAPABILITIES_SERVICE_H_
