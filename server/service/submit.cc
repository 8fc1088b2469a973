#include "server/service/submit.h"

#include "absl/strings/str_cat.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/node/requests.h"

namespace chorus::server {

absl::StatusOr<std::string> FrameOf(int64_t sequence, absl::StatusOr<CommandBody> body) {
  CHORUS_RETURN_IF_ERROR(body.status());
  CHORUS_RETURN_IF_ERROR(node::CheckSequence(Sequence(sequence)));
  Command command;
  command.sequence = Sequence(sequence);
  command.body = *std::move(body);
  ByteWriter frame;
  EncodeFrame(command, &frame);
  if (frame.size() > kMaxFrameBytes) {
    return Malformed(absl::StrCat("command: expected at most ", kMaxFrameBytes,
                                  " bytes as a frame, got ", frame.size(),
                                  "; a large graph goes through a staging arena (staged)"));
  }
  return frame.Take();
}

}  // namespace chorus::server
