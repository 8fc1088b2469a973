#include "tests/fault/hostile_client.h"

#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "core/base/bytes.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/tensor/type.h"
#include "core/transport/command.h"
#include "core/transport/completion.h"
#include "core/transport/frame_format.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"
#include "proto/convert/errors_convert.h"
#include "tests/fault/raw_session.h"

namespace chorus {
namespace fault {

struct HostileClient::Impl : RawSession {
  explicit Impl(RawSession raw) : RawSession(std::move(raw)) {}

  std::mt19937_64 random;

  uint64_t Below(uint64_t bound) { return random() % bound; }

  // Puts `record` where the next frame would stand and moves the tail by `published`.
  void Publish(absl::string_view record, uint64_t published) {
    SessionControl& control = memory->control();
    const uint64_t tail = control.client.tail.load();
    std::memcpy(memory->ring() + tail % memory->ring_bytes(), record.data(), record.size());
    control.client.tail.store(tail + published);
    RingWakeEvent(wake.get());
  }
  void PublishStart(uint32_t size, uint16_t kind, uint64_t published) {
    const FrameStart start{size, kind, kFrameVersion};
    std::string record(kFrameHeaderBytes, '\0');
    std::memcpy(&record[0], &start, sizeof(start));
    Publish(record, published);
  }

  // Asks until the daemon no longer knows the session: what it says then.
  absl::StatusOr<std::string> WaitForTheEnd() {
    const absl::Time deadline = SteadyNow() + kPatience;
    const auto stub = v1::Sessions::NewStub(channel);
    while (SteadyNow() < deadline) {
      grpc::ClientContext context;
      SetDeadline(&context);
      v1::RenewSessionRequest request;
      v1::RenewSessionResponse response;
      request.set_session(session);
      const absl::Status status = FromGrpc(stub->Renew(&context, request, &response));
      if (ErrorOf(status).reason == Reason::kSessionLost) return std::string(status.message());
      CHORUS_RETURN_IF_ERROR(status);
    }
    return absl::DeadlineExceededError("the session still lives");
  }

  void RandomBytes();
  void RandomBodies();
  absl::StatusOr<std::string> WildNumbers();

