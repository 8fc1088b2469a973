// What went wrong, which rank or process caused it and what to do next.
//
// Every failure travels as absl::Status. An Error is what such a status carries beyond its code and
// text: a reason (one of the list below, each with cause and remedy in docs/errors.md), the
// culprit, the collective it belongs to and where in the trainer's source it was asked for. It is
// attached as a payload, so it survives every function that only passes the status on.
//
// A status's text is the error's message and, in brackets, what its reader does next:
//   rank 1: take: input 1, i64[3], holds 7 at [2], expected from 0 to 4 (train.cc:12)
//       [BAD_TYPE; fix the call; error 17]
// The brackets are the status's alone: an Error's message never has them, so that records are equal
// where their errors are, and an error that quotes another does not say two remedies.
//
// Threads: plain values and pure functions. Ownership: copies; see Detached() for statuses that are
// handed to another thread. Errors: none; each function says what it gives for what is no reason,
// or no error.
#ifndef CHORUS_CORE_BASE_ERROR_H_
#define CHORUS_CORE_BASE_ERROR_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/base/ids.h"

namespace chorus {

// Stable names: they go over the wire as ErrorInfo.reason. Append only.
enum class Reason : uint16_t {
  kUnspecified = 0,
  // The request itself.
  kMalformed = 1,         // bytes that do not decode, or numbers out of bounds
  kBadType = 2,           // shape, dtype or attribute that the op does not take
  kVersion = 3,           // client and daemon speak different versions
  kUnsupported = 4,       // decoded, but not run by this build
  kUnknownName = 5,       // tensor, graph, world, group or session that does not exist
  kSequenceGap = 6,       // a command's predecessor did not arrive in time
  kOutcomeForgotten = 7,  // the run is older than the outcomes that are kept
  kDonated = 8,           // a tensor whose memory was given to a run
  kWrongState = 9,        // not on this object or not at this time; the text names what comes first
  // Agreement.
  kMismatch = 10,      // the ranks asked for different things
  kOrderCycle = 11,    // the groups of a gang wait for each other in a circle
  kAgreeTimeout = 12,  // a rank did not ask in time; nothing was executed
  kPeerDied = 13,      // a rank's process ended, or its session did; the text says how
  kPeerLeft = 14,      // a rank left the world
  kPeerRefused = 15,   // a rank's part of the collective was refused
  kCancelled = 16,     // a rank withdrew a call of its own
  kEpochEnded = 17,    // the request belongs to an epoch that has ended, cause forgotten
  kNeedsReform = 18,   // the world has lost a member for good
  kTapeConsumed = 19,  // a rank no longer holds what this gradient needs from it
  kGradientLost = 20,  // part of a gradient leads through what a rank has given up
  kOutOfLine = 21,     // this rank could not make a call, and sits out the rest of its step
  kAborted = 22,       // a rank ended the epoch for all
  // Joining.
  kDuplicateRank = 30,
  kWorldSize = 31,
  kJoinTimeout = 32,
  // The daemon.
  kOutOfMemory = 40,
  kQuota = 41,
  kDraining = 42,
  kSessionLost = 43,       // the daemon was restarted, or the lease ran out
  kDaemonLost = 44,        // the daemon does not answer any more
  kExecTimeout = 45,       // committed, but not finished in time
  kExecFailed = 46,        // a device failed while executing
  kNotAttached = 47,       // needs the credentials that only the attach socket gives
  kForked = 48,            // an SDK object used in a forked child
  kTransportTimeout = 49,  // the caller's own wait ended; the outcome is still to be had
  kInternal = 50,
  kCannotServe = 51,  // chorusd does not start: an address, a file or a flag
  kDeviceLost = 52,   // the process that had a device has ended, and all that stood there
};

// What there is to know of a reason, once.
struct ReasonInfo {
  Reason reason;
  const char* name;       // "AGREE_TIMEOUT" for kAgreeTimeout, and so on
  absl::StatusCode code;  // of every error of this reason
  const char* remedy;     // what its reader does next
};
// In the order of their numbers. kUnspecified alone has no code of its own: it is the reason of
// statuses from elsewhere, which keep theirs.
absl::Span<const ReasonInfo> Reasons();
// Of a number that is no reason: kUnspecified's.
const ReasonInfo& InfoOf(Reason reason);
absl::string_view ReasonName(Reason reason);
// The inverse; kUnspecified for a name that this build does not know.
Reason ReasonFromName(absl::string_view name);

// The rank, process or device at fault. Unset numbers are -1.
struct Culprit {
  int32_t rank = -1;  // world rank
  int32_t pid = -1;   // of the trainer, on its own node
  std::string node;   // empty: this one

