#include "client/internal/core.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/source_line.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/ops/graph_builder.h"

namespace chorus {
inline namespace sdk {
namespace {

// Local ops that wait at most: a loop without collectives or reads still gets going.
constexpr size_t kMaxFragmentNodes = 256;
constexpr size_t kMaxFragments = 1024;
// Graphs of one group's collectives.
constexpr size_t kMaxCalls = 1024;
// Lines of the program.
constexpr size_t kMaxSources = 4096;
// Of a set of dependences, but for those that may have runs under way.
constexpr size_t kMaxOrigins = 8;
// Released tensors wait for company, unless they hold memory that others could use.
constexpr size_t kMaxRetiredTensors = 64;
constexpr int64_t kMaxRetiredBytes = 256 * 1024;
// Larger graphs go through staging memory: a frame must fit the ring more than once.
constexpr size_t kMaxInlineGraphBytes = 32 * 1024;
constexpr size_t kDropsPerFrame = 512;
constexpr size_t kGraphsPerFrame = 512;
constexpr int64_t kStagingBlockBytes = 4 << 20;
constexpr int64_t kMaxStagingBytes = 64 << 20;
constexpr int64_t kStagingAlign = 64;
// Half of what a daemon allows unless told otherwise: flushes come on top.
constexpr size_t kMaxUnderWay = 512;

std::atomic<uint64_t> fork_count{0};

void CountFork() { fork_count.fetch_add(1, std::memory_order_relaxed); }

uint64_t ForkCount() {
  static const int registered = pthread_atfork(nullptr, nullptr, CountFork);
  (void)registered;
  return fork_count.load(std::memory_order_relaxed);
}

// The session whose lock this thread holds.
thread_local const SessionCore* locked_session = nullptr;

}  // namespace

absl::Status ForkedError() {
  return MakeError(Reason::kForked,
                   "this object belongs to the parent process; open a session of your own after "
                   "fork");
}

bool IsLost(const absl::Status& status) {
  switch (ErrorOf(status).reason) {
    case Reason::kDaemonLost:
    case Reason::kSessionLost:
    case Reason::kForked:
      return true;
    default:
      return false;
  }
}

std::string SourceOf(CallSite site) {
  return std::string(ShortSourceLine(absl::StrCat(site.file, ":", site.line)));
}

absl::Status WithSource(const absl::Status& status, const std::string& source) {
  Error error = ErrorOf(status);
  if (!error.source.empty() || source.empty()) return status;
  error.source = source;
  error.message = absl::StrCat(error.message, " (", source, ")");
  return ToStatus(error);
}

absl::Status AtPlace(const absl::Status& status, size_t place) {
  Error error = ErrorOf(status);
  error.message = absl::StrCat("in place ", place, " of the coalesced call: ", error.message);
  return ToStatus(error);
}

// --- TensorData ---------------------------------------------------------------------------------

TensorData::~TensorData() {
  const State s = state.load(std::memory_order_acquire);
  if (s != State::kSent && s != State::kExternal) return;
  session->Retire(*this);
  session->DrainIfUrgent();
}

// --- OwnWorld, MemberCore
// -------------------------------------------------------------------------

OwnWorld::~OwnWorld() {
  if (gone_.ranks.empty()) return;
  session_->RetireWorld(std::move(gone_));
  session_->DrainIfUrgent();
}

void OwnWorld::Add(const MemberCore& gone) {
  MutexLock lock(&mutex_);
  gone_.world = gone.world;
  gone_.ranks.push_back(Rank(gone.rank.load(std::memory_order_relaxed)));
}

MemberCore::~MemberCore() {
  std::vector<GraphId> graphs;
  for (const auto& group : groups) {
    for (const auto& call : group->calls) graphs.push_back(call.second->draft.run().graph);
    for (const auto& batch : group->batches) graphs.push_back(batch.second->draft.run().graph);
  }
  if (!graphs.empty()) session->RetireGraphs(graphs, /*of_calls=*/true);
  if (own_world != nullptr && !left.load(std::memory_order_relaxed)) own_world->Add(*this);
  session->DrainIfUrgent();
}

// --- SessionLock --------------------------------------------------------------------------------

SessionLock::SessionLock(SessionCore* core) : core_(core) {
  if (core_->Forked()) {
    status_ = ForkedError();
    return;
  }
  core_->mutex_.Lock();
  held_ = true;
  locked_session = core_;
  if (core_->closed_) {
    status_ = MakeError(Reason::kSessionLost, "the session is closed");
  } else {
    status_ = core_->broken_;
  }
}

SessionLock::~SessionLock() {
  if (!held_) return;
  if (core_->urgent_.load(std::memory_order_relaxed)) core_->DrainLocked(/*all=*/false);
  locked_session = nullptr;
  core_->mutex_.Unlock();
}

// --- SessionCore --------------------------------------------------------------------------------

SessionCore::SessionCore(std::unique_ptr<Link> link, absl::Duration wait_timeout,
                         WaitReportOptions reports)
    : link_(link.release()),
      wait_timeout_(wait_timeout),
      reports_(link_, std::move(reports)),
      devices_(link_->devices()),
      fork_count_(ForkCount()) {}

SessionCore::~SessionCore() {
  // In a forked child the link's threads do not exist, and its session is the parent's.
  if (Forked()) return;
  Close().IgnoreError();
  delete link_;
}

bool SessionCore::Forked() const {
  return fork_count.load(std::memory_order_relaxed) != fork_count_;
}

TensorInfoPtr SessionCore::Intern(const TensorType& type) {
  return types_.Get(type, [&type] {
    auto info = std::make_shared<TensorInfo>();
    info->type = type;
    info->shape = type.sizes();
    info->elements = type.num_elements();
    info->bytes = type.num_bytes();
    return info;
  });
}

const std::string* SessionCore::InternSource(const std::string& source) {
  std::unique_ptr<std::string>& entry = sources_[source];
  if (entry == nullptr) entry = std::make_unique<std::string>(source);
  return entry.get();
}

absl::StatusOr<Sequence> SessionCore::SubmitLocked(CommandBody body) {
  Command command{Sequence(), std::move(body)};
  return SubmitLocked(&command);
}

absl::StatusOr<Sequence> SessionCore::SubmitLocked(Command* command) {
  CHORUS_RETURN_IF_ERROR(broken_);
  command->sequence = Sequence(next_sequence_);
  const absl::Status status = link_->Submit(*command);
  if (!status.ok()) {
    // A full ring may have room later, and the next command may be one that can be sent; a daemon
    // that is gone stays so.
    const Reason reason = ErrorOf(status).reason;
    if (reason != Reason::kTransportTimeout && reason != Reason::kMalformed) broken_ = status;
    return status;
  }
  return Sequence(next_sequence_++);
}

absl::StatusOr<TensorId> SessionCore::NewTensorIdLocked() {
  if (free_tensors_.empty() && next_tensor_ >= link_->max_tensors()) DrainLocked(/*all=*/true);
  if (!free_tensors_.empty()) {
    const TensorId id = free_tensors_.back();
    free_tensors_.pop_back();
    return id;
  }
  if (next_tensor_ >= link_->max_tensors()) {
    return MakeError(Reason::kQuota, absl::StrCat("the session holds ", next_tensor_,
                                                  " tensors, as many as it may; drop some"));
  }
  return TensorId{next_tensor_++, 1};
}

absl::Status SessionCore::NameOutputsLocked(absl::Span<OutBinding> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const absl::StatusOr<TensorId> id = NewTensorIdLocked();
    if (!id.ok()) {
      GiveBackLocked(outputs.first(i));
      return id.status();
    }
    outputs[i].kind = OutBinding::Kind::kFresh;
    outputs[i].id = *id;
  }
  return absl::OkStatus();
}

void SessionCore::GiveBackLocked(absl::Span<const OutBinding> outputs) {
  for (const OutBinding& output : outputs) free_tensors_.push_back(output.id);
}

TensorDataPtr SessionCore::NewSentLocked(const TensorInfoPtr& info, int32_t device_slot,
                                         TensorId id, Sequence producer) {
  auto data = std::make_shared<TensorData>(shared_from_this());
  data->info = info;
  data->device_slot = device_slot;
  data->id = id;
  data->producer = producer;
  data->state.store(TensorData::State::kSent, std::memory_order_release);
  return data;
}

Binding SessionCore::BindingOf(const TensorData& data) const {
  switch (data.state.load(std::memory_order_relaxed)) {
    case TensorData::State::kInline:
    case TensorData::State::kHost:
      return data.inline_data;
    case TensorData::State::kExternal:
      return data.external;
    default:
      return data.id;
  }
}

// --- Local ops ----------------------------------------------------------------------------------

DependencesPtr SessionCore::InternDependences(const Dependences& set) {
  return dependences_.Get(set, [&set] { return std::make_shared<const Dependences>(set); });
}

bool SessionCore::IsOver(Sequence run) {
  const auto outcome = link_->Peek(run);
  // A forgotten outcome is an outcome.
  return !outcome.ok() || outcome->has_value();
}

Sequence SessionCore::OldestUnderWayLocked() {
  while (!under_way_.empty() && IsOver(under_way_.front())) under_way_.pop_front();
  under_way_count_.store(under_way_.size(), std::memory_order_relaxed);
  return under_way_.empty() ? Sequence(next_sequence_) : under_way_.front();
}

void SessionCore::JoinSets(DependencesPtr* both, const Dependences& other) {
  Dependences united;
  std::set_union((*both)->begin(), (*both)->end(), other.begin(), other.end(),
                 std::back_inserter(united),
                 [](const OriginPtr& a, const OriginPtr& b) { return a->number < b->number; });
  if (united.size() > kMaxOrigins) {
    const Sequence oldest = OldestUnderWayLocked();
    united.erase(std::remove_if(united.begin(), united.end(),
                                [oldest](const OriginPtr& origin) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                                    session_lock) { return origin->last < oldest; }),
                 united.end());
  }
  *both = united.empty() ? nullptr : InternDependences(united);
}

