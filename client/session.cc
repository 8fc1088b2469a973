#include "chorus/session.h"

#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/refusals.h"
#include "client/internal/session_core.h"
#include "client/internal/trace.h"
#include "client/link/open_link.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using internal::CheckNotInTrace;
using internal::DeviceFrom;
using internal::ForkedError;
using internal::GroupCore;
using internal::GroupFrom;
using internal::InShort;
using internal::IsNoOutcome;
using internal::Link;
using internal::MemberCore;
using internal::MemberOf;
using internal::OpenLink;
using internal::Refusals;
using internal::RefusedOf;
using internal::SessionCore;
using internal::SessionFrom;
using internal::SessionLock;
using internal::SessionOf;
using internal::SourceOf;
using internal::Trace;
using internal::WaitReportOptions;
using internal::WaitReports;
using internal::WithSource;
using internal::WorldFrom;

absl::Status NoSession() {
  return MakeError(Reason::kWrongState, "an empty session: make one with Session::Open");
}

absl::Status NoWorld() {
  return MakeError(Reason::kWrongState, "an empty world: get one from Session::Join");
}

// The first of these variables that is set and not empty.
std::string FromEnvironment(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* const value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "";
}

absl::StatusOr<int> NumberFromEnvironment(const char* what,
                                          std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* const value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    int number = 0;
    if (absl::SimpleAtoi(value, &number) && number >= 0) return number;
    return BadType(
        absl::StrCat("environment variable ", name, ": expected a number, got \"", value, "\""));
  }
  return BadType(absl::StrCat("WorldOptions: no ", what, " given, and none of the variables ",
                              *names.begin(), ", ... is set"));
}

}  // namespace

DeviceRef::DeviceRef(const Session& session) : session_(SessionOf(session)) {}
DeviceRef::DeviceRef(const World& world) {
  if (MemberOf(world) == nullptr) return;
  session_ = MemberOf(world)->session;
  slot_ = MemberOf(world)->device_slot;
}

DeviceInfo DeviceRef::info() const {
  if (session_ == nullptr || slot_ < 0) return DeviceInfo();
  const std::vector<DeviceInfo> infos = session_->link().device_infos();
  const size_t index = static_cast<size_t>(slot_);
  return index < infos.size() ? infos[index] : DeviceInfo();
}

// --- Session ------------------------------------------------------------------------------------

absl::StatusOr<Session> Session::Open(const SessionOptions& options) {
  absl::StatusOr<std::unique_ptr<Link>> link = OpenLink(options);
  if (!link.ok()) return link.status();
  WaitReportOptions reports;
  reports.on = options.report_waits;
  return SessionFrom(SessionCore::Make(*std::move(link), absl::FromChrono(options.wait_timeout),
                                       std::move(reports)));
}

absl::StatusOr<World> Session::Join(const WorldOptions& request) const {
  if (session_ == nullptr) return NoSession();
  if (session_->Forked()) return ForkedError();
  WorldOptions options = request;
  if (options.name.empty()) {
    options.name = FromEnvironment({"CHORUS_WORLD", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID",
                                    "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"});
    if (options.name.empty()) options.name = "default";
  }
  if (options.rank < 0) {
    CHORUS_ASSIGN_OR_RETURN(
        options.rank, NumberFromEnvironment(
                          "rank", {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}));
  }
  // What is wrong here goes to the daemon all the same, as numbers that it refuses: it tells the
  // ranks that wait for this one.
  absl::Status refused;
  if (options.size < 0) {
    const absl::StatusOr<int> size = NumberFromEnvironment(
        "size", {"WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"});
    options.size = size.ok() ? *size : -1;
    refused = size.status();
  }
  DeviceIndex device(-1);
  if (options.device >= 0 && options.device < session_->device_count()) {
    device = session_->device(options.device);
  } else if (refused.ok()) {
    refused = BadType(absl::StrCat("WorldOptions: device ", options.device,
                                   " is none of the session's ", session_->device_count()));
  }
  session_->LeaveWhatIsOver();
  const auto joined = [&] {
    const WaitReports::During reports(&session_->reports());
    return session_->link().Join(options, device);
  }();
  // Says more than the daemon's answer to such numbers.
  if (!refused.ok()) return refused;
  if (!joined.ok()) return joined.status();
  auto member = std::make_shared<MemberCore>(session_, options.name);
  member->world = joined->world;
  member->device_slot = options.device;
  member->compares_lines = options.check_call_sites != CheckCallSites::kOff;
  member->rank = options.rank;
  member->size = options.size;
  member->epoch = joined->epoch;
  auto everybody = std::make_unique<GroupCore>();
  everybody->member = member.get();
  everybody->id = GroupId(0);
  for (int r = 0; r < options.size; ++r) everybody->ranks.push_back(r);
  everybody->rank = options.rank;
  member->everybody = everybody.get();
  SessionLock lock(session_.get());
  if (!lock.status().ok()) return lock.status();
  member->since = Epoch(1);
  member->groups.push_back(std::move(everybody));
  session_->members().Add(member);
  return WorldFrom(std::move(member));
}

