// Bytes on their way to the daemon that are too many for a frame: blocks of staging memory, used
// again when the commands that read from them are over.
//
// Threads: the session's lock guards it. Put waits for the oldest command where the blocks are
// full. Ownership: the link is the session's, and outlives it; blocks live as long as the session.
// Errors: Put's: the link's, and those of the command that it waits for.
#ifndef CHORUS_CLIENT_INTERNAL_STAGING_H_
#define CHORUS_CLIENT_INTERNAL_STAGING_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/internal/link.h"
#include "core/base/ids.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

class StagingPool {
 public:
  StagingPool(Link* link, absl::Duration wait_timeout) : link_(link), wait_timeout_(wait_timeout) {}

  struct Placement {
    ExternalRange range;
    Sequence* reader = nullptr;  // set to the command that reads it
  };
  // Copies `bytes` there. RESOURCE_EXHAUSTED: no memory is to be had. DEADLINE_EXCEEDED
  // kTransportTimeout: what is there was not read in time.
  absl::StatusOr<Placement> Put(absl::string_view bytes);

 private:
  struct Block {
    Link::Staging staging;
    int64_t bytes = 0;
    int64_t used = 0;
    Sequence last;  // the last command that reads from it
  };
  absl::StatusOr<Block*> BlockFor(int64_t bytes);

  Link* const link_;
  const absl::Duration wait_timeout_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_STAGING_H_
