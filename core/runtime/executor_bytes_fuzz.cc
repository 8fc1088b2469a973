// Bytes for an executor: device plans, launches and completions. None may crash it; what decodes
// must encode to what decodes to the same.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/string_view.h"
#include "core/base/bytes.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/messages.h"

namespace {

void Require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

// The first byte chooses the format.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const absl::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  chorus::ByteWriter out;
  switch (data[0] % 3) {
    case 0: {
      const auto plan = chorus::DecodeDevicePlan(bytes);
      if (!plan.ok()) return 0;
      const std::string once = chorus::EncodeDevicePlan(*plan);
      const auto again = chorus::DecodeDevicePlan(once);
      Require(again.ok() && chorus::EncodeDevicePlan(*again) == once);
      return 0;
    }
    case 1: {
      const auto launch = chorus::DecodeLaunch(bytes);
      if (!launch.ok()) return 0;
      chorus::EncodeLaunch(*launch, &out);
      const auto again = chorus::DecodeLaunch(out.bytes());
      Require(again.ok() && again->launch == launch->launch && again->buffers == launch->buffers &&
              again->after == launch->after && again->uploads == launch->uploads &&
              again->inlines.size() == launch->inlines.size());
      return 0;
    }
    default: {
      const auto event = chorus::DecodeEvent(bytes);
      if (!event.ok()) return 0;
      chorus::EncodeEvent(*event, &out);
      const auto again = chorus::DecodeEvent(out.bytes());
      Require(again.ok() && again->index() == event->index());
      return 0;
    }
  }
}
