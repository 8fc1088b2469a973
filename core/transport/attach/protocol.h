// The attach socket: how a local client proves its identity and gets descriptors.
//
// A SOCK_SEQPACKET Unix socket beside the gRPC socket (PATH.attach). One packet is one message; the
// client asks, the daemon answers each request once and in any order. Descriptors travel with the
// answers alone: the daemon takes none.
//
//   client                                   daemon
//   connect                                  reads SO_PEERCRED: pid and uid at the time of connect
//   Hello{magic, versions}               ->  opens a pidfd of that pid
//                                        <-  Challenge{version, nonce}
//   Proof{nonce}                         ->  the kernel says that this pid sent it
//                                            (SCM_CREDENTIALS), after the pidfd was opened: so
//                                            the pidfd is the client's
//                                        <-  Welcome{token, incarnation} + the doorbell page
//   Sessions.Open{attach_token} by gRPC
//   SessionMemory, CreateStaging ...     ->
//                                        <-  answers with descriptors
//
// The token is good for one Sessions.Open of the same uid while this connection lives. When the
// connection closes while the process lives, its session is detached.
// Messages come from processes that may be hostile: decoding checks everything. No gRPC here.
//
// Threads: plain functions and data.
// Ownership: plain values. Errors: INVALID_ARGUMENT (MALFORMED) where a message does not decode.
#ifndef CHORUS_CORE_TRANSPORT_ATTACH_PROTOCOL_H_
#define CHORUS_CORE_TRANSPORT_ATTACH_PROTOCOL_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/ids.h"

namespace chorus {

// Of this protocol and of the shared memory that it hands out.
inline constexpr int32_t kAttachVersion = 2;
inline constexpr size_t kAttachTokenBytes = 16;  // from the system's random source
// Of one message. A longer packet is malformed.
inline constexpr size_t kMaxAttachMessageBytes = 8192;
inline constexpr int kMaxAttachDescriptors = 2;

// PATH.attach.
std::string AttachPath(absl::string_view grpc_path);
// Root's daemon, for all users of a machine.
inline constexpr char kSystemSocketPath[] = "/run/chorus/chorusd.sock";
// Where a daemon of this process's user listens unless it is told another path: for root
// kSystemSocketPath; for user U /run/user/U/chorus/chorusd.sock, or /tmp/chorus-U/chorusd.sock on
// systems without /run/user/U.
std::string DefaultSocketPath();

struct AttachRequest {
  enum class Kind : uint8_t {
    kHello = 1,
    kProof = 2,
    kSessionMemory = 3,   // answer: descriptors of the session memory and of its wake eventfd
    kCreateStaging = 4,   // answer: arena, its size and descriptor
    kConfirmStaging = 5,  // the client has mapped and sealed it (SealMapped)
    kReleaseStaging = 6,
    kResultArena = 7,    // answer: its descriptor and size
    kConfirmMemory = 8,  // the client has mapped and sealed the session memory: it is looked at now
  };
  Kind kind = Kind::kHello;
  uint32_t id = 0;                          // of the client's choosing; its answer carries it
  int32_t oldest_version = kAttachVersion;  // kHello
  int32_t newest_version = kAttachVersion;
  std::string nonce;  // kProof: kAttachTokenBytes
  int64_t bytes = 0;  // kCreateStaging
  ArenaId arena;      // kConfirmStaging, kReleaseStaging, kResultArena

  friend bool operator==(const AttachRequest& a, const AttachRequest& b) {
    return a.kind == b.kind && a.id == b.id && a.oldest_version == b.oldest_version &&
           a.newest_version == b.newest_version && a.nonce == b.nonce && a.bytes == b.bytes &&
           a.arena == b.arena;
  }
};

// Fields that do not belong to the request's kind keep their defaults.
struct AttachReply {
  uint32_t id = 0;
  absl::Status status;         // with its Error
  int32_t version = 0;         // to kHello: the one that both speak
  std::string secret;          // to kHello: the nonce; to kProof: the token. kAttachTokenBytes
  int64_t incarnation = 0;     // to kProof
  std::string daemon_version;  // to kProof
  ArenaId arena;               // to kCreateStaging
  int64_t bytes = 0;           // to kCreateStaging, kResultArena: size of the descriptor's file

  friend bool operator==(const AttachReply& a, const AttachReply& b) {
    return a.id == b.id && a.status == b.status && a.version == b.version && a.secret == b.secret &&
           a.incarnation == b.incarnation && a.daemon_version == b.daemon_version &&
           a.arena == b.arena && a.bytes == b.bytes;
  }
};

std::string EncodeAttachRequest(const AttachRequest& request);
// INVALID_ARGUMENT (MALFORMED): not one whole request. What decodes encodes to the same bytes.
absl::StatusOr<AttachRequest> DecodeAttachRequest(absl::string_view bytes);

std::string EncodeAttachReply(const AttachReply& reply);
absl::StatusOr<AttachReply> DecodeAttachReply(absl::string_view bytes);

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_ATTACH_PROTOCOL_H_
