#include "core/worker/protocol.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus::worker {
namespace {

class Writer {
 public:
  explicit Writer(ByteWriter* out) : out_(out) {}

  template <typename... Fields>
  void operator()(const Fields&... fields) {
    (Put(fields), ...);
  }

 private:
  void Put(int32_t value) { out_->PutSigned(value); }
  void Put(int64_t value) { out_->PutSigned(value); }
  void Put(uint64_t value) { out_->PutVarint(value); }
  void Put(bool value) { out_->Put(static_cast<uint8_t>(value)); }
  template <typename Tag>
  void Put(const StrongId<Tag, uint64_t>& id) {
    out_->PutVarint(id.value());
  }
  void Put(absl::string_view rest) { out_->PutRaw(rest.data(), rest.size()); }
  void Put(const std::string& text) { out_->PutString(text); }
  void Put(const absl::Status& status) {
    out_->PutString(status.ok() ? std::string() : EncodeError(ErrorOf(status)));
  }
  void Put(const std::vector<int32_t>& values) {
    out_->PutVarint(values.size());
    for (const int32_t value : values) out_->PutSigned(value);
  }

  ByteWriter* const out_;
};

class Reader {
 public:
  explicit Reader(ByteReader* in) : in_(in) {}

  template <typename... Fields>
  void operator()(Fields&... fields) {
    (Get(&fields), ...);
  }

 private:
  void Get(int32_t* value) {
    const int64_t read = in_->GetSigned();
    *value = static_cast<int32_t>(read);
    if (*value != read) in_->Fail();
  }
  void Get(int64_t* value) { *value = in_->GetSigned(); }
  void Get(uint64_t* value) { *value = in_->GetVarint(); }
  void Get(bool* value) {
    const uint8_t read = in_->Get<uint8_t>();
    if (read > 1) in_->Fail();
    *value = read == 1;
  }
  template <typename Tag>
  void Get(StrongId<Tag, uint64_t>* id) {
    *id = StrongId<Tag, uint64_t>(in_->GetVarint());
  }
  void Get(absl::string_view* rest) { *rest = in_->GetRaw(in_->remaining()); }
  void Get(std::string* text) { *text = std::string(in_->GetString()); }
  void Get(absl::Status* status) {
    const absl::string_view bytes = in_->GetString();
    if (!bytes.empty()) *status = ToStatus(DecodeError(bytes));
  }
  void Get(std::vector<int32_t>* values) {
    values->resize(in_->GetCount());
    for (int32_t& value : *values) Get(&value);
  }

  ByteReader* const in_;
};

// A message is its index in the variant, then its fields.
template <typename Messages>
void EncodeOneOf(const Messages& message, ByteWriter* out) {
  out->Put(static_cast<uint8_t>(message.index()));
  Writer writer(out);
  absl::visit([&writer](const auto& m) { m.Fields(m, writer); }, message);
}

template <typename Messages, size_t kIndex = 0>
absl::StatusOr<Messages> DecodeOneOf(absl::string_view bytes) {
  if constexpr (kIndex < absl::variant_size<Messages>::value) {
    if (bytes.empty() || static_cast<uint8_t>(bytes[0]) != kIndex) {
      return DecodeOneOf<Messages, kIndex + 1>(bytes);
    }
    ByteReader in(bytes.substr(1));
    Reader reader(&in);
    absl::variant_alternative_t<kIndex, Messages> message;
    message.Fields(message, reader);
    if (in.Done()) return Messages(std::move(message));
  }
  return Malformed(absl::StrCat("a message of ", bytes.size(), " bytes does not decode"));
}

}  // namespace

void Encode(const ToWorker& message, ByteWriter* out) { EncodeOneOf(message, out); }
absl::StatusOr<ToWorker> DecodeToWorker(absl::string_view bytes) {
  return DecodeOneOf<ToWorker>(bytes);
}
void Encode(const ToDaemon& message, ByteWriter* out) { EncodeOneOf(message, out); }
absl::StatusOr<ToDaemon> DecodeToDaemon(absl::string_view bytes) {
  return DecodeOneOf<ToDaemon>(bytes);
}

}  // namespace chorus::worker
