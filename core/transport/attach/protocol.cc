#include "core/transport/attach/protocol.h"

#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "core/base/bytes.h"
#include "core/base/error.h"

namespace chorus {
namespace {

// Tells a client of ours from a process that connected to the wrong socket.
constexpr uint32_t kMagic = 0x41524843;  // "CHRA"

absl::Status NoRequest(absl::string_view why) {
  return Malformed(absl::StrCat("attach request: ", why));
}

}  // namespace

std::string AttachPath(absl::string_view grpc_path) { return absl::StrCat(grpc_path, ".attach"); }

std::string DefaultSocketPath() {
  const uid_t uid = geteuid();
  if (uid == 0) return kSystemSocketPath;
  const std::string runtime = absl::StrCat("/run/user/", uid);
  struct stat info;
  if (stat(runtime.c_str(), &info) == 0 && info.st_uid == uid) {
    return absl::StrCat(runtime, "/chorus/chorusd.sock");
  }
  return absl::StrCat("/tmp/chorus-", uid, "/chorusd.sock");
}

std::string EncodeAttachRequest(const AttachRequest& request) {
  ByteWriter out;
  out.Put(kMagic);
  out.Put(request.kind);
  out.Put(request.id);
  switch (request.kind) {
    case AttachRequest::Kind::kHello:
      out.Put(request.oldest_version);
      out.Put(request.newest_version);
      break;
    case AttachRequest::Kind::kProof:
      out.PutRaw(request.nonce.data(), request.nonce.size());
      break;
    case AttachRequest::Kind::kSessionMemory:
    case AttachRequest::Kind::kConfirmMemory:
      break;
    case AttachRequest::Kind::kCreateStaging:
      out.Put(request.bytes);
      break;
    case AttachRequest::Kind::kConfirmStaging:
    case AttachRequest::Kind::kReleaseStaging:
    case AttachRequest::Kind::kResultArena:
      out.Put(request.arena.value());
      break;
  }
  return out.Take();
}

absl::StatusOr<AttachRequest> DecodeAttachRequest(absl::string_view bytes) {
  ByteReader in(bytes);
  if (in.Get<uint32_t>() != kMagic) return NoRequest("does not begin with its magic number");
  AttachRequest request;
  const uint8_t kind = in.Get<uint8_t>();
  if (kind < static_cast<uint8_t>(AttachRequest::Kind::kHello) ||
      kind > static_cast<uint8_t>(AttachRequest::Kind::kConfirmMemory)) {
    return NoRequest(absl::StrCat("expected kind 1 to 8, got ", kind));
  }
  request.kind = static_cast<AttachRequest::Kind>(kind);
  request.id = in.Get<uint32_t>();
  switch (request.kind) {
    case AttachRequest::Kind::kHello:
      request.oldest_version = in.Get<int32_t>();
      request.newest_version = in.Get<int32_t>();
      break;
    case AttachRequest::Kind::kProof:
      request.nonce = std::string(in.GetRaw(kAttachTokenBytes));
      break;
    case AttachRequest::Kind::kSessionMemory:
    case AttachRequest::Kind::kConfirmMemory:
      break;
    case AttachRequest::Kind::kCreateStaging:
      request.bytes = in.Get<int64_t>();
      break;
    case AttachRequest::Kind::kConfirmStaging:
    case AttachRequest::Kind::kReleaseStaging:
    case AttachRequest::Kind::kResultArena:
      request.arena = ArenaId(in.Get<int32_t>());
      break;
  }
  if (!in.Done()) {
    return NoRequest(absl::StrCat("kind ", kind, " has another size than ", bytes.size()));
  }
  return request;
}

std::string EncodeAttachReply(const AttachReply& reply) {
  ByteWriter out;
  out.Put(kMagic);
  out.Put(reply.id);
  out.PutString(reply.status.ok() ? "" : EncodeError(ErrorOf(reply.status)));
  out.Put(reply.version);
  out.PutString(reply.secret);
  out.Put(reply.incarnation);
  out.PutString(reply.daemon_version);
  out.Put(reply.arena.value());
  out.Put(reply.bytes);
  return out.Take();
}

absl::StatusOr<AttachReply> DecodeAttachReply(absl::string_view bytes) {
  ByteReader in(bytes);
  if (in.Get<uint32_t>() != kMagic) {
    return Malformed("attach reply: does not begin with its magic number");
  }
  AttachReply reply;
  reply.id = in.Get<uint32_t>();
  const absl::string_view error = in.GetString();
  if (!error.empty()) reply.status = ToStatus(DecodeError(error));
  reply.version = in.Get<int32_t>();
  reply.secret = std::string(in.GetString());
  reply.incarnation = in.Get<int64_t>();
  reply.daemon_version = std::string(in.GetString());
  reply.arena = ArenaId(in.Get<int32_t>());
  reply.bytes = in.Get<int64_t>();
  if (!in.Done() || (!reply.secret.empty() && reply.secret.size() != kAttachTokenBytes)) {
    return Malformed(absl::StrCat("attach reply: ", bytes.size(), " bytes do not decode"));
  }
  return reply;
}

}  // namespace chorus
