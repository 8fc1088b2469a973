#include "tests/hostile/attacker.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "client/attach/attach_client.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/base/source_line.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/runtime/testing/hostile_graphs.h"
#include "core/tensor/type.h"
#include "core/transport/command.h"
#include "core/transport/completion.h"
#include "core/transport/ring.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"
#include "proto/chorus/v1/diagnostics.grpc.pb.h"
#include "proto/chorus/v1/sessions.grpc.pb.h"
#include "proto/chorus/v1/worlds.grpc.pb.h"
#include "proto/convert/errors_convert.h"
#include "tests/fault/raw_session.h"
#include "tests/hostile/half_messages.h"
#include "tests/hostile/rpc_attacks.h"
#include "tests/hostile/unread_call.h"

namespace chorus {
namespace hostile {
namespace {

absl::Time Deadline() { return fault::RawSession::Deadline(); }

}  // namespace

struct Attacker::Impl : fault::RawSession {
  Impl(const std::string& daemon, fault::RawSession raw)
      : fault::RawSession(std::move(raw)), address(daemon) {
    if (memory == nullptr) return;
    submitter.emplace(memory.get(), doorbell.get(), std::move(wake));
    waiter.emplace(memory.get());
  }

  // Of a daemon on a Unix socket.
  std::string SocketPath() const { return std::string(absl::StripPrefix(address, "unix:")); }

  const std::string address;
  absl::optional<Submitter> submitter;  // of one that is attached
  absl::optional<CompletionWaiter> waiter;
  int64_t sequence = 0;
  ErrorId last_error;                             // of what Do has done last
  std::vector<UniqueFd> kept;                     // descriptors
  std::vector<std::unique_ptr<Attacker>> others;  // sessions of its own
  Kept calls;

  absl::StatusOr<Sequence> Submit(CommandBody body) {
    return SubmitAs(++sequence, std::move(body));
  }
  absl::StatusOr<Sequence> SubmitAs(int64_t id, CommandBody body) {
    Command command;
    command.sequence = Sequence(id);
    command.body = std::move(body);
    ByteWriter frame;
    EncodeFrame(command, &frame);
    CHORUS_RETURN_IF_ERROR(submitter->Submit(frame.bytes(), fault::RawSession::kPatience));
    return command.sequence;
  }
  // OK, or the code with which it ended.
  absl::StatusOr<absl::Status> Do(CommandBody body) {
    CHORUS_ASSIGN_OR_RETURN(const Sequence command, Submit(std::move(body)));
    CHORUS_ASSIGN_OR_RETURN(const RunOutcome outcome, waiter->WaitForRun(command, Deadline()));
    last_error = outcome.error;
    return absl::Status(outcome.code, "");
  }
  // What the daemon keeps of it.
  absl::StatusOr<v1::Error> KeptError(ErrorId error) const {
    grpc::ClientContext context;
    fault::RawSession::SetDeadline(&context);
    v1::GetErrorRequest request;
    v1::GetErrorResponse kept;
    request.set_error_id(error.value());
    CHORUS_RETURN_IF_ERROR(
        FromGrpc(v1::Diagnostics::NewStub(channel)->GetError(&context, request, &kept)));
    return kept.error();
  }

