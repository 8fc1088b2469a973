// Messages of gRPC that begin and do not end, answers that nobody takes from the socket, and more
// of both than anybody answers, as HTTP/2 by hand: no library does such.
//
// Threads: one at a time.
#ifndef CHORUS_TESTS_HOSTILE_HALF_MESSAGES_H_
#define CHORUS_TESTS_HOSTILE_HALF_MESSAGES_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/unique_fd.h"
#include "tests/hostile/report.h"

namespace chorus {
namespace hostile {

// Bytes of the longest frame.
inline constexpr size_t kMaxFrame = 16384;

// Many calls of the daemon that listens at `path`, streams of commands first, each with nearly all
// of the largest message, or as much as it takes, in frames of `frame` bytes. They are under way
// while `connection` is open, which acknowledges none of the daemon's settings. Reports of how many
// calls were sent when nothing more was taken, 0 where the connection was ended.
absl::StatusOr<Report> SendHalfMessages(const std::string& path, size_t frame,
                                        UniqueFd* connection);

// The same with so many messages of no bytes, five with their prefix, each: those of calls that
// wait behind others of which nothing comes.
absl::StatusOr<Report> SendEmptyMessages(const std::string& path, size_t messages, size_t frame,
                                         UniqueFd* connection);

// One stream of commands with a message that is declared to be of 1 GiB: as much of it as is
// granted, until the connection is ended. Reports of how many MiB were taken.
absl::StatusOr<Report> SendDeclared(const std::string& path, UniqueFd* connection);

// As many connections as there may be of one user, each with half of a call's headers.
absl::StatusOr<Report> SendHalfHeaders(const std::string& path, std::vector<UniqueFd>* connections);

// So many connections that their requests take all turns of a tenant, which do not end in time
// either: behind more answers than a socket has room for.
absl::StatusOr<Report> SendUnreadHalves(const std::string& path,
                                        std::vector<UniqueFd>* connections);

// What connections send that read nothing, without end.
enum class FloodKind { kCalls, kUnknownCalls, kClosedCalls, kPings, kSettings, kHeaders };
// On twenty connections; reports of how many the daemon has not taken all.
absl::StatusOr<Report> SendFlood(const std::string& path, FloodKind kind,
                                 std::vector<UniqueFd>* connections);

}  // namespace hostile
}  // namespace chorus

#endif  // CHORUS_TESTS_HOSTILE_HALF_MESSAGES_H_
