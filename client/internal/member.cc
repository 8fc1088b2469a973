#include "client/internal/member.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/collective/instance.h"

namespace chorus {
namespace internal {

std::pair<GroupRank, GroupRank> Between(const GroupCore& group, const PairEnd& end) {
  const GroupRank rank(group.rank);
  const GroupRank peer(end.peer);
  return end.send ? std::make_pair(rank, peer) : std::make_pair(peer, rank);
}

OwnWorld::~OwnWorld() {
  if (gone_.ranks.empty()) return;
  releases_->Add(std::move(gone_));
  releases_->DrainIfUrgent();
}

void OwnWorld::Add(const MemberCore& member) {
  MutexLock lock(&mutex_);
  gone_.world = member.world;
  gone_.ranks.push_back(Rank(member.rank.load(std::memory_order_relaxed)));
}

MemberCore::~MemberCore() {
  std::vector<GraphId> graphs;
  for (const auto& group : groups) {
    const std::vector<GraphId> call_graphs = group->calls.graphs();
    graphs.insert(graphs.end(), call_graphs.begin(), call_graphs.end());
  }
  if (!graphs.empty()) releases->Add(graphs, /*of_calls=*/true);
  if (own_world != nullptr && !left.load(std::memory_order_relaxed)) own_world->Add(*this);
  releases->DrainIfUrgent();
}

void MemberCore::ResetCounts() {
  out_of_line = absl::OkStatus();
  group_requests.clear();
  for (const auto& group : groups) group->counters.Reset();
}

absl::Status MemberCore::BeginStep(int64_t n) {
  const int64_t own_count = own_steps.load(std::memory_order_relaxed);
  const int64_t last = step.load(std::memory_order_relaxed) - own_count;
  if (n <= last || n >= kMaxCallNumber - own_count) {
    return Malformed(absl::StrCat("Step: expected a number above that of the last step, ", last,
                                  ", and below ", kMaxCallNumber - own_count, ", got ", n,
                                  "; a step that is done again has a new number"));
  }
  step.store(n + own_count, std::memory_order_relaxed);
  ResetCounts();
  return absl::OkStatus();
}

void MemberCore::BeginOwnStep() {
  own_steps.fetch_add(1, std::memory_order_relaxed);
  step.fetch_add(1, std::memory_order_relaxed);
  ResetCounts();
}

void MemberTable::Add(const std::shared_ptr<MemberCore>& member) {
  if (members_.size() >= trim_at_) {
    members_.erase(std::remove_if(members_.begin(), members_.end(),
                                  [](const auto& held) { return held.expired(); }),
                   members_.end());
    trim_at_ = std::max<size_t>(64, 2 * members_.size());
  }
  members_.push_back(member);
}

std::vector<std::shared_ptr<MemberCore>> MemberTable::members() const {
  std::vector<std::shared_ptr<MemberCore>> members;
  for (const auto& held : members_) {
    if (std::shared_ptr<MemberCore> member = held.lock()) members.push_back(std::move(member));
  }
  return members;
}

}  // namespace internal
}  // namespace chorus
