// The graphs that a session has registered with its daemon: of fragments, of calls, of compiled
// functions. A session may have so many of them, so those of fragments and calls go where they are
// many.
//
// Threads: the session's lock guards it.
// Ownership: the names of fragments' graphs are its own, those of calls are in the tables of their
//   groups (call_table.h), and those of compiled functions their programs'. Log, staging memory and
//   releases are the session's, and outlive it.
// Errors: RESOURCE_EXHAUSTED kQuota: the session has as many graphs as it may; the log's and the
//   staging memory's; MakeEntry's.
#ifndef CHORUS_CLIENT_INTERNAL_GRAPHS_H_
#define CHORUS_CLIENT_INTERNAL_GRAPHS_H_

#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/internal/call_table.h"
#include "client/internal/interner.h"
#include "client/internal/link.h"
#include "client/internal/log.h"
#include "client/internal/member.h"
#include "client/internal/releases.h"
#include "client/internal/session_lock.h"
#include "client/internal/staging.h"
#include "core/base/ids.h"

namespace chorus {
namespace internal {

// Whether the command that registered a graph has failed: for want of memory, say, so that the same
// graph may be registered again. Forgets *command, which is 0 then, once it is over.
bool RegistrationFailed(Link* link, Sequence* command);

class Graphs {
 public:
  Graphs(Link* link, Log* log, StagingPool* staging, Releases* releases)
      : link_(link), log_(log), staging_(staging), releases_(releases) {}

  // A name, and the command that gives it to the graph: whether that goes well is not waited for.
  struct Registered {
    GraphId graph;
    Sequence command;
  };
  // Registers a graph under a new name.
  absl::StatusOr<Registered> Register(const std::string& encoded);
  // The graph of a fragment, registered if it is a new one.
  absl::StatusOr<GraphId> OfFragment(std::string encoded);
  // The entry of calls, with its graph registered if they have not been seen.
  absl::StatusOr<CallEntry*> OfCalls(absl::Span<const CallPart> parts, int device_count,
                                     Interner* interner)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
    CallEntry* const entry = parts[0].group->calls.Find(parts);
    if (entry != nullptr &&
        (entry->registration == Sequence() || IsRegistered(entry, parts[0].group))) {
      return entry;
    }
    return RegisterCalls(parts, device_count, interner);
  }
  // Drops the graphs of all calls of a group.
  void ForgetCalls(GroupCore* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Half of the session's graphs are of calls.
  bool HasManyOfCalls() const { return of_calls_ >= log_->graphs().most() / 2; }
  // Releases those that destructors have left.
  void ReleaseLeft();

 private:
  absl::StatusOr<CallEntry*> RegisterCalls(absl::Span<const CallPart> parts, int device_count,
                                           Interner* interner)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Not so: the calls of the entry's group are forgotten.
  bool IsRegistered(CallEntry* entry, GroupCore* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  void Release(absl::Span<const GraphId> graphs);

  Link* const link_;
  Log* const log_;
  StagingPool* const staging_;
  Releases* const releases_;
  // By their bytes: at most kMaxOfFragments, and a quarter of the graphs that a session may have.
  // Calls have at most CallTable::kMax in each group, and half of the session's in all.
  absl::flat_hash_map<std::string, Registered> of_fragments_;
  int32_t of_calls_ = 0;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_GRAPHS_H_
