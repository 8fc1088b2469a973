#include "client/internal/program.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/log.h"
#include "client/internal/member.h"
#include "client/internal/tape.h"
#include "client/internal/unify.h"
#include "core/base/error.h"
#include "core/graph/encoding.h"
#include "core/ops/specialize.h"

namespace chorus {
namespace internal {
namespace {

// One call of the function with placeholders.
struct Traced {
  Trace::Finished trace;
  std::vector<ProgramResult> results;
  Infos output_infos;
  std::vector<int32_t> output_devices;
};

bool Travels(const TensorData& data) {
  const TensorData::State state = data.state.load(std::memory_order_acquire);
  return state == TensorData::State::kInline || state == TensorData::State::kHost;
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
      const auto use = std::find(node.inputs.begin(), node.inputs.end(),
                                 static_cast<ValueIndex>(num_inputs + i));
      if (where.empty() && use != node.inputs.end()) {
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
  if (!same) {
    return BadType(
        "a function of a batch whose size varies must be one function, but what it uses or gives "
        "back depends on the size");
  }
  // Where there are more slots in one of them, its graph is another one (UnifyGraphs).
  for (size_t s = 0; s < std::min(a.trace.slots.size(), b.trace.slots.size()); ++s) {
    if (a.trace.slots[s].groups == b.trace.slots[s].groups) continue;
    const auto user =
        std::find_if(a.trace.graph.nodes.begin(), a.trace.graph.nodes.end(), [s](const Node& node) {
          return node.collective.has_value() &&
                 node.collective->group_slot == static_cast<int32_t>(s);
        });
    return BadType(absl::StrCat(
        "a function of a batch whose size varies must be one function, but the group of ", user->op,
        " at ", user->source, " is another one for another size"));
  }
  return absl::OkStatus();
}

// What a function has in an input's place, behind those of the inputs before it: a leaf of its own,
// whose value is `data`; of the same tensor the same one.
void AddPlaceholder(TensorDataPtr data, const InputKey& key, std::vector<Tensor>* placeholders) {
  if (key.same_as >= 0) {
    placeholders->push_back((*placeholders)[static_cast<size_t>(key.same_as)]);
    return;
  }
  auto impl = std::make_shared<TensorImpl>();
  impl->data = std::move(data);
  impl->leaf_requires_grad = key.requires_grad;
  impl->outer_collective = key.from_collective;
  impl->outer_companions = key.has_companions;
  placeholders->push_back(TensorFrom(std::move(impl)));
}

// Calls the function in this thread's trace. What it gives are tensors of that, or of outside.
absl::StatusOr<std::vector<Tensor>> CallInTrace(const Function& function,
                                                const std::vector<Tensor>& inputs,
                                                const std::vector<Tensor>& placeholders) {
  const CallSiteScope own_lines;
  const CallInputs names(inputs, placeholders);
  std::vector<Tensor> returned = function(placeholders);
  for (size_t i = 0; i < returned.size(); ++i) {
    const std::string result = absl::StrCat("compiled function: result ", i);
    if (!returned[i].defined()) return BadType(absl::StrCat(result, " is an undefined tensor"));
    CHORUS_RETURN_IF_ERROR(returned[i].status());
    CHORUS_RETURN_IF_ERROR(CheckTrace(result, *ImplOf(returned[i])->data, IdOf(Trace::Current())));
  }
  return returned;
}

// What the function is with inputs of these types.
absl::StatusOr<Traced> TraceOnce(const Function& function, const CompileOptions& options,
                                 const std::shared_ptr<SessionCore>& session,
                                 const std::vector<Tensor>& inputs,
                                 const std::vector<InputKey>& key) {
  Traced traced;
  Trace trace(session, !options.varying.empty());
  std::vector<Tensor> placeholders;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool donated = std::find(options.donate.begin(), options.donate.end(),
                                   static_cast<int>(i)) != options.donate.end();
    const InputRole role = donated ? InputRole::kState : RoleOf(*ImplOf(inputs[i])->data);
    AddPlaceholder(trace.AddInput(key[i].info, key[i].device_slot, role, donated), key[i],
                   &placeholders);
  }
  std::vector<Tensor> returned;
  {
    const TraceScope scope(&trace);
    CHORUS_ASSIGN_OR_RETURN(returned, CallInTrace(function, inputs, placeholders));
  }
  std::vector<TensorDataPtr> outputs;
  for (const Tensor& tensor : returned) {
    const TensorDataPtr& data = ImplOf(tensor)->data;
    ProgramResult result;
    result.info = data->info;
    result.device_slot = data->device_slot;
    const TensorData::State state = data->state.load(std::memory_order_acquire);
    if (state == TensorData::State::kTraced) {
      for (size_t p = 0; p < placeholders.size() && result.input < 0; ++p) {
        if (ImplOf(placeholders[p])->data == data) result.input = static_cast<int32_t>(p);
      }
      if (result.input < 0) {
        const auto position = std::find(outputs.begin(), outputs.end(), data);
        result.output = static_cast<int32_t>(position - outputs.begin());
        if (position == outputs.end()) outputs.push_back(data);
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

}  // namespace

std::vector<InputKey> KeysOf(absl::Span<const Tensor> inputs) {
  std::vector<InputKey> keys;
  keys.reserve(inputs.size());
  for (const Tensor& input : inputs) {
    const TensorData& data = *ImplOf(input)->data;
    const Leads leads = LeadsOf({input});
    keys.push_back({data.info, data.device_slot, input.requires_grad(), leads.to_collective,
                    leads.to_companions});
  }
  // Of few to compare each with all before it takes less than a table.
  constexpr size_t kFew = 16;
  if (inputs.size() <= kFew) {
    for (size_t i = 1; i < inputs.size(); ++i) {
      for (size_t first = 0; first < i && keys[i].same_as < 0; ++first) {
        if (ImplOf(inputs[first]) == ImplOf(inputs[i]))
          keys[i].same_as = static_cast<int32_t>(first);
      }
    }
    return keys;
  }
  absl::flat_hash_map<const TensorImpl*, int32_t> first_of;
  first_of.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto added = first_of.try_emplace(ImplOf(inputs[i]).get(), static_cast<int32_t>(i));
    if (!added.second) keys[i].same_as = added.first->second;
  }
  return keys;
}

Program::~Program() {
  if (graph == GraphId()) return;
  session->releases().Add({graph}, /*of_calls=*/false);
  session->releases().DrainIfUrgent();
}

bool Program::IsThere() {
  // (Which device was lost is not told.)
  if (!trace.uploads.empty() && session->losses() != losses_before) return false;
  if (commands_are_over.load(std::memory_order_relaxed)) return true;
  for (const Sequence command : commands) {
    const absl::optional<bool> well = WentWell(&session->link(), command);
    if (!well.has_value()) return true;
    if (!*well) return false;
  }
  commands_are_over.store(true, std::memory_order_relaxed);
  return true;
}

bool IsCurrent(const Trace::Finished& trace) {
  for (const Trace::Slot& slot : trace.slots) {
    for (size_t i = 0; i < slot.groups.size(); ++i) {
      if (slot.groups[i]->generation.load(std::memory_order_relaxed) != slot.generations[i]) {
        return false;
      }
    }
  }
  return true;
}

absl::StatusOr<TensorInfoPtr> AtSize(SessionCore* session, const CompileOptions& options, int i,
                                     const TensorInfoPtr& info, int64_t size,
                                     int64_t* actual_size) {
  TensorType type;
  for (const CompileOptions::Varying& varying : options.varying) {
    if (varying.input != i) continue;
    if (varying.dim < 0 || varying.dim >= static_cast<int>(info->shape.size())) {
      return BadType(absl::StrCat("compiled function: dimension ", varying.dim, " of input ", i,
                                  " varies, got ", info->type.ToString()));
    }
    if (type.dims.empty()) type = info->type;
    const int64_t actual = info->shape[static_cast<size_t>(varying.dim)];
    if (*actual_size < 0) *actual_size = actual;
    if (actual != *actual_size || actual < 1 || actual > options.max_size) {
      return BadType(
          absl::StrCat("compiled function: expected one size from 1 to ", options.max_size,
                       " in all inputs that vary, got ", actual,
                       actual != *actual_size ? absl::StrCat(" after ", *actual_size) : ""));
    }
    type.dims[static_cast<size_t>(varying.dim)] = Dim(size);
  }
  if (type.dims.empty()) return info;
  SessionLock lock(session);
  CHORUS_RETURN_IF_ERROR(lock.status());
  return session->interner().Type(type);
}

absl::Status CheckInput(const Tensor& input) {
  if (!input.defined() || input.absent()) {
    return BadType("compiled function: expected tensors, got an undefined or absent one");
  }
  CHORUS_RETURN_IF_ERROR(input.status());
  return CheckTrace("compiled function", *ImplOf(input)->data, IdOf(Trace::Current()));
}

absl::StatusOr<std::vector<Tensor>> CallInside(const Function& function,
                                               const std::vector<Tensor>& inputs) {
  std::vector<Tensor> placeholders;
  const std::vector<InputKey> keys = KeysOf(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    AddPlaceholder(ImplOf(inputs[i])->data, keys[i], &placeholders);
  }
  CHORUS_ASSIGN_OR_RETURN(std::vector<Tensor> results, CallInTrace(function, inputs, placeholders));
  for (Tensor& result : results) result = result.Detach();
  return results;
}

absl::StatusOr<std::shared_ptr<Program>> MakeProgram(const Function& function,
                                                     const CompileOptions& options,
                                                     const std::shared_ptr<SessionCore>& session,
                                                     const std::vector<Tensor>& inputs,
                                                     const ProgramKey& key) {
  for (const CompileOptions::Varying& varying : options.varying) {
    if (varying.input < 0 || varying.input >= static_cast<int>(inputs.size())) {
      return BadType(absl::StrCat("compiled function: input ", varying.input, " of ", inputs.size(),
                                  " varies"));
    }
  }
  for (const int donated : options.donate) {
    if (donated < 0 || donated >= static_cast<int>(inputs.size())) {
      return BadType(
          absl::StrCat("compiled function: donates input ", donated, " of ", inputs.size()));
    }
  }
  // The two largest sizes make the rules, and a small one checks them, where there is a third: no
  // product of sizes is linear at three, and what is cut off or rounded at some size is not what
  // its rule says far below. Never with 1, which stretches, unless there is nothing else.
  constexpr size_t kSizes = 3;
  std::vector<int64_t> sizes = {options.max_size};
  if (!options.varying.empty()) {
    for (const int64_t size : {options.max_size - 1, int64_t{2}, int64_t{1}}) {
      if (size >= 1 && size < sizes.back() && sizes.size() < kSizes) sizes.push_back(size);
    }
  }
  const int64_t losses_before = session->losses();
  std::vector<Traced> traced;
  std::vector<Graph> graphs;
  std::vector<VaryingDim> varying;
  for (const CompileOptions::Varying& v : options.varying) varying.push_back({v.input, v.dim});
  for (const int64_t size : sizes) {
    std::vector<InputKey> at = key.inputs;
    for (size_t i = 0; i < at.size(); ++i) {
      int64_t most = -1;
      CHORUS_ASSIGN_OR_RETURN(
          at[i].info, AtSize(session.get(), options, static_cast<int>(i), at[i].info, size, &most));
    }
    CHORUS_ASSIGN_OR_RETURN(Traced one, TraceOnce(function, options, session, inputs, at));
    graphs.push_back(one.trace.graph);
    traced.push_back(std::move(one));
    CHORUS_RETURN_IF_ERROR(CheckSame(traced.front(), traced.back(), inputs.size()));
  }
  auto program = std::make_shared<Program>();
  program->session = session;
  program->key = key;
  program->losses_before = losses_before;
  program->results = std::move(traced[0].results);
  program->output_infos = std::make_shared<Infos>(traced[0].output_infos);
  program->output_devices = std::move(traced[0].output_devices);
  program->trace = std::move(traced[0].trace);
  Graph& graph = program->trace.graph;
  CHORUS_ASSIGN_OR_RETURN(graph, UnifyGraphs(graphs, sizes, varying));
  // What is returned as it is has its name and its memory after the run as well.
  for (const ProgramResult& result : program->results) {
    if (result.input >= 0) graph.inputs[static_cast<size_t>(result.input)].donatable = false;
  }
  // An output of a donated input's type, at every size, may take its memory over, each at most
  // once.
  const ValueTable last(graphs.back());
  const auto alike = [&](size_t o, size_t i) {
    const GraphOutput& output = graph.outputs[o];
    return key.inputs[i].info == (*program->output_infos)[o] &&
           key.inputs[i].device_slot == program->output_devices[o] &&
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
  CHORUS_ASSIGN_OR_RETURN(const Graphs::Registered registered,
                          session->graphs().Register(EncodeGraph(graph)));
  program->graph = registered.graph;
  program->commands = program->trace.uploads;
  program->commands.push_back(registered.command);
  return program;
}

absl::StatusOr<std::shared_ptr<const Infos>> OutputInfosAt(const Program& program, int64_t size) {
  CHORUS_ASSIGN_OR_RETURN(const Graph graph, Specialize(program.trace.graph, {size}));
  const ValueTable values(graph);
  auto infos = std::make_shared<Infos>();
  SessionLock lock(program.session.get());
  CHORUS_RETURN_IF_ERROR(lock.status());
  Interner& interner = program.session->interner();
  for (const GraphOutput& output : graph.outputs) {
    infos->push_back(interner.Type(values.type(output.value)));
  }
  return std::shared_ptr<const Infos>(std::move(infos));
}

}  // namespace internal
}  // namespace chorus
