#include "tests/conformance/direct_link.h"

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/base/shared_file.h"
#include "core/node/node_loop.h"

namespace chorus {
namespace conformance {
namespace {

using internal::JoinedWorld;
using internal::Link;
using internal::ReformedWorld;

// The node answers at once whatever is not a wait; longer means that it is stuck.
constexpr absl::Duration kAnswer = absl::Seconds(60);
constexpr size_t kKeptOutcomes = 1024;
constexpr int kMaxUnderWay = 1024;  // as many as a node holds of one log

absl::Status Late(absl::string_view what) {
  return MakeError(Reason::kTransportTimeout, absl::StrCat("no answer yet to: ", what));
}

// What a callback on the node thread hands over; the callback may come after the waiter has gone.
template <typename T>
class Answer {
 public:
  Answer() : state_(std::make_shared<State>()) {}
  void Set(T value) const {
    MutexLock lock(&state_->mutex);
    state_->value = std::move(value);
    state_->changed.SignalAll();
  }
  // Empty: not within `timeout`.
  absl::optional<T> Get(absl::Duration timeout) const {
    const absl::Time deadline = absl::Now() + timeout;
    MutexLock lock(&state_->mutex);
    while (!state_->value.has_value()) {
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) return absl::nullopt;
      state_->changed.WaitFor(&state_->mutex, left);
    }
    return std::move(state_->value);
  }

 private:
  struct State {
    Mutex mutex;
    CondVar changed;
    absl::optional<T> value ABSL_GUARDED_BY(mutex);
  };
  const std::shared_ptr<State> state_;
};

class DirectLink : public Link {
 public:
  DirectLink(node::NodeLoop* loop, SessionId session, std::vector<DeviceIndex> devices,
             bool host_readable)
      : loop_(loop),
        session_(session),
        devices_(std::move(devices)),
        host_readable_(host_readable),
        log_(std::make_shared<Log>()) {}

  ~DirectLink() override {
    for (const auto& arena : mappings_) munmap(arena.second.first, arena.second.second);
  }

  Transport transport() const override { return Transport::kAuto; }
  std::vector<DeviceIndex> devices() const override { return devices_; }
  int32_t max_tensors() const override { return node::NodeOptions().max_tensors; }
  int32_t max_graphs() const override { return node::NodeOptions().max_graphs; }

  absl::Status Submit(const Command& command) override {
    ByteWriter out;
    EncodeFrame(command, &out);
    const std::shared_ptr<Log> log = log_;
    CHORUS_RETURN_IF_ERROR(WaitForRoom());
    loop_->PostOwn([session = session_, frame = out.Take(), log, sequence = command.sequence](
                       node::LocalNode& node, absl::Time now) {
      node.Submit(session, frame, now, [log, sequence](node::Outcome outcome) {
        MutexLock lock(&log->mutex);
        --log->under_way;
        log->outcomes[sequence] = Detached(outcome.status);
        if (log->outcomes.size() > kKeptOutcomes) log->outcomes.erase(log->outcomes.begin());
        log->changed.SignalAll();
      });
    });
    return absl::OkStatus();
  }

  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence sequence) override {
    MutexLock lock(&log_->mutex);
    absl::StatusOr<absl::optional<absl::Status>> found = FindLocked(sequence);
    if (!found.ok()) return found.status();
    if (!found->has_value()) return absl::optional<RunOutcome>();
    return absl::optional<RunOutcome>(RunOutcome{(*found)->code(), ErrorOf(**found).id});
  }

  absl::Status WaitCommand(Sequence sequence, absl::Duration timeout) override {
    const absl::Time deadline = absl::Now() + timeout;
    {
      MutexLock lock(&log_->mutex);
      while (true) {
        absl::StatusOr<absl::optional<absl::Status>> found = FindLocked(sequence);
        if (!found.ok()) return found.status();
        if (found->has_value()) return Detached(**found);
        const absl::Duration left = deadline - absl::Now();
        if (left <= absl::ZeroDuration()) break;
        log_->changed.WaitFor(&log_->mutex, left);
      }
    }
    return Late(absl::StrCat("command ", sequence.value(), "; pending: ", Pending()));
  }

