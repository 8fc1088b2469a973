// What a matched collective comes down to: a list of reductions and copies between addresses, cut
// into chunks that any number of threads may run in any order.
//
// The backends that compute with the CPU run the chunks here, so that they have one arithmetic; a
// backend that has another processor takes the list from here and runs it there. Elements are
// reduced in the one tree over all members (core/backend/reduction.h), the same for every kind,
// piece and output, whatever the chunks: bits depend on neither size nor timing. Members that do
// not take part are left out of it: they are nothing, not zeros.
//
// Threads: said at CollectiveWork; CheckCall is a pure function. Ownership: the memory of the
// operands is the callers'; of their calls nothing is kept. Errors: said at each function;
// RunChunk() cannot fail.
#ifndef CHORUS_CORE_BACKEND_COLLECTIVE_WORK_H_
#define CHORUS_CORE_BACKEND_COLLECTIVE_WORK_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/backend/reduction.h"
#include "core/backend/runtime_pieces.h"

namespace chorus {

// INVALID_ARGUMENT kBadType: what member `member` of `size` must not ask for (see backend.h).
// UNIMPLEMENTED: kinds, reductions and dtypes that this build does not run.
absl::Status CheckCall(const CollectiveCall& call, int size, int member);

// Turns device addresses into pointers. The host's are pointers already.
class AddressSpace {
 public:
  virtual ~AddressSpace() = default;
  // False: a pointer is of use only to the device, for which the list is made. Numbers that the
  // list depends on come and go by Read and Write; PREMUL_SUM's factors are left to the device.
  virtual bool host_addressable() const { return true; }
  virtual absl::Status Read(int device, DeviceAddress from, int64_t bytes, void* to) const;
  virtual absl::Status Write(int device, DeviceAddress to, int64_t bytes, const void* from) const;
  // INTERNAL: [address, address + bytes) is not wholly inside one live allocation in the domain of
  // `device`.
  virtual absl::Status Resolve(int device, DeviceAddress address, int64_t bytes,
                               void** pointer) const = 0;
};

// Threads: thread-compatible; RunChunk is const and may be called for different chunks at once.
class CollectiveWork {
 public:
  // What the calls of all members have in common. A pair of kSend and kRecv is a kSend whose root
  // is the sender.
  struct Common {
    CollectiveKind kind = CollectiveKind::kUnspecified;
    Reduction reduction = Reduction::kNone;
    DType dtype = DType::kUnspecified;
    int32_t root = -1;
    bool runtime = false;  // pieces are placed by runtime counts

    // Of a member's call.
    static Common Of(const CollectiveCall& call, int member);
    friend bool operator==(const Common& a, const Common& b) {
      return a.kind == b.kind && a.reduction == b.reduction && a.dtype == b.dtype &&
             a.root == b.root && a.runtime == b.runtime;
    }
    friend bool operator!=(const Common& a, const Common& b) { return !(a == b); }
  };
  struct Member {
    int device = 0;
    const CollectiveCall* call = nullptr;  // null: it does not take part
  };

  // One pass: the elements of the inputs, reduced, to every output.
  struct Move {
    int64_t count = 0;  // elements
    int64_t element_bytes = 0;
    int64_t first_chunk = 0;
    int32_t first_input = 0;
    int32_t num_inputs = 0;  // 0: zeros
    int32_t first_output = 0;
    int32_t num_outputs = 0;
    int32_t first_holders = -1;  // one for each input; -1: none is wanted
    int32_t first_factor = 0;
    int32_t num_factors = 0;
  };
  // A copy of an input as it was before the output was written, which may be the same memory.
  struct Factor {
    int32_t input = 0;  // of the move
    void* to = nullptr;
  };
  // What Prepare made, for a device that runs it: moves, and the lists that they index. It stands
  // until the next Prepare.
  struct List {
    Common common;
    absl::Span<const Move> moves;
    absl::Span<const void* const> inputs;
    absl::Span<void* const> outputs;
    absl::Span<float* const> holders;  // null for some
    absl::Span<const Factor> factors;
    absl::Span<const ReductionTree::Step> steps;  // of the tree of num_operands
    int num_operands = 0;
    absl::Span<const void* const> scales;  // PREMUL_SUM: where each input's factor stands
    double divisor = 1;
  };

  // Each member's call has passed CheckCall. `space` is null where addresses are pointers. Keeps no
  // reference to its arguments; may be called again, and then allocates nothing unless the new call
  // is larger. INTERNAL: members disagree about a piece, or memory is not what it should be.
  // INVALID_ARGUMENT: runtime counts that are wrong.
  absl::Status Prepare(const Common& common, absl::Span<const Member> members,
                       const AddressSpace* space);

