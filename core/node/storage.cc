#include "core/node/storage.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/node/strided.h"

namespace chorus::node {
namespace {

constexpr int64_t kBackgroundCopyBytes = 256 << 10;
// What a copy of that many bytes takes that lie side by side, as StridedExtent counts it.
constexpr int64_t kBackgroundCopyWork = 6144;
// What is put in order before others' work in the background has its turn.
constexpr int64_t kGatheredWork = 64 * kBackgroundCopyWork;

constexpr int64_t kSmallCopyWork = 64;  // to have it made by the background costs no less
// Smaller ones, as many as a run may have, take few arenas.
constexpr int64_t kReservedBytes = 16 << 10;
// Of the node thread, beside the bytes.
constexpr int64_t kWorkPerBinding = 2;
constexpr int64_t kWorkPerTransfer = 8;

// Whether a copy from or to staging memory is not made by the node's thread: a large one, or one of
// so many that this slice has done enough.
bool IsForBackground(int64_t work) {
  return work >= kBackgroundCopyWork || (work > kSmallCopyWork && !SliceHasTime());
}

// How the bytes of a range come to where a device reads them.
struct Way {
  std::shared_ptr<Arena> arena;
  const char* source = nullptr;
  int64_t work = 0;        // of a copy in host memory (StridedExtent)
  bool in_place = false;   // it reads them where they stand
  bool by_device = false;  // else: it takes them from there; false: by a copy in host memory
};
// `host`: the devices' memory is the host's.
absl::StatusOr<Way> WayOf(std::shared_ptr<Arena> arena, const ExternalRange& range,
                          const TensorType& type, bool stable, bool host) {
  Way way;
  CHORUS_ASSIGN_OR_RETURN(const StridedExtent extent,
                          CheckStrided(type, range.strides, range.offset, arena->bytes()));
  way.source = arena->data() + range.offset;
  way.arena = std::move(arena);
  way.work = extent.work;
  way.in_place =
      !stable && host && extent.contiguous &&
      reinterpret_cast<uintptr_t>(way.source) % static_cast<uintptr_t>(DTypeBytes(type.dtype)) == 0;
  way.by_device = extent.contiguous && (!host || type.num_bytes() >= kBackgroundCopyBytes);
  return way;
}

absl::Status CheckInline(const InlineData& data, const TensorType& type) {
  if (static_cast<int64_t>(data.bytes.size()) == type.num_bytes()) return absl::OkStatus();
  return Malformed(absl::StrCat(data.bytes.size(), " inline bytes for ", type.ToString(),
                                ", which has ", type.num_bytes()));
}

}  // namespace

struct Storage::Moves {
  struct Move {
    TensorType type;
    std::vector<int64_t> strides;
    std::shared_ptr<Arena> arena;
    const char* from = nullptr;
    int64_t work = 0;
    BufferRef copy;  // in host memory; null: a device takes the bytes from where they stand
    DeviceIndex device;
    BufferRef target;  // there; null: the host's
    OnArrived arrived;
  };
  // RESOURCE_EXHAUSTED: the session cannot be charged for one more.
  static absl::Status Add(const Session& session, Move move, std::shared_ptr<Moves>* moves) {
    if (*moves == nullptr) *moves = std::make_shared<Moves>();
    Moves& to = **moves;
    to.lane = session.tenant->lane;
    if (to.all.size() == to.all.capacity()) {
      const size_t room = std::max<size_t>(16, 2 * to.all.size());
      // Twice: what has been moved to the new room stands in the old one until then.
      CHORUS_ASSIGN_OR_RETURN(
          to.charge,
          session.budget->Charge(Domain::kHost, Resource::kRunBytes,
                                 2 * static_cast<int64_t>(room * (sizeof(Move) + kBytesPerMove))));
      to.all.reserve(room);
    }
    to.all.push_back(std::move(move));
    return absl::OkStatus();
  }

