// A message that converts gives a command whose message converts to the same frame; errors never
// exceed their limit; nothing crashes.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "chorus/v1/commands.pb.h"
#include "chorus/v1/errors.pb.h"
#include "core/base/bytes.h"
#include "core/transport/command.h"
#include "proto/convert/convert.h"
#include "proto/convert/errors_convert.h"

namespace {

std::string FrameOf(const chorus::Command& command) {
  chorus::ByteWriter out;
  chorus::EncodeFrame(command, &out);
  return out.Take();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int length = static_cast<int>(size);
  chorus::v1::Command message;
  if (message.ParseFromArray(data, length)) {
    const absl::StatusOr<chorus::Command> command = chorus::FromProto(message);
    if (command.ok()) {
      chorus::v1::Command again;
      if (!chorus::ToProto(*command, &again).ok()) std::abort();
      const absl::StatusOr<chorus::Command> twice = chorus::FromProto(again);
      if (!twice.ok() || FrameOf(*twice) != FrameOf(*command)) std::abort();
    }
  }
  chorus::v1::RpcStatus status;
  if (status.ParseFromArray(data, length)) {
    const chorus::v1::RpcStatus packed = chorus::ToRpcStatus(chorus::FromRpcStatus(status));
    if (packed.ByteSizeLong() > chorus::kMaxErrorBytes) std::abort();
  }
  return 0;
}
