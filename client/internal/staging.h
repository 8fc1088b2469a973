// Bytes on their way to the daemon that are too many for a frame: blocks of staging memory, used
// again when all commands that read from them are over. (These end in any order: a large upload may
// be copied while the commands behind it have their outcomes.) Above 64 MiB in all a block is given
// back that nobody reads, where another is made or it was not used for a while; so is all of it
// where the session is refused memory, and a block where a write to it has failed: the daemon may
// still carry that out.
//
// Threads: the session's lock guards it. Send waits for the commands that read the oldest block
// where the blocks are full, or no more are to be had. Ownership: the link and the log are the
// session's, and outlive it. Errors: Send's: the link's, and those of the command that it sends.
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
#include "absl/types/span.h"
#include "client/internal/link.h"
#include "client/internal/log.h"
#include "core/base/ids.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

class StagingPool {
 public:
  StagingPool(Link* link, absl::Duration wait_timeout, Log* log)
      : link_(link), wait_timeout_(wait_timeout), log_(log) {}

  // Copies `bytes` there and calls `send`, which sends the one command that reads them, and may
  // come back here for others. Gives what `send` gives. RESOURCE_EXHAUSTED: no memory is to be had.
  // DEADLINE_EXCEEDED kTransportTimeout: what is there was not read in time.
  absl::StatusOr<Sequence> Send(
      absl::string_view bytes,
      absl::FunctionRef<absl::StatusOr<Sequence>(const ExternalRange& range)> send);
  // Tells that the session has these arenas no more, whoever had them, behind what has been sent.
  void Release(absl::Span<const ArenaId> arenas);
  // Waits for what reads the blocks and gives them back, but for what is being sent. When it is OK
  // the daemon has taken all that was released, and may have the memory for what it has refused.
  absl::Status GiveBackAll();

 private:
  struct Block {
    Link::Staging staging;
    int64_t bytes = 0;
    int64_t used = 0;
    int64_t last_use = 0;           // which of the pool's sends
    int unsent = 0;                 // bytes of so many commands that are being sent
    bool is_spoilt = false;         // a write has failed: nothing more is put there
    std::vector<Sequence> readers;  // that may not be over, in their order
  };
  absl::StatusOr<Block*> BlockFor(int64_t bytes);
  // Whether nobody reads there any more. Forgets readers that are over.
  bool IsFree(Block* block) const;
  absl::Status Await(Block* block) const;
  // The block, when nobody reads there any more.
  absl::StatusOr<Block*> Emptied(Block* block) const;
  // Gives back blocks that are free, until it is that much less: those that have less than `below`,
  // which another will have, and those that were not used for a while.
  void GiveBackFree(int64_t bytes, int64_t below, const Block* but);
  // If it is spoilt, and the commands that read it are all in the log, ahead of its release.
  void GiveBackSpoilt(Block* block);
  // But for what is being sent.
  void GiveBackIf(absl::FunctionRef<bool(Block* block)> goes);

  Link* const link_;
  const absl::Duration wait_timeout_;
  Log* const log_;
  std::vector<std::unique_ptr<Block>> blocks_;
  int64_t sends_ = 0;
  Sequence last_release_;  // of arenas
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_STAGING_H_