  // Dims and strides beyond those that stand in a Move itself.
  static constexpr size_t kBytesPerMove = 128;
  Charge charge;
  int32_t lane = 0;
  std::vector<Move> all;
  size_t next = 0;
};

Storage::Storage(const NodeOptions* options, BudgetRef budget, Devices* devices, Launcher* launcher,
                 Background* background, const Clock* clock, TimerQueue* timers,
                 PathCounters* paths, std::function<void()> ask_to_let_go)
    : options_(options),
      host_(devices->info().host_addressable),
      launcher_(launcher),
      background_(background),
      clock_(clock),
      timers_(timers),
      paths_(paths),
      budget_(std::move(budget)),
      share_(budget_->limits().Share()),
      held_(&memory_thread_, [this, ask = std::move(ask_to_let_go)] {
        ask();
        if (held_.size() == 1) LookAtHeldLater(clock_->now);
      }) {
  // First, for that is there by itself.
  budget_->Reclaim(&memory_thread_, [this](const Budget&) {
    bool has_settled = memory_thread_.Settle();
    for (const auto& set : device_sets_) has_settled |= set->Settle();
    return has_settled;
  });
  budget_->Reclaim(&held_, [this](const Budget& full) { return held_.LookWithin(full); });
  if (host_) return;
  for (int i = 0; i < devices->info().count(); ++i) {
    device_sets_.push_back(std::make_unique<DeviceSet>(devices, i));
  }
}

Storage::~Storage() {
  budget_->Forget(&held_);
  budget_->Forget(&memory_thread_);
}

int32_t Storage::LeastUsedLane() const {
  std::array<int, kMaxLanes> tenants_on{};
  for (const auto& entry : tenants_) {
    if (const auto tenant = entry.second.tenant.lock()) {
      ++tenants_on[static_cast<size_t>(tenant->lane)];
    }
  }
  const auto least = std::min_element(tenants_on.begin(), tenants_on.end());
  return static_cast<int32_t>(least - tenants_on.begin());
}

std::shared_ptr<Tenant> Storage::TenantNamed(const std::string& name) {
  if (std::shared_ptr<Tenant> tenant = tenants_[name].tenant.lock()) return tenant;
  // Drops tenants whose last session has gone, and with it all that they had.
  for (auto it = tenants_.begin(); it != tenants_.end();) {
    if (it->second.tenant.expired() && it->second.budget.expired() && it->first != name) {
      tenants_.erase(it++);
    } else {
      ++it;
    }
  }
  TenantEntry& entry = tenants_[name];
  auto tenant = std::make_shared<Tenant>();
  tenant->name = name;
  // Pages that clients of its former sessions still hold are charged to it.
  tenant->budget = entry.budget.lock();
  if (tenant->budget == nullptr) {
    tenant->budget = Budget::Within(budget_, absl::StrCat("tenant ", name), share_);
  }
  ArenaSetOptions arenas;
  arenas.helpers = {&memory_thread_, &held_, options_->memory_guard};
  arenas.left = &left_;
  tenant->arenas = ArenaSet::Create(tenant->budget, arenas);
  tenant->lane = LeastUsedLane();
  entry = {tenant, tenant->budget};
  return tenant;
}

std::shared_ptr<const Tenant> Storage::FindTenant(absl::string_view name) const {
  const auto it = tenants_.find(name);
  return it == tenants_.end() ? nullptr : it->second.tenant.lock();
}

// --- Staging arenas -----------------------------------------------------------------------------

void Storage::CreateStaging(const std::shared_ptr<Session>& session, int64_t bytes,
                            Patience patience, OnStaging done) {
  if (session->dead()) return done(SessionLost(""));
  absl::StatusOr<StagingArena> staging = MakeStaging(session.get(), bytes);
  absl::Status answer = staging.status();
  if (Waits(&patience, &answer)) {
    auto charge = ChargeWait(session->budget);
    if (charge.ok()) {
      return AwaitMemory(
          *session->tenant, patience.until(),
          [this, session, bytes, patience, done = std::move(done), charge = *std::move(charge)] {
            CreateStaging(session, bytes, patience, done);
          });
    }
  }
  if (answer.ok()) return done(std::move(staging));
  done(std::move(answer));
}

absl::StatusOr<StagingArena> Storage::MakeStaging(Session* session, int64_t bytes) {
  if (bytes <= 0) {
    return Malformed(absl::StrCat("a staging arena has at least one byte, not ", bytes));
  }
  if (static_cast<int64_t>(session->staging.size()) >= options_->max_staging_arenas ||
      bytes > options_->max_staging_bytes - session->staging_bytes) {
    return MakeError(Reason::kQuota,
                     absl::StrCat("a session may have ", options_->max_staging_arenas,
                                  " staging arenas of ", options_->max_staging_bytes,
                                  " bytes together; it has ", session->staging.size(), " of ",
                                  session->staging_bytes, " and asks for ", bytes, " more"));
  }
  const ArenaHelpers helpers = {&memory_thread_, &held_, options_->memory_guard};
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena,
                          Arena::CreateStaging(session->budget, bytes, helpers));
  StagingArena staging;
  staging.arena = arena->id();
  staging.bytes = arena->bytes();
  session->staging_bytes += staging.bytes;
  session->staging[arena->id()] = std::move(arena);
  return staging;
}

