// Bytes on their way to the daemon that are too many for a frame: blocks of staging memory, used
// again when all commands that read from them are over. (These end in any order: a large upload may
// be copied while the commands behind it have their outcomes.) A block is given back where a write
// to it has failed: the daemon may still carry that out.
//
// Threads: the session's lock guards it. Send waits for the commands that read the oldest block
// where the blocks are full. Ownership: the link and the releases are the session's, and outlive
// it; other blocks live as long as the session. Errors: Send's: the link's, and those of the
// command that it sends.
#ifndef CHORUS_CLIENT_INTERNAL_STAGING_H_
#define CHORUS_CLIENT_INTERNAL_STAGING_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/internal/link.h"
#include "client/internal/releases.h"
#include "core/base/ids.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

class StagingPool {
 public:
  StagingPool(Link* link, absl::Duration wait_timeout, Releases* releases)
      : link_(link), wait_timeout_(wait_timeout), releases_(releases) {}

  // Copies `bytes` there and calls `send`, which sends the one command that reads them, and may
  // come back here for others. Gives what `send` gives. RESOURCE_EXHAUSTED: no memory is to be had.
  // DEADLINE_EXCEEDED kTransportTimeout: what is there was not read in time.
  absl::StatusOr<Sequence> Send(
      absl::string_view bytes,
      absl::FunctionRef<absl::StatusOr<Sequence>(const ExternalRange& range)> send);

 private:
  struct Block {
    Link::Staging staging;
    int64_t bytes = 0;
    int64_t used = 0;
    int unsent = 0;                 // bytes of so many commands that are being sent
    bool is_spoilt = false;         // a write has failed: nothing more is put there
    std::vector<Sequence> readers;  // that may not be over, in their order
  };
  absl::StatusOr<Block*> BlockFor(int64_t bytes);
  // Whether nobody reads there any more. Forgets readers that are over.
  bool IsFree(Block* block) const;
  absl::Status Await(Block* block) const;
  // If it is spoilt, and the commands that read it are all in the log, ahead of its release.
  void GiveBackSpoilt(Block* block);

  Link* const link_;
  const absl::Duration wait_timeout_;
  Releases* const releases_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_STAGING_H_
