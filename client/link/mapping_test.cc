#include "client/link/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "gtest/gtest.h"

namespace chorus {
namespace internal {
namespace {

constexpr int64_t kBytes = 3 * 4096;

UniqueFd File(int64_t bytes, int seals) {
  UniqueFd fd(memfd_create("arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
  if (seals != 0) {
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  }
  return fd;
}

TEST(MappingTest, MapsWhatIsThereAndStays) {
  const UniqueFd whole = File(kBytes, F_SEAL_SHRINK);
  for (const int64_t bytes : {int64_t{1}, int64_t{4097}, kBytes}) {
    const auto mapping = Mapping::Make(whole.get(), bytes, PROT_READ | PROT_WRITE);
    ASSERT_TRUE(mapping.ok()) << mapping.status();
    EXPECT_EQ((*mapping)->bytes(), bytes);
    EXPECT_EQ((*mapping)->data()[bytes - 1], 0);
  }
}

TEST(MappingTest, RefusesWhatIsNotThereOrMayGo) {
  const UniqueFd whole = File(kBytes, F_SEAL_SHRINK);
  const UniqueFd open = File(kBytes, 0);
  for (const int64_t bytes : {int64_t{-1}, int64_t{0}, kBytes + 1}) {
    const auto mapping = Mapping::Make(whole.get(), bytes, PROT_READ);
    EXPECT_EQ(ErrorOf(mapping.status()).reason, Reason::kInternal) << bytes;
  }
  EXPECT_EQ(ErrorOf(Mapping::Make(open.get(), kBytes, PROT_READ).status()).reason,
            Reason::kInternal);
  EXPECT_EQ(ErrorOf(Mapping::Make(-1, kBytes, PROT_READ).status()).reason, Reason::kInternal);
}

}  // namespace
}  // namespace internal
}  // namespace chorus