absl::StatusOr<std::shared_ptr<Arena>> Storage::FindStaging(const Session& session,
                                                            ArenaId arena) const {
  const auto it = session.staging.find(arena);
  if (it == session.staging.end()) {
    return UnknownName(
        absl::StrCat("arena ", arena.value(), " is no staging arena of this session"));
  }
  return it->second;
}

absl::StatusOr<std::shared_ptr<Arena>> Storage::FindStable(const Session& session,
                                                           ArenaId arena) const {
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> staging, FindStaging(session, arena));
  if (!staging->may_change()) return staging;
  return MakeError(Reason::kWrongState,
                   absl::StrCat("arena ", arena.value(),
                                " is used before its client has sealed its mapping and said so "
                                "(ConfirmStaging)"));
}

absl::Status Storage::ReleaseStaging(Session* session, ArenaId arena) {
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> target, FindStaging(*session, arena));
  session->staging_bytes -= target->bytes();
  session->staging.erase(arena);
  return absl::OkStatus();
}

absl::Status Storage::WriteStaging(const Session& session, ArenaId arena, int64_t offset,
                                   absl::string_view bytes) {
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> target, FindStaging(session, arena));
  const int64_t size = static_cast<int64_t>(bytes.size());
  if (offset < 0 || offset > target->bytes() || size > target->bytes() - offset) {
    return Malformed(absl::StrCat("bytes ", offset, " to ", offset, "+", size,
                                  " are not inside arena ", arena.value(), " of ", target->bytes(),
                                  " bytes"));
  }
  if (target->is_shared()) {
    return MakeError(Reason::kWrongState,
                     absl::StrCat("arena ", arena.value(),
                                  " cannot be written by the daemon: an attached client writes its "
                                  "own mapping"));
  }
  std::memcpy(target->writable() + offset, bytes.data(), bytes.size());
  paths_->streamed_bytes += size;
  return absl::OkStatus();
}

absl::StatusOr<BufferRef> Storage::FindStaged(const Session& session, const ExternalRange& range,
                                              int64_t bytes) const {
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena, FindStable(session, range.arena));
  return Buffer::OfStaging(std::move(arena), range.offset, bytes);
}

absl::StatusOr<int> Storage::ResultArenaFd(const Session& session, ArenaId arena) const {
  Arena* const target = session.tenant->arenas->Find(arena);
  if (target == nullptr) {
    return UnknownName(absl::StrCat("arena ", arena.value(), " holds nothing of this tenant"));
  }
  return target->ClientFd();
}

