#include "core/cuda/shared_library.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace cuda {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

void MakeFolder(const std::string& path) {
  for (size_t end = path.find('/', 1); end != std::string::npos; end = path.find('/', end + 1)) {
    mkdir(path.substr(0, end).c_str(), 0755);
  }
  mkdir(path.c_str(), 0755);
}

class PythonFoldersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/chorus-python-XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    root_ = path;
  }
  void TearDown() override {
    for (const char* name : {"PYTHONPATH", "VIRTUAL_ENV"}) unsetenv(name);
    ASSERT_EQ(system(("rm -r " + root_).c_str()), 0);
  }
  std::string root_;
};

TEST(SharedLibraryTest, SaysInOneLineWhatIsNotThere) {
  const auto library = SharedLibrary::Open({"libchorus-none.so.1", "libchorus-none.so.0"}, {}, {});
  ASSERT_FALSE(library.ok());
  const std::string text(library.status().message());
  EXPECT_THAT(text, HasSubstr("no libchorus-none.so.1 or libchorus-none.so.0: "));
  EXPECT_THAT(text, HasSubstr("libchorus-none.so.1: cannot open shared object file"));
  EXPECT_THAT(text, Not(HasSubstr("\n")));
}

TEST(SharedLibraryTest, FindsSymbolsOfTheNextNameToo) {
  const auto library = SharedLibrary::Open({"libchorus-none.so.1", "libm.so.6"}, {}, {});
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_NE(library->Find("cos"), nullptr);
  EXPECT_EQ(library->Find("chorus_no_such_function"), nullptr);
  EXPECT_THAT(library->path(), HasSubstr("/libm.so.6"));
}

TEST(SharedLibraryTest, FoldersOfTheEnvironmentComeBehindThoseOfTheCall) {
  setenv("CHORUS_CUDA_LIBRARIES", "/b::/c", 1);
  EXPECT_THAT(WithLibraryFolders({"/a"}), ElementsAre("/a", "/b", "/c"));
  unsetenv("CHORUS_CUDA_LIBRARIES");
  EXPECT_THAT(WithLibraryFolders({"/a"}), ElementsAre("/a"));
}

TEST(SharedLibraryTest, AFileThatIsNoLibraryIsPassedOver) {
  char path[] = "/tmp/chorus-library-XXXXXX";
  ASSERT_NE(mkdtemp(path), nullptr);
  const std::string bad = std::string(path) + "/libm.so.6";
  std::ofstream(bad) << "not a library";
  const auto library = SharedLibrary::Open({"libm.so.6"}, {path}, {});
  EXPECT_TRUE(library.ok()) << library.status();
  unlink(bad.c_str());
  rmdir(path);
}

TEST_F(PythonFoldersTest, LooksInPackagesOfPythonpath) {
  const std::string folder = root_ + "/nvidia/nccl/lib";
  MakeFolder(folder);
  setenv("PYTHONPATH", (root_ + "/none:" + root_).c_str(), 1);
  EXPECT_THAT(PythonLibraryFolders({"cu13", "nccl"}), Contains(folder));
  EXPECT_THAT(PythonLibraryFolders({"cu13"}), Not(Contains(folder)));
}

TEST_F(PythonFoldersTest, LooksInAVirtualEnvironmentAndInWhatItsInterpreterLinksTo) {
  const std::string in_environment = root_ + "/venv/lib/python3.12/site-packages/nvidia/cu13/lib";
  const std::string behind_link = root_ + "/real/lib/python3.12/site-packages/nvidia/cu13/lib";
  MakeFolder(in_environment);
  MakeFolder(behind_link);
  MakeFolder(root_ + "/bin");
  MakeFolder(root_ + "/real/bin");
  const std::string interpreter = root_ + "/real/bin/python3";
  std::ofstream(interpreter) << "#!/bin/sh\n";
  chmod(interpreter.c_str(), 0755);
  ASSERT_EQ(symlink("../real/bin/python3", (root_ + "/bin/python3").c_str()), 0);
  setenv("VIRTUAL_ENV", (root_ + "/venv").c_str(), 1);
  const std::string path = getenv("PATH") == nullptr ? "" : getenv("PATH");
  setenv("PATH", (root_ + "/bin:" + path).c_str(), 1);
  const std::vector<std::string> folders = PythonLibraryFolders({"cu13"});
  setenv("PATH", path.c_str(), 1);
  EXPECT_THAT(folders, Contains(in_environment));
  // The link leads by way of "..": the same folder under another name.
  EXPECT_THAT(folders,
              Contains(::testing::EndsWith("/real/lib/python3.12/site-packages/nvidia/cu13/lib")));
}

}  // namespace
}  // namespace cuda
}  // namespace chorus
