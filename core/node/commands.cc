#include "core/node/commands.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"

namespace chorus::node {
namespace {

int64_t WorkOf(absl::string_view frame) {
  constexpr size_t kNameBytes = 16;
  return 1 + static_cast<int64_t>(frame.size() / kNameBytes);
}

// The first failure of several tensors. That of one that has failed is its own: however many wait
// with it, it is there once, and charged there.
class FirstFailure {
 public:
  bool none() const { return error_ == nullptr && status_.ok(); }
  void Note(const Cell& cell) {
    if (none()) error_ = cell.error;
  }
  // No tensor's; its text is the node's own, or a device's.
  void Note(const absl::Status& status) {
    if (none()) status_ = status;
  }
  absl::Status status() const { return error_ != nullptr ? ToStatus(*error_) : status_; }

 private:
  std::shared_ptr<const Error> error_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<CommandLog::Sender> Commands::Take(const std::shared_ptr<Session>& session,
                                                  absl::string_view frame, absl::Time now,
                                                  OnOutcome done) {
  // Also of one that is only answered, or kept.
  CountWork(WorkOf(frame));
  const absl::StatusOr<Command> decoded = DecodeFrame(frame);
  CHORUS_RETURN_IF_ERROR(decoded.status());
  const Command& command = *decoded;  // large: it is not moved
  CommandLog& log = session->log;
  if (log.IsEarly(command.sequence)) {
    return log.Hold(command.sequence, frame, now, std::move(done));
  }
  // Answered from the record, never executed again.
  if (command.sequence < log.next()) return log.Repeat(command.sequence, std::move(done));
  if (const auto sender = short_way_->Take(session, command, frame, now, &done)) return *sender;
  // The log may be parked for it now.
  short_way_->MakeWay(*session);
  if (log.IsEarly(command.sequence)) {
    return log.Hold(command.sequence, frame, now, std::move(done));
  }
  const CommandLog::Sender sender = log.Begin(command.sequence, std::move(done));
  Execute(session, command, frame, now);
  if (log.holds()) TakeHeld(session, now);
  return sender;
}

void Commands::TakeHeld(const std::shared_ptr<Session>& session, absl::Time now) {
  CommandLog& log = session->log;
  for (int count = 0; !log.parked(); ++count) {
    if (count == CommandLog::kFramesPerTurn || !SliceHasTime()) return GoOnLater(session);
    const absl::optional<CommandLog::HeldFrame> held = log.TakeHeld(now);
    if (!held.has_value()) return;
    const absl::StatusOr<Command> next = DecodeFrame(held->frame);
    if (!next.ok()) return;  // cannot be: it decoded when it came
    CountWork(WorkOf(held->frame));
    log.Begin(next->sequence, nullptr);
    Execute(session, *next, held->frame, now);
  }
}

// Others' frames come in between.
void Commands::GoOnLater(const std::shared_ptr<Session>& session) {
  session->log.Park();
  go_on_later_(session, [this](const std::shared_ptr<Session>& of) { GoOn(of, clock_->now); });
}

void Commands::GoOn(const std::shared_ptr<Session>& session, absl::Time now) {
  sessions_->RenewLease(session.get(), now);
  session->log.Unpark();
  TakeHeld(session, now);
}

void Commands::Execute(const std::shared_ptr<Session>& session, const Command& command,
                       absl::string_view frame, absl::Time now) {
  sessions_->RenewLease(session.get(), now);
  if (const Run* run = absl::get_if<Run>(&command.body)) {
    Submit(session, *run, command.sequence, frame, absl::OkStatus(), now);
  } else if (const auto* readable = absl::get_if<chorus::MakeReadable>(&command.body)) {
    MakeReadable(session, command.sequence, *readable);
  } else if (const auto* create = absl::get_if<CreateTensor>(&command.body)) {
    Create(session, command.sequence, *create, frame);
  } else if (const auto* graph = absl::get_if<RegisterGraph>(&command.body)) {
    Register(session, command.sequence, *graph);
  } else if (const auto* drop = absl::get_if<DropTape>(&command.body)) {
    DropTapes(session, command.sequence, *drop, now);
  } else if (const auto* release = absl::get_if<Release>(&command.body)) {
    ReleaseNames(session, command.sequence, *release);
  } else {
    Finish(session.get(), command.sequence, ExecuteAtOnce(session.get(), command.body, now));
  }
}

absl::Status Commands::ExecuteAtOnce(Session* session, const CommandBody& body, absl::Time now) {
  if (const auto* cancel = absl::get_if<Cancel>(&body)) {
    runs_->Cancel(*session, cancel->run, now);
  } else if (const auto* enter = absl::get_if<EnterEpoch>(&body)) {
    return worlds_->EnterEpoch(session, *enter);
  } else if (const auto* refuse = absl::get_if<Refuse>(&body)) {
    return worlds_->Refuse(*session, *refuse, now);
  }
  return absl::OkStatus();
}

void Commands::Finish(Session* session, Sequence sequence, const absl::Status& status) {
  if (status.ok()) {
    session->log.Finish(sequence);
    return;
  }
  Error error = ErrorOf(status);
  failures_->Record(session, nullptr, &error);
  session->log.Finish(sequence, error);
}

// --- Tapes --------------------------------------------------------------------------------------

void Commands::DropTapes(const std::shared_ptr<Session>& session, Sequence sequence,
                         const DropTape& command, absl::Time now) {
  const auto entries = absl::MakeConstSpan(command.entries);
  const size_t num_dropped = worlds_->DropTape(*session, entries, now);
  if (num_dropped == entries.size()) return Finish(session.get(), sequence, absl::OkStatus());
  const auto rest = entries.subspan(num_dropped);
  int64_t bytes = 0;
  for (const DropTape::Entry& entry : rest) {
    bytes += static_cast<int64_t>(sizeof(entry)) + HeapBytesOf(entry.key);
  }
  absl::StatusOr<Charge> charge =
      session->budget->Charge(Domain::kHost, Resource::kCommandBytes, bytes);
  if (!charge.ok()) {
    // There is no memory to keep the rest, and others may wait for it: all go in this turn.
    for (size_t at = 0; at < rest.size();) at += worlds_->DropTape(*session, rest.subspan(at), now);
    return Finish(session.get(), sequence, absl::OkStatus());
  }
  session->log.Park();
  DropTapesLater(
      session, sequence,
      std::make_shared<TapesToDrop>(TapesToDrop{*std::move(charge), {rest.begin(), rest.end()}}));
}

// What comes behind it in this log finds all of them dropped.
void Commands::DropTapesLater(const std::shared_ptr<Session>& session, Sequence sequence,
                              const std::shared_ptr<TapesToDrop>& tapes) {
  go_on_later_(session, [this, sequence, tapes](const std::shared_ptr<Session>& of) {
    if (of->dead()) return;
    const auto rest = absl::MakeConstSpan(tapes->entries).subspan(tapes->done);
    tapes->done += worlds_->DropTape(*of, rest, clock_->now);
    if (tapes->done < tapes->entries.size()) return DropTapesLater(of, sequence, tapes);
    Finish(of.get(), sequence, absl::OkStatus());
    GoOn(of, clock_->now);
  });
}

// --- Release ------------------------------------------------------------------------------------

void Commands::ReleaseNames(const std::shared_ptr<Session>& session, Sequence sequence,
                            const Release& command) {
  for (ArenaId arena : command.arenas) {
    // As with names: one that is gone is no fault, and an error that nobody hears is not made.
    if (session->staging.count(arena) == 0) continue;
    storage_->ReleaseStaging(session.get(), arena).IgnoreError();
  }
  Names& names = session->names;
  for (TensorId id : command.tensors) names.ReleaseTensor(id);
  for (GraphId id : command.graphs) names.ReleaseGraph(id);
  if (names.ReleaseMarked()) return Finish(session.get(), sequence, absl::OkStatus());
  session->log.Park();
  ReleaseLater(session, sequence);
}

// Others' frames come in between. What comes behind it in this log finds all of it released.
void Commands::ReleaseLater(const std::shared_ptr<Session>& session, Sequence sequence) {
  go_on_later_(session, [this, sequence](const std::shared_ptr<Session>& of) {
    if (!of->names.ReleaseMarked()) return ReleaseLater(of, sequence);
    Finish(of.get(), sequence, absl::OkStatus());
    GoOn(of, clock_->now);
  });
}

// --- Graphs -------------------------------------------------------------------------------------

void Commands::Register(const std::shared_ptr<Session>& session, Sequence sequence,
                        const RegisterGraph& command) {
  const absl::Status status = session->names.CheckFresh(command.graph);
  if (!status.ok()) return Finish(session.get(), sequence, status);
  absl::StatusOr<std::shared_ptr<GraphRecord>> record = MakeGraph(session, sequence, command);
  if (record.ok() && *record == nullptr) return session->log.Park();
  Finish(session.get(), sequence, NameGraph(session.get(), command.graph, std::move(record)));
}

absl::StatusOr<std::shared_ptr<GraphRecord>> Commands::MakeGraph(
    const std::shared_ptr<Session>& session, Sequence sequence, const RegisterGraph& command) {
  // What is registered, until it has been read.
  struct Encoded {
    Charge charge;
    std::string inlined;
    BufferRef staged;
  };
  auto encoded = std::make_shared<Encoded>();
  absl::string_view bytes;
  if (command.staged_bytes > 0) {
    CHORUS_ASSIGN_OR_RETURN(encoded->staged,
                            storage_->FindStaged(*session, command.staged, command.staged_bytes));
    bytes = absl::string_view(encoded->staged->host(), static_cast<size_t>(command.staged_bytes));
  } else {
    CHORUS_ASSIGN_OR_RETURN(encoded->charge,
                            session->budget->Charge(Domain::kHost, Resource::kCommandBytes,
                                                    static_cast<int64_t>(command.encoded.size())));
    encoded->inlined = command.encoded;
    bytes = encoded->inlined;
  }
  return graphs_->Register(bytes, {session->tenant->name, session->budget},
                           [this, session, sequence, encoded, id = command.graph](
                               absl::StatusOr<std::shared_ptr<GraphRecord>> record) {
                             if (session->dead()) return;
                             const absl::Status status = NameGraph(session.get(), id, record);
                             if (status.ok() && LoadGraph(session, sequence, *record)) return;
                             Finish(session.get(), sequence, status);
                             GoOn(session, clock_->now);
                           });
}

// Large plans are loaded before their first run asks for it, where that will most likely be. False:
// there is nothing to wait for.
bool Commands::LoadGraph(const std::shared_ptr<Session>& session, Sequence sequence,
                         const std::shared_ptr<GraphRecord>& record) {
  const size_t slots = static_cast<size_t>(record->graph.num_device_slots);
  if (!record->maxima.empty() || slots > session->devices.size()) return false;
  const auto wait = [&]() -> absl::StatusOr<GraphStore::OnMade> {
    // If it cannot be loaded the run says why.
    return GraphStore::OnMade([this, session, sequence](const absl::Status&) {
      if (session->dead()) return;
      Finish(session.get(), sequence, absl::OkStatus());
      GoOn(session, clock_->now);
    });
  };
  const absl::StatusOr<bool> is_loaded = launcher_->LoadPlan(
      record, /*variant=*/nullptr, absl::MakeConstSpan(session->devices).first(slots),
      {session->tenant->name, session->budget}, {absl::OkStatus(), wait});
  return is_loaded.ok() && !*is_loaded;
}

absl::Status Commands::NameGraph(Session* session, GraphId id,
                                 absl::StatusOr<std::shared_ptr<GraphRecord>> record) {
  const auto check = [&]() -> absl::Status {
    if (!record.ok()) return absl::OkStatus();  // runs that name it say why
    int64_t workspace = 0;
    for (int64_t bytes : (*record)->main.plan.workspace_bytes) workspace += bytes;
    if (workspace <= storage_->budget().limit()) return absl::OkStatus();
    return MakeError(Reason::kOutOfMemory, absl::StrCat("a run of this graph needs ", workspace,
                                                        " bytes of workspace; the daemon may use ",
                                                        storage_->budget().limit()));
  };
  const absl::Status status = check();
  if (!status.ok()) record = status;
  return session->names.NameGraph(id, std::move(record));
}

// --- Runs ---------------------------------------------------------------------------------------

void Commands::Submit(const std::shared_ptr<Session>& session, const Run& command,
                      Sequence sequence, absl::string_view frame, const absl::Status& planned,
                      absl::Time now) {
  // Before it is prepared: what it finds is to stay so until its vote.
  if (!command.groups.empty()) short_way_->MakeWayInWorldsOf(*session);
  const auto wait = [&] { return AskAgain(session, sequence, frame); };
  if (!runs_->Submit(session, sequence, command, {planned, wait}, now)) session->log.Park();
}

void Commands::SubmitBegun(const std::shared_ptr<Session>& session, Sequence sequence,
                           absl::string_view frame, absl::Time now) {
  CountWork(WorkOf(frame));
  const absl::StatusOr<Command> command = DecodeFrame(frame);
  Submit(session, absl::get<Run>(command->body), sequence, frame, absl::OkStatus(), now);
}

absl::StatusOr<GraphStore::OnMade> Commands::AskAgain(const std::shared_ptr<Session>& session,
                                                      Sequence sequence, absl::string_view frame) {
  CHORUS_ASSIGN_OR_RETURN(Charge charge,
                          session->budget->Charge(Domain::kHost, Resource::kCommandBytes,
                                                  static_cast<int64_t>(frame.size())));
  auto copy = std::make_shared<FrameCopy>(FrameCopy{std::move(charge), std::string(frame)});
  return GraphStore::OnMade([this, session, sequence, copy](const absl::Status& status) {
    SubmitAgain(session, sequence, copy, status);
  });
}

// Many may have waited for the same: each has a turn of its own.
void Commands::SubmitAgain(const std::shared_ptr<Session>& session, Sequence sequence,
                           const std::shared_ptr<FrameCopy>& copy, const absl::Status& planned) {
  if (session->dead()) return;
  go_on_later_(session, [this, sequence, copy, planned](const std::shared_ptr<Session>& of) {
    if (of->failing > 0) {
      // Not by AfterFailing(): what is still to fail may wait for the background, and would be
      // asked for again and again meanwhile.
      of->when_failed.push_back(
          [this, sequence, copy, planned](const std::shared_ptr<Session>& self) {
            SubmitAgain(self, sequence, copy, planned);
          });
      return;
    }
    of->log.Unpark();
    CountWork(WorkOf(copy->frame));
    const absl::StatusOr<Command> command = DecodeFrame(copy->frame);
    if (const Run* run = absl::get_if<Run>(&command->body)) {
      Submit(of, *run, sequence, copy->frame, planned, clock_->now);
    } else {
      Create(of, sequence, absl::get<CreateTensor>(command->body), copy->frame);
    }
    TakeHeld(of, clock_->now);
  });
}

// --- Tensors ------------------------------------------------------------------------------------

// Its outcome follows when the bytes are there.
void Commands::Create(const std::shared_ptr<Session>& session, Sequence sequence,
                      const CreateTensor& command, absl::string_view frame) {
  const absl::Status status = BeginCreate(session, sequence, command);
  const auto ask_again = [&] { return AskAgain(session, sequence, frame); };
  if (storage_->AwaitMemory(session.get(), status, ask_again)) return session->log.Park();
  if (status.ok()) return;
  Error error = ErrorOf(status);
  holders_->Explain(*session, command, &error);
  failures_->Record(session.get(), nullptr, &error);
  session->names.NameFailed({command.tensor}, session->names.Keep(error));
  session->log.Finish(sequence, error);
}

absl::Status Commands::BeginCreate(const std::shared_ptr<Session>& session, Sequence sequence,
                                   const CreateTensor& command) {
  CHORUS_RETURN_IF_ERROR(session->names.CheckFresh(command.tensor));
  CHORUS_RETURN_IF_ERROR(command.type.Validate(options_->memory_limit_bytes));
  if (std::find(session->devices.begin(), session->devices.end(), command.device) ==
      session->devices.end()) {
    return Malformed(absl::StrCat("device ", command.device.value(), " is none of the session's"));
  }
  if (absl::holds_alternative<TensorId>(command.source)) {
    return Malformed("a tensor is made from inline bytes or from staging, not from a tensor");
  }
  CHORUS_RETURN_IF_ERROR(session->names.Reserve(1, command.tensor.slot));
  auto cell = std::make_shared<Cell>();
  cell->type = std::make_shared<TensorType>(command.type);
  cell->device = command.device;
  cell->bytes = command.type.num_bytes();
  const TensorId id = command.tensor;
  const auto settle = [this, session, sequence, id, cell](Storage::Arrival,
                                                          const absl::Status& status) {
    if (status.ok()) {
      cell->state = Cell::State::kReady;
    } else {
      Error error = ErrorOf(status);
      failures_->Record(session.get(), nullptr, &error);
      cell->state = Cell::State::kFailed;
      cell->error = session->names.Keep(std::move(error));
    }
    if (!session->dead()) {
      session->names.Publish(id, *cell);
      Finish(session.get(), sequence, status);
    }
    runs_->Settled(cell, session->tenant->name);
  };
  CHORUS_ASSIGN_OR_RETURN(Storage::Bound bound,
                          storage_->Bind(*session, command.source, command.type, command.device,
                                         /*stable=*/true, settle));
  cell->buffer = std::move(bound.buffer);
  session->names.NameTensor(id, cell);
  if (bound.arrival == Storage::Arrival::kInOrder) {
    cell->state = Cell::State::kLaunched;
    cell->upload = bound.upload;
  } else if (bound.arrival == Storage::Arrival::kThere) {
    settle(bound.arrival, absl::OkStatus());
  }
  return absl::OkStatus();
}

void Commands::MakeReadable(const std::shared_ptr<Session>& session, Sequence sequence,
                            const chorus::MakeReadable& command) {
  // Ends when the last of them is readable, with the first failure.
  struct Progress {
    size_t remaining;
    FirstFailure failure;
    Charge charge;
  };
  FirstFailure failure;
  // Those that are not readable yet, each once, whatever often it is named.
  absl::flat_hash_map<TensorId, CellRef> unreadable;
  CountWork(kWorkPerWaiter * static_cast<int64_t>(command.tensors.size()));
  for (TensorId id : command.tensors) {
    absl::StatusOr<CellRef> cell = session->names.FindTensor(id);
    if (!cell.ok()) {
      failure.Note(cell.status());
    } else if ((*cell)->state == Cell::State::kFailed) {
      failure.Note(**cell);
    } else if ((*cell)->settled() && (*cell)->host() != nullptr) {
      session->names.Publish(id, **cell);
    } else {
      unreadable.emplace(id, *std::move(cell));
    }
    // The command has one error: a frame may have many names that are wrong.
    if (!failure.none()) break;
  }
  if (unreadable.empty()) return Finish(session.get(), sequence, failure.status());
  // What waits for one of them takes, and the command.
  constexpr int64_t kBytesPerWait = 512;
  absl::StatusOr<Charge> charge =
      session->budget->Charge(Domain::kHost, Resource::kCommandBytes,
                              kBytesPerWait * static_cast<int64_t>(unreadable.size() + 1));
  if (!charge.ok()) return Finish(session.get(), sequence, charge.status());
  auto progress = std::make_shared<Progress>(
      Progress{unreadable.size(), std::move(failure), *std::move(charge)});
  for (const auto& entry : unreadable) {
    storage_->WhenReadable(entry.second, session->tenant,
                           [this, session, sequence, id = entry.first, progress](
                               const CellRef& readable, const absl::Status& read) {
                             if (readable->state == Cell::State::kFailed) {
                               progress->failure.Note(*readable);
                             } else if (!read.ok()) {
                               progress->failure.Note(read);
                             } else if (!session->dead()) {
                               session->names.Publish(id, *readable);
                             }
                             if (--progress->remaining == 0 && !session->dead()) {
                               Finish(session.get(), sequence, progress->failure.status());
                             }
                           });
  }
}

}  // namespace chorus::node
