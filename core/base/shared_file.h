// Files of memory whose descriptors go to other processes, and whether these still have them.
//
// A descriptor can be passed on, reopened or mapped, and none of it is told. But the kernel counts
// those that have opened a file by its name, and gives a write lease to an only one. So each side
// gets a descriptor that OpenAgain() has made: what memfd_create gives does not count as an opener.
//
// Threads: any. Ownership: the caller's. Errors: said at each function.
#ifndef CHORUS_CORE_BASE_SHARED_FILE_H_
#define CHORUS_CORE_BASE_SHARED_FILE_H_

#include "core/base/unique_fd.h"

namespace chorus {

// Another descriptor of the file behind `fd`, which counts as an opener of its own. Invalid: errno
// says why.
UniqueFd OpenAgain(int fd, int flags);

// Whether anybody but `fd`, which OpenAgain() has made for writing, has the file: a descriptor of
// another opener is open somewhere, or the file mapped by one. What the process has mapped by `fd`
// does not count. Where the kernel does not say, for it gives no lease: true.
//
// It cannot know of pages that somebody has put into a pipe or into a socket's queue (splice,
// sendfile): no opener has those, so it is false, and when the file is gone they stay, some 200 KiB
// a socket, until they are read or the socket goes. What a whole process has of such no account
// tells (core/runtime/memory_guard.h).
bool IsHeldByOthers(int fd);

// Of a memfd that the caller has mapped for writing: from now on nobody can map it so, write to it
// by a descriptor, take pages out of it or add seals. (While pages are taken out, a thread that
// touches or unmaps one of them waits until all are out.) False: errno says why not. Waits while
// any process is in a call of the system that changes the file, which may be long: the kernel lets
// in one at a time.
bool SealMapped(int fd);
// Whether that has been done. Waits for nobody.
bool IsSealedMapped(int fd);

// Whether the kernel gives leases on files of memory. False: errno says why not.
bool KernelGivesLeases();

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_SHARED_FILE_H_
