// A stage that does what its name says, for tests of the schedule.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int kRecords = 4;  // Schedule::kRecordsNumber

void Tell(const std::string& line) { (void)!write(kRecords, line.data(), line.size()); }

// Waits for what never comes.
void HangForever() {
  int ends[2];
  if (pipe(ends) != 0) abort();
  char byte;
  (void)!read(ends[0], &byte, 1);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  const std::string verdict = R"({"kind":"verdict","what":")" + name +
                              R"(","text":"it does","verdict":"holds"})"
                              "\n";
  const std::string fact = R"({"kind":"fact","what":"first","text":"told"})"
                           "\n";
  if (name == "holds") {
    Tell(fact + verdict);
  } else if (name == "silent") {
    Tell(fact);
  } else if (name == "crashes") {
    Tell(fact);
    (void)!write(STDERR_FILENO, "last words\n", 11);
    signal(SIGSEGV, SIG_DFL);  // which a sanitizer takes otherwise
    raise(SIGSEGV);
  } else if (name == "hangs") {
    Tell(fact);
    HangForever();
  } else if (name == "hangs_on") {  // and so does a process that it has started
    Tell(fact + verdict);
    if (fork() == 0) {
      // Until its own process group is killed, this keeps the pipe that the test waits on.
      HangForever();
    }
    HangForever();
  } else if (name == "garbles") {
    Tell("no record\n" + fact + "{\"kind\":\n" + verdict);
  } else if (name == "fails") {
    Tell(fact);
    return 3;
  } else if (name == "shouts") {
    const std::string much(1 << 20, 'x');
    for (int n = 0; n < 4; ++n) (void)!write(STDOUT_FILENO, much.data(), much.size());
    (void)!write(STDOUT_FILENO, "THE END", 7);
    return 1;
  }
  return 0;
}
