#include "core/backend/runtime_pieces.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using Parts = absl::Span<const RuntimePieces::Part>;

// As its trainer calls it where it is known: "rank 3", else "member 1" of the group.
std::string Name(Parts parts, int m) {
  return parts[m].rank >= 0 ? absl::StrCat("rank ", parts[m].rank) : absl::StrCat("member ", m);
}

// Of what member m has given, with its line. `text` follows its name.
absl::Status Wrong(Reason reason, CollectiveKind kind, Parts parts, int m, absl::string_view text) {
  Error error(reason);
  error.op = std::string(CollectiveKindName(kind));
  error.culprit.rank = parts[m].rank;
  error.source = std::string(parts[m].source);
  error.message = absl::StrCat(error.op, ": ", Name(parts, m), text);
  if (!error.source.empty()) absl::StrAppend(&error.message, " (", error.source, ")");
  return ToStatus(error);
}

}  // namespace

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
        return Wrong(
            Reason::kBadType, kind_, parts, m,
            absl::StrCat(
                " sends ", rows, " rows",
                part.sends.size() > 1 ? absl::StrCat(" to ", Name(parts, static_cast<int>(i))) : "",
                ", expected 0 to ", part.input_rows));
      }
      inputs_[m * size_ + i] = {end, rows};
      end += rows;
    }
    if (end > part.input_rows) {
      return Wrong(Reason::kBadType, kind_, parts, m,
                   absl::StrCat(" sends ", end, " rows in all, expected at most the ",
                                part.input_rows, " of its input"));
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
      if (IsReducing(kind_) && parts[m].sends[k] != parts[first].sends[k]) {
        return Wrong(
            Reason::kMismatch, kind_, parts, m,
            absl::StrCat(" has ", parts[m].sends[k], " rows for ", Name(parts, k), ", expected ",
                         parts[first].sends[k], " as ", Name(parts, first), " has"));
      }
      // All members get the same from members that are missing, too.
      if (GivesEqualResults(kind_) &&
          outputs_[m * size_ + k].count != outputs_[first * size_ + k].count) {
        return Wrong(
            Reason::kMismatch, kind_, parts, m,
            absl::StrCat(" expects ", outputs_[m * size_ + k].count, " rows from ", Name(parts, k),
                         ", which is missing, expected ", outputs_[first * size_ + k].count, " as ",
                         Name(parts, first), " does"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status RuntimePieces::PlaceOutputs(absl::Span<const Part> parts) {
  const CollectiveFacts& facts = FactsOf(kind_);
  for (int m = 0; m < size_; ++m) {
    const Part& part = parts[m];
    const int pieces = part.present ? PiecesOn(facts.out, size_, m == root_) : 0;
    int64_t end = 0;
    for (int k = 0; k < pieces; ++k) {
      int from = k;
      if (AtRoot(facts.in)) from = root_;
      if (IsReducing(kind_)) from = m;  // all members have the same
      int64_t rows = 0;
      if (!part.receives.empty()) {
        rows = part.receives[k];
        if (rows < 0 || rows > part.output_rows) {
          return Wrong(Reason::kBadType, kind_, parts, m,
                       absl::StrCat(" expects ", rows, " rows from ", Name(parts, from),
                                    ", expected 0 to ", part.output_rows));
        }
      }
      if (parts[from].present) {
        const int64_t sent = Sent(parts, from, m);
        if (!part.receives.empty() && rows != sent) {
          return Wrong(
              Reason::kMismatch, kind_, parts, m,
              absl::StrCat(" expected ", rows, " rows from ", Name(parts, from), ", got ", sent));
        }
        rows = sent;
      }
      outputs_[m * size_ + k] = {end, rows};
      end += rows;
    }
    if (end > part.output_rows) {
      return Wrong(Reason::kBadType, kind_, parts, m,
                   absl::StrCat(" gets ", end, " rows, expected at most the ", part.output_rows,
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
