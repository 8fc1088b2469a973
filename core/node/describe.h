// What sessions and worlds look like from outside. Nothing here changes anything.
//
// Threads: the node thread. Ownership: copies. Errors: none.
#ifndef CHORUS_CORE_NODE_DESCRIBE_H_
#define CHORUS_CORE_NODE_DESCRIBE_H_

#include <cstdint>

#include "absl/time/time.h"
#include "core/node/info.h"
#include "core/node/session.h"
#include "core/node/world.h"

namespace chorus::node {

SessionInfo Describe(const Session& session, absl::Time now);
// Takes one of `room` for each member, and for each group and its members: where there is no more
// room groups are left out.
WorldInfo Describe(const World& world, absl::Time now, int64_t* room);

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_DESCRIBE_H_
