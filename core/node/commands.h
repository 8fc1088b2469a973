// Carries out the commands of sessions' logs, each in its turn.
//
// Threads: the node thread.
#ifndef CHORUS_CORE_NODE_COMMANDS_H_
#define CHORUS_CORE_NODE_COMMANDS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/node/failures.h"
#include "core/node/graph_store.h"
#include "core/node/holders.h"
#include "core/node/options.h"
#include "core/node/requests.h"
#include "core/node/runs.h"
#include "core/node/session.h"
#include "core/node/storage.h"
#include "core/node/worlds.h"
#include "core/transport/command.h"

namespace chorus::node {

class Commands {
 public:
  // All outlive it.
  struct Parts {
    const NodeOptions* options = nullptr;
    SessionTable* sessions = nullptr;
    GraphStore* graphs = nullptr;
    Storage* storage = nullptr;
    Runs* runs = nullptr;
    Worlds* worlds = nullptr;
    Failures* failures = nullptr;
    Holders* holders = nullptr;
  };
  explicit Commands(const Parts& parts)
      : options_(parts.options),
        sessions_(parts.sessions),
        graphs_(parts.graphs),
        storage_(parts.storage),
        runs_(parts.runs),
        worlds_(parts.worlds),
        failures_(parts.failures),
        holders_(parts.holders) {}
  Commands(const Commands&) = delete;
  Commands& operator=(const Commands&) = delete;

  // One frame of the session's log: carried out if it is its turn, held or answered from the record
  // else. `done`, unless null, gets its outcome. INVALID_ARGUMENT, UNIMPLEMENTED: the bytes are no
  // frame; nothing has happened, and `done` was not called.
  absl::Status Take(const std::shared_ptr<Session>& session, absl::string_view frame,
                    absl::Time now, OnOutcome done);

 private:
  void Execute(const std::shared_ptr<Session>& session, const Command& command, absl::Time now);
  absl::Status ExecuteAtOnce(Session* session, const CommandBody& body, absl::Time now);
  absl::Status Register(Session* session, const RegisterGraph& command);
  absl::StatusOr<std::shared_ptr<GraphRecord>> MakeGraph(const Session& session,
                                                         const RegisterGraph& command);
  void Create(const std::shared_ptr<Session>& session, Sequence sequence,
              const CreateTensor& command);
  absl::Status BeginCreate(const std::shared_ptr<Session>& session, Sequence sequence,
                           const CreateTensor& command);
  void MakeReadable(const std::shared_ptr<Session>& session, Sequence sequence,
                    const chorus::MakeReadable& command);
  // It is over, with what `status` says, which is recorded.
  void Finish(Session* session, Sequence sequence, const absl::Status& status);

  const NodeOptions* const options_;
  SessionTable* const sessions_;
  GraphStore* const graphs_;
  Storage* const storage_;
  Runs* const runs_;
  Worlds* const worlds_;
  Failures* const failures_;
  Holders* const holders_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_COMMANDS_H_
