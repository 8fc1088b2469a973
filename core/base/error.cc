#include "core/base/error.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/base/bytes.h"

namespace chorus {
namespace {

constexpr char kPayloadUrl[] = "chorus.error";

struct ReasonEntry {
  Reason reason;
  const char* name;
};

constexpr ReasonEntry kReasons[] = {
    {Reason::kUnspecified, "UNSPECIFIED"},
    {Reason::kMalformed, "MALFORMED"},
    {Reason::kBadType, "BAD_TYPE"},
    {Reason::kVersion, "VERSION"},
    {Reason::kUnsupported, "UNSUPPORTED"},
    {Reason::kUnknownName, "UNKNOWN_NAME"},
    {Reason::kSequenceGap, "SEQUENCE_GAP"},
    {Reason::kOutcomeForgotten, "OUTCOME_FORGOTTEN"},
    {Reason::kDonated, "DONATED"},
    {Reason::kMismatch, "MISMATCH"},
    {Reason::kOrderCycle, "ORDER_CYCLE"},
    {Reason::kAgreeTimeout, "AGREE_TIMEOUT"},
    {Reason::kPeerDied, "PEER_DIED"},
    {Reason::kPeerLeft, "PEER_LEFT"},
    {Reason::kPeerRefused, "PEER_REFUSED"},
    {Reason::kCancelled, "CANCELLED"},
    {Reason::kEpochEnded, "EPOCH_ENDED"},
    {Reason::kNeedsReform, "NEEDS_REFORM"},
    {Reason::kTapeConsumed, "TAPE_CONSUMED"},
    {Reason::kGradientLost, "GRADIENT_LOST"},
    {Reason::kDuplicateRank, "DUPLICATE_RANK"},
    {Reason::kWorldSize, "WORLD_SIZE"},
    {Reason::kJoinTimeout, "JOIN_TIMEOUT"},
    {Reason::kOutOfMemory, "OUT_OF_MEMORY"},
    {Reason::kQuota, "QUOTA"},
    {Reason::kDraining, "DRAINING"},
    {Reason::kSessionLost, "SESSION_LOST"},
    {Reason::kDaemonLost, "DAEMON_LOST"},
    {Reason::kExecTimeout, "EXEC_TIMEOUT"},
    {Reason::kExecFailed, "EXEC_FAILED"},
    {Reason::kNotAttached, "NOT_ATTACHED"},
    {Reason::kForked, "FORKED"},
    {Reason::kTransportTimeout, "TRANSPORT_TIMEOUT"},
    {Reason::kInternal, "INTERNAL"},
};

void Shorten(std::string* text, size_t limit) {
  if (text->size() <= limit) return;
  text->resize(limit > 3 ? limit - 3 : 0);
  text->append("...");
}

std::string EncodeUnbounded(const Error& error) {
  ByteWriter out;
  out.PutVarint(static_cast<uint64_t>(error.code));
  out.PutVarint(static_cast<uint64_t>(error.reason));
  out.PutString(error.message);
  out.PutSigned(error.id.value());
  out.PutSigned(error.culprit.rank);
  out.PutSigned(error.culprit.pid);
  out.PutString(error.culprit.node);
  out.PutString(error.instance);
  out.PutString(error.op);
  out.PutString(error.source);
  out.PutString(error.expected);
  out.PutString(error.got);
  out.PutVarint(std::min(error.ranks.size(), Error::kMaxRanks));
  for (size_t i = 0; i < error.ranks.size() && i < Error::kMaxRanks; ++i) {
    out.PutSigned(error.ranks[i].rank);
    out.PutString(error.ranks[i].what);
    out.PutString(error.ranks[i].source);
  }
  out.PutVarint(std::min(error.ended.size(), Error::kMaxRanks));
  for (size_t i = 0; i < error.ended.size() && i < Error::kMaxRanks; ++i) {
    out.PutSigned(error.ended[i].world.value());
    out.PutSigned(error.ended[i].open.value());
  }
  out.Put(static_cast<uint8_t>(error.alone ? 1 : 0));
  return out.Take();
}

}  // namespace

absl::string_view ReasonName(Reason reason) {
  for (const ReasonEntry& entry : kReasons) {
    if (entry.reason == reason) return entry.name;
  }
  return "UNSPECIFIED";
}

Reason ReasonFromName(absl::string_view name) {
  for (const ReasonEntry& entry : kReasons) {
    if (name == entry.name) return entry.reason;
  }
  return Reason::kUnspecified;
}

absl::Status ToStatus(const Error& error) {
  if (error.code == absl::StatusCode::kOk) return absl::OkStatus();
  absl::Status status(error.code, error.message);
  status.SetPayload(kPayloadUrl, absl::Cord(EncodeError(error)));
  return status;
}

Error ErrorOf(const absl::Status& status) {
  Error error;
  if (absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl)) {
    error = DecodeError(std::string(*payload));
  }
  error.code = status.code();
  error.message = std::string(status.message());
  return error;
}

