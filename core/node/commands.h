// Carries out the commands of sessions' logs, each in its turn.
//
// A command that would keep the node thread from others is carried out in the background: then its
// session's log is parked until it is done, and no other session waits.
//
// Threads: the node thread. Ownership: none; work in the background keeps its session. Errors: they
// are recorded, and are the command's outcome in the log.
#ifndef CHORUS_CORE_NODE_COMMANDS_H_
#define CHORUS_CORE_NODE_COMMANDS_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/node/failures.h"
#include "core/node/graph_store.h"
#include "core/node/holders.h"
#include "core/node/launcher.h"
#include "core/node/options.h"
#include "core/node/requests.h"
#include "core/node/runs.h"
#include "core/node/session.h"
#include "core/node/short_way.h"
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
    Launcher* launcher = nullptr;
    Storage* storage = nullptr;
    Runs* runs = nullptr;
    Worlds* worlds = nullptr;
    ShortWay* short_way = nullptr;
    Failures* failures = nullptr;
    Holders* holders = nullptr;
    const Clock* clock = nullptr;
    InNextTurn go_on_later;
  };
  explicit Commands(const Parts& parts)
      : options_(parts.options),
        sessions_(parts.sessions),
        graphs_(parts.graphs),
        launcher_(parts.launcher),
        storage_(parts.storage),
        runs_(parts.runs),
        worlds_(parts.worlds),
        short_way_(parts.short_way),
        failures_(parts.failures),
        holders_(parts.holders),
        clock_(parts.clock),
        go_on_later_(parts.go_on_later) {}
  Commands(const Commands&) = delete;
  Commands& operator=(const Commands&) = delete;

  // One frame of the session's log: carried out if it is its turn, held or answered from the record
  // else. `done`, unless null, gets its outcome, unless the sender is forgotten. INVALID_ARGUMENT,
  // UNIMPLEMENTED: the bytes are no frame; nothing has happened, and `done` was not called.
  absl::StatusOr<CommandLog::Sender> Take(const std::shared_ptr<Session>& session,
                                          absl::string_view frame, absl::Time now, OnOutcome done);
  // A Run that the log has begun, and that has not gone the short way.
  void SubmitBegun(const std::shared_ptr<Session>& session, Sequence sequence,
                   absl::string_view frame, absl::Time now);
  // What the log was parked for is over.
  void GoOn(const std::shared_ptr<Session>& session, absl::Time now);

 private:
  void Execute(const std::shared_ptr<Session>& session, const Command& command,
               absl::string_view frame, absl::Time now);
  absl::Status ExecuteAtOnce(Session* session, const CommandBody& body, absl::Time now);
  // The log's next frames, as long as they are there.
  void TakeHeld(const std::shared_ptr<Session>& session, absl::Time now);
  void GoOnLater(const std::shared_ptr<Session>& session);
  void Submit(const std::shared_ptr<Session>& session, const Run& command, Sequence sequence,
              absl::string_view frame, const absl::Status& planned, absl::Time now);
  // The frame of a Run that is to be planned, or of what waits for memory.
  struct FrameCopy {
    Charge charge;
    std::string frame;
  };
  // How it is asked for again; a caller that has this parks the log. RESOURCE_EXHAUSTED: the frame
  // cannot be kept.
  absl::StatusOr<GraphStore::OnMade> AskAgain(const std::shared_ptr<Session>& session,
                                              Sequence sequence, absl::string_view frame);
  void SubmitAgain(const std::shared_ptr<Session>& session, Sequence sequence,
                   const std::shared_ptr<FrameCopy>& copy, const absl::Status& planned);
  void Register(const std::shared_ptr<Session>& session, Sequence sequence,
                const RegisterGraph& command);
  absl::StatusOr<std::shared_ptr<GraphRecord>> MakeGraph(const std::shared_ptr<Session>& session,
                                                         Sequence sequence,
                                                         const RegisterGraph& command);
  absl::Status NameGraph(Session* session, GraphId id,
                         absl::StatusOr<std::shared_ptr<GraphRecord>> record);
  bool LoadGraph(const std::shared_ptr<Session>& session, Sequence sequence,
                 const std::shared_ptr<GraphRecord>& record);
  void Create(const std::shared_ptr<Session>& session, Sequence sequence,
              const CreateTensor& command, absl::string_view frame);
  absl::Status BeginCreate(const std::shared_ptr<Session>& session, Sequence sequence,
                           const CreateTensor& command);
  void MakeReadable(const std::shared_ptr<Session>& session, Sequence sequence,
                    const chorus::MakeReadable& command);
  void DropTapes(const std::shared_ptr<Session>& session, Sequence sequence,
                 const DropTape& command, absl::Time now);
  // What one turn had no time for.
  struct TapesToDrop {
    Charge charge;
    std::vector<DropTape::Entry> entries;
    size_t done = 0;  // of these, from the first
  };
  void DropTapesLater(const std::shared_ptr<Session>& session, Sequence sequence,
                      const std::shared_ptr<TapesToDrop>& tapes);
  void ReleaseNames(const std::shared_ptr<Session>& session, Sequence sequence,
                    const Release& command);
  void ReleaseLater(const std::shared_ptr<Session>& session, Sequence sequence);
  // The command is over; an error in `status` is recorded.
  void Finish(Session* session, Sequence sequence, const absl::Status& status);

  const NodeOptions* const options_;
  SessionTable* const sessions_;
  GraphStore* const graphs_;
  Launcher* const launcher_;
  Storage* const storage_;
  Runs* const runs_;
  Worlds* const worlds_;
  ShortWay* const short_way_;
  Failures* const failures_;
  Holders* const holders_;
  const Clock* const clock_;
  const InNextTurn go_on_later_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_COMMANDS_H_