// No event tells that a client lets go.
void Storage::LookAtHeldLater(absl::Time now) {
  timers_->Add(now + absl::Seconds(1), [this](absl::Time then) {
    held_.Look();
    if (held_.size() > 0) LookAtHeldLater(then);
  });
}

absl::StatusOr<BufferRef> Storage::Allocate(Tenant* tenant, DeviceIndex device, int64_t bytes) {
  if (host_) return tenant->arenas->Allocate(bytes);
  return device_sets_[static_cast<size_t>(device.value())]->Allocate(tenant->budget, bytes);
}

absl::StatusOr<BufferRef> Storage::Reserve(Session* session, DeviceIndex device, int64_t bytes) {
  return session->reservation.Make([&] { return Allocate(session->tenant.get(), device, bytes); });
}

absl::Status Storage::ReserveCopy(Session* session, const ExternalRange& range,
                                  const TensorType& type, bool stable,
                                  std::vector<BufferRef>* buffers) {
  const int64_t bytes = type.num_bytes();
  if (bytes < kReservedBytes || !session->reservation.goes_on()) return absl::OkStatus();
  CountWork(kWorkPerBinding);
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena, FindStable(*session, range.arena));
  CHORUS_ASSIGN_OR_RETURN(const Way way, WayOf(std::move(arena), range, type, stable, host_));
  if (way.in_place || (way.by_device && !host_)) return absl::OkStatus();
  CHORUS_ASSIGN_OR_RETURN(BufferRef buffer, session->reservation.Make([&] {
    return session->tenant->arenas->Allocate(bytes);
  }));
  if (buffer) buffers->push_back(std::move(buffer));
  return absl::OkStatus();
}

bool Storage::Waits(Patience* patience, absl::Status* answer) const {
  if (!stopped_) return patience->Waits(*answer, clock_->now);
  if (IsForNow(*answer)) *answer = DrainingError();
  return false;
}

void Storage::AwaitMemory(const Tenant& tenant, absl::Time until, std::function<void()> then) {
  AwaitMemory(memory_thread_.WhetherGone(*tenant.budget), until, std::move(then));
}

bool Storage::AwaitMemory(Session* session, const absl::Status& answer, AskAgain ask_again) {
  Patience& patience = session->patience;
  absl::Status last_answer = answer;
  if (!Waits(&patience, &last_answer)) return false;
  auto on_memory = ask_again();
  if (!on_memory.ok()) {
    patience = Patience();
    return false;
  }
  AwaitMemory(*session->tenant, patience.until(),
              [on_memory = *std::move(on_memory)] { on_memory(absl::OkStatus()); });
  return true;
}

// That takes milliseconds: a look at each is soon enough, and nothing has to wake the node thread.
void Storage::AwaitMemory(std::function<bool()> is_there, absl::Time until,
                          std::function<void()> then) {
  timers_->Add(clock_->now + absl::Milliseconds(1),
               [this, is_there = std::move(is_there), until,
                then = std::move(then)](absl::Time now) mutable {
                 if (is_there() || now >= until || stopped_) return then();
                 AwaitMemory(std::move(is_there), until, std::move(then));
               });
}

absl::StatusOr<BufferRef> Storage::BindInline(const Session& session, const InlineData& data,
                                              const TensorType& type, DeviceIndex device) {
  CountWork(kWorkPerBinding);
  CHORUS_RETURN_IF_ERROR(CheckInline(data, type));
  CHORUS_ASSIGN_OR_RETURN(BufferRef buffer,
                          Allocate(session.tenant.get(), device, type.num_bytes()));
  if (buffer) buffer->set_state(Buffer::State::kFrozen);
  return buffer;
}