const DependencesPtr& SessionCore::OriginOf(GroupCore* group) {
  if (group->after == nullptr) {
    group->after = InternDependences({std::make_shared<Origin>(next_origin_++)});
  }
  return group->after;
}

int32_t SessionCore::FragmentInput(Fragment* fragment, const TensorDataPtr& data) {
  const TensorData::State state = data->state.load(std::memory_order_relaxed);
  // Its own and no other's. (Others have been sent: what is not, has no name either, and the daemon
  // refuses it.)
  if (state == TensorData::State::kLazy && data->fragment == fragment->number) return data->value;
  // Names are compared, not handles: a handle may die before the fragment is sent, its name may
  // not.
  for (size_t i = 0; i < fragment->inputs.size(); ++i) {
    const Binding& binding = fragment->inputs[i];
    if (state == TensorData::State::kSent && absl::holds_alternative<TensorId>(binding) &&
        absl::get<TensorId>(binding) == data->id) {
      return ~static_cast<int32_t>(i);
    }
    if (state == TensorData::State::kExternal && absl::holds_alternative<ExternalRange>(binding) &&
        absl::get<ExternalRange>(binding).arena == data->external.arena) {
      return ~static_cast<int32_t>(i);
    }
  }
  GraphInput input;
  input.type = data->info->type;
  input.role = state == TensorData::State::kInline ? InputRole::kScalar : InputRole::kData;
  input.device_slot = data->device_slot;
  fragment->input_types.push_back(std::move(input));
  fragment->inputs.push_back(BindingOf(*data));
  return ~static_cast<int32_t>(fragment->inputs.size() - 1);
}

Fragment* SessionCore::FindFragment(const DependencesPtr& after) {
  for (const auto& open : open_) {
    if (open->after == after) return open.get();
  }
  return nullptr;
}

Fragment* SessionCore::OpenFragmentLocked(const DependencesPtr& after) {
  Fragment* const open = FindFragment(after);
  if (open != nullptr) {
    if (open->nodes.size() < kMaxFragmentNodes) return open;
    FlushLocked(open->number);
  }
  open_.push_back(std::make_unique<Fragment>(next_fragment_++, after));
  return open_.back().get();
}

TensorDatas SessionCore::AppendLocked(NodeSpec spec, absl::Span<const TensorDataPtr> inputs,
                                      absl::Span<const TensorType> outputs) {
  DependencesPtr after;
  for (const TensorDataPtr& input : inputs) Join(&after, input->after);
  // To name a tensor, and to send a fragment, may send all others: the op's own is looked for
  // last, and nothing is sent from there on.
  std::shared_ptr<const Failure> failure;
  for (const TensorDataPtr& input : inputs) {
    const absl::Status named = NameLocked(input.get());
    if (!named.ok()) failure = std::make_shared<Failure>(Failure{named});
  }
  for (const TensorDataPtr& input : inputs) {
    if (input->state.load(std::memory_order_relaxed) != TensorData::State::kLazy) continue;
    const Fragment* const own = FindFragment(after);
    if (own == nullptr || input->fragment != own->number) FlushLocked(input->fragment);
  }
  Fragment* const fragment = OpenFragmentLocked(after);
  for (const TensorDataPtr& input : inputs) {
    // Flushing may have failed.
    if (input->failure != nullptr) failure = input->failure;
  }

  Fragment::Op node;
  spec.inputs.clear();
  TensorDatas results;
  if (failure == nullptr) {
    for (const TensorDataPtr& input : inputs) {
      spec.inputs.push_back(FragmentInput(fragment, input));
    }
  }
  node.first_value = fragment->num_values;
  for (const TensorType& type : outputs) {
    auto data = std::make_shared<TensorData>(shared_from_this());
    data->info = Intern(type);
    data->device_slot = spec.device_slot;
    data->after = after;
    if (failure != nullptr) {
      data->failure = failure;
      data->state.store(TensorData::State::kFailed, std::memory_order_release);
    } else {
      data->fragment = fragment->number;
      data->value = fragment->num_values++;
      node.outputs.push_back(data);
    }
    results.push_back(std::move(data));
  }
  if (failure != nullptr) return results;
  node.spec = std::move(spec);
  node.types.assign(outputs.begin(), outputs.end());
  fragment->nodes.push_back(std::move(node));
  return results;
}

void SessionCore::FlushLocked() {
  while (!open_.empty()) FlushLocked(open_.front()->number);
}

