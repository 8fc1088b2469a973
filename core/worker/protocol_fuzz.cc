// Any bytes in place of the messages that a worker and its daemon send each other. None may crash a
// decoder; a message that comes of them is encoded to bytes of which the same message comes again.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/string_view.h"
#include "core/base/bytes.h"
#include "core/worker/protocol.h"

namespace {

template <typename Decode>
void Try(absl::string_view bytes, Decode decode) {
  const auto message = decode(bytes);
  if (!message.ok()) return;
  chorus::ByteWriter once;
  chorus::worker::Encode(*message, &once);
  const auto again = decode(once.bytes());
  if (!again.ok()) std::abort();
  chorus::ByteWriter twice;
  chorus::worker::Encode(*again, &twice);
  if (once.bytes() != twice.bytes()) std::abort();
}

}  // namespace

// The first byte says whose decoder gets the others: the worker's or the daemon's.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const absl::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 2 == 0) {
    Try(bytes, chorus::worker::DecodeToWorker);
  } else {
    Try(bytes, chorus::worker::DecodeToDaemon);
  }
  return 0;
}
