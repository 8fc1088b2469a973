#include "server/attach/attach_server.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "glog/logging.h"
#include "server/accept.h"
#include "server/places.h"
#include "server/unix_listener.h"

namespace chorus::server {
namespace {

// What epoll_event.data.u64 says; connections count from kFirstConnection.
constexpr uint64_t kStop = 0;
constexpr uint64_t kFirstListener = 1;
constexpr uint64_t kFirstConnection = 1 << 16;

// Whether `fd` is watched, for what, from now on.
bool Watch(int epoll, int operation, int fd, uint32_t events, uint64_t source) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = source;
  return epoll_ctl(epoll, operation, fd, &event) == 0;
}

bool Exited(int pidfd) {
  pollfd entry = {pidfd, POLLIN, 0};
  return poll(&entry, 1, 0) != 0;
}

// On their way to one client. The system counts all that this process's user has sent and nobody
// has read, and lets it send no more to anybody at as many as it may have open. There are no more
// connections than an eighth of that (server/daemon.cc), so half of it is never reached.
constexpr int kMaxUnreadDescriptors = 4;

// Bytes that were sent and that the other end has not read; it has none where it is gone.
int UnreadBytes(int socket) {
  int bytes = 0;
  return ioctl(socket, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

// False: the client was told, or will see, that it does not get this.
bool Answer(int socket, uint32_t id, AttachReply reply, absl::Span<const int> fds) {
  reply.id = id;
  const absl::Status status = SendPacket(socket, EncodeAttachReply(reply), fds);
  if (status.ok()) return true;
  if (absl::IsResourceExhausted(status)) {
    // By others' descriptors: it is no fault of this client.
    AttachReply refusal;
    refusal.status = status;
    Answer(socket, id, std::move(refusal), {});
    return false;
  }
  // A client that does not take its answers: its connection ends, which its own thread sees.
  shutdown(socket, SHUT_RDWR);
  return false;
}

void AnswerError(int socket, uint32_t id, const absl::Status& status) {
  AttachReply reply;
  reply.status = status;
  Answer(socket, id, std::move(reply), {});
}

// In its answer.
int DescriptorsOf(AttachRequest::Kind kind) {
  switch (kind) {
    case AttachRequest::Kind::kSessionMemory:
      return 2;
    case AttachRequest::Kind::kProof:
    case AttachRequest::Kind::kCreateStaging:
    case AttachRequest::Kind::kResultArena:
      return 1;
    case AttachRequest::Kind::kHello:
    case AttachRequest::Kind::kConfirmMemory:
    case AttachRequest::Kind::kConfirmStaging:
    case AttachRequest::Kind::kReleaseStaging:
      return 0;
  }
  return 0;
}

absl::Status Denied(absl::string_view why) {
  return MakeError(Reason::kNotAttached, absl::StrCat("attach: ", why));
}

int64_t FileBytes(int fd) {
  struct stat info = {};
  return fstat(fd, &info) == 0 ? static_cast<int64_t>(info.st_size) : 0;
}

}  // namespace

std::string RandomToken() {
  std::string token(kAttachTokenBytes, '\0');
  // At most 256 bytes come whole or not at all, once the system is up.
  const ssize_t size = getrandom(&token[0], token.size(), 0);
  CHECK_EQ(size, static_cast<ssize_t>(token.size())) << "getrandom: " << strerror(errno);
  return token;
}

void AttachServer::Connection::Asked() {
  MutexLock lock(&unanswered_mutex);
  if (++unanswered == kMaxAsked) Watch(epoll->get(), EPOLL_CTL_MOD, socket.get(), EPOLLRDHUP, id);
}

void AttachServer::Connection::Answered() {
  MutexLock lock(&unanswered_mutex);
  // One that has been closed is not watched any more, and stays so.
  if (unanswered-- == kMaxAsked) {
    Watch(epoll->get(), EPOLL_CTL_MOD, socket.get(), EPOLLIN | EPOLLRDHUP, id);
  }
}

bool AttachServer::Connection::MayAsk() {
  MutexLock lock(&unanswered_mutex);
  return unanswered < kMaxAsked;
}

bool AttachServer::Connection::MayHave(int descriptors) {
  if (UnreadBytes(socket.get()) == 0) unread_fds = 0;
  if (unread_fds + descriptors > kMaxUnreadDescriptors) return false;
  unread_fds += descriptors;
  return true;
}

AttachServer::AttachServer(std::vector<UniqueFd> listeners, AttachOptions options,
                           node::NodeLoop* loop, TenantLog* log)
    : listeners_(std::move(listeners)),
      options_(std::move(options)),
      loop_(loop),
      log_(log),
      epoll_(std::make_shared<const UniqueFd>(epoll_create1(EPOLL_CLOEXEC))),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      next_id_(kFirstConnection) {
  Watch(epoll_->get(), EPOLL_CTL_ADD, stop_.get(), EPOLLIN, kStop);
  for (size_t i = 0; i < listeners_.size(); ++i) {
    Watch(epoll_->get(), EPOLL_CTL_ADD, listeners_[i].get(), EPOLLIN, kFirstListener + i);
  }
  thread_ = std::thread([this] { Loop(); });
}

AttachServer::~AttachServer() {
  if (thread_.joinable()) Stop();
}

void AttachServer::Stop() {
  const uint64_t one = 1;
  if (write(stop_.get(), &one, sizeof(one)) < 0) LOG(ERROR) << "attach: " << strerror(errno);
  thread_.join();
  listeners_.clear();
  std::vector<ConnectionRef> rest;
  {
    MutexLock lock(&mutex_);
    for (const auto& [id, connection] : connections_) rest.push_back(connection);
  }
  for (const ConnectionRef& connection : rest) Close(connection);
  MutexLock lock(&mutex_);
  unread_.clear();
}

void AttachServer::Loop() {
  for (;;) {
    epoll_event events[64];
    const int count = epoll_wait(epoll_->get(), events, 64, Sweep());
    if (count < 0 && errno != EINTR) {
      LOG(ERROR) << "attach: epoll_wait: " << strerror(errno);
      return;
    }
    for (int i = 0; i < count; ++i) {
      const uint64_t source = events[i].data.u64;
      if (source == kStop) return;
      if (source < kFirstConnection) {
        Accept(listeners_[source - kFirstListener].get());
        continue;
      }
      ConnectionRef connection;
      {
        MutexLock lock(&mutex_);
        const auto it = connections_.find(source);
        if (it != connections_.end()) connection = it->second;
      }
      if (connection != nullptr) {
        Receive(connection, (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0);
      }
    }
  }
}

void AttachServer::Accept(int listener) {
  server::Accept("attach", listener, stop_.get(),
                 [this](ClientSocket socket) { Add(std::move(socket)); });
}

void AttachServer::Add(ClientSocket socket) {
  const absl::StatusOr<PeerCredentials> peer = GetPeerCredentials(socket.get());
  if (!peer.ok() || peer->pid <= 0) {
    AnswerError(socket.get(), 0,
                Denied("the daemon cannot see the client's process (another PID namespace?)"));
    return;
  }
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on));
  auto connection = std::make_shared<Connection>();
  connection->pid = peer->pid;
  connection->uid = peer->uid;
  connection->socket = std::move(socket);
  connection->epoll = epoll_;
  {
    MutexLock lock(&mutex_);
    const auto count = per_uid_.find(connection->uid);
    const absl::Status status = CheckPlaces(
        "attach connections", count == per_uid_.end() ? 0 : count->second,
        static_cast<int>(connections_.size() + unread_.size()), options_.max_connections);
    if (!status.ok()) {
      AnswerError(connection->socket.get(), 0, status);
      return;
    }
    ++per_uid_[connection->uid];
    connection->id = next_id_++;
    connections_[connection->id] = connection;
    SetDeadlineLocked(connection.get(), SteadyNow() + options_.handshake_timeout);
  }
  if (!Watch(epoll_->get(), EPOLL_CTL_ADD, connection->socket.get(), EPOLLIN | EPOLLRDHUP,
             connection->id)) {
    LOG(ERROR) << "attach: epoll_ctl: " << strerror(errno);
    Close(connection);
  }
}

void AttachServer::Receive(const ConnectionRef& connection, bool has_ended) {
  // A bound on one client's turn: the rest is still there at the next.
  for (int turn = 0; turn < 16; ++turn) {
    // The node's answers are to come first: a client has no more of its time than that.
    if (!connection->MayAsk()) {
      if (has_ended) Close(connection);
      return;
    }
    absl::StatusOr<absl::optional<Packet>> packet =
        ReceivePacket(connection->socket.get(), kMaxAttachMessageBytes, 0);
    if (packet.ok() && !packet->has_value()) return;
    absl::Status status = packet.status();
    uint32_t id = 0;
    if (status.ok()) {
      const absl::StatusOr<AttachRequest> request = DecodeAttachRequest((*packet)->bytes);
      status = request.status();
      if (status.ok()) {
        id = request->id;
        status = Handle(connection, *request, **packet);
      }
    }
    if (!status.ok()) {
      if (!absl::IsUnavailable(status)) {
        Say(google::GLOG_WARNING, *connection, absl::StrCat("is refused: ", status.message()));
        AnswerError(connection->socket.get(), id, status);
      }
      Close(connection);
      return;
    }
  }
}

void AttachServer::Say(google::LogSeverity severity, const Connection& connection,
                       absl::string_view what) {
  log_->Say(severity, TenantOf(connection.uid),
            absl::StrCat("attach: pid ", connection.pid, " uid ", connection.uid, " ", what));
}

absl::Status AttachServer::Handle(const ConnectionRef& connection, const AttachRequest& request,
                                  const Packet& packet) {
  Connection::State state;
  SessionId session;
  {
    MutexLock lock(&mutex_);
    state = connection->state;
    session = connection->session;
  }
  if (request.kind == AttachRequest::Kind::kHello && state == Connection::State::kNew) {
    return HandleHello(connection, request);
  }
  if (request.kind == AttachRequest::Kind::kProof && state == Connection::State::kChallenged) {
    return HandleProof(connection, request, packet);
  }
  if (request.kind == AttachRequest::Kind::kHello || request.kind == AttachRequest::Kind::kProof ||
      state == Connection::State::kNew || state == Connection::State::kChallenged) {
    return Malformed("attach: expected Hello, then Proof, then the rest");
  }
  if (state != Connection::State::kBound) {
    AnswerError(connection->socket.get(), request.id,
                MakeError(Reason::kNotAttached,
                          "attach: open a session with the token first (Sessions.Open)"));
    return absl::OkStatus();
  }
  CarryOut(connection, request, session);
  return absl::OkStatus();
}

absl::Status AttachServer::HandleHello(const ConnectionRef& connection,
                                       const AttachRequest& request) {
  if (request.oldest_version > kAttachVersion || request.newest_version < kAttachVersion) {
    return MakeError(Reason::kVersion,
                     absl::StrCat("attach: the client speaks versions ", request.oldest_version,
                                  " to ", request.newest_version, ", this daemon (",
                                  options_.daemon_version, ") speaks ", kAttachVersion));
  }
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, connection->pid, 0)));
  if (!pidfd.valid()) {
    return errno == ESRCH
               ? Denied("the process that connected has ended")
               : MakeError(Reason::kQuota, absl::StrCat("attach: pidfd_open: ", strerror(errno)));
  }
  AttachReply reply;
  reply.version = kAttachVersion;
  reply.secret = RandomToken();
  {
    MutexLock lock(&mutex_);
    connection->pidfd = std::move(pidfd);
    connection->secret = reply.secret;
    connection->state = Connection::State::kChallenged;
  }
  Answer(connection->socket.get(), request.id, std::move(reply), {});
  return absl::OkStatus();
}