void SessionCore::FlushLocked(int64_t number) {
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [number](const auto& open) { return open->number == number; });
  if (found == open_.end()) return;
  // Not open any more: what is done to send it may send the others, never it again.
  const std::unique_ptr<Fragment> fragment = std::move(*found);
  open_.erase(found);
  std::vector<TensorDataPtr> alive;
  for (const Fragment::Op& node : fragment->nodes) {
    for (const auto& output : node.outputs) {
      if (TensorDataPtr data = output.lock()) alive.push_back(std::move(data));
    }
  }
  sending_.push_back(fragment.get());
  const absl::Status status = SendLocked(fragment.get());
  sending_.pop_back();
  if (status.ok()) return;
  const auto failure = std::make_shared<Failure>(Failure{status});
  for (const TensorDataPtr& data : alive) {
    if (data->state.load(std::memory_order_relaxed) != TensorData::State::kLazy) continue;
    data->failure = failure;
    data->state.store(TensorData::State::kFailed, std::memory_order_release);
  }
}

absl::StatusOr<GraphId> SessionCore::FragmentGraphLocked(std::string encoded) {
  const auto found = fragments_.find(encoded);
  if (found != fragments_.end()) return found->second;
  if (fragments_.size() >= std::min(kMaxFragments, MaxGraphs() / 4)) {
    for (const auto& entry : fragments_) ReleaseGraphLocked(entry.second);
    fragments_.clear();
  }
  CHORUS_ASSIGN_OR_RETURN(const GraphId id, RegisterLocked(encoded));
  fragments_.emplace(std::move(encoded), id);
  return id;
}

absl::Status SessionCore::SendLocked(Fragment* fragment) {
  std::vector<Fragment::Op>& nodes = fragment->nodes;
  // What nobody holds any more and nothing needs is not computed.
  std::vector<TensorDataPtr> held(fragment->num_values);
  std::vector<bool> needed(fragment->num_values, false);
  std::vector<bool> kept(nodes.size(), false);
  for (size_t n = nodes.size(); n-- > 0;) {
    for (size_t o = 0; o < nodes[n].outputs.size(); ++o) {
      const int32_t value = nodes[n].first_value + static_cast<int32_t>(o);
      held[value] = nodes[n].outputs[o].lock();
      kept[n] = kept[n] || held[value] != nullptr || needed[value];
    }
    if (!kept[n]) continue;
    for (const ValueIndex input : nodes[n].spec.inputs) {
      if (input >= 0) needed[input] = true;
    }
  }
  RunDraft draft;
  Graph graph;
  graph.num_device_slots = device_count();
  std::vector<int32_t> input_number(fragment->inputs.size(), -1);
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (!kept[n]) continue;
    for (const ValueIndex input : nodes[n].spec.inputs) {
      if (input >= 0 || input_number[~input] >= 0) continue;
      input_number[~input] = static_cast<int32_t>(graph.inputs.size());
      graph.inputs.push_back(fragment->input_types[~input]);
      draft.run().inputs.push_back(fragment->inputs[~input]);
    }
  }
  std::vector<ValueIndex> number(fragment->num_values, -1);
  ValueIndex next = static_cast<ValueIndex>(graph.inputs.size());
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (!kept[n]) continue;
    for (ValueIndex& input : nodes[n].spec.inputs) {
      input = input >= 0 ? number[input] : input_number[~input];
    }
    for (size_t o = 0; o < nodes[n].outputs.size(); ++o) {
      const int32_t value = nodes[n].first_value + static_cast<int32_t>(o);
      number[value] = next;
      if (held[value] != nullptr) {
        GraphOutput output;
        output.value = next;
        graph.outputs.push_back(output);
        const TensorDataPtr& data = held[value];
        draft.results.push_back({data->info, data->device_slot, data});
      }
      ++next;
    }
    graph.nodes.push_back(NodeOf(std::move(nodes[n].spec), std::move(nodes[n].types)));
  }
  if (draft.results.empty()) return absl::OkStatus();
  draft.encoded = EncodeGraph(graph);
  TensorDatas sent;
  return SubmitRun(&draft, &sent).status();
}

// --- Runs ---------------------------------------------------------------------------------------

absl::StatusOr<Sequence> SessionCore::SubmitRun(RunDraft* draft, TensorDatas* results) {
  Run& run = draft->run();
  if (draft->encoded.empty()) {
    FlushLocked();
    run.inputs.resize(draft->operands.size());
    for (size_t i = 0; i < draft->operands.size(); ++i) {
      const TensorData& operand = *draft->operands[i];
      // Flushing may have failed.
      if (operand.failure != nullptr) return operand.failure->status;
      run.inputs[i] = BindingOf(operand);
    }
  }
  run.outputs.resize(draft->results.size());
  CHORUS_RETURN_IF_ERROR(NameOutputsLocked(absl::MakeSpan(run.outputs)));
  absl::StatusOr<Sequence> sequence = Sequence();
  // Behind the names: to find them may send other fragments, whose graphs may push this one out.
  if (!draft->encoded.empty()) {
    const absl::StatusOr<GraphId> graph = FragmentGraphLocked(std::move(draft->encoded));
    if (graph.ok()) {
      run.graph = *graph;
    } else {
      sequence = graph.status();
    }
  }
  if (sequence.ok()) sequence = SubmitLocked(&draft->command);
  if (!sequence.ok()) {
    GiveBackLocked(run.outputs);
    return sequence.status();
  }
  under_way_.push_back(*sequence);
  under_way_count_.store(under_way_.size(), std::memory_order_relaxed);

  // All results come at once, when the last of the collectives is done.
  DependencesPtr after;
  for (const DependencesPtr& origin : draft->origins) {
    origin->front()->last = *sequence;
    Join(&after, origin);
  }
  for (const TensorData* const operand : draft->operands) Join(&after, operand->after);
  for (size_t i = 0; i < draft->results.size(); ++i) {
    const RunDraft::Result& result = draft->results[i];
    TensorDataPtr data = result.lazy;
    if (data == nullptr) {
      data = NewSentLocked(result.info, result.device_slot, run.outputs[i].id, *sequence);
      data->after = after;
    } else {
      data->id = run.outputs[i].id;
      data->producer = *sequence;
      data->state.store(TensorData::State::kSent, std::memory_order_release);
    }
    results->push_back(std::move(data));
  }
  return sequence;
}

// --- Graphs -------------------------------------------------------------------------------------

absl::StatusOr<GraphId> SessionCore::RegisterLocked(const std::string& encoded) {
  if (free_graphs_.empty() && next_graph_ >= link_->max_graphs()) ReleaseRetiredGraphsLocked();
  GraphId id{next_graph_, 1};
  if (!free_graphs_.empty()) {
    id = free_graphs_.back();
  } else if (next_graph_ >= link_->max_graphs()) {
    return MakeError(
        Reason::kQuota,
        absl::StrCat("the session has ", next_graph_,
                     " graphs, as many as it may: most are of "
                     "compiled functions, drop some, or give them inputs of fewer types"));
  }
  RegisterGraph body;
  body.graph = id;
  StagingBlock* block = nullptr;
  if (encoded.size() <= kMaxInlineGraphBytes) {
    body.encoded = encoded;
  } else {
    const int64_t bytes = static_cast<int64_t>(encoded.size());
    CHORUS_ASSIGN_OR_RETURN(block, StagingLocked(bytes));
    body.staged.arena = block->staging.arena;
    body.staged.offset = block->used;
    body.staged_bytes = bytes;
    if (block->staging.data != nullptr) {
      std::memcpy(block->staging.data + block->used, encoded.data(), encoded.size());
    } else {
      CHORUS_RETURN_IF_ERROR(link_->WriteStaging(block->staging.arena, block->used, encoded));
    }
    block->used += (bytes + kStagingAlign - 1) / kStagingAlign * kStagingAlign;
  }
  CHORUS_ASSIGN_OR_RETURN(const Sequence sequence, SubmitLocked(std::move(body)));
  if (block != nullptr) block->last = sequence;
  if (!free_graphs_.empty()) {
    free_graphs_.pop_back();
  } else {
    ++next_graph_;
  }
  return id;
}

