#include "tests/hostile/rpc_attacks.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "chorus/v1/log.grpc.pb.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "chorus/v1/tensors.grpc.pb.h"
#include "chorus/v1/worlds.grpc.pb.h"
#include "core/base/error.h"
#include "google/protobuf/unknown_field_set.h"
#include "grpcpp/client_context.h"
#include "proto/convert/errors_convert.h"
#include "tests/hostile/unread_call.h"

namespace chorus {
namespace hostile {
namespace {

constexpr int kUnknown = 15;  // of no message's fields; one byte as a tag

// Two bytes each, many times that when they are parsed.
void AddUnknownFields(google::protobuf::Message* message, int count) {
  google::protobuf::UnknownFieldSet* const fields =
      message->GetReflection()->MutableUnknownFields(message);
  for (int i = 0; i < count; ++i) fields->AddLengthDelimited(kUnknown, "");
}

absl::Status Submit(const fault::RawSession& session, v1::Log::Stub* log,
                    v1::SubmitRequest request) {
  grpc::ClientContext context;
  fault::RawSession::SetDeadline(&context);
  v1::SubmitResponse response;
  request.set_session(session.session);
  return FromGrpc(log->Submit(&context, request, &response));
}

// Calls that wait for what never comes, each with as much as a message may have.
absl::StatusOr<Report> Messages(const fault::RawSession& session, Kept* kept) {
  struct Call {
    grpc::ClientContext context;
    v1::WaitResponse response;
    absl::Notification done;
    ~Call() {
      context.TryCancel();
      done.WaitForNotification();
    }
  };
  constexpr int kCalls = 600;
  Report report;
  const std::shared_ptr<v1::Log::Stub> log = v1::Log::NewStub(session.channel);
  kept->push_back(log);
  std::vector<std::shared_ptr<Call>> calls;
  v1::WaitRequest request;
  request.set_session(session.session);
  request.set_sequence(1000000);
  AddUnknownFields(&request, 30000);
  for (int i = 0; i < kCalls; ++i) {
    const auto& call = calls.emplace_back(std::make_shared<Call>());
    kept->push_back(call);
    log->async()->Wait(&call->context, &request, &call->response,
                       [raw = call.get()](const grpc::Status&) { raw->done.Notify(); });
  }
  // When this is answered the daemon has had them all: it is one connection.
  request = v1::WaitRequest();
  request.set_session(session.session);
  request.set_sequence(-1);
  grpc::ClientContext context;
  fault::RawSession::SetDeadline(&context);
  v1::WaitResponse response;
  report.refused = FromGrpc(log->Wait(&context, request, &response));
  for (const auto& call : calls) report.done += call->done.HasBeenNotified() ? 0 : 1;
  return report;
}

// Commands that are no frame: little as a message, much when parsed.
absl::StatusOr<Report> Large(const fault::RawSession& session, Kept*) {
  Report report;
  const auto log = v1::Log::NewStub(session.channel);
  v1::SubmitRequest request;
  request.mutable_command()->set_sequence(1);
  request.mutable_command()->mutable_register_graph()->mutable_id()->set_generation(1);
  v1::Graph* const graph = request.mutable_command()->mutable_register_graph()->mutable_graph();
  struct Part {
    int nodes;  // of two bytes
    absl::string_view says;
  };
  for (const Part& part : {Part{125000, "graph.nodes: expected at most 7281"},
                           Part{132000, "SubmitRequest: expected at most 262144 bytes"}}) {
    while (graph->nodes_size() < part.nodes) graph->add_nodes();
    for (int i = 0; i < 10; ++i) {
      report.refused = Submit(session, log.get(), request);
      CHORUS_RETURN_IF_ERROR(ExpectEnd(absl::StrCat(part.nodes, " nodes"), report.refused,
                                       absl::StatusCode::kInvalidArgument,
                                       {"MALFORMED", part.says}));
    }
  }
  return report;
}

// Streams with a command that nobody ends. It leaves a little, for others of its user.
absl::StatusOr<Report> Streams(const fault::RawSession& session, Kept* kept) {
  struct Stream {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::CommandsRequest, v1::CommandsResponse>> stream;
    ~Stream() { context.TryCancel(); }
  };
  Report report;
  const std::shared_ptr<v1::Log::Stub> log = v1::Log::NewStub(session.channel);
  kept->push_back(log);
  v1::CommandsRequest request;
  request.set_session(session.session);
  request.mutable_command()->mutable_release();
  for (; report.done < 5000; ++report.done) {
    auto stream = std::make_shared<Stream>();
    fault::RawSession::SetDeadline(&stream->context);
    stream->stream = log->Commands(&stream->context);
    request.mutable_command()->set_sequence(report.done + 1);
    v1::CommandsResponse response;
    if (!stream->stream->Write(request) || !stream->stream->Read(&response)) {
      report.refused = FromGrpc(stream->stream->Finish());
      break;
    }
    kept->push_back(std::move(stream));
  }
  kept->resize(kept->size() - std::min<size_t>(kept->size() - 1, 8));
  const absl::Time deadline = fault::RawSession::Deadline();
  while (absl::IsResourceExhausted(Submit(session, log.get(), {})) && absl::Now() < deadline) {
  }
  return report;
}

// Commands that are none.
class UnreadStream : public UnreadCall<v1::CommandsRequest, v1::CommandsResponse> {
 public:
  // `written`: by all such streams.
  UnreadStream(v1::Log::Stub* log, const v1::CommandsRequest& request,
               std::shared_ptr<std::atomic<int>> written)
      : UnreadCall(request, [log](grpc::ClientContext* context,
                                  auto* reactor) { log->async()->Commands(context, reactor); }),
        all_written_(std::move(written)) {}
  ~UnreadStream() override { End(); }

