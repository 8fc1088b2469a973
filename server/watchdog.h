// Ends this process when it does not end by itself: work of a device that never finishes, a thread
// that hangs, threads or memory that are not to be had any more. It needs none of these: a timer of
// the kernel's and a signal handler, both there from the start.
//
// Threads: any. Ownership: SIGALRM and the process's real-time interval timer are its own.
// Errors: none.
#ifndef CHORUS_SERVER_WATCHDOG_H_
#define CHORUS_SERVER_WATCHDOG_H_

#include "absl/time/time.h"

namespace chorus::server {

// The exit status of a process that it has ended.
inline constexpr int kOverdueStatus = 3;

// At the start of the process. Later threads leave SIGALRM unblocked.
void InstallWatchdog();

// From now on the process has this long to end, destructors of static objects included. Then a line
// on standard error says what it was at, if there is room for it, and the process ends at once with
// kOverdueStatus. It cannot be taken back.
void EndProcessWithin(absl::Duration time);

// What the process is at, for that line: a literal.
void NowAt(const char* what);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_WATCHDOG_H_