absl::Status AttachServer::HandleProof(const ConnectionRef& connection,
                                       const AttachRequest& request, const Packet& packet) {
  if (request.nonce != connection->secret) return Denied("the proof is not what was asked for");
  // The nonce did not exist before the pidfd: the process that sends it now with this pid is the
  // one that the pidfd is of, unless that process has ended.
  if (packet.sender != connection->pid) {
    return Denied(absl::StrCat("pid ", connection->pid, " connected, but pid ",
                               packet.sender.value_or(-1),
                               " speaks (a connection cannot be handed on or used after fork)"));
  }
  if (Exited(connection->pidfd.get())) return Denied("the process that connected has ended");
  AttachReply reply;
  reply.secret = RandomToken();
  reply.incarnation = options_.incarnation;
  reply.daemon_version = options_.daemon_version;
  {
    MutexLock lock(&mutex_);
    connection->secret = reply.secret;
    connection->state = Connection::State::kWelcome;
    SetDeadlineLocked(connection.get(), SteadyNow() + options_.open_timeout);
    tokens_[reply.secret] = connection;
  }
  // The doorbell's descriptor is the node's, so its thread sends it.
  AskNode(connection, [id = request.id, reply = std::move(reply)](node::LocalNode& node,
                                                                  const ConnectionRef& c) {
    c->MayHave(DescriptorsOf(AttachRequest::Kind::kProof));  // the first
    Answer(c->socket.get(), id, reply, {node.doorbell_fd()});
  });
  return absl::OkStatus();
}

