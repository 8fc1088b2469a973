#include "client/attach/attach_client.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "client/attach/daemon_socket.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/shared_file.h"

namespace chorus {
namespace {

absl::Status TimedOut(absl::string_view path, absl::string_view what) {
  return MakeError(
      Reason::kTransportTimeout,
      absl::StrCat("the daemon at ", path, " does not answer: nothing came to ", what, " in time"));
}

// Waits until there is something to read. False at the deadline.
bool AwaitReadable(int fd, absl::Time deadline) {
  for (;;) {
    const absl::Duration left = deadline - SteadyNow();
    // An hour at a time, so that an infinite deadline is no overflow.
    const int64_t wait_ms = std::min<int64_t>(
        absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))), 3'600'000);
    pollfd entry = {fd, POLLIN, 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::max<int64_t>(wait_ms, 0)));
    if (ready > 0) return true;
    if (ready == 0 && SteadyNow() >= deadline) return false;
  }
}

absl::string_view KindName(AttachRequest::Kind kind) {
  switch (kind) {
    case AttachRequest::Kind::kHello:
      return "Hello";
    case AttachRequest::Kind::kProof:
      return "Proof";
    case AttachRequest::Kind::kSessionMemory:
      return "SessionMemory";
    case AttachRequest::Kind::kConfirmMemory:
      return "ConfirmMemory";
    case AttachRequest::Kind::kCreateStaging:
      return "CreateStaging";
    case AttachRequest::Kind::kConfirmStaging:
      return "ConfirmStaging";
    case AttachRequest::Kind::kReleaseStaging:
      return "ReleaseStaging";
    case AttachRequest::Kind::kResultArena:
      return "ResultArena";
  }
  return "?";
}

