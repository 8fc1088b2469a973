// What is counted does not depend on how the bytes come: at once, one by one, or in two pieces,
// nor, but for how many these are, does it whether a connection may go on. It is never more than
// the bytes have room for, and what is a call is answered.

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "server/http2_frames.h"

namespace chorus::server {
namespace {

// In pieces: the first of so many bytes, the others of `size`.
Http2Frames::Counts Take(absl::string_view bytes, size_t first, size_t size, uint32_t pieces) {
  // Few streams, so that some are given up.
  Http2Frames frames(Http2Frames::Limits{2, 1000, pieces, 50, 2, pieces + 2});
  Http2Frames::Counts sum;
  for (size_t piece = first; !bytes.empty(); piece = size) {
    sum += frames.Take(bytes.substr(0, piece));
    bytes.remove_prefix(bytes.substr(0, piece).size());
  }
  return sum;
}

bool Equal(Http2Frames::Counts a, Http2Frames::Counts b) {
  return a.calls == b.calls && a.requests == b.requests && a.broken == b.broken;
}

}  // namespace
}  // namespace chorus::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kPreface = 24;
  constexpr size_t kHead = 9;
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  // Cut where the input says, which is most often inside a frame.
  const size_t cut = size == 0 ? 0 : 1 + data[size - 1] % size;
  constexpr uint32_t kAny = uint32_t{1} << 30;
  const chorus::server::Http2Frames::Counts whole = chorus::server::Take(bytes, size, size, kAny);
  if (!chorus::server::Equal(whole, chorus::server::Take(bytes, 1, 1, kAny))) std::abort();
  if (!chorus::server::Equal(whole, chorus::server::Take(bytes, cut, size, kAny))) std::abort();
  // More pieces are worse.
  constexpr uint32_t kFew = 8;
  if (!chorus::server::Take(bytes, size, size, kFew).broken.empty() &&
      chorus::server::Take(bytes, cut, size, kFew).broken.empty()) {
    std::abort();
  }
  const size_t frames = size < kPreface ? 0 : (size - kPreface) / kHead;
  if (whole.requests < 0 || static_cast<size_t>(whole.requests) > frames) std::abort();
  if (whole.calls < 0 || whole.calls > whole.requests) std::abort();
  return 0;
}
