// The memory through which bytes of tensors go between a daemon and its worker (protocol.h).
//
// Threads: any; which slot is whose is the protocol's to say. Ownership: each end has its mapping.
// Errors: RESOURCE_EXHAUSTED kOutOfMemory: what the system refuses; INVALID_ARGUMENT kMalformed: a
// file that is no window.
#ifndef CHORUS_CORE_WORKER_WINDOW_H_
#define CHORUS_CORE_WORKER_WINDOW_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "core/base/unique_fd.h"
#include "core/worker/protocol.h"

namespace chorus::worker {

class Window {
 public:
  // Sealed: neither end can make it shorter.
  static absl::StatusOr<std::unique_ptr<Window>> Create();
  static absl::StatusOr<std::unique_ptr<Window>> Map(UniqueFd fd);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  int fd() const { return fd_.get(); }
  char* upload_slot(int slot) const { return base_ + slot * kSlotBytes; }
  char* download_slot(int slot) const { return base_ + (kSlots + slot) * kSlotBytes; }

 private:
  Window(UniqueFd fd, char* base) : fd_(std::move(fd)), base_(base) {}
  static absl::StatusOr<std::unique_ptr<Window>> MapWhole(UniqueFd fd);

  const UniqueFd fd_;
  char* const base_;
};

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_WINDOW_H_
