#include "core/backend/runtime_pieces.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

absl::Status Mismatch(const std::string& text) {
  return MakeError(absl::StatusCode::kInvalidArgument, Reason::kMismatch, text);
}

}  // namespace

int RuntimePieces::NumSends(CollectiveKind kind, int size, bool is_root) {
  switch (kind) {
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kReduceScatter:
      return size;
    case CollectiveKind::kScatter:
      return is_root ? size : 0;
    default:  // kAllGather, kGather
      return 1;
  }
}

int RuntimePieces::NumReceives(CollectiveKind kind, int size, bool is_root) {
  switch (kind) {
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kAllGather:
      return size;
    case CollectiveKind::kGather:
      return is_root ? size : 0;
    default:  // kReduceScatter, kScatter
      return 1;
  }
}

int64_t RuntimePieces::Sent(absl::Span<const Part> parts, int from, int to) const {
  return parts[from].sends[parts[from].sends.size() == 1 ? 0 : to];
}

absl::Status RuntimePieces::PlaceInputs(absl::Span<const Part> parts) {
  for (int m = 0; m < size_; ++m) {
    const Part& part = parts[m];
    int64_t end = 0;
    for (size_t i = 0; i < part.sends.size(); ++i) {
      const int64_t rows = part.sends[i];
      if (rows < 0 || rows > part.input_rows) {
        return BadType(absl::StrCat(CollectiveKindName(kind_), ": member ", m, " sends ", rows,
                                    " rows", part.sends.size() > 1 ? " to member " : "",
                                    part.sends.size() > 1 ? absl::StrCat(i) : "",
                                    ", expected 0 to ", part.input_rows));
      }
      inputs_[m * size_ + i] = {end, rows};
      end += rows;
    }
    if (end > part.input_rows) {
      return BadType(absl::StrCat(CollectiveKindName(kind_), ": member ", m, " sends ", end,
                                  " rows in all, expected at most the ", part.input_rows,
                                  " of its input"));
    }
    input_ends_[m] = end;
  }
  return absl::OkStatus();
}

absl::Status RuntimePieces::CheckAgreement(absl::Span<const Part> parts) const {
  int first = -1;
  for (int m = 0; m < size_; ++m) {
    if (!parts[m].present) continue;
    if (first < 0) first = m;
    for (int k = 0; k < size_; ++k) {
      if (kind_ == CollectiveKind::kReduceScatter && parts[m].sends[k] != parts[first].sends[k]) {
        return Mismatch(absl::StrCat("reduce_scatter: member ", m, " has ", parts[m].sends[k],
                                     " rows for member ", k, ", expected ", parts[first].sends[k],
                                     " as member ", first, " has"));
      }
      // Everybody gets the same from those who are missing, too.
      if (kind_ == CollectiveKind::kAllGather &&
          outputs_[m * size_ + k].count != outputs_[first * size_ + k].count) {
        return Mismatch(
            absl::StrCat("all_gather: member ", m, " expects ", outputs_[m * size_ + k].count,
                         " rows from member ", k, ", which is missing, expected ",
                         outputs_[first * size_ + k].count, " as member ", first, " does"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status RuntimePieces::PlaceOutputs(absl::Span<const Part> parts) {
  for (int m = 0; m < size_; ++m) {
    const Part& part = parts[m];
    const int pieces = part.present ? NumReceives(kind_, size_, m == root_) : 0;
    int64_t end = 0;
    for (int k = 0; k < pieces; ++k) {
      int from = k;
      if (kind_ == CollectiveKind::kScatter) from = root_;
      if (kind_ == CollectiveKind::kReduceScatter) from = m;  // all members have the same
      int64_t rows = 0;
      if (!part.receives.empty()) {
        rows = part.receives[k];
        if (rows < 0 || rows > part.output_rows) {
          return BadType(absl::StrCat(CollectiveKindName(kind_), ": member ", m, " expects ", rows,
                                      " rows from member ", from, ", expected 0 to ",
                                      part.output_rows));
        }
      }
      if (parts[from].present) {
        const int64_t sent = Sent(parts, from, m);
        if (!part.receives.empty() && rows != sent) {
          return Mismatch(absl::StrCat(CollectiveKindName(kind_), ": member ", m, " expected ",
                                       rows, " rows from member ", from, ", got ", sent));
        }
        rows = sent;
      }
      outputs_[m * size_ + k] = {end, rows};
      end += rows;
    }
    if (end > part.output_rows) {
      return BadType(absl::StrCat(CollectiveKindName(kind_), ": member ", m, " gets ", end,
                                  " rows, expected at most the ", part.output_rows,
                                  " of its output"));
    }
    output_ends_[m] = end;
  }
  return absl::OkStatus();
}

absl::Status RuntimePieces::Place(CollectiveKind kind, int root, absl::Span<const Part> parts) {
  kind_ = kind;
  root_ = root;
  size_ = static_cast<int>(parts.size());
  inputs_.assign(parts.size() * parts.size(), Rows());
  outputs_.assign(parts.size() * parts.size(), Rows());
  input_ends_.assign(parts.size(), 0);
  output_ends_.assign(parts.size(), 0);
  CHORUS_RETURN_IF_ERROR(PlaceInputs(parts));
  CHORUS_RETURN_IF_ERROR(PlaceOutputs(parts));
  return CheckAgreement(parts);
}

}  // namespace chorus