  absl::StatusOr<AttachClient::Staging> Stage(absl::string_view bytes) {
    CHORUS_ASSIGN_OR_RETURN(AttachClient::Staging staging,
                            attach->CreateStaging(static_cast<int64_t>(bytes.size()), Deadline()));
    void* const data = mmap(nullptr, static_cast<size_t>(staging.bytes), PROT_READ | PROT_WRITE,
                            MAP_SHARED, staging.fd.get(), 0);
    if (data == MAP_FAILED) return absl::InternalError("mmap");
    std::copy(bytes.begin(), bytes.end(), static_cast<char*>(data));
    const absl::Status confirmed = attach->ConfirmStaging(staging, Deadline());
    munmap(data, static_cast<size_t>(staging.bytes));
    CHORUS_RETURN_IF_ERROR(confirmed);
    return staging;
  }
  // The whole arena as a graph.
  absl::StatusOr<absl::Status> RegisterStaged(absl::string_view bytes, int32_t slot) {
    const int64_t size = static_cast<int64_t>(bytes.size());
    CHORUS_ASSIGN_OR_RETURN(const AttachClient::Staging staging, Stage(bytes));
    RegisterGraph command;
    command.graph = {slot, 1};
    command.staged.arena = staging.arena;
    command.staged_bytes = size;
    CHORUS_ASSIGN_OR_RETURN(const absl::Status status, Do(std::move(command)));
    CHORUS_RETURN_IF_ERROR(attach->ReleaseStaging(staging.arena, Deadline()));
    return status;
  }
};

namespace {

// A chain of so many small ops on a vector.
Graph Chain(int nodes, Dim size) {
  Graph graph;
  graph.num_device_slots = 1;
  GraphInput input;
  input.type = TensorType(DType::kF32, {size});
  graph.inputs.push_back(input);
  ValueIndex value = 0;
  for (int i = 0; i < nodes; ++i) {
    Node node;
    node.op = "neg";
    node.inputs = {value};
    node.outputs = {input.type};
    graph.nodes.push_back(std::move(node));
    ++value;
  }
  GraphOutput output;
  output.value = value;
  graph.outputs.push_back(output);
  return graph;
}

InlineData Zeros(int64_t floats) {
  InlineData data;
  data.bytes.resize(static_cast<size_t>(floats) * 4);
  return data;
}

// Graphs of nothing: a node is a few zero bytes.
absl::StatusOr<Report> ZeroNodes(Attacker* attacker) {
  Report report;
  Graph empty;
  empty.nodes.resize(400000);
  CHORUS_ASSIGN_OR_RETURN(report.refused,
                          attacker->impl().RegisterStaged(EncodeGraph(empty), /*slot=*/0));
  return report;
}

// Each small as bytes, and much to plan: with as many collectives as a graph may have, which are
// planned, and with more; and such whose plans are too large.
absl::StatusOr<Report> Quadratic(Attacker* attacker) {
  using testing::HostileGraph;
  struct Part {
    HostileGraph kind;
    int size;
    absl::StatusCode code;
    std::vector<absl::string_view> says;
  };
  const std::vector<absl::string_view> too_many = {"MALFORMED", "number of collectives"};
  const std::vector<absl::string_view> too_large = {"QUOTA", "the graph's plan"};
  const Part parts[] = {
      {HostileGraph::kSums, 2047, absl::StatusCode::kOk, {}},
      {HostileGraph::kSums, 2048, absl::StatusCode::kInvalidArgument, too_many},
      {HostileGraph::kAllAfterAll, 1024, absl::StatusCode::kOk, {}},
      {HostileGraph::kAllAfterAll, 1025, absl::StatusCode::kInvalidArgument, too_many},
      {HostileGraph::kManyPieces, 20000, absl::StatusCode::kResourceExhausted, too_large},
      {HostileGraph::kWideNodes, 20000, absl::StatusCode::kResourceExhausted, too_large},
  };
  Report report;
  Attacker::Impl& impl = attacker->impl();
  int32_t slot = 0;
  for (const Part& part : parts) {
    const std::string bytes = EncodeGraph(testing::MakeHostileGraph(part.kind, part.size));
    CHORUS_ASSIGN_OR_RETURN(absl::Status status, impl.RegisterStaged(bytes, ++slot));
    if (status.ok()) {
      ++report.done;
    } else {
      CHORUS_ASSIGN_OR_RETURN(const v1::Error kept, impl.KeptError(impl.last_error));
      status = absl::Status(status.code(), absl::StrCat(kept.reason(), ": ", kept.message()));
      report.refused = status;
    }
    CHORUS_RETURN_IF_ERROR(ExpectEnd(absl::StrCat(testing::NameOf(part.kind), " of ", part.size),
                                     status, part.code, part.says));
  }
  return report;
}

// Different graphs, all kept.
absl::StatusOr<Report> Graphs(Attacker* attacker) {
  Report report;
  for (int32_t slot = 0; slot < 1000; ++slot) {
    const std::string bytes = EncodeGraph(
        testing::MakeHostileGraph(testing::HostileGraph::kOutputsOfAChain, 3000 + slot));
    CHORUS_ASSIGN_OR_RETURN(report.refused, attacker->impl().RegisterStaged(bytes, slot));
    if (!report.refused.ok()) break;
    ++report.done;
  }
  return report;
}

// Staging that it gives back and keeps: the pages are its own all the same.
absl::StatusOr<Report> Pages(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  for (; report.done < 1000; ++report.done) {
    absl::StatusOr<AttachClient::Staging> staging =
        impl.attach->CreateStaging(int64_t{4} << 20, Deadline());
    report.refused = staging.status();
    if (!staging.ok()) break;
    // Touched: without a page it would be nothing.
    void* const data = mmap(nullptr, static_cast<size_t>(staging->bytes), PROT_READ | PROT_WRITE,
                            MAP_SHARED, staging->fd.get(), 0);
    if (data == MAP_FAILED) return absl::InternalError("mmap");
    for (int64_t at = 0; at < staging->bytes; at += 4096) static_cast<char*>(data)[at] = 1;
    munmap(data, static_cast<size_t>(staging->bytes));
    impl.kept.push_back(std::move(staging->fd));
    CHORUS_RETURN_IF_ERROR(impl.attach->ReleaseStaging(staging->arena, Deadline()));
  }
  return report;
}

// Commands whose predecessor never comes.
absl::StatusOr<Report> Gaps(Attacker* attacker) {
  Report report;
  RegisterGraph command;
  command.encoded = std::string(60 << 10, 'x');
  for (int64_t sequence = 2; sequence < 2000; ++sequence) {
    CHORUS_RETURN_IF_ERROR(attacker->impl().SubmitAs(sequence, command).status());
    ++report.done;
  }
  // Then the first: what is held is carried out. Of so many outcomes the first is forgotten soon.
  CHORUS_RETURN_IF_ERROR(attacker->impl().SubmitAs(1, Cancel{Sequence(1)}).status());
  constexpr int64_t kHeld = 1024;
  CHORUS_ASSIGN_OR_RETURN(const RunOutcome outcome,
                          attacker->impl().waiter->WaitForRun(Sequence(1 + kHeld), Deadline()));
  report.refused = absl::Status(outcome.code, "");
  return report;
}

// Names of what failed.
absl::StatusOr<Report> Names(Attacker* attacker) {
  Report report;
  for (int32_t slot = 0; slot < 60000; ++slot) {
    CreateTensor create;
    create.tensor = TensorId{slot, 1};
    create.type = TensorType(DType::kF32, {Dim(int64_t{1024})});
    create.source = InlineData{{1, 2, 3, 4}};
    create.call_site = absl::StrCat(std::string(400, 'x'), slot);
    CHORUS_ASSIGN_OR_RETURN(const Sequence sequence, attacker->impl().Submit(std::move(create)));
    ++report.done;
    if (slot % 500 != 499) continue;
    CHORUS_ASSIGN_OR_RETURN(const RunOutcome outcome,
                            attacker->impl().waiter->WaitForRun(sequence, Deadline()));
    report.refused = absl::Status(outcome.code, "");
  }
  return report;
}

// A world of its own, named after one of its sessions: other attackers may have others at the same
// time. Waits until the world is complete.
absl::StatusOr<WorldId> JoinOwn(Attacker::Impl* impl, int64_t named_after, int rank, int size) {
  grpc::ClientContext context;
  fault::RawSession::SetDeadline(&context);
  v1::JoinWorldRequest request;
  v1::JoinWorldResponse response;
  request.set_session(impl->session);
  request.set_name(absl::StrCat("own", named_after));
  request.set_rank(rank);
  request.set_size(size);
  CHORUS_RETURN_IF_ERROR(
      FromGrpc(v1::Worlds::NewStub(impl->channel)->Join(&context, request, &response)));
  return WorldId(response.world().world());
}

// A chain of so many collectives of rank 0 of so many, the last or each of them a result.
Graph AllReduces(int size, int calls, bool all_results) {
  Graph graph = Chain(calls, Dim(int64_t{1}));
  if (all_results) graph.outputs.clear();
  for (Node& node : graph.nodes) {
    node.op = "all_reduce";
    node.effect = Effect::kCollective;
    node.collective.emplace();
    node.collective->kind = CollectiveKind::kAllReduce;
    node.collective->reduction = Reduction::kSum;
    node.collective->rank = GroupRank(0);
    if (!all_results) continue;
    graph.outputs.emplace_back();
    graph.outputs.back().value = node.inputs[0] + 1;
  }
  GroupSlot slot;
  slot.size = size;
  slot.held = {GroupRank(0)};
  slot.device_slots = {0};
  graph.group_slots.push_back(slot);
  return graph;
}

// A run of this graph by rank 0 of the world, whose results have the slots from `slot` on.
Run RunOfCalls(GraphId graph, WorldId world, size_t results, int32_t slot, uint32_t generation) {
  Run run;
  run.graph = graph;
  run.inputs.push_back(Zeros(1));
  run.outputs.resize(results);
  for (OutBinding& output : run.outputs) {
    output.kind = OutBinding::Kind::kFresh;
    output.id = {slot++, generation};
  }
  run.groups.emplace_back();
  run.groups.back().world = world;
  run.groups.back().base.emplace_back();
  return run;
}

// Lines of the program that errors have in their texts: first one that is too long, then calls that
// are refused, each with the longest. All their results are kept.
absl::StatusOr<Report> Sources(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  Graph graph = AllReduces(/*size=*/1, /*calls=*/1, /*all_results=*/false);
  graph.nodes[0].source = std::string(size_t{1} << 20, 'x');
  CHORUS_ASSIGN_OR_RETURN(const absl::Status longer,
                          impl.RegisterStaged(EncodeGraph(graph), /*slot=*/0));
  if (longer.ok()) return absl::InternalError("a source of 1 MiB is taken");
  graph.nodes[0].source = std::string(kMaxSourceLineBytes, 'x');
  CHORUS_ASSIGN_OR_RETURN(report.refused, impl.RegisterStaged(EncodeGraph(graph), /*slot=*/1));
  if (!report.refused.ok()) return report;
  CHORUS_ASSIGN_OR_RETURN(const WorldId world,
                          JoinOwn(&impl, impl.session, /*rank=*/0, /*size=*/1));
  Run run = RunOfCalls({1, 1}, world, /*results=*/1, /*slot=*/0, /*generation=*/1);
  CallPosition& position = run.groups.back().base.back();
  position.part = kMaxCallPart;  // there is none
  Sequence last;
  for (; report.done < 3000; ++report.done) {
    run.outputs.back().id = {static_cast<int32_t>(report.done), 1};
    // Each of them ends an epoch, and is another error.
    run.groups.back().epoch = Epoch(1 + report.done);
    position.call = report.done;
    CHORUS_ASSIGN_OR_RETURN(last, impl.Submit(run));
  }
  CHORUS_ASSIGN_OR_RETURN(const RunOutcome outcome, impl.waiter->WaitForRun(last, Deadline()));
  report.refused = absl::Status(outcome.code, "");
  // What is kept of it is no more than an error may have.
  CHORUS_ASSIGN_OR_RETURN(const v1::Error kept, impl.KeptError(outcome.error));
  if (!absl::StrContains(kept.message(), std::string(kMaxSourceLineBytes / 4, 'x')) ||
      kept.ByteSizeLong() > 2 * Error::kMaxBytes) {
    return absl::InternalError(absl::StrCat("kept: ", kept.message()));
  }
  return report;
}

// Calls of a world by one rank alone, as many as its memory has room for, of which the other rank
// ends the epoch.
absl::StatusOr<Report> Epochs(Attacker* attacker) {
  constexpr int kCalls = 1000;  // of a run
  constexpr int kRuns = 20;
  Report report;
  Attacker::Impl& impl = attacker->impl();
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Attacker> opened, Attacker::Open(impl.address, "epochs"));
  impl.others.push_back(std::move(opened));
  Attacker::Impl& other = impl.others.back()->impl();
  CHORUS_ASSIGN_OR_RETURN(
      report.refused,
      impl.RegisterStaged(EncodeGraph(AllReduces(/*size=*/2, kCalls, /*all_results=*/true)),
                          /*slot=*/0));
  absl::Status joined;
  std::thread other_joins([&] { joined = JoinOwn(&other, impl.session, 1, 2).status(); });
  const absl::StatusOr<WorldId> world = JoinOwn(&impl, impl.session, 0, 2);
  other_joins.join();
  CHORUS_RETURN_IF_ERROR(world.status());
  CHORUS_RETURN_IF_ERROR(joined);
  const auto worlds = v1::Worlds::NewStub(other.channel);
  for (; report.refused.ok() && report.done < 10; ++report.done) {
    Sequence last;
    Release release;
    for (int r = 0; r < kRuns; ++r) {
      Run run =
          RunOfCalls({0, 1}, *world, kCalls, r * kCalls, static_cast<uint32_t>(report.done + 1));
      run.groups.back().epoch = Epoch(report.done + 1);
      run.groups.back().base.back().call = (report.done * kRuns + r) * kCalls;
      for (const OutBinding& output : run.outputs) release.tensors.push_back(output.id);
      CHORUS_ASSIGN_OR_RETURN(last, impl.Submit(std::move(run)));
    }
    // All of them have been taken when this one has.
    CHORUS_RETURN_IF_ERROR(impl.Do(Release()).status());
    grpc::ClientContext context;
    fault::RawSession::SetDeadline(&context);
    v1::AbortWorldRequest abort;
    v1::AbortWorldResponse aborted;
    abort.set_session(other.session);
    abort.set_world(world->value());
    abort.set_rank(1);
    abort.set_message("again");
    CHORUS_RETURN_IF_ERROR(FromGrpc(worlds->Abort(&context, abort, &aborted)));
    CHORUS_ASSIGN_OR_RETURN(const RunOutcome outcome, impl.waiter->WaitForRun(last, Deadline()));
    if (outcome.code != absl::StatusCode::kAborted) {
      return absl::InternalError(
          absl::StrCat("an aborted run: ", absl::StatusCodeToString(outcome.code)));
    }
    for (size_t at = 0; at < release.tensors.size(); at += 4000) {
      Release part;
      part.tensors.assign(release.tensors.begin() + static_cast<ptrdiff_t>(at),
                          release.tensors.begin() +
                              static_cast<ptrdiff_t>(std::min(at + 4000, release.tensors.size())));
      CHORUS_RETURN_IF_ERROR(impl.Submit(std::move(part)).status());
    }
    EnterEpoch enter;
    enter.world = *world;
    enter.epoch = Epoch(report.done + 2);
    CHORUS_ASSIGN_OR_RETURN(report.refused, impl.Do(enter));
  }
  return report;
}

// Tape entries of a world of its own that no gradient is ever taken of, in runs of many calls. When
// there is no room for more it drops all but those of the first run, in as few frames as it can,
// and goes on.
absl::StatusOr<Report> Tapes(Attacker* attacker) {
  constexpr int kCalls = 1000;  // of a run
  Report report;
  Attacker::Impl& impl = attacker->impl();
  Graph graph = AllReduces(/*size=*/1, kCalls, /*all_results=*/false);
  for (Node& node : graph.nodes) node.collective->wants_grad = true;
  CHORUS_ASSIGN_OR_RETURN(report.refused, impl.RegisterStaged(EncodeGraph(graph), /*slot=*/0));
  if (!report.refused.ok()) return report;
  CHORUS_ASSIGN_OR_RETURN(const WorldId world,
                          JoinOwn(&impl, impl.session, /*rank=*/0, /*size=*/1));
  Run run = RunOfCalls({0, 1}, world, /*results=*/1, /*slot=*/0, /*generation=*/1);
  run.outputs.back() = OutBinding();  // nobody wants it
  // Given back before it goes on: the rows of tapes stay with their world, for others of these.
  CHORUS_ASSIGN_OR_RETURN(AttachClient::Staging spare,
                          impl.attach->CreateStaging(int64_t{4} << 20, Deadline()));
  RunGroup& group = run.groups.back();
  group.epoch = Epoch(1);
  int64_t& call = group.base.back().call;
  for (const bool again : {false, true}) {
    const int64_t first = call;
    for (int runs = 0; runs < 1000; ++runs) {
      CHORUS_ASSIGN_OR_RETURN(report.refused, impl.Do(run));
      call += kCalls;  // of a run that is refused as well
      if (!report.refused.ok()) break;
      ++report.done;
    }
    if (again || report.refused.ok()) break;
    DropTape drop;
    for (int64_t tape = first + kCalls; tape < call; ++tape) {
      DropTape::Entry& entry = drop.entries.emplace_back();
      entry.world = world;
      entry.member = GroupRank(0);
      entry.key.since = Epoch(1);
      entry.key.at.call = tape;
      if (drop.entries.size() < DropTape::kMaxEntries && tape + 1 < call) continue;
      CHORUS_RETURN_IF_ERROR(impl.Submit(std::move(drop)).status());
      drop = DropTape();
    }
    spare.fd = UniqueFd();
    CHORUS_RETURN_IF_ERROR(impl.attach->ReleaseStaging(spare.arena, Deadline()));
    EnterEpoch enter;  // the refusal has ended one
    enter.world = world;
    enter.epoch = group.epoch = Epoch(2);
    CHORUS_ASSIGN_OR_RETURN(report.refused, impl.Do(enter));
    if (!report.refused.ok()) break;
  }
  return report;
}

// Results that it gives back and keeps: their pages are its own all the same. Then it asks for
// other memory.
absl::StatusOr<Report> Results(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  const TensorType type(DType::kF32, {int64_t{1} << 20});
  Graph graph = Chain(/*nodes=*/1, type.dims[0]);
  CHORUS_ASSIGN_OR_RETURN(report.refused, impl.RegisterStaged(EncodeGraph(graph), /*slot=*/0));
  if (!report.refused.ok()) return report;
  CHORUS_ASSIGN_OR_RETURN(const AttachClient::Staging staging,
                          impl.Stage(std::string(static_cast<size_t>(type.num_bytes()), '\1')));
  ExternalRange ones;
  ones.arena = staging.arena;
  Run run;
  run.graph = {0, 1};
  run.inputs = {ones};
  run.outputs.emplace_back();
  run.outputs.back().kind = OutBinding::Kind::kFresh;
  Release release;
  for (; report.done < 1000; ++report.done) {
    const TensorId result{static_cast<int32_t>(report.done), 1};
    run.outputs.back().id = result;
    CHORUS_ASSIGN_OR_RETURN(report.refused, impl.Do(run));
    if (!report.refused.ok()) break;
    release.tensors.push_back(result);
    CHORUS_RETURN_IF_ERROR(impl.Submit(MakeReadable{{result}}).status());
    CHORUS_ASSIGN_OR_RETURN(
        const TensorRecord record,
        impl.waiter->WaitForTensor(result, CompletionWaiter::Until::kReadable, Deadline()));
    report.refused = absl::Status(record.code, "");
    if (!report.refused.ok()) break;
    CHORUS_ASSIGN_OR_RETURN(AttachClient::ResultArenaFd arena,
                            impl.attach->ResultArena(record.arena, Deadline()));
    impl.kept.push_back(std::move(arena.fd));
  }
  CHORUS_RETURN_IF_ERROR(impl.Do(std::move(release)).status());
  CHORUS_RETURN_IF_ERROR(impl.attach->ReleaseStaging(staging.arena, Deadline()));
  CHORUS_ASSIGN_OR_RETURN(const Report pages, Pages(attacker));
  report.refused = pages.refused;
  report.done += pages.done;
  return report;
}

// Puts a part of the file into queues of new sockets, in which no page has an opener.
absl::Status PutIntoSockets(int file, int64_t offset, int64_t bytes,
                            std::vector<UniqueFd>* sockets) {
  off_t at = offset;
  const off_t end_at = offset + bytes;
  while (at < end_at) {
    const off_t before = at;
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
      return absl::InternalError(absl::StrCat("socketpair: ", strerror(errno)));
    }
    for (const int end : ends) {
      sockets->emplace_back(end);
      while (at < end_at && sendfile(end, file, &at, static_cast<size_t>(end_at - at)) > 0) {
      }
    }
    if (at == before) return absl::InternalError(absl::StrCat("sendfile: ", strerror(errno)));
  }
  return absl::OkStatus();
}

// Results whose pages it keeps where nobody sees them: it gives back what it was given, and asks
// for other memory, until it is told that this is in no account.
absl::StatusOr<Report> Splices(Attacker* attacker) {
  constexpr int kRounds = 16;
  constexpr int32_t kMostOfARound = 30;
  Report report;
  Attacker::Impl& impl = attacker->impl();
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  // Of two sizes in turns: else it would get the same memory again.
  const TensorType types[] = {TensorType(DType::kF32, {int64_t{1} << 20}),
                              TensorType(DType::kF32, {int64_t{5} << 18})};
  for (int32_t size = 0; size < 2; ++size) {
    CHORUS_ASSIGN_OR_RETURN(
        report.refused,
        impl.RegisterStaged(EncodeGraph(Chain(/*nodes=*/1, types[size].dims[0])), size));
    if (!report.refused.ok()) return report;
  }
  CHORUS_ASSIGN_OR_RETURN(const AttachClient::Staging staging,
                          impl.Stage(std::string(static_cast<size_t>(types[1].num_bytes()), '\1')));
  ExternalRange ones;
  ones.arena = staging.arena;
  Run run;
  run.inputs = {ones};
  run.outputs.emplace_back();
  run.outputs.back().kind = OutBinding::Kind::kFresh;
  for (int round = 0; round < kRounds; ++round) {
    const int32_t size = round % 2;
    run.graph = {size, 1};
    Release release;
    for (int32_t i = 0; i < kMostOfARound; ++i) {
      const TensorId result{i, static_cast<uint32_t>(round + 1)};
      run.outputs.back().id = result;
      CHORUS_ASSIGN_OR_RETURN(report.refused, impl.Do(run));
      release.tensors.push_back(result);  // it has failed where the run was refused
      if (!report.refused.ok()) break;
      CHORUS_ASSIGN_OR_RETURN(report.refused, impl.Do(MakeReadable{{result}}));
      if (!report.refused.ok()) break;
      CHORUS_ASSIGN_OR_RETURN(
          const TensorRecord record,
          impl.waiter->WaitForTensor(result, CompletionWaiter::Until::kReadable, Deadline()));
      CHORUS_ASSIGN_OR_RETURN(const AttachClient::ResultArenaFd arena,
                              impl.attach->ResultArena(record.arena, Deadline()));
      CHORUS_RETURN_IF_ERROR(
          PutIntoSockets(arena.fd.get(), record.offset, record.bytes, &impl.kept));
      ++report.done;
      report.amount += types[size].num_bytes();
    }
    if (!report.refused.ok()) {
      CHORUS_ASSIGN_OR_RETURN(const v1::Error kept, impl.KeptError(impl.last_error));
      report.refused = absl::Status(report.refused.code(), kept.message());
    }
    CHORUS_RETURN_IF_ERROR(impl.Do(std::move(release)).status());
    if (absl::StrContains(report.refused.message(), "in no account")) break;
  }
  return report;
}

absl::StatusOr<Report> Sessions(Attacker* attacker) {
  Report report;
  for (; report.done < 1000; ++report.done) {
    absl::StatusOr<std::unique_ptr<Attacker>> other =
        Attacker::Open(attacker->impl().address, "sessions");
    report.refused = other.status();
    if (!other.ok()) break;
    attacker->impl().others.push_back(*std::move(other));
  }
  return report;
}

// --- What takes long: none is refused ---

// In a slot of its own, behind the first. What is refused is not released.
absl::Status RegisterAndRelease(Attacker::Impl* impl, const Graph& graph, Report* report) {
  const auto slot = static_cast<int32_t>(report->done) + 1;
  CHORUS_ASSIGN_OR_RETURN(report->refused, impl->RegisterStaged(EncodeGraph(graph), slot));
  if (!report->refused.ok()) return absl::OkStatus();
  ++report->done;
  Release release;
  release.graphs = {{slot, 1}};
  return impl->Submit(std::move(release)).status();
}

// The output, which has the generation of the same slot's last one plus one, is released.
absl::Status RunAndRelease(Attacker::Impl* impl, GraphId graph, Binding input, Report* report) {
  Run run;
  run.graph = graph;
  run.inputs.push_back(std::move(input));
  run.outputs.emplace_back();
  run.outputs.back().kind = OutBinding::Kind::kFresh;
  run.outputs.back().id = {1, static_cast<uint32_t>(++report->done)};
  Release release;
  release.tensors = {run.outputs.back().id};
  CHORUS_ASSIGN_OR_RETURN(report->refused, impl->Do(std::move(run)));
  return impl->Submit(std::move(release)).status();
}

// Large graphs, one after the other.
absl::StatusOr<Report> Planning(Attacker* attacker) {
  Report report;
  while (report.refused.ok() && report.done < 4) {
    const Graph graph = Chain(20000 + static_cast<int>(report.done), Dim(int64_t{2}));
    CHORUS_RETURN_IF_ERROR(RegisterAndRelease(&attacker->impl(), graph, &report));
  }
  return report;
}

// One graph, each time at sizes that it has not had.
absl::StatusOr<Report> Sizes(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  constexpr int64_t kMost = 64;
  Graph graph = Chain(2000, Dim(kMost));
  graph.inputs[0].type.dims[0] = Dim::Symbol(0, kMost);
  CHORUS_ASSIGN_OR_RETURN(report.refused, impl.RegisterStaged(EncodeGraph(graph), /*slot=*/0));
  CHORUS_ASSIGN_OR_RETURN(const AttachClient::Staging staging,
                          impl.Stage(std::string(4 * kMost, '\0')));
  ExternalRange zeros;
  zeros.arena = staging.arena;
  for (int64_t size = 1; size <= 40 && report.refused.ok(); ++size) {
    CreateTensor create;
    create.tensor = {2, static_cast<uint32_t>(size)};
    create.type = TensorType(DType::kF32, {size});
    create.device = DeviceIndex(impl.device);
    create.source = zeros;
    CHORUS_RETURN_IF_ERROR(impl.Submit(create).status());
    CHORUS_RETURN_IF_ERROR(RunAndRelease(&impl, {0, 1}, create.tensor, &report));
    Release release;
    release.tensors = {create.tensor};
    CHORUS_RETURN_IF_ERROR(impl.Submit(std::move(release)).status());
  }
  return report;
}

// One graph of thousands of small ops, again and again.
absl::StatusOr<Report> Steps(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  CHORUS_ASSIGN_OR_RETURN(
      report.refused, impl.RegisterStaged(EncodeGraph(Chain(20000, Dim(int64_t{2}))), /*slot=*/0));
  while (report.refused.ok() && report.done < 20) {
    CHORUS_RETURN_IF_ERROR(RunAndRelease(&impl, {0, 1}, Zeros(2), &report));
  }
  return report;
}

// A chain of products with a matrix of `side` rows.
Graph Products(int nodes, int64_t side) {
  Graph graph = Chain(nodes, Dim(int64_t{1}));
  graph.inputs[0].type = TensorType(DType::kF32, {side, side});
  for (Node& node : graph.nodes) {
    node.op = "matmul";
    node.inputs.push_back(0);
    node.outputs = {graph.inputs[0].type};
  }
  return graph;
}

// Runs of much arithmetic on little memory, which nobody waits for: the device has enough to do for
// hours. What the graph was refused with.
absl::StatusOr<absl::Status> KeepDeviceBusy(Attacker::Impl* impl, int runs, int products = 20000) {
  const Graph graph = Products(products, 512);  // each of a quarter of a milliard steps
  const TensorType& square = graph.inputs[0].type;
  CHORUS_ASSIGN_OR_RETURN(const absl::Status refused,
                          impl->RegisterStaged(EncodeGraph(graph), /*slot=*/0));
  if (!refused.ok()) return refused;
  CHORUS_ASSIGN_OR_RETURN(const AttachClient::Staging staging,
                          impl->Stage(std::string(static_cast<size_t>(square.num_bytes()), '\0')));
  ExternalRange zeros;
  zeros.arena = staging.arena;
  Run run;
  run.graph = {0, 1};
  run.inputs = {zeros};
  run.outputs.emplace_back();  // nobody wants it
  for (int i = 0; i < runs; ++i) CHORUS_RETURN_IF_ERROR(impl->Submit(run).status());
  CHORUS_RETURN_IF_ERROR(impl->Do(Release()).status());
  return absl::OkStatus();
}

absl::StatusOr<Report> Compute(Attacker* attacker) {
  Report report;
  constexpr int kRuns = 4;
  CHORUS_ASSIGN_OR_RETURN(report.refused, KeepDeviceBusy(&attacker->impl(), kRuns));
  if (report.refused.ok()) report.done = kRuns;
  return report;
}

// All of the daemon's devices, for longer than anybody waits: each session is given one that few
// have.
absl::StatusOr<Report> Computes(Attacker* attacker) {
  Report report;
  constexpr int kSessions = 4;
  while (report.refused.ok() && report.done < kSessions) {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Attacker> opened,
                            Attacker::Open(attacker->impl().address, "computes"));
    CHORUS_ASSIGN_OR_RETURN(report.refused,
                            KeepDeviceBusy(&opened->impl(), /*runs=*/4, /*products=*/4000));
    attacker->impl().others.push_back(std::move(opened));
    ++report.done;
  }
  return report;
}

