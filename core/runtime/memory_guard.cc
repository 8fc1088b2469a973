#include "core/runtime/memory_guard.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/runtime/budget.h"

namespace chorus {

MemoryGuard::MemoryGuard(int64_t most_bytes, Cgroup cgroup, std::function<absl::Time()> now)
    : most_bytes_(most_bytes), cgroup_(std::move(cgroup)), now_(std::move(now)) {}

absl::Status MemoryGuard::Admit(int64_t bytes, int64_t untouched, int64_t charged) {
  if (bytes <= room_) {
    room_ -= bytes;
    return absl::OkStatus();
  }
  const auto left = [&](int64_t had) { return most_bytes_ - had - untouched - bytes; };
  const auto admit = [&](int64_t left_bytes) {
    room_ = std::min(kBytesALook, left_bytes);
    return absl::OkStatus();
  };
  if (now_() < refused_at_ + kRefusal && left(had_bytes_) < 0) {
    return Refuse(bytes, charged);
  }
  CountWork(kWorkToLook);
  const absl::optional<int64_t> usage = cgroup_.usage();
  if (!usage.has_value()) return admit(kBytesALook);
  if (left(*usage) >= 0) return admit(left(*usage));
  CountWork(kWorkToLookCloser);
  const absl::optional<int64_t> fixed = cgroup_.fixed();
  if (!fixed.has_value()) return admit(kBytesALook);
  if (left(*fixed) >= 0) return admit(left(*fixed));
  room_ = 0;
  had_bytes_ = *fixed;
  refused_at_ = now_();
  return Refuse(bytes, charged);
}

absl::Status MemoryGuard::Refuse(int64_t bytes, int64_t charged) const {
  absl::Status refusal = MakeError(
      Reason::kOutOfMemory,
      absl::StrCat("out of memory: ", bytes, " bytes are needed, and the daemon's cgroup has ",
                   had_bytes_, " of the ", most_bytes_, " up to which it takes more; at least ",
                   std::max<int64_t>(had_bytes_ - charged, 0),
                   " of them are in no account: the daemon's own, and pages that clients keep in "
                   "sockets or pipes"));
  return had_bytes_ + bytes <= most_bytes_ ? ForNow(std::move(refusal)) : refusal;
}

}  // namespace chorus
