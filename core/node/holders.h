// The text of an error of memory: which op the memory was for and which sessions of the caller's
// tenant hold most. Nothing is said of other tenants.
//
// Threads: the node thread. Ownership: none. Errors: it only completes one.
#ifndef CHORUS_CORE_NODE_HOLDERS_H_
#define CHORUS_CORE_NODE_HOLDERS_H_

#include <cstdint>
#include <string>

#include "core/base/error.h"
#include "core/node/run_state.h"
#include "core/node/session.h"
#include "core/node/timers.h"
#include "core/transport/command.h"

namespace chorus::node {

class Holders {
 public:
  // All outlive it.
  Holders(const Clock* clock, const SessionTable* sessions, RunTable* runs)
      : clock_(clock), sessions_(sessions), runs_(runs) {}

  // Of an error of memory that is not recorded yet; others stay as they are. `run` may be null.
  void Explain(const Session& caller, const RunState* run, Error* error);
  void Explain(const Session& caller, const CreateTensor& create, Error* error);

 private:
  void Name(const Session& caller, Error* error);
  std::string TextOf(const Tenant& tenant, int64_t most_slots);
  // What a session holds, as far as it was looked at: so many of its tensors, and of its runs'
  // buffers; `all`: there were no more.
  struct Held {
    int64_t bytes = 0;
    int64_t slots = 0;
    bool all = true;
  };
  Held HeldBy(const Session& session, int64_t most_slots);

  const Clock* const clock_;
  const SessionTable* const sessions_;
  RunTable* const runs_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_HOLDERS_H_
