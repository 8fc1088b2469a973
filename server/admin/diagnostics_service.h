// Handlers of chorus.v1.Diagnostics: read only, for the tenant of the caller.
//
// Threads: gRPC's.
#ifndef CHORUS_SERVER_ADMIN_DIAGNOSTICS_SERVICE_H_
#define CHORUS_SERVER_ADMIN_DIAGNOSTICS_SERVICE_H_

#include "chorus/v1/diagnostics.grpc.pb.h"
#include "server/service/context.h"

namespace chorus {

class DiagnosticsService : public v1::Diagnostics::CallbackService {
 public:
  // `service` outlives it.
  explicit DiagnosticsService(const ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* ListDevices(grpc::CallbackServerContext* context,
                                        const v1::ListDevicesRequest* request,
                                        v1::ListDevicesResponse* response) override;
  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext* context,
                                         const v1::ListSessionsRequest* request,
                                         v1::ListSessionsResponse* response) override;
  grpc::ServerUnaryReactor* ListPending(grpc::CallbackServerContext* context,
                                        const v1::ListPendingRequest* request,
                                        v1::ListPendingResponse* response) override;
  grpc::ServerUnaryReactor* GetError(grpc::CallbackServerContext* context,
                                     const v1::GetErrorRequest* request,
                                     v1::GetErrorResponse* response) override;
  grpc::ServerUnaryReactor* ListFlightEvents(grpc::CallbackServerContext* context,
                                             const v1::ListFlightEventsRequest* request,
                                             v1::ListFlightEventsResponse* response) override;
  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* context,
                                     const v1::GetStatsRequest* request,
                                     v1::GetStatsResponse* response) override;

 private:
  const ServiceContext* const service_;
};

}  // namespace chorus

#endif  // CHORUS_SERVER_ADMIN_DIAGNOSTICS_SERVICE_H_