  // The numbers that Prepare reads of a device's memory where there are runtime counts: address and
  // bytes of each.
  static std::vector<std::pair<DeviceAddress, int64_t>> NumbersOf(const Common& common,
                                                                  absl::Span<const Member> members);
  List list() const;

  // Bytes read and written in all.
  int64_t traffic_bytes() const { return traffic_bytes_; }
  // The bytes of each result in a chunk that reads and writes about `traffic_bytes`.
  int64_t ChunkBytes(int64_t traffic_bytes) const;
  // Cuts the work into chunks of at most `chunk_bytes` bytes (rounded to whole cache lines) of each
  // result. How many they are.
  int64_t Cut(int64_t chunk_bytes);
  void RunChunk(int64_t chunk, bool streaming) const;
  // All of it, on this thread.
  void RunWhole();

 private:
  // For texts: "member 2's input 0".
  struct Operand {
    int member = -1;
    const char* list = nullptr;
    size_t index = 0;
  };

  // A piece in a member's operand.
  struct Slice {
    DeviceAddress address = 0;  // 0: no memory, or none of interest
    int64_t count = 0;          // elements
    int64_t first = 0;          // elements before it
  };

  absl::Status ReadRuntimeCounts(absl::Span<const Member> members);
  absl::Status CopyCounts(const Member& member, DeviceAddress address, int count);
  absl::Status Read(const Member& member, DeviceAddress from, int64_t bytes, void* to) const;
  // What stands behind the pieces, and what is told of them.
  absl::Status FinishRuntime(absl::Span<const Member> members);
  // Adds a move of zeros to elements [begin, end); not if they stand in `once`, where they are
  // noted.
  absl::Status AddZeros(const Member& member, DeviceAddress address, int64_t begin, int64_t end,
                        int64_t element_bytes, std::vector<void*>* once = nullptr);
  Slice SliceOf(const RuntimePieces::Rows& rows, const CollectiveCall::RuntimeCounts& runtime,
                const std::vector<DeviceAddress>& operands) const;
  Slice InputOf(const CollectiveCall& call, int member, size_t index) const;
  Slice OutputOf(const CollectiveCall& call, int member, size_t index) const;

  absl::Status PrepareReduction(absl::Span<const Member> members);
  absl::Status PrepareMovement(absl::Span<const Member> members);
  absl::Status ReadScales(absl::Span<const Member> members);
  // Every member's input `index`, with its holders.
  absl::Status AddReducedInputs(absl::Span<const Member> members, size_t index);
  absl::Status AddFactors(const Member& member);

  absl::Status Resolve(const Member& member, DeviceAddress address, int64_t bytes,
                       void** pointer) const;
  void BeginMove();
  absl::Status AddInput(absl::Span<const Member> members, int member, size_t index);
  absl::Status AddOutput(absl::Span<const Member> members, int member, size_t index);
  // The first operand gives the move its number of elements, the others must agree. Nothing is
  // added where there is no memory.
  template <typename Pointer>
  absl::Status AddOperand(const Member& member, const Operand& operand, const Slice& slice,
                          std::vector<Pointer>* to);
  absl::Status Disagree(const Operand& operand, int64_t count) const;
  // Outputs that are named twice or that are already there are left out.
  void EndMove();

  bool Reduces(const Move& move) const {
    return move.num_inputs > 1 || (move.num_inputs == 1 && changes_single_input_);
  }
  // How many of a move's elements are read and written for each result.
  static int64_t OperandsPerElement(const Move& move);
  ReducePass PassOf(const void* const* inputs, const Move& move, void* output) const;
  void ReduceWithHolders(const Move& move, int64_t begin, int64_t end) const;

  Common common_;
  const AddressSpace* space_ = nullptr;
  ReduceFunction reduce_ = nullptr;
  HoldersFunction count_holders_ = nullptr;
  bool changes_single_input_ = false;
  int64_t element_bytes_ = 0;
  int64_t traffic_bytes_ = 0;
  int64_t chunk_elements_ = 1;
  double divisor_ = 1;
  std::vector<double> scales_;               // AVG, PREMUL_SUM: by input of a move
  std::vector<const void*> scale_pointers_;  // PREMUL_SUM, where the device reads them
  std::vector<int32_t> ranks_;  // the members that take part: the inputs of each move that reduces
  ReductionTree tree_;          // of these
  Move move_;                   // being made
  Operand first_;               // that gave move_ its number of elements
  std::vector<Move> moves_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  std::vector<float*> holders_;
  std::vector<Factor> factors_;
  RuntimePieces pieces_;
  std::vector<int64_t> counts_;  // the members' sends and receives, copied
  std::vector<int64_t> received_;
  std::vector<RuntimePieces::Part> parts_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_COLLECTIVE_WORK_H_
