#include "core/ops/host_onednn.h"

#include <dnnl.hpp>

namespace chorus {

void PrepareSgemm() {
  static const bool prepared = [] {
    UseOneThread();
    constexpr int kSize = 16;
    const float zeros[kSize * kSize] = {};
    float c[kSize * kSize];
    return dnnl::sgemm('N', 'N', kSize, kSize, kSize, 1, zeros, kSize, zeros, kSize, 0, c, kSize) ==
           dnnl::status::success;
  }();
  static_cast<void>(prepared);
}

}  // namespace chorus
