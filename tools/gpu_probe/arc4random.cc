// The C++ library's archive takes arc4random() from the C library, for std::random_device, which
// nothing here uses: that alone would ask for glibc 2.36, where 2.34 does. This one stands in.
#include <stdlib.h>
#include <sys/random.h>

extern "C" __uint32_t arc4random() noexcept {
  __uint32_t number = 0;
  if (getrandom(&number, sizeof(number), 0) != sizeof(number)) abort();
  return number;
}
