#include "benchmarks/helper.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/bytes.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

constexpr uint64_t kMostMessageBytes = uint64_t{1} << 30;

struct Hello {
  int32_t index;
  int32_t pid;
};

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  return address;
}

absl::Status Transfer(int fd, char* data, size_t size, bool writing, int64_t deadline) {
  while (size > 0) {
    const int64_t left = deadline - NowNanos();
    pollfd entry{fd, static_cast<short>(writing ? POLLOUT : POLLIN), 0};
    const int ready = left <= 0 ? 0 : poll(&entry, 1, static_cast<int>(left / 1000000 + 1));
    if (ready == 0) return absl::DeadlineExceededError("no answer in time");
    if (ready < 0 && errno == EINTR) continue;
    const ssize_t count = writing ? send(fd, data, size, MSG_NOSIGNAL) : recv(fd, data, size, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return absl::UnavailableError("the other end has gone");
    data += count;
    size -= static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

absl::Status SendMessage(int fd, const std::string& message) {
  ByteWriter framed;
  framed.Put(static_cast<uint64_t>(message.size()));
  framed.PutRaw(message.data(), message.size());
  std::string bytes = framed.Take();
  return Transfer(fd, &bytes[0], bytes.size(), true, NowNanos() + HelperGroup::kPatienceNanos);
}

absl::StatusOr<std::string> ReceiveMessage(int fd, int64_t patience_ns) {
  const int64_t deadline = NowNanos() + patience_ns;
  uint64_t size = 0;
  CHORUS_RETURN_IF_ERROR(
      Transfer(fd, reinterpret_cast<char*>(&size), sizeof(size), false, deadline));
  if (size > kMostMessageBytes) return absl::InternalError("a message that cannot be true");
  std::string message(size, '\0');
  CHORUS_RETURN_IF_ERROR(Transfer(fd, &message[0], size, false, deadline));
  return message;
}

std::string EncodeTask(const Task& task) {
  ByteWriter out;
  out.PutString(task.op);
  for (const int64_t value : {task.bytes, task.iterations, task.warm_up, task.number}) {
    out.Put(value);
  }
  out.PutString(task.text);
  return out.Take();
}

absl::StatusOr<Task> DecodeTask(const std::string& message) {
  ByteReader in(message);
  Task task;
  task.op = std::string(in.GetString());
  for (int64_t* value : {&task.bytes, &task.iterations, &task.warm_up, &task.number}) {
    *value = in.Get<int64_t>();
  }
  task.text = std::string(in.GetString());
  if (!in.Done()) return absl::InternalError("a task that does not decode");
  return task;
}

std::string EncodeOutcome(const Outcome& outcome) {
  ByteWriter out;
  out.Put(static_cast<int32_t>(outcome.status.code()));
  out.PutString(outcome.status.message());
  for (const int64_t value : {outcome.start_ns, outcome.end_ns, outcome.cpu_ns}) out.Put(value);
  out.PutString(outcome.text);
  out.Put(static_cast<uint64_t>(outcome.samples.size()));
  out.PutRaw(outcome.samples.data(), outcome.samples.size() * sizeof(double));
  return out.Take();
}

absl::StatusOr<Outcome> DecodeOutcome(const std::string& message) {
  ByteReader in(message);
  Outcome outcome;
  const auto code = static_cast<absl::StatusCode>(in.Get<int32_t>());
  outcome.status = absl::Status(code, in.GetString());
  for (int64_t* value : {&outcome.start_ns, &outcome.end_ns, &outcome.cpu_ns}) {
    *value = in.Get<int64_t>();
  }
  outcome.text = std::string(in.GetString());
  const uint64_t samples = in.Get<uint64_t>();
  if (samples * sizeof(double) == in.remaining()) {
    outcome.samples.resize(samples);
    const absl::string_view raw = in.GetRaw(in.remaining());
    if (samples > 0) std::memcpy(outcome.samples.data(), raw.data(), raw.size());
  }
  if (!in.Done()) return absl::InternalError("an outcome that does not decode");
  return outcome;
}

}  // namespace

int RunHelper(const std::string& control_path, int index, const Handler& handler) {
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = AddressOf(control_path);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    std::fprintf(stderr, "helper %d: cannot connect to %s: %s\n", index, control_path.c_str(),
                 std::strerror(errno));
    return 1;
  }
  Hello hello{index, getpid()};
  if (!Transfer(fd.get(), reinterpret_cast<char*>(&hello), sizeof(hello), true,
                NowNanos() + HelperGroup::kPatienceNanos)
           .ok()) {
    return 1;
  }
  while (true) {
    // A driver that is busy with others may need any time; when it ends, so does the connection.
    absl::StatusOr<std::string> message = ReceiveMessage(fd.get(), int64_t{86400} * 1000000000);
    if (!message.ok()) return 0;
    absl::StatusOr<Task> task = DecodeTask(*message);
    Outcome outcome;
    if (task.ok()) {
      outcome = handler(*task);
    } else {
      outcome.status = task.status();
    }
    if (!SendMessage(fd.get(), EncodeOutcome(outcome)).ok()) return 0;
  }
}

absl::StatusOr<std::unique_ptr<HelperGroup>> HelperGroup::Create(const ScratchDirectory& scratch,
                                                                 const std::string& name,
                                                                 int count) {
  std::unique_ptr<HelperGroup> group(new HelperGroup());
  group->path_ = absl::StrCat(scratch.path(), "/", name);
  group->connections_.resize(count);
  group->pids_.resize(count, -1);
  unlink(group->path_.c_str());
  group->listener_.Reset(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = AddressOf(group->path_);
  if (bind(group->listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
          0 ||
      listen(group->listener_.get(), 64) != 0) {
    return absl::InternalError(
        absl::StrCat("cannot listen on ", group->path_, ": ", std::strerror(errno)));
  }
  return group;
}

HelperGroup::~HelperGroup() {
  for (UniqueFd& connection : connections_) connection.Reset();
  listener_.Reset();
  for (Process& process : processes_) {
    // One that does not notice is killed by its destructor.
    if (process.running()) (void)process.Wait(int64_t{10} * 1000000000);
  }
  unlink(path_.c_str());
}

absl::Status HelperGroup::AwaitHellos() {
  const int64_t deadline = NowNanos() + int64_t{60} * 1000000000;
  while (true) {
    const auto missing = std::find_if(connections_.begin(), connections_.end(),
                                      [](const UniqueFd& fd) { return !fd.valid(); });
    if (missing == connections_.end()) return absl::OkStatus();
    pollfd entry{listener_.get(), POLLIN, 0};
    if (poll(&entry, 1, 100) <= 0) {
      for (Process& process : processes_) {
        if (!process.running()) continue;
        const absl::StatusOr<int> ended = process.Wait(0);
        if (ended.ok() && *ended != 0) {
          return absl::UnavailableError(absl::StrCat(path_, ": a helper ended with ", *ended));
        }
      }
      if (NowNanos() < deadline) continue;
      return absl::DeadlineExceededError(
          absl::StrCat(path_, ": helper ", missing - connections_.begin(), " did not start"));
    }
    UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd.valid()) continue;
    Hello hello;
    CHORUS_RETURN_IF_ERROR(Transfer(fd.get(), reinterpret_cast<char*>(&hello), sizeof(hello), false,
                                    NowNanos() + kPatienceNanos));
    if (hello.index < 0 || hello.index >= count()) {
      return absl::InternalError(absl::StrCat(path_, ": a helper with index ", hello.index));
    }
    connections_[hello.index] = std::move(fd);
    pids_[hello.index] = hello.pid;
  }
}

absl::Status HelperGroup::Send(int index, const Task& task) {
  return SendMessage(connections_[index].get(), EncodeTask(task));
}

absl::StatusOr<Outcome> HelperGroup::Receive(int index) {
  absl::StatusOr<std::string> message = ReceiveMessage(connections_[index].get(), kPatienceNanos);
  if (message.ok()) return DecodeOutcome(*message);
  std::string end;
  for (Process& process : processes_) {
    if (process.pid() != pids_[index]) continue;
    const absl::StatusOr<int> status = process.Wait(1000000000);
    if (status.ok()) end = absl::StrCat(", its exit status is ", *status);
  }
  return absl::Status(message.status().code(), absl::StrCat("helper ", index, " of ", path_, ": ",
                                                            message.status().message(), end));
}

absl::StatusOr<std::vector<Outcome>> HelperGroup::Run(const Task& task) {
  for (int i = 0; i < count(); ++i) CHORUS_RETURN_IF_ERROR(Send(i, task));
  std::vector<Outcome> outcomes;
  absl::Status first_error;
  for (int i = 0; i < count(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(Outcome outcome, Receive(i));
    if (first_error.ok() && !outcome.status.ok()) {
      first_error = absl::Status(outcome.status.code(), absl::StrCat(task.op, ", helper ", i, ": ",
                                                                     outcome.status.message()));
    }
    outcomes.push_back(std::move(outcome));
  }
  if (!first_error.ok()) return first_error;
  return outcomes;
}

void HelperGroup::Kill(int index) {
  for (Process& process : processes_) {
    if (process.pid() == pids_[index]) {
      process.Signal(SIGKILL);
      (void)process.Wait(int64_t{10} * 1000000000);
    }
  }
  processes_.erase(std::remove_if(processes_.begin(), processes_.end(),
                                  [](const Process& process) { return !process.running(); }),
                   processes_.end());
  connections_[index].Reset();
  pids_[index] = -1;
}

absl::StatusOr<std::vector<double>> HelperGroup::Sample(Task task, int64_t iterations) {
  task.iterations = iterations;
  CHORUS_ASSIGN_OR_RETURN(const std::vector<Outcome> outcomes, Run(task));
  return GroupSamples(outcomes);
}

std::vector<double> GroupSamples(const std::vector<Outcome>& outcomes) {
  size_t count = 0;
  double before = 0;  // when the last one started; then, had the previous result
  for (const Outcome& outcome : outcomes) {
    if (outcome.samples.empty()) continue;
    count = outcome.samples.size();
    before = std::max(before, static_cast<double>(outcome.start_ns));
  }
  std::vector<double> last(count, 0);
  for (const Outcome& outcome : outcomes) {
    double now = static_cast<double>(outcome.start_ns);
    for (size_t i = 0; i < outcome.samples.size(); ++i) {
      now += outcome.samples[i];
      last[i] = std::max(last[i], now);
    }
  }
  for (double& moment : last) {
    const double now = moment;
    moment = now - before;
    before = now;
  }
  return last;
}

int64_t WarmUpFor(int64_t iterations) { return iterations / 10 + 1; }

int64_t WallNanos(const std::vector<Outcome>& outcomes) {
  int64_t start = outcomes.front().start_ns;
  int64_t end = outcomes.front().end_ns;
  for (const Outcome& outcome : outcomes) {
    start = std::min(start, outcome.start_ns);
    end = std::max(end, outcome.end_ns);
  }
  return end - start;
}

}  // namespace bench
}  // namespace chorus
