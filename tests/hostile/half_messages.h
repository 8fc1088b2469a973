// Messages of gRPC that begin and do not end, and answers that nobody takes from the socket, as
// HTTP/2 by hand: no library does such.
//
// Threads: one at a time.
#ifndef CHORUS_TESTS_HOSTILE_HALF_MESSAGES_H_
#define CHORUS_TESTS_HOSTILE_HALF_MESSAGES_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/unique_fd.h"
#include "tests/hostile/report.h"

namespace chorus {
namespace hostile {

// Many calls of the daemon that listens at `path`, each with 300 KB of a message of 1 MiB, or as
// much as it takes. They are under way while `connection` is open.
absl::StatusOr<Report> SendHalfMessages(const std::string& path, UniqueFd* connection);

// So many connections that their requests take all turns of a tenant, which do not end in time
// either: behind more answers than a socket has room for.
absl::StatusOr<Report> SendUnreadHalves(const std::string& path,
                                        std::vector<UniqueFd>* connections);

// Many calls without a request.
absl::StatusOr<Report> SendUnreadCalls(const std::string& path, std::vector<UniqueFd>* connections);

}  // namespace hostile
}  // namespace chorus

#endif  // CHORUS_TESTS_HOSTILE_HALF_MESSAGES_H_