void AttachServer::AskNode(
    const ConnectionRef& connection,
    std::function<void(node::LocalNode& node, const ConnectionRef& asker)> answer) {
  connection->Asked();
  ConnectionRef asker(connection.get(), [connection](Connection* c) { c->Answered(); });
  loop_->Post(TenantOf(connection->uid),
              [asker = std::move(asker), answer = std::move(answer)](
                  node::LocalNode& node, absl::Time) { answer(node, asker); });
}

void AttachServer::CarryOut(const ConnectionRef& connection, const AttachRequest& request,
                            SessionId session) {
  AskNode(connection, [request, session](node::LocalNode& node, const ConnectionRef& c) {
    const int socket = c->socket.get();
    // Just before they are sent.
    const auto check_may_have = [c, kind = request.kind]() -> absl::Status {
      if (c->MayHave(DescriptorsOf(kind))) return absl::OkStatus();
      return MakeError(Reason::kQuota, absl::StrCat("attach: ", c->unread_fds.load(),
                                                    " descriptors were sent and have not been "
                                                    "read, of ",
                                                    kMaxUnreadDescriptors));
    };
    if (request.kind != AttachRequest::Kind::kCreateStaging) {
      const absl::Status may_have = check_may_have();
      if (!may_have.ok()) return AnswerError(socket, request.id, may_have);
    }
    switch (request.kind) {
      case AttachRequest::Kind::kSessionMemory: {
        const auto memory = node.AttachMemory(session);
        if (!memory.ok()) return AnswerError(socket, request.id, memory.status());
        Answer(socket, request.id, AttachReply(), {memory->memory_fd, memory->wake_fd});
        return;
      }
      case AttachRequest::Kind::kConfirmMemory:
        return AnswerError(socket, request.id, node.ConfirmMemory(session));
      case AttachRequest::Kind::kCreateStaging: {
        const auto answer = [&node, c, session, check_may_have,
                             id = request.id](const absl::StatusOr<node::StagingArena>& staging) {
          if (!staging.ok()) return AnswerError(c->socket.get(), id, staging.status());
          const absl::Status may_have = check_may_have();
          if (!may_have.ok()) {
            node.ReleaseStaging(session, staging->arena).IgnoreError();
            return AnswerError(c->socket.get(), id, may_have);
          }
          AttachReply reply;
          reply.arena = staging->arena;
          reply.bytes = staging->bytes;
          const absl::StatusOr<int> fd = node.StagingFd(session, staging->arena);
          if (!fd.ok()) {
            node.ReleaseStaging(session, staging->arena).IgnoreError();
            return AnswerError(c->socket.get(), id, fd.status());
          }
          if (!Answer(c->socket.get(), id, std::move(reply), {*fd})) {
            node.ReleaseStaging(session, staging->arena).IgnoreError();
          }
        };
        node.CreateStaging(session, request.bytes, answer);
        return;
      }
      case AttachRequest::Kind::kConfirmStaging:
        return AnswerError(socket, request.id, node.ConfirmStaging(session, request.arena));
      case AttachRequest::Kind::kReleaseStaging:
        return AnswerError(socket, request.id, node.ReleaseStaging(session, request.arena));
      case AttachRequest::Kind::kResultArena: {
        const auto fd = node.ResultArenaFd(session, request.arena);
        if (!fd.ok()) return AnswerError(socket, request.id, fd.status());
        AttachReply reply;
        reply.arena = request.arena;
        reply.bytes = FileBytes(*fd);
        Answer(socket, request.id, std::move(reply), {*fd});
        return;
      }
      case AttachRequest::Kind::kHello:
      case AttachRequest::Kind::kProof:
        break;  // the handshake is over before anything comes here
    }
  });
}