absl::StatusOr<Storage::Bound> Storage::Bind(const Session& session, const Binding& binding,
                                             const TensorType& type, DeviceIndex device,
                                             bool stable, OnArrived arrived,
                                             std::shared_ptr<Moves>* moves) {
  CountWork(kWorkPerBinding);
  const int64_t bytes = type.num_bytes();
  const bool moves_later = moves != nullptr && !SliceHasTime();
  Bound bound;
  BufferRef copy;                     // in host memory
  std::shared_ptr<Arena> gathers;     // what is to be copied from there in the background
  std::shared_ptr<Arena> moved_from;  // or in a turn that comes
  int64_t work = 0;                   // of that copy
  Charge gathering;
  if (const auto* data = absl::get_if<InlineData>(&binding)) {
    CHORUS_RETURN_IF_ERROR(CheckInline(*data, type));
    if (bytes == 0) return bound;
    CHORUS_ASSIGN_OR_RETURN(copy, session.tenant->arenas->Allocate(bytes));
    std::memcpy(copy->host(), data->bytes.data(), data->bytes.size());
  } else {
    const ExternalRange& range = absl::get<ExternalRange>(binding);
    CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena, FindStable(session, range.arena));
    CHORUS_ASSIGN_OR_RETURN(Way way, WayOf(std::move(arena), range, type, stable, host_));
    if (bytes == 0) return bound;
    if (way.in_place) {
      CHORUS_ASSIGN_OR_RETURN(bound.buffer,
                              Buffer::OfStaging(std::move(way.arena), range.offset, bytes));
      bound.address = bound.buffer->address();
      return bound;
    }
    paths_->copied_bytes += bytes;
    if (way.by_device) {
      CHORUS_ASSIGN_OR_RETURN(bound.buffer, Allocate(session.tenant.get(), device, bytes));
      bound.buffer->set_state(Buffer::State::kFrozen);
      bound.address = bound.buffer->address();
      if (moves_later) {
        bound.arrival = Arrival::kLater;
        CHORUS_RETURN_IF_ERROR(Moves::Add(session,
                                          {type,
                                           {},
                                           std::move(way.arena),
                                           way.source,
                                           kWorkPerTransfer,
                                           BufferRef(),
                                           device,
                                           bound.buffer,
                                           std::move(arrived)},
                                          moves));
        return bound;
      }
      bound.arrival = Arrival::kInOrder;
      bound.upload = Upload(device, session.tenant->lane, bound.buffer, way.source,
                            std::move(way.arena), bound.arrival, std::move(arrived));
      return bound;
    }
    CHORUS_ASSIGN_OR_RETURN(copy, session.tenant->arenas->Allocate(bytes));
    work = way.work;
    if (moves_later && work <= kSmallCopyWork) {
      moved_from = std::move(way.arena);
    } else if (IsForBackground(work)) {
      CHORUS_ASSIGN_OR_RETURN(
          gathering, session.budget->Charge(Domain::kHost, Resource::kRunBytes, kBytesToCopyLater));
      gathers = std::move(way.arena);
    } else {
      CountWork(work);
      CopyStrided(type, range.strides, 0, type.num_elements(), way.source, copy->host());
    }
  }
  copy->set_state(Buffer::State::kFrozen);
  bound.buffer = copy;
  if (!host_) {
    CHORUS_ASSIGN_OR_RETURN(bound.buffer, Allocate(session.tenant.get(), device, bytes));
    bound.buffer->set_state(Buffer::State::kFrozen);
  }
  bound.address = bound.buffer->address();
  if (moved_from != nullptr) {
    bound.arrival = Arrival::kLater;
    const ExternalRange& range = absl::get<ExternalRange>(binding);
    const char* const from = moved_from->data() + range.offset;
    CHORUS_RETURN_IF_ERROR(
        Moves::Add(session,
                   {type, range.strides, std::move(moved_from), from, work + kWorkPerTransfer, copy,
                    device, host_ ? BufferRef() : bound.buffer, std::move(arrived)},
                   moves));
  } else if (gathers != nullptr) {
    bound.arrival = Arrival::kLater;
    Gather(
        session, std::move(gathers), absl::get<ExternalRange>(binding), type, work, copy,
        [this, charge = std::make_shared<Charge>(std::move(gathering)), device,
         lane = session.tenant->lane, target = bound.buffer, copy, arrived = std::move(arrived)] {
          if (host_) return arrived(Arrival::kLater, absl::OkStatus());
          Upload(device, lane, target, copy->host(), copy, Arrival::kLater, arrived);
        });
  } else if (!host_) {
    bound.arrival = Arrival::kInOrder;
    bound.upload = Upload(device, session.tenant->lane, bound.buffer, copy->host(), copy,
                          bound.arrival, std::move(arrived));
  }
  return bound;
}