  absl::StatusOr<bool> WaitTensor(TensorId tensor, Sequence producer,
                                  absl::Duration timeout) override {
    const absl::Status done = WaitCommand(producer, timeout);
    if (ErrorOf(done).reason != Reason::kOutcomeForgotten) CHORUS_RETURN_IF_ERROR(done);
    (void)tensor;
    return !host_readable_;
  }

  absl::Status Read(TensorId tensor, Sequence, char* out, int64_t bytes,
                    absl::Duration timeout) override {
    const Answer<absl::StatusOr<std::string>> answer;
    loop_->PostOwn(
        [session = session_, tensor, timeout, answer](node::LocalNode& node, absl::Time now) {
          node.ReadTensor(session, tensor, now + timeout,
                          [answer](absl::StatusOr<node::ReadableTensor> view) {
                            if (!view.ok()) return answer.Set(Detached(view.status()));
                            answer.Set(std::string(view->data, static_cast<size_t>(view->bytes)));
                          });
        });
    const absl::optional<absl::StatusOr<std::string>> read = answer.Get(timeout + kAnswer);
    if (!read.has_value()) return Late("read");
    CHORUS_RETURN_IF_ERROR(read->status());
    if (static_cast<int64_t>((*read)->size()) != bytes) {
      return MakeError(Reason::kInternal,
                       absl::StrCat("a tensor of ", bytes, " bytes has ", (*read)->size()));
    }
    std::memcpy(out, (*read)->data(), (*read)->size());
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<const char>> MapTensor(TensorId tensor, Sequence, int64_t bytes,
                                                        absl::Duration timeout) override {
    const Answer<absl::StatusOr<std::pair<const char*, int64_t>>> answer;
    loop_->PostOwn(
        [session = session_, tensor, timeout, answer](node::LocalNode& node, absl::Time now) {
          node.ReadTensor(session, tensor, now + timeout,
                          [answer](absl::StatusOr<node::ReadableTensor> view) {
                            if (!view.ok()) return answer.Set(Detached(view.status()));
                            answer.Set(std::make_pair(view->data, view->bytes));
                          });
        });
    const auto mapped = answer.Get(timeout + kAnswer);
    if (!mapped.has_value()) return Late("map");
    CHORUS_RETURN_IF_ERROR(mapped->status());
    if ((*mapped)->second != bytes) {
      return MakeError(Reason::kInternal,
                       absl::StrCat("a tensor of ", bytes, " bytes has ", (*mapped)->second));
    }
    // The node's own memory, which stays as long as the tensor's name.
    return std::shared_ptr<const char>(std::shared_ptr<void>(), (*mapped)->first);
  }

  absl::StatusOr<Staging> CreateStaging(int64_t bytes) override {
    // Mapped on the node thread: the node closes its descriptor when the arena goes.
    using Made = absl::StatusOr<std::pair<Staging, int64_t>>;
    const Answer<Made> answer;
    loop_->PostOwn([session = session_, bytes, answer](node::LocalNode& node, absl::Time) {
      node.CreateStaging(session, bytes,
                         [&node, session, answer](const absl::StatusOr<node::StagingArena>& arena) {
                           if (!arena.ok()) return answer.Set(Detached(arena.status()));
                           const absl::StatusOr<int> fd = node.StagingFd(session, arena->arena);
                           if (!fd.ok()) return answer.Set(Detached(fd.status()));
                           void* const data = mmap(nullptr, static_cast<size_t>(arena->bytes),
                                                   PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
                           if (data == MAP_FAILED || !SealMapped(*fd)) {
                             return answer.Set(MakeError(Reason::kOutOfMemory, "mmap of an arena"));
                           }
                           const absl::Status confirmed =
                               node.ConfirmStaging(session, arena->arena);
                           if (!confirmed.ok()) return answer.Set(Detached(confirmed));
                           Staging staging;
                           staging.arena = arena->arena;
                           staging.data = static_cast<char*>(data);
                           answer.Set(std::make_pair(staging, arena->bytes));
                         });
    });
    const absl::optional<Made> got = answer.Get(kAnswer);
    if (!got.has_value()) return Late("create staging");
    const Made& made = *got;
    CHORUS_RETURN_IF_ERROR(made.status());
    MutexLock lock(&mappings_mutex_);
    mappings_[made->first.arena.value()] = {made->first.data, static_cast<size_t>(made->second)};
    return made->first;
  }

  absl::Status WriteStaging(ArenaId arena, int64_t offset, absl::string_view bytes) override {
    MutexLock lock(&mappings_mutex_);
    std::memcpy(mappings_[arena.value()].first + offset, bytes.data(), bytes.size());
    return absl::OkStatus();
  }

  void UnmapStaging(ArenaId) override {}  // with the others

  absl::StatusOr<JoinedWorld> Join(const WorldOptions& options, DeviceIndex device) override {
    node::JoinRequest join;
    join.name = options.name;
    join.size = options.size;
    join.rank = Rank(options.rank);
    join.device = device;
    join.join_timeout = absl::FromChrono(options.join_timeout);
    join.agree_timeout = absl::FromChrono(options.agree_timeout);
    join.exec_timeout = absl::FromChrono(options.exec_timeout);
    join.check_call_sites = options.check_call_sites;
    const Answer<absl::StatusOr<JoinedWorld>> answer;
    loop_->PostOwn([session = session_, join, answer](node::LocalNode& node, absl::Time now) {
      node.JoinWorld(session, join, now, [answer](absl::StatusOr<node::WorldInfo> info) {
        if (!info.ok()) return answer.Set(Detached(info.status()));
        answer.Set(JoinedWorld{info->id, info->epoch});
      });
    });
    const auto joined = answer.Get(join.join_timeout + kAnswer);
    return joined.has_value() ? *joined : Late("join");
  }

  absl::StatusOr<GroupId> CreateGroup(WorldId world, Rank rank, absl::Span<const int> members,
                                      InstanceKey::Request request) override {
    std::vector<Rank> ranks;
    for (const int member : members) ranks.push_back(Rank(member));
    return Ask<absl::StatusOr<GroupId>>(
        "create group",
        [session = session_, world, rank, ranks, request](node::LocalNode& node, absl::Time) {
          absl::StatusOr<GroupId> made =
              node.CreateGroup(session, {world, rank, ranks, request.step, request.number});
          return made.ok() ? made : absl::StatusOr<GroupId>(Detached(made.status()));
        });
  }

  absl::Status Leave(WorldId world, Rank rank) override {
    return Ask<absl::Status>(
        "leave", [session = session_, world, rank](node::LocalNode& node, absl::Time now) {
          return Detached(node.LeaveWorld(session, world, rank, now));
        });
  }

  absl::StatusOr<ReformedWorld> Reform(WorldId world, Rank rank, Timeout timeout) override {
    const Answer<absl::StatusOr<ReformedWorld>> answer;
    loop_->PostOwn([session = session_, world, rank, timeout, answer](node::LocalNode& node,
                                                                      absl::Time now) {
      node.ReformWorld(
          session, {world, rank, absl::FromChrono(timeout), absl::nullopt}, now,
          [answer](absl::StatusOr<node::ReformResult> result) {
            if (!result.ok()) return answer.Set(Detached(result.status()));
            ReformedWorld reformed;
            reformed.rank = result->rank.value();
            reformed.size = result->size;
            reformed.epoch = result->epoch;
            for (const node::ReformResult::Survivor& survivor : result->survivors) {
              const auto& last = survivor.last_published;
              reformed.survivors.push_back(
                  {survivor.old_rank.value(), last.has_value() ? last->ToString() : std::string()});
            }
            answer.Set(std::move(reformed));
          });
    });
    const auto reformed = answer.Get(absl::FromChrono(timeout) + kAnswer);
    return reformed.has_value() ? *reformed : Late("reform");
  }

  absl::StatusOr<std::vector<std::string>> Waits() override { return std::vector<std::string>(); }
  absl::Status Close() override {
    return Ask<absl::Status>("close", [session = session_](node::LocalNode& node, absl::Time now) {
      return Detached(node.CloseSession(session, now));
    });
  }

 private:
  struct Log {
    Mutex mutex;
    CondVar changed;
    std::map<Sequence, absl::Status> outcomes ABSL_GUARDED_BY(mutex);
    int under_way ABSL_GUARDED_BY(mutex) = 0;  // commands without an outcome
  };

  // As a transport does that is not read any more: a log holds so many frames, and refuses others.
  absl::Status WaitForRoom() {
    const absl::Time deadline = absl::Now() + kAnswer;
    MutexLock lock(&log_->mutex);
    while (log_->under_way >= kMaxUnderWay) {
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) return Late("room for a command");
      log_->changed.WaitFor(&log_->mutex, left);
    }
    ++log_->under_way;
    return absl::OkStatus();
  }

  // Runs `f` on the node thread and returns what it does.
  template <typename T, typename F>
  T Ask(absl::string_view what, F f) {
    const Answer<T> answer;
    loop_->PostOwn(
        [f, answer](node::LocalNode& node, absl::Time now) { answer.Set(f(node, now)); });
    absl::optional<T> got = answer.Get(kAnswer);
    return got.has_value() ? *std::move(got) : T(Late(what));
  }

  // The instances that wait for somebody, and what was last seen of each session: for the reader of
  // a test that failed.
  std::string Pending() {
    return Ask<absl::StatusOr<std::string>>(
               "pending",
               [](node::LocalNode& node, absl::Time now) {
                 std::string text;
                 const node::Listing<node::PendingView> pending = node.Pending("", now);
                 for (const node::PendingView& view : pending.rows) {
                   absl::StrAppend(&text, view.instance.key.ToString(), " (", view.instance.what,
                                   ", missing ranks:");
                   for (const Rank rank : view.instance.missing) {
                     absl::StrAppend(&text, " ", rank.value());
                   }
                   absl::StrAppend(&text, ") ");
                 }
                 const auto events = node.Flight("", 12);
                 for (const node::FlightEvent& event : *events) {
                   absl::StrAppend(&text, "[session ", event.session.value(), " command ",
                                   event.sequence.value(), " event ", static_cast<int>(event.kind),
                                   "] ");
                 }
                 return absl::StatusOr<std::string>(text);
               })
        .value_or("");
  }

  absl::StatusOr<absl::optional<absl::Status>> FindLocked(Sequence sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(log_->mutex) {
    const auto found = log_->outcomes.find(sequence);
    if (found != log_->outcomes.end()) return absl::optional<absl::Status>(found->second);
    if (!log_->outcomes.empty() && log_->outcomes.size() == kKeptOutcomes &&
        sequence < log_->outcomes.begin()->first) {
      return MakeError(Reason::kOutcomeForgotten,
                       absl::StrCat("command ", sequence.value(), " is too long ago"));
    }
    return absl::optional<absl::Status>();
  }

  node::NodeLoop* const loop_;
  const SessionId session_;
  const std::vector<DeviceIndex> devices_;
  const bool host_readable_;
  const std::shared_ptr<Log> log_;
  Mutex mappings_mutex_;
  // By arena: where it is mapped, and how large. Kept until the end: a trainer may still hold it.
  absl::flat_hash_map<int32_t, std::pair<char*, size_t>> mappings_ ABSL_GUARDED_BY(mappings_mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Link>> OpenDirectLink(node::NodeLoop* loop,
                                                     const std::vector<int>& devices, int pid,
                                                     bool host_readable, SessionId* session) {
  node::OpenSessionRequest request;
  request.tenant = "uid:0";
  request.label = "conformance";
  request.pid = pid;
  request.attached = true;
  std::vector<DeviceIndex> held;
  for (const int device : devices) held.push_back(DeviceIndex(device));
  request.devices = held;
  const Answer<absl::StatusOr<SessionId>> answer;
  loop->PostOwn([request, answer](node::LocalNode& node, absl::Time now) {
    const absl::StatusOr<node::SessionInfo> info = node.OpenSession(request, now);
    if (!info.ok()) return answer.Set(Detached(info.status()));
    answer.Set(info->id);
  });
  const absl::optional<absl::StatusOr<SessionId>> opened = answer.Get(kAnswer);
  if (!opened.has_value()) return Late("open");
  CHORUS_RETURN_IF_ERROR(opened->status());
  *session = **opened;
  return std::unique_ptr<Link>(
      std::make_unique<DirectLink>(loop, *session, std::move(held), host_readable));
}

}  // namespace conformance
}  // namespace chorus
