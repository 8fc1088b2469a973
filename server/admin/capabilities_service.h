// chorus.v1.Capabilities; the proto says what each RPC does.
//
// Threads: as server/service/methods.h says. Ownership: `context` outlives it. Errors: those of
// every call (server/service/request_call.h).
#ifndef CHORUS_SERVER_ADMIN_CAPABILITIES_SERVICE_H_
#define CHORUS_SERVER_ADMIN_CAPABILITIES_SERVICE_H_

#include <memory>

#include "grpcpp/impl/service_type.h"
#include "server/service/context.h"

namespace chorus::server {

std::unique_ptr<grpc::Service> MakeCapabilitiesService(const ServiceContext* context);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_ADMIN_CAPABILITIES_SERVICE_H_
