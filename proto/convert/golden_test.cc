// The golden messages parse, convert to core types, pass through a frame and come back equal.

#include <dirent.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "chorus/v1/commands.pb.h"
#include "chorus/v1/errors.pb.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "google/protobuf/util/json_util.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "proto/convert/convert.h"
#include "proto/convert/errors_convert.h"

namespace chorus {
namespace {

constexpr char kFolder[] = "proto/chorus/v1/golden";

std::vector<std::string> GoldenFiles(const std::string& prefix,
                                     const std::string& suffix = ".json") {
  std::vector<std::string> files;
  DIR* const folder = opendir(kFolder);
  if (folder == nullptr) return files;
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (absl::StartsWith(name, prefix) && absl::EndsWith(name, suffix)) files.push_back(name);
  }
  closedir(folder);
  std::sort(files.begin(), files.end());
  return files;
}

std::string ReadGolden(const std::string& name) {
  std::ifstream file(absl::StrCat(kFolder, "/", name));
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

template <typename Message>
Message Parse(const std::string& name) {
  Message message;
  const auto status = google::protobuf::util::JsonStringToMessage(ReadGolden(name), &message);
  EXPECT_TRUE(status.ok()) << name << ": " << status.message().ToString();
  return message;
}

// What differs, empty when nothing does.
std::string Difference(const google::protobuf::Message& a, const google::protobuf::Message& b) {
  std::string report;
  google::protobuf::util::MessageDifferencer differencer;
  differencer.ReportDifferencesToString(&report);
  return differencer.Compare(a, b) ? "" : report;
}

TEST(GoldenTest, CommandsSurviveTheWayThroughAFrame) {
  const std::vector<std::string> files = GoldenFiles("command_");
  ASSERT_GE(files.size(), 10u);
  std::vector<int> kinds;
  for (const std::string& name : files) {
    SCOPED_TRACE(name);
    const v1::Command message = Parse<v1::Command>(name);
    kinds.push_back(message.body_case());
    const absl::StatusOr<Command> command = FromProto(message);
    ASSERT_TRUE(command.ok()) << command.status();
    ByteWriter frame;
    EncodeFrame(*command, &frame);
    const absl::StatusOr<Command> decoded = DecodeFrame(frame.bytes());
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    v1::Command back;
    ASSERT_TRUE(ToProto(*decoded, &back).ok());
    EXPECT_EQ(Difference(message, back), "");
  }
  // Every kind of command has a golden message.
  const google::protobuf::OneofDescriptor* body =
      v1::Command::descriptor()->FindOneofByName("body");
  for (int i = 0; i < body->field_count(); ++i) {
    EXPECT_THAT(kinds, testing::Contains(body->field(i)->number())) << body->field(i)->name();
  }
}

TEST(GoldenTest, EveryFieldOfTheGraphIsUsed) {
  const v1::Command message = Parse<v1::Command>("command_register_every_field.json");
  const v1::Graph& graph = message.register_graph().graph();
  // Each message type below the graph, with the union of the fields that its instances set.
  struct Walker {
    std::map<const google::protobuf::FieldDescriptor*, int> used;
    void Walk(const google::protobuf::Message& m) {
      const auto* reflection = m.GetReflection();
      for (int i = 0; i < m.GetDescriptor()->field_count(); ++i) used[m.GetDescriptor()->field(i)];
      std::vector<const google::protobuf::FieldDescriptor*> fields;
      reflection->ListFields(m, &fields);
      for (const auto* field : fields) {
        ++used[field];
        if (field->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) continue;
        if (!field->is_repeated()) {
          Walk(reflection->GetMessage(m, field));
          continue;
        }
        for (int i = 0; i < reflection->FieldSize(m, field); ++i) {
          Walk(reflection->GetRepeatedMessage(m, field, i));
        }
      }
    }
  } walker;
  walker.Walk(graph);
  EXPECT_GT(walker.used.size(), 40u);
  for (const auto& [field, count] : walker.used) EXPECT_GT(count, 0) << field->full_name();
}

// The graph of a golden message, by the name of its bytes.
absl::StatusOr<Graph> GoldenGraph(const std::string& hex_file) {
  const std::string json = absl::StrCat(absl::StripSuffix(hex_file, ".graph.hex"), ".json");
  if (absl::StartsWith(json, "graph_")) return FromProto(Parse<v1::Graph>(json));
  return FromProto(Parse<v1::Command>(json).register_graph().graph());
}

// proto/chorus/v1/graph_encoding.md says what these bytes are.
TEST(GoldenTest, GraphsHaveTheirCanonicalBytes) {
  const std::vector<std::string> files = GoldenFiles("", ".graph.hex");
  ASSERT_GE(files.size(), 3u);
  for (const std::string& name : files) {
    SCOPED_TRACE(name);
    std::string digits = ReadGolden(name);
    digits.erase(std::remove_if(digits.begin(), digits.end(), absl::ascii_isspace), digits.end());
    const std::string bytes = absl::HexStringToBytes(digits);
    const absl::StatusOr<Graph> graph = GoldenGraph(name);
    ASSERT_TRUE(graph.ok()) << graph.status();
    EXPECT_EQ(absl::BytesToHexString(EncodeGraph(*graph)), digits);
    const absl::StatusOr<Graph> decoded = DecodeGraph(bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_TRUE(*decoded == *graph) << DebugString(*decoded);
  }
}

TEST(GoldenTest, ErrorsSurviveTheWayThroughAStatus) {
  const std::vector<std::string> files = GoldenFiles("error_");
  ASSERT_GE(files.size(), 1u);
  for (const std::string& name : files) {
    SCOPED_TRACE(name);
    const v1::ErrorInfo info = Parse<v1::ErrorInfo>(name);
    v1::RpcStatus message;
    message.set_code(3);
    message.set_message("ranks 0 and 1 disagree");
    message.add_details()->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
    message.mutable_details(0)->set_value(info.SerializeAsString());
    const v1::RpcStatus back = ToRpcStatus(FromRpcStatus(message));
    ASSERT_EQ(back.details_size(), 1);
    EXPECT_EQ(back.details(0).type_url(), message.details(0).type_url());
    v1::ErrorInfo info_back;
    ASSERT_TRUE(info_back.ParseFromString(back.details(0).value()));
    EXPECT_EQ(Difference(info, info_back), "");
    EXPECT_EQ(back.code(), message.code());
    EXPECT_EQ(back.message(), message.message() + RemedyText(ErrorOf(FromRpcStatus(message))));
  }
}

}  // namespace
}  // namespace chorus
