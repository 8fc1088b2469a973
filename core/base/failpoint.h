// Named points of the code at which a fault test can make a process die, or look at what is going
// on.
//
//   CHORUS_FAILPOINT("ring.before_tail");
//
// Off, which it is unless a test says otherwise, a failpoint is one relaxed load and a branch.
// It is turned on
//   - by a test in the same process, with SetFailpointHook();
//   - for a whole process, by the environment: CHORUS_FAILPOINT=ring.before_tail=kill, or
//     CHORUS_FAILPOINT=ring.before_tail:3=kill for the third time it is reached. "kill" raises
//     SIGKILL. What does not parse, or names no failpoint, ends the process at its start: a fault
//     test that does nothing must not pass.
//
// Threads: any. Ownership: the hook is copied. Errors: as said.
#ifndef CHORUS_CORE_BASE_FAILPOINT_H_
#define CHORUS_CORE_BASE_FAILPOINT_H_

#include <atomic>
#include <cstddef>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace chorus {

// Every failpoint there is; fault tests go through this list. Using a name that is not in it does
// not compile.
inline constexpr const char* kFailpoints[] = {
    // Client: a frame on its way into the submission ring.
    "ring.before_copy",
    "ring.mid_copy",
    "ring.before_tail",
    "ring.before_doorbell",
    "ring.waiting_for_space",
    // Daemon: between looking at a frame's size and copying the frame.
    "ring_reader.before_copy",
    // Client: asleep until a tensor or a run is done.
    "completion.waiting",
    // Client: a result has been copied, and not been looked at again.
    "ring_link.result_copied",
    // Daemon: the record of a tensor that has been there, or has failed, between two states.
    "completion_writer.mid_record",
    // Daemon: a run between its frame and its outcome.
    "node.before_prepare",
    "node.before_vote",
    "node.after_vote",
    "node.before_launch",
    "node.after_launch",
    "node.before_publish",
    "node.after_publish",
};

inline absl::Span<const char* const> AllFailpoints() { return kFailpoints; }

// Called at every failpoint that is reached, with its name, on the thread that reached it.
using FailpointHook = void (*)(absl::string_view name);
// nullptr turns it off. Replaces the environment's.
void SetFailpointHook(FailpointHook hook);

// Parses "name[:count]=kill". False: it does not parse, or there is no such name.
bool ParseFailpoint(absl::string_view text, absl::string_view* name, int* count);

namespace failpoint_internal {

extern std::atomic<FailpointHook> hook;

constexpr bool Equal(const char* a, const char* b) {
  while (*a != 0 && *a == *b) {
    ++a;
    ++b;
  }
  return *a == *b;
}

constexpr bool IsListed(const char* name) {
  for (const char* listed : kFailpoints) {
    if (Equal(listed, name)) return true;
  }
  return false;
}

}  // namespace failpoint_internal
}  // namespace chorus

#define CHORUS_FAILPOINT(name)                                                \
  do {                                                                        \
    static_assert(::chorus::failpoint_internal::IsListed(name),               \
                  "list it in kFailpoints, core/base/failpoint.h");           \
    const ::chorus::FailpointHook chorus_hook =                               \
        ::chorus::failpoint_internal::hook.load(::std::memory_order_relaxed); \
    if (__builtin_expect(chorus_hook != nullptr, 0)) chorus_hook(name);       \
  } while (false)

#endif  // CHORUS_CORE_BASE_FAILPOINT_H_
