#include "tests/hostile/attacker.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/attach/attach_client.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/runtime/testing/hostile_graphs.h"
#include "core/tensor/type.h"
#include "core/transport/command.h"
#include "core/transport/completion.h"
#include "core/transport/ring.h"
#include "tests/fault/raw_session.h"

namespace chorus {
namespace hostile {
namespace {

absl::Time Deadline() { return RawSession::Deadline(); }

}  // namespace

struct Attacker::Impl : RawSession {
  Impl(const std::string& daemon, RawSession raw)
      : RawSession(std::move(raw)),
        address(daemon),
        submitter(memory.get(), doorbell.get(), std::move(wake)),
        waiter(memory.get()) {}

  const std::string address;
  Submitter submitter;
  CompletionWaiter waiter;
  int64_t sequence = 0;
  std::vector<UniqueFd> kept;                     // descriptors
  std::vector<std::unique_ptr<Attacker>> others;  // sessions of its own

  absl::StatusOr<Sequence> Submit(CommandBody body) {
    return SubmitAs(++sequence, std::move(body));
  }
  absl::StatusOr<Sequence> SubmitAs(int64_t number, CommandBody body) {
    Command command;
    command.sequence = Sequence(number);
    command.body = std::move(body);
    ByteWriter frame;
    EncodeFrame(command, &frame);
    CHORUS_RETURN_IF_ERROR(submitter.Submit(frame.bytes(), RawSession::kPatience));
    return command.sequence;
  }
  // OK, or the code with which it ended.
  absl::StatusOr<absl::Status> Do(CommandBody body) {
    CHORUS_ASSIGN_OR_RETURN(const Sequence number, Submit(std::move(body)));
    CHORUS_ASSIGN_OR_RETURN(const RunOutcome outcome, waiter.WaitForRun(number, Deadline()));
    return absl::Status(outcome.code, "");
  }

  // The whole arena as a graph.
  absl::StatusOr<absl::Status> RegisterStaged(absl::string_view bytes, int32_t slot) {
    const int64_t size = static_cast<int64_t>(bytes.size());
    CHORUS_ASSIGN_OR_RETURN(AttachClient::Staging staging, attach->CreateStaging(size, Deadline()));
    void* const data = mmap(nullptr, static_cast<size_t>(staging.bytes), PROT_READ | PROT_WRITE,
                            MAP_SHARED, staging.fd.get(), 0);
    if (data == MAP_FAILED) return absl::InternalError("mmap");
    std::copy(bytes.begin(), bytes.end(), static_cast<char*>(data));
    munmap(data, static_cast<size_t>(staging.bytes));
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

// Graphs of nothing: a node is a few zero bytes.
absl::StatusOr<Report> Zeros(Attacker* attacker) {
  Report report;
  Graph empty;
  empty.nodes.resize(400000);
  CHORUS_ASSIGN_OR_RETURN(report.refused,
                          attacker->impl().RegisterStaged(EncodeGraph(empty), /*slot=*/0));
  return report;
}

// Each small as bytes, and much to plan.
absl::StatusOr<Report> Quadratic(Attacker* attacker) {
  Report report;
  int32_t slot = 0;
  for (const testing::HostileGraph kind :
       {testing::HostileGraph::kSums, testing::HostileGraph::kAllAfterAll,
        testing::HostileGraph::kManyPieces, testing::HostileGraph::kWideNodes}) {
    const std::string bytes = EncodeGraph(testing::MakeHostileGraph(kind, 20000));
    CHORUS_ASSIGN_OR_RETURN(const absl::Status status,
                            attacker->impl().RegisterStaged(bytes, ++slot));
    if (status.ok()) {
      ++report.done;
    } else {
      report.refused = status;
    }
  }
  return report;
}

// Different graphs, all kept.
absl::StatusOr<Report> Graphs(Attacker* attacker) {
  Report report;
  for (int32_t slot = 0; slot < 1000; ++slot) {
    const std::string bytes = EncodeGraph(
        testing::MakeHostileGraph(testing::HostileGraph::kOutputsOfAChain, 4000 + slot));
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
  for (int64_t number = 2; number < 2000; ++number) {
    CHORUS_RETURN_IF_ERROR(attacker->impl().SubmitAs(number, command).status());
    ++report.done;
  }
  // Then the first: what is held is told, and malformed.
  CHORUS_ASSIGN_OR_RETURN(report.refused, attacker->impl().Do(Cancel{Sequence(1)}));
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
    CHORUS_ASSIGN_OR_RETURN(const Sequence number, attacker->impl().Submit(std::move(create)));
    ++report.done;
    if (slot % 500 != 499) continue;
    CHORUS_ASSIGN_OR_RETURN(const RunOutcome outcome,
                            attacker->impl().waiter.WaitForRun(number, Deadline()));
    report.refused = absl::Status(outcome.code, "");
  }
  return report;
}

absl::StatusOr<Report> Sessions(Attacker* attacker) {
  Report report;
  for (; report.done < 1000; ++report.done) {
    absl::StatusOr<std::unique_ptr<Attacker>> other = Attacker::Open(attacker->impl().address);
    report.refused = other.status();
    if (!other.ok()) break;
    attacker->impl().others.push_back(*std::move(other));
  }
  return report;
}

absl::StatusOr<Report> Worlds(Attacker* attacker) {
  Report report;
  for (; report.done < 5000; ++report.done) {
    report.refused = attacker->impl().Join(absl::StrCat("hostile", report.done), 0, 1, 0);
    if (!report.refused.ok()) break;
  }
  return report;
}

}  // namespace

const std::map<std::string, Attack>& Attacks() {
  static const auto* const attacks = new std::map<std::string, Attack>{
      {"zeros", &Zeros}, {"quadratic", &Quadratic}, {"graphs", &Graphs},     {"pages", &Pages},
      {"gaps", &Gaps},   {"names", &Names},         {"sessions", &Sessions}, {"worlds", &Worlds},
  };
  return *attacks;
}

Attacker::Attacker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Attacker::~Attacker() = default;

absl::StatusOr<std::unique_ptr<Attacker>> Attacker::Open(const std::string& address) {
  CHORUS_ASSIGN_OR_RETURN(RawSession raw, RawSession::Open(address, /*attached=*/true));
  return std::unique_ptr<Attacker>(new Attacker(std::make_unique<Impl>(address, std::move(raw))));
}

}  // namespace hostile
}  // namespace chorus
