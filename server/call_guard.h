// Looks at each call when it comes, before its handler has it.
//
// Each is counted as its connection's, until it has ended. One that PeerTable has no room for is
// cancelled, with that error: what a handler answers would wait for a client that may not read it,
// and gRPC's own services do not ask. channelz tells of every connection, whichever tenant's it is:
// it is for the daemon's own user alone. And a call of reflection or channelz holds a thread of the
// daemon's as long as its client likes: there are kMaxBlockingCalls at a time, of one tenant
// ShareOf that.
//
// Threads: gRPC's. Ownership: the guards are gRPC's. Errors: end the call: RESOURCE_EXHAUSTED
// (QUOTA) where there is no room for it, PERMISSION_DENIED (NOT_ATTACHED) of channelz.
#ifndef CHORUS_SERVER_CALL_GUARD_H_
#define CHORUS_SERVER_CALL_GUARD_H_

#include <memory>

#include "grpcpp/support/server_interceptor.h"
#include "server/peers.h"
#include "server/service/room.h"

namespace chorus::server {

inline constexpr int kMaxBlockingCalls = 24;
// Those that gRPC has for them: also some to refuse more.
inline constexpr int kBlockingThreads = kMaxBlockingCalls + 8;

// `peers`, and `blocking`, which has room for the calls that hold a thread, outlive the server.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> GuardCalls(
    PeerTable* peers, SharedRoom* blocking);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_CALL_GUARD_H_