void Storage::MakeMoves(std::shared_ptr<Moves> moves) {
  if (moves == nullptr) return;
  // Not at once: whoever has bound them is not done.
  launcher_->Post([this, moves = std::move(moves)] {
    InTurns([this, moves] {
      if (moves->next == moves->all.size()) return false;
      Moves::Move move = std::move(moves->all[moves->next++]);
      CountWork(move.work);
      const char* from = move.from;
      if (move.copy) {
        CopyStrided(move.type, move.strides, 0, move.type.num_elements(), from, move.copy->host());
        from = move.copy->host();
      }
      if (move.target) {
        Upload(move.device, moves->lane, move.target, from, std::make_pair(move.arena, move.copy),
               Arrival::kLater, std::move(move.arrived));
      } else {
        move.arrived(Arrival::kLater, absl::OkStatus());
      }
      return true;
    });
  });
}

void Storage::InTurns(std::function<bool()> step) {
  while (SliceHasTime()) {
    if (!step()) return;
  }
  launcher_->Post([this, step = std::move(step)]() mutable { InTurns(std::move(step)); });
}

template <typename Copy>
void Storage::InParts(const std::string& tenant, int64_t elements, int64_t work, Copy copy,
                      std::function<void()> done) {
  const int64_t parts = 1 + work / kGatheredWork;
  const int64_t part = (elements + parts - 1) / parts;
  int64_t begin = 0;
  for (; elements - begin > part; begin += part) {
    background_->Do(
        tenant, [copy, begin, part] { copy(begin, begin + part); }, [] {});
  }
  background_->Do(
      tenant, [copy, begin, elements] { copy(begin, elements); }, std::move(done));
}

void Storage::Gather(const Session& session, std::shared_ptr<Arena> arena,
                     const ExternalRange& range, const TensorType& type, int64_t work,
                     BufferRef copy, std::function<void()> gathered) {
  const char* const from = arena->data() + range.offset;
  char* const to = copy->host();
  InParts(
      session.tenant->name, type.num_elements(), work,
      [type, strides = range.strides, from, to](int64_t begin, int64_t end) {
        CopyStrided(type, strides, begin, end, from, to);
      },
      [arena = std::move(arena), copy = std::move(copy), gathered = std::move(gathered)] {
        gathered();
      });
}

absl::StatusOr<ClientTarget> Storage::FindTarget(Session* session, const ExternalRange& range,
                                                 const TensorType& type) {
  CountWork(kWorkPerBinding);
  ClientTarget target;
  CHORUS_ASSIGN_OR_RETURN(target.arena, FindStable(*session, range.arena));
  CHORUS_ASSIGN_OR_RETURN(const StridedExtent extent,
                          CheckStrided(type, range.strides, range.offset, target.arena->bytes()));
  CHORUS_RETURN_IF_ERROR(CheckNoOverlap(type, range.strides));
  target.offset = range.offset;
  target.work = extent.work;
  if (extent.contiguous) return target;
  target.strides = range.strides;
  if (!host_ && type.num_bytes() > 0) {
    CHORUS_ASSIGN_OR_RETURN(target.landing, session->reservation.Make([&] {
      return session->tenant->arenas->Allocate(type.num_bytes());
    }));
  }
  return target;
}

