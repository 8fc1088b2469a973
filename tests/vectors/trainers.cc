#include "tests/vectors/trainers.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "chorus/parallel.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "tests/vectors/run.h"

namespace chorus {
namespace vectors {

// One rank's session, worlds and groups. Threads: one at a time.
class Trainers::Rank {
 public:
  Rank(const TrainerOptions& options, std::string name, int rank)
      : options_(options), name_(std::move(name)), rank_(rank) {}

  // Every rank joins the world; one that is not in the group then has done its part.
  absl::Status Run(const Vector& v, Pass pass, std::vector<RankResults>* out) {
    CHORUS_ASSIGN_OR_RETURN(const World world, Join(v.world));
    const auto position = std::find(v.group.begin(), v.group.end(), rank_);
    if (position == v.group.end()) return absl::OkStatus();
    const absl::Status status =
        RunIn(world, v, static_cast<int>(position - v.group.begin()), pass, out);
    // The others need not wait for this one. They may be the cause.
    if (!status.ok()) world.Abort(std::string(status.message())).IgnoreError();
    return status;
  }

 private:
  absl::Status RunIn(const World& world, const Vector& v, int group_rank, Pass pass,
                     std::vector<RankResults>* out) {
    CHORUS_ASSIGN_OR_RETURN(const Group group, GroupOf(world, v));
    return RunVector(v, pass, MakeRankCaller(v, group_rank, group, world).get(), out);
  }

  absl::StatusOr<World> Join(int size) {
    const auto found = worlds_.find(size);
    if (found != worlds_.end()) return found->second;
    // A device has one rank of a world at most.
    if (!session_.is_open()) {
      CHORUS_ASSIGN_OR_RETURN(session_, options_.open({rank_}));
    }
    WorldOptions join;
    join.name = absl::StrCat(name_, "-", size);
    join.rank = rank_;
    join.size = size;
    join.join_timeout = join.agree_timeout = join.exec_timeout =
        absl::ToChronoNanoseconds(options_.patience);
    CHORUS_ASSIGN_OR_RETURN(World world, session_.Join(join));
    return worlds_[size] = std::move(world);
  }

  absl::StatusOr<Group> GroupOf(const World& world, const Vector& v) {
    if (v.everybody()) return world.group();
    Group& group = groups_[{v.world, v.group}];
    if (group.size() == 0) {
      CHORUS_ASSIGN_OR_RETURN(group, world.NewGroup(v.group));
    }
    return group;
  }

  const TrainerOptions options_;
  const std::string name_;
  const int rank_;
  Session session_;
  std::map<int, World> worlds_;                               // by size
  std::map<std::pair<int, std::vector<int>>, Group> groups_;  // by world's size and ranks
};

// One process with several devices. Threads: one at a time.
class Trainers::Process {
 public:
  explicit Process(const TrainerOptions& options) : options_(options) {}

  absl::Status Run(const Vector& v, Pass pass, std::vector<RankResults>* out) {
    Devices& devices = devices_[v.world];
    if (!devices.session.is_open()) {
      CHORUS_ASSIGN_OR_RETURN(devices.session, options_.open(v.group));
      CHORUS_ASSIGN_OR_RETURN(devices.group, parallel::DeviceGroup::Create(devices.session));
    }
    return RunVector(v, pass, MakeDevicesCaller(v, devices.group).get(), out);
  }

 private:
  struct Devices {
    Session session;
    parallel::DeviceGroup group;
  };

  const TrainerOptions options_;
  std::map<int, Devices> devices_;  // by number
};

namespace {

// One run, as its threads share it with the thread that waits for them.
struct Running {
  Running(const Vector& vector, size_t threads)
      : v(vector), results(v.group.size()), statuses(threads), left(threads) {}

  const Vector v;
  std::vector<RankResults> results;    // by group rank
  std::vector<absl::Status> statuses;  // by thread
  Mutex mutex;
  CondVar changed;
  size_t left ABSL_GUARDED_BY(mutex);  // threads
};

// False: not within `patience`.
bool WaitForEnd(Running* running, absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  MutexLock lock(&running->mutex);
  while (running->left > 0) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    running->changed.WaitFor(&running->mutex, left);
  }
  return true;
}

// The error that says most: not one that only tells of another rank's.
absl::Status FirstCause(const std::vector<absl::Status>& statuses) {
  absl::Status first;
  for (const bool echoes : {false, true}) {
    for (size_t r = 0; r < statuses.size(); ++r) {
      const absl::Status& status = statuses[r];
      if (status.ok() || !first.ok()) continue;
      if (!echoes && ErrorOf(status).reason == Reason::kAborted) continue;
      first = absl::Status(
          status.code(),
          absl::StrCat(statuses.size() == 1 ? "" : absl::StrCat("world rank ", r, ": "),
                       absl::StatusCodeToString(status.code()), " ",
                       ReasonName(ErrorOf(status).reason), ": ", status.message()));
    }
  }
  return first;
}

}  // namespace

Trainers::Trainers(TrainerOptions options)
    : options_(std::move(options)), name_(absl::StrCat("vectors-", getpid())) {}

Trainers::~Trainers() = default;

absl::StatusOr<std::vector<RankResults>> Trainers::Run(const Vector& v, Pass pass) {
  using Part = std::function<absl::Status(const Vector&, std::vector<RankResults>*)>;
  std::vector<Part> parts;  // a thread each
  if (v.one_process()) {
    if (process_ == nullptr) process_ = std::make_shared<Process>(options_);
    parts.push_back(
        [pass, process = process_](const Vector& vector, std::vector<RankResults>* results) {
          return process->Run(vector, pass, results);
        });
  }
  for (int r = 0; r < v.world && !v.one_process(); ++r) {
    if (r == static_cast<int>(ranks_.size())) {
      ranks_.push_back(std::make_shared<Rank>(options_, absl::StrCat(name_, "-", lives_), r));
    }
    parts.push_back([pass, rank = ranks_[static_cast<size_t>(r)]](
                        const Vector& vector, std::vector<RankResults>* results) {
      return rank->Run(vector, pass, results);
    });
  }
  const auto running = std::make_shared<Running>(v, parts.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < parts.size(); ++i) {
    threads.emplace_back([running, i, part = std::move(parts[i])] {
      running->statuses[i] = part(running->v, &running->results);
      MutexLock lock(&running->mutex);
      if (--running->left == 0) running->changed.SignalAll();
    });
  }
  const bool ended = WaitForEnd(running.get(), 3 * options_.patience);
  absl::Status status;
  if (ended) {
    for (std::thread& thread : threads) thread.join();
    status = FirstCause(running->statuses);
    if (status.ok()) return std::move(running->results);
  } else {
    for (std::thread& thread : threads) thread.detach();
    status = absl::DeadlineExceededError("a rank hangs");
  }
  if (absl::IsDeadlineExceeded(status)) {
    status = absl::DeadlineExceededError(
        absl::StrCat(status.message(), "; pending: ", options_.pending()));
  }
  ranks_.clear();
  process_.reset();
  ++lives_;
  return status;
}

}  // namespace vectors
}  // namespace chorus
