// Handlers of chorus.v1.Diagnostics: read only, for the tenant of the caller.
//
// Threads: gRPC's.
#ifndef CHORUS_SERVER_ADMIN_DIAGNOSTICS_SERVICE_H_
#define CHORUS_SERVER_ADMIN_DIAGNOSTICS_SERVICE_H_

#include "chorus/v1/diagnostics.grpc.pb.h"
#include "server/service/context.h"
#include "server/service/parsed.h"

namespace chorus {

class DiagnosticsService
    : public Raw<v1::Diagnostics::Service, v1::Diagnostics::WithRawCallbackMethod_ListDevices,
                 v1::Diagnostics::WithRawCallbackMethod_ListSessions,
                 v1::Diagnostics::WithRawCallbackMethod_ListPending,
                 v1::Diagnostics::WithRawCallbackMethod_GetError,
                 v1::Diagnostics::WithRawCallbackMethod_ListFlightEvents,
                 v1::Diagnostics::WithRawCallbackMethod_GetStats> {
 public:
  // `service` outlives it.
  explicit DiagnosticsService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* ListDevices(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* bytes,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* bytes,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListPending(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* bytes,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetError(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* bytes,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListFlightEvents(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* bytes,
                                             grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* bytes,
                                     grpc::ByteBuffer* response) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_ADMIN_DIAGNOSTICS_SERVICE_H_
