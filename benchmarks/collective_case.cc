#include "benchmarks/collective_case.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "benchmarks/pattern.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

// How many pieces a rank has, or gets.
enum class Pieces { kOne, kEach, kOneAtRoot, kEachAtRoot };

struct Form {
  const char* op;
  Pieces inputs;
  Pieces outputs;
  bool reduces;
  bool hands_over;
};
constexpr Form kForms[] = {
    {"broadcast", Pieces::kOneAtRoot, Pieces::kOne, false, true},
    {"reduce", Pieces::kOne, Pieces::kOneAtRoot, true, false},
    {"all_reduce", Pieces::kOne, Pieces::kOne, true, false},
    {"reduce_scatter", Pieces::kEach, Pieces::kOne, true, false},
    {"reduce_scatter_tensor", Pieces::kEach, Pieces::kOne, true, false},
    {"all_gather", Pieces::kOne, Pieces::kEach, false, true},
    {"all_gather_into_tensor", Pieces::kOne, Pieces::kEach, false, false},
    {"gather", Pieces::kOne, Pieces::kEachAtRoot, false, true},
    {"scatter", Pieces::kEachAtRoot, Pieces::kOne, false, true},
    {"all_to_all", Pieces::kEach, Pieces::kEach, false, true},
    {"all_to_all_single", Pieces::kEach, Pieces::kEach, false, false},
    {"send_recv", Pieces::kOne, Pieces::kOne, false, true},
};

const Form* FormOf(const std::string& op) {
  for (const Form& form : kForms) {
    if (op == form.op) return &form;
  }
  return nullptr;
}

int Count(Pieces pieces, int rank, int ranks) {
  switch (pieces) {
    case Pieces::kOne:
      return 1;
    case Pieces::kEach:
      return ranks;
    case Pieces::kOneAtRoot:
      return rank == 0 ? 1 : 0;
    case Pieces::kEachAtRoot:
      return rank == 0 ? ranks : 0;
  }
  return 0;
}

}  // namespace

const std::vector<std::string>& CollectiveOps() {
  static const auto* const ops = [] {
    auto* const names = new std::vector<std::string>();
    for (const Form& form : kForms) names->push_back(form.op);
    return names;
  }();
  return *ops;
}

absl::StatusOr<CollectiveCase> CollectiveCase::Of(const std::string& op, int ranks,
                                                  int64_t piece_bytes) {
  if (FormOf(op) == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("no collective ", op, "; there are ", absl::StrJoin(CollectiveOps(), ", ")));
  }
  CollectiveCase c;
  c.op = op;
  c.ranks = ranks;
  c.count = piece_bytes / static_cast<int64_t>(sizeof(float));
  return c;
}

absl::StatusOr<CollectiveCase> CollectiveCase::WithResult(const std::string& op, int ranks,
                                                          int64_t bytes) {
  CHORUS_ASSIGN_OR_RETURN(CollectiveCase c, Of(op, ranks, sizeof(float)));
  c.count = std::max<int64_t>(1, bytes / (c.OutputPieces(0) * static_cast<int64_t>(sizeof(float))));
  return c;
}

int CollectiveCase::InputPieces(int rank) const {
  if (op == "send_recv") return Neighbour(rank) < 0 ? 0 : 1;
  return Count(FormOf(op)->inputs, rank, ranks);
}

int CollectiveCase::OutputPieces(int rank) const {
  if (op == "send_recv") return Neighbour(rank) < 0 ? 0 : 1;
  return Count(FormOf(op)->outputs, rank, ranks);
}

int64_t CollectiveCase::result_bytes() const { return OutputPieces(0) * piece_bytes(); }

int64_t CollectiveCase::input_bytes() const {
  int64_t pieces = 0;
  for (int rank = 0; rank < ranks; ++rank) pieces += InputPieces(rank);
  return pieces * piece_bytes();
}

int64_t CollectiveCase::output_bytes() const {
  int64_t pieces = 0;
  for (int rank = 0; rank < ranks; ++rank) pieces += OutputPieces(rank);
  return pieces * piece_bytes();
}

bool CollectiveCase::HandsOver() const { return FormOf(op)->hands_over; }

void CollectiveCase::Fill(int rank, float* pieces) const {
  for (int k = 0; k < InputPieces(rank); ++k) FillPiece(rank, k, pieces + k * count);
}

void CollectiveCase::FillPiece(int rank, int piece, float* to) const {
  const bool several = InputPieces(rank) > 1;
  FillPattern(several ? rank * ranks + piece : rank, to, count);
}

absl::Status CollectiveCase::Check(int rank, const float* pieces) const {
  for (int k = 0; k < OutputPieces(rank); ++k) {
    CHORUS_RETURN_IF_ERROR(CheckPiece(rank, k, pieces + k * count));
  }
  return absl::OkStatus();
}

absl::Status CollectiveCase::CheckPiece(int rank, int piece, const float* values) const {
  const Form& form = *FormOf(op);
  std::vector<int> patterns;
  if (op == "send_recv") {
    patterns = {Neighbour(rank)};
  } else if (form.reduces) {
    const bool several = form.inputs == Pieces::kEach;
    for (int r = 0; r < ranks; ++r) patterns.push_back(several ? r * ranks + rank : r);
  } else if (form.inputs == Pieces::kOneAtRoot) {
    patterns = {0};
  } else if (form.inputs == Pieces::kEachAtRoot) {
    patterns = {rank};
  } else if (form.inputs == Pieces::kEach) {
    patterns = {piece * ranks + rank};
  } else {
    patterns = {piece};
  }
  return CheckPatternSumOf(patterns, values, count);
}

int CollectiveCase::Neighbour(int rank) const {
  const int other = rank ^ 1;
  return other < ranks ? other : -1;
}

}  // namespace bench
}  // namespace chorus