void AttachServer::Close(const ConnectionRef& connection) {
  bool is_bound;
  SessionId session;
  {
    MutexLock lock(&mutex_);
    if (connections_.erase(connection->id) == 0) return;
    SetDeadlineLocked(connection.get(), absl::InfiniteFuture());
    tokens_.erase(connection->secret);
    is_bound = connection->state == Connection::State::kBound;
    if (is_bound || connection->state == Connection::State::kClaimed) {
      const auto process = attached_.find(connection->pid);
      if (--process->second == 0) attached_.erase(process);
    }
    session = connection->session;
    // It may be kept until its client has read; nobody asks after its process any more.
    connection->pidfd = UniqueFd();
  }
  epoll_ctl(epoll_->get(), EPOLL_CTL_DEL, connection->socket.get(), nullptr);
  // Nothing is sent to it after that.
  shutdown(connection->socket.get(), SHUT_RDWR);
  {
    MutexLock lock(&mutex_);
    if (connection->unread_fds == 0 || UnreadBytes(connection->socket.get()) == 0) {
      UncountLocked(*connection);
    } else {
      unread_.push_back(connection);
    }
  }
  if (is_bound) {
    loop_->Post(TenantOf(connection->uid), [session](node::LocalNode& node, absl::Time now) {
      node.SetDetached(session, true, now);
    });
  }
}

