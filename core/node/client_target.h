// Where an output of a run is written in client memory.
//
// Threads: the node thread. Ownership: shares the arena. Errors: none; Storage::FindTarget makes
// it.
#ifndef CHORUS_CORE_NODE_CLIENT_TARGET_H_
#define CHORUS_CORE_NODE_CLIENT_TARGET_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/runtime/arena.h"
#include "core/runtime/buffer.h"

namespace chorus::node {

struct ClientTarget {
  std::shared_ptr<Arena> arena;
  int64_t offset = 0;            // bytes
  std::vector<int64_t> strides;  // elements; empty: row-major
  int64_t work = 0;              // of a copy there (StridedExtent)
  BufferRef landing;             // host memory for what comes from a device and is to be spread
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_CLIENT_TARGET_H_