// Runs behind those, each of a graph of its own, which has no name any more.
absl::StatusOr<Report> Queues(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  CHORUS_ASSIGN_OR_RETURN(report.refused, KeepDeviceBusy(&impl, 1));
  while (report.refused.ok() && report.done < 500) {
    const auto slot = static_cast<int32_t>(++report.done);
    CHORUS_ASSIGN_OR_RETURN(
        report.refused,
        impl.RegisterStaged(EncodeGraph(Chain(10000 + slot, Dim(int64_t{2}))), slot));
    if (!report.refused.ok()) break;
    Run run;
    run.graph = {slot, 1};
    run.inputs.emplace_back(Zeros(2));
    run.outputs.emplace_back();
    CHORUS_ASSIGN_OR_RETURN(const Sequence sequence, impl.Submit(run));
    Release release;
    release.graphs = {run.graph};
    CHORUS_RETURN_IF_ERROR(impl.Do(std::move(release)).status());
    CHORUS_ASSIGN_OR_RETURN(const absl::optional<RunOutcome> outcome, impl.waiter->Run(sequence));
    if (outcome.has_value()) report.refused = absl::Status(outcome->code, "");
  }
  return report;
}

// Graphs that are registered and released while the device works.
absl::StatusOr<Report> Unloads(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  CHORUS_ASSIGN_OR_RETURN(report.refused, KeepDeviceBusy(&impl, 1));
  while (report.refused.ok() && report.done < 6) {
    const Graph graph = Products(20001 + static_cast<int>(report.done), 2);
    CHORUS_RETURN_IF_ERROR(RegisterAndRelease(&impl, graph, &report));
  }
  return report;
}