void AttachServer::UncountLocked(const Connection& connection) {
  const auto count = per_uid_.find(connection.uid);
  if (--count->second == 0) per_uid_.erase(count);
}

void AttachServer::SetDeadlineLocked(Connection* connection, absl::Time deadline) {
  deadlines_.erase({connection->deadline, connection->id});
  connection->deadline = deadline;
  if (deadline != absl::InfiniteFuture()) deadlines_.insert({deadline, connection->id});
}

int AttachServer::Sweep() {
  std::vector<ConnectionRef> overdue;
  std::vector<ConnectionRef> bound_connections;
  absl::Time next = absl::InfiniteFuture();
  const absl::Time now = SteadyNow();
  {
    MutexLock lock(&mutex_);
    for (const auto& [deadline, id] : deadlines_) {
      if (deadline > now) {
        next = deadline;
        break;
      }
      overdue.push_back(connections_[id]);
    }
    if (!attached_.empty() || !unread_.empty()) {
      // Once in a while, all of them.
      if (next_look_ <= now) {
        next_look_ = now + options_.open_timeout / 4;
        const auto first_read = std::partition(
            unread_.begin(), unread_.end(),
            [](const ConnectionRef& closed) { return UnreadBytes(closed->socket.get()) > 0; });
        for (auto it = first_read; it != unread_.end(); ++it) UncountLocked(**it);
        unread_.erase(first_read, unread_.end());
        for (const auto& [id, connection] : connections_) {
          if (connection->state != Connection::State::kBound) continue;
          bound_connections.push_back(connection);
        }
      }
      next = std::min(next, next_look_);
    }
  }
  for (const ConnectionRef& connection : overdue) {
    Say(google::GLOG_INFO, *connection, "has opened no session in time");
    Close(connection);
  }
  if (!bound_connections.empty()) CloseEnded(std::move(bound_connections));
  if (next == absl::InfiniteFuture()) return -1;
  return static_cast<int>(absl::ToInt64Milliseconds(
      std::min(absl::Ceil(next - now, absl::Milliseconds(1)), absl::Hours(1))));
}

void AttachServer::CloseEnded(std::vector<ConnectionRef> bound_connections) {
  loop_->PostOwn(
      [bound_connections = std::move(bound_connections)](node::LocalNode& node, absl::Time) {
        for (const ConnectionRef& connection : bound_connections) {
          if (node.Lives(connection->session)) continue;
          // The attach thread sees it.
          shutdown(connection->socket.get(), SHUT_RDWR);
        }
      });
}

bool AttachServer::Attached(pid_t pid) const {
  MutexLock lock(&mutex_);
  return attached_.contains(pid);
}

absl::StatusOr<AttachServer::Client> AttachServer::Claim(absl::string_view token, uid_t uid) {
  MutexLock lock(&mutex_);
  const auto it = tokens_.find(token);
  if (it == tokens_.end() || it->second->uid != uid) {
    return Denied("the token is unknown, used or of another uid; connect to the attach socket");
  }
  Connection* const connection = it->second.get();
  Client client;
  client.connection = connection->id;
  client.pid = connection->pid;
  client.pidfd = UniqueFd(fcntl(connection->pidfd.get(), F_DUPFD_CLOEXEC, 0));
  if (!client.pidfd.valid()) {
    return MakeError(Reason::kQuota, absl::StrCat("attach: ", strerror(errno)));
  }
  connection->state = Connection::State::kClaimed;
  ++attached_[connection->pid];
  tokens_.erase(it);
  return client;
}

void AttachServer::SayGoodbye(const absl::Status& why) {
  AttachReply reply;
  reply.status = why;
  const std::string bytes = EncodeAttachReply(reply);
  MutexLock lock(&mutex_);
  for (const auto& [id, connection] : connections_) {
    // Whose buffer is full does not read anyway.
    SendPacket(connection->socket.get(), bytes, {}).IgnoreError();
  }
}

bool AttachServer::Bind(uint64_t connection, SessionId session) {
  MutexLock lock(&mutex_);
  const auto it = connections_.find(connection);
  if (it == connections_.end()) return false;
  it->second->state = Connection::State::kBound;
  it->second->session = session;
  SetDeadlineLocked(it->second.get(), absl::InfiniteFuture());
  return true;
}

}  // namespace chorus::server
