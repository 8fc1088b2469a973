#include "chorus/compile.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "chorus/autograd.h"
#include "client/internal/access.h"
#include "client/internal/refusals.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "client/internal/trace.h"
#include "client/internal/unify.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/graph/encoding.h"
#include "core/ops/specialize.h"

namespace chorus {
namespace {

using internal::AddRefused;
using internal::AwaitRefused;
using internal::Between;
using internal::GradMode;
using internal::GroupCore;
using internal::ImplOf;
using internal::Interner;
using internal::IsLost;
using internal::MakeTensor;
using internal::OriginOf;
using internal::PairEnd;
using internal::PutOutOfLine;
using internal::Refusals;
using internal::RefusedOf;
using internal::RoleOf;
using internal::RunDraft;
using internal::session_lock;
using internal::SessionCore;
using internal::SessionLock;
using internal::SessionOf;
using internal::SourceOf;
using internal::SubmitRefusals;
using internal::TensorData;
using internal::TensorDataPtr;
using internal::TensorDatas;
using internal::TensorFrom;
using internal::TensorImpl;
using internal::TensorInfoPtr;
using internal::Trace;
using internal::TraceScope;
using internal::UnifyGraphs;
using internal::VaryingDim;
using internal::WithSource;

// What a trace depends on of one input.
struct InputKey {
  TensorInfoPtr info;
  int32_t device_slot = 0;
  bool requires_grad = false;
  friend bool operator==(const InputKey& a, const InputKey& b) {
    return a.info == b.info && a.device_slot == b.device_slot && a.requires_grad == b.requires_grad;
  }
};

// Where a result of the function comes from.
struct Result {
  int32_t output = -1;    // of the graph
  TensorDataPtr outside;  // a tensor from outside that the function returned
  int32_t input = -1;     // an input, returned as it is
  TensorInfoPtr info;     // null: absent
  int32_t device_slot = 0;
};

using Infos = std::vector<TensorInfoPtr>;

struct Program {
  // Its last run has been sent, or nobody can send one.
  ~Program() {
    if (graph == GraphId()) return;
    if (internal::Releases* const releases = session->releases()) {
      releases->Add({graph}, /*of_calls=*/false);
    }
    session->DrainIfUrgent();
  }

  std::shared_ptr<SessionCore> session;
  std::vector<InputKey> key;
  std::vector<Result> results;
  std::shared_ptr<const Infos> output_infos;  // where the size that varies is the largest
  std::vector<int32_t> output_devices;
  Trace::Finished trace;
  GraphId graph;
  // By size. Guarded by the mutex of its CompiledImpl.
  static constexpr size_t kMaxSizes = 1024;
  std::map<int64_t, std::shared_ptr<const Infos>> infos_at;