// A few bytes, millions of times.
absl::StatusOr<Report> Strides(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  CHORUS_ASSIGN_OR_RETURN(const AttachClient::Staging staging, impl.Stage(std::string(4096, '\0')));
  for (uint32_t generation = 1; generation <= 8 && report.refused.ok(); ++generation) {
    CreateTensor create;
    create.tensor = {0, generation};
    create.type = TensorType(DType::kU8, {int64_t{16} << 20, int64_t{2}});
    create.device = DeviceIndex(impl.device);
    ExternalRange range;
    range.arena = staging.arena;
    range.strides = {0, 1};
    create.source = std::move(range);
    CHORUS_ASSIGN_OR_RETURN(report.refused, impl.Do(create));
    Release release;
    release.tensors = {create.tensor};
    CHORUS_RETURN_IF_ERROR(impl.Submit(std::move(release)).status());
    ++report.done;
  }
  return report;
}

// Runs of many operands and results in client memory, each of them soon copied.
absl::StatusOr<Report> Copies(Attacker* attacker) {
  constexpr int kValues = 32;
  Report report;
  Attacker::Impl& impl = attacker->impl();
  int32_t slot = 0;
  for (const int64_t rows : {200, 4000, 30000}) {  // 1.6, 32 and 240 kB
    const TensorType type(DType::kF32, {rows, int64_t{2}});
    Graph graph;
    graph.num_device_slots = 1;
    graph.inputs.resize(kValues);
    for (GraphInput& input : graph.inputs) input.type = type;
    for (ValueIndex value = 0; value < kValues; ++value) {
      Node node;
      node.op = "neg";
      node.inputs = {value};
      node.outputs = {type};
      graph.nodes.push_back(std::move(node));
      graph.outputs.emplace_back();
      graph.outputs.back().value = kValues + value;
    }
    CHORUS_ASSIGN_OR_RETURN(report.refused, impl.RegisterStaged(EncodeGraph(graph), slot));
    if (!report.refused.ok()) return report;
    CHORUS_ASSIGN_OR_RETURN(
        const AttachClient::Staging staging,
        impl.Stage(std::string(static_cast<size_t>(2 * type.num_bytes()), '\0')));
    for (const bool strided : {false, true}) {
      ExternalRange operand;
      operand.arena = staging.arena;
      if (strided) operand.strides = {1, rows};
      OutBinding result;
      result.kind = OutBinding::Kind::kInto;
      result.into = operand;
      result.into.offset = type.num_bytes();
      Run run;
      run.graph = {slot, 1};
      run.inputs.assign(kValues, operand);
      run.outputs.assign(kValues, result);
      for (int times = 0; times < 4; ++times, ++report.done) {
        CHORUS_ASSIGN_OR_RETURN(report.refused, impl.Do(run));
        if (!report.refused.ok()) return report;
      }
    }
    CHORUS_RETURN_IF_ERROR(impl.attach->ReleaseStaging(staging.arena, Deadline()));
    ++slot;
  }
  return report;
}

