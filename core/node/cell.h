// A tensor's value on its way: named at submit, given its memory at launch, readable at completion.
//
// Threads: the node thread. Ownership: a cell is shared, and shares its buffer. Errors: a failed
// cell has its error.
#ifndef CHORUS_CORE_NODE_CELL_H_
#define CHORUS_CORE_NODE_CELL_H_

#include <memory>

#include "absl/types/optional.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/graph/graph.h"
#include "core/node/waiters.h"
#include "core/runtime/buffer.h"
#include "core/runtime/messages.h"
#include "core/tensor/type.h"

namespace chorus::node {

// What a client's tensor id stands for. Shared by the id, by the run that computes it and by its
// readers, so that releasing the id takes nothing away from work under way.
struct Cell {
  enum class State : uint8_t {
    kPending,   // its run is not launched: it has no memory yet; without one it is being made
    kLaunched,  // has its memory; written when `launch`, or `upload`, has completed
    kReady,
    kFailed,
  };
  State state = State::kPending;
  std::shared_ptr<const TensorType> type;
  DeviceIndex device;
  RunHandle producer;  // until it is settled; none: it is made from a client's bytes
  int32_t output = 0;  // of it, which one
  LaunchId launch;     // while kLaunched: this,
  TransferId upload;   // or that
  BufferRef buffer;    // null: no bytes
  int64_t offset = 0;  // in `buffer`
  int64_t bytes = 0;
  // Equal for equal values (equal_work.h); 0: not known. Other cells may be given its buffer while
  // it is pending.
  Hash128 value_id;
  Sequence donated_to;                 // the run that it is promised to; 0: none
  std::shared_ptr<const Error> error;  // kFailed
  // Run once with this cell, when it is ready or failed. They must not hold it: it would hold
  // itself, and a cell that is not settled before the node ends would never go.
  Waiters<std::shared_ptr<Cell>> on_settled;

  bool settled() const { return state == State::kReady || state == State::kFailed; }
  // Of a client's bytes, which are on their way: no device may read it.
  bool being_made() const { return state == State::kPending && producer == RunHandle(); }
  DeviceAddress address() const {
    return buffer ? buffer->address() + static_cast<DeviceAddress>(offset) : 0;
  }
  // Where clients read it; a null buffer: it has no bytes, or the host cannot read it (yet).
  struct Location {
    const Buffer* buffer = nullptr;
    int64_t offset = 0;  // in `buffer`
  };
  Location readable() const {
    if (!buffer || buffer->host() != nullptr) return {buffer.get(), offset};
    return {buffer->mirror(offset, bytes), 0};
  }
  // Null when the host cannot read it (yet).
  const char* host() const {
    if (!buffer) return "";
    const Location location = readable();
    return location.buffer == nullptr ? nullptr : location.buffer->host() + location.offset;
  }
};
using CellRef = std::shared_ptr<Cell>;

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_CELL_H_
