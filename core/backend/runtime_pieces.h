// Where the pieces of a collective stand in its tensors, when their rows are only known as it runs.
//
// Arithmetic on numbers that were copied from the members' memory; it checks all of them, for they
// may be a client's.
//
// Threads: thread-compatible. Ownership: parts are only read during Place(). Errors: said at
// Place().
#ifndef CHORUS_CORE_BACKEND_RUNTIME_PIECES_H_
#define CHORUS_CORE_BACKEND_RUNTIME_PIECES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"

namespace chorus {

class RuntimePieces {
 public:
  struct Part {
    bool present = false;
    absl::Span<const int64_t> sends;  // of each piece that goes in (core/graph/collective_kind.h)
    absl::Span<const int64_t> receives;  // of each that comes out, or none: whatever comes
    int64_t input_rows = 0;              // capacities
    int64_t output_rows = 0;
    // See CollectiveCall::RuntimeCounts.
    int32_t rank = -1;
    absl::string_view source;
  };
  struct Rows {
    int64_t first = 0;
    int64_t count = 0;
  };

  // INVALID_ARGUMENT kBadType: a count that is negative or exceeds its tensor; kMismatch: members
  // contradict each other. The text says which member, what was expected and what came. Allocates
  // nothing unless there are more members than ever before.
  absl::Status Place(CollectiveKind kind, int root, absl::Span<const Part> parts);

  // Of member m's input, piece `index` of those that go in; of its output, of those that come out.
  Rows Input(int m, size_t index) const { return inputs_[m * size_ + index]; }
  Rows Output(int m, size_t index) const { return outputs_[m * size_ + index]; }
  // How many rows of the tensor are in pieces; those behind them belong to nobody.
  int64_t InputEnd(int m) const { return input_ends_[m]; }
  int64_t OutputEnd(int m) const { return output_ends_[m]; }

 private:
  absl::Status PlaceInputs(absl::Span<const Part> parts);
  absl::Status PlaceOutputs(absl::Span<const Part> parts);
  absl::Status CheckAgreement(absl::Span<const Part> parts) const;
  // The rows that member `from` has for member `to`.
  int64_t Sent(absl::Span<const Part> parts, int from, int to) const;

  CollectiveKind kind_ = CollectiveKind::kUnspecified;
  int root_ = -1;
  int size_ = 0;
  std::vector<Rows> inputs_;  // [member][piece]
  std::vector<Rows> outputs_;
  std::vector<int64_t> input_ends_;
  std::vector<int64_t> output_ends_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_RUNTIME_PIECES_H_