// Commands that ask for nothing, as fast as they go.
absl::StatusOr<Report> Flood(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  Release release;
  release.tensors.resize(4000, TensorId{0, 1});
  for (; report.done < 20000; ++report.done) {
    CHORUS_RETURN_IF_ERROR(impl.Submit(report.done % 10 == 0 ? release : Release()).status());
  }
  CHORUS_ASSIGN_OR_RETURN(report.refused, impl.Do(Release()));
  return report;
}

// Everything that diagnostics have, after many failures.
absl::StatusOr<Report> Listing(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  CHORUS_RETURN_IF_ERROR(Names(attacker).status());
  const auto diagnostics = v1::Diagnostics::NewStub(impl.channel);
  for (; report.done < 30; ++report.done) {
    grpc::ClientContext context;
    fault::RawSession::SetDeadline(&context);
    v1::ListFlightEventsRequest request;
    request.set_limit(10000);
    v1::ListFlightEventsResponse response;
    const grpc::Status listed = diagnostics->ListFlightEvents(&context, request, &response);
    report.refused = absl::Status(static_cast<absl::StatusCode>(listed.error_code()), "");
    if (!report.refused.ok()) break;
  }
  return report;
}

// All flight events, time and again, and nobody reads them.
absl::StatusOr<Report> Answers(Attacker* attacker) {
  Report report;
  Attacker::Impl& impl = attacker->impl();
  CHORUS_RETURN_IF_ERROR(Names(attacker).status());
  v1::ListFlightEventsRequest request;
  request.set_limit(10000);
  const grpc::Slice slice(request.SerializeAsString());
  const auto stub = std::make_shared<grpc::GenericStub>(impl.channel);
  impl.calls.push_back(stub);
  for (; report.done < 200; ++report.done) {
    auto call = std::make_shared<UnreadCall<grpc::ByteBuffer, grpc::ByteBuffer>>(
        grpc::ByteBuffer(&slice, 1), [&stub](grpc::ClientContext* context, auto* reactor) {
          stub->PrepareBidiStreamingCall(context, "/chorus.v1.Diagnostics/ListFlightEvents", {},
                                         reactor);
        });
    call->Start();
    impl.calls.push_back(std::move(call));
  }
  // The node has looked at all of them when it answers another one.
  grpc::ClientContext context;
  fault::RawSession::SetDeadline(&context);
  v1::ListFlightEventsResponse response;
  report.refused = FromGrpc(
      v1::Diagnostics::NewStub(impl.channel)->ListFlightEvents(&context, request, &response));
  return report;
}

