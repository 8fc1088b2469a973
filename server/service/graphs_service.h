// chorus.v1.Graphs; the proto says what each RPC does.
//
// Threads: as server/service/methods.h says. Ownership: `context` outlives it. Errors: a call ends
// with them; the proto says which.
#ifndef CHORUS_SERVER_SERVICE_GRAPHS_SERVICE_H_
#define CHORUS_SERVER_SERVICE_GRAPHS_SERVICE_H_

#include <memory>

#include "grpcpp/impl/service_type.h"
#include "server/service/context.h"

namespace chorus::server {

std::unique_ptr<grpc::Service> MakeGraphsService(const ServiceContext* context);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_GRAPHS_SERVICE_H_
