#include "core/node/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus::node {
namespace {

// So many sessions that died are remembered, with the cause.
constexpr size_t kKeptDeaths = 1024;
// While a call of a session is under way each quarter of its lease it is renewed, with those of
// others: whoever asks for less has this.
constexpr absl::Duration kShortestLease = absl::Milliseconds(200);

}  // namespace

absl::Status SessionLost(absl::string_view how) {
  return MakeError(
      Reason::kSessionLost,
      how.empty()
          ? "the session has ended, or belongs to an earlier life of the daemon; open a new one"
          : absl::StrCat("the session has ended: ", how, "; open a new one"));
}

absl::StatusOr<std::shared_ptr<WaitCharge>> ChargeWait(const BudgetRef& session) {
  const auto charge = std::make_shared<WaitCharge>();
  CHORUS_ASSIGN_OR_RETURN(charge->count_charge,
                          session->Charge(Domain::kHost, Resource::kWaits, 1));
  if (session->held(Resource::kWaits) > kFreeWaits) {
    CHORUS_ASSIGN_OR_RETURN(charge->bytes,
                            session->Charge(Domain::kHost, Resource::kRunBytes, kWaitBytes));
  }
  return charge;
}

SessionTable::SessionTable(const NodeOptions* options, int device_count, TimerQueue* timers,
                           Expire expire, int64_t last_session)
    : options_(options),
      timers_(timers),
      expire_(std::move(expire)),
      last_session_(last_session),
      on_device_(static_cast<size_t>(device_count)) {}

SessionTable::~SessionTable() {
  for (const auto& entry : sessions_) {
    entry.second->memberships.clear();
    entry.second->names.TakeAll();
  }
}

absl::StatusOr<std::vector<DeviceIndex>> SessionTable::ChooseDevices(
    const OpenSessionRequest& request) const {
  std::vector<DeviceIndex> devices = request.devices;
  const int device_count = static_cast<int>(on_device_.size());
  if (devices.empty()) {
    const int count = std::max(request.device_count, 1);
    if (count > device_count) {
      return Malformed(
          absl::StrCat("a session holds 1 to ", device_count, " devices, not ", count));
    }
    for (int i = 0; i < device_count; ++i) devices.push_back(DeviceIndex(i));
    // Those with the fewest sessions, in the order of their indices.
    std::stable_sort(devices.begin(), devices.end(),
                     [this](DeviceIndex a, DeviceIndex b) { return on_device(a) < on_device(b); });
    devices.resize(static_cast<size_t>(count));
    std::sort(devices.begin(), devices.end());
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].value() < 0 || devices[i].value() >= device_count) {
      return UnknownName(absl::StrCat("device ", devices[i].value(), " does not exist; there are ",
                                      device_count, ", 0 to ", device_count - 1));
    }
    const auto here = devices.begin() + static_cast<ptrdiff_t>(i);
    if (std::find(devices.begin(), here, devices[i]) != here) {
      return Malformed(absl::StrCat("device ", devices[i].value(), " is named twice"));
    }
  }
  return devices;
}

absl::StatusOr<std::shared_ptr<Session>> SessionTable::Open(const OpenSessionRequest& request,
                                                            const TenantNamed& tenant_named,
                                                            const CommandLog::Shared& logs,
                                                            News* news, absl::Time now) {
  CHORUS_ASSIGN_OR_RETURN(std::vector<DeviceIndex> devices, ChooseDevices(request));
  if (request.lease > options_->max_lease) {
    return Malformed(absl::StrCat("lease: expected at most ",
                                  absl::FormatDuration(options_->max_lease), ", got ",
                                  absl::FormatDuration(request.lease)));
  }
  if (last_session_ >= kMaxSessionId) {
    return MakeError(Reason::kQuota, absl::StrCat("this daemon has had ", kMaxSessionId,
                                                  " sessions, all that it has names for: it has "
                                                  "to be started again"));
  }
  std::shared_ptr<Tenant> tenant = tenant_named(request.tenant);
  CHORUS_ASSIGN_OR_RETURN(Charge count_charge,
                          tenant->budget->Charge(Domain::kHost, Resource::kSessions, 1));
  const Names::Limits limits{options_->max_tensors, options_->max_graphs};
  Budget::Limits bounds;
  bounds.downloads = options_->max_session_downloads;
  auto session = std::make_shared<Session>(SessionId(++last_session_), request, std::move(tenant),
                                           logs, limits, bounds, news);
  session->count_charge = std::move(count_charge);
  session->devices = std::move(devices);
  session->lease = std::max(request.lease > absl::ZeroDuration() ? request.lease : options_->lease,
                            kShortestLease);
  for (DeviceIndex device : session->devices) {
    ++on_device_[static_cast<size_t>(device.value())];
  }
  for (const auto& other : sessions_) {
    if (other.second->tenant == session->tenant && other.second->request.pid == request.pid) {
      session->process = other.second->process;
    }
  }
  if (session->process == nullptr) session->process = std::make_shared<Turns>();
  sessions_[session->id] = session;
  if (!request.attached) {
    RenewLease(session.get(), now);
    ArmLease(session);
  }
  return session;
}