template <size_t frame>
absl::StatusOr<Report> Halves(Attacker* attacker) {
  Attacker::Impl& impl = attacker->impl();
  return SendHalfMessages(impl.SocketPath(), frame, &impl.kept.emplace_back());
}

template <size_t messages, size_t frame>
absl::StatusOr<Report> Empties(Attacker* attacker) {
  Attacker::Impl& impl = attacker->impl();
  return SendEmptyMessages(impl.SocketPath(), messages, frame, &impl.kept.emplace_back());
}

absl::StatusOr<Report> Declared(Attacker* attacker) {
  return SendDeclared(attacker->impl().SocketPath(), &attacker->impl().kept.emplace_back());
}

absl::Status CallOnce(Attacker* attacker, absl::Duration patience) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + patience));
  v1::GetStatsResponse response;
  return FromGrpc(v1::Diagnostics::NewStub(attacker->impl().channel)
                      ->GetStats(&context, v1::GetStatsRequest(), &response));
}

// Until it has no turn for a call of its own; then that has one.
absl::StatusOr<Report> UnreadHalves(Attacker* attacker) {
  Attacker::Impl& impl = attacker->impl();
  CHORUS_ASSIGN_OR_RETURN(Report report, SendUnreadHalves(impl.SocketPath(), &impl.kept));
  for (int i = 0; i < 3000 && !absl::IsDeadlineExceeded(report.refused); ++i) {
    report.refused = CallOnce(attacker, absl::Seconds(1));
  }
  if (!absl::IsDeadlineExceeded(report.refused)) {
    return absl::InternalError(absl::StrCat("halves take no turns: ", report.refused.ToString()));
  }
  report.refused = CallOnce(attacker, fault::RawSession::kPatience);
  return report;
}

