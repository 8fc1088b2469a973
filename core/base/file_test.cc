#include "core/base/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

class FileTest : public ::testing::Test {
 protected:
  FileTest() {
    folder_ = ::testing::TempDir() + "/file.XXXXXX";
    EXPECT_NE(mkdtemp(&folder_[0]), nullptr);
    path_ = folder_ + "/file";
  }
  ~FileTest() override { (void)std::system(("rm -rf " + folder_).c_str()); }

  std::string folder_;
  std::string path_;
};

TEST_F(FileTest, WhatIsWrittenIsReadWhateverItsSize) {
  for (const size_t size : {0, 1, 4096, 70001}) {
    const std::string bytes(size, 'x');
    ASSERT_TRUE(ReplaceFile(path_, {"ab", bytes, "", "z"}).ok());
    const absl::StatusOr<HeldBytes> read = MapFile(path_);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->bytes, absl::StrCat("ab", bytes, "z"));
  }
  ASSERT_TRUE(ReplaceFile(path_, {}).ok());
  EXPECT_TRUE(MapFile(path_)->bytes.empty());
}

TEST_F(FileTest, ReadersOfTheOldFileKeepIt) {
  ASSERT_TRUE(ReplaceFile(path_, {"old"}).ok());
  const absl::StatusOr<HeldBytes> old = MapFile(path_);
  ASSERT_TRUE(old.ok()) << old.status();
  ASSERT_TRUE(ReplaceFile(path_, {"new"}).ok());
  EXPECT_EQ(old->bytes, "old");
  EXPECT_EQ(MapFile(path_)->bytes, "new");
}

TEST_F(FileTest, WhatIsNoFileIsRefused) {
  EXPECT_EQ(ErrorOf(MapFile(path_).status()).reason, Reason::kUnknownName);
  EXPECT_EQ(ErrorOf(MapFile(folder_).status()).reason, Reason::kMalformed);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_EQ(ErrorOf(MapFile(path_).status()).reason, Reason::kMalformed);
}

TEST_F(FileTest, AReplacementThatFailsLeavesNothingBehind) {
  EXPECT_EQ(ErrorOf(ReplaceFile(folder_ + "/no/such", {"x"})).reason, Reason::kUnknownName);
  // A directory cannot be replaced by a file.
  ASSERT_EQ(mkdir(path_.c_str(), 0700), 0);
  EXPECT_EQ(ErrorOf(ReplaceFile(path_, {"x"})).reason, Reason::kWrongState);
  EXPECT_EQ(rmdir(path_.c_str()), 0);
  EXPECT_EQ(rmdir(folder_.c_str()), 0) << "something is left in " << folder_;
}

// What one that died has left stays as it is.
TEST_F(FileTest, EachWriterOfAPathHasAFileOfItsOwnUntilItsTurn) {
  const std::string left = path_ + ".new.0";
  ASSERT_TRUE(ReplaceFile(left, {"left"}).ok());
  std::vector<std::thread> threads;
  for (const char letter : {'a', 'b', 'c'}) {
    threads.emplace_back([this, letter] {
      for (int i = 0; i < 8; ++i) {
        const std::string bytes(5000, letter);
        const absl::Status status = ReplaceFile(path_, {bytes, bytes});
        EXPECT_TRUE(status.ok()) << status;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const absl::StatusOr<HeldBytes> read = MapFile(path_);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->bytes, std::string(10000, read->bytes[0]));
  EXPECT_EQ(MapFile(left)->bytes, "left");
  EXPECT_EQ(unlink(left.c_str()), 0);
  EXPECT_EQ(unlink(path_.c_str()), 0);
  EXPECT_EQ(rmdir(folder_.c_str()), 0) << "something is left in " << folder_;
}

TEST(HoldTest, TheBytesAreKept) {
  HeldBytes held = Hold("a short one");
  const HeldBytes copy = held;
  held = HeldBytes();
  EXPECT_EQ(copy.bytes, "a short one");
}

}  // namespace
}  // namespace chorus
