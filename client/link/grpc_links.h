// The log by gRPC: one stream for all commands, or one unary call each.
//
// Threads: as Link (client/internal/link.h). Ownership: a link owns its session and its calls; its
//   destructor ends those that are under way, and waits for them. Errors: Link's.
#ifndef CHORUS_CLIENT_LINK_GRPC_LINKS_H_
#define CHORUS_CLIENT_LINK_GRPC_LINKS_H_

#include <memory>

#include "client/internal/link.h"
#include "client/link/rpc_link.h"

namespace chorus {
namespace internal {

std::unique_ptr<Link> MakeStreamLink(OpenedSession opened);
std::unique_ptr<Link> MakeUnaryLink(OpenedSession opened);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_LINK_GRPC_LINKS_H_
