#include "core/backend/collective_work.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/node_spec.h"

namespace chorus {
namespace {

constexpr int64_t kCacheLine = 64;

// Of one piece, so that sums of their sizes stay within 64 bits: all that a graph can ask for.
constexpr int64_t kMaxPieceBytes = kMaxValueBytes;
// Elements whose results and holders are computed before any of the results is written.
constexpr int64_t kHoldersBlock = 1024;

int64_t CountOf(const CollectiveCall& call, const std::vector<int64_t>& counts, size_t index) {
  return counts.empty() ? call.count : counts[index];
}

// How many operands a member must pass. -1: nobody reads them, any number will do.
struct NumOperands {
  int64_t inputs = 1;
  int64_t outputs = 1;
};
int64_t ListedOperands(Pieces pieces, int size, bool root) {
  return AtRoot(pieces) && !root ? -1 : PiecesOn(pieces, size, root);
}

NumOperands OperandsOf(const CollectiveCall& call, int size, int member) {
  const CollectiveFacts& facts = FactsOf(call.kind);
  const bool root = member == call.root;
  NumOperands operands{ListedOperands(facts.in, size, root), ListedOperands(facts.out, size, root)};
  if (call.runtime.has_value()) {
    operands.inputs = std::min<int64_t>(operands.inputs, 1);
    operands.outputs = std::min<int64_t>(operands.outputs, 1);
  }
  return operands;
}

absl::Status CheckOperandList(const CollectiveCall& call, int size, int member, const char* what,
                              int64_t expected, const std::vector<DeviceAddress>& list,
                              const std::vector<int64_t>& counts) {
  const auto name = [&] { return CollectiveKindName(call.kind); };
  if (expected >= 0 && static_cast<size_t>(expected) != list.size()) {
    return BadType(absl::StrCat(name(), " of ", size, " members: member ", member, " passes ",
                                list.size(), " ", what, "s, expected ", expected));
  }
  if (!counts.empty() && counts.size() != list.size()) {
    return BadType(absl::StrCat(name(), ": member ", member, " passes ", counts.size(),
                                " counts for ", list.size(), " ", what, "s"));
  }
  const int64_t bytes = DTypeBytes(call.dtype);
  const auto fits = [bytes](int64_t count) {
    return count >= 0 && count <= kMaxPieceBytes && count * bytes <= kMaxPieceBytes;
  };
  const auto wrong = std::find_if_not(counts.begin(), counts.end(), fits);
  if (wrong == counts.end() && (!counts.empty() || list.empty() || fits(call.count))) {
    return absl::OkStatus();
  }
  return BadType(absl::StrCat(name(), ": member ", member, " passes an ", what, " of ",
                              wrong == counts.end() ? call.count : *wrong,
                              " elements, expected 0 to ",
                              kMaxPieceBytes / std::max<int64_t>(1, bytes)));
}

absl::Status CheckOperands(const CollectiveCall& call, int size, int member) {
  const NumOperands expected = OperandsOf(call, size, member);
  CHORUS_RETURN_IF_ERROR(CheckOperandList(call, size, member, "input", expected.inputs, call.inputs,
                                          call.input_counts));
  CHORUS_RETURN_IF_ERROR(CheckOperandList(call, size, member, "output", expected.outputs,
                                          call.outputs, call.output_counts));
  for (size_t i = 0; expected.inputs > 0 && i < call.inputs.size(); ++i) {
    if (call.inputs[i] != 0) continue;
    const int64_t count = call.runtime.has_value()
                              ? call.runtime->input_rows * call.runtime->row_elements
                              : CountOf(call, call.input_counts, i);
    if (count > 0) {
      return BadType(absl::StrCat(CollectiveKindName(call.kind), ": member ", member,
                                  " passes input ", i, " without memory for ", count, " elements"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRuntime(const CollectiveCall& call, int member) {
  const CollectiveCall::RuntimeCounts& runtime = *call.runtime;
  const auto refuse = [&](absl::string_view what) {
    return BadType(absl::StrCat(CollectiveKindName(call.kind), " with runtime counts: member ",
                                member, " passes ", what));
  };
  if (!MayBeUneven(call.kind)) return refuse("them to a kind that has no pieces");
  if (!call.input_counts.empty() || !call.output_counts.empty()) return refuse("others as well");
  const bool sends = AnyOn(FactsOf(call.kind).in, call.root == member);
  if (sends && runtime.sends == 0) return refuse("no rows to send");
  const int64_t row_bytes = DTypeBytes(call.dtype);
  const bool row_fits = runtime.row_elements >= 0 && runtime.row_elements <= kMaxPieceBytes &&
                        runtime.row_elements * row_bytes <= kMaxPieceBytes;
  const int64_t most =
      row_fits ? kMaxPieceBytes / std::max<int64_t>(1, runtime.row_elements * row_bytes) : 0;
  for (const int64_t rows : {runtime.input_rows, runtime.output_rows}) {
    if (row_fits && rows >= 0 && rows <= most) continue;
    return refuse(absl::StrCat(rows, " rows of ", runtime.row_elements, " elements"));
  }
  return absl::OkStatus();
}

absl::Status CheckReduction(const CollectiveCall& call) {
  if (FindReduction(call.reduction, call.dtype) != nullptr) return absl::OkStatus();
  const std::string what =
      absl::StrCat(CollectiveKindName(call.kind), " with reduction ", ReductionName(call.reduction),
                   " of dtype ", DTypeName(call.dtype));
  const bool supports_dtype = FindReduction(Reduction::kSum, call.dtype) != nullptr;
  switch (call.reduction) {
    case Reduction::kAvg:
    case Reduction::kPremulSum:
      if (!supports_dtype) break;
      return BadType(absl::StrCat(what, ", expected a floating dtype"));
    case Reduction::kBand:
    case Reduction::kBor:
    case Reduction::kBxor:
      if (!supports_dtype) break;
      return BadType(absl::StrCat(what, ", expected an integer dtype or bool"));
    default:
      break;
  }
  return Unsupported(absl::StrCat(what, " is not run by this backend"));
}

// What only some reductions have.
absl::Status CheckExtras(const CollectiveCall& call, int size, int member) {
  const bool reduces = IsReducing(call.kind);
  const auto refuse = [&](absl::string_view what) {
    return BadType(absl::StrCat(CollectiveKindName(call.kind), " with reduction ",
                                ReductionName(call.reduction), " of dtype ", DTypeName(call.dtype),
                                ": member ", member, " passes ", what));
  };
  const bool scaled = reduces && call.reduction == Reduction::kPremulSum;
  if (scaled != (call.factor != 0)) return refuse(scaled ? "no factor" : "a factor");
  if (!call.holders.empty()) {
    const bool has = reduces && IsFloating(call.dtype) &&
                     (call.reduction == Reduction::kMin || call.reduction == Reduction::kMax);
    if (!has || call.holders.size() != call.inputs.size()) {
      return refuse(
          absl::StrCat(call.holders.size(), " holders, expected ", has ? call.inputs.size() : 0));
    }
  }
  if (!call.factors.empty()) {
    const bool has = reduces && call.reduction == Reduction::kProduct &&
                     AnyOn(FactsOf(call.kind).out, call.root == member);
    if (!has || call.factors.size() != static_cast<size_t>(size)) {
      return refuse(absl::StrCat(call.factors.size(), " factors, expected ", has ? size : 0));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCall(const CollectiveCall& call, int size, int member) {
  const CollectiveKind kind = call.kind;
  const auto name = [kind] { return CollectiveKindName(kind); };
  if (!IsCollectiveKind(kind)) {
    return Unsupported(
        absl::StrCat("collective kind ", static_cast<int>(kind), " is not run by this backend"));
  }
  if (!OnlyOrders(kind) && DTypeBytes(call.dtype) == 0) {
    return BadType(absl::StrCat(name(), ": unknown dtype ", static_cast<int>(call.dtype)));
  }
  if (IsReducing(kind)) CHORUS_RETURN_IF_ERROR(CheckReduction(call));
  if ((HasRoot(kind) || HasPeer(kind)) && (call.root < 0 || call.root >= size)) {
    return BadType(
        absl::StrCat(name(), ": root or peer ", call.root, " is no member of 0..", size - 1));
  }
  if (HasPeer(kind) && call.root == member) {
    return BadType(absl::StrCat(name(), ": member ", member, " names itself as its peer"));
  }
  if (!call.present.empty()) {
    bool self = false;
    int32_t previous = -1;
    for (const int32_t m : call.present) {
      if (m <= previous || m >= size) {
        return BadType(absl::StrCat(name(), ": present members must ascend within 0..", size - 1,
                                    ", got ", m, " after ", previous));
      }
      previous = m;
      self = self || m == member;
    }
    if (!self) {
      return BadType(absl::StrCat(name(), ": member ", member,
                                  " enqueues a call in which it does not take part"));
    }
    if (IsReducing(kind) && !ZeroIsNeutral(call.reduction) &&
        call.present.size() < static_cast<size_t>(size)) {
      return BadType(absl::StrCat(name(), " with reduction ", ReductionName(call.reduction),
                                  " takes all ", size, " members, got ", call.present.size()));
    }
  }
  if (call.runtime.has_value()) CHORUS_RETURN_IF_ERROR(CheckRuntime(call, member));
  CHORUS_RETURN_IF_ERROR(CheckOperands(call, size, member));
  return CheckExtras(call, size, member);
}

absl::Status AddressSpace::Read(int device, DeviceAddress from, int64_t bytes, void* to) const {
  void* pointer = nullptr;
  CHORUS_RETURN_IF_ERROR(Resolve(device, from, bytes, &pointer));
  std::memcpy(to, pointer, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status AddressSpace::Write(int device, DeviceAddress to, int64_t bytes,
                                 const void* from) const {
  void* pointer = nullptr;
  CHORUS_RETURN_IF_ERROR(Resolve(device, to, bytes, &pointer));
  std::memcpy(pointer, from, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status CollectiveWork::Read(const Member& member, DeviceAddress from, int64_t bytes,
                                  void* to) const {
  if (space_ != nullptr) return space_->Read(member.device, from, bytes, to);
  std::memcpy(to, reinterpret_cast<const void*>(from), static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status CollectiveWork::Resolve(const Member& member, DeviceAddress address, int64_t bytes,
                                     void** pointer) const {
  if (space_ == nullptr) {
    *pointer = reinterpret_cast<void*>(address);
    return absl::OkStatus();
  }
  return space_->Resolve(member.device, address, bytes, pointer);
}

void CollectiveWork::BeginMove() {
  move_ = Move();
  move_.element_bytes = element_bytes_;
  first_ = Operand();
  move_.first_input = static_cast<int32_t>(inputs_.size());
  move_.first_output = static_cast<int32_t>(outputs_.size());
  move_.first_factor = static_cast<int32_t>(factors_.size());
}

absl::Status CollectiveWork::Disagree(const Operand& operand, int64_t count) const {
  const auto name = [](const Operand& o) {
    return absl::StrCat("member ", o.member, "'s ", o.list, " ", o.index);
  };
  return MakeError(Reason::kInternal,
                   absl::StrCat(CollectiveKindName(common_.kind), ": ", name(operand), " has ",
                                count, " elements, ", name(first_), " has ", move_.count));
}

CollectiveWork::Slice CollectiveWork::SliceOf(const RuntimePieces::Rows& rows,
                                              const CollectiveCall::RuntimeCounts& runtime,
                                              const std::vector<DeviceAddress>& operands) const {
  Slice slice;
  slice.first = rows.first * runtime.row_elements;
  slice.count = rows.count * runtime.row_elements;
  if (operands[0] != 0) slice.address = operands[0] + slice.first * element_bytes_;
  return slice;
}

CollectiveWork::Slice CollectiveWork::InputOf(const CollectiveCall& call, int member,
                                              size_t index) const {
  if (!common_.runtime) return {call.inputs[index], CountOf(call, call.input_counts, index), 0};
  return SliceOf(pieces_.Input(member, index), *call.runtime, call.inputs);
}

CollectiveWork::Slice CollectiveWork::OutputOf(const CollectiveCall& call, int member,
                                               size_t index) const {
  if (!common_.runtime) return {call.outputs[index], CountOf(call, call.output_counts, index), 0};
  return SliceOf(pieces_.Output(member, index), *call.runtime, call.outputs);
}

template <typename Pointer>
absl::Status CollectiveWork::AddOperand(const Member& member, const Operand& operand,
                                        const Slice& slice, std::vector<Pointer>* to) {
  if (first_.member < 0) {
    first_ = operand;
    move_.count = slice.count;
  } else if (slice.count != move_.count) {
    return Disagree(operand, slice.count);
  }
  if (slice.count == 0 || slice.address == 0) return absl::OkStatus();
  void* pointer = nullptr;
  CHORUS_RETURN_IF_ERROR(Resolve(member, slice.address, slice.count * element_bytes_, &pointer));
  to->push_back(pointer);
  return absl::OkStatus();
}

absl::Status CollectiveWork::AddInput(absl::Span<const Member> members, int member, size_t index) {
  return AddOperand(members[member], {member, "input", index},
                    InputOf(*members[member].call, member, index), &inputs_);
}

absl::Status CollectiveWork::AddOutput(absl::Span<const Member> members, int member, size_t index) {
  return AddOperand(members[member], {member, "output", index},
                    OutputOf(*members[member].call, member, index), &outputs_);
}

absl::Status CollectiveWork::AddReducedInputs(absl::Span<const Member> members, size_t index) {
  const auto first_holders = static_cast<int32_t>(holders_.size());
  for (size_t m = 0; m < members.size(); ++m) {
    const Member& member = members[m];
    if (member.call == nullptr) continue;
    CHORUS_RETURN_IF_ERROR(AddInput(members, static_cast<int>(m), index));
    if (count_holders_ == nullptr) continue;
    void* holders = nullptr;
    const std::vector<DeviceAddress>& addresses = member.call->holders;
    const DeviceAddress base = addresses.empty() ? 0 : addresses[common_.runtime ? 0 : index];
    if (move_.count > 0 && base != 0) {
      const int64_t first = InputOf(*member.call, static_cast<int>(m), index).first;
      CHORUS_RETURN_IF_ERROR(Resolve(member, base + first * sizeof(float),
                                     move_.count * int64_t{sizeof(float)}, &holders));
      move_.first_holders = first_holders;
    }
    holders_.push_back(static_cast<float*>(holders));
  }
  return absl::OkStatus();
}

absl::Status CollectiveWork::AddFactors(const Member& member) {
  if (move_.count == 0) return absl::OkStatus();
  // Nobody is missing from a product: the move's inputs are the members'.
  for (size_t k = 0; k < member.call->factors.size(); ++k) {
    const DeviceAddress address = member.call->factors[k];
    if (address == 0) continue;
    Factor factor;
    factor.input = static_cast<int32_t>(k);
    CHORUS_RETURN_IF_ERROR(Resolve(member, address, move_.count * element_bytes_, &factor.to));
    if (factor.to != inputs_[move_.first_input + k]) factors_.push_back(factor);
  }
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
  const auto first_factor = factors_.begin() + move_.first_factor;
  if (first_factor != factors_.end()) {
    const auto key = [](const Factor& f) { return std::make_pair(f.input, f.to); };
    std::sort(first_factor, factors_.end(),
              [key](const Factor& a, const Factor& b) { return key(a) < key(b); });
    factors_.erase(
        std::unique(first_factor, factors_.end(),
                    [key](const Factor& a, const Factor& b) { return key(a) == key(b); }),
        factors_.end());
  }
  move_.num_inputs = static_cast<int32_t>(inputs_.size()) - move_.first_input;
  move_.num_outputs = static_cast<int32_t>(outputs_.size()) - move_.first_output;
  move_.num_factors = static_cast<int32_t>(factors_.size()) - move_.first_factor;
  const bool only_results = move_.num_factors == 0 && move_.first_holders < 0;
  const bool in_place = move_.num_inputs == 1 && move_.num_outputs == 1 &&
                        inputs_.back() == outputs_.back() && !changes_single_input_;
  if (only_results && (move_.num_outputs == 0 || in_place)) {
    inputs_.resize(move_.first_input);
    outputs_.resize(move_.first_output);
    return;
  }
  moves_.push_back(move_);
  traffic_bytes_ += OperandsPerElement(move_) * move_.count * move_.element_bytes;
}

absl::Status CollectiveWork::ReadScales(absl::Span<const Member> members) {
  scales_.clear();
  scale_pointers_.clear();
  divisor_ = 1;
  if (common_.reduction == Reduction::kAvg) {
    scales_.resize(members.size(), 1);
    divisor_ = static_cast<double>(members.size());
  }
  if (common_.reduction != Reduction::kPremulSum) return absl::OkStatus();
  const bool wide = common_.dtype == DType::kF64;
  const bool by_device = space_ != nullptr && !space_->host_addressable();
  for (const Member& member : members) {
    if (member.call == nullptr) continue;
    const DeviceAddress factor = member.call->factor;
    if (by_device) {
      void* pointer = nullptr;
      CHORUS_RETURN_IF_ERROR(
          Resolve(member, factor, wide ? sizeof(double) : sizeof(float), &pointer));
      scale_pointers_.push_back(pointer);
      continue;
    }
    float narrow = 0;
    double scale = 0;
    CHORUS_RETURN_IF_ERROR(wide ? Read(member, factor, sizeof(scale), &scale)
                                : Read(member, factor, sizeof(narrow), &narrow));
    scales_.push_back(wide ? scale : narrow);
  }
  return absl::OkStatus();
}

absl::Status CollectiveWork::PrepareReduction(absl::Span<const Member> members) {
  const int size = static_cast<int>(members.size());
  reduce_ = FindReduction(common_.reduction, common_.dtype);
  changes_single_input_ = ChangesSingleInput(common_.reduction, common_.dtype);
  const bool ordered = common_.reduction == Reduction::kMin || common_.reduction == Reduction::kMax;
  count_holders_ = ordered ? FindHolders(common_.dtype) : nullptr;
  CHORUS_RETURN_IF_ERROR(ReadScales(members));
  ranks_.clear();
  for (int m = 0; m < size; ++m) {
    if (members[m].call != nullptr) ranks_.push_back(m);
  }
  tree_.Set(ranks_);
  const CollectiveFacts& facts = FactsOf(common_.kind);
  if (OfEach(facts.in)) {
    for (int to = 0; to < size; ++to) {
      if (members[to].call == nullptr) continue;
      BeginMove();
      CHORUS_RETURN_IF_ERROR(AddReducedInputs(members, to));
      CHORUS_RETURN_IF_ERROR(AddOutput(members, to, 0));
      CHORUS_RETURN_IF_ERROR(AddFactors(members[to]));
      EndMove();
    }
    return absl::OkStatus();
  }
  BeginMove();
  CHORUS_RETURN_IF_ERROR(AddReducedInputs(members, 0));
  for (int m = 0; m < size; ++m) {
    if (members[m].call == nullptr) continue;
    if (!AnyOn(facts.out, m == common_.root)) continue;
    CHORUS_RETURN_IF_ERROR(AddOutput(members, m, 0));
    CHORUS_RETURN_IF_ERROR(AddFactors(members[m]));
  }
  EndMove();
  return absl::OkStatus();
}

absl::Status CollectiveWork::PrepareMovement(absl::Span<const Member> members) {
  const int size = static_cast<int>(members.size());
  reduce_ = nullptr;
  changes_single_input_ = false;
  const auto present = [members](int m) { return members[m].call != nullptr; };
  const int root = common_.root;
  switch (common_.kind) {
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kSend:
      BeginMove();
      if (present(root)) CHORUS_RETURN_IF_ERROR(AddInput(members, root, 0));
      for (int to = 0; to < size; ++to) {
        if (!present(to) || members[to].call->outputs.empty()) continue;
        CHORUS_RETURN_IF_ERROR(AddOutput(members, to, 0));
      }
      EndMove();
      break;
    case CollectiveKind::kAllGather:
      for (int from = 0; from < size; ++from) {
        BeginMove();
        if (present(from)) CHORUS_RETURN_IF_ERROR(AddInput(members, from, 0));
        for (int to = 0; to < size; ++to) {
          if (present(to)) CHORUS_RETURN_IF_ERROR(AddOutput(members, to, from));
        }
        EndMove();
      }
      break;
    case CollectiveKind::kGather:
      for (int from = 0; present(root) && from < size; ++from) {
        BeginMove();
        if (present(from)) CHORUS_RETURN_IF_ERROR(AddInput(members, from, 0));
        CHORUS_RETURN_IF_ERROR(AddOutput(members, root, from));
        EndMove();
      }
      break;
    case CollectiveKind::kScatter:
      for (int to = 0; to < size; ++to) {
        if (!present(to)) continue;
        BeginMove();
        if (present(root)) CHORUS_RETURN_IF_ERROR(AddInput(members, root, to));
        CHORUS_RETURN_IF_ERROR(AddOutput(members, to, 0));
        EndMove();
      }
      break;
    case CollectiveKind::kAllToAll:
      for (int to = 0; to < size; ++to) {
        for (int from = 0; present(to) && from < size; ++from) {
          BeginMove();
          if (present(from)) CHORUS_RETURN_IF_ERROR(AddInput(members, from, to));
          CHORUS_RETURN_IF_ERROR(AddOutput(members, to, from));
          EndMove();
        }
      }
      break;
    default:
      break;
  }
  return absl::OkStatus();
}

absl::Status CollectiveWork::CopyCounts(const Member& member, DeviceAddress address, int count) {
  if (count == 0 || address == 0) return absl::OkStatus();
  counts_.resize(counts_.size() + count);
  return Read(member, address, count * int64_t{sizeof(int64_t)},
              counts_.data() + counts_.size() - count);
}

std::vector<std::pair<DeviceAddress, int64_t>> CollectiveWork::NumbersOf(
    const Common& common, absl::Span<const Member> members) {
  std::vector<std::pair<DeviceAddress, int64_t>> numbers;
  const int size = static_cast<int>(members.size());
  const CollectiveFacts& facts = FactsOf(common.kind);
  for (int m = 0; common.runtime && m < size; ++m) {
    if (members[m].call == nullptr) continue;
    const CollectiveCall::RuntimeCounts& runtime = *members[m].call->runtime;
    const auto add = [&](DeviceAddress address, Pieces pieces) {
      const int64_t count = PiecesOn(pieces, size, m == common.root);
      if (address != 0 && count > 0) numbers.emplace_back(address, count * sizeof(int64_t));
    };
    add(runtime.sends, facts.in);
    add(runtime.receives, facts.out);
  }
  return numbers;
}

CollectiveWork::List CollectiveWork::list() const {
  List list;
  list.common = common_;
  list.moves = moves_;
  list.inputs = inputs_;
  list.outputs = outputs_;
  list.holders = holders_;
  list.factors = factors_;
  list.steps = absl::MakeConstSpan(tree_.steps(), tree_.num_steps());
  list.num_operands = static_cast<int>(ranks_.size());
  list.scales = scale_pointers_;
  list.divisor = divisor_;
  return list;
}

absl::Status CollectiveWork::ReadRuntimeCounts(absl::Span<const Member> members) {
  const int size = static_cast<int>(members.size());
  counts_.clear();
  counts_.reserve(2 * members.size() * members.size());  // it must not move below
  parts_.assign(members.size(), RuntimePieces::Part());
  int64_t row_elements = -1;
  for (int m = 0; m < size; ++m) {
    if (members[m].call == nullptr) continue;
    const CollectiveCall::RuntimeCounts& runtime = *members[m].call->runtime;
    const bool is_root = m == common_.root;
    RuntimePieces::Part& part = parts_[m];
    part.present = true;
    part.input_rows = runtime.input_rows;
    part.output_rows = runtime.output_rows;
    part.rank = runtime.rank;
    part.source = runtime.source;
    const auto copy = [&](DeviceAddress address, int count, absl::Span<const int64_t>* to) {
      const size_t before = counts_.size();
      CHORUS_RETURN_IF_ERROR(CopyCounts(members[m], address, count));
      *to = absl::MakeConstSpan(counts_).subspan(before);
      return absl::OkStatus();
    };
    CHORUS_RETURN_IF_ERROR(
        copy(runtime.sends, PiecesOn(FactsOf(common_.kind).in, size, is_root), &part.sends));
    CHORUS_RETURN_IF_ERROR(
        copy(runtime.receives, PiecesOn(FactsOf(common_.kind).out, size, is_root), &part.receives));
    if (row_elements < 0) row_elements = runtime.row_elements;
    if (row_elements != runtime.row_elements) {
      return MakeError(
          Reason::kInternal,
          absl::StrCat(CollectiveKindName(common_.kind), ": member ", m, " has rows of ",
                       runtime.row_elements, " elements, others have ", row_elements));
    }
  }
  return pieces_.Place(common_.kind, common_.root, parts_);
}

absl::Status CollectiveWork::AddZeros(const Member& member, DeviceAddress address, int64_t begin,
                                      int64_t end, int64_t element_bytes,
                                      std::vector<void*>* once) {
  if (address == 0 || begin == end) return absl::OkStatus();
  void* to = nullptr;
  CHORUS_RETURN_IF_ERROR(
      Resolve(member, address + begin * element_bytes, (end - begin) * element_bytes, &to));
  if (once != nullptr) {
    if (std::find(once->begin(), once->end(), to) != once->end()) return absl::OkStatus();
    once->push_back(to);
  }
  BeginMove();
  move_.count = end - begin;
  move_.element_bytes = element_bytes;
  outputs_.push_back(to);
  EndMove();
  return absl::OkStatus();
}

absl::Status CollectiveWork::FinishRuntime(absl::Span<const Member> members) {
  const int size = static_cast<int>(members.size());
  std::vector<void*> zeroed;  // members that share a result share what is behind its pieces
  for (int m = 0; m < size; ++m) {
    const Member& member = members[m];
    if (member.call == nullptr) continue;
    const CollectiveCall& call = *member.call;
    const CollectiveCall::RuntimeCounts& runtime = *call.runtime;
    const int64_t row = runtime.row_elements;
    const int num_received = PiecesOn(FactsOf(common_.kind).out, size, m == common_.root);
    const int64_t output_end = pieces_.OutputEnd(m) * row;
    const int64_t outputs = runtime.output_rows * row;
    if (num_received > 0) {
      CHORUS_RETURN_IF_ERROR(
          AddZeros(member, call.outputs[0], output_end, outputs, element_bytes_, &zeroed));
    }
    for (const DeviceAddress factor : call.factors) {
      CHORUS_RETURN_IF_ERROR(AddZeros(member, factor, output_end, outputs, element_bytes_));
    }
    for (const DeviceAddress holders : call.holders) {
      CHORUS_RETURN_IF_ERROR(AddZeros(member, holders, pieces_.InputEnd(m) * row,
                                      runtime.input_rows * row, sizeof(float)));
    }
    if (runtime.received == 0) continue;
    received_.clear();
    for (int k = 0; k < num_received; ++k) received_.push_back(pieces_.Output(m, k).count);
    const int64_t bytes = num_received * int64_t{sizeof(int64_t)};
    if (space_ != nullptr) {
      CHORUS_RETURN_IF_ERROR(
          space_->Write(member.device, runtime.received, bytes, received_.data()));
    } else {
      std::memcpy(reinterpret_cast<void*>(runtime.received), received_.data(),
                  static_cast<size_t>(bytes));
    }
  }
  return absl::OkStatus();
}

CollectiveWork::Common CollectiveWork::Common::Of(const CollectiveCall& call, int member) {
  if (OnlyOrders(call.kind)) return {call.kind, Reduction::kNone, DType(), -1};
  if (!HasPeer(call.kind)) {
    return {call.kind, call.reduction, call.dtype, call.root, call.runtime.has_value()};
  }
  return {MeetsAs(call.kind), call.reduction, call.dtype, IsSender(call.kind) ? member : call.root};
}

absl::Status CollectiveWork::Prepare(const Common& common, absl::Span<const Member> members,
                                     const AddressSpace* space) {
  common_ = common;
  space_ = space;
  element_bytes_ = DTypeBytes(common.dtype);
  traffic_bytes_ = 0;
  moves_.clear();
  inputs_.clear();
  outputs_.clear();
  holders_.clear();
  factors_.clear();
  if (common.runtime) CHORUS_RETURN_IF_ERROR(ReadRuntimeCounts(members));
  CHORUS_RETURN_IF_ERROR(IsReducing(common.kind) ? PrepareReduction(members)
                                                 : PrepareMovement(members));
  return common.runtime ? FinishRuntime(members) : absl::OkStatus();
}

int64_t CollectiveWork::OperandsPerElement(const Move& move) {
  // Holders are about as large as the inputs.
  return int64_t{move.num_inputs} * (move.first_holders < 0 ? 1 : 2) + move.num_outputs +
         move.num_factors;
}

int64_t CollectiveWork::ChunkBytes(int64_t traffic_bytes) const {
  int64_t operands = 1;
  for (const Move& move : moves_) operands = std::max(operands, OperandsPerElement(move));
  return std::max<int64_t>(kCacheLine, traffic_bytes / operands / kCacheLine * kCacheLine);
}

int64_t CollectiveWork::Cut(int64_t chunk_bytes) {
  const int64_t lines = std::max<int64_t>(1, chunk_bytes / kCacheLine);
  chunk_elements_ = std::max<int64_t>(1, lines * kCacheLine / std::max<int64_t>(1, element_bytes_));
  int64_t chunks = 0;
  for (Move& move : moves_) {
    move.first_chunk = chunks;
    chunks += (move.count + chunk_elements_ - 1) / chunk_elements_;
  }
  return chunks;
}

void CollectiveWork::RunWhole() {
  constexpr int64_t kWhole = std::numeric_limits<int64_t>::max() / 2;
  const int64_t chunks = Cut(kWhole);
  for (int64_t i = 0; i < chunks; ++i) RunChunk(i, /*streaming=*/false);
}

void CollectiveWork::RunChunk(int64_t chunk, bool streaming) const {
  const auto behind =
      std::upper_bound(moves_.begin(), moves_.end(), chunk,
                       [](int64_t c, const Move& move) { return c < move.first_chunk; });
  const Move& move = *(behind - 1);
  const int64_t begin = (chunk - move.first_chunk) * chunk_elements_;
  const int64_t end = std::min(move.count, begin + chunk_elements_);
  const int64_t offset = begin * move.element_bytes;
  const int64_t bytes = (end - begin) * move.element_bytes;
  void* const* outputs = outputs_.data() + move.first_output;
  const void* const* inputs = inputs_.data() + move.first_input;
  const auto at = [offset](const void* base) { return static_cast<const char*>(base) + offset; };
  const auto to = [offset](void* base) { return static_cast<char*>(base) + offset; };

  for (int i = 0; i < move.num_factors; ++i) {
    const Factor& factor = factors_[move.first_factor + i];
    CopyBytes(to(factor.to), at(inputs[factor.input]), bytes, /*streaming=*/false);
  }
  if (move.first_holders >= 0) return ReduceWithHolders(move, begin, end);
  int copied_from = -1;  // the output that already holds the result
  if (move.num_outputs > 0 && Reduces(move)) {
    // Further outputs are copied from the first, which therefore stays in the caches.
    reduce_(PassOf(inputs, move, outputs[0]), begin, end, streaming && move.num_outputs == 1);
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

ReducePass CollectiveWork::PassOf(const void* const* inputs, const Move& move, void* output) const {
  ReducePass pass;
  pass.inputs = inputs;
  pass.num_inputs = move.num_inputs;
  pass.steps = tree_.steps();
  pass.output = output;
  pass.factors = scales_.data();
  pass.divisor = divisor_;
  return pass;
}

void CollectiveWork::ReduceWithHolders(const Move& move, int64_t begin, int64_t end) const {
  alignas(kCacheLine) char result[kHoldersBlock * sizeof(double)];
  absl::InlinedVector<const void*, 64> inputs(move.num_inputs);
  absl::InlinedVector<float*, 64> holders(move.num_inputs);
  for (int64_t at = begin; at < end; at += kHoldersBlock) {
    const int64_t count = std::min(kHoldersBlock, end - at);
    for (int k = 0; k < move.num_inputs; ++k) {
      inputs[k] = static_cast<const char*>(inputs_[move.first_input + k]) + at * element_bytes_;
      float* const to = holders_[move.first_holders + k];
      holders[k] = to == nullptr ? nullptr : to + at;
    }
    // A single input is copied, as it is without holders.
    if (Reduces(move)) {
      reduce_(PassOf(inputs.data(), move, result), 0, count, /*streaming=*/false);
    } else {
      CopyBytes(result, inputs[0], count * element_bytes_, /*streaming=*/false);
    }
    // An output may be one of the inputs: they are not needed after this.
    count_holders_(inputs.data(), move.num_inputs, result, holders.data(), 0, count);
    for (int i = 0; i < move.num_outputs; ++i) {
      CopyBytes(static_cast<char*>(outputs_[move.first_output + i]) + at * element_bytes_, result,
                count * element_bytes_, /*streaming=*/false);
    }
  }
}

}  // namespace chorus
