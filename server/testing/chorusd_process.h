// A chorusd that a test starts as a process of its own.
//
// Threads: each object belongs to one thread. Ownership: the process ends with it. Errors: said at
// each function.
#ifndef CHORUS_SERVER_TESTING_CHORUSD_PROCESS_H_
#define CHORUS_SERVER_TESTING_CHORUSD_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/types/optional.h"

namespace chorus::server {

class ChorusdProcess {
 public:
  // Starts it with `flags`, as user `uid` where one is given (which takes root). Its output goes to
  // a file in `folder`, or to `output` (a descriptor).
  ChorusdProcess(const std::string& folder, std::vector<std::string> flags,
                 absl::optional<uid_t> uid = absl::nullopt, int output = -1);
  ChorusdProcess(const ChorusdProcess&) = delete;
  ChorusdProcess& operator=(const ChorusdProcess&) = delete;
  ~ChorusdProcess();  // kills it

  pid_t pid() const { return pid_; }
  std::string output() const;  // so far
  // False: it has ended, or says nothing.
  bool WaitForStart();
  void Signal(int number);
  // The exit status, -1: it did not end, -2: by a signal.
  int Wait();

 private:
  bool Ended();

  const std::string log_;
  pid_t pid_ = -1;
  int status_ = -1;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_TESTING_CHORUSD_PROCESS_H_