template <FloodKind kind>
absl::StatusOr<Report> Floods(Attacker* attacker) {
  return SendFlood(attacker->impl().SocketPath(), kind, &attacker->impl().kept);
}

absl::StatusOr<Report> HalfHeaders(Attacker* attacker) {
  return SendHalfHeaders(attacker->impl().SocketPath(), &attacker->impl().kept);
}

absl::StatusOr<Report> Worlds(Attacker* attacker) {
  Report report;
  for (; report.done < 5000; ++report.done) {
    report.refused = attacker->impl().Join(absl::StrCat("hostile", report.done), 0, 1, 0);
    if (!report.refused.ok()) break;
  }
  return report;
}

using RingAttack = absl::StatusOr<Report> (*)(Attacker* attacker);
const std::map<std::string, RingAttack>& RingAttacks() {
  static const auto* const attacks = new std::map<std::string, RingAttack>{
      {"zeros", &ZeroNodes},
      {"quadratic", &Quadratic},
      {"graphs", &Graphs},
      {"pages", &Pages},
      {"gaps", &Gaps},
      {"names", &Names},
      {"sources", &Sources},
      {"epochs", &Epochs},
      {"tapes", &Tapes},
      {"results", &Results},
      {"splices", &Splices},
      {"sessions", &Sessions},
      {"worlds", &Worlds},
      {"planning", &Planning},
      {"sizes", &Sizes},
      {"steps", &Steps},
      {"compute", &Compute},
      {"computes", &Computes},
      {"queues", &Queues},
      {"unloads", &Unloads},
      {"strides", &Strides},
      {"copies", &Copies},
      {"flood", &Flood},
      {"listing", &Listing},
      {"answers", &Answers},
      {"halves", &Halves<kMaxFrame>},
      // In about as many pieces as a message may come in.
      {"halves_in_pieces", &Halves<600>},
      {"halves_in_bytes", &Halves<1>},
      {"declared", &Declared},
      {"unread_halves", &UnreadHalves},
      {"empties", &Empties<13000, kMaxFrame>},
      {"empties_of_a_frame", &Empties<13000, 5>},
      {"empties_in_bytes", &Empties<13000, 1>},
      // In about as many pieces as a user's may come in, and as many of them.
      {"few_empties", &Empties<50, 2>},
      {"half_headers", &HalfHeaders},
      {"calls", &Floods<FloodKind::kCalls>},
      {"unknown_calls", &Floods<FloodKind::kUnknownCalls>},
      {"closed_calls", &Floods<FloodKind::kClosedCalls>},
      {"pings", &Floods<FloodKind::kPings>},
      {"settings", &Floods<FloodKind::kSettings>},
      {"headers", &Floods<FloodKind::kHeaders>},
  };
  return *attacks;
}

}  // namespace

