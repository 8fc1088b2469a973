// A tree of files that stand in for the system's, such as /proc and /sys.
//
// Threads: the test's. Ownership: its files go with it. Errors: a folder that cannot be made ends
// the process.
#ifndef CHORUS_SERVER_TESTING_FILE_TREE_H_
#define CHORUS_SERVER_TESTING_FILE_TREE_H_

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace chorus::server {

class FileTreeTest : public testing::Test {
 protected:
  FileTreeTest() {
    std::string pattern = absl::StrCat(testing::TempDir(), "/file-tree-XXXXXX");
    if (mkdtemp(&pattern[0]) == nullptr) abort();
    root_ = pattern;
  }
  ~FileTreeTest() override { std::filesystem::remove_all(root_); }

  // `path` begins with "/".
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  std::string root_;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_TESTING_FILE_TREE_H_
