#include "server/testing/chorusd_process.h"

#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/testing/rpc.h"

namespace chorus::server {
namespace {

constexpr char kProgram[] = "server/chorusd";

int Count() {
  static int count = 0;
  return count++;
}

}  // namespace

ChorusdProcess::ChorusdProcess(const std::string& folder, std::vector<std::string> flags,
                               absl::optional<uid_t> uid, int output)
    : log_(absl::StrCat(folder, "/log", Count())) {
  std::vector<std::string> words = {kProgram};
  for (std::string& flag : flags) words.push_back(std::move(flag));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(&word[0]);
  argv.push_back(nullptr);
  // Another user may not see the folder in which the program lies, or write into the log's.
  const int program = open(kProgram, O_PATH | O_CLOEXEC);
  const int log = open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(output >= 0 ? output : log, 1);
    dup2(output >= 0 ? output : log, 2);
    if (uid.has_value() && (setgroups(0, nullptr) != 0 || setgid(*uid) != 0 || setuid(*uid) != 0)) {
      _exit(126);
    }
    fexecve(program, argv.data(), environ);
    _exit(127);
  }
  close(program);
  close(log);
}

ChorusdProcess::~ChorusdProcess() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::string ChorusdProcess::output() const {
  std::ifstream file(log_);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

bool ChorusdProcess::WaitForStart() {
  return Eventually([&] { return absl::StrContains(output(), "devices on") || Ended(); }) &&
         pid_ >= 0;
}

void ChorusdProcess::Signal(int number) { kill(pid_, number); }

int ChorusdProcess::Wait() {
  return Eventually([&] { return Ended(); }) ? status_ : -1;
}

bool ChorusdProcess::Ended() {
  if (pid_ < 0) return true;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return false;
  pid_ = -1;
  status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -2;
  return true;
}

}  // namespace chorus::server