  // The groups are those that were traced: a Reform changes ranks and sizes.
  bool IsCurrent() const {
    for (const Trace::Slot& slot : trace.slots) {
      for (size_t i = 0; i < slot.groups.size(); ++i) {
        if (slot.groups[i]->generation.load(std::memory_order_relaxed) != slot.generations[i]) {
          return false;
        }
      }
    }
    return true;
  }
};

// One call of the function with placeholders.
struct Traced {
  Trace::Finished trace;
  std::vector<Result> results;
  Infos output_infos;
  std::vector<int32_t> output_devices;
};

bool Travels(const TensorData& data) {
  const TensorData::State state = data.state.load(std::memory_order_acquire);
  return state == TensorData::State::kInline || state == TensorData::State::kHost;
}

// How often a run calls, by group and end of a pair; by no end for the group itself.
std::map<std::pair<GroupCore*, PairEnd>, int64_t> CallsOf(const Trace::Finished& trace) {
  std::map<std::pair<GroupCore*, PairEnd>, int64_t> calls;
  for (const Trace::Slot& slot : trace.slots) {
    for (size_t i = 0; i < slot.groups.size(); ++i) {
      if (slot.used[i] > 0) calls[{slot.groups[i], PairEnd()}] = slot.used[i];
    }
  }
  for (const Trace::PairUse& pair : trace.pairs) calls[{pair.group, pair.end}] = pair.used;
  return calls;
}

// Where the calls of a run stand.
struct Counted {
  std::vector<absl::InlinedVector<CallPosition, 1>> bases;  // by slot
  absl::InlinedVector<int64_t, 1> pairs;                    // by pair
};

// Counts the calls of a run: once for each, whatever becomes of it.
Counted CountLocked(const Trace::Finished& trace) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
  Counted counted;
  for (const Trace::Slot& slot : trace.slots) {
    counted.bases.emplace_back();
    for (size_t i = 0; i < slot.groups.size(); ++i) {
      GroupCore* const group = slot.groups[i];
      counted.bases.back().push_back({group->member->step.load(std::memory_order_relaxed),
                                      group->counters.Count(slot.used[i]), 0});
    }
  }
  for (const Trace::PairUse& pair : trace.pairs) {
    counted.pairs.push_back(pair.group->counters.Count(pair.end, pair.used));
  }
  return counted;
}

void AddRefused(const Trace::Finished& trace, const Counted& counted, Refusals* refusals)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
  for (size_t s = 0; s < trace.slots.size(); ++s) {
    const Trace::Slot& slot = trace.slots[s];
    for (size_t i = 0; i < slot.groups.size(); ++i) {
      if (slot.used[i] == 0) continue;
      RefusedCalls calls;
      calls.group = slot.groups[i]->id;
      calls.first = counted.bases[s][i].call;
      calls.next = calls.first + slot.used[i];
      RefusedOf(slot.groups[i]->member, refusals)->calls.push_back(calls);
    }
  }
  for (size_t p = 0; p < trace.pairs.size(); ++p) {
    const Trace::PairUse& pair = trace.pairs[p];
    RefusedCalls calls;
    calls.group = pair.group->id;
    std::tie(calls.source, calls.destination) = Between(*pair.group, pair.end);
    calls.tag = pair.end.tag;
    calls.is_recv = !pair.end.send;
    calls.first = counted.pairs[p];
    calls.next = calls.first + pair.used;
    RefusedOf(pair.group->member, refusals)->calls.push_back(calls);
  }
}

absl::Status Thrown(absl::string_view what) {
  return MakeError(Reason::kCancelled,
                   absl::StrCat("compiled function: it threw an exception", what));
}

// What two traces of a function capture, and give back, must not depend on the size.
absl::Status CheckSame(const Traced& a, const Traced& b, size_t num_inputs) {
  for (size_t i = 0; i < std::min(a.trace.captures.size(), b.trace.captures.size()); ++i) {
    const TensorDataPtr& one = a.trace.captures[i].data;
    const TensorDataPtr& other = b.trace.captures[i].data;
    if (one == other || (Travels(*one) && Travels(*other) && one->info == other->info &&
                         one->inline_data.bytes == other->inline_data.bytes)) {
      continue;
    }
    std::string where;
    for (const Node& node : a.trace.graph.nodes) {
      const auto found = std::find(node.inputs.begin(), node.inputs.end(),
                                   static_cast<ValueIndex>(num_inputs + i));
      if (where.empty() && found != node.inputs.end()) {
        where = absl::StrCat(" in ", node.op, " at ", node.source);
      }
    }
    return BadType(absl::StrCat(
        "a function of a batch whose size varies must be one function, but a number or tensor that "
        "it uses",
        where,
        " is another one for another size; for a constant like 1 / batch use "
        "Mean, and pass what it makes from the host as an input"));
  }
  bool same =
      a.trace.captures.size() == b.trace.captures.size() && a.results.size() == b.results.size();
  for (size_t i = 0; same && i < a.results.size(); ++i) {
    same = a.results[i].output == b.results[i].output &&
           a.results[i].outside == b.results[i].outside && a.results[i].input == b.results[i].input;
  }
  if (same) return absl::OkStatus();
  return BadType(
      "a function of a batch whose size varies must be one function, but what it uses or gives "
      "back "
      "depends on the size");
}

}  // namespace

namespace internal {

// Threads that are the first with one list of types at a time trace the function for it each, and
// use one graph. Lock order: session_lock.h.
class CompiledImpl {
 public:
  CompiledImpl(Function function, CompileOptions options)
      : function_(std::move(function)), options_(std::move(options)) {}

