// attack ADDRESS NAME [again]: one attack (attacker.h) by a process of its own.
//
// Says "done=N code=CODE message=..." when it has been refused, or has had enough; then it keeps
// what it has until it is killed. "again": it says nothing and begins anew, by another session.
#include <unistd.h>

#include <iostream>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_replace.h"
#include "tests/hostile/attacker.h"

int main(int argc, char** argv) {
  using namespace chorus;
  const bool again = argc == 4 && std::string(argv[3]) == "again";
  if (argc != (again ? 4 : 3) || hostile::Attacks().count(argv[2]) == 0) {
    std::cerr << "attack ADDRESS NAME [again]" << std::endl;
    return 2;
  }
  while (again) {
    const auto attacker = hostile::Attacker::Open(argv[1]);
    if (attacker.ok()) (void)hostile::Attacks().at(argv[2])(attacker->get());
  }
  absl::StatusOr<std::unique_ptr<hostile::Attacker>> attacker = hostile::Attacker::Open(argv[1]);
  if (!attacker.ok()) {
    std::cerr << attacker.status() << std::endl;
    return 1;
  }
  const absl::StatusOr<hostile::Report> report = hostile::Attacks().at(argv[2])(attacker->get());
  if (!report.ok()) {
    std::cerr << report.status() << std::endl;
    return 1;
  }
  std::cout << "done=" << report->done
            << " code=" << absl::StatusCodeToString(report->refused.code())
            << " message=" << absl::StrReplaceAll(report->refused.message(), {{"\n", " "}})
            << std::endl;
  for (;;) pause();
}