void Storage::WriteOut(const Tenant& tenant, DeviceIndex device, DeviceAddress address,
                       const TensorType& type, const ClientTarget& target, OnWritten done) {
  const int64_t bytes = type.num_bytes();
  if (bytes == 0) return done(absl::OkStatus());
  paths_->copied_bytes += bytes;
  if (host_) {
    return Spread(tenant.name, reinterpret_cast<const char*>(address), type, target,
                  [done = std::move(done)] { done(absl::OkStatus()); });
  }
  char* const to =
      target.landing ? target.landing->host() : target.arena->writable() + target.offset;
  CountWork(kWorkPerTransfer);
  launcher_->Download(device, tenant.lane, to, address, bytes,
                      [this, tenant = tenant.name, type, target,
                       done = std::move(done)](const absl::Status& status) {
                        if (!status.ok() || !target.landing) return done(status);
                        Spread(tenant, target.landing->host(), type, target,
                               [landing = target.landing, done] { done(absl::OkStatus()); });
                      });
}

void Storage::Spread(const std::string& tenant, const char* from, const TensorType& type,
                     const ClientTarget& target, std::function<void()> done) {
  char* const to = target.arena->writable() + target.offset;
  const auto spread = [type, strides = target.strides, from, to](int64_t begin, int64_t end) {
    SpreadStrided(type, strides, begin, end, from, to);
  };
  if (!IsForBackground(target.work)) {
    CountWork(target.work);
    spread(0, type.num_elements());
    return done();
  }
  InParts(tenant, type.num_elements(), target.work, spread,
          [arena = target.arena, done = std::move(done)] { done(); });
}

// On the device's copy stream, beside what the device and the node do meanwhile.
template <typename Keep>
TransferId Storage::Upload(DeviceIndex device, int32_t lane, const BufferRef& target,
                           const char* source, Keep keep, Arrival arrival, OnArrived arrived) {
  CountWork(kWorkPerTransfer);
  return launcher_->Upload(device, lane, target->address(), source, target->bytes(),
                           [keep = std::move(keep), target, arrival, arrived = std::move(arrived)](
                               const absl::Status& status) { arrived(arrival, status); });
}

// --- Reading ------------------------------------------------------------------------------------

Waiters<CellRef>::Id Storage::WhenReadable(const CellRef& cell,
                                           const std::shared_ptr<Tenant>& tenant, OnReadable done) {
  if (!cell->settled()) {
    return cell->on_settled.Add([this, tenant, done](const CellRef& settled) {
      MakeReadable(settled, tenant, Patience(), done);
    });
  }
  MakeReadable(cell, tenant, Patience(), std::move(done));
  return 0;
}

void Storage::MakeReadable(const CellRef& cell, const std::shared_ptr<Tenant>& tenant,
                           Patience patience, OnReadable done) {
  if (cell->state == Cell::State::kFailed) return done(cell, ToStatus(*cell->error));
  if (cell->host() != nullptr) return done(cell, absl::OkStatus());
  const DownloadKey key(cell->buffer.get(), cell->offset, cell->bytes);
  const auto under_way = downloads_.find(key);
  if (under_way != downloads_.end()) {
    under_way->second.push_back({cell, std::move(done)});
    return;
  }
  if (!SliceHasTime()) {
    return launcher_->Post([this, cell, tenant, patience, done = std::move(done)]() mutable {
      MakeReadable(cell, tenant, patience, std::move(done));
    });
  }
  absl::StatusOr<BufferRef> mirror = tenant->arenas->Allocate(cell->bytes);
  absl::Status answer = mirror.status();
  if (Waits(&patience, &answer)) {
    return AwaitMemory(*tenant, patience.until(),
                       [this, cell, tenant, patience, done = std::move(done)] {
                         MakeReadable(cell, tenant, patience, done);
                       });
  }
  if (!answer.ok()) return done(cell, answer);
  downloads_[key].push_back({cell, std::move(done)});
  char* const to = (*mirror)->host();
  launcher_->Download(cell->device, tenant->lane, to, cell->address(), cell->bytes,
                      [this, key, buffer = cell->buffer, offset = cell->offset,
                       copy = *std::move(mirror)](const absl::Status& status) {
                        if (status.ok()) buffer->AddMirror(offset, copy);
                        auto readers =
                            std::make_shared<std::deque<Reader>>(std::move(downloads_[key]));
                        downloads_.erase(key);
                        TellReaders(std::move(readers), status);
                      });
}