void SessionCore::ReleaseGraphLocked(GraphId graph) { ReleaseGraphsLocked({graph}); }

void SessionCore::ReleaseGraphsLocked(absl::Span<const GraphId> graphs) {
  Release release;
  release.graphs.assign(graphs.begin(), graphs.end());
  if (!SubmitLocked(std::move(release)).ok()) return;
  for (const GraphId graph : graphs) {
    free_graphs_.push_back(GraphId{graph.slot, graph.generation + 1});
  }
}

// --- Bytes --------------------------------------------------------------------------------------

absl::StatusOr<SessionCore::StagingBlock*> SessionCore::StagingLocked(int64_t bytes) {
  int64_t total = 0;
  StagingBlock* oldest = nullptr;
  for (const auto& block : staging_) {
    total += block->bytes;
    if (block->bytes < bytes) continue;
    if (block->bytes - block->used >= bytes) return block.get();
    const auto outcome = link_->Peek(block->last);
    // A forgotten outcome is an outcome.
    if (!outcome.ok() || outcome->has_value()) {
      block->used = 0;
      return block.get();
    }
    if (oldest == nullptr || block->last < oldest->last) oldest = block.get();
  }
  if (oldest != nullptr && total + bytes > kMaxStagingBytes) {
    const absl::Status done = link_->WaitCommand(oldest->last, wait_timeout_);
    if (ErrorOf(done).reason == Reason::kTransportTimeout) return done;
    oldest->used = 0;
    return oldest;
  }
  auto block = std::make_unique<StagingBlock>();
  block->bytes = kStagingBlockBytes;
  while (block->bytes < bytes) block->bytes *= 2;
  CHORUS_ASSIGN_OR_RETURN(block->staging, link_->CreateStaging(block->bytes));
  staging_.push_back(std::move(block));
  return staging_.back().get();
}

absl::StatusOr<SessionCore::Created> SessionCore::CreateLocked(const TensorInfoPtr& info,
                                                               int32_t device_slot, Binding source,
                                                               const std::string& call_site) {
  CreateTensor create;
  create.type = info->type;
  create.device = devices_[device_slot];
  create.source = std::move(source);
  create.call_site = call_site;
  Created created;
  CHORUS_ASSIGN_OR_RETURN(created.id, NewTensorIdLocked());
  create.tensor = created.id;
  const absl::StatusOr<Sequence> sequence = SubmitLocked(std::move(create));
  if (!sequence.ok()) {
    free_tensors_.push_back(created.id);
    return sequence.status();
  }
  created.sequence = *sequence;
  return created;
}

absl::StatusOr<TensorDataPtr> SessionCore::FromHostLocked(const TensorInfoPtr& info,
                                                          int32_t device_slot, const char* bytes,
                                                          CallSite site) {
  if (info->bytes <= static_cast<int64_t>(InlineData::kMaxBytes)) {
    auto data = std::make_shared<TensorData>(shared_from_this());
    data->info = info;
    data->device_slot = device_slot;
    data->inline_data.bytes.assign(bytes, bytes + info->bytes);
    data->state.store(TensorData::State::kHost, std::memory_order_release);
    return data;
  }
  CHORUS_ASSIGN_OR_RETURN(StagingBlock* const block, StagingLocked(info->bytes));
  ExternalRange range;
  range.arena = block->staging.arena;
  range.offset = block->used;
  if (block->staging.data != nullptr) {
    std::memcpy(block->staging.data + block->used, bytes, static_cast<size_t>(info->bytes));
  } else {
    CHORUS_RETURN_IF_ERROR(
        link_->WriteStaging(block->staging.arena, block->used,
                            absl::string_view(bytes, static_cast<size_t>(info->bytes))));
  }
  block->used += (info->bytes + kStagingAlign - 1) / kStagingAlign * kStagingAlign;
  CHORUS_ASSIGN_OR_RETURN(const Created created,
                          CreateLocked(info, device_slot, std::move(range), SourceOf(site)));
  block->last = created.sequence;
  return NewSentLocked(info, device_slot, created.id, created.sequence);
}

absl::Status SessionCore::NameLocked(TensorData* data) {
  if (data->state.load(std::memory_order_relaxed) != TensorData::State::kHost) {
    return absl::OkStatus();
  }
  CHORUS_ASSIGN_OR_RETURN(const Created created,
                          CreateLocked(data->info, data->device_slot, data->inline_data));
  data->id = created.id;
  data->producer = created.sequence;
  data->state.store(TensorData::State::kSent, std::memory_order_release);
  return absl::OkStatus();
}

absl::StatusOr<TensorDataPtr> SessionCore::FreezeLocked(const TensorData& data) {
  CHORUS_ASSIGN_OR_RETURN(const Created created,
                          CreateLocked(data.info, data.device_slot, data.external));
  return NewSentLocked(data.info, data.device_slot, created.id, created.sequence);
}

// --- Members
// --------------------------------------------------------------------------------------

void SessionCore::AddMemberLocked(const std::shared_ptr<MemberCore>& member) {
  if (members_.size() >= trim_members_at_) {
    members_.erase(std::remove_if(members_.begin(), members_.end(),
                                  [](const auto& held) { return held.expired(); }),
                   members_.end());
    trim_members_at_ = std::max<size_t>(64, 2 * members_.size());
  }
  members_.push_back(member);
}

void SessionCore::LeaveLocked() {
  // A rank that leaves takes its runs with it that wait for others; in a world of one session's
  // they wait for its own, which have been sent before.
  for (OwnWorld::Gone& world : leaving_) {
    if (world.runs_before == Sequence()) world.runs_before = Sequence(next_sequence_);
  }
  const Sequence oldest = OldestUnderWayLocked();
  const auto gone = std::stable_partition(
      leaving_.begin(), leaving_.end(),
      [oldest](const OwnWorld::Gone& world) { return oldest < world.runs_before; });
  std::vector<OwnWorld::Gone> left(std::make_move_iterator(gone),
                                   std::make_move_iterator(leaving_.end()));
  leaving_.erase(gone, leaving_.end());
  leaving_count_.store(leaving_.size(), std::memory_order_relaxed);
  for (const OwnWorld::Gone& world : left) {
    for (const Rank rank : world.ranks) link_->Leave(world.world, rank).IgnoreError();
  }
}

void SessionCore::LeaveWhatIsOver() {
  if (leaving_count_.load(std::memory_order_relaxed) == 0 || Forked()) return;
  SessionLock lock(this);
  if (lock.status().ok()) LeaveLocked();
}

