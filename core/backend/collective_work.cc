#include "core/backend/collective_work.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

constexpr int64_t kCacheLine = 64;

bool Reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}

bool Rooted(CollectiveKind kind) {
  return kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv;
}

std::string Name(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return "all_reduce";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kReduce:
      return "reduce";
    case CollectiveKind::kAllGather:
      return "all_gather";
    case CollectiveKind::kReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::kSend:
      return "send";
    case CollectiveKind::kRecv:
      return "recv";
    case CollectiveKind::kBarrier:
      return "barrier";
    default:
      return absl::StrCat("collective kind ", static_cast<int>(kind));
  }
}

// How many operands a member must pass. A member whose operands nobody reads may pass any number.
absl::Status CheckOperands(const CollectiveCall& call, int size, int member) {
  int64_t inputs = 1;
  int64_t outputs = 1;
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
      break;
    case CollectiveKind::kBroadcast:
      inputs = member == call.root ? 1 : -1;
      break;
    case CollectiveKind::kReduce:
      outputs = member == call.root ? 1 : -1;
      break;
    case CollectiveKind::kAllGather:
      outputs = size;
      break;
    case CollectiveKind::kReduceScatter:
      inputs = size;
      break;
    case CollectiveKind::kSend:
      outputs = 0;
      break;
    case CollectiveKind::kRecv:
      inputs = 0;
      break;
    default:
      inputs = outputs = 0;
  }
  const auto wrong = [](int64_t expected, size_t got) {
    return expected >= 0 && static_cast<size_t>(expected) != got;
  };
  const auto refuse = [&](const char* what, int64_t expected, size_t got) {
    return BadType(absl::StrCat(Name(call.kind), " of ", size, " members: member ", member,
                                " passes ", got, " ", what, ", expected ", expected));
  };
  if (wrong(inputs, call.inputs.size())) return refuse("inputs", inputs, call.inputs.size());
  if (wrong(outputs, call.outputs.size())) return refuse("outputs", outputs, call.outputs.size());
  if (inputs > 0 && call.count > 0) {
    for (const DeviceAddress address : call.inputs) {
      if (address == 0) {
        return BadType(absl::StrCat(Name(call.kind), ": member ", member,
                                    " passes an input without memory for ", call.count,
                                    " elements"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCall(const CollectiveCall& call, int size, int member) {
  const CollectiveKind kind = call.kind;
  switch (kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kReduce:
    case CollectiveKind::kAllGather:
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
    case CollectiveKind::kBarrier:
      break;
    default:
      return Unsupported(absl::StrCat(Name(kind), " is not run by this backend"));
  }
  if (!call.input_counts.empty() || !call.output_counts.empty()) {
    return Unsupported(absl::StrCat(Name(kind), " of uneven pieces is not run by this backend"));
  }
  if (call.factor != 0 || !call.holders.empty() || !call.factors.empty()) {
    return Unsupported(
        absl::StrCat(Name(kind), " with a factor, holders or factors is not run by this backend"));
  }
  if (call.count < 0) {
    return BadType(absl::StrCat(Name(kind), ": count ", call.count, " is negative"));
  }
  if (Reduces(kind) && FindReduction(call.reduction, call.dtype) == nullptr) {
    return Unsupported(absl::StrCat(
        Name(kind), " with reduction ", static_cast<int>(call.reduction), " of dtype ",
        static_cast<int>(call.dtype), " is not run by this backend; SUM of f32, f64 and i64 is"));
  }
  if (kind != CollectiveKind::kBarrier && DTypeBytes(call.dtype) == 0) {
    return BadType(absl::StrCat(Name(kind), ": unknown dtype ", static_cast<int>(call.dtype)));
  }
  if (Rooted(kind) && (call.root < 0 || call.root >= size)) {
    return BadType(
        absl::StrCat(Name(kind), ": root or peer ", call.root, " is no member of 0..", size - 1));
  }
  if ((kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv) && call.root == member) {
    return BadType(absl::StrCat(Name(kind), ": member ", member, " names itself as its peer"));
  }
  if (!call.present.empty()) {
    bool self = false;
    int32_t previous = -1;
    for (const int32_t m : call.present) {
      if (m <= previous || m >= size) {
        return BadType(absl::StrCat(Name(kind), ": present members must ascend within 0..",
                                    size - 1, ", got ", m, " after ", previous));
      }
      previous = m;
      self = self || m == member;
    }
    if (!self) {
      return BadType(absl::StrCat(Name(kind), ": member ", member,
                                  " enqueues a call in which it does not take part"));
    }
  }
  return CheckOperands(call, size, member);
}

absl::Status CollectiveWork::Resolve(const Operands& member, DeviceAddress address,
                                     void** pointer) const {
  if (space_ == nullptr) {
    *pointer = reinterpret_cast<void*>(address);
    return absl::OkStatus();
  }
  return space_->Resolve(member.device, address, count_ * element_bytes_, pointer);
}

void CollectiveWork::BeginMove() {
  move_ = Move();
  move_.first_input = static_cast<int32_t>(inputs_.size());
  move_.first_output = static_cast<int32_t>(outputs_.size());
}

absl::Status CollectiveWork::AddInput(const Operands& member, DeviceAddress address) {
  void* pointer = nullptr;
  CHORUS_RETURN_IF_ERROR(Resolve(member, address, &pointer));
  inputs_.push_back(pointer);
  return absl::OkStatus();
}

absl::Status CollectiveWork::AddOutput(const Operands& member, DeviceAddress address) {
  if (address == 0) return absl::OkStatus();
  void* pointer = nullptr;
  CHORUS_RETURN_IF_ERROR(Resolve(member, address, &pointer));
  outputs_.push_back(pointer);
  return absl::OkStatus();
}

void CollectiveWork::EndMove() {
  const auto first = outputs_.begin() + move_.first_output;
  // Most often there is one result that all members share.
  if (std::adjacent_find(first, outputs_.end(), std::not_equal_to<void*>()) == outputs_.end()) {
    if (first != outputs_.end()) outputs_.erase(first + 1, outputs_.end());
  } else {
    std::sort(first, outputs_.end());
    outputs_.erase(std::unique(first, outputs_.end()), outputs_.end());
  }
  move_.num_inputs = static_cast<int32_t>(inputs_.size()) - move_.first_input;
  move_.num_outputs = static_cast<int32_t>(outputs_.size()) - move_.first_output;
  const bool in_place =
      move_.num_inputs == 1 && move_.num_outputs == 1 && inputs_.back() == outputs_.back();
  if (move_.num_outputs == 0 || in_place) {
    inputs_.resize(move_.first_input);
    outputs_.resize(move_.first_output);
    return;
  }
  moves_.push_back(move_);
  traffic_bytes_ += (int64_t{move_.num_inputs} + move_.num_outputs) * count_ * element_bytes_;
}

absl::Status CollectiveWork::Prepare(const CollectiveCall& call, absl::Span<const Operands> members,
                                     const AddressSpace* space) {
  moves_.clear();
  inputs_.clear();
  outputs_.clear();
  space_ = space;
  traffic_bytes_ = 0;
  count_ = call.count;
  if (count_ == 0 || call.kind == CollectiveKind::kBarrier) return absl::OkStatus();
  element_bytes_ = DTypeBytes(call.dtype);
  reduce_ = Reduces(call.kind) ? FindReduction(call.reduction, call.dtype) : nullptr;
  const int size = static_cast<int>(members.size());

  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
      BeginMove();
      for (int m = 0; m < size; ++m) {
        const Operands& member = members[m];
        if (!member.present) continue;
        CHORUS_RETURN_IF_ERROR(AddInput(member, (*member.inputs)[0]));
        if (call.kind == CollectiveKind::kAllReduce || m == call.root) {
          CHORUS_RETURN_IF_ERROR(AddOutput(member, (*member.outputs)[0]));
        }
      }
      EndMove();
      break;
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv: {
      BeginMove();
      const Operands& root = members[call.root];
      if (root.present) CHORUS_RETURN_IF_ERROR(AddInput(root, (*root.inputs)[0]));
      for (const Operands& member : members) {
        if (!member.present || member.outputs->empty()) continue;
        CHORUS_RETURN_IF_ERROR(AddOutput(member, (*member.outputs)[0]));
      }
      EndMove();
      break;
    }
    case CollectiveKind::kAllGather:
      for (int from = 0; from < size; ++from) {
        BeginMove();
        if (members[from].present) {
          CHORUS_RETURN_IF_ERROR(AddInput(members[from], (*members[from].inputs)[0]));
        }
        for (const Operands& member : members) {
          if (member.present) CHORUS_RETURN_IF_ERROR(AddOutput(member, (*member.outputs)[from]));
        }
        EndMove();
      }
      break;
    case CollectiveKind::kReduceScatter:
      for (int to = 0; to < size; ++to) {
        if (!members[to].present) continue;
        BeginMove();
        for (const Operands& member : members) {
          if (member.present) CHORUS_RETURN_IF_ERROR(AddInput(member, (*member.inputs)[to]));
        }
        CHORUS_RETURN_IF_ERROR(AddOutput(members[to], (*members[to].outputs)[0]));
        EndMove();
      }
      break;
    default:
      break;
  }
  return absl::OkStatus();
}

namespace {

int64_t ElementsOfChunk(int64_t chunk_bytes, int64_t element_bytes) {
  const int64_t lines = std::max<int64_t>(1, chunk_bytes / kCacheLine);
  return std::max<int64_t>(1, lines * kCacheLine / element_bytes);
}

}  // namespace

int64_t CollectiveWork::ChunkBytes(int64_t traffic_bytes) const {
  int64_t operands = 1;
  for (const Move& move : moves_) {
    operands = std::max<int64_t>(operands, int64_t{move.num_inputs} + move.num_outputs);
  }
  return std::max<int64_t>(kCacheLine, traffic_bytes / operands / kCacheLine * kCacheLine);
}

int64_t CollectiveWork::num_chunks(int64_t chunk_bytes) const {
  if (moves_.empty()) return 0;
  const int64_t elements = ElementsOfChunk(chunk_bytes, element_bytes_);
  return static_cast<int64_t>(moves_.size()) * ((count_ + elements - 1) / elements);
}

void CollectiveWork::RunChunk(int64_t chunk, int64_t chunk_bytes, bool streaming) const {
  const int64_t elements = ElementsOfChunk(chunk_bytes, element_bytes_);
  const int64_t per_move = (count_ + elements - 1) / elements;
  const Move& move = moves_[chunk / per_move];
  const int64_t begin = chunk % per_move * elements;
  const int64_t end = std::min(count_, begin + elements);
  const int64_t offset = begin * element_bytes_;
  const int64_t bytes = (end - begin) * element_bytes_;
  void* const* outputs = outputs_.data() + move.first_output;
  const void* const* inputs = inputs_.data() + move.first_input;
  const auto at = [offset](const void* base) { return static_cast<const char*>(base) + offset; };
  const auto to = [offset](void* base) { return static_cast<char*>(base) + offset; };

  int copied_from = -1;  // the output that already holds the result
  if (move.num_inputs > 1) {
    // Further outputs are copied from the first, which therefore stays in the caches.
    reduce_(inputs, move.num_inputs, outputs[0], begin, end, streaming && move.num_outputs == 1);
    copied_from = 0;
  }
  for (int i = 0; i < move.num_outputs; ++i) {
    if (i == copied_from) continue;
    if (move.num_inputs == 0) {
      std::memset(to(outputs[i]), 0, bytes);
    } else {
      CopyBytes(to(outputs[i]), copied_from < 0 ? at(inputs[0]) : at(outputs[copied_from]), bytes,
                streaming);
    }
  }
}

}  // namespace chorus
