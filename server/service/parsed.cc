#include "server/service/parsed.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/slice.h"

namespace chorus::server {

absl::Status Parse(grpc::ByteBuffer* bytes, int64_t most, google::protobuf::Message* message) {
  const int64_t size = static_cast<int64_t>(bytes->Length());
  bool is_read = false;
  if (size <= most) {
    grpc::ProtoBufferReader reader(bytes);
    is_read = reader.status().ok() && message->ParseFromZeroCopyStream(&reader);
  }
  bytes->Clear();
  if (is_read) return absl::OkStatus();
  const std::string& name = message->GetDescriptor()->full_name();
  if (size > most) {
    return Malformed(absl::StrCat(name, ": expected at most ", most, " bytes, got ", size));
  }
  return Malformed(absl::StrCat("expected a ", name, ", got ", size, " bytes that are none"));
}

grpc::ByteBuffer Serialized(const google::protobuf::Message& message) {
  // Straight into the slice that is sent.
  grpc::Slice slice(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(const_cast<uint8_t*>(slice.begin()));
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace chorus::server
