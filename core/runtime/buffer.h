// Buffers: counted ranges of an arena or of device memory.
//
// Threads: everything here belongs to the node thread; a buffer's reference count is plain.
// Ownership: BufferRef counts; with the last one a buffer returns to its home (memory.h), or is
// gone. Errors: said at OfStaging().
#ifndef CHORUS_CORE_RUNTIME_BUFFER_H_
#define CHORUS_CORE_RUNTIME_BUFFER_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "core/backend/backend.h"
#include "core/base/ids.h"
#include "core/runtime/arena.h"
#include "core/runtime/budget.h"

namespace chorus {

class Buffer;

// A counted handle on a buffer; null when default-made or moved from.
class BufferRef {
 public:
  BufferRef() = default;
  BufferRef(const BufferRef& other) : buffer_(other.buffer_) { Acquire(); }
  BufferRef(BufferRef&& other) noexcept : buffer_(other.buffer_) { other.buffer_ = nullptr; }
  BufferRef& operator=(BufferRef other) noexcept {
    std::swap(buffer_, other.buffer_);
    return *this;
  }
  ~BufferRef() { reset(); }

  inline void reset();
  Buffer* get() const { return buffer_; }
  Buffer* operator->() const { return buffer_; }
  Buffer& operator*() const { return *buffer_; }
  explicit operator bool() const { return buffer_ != nullptr; }
  friend bool operator==(const BufferRef& a, const BufferRef& b) { return a.buffer_ == b.buffer_; }
  friend bool operator!=(const BufferRef& a, const BufferRef& b) { return !(a == b); }

 private:
  friend class ArenaSet;
  friend class DeviceSet;
  friend class Buffer;
  struct Adopt {};
  BufferRef(Buffer* buffer, Adopt) : buffer_(buffer) {}
  inline void Acquire();

  Buffer* buffer_ = nullptr;
};

// Takes buffers back when their last reference has gone.
class BufferHome {
 public:
  virtual void Return(Buffer* buffer) = 0;

 protected:
  ~BufferHome() = default;
};

// A counted range of an arena, or of device memory.
class Buffer {
 public:
  enum class State : uint8_t {
    kStaging = 0,  // the client may still write it
    kFrozen = 1,   // holds a client's bytes, copied: not written any more
    kResult = 2,   // written by the run that made it, and not afterwards
  };

  // A range of a staging arena, which it keeps alive. INVALID_ARGUMENT kMalformed: out of bounds.
  static absl::StatusOr<BufferRef> OfStaging(std::shared_ptr<Arena> arena, int64_t offset,
                                             int64_t bytes);

  ArenaId arena() const { return arena_; }    // 0: not in an arena
  int64_t offset() const { return offset_; }  // in its arena
  int64_t bytes() const { return bytes_; }    // as asked for
  State state() const { return state_; }
  void set_state(State state) { state_ = state; }
  DeviceAddress address() const { return address_; }
  // Null when the host cannot address it.
  char* host() const { return arena_.value() == 0 ? nullptr : reinterpret_cast<char*>(address_); }
  // Of device memory: a copy that clients can read of exactly `bytes` bytes from `offset` on. Null:
  // none. (What stands in one range is complete when it is copied, what stands beside it may not
  // be.)
  const Buffer* mirror(int64_t offset, int64_t bytes) const;
  // Of copy->bytes() bytes from `offset` on; readers may have been told of one that is there, which
  // stays.
  void AddMirror(int64_t offset, BufferRef copy);
  void DropMirrors() { mirrors_.reset(); }
  int64_t references() const { return references_; }

 private:
  friend class BufferRef;
  friend class ArenaSet;
  friend class DeviceSet;
  friend class StagingHome;

  BufferHome* home_ = nullptr;
  DeviceAddress address_ = 0;
  int64_t offset_ = 0;
  int64_t bytes_ = 0;
  int64_t references_ = 0;
  ArenaId arena_;
  State state_ = State::kResult;
  using Mirrors = absl::flat_hash_map<std::pair<int64_t, int64_t>, BufferRef>;  // offset, bytes
  std::unique_ptr<Mirrors> mirrors_;                                            // null: none
  void* owner_ = nullptr;        // ArenaSet: its shelf
  Charge charge_;                // DeviceSet; an ArenaSet's arenas are charged
  Buffer* next_free_ = nullptr;  // ArenaSet: on its shelf
  std::shared_ptr<Arena> keep_;  // staging
};

void BufferRef::Acquire() {
  if (buffer_ != nullptr) ++buffer_->references_;
}
void BufferRef::reset() {
  Buffer* const buffer = buffer_;
  buffer_ = nullptr;
  if (buffer != nullptr && --buffer->references_ == 0) buffer->home_->Return(buffer);
}

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_BUFFER_H_
