// The SDK's way to a node in the same process, without any transport: frames are posted to its
// loop.
//
// It shows what the transports must show too: the same frames, order, outcomes and errors.
#ifndef CHORUS_TESTS_CONFORMANCE_DIRECT_LINK_H_
#define CHORUS_TESTS_CONFORMANCE_DIRECT_LINK_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/internal/link.h"
#include "core/base/ids.h"

namespace chorus {

namespace node {
class NodeLoop;
}

namespace conformance {

// Opens a session for a trainer that says it is process `pid`. `loop` outlives the link.
// `host_readable`: the backend's memory is the host's. Sets *session.
absl::StatusOr<std::unique_ptr<internal::Link>> OpenDirectLink(node::NodeLoop* loop,
                                                               const std::vector<int>& devices,
                                                               int pid, bool host_readable,
                                                               SessionId* session);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_DIRECT_LINK_H_
