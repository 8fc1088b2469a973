#include "core/runtime/buffer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {

// The home of ranges of staging arenas: each is made for one use and deleted after it.
class StagingHome final : public BufferHome {
 public:
  static StagingHome* Get() {
    static StagingHome home;
    return &home;
  }
  BufferRef Make(std::shared_ptr<Arena> arena, int64_t offset, int64_t bytes,
                 BufferRef (*adopt)(Buffer*)) {
    auto* const buffer = new Buffer;
    buffer->home_ = this;
    buffer->address_ = reinterpret_cast<DeviceAddress>(arena->data() + offset);
    buffer->offset_ = offset;
    buffer->bytes_ = bytes;
    buffer->references_ = 1;
    buffer->arena_ = arena->id();
    buffer->state_ = Buffer::State::kStaging;
    buffer->keep_ = std::move(arena);
    return adopt(buffer);
  }
  void Return(Buffer* buffer) override { delete buffer; }
};

absl::StatusOr<BufferRef> Buffer::OfStaging(std::shared_ptr<Arena> arena, int64_t offset,
                                            int64_t bytes) {
  if (arena->kind() != Arena::Kind::kStaging) {
    return Malformed(absl::StrCat("arena ", arena->id().value(), " is not a staging arena"));
  }
  if (offset < 0 || bytes < 0 || bytes > arena->bytes() || offset > arena->bytes() - bytes) {
    return Malformed(absl::StrCat("staging arena ", arena->id().value(), " has ", arena->bytes(),
                                  " bytes; the range of ", bytes, " at ", offset,
                                  " is not inside it"));
  }
  return StagingHome::Get()->Make(std::move(arena), offset, bytes, [](Buffer* buffer) {
    return BufferRef(buffer, BufferRef::Adopt());
  });
}

const Buffer* Buffer::mirror(int64_t offset, int64_t bytes) const {
  if (mirrors_ == nullptr) return nullptr;
  const auto it = mirrors_->find({offset, bytes});
  return it == mirrors_->end() ? nullptr : it->second.get();
}

void Buffer::AddMirror(int64_t offset, BufferRef copy) {
  if (mirrors_ == nullptr) mirrors_ = std::make_unique<Mirrors>();
  const int64_t bytes = copy->bytes();
  mirrors_->try_emplace({offset, bytes}, std::move(copy));
}

}  // namespace chorus