  int64_t WildNumber();
  Command WildCommand(int kind);  // of 6
};

void HostileClient::Impl::RandomBytes() {
  std::string record(8 * (2 + Below(64)), '\0');
  for (char& byte : record) byte = static_cast<char>(random());
  Publish(record, record.size());
}

// Some may even decode: a session that cancels a run which does not exist does no harm. The last
// one does not.
void HostileClient::Impl::RandomBodies() {
  for (int64_t sequence = 1; sequence <= 16; ++sequence) {
    std::string record(kFrameHeaderBytes + 8 * Below(16), '\0');
    for (char& byte : record) byte = static_cast<char>(random());
    const FrameStart start{static_cast<uint32_t>(record.size()),
                           static_cast<uint16_t>(sequence == 16 ? 999 : 1 + Below(8)),
                           kFrameVersion};
    std::memcpy(&record[0], &start, sizeof(start));
    std::memcpy(&record[sizeof(start)], &sequence, sizeof(sequence));
    Publish(record, record.size());
  }
}

int64_t HostileClient::Impl::WildNumber() {
  static constexpr int64_t kWild[] = {-1,
                                      1 << 30,
                                      std::numeric_limits<int32_t>::max(),
                                      std::numeric_limits<int32_t>::min(),
                                      65536,
                                      1000,
                                      7};
  return kWild[Below(sizeof(kWild) / sizeof(kWild[0]))];
}

Command HostileClient::Impl::WildCommand(int kind) {
  const auto wild32 = [this] { return static_cast<int32_t>(WildNumber()); };
  Command command;
  switch (kind) {
    case 0: {
      Run run;
      run.graph = GraphId{wild32(), 1};
      run.inputs.push_back(ExternalRange{ArenaId(wild32()), WildNumber(), {}});
      command.body = run;
      break;
    }
    case 1: {
      CreateTensor create;
      create.tensor = TensorId{wild32(), 1};
      create.type = TensorType(DType::kF32, {Dim(int64_t{1} << 38)});
      create.source = InlineData{{1, 2, 3, 4}};
      command.body = create;
      break;
    }
    case 2: {
      CreateTensor create;
      create.tensor = TensorId{0, 1};
      create.type = TensorType(DType::kF32, {Dim(int64_t{1024})});
      create.source = ExternalRange{ArenaId(wild32()), WildNumber(), {}};
      command.body = create;
      break;
    }
    case 3: {
      MakeReadable readable;
      readable.tensors.push_back(TensorId{wild32(), static_cast<uint32_t>(random())});
      command.body = readable;
      break;
    }
    case 4:
      command.body = EnterEpoch{WorldId(WildNumber()), Epoch(WildNumber())};
      break;
    default: {
      RegisterGraph graph;
      graph.graph = GraphId{wild32(), 1};
      graph.staged = ExternalRange{ArenaId(wild32()), WildNumber(), {}};
      graph.staged_bytes = WildNumber();
      command.body = graph;
      break;
    }
  }
  return command;
}

absl::StatusOr<std::string> HostileClient::Impl::WildNumbers() {
  Submitter submitter(memory.get(), doorbell.get(), std::move(wake));
  CompletionWaiter waiter(memory.get());
  const absl::Time deadline = SteadyNow() + kPatience;
  // By WildCommand's kind.
  static constexpr const char* kKinds[] = {"run",           "create_inline", "create_external",
                                           "make_readable", "enter_epoch",   "register_graph"};
  constexpr int kEach = 11;
  std::map<std::string, int> refused;
  int64_t sequence = 0;
  for (int i = 0; i < kEach * static_cast<int>(std::size(kKinds)); ++i) {
    const int kind = i % static_cast<int>(std::size(kKinds));
    Command command;
    ByteWriter frame;
    // The limits of form are the decoder's: what breaks them ends a session.
    do {
      command = WildCommand(kind);
      command.sequence = Sequence(sequence + 1);
      frame = ByteWriter();
      EncodeFrame(command, &frame);
    } while (!DecodeFrame(frame.bytes()).ok());
    ++sequence;
    CHORUS_RETURN_IF_ERROR(submitter.Submit(frame.bytes(), kPatience));
    CHORUS_ASSIGN_OR_RETURN(const RunOutcome outcome,
                            waiter.WaitForRun(command.sequence, deadline));
    if (outcome.code == absl::StatusCode::kOk || outcome.code == absl::StatusCode::kInternal) {
      return absl::DataLossError(
          absl::StrCat("a command with wild numbers gave code ", static_cast<int>(outcome.code)));
    }
    ++refused[kKinds[kind]];
  }
  return absl::StrJoin(refused, " ", absl::PairFormatter("="));
}

HostileClient::HostileClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HostileClient::~HostileClient() = default;

absl::StatusOr<std::unique_ptr<HostileClient>> HostileClient::Open(const std::string& address,
                                                                   bool attached) {
  CHORUS_ASSIGN_OR_RETURN(RawSession raw, RawSession::Open(address, attached));
  return std::unique_ptr<HostileClient>(new HostileClient(std::make_unique<Impl>(std::move(raw))));
}

absl::Status HostileClient::Join(const std::string& name, int rank, int size,
                                 int64_t agree_seconds) {
  return impl_->Join(name, rank, size, agree_seconds);
}

absl::StatusOr<std::string> HostileClient::Attack(const std::string& kind, uint64_t seed) {
  impl_->random.seed(seed);
  if (kind == "numbers") return impl_->WildNumbers();
  if (kind == "tail") {
    const uint64_t ring = impl_->memory->ring_bytes();
    const uint64_t tails[] = {ring + 8, 3, ~uint64_t{7}, uint64_t{1} << 63};
    impl_->Publish("", tails[impl_->Below(4)]);
  } else if (kind == "bytes") {
    impl_->RandomBytes();
  } else if (kind == "skip") {
    impl_->PublishStart(impl_->Below(2) == 0 ? 0 : impl_->memory->ring_bytes(), kSkipKind,
                        kFrameHeaderBytes);
  } else if (kind == "size") {
    const uint32_t sizes[] = {0, 8, 24, kMaxFrameBytes + 1, ~uint32_t{0}};
    impl_->PublishStart(sizes[impl_->Below(5)], 2, kFrameHeaderBytes);
  } else if (kind == "body") {
    impl_->RandomBodies();
  } else {
    return absl::InvalidArgumentError(kind);
  }
  CHORUS_ASSIGN_OR_RETURN(const std::string ending, impl_->WaitForTheEnd());
  return absl::StrCat("ended=1 message=", ending);
}

}  // namespace fault
}  // namespace chorus