  absl::StatusOr<std::vector<Tensor>> Run(const std::vector<Tensor>& inputs, CallSite site) {
    if (Trace::Current() != nullptr) {
      // One graph is the point: the inner function becomes part of the outer one.
      const CallSiteScope own_lines;
      return function_(inputs);
    }
    const std::string source = SourceOf(site);
    absl::StatusOr<Prepared> prepared = Prepared();
    try {
      prepared = Prepare(inputs);
    } catch (const std::exception& thrown) {
      Refuse(inputs, WithSource(Thrown(absl::StrCat(": ", thrown.what())), source)).IgnoreError();
      throw;
    } catch (...) {
      Refuse(inputs, WithSource(Thrown(""), source)).IgnoreError();
      throw;
    }
    if (!prepared.ok()) return Refuse(inputs, WithSource(prepared.status(), source));
    return Call(*prepared->program, inputs, *prepared->infos, source);
  }

  int traces() const {
    MutexLock lock(&mutex_);
    return traces_;
  }

 private:
  // What a call with some inputs runs.
  struct Prepared {
    std::shared_ptr<Program> program;
    std::shared_ptr<const Infos> infos;  // of its outputs
  };

  // Traces the function where it has to, under no lock: it may throw, and wait for what it likes.
  absl::StatusOr<Prepared> Prepare(const std::vector<Tensor>& inputs) {
    std::shared_ptr<SessionCore> session;
    std::vector<InputKey> key;
    int64_t size = -1;
    for (const Tensor& input : inputs) {
      if (!input.defined() || input.absent()) {
        return BadType("compiled function: expected tensors, got an undefined or absent one");
      }
      CHORUS_RETURN_IF_ERROR(input.status());
      const TensorData& data = *ImplOf(input)->data;
      if (session == nullptr) session = data.session;
      if (session != data.session) {
        return BadType("compiled function: expected inputs of one session");
      }
      CHORUS_ASSIGN_OR_RETURN(
          const TensorInfoPtr info,
          AtSize(session.get(), static_cast<int>(key.size()), data.info, options_.max_size, &size));
      key.push_back({info, data.device_slot, input.requires_grad()});
    }
    if (session == nullptr) {
      return BadType(
          "compiled function: expected at least one input: it says on which session the function "
          "runs");
    }
    Prepared prepared;
    prepared.program = Find(session, key);
    if (prepared.program == nullptr) {
      CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Program> made, MakeProgram(session, inputs, key));
      prepared.program = Keep(std::move(made));
    }
    CHORUS_ASSIGN_OR_RETURN(prepared.infos, InfosAt(prepared.program.get(), size));
    return prepared;
  }

  // The program of such inputs; null: there is none, or its groups are others by now.
  std::shared_ptr<Program> Find(const std::shared_ptr<SessionCore>& session,
                                const std::vector<InputKey>& key) {
    std::shared_ptr<Program> past;  // goes behind the lock: it tells its session
    MutexLock lock(&mutex_);
    for (size_t i = 0; i < programs_.size(); ++i) {
      if (programs_[i]->session != session || programs_[i]->key != key) continue;
      if (programs_[i]->IsCurrent()) return programs_[i];
      past = std::move(programs_[i]);
      programs_.erase(programs_.begin() + static_cast<int64_t>(i));
      break;
    }
    return nullptr;
  }

  // The one to use: another thread may have traced the function for such inputs meanwhile.
  std::shared_ptr<Program> Keep(std::shared_ptr<Program> made) {
    std::shared_ptr<Program> known = Find(made->session, made->key);
    if (known != nullptr) return known;
    std::shared_ptr<Program> past;
    MutexLock lock(&mutex_);
    if (programs_.size() >= kMaxPrograms) {
      past = std::move(programs_.front());
      programs_.erase(programs_.begin());
    }
    programs_.push_back(made);
    ++traces_;
    return made;
  }

