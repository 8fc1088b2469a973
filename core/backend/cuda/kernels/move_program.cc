#include "core/backend/cuda/kernels/move_program.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace cuda {
namespace {

// Rows and columns as kReductions of core/backend/reduction.cc has them: f16 bf16 f32 f64 i8 u8 i16
// i32 i64 bool; SUM AVG PRODUCT MIN MAX PREMUL_SUM BAND BOR BXOR.
constexpr int kRows = 10;
constexpr int kColumns = 9;
#define CHORUS_FLOATING_NAMES(dtype)                                                               \
  {                                                                                                \
    "reduce_sum_" dtype, "reduce_scaled_sum_" dtype, "reduce_product_" dtype, "reduce_min_" dtype, \
        "reduce_max_" dtype, "reduce_scaled_sum_" dtype, nullptr, nullptr, nullptr                 \
  }
#define CHORUS_INTEGER_NAMES(width, dtype)                                                   \
  {                                                                                          \
    "reduce_sum_" width, nullptr, "reduce_product_" width, "reduce_min_" dtype,              \
        "reduce_max_" dtype, nullptr, "reduce_and_bits", "reduce_or_bits", "reduce_xor_bits" \
  }
constexpr const char* kNames[kRows][kColumns] = {
    CHORUS_FLOATING_NAMES("f16"),
    CHORUS_FLOATING_NAMES("bf16"),
    CHORUS_FLOATING_NAMES("f32"),
    CHORUS_FLOATING_NAMES("f64"),
    CHORUS_INTEGER_NAMES("i8", "i8"),
    CHORUS_INTEGER_NAMES("i8", "u8"),
    CHORUS_INTEGER_NAMES("i16", "i16"),
    CHORUS_INTEGER_NAMES("i32", "i32"),
    CHORUS_INTEGER_NAMES("i64", "i64"),
    {"reduce_or_bool", nullptr, "reduce_and_bool", "reduce_and_bool", "reduce_or_bool", nullptr,
     "reduce_and_bool", "reduce_or_bool", "reduce_xor_bool"},
};
#undef CHORUS_FLOATING_NAMES
#undef CHORUS_INTEGER_NAMES

constexpr size_t kTableAlignment = 8;
static_assert(sizeof(ProgramHeader) % kTableAlignment == 0, "the table of moves follows it");

template <typename T>
int32_t AppendTable(const std::vector<T>& table, std::vector<char>* bytes) {
  const size_t offset = (bytes->size() + kTableAlignment - 1) / kTableAlignment * kTableAlignment;
  bytes->resize(offset + table.size() * sizeof(T));
  if (!table.empty()) std::memcpy(bytes->data() + offset, table.data(), table.size() * sizeof(T));
  return static_cast<int32_t>(offset);
}

}  // namespace

const char* MoveKernelName(Reduction reduction, DType dtype) {
  if (reduction == Reduction::kNone) return "move_bytes";
  const int row = static_cast<int>(dtype) - static_cast<int>(DType::kF16);
  const int column = static_cast<int>(reduction) - static_cast<int>(Reduction::kSum);
  if (row < 0 || row >= kRows || column < 0 || column >= kColumns) return nullptr;
  return kNames[row][column];
}

void MoveProgram::Clear() {
  header_ = ProgramHeader();
  moves_.clear();
  inputs_.clear();
  outputs_.clear();
  holders_.clear();
  factors_.clear();
  scales_.clear();
  steps_.clear();
}

void MoveProgram::AddMove(int64_t count, int64_t element_bytes) {
  MoveEntry move;
  move.first_unit = units();
  move.bytes = count * element_bytes;
  move.first_input = static_cast<int32_t>(inputs_.size());
  move.first_output = static_cast<int32_t>(outputs_.size());
  move.first_factor = static_cast<int32_t>(factors_.size());
  moves_.push_back(move);
  element_bytes_ = element_bytes;
}

void MoveProgram::Align(uint64_t address) {
  const uint64_t bits = address | static_cast<uint64_t>(last_move().width);
  last_move().width = static_cast<int32_t>(bits & (~bits + 1));  // the lowest one
}

void MoveProgram::AddInput(uint64_t address) {
  Align(address);
  inputs_.push_back(address);
  ++last_move().num_inputs;
}

void MoveProgram::AddOutput(uint64_t address) {
  Align(address);
  outputs_.push_back(address);
  ++last_move().num_outputs;
}

void MoveProgram::AddHolders(uint64_t address) {
  if (last_move().first_holders < 0) {
    last_move().first_holders = static_cast<int32_t>(holders_.size());
  }
  holders_.push_back(address);
  // The two of a unit of f64 are stored one by one, those of others by fours.
  if (element_bytes_ < static_cast<int64_t>(sizeof(double))) Align(address);
}

void MoveProgram::AddFactor(int input, uint64_t address) {
  assert(input >= 0 && input < last_move().num_inputs);
  Align(address);
  factors_.push_back({int64_t{last_move().first_input} + input, address});
  ++last_move().num_factors;
}

absl::Status MoveProgram::SetSteps(const ReductionTree::Step* steps, int num_inputs) {
  steps_.clear();
  int unjoined = 0;  // after each operand, whether or not a step takes it with others
  int most = 0;
  for (int k = 0; k < num_inputs; ++steps) {
    steps_.push_back({steps->operands, steps->joins});
    k += steps->operands;
    // Those of a tree of 2^h operands are at most h + 1.
    const int height = steps->operands == 1 ? 0 : steps->operands == 2 ? 1 : 2;
    most = std::max(most, unjoined + height + 1);
    unjoined += 1 - steps->joins;
  }
  // The last one that a kernel takes and the one before it are in registers.
  if (most - 2 > kMostWaiting) {
    steps_.clear();
    return Unsupported(absl::StrCat("a reduction of ", num_inputs, " members has ", most - 2,
                                    " partial results that wait, this build runs ", kMostWaiting,
                                    " on one GPU"));
  }
  return absl::OkStatus();
}

void MoveProgram::AddScale(uint64_t address) { scales_.push_back(address); }

int64_t MoveProgram::units() const {
  if (moves_.empty()) return 0;
  const MoveEntry& last = moves_.back();
  return last.first_unit + (last.bytes + kUnitBytes - 1) / kUnitBytes;
}

absl::Span<const char> MoveProgram::Bytes() {
  header_.units = units();
  header_.num_moves = static_cast<int32_t>(moves_.size());
  bytes_.resize(sizeof(header_));
  AppendTable(moves_, &bytes_);
  header_.inputs = AppendTable(inputs_, &bytes_);
  header_.outputs = AppendTable(outputs_, &bytes_);
  header_.holders = AppendTable(holders_, &bytes_);
  header_.factors = AppendTable(factors_, &bytes_);
  header_.scales = scales_.empty() ? 0 : AppendTable(scales_, &bytes_);
  header_.steps = AppendTable(steps_, &bytes_);
  std::memcpy(bytes_.data(), &header_, sizeof(header_));
  return bytes_;
}

MoveArgs MoveProgram::Arguments(uint64_t on_device) {
  MoveArgs args;
  if (on_device != 0) {
    args.on_device = reinterpret_cast<const char*>(on_device);
    return args;
  }
  const absl::Span<const char> bytes = Bytes();
  assert(bytes.size() <= sizeof(args.program));
  std::memcpy(args.program, bytes.data(), bytes.size());
  return args;
}

}  // namespace cuda
}  // namespace chorus
