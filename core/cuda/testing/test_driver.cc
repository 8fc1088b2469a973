#include "core/cuda/testing/test_driver.h"

#include <cstdlib>
#include <cstring>

namespace chorus {

bool TestsRunOnADriver() {
  const char* const gpu = std::getenv("CHORUS_TEST_GPU");
  return gpu != nullptr && std::strcmp(gpu, "driver") == 0;
}

}  // namespace chorus
