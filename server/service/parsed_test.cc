#include "server/service/parsed.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "chorus/v1/diagnostics.pb.h"
#include "chorus/v1/graphs.pb.h"
#include "chorus/v1/log.pb.h"
#include "chorus/v1/sessions.pb.h"
#include "chorus/v1/tensors.pb.h"
#include "chorus/v1/worlds.pb.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/wire_format_lite.h"
#include "gtest/gtest.h"

namespace chorus::server {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::internal::WireFormatLite;
using testing::AllOf;
using testing::HasSubstr;

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}
std::string Tag(int number, WireFormatLite::WireType type) {
  return Varint(WireFormatLite::MakeTag(number, type));
}
std::string Delimited(int number, const std::string& content) {
  return Tag(number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED) + Varint(content.size()) + content;
}
std::string Repeated(const std::string& what, size_t bytes) {
  std::string all;
  while (all.size() + what.size() <= bytes) all += what;
  return all;
}

grpc::ByteBuffer BufferOf(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// What a message of this type takes more than its bytes at most, for each byte: lists of whatever
// is smallest, in it and in the messages in it, and fields that nobody knows.
class Worst {
 public:
  explicit Worst(const Message& type) : type_(type) {
    Look(type.GetDescriptor(), [](const std::string& content) { return content; });
  }
  double factor() const { return factor_; }

 private:
  static constexpr size_t kBytes = 60000;
  static int64_t Held() {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<int64_t>(info.uordblks + info.hblkhd);
  }

  void Try(const std::string& wire) {
    std::unique_ptr<Message> message(type_.New());
    grpc::ByteBuffer buffer = BufferOf(wire);
    const int64_t before = Held();
    ASSERT_TRUE(Parse(&buffer, kMaxMessageBytes, message.get()).ok());
    const int64_t taken = Held() - before;
    factor_ = std::max(factor_, static_cast<double>(taken) / static_cast<double>(wire.size()));
  }

  void Look(const Descriptor* in, const std::function<std::string(const std::string&)>& wrap) {
    if (!seen_.insert(in).second) return;
    constexpr int kUnknown = 15;  // one byte as a tag
    if (in->FindFieldByNumber(kUnknown) == nullptr) {
      Try(wrap(Repeated(Tag(kUnknown, WireFormatLite::WIRETYPE_VARINT) + Varint(0), kBytes)));
      Try(wrap(Repeated(Delimited(kUnknown, ""), kBytes)));
      Try(wrap(Repeated(Tag(kUnknown, WireFormatLite::WIRETYPE_START_GROUP) +
                            Tag(kUnknown, WireFormatLite::WIRETYPE_END_GROUP),
                        kBytes)));
    }
    for (int i = 0; i < in->field_count(); ++i) {
      const FieldDescriptor* const field = in->field(i);
      const bool delimited = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE ||
                             field->cpp_type() == FieldDescriptor::CPPTYPE_STRING;
      if (!delimited) continue;
      if (field->is_repeated()) Try(wrap(Repeated(Delimited(field->number(), ""), kBytes)));
      if (field->message_type() == nullptr) continue;
      Look(field->message_type(), [&wrap, field](const std::string& content) {
        return wrap(Delimited(field->number(), content));
      });
    }
  }

  const Message& type_;
  std::set<const Descriptor*> seen_;
  double factor_ = 0;
};

TEST(ParsedTest, NoMessageTakesMoreThanItIsCountedFor) {
  if (mallinfo2().uordblks == 0) {
    std::cout << "skipped: this allocator does not tell what it has given out" << std::endl;
    GTEST_SKIP() << "this allocator does not tell what it has given out";
  }
  const std::vector<std::shared_ptr<const Message>> types = {
      std::make_shared<v1::CommandsRequest>(),      std::make_shared<v1::SubmitRequest>(),
      std::make_shared<v1::RegisterGraphRequest>(), std::make_shared<v1::RunGraphRequest>(),
      std::make_shared<v1::CreateTensorRequest>(),  std::make_shared<v1::WriteStagingRequest>(),
      std::make_shared<v1::OpenSessionRequest>(),   std::make_shared<v1::CreateGroupRequest>(),
      std::make_shared<v1::JoinWorldRequest>(),     std::make_shared<v1::GetErrorRequest>()};
  for (const auto& type : types) {
    const double factor = Worst(*type).factor();
    std::cout << type->GetTypeName() << " " << factor << std::endl;
    EXPECT_GT(factor, 1) << type->GetTypeName();
    EXPECT_LE(factor, kParsedFactor) << type->GetTypeName();
  }
}

TEST(ParsedTest, TakesTheBytesAndGivesTheRoomBack) {
  Room parsing(kMaxRequestBytes * kParsedFactor);
  v1::JoinWorldRequest join;
  join.set_name("job");
  for (int i = 0; i < 3; ++i) {
    grpc::ByteBuffer bytes = Serialized(join);
    const Parsed<v1::JoinWorldRequest> parsed(&parsing, &bytes);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->name(), "job");
    EXPECT_FALSE(bytes.Valid());
  }
  parsing.Enter(kMaxRequestBytes * kParsedFactor);
}

TEST(ParsedTest, WhatIsTooLargeIsNotParsed) {
  Room parsing(kMaxRequestBytes * kParsedFactor);
  for (const int64_t size : {kMaxRequestBytes, kMaxRequestBytes + 1}) {
    v1::JoinWorldRequest join;
    join.set_name(std::string(static_cast<size_t>(size) - 4, 'x'));
    ASSERT_EQ(static_cast<int64_t>(join.ByteSizeLong()), size);
    grpc::ByteBuffer bytes = Serialized(join);
    const Parsed<v1::JoinWorldRequest> parsed(&parsing, &bytes);
    EXPECT_EQ(parsed.ok(), size == kMaxRequestBytes) << parsed.status();
    EXPECT_EQ(parsed->name().empty(), size != kMaxRequestBytes);
    if (parsed.ok()) continue;
    EXPECT_EQ(ErrorOf(parsed.status()).reason, Reason::kMalformed);
    EXPECT_THAT(
        ErrorOf(parsed.status()).message,
        AllOf(HasSubstr("JoinWorldRequest"), HasSubstr("at most 65536"), HasSubstr("got 65537")));
  }
  grpc::ByteBuffer garbage = BufferOf("\xff\xff\xff");
  const Parsed<v1::JoinWorldRequest> none(&parsing, &garbage);
  EXPECT_EQ(ErrorOf(none.status()).reason, Reason::kMalformed);
}

TEST(RoomTest, WhoeverFindsNoneWaits) {
  Room room(100);
  std::atomic<bool> left{false};
  std::atomic<bool> entered{false};
  std::thread waiting;
  {
    const Room::Part all = room.Enter(100);
    waiting = std::thread([&] {
      const Room::Part part = room.Enter(1);
      EXPECT_TRUE(left);
      entered = true;
    });
    while (room.waiting() == 0 && !entered) std::this_thread::yield();
    left = true;
  }
  waiting.join();
  room.Enter(100);
}

}  // namespace
}  // namespace chorus::server
