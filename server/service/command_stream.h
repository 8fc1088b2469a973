// One Log.Commands: a session's log by messages.
//
// Threads: gRPC's; the stream owns itself and ends with its call. What ends it is its status.
#ifndef CHORUS_SERVER_SERVICE_COMMAND_STREAM_H_
#define CHORUS_SERVER_SERVICE_COMMAND_STREAM_H_

#include "grpcpp/support/server_callback.h"
#include "server/service/context.h"

namespace chorus {

// A stream with kMaxCommandsUnderWay commands without an outcome is not read further until one has
// ended, so that a client that does not read its outcomes stops itself.
inline constexpr int kMaxCommandsUnderWay = 1024;

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StartCommandStream(
    const ServiceContext* service, grpc::CallbackServerContext* context);

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_COMMAND_STREAM_H_
