#include "core/runtime/testing/gang_rig.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/backend/testing/device_rig.h"
#include "core/base/error.h"

namespace chorus {
namespace testing {
namespace {

constexpr absl::Duration kDeadline = absl::Minutes(1);

class ReferenceKernel final : public HostKernel {
 public:
  ReferenceKernel(const NodeView& node, absl::Span<const TensorType> outputs)
      : HostKernel(1, 1, kScratchBytes),
        op_(node.op.data(), node.op.size()),
        attributes_(node.attributes.begin(), node.attributes.end()),
        outputs_(outputs.begin(), outputs.end()) {
    for (const TensorType* type : node.inputs) inputs_.push_back(*type);
  }

  absl::Status Run(const HostBuffers& buffers, int64_t, int64_t) const override {
    // Nothing that runs beside it, and none of its operands, is to be where its scratch is.
    const auto mark = static_cast<char>(++marks_);
    std::fill(buffers.workspace.begin(), buffers.workspace.end(), mark);
    std::vector<Value> values;
    std::vector<const Value*> value_pointers;
    std::vector<const TensorType*> types;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const auto bytes = static_cast<size_t>(inputs_[i].num_bytes());
      values.push_back(
          {inputs_[i], bytes == 0
                           ? std::string()
                           : std::string(static_cast<const char*>(buffers.inputs[i]), bytes)});
    }
    for (size_t i = 0; i < values.size(); ++i) {
      value_pointers.push_back(&values[i]);
      types.push_back(&inputs_[i]);
    }
    NodeView view;
    view.op = op_;
    view.attributes = attributes_;
    view.inputs = types;
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Value> results,
                            EvaluateLocal(view, value_pointers, outputs_));
    for (size_t i = 0; i < results.size(); ++i) {
      if (!results[i].bytes.empty()) {
        std::memcpy(buffers.outputs[i], results[i].bytes.data(), results[i].bytes.size());
      }
    }
    const bool is_whole = std::all_of(buffers.workspace.begin(), buffers.workspace.end(),
                                      [mark](char byte) { return byte == mark; });
    return is_whole ? absl::OkStatus() : absl::InternalError("somebody wrote over its workspace");
  }

 private:
  static constexpr int64_t kScratchBytes = 100;
  static std::atomic<int> marks_;

  const std::string op_;
  const std::vector<Attribute> attributes_;
  std::vector<TensorType> inputs_;
  const std::vector<TensorType> outputs_;
};

std::atomic<int> ReferenceKernel::marks_{0};

[[noreturn]] void Die(absl::string_view what, const absl::Status& status) {
  std::fprintf(stderr, "GangRig: %s: %s\n", std::string(what.data(), what.size()).c_str(),
               status.ToString().c_str());
  std::abort();
}

}  // namespace

HostKernelOrError MakeReferenceKernel(const NodeView& node, absl::Span<const TensorType> outputs) {
  return std::unique_ptr<HostKernel>(new ReferenceKernel(node, outputs));
}

