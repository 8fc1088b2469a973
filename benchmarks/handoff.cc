#include "benchmarks/handoff.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <new>

#include "absl/strings/str_cat.h"
#include "benchmarks/memory_traffic.h"
#include "benchmarks/pattern.h"
#include "benchmarks/timed_loop.h"
#include "core/base/adaptive_spin.h"
#include "core/base/bytes.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/base/ids.h"
#include "core/base/unique_fd.h"
#include "core/transport/command.h"
#include "core/transport/completion.h"
#include "core/transport/doorbell.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"

namespace chorus {
namespace bench {
namespace {

// Each word on a line of its own: it has one writer, and one reader waits for it.
struct Words {
  struct Client {
    alignas(64) std::atomic<uint32_t> posted{0};
    alignas(64) std::atomic<uint32_t> answered{0};
  };
  alignas(64) std::atomic<uint32_t> bell{0};  // the server sleeps on it
  Client clients[HandoffGroup::kMostClients];
};

// What one client's ring is made of.
struct RingSession {
  std::unique_ptr<SessionMemory> memory;
  UniqueFd event;
};

absl::Status WrongAnswer(uint32_t turn, uint64_t answer) {
  return absl::DataLossError(absl::StrCat("turn ", turn, " was answered with ", answer));
}

constexpr absl::Duration kPatience = absl::Seconds(30);

// A client's end of the words.
class WordClient {
 public:
  explicit WordClient(Words::Client* mine, std::atomic<uint32_t>* bell)
      : mine_(*mine), bell_(*bell) {}

  absl::Status Ask(bool sleeps) {
    ++turn_;
    mine_.posted.store(turn_, std::memory_order_release);
    if (sleeps) {
      bell_.fetch_add(1);
      FutexWakeAll(bell_);
    }
    uint32_t answer;
    while ((answer = mine_.answered.load(std::memory_order_acquire)) == turn_ - 1) {
      if (sleeps) {
        FutexWait(mine_.answered, answer, absl::Seconds(10));
      } else {
        sched_yield();
      }
    }
    return answer == turn_ ? absl::OkStatus() : WrongAnswer(turn_, answer);
  }

 private:
  Words::Client& mine_;
  std::atomic<uint32_t>& bell_;
  uint32_t turn_ = 0;
};

class WordServer {
 public:
  WordServer(Words* words, int clients) : words_(*words), clients_(clients) {}

  template <typename Work>
  absl::Status Answer(bool sleeps, const Work& work) {
    ++turn_;
    for (int i = 0; i < clients_; ++i) {
      while (true) {
        const uint32_t bell = words_.bell.load();
        if (words_.clients[i].posted.load(std::memory_order_acquire) == turn_) break;
        if (sleeps) {
          FutexWait(words_.bell, bell, absl::Seconds(10));
        } else {
          sched_yield();
        }
      }
    }
    work();
    for (int i = 0; i < clients_; ++i) {
      words_.clients[i].answered.store(turn_, std::memory_order_release);
      if (sleeps) FutexWakeAll(words_.clients[i].answered);
    }
    return absl::OkStatus();
  }

 private:
  Words& words_;
  const int clients_;
  uint32_t turn_ = 0;
};

class RingClient {
 public:
  static absl::StatusOr<std::unique_ptr<RingClient>> Open(const RingSession& session,
                                                          int doorbell_fd) {
    std::unique_ptr<RingClient> client(new RingClient());
    CHORUS_ASSIGN_OR_RETURN(client->memory_, MapSessionMemory(session.memory->fd()));
    CHORUS_ASSIGN_OR_RETURN(client->doorbell_, DoorbellView::Map(doorbell_fd));
    client->submitter_ = std::make_unique<Submitter>(client->memory_.get(), client->doorbell_.get(),
                                                     UniqueFd(dup(session.event.get())));
    client->waiter_ = std::make_unique<CompletionWaiter>(client->memory_.get());
    return client;
  }

  absl::Status Ask() {
    ++turn_;
    chorus::Run run;
    run.graph = GraphId{2, 1};
    run.inputs.push_back(TensorId{1, turn_});
    const TensorId output{static_cast<int32_t>(2 + turn_ % 64), turn_};
    run.outputs.push_back(OutBinding{OutBinding::Kind::kFresh, output, {}});
    run.groups.push_back(RunGroup{WorldId(1), GroupId(0), Epoch(1), {CallPosition{0, turn_, 0}}});
    frame_.Clear();
    EncodeFrame(Command{Sequence(turn_), std::move(run)}, &frame_);
    CHORUS_RETURN_IF_ERROR(submitter_->Submit(frame_.bytes(), kPatience));
    CHORUS_ASSIGN_OR_RETURN(const TensorRecord record,
                            waiter_->WaitForTensor(output, CompletionWaiter::Until::kReadable,
                                                   SteadyNow() + kPatience));
    if (record.offset != turn_) return WrongAnswer(turn_, record.offset);
    return absl::OkStatus();
  }