AttachRequest RequestOf(AttachRequest::Kind kind, ArenaId arena = ArenaId()) {
  AttachRequest request;
  request.kind = kind;
  request.arena = arena;
  return request;
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttachClient>> AttachClient::Connect(
    const std::string& path, absl::Time deadline, absl::Span<const uint32_t> daemon_uids) {
  CHORUS_ASSIGN_OR_RETURN(UniqueFd socket_fd,
                          ConnectToDaemon(path, SOCK_SEQPACKET, daemon_uids, deadline));
  std::unique_ptr<AttachClient> client(new AttachClient(path, std::move(socket_fd)));
  CHORUS_ASSIGN_OR_RETURN(Answer challenge,
                          client->Ask(RequestOf(AttachRequest::Kind::kHello), 0, deadline));
  AttachRequest proof = RequestOf(AttachRequest::Kind::kProof);
  proof.nonce = challenge.reply.secret;
  CHORUS_ASSIGN_OR_RETURN(Answer welcome, client->Ask(std::move(proof), 1, deadline));
  client->token_ = std::move(welcome.reply.secret);
  client->incarnation_ = welcome.reply.incarnation;
  client->daemon_version_ = std::move(welcome.reply.daemon_version);
  client->doorbell_ = std::move(welcome.fds[0]);
  return client;
}

absl::StatusOr<AttachClient::Answer> AttachClient::Ask(AttachRequest request, size_t fds,
                                                       absl::Time deadline) {
  MutexLock lock(&mutex_);
  request.id = next_id_++;
  const absl::Status sent = SendPacket(socket_.get(), EncodeAttachRequest(request), {});
  if (!sent.ok()) {
    // What was said before the connection closed says more.
    while (goodbye_.ok()) {
      const absl::StatusOr<absl::optional<Answer>> packet = Receive();
      if (!packet.ok() || !packet->has_value()) break;
    }
    return goodbye_.ok() ? sent : goodbye_;
  }
  for (;;) {
    if (!AwaitReadable(socket_.get(), deadline)) return TimedOut(path_, KindName(request.kind));
    absl::StatusOr<absl::optional<Answer>> packet = Receive();
    if (!packet.ok()) return goodbye_.ok() ? packet.status() : goodbye_;
    // Nothing, or of a request that ended by its deadline.
    if (!packet->has_value() || (*packet)->reply.id != request.id) continue;
    Answer answer = **std::move(packet);
    CHORUS_RETURN_IF_ERROR(answer.reply.status);
    if (answer.fds.size() != fds) {
      return MakeError(Reason::kInternal,
                       absl::StrCat("attach socket: the answer to ", KindName(request.kind),
                                    " has ", answer.fds.size(), " descriptors, expected ", fds));
    }
    return answer;
  }
}

absl::StatusOr<absl::optional<AttachClient::Answer>> AttachClient::Receive() {
  CHORUS_ASSIGN_OR_RETURN(
      absl::optional<Packet> packet,
      ReceivePacket(socket_.get(), kMaxAttachMessageBytes, kMaxAttachDescriptors));
  if (!packet.has_value()) return absl::optional<Answer>();
  Answer answer;
  CHORUS_ASSIGN_OR_RETURN(answer.reply, DecodeAttachReply(packet->bytes));
  answer.fds = std::move(packet->fds);
  if (answer.reply.id == 0 && !answer.reply.status.ok()) goodbye_ = answer.reply.status;
  return absl::optional<Answer>(std::move(answer));
}

absl::Status AttachClient::Goodbye() {
  MutexLock lock(&mutex_);
  for (;;) {
    const absl::StatusOr<absl::optional<Answer>> packet = Receive();
    if (!packet.ok() || !packet->has_value()) return goodbye_;
  }
}

absl::StatusOr<AttachClient::SessionMemoryFds> AttachClient::SessionMemory(absl::Time deadline) {
  CHORUS_ASSIGN_OR_RETURN(Answer answer,
                          Ask(RequestOf(AttachRequest::Kind::kSessionMemory), 2, deadline));
  SessionMemoryFds result;
  result.memory = std::move(answer.fds[0]);
  result.wake = std::move(answer.fds[1]);
  return result;
}

absl::Status AttachClient::ConfirmMemory(absl::Time deadline) {
  return Ask(RequestOf(AttachRequest::Kind::kConfirmMemory), 0, deadline).status();
}

absl::StatusOr<AttachClient::Staging> AttachClient::CreateStaging(int64_t bytes,
                                                                  absl::Time deadline) {
  AttachRequest request = RequestOf(AttachRequest::Kind::kCreateStaging);
  request.bytes = bytes;
  CHORUS_ASSIGN_OR_RETURN(Answer answer, Ask(std::move(request), 1, deadline));
  Staging staging;
  staging.arena = answer.reply.arena;
  staging.bytes = answer.reply.bytes;
  staging.fd = std::move(answer.fds[0]);
  return staging;
}

absl::Status AttachClient::ConfirmStaging(const Staging& staging, absl::Time deadline) {
  if (!SealMapped(staging.fd.get())) {
    return MakeError(Reason::kInternal, absl::StrCat("staging arena ", staging.arena.value(),
                                                     " cannot be sealed: ", strerror(errno)));
  }
  return Ask(RequestOf(AttachRequest::Kind::kConfirmStaging, staging.arena), 0, deadline).status();
}

absl::Status AttachClient::ReleaseStaging(ArenaId arena, absl::Time deadline) {
  return Ask(RequestOf(AttachRequest::Kind::kReleaseStaging, arena), 0, deadline).status();
}

absl::StatusOr<AttachClient::ResultArenaFd> AttachClient::ResultArena(ArenaId arena,
                                                                      absl::Time deadline) {
  CHORUS_ASSIGN_OR_RETURN(Answer answer,
                          Ask(RequestOf(AttachRequest::Kind::kResultArena, arena), 1, deadline));
  ResultArenaFd result;
  result.bytes = answer.reply.bytes;
  result.fd = std::move(answer.fds[0]);
  return result;
}

}  // namespace chorus
