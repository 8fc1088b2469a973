// What a matched collective comes down to: a list of reductions and copies between addresses, cut
// into chunks that any number of threads may run in any order.
//
// Shared by the backends that compute with the CPU, so that they have one arithmetic. Elements are
// reduced in member order whatever the chunks, so bits depend on neither size nor timing.
#ifndef CHORUS_CORE_BACKEND_COLLECTIVE_WORK_H_
#define CHORUS_CORE_BACKEND_COLLECTIVE_WORK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/backend/reduction.h"

namespace chorus {

// INVALID_ARGUMENT kBadType: what member `member` of `size` must not ask for (see backend.h).
// UNIMPLEMENTED: kinds, reductions and dtypes that this build does not run.
absl::Status CheckCall(const CollectiveCall& call, int size, int member);

// Turns device addresses into pointers. The host's are pointers already.
class AddressSpace {
 public:
  virtual ~AddressSpace() = default;
  // INTERNAL: [address, address + bytes) is not wholly inside one live allocation of `device`.
  virtual absl::Status Resolve(int device, DeviceAddress address, int64_t bytes,
                               void** pointer) const = 0;
};

// Threads: thread-compatible; RunChunk is const and may be called for different chunks at once.
class CollectiveWork {
 public:
  // One member's operands; a member that does not take part has none.
  struct Operands {
    bool present = false;
    int device = 0;
    const std::vector<DeviceAddress>* inputs = nullptr;
    const std::vector<DeviceAddress>* outputs = nullptr;
  };

  // `call`: kind, reduction, dtype, count and root, the same for all members; each member's call
  // has passed CheckCall. For kSend and kRecv, `call.root` is the sender. `space` is null where
  // addresses are pointers. Keeps no reference to its arguments; may be called again, and then
  // allocates nothing unless the new call is larger.
  absl::Status Prepare(const CollectiveCall& call, absl::Span<const Operands> members,
                       const AddressSpace* space);

  // Bytes read and written in all.
  int64_t traffic_bytes() const { return traffic_bytes_; }
  // The bytes of each result in a chunk that reads and writes about `traffic_bytes`.
  int64_t ChunkBytes(int64_t traffic_bytes) const;
  // For chunks of at most `chunk_bytes` bytes (rounded to whole cache lines) of each result.
  int64_t num_chunks(int64_t chunk_bytes) const;
  void RunChunk(int64_t chunk, int64_t chunk_bytes, bool streaming) const;

 private:
  // One pass: the elements of the inputs, reduced, to every output.
  struct Move {
    int32_t first_input = 0;
    int32_t num_inputs = 0;  // 0: zeros
    int32_t first_output = 0;
    int32_t num_outputs = 0;
  };

  // The pointer of a member's operand.
  absl::Status Resolve(const Operands& member, DeviceAddress address, void** pointer) const;
  void BeginMove();
  absl::Status AddInput(const Operands& member, DeviceAddress address);
  absl::Status AddOutput(const Operands& member, DeviceAddress address);
  // Outputs that are named twice or that are already there are left out.
  void EndMove();

  const AddressSpace* space_ = nullptr;
  ReduceFunction reduce_ = nullptr;
  int64_t element_bytes_ = 0;
  int64_t count_ = 0;
  int64_t traffic_bytes_ = 0;
  Move move_;
  std::vector<Move> moves_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_COLLECTIVE_WORK_H_
