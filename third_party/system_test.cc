// One call into each library of @system that only works if headers and link options fit together:
// what to run first when a build fails after the operating system was upgraded.

#include <benchmark/benchmark.h>
#include <glog/logging.h>
#include <google/protobuf/any.pb.h>
#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>
#include <hwy/targets.h>
#include <xxhash.h>
#include <zip.h>

#include <dnnl.hpp>
#include <eigen3/Eigen/Core>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

ABSL_FLAG(int, answer, 42, "A flag.");

namespace {

TEST(SystemTest, Abseil) {
  absl::flat_hash_map<std::string, int> map{{"a", 1}};
  EXPECT_EQ(map.at("a"), 1);
  absl::btree_map<int, int> ordered{{2, 3}};
  EXPECT_EQ(ordered.at(2), 3);
  absl::InlinedVector<int, 2> inlined(5, 1);
  EXPECT_EQ(inlined.size(), 5u);

  absl::StatusOr<int> missing = absl::NotFoundError(absl::StrCat("no ", 7));
  EXPECT_EQ(missing.status().ToString(), "NOT_FOUND: no 7");
  EXPECT_EQ(absl::StrFormat("%05.1f", 2.5), "002.5");
  EXPECT_EQ(std::vector<std::string>(absl::StrSplit("a,b", ',')).size(), 2u);
  EXPECT_EQ(absl::FormatDuration(absl::Hours(2)), "2h");
  EXPECT_GT(absl::Now(), absl::UnixEpoch());

  absl::Notification done;
  absl::Mutex mutex;
  {
    absl::MutexLock lock(&mutex);
    done.Notify();
  }
  EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(1)));

  absl::SetProgramUsageMessage("usage");
  char program[] = "program";
  char flag[] = "--answer=7";
  char* argv[] = {program, flag};
  absl::ParseCommandLine(2, argv);
  EXPECT_EQ(absl::GetFlag(FLAGS_answer), 7);
}

TEST(SystemTest, GrpcServesReflectionAndChannelz) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::channelz::experimental::InitChannelzService();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  EXPECT_NE(port, 0);
  EXPECT_NE(server->GetHealthCheckService(), nullptr);
  server->Shutdown();
}

TEST(SystemTest, Protobuf) {
  google::protobuf::Any any;
  any.set_type_url("type.googleapis.com/x");
  EXPECT_EQ(any.SerializeAsString().size(), 23u);
}

TEST(SystemTest, Numerics) {
  Eigen::Matrix2f m = Eigen::Matrix2f::Identity() * 2;
  EXPECT_EQ(m.sum(), 4.0f);

  float a[] = {1, 2};
  float b[] = {3, 4};
  float c[] = {0};
  ASSERT_EQ(dnnl::sgemm('N', 'N', 1, 1, 2, 1.0f, a, 2, b, 1, 0.0f, c, 1), dnnl::status::success);
  EXPECT_EQ(c[0], 11.0f);

  EXPECT_NE(hwy::SupportedTargets(), 0);
}

TEST(SystemTest, XxHash) {
  const XXH128_hash_t hash = XXH3_128bits("", 0);
  EXPECT_EQ(hash.low64, 0x6001c324468d497fu);
  EXPECT_EQ(hash.high64, 0x99aa06d3014798d8u);
}

TEST(SystemTest, Zip) { EXPECT_NE(zip_libzip_version(), nullptr); }

TEST(SystemTest, JsonGlogBenchmarkXxhash) {
  EXPECT_NE(XXH3_128bits("a", 1).low64, XXH3_128bits("b", 1).low64);
  EXPECT_EQ(nlohmann::json::parse("[1,2]").at(1).get<int>(), 2);
  LOG(INFO) << "glog links";
  benchmark::DoNotOptimize(1);
  EXPECT_GT(benchmark::CPUInfo::Get().num_cpus, 0);
}

}  // namespace
