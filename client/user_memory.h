// all_reduce from the trainer's own memory to the trainer's own memory, such as a vector's. A
// library of its own, @chorus//client:user_memory.
//
//   UserMemory memory(world);
//   CHORUS_RETURN_IF_ERROR(memory.AllReduce(gradients.data(), gradients.data(), gradients.size()));
//
// The daemon cannot see such memory, so its bytes have to pass through memory that is shared. They
// do so in chunks, a few of them under way at a time: while one is reduced, the next is copied in
// and the one before is copied out. The chunks and their results stay in the caches, so that memory
// sees each operand read once and each result written once.
//
// A call is synchronous and not recorded: for gradients through a collective use tensors
// (chorus.h). Every rank gives the same count, type and reduction, and the result's bits are those
// of AllReduce. A call is one all_reduce a chunk (of several parts: behind an all_gather in which
// the ranks compare their counts), and counts once among the member's calls, however many they are;
// where the chunks begin is a function of the size alone. A rank with another count is a kMismatch
// on every rank, at the last chunk of the shortest one. A call stops at its first error, and the
// other ranks are told. Not inside Compile.
//
// Of many vectors, such as the gradients of a step, make one call: AllReduceCoalesced. Its chunks
// go through all of them as if they were one, so that no vector waits for the one before.
//
// By another transport than the ring no memory is shared: then each chunk is uploaded and read, and
// path() says so.
//
// Threads: thread-compatible.
// Ownership: it keeps its group, and staging memory that its calls use again; the trainer's memory
//   is read and written during a call alone.
// Errors: returned, with the line of the call: those of AllReduce (chorus/collectives.h), and
//   FAILED_PRECONDITION kWrongState for a group that is empty or ended with a Reform, or inside
//   Compile.
#ifndef CHORUS_CLIENT_USER_MEMORY_H_
#define CHORUS_CLIENT_USER_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/collectives.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {

namespace internal {
struct CallInRuns;
}  // namespace internal

class UserMemory {
 public:
  // How the bytes of the last call reached the daemon.
  enum class Path {
    kNone,     // there was no call
    kStaging,  // shared memory
    kUpload,   // copies, as by FromHost and Read: the call was small, or no memory is shared
  };

  explicit UserMemory(const Group& group) : group_(group) {}

  // The reduction of all members' `in`, to `out`, which is `in` or does not overlap it. After an
  // error `out` holds anything.
  template <typename T>
  absl::Status AllReduce(const T* in, T* out, size_t count, ReduceOp op = {},
                         CallSite site = CallSite::Here());

  // The same of each of `parts`. Every rank gives as many, with the same counts in the same order:
  // else kMismatch on every rank before anything is reduced, which names one that differs.
  template <typename T>
  struct Part {
    const T* in = nullptr;
    T* out = nullptr;  // `in`, or no part's memory but this one's
    size_t count = 0;
  };
  template <typename T>
  absl::Status AllReduceCoalesced(const std::vector<Part<T>>& parts, ReduceOp op = {},
                                  CallSite site = CallSite::Here());

  Path path() const { return path_; }

  // Elements of each chunk of a call: the last has what is left.
  static std::vector<size_t> ChunksOf(size_t count, size_t element_bytes);

 private:
  // A chunk's way in: a tensor of some length in staging memory.
  struct Staging {
    DType dtype = DType::kUnspecified;
    Shape shape;
    bool taken = false;  // by a chunk that is under way
    uint64_t last_use = 0;
    Tensor tensor;
    char* data = nullptr;
  };
  struct UnderWay {
    Staging* staging = nullptr;  // null: uploaded
    Tensor result;
    size_t bytes = 0;
  };
  struct Extent {
    const char* in = nullptr;
    char* out = nullptr;
    size_t bytes = 0;
  };
  // A position in the extents of a call, as if they were one.
  class Cursor;

  DeviceRef Device() const;
  absl::Status Run(DType dtype, size_t element_bytes, const std::vector<Extent>& extents,
                   const ReduceOp& op, CallSite site);
  absl::StatusOr<UnderWay> Start(DType dtype, const Shape& shape, size_t bytes, Cursor* from,
                                 const ReduceOp& op, internal::CallInRuns* call, CallSite site);
  // *everywhere: the error is one that every rank comes to.
  absl::Status AgreeOn(const std::vector<Extent>& extents, size_t element_bytes,
                       internal::CallInRuns* call, bool* everywhere, CallSite site);
  absl::StatusOr<std::string> CountsOf(int64_t rank, const std::vector<Extent>& extents,
                                       size_t element_bytes, internal::CallInRuns* call,
                                       CallSite site);
  absl::Status Finish(UnderWay* chunk, bool streaming, Cursor* to);
  // Null: the daemon is remote.
  absl::StatusOr<Staging*> Take(DType dtype, const Shape& shape, CallSite site);

  Group group_;
  bool remote_ = false;
  Path path_ = Path::kNone;
  uint64_t uses_ = 0;
  std::vector<std::unique_ptr<Staging>> stagings_;
};

template <typename T>
absl::Status UserMemory::AllReduce(const T* in, T* out, size_t count, ReduceOp op, CallSite site) {
  return AllReduceCoalesced<T>({{in, out, count}}, op, site);
}

template <typename T>
absl::Status UserMemory::AllReduceCoalesced(const std::vector<Part<T>>& parts, ReduceOp op,
                                            CallSite site) {
  std::vector<Extent> extents;
  extents.reserve(parts.size());
  for (const Part<T>& part : parts) {
    extents.push_back({reinterpret_cast<const char*>(part.in), reinterpret_cast<char*>(part.out),
                       part.count * sizeof(T)});
  }
  return Run(DTypeOf<T>(), sizeof(T), extents, op, site);
}

}  // namespace chorus

#endif  // CHORUS_CLIENT_USER_MEMORY_H_
