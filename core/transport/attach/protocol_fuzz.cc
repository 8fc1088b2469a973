// Whatever decodes encodes to the same bytes again; nothing crashes.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "core/transport/attach/protocol.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<chorus::AttachRequest> request = chorus::DecodeAttachRequest(bytes);
  if (request.ok() && chorus::EncodeAttachRequest(*request) != bytes) std::abort();
  // A reply's error is decoded leniently: it must survive a second time, not byte for byte.
  const absl::StatusOr<chorus::AttachReply> reply = chorus::DecodeAttachReply(bytes);
  if (reply.ok()) {
    const absl::StatusOr<chorus::AttachReply> again =
        chorus::DecodeAttachReply(chorus::EncodeAttachReply(*reply));
    if (!again.ok() || again->status.code() != reply->status.code()) std::abort();
  }
  return 0;
}