bool IsAttack(const std::string& name) {
  return RingAttacks().count(name) > 0 || RpcAttacks().count(name) > 0;
}

absl::StatusOr<Report> Attack(const std::string& name, Attacker* attacker) {
  const auto rpc = RpcAttacks().find(name);
  if (rpc == RpcAttacks().end()) return RingAttacks().at(name)(attacker);
  return rpc->second(attacker->impl(), &attacker->impl().calls);
}

void Attacker::CloseSessions() {
  for (const std::unique_ptr<Attacker>& other : impl_->others) other->CloseSessions();
  impl_->calls.clear();  // else there may be none left for this one
  grpc::ClientContext context;
  fault::RawSession::SetDeadline(&context);
  v1::CloseSessionRequest request;
  v1::CloseSessionResponse response;
  request.set_session(impl_->session);
  // The daemon may have ended it, or still have no call for this user.
  (void)v1::Sessions::NewStub(impl_->channel)->Close(&context, request, &response);
}

Attacker::Attacker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Attacker::~Attacker() = default;

absl::StatusOr<std::unique_ptr<Attacker>> Attacker::Open(const std::string& address,
                                                         const std::string& attack) {
  struct stat socket = {};
  if (stat(std::string(absl::StripPrefix(address, "unix:")).c_str(), &socket) != 0) {
    return absl::NotFoundError(address);
  }
  // Without having attached only the daemon's own user may open one.
  const bool attached = RpcAttacks().count(attack) == 0 || socket.st_uid != geteuid();
  CHORUS_ASSIGN_OR_RETURN(fault::RawSession raw, fault::RawSession::Open(address, attached));
  return std::unique_ptr<Attacker>(new Attacker(std::make_unique<Impl>(address, std::move(raw))));
}

}  // namespace hostile
}  // namespace chorus
