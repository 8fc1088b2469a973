#include "core/node/short_way.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/failpoint.h"
#include "core/base/work.h"
#include "core/node/run_state.h"
#include "core/tensor/type.h"

namespace chorus::node {
namespace {

// What a point takes for each member, and for each kind, from above.
constexpr size_t kPerStanding = 1536;
static_assert(sizeof(StandingRun) + ShortWay::kMostFrameBytes + 256 <= kPerStanding);
constexpr size_t kPerKind = 1024;

// To make a template; to take a run, and to publish it.
constexpr int64_t kWorkPerTemplate = 32;
constexpr int64_t kWorkPerStanding = 8;

// The membership of the world that the run's one group is of; null: there is none, or it has more.
const Session::Membership* MembershipOf(const Session& session, const Run& run) {
  if (run.groups.size() != 1) return nullptr;
  for (const Session::Membership& membership : session.memberships) {
    if (membership.world->id == run.groups.front().world) return &membership;
  }
  return nullptr;
}

// Whether the run binds what is usual, and nothing else.
bool IsUsual(const Run& run) {
  return run.instances.empty() && run.pair_calls.empty() && !run.call_goes_on &&
         run.donate.empty() && run.groups.front().base.size() <= 1 &&
         run.outputs.size() <= ShortWay::kMostOutputs;
}

// Whether a graph is one collective that all members may call alike, on one device, without a
// gradient.
bool IsOneCollective(const GraphRecord& record) {
  const Graph& graph = record.graph;
  const Plan& plan = record.main.plan;
  if (!record.maxima.empty() || !plan.only_collectives || !plan.equal_groups.empty() ||
      plan.votes->participations.size() != 1 || graph.group_slots.size() != 1 ||
      graph.group_slots.front().held.size() != 1) {
    return false;
  }
  for (const BufferSpec& spec : plan.buffers) {
    if (spec.kind == BufferSpec::Kind::kWorkspace && spec.bytes > 0) return false;
  }
  const Participation& part = plan.votes->participations.front();
  return part.instance.kind == InstanceRef::Kind::kNext && !HasPeer(part.descriptor.kind) &&
         !part.descriptor.runtime_counts && !part.descriptor.RowsDiffer() && !part.wants_grad &&
         part.part == 0;
}

// Whether another member's results, or this one's, stand where this one's operands do.
bool KeepsInputs(const Plan& plan) {
  const auto stands_in_input = [&plan](const Plan::Output& output) {
    return output.bytes > 0 &&
           plan.buffers[static_cast<size_t>(output.buffer)].kind == BufferSpec::Kind::kInput;
  };
  const auto is_peer = [](const BufferSpec& spec) { return spec.kind == BufferSpec::Kind::kPeer; };
  return std::any_of(plan.outputs.begin(), plan.outputs.end(), stands_in_input) ||
         std::any_of(plan.buffers.begin(), plan.buffers.end(), is_peer);
}

}  // namespace

// --- Templates ----------------------------------------------------------------------------------

// Runs of one kind agree, whichever members call them.
int32_t ShortWay::KindOf(const Participation& part, CheckCallSites check, MeetingPoint* point) {
  for (size_t i = 0; i < point->kinds.size(); ++i) {
    const MeetingPoint::Kind& kind = point->kinds[i];
    if (check != CheckCallSites::kOff && kind.source != part.source) continue;
    if (FirstDifference(kind.member, kind.descriptor, part.member, part.descriptor).has_value()) {
      continue;
    }
    return static_cast<int32_t>(i);
  }
  const bool is_long = part.source.size() > kPerKind / 2 || part.descriptor.dims.size() > 16;
  const size_t kinds = point->kinds.size() + 1;
  if (kinds > kMostKinds || is_long || !point->charge.Cover(BytesOf(*point, kinds)).ok()) {
    return RunTemplate::kNone;
  }
  point->kinds.push_back({part.member, part.descriptor, part.source});
  return static_cast<int32_t>(point->kinds.size()) - 1;
}

int64_t ShortWay::BytesOf(const MeetingPoint& point, size_t kinds) {
  return static_cast<int64_t>(sizeof(MeetingPoint) + point.standing.size() * kPerStanding +
                              kinds * kPerKind);
}

void ShortWay::MakeTemplate(const Session& session, const Run& run, const GraphRecord& record,
                            World* world, RunTemplate* run_template) {
  CountWork(kWorkPerTemplate);
  const RunGroup& bound = run.groups.front();
  *run_template = RunTemplate();
  run_template->graph = run.graph;
  run_template->world = world->id;
  run_template->since = world->agreement->since();
  run_template->group = bound.group;
  const auto group = static_cast<size_t>(bound.group.value());
  if (group >= MeetingPoints::kMost || !IsOneCollective(record)) return;
  const absl::StatusOr<absl::Span<const Rank>> members =
      world->agreement->GroupMembers(bound.group);
  if (!members.ok() || members->size() > kMostMembers) return;
  const GroupSlot& slot = record.graph.group_slots.front();
  const Plan& plan = record.main.plan;
  const Participation& part = plan.votes->participations.front();
  const auto member = static_cast<size_t>(part.member.value());
  if (slot.size != static_cast<int32_t>(members->size()) || slot.held.front() != part.member ||
      member >= members->size()) {
    return;
  }
  const World::Member& held = world->members[static_cast<size_t>((*members)[member].value())];
  if (held.session.get() != &session || session.devices.empty()) return;
  const DeviceIndex device = run.devices.empty() ? session.devices.front() : run.devices.front();
  if (held.device != device) return;
  int64_t bytes = 0;
  const auto size = static_cast<int64_t>(members->size());
  for (int64_t m = 0; m < size; ++m) bytes += CollectiveAtOnce::BytesOf(plan, 0, size, m == 0);
  if (bytes > parts_.launcher->at_once_bytes()) return;
  if (world->points == nullptr) {
    world->points = std::make_shared<MeetingPoints>();
    world->make_way = [this, world] { MakeWay(*world); };
  }
  std::unique_ptr<MeetingPoint>& point = world->points->of_group[group];
  if (point == nullptr) {
    point = std::make_unique<MeetingPoint>(session.tenant->budget);
    point->group = bound.group;
    point->standing = std::vector<StandingRun>(members->size());
    if (!point->charge.Cover(BytesOf(*point, 0)).ok()) {
      point.reset();
      *run_template = RunTemplate();  // there may be memory later
      return;
    }
  }
  run_template->kind = KindOf(part, world->options.check_call_sites, point.get());
  run_template->member = part.member;
  run_template->device = device;
  run_template->record = &record;
  run_template->keeps_inputs = KeepsInputs(plan);
}

// Null: it does not go this way.
RunTemplate* ShortWay::TemplateOf(Session* session, const Run& run, World* world) {
  if (!IsUsual(run) || !world->formed()) return nullptr;
  const GraphRecord* const record = session->names.RecordOf(run.graph);
  if (record == nullptr) return nullptr;
  const RunGroup& bound = run.groups.front();
  if (session->templates == nullptr) session->templates = std::make_shared<RunTemplates>();
  RunTemplate* const row = session->templates->Of(run.graph);
  if (row->graph != run.graph || row->world != bound.world || row->group != bound.group ||
      row->since != world->agreement->since()) {
    MakeTemplate(*session, run, *record, world, row);
  }
  if (row->kind == RunTemplate::kNone || bound.epoch != world->agreement->epoch()) return nullptr;
  const bool elsewhere =
      run.devices.size() > 1 || (run.devices.size() == 1 && run.devices.front() != row->device);
  const Graph& graph = record->graph;
  const bool is_whole =
      run.inputs.size() == graph.inputs.size() && run.outputs.size() == graph.outputs.size();
  return elsewhere || !is_whole ? nullptr : row;
}

// --- Those that stand ---------------------------------------------------------------------------

// Whether all are there, and as the graph wants them.
bool ShortWay::FindOperands(const Session& session, const Run& run, StandingRun* standing) const {
  const RunTemplate& of = *standing->of;
  standing->inputs.assign(run.inputs.size(), {});
  bool has_inlined = of.keeps_inputs;
  for (size_t i = 0; i < run.inputs.size(); ++i) {
    const TensorType& type = of.record->graph.inputs[i].type;
    if (const TensorId* id = absl::get_if<TensorId>(&run.inputs[i])) {
      const CellRef* const cell = session.names.SharedCellOf(*id);
      if (cell == nullptr || (*cell)->state != Cell::State::kReady ||
          (*cell)->donated_to != Sequence() || (*cell)->device != of.device ||
          *(*cell)->type != type) {
        return false;
      }
      standing->inputs[i].cell = *cell;
      continue;
    }
    if (const auto* range = absl::get_if<ExternalRange>(&run.inputs[i])) {
      // As Storage::Bind() reads them where they stand.
      const bool in_place = of.record->main.plan.input_may_be_staging[i] &&
                            range->strides.empty() && range->offset % DTypeBytes(type.dtype) == 0;
      if (!in_place) return false;
      absl::StatusOr<BufferRef> staged =
          parts_.storage->FindStaged(session, *range, type.num_bytes());
      if (!staged.ok()) return false;
      standing->inputs[i].staged = *std::move(staged);
      continue;
    }
    const auto* const data = absl::get_if<InlineData>(&run.inputs[i]);
    if (data == nullptr || std::exchange(has_inlined, true) ||
        static_cast<int64_t>(data->bytes.size()) != type.num_bytes()) {
      return false;
    }
    std::memcpy(standing->inlined, data->bytes.data(), data->bytes.size());
  }
  return true;
}

// Whether its names are new, and there is memory for them.
bool ShortWay::FindOutputs(Session* session, const Run& run, StandingRun* standing) const {
  standing->outputs.assign(run.outputs.size(), absl::nullopt);
  int32_t top_slot = -1;
  for (size_t i = 0; i < run.outputs.size(); ++i) {
    const OutBinding& output = run.outputs[i];
    if (output.kind == OutBinding::Kind::kDiscard) continue;
    if (output.kind == OutBinding::Kind::kInto || !session->names.IsFresh(output.id)) return false;
    for (size_t j = 0; j < i; ++j) {
      const absl::optional<TensorId>& other = standing->outputs[j];
      if (other.has_value() && other->slot == output.id.slot) return false;
    }
    standing->outputs[i] = output.id;
    top_slot = std::max(top_slot, output.id.slot);
  }
  return session->names.Reserve(run.outputs.size(), top_slot).ok();
}

bool ShortWay::MayStand(const Session& session) const {
  return !stopped_ && parts_.options->short_way && parts_.launcher->at_once_bytes() > 0 &&
         !parts_.domains->mixed() && num_standing_ < kMostStanding &&
         session.tenant->standing < ShareOf(kMostStanding) && session.stands_at == nullptr &&
         session.failing == 0 && !session.log.parked() && !session.log.holds() &&
         static_cast<int64_t>(session.runs.size()) < parts_.options->max_pending_runs;
}

bool ShortWay::MayStandThere(const Run& run, const RunTemplate& of, const World& world,
                             const MeetingPoint& point) {
  if (!world.agreement->IsQuiet()) return false;
  const auto& base = run.groups.front().base;
  if (!base.empty() && base.front() != world.agreement->NextCall(of.group, of.member)) return false;
  if (point.order.empty()) return true;
  return point.standing[static_cast<size_t>(point.order.front())].of->kind == of.kind;
}

absl::optional<CommandLog::Sender> ShortWay::Take(const std::shared_ptr<Session>& session,
                                                  const Command& command, absl::string_view frame,
                                                  absl::Time now, OnOutcome* done) {
  const Run* const run = absl::get_if<Run>(&command.body);
  if (run == nullptr || frame.size() > kMostFrameBytes || !MayStand(*session)) {
    return absl::nullopt;
  }
  const Session::Membership* const membership = MembershipOf(*session, *run);
  if (membership == nullptr) return absl::nullopt;
  const std::shared_ptr<World>& world = membership->world;
  const RunTemplate* const of = TemplateOf(session.get(), *run, world.get());
  if (of == nullptr) return absl::nullopt;
  MeetingPoint* const point = world->points->of_group[static_cast<size_t>(of->group.value())].get();
  StandingRun* const standing = &point->standing[static_cast<size_t>(of->member.value())];
  if (!MayStandThere(*run, *of, *world, *point)) return absl::nullopt;
  standing->of = of;
  if (!FindOperands(*session, *run, standing) || !FindOutputs(session.get(), *run, standing)) {
    standing->inputs.clear();
    return absl::nullopt;
  }
  CHORUS_FAILPOINT("node.before_prepare");
  const CommandLog::Sender sender = session->log.Begin(command.sequence, std::move(*done));
  parts_.sessions->RenewLease(session.get(), now);
  standing->session = session;
  standing->sequence = command.sequence;
  standing->came = now;
  standing->frame.assign(frame.data(), frame.size());
  standing->at.reset();
  const auto& base = run->groups.front().base;
  if (!base.empty()) standing->at = base.front();
  CHORUS_FAILPOINT("node.before_vote");
  Stand(world, point, of->member);
  CHORUS_FAILPOINT("node.after_vote");
  if (point->order.size() == point->standing.size()) {
    const bool have_met = Meet(point, now);
    for (Bytes& bytes : bytes_) bytes.refs.clear();
    if (!have_met) MakeWayAt(point);
  }
  return sender;
}

void ShortWay::Stand(const std::shared_ptr<World>& world, MeetingPoint* point, GroupRank member) {
  CountWork(kWorkPerStanding);
  const StandingRun& run = point->standing[static_cast<size_t>(member.value())];
  run.session->stands_at = point;
  if (point->order.empty()) {
    point->world = world;
    world->stands_short = true;
    points_.push_back(point);
    if (!armed_) ArmTimer(run.came);
  }
  point->order.push_back(member.value());
  ++num_standing_;
  ++run.session->tenant->standing;
}

void ShortWay::ArmTimer(absl::Time first_came) {
  armed_ = true;
  parts_.timers->Add(first_came + kMostWait, [this](absl::Time now) {
    armed_ = false;
    const auto came = [](const MeetingPoint* point) {
      return point->standing[static_cast<size_t>(point->order.front())].came;
    };
    const auto first = [&] {
      return std::min_element(
          points_.begin(), points_.end(),
          [&](const MeetingPoint* a, const MeetingPoint* b) { return came(a) < came(b); });
    };
    while (!points_.empty() && came(*first()) + kMostWait <= now) MakeWayAt(*first());
    if (!points_.empty()) ArmTimer(came(*first()));
  });
}

// --- Making way ---------------------------------------------------------------------------------

void ShortWay::MakeWayAt(MeetingPoint* point) {
  struct Comer {
    std::shared_ptr<Session> session;
    Sequence sequence;
    std::string frame;
    absl::Time came;
  };
  const std::shared_ptr<World> world = point->world;  // it owns the point
  std::vector<Comer> comers;
  for (const int32_t member : Leave(point)) {
    StandingRun& run = point->standing[static_cast<size_t>(member)];
    run.inputs.clear();
    comers.push_back({std::move(run.session), run.sequence, std::move(run.frame), run.came});
  }
  for (const Comer& comer : comers) {
    parts_.submit(comer.session, comer.sequence, comer.frame, comer.came);
  }
}

absl::InlinedVector<int32_t, 8> ShortWay::Leave(MeetingPoint* point) {
  for (const int32_t member : point->order) {
    Session& session = *point->standing[static_cast<size_t>(member)].session;
    session.stands_at = nullptr;
    --session.tenant->standing;
  }
  const absl::InlinedVector<int32_t, 8> order(point->order.begin(), point->order.end());
  point->order.clear();
  num_standing_ -= static_cast<int64_t>(order.size());
  points_.erase(std::find(points_.begin(), points_.end(), point));
  const std::shared_ptr<World> world = std::move(point->world);
  world->stands_short = std::any_of(points_.begin(), points_.end(), [&](const MeetingPoint* other) {
    return other->world == world;
  });
  return order;
}

void ShortWay::MakeWay(const Session& session) {
  if (session.stands_at != nullptr) MakeWayAt(session.stands_at);
}

template <typename Predicate>
void ShortWay::MakeWayWhere(Predicate is_wanted) {
  for (;;) {
    const auto at = std::find_if(points_.begin(), points_.end(), is_wanted);
    if (at == points_.end()) return;
    MakeWayAt(*at);
  }
}

void ShortWay::MakeWay(const World& world) {
  if (!world.stands_short) return;
  MakeWayWhere([&](const MeetingPoint* point) { return point->world.get() == &world; });
}

void ShortWay::MakeWayInWorldsOf(const Session& session) {
  MakeWay(session);
  if (points_.empty()) return;
  for (size_t i = 0; i < session.memberships.size(); ++i) {
    if (!session.memberships[i].world->stands_short) continue;
    const std::shared_ptr<World> world = session.memberships[i].world;
    MakeWay(*world);
  }
}

void ShortWay::MakeWayInWorldsOf(absl::string_view tenant) {
  MakeWayWhere(
      [&](const MeetingPoint* point) { return tenant.empty() || point->world->tenant == tenant; });
}

void ShortWay::MakeWay() {
  while (!points_.empty()) MakeWayAt(points_.front());
}

// --- Meeting ------------------------------------------------------------------------------------

// Where a plan's buffer stands: of a member whose own operands have been found.
bool ShortWay::FindBuffer(const MeetingPoint& point, size_t member, size_t index) {
  const StandingRun& run = point.standing[member];
  const BufferSpec& spec = run.of->record->main.plan.buffers[index];
  Bytes& bytes = bytes_[member];
  if (spec.bytes == 0) return true;
  switch (spec.kind) {
    case BufferSpec::Kind::kInput: {
      const StandingRun::Operand& operand = run.inputs[static_cast<size_t>(spec.index)];
      if (operand.cell != nullptr) {
        bytes.addresses[index] = operand.cell->address();
        bytes.refs[index] = operand.cell->buffer;
      } else if (operand.staged) {
        bytes.addresses[index] = operand.staged->address();
        bytes.refs[index] = operand.staged;
      } else {
        bytes.addresses[index] = reinterpret_cast<DeviceAddress>(&run.inlined[0]);
      }
      return true;
    }
    case BufferSpec::Kind::kPeer: {
      const auto peer = static_cast<size_t>(spec.list_member);
      const Plan::Operand& operand =
          point.standing[peer]
              .of->record->main.plan.operands[0][static_cast<size_t>(spec.list_index)];
      const auto from = static_cast<size_t>(operand.buffer);
      // What it stands in has been found if it is an operand of its own.
      bytes.addresses[index] =
          bytes_[peer].addresses[from] + static_cast<DeviceAddress>(operand.offset);
      bytes.refs[index] = bytes_[peer].refs[from];
      return bytes_[peer].addresses[from] != 0;
    }
    case BufferSpec::Kind::kShared:
      // As the first member's, whose entry is for the same result.
      for (size_t other = 0; other < member; ++other) {
        const auto& buffers = point.standing[other].of->record->main.plan.buffers;
        for (size_t i = 0; i < buffers.size(); ++i) {
          const BufferSpec& same = buffers[i];
          if (same.kind != spec.kind || same.list_index != spec.list_index) continue;
          if (same.bytes != spec.bytes) return false;
          bytes.addresses[index] = bytes_[other].addresses[i];
          bytes.refs[index] = bytes_[other].refs[i];
          return true;
        }
      }
      break;
    case BufferSpec::Kind::kOwned:
    case BufferSpec::Kind::kWorkspace:
      break;
  }
  absl::StatusOr<BufferRef> buffer =
      parts_.storage->Allocate(run.session->tenant.get(), run.of->device, spec.bytes);
  if (!buffer.ok()) return false;
  bytes.addresses[index] = (*buffer)->address();
  bytes.refs[index] = *std::move(buffer);
  return true;
}

bool ShortWay::FindBytes(MeetingPoint* point) {
  const size_t size = point->standing.size();
  bytes_.resize(std::max(bytes_.size(), size));
  for (size_t m = 0; m < size; ++m) {
    const size_t buffers = point->standing[m].of->record->main.plan.buffers.size();
    bytes_[m].addresses.assign(buffers, 0);
    bytes_[m].refs.clear();
    bytes_[m].refs.resize(buffers);
  }
  // Those that stand with others come last.
  for (const bool with_others : {false, true}) {
    for (size_t m = 0; m < size; ++m) {
      const auto& buffers = point->standing[m].of->record->main.plan.buffers;
      for (size_t i = 0; i < buffers.size(); ++i) {
        if ((buffers[i].kind == BufferSpec::Kind::kPeer) != with_others) continue;
        if (!FindBuffer(*point, m, i)) return false;
      }
    }
  }
  return true;
}

bool ShortWay::Meet(MeetingPoint* point, absl::Time now) {
  const size_t size = point->standing.size();
  int64_t bytes = 0;
  int64_t results = 0;
  calls_.resize(size);
  for (size_t m = 0; m < size; ++m) {
    const StandingRun& run = point->standing[m];
    const LoadedPlan& loaded = run.of->record->main;
    bytes += CollectiveAtOnce::BytesOf(loaded.plan, 0, static_cast<int64_t>(size), m == 0);
    results += static_cast<int64_t>(run.outputs.size()) + loaded.looked_at;
    calls_[m].at = run.at.has_value() ? &*run.at : nullptr;
    calls_[m].source = &loaded.plan.votes->participations.front().source;
  }
  if (bytes > collective_.bytes_left() || !FindBytes(point)) return false;
  collective_.Begin(size);
  for (size_t m = 0; m < size; ++m) {
    const RunTemplate& of = *point->standing[m].of;
    const absl::Status added =
        collective_.Add(m, of.record->main, /*participation=*/0, of.device, bytes_[m].addresses);
    if (!added.ok()) return false;
  }
  if (!collective_.Prepare().ok()) return false;
  const absl::optional<MetGang> met =
      point->world->agreement->Meet(point->group, calls_, results, now);
  if (!met.has_value()) return false;
  CHORUS_FAILPOINT("node.before_launch");
  collective_.Run();
  CHORUS_FAILPOINT("node.after_launch");
  CHORUS_FAILPOINT("node.before_publish");
  // It may be that whoever is told comes again at once.
  const std::shared_ptr<World> world = point->world;
  const absl::InlinedVector<int32_t, 8> members = Leave(point);
  for (const int32_t member : members) {
    const StandingRun& run = point->standing[static_cast<size_t>(member)];
    Note(FlightKind::kVoted, run.came, *world, run, Ticket());
  }
  for (const int32_t member : members) {
    const StandingRun& run = point->standing[static_cast<size_t>(member)];
    parts_.launcher->CountLaunch(run.of->device);
    Note(FlightKind::kLaunched, now, *world, run, met->ticket);
  }
  for (const int32_t member : members) {
    StandingRun& run = point->standing[static_cast<size_t>(member)];
    Publish(*world, *met, run, now);
    run.inputs.clear();
    const std::shared_ptr<Session> session = std::move(run.session);
    session->log.Finish(run.sequence);
  }
  CHORUS_FAILPOINT("node.after_publish");
  return true;
}

void ShortWay::Note(FlightKind kind, absl::Time time, const World& world, const StandingRun& run,
                    Ticket ticket) {
  parts_.failures->Note(kind, time, run.session.get(), &world, run.sequence, ticket);
}

// All but its outcome.
void ShortWay::Publish(const World& world, const MetGang& met, const StandingRun& run,
                       absl::Time now) {
  Session* const session = run.session.get();
  const GraphRecord& record = *run.of->record;
  const Plan& plan = record.main.plan;
  const auto member = static_cast<size_t>(run.of->member.value());
  CountWork(kWorkPerStanding);
  const Plan::Written& written = plan.written.front();
  PathCounters& paths = parts_.stats->paths;
  paths.reduced_bytes += written.own.reduced + (member == 0 ? written.shared.reduced : 0);
  paths.copied_bytes += written.own.copied + (member == 0 ? written.shared.copied : 0);
  for (const BufferSpec& spec : plan.buffers) {
    if (spec.kind == BufferSpec::Kind::kPeer) paths.aliased_bytes += spec.bytes;
  }
  ++parts_.stats->runs_published;
  ++parts_.stats->short_runs;
  for (size_t i = 0; i < run.outputs.size(); ++i) {
    if (!run.outputs[i].has_value()) continue;
    const Plan::Output& output = plan.outputs[i];
    auto cell = std::make_shared<Cell>();
    cell->state = Cell::State::kReady;
    cell->type = record.output_types[i];
    cell->device = run.of->device;
    cell->output = static_cast<int32_t>(i);
    cell->bytes = output.bytes;
    if (output.bytes > 0) {
      const auto buffer = static_cast<size_t>(output.buffer);
      const Bytes& bytes = bytes_[member];
      cell->buffer = bytes.refs[buffer];
      cell->offset =
          static_cast<int64_t>(bytes.addresses[buffer] - cell->buffer->address()) + output.offset;
    }
    session->names.NameTensor(*run.outputs[i], cell);
    session->names.Publish(*run.outputs[i], *cell);
  }
  Note(FlightKind::kPublished, now, world, run, met.ticket);
}

}  // namespace chorus::node
