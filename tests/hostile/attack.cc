// attack ADDRESS NAME [again|rounds] [uid=N]: one attack (attacker.h) by a process of its own.
//
// Says "done=N amount=N code=CODE message=..." when it has been refused, or has had enough; then it
// keeps what it has until it is killed. "again": it says nothing, closes its sessions and begins
// anew. "rounds": the same, and it says "attacks" when it has been let in and begins the first,
// such a line of each round, if it is another one than that of the round before, or "failed=CODE
// message=...", of failures with one code once. "uid=N": as another user, which takes root.
#include <unistd.h>

#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "tests/hostile/attacker.h"

namespace chorus {
namespace hostile {
namespace {

// `begins`: what it says before, nothing after that.
absl::StatusOr<Report> Once(const std::string& address, const std::string& attack,
                            std::string* begins, std::unique_ptr<Attacker>* attacker) {
  absl::StatusOr<std::unique_ptr<Attacker>> opened = Attacker::Open(address, attack);
  if (!opened.ok()) return opened.status();
  *attacker = *std::move(opened);
  std::cout << std::exchange(*begins, {}) << std::flush;
  return Attack(attack, attacker->get());
}

// In one line.
std::string MessageOf(const absl::Status& status) {
  return absl::StrCat(" message=", absl::StrReplaceAll(status.message(), {{"\n", " "}}), "\n");
}
std::string Line(const absl::StatusOr<Report>& report) {
  if (!report.ok()) {
    return absl::StrCat("failed=", absl::StatusCodeToString(report.status().code()),
                        MessageOf(report.status()));
  }
  return absl::StrCat("done=", report->done, " amount=", report->amount,
                      " code=", absl::StatusCodeToString(report->refused.code()),
                      MessageOf(report->refused));
}

int Main(int argc, char** argv) {
  bool again = false;
  bool tells_rounds = false;
  bool understood = argc >= 3 && IsAttack(argv[2]);
  for (int i = 3; i < argc; ++i) {
    absl::string_view word = argv[i];
    uint32_t uid = 0;
    if (word == "again") {
      again = true;
    } else if (word == "rounds") {
      again = tells_rounds = true;
    } else if (absl::ConsumePrefix(&word, "uid=") && absl::SimpleAtoi(word, &uid)) {
      if (setgid(uid) != 0 || setuid(uid) != 0) {
        std::cerr << "cannot become uid " << uid << std::endl;
        return 1;
      }
    } else {
      understood = false;
    }
  }
  if (!understood) {
    std::cerr << "attack ADDRESS NAME [again|rounds] [uid=N]" << std::endl;
    return 2;
  }
  std::unique_ptr<Attacker> attacker;
  std::string begins = tells_rounds ? "attacks\n" : "";
  if (again) {
    std::set<absl::StatusCode> failures;
    std::string told;
    while (true) {  // until it is killed
      const absl::StatusOr<Report> round = Once(argv[1], argv[2], &begins, &attacker);
      const bool is_new = round.ok() || failures.insert(round.status().code()).second;
      if (tells_rounds && is_new && Line(round) != told) {
        std::cout << (told = Line(round)) << std::flush;
      }
      if (attacker == nullptr) continue;
      attacker->CloseSessions();
      attacker.reset();
    }
  }
  const absl::StatusOr<Report> report = Once(argv[1], argv[2], &begins, &attacker);
  if (!report.ok()) {
    std::cerr << report.status() << std::endl;
    return 1;
  }
  std::cout << Line(report) << std::flush;
  for (;;) pause();
}

}  // namespace
}  // namespace hostile
}  // namespace chorus

int main(int argc, char** argv) { return chorus::hostile::Main(argc, argv); }