 private:
  RingClient() = default;

  std::unique_ptr<SessionMemory> memory_;
  std::unique_ptr<DoorbellView> doorbell_;
  std::unique_ptr<Submitter> submitter_;
  std::unique_ptr<CompletionWaiter> waiter_;
  ByteWriter frame_;
  uint32_t turn_ = 0;
};

class RingServer {
 public:
  RingServer(const std::vector<RingSession>& sessions, Doorbell* doorbell)
      : doorbell_(*doorbell), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    for (const RingSession& session : sessions) {
      ends_.emplace_back();
      ends_.back().reader = std::make_unique<SubmissionRingReader>(session.memory.get());
      ends_.back().writer = std::make_unique<CompletionWriter>(session.memory.get());
      epoll_event interest{};
      interest.events = EPOLLIN | EPOLLET;
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, session.event.get(), &interest);
    }
  }

  template <typename Work>
  absl::Status Answer(const Work& work) {
    ++turn_;
    size_t frames = 0;
    while (frames < ends_.size()) {
      AwaitWork();
      for (End& end : ends_) {
        absl::string_view frame;
        const SubmissionRingReader::Result result = end.reader->Poll(&buffer_, &frame);
        if (result == SubmissionRingReader::Result::kMalformed) return end.reader->status();
        if (result == SubmissionRingReader::Result::kEmpty) continue;
        CHORUS_ASSIGN_OR_RETURN(const Command command, DecodeFrame(frame));
        if (command.sequence != Sequence(turn_)) return WrongAnswer(turn_, 0);
        end.output = absl::get<chorus::Run>(command.body).outputs[0].id;
        ++frames;
      }
    }
    work();
    for (End& end : ends_) {
      TensorRecord record;
      record.state = TensorState::kReady;
      record.offset = turn_;
      end.writer->PublishTensor(end.output, record);
      end.writer->PublishRun(Sequence(turn_), {});
      end.writer->Signal();
    }
    return absl::OkStatus();
  }

 private:
  struct End {
    std::unique_ptr<SubmissionRingReader> reader;
    std::unique_ptr<CompletionWriter> writer;
    TensorId output;
  };

  void AwaitWork() {
    const auto any_work = [this] {
      for (const End& end : ends_) {
        if (end.reader->HasFrame()) return true;
      }
      return false;
    };
    int64_t start = 0;
    if (spin_.Spin(any_work, &start)) return;
    doorbell_.SleepUnless(any_work, [this] {
      epoll_event ready;
      epoll_wait(epoll_.get(), &ready, 1, 10000);
    });
    spin_.WaitEnded(SpinClock::Real()->NowNanos() - start);
  }