absl::Status Session::Close() const {
  return session_ == nullptr ? NoSession() : session_->Close();
}

DeviceRef Session::device(int slot) const { return DeviceFrom(session_, slot); }

int Session::device_count() const { return session_ == nullptr ? 0 : session_->device_count(); }

Transport Session::transport() const {
  return session_ == nullptr ? Transport::kAuto : session_->link().transport();
}

bool Session::is_open() const {
  if (session_ == nullptr || session_->Forked()) return false;
  SessionLock lock(session_.get());
  return lock.status().ok();
}

// --- Group --------------------------------------------------------------------------------------

Group::Group(const World& world) {
  if (MemberOf(world) == nullptr) return;
  member_ = MemberOf(world);
  core_ = member_->everybody;
}

int Group::rank() const { return core_ == nullptr ? -1 : core_->rank; }
int Group::size() const { return core_ == nullptr ? 0 : static_cast<int>(core_->ranks.size()); }

int Group::GroupRankOf(int world_rank) const {
  for (int rank_in_group = 0; rank_in_group < size(); ++rank_in_group) {
    if (core_->ranks[static_cast<size_t>(rank_in_group)] == world_rank) return rank_in_group;
  }
  return -1;
}

const std::vector<int>& Group::world_ranks() const {
  static const auto* const none = new std::vector<int>();
  return core_ == nullptr ? *none : core_->ranks;
}

// --- World --------------------------------------------------------------------------------------

int World::rank() const { return member_ == nullptr ? -1 : member_->rank.load(); }
int World::size() const { return member_ == nullptr ? 0 : member_->size.load(); }

const std::string& World::name() const {
  static const auto* const none = new std::string();
  return member_ == nullptr ? *none : member_->name;
}

int64_t World::epoch() const { return member_ == nullptr ? 0 : member_->epoch.load().value(); }
DeviceRef World::device() const { return DeviceRef(*this); }
Group World::group() const { return Group(*this); }

int64_t World::step() const {
  return member_ == nullptr ? 0 : member_->step.load() - member_->own_steps.load();
}

absl::Status World::Step(int64_t n, CallSite site) const {
  if (member_ == nullptr) return NoWorld();
  if (member_->session->Forked()) return ForkedError();
  if (Trace::Current() != nullptr) {
    return WithSource(MakeError(Reason::kWrongState,
                                "Step: a compiled function is part of a step; begin it outside"),
                      SourceOf(site));
  }
  SessionLock lock(member_->session.get());
  return WithSource(lock.status().ok() ? member_->BeginStep(n) : lock.status(), SourceOf(site));
}

absl::StatusOr<Group> World::NewGroup(const std::vector<int>& world_ranks) const {
  if (member_ == nullptr) return NoWorld();
  SessionCore* const session = member_->session.get();
  if (session->Forked()) return ForkedError();
  CHORUS_RETURN_IF_ERROR(CheckNotInTrace("NewGroup", "call it outside"));
  InstanceKey::Request request;
  {
    SessionLock lock(session);
    CHORUS_RETURN_IF_ERROR(lock.status());
    if (!member_->out_of_line.ok()) return Detached(member_->out_of_line);
    // Counts like any call, whatever becomes of it.
    request = {member_->step.load(), member_->group_requests[world_ranks]++};
  }
  CHORUS_ASSIGN_OR_RETURN(
      const GroupId id,
      session->link().CreateGroup(member_->world, Rank(rank()), world_ranks, request));
  auto group = std::make_unique<GroupCore>();
  group->member = member_.get();
  group->id = id;
  group->ranks = world_ranks;
  for (size_t rank_in_group = 0; rank_in_group < world_ranks.size(); ++rank_in_group) {
    if (world_ranks[rank_in_group] == rank()) group->rank = static_cast<int>(rank_in_group);
  }
  SessionLock lock(session);
  if (!lock.status().ok()) return lock.status();
  member_->groups.push_back(std::move(group));
  return GroupFrom(member_, member_->groups.back().get());
}