GangRig::GangRig(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {
  for (int d = 0; d < backend_->device_count(); ++d) {
    const auto take = [this, d](absl::string_view bytes) {
      const absl::StatusOr<EventMessage> event = DecodeEvent(bytes);
      if (!event.ok()) Die("event", event.status());
      const bool is_new = absl::visit([&](const auto& of) { return Keep(d, of); }, *event);
      if (!is_new) Die("event", absl::InternalError("one came twice"));
    };
    // Small slices: launches are in parts, and of the devices of a gang some more than others.
    DeviceExecutorOptions options;
    options.slice_steps = d % 2 == 0 ? 2 : 5;
    executors_.push_back(CreateDeviceExecutor(backend_.get(), d, take, std::move(options)));
  }
}

PlanOptions GangRig::Options() const {
  PlanOptions options;
  options.share_results = InOneDomain(*backend_);
  options.workspace_bytes = [this](const NodeView& node, absl::Span<const TensorType> outputs) {
    return backend_->WorkspaceBytes(node, outputs);
  };
  return options;
}

void GangRig::Pump() {
  for (bool more = true; more;) {
    more = false;
    for (const auto& executor : executors_) more |= executor->Continue();
  }
}

GangRig::~GangRig() {
  Pump();
  executors_.clear();
  for (const auto& block : allocated_) backend_->device(block.first)->Free(block.second);
}

// --- Waiting and bytes ---

bool GangRig::Send(int device, const LaunchMessage& message) {
  ByteWriter bytes;
  EncodeLaunch(message, &bytes);
  return executor(device)->Launch(bytes.bytes());
}

CompletionMessage GangRig::CompletionOf(LaunchId launch, bool enqueue) {
  if (enqueue) Pump();
  const absl::Time deadline = absl::Now() + kDeadline;
  MutexLock lock(&mutex_);
  while (true) {
    const auto it = completions_.find(launch);
    if (it != completions_.end()) return it->second;
    if (absl::Now() > deadline) {
      CompletionMessage none;
      none.status =
          absl::DeadlineExceededError(absl::StrCat("launch ", launch.value(), " stands still"));
      return none;
    }
    changed_.WaitFor(&mutex_, absl::Milliseconds(100));
  }
}

absl::Status GangRig::Wait(const Result& result) {
  absl::Status status = result.status;
  if (!status.ok()) return status;
  for (const Result::OnSession& session : result.sessions) {
    for (const LaunchId launch : session.launches) status.Update(WaitFor(launch));
  }
  return status;
}

DeviceAddress GangRig::Allocate(int device, int64_t bytes) {
  const int64_t size = std::max<int64_t>(bytes, 1);
  const absl::StatusOr<DeviceAddress> address = backend_->device(device)->Allocate(size);
  if (!address.ok()) Die("Allocate", address.status());
  allocated_.emplace_back(device, *address);
  const absl::Status status =
      Upload(device, *address, std::string(static_cast<size_t>(size), '\xab'));
  if (!status.ok()) Die("Upload", status);
  return *address;
}

absl::Status GangRig::WaitFor(const EventKey& key) {
  const absl::Time deadline = absl::Now() + kDeadline;
  MutexLock lock(&mutex_);
  while (true) {
    const auto it = told_.find(key);
    if (it != told_.end()) {
      const absl::Status status = it->second;
      told_.erase(it);
      return status;
    }
    // A transfer still refers to its caller's bytes.
    if (absl::Now() > deadline) Die("event", absl::DeadlineExceededError("stands still"));
    changed_.WaitFor(&mutex_, absl::Milliseconds(100));
  }
}

absl::Status GangRig::LoadPlan(int device, PlanId id, const std::string& plan) {
  executor(device)->LoadPlan(id, plan);
  return WaitFor(KeyOf(device, LoadedMessage{id, absl::OkStatus()}));
}

absl::Status GangRig::Upload(int device, DeviceAddress to, const std::string& bytes) {
  const TransferId id = ++last_transfer_;
  executor(device)->Upload(id, lane_, to, bytes.data(), static_cast<int64_t>(bytes.size()));
  Pump();
  return WaitFor(KeyOf(device, TransferredMessage{id, absl::OkStatus()}));
}

std::string GangRig::Download(int device, DeviceAddress from, int64_t bytes, LaunchId after) {
  std::string result(static_cast<size_t>(bytes), '\0');
  const TransferId id = ++last_transfer_;
  executor(device)->Download(id, lane_, &result[0], from, bytes, after);
  Pump();
  const absl::Status status = WaitFor(KeyOf(device, TransferredMessage{id, absl::OkStatus()}));
  if (!status.ok()) Die("Download", status);
  return result;
}

CommunicatorId GangRig::CommunicatorOf(const std::vector<int>& devices) {
  const auto found = communicators_.find({lane_, devices});
  if (found != communicators_.end()) return found->second;
  const CommunicatorId id(communicators_.size() + 1);
  communicators_.emplace(std::make_pair(lane_, devices), id);
  for (size_t member = 0; member < devices.size(); ++member) {
    executor(devices[member])->OpenCommunicator(id, devices, static_cast<int>(member));
    const absl::Status status =
        WaitFor(KeyOf(devices[member], OpenedMessage{id, absl::OkStatus()}));
    if (!status.ok()) Die("OpenCommunicator", status);
  }
  return id;
}

// --- Gangs ---

// A name for the instance of participation `p`, equal on all its members.
std::string GangRig::KeyOf(const Session& session, const VoteTemplate& votes, int32_t p,
                           std::map<std::string, int>* counts) const {
  const Participation& part = votes.participations[static_cast<size_t>(p)];
  const std::string group = absl::StrCat("g", session.groups[static_cast<size_t>(part.group_slot)]);
  switch (part.instance.kind) {
    case InstanceRef::Kind::kBound:
      return session.instances[static_cast<size_t>(part.instance.slot)];
    case InstanceRef::Kind::kGradient:
      return absl::StrCat(keys_.back()[static_cast<size_t>(part.instance.node)], "'",
                          part.instance.request);
    case InstanceRef::Kind::kNext:
      break;
  }
  if (part.peer.value() >= 0) {
    const int32_t source = part.is_recv ? part.peer.value() : part.member.value();
    const int32_t destination = part.is_recv ? part.member.value() : part.peer.value();
    const std::string pair = absl::StrCat(group, " ", source, ">", destination, " t", part.tag);
    const int index = (*counts)[absl::StrCat(pair, part.is_recv ? "r" : "s")]++;
    return absl::StrCat(pair, " ", index);
  }
  return absl::StrCat(group, " ", (*counts)[absl::StrCat(group, " m", part.member.value())]++);
}

// The address of a plan's buffer, found where its bytes stand. Buffers of other ranks first.
DeviceAddress GangRig::Resolve(const std::vector<Session>& sessions, Result* result, int session,
                               int32_t buffer) {
  Result::OnSession& on = result->sessions[static_cast<size_t>(session)];
  DeviceAddress& address = on.addresses[static_cast<size_t>(buffer)];
  if (address != 0) return address;
  const BufferSpec& spec = on.plan.buffers[static_cast<size_t>(buffer)];
  const int device = on.devices[static_cast<size_t>(spec.device_slot)];
  switch (spec.kind) {
    case BufferSpec::Kind::kInput: {
      const Source& source =
          sessions[static_cast<size_t>(session)].inputs[static_cast<size_t>(spec.index)];
      if (source.value.has_value()) {
        address = Allocate(device, spec.bytes);
        const absl::Status status = Upload(device, address, source.value->bytes);
        if (!status.ok()) Die("Upload", status);
      } else {
        const Result::OnSession& from =
            source.result->sessions[static_cast<size_t>(source.session)];
        const Plan::Output& planned = from.plan.outputs[static_cast<size_t>(source.output)];
        address = from.addresses[static_cast<size_t>(planned.buffer)] +
                  static_cast<DeviceAddress>(planned.offset);
      }
      break;
    }
    case BufferSpec::Kind::kShared: {
      const std::string& key = keys_[static_cast<size_t>(session)][static_cast<size_t>(spec.index)];
      DeviceAddress& shared = shared_[key];
      if (shared == 0) shared = Allocate(device, spec.bytes);
      address = shared;
      break;
    }
    case BufferSpec::Kind::kPeer: {
      const std::string& key = keys_[static_cast<size_t>(session)][static_cast<size_t>(spec.index)];
      for (const Part& part : instances_[key].parts) {
        if (part.member != spec.list_member) continue;
        const Plan::Operand& operand =
            result->sessions[static_cast<size_t>(part.session)].plan.operands[static_cast<size_t>(
                part.participation)][static_cast<size_t>(spec.list_index)];
        address = Resolve(sessions, result, part.session, operand.buffer) +
                  static_cast<DeviceAddress>(operand.offset);
      }
      if (address == 0) address = Allocate(device, spec.bytes);  // an absent member
      break;
    }
    case BufferSpec::Kind::kOwned:
    case BufferSpec::Kind::kWorkspace:
      address = Allocate(device, spec.bytes);
      break;
  }
  return address;
}

absl::Status GangRig::PrepareInto(const std::vector<Session>& sessions, Result* result,
                                  std::vector<LaunchMessage>* messages) {
  instances_.clear();
  keys_.clear();
  shared_.clear();
  std::map<int, std::map<int32_t, int>> group_devices;  // group, member -> device
  for (size_t s = 0; s < sessions.size(); ++s) {
    const Session& session = sessions[s];
    Result::OnSession on;
    PlanOptions options = Options();
    options.order = session.order;
    CHORUS_ASSIGN_OR_RETURN(on.plan, CompilePlan(session.graph, options));
    on.devices = session.devices;
    on.addresses.resize(on.plan.buffers.size());
    const ValueTable values(session.graph);
    for (const GraphOutput& output : session.graph.outputs) {
      on.output_types.push_back(values.type(output.value));
    }
    keys_.emplace_back();
    std::map<std::string, int> counts;
    const auto& participations = on.plan.votes->participations;
    for (size_t p = 0; p < participations.size(); ++p) {
      const Participation& part = participations[p];
      keys_.back().push_back(KeyOf(session, *on.plan.votes, static_cast<int32_t>(p), &counts));
      Instance& instance = instances_[keys_.back().back()];
      instance.parts.push_back({static_cast<int>(s), static_cast<int32_t>(p), part.member.value()});
      instance.group = session.groups[static_cast<size_t>(part.group_slot)];
      instance.size = session.graph.group_slots[static_cast<size_t>(part.group_slot)].size;
      if (part.peer.value() >= 0) {
        instance.source = std::min(part.member.value(), part.peer.value());
        instance.destination = std::max(part.member.value(), part.peer.value());
      }
    }
    for (size_t g = 0; g < session.graph.group_slots.size(); ++g) {
      const GroupSlot& slot = session.graph.group_slots[g];
      for (size_t i = 0; i < slot.held.size(); ++i) {
        group_devices[session.groups[g]][slot.held[i].value()] =
            session.devices[static_cast<size_t>(slot.device_slots[i])];
      }
    }
    result->sessions.push_back(std::move(on));
  }
  for (size_t s = 0; s < sessions.size(); ++s) {
    Result::OnSession& on = result->sessions[s];
    for (const Plan::Output& output : on.plan.outputs) {
      if (!donate_ || output.donor < 0) continue;
      for (size_t b = 0; b < on.plan.buffers.size(); ++b) {
        const BufferSpec& spec = on.plan.buffers[b];
        if (spec.kind != BufferSpec::Kind::kInput || spec.index != output.donor) continue;
        on.addresses[static_cast<size_t>(output.buffer)] =
            Resolve(sessions, result, static_cast<int>(s), static_cast<int32_t>(b));
      }
    }
    for (size_t b = 0; b < on.addresses.size(); ++b) {
      Resolve(sessions, result, static_cast<int>(s), static_cast<int32_t>(b));
    }
    for (size_t slot = 0; slot < on.devices.size(); ++slot) {
      LaunchMessage message;
      message.lane = lane_;
      message.plan = ++last_plan_;
      std::string bytes = on.plan.device_plans[slot];
      if (mutate_) {
        CHORUS_ASSIGN_OR_RETURN(DevicePlan decoded, DecodeDevicePlan(bytes));
        mutate_(&decoded);
        bytes = EncodeDevicePlan(decoded);
      }
      CHORUS_RETURN_IF_ERROR(LoadPlan(on.devices[slot], message.plan, bytes));
      message.buffers.assign(on.addresses.begin(), on.addresses.end());
      message.hold_back = donate_;
      for (const Plan::CollectiveSlot& wanted : on.plan.collectives[slot]) {
        LaunchMessage::CollectiveBinding binding;
        if (wanted.equal_work) {  // every session does its own
          message.collectives.push_back(std::move(binding));
          continue;
        }
        std::vector<int> devices;
        if (wanted.participation < 0) {
          devices = {on.devices[static_cast<size_t>(wanted.from_slot)],
                     on.devices[static_cast<size_t>(wanted.to_slot)]};
        } else {
          const Instance& instance =
              instances_[keys_[s][static_cast<size_t>(wanted.participation)]];
          std::vector<int32_t> members;
          if (instance.source >= 0) {
            members = {instance.source, instance.destination};
          } else {
            for (int32_t m = 0; m < instance.size; ++m) members.push_back(m);
          }
          for (size_t m = 0; m < members.size(); ++m) {
            devices.push_back(group_devices[instance.group][members[m]]);
            for (const Part& part : instance.parts) {
              if (part.member == members[m]) binding.present.push_back(static_cast<int32_t>(m));
            }
          }
          if (binding.present.size() == members.size()) binding.present.clear();
        }
        binding.communicator = CommunicatorOf(devices);
        message.collectives.push_back(std::move(binding));
      }
      for (size_t i = 0; i < sessions[s].inputs.size(); ++i) {
        const Source& source = sessions[s].inputs[i];
        if (source.value.has_value() ||
            sessions[s].graph.inputs[i].device_slot != static_cast<int32_t>(slot)) {
          continue;
        }
        const Result::OnSession& from =
            source.result->sessions[static_cast<size_t>(source.session)];
        const Plan::Output& planned = from.plan.outputs[static_cast<size_t>(source.output)];
        message.after.push_back(from.launches[static_cast<size_t>(planned.device_slot)]);
      }
      messages->push_back(std::move(message));
    }
  }
  return absl::OkStatus();
}

std::unique_ptr<GangRig::Result> GangRig::Prepare(const std::vector<Session>& sessions) {
  auto result = std::make_unique<Result>();
  std::vector<LaunchMessage> messages;
  result->status = PrepareInto(sessions, result.get(), &messages);
  if (!result->status.ok()) return result;
  std::vector<size_t> first(sessions.size());
  for (size_t s = 0, m = 0; s < sessions.size(); ++s) {
    first[s] = m;
    m += sessions[s].devices.size();
  }
  for (size_t i = 0; i < sessions.size(); ++i) {
    const size_t s = launch_order_.empty() ? i : static_cast<size_t>(launch_order_[i]);
    Result::OnSession& on = result->sessions[s];
    for (size_t slot = 0; slot < on.devices.size(); ++slot) {
      LaunchMessage& message = messages[first[s] + slot];
      message.launch = NextLaunch();
      on.launches.push_back(message.launch);
      result->messages.emplace_back(on.devices[slot], std::move(message));
    }
  }
  return result;
}

void GangRig::Start(const Result& result) {
  for (const auto& [device, message] : result.messages) Send(device, message);
}

Value GangRig::Output(const Result& result, int session, int output) {
  const Result::OnSession& on = result.sessions[static_cast<size_t>(session)];
  const Plan::Output& planned = on.plan.outputs[static_cast<size_t>(output)];
  const int device = on.devices[static_cast<size_t>(planned.device_slot)];
  const DeviceAddress address = on.addresses[static_cast<size_t>(planned.buffer)] +
                                static_cast<DeviceAddress>(planned.offset);
  return {on.output_types[static_cast<size_t>(output)], Download(device, address, planned.bytes)};
}

std::string GangRig::Differences(const std::vector<Session>& sessions, const Result& result) {
  std::vector<testing::Session> reference;
  for (const Session& session : sessions) {
    testing::Session r;
    r.graph = &session.graph;
    for (const Source& source : session.inputs) {
      r.inputs.push_back(source.value.has_value()
                             ? *source.value
                             : Output(*source.result, source.session, source.output));
    }
    r.groups = session.groups;
    r.instances = session.instances;
    reference.push_back(std::move(r));
  }
  const auto expected = Evaluate(reference);
  if (!expected.ok()) return absl::StrCat("reference: ", expected.status().ToString());
  std::string text;
  for (size_t s = 0; s < sessions.size(); ++s) {
    for (size_t o = 0; o < sessions[s].graph.outputs.size(); ++o) {
      const Value& want = (*expected)[s][static_cast<size_t>(sessions[s].graph.outputs[o].value)];
      const Value got = Output(result, static_cast<int>(s), static_cast<int>(o));
      if (want == got) continue;
      size_t at = 0;
      while (at < want.bytes.size() && want.bytes[at] == got.bytes[at]) ++at;
      absl::StrAppend(&text, "session ", s, " output ", o, " of type ", want.type.ToString(),
                      " differs from byte ", at, " on\n");
    }
  }
  return text;
}

std::string GangRig::Check(const std::vector<Session>& sessions) {
  const std::unique_ptr<Result> result = Launch(sessions);
  const absl::Status status = Wait(*result);
  if (!status.ok()) return status.ToString();
  return Differences(sessions, *result);
}

}  // namespace testing
}  // namespace chorus