SessionCore::Tables SessionCore::CountTables() {
  SessionLock lock(this);
  Tables tables;
  tables.types = types_.size();
  tables.dependences = dependences_.size();
  tables.sources = sources_.size();
  tables.members = members_.size();
  tables.worlds = leaving_.size();
  tables.graphs = static_cast<size_t>(next_graph_) - free_graphs_.size();
  return tables;
}

// --- Collectives --------------------------------------------------------------------------------

NodeSpec NodeSpecOf(const CollectiveSpec& call, const GroupCore& group, int32_t part) {
  NodeSpec spec;
  spec.op.assign(call.op->name.data(), call.op->name.size());
  spec.version = call.op->version;
  spec.device_slot = group.member->device_slot;
  spec.source = call.source != nullptr ? *call.source : SourceOf(call.site);
  if (call.type != nullptr) spec.attributes = TypeAttributes(*call.type);
  spec.collective = call.collective;
  spec.collective->group_slot = 0;
  spec.collective->rank = GroupRank(group.rank);
  spec.collective->part = part;
  return spec;
}

std::pair<GroupRank, GroupRank> Between(const GroupCore& group, const PairEnd& end) {
  const GroupRank own(group.rank);
  const GroupRank peer(end.peer);
  return end.send ? std::make_pair(own, peer) : std::make_pair(peer, own);
}

void GroupCounters::Reset() {
  next_ = 0;
  absl::erase_if(ends_, [](const auto& end) { return end.second.next == 0; });
  for (auto& end : ends_) end.second.next = 0;
}

const CallPart* PartBefore(absl::Span<const CallPart> parts, size_t p) {
  if (HasPeer(parts[p].key.spec.op->kind)) return nullptr;
  for (size_t other = p; other-- > 0;) {
    if (parts[other].group == parts[p].group && !HasPeer(parts[other].key.spec.op->kind)) {
      return &parts[other];
    }
  }
  return nullptr;
}

void SessionCore::CountCallLocked(absl::Span<CallPart> parts, CallInRuns* runs) {
  for (size_t p = 0; p < parts.size(); ++p) {
    CallPart& part = parts[p];
    GroupCore* const group = part.group;
    InstanceKey& key = part.instance;
    key.group = group->id;
    key.since = group->member->since;
    key.at.step = group->member->step.load(std::memory_order_relaxed);
    const Collective& collective = part.key.spec.collective;
    if (HasPeer(collective.kind)) {
      const PairEnd end = EndOf(collective);
      std::tie(key.source, key.destination) = Between(*group, end);
      key.tag = end.tag;
      key.at.call = group->counters.Count(end, 1);
      continue;
    }
    if (const CallPart* const before = PartBefore(parts, p)) {
      key.at.call = before->instance.at.call;
      key.at.part = before->instance.at.part + 1;
    } else if (runs != nullptr && runs->begun) {
      key.at = runs->next;
    } else {
      key.at.call = group->counters.Count(1);
    }
    if (runs == nullptr) continue;
    runs->begun = true;
    runs->next = key.at;
    ++runs->next.part;
  }
}

RefusedMember* SessionCore::RefusedOf(MemberCore* member, Refusals* refusals) {
  Refuse* refuse = nullptr;
  for (Refuse& one : *refusals) {
    if (one.world == member->world) refuse = &one;
  }
  if (refuse == nullptr) {
    refusals->emplace_back();
    refuse = &refusals->back();
    refuse->world = member->world;
    refuse->epoch = Epoch(member->epoch.load(std::memory_order_relaxed));
  }
  const Rank rank(member->rank.load(std::memory_order_relaxed));
  for (RefusedMember& one : refuse->members) {
    if (one.rank == rank) return &one;
  }
  RefusedMember refused;
  refused.rank = rank;
  refused.step = member->step.load(std::memory_order_relaxed);
  refuse->members.push_back(std::move(refused));
  return &refuse->members.back();
}

void SessionCore::AddRefused(absl::Span<const CallPart> parts, Refusals* refusals) {
  for (const CallPart& part : parts) {
    RefusedMember* const member = RefusedOf(part.group->member, refusals);
    const InstanceKey& key = part.instance;
    RefusedCalls calls;
    calls.group = key.group;
    calls.source = key.source;
    calls.destination = key.destination;
    calls.tag = key.tag;
    const Collective& collective = part.key.spec.collective;
    calls.is_recv = collective.kind == CollectiveKind::kRecv;
    calls.first = key.at.call;
    calls.next = key.at.call + 1;
    // A peer that is no member waits for nothing.
    const int32_t size = static_cast<int32_t>(part.group->ranks.size());
    const int32_t peer = collective.peer.value();
    if (HasPeer(collective.kind) && (peer < 0 || peer >= size)) continue;
    // Parts of one call count once.
    const bool again = std::any_of(
        member->calls.begin(), member->calls.end(), [&calls](const RefusedCalls& other) {
          return other.group == calls.group && other.source == calls.source &&
                 other.destination == calls.destination && other.tag == calls.tag &&
                 other.first == calls.first;
        });
    if (!again) member->calls.push_back(calls);
  }
}

void SessionCore::PutOutOfLineLocked(const absl::Status& why, Refusals* refusals) {
  Error error = ErrorOf(why);
  error.SetReason(Reason::kOutOfLine);
  error.message = absl::StrCat(
      "this rank is out of line: a call could not be made here, and what would have followed from "
      "it is not known, so it takes part in nothing more until its next World::Step (or Reform); "
      "the call: ",
      error.message);
  for (const auto& held : members_) {
    const std::shared_ptr<MemberCore> member = held.lock();
    if (member == nullptr || member->in_device_group.load(std::memory_order_relaxed)) continue;
    if (!member->out_of_line.ok()) continue;
    member->out_of_line = ToStatus(error);
    RefusedOf(member.get(), refusals)->rest_of_step = true;
  }
}

void SessionCore::LoseTapesLocked(absl::Span<MemberCore* const> members, uint64_t order,
                                  const absl::Status& why, bool ends_epoch, Refusals* refusals) {
  Error error = ErrorOf(why);
  error.SetReason(Reason::kTapeConsumed);
  error.message = absl::StrCat(
      "what was recorded before has no gradient any more: a call for gradients was refused here, "
      "and which it would have asked for is not known; record anew; the call: ",
      error.message);
  const auto lose = [&](MemberCore* member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
    // Nobody waits for it in this step, and requests count anew in the next.
    if (!member->out_of_line.ok()) return;
    member->tapes_lost_before.store(order, std::memory_order_relaxed);
    member->why_tapes_lost = ToStatus(error);
    RefusedOf(member, refusals)->drops_tapes = true;
  };
  for (MemberCore* const member : members) lose(member);
  for (size_t m = 0; members.empty() && m < members_.size(); ++m) {
    const std::shared_ptr<MemberCore> member = members_[m].lock();
    if (member != nullptr && !member->in_device_group.load(std::memory_order_relaxed)) {
      lose(member.get());
    }
  }
  if (ends_epoch) return;
  // The epoch before the member's own is over.
  for (Refuse& refuse : *refusals) refuse.epoch = Epoch(refuse.epoch.value() - 1);
}

std::vector<Sequence> SessionCore::RefuseLocked(Refusals refusals, const absl::Status& why) {
  std::vector<Sequence> sent;
  for (Refuse& refuse : refusals) {
    refuse.why = ErrorOf(why);
    // Where it comes of a failure that has ended an epoch the others have been told.
    for (const Error::EndedEpoch& ended : refuse.why.ended) {
      refuse.why.alone |= ended.world == refuse.world;
    }
    const absl::StatusOr<Sequence> sequence = SubmitLocked(std::move(refuse));
    if (sequence.ok()) sent.push_back(*sequence);
  }
  return sent;
}

