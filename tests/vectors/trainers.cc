#include "tests/vectors/trainers.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "chorus/v1/diagnostics.grpc.pb.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "tests/vectors/rank_run.h"

namespace chorus {
namespace vectors {

// One rank's session, worlds and groups. Threads: one at a time.
class Trainers::Rank {
 public:
  Rank(const TrainerOptions& options, std::string name, int rank)
      : options_(options), name_(std::move(name)), rank_(rank) {}

  // Everybody joins the world; who is not in the group then has done its part.
  absl::Status Run(const Vector& v, Pass pass, std::vector<RankResults>* out) {
    CHORUS_ASSIGN_OR_RETURN(const World world, Join(v.world));
    const auto place = std::find(v.group.begin(), v.group.end(), rank_);
    if (place == v.group.end()) return absl::OkStatus();
    const auto group_rank = static_cast<size_t>(place - v.group.begin());
    const absl::Status status =
        RunIn(world, v, static_cast<int>(group_rank), pass, &(*out)[group_rank]);
    // The others need not wait for this one. They may be the cause.
    if (!status.ok()) world.Abort(std::string(status.message())).IgnoreError();
    return status;
  }

 private:
  absl::Status RunIn(const World& world, const Vector& v, int group_rank, Pass pass,
                     RankResults* out) {
    CHORUS_ASSIGN_OR_RETURN(const Group group, GroupOf(world, v));
    return RunRank(v, group_rank, pass, group, world, out);
  }

  absl::StatusOr<World> Join(int size) {
    const auto found = worlds_.find(size);
    if (found != worlds_.end()) return found->second;
    if (!session_.is_open()) {
      SessionOptions session;
      session.address = options_.address;
      session.transport = options_.transport;
      // A device has one rank of a world at most.
      session.devices = {rank_};
      session.open_timeout = absl::ToChronoNanoseconds(options_.patience);
      session.wait_timeout = absl::ToChronoNanoseconds(2 * options_.patience);
      session.label = absl::StrCat("vectors, rank ", rank_);
      CHORUS_ASSIGN_OR_RETURN(session_, sdk::Session::Open(session));
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
    if (group.core() == nullptr) {
      CHORUS_ASSIGN_OR_RETURN(group, world.NewGroup(v.group));
    }
    return group;
  }

  const TrainerOptions options_;
  const std::string name_;
  const int rank_;
  sdk::Session session_;
  std::map<int, World> worlds_;                               // by size
  std::map<std::pair<int, std::vector<int>>, Group> groups_;  // by world's size and ranks
};

namespace {

// One run, as its threads share it with who waits for them.
struct Running {
  explicit Running(const Vector& vector)
      : v(vector), results(v.group.size()), statuses(static_cast<size_t>(v.world)), left(v.world) {}

  const Vector v;
  std::vector<RankResults> results;    // by group rank
  std::vector<absl::Status> statuses;  // by world rank
  Mutex mutex;
  CondVar changed;
  int left ABSL_GUARDED_BY(mutex);  // threads
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
      if (!echoes && ErrorOf(status).reason == Reason::kCancelled) continue;
      first = absl::Status(
          status.code(),
          absl::StrCat("world rank ", r, ": ", absl::StatusCodeToString(status.code()), " ",
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
  for (int r = static_cast<int>(ranks_.size()); r < v.world; ++r) {
    ranks_.push_back(std::make_shared<Rank>(options_, absl::StrCat(name_, "-", lives_), r));
  }
  const auto running = std::make_shared<Running>(v);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < running->statuses.size(); ++r) {
    threads.emplace_back([running, pass, r, rank = ranks_[r]] {
      running->statuses[r] = rank->Run(running->v, pass, &running->results);
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
        absl::StrCat(status.message(), "; pending: ", PendingText(options_.address)));
  }
  ranks_.clear();
  ++lives_;
  return status;
}

std::string PendingText(const std::string& address) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(5)));
  v1::ListPendingResponse response;
  const grpc::Status status =
      v1::Diagnostics::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))
          ->ListPending(&context, v1::ListPendingRequest(), &response);
  if (!status.ok())
    return absl::StrCat("unknown, the daemon does not say: ", status.error_message());
  std::vector<std::string> waiting;
  for (const auto& pending : response.pending()) {
    waiting.push_back(absl::StrCat(pending.what(), " (", pending.source(), ") of ",
                                   pending.world_name(), " waits for ranks ",
                                   absl::StrJoin(pending.missing_ranks(), ",")));
  }
  return waiting.empty() ? "nothing" : absl::StrJoin(waiting, "; ");
}

}  // namespace vectors
}  // namespace chorus
