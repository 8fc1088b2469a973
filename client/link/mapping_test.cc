#include "client/link/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
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

// Where it was something of the child's own may stand.
TEST(MappingTest, AForkedChildUnmapsNothing) {
  const UniqueFd whole = File(kBytes, F_SEAL_SHRINK);
  auto mapping = Mapping::Make(whole.get(), kBytes, PROT_READ);
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    char* const own =
        static_cast<char*>(::mmap((*mapping)->data(), kBytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
    if (own != (*mapping)->data()) ::_exit(1);
    mapping->reset();
    own[0] = 1;
    ::_exit(own[0] == 1 ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace internal
}  // namespace chorus
