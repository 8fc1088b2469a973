// What clients may make the daemon hold by gRPC, beside what is charged to sessions: together at
// most kOwnBytes, with the flags as they are unless told otherwise. The same of what waits in the
// node for a session's first calls.
//
// The library itself holds what it has read and nobody has taken, its calls, and answers that
// nobody reads. How many calls and connections there are is bounded before it makes them
// (read_gate.h, peers.h), how long a message may be before it grants that (http2_frames.h), and
// what it reads by a quota of its own (ReadBytes): beyond that it ends calls, whichever user's they
// are. So the quota has room for all that calls and streams may bring, and no one user comes that
// far.
//
// What malloc keeps of it when it is freed comes on top, as little as heap.h leaves.
//
// Measured with gRPC 1.51: docs/protocol.md, "What a client may make gRPC hold".
//
// Threads: constants. Ownership: none. Errors: none.
#ifndef CHORUS_SERVER_OWN_MEMORY_H_
#define CHORUS_SERVER_OWN_MEMORY_H_

#include <cstdint>

#include "core/base/error.h"
#include "core/node/options.h"
#include "core/node/records.h"
#include "core/node/requests.h"
#include "core/transport/frame_format.h"

namespace chorus::server {

// Bytes of one message. A command has a frame's worth of content, which takes more as a message.
inline constexpr int64_t kMaxRequestBytes = 64 << 10;
inline constexpr int64_t kMaxCommandMessageBytes = 4 * int64_t{kMaxFrameBytes};
inline constexpr int64_t kMaxWriteMessageBytes = node::kMaxChunkBytes + (4 << 10);
inline constexpr int64_t kMaxMessageBytes = kMaxWriteMessageBytes;
static_assert(kMaxCommandMessageBytes <= kMaxMessageBytes);

// Of a message that is not whole gRPC keeps a slice of 32 bytes for what each frame, and each read
// of a connection, brings of it: so it may come in so many pieces, and one more for each so many
// bytes of it. A library that sends cuts frames of 16 KiB, or where a window ends; and gRPC's reads
// end each 8 KiB, or where a client has written no more yet.
inline constexpr int kMessagePieces = 32;
inline constexpr int kMessageBytesAPiece = 512;
// Each message of a stream brings so many more. It may need three itself: a library may send the
// bytes before a message for themselves, and reads end anywhere. And a window that is full of
// messages is made room in as they are taken, and told with each answer: what is sent behind them,
// of whatever size, comes in as many pieces as there were answers. What a stream has not used it
// keeps, up to so many; each takes a slice, and the frame that it came in.
inline constexpr int kPiecesAMessage = 4;
inline constexpr int kMostPieces = kMessagePieces + 640;
inline constexpr int64_t kPieceBytes = 50;
// Messages of calls, behind the first of each, that nobody has taken: only streams of commands (and
// reflection) may have some. A window of 64 KiB has up to 5,957 commands, 11 bytes each. gRPC
// keeps the pieces of one, and the frames that they came in, of five bytes in all where it is
// empty.
inline constexpr int kMaxLaterMessages = 32 << 10;
inline constexpr int64_t kLaterMessageBytes = kPiecesAMessage * (32 + 9) + 5;

// Parsed, a message takes up to so many times its bytes: two of them are an empty message in a
// list, or a field that this build does not know.
inline constexpr int64_t kParsedFactor = 96;
// Of all messages that are being parsed, in memory.
inline constexpr int64_t kMaxParsedBytes = int64_t{25} << 20;
static_assert(kMaxMessageBytes * kParsedFactor <= kMaxParsedBytes);
// Requests that are being read, each of which may become the largest, or wait for the node, as a
// command's frame and the bytes of an upload do.
inline constexpr int64_t kMaxReads = 32;
// Of a stream of commands: what of it may wait for the node before more is read.
inline constexpr int64_t kMaxPostedBytes = 4 << 10;
// Of all answers that are not small until they are read.
inline constexpr int64_t kMaxAnswerBytes = int64_t{17} << 20;

// Connections of each kind, calls that their handlers have let in, and streams of commands, which
// are such calls: unless told otherwise.
inline constexpr int kDefaultMaxConnections = 256;
inline constexpr int kDefaultMaxCalls = 768;
inline constexpr int kDefaultMaxStreams = 64;
// Calls that are not let in, or not yet, or are of gRPC's own services; and those that only have to
// end: beyond these, which are told that there are too many, and those whose answer is on its way.
inline constexpr int kMaxOtherCalls = 128;
inline constexpr int kMaxEndingCalls = 96;
// Of one connection's, that gRPC has not done with.
inline constexpr int kMaxAnswering = 16;

// Of one call's headers, as HTTP/2 counts: names, values and 32 for each field.
inline constexpr int kMaxHeaderBytes = 8 << 10;
// Of a call: what it is to gRPC and to its handler, with its headers and the slices of its message;
// and what its client may send before anybody reads it, to which its first window entitles it (RFC
// 9113, section 6.9.2). One that is cancelled takes nothing more.
inline constexpr int64_t kCallBytes = 56 << 10;
inline constexpr int64_t kUnreadBytes = 64 << 10;
// Of a connection: what it is to gRPC, with the beginning of a call; the answers that gRPC keeps
// for a client that does not read, and the rows of its streams (http2_frames.h); and of all this
// what gRPC counts as read.
inline constexpr int64_t kConnectionBytes = 128 << 10;
inline constexpr int64_t kConnectionReadBytes = 16 << 10;
// Of answers, in the system: how much of them it takes from gRPC and from the attach server before
// a connection's client has read some.
inline constexpr int kSocketBytes = 16 << 10;

// Of gRPC, for what it reads.
constexpr int64_t ReadBytes(int64_t max_connections, int64_t max_calls, int64_t max_streams) {
  return (max_calls + kMaxOtherCalls) * kUnreadBytes +
         (max_streams + kMaxReads) * kMaxMessageBytes + max_connections * kConnectionReadBytes;
}

// With the flags as they are unless told otherwise.
inline constexpr int64_t kOwnBytes = int64_t{256} << 20;
// And of each session, whose record is charged to nobody: CommandLog::kMaxOutcomeBytes, and its
// row.
inline constexpr int64_t kSessionOwnBytes = int64_t{64} << 10;
// The process itself, its log and its tables.
inline constexpr int64_t kBaseBytes = int64_t{16} << 20;
// Errors that it keeps, whose texts clients choose in part; the rest is a row.
inline constexpr int64_t kErrorBytes = int64_t{node::kMaxErrors} * (Error::kMaxBytes + 128);
// All together.
constexpr int64_t SumOfParts(int64_t connections, int64_t calls, int64_t streams,
                             int64_t sessions) {
  return kBaseBytes + kErrorBytes + ReadBytes(0, calls, streams) +
         (calls + kMaxOtherCalls + kMaxEndingCalls) * kCallBytes + connections * kConnectionBytes +
         kMaxParsedBytes + kMaxAnswerBytes + kMaxReads * kMaxMessageBytes +
         streams * (kMaxPostedBytes + kMaxFrameBytes + kMostPieces * kPieceBytes) +
         kMaxLaterMessages * kLaterMessageBytes + sessions * node::kFreeWaits * node::kWaitBytes;
}
inline constexpr int64_t kDefaultSum = SumOfParts(kDefaultMaxConnections, kDefaultMaxCalls,
                                                  kDefaultMaxStreams, node::kDefaultMaxSessions);
static_assert(kDefaultSum <= kOwnBytes);

// What the daemon may take beside its memory limit, sessions' records included.
constexpr int64_t OwnBytes(int64_t connections, int64_t calls, int64_t streams, int64_t sessions) {
  return kOwnBytes - kDefaultSum + SumOfParts(connections, calls, streams, sessions) +
         sessions * kSessionOwnBytes;
}

// Up to which the daemon's cgroup may have memory where arenas are made
// (core/runtime/memory_guard.h), with a memory limit of `limit` and OwnBytes() of `own`. Half of
// what is the daemon's own is left for what comes beside arenas from then on: it has seldom more
// than a fraction of the other half, which would have to be full, and the limit as well, for the
// guard to refuse what accounts have room for. A 128th of the limit is for what the kernel needs to
// find pages: 18 bytes of 4 KiB where they are mapped once, 26 where twice.
constexpr int64_t GuardedBytes(int64_t limit, int64_t own) {
  return limit > INT64_MAX / 2 ? INT64_MAX : limit + limit / 128 + own / 2;
}

}  // namespace chorus::server

#endif  // CHORUS_SERVER_OWN_MEMORY_H_
