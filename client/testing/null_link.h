// A link that takes commands and has always done them: what is left is the SDK's own cost.
//
// Threads: as Link. Ownership: plain values. Errors: none: every call succeeds.
#ifndef CHORUS_CLIENT_TESTING_NULL_LINK_H_
#define CHORUS_CLIENT_TESTING_NULL_LINK_H_

#include <memory>
#include <string>
#include <vector>

#include "client/internal/link.h"
#include "core/base/bytes.h"
#include "core/base/error.h"

namespace chorus {
namespace testing {

class NullLink : public internal::Link {
 public:
  Transport transport() const override { return Transport::kRing; }
  std::vector<DeviceIndex> devices() const override { return {DeviceIndex(0)}; }
  int32_t max_tensors() const override { return 65536; }
  int32_t max_graphs() const override { return 16384; }

  absl::Status Submit(const Command& command) override {
    encoder_.Clear();
    EncodeFrame(command, &encoder_);
    ++frames_;
    bytes_ += static_cast<int64_t>(encoder_.size());
    return absl::OkStatus();
  }
  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence) override {
    return absl::optional<RunOutcome>(RunOutcome());
  }
  absl::Status WaitCommand(Sequence, absl::Duration) override { return absl::OkStatus(); }
  absl::StatusOr<bool> WaitTensor(TensorId, Sequence, absl::Duration) override { return false; }
  absl::Status Read(TensorId, Sequence, char*, int64_t, absl::Duration) override {
    return Unsupported("read");
  }
  absl::StatusOr<std::shared_ptr<const char>> MapTensor(TensorId, Sequence, int64_t,
                                                        absl::Duration) override {
    return Unsupported("map");
  }
  absl::StatusOr<Staging> CreateStaging(int64_t) override { return Unsupported("staging"); }
  absl::Status WriteStaging(ArenaId, int64_t, absl::string_view) override {
    return Unsupported("staging");
  }
  void UnmapStaging(ArenaId) override {}
  absl::StatusOr<internal::JoinedWorld> Join(const WorldOptions&, DeviceIndex) override {
    return internal::JoinedWorld{WorldId(1), Epoch(1)};
  }
  absl::StatusOr<GroupId> CreateGroup(WorldId, Rank, absl::Span<const int>,
                                      InstanceKey::Request) override {
    return GroupId(1);
  }
  absl::Status Leave(WorldId, Rank) override { return absl::OkStatus(); }
  absl::StatusOr<internal::ReformedWorld> Reform(WorldId, Rank, Timeout) override {
    return Unsupported("reform");
  }
  absl::StatusOr<std::vector<std::string>> Waits() override { return std::vector<std::string>(); }
  absl::Status Close() override { return absl::OkStatus(); }

  int64_t frames() const { return frames_; }
  int64_t bytes() const { return bytes_; }

 private:
  ByteWriter encoder_;
  int64_t frames_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CLIENT_TESTING_NULL_LINK_H_