absl::Status SessionCore::AwaitRefused(const std::vector<Sequence>& sent, const absl::Status& why) {
  absl::Status recorded = why;
  for (const Sequence sequence : sent) {
    const absl::Status outcome = link_->WaitCommand(sequence, wait_timeout_);
    OnError(outcome);
    const Error error = ErrorOf(outcome);
    // It is `why` with its number, unless the command itself was not understood or not answered.
    if (error.reason == ErrorOf(why).reason && outcome.code() == why.code() &&
        ErrorOf(recorded).id.value() == ErrorOf(why).id.value()) {
      recorded = outcome;
    }
  }
  return recorded;
}

absl::Status SessionCore::RefuseRest(GroupCore* group, CallInRuns* call, const absl::Status& why) {
  if (IsLost(why)) return why;
  MemberCore* const member = group->member;
  std::vector<Sequence> sent;
  {
    SessionLock lock(this);
    CHORUS_RETURN_IF_ERROR(lock.status());
    if (!member->out_of_line.ok()) return Detached(member->out_of_line);
    if (!call->begun) {
      call->begun = true;
      call->next = {member->step.load(std::memory_order_relaxed), group->counters.Count(1), 0};
    }
    // A call of a step that is over is passed.
    if (call->next.step != member->step.load(std::memory_order_relaxed)) return why;
    RefusedCalls calls;
    calls.group = group->id;
    calls.first = call->next.call;
    calls.next = calls.first + 1;
    Refusals refusals;
    RefusedOf(member, &refusals)->calls.push_back(calls);
    sent = RefuseLocked(std::move(refusals), why);
  }
  return AwaitRefused(sent, why);
}

void SessionCore::ResetCountsLocked(MemberCore* member) {
  member->out_of_line = absl::OkStatus();
  member->group_requests.clear();
  for (const auto& group : member->groups) {
    group->counters.Reset();
  }
}

absl::Status SessionCore::BeginStep(MemberCore* member, int64_t step) {
  SessionLock lock(this);
  CHORUS_RETURN_IF_ERROR(lock.status());
  const int64_t last = member->step.load(std::memory_order_relaxed);
  if (step <= last || step >= kMaxCallNumber) {
    return Malformed(absl::StrCat("Step: expected a number above that of the last step, ", last,
                                  ", and below ", kMaxCallNumber, ", got ", step,
                                  "; a step that is done again has a new number"));
  }
  member->step.store(step, std::memory_order_relaxed);
  ResetCountsLocked(member);
  return absl::OkStatus();
}

void SessionCore::TrimCallsLocked() {
  if (sources_.size() < kMaxSources && static_cast<size_t>(call_graphs_) < MaxGraphs() / 2) {
    return;
  }
  for (const auto& held : members_) {
    const std::shared_ptr<MemberCore> member = held.lock();
    if (member == nullptr) continue;
    for (const auto& group : member->groups) ForgetCallsLocked(group.get());
  }
  sources_.clear();
}

void SessionCore::ForgetCallsLocked(GroupCore* group) {
  for (const auto& call : group->calls) ReleaseGraphLocked(call.second->draft.run().graph);
  for (const auto& batch : group->batches) ReleaseGraphLocked(batch.second->draft.run().graph);
  call_graphs_ -= static_cast<int32_t>(group->calls.size() + group->batches.size());
  group->calls.clear();
  group->batches.clear();
  group->last_entry = nullptr;
  group->last_key = CallKey();
}

absl::StatusOr<CallEntry*> SessionCore::EntryLocked(absl::Span<const CallPart> parts) {
  GroupCore* const group = parts[0].group;
  const CallKey& first = parts[0].key;
  // Counts that change with every call must not fill the daemon with graphs.
  const auto make_room = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
    if (group->calls.size() + group->batches.size() >= kMaxCalls) ForgetCallsLocked(group);
  };
  if (parts.size() == 1) {
    if (group->last_entry != nullptr && group->last_key == first) return group->last_entry;
    auto found = group->calls.find(first);
    if (found == group->calls.end()) {
      make_room();
      CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<CallEntry> made, MakeEntryLocked(parts));
      found = group->calls.emplace(first, std::move(made)).first;
      ++call_graphs_;
    }
    group->last_key = first;
    group->last_entry = found->second.get();
    return group->last_entry;
  }
  GroupCore::BatchKey key;
  key.reserve(parts.size());
  for (const CallPart& part : parts) key.emplace_back(part.group, part.key);
  auto found = group->batches.find(key);
  if (found == group->batches.end()) {
    make_room();
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<CallEntry> made, MakeEntryLocked(parts));
    found = group->batches.emplace(std::move(key), std::move(made)).first;
    ++call_graphs_;
  }
  return found->second.get();
}

absl::StatusOr<std::unique_ptr<CallEntry>> SessionCore::MakeEntryLocked(
    absl::Span<const CallPart> parts) {
  // The members that the run holds, by rank.
  std::vector<GroupCore*> held;
  for (const CallPart& part : parts) {
    if (std::find(held.begin(), held.end(), part.group) == held.end()) held.push_back(part.group);
  }
  std::sort(held.begin(), held.end(),
            [](const GroupCore* a, const GroupCore* b) { return a->rank < b->rank; });
  GroupSlot slot;
  slot.size = static_cast<int32_t>(held[0]->ranks.size());
  for (const GroupCore* group : held) {
    slot.held.push_back(GroupRank(group->rank));
    slot.device_slots.push_back(group->member->device_slot);
  }
  auto entry = std::make_unique<CallEntry>();
  GraphBuilder builder(device_count(), {std::move(slot)});
  absl::flat_hash_map<const GroupCore*, int32_t> next_part;
  for (size_t p = 0; p < parts.size(); ++p) {
    const CallPart& part = parts[p];
    const CollectiveSpec& call = part.key.spec;
    CallEntry::Part made;
    if (part.declared != nullptr) made.types.push_back(part.declared);
    NodeSpec spec =
        NodeSpecOf(call, *part.group, HasPeer(call.op->kind) ? 0 : next_part[part.group]++);
    made.spec = std::make_shared<const NodeSpec>(spec);
    for (const TensorData* input : part.inputs) {
      made.types.push_back(input->info);
      GraphInput added;
      added.type = input->info->type;
      // A number of the run, like a factor.
      if (input->state.load(std::memory_order_relaxed) == TensorData::State::kInline) {
        added.role = InputRole::kScalar;
      }
      added.device_slot = spec.device_slot;
      spec.inputs.push_back(builder.AddInput(std::move(added)));
    }
    const absl::StatusOr<std::vector<ValueIndex>> values = builder.Emit(std::move(spec));
    if (!values.ok()) return parts.size() == 1 ? values.status() : AtPlace(values.status(), p);
    for (const ValueIndex value : *values) {
      GraphOutput output;
      output.value = value;
      builder.AddOutput(output);
      entry->draft.results.push_back(
          {Intern(builder.TypeOf(value)), made.spec->device_slot, nullptr});
    }
    const int num_outputs = static_cast<int>(values->size());
    made.outputs = values->size();
    made.visible = NumVisibleOutputs(*made.spec->collective, num_outputs);
    made.saved = SavedBy(*call.op, *made.spec, static_cast<int>(part.inputs.size()), num_outputs);
    made.rank =
        static_cast<int32_t>(std::find(held.begin(), held.end(), part.group) - held.begin());
    entry->parts.push_back(std::move(made));
  }
  Graph graph = builder.Build();
  const InstanceRef& instance = parts[0].key.spec.collective.instance;
  if (instance.kind == InstanceRef::Kind::kBound) graph.num_instance_slots = 1;
  Run& run = entry->draft.run();
  CHORUS_ASSIGN_OR_RETURN(run.graph, RegisterLocked(EncodeGraph(graph)));
  run.groups.resize(1);
  run.groups[0].group = held[0]->id;
  run.groups[0].base.resize(held.size());
  run.instances.resize(static_cast<size_t>(graph.num_instance_slots));
  return entry;
}

