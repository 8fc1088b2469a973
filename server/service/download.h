// One Tensors.Download.
//
// Threads: gRPC's. Ownership: the download owns itself and ends with its call. Errors: what ends it
// is its status.
#ifndef CHORUS_SERVER_SERVICE_DOWNLOAD_H_
#define CHORUS_SERVER_SERVICE_DOWNLOAD_H_

#include "grpcpp/server_context.h"
#include "server/service/context.h"
#include "server/service/request_call.h"

namespace chorus::server {

// Waits for the tensor, then sends it part by part, each made when the one before is on its way.
// The tensor's bytes are kept as long as that takes, whatever becomes of its name: a reader that
// leaves a part for ServiceContext::download_timeout is told TRANSPORT_TIMEOUT, and holds no more.
// An end that it does not take is given up after that time, too (UnreadAlarm).
ByteStream* StartDownload(const ServiceContext* service, grpc::CallbackServerContext* context);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_DOWNLOAD_H_