void Storage::TellReaders(std::shared_ptr<std::deque<Reader>> readers, const absl::Status& status) {
  InTurns([readers = std::move(readers), status] {
    if (readers->empty()) return false;
    CountWork(kWorkPerWaiter);
    readers->front().done(readers->front().cell, status);
    readers->pop_front();
    return true;
  });
}

TimerQueue::Id Storage::ReadTensor(const Session& session, TensorId id, absl::Time deadline,
                                   OnTensor done) {
  absl::StatusOr<CellRef> cell = session.names.FindTensor(id);
  if (!cell.ok()) {
    done(cell.status());
    return {};
  }
  absl::StatusOr<Charge> download = session.budget->Charge(Domain::kHost, Resource::kDownloads, 1);
  if (!download.ok()) {
    done(download.status());
    return {};
  }
  // Whichever comes first takes the callback; bytes that are on their way to the host cannot be
  // stopped.
  auto shared_done = std::make_shared<OnTensor>(std::move(done));
  auto charge = std::make_shared<Charge>(*std::move(download));
  auto waiter = std::make_shared<Waiters<CellRef>::Id>();
  const std::weak_ptr<Cell> weak = *cell;
  const TimerQueue::Id timer = timers_->Add(deadline, [shared_done, weak, waiter, id](absl::Time) {
    if (const CellRef cell = weak.lock()) cell->on_settled.Remove(*waiter);
    OnTensor call = std::move(*shared_done);
    *shared_done = nullptr;
    call(MakeError(Reason::kTransportTimeout, absl::StrCat("tensor ", id.slot, ".", id.generation,
                                                           " is not computed yet; ask again")));
  });
  const auto answer = [this, budget = session.budget, shared_done, charge, timer](
                          const CellRef& cell, absl::Status status) {
    if (*shared_done == nullptr) return;
    timers_->Cancel(timer);
    OnTensor call = std::move(*shared_done);
    *shared_done = nullptr;
    ReadableTensor view;
    view.download = std::move(*charge);
    if (status.ok()) {
      absl::StatusOr<Charge> parts = budget->Charge(Domain::kHost, Resource::kTransferBytes,
                                                    2 * std::min(cell->bytes, kMaxChunkBytes));
      status = parts.status();
      if (status.ok()) view.parts = *std::move(parts);
    }
    if (!status.ok()) {
      call(status);
      return;
    }
    view.type = *cell->type;
    view.device = cell->device;
    view.buffer = cell->buffer;
    view.data = cell->host();
    view.bytes = cell->bytes;
    call(std::move(view));
  };
  *waiter = WhenReadable(*cell, session.tenant, answer);
  return timer;
}

int64_t Storage::live_buffers() const {
  int64_t live = 0;
  for (const auto& entry : tenants_) {
    if (const auto tenant = entry.second.tenant.lock()) live += tenant->arenas->live_buffers();
  }
  for (const auto& set : device_sets_) live += set->live_buffers();
  return live;
}

int64_t Storage::idle_bytes() const {
  int64_t idle = 0;
  for (const auto& entry : tenants_) {
    if (const auto tenant = entry.second.tenant.lock()) idle += tenant->arenas->idle_bytes();
  }
  return idle;
}

}  // namespace chorus::node
