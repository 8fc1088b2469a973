#include "core/backend/backend_options.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {

absl::Status CheckDeviceCount(int devices) {
  if (devices >= 1 && devices <= kMaxDevices) return absl::OkStatus();
  return Malformed(absl::StrCat("devices: expected 1 to ", kMaxDevices, ", got ", devices));
}

}  // namespace chorus