absl::Status World::Leave() const {
  if (member_ == nullptr) return NoWorld();
  SessionCore* const session = member_->session.get();
  if (session->Forked()) return ForkedError();
  CHORUS_RETURN_IF_ERROR(CheckNotInTrace("Leave", "call it outside"));
  // By a call beside the log, which must not come before what this rank has called: an empty
  // command behind that has its outcome when all of it has been taken.
  absl::StatusOr<Sequence> behind = Sequence();
  {
    SessionLock lock(session);
    CHORUS_RETURN_IF_ERROR(lock.status());
    behind = session->log().Submit(Release{});
  }
  CHORUS_RETURN_IF_ERROR(behind.status());
  const absl::Status taken = session->link().WaitCommand(*behind, session->wait_timeout());
  if (IsNoOutcome(taken)) return taken;
  CHORUS_RETURN_IF_ERROR(session->link().Leave(member_->world, Rank(rank())));
  member_->left.store(true, std::memory_order_relaxed);
  // Nothing of it can be called any more.
  SessionLock lock(session);
  if (!lock.status().ok()) return lock.status();
  for (const auto& group : member_->groups) session->graphs().ForgetCalls(group.get());
  return absl::OkStatus();
}

absl::Status World::Abort(const std::string& why) const {
  if (member_ == nullptr) return NoWorld();
  if (member_->session->Forked()) return ForkedError();
  CHORUS_RETURN_IF_ERROR(CheckNotInTrace("Abort", "call it outside"));
  SessionCore* const session = member_->session.get();
  Error error = InShort(Error(Reason::kAborted, why));
  absl::StatusOr<Sequence> sent = Sequence();
  {
    SessionLock lock(session);
    CHORUS_RETURN_IF_ERROR(lock.status());
    Refusals refusals;
    RefusedOf(member_.get(), &refusals);
    refusals[0].by_hand = true;
    refusals[0].why = std::move(error);
    sent = session->log().Submit(std::move(refusals[0]));
  }
  if (!sent.ok()) return sent.status();
  const absl::Status outcome = session->link().WaitCommand(*sent, session->wait_timeout());
  session->OnError(outcome);
  // It is the error that was asked for, if it was heard.
  return ErrorOf(outcome).ended.empty() ? outcome : absl::OkStatus();
}

absl::StatusOr<World::Reformed> World::Reform(Timeout timeout) {
  if (member_ == nullptr) return NoWorld();
  SessionCore* const session = member_->session.get();
  if (session->Forked()) return ForkedError();
  CHORUS_RETURN_IF_ERROR(CheckNotInTrace("Reform", "call it outside"));
  auto reformed = [&] {
    const WaitReports::During reports(&session->reports());
    return session->link().Reform(member_->world, Rank(rank()), timeout);
  }();
  if (!reformed.ok()) return reformed.status();
  SessionLock lock(session);
  if (!lock.status().ok()) return lock.status();
  member_->rank = reformed->rank;
  member_->size = reformed->size;
  member_->epoch = reformed->epoch;
  member_->since = reformed->epoch;
  member_->step = 0;
  member_->own_steps = 0;
  member_->ResetCounts();
  for (const auto& group : member_->groups) {
    group->alive = group->id == GroupId(0);
    ++group->generation;
    session->graphs().ForgetCalls(group.get());
  }
  GroupCore* const everybody = member_->everybody;
  everybody->ranks.clear();
  for (int r = 0; r < reformed->size; ++r) everybody->ranks.push_back(r);
  everybody->rank = reformed->rank;
  Reformed result;
  result.rank = reformed->rank;
  result.size = reformed->size;
  result.epoch = reformed->epoch.value();
  result.survivors = std::move(reformed->survivors);
  return result;
}

}  // namespace chorus
