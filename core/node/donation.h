// Donated inputs: where a run gives the last reference to an input away, an output takes over its
// memory, and nothing is reserved for it.
//
// The run's submit promises the memory, its launch takes it, a failure before anything was written
// gives it back. From the promise on the name cannot be used, so that the reference stays the last.
//
// Threads: the node thread. Ownership: a run keeps the memory that it was promised. Errors: said at
// Promise(); the others cannot fail.
#ifndef CHORUS_CORE_NODE_DONATION_H_
#define CHORUS_CORE_NODE_DONATION_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/node/records.h"
#include "core/node/run_state.h"
#include "core/transport/command.h"

namespace chorus::node {

class Donations {
 public:
  // `runs` finds producers, `errors` keeps the errors that names of donated tensors stand for. Both
  // outlive it.
  Donations(RunTable* runs, ErrorStore* errors) : runs_(runs), errors_(errors) {}

  // `run` knows its inputs and outputs, and has no memory of its own yet. INVALID_ARGUMENT: the
  // graph says that an input cannot be donated.
  absl::Status Promise(const Run& command, RunState* run);
  // The run is being launched: the promise is kept.
  void Take(RunState* run);
  // The run has failed. Where nothing was written all is as before; else the name stands for an
  // error.
  void Return(RunState* run);

 private:
  BufferRef SoleBufferOf(const CellRef& cell);
  std::shared_ptr<const Error> Tell(const RunState& run, absl::string_view what);
  void NameDonated(RunState* run, const RunState::Donation& donation,
                   const std::shared_ptr<const Error>& error);

  RunTable* const runs_;
  ErrorStore* const errors_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_DONATION_H_
