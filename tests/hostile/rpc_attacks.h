// Attacks by a client that never attaches: calls of gRPC alone.
//
// Threads: one at a time; what is kept is used by gRPC's as well.
#ifndef CHORUS_TESTS_HOSTILE_RPC_ATTACKS_H_
#define CHORUS_TESTS_HOSTILE_RPC_ATTACKS_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/fault/raw_session.h"
#include "tests/hostile/report.h"

namespace chorus {
namespace hostile {

// Calls that are under way, and what they need.
using Kept = std::vector<std::shared_ptr<void>>;

// `session` lives by a lease.
using RpcAttack = absl::StatusOr<Report> (*)(const fault::RawSession& session, Kept* kept);
const std::map<std::string, RpcAttack>& RpcAttacks();

}  // namespace hostile
}  // namespace chorus

#endif  // CHORUS_TESTS_HOSTILE_RPC_ATTACKS_H_