absl::StatusOr<Sequence> SessionCore::CollectivesLocked(absl::Span<CallPart> parts, bool bound,
                                                        const CallInRuns* runs,
                                                        const CallEntry** used,
                                                        TensorDatas* results) {
  for (const CallPart& part : parts) {
    for (TensorData* const input : part.inputs) CHORUS_RETURN_IF_ERROR(NameLocked(input));
  }
  CHORUS_ASSIGN_OR_RETURN(CallEntry* const entry, EntryLocked(parts));
  *used = entry;
  RunDraft& draft = entry->draft;
  Run& run = draft.run();
  MemberCore* const member = parts[0].group->member;
  run.groups[0].world = member->world;
  run.groups[0].epoch = Epoch(member->epoch.load(std::memory_order_relaxed));
  run.pair_calls.clear();
  run.call_goes_on = runs != nullptr && !runs->last;
  draft.operands.clear();
  draft.origins.resize(parts.size());
  for (size_t p = 0; p < parts.size(); ++p) {
    const CallPart& part = parts[p];
    GroupCore* const group = part.group;
    for (TensorData* const input : part.inputs) draft.operands.push_back(input);
    if (HasPeer(part.key.spec.op->kind)) {
      OriginPtr& origin = group->counters.OriginAt(EndOf(part.key.spec.collective));
      if (origin == nullptr) origin = std::make_shared<Origin>(next_origin_++);
      draft.origins[p] = InternDependences({origin});
    } else if (draft.origins[p] != OriginOf(group)) {
      draft.origins[p] = OriginOf(group);
    }
    CallPosition& base = run.groups[0].base[entry->parts[p].rank];
    if (bound || part.instance.is_pair()) {
      base = {group->member->step.load(std::memory_order_relaxed), group->counters.next(), 0};
    }
    if (!bound && part.instance.is_pair()) run.pair_calls.push_back(part.instance.at.call);
  }
  if (bound) run.instances[0] = parts[0].instance;
  for (size_t p = 0; p < parts.size() && !bound; ++p) {
    // Where the call of the group stands, not what was counted since.
    if (parts[p].instance.is_pair() || PartBefore(parts, p) != nullptr) continue;
    run.groups[0].base[entry->parts[p].rank] = parts[p].instance.at;
  }
  const absl::StatusOr<Sequence> sequence = SubmitRun(&draft, results);
  // Tags come and go: what a pair's results depend on is not kept for its next call.
  for (size_t p = 0; p < parts.size(); ++p) {
    if (HasPeer(parts[p].key.spec.op->kind)) draft.origins[p] = nullptr;
  }
  return sequence;
}

void SessionCore::Throttle() {
  if (under_way_count_.load(std::memory_order_relaxed) < kMaxUnderWay) return;
  Sequence oldest;
  {
    SessionLock lock(this);
    if (!lock.status().ok()) return;
    // Runs end in any order.
    const auto is_over = [this](Sequence run)
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) { return IsOver(run); };
    under_way_.erase(std::remove_if(under_way_.begin(), under_way_.end(), is_over),
                     under_way_.end());
    under_way_count_.store(under_way_.size(), std::memory_order_relaxed);
    if (under_way_.size() < kMaxUnderWay) return;
    oldest = under_way_.front();
  }
  WaitForRun(oldest).IgnoreError();
}

absl::Status SessionCore::WaitForRun(Sequence run) {
  return reports_.InParts(wait_timeout_,
                          [&](absl::Duration part) { return link_->WaitCommand(run, part); });
}

// --- Waiting ------------------------------------------------------------------------------------

void SessionCore::OnError(const absl::Status& status) {
  const Error error = ErrorOf(status);
  if (error.ended.empty()) return;
  SessionLock lock(this);
  if (!lock.status().ok()) return;
  for (const Error::EndedEpoch& ended : error.ended) {
    bool entered = false;
    for (const auto& held : members_) {
      const std::shared_ptr<MemberCore> member = held.lock();
      if (member == nullptr || member->world != ended.world ||
          member->epoch.load(std::memory_order_relaxed) >= ended.open.value()) {
        continue;
      }
      member->epoch.store(ended.open.value(), std::memory_order_relaxed);
      entered = true;
    }
    if (entered) SubmitLocked(EnterEpoch{ended.world, ended.open}).status().IgnoreError();
  }
}

absl::Status SessionCore::Wait(const TensorDataPtr& data, absl::Duration timeout) {
  if (Forked()) return ForkedError();
  TensorData::State state = data->state.load(std::memory_order_acquire);
  if (state == TensorData::State::kLazy) {
    SessionLock lock(this);
    CHORUS_RETURN_IF_ERROR(lock.status());
    FlushLocked();
    state = data->state.load(std::memory_order_acquire);
  }
  switch (state) {
    case TensorData::State::kSent: {
      const absl::StatusOr<bool> done = reports_.InParts(timeout, [&](absl::Duration part) {
        return link_->WaitTensor(data->id, data->producer, part);
      });
      LeaveWhatIsOver();
      if (done.ok()) return absl::OkStatus();
      OnError(done.status());
      return done.status();
    }
    case TensorData::State::kAbsent: {
      if (data->producer == Sequence()) return absl::OkStatus();
      const absl::Status status = reports_.InParts(
          timeout, [&](absl::Duration part) { return link_->WaitCommand(data->producer, part); });
      if (!status.ok()) OnError(status);
      return status;
    }
    case TensorData::State::kFailed:
      return data->failure->status;
    case TensorData::State::kTraced:
      return MakeError(Reason::kWrongState,
                       "a tensor inside a compiled function has no bytes: return it, and read the "
                       "result of the call");
    case TensorData::State::kInline:
    case TensorData::State::kHost:
    case TensorData::State::kExternal:
    case TensorData::State::kLazy:
      break;
  }
  return absl::OkStatus();
}

absl::Status SessionCore::ReadTensor(const TensorDataPtr& data, char* out) {
  if (data->info->bytes == 0) return absl::OkStatus();
  switch (data->state.load(std::memory_order_acquire)) {
    case TensorData::State::kInline:
    case TensorData::State::kHost:
      std::memcpy(out, data->inline_data.bytes.data(), data->inline_data.bytes.size());
      return absl::OkStatus();
    case TensorData::State::kExternal:
      std::memcpy(out, data->staging, static_cast<size_t>(data->info->bytes));
      return absl::OkStatus();
    default:
      break;
  }
  const absl::StatusOr<bool> on_device = link_->WaitTensor(data->id, data->producer, wait_timeout_);
  CHORUS_RETURN_IF_ERROR(on_device.status());
  if (*on_device) {
    SessionLock lock(this);
    CHORUS_RETURN_IF_ERROR(lock.status());
    CHORUS_RETURN_IF_ERROR(SubmitLocked(MakeReadable{{data->id}}).status());
  }
  return link_->Read(data->id, data->producer, out, data->info->bytes, wait_timeout_);
}

