// docs/grpcurl.md, run as it stands: its sh blocks in one shell against a live daemon, with a
// stand-in for grpcurl that knows only reflection; what each block prints must be the text block
// that follows it ("..." stands for any further lines).

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "server/testing/test_daemon.h"

namespace chorus::server {
namespace {

struct Block {
  int line = 0;  // of the sh block's first line
  std::string commands;
  std::string expected;
  bool has_expected = false;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<Block> BlocksOf(const std::string& page) {
  std::vector<Block> blocks;
  std::string fence;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(page, '\n')) {
    ++number;
    if (absl::StartsWith(line, "```")) {
      fence = fence.empty() ? std::string(line.substr(3)) : "";
      if (fence == "sh") blocks.push_back({number + 1, "", "", false});
      if (fence == "text") blocks.back().has_expected = true;
      if (line == "```") fence = "";
      continue;
    }
    if (fence == "sh") absl::StrAppend(&blocks.back().commands, line, "\n");
    if (fence == "text") absl::StrAppend(&blocks.back().expected, line, "\n");
  }
  return blocks;
}

// True when `got` is `expected`, whose lines "..." stand for any number of lines.
bool Matches(const std::string& expected, const std::string& got) {
  const size_t dots = expected.find("...\n");
  if (dots == std::string::npos) return expected == got;
  return absl::StartsWith(got, expected.substr(0, dots)) && got.size() > dots;
}

TEST(GrpcurlTest, ThePageDoesWhatItSays) {
  const std::vector<Block> blocks = BlocksOf(ReadFile("docs/grpcurl.md"));
  ASSERT_GE(blocks.size(), 12u);
  TestDaemon daemon;
  const std::string& folder = daemon.folder();

  // A program of that name on the path.
  char here[4096];
  ASSERT_NE(getcwd(here, sizeof(here)), nullptr);
  ASSERT_EQ(mkdir(absl::StrCat(folder, "/bin").c_str(), 0700), 0);
  ASSERT_EQ(symlink(absl::StrCat(here, "/server/testing/grpcurl").c_str(),
                    absl::StrCat(folder, "/bin/grpcurl").c_str()),
            0);

  std::string script = absl::StrCat("set -eu -o pipefail\nPATH=", folder,
                                    "/bin:$PATH\nTMP=", folder, "\nCHORUS=", daemon.path(), "\n");
  for (size_t i = 0; i < blocks.size(); ++i) {
    absl::StrAppend(&script, "exec > ", folder, "/", i, ".out\n", blocks[i].commands);
  }
  const std::string script_path = absl::StrCat(folder, "/script");
  std::ofstream(script_path) << script;
  // The script's own bound: a call that hangs fails the test with what was printed so far.
  const int result =
      system(absl::StrCat("timeout 120 bash ", script_path, " 2> ", folder, "/err").c_str());
  EXPECT_TRUE(WIFEXITED(result) && WEXITSTATUS(result) == 0)
      << "exit " << WEXITSTATUS(result) << "\n"
      << ReadFile(absl::StrCat(folder, "/err"));
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].has_expected) continue;
    const std::string got = ReadFile(absl::StrCat(folder, "/", i, ".out"));
    EXPECT_TRUE(Matches(blocks[i].expected, got)) << "docs/grpcurl.md:" << blocks[i].line << ":\n"
                                                  << blocks[i].commands << "expected:\n"
                                                  << blocks[i].expected << "got:\n"
                                                  << got;
  }
}

}  // namespace
}  // namespace chorus::server
