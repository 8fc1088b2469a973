// The collectives that all contenders are asked for, and what must come out: one description, so
// that ours, Open MPI's ranks and c10d's move the same bytes. torch_rank.py has it once more.
//
// A collective moves pieces of float32, all of one length. A rank has one piece or one for each
// member, and gets as many; its result is what it gets.
#ifndef CHORUS_BENCHMARKS_COLLECTIVE_CASE_H_
#define CHORUS_BENCHMARKS_COLLECTIVE_CASE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace chorus {
namespace bench {

// Of every kind, the list form and the form with all pieces in one tensor. send_recv: each rank and
// its neighbour, 0 and 1, 2 and 3, send each other a piece; the last of an odd number does nothing.
// The root is rank 0.
const std::vector<std::string>& CollectiveOps();

struct CollectiveCase {
  // INVALID_ARGUMENT: there is no such op.
  static absl::StatusOr<CollectiveCase> Of(const std::string& op, int ranks, int64_t piece_bytes);
  // With a result of so many bytes where a rank gets any; at least an element a piece.
  static absl::StatusOr<CollectiveCase> WithResult(const std::string& op, int ranks, int64_t bytes);

  int InputPieces(int rank) const;
  int OutputPieces(int rank) const;
  int64_t piece_bytes() const { return count * static_cast<int64_t>(sizeof(float)); }
  // Of a rank that gets most.
  int64_t result_bytes() const;
  // Of all ranks together.
  int64_t input_bytes() const;
  int64_t output_bytes() const;
  // Its result is pieces that some rank has already: where memory is shared, nothing is moved.
  bool HandsOver() const;

  // Writes the rank's pieces, or one of them.
  void Fill(int rank, float* pieces) const;
  void FillPiece(int rank, int piece, float* to) const;
  // DATA_LOSS unless the values are the rank's result, or a piece of it.
  absl::Status Check(int rank, const float* pieces) const;
  absl::Status CheckPiece(int rank, int piece, const float* values) const;
  // The rank that a rank sends to and hears from in send_recv; -1: none.
  int Neighbour(int rank) const;

  std::string op;
  int ranks = 0;
  int64_t count = 0;  // elements of a piece
};

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_COLLECTIVE_CASE_H_