absl::StatusOr<const char*> SessionCore::MapTensor(const TensorDataPtr& data) {
  if (data->state.load(std::memory_order_acquire) == TensorData::State::kHost) {
    // Like any tensor: what works does not depend on how large it is.
    SessionLock lock(this);
    CHORUS_RETURN_IF_ERROR(lock.status());
    CHORUS_RETURN_IF_ERROR(NameLocked(data.get()));
  }
  // Whoever looks there would see what that run writes: whether it has the memory must be known.
  if (const Sequence given(data->given_to.load()); given != Sequence()) {
    link_->WaitCommand(given, wait_timeout_).IgnoreError();
  }
  const absl::StatusOr<bool> on_device = link_->WaitTensor(data->id, data->producer, wait_timeout_);
  CHORUS_RETURN_IF_ERROR(on_device.status());
  if (*on_device) {
    SessionLock lock(this);
    CHORUS_RETURN_IF_ERROR(lock.status());
    CHORUS_RETURN_IF_ERROR(SubmitLocked(MakeReadable{{data->id}}).status());
  }
  return link_->MapTensor(data->id, data->producer, data->info->bytes, wait_timeout_);
}

absl::Status SessionCore::Close() {
  {
    SessionLock lock(this);
    if (Forked()) return lock.status();
    if (closed_) return absl::OkStatus();
    closed_ = true;
    open_.clear();
  }
  return link_->Close();
}

// --- Releasing ----------------------------------------------------------------------------------

void SessionCore::Retire(const TensorData& data) {
  if (Forked()) return;
  MutexLock lock(&retired_mutex_);
  if (data.state.load(std::memory_order_relaxed) == TensorData::State::kExternal) {
    retired_.arenas.push_back(data.external.arena);
    urgent_.store(true, std::memory_order_relaxed);
    return;
  }
  retired_.tensors.push_back(data.id);
  retired_.bytes += data.info->bytes;
  if (retired_.tensors.size() >= kMaxRetiredTensors || retired_.bytes >= kMaxRetiredBytes) {
    urgent_.store(true, std::memory_order_relaxed);
  }
}

void SessionCore::RetireGraphs(absl::Span<const GraphId> graphs, bool of_calls) {
  if (Forked()) return;
  MutexLock lock(&retired_mutex_);
  if (of_calls) retired_.call_graphs += static_cast<int32_t>(graphs.size());
  retired_.graphs.insert(retired_.graphs.end(), graphs.begin(), graphs.end());
  urgent_.store(true, std::memory_order_relaxed);
}

void SessionCore::RetireWorld(OwnWorld::Gone world) {
  if (Forked()) return;
  MutexLock lock(&retired_mutex_);
  retired_.worlds.push_back(std::move(world));
  urgent_.store(true, std::memory_order_relaxed);
}

void SessionCore::RetireTape(DropTape::Entry entry) {
  if (Forked()) return;
  MutexLock lock(&retired_mutex_);
  retired_.tapes.push_back(std::move(entry));
  urgent_.store(true, std::memory_order_relaxed);
}

void SessionCore::DrainIfUrgent() {
  if (!urgent_.load(std::memory_order_relaxed) || locked_session == this || Forked()) return;
  SessionLock lock(this);  // drains when it ends
}

void SessionCore::KeepWhatIsBeingSent(Retired* retired) {
  MutexLock lock(&retired_mutex_);
  for (const Fragment* fragment : sending_) {
    for (const Binding& input : fragment->inputs) {
      const auto keep = [](auto* names, const auto& name, auto* back) {
        const auto found = std::find(names->begin(), names->end(), name);
        if (found == names->end()) return false;
        back->push_back(name);
        names->erase(found);
        return true;
      };
      if (const auto* tensor = absl::get_if<TensorId>(&input)) {
        if (!keep(&retired->tensors, *tensor, &retired_.tensors)) continue;
        // How large it is has been forgotten.
        retired_.bytes = kMaxRetiredBytes;
      } else if (const auto* range = absl::get_if<ExternalRange>(&input)) {
        if (!keep(&retired->arenas, range->arena, &retired_.arenas)) continue;
      } else {
        continue;
      }
      urgent_.store(true, std::memory_order_relaxed);
    }
  }
}

void SessionCore::ReleaseRetiredGraphsLocked() {
  std::vector<GraphId> graphs;
  {
    MutexLock lock(&retired_mutex_);
    std::swap(graphs, retired_.graphs);
    call_graphs_ -= std::exchange(retired_.call_graphs, 0);
  }
  for (size_t begin = 0; begin < graphs.size(); begin += kGraphsPerFrame) {
    ReleaseGraphsLocked(absl::MakeConstSpan(graphs).subspan(begin, kGraphsPerFrame));
  }
}

void SessionCore::DrainLocked(bool all) {
  Retired retired;
  {
    MutexLock lock(&retired_mutex_);
    urgent_.store(false, std::memory_order_relaxed);
    // Tape entries are urgent by themselves: tensors need not go with each of them.
    if (all || retired_.tensors.size() >= kMaxRetiredTensors ||
        retired_.bytes >= kMaxRetiredBytes) {
      std::swap(retired.tensors, retired_.tensors);
      retired_.tensors.reserve(kMaxRetiredTensors);
      retired_.bytes = 0;
    }
    std::swap(retired.arenas, retired_.arenas);
    std::swap(retired.tapes, retired_.tapes);
    std::swap(retired.worlds, retired_.worlds);
  }
  if (closed_) return;
  KeepWhatIsBeingSent(&retired);
  for (size_t begin = 0; begin < retired.tapes.size(); begin += kDropsPerFrame) {
    const size_t end = std::min(begin + kDropsPerFrame, retired.tapes.size());
    DropTape drop;
    drop.entries.assign(std::make_move_iterator(retired.tapes.begin() + begin),
                        std::make_move_iterator(retired.tapes.begin() + end));
    SubmitLocked(std::move(drop)).status().IgnoreError();
  }
  ReleaseRetiredGraphsLocked();
  leaving_.insert(leaving_.end(), std::make_move_iterator(retired.worlds.begin()),
                  std::make_move_iterator(retired.worlds.end()));
  if (!leaving_.empty()) LeaveLocked();
  if (retired.tensors.empty() && retired.arenas.empty()) return;
  // The pending fragments may use them.
  FlushLocked();
  if (!retired.tensors.empty()) {
    Release release;
    release.tensors = retired.tensors;
    if (SubmitLocked(std::move(release)).ok()) {
      for (const TensorId id : retired.tensors) {
        free_tensors_.push_back(TensorId{id.slot, id.generation + 1});
      }
    }
  }
  for (const ArenaId arena : retired.arenas) link_->ReleaseStaging(arena).IgnoreError();
}

}  // namespace sdk
}  // namespace chorus