  // The session on which a call with these inputs would have run, as far as that can be told.
  std::shared_ptr<SessionCore> SessionOf(const std::vector<Tensor>& inputs) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const Tensor& input : inputs) {
      if (input.defined() && ImplOf(input)->data->session != nullptr) {
        return ImplOf(input)->data->session;
      }
    }
    std::shared_ptr<SessionCore> session;
    for (const auto& program : programs_) {
      if (session != nullptr && session != program->session) return nullptr;
      session = program->session;
    }
    return session;
  }

  // A call that cannot be made, for `why`: it counts what all traces so far have counted; where
  // that is not one number the rank is out of line. The others are told. Gives the error as
  // recorded.
  absl::Status Refuse(const std::vector<Tensor>& inputs, const absl::Status& why) {
    if (IsLost(why)) return why;
    std::shared_ptr<SessionCore> session;
    std::shared_ptr<Program> known;
    bool differ = false;
    {
      MutexLock lock(&mutex_);
      session = SessionOf(inputs);
      for (const auto& program : programs_) {
        if (program->session != session || !program->IsCurrent()) continue;
        if (known == nullptr) known = program;
        differ = differ || CallsOf(known->trace) != CallsOf(program->trace);
      }
    }
    if (session == nullptr || session->Forked()) return why;
    std::vector<Sequence> sent;
    {
      SessionLock lock(session.get());
      CHORUS_RETURN_IF_ERROR(lock.status());
      Refusals refusals;
      if (known == nullptr || differ) {
        PutOutOfLine(session->members(), why, &refusals);
      } else {
        CHORUS_RETURN_IF_ERROR(OutOfLine(known->trace));
        AddRefused(known->trace, CountLocked(known->trace), &refusals);
      }
      sent = SubmitRefusals(&session->log(), std::move(refusals), why);
    }
    return AwaitRefused(session.get(), sent, why);
  }

  // The first of the members that takes part in nothing more in its step says why.
  static absl::Status OutOfLine(const Trace::Finished& trace)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
    for (const auto& member : trace.members) {
      if (!member->out_of_line.ok()) return Detached(member->out_of_line);
    }
    return absl::OkStatus();
  }

  // The type of input `i` with its dimensions that vary as `size`; *found is what they are, the
  // same in all inputs.
  absl::StatusOr<TensorInfoPtr> AtSize(SessionCore* session, int i, const TensorInfoPtr& info,
                                       int64_t size, int64_t* found) const {
    TensorType type;
    for (const CompileOptions::Varying& varying : options_.varying) {
      if (varying.input != i) continue;
      if (varying.dim < 0 || varying.dim >= static_cast<int>(info->shape.size())) {
        return BadType(absl::StrCat("compiled function: dimension ", varying.dim, " of input ", i,
                                    " varies, got ", info->type.ToString()));
      }
      if (type.dims.empty()) type = info->type;
      const int64_t actual = info->shape[static_cast<size_t>(varying.dim)];
      if (*found < 0) *found = actual;
      if (actual != *found || actual < 1 || actual > options_.max_size) {
        return BadType(absl::StrCat("compiled function: expected one size from 1 to ",
                                    options_.max_size, " in all inputs that vary, got ", actual,
                                    actual != *found ? absl::StrCat(" after ", *found) : ""));
      }
      type.dims[static_cast<size_t>(varying.dim)] = Dim(size);
    }
    if (type.dims.empty()) return info;
    SessionLock lock(session);
    CHORUS_RETURN_IF_ERROR(lock.status());
    return session->interner().Type(type);
  }

  // The types of the outputs where the size that varies is `size` (-1: none does).
  absl::StatusOr<std::shared_ptr<const Infos>> InfosAt(Program* program, int64_t size) {
    if (size < 0) return program->output_infos;
    {
      MutexLock lock(&mutex_);
      const auto known = program->infos_at.find(size);
      if (known != program->infos_at.end()) return known->second;
    }
    CHORUS_ASSIGN_OR_RETURN(const Graph graph, Specialize(program->trace.graph, {size}));
    const ValueTable values(graph);
    auto infos = std::make_shared<Infos>();
    {
      SessionLock lock(program->session.get());
      CHORUS_RETURN_IF_ERROR(lock.status());
      Interner& interner = program->session->interner();
      for (const GraphOutput& output : graph.outputs) {
        infos->push_back(interner.Type(values.type(output.value)));
      }
    }
    MutexLock lock(&mutex_);
    if (program->infos_at.size() > Program::kMaxSizes) program->infos_at.clear();
    program->infos_at[size] = infos;
    return std::shared_ptr<const Infos>(std::move(infos));
  }

  absl::StatusOr<std::shared_ptr<Program>> MakeProgram(const std::shared_ptr<SessionCore>& session,
                                                       const std::vector<Tensor>& inputs,
                                                       const std::vector<InputKey>& key) {
    for (const CompileOptions::Varying& varying : options_.varying) {
      if (varying.input < 0 || varying.input >= static_cast<int>(inputs.size())) {
        return BadType(absl::StrCat("compiled function: input ", varying.input, " of ",
                                    inputs.size(), " varies"));
      }
    }
    for (const int donated : options_.donate) {
      if (donated < 0 || donated >= static_cast<int>(inputs.size())) {
        return BadType(
            absl::StrCat("compiled function: donates input ", donated, " of ", inputs.size()));
      }
    }
    // With sizes at which nothing that is not linear looks as if it were; never with 1, which
    // stretches, unless there is nothing else.
    std::vector<int64_t> sizes = {options_.max_size};
    if (!options_.varying.empty()) {
      for (const int64_t size : {options_.max_size - 1, options_.max_size / 2 + 1}) {
        if (size >= 1 && size < sizes.back()) sizes.push_back(size);
      }
    }
    std::vector<Traced> traced;
    std::vector<Graph> graphs;
    std::vector<VaryingDim> varying;
    for (const CompileOptions::Varying& v : options_.varying) varying.push_back({v.input, v.dim});
    for (const int64_t size : sizes) {
      std::vector<InputKey> at = key;
      for (size_t i = 0; i < at.size(); ++i) {
        int64_t most = -1;
        CHORUS_ASSIGN_OR_RETURN(
            at[i].info, AtSize(session.get(), static_cast<int>(i), at[i].info, size, &most));
      }
      CHORUS_ASSIGN_OR_RETURN(Traced one, TraceOnce(session, inputs, at));
      graphs.push_back(one.trace.graph);
      traced.push_back(std::move(one));
      CHORUS_RETURN_IF_ERROR(CheckSame(traced.front(), traced.back(), inputs.size()));
    }
    auto program = std::make_shared<Program>();
    program->session = session;
    program->key = key;
    program->results = std::move(traced[0].results);
    program->output_infos = std::make_shared<Infos>(traced[0].output_infos);
    program->output_devices = std::move(traced[0].output_devices);
    program->trace = std::move(traced[0].trace);
    Graph& graph = program->trace.graph;
    CHORUS_ASSIGN_OR_RETURN(graph, UnifyGraphs(graphs, sizes, varying));
    // What is returned as it is has its name and its memory after the run as well.
    for (const Result& result : program->results) {
      if (result.input >= 0) graph.inputs[static_cast<size_t>(result.input)].donatable = false;
    }
    // An output of a donated input's type, at every size, may take its memory over, each at most
    // once.
    const ValueTable last(graphs.back());
    const auto alike = [&](size_t o, size_t i) {
      const GraphOutput& output = graph.outputs[o];
      return key[i].info == (*program->output_infos)[o] &&
             key[i].device_slot == program->output_devices[o] &&
             last.type(output.value) == last.type(static_cast<ValueIndex>(i));
    };
    std::vector<bool> taken(graph.inputs.size(), false);
    for (size_t o = 0; o < graph.outputs.size(); ++o) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (!graph.inputs[i].donatable || taken[i] || !alike(o, i)) continue;
        graph.outputs[o].may_alias = static_cast<int32_t>(i);
        graph.outputs[o].role = InputRole::kState;
        taken[i] = true;
        break;
      }
    }
    for (const Trace::Slot& slot : program->trace.slots) {
      if (slot.groups[0]->member->world != program->trace.slots[0].groups[0]->member->world) {
        return Unsupported("compiled function: its groups belong to different worlds");
      }
    }
    SessionLock lock(session.get());
    CHORUS_RETURN_IF_ERROR(lock.status());
    CHORUS_ASSIGN_OR_RETURN(program->graph, session->Register(EncodeGraph(graph)));
    return program;
  }

  // What the function is with inputs of these types.
  absl::StatusOr<Traced> TraceOnce(const std::shared_ptr<SessionCore>& session,
                                   const std::vector<Tensor>& inputs,
                                   const std::vector<InputKey>& key) {
    Traced traced;
    Trace trace(session);
    std::vector<Tensor> placeholders;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool donated = std::find(options_.donate.begin(), options_.donate.end(),
                                     static_cast<int>(i)) != options_.donate.end();
      auto impl = std::make_shared<TensorImpl>();
      impl->data =
          trace.AddInput(key[i].info, key[i].device_slot,
                         donated ? InputRole::kState : RoleOf(*ImplOf(inputs[i])->data), donated);
      impl->leaf_requires_grad = key[i].requires_grad;
      placeholders.push_back(TensorFrom(std::move(impl)));
    }
    std::vector<Tensor> returned;
    {
      const GradMode mode(true);
      const CallSiteScope own_lines;
      const TraceScope scope(&trace);
      returned = function_(placeholders);
    }
    std::vector<TensorDataPtr> outputs;
    for (size_t i = 0; i < returned.size(); ++i) {
      if (!returned[i].defined()) {
        return BadType(absl::StrCat("compiled function: result ", i, " is an undefined tensor"));
      }
      CHORUS_RETURN_IF_ERROR(returned[i].status());
      const TensorDataPtr& data = ImplOf(returned[i])->data;
      Result result;
      result.info = data->info;
      result.device_slot = data->device_slot;
      const TensorData::State state = data->state.load(std::memory_order_acquire);
      if (state == TensorData::State::kTraced) {
        for (size_t p = 0; p < placeholders.size(); ++p) {
          if (ImplOf(placeholders[p])->data == data) result.input = static_cast<int32_t>(p);
        }
        if (result.input < 0) {
          const auto found = std::find(outputs.begin(), outputs.end(), data);
          result.output = static_cast<int32_t>(found - outputs.begin());
          if (found == outputs.end()) outputs.push_back(data);
        }
      } else if (state != TensorData::State::kAbsent) {
        result.outside = data;
      }
      traced.results.push_back(std::move(result));
    }
    for (const TensorDataPtr& output : outputs) {
      traced.output_infos.push_back(output->info);
      traced.output_devices.push_back(output->device_slot);
    }
    CHORUS_ASSIGN_OR_RETURN(traced.trace, trace.Finish(outputs));
    return traced;
  }

  // Waits while as many calls are under way as may be. Their errors are not its business.
  void Await() {
    while (true) {
      std::pair<std::shared_ptr<SessionCore>, Sequence> oldest;
      {
        MutexLock lock(&mutex_);
        if (under_way_.size() < static_cast<size_t>(std::max(1, options_.max_under_way))) return;
        oldest = std::move(under_way_.front());
        under_way_.pop_front();
      }
      SessionCore* const session = oldest.first.get();
      if (session->Forked()) continue;
      const auto outcome = session->link().Peek(oldest.second);
      // A forgotten outcome is an outcome.
      if (!outcome.ok() || outcome->has_value()) continue;
      session->WaitForRun(oldest.second).IgnoreError();
    }
  }

  // `infos`: of the outputs.
  absl::StatusOr<std::vector<Tensor>> Call(const Program& program,
                                           const std::vector<Tensor>& inputs, const Infos& infos,
                                           const std::string& source) {
    SessionCore* const session = program.session.get();
    Sent sent;
    absl::Status refused;
    std::vector<Sequence> refusals_sent;
    session->Throttle();
    Await();
    {
      SessionLock lock(session);
      CHORUS_RETURN_IF_ERROR(lock.status());
      CHORUS_RETURN_IF_ERROR(OutOfLine(program.trace));
      const Counted counted = CountLocked(program.trace);
      refused = WithSource(SendLocked(program, inputs, infos, counted, &sent), source);
      if (!refused.ok() && !IsLost(refused)) {
        Refusals refusals;
        AddRefused(program.trace, counted, &refusals);
        refusals_sent = SubmitRefusals(&session->log(), std::move(refusals), refused);
      }
    }
    if (!refused.ok()) return AwaitRefused(session, refusals_sent, refused);
    {
      MutexLock lock(&mutex_);
      under_way_.emplace_back(program.session, sent.sequence);
    }
    std::vector<Tensor> results;
    for (const Result& result : program.results) {
      if (result.outside != nullptr) {
        results.push_back(MakeTensor(result.outside));
      } else if (result.input >= 0) {
        results.push_back(MakeTensor(ImplOf(inputs[static_cast<size_t>(result.input)])->data));
      } else if (result.output >= 0) {
        results.push_back(MakeTensor(sent.results[static_cast<size_t>(result.output)]));
      } else {
        auto absent = std::make_shared<TensorData>(program.session);
        absent->device_slot = result.device_slot;
        absent->producer = sent.sequence;
        absent->state.store(TensorData::State::kAbsent, std::memory_order_release);
        results.push_back(MakeTensor(std::move(absent)));
      }
    }
    return results;
  }

  // A run of a program.
  struct Sent {
    TensorDatas results;
    Sequence sequence;
  };

  absl::Status SendLocked(const Program& program, const std::vector<Tensor>& inputs,
                          const Infos& infos, const Counted& counted, Sent* sent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
    SessionCore* const session = program.session.get();
    const Trace::Finished& trace = program.trace;
    RunDraft draft;
    chorus::Run& run = draft.run();
    run.graph = program.graph;
    TensorDatas copies;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const TensorDataPtr& data = ImplOf(inputs[i])->data;
      draft.operands.push_back(data.get());
      if (std::none_of(options_.varying.begin(), options_.varying.end(),
                       [i](const auto& v) { return v.input == static_cast<int>(i); })) {
        continue;
      }
      // The daemon takes the size from it, which bytes alone do not have.
      CHORUS_RETURN_IF_ERROR(session->Name(data.get()));
      if (data->state.load(std::memory_order_relaxed) == TensorData::State::kExternal) {
        CHORUS_ASSIGN_OR_RETURN(TensorDataPtr copy, session->Freeze(*data));
        draft.operands.back() = copy.get();
        copies.push_back(std::move(copy));
      }
    }
    for (const Trace::Capture& capture : trace.captures) {
      draft.operands.push_back(capture.data.get());
    }
    if (!options_.donate.empty()) {
      run.donate.assign(draft.operands.size(), false);
      for (const int donated : options_.donate) {
        const auto place = static_cast<size_t>(donated);
        if (!trace.graph.inputs[place].donatable) continue;
        // Detached tensors, and what autograd keeps, hold the same name.
        run.donate[place] = ImplOf(inputs[place])->data.use_count() == 1;
      }
    }
    // One run is of one epoch. Members that are behind bring the run down with the cause that
    // they have not handed out yet.
    int64_t epoch = 0;
    for (const auto& member : trace.members) {
      const int64_t e = member->epoch.load(std::memory_order_relaxed);
      epoch = epoch == 0 ? e : std::min(epoch, e);
    }
    for (size_t s = 0; s < trace.slots.size(); ++s) {
      const Trace::Slot& slot = trace.slots[s];
      RunGroup group;
      group.world = slot.groups[0]->member->world;
      group.group = slot.groups[0]->id;
      group.epoch = Epoch(epoch);
      group.base = counted.bases[s];
      run.groups.push_back(std::move(group));
      for (GroupCore* g : slot.groups) draft.origins.push_back(OriginOf(g, &session->interner()));
    }
    run.pair_calls = counted.pairs;
    for (size_t o = 0; o < infos.size(); ++o) {
      draft.results.push_back({infos[o], program.output_devices[o], nullptr});
    }
    CHORUS_ASSIGN_OR_RETURN(sent->sequence, session->SubmitRun(&draft, &sent->results));
    for (size_t i = 0; i < run.donate.size(); ++i) {
      if (run.donate[i]) ImplOf(inputs[i])->data->given_to.store(sent->sequence.value());
    }
    return absl::OkStatus();
  }

  // Types of inputs that have a graph at a time: who has ever new ones traces again, and does not
  // fill the daemon.
  static constexpr size_t kMaxPrograms = 256;

  const Function function_;
  const CompileOptions options_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<Program>> programs_ ABSL_GUARDED_BY(mutex_);
  int traces_ ABSL_GUARDED_BY(mutex_) = 0;
  // Calls whose end has not been seen, oldest first.
  std::deque<std::pair<std::shared_ptr<SessionCore>, Sequence>> under_way_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace internal

Compiled Compile(Function function, const CompileOptions& options) {
  return Compiled(std::make_shared<internal::CompiledImpl>(std::move(function), options));
}

absl::StatusOr<std::vector<Tensor>> Compiled::Run(const std::vector<Tensor>& inputs,
                                                  CallSite site) const {
  if (impl_ == nullptr) {
    return MakeError(Reason::kWrongState, "an empty Compiled: make one with Compile");
  }
  return impl_->Run(inputs, site);
}

int Compiled::traces() const { return impl_ == nullptr ? 0 : impl_->traces(); }

}  // namespace chorus
