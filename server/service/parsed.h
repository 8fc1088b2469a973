// Messages of clients, and how much memory parsing them takes at a time.
//
// Few bytes can say much: parsed, a message takes up to kParsedFactor times its bytes. So gRPC
// hands over bytes. A handler parses them, takes what it needs and lets go of both when it returns,
// whatever becomes of its call; and messages are parsed only as many at a time as kMaxParsedBytes
// holds. A handler that finds no room waits for those that are being parsed, which wait for
// nothing.
//
// Threads: a Parsed belongs to one thread. Ownership: it has the message, and its room.
// Errors: said at Parse().
#ifndef CHORUS_SERVER_SERVICE_PARSED_H_
#define CHORUS_SERVER_SERVICE_PARSED_H_

#include <algorithm>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/own_memory.h"
#include "server/service/room.h"

namespace chorus::server {

// Takes `bytes`, which are empty afterwards, into `message`. INVALID_ARGUMENT kMalformed: more than
// `most`, which are not parsed, or no message of this type.
absl::Status Parse(grpc::ByteBuffer* bytes, int64_t most, google::protobuf::Message* message);

template <typename Message>
class Parsed {
 public:
  // Takes `bytes`, which are empty afterwards. `parsing` outlives it.
  Parsed(Room* parsing, grpc::ByteBuffer* bytes, int64_t most = kMaxRequestBytes)
      : room_(parsing->Enter(kParsedFactor *
                             std::min<int64_t>(static_cast<int64_t>(bytes->Length()), most))),
        message_(std::make_unique<Message>()),
        status_(Parse(bytes, most, message_.get())) {}
  Parsed(const Parsed&) = delete;
  Parsed& operator=(const Parsed&) = delete;

  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }
  const Message& operator*() const { return *message_; }
  const Message* operator->() const { return message_.get(); }

 private:
  const Room::Part room_;  // goes behind the message
  const std::unique_ptr<Message> message_;
  const absl::Status status_;
};

// `message` as bytes.
grpc::ByteBuffer Serialized(const google::protobuf::Message& message);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_PARSED_H_