  friend bool operator==(const Culprit& a, const Culprit& b) {
    return a.rank == b.rank && a.pid == b.pid && a.node == b.node;
  }
};

struct Error {
  // Where a mismatch is concerned, what each rank asked for; at most kMaxRanks of them.
  struct Version {
    int32_t rank = -1;
    std::string what;    // "all_reduce SUM f32[4]"
    std::string source;  // "train.cc:42"

    friend bool operator==(const Version& a, const Version& b) {
      return a.rank == b.rank && a.what == b.what && a.source == b.source;
    }
  };
  static constexpr size_t kMaxRanks = 8;
  // Encoded, and as a status's payload; larger gRPC details vanish on the way.
  static constexpr size_t kMaxBytes = 4096;

  Error() = default;
  // With the code of `reason`.
  explicit Error(Reason reason, std::string message = "");
  // Another reason, with its code.
  void SetReason(Reason reason);

  absl::StatusCode code = absl::StatusCode::kOk;
  Reason reason = Reason::kUnspecified;
  std::string message;  // complete: op, rank, group, expected, got. Texts repeat nothing below.
  ErrorId id;           // 0 until the daemon has recorded it
  Culprit culprit;
  std::string instance;  // "group 0 step 3 call 17"
  std::string op;        // "all_reduce"
  std::string source;    // file:line in the trainer that asked
  std::string expected;
  std::string got;
  std::vector<Version> ranks;
  // Worlds whose epoch ended with this, and the epoch that was open afterwards. A session that is
  // told of it has received the cause, and goes on there. Empty: no epoch has ended.
  struct EndedEpoch {
    WorldId world;
    Epoch open;

    friend bool operator==(const EndedEpoch& a, const EndedEpoch& b) {
      return a.world == b.world && a.open == b.open;
    }
  };
  std::vector<EndedEpoch> ended;  // at most kMaxRanks
  // A call failed without ending its epoch: those concerned have been told, and what uses its
  // result fails in the same way.
  bool alone = false;
};

// In memory, with its texts, about.
int64_t BytesOf(const Error& error);

// What a status's text has after the error's message: " [BAD_TYPE; fix the call; error 17]".
std::string RemedyText(const Error& error);
// `text` without that; unchanged where it does not end with it.
absl::string_view WithoutRemedyText(absl::string_view text, Reason reason);

// The status of `error`, carrying all of it. kOk gives OkStatus.
absl::Status ToStatus(const Error& error);

// What `status` carries; a status from elsewhere gives its code, text and kUnspecified.
Error ErrorOf(const absl::Status& status);

// Shorthand for errors that need no more than a reason and a text.
absl::Status MakeError(Reason reason, absl::string_view message);
absl::Status Malformed(absl::string_view message);
absl::Status BadType(absl::string_view message);
absl::Status Unsupported(absl::string_view message);
absl::Status UnknownName(absl::string_view message);
absl::Status DrainingError();  // of what the end of the daemon ends

// At most 256 bytes of `text`, escaped where they cannot be printed: names and lines that clients
// send, for an error.
std::string Printable(absl::string_view text);

// A copy that shares nothing with `status`, for handing to another thread: the counting of what
// copies of a status share happens inside a library in which ThreadSanitizer sees no atomics.
absl::Status Detached(const absl::Status& status);

// For records and for transports that carry bytes. Encode never exceeds Error::kMaxBytes: texts are
// shortened, the longest first, with "..." in their place.
std::string EncodeError(const Error& error);
// Never fails: bytes that are not an error decode to INTERNAL.
Error DecodeError(absl::string_view bytes);

}  // namespace chorus

#define CHORUS_RETURN_IF_ERROR(expression)         \
  do {                                             \
    ::absl::Status chorus_status = (expression);   \
    if (!chorus_status.ok()) return chorus_status; \
  } while (false)

#define CHORUS_CONCAT_INNER(a, b) a##b
#define CHORUS_CONCAT(a, b) CHORUS_CONCAT_INNER(a, b)
#define CHORUS_ASSIGN_OR_RETURN_IMPL(result, lhs, expression) \
  auto result = (expression);                                 \
  if (!result.ok()) return std::move(result).status();        \
  lhs = *std::move(result)
#define CHORUS_ASSIGN_OR_RETURN(lhs, expression) \
  CHORUS_ASSIGN_OR_RETURN_IMPL(CHORUS_CONCAT(chorus_result_, __LINE__), lhs, expression)

#endif  // CHORUS_CORE_BASE_ERROR_H_
