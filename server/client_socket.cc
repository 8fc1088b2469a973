#include "server/client_socket.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

#include <atomic>
#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "core/base/mutex.h"

namespace chorus::server {
namespace {

// SO_PASSRIGHTS, which the headers of older systems have not.
constexpr int kPassRights = 83;

// Drops all that has come on `socket`, with its descriptors.
void DropUnread(int socket) {
  constexpr int kPackets = 64;
  char bytes[4096];  // nobody looks at them
  iovec part = {bytes, sizeof(bytes)};
  mmsghdr packets[kPackets] = {};
  for (mmsghdr& packet : packets) {
    packet.msg_hdr.msg_iov = &part;
    packet.msg_hdr.msg_iovlen = 1;
  }
  // The files of one such call end together, so that one signal is enough for them.
  while (recvmmsg(socket, packets, kPackets, MSG_DONTWAIT, nullptr) == kPackets &&
         packets[kPackets - 1].msg_len > 0) {
  }
}

// That the thread has, with the one that it is closing.
std::atomic<int> unclosed{0};

class Closer {
 public:
  static Closer& Get() {
    static Closer* const closer = new Closer;
    return *closer;
  }

  void Take(UniqueFd socket) {
    MutexLock lock(&mutex_);
    waiting_.push_back(std::move(socket));
    ++unclosed;
    not_empty_.Signal();
  }

  // It may not wait at this moment: then the next call does it.
  void EndWait() { pthread_kill(thread_, SIGURG); }

 private:
  Closer() {
    // A signal that is ignored, as this one is by default, ends no wait.
    struct sigaction action = {};
    action.sa_handler = [](int) {};
    sigaction(SIGURG, &action, nullptr);
    std::thread thread([this] { Loop(); });
    thread_ = thread.native_handle();
    thread.detach();
  }

  void Loop() {
    sigset_t urgent;
    sigemptyset(&urgent);
    sigaddset(&urgent, SIGURG);
    pthread_sigmask(SIG_UNBLOCK, &urgent, nullptr);
    for (;;) {
      UniqueFd socket;
      {
        MutexLock lock(&mutex_);
        while (waiting_.empty()) not_empty_.Wait(&mutex_);
        socket = std::move(waiting_.front());
        waiting_.pop_front();
      }
      // gRPC may close its own of the same socket later than this one.
      DropUnread(socket.get());
      socket.Reset();
      --unclosed;
    }
  }

  pthread_t thread_ = {};
  Mutex mutex_;
  CondVar not_empty_;
  std::deque<UniqueFd> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

void RefuseDescriptors(int listener) {
  const int passes = 0;
  // Its thread begins here: later there may be none to be had.
  if (setsockopt(listener, SOL_SOCKET, kPassRights, &passes, sizeof(passes)) != 0) Closer::Get();
}

bool MayBringDescriptors(int socket) {
  int family = AF_UNSPEC;
  socklen_t size = sizeof(family);
  if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &size) != 0) return false;
  int passes = 1;
  size = sizeof(passes);
  return family == AF_UNIX &&
         (getsockopt(socket, SOL_SOCKET, kPassRights, &passes, &size) != 0 || passes != 0);
}

ClientSocket::~ClientSocket() {
  if (!valid() || !MayBringDescriptors(get())) return;
  // The client sees its end now, and nothing comes any more.
  shutdown(get(), SHUT_RDWR);
  Closer::Get().Take(std::move(socket_));
}

bool TooManyUnclosed() {
  if (unclosed <= kMaxUnclosed) return false;
  Closer::Get().EndWait();
  return true;
}

}  // namespace chorus::server