  void OnWriteDone(bool ok) override {
    if (!ok) return;
    all_written_->fetch_add(1);
    if (++written_ < kWrites) WriteAgain();
  }

 private:
  static constexpr int kWrites = 1100;

  const std::shared_ptr<std::atomic<int>> all_written_;
  int written_ = 0;
};

absl::StatusOr<Report> Unread(const fault::RawSession& session, Kept* kept) {
  constexpr int kStreams = 48;
  Report report;
  const std::shared_ptr<v1::Log::Stub> log = v1::Log::NewStub(session.channel);
  kept->push_back(log);
  v1::CommandsRequest request;
  request.set_session(session.session);
  request.mutable_command()->set_sequence(1);
  const auto written = std::make_shared<std::atomic<int>>(0);
  for (int i = 0; i < kStreams; ++i) {
    auto stream = std::make_shared<UnreadStream>(log.get(), request, written);
    stream->Start();
    kept->push_back(std::move(stream));
  }
  // Until the daemon answers others and reads no more of these, for a while too: it may answer many
  // before it comes to the rest.
  constexpr absl::Duration kWhile = absl::Seconds(1);
  v1::SubmitRequest other;
  other.mutable_command()->set_sequence(1);
  int before = -1;
  absl::Time last = absl::InfinitePast();
  for (int idle = 0; idle < 100 || absl::Now() - last < kWhile; ++idle) {
    report.refused = Submit(session, log.get(), other);
    const int now = written->load();
    if (now == before) continue;
    before = now;
    idle = 0;
    last = absl::Now();
  }
  report.done = before;
  return report;
}

// Few bytes that would be many: the first some 200 KiB that would be 192 MiB.
absl::StatusOr<Report> Compressed(const fault::RawSession& session, Kept*) {
  Report report;
  const auto log = v1::Log::NewStub(session.channel);
  for (int i = 0; i < 8; ++i) {
    grpc::ClientContext context;
    fault::RawSession::SetDeadline(&context);
    context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
    v1::WaitRequest request;
    request.set_session(session.session);
    request.set_sequence(1);
    google::protobuf::UnknownFieldSet* const fields =
        request.GetReflection()->MutableUnknownFields(&request);
    fields->AddLengthDelimited(kUnknown, std::string(i == 0 ? 192 << 20 : 3 << 20, '\0'));
    v1::WaitResponse response;
    report.refused = FromGrpc(log->Wait(&context, request, &response));
    if (report.refused.ok()) ++report.done;
  }
  return report;
}

// Tensors that are read up to their first part.
absl::StatusOr<Report> Downloads(const fault::RawSession& session, Kept* kept) {
  struct Download {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::DownloadTensorResponse>> reader;
    ~Download() { context.TryCancel(); }
  };
  Report report;
  const std::shared_ptr<v1::Tensors::Stub> tensors = v1::Tensors::NewStub(session.channel);
  kept->push_back(tensors);
  constexpr int64_t kBytes = int64_t{8} << 20;
  v1::CreateStagingResponse staging;
  {
    grpc::ClientContext context;
    fault::RawSession::SetDeadline(&context);
    v1::CreateStagingRequest request;
    request.set_session(session.session);
    request.set_size_bytes(kBytes);
    CHORUS_RETURN_IF_ERROR(FromGrpc(tensors->CreateStaging(&context, request, &staging)));
  }
  v1::DownloadTensorRequest read;
  {
    grpc::ClientContext context;
    fault::RawSession::SetDeadline(&context);
    v1::CreateTensorRequest request;
    request.set_session(session.session);
    request.set_sequence(1);
    v1::CreateTensor* const tensor = request.mutable_tensor();
    tensor->mutable_id()->set_generation(1);
    tensor->mutable_type()->set_dtype(v1::DTYPE_U8);
    tensor->mutable_type()->add_dims(kBytes);
    tensor->set_device(session.device);
    tensor->mutable_source()->mutable_external()->set_arena(staging.arena());
    *read.mutable_tensor() = tensor->id();
    v1::CreateTensorResponse response;
    CHORUS_RETURN_IF_ERROR(FromGrpc(tensors->Create(&context, request, &response)));
  }
  read.set_session(session.session);
  for (; report.done < 1000; ++report.done) {
    const auto download = std::make_shared<Download>();
    fault::RawSession::SetDeadline(&download->context);
    download->reader = tensors->Download(&download->context, read);
    v1::DownloadTensorResponse part;
    if (!download->reader->Read(&part)) {
      report.refused = FromGrpc(download->reader->Finish());
      break;
    }
    kept->push_back(download);
  }
  return report;
}

// The longest lists that a message has room for.
absl::StatusOr<Report> Lists(const fault::RawSession& session, Kept*) {
  Report report;
  const auto worlds = v1::Worlds::NewStub(session.channel);
  const auto sessions = v1::Sessions::NewStub(session.channel);
  const auto log = v1::Log::NewStub(session.channel);
  v1::JoinWorldResponse joined;
  {
    grpc::ClientContext context;
    fault::RawSession::SetDeadline(&context);
    v1::JoinWorldRequest join;
    join.set_session(session.session);
    join.set_name(absl::StrCat("lists", session.session));
    join.set_size(1);
    CHORUS_RETURN_IF_ERROR(FromGrpc(worlds->Join(&context, join, &joined)));
  }
  v1::CreateGroupRequest group;
  group.set_session(session.session);
  group.set_world(joined.world().world());
  for (int i = 0; i < 60000; ++i) group.add_ranks(0);
  v1::OpenSessionRequest open;
  for (int i = 0; i < 60000; ++i) open.add_devices(i % 100);
  v1::SubmitRequest release;
  release.mutable_command()->set_sequence(1);
  for (int i = 0; i < 60000; ++i) {
    release.mutable_command()->mutable_release()->add_tensors()->set_generation(1);
  }
  for (int i = 0; i < 25; ++i) {
    grpc::ClientContext first;
    grpc::ClientContext second;
    fault::RawSession::SetDeadline(&first);
    fault::RawSession::SetDeadline(&second);
    v1::CreateGroupResponse group_response;
    v1::OpenSessionResponse open_response;
    CHORUS_RETURN_IF_ERROR(ExpectEnd(
        "a group of 60000 ranks", FromGrpc(worlds->CreateGroup(&first, group, &group_response)),
        absl::StatusCode::kInvalidArgument, {"MALFORMED", "rank 0 is twice in the group's list"}));
    const absl::Status opened = FromGrpc(sessions->Open(&second, open, &open_response));
    // Another user has to attach before its list is looked at.
    CHORUS_RETURN_IF_ERROR(session.attach == nullptr
                               ? ExpectEnd("a session of 60000 devices", opened,
                                           absl::StatusCode::kNotFound,
                                           {"UNKNOWN_NAME", "does not exist"})
                               : ExpectEnd("a session of 60000 devices", opened,
                                           absl::StatusCode::kPermissionDenied, {"NOT_ATTACHED"}));
    report.refused = Submit(session, log.get(), release);
    CHORUS_RETURN_IF_ERROR(ExpectEnd("a release of 60000 tensors", report.refused,
                                     absl::StatusCode::kInvalidArgument,
                                     {"MALFORMED", "as a frame"}));
  }
  return report;
}

}  // namespace

const std::map<std::string, RpcAttack>& RpcAttacks() {
  static const auto* const attacks = new std::map<std::string, RpcAttack>{
      {"messages", &Messages},     {"large", &Large},   {"streams", &Streams},
      {"compressed", &Compressed}, {"unread", &Unread}, {"downloads", &Downloads},
      {"lists", &Lists},
  };
  return *attacks;
}

}  // namespace hostile
}  // namespace chorus
