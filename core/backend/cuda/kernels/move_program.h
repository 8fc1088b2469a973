// Writes the programs that the kernels of moves.h run, and says which kernel runs them.
//
// Threads: MoveProgram is thread-compatible, MoveKernelName a pure function. Ownership: addresses
// are noted, not used: the memory is the caller's. Errors: said at each function.
#ifndef CHORUS_CORE_BACKEND_CUDA_KERNELS_MOVE_PROGRAM_H_
#define CHORUS_CORE_BACKEND_CUDA_KERNELS_MOVE_PROGRAM_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/backend/cuda/kernels/moves.h"
#include "core/backend/reduction.h"
#include "core/graph/reduction_kind.h"
#include "core/tensor/type.h"

namespace chorus {
namespace cuda {

// The kernel of CHORUS_MOVE_KERNELS that reduces so, or moves if `reduction` is kNone: that one is
// for every dtype. Null where FindReduction has none either.
const char* MoveKernelName(Reduction reduction, DType dtype);

// Allocates nothing that an earlier program as large has had.
class MoveProgram {
 public:
  // Begins a new one.
  void Clear();

  // The operands that are added next are those of a new move: of `count` elements of
  // `element_bytes` each.
  void AddMove(int64_t count, int64_t element_bytes);
  // In the order of the tree's operands. A move that reduces has as many as SetSteps says, one that
  // copies has one, one that writes zeros has none.
  void AddInput(uint64_t address);
  void AddOutput(uint64_t address);
  // MIN and MAX of floating dtypes: for all inputs of the move or for none, in their order; 0 where
  // it is not wanted.
  void AddHolders(uint64_t address);
  // PRODUCT: a copy of the move's input `input`, which has been added, to `address`.
  void AddFactor(int input, uint64_t address);

  // Of all moves that reduce: the tree of their `num_inputs` inputs. UNIMPLEMENTED: more of its
  // partial results would wait than a kernel has memory for; of 64 members never.
  absl::Status SetSteps(const ReductionTree::Step* steps, int num_inputs);
  // PREMUL_SUM, of all moves: for each input, in their order, where its factor stands on the GPU;
  // 0: it is 1. AVG: none is added, or zeros.
  void AddScale(uint64_t address);
  void set_divisor(double divisor) { header_.divisor = divisor; }

  // The program as it is now, until it changes. Its own address must be a multiple of 8.
  absl::Span<const char> Bytes();
  // The threads that have something to do.
  int64_t units() const;
  // For a launch. `on_device` is the address of a copy of Bytes(), or 0: then Bytes() are at most
  // MoveArgs::kInlineBytes, and no copy is needed.
  MoveArgs Arguments(uint64_t on_device);

 private:
  MoveEntry& last_move() { return moves_.back(); }
  // Notes where an operand of the last move stands.
  void Align(uint64_t address);

  ProgramHeader header_;
  std::vector<MoveEntry> moves_;
  int64_t element_bytes_ = 0;  // of the last move
  std::vector<uint64_t> inputs_;
  std::vector<uint64_t> outputs_;
  std::vector<uint64_t> holders_;
  std::vector<FactorEntry> factors_;
  std::vector<uint64_t> scales_;
  std::vector<TreeStep> steps_;
  std::vector<char> bytes_;
};

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_KERNELS_MOVE_PROGRAM_H_