void SessionTable::RenewLease(Session* session, absl::Time now) const {
  if (!session->request.attached) session->lease_until = now + session->lease;
}

// Renewals only move `lease_until`: the timer looks at it when it fires.
void SessionTable::ArmLease(const std::shared_ptr<Session>& session) {
  const std::weak_ptr<Session> weak = session;
  session->lease_timer = timers_->Add(session->lease_until, [this, weak](absl::Time now) {
    const std::shared_ptr<Session> session = weak.lock();
    if (session == nullptr || session->dead()) return;
    if (session->lease_until <= now) {
      expire_(session,
              absl::StrCat("its lease of ", absl::FormatDuration(session->lease), " ran out"), now);
    } else {
      ArmLease(session);
    }
  });
}

void SessionTable::SetDetached(const std::shared_ptr<Session>& session, bool detached,
                               absl::Time now) {
  if (session->dead() || detached == (session->state == SessionState::kDetached)) return;
  timers_->Cancel(session->detach_timer);
  if (!detached) {
    session->state = SessionState::kActive;
    return;
  }
  session->state = SessionState::kDetached;
  const std::weak_ptr<Session> weak = session;
  session->detach_timer = timers_->Add(now + options_->detach_grace, [this, weak](absl::Time then) {
    const std::shared_ptr<Session> session = weak.lock();
    if (session == nullptr) return;
    expire_(session,
            absl::StrCat("its connection was lost and did not come back within ",
                         absl::FormatDuration(options_->detach_grace)),
            then);
  });
}

void SessionTable::Remove(Session* session, const std::string& died) {
  timers_->Cancel(session->lease_timer);
  timers_->Cancel(session->detach_timer);
  for (DeviceIndex device : session->devices) {
    --on_device_[static_cast<size_t>(device.value())];
  }
  if (!died.empty()) {
    deaths_[session->id] = {session->tenant->name, died};
    deaths_of_[session->tenant->name].insert(session->id);
    if (deaths_.size() > kKeptDeaths) ForgetDeath();
  }
  session->count_charge = Charge();
  sessions_.erase(session->id);
}

void SessionTable::ForgetDeath() {
  const auto most =
      std::max_element(deaths_of_.begin(), deaths_of_.end(), [](const auto& a, const auto& b) {
        // Of those that have as many the one whose oldest is the oldest.
        return std::make_pair(a.second.size(), *b.second.begin()) <
               std::make_pair(b.second.size(), *a.second.begin());
      });
  deaths_.erase(*most->second.begin());
  most->second.erase(most->second.begin());
  if (most->second.empty()) deaths_of_.erase(most);
}

absl::StatusOr<std::shared_ptr<Session>> SessionTable::Find(SessionId id) const {
  const auto it = sessions_.find(id);
  if (it != sessions_.end()) return it->second;
  const auto death = deaths_.find(id);
  return SessionLost(death == deaths_.end() ? "" : death->second.how);
}

absl::StatusOr<std::string> SessionTable::TenantOf(SessionId id) const {
  const auto death = deaths_.find(id);
  if (death != deaths_.end()) return death->second.tenant;
  CHORUS_ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, Find(id));
  return session->tenant->name;
}

}  // namespace chorus::node
