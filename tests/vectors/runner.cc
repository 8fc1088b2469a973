#include "tests/vectors/runner.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "chorus/v1/diagnostics.grpc.pb.h"
#include "core/base/error.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "tests/vectors/check.h"

namespace chorus {
namespace vectors {
namespace {

constexpr int kDevices = 8;  // and more where a vector has more ranks

// What the daemon waits for.
std::string PendingText(const std::string& address) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(5)));
  v1::ListPendingResponse response;
  const grpc::Status status =
      v1::Diagnostics::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))
          ->ListPending(&context, v1::ListPendingRequest(), &response);
  if (!status.ok())
    return absl::StrCat("unknown, the daemon does not say: ", status.error_message());
  std::vector<std::string> waiting;
  for (const auto& pending : response.pending()) {
    waiting.push_back(absl::StrCat(pending.what(), " (", pending.source(), ") of ",
                                   pending.world_name(), " waits for ranks ",
                                   absl::StrJoin(pending.missing_ranks(), ",")));
  }
  return waiting.empty() ? "nothing" : absl::StrJoin(waiting, "; ");
}

}  // namespace

bool Runner::Lives() { return cluster_ != nullptr || (daemon_ != nullptr && daemon_->Lives()); }

absl::Status Runner::Prepare(int devices) {
  if (Lives() && devices <= devices_) return absl::OkStatus();
  trainers_.reset();
  daemon_.reset();
  cluster_.reset();
  devices_ = std::max(devices, kDevices);
  TrainerOptions trainers;
  trainers.patience = options_.patience;
  CHORUS_RETURN_IF_ERROR(options_.cluster == nullptr ? StartDaemon(&trainers)
                                                     : OpenCluster(&trainers));
  trainers_ = std::make_unique<Trainers>(trainers);
  return absl::OkStatus();
}

absl::Status Runner::OpenCluster(TrainerOptions* trainers) {
  conformance::ClusterOptions options;
  options.devices = devices_;
  options.seed = options_.sim_seed;
  CHORUS_ASSIGN_OR_RETURN(cluster_, options_.cluster(options));
  trainers->open = [cluster = cluster_.get()](const std::vector<int>& devices) {
    return cluster->Open(devices);
  };
  trainers->pending = [] { return "unknown, there is no daemon to ask"; };
  return absl::OkStatus();
}

absl::Status Runner::StartDaemon(TrainerOptions* trainers) {
  CHORUS_ASSIGN_OR_RETURN(daemon_,
                          bench::Daemon::Start(options_.daemon, scratch_,
                                               {absl::StrCat("--host_devices=", devices_),
                                                absl::StrCat("--backend=", options_.backend),
                                                absl::StrCat("--sim_seed=", options_.sim_seed)}));
  SessionOptions session;
  session.address = daemon_->address();
  session.transport = options_.transport;
  session.open_timeout = absl::ToChronoNanoseconds(options_.patience);
  session.wait_timeout = absl::ToChronoNanoseconds(2 * options_.patience);
  session.label = "golden vectors";
  trainers->open = [session](const std::vector<int>& devices) {
    SessionOptions mine = session;
    mine.devices = devices;
    return Session::Open(mine);
  };
  trainers->pending = [address = daemon_->address()] { return PendingText(address); };
  return absl::OkStatus();
}

std::string Runner::RunPass(const Vector& v, const Tolerance& tolerance, Pass pass) {
  const absl::StatusOr<std::vector<RankResults>> got = trainers_->Run(v, pass);
  if (!got.ok()) {
    if (absl::IsDeadlineExceeded(got.status())) {
      // A rank that hangs uses it for good.
      cluster_.release();  // NOLINT(bugprone-unused-return-value)
    }
    return std::string(got.status().message());
  }
  const std::vector<std::string> failures = Check(v, tolerance, pass, *got);
  if (failures.empty()) return "";
  if (failures.size() == 1) return failures[0];
  return absl::StrCat(failures[0], " (and ", failures.size() - 1, " more)");
}

std::string Runner::Run(const Vector& v, const Tolerance& tolerance) {
  const absl::Status prepared = Prepare(v.world);
  if (!prepared.ok()) return std::string(prepared.message());
  std::string failure = RunPass(v, tolerance, Pass::kAsItStands);
  if (failure.empty() && NeedsAllJoin(v)) {
    failure = RunPass(v, tolerance, Pass::kAllJoin);
    if (!failure.empty()) failure = absl::StrCat(failure, ", where all ranks join");
  }
  // Its connections end a little before the process does.
  constexpr int64_t kEndingNs = 20 * 1000 * 1000;
  if (!failure.empty() && daemon_ != nullptr && !daemon_->Lives(kEndingNs)) {
    failure = absl::StrCat(failure, "; chorusd has ended: ", daemon_->Log());
  }
  return failure;
}

Tally Runner::RunFile(const std::string& path, const std::function<void(const std::string&)>& say) {
  Tally tally;
  const auto fail = [&](absl::string_view id, absl::string_view what) {
    ++tally.failed;
    say(absl::StrReplaceAll(absl::StrCat("FAILED ", id, ": ", what), {{"\n", " "}}));
  };
  const std::string name = std::filesystem::path(path).filename().string();
  std::ifstream stream(path, std::ios::binary);
  std::stringstream text;
  text << stream.rdbuf();
  if (!stream) {
    fail(name, "cannot be read");
    return tally;
  }
  const absl::StatusOr<VectorFile> file = ParseVectorFile(name, text.str());
  if (!file.ok()) {
    fail(name, file.status().message());
    return tally;
  }
  for (const VectorFile::Entry& entry : file->entries) {
    const std::string failure = entry.vector.ok() ? Run(*entry.vector, file->tolerance)
                                                  : std::string(entry.vector.status().message());
    if (failure.empty()) {
      ++tally.passed;
    } else {
      fail(entry.id, failure);
    }
  }
  return tally;
}

absl::StatusOr<std::vector<std::string>> VectorFiles(const std::string& directory) {
  std::vector<std::string> files;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() == ".json") files.push_back(entry->path().string());
  }
  if (error) return absl::NotFoundError(absl::StrCat(directory, ": ", error.message()));
  if (files.empty()) return absl::NotFoundError(absl::StrCat(directory, ": no JSON files"));
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace vectors
}  // namespace chorus
