// channelz tells of every connection, whoever's it is: to the daemon's own user alone.
//
// Threads: any.
#ifndef CHORUS_SERVER_CHANNELZ_GUARD_H_
#define CHORUS_SERVER_CHANNELZ_GUARD_H_

#include <memory>

#include "grpcpp/support/server_interceptor.h"
#include "server/peers.h"

namespace chorus {

// Cancels calls of channelz by others (gRPC's own service has no place for a better answer).
// `peers` outlives the server.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> GuardChannelz(
    const PeerTable* peers);

}  // namespace chorus

#endif  // CHORUS_SERVER_CHANNELZ_GUARD_H_
