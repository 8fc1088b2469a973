// Whatever DecodeFrame accepts, EncodeFrame gives back byte for byte; it crashes on nothing.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/transport/command.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The size field is made right, so that the search gets past it.
  std::string frame(reinterpret_cast<const char*>(data), size);
  const uint32_t stated = static_cast<uint32_t>(size);
  if (size >= sizeof(stated)) std::memcpy(&frame[0], &stated, sizeof(stated));
  const absl::StatusOr<chorus::Command> command = chorus::DecodeFrame(frame);
  if (command.ok()) {
    chorus::ByteWriter out;
    chorus::EncodeFrame(*command, &out);
    if (out.bytes() != frame) std::abort();
  }
  return 0;
}
