// One Log.Commands: a session's log by messages.
//
// Threads: gRPC's. Ownership: the stream owns itself and ends with its call. Errors: a command's
// come with its outcome; what ends the stream is its status.
#ifndef CHORUS_SERVER_SERVICE_COMMAND_STREAM_H_
#define CHORUS_SERVER_SERVICE_COMMAND_STREAM_H_

#include <cstdint>

#include "grpcpp/server_context.h"
#include "server/service/context.h"
#include "server/service/request_call.h"

namespace chorus::server {

// A stream with kMaxCommandsUnderWay commands whose outcome has not been written, with more than
// kMaxUnwrittenBytes of outcomes, or with more than kMaxPostedBytes of commands that the node has
// not come to, is not read further until that is less, so that a client that does not read its
// outcomes stops itself. What the commands under way hold is charged by the node; what their
// outcomes are beyond kMaxUnwrittenBytes takes room of ServiceContext::answers from when the node
// tells them, for thousands may fail at a time, and the worker comes to them one by one. Where
// there is no room the stream ends.
inline constexpr int kMaxCommandsUnderWay = 1024;
inline constexpr int64_t kMaxUnwrittenBytes = 4096;

ByteStream* StartCommandStream(const ServiceContext* service, grpc::CallbackServerContext* context);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_COMMAND_STREAM_H_