  Doorbell& doorbell_;
  const UniqueFd epoll_;
  std::vector<End> ends_;
  FrameBuffer buffer_;
  AdaptiveSpin spin_{SpinClock::Real()};
  uint32_t turn_ = 0;
};

absl::Status NoSuchWay(const std::string& op) {
  return absl::InvalidArgumentError(absl::StrCat("no hand-off by ", op));
}

int BeClient(const std::string& control_path, int index, Words* words, const RingSession& session,
             int doorbell_fd) {
  WordClient by_word(&words->clients[index], &words->bell);
  absl::StatusOr<std::unique_ptr<RingClient>> by_ring = RingClient::Open(session, doorbell_fd);
  if (!by_ring.ok()) {
    std::fprintf(stderr, "hand-off: %s\n", by_ring.status().ToString().c_str());
    return 1;
  }
  return RunHelper(control_path, index, [&](const Task& task) {
    return TimedLoop(task, [&] {
      if (task.number > 0) Compute(task.number);
      if (task.op == "ring") return (*by_ring)->Ask();
      if (task.op == "yield" || task.op == "futex") return by_word.Ask(task.op == "futex");
      return NoSuchWay(task.op);
    });
  });
}

int BeServer(const std::string& control_path, int index, Words* words,
             const std::vector<RingSession>& sessions, Doorbell* doorbell) {
  WordServer by_word(words, index);
  RingServer by_ring(sessions, doorbell);
  TrafficMemory memory;
  return RunHelper(control_path, index, [&](const Task& task) {
    const auto answer = [&](const auto& work) {
      return TimedLoop(task, [&] {
        if (task.op == "ring") return by_ring.Answer(work);
        if (task.op == "yield" || task.op == "futex") {
          return by_word.Answer(task.op == "futex", work);
        }
        return NoSuchWay(task.op);
      });
    };
    Outcome outcome;
    if (task.bytes == 0) {
      outcome = answer([] {});
    } else {
      outcome.status = memory.Reserve(index, /*outputs=*/2, task.bytes);
      if (!outcome.status.ok()) return outcome;
      Traffic traffic = memory.AsTraffic();
      traffic.in_turn = true;
      TrafficTeam team(std::move(traffic), TrafficVariant::Decode(task.text));
      outcome = answer([&team] { team.Move(); });
      if (outcome.status.ok()) outcome.status = memory.CheckOutputs();
    }
    outcome.samples.clear();
    return outcome;
  });
}

// The server makes what is shared and forks the clients: its own end of a ring does not survive a
// fork, the descriptors do.
int BeServerAndFork(const std::string& control_path, int clients) {
  const auto fail = [](const absl::Status& status) {
    std::fprintf(stderr, "hand-off: %s\n", status.ToString().c_str());
    return 1;
  };
  void* const memory =
      mmap(nullptr, sizeof(Words), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return fail(absl::ResourceExhaustedError("no shared memory"));
  Words* const words = new (memory) Words();
  const absl::StatusOr<std::unique_ptr<Doorbell>> doorbell = Doorbell::Create();
  if (!doorbell.ok()) return fail(doorbell.status());
  std::vector<RingSession> sessions(clients);
  std::vector<Process> processes;
  for (int i = 0; i < clients; ++i) {
    absl::StatusOr<std::unique_ptr<SessionMemory>> session_memory = CreateSessionMemory({});
    if (!session_memory.ok()) return fail(session_memory.status());
    absl::StatusOr<UniqueFd> event = CreateWakeEvent();
    if (!event.ok()) return fail(event.status());
    sessions[i] = {*std::move(session_memory), *std::move(event)};
    absl::StatusOr<Process> process = Process::Fork(
        [&] { return BeClient(control_path, i, words, sessions[i], (*doorbell)->fd()); },
        {(*doorbell)->fd(), sessions[i].memory->fd(), sessions[i].event.get()});
    if (!process.ok()) return fail(process.status());
    processes.push_back(*std::move(process));
  }
  return BeServer(control_path, clients, words, sessions, doorbell->get());
}

}  // namespace

absl::StatusOr<std::unique_ptr<HandoffGroup>> HandoffGroup::Start(const ScratchDirectory& scratch,
                                                                  int clients) {
  if (clients < 1 || clients > kMostClients) {
    return absl::InvalidArgumentError(absl::StrCat("hand-off with ", clients, " clients"));
  }
  auto group = std::make_unique<HandoffGroup>();
  CHORUS_ASSIGN_OR_RETURN(
      group->helpers_, HelperGroup::Create(scratch, absl::StrCat("handoff", clients), clients + 1));
  const std::string& path = group->helpers_->path();
  CHORUS_ASSIGN_OR_RETURN(
      Process process,
      Process::Fork([&path, clients] { return BeServerAndFork(path, clients); }, {}));
  group->helpers_->Own(std::move(process));
  CHORUS_RETURN_IF_ERROR(group->helpers_->AwaitHellos());
  return group;
}

absl::StatusOr<std::vector<double>> HandoffGroup::Run(const std::string& way, int64_t iterations) {
  Task task;
  task.op = way;
  task.warm_up = iterations / 10 + 1;
  return helpers_->Sample(task, iterations);
}

Contender HandoffGroup::WithTraffic(int64_t bytes) const {
  Contender contender;
  contender.name = "transport and memory alone";
  contender.role = Role::kPart;
  Task task;
  task.op = "ring";
  task.bytes = bytes;
  task.warm_up = 2;
  HelperGroup* const helpers = helpers_.get();
  for (const TrafficVariant& variant : AllTrafficVariants()) {
    task.text = variant.Encode();
    contender.settings.push_back(
        {variant.Name(), [helpers, task](int64_t n) { return helpers->Sample(task, n); }});
  }
  return contender;
}

}  // namespace bench
}  // namespace chorus