absl::Status MakeError(absl::StatusCode code, Reason reason, absl::string_view message) {
  Error error;
  error.code = code;
  error.reason = reason;
  error.message = std::string(message);
  return ToStatus(error);
}

absl::Status Malformed(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, Reason::kMalformed, message);
}
absl::Status BadType(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, Reason::kBadType, message);
}
absl::Status Unsupported(absl::string_view message) {
  return MakeError(absl::StatusCode::kUnimplemented, Reason::kUnsupported, message);
}
absl::Status UnknownName(absl::string_view message) {
  return MakeError(absl::StatusCode::kNotFound, Reason::kUnknownName, message);
}

absl::Status Detached(const absl::Status& status) {
  absl::Status copy(status.code(), status.message());
  status.ForEachPayload([&copy](absl::string_view type, const absl::Cord& payload) {
    copy.SetPayload(type, absl::Cord(std::string(payload)));
  });
  return copy;
}

std::string EncodeError(const Error& error) {
  std::string bytes = EncodeUnbounded(error);
  if (bytes.size() <= Error::kMaxBytes) return bytes;
  // 9 texts and 2 for each of 8 ranks share the limit; halving the longest allowed text ends soon.
  Error shorter = error;
  for (size_t limit = Error::kMaxBytes / 2; bytes.size() > Error::kMaxBytes && limit >= 16;
       limit /= 2) {
    Shorten(&shorter.message, limit);
    Shorten(&shorter.culprit.node, limit);
    Shorten(&shorter.instance, limit);
    Shorten(&shorter.op, limit);
    Shorten(&shorter.source, limit);
    Shorten(&shorter.expected, limit);
    Shorten(&shorter.got, limit);
    for (Error::Version& version : shorter.ranks) {
      Shorten(&version.what, limit);
      Shorten(&version.source, limit);
    }
    bytes = EncodeUnbounded(shorter);
  }
  return bytes;
}

Error DecodeError(absl::string_view bytes) {
  ByteReader in(bytes);
  Error error;
  const uint64_t code = in.GetVarint();
  const uint64_t reason = in.GetVarint();
  error.message = std::string(in.GetString());
  error.id = ErrorId(in.GetSigned());
  error.culprit.rank = static_cast<int32_t>(in.GetSigned());
  error.culprit.pid = static_cast<int32_t>(in.GetSigned());
  error.culprit.node = std::string(in.GetString());
  error.instance = std::string(in.GetString());
  error.op = std::string(in.GetString());
  error.source = std::string(in.GetString());
  error.expected = std::string(in.GetString());
  error.got = std::string(in.GetString());
  const size_t count = in.GetCount(3);
  for (size_t i = 0; i < count && i < Error::kMaxRanks; ++i) {
    Error::Version version;
    version.rank = static_cast<int32_t>(in.GetSigned());
    version.what = std::string(in.GetString());
    version.source = std::string(in.GetString());
    error.ranks.push_back(std::move(version));
  }
  const size_t ended = in.GetCount(2);
  for (size_t i = 0; i < ended && i < Error::kMaxRanks; ++i) {
    Error::EndedEpoch epoch;
    epoch.world = WorldId(in.GetSigned());
    epoch.open = Epoch(in.GetSigned());
    error.ended.push_back(epoch);
  }
  const uint8_t alone = in.Get<uint8_t>();
  error.alone = alone == 1;
  constexpr uint64_t kLastCode = static_cast<uint64_t>(absl::StatusCode::kUnauthenticated);
  if (!in.Done() || alone > 1 || code == 0 || code > kLastCode) {
    Error broken;
    broken.code = absl::StatusCode::kInternal;
    broken.reason = Reason::kInternal;
    broken.message = absl::StrCat("an error record of ", bytes.size(), " bytes does not decode");
    return broken;
  }
  error.code = static_cast<absl::StatusCode>(code);
  error.reason = ReasonFromName(ReasonName(static_cast<Reason>(reason)));
  return error;
}

}  // namespace chorus
