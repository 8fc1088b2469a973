#include "core/base/error.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/optional.h"
#include "core/base/bytes.h"

namespace chorus {
namespace {

constexpr char kPayloadUrl[] = "chorus.error";

using Code = absl::StatusCode;

constexpr ReasonInfo kReasons[] = {
    {Reason::kUnspecified, "UNSPECIFIED", Code::kUnknown, "go by the code"},
    {Reason::kMalformed, "MALFORMED", Code::kInvalidArgument,
     "fix the argument, or the client that sent it"},
    {Reason::kBadType, "BAD_TYPE", Code::kInvalidArgument, "fix the call"},
    {Reason::kVersion, "VERSION", Code::kUnimplemented, "upgrade the older side"},
    {Reason::kUnsupported, "UNSUPPORTED", Code::kUnimplemented, "do without it, or upgrade"},
    {Reason::kUnknownName, "UNKNOWN_NAME", Code::kNotFound, "create it again"},
    {Reason::kSequenceGap, "SEQUENCE_GAP", Code::kFailedPrecondition,
     "send the missing command, then those after it"},
    {Reason::kOutcomeForgotten, "OUTCOME_FORGOTTEN", Code::kNotFound, "ask earlier"},
    {Reason::kDonated, "DONATED", Code::kFailedPrecondition,
     "use that run's result, and donate only what is not needed any more"},
    {Reason::kWrongState, "WRONG_STATE", Code::kFailedPrecondition, "do first what the text says"},
    {Reason::kMismatch, "MISMATCH", Code::kInvalidArgument,
     "make all ranks ask for the same, and go on with the next World::Step"},
    {Reason::kOrderCycle, "ORDER_CYCLE", Code::kInvalidArgument,
     "use the groups in one order on all ranks"},
    {Reason::kAgreeTimeout, "AGREE_TIMEOUT", Code::kDeadlineExceeded,
     "see why that rank is late, and redo the step"},
    {Reason::kPeerDied, "PEER_DIED", Code::kAborted,
     "call World::Reform, then resume from the last published instance"},
    {Reason::kPeerLeft, "PEER_LEFT", Code::kAborted, "end the job, or call World::Reform"},
    {Reason::kPeerRefused, "PEER_REFUSED", Code::kAborted,
     "fix that rank's call, and go on with the next World::Step"},
    {Reason::kCancelled, "CANCELLED", Code::kCancelled, "redo the step if it is still wanted"},
    {Reason::kEpochEnded, "EPOCH_ENDED", Code::kAborted, "go on in the epoch that is open"},
    {Reason::kNeedsReform, "NEEDS_REFORM", Code::kFailedPrecondition, "call World::Reform"},
    {Reason::kTapeConsumed, "TAPE_CONSUMED", Code::kFailedPrecondition,
     "keep the tape (retain_graph) on every rank; after a refusal, record anew"},
    {Reason::kGradientLost, "GRADIENT_LOST", Code::kFailedPrecondition,
     "call Backward on that rank with a zero seed, or make the call under NoGrad"},
    {Reason::kOutOfLine, "OUT_OF_LINE", Code::kFailedPrecondition,
     "fix the call that is quoted, and go on with the next World::Step"},
    {Reason::kAborted, "ABORTED", Code::kAborted, "redo the step"},
    {Reason::kDuplicateRank, "DUPLICATE_RANK", Code::kAlreadyExists, "check RANK in the launcher"},
    {Reason::kWorldSize, "WORLD_SIZE", Code::kInvalidArgument, "check WORLD_SIZE in the launcher"},
    {Reason::kJoinTimeout, "JOIN_TIMEOUT", Code::kDeadlineExceeded, "start the missing ranks"},
    {Reason::kOutOfMemory, "OUT_OF_MEMORY", Code::kResourceExhausted,
     "release tensors, or raise --memory_limit_bytes"},
    {Reason::kQuota, "QUOTA", Code::kResourceExhausted, "release some, or raise the limit"},
    {Reason::kDraining, "DRAINING", Code::kUnavailable,
     "open a new session when the daemon is back"},
    {Reason::kSessionLost, "SESSION_LOST", Code::kNotFound, "open a new session"},
    {Reason::kDaemonLost, "DAEMON_LOST", Code::kUnavailable,
     "start the daemon, then open a new session"},
    {Reason::kExecTimeout, "EXEC_TIMEOUT", Code::kDeadlineExceeded,
     "look at the devices, and report it"},
    {Reason::kExecFailed, "EXEC_FAILED", Code::kInternal, "look at the devices, and report it"},
    {Reason::kNotAttached, "NOT_ATTACHED", Code::kPermissionDenied,
     "attach, run as the daemon's user, or start it with --socket_mode and --socket_group"},
    {Reason::kForked, "FORKED", Code::kFailedPrecondition, "open a session in the child"},
    {Reason::kTransportTimeout, "TRANSPORT_TIMEOUT", Code::kDeadlineExceeded,
     "ask again, and see whether the daemon is stopped"},
    {Reason::kInternal, "INTERNAL", Code::kInternal, "report it"},
    {Reason::kCannotServe, "CANNOT_SERVE", Code::kFailedPrecondition,
     "free or change what the text names, and start chorusd again"},
    {Reason::kDeviceLost, "DEVICE_LOST", Code::kUnavailable,
     "put tensors there again, and go on: the device is started anew"},
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

// A payload is text: absl prints payloads with everything that is not printable escaped, and the
// function that would print them otherwise is the process's own, hence the trainer's. In values all
// but plain characters is "%XX", which leaves "; ", "=" and "|" to stand between them.
bool IsPlain(char c) { return c >= ' ' && c <= '~' && !absl::StrContains("%;|'\"\\", c); }

void AppendValue(absl::string_view value, std::string* text) {
  for (const char c : value) {
    if (IsPlain(c)) {
      text->push_back(c);
    } else {
      absl::StrAppend(text, "%", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    }
  }
}

std::string ValueOf(absl::string_view encoded) {
  std::string value;
  for (size_t i = 0; i < encoded.size(); ++i) {
    int byte = 0;
    if (encoded[i] == '%' && absl::SimpleHexAtoi(encoded.substr(i + 1, 2), &byte)) {
      value.push_back(static_cast<char>(byte));
      i += 2;
    } else {
      value.push_back(encoded[i]);
    }
  }
  return value;
}

// The texts of a payload, with their names there. The message is the status's.
template <typename MaybeConstError>
auto TextsOf(MaybeConstError* error) {
  using Field = std::pair<const char*, decltype(&error->op)>;
  return std::array<Field, 6>{{{"node", &error->culprit.node},
                               {"instance", &error->instance},
                               {"op", &error->op},
                               {"source", &error->source},
                               {"expected", &error->expected},
                               {"got", &error->got}}};
}

std::string EncodePayload(const Error& error) {
  std::string text = absl::StrCat("reason=", InfoOf(error.reason).name);
  const auto put = [&text](absl::string_view name, absl::string_view value) {
    absl::StrAppend(&text, "; ", name, "=");
    AppendValue(value, &text);
  };
  if (error.id != ErrorId()) put("error_id", absl::StrCat(error.id.value()));
  if (error.culprit.rank != -1) put("rank", absl::StrCat(error.culprit.rank));
  if (error.culprit.pid != -1) put("pid", absl::StrCat(error.culprit.pid));
  for (const auto& field : TextsOf(&error)) {
    if (!field.second->empty()) put(field.first, *field.second);
  }
  for (size_t i = 0; i < error.ranks.size() && i < Error::kMaxRanks; ++i) {
    put("asked", absl::StrCat(error.ranks[i].rank));
    for (const std::string* part : {&error.ranks[i].what, &error.ranks[i].source}) {
      text.push_back('|');
      AppendValue(*part, &text);
    }
  }
  for (size_t i = 0; i < error.ended.size() && i < Error::kMaxRanks; ++i) {
    put("ended", absl::StrCat(error.ended[i].world.value()));
    absl::StrAppend(&text, "|", error.ended[i].open.value());
  }
  if (error.alone) put("alone", "true");
  return text;
}

template <typename Int>
Int NumberOf(absl::string_view text) {
  Int number = 0;
  return absl::SimpleAtoi(text, &number) ? number : 0;
}

Error DecodePayload(absl::string_view payload) {
  Error error;
  for (const absl::string_view field : absl::StrSplit(payload, "; ")) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(field, absl::MaxSplits('=', 1));
    const absl::string_view name = pair.first;
    const std::vector<absl::string_view> parts = absl::StrSplit(pair.second, '|');
    for (const auto& text : TextsOf(&error)) {
      if (name == text.first) *text.second = ValueOf(pair.second);
    }
    if (name == "reason") error.reason = ReasonFromName(pair.second);
    if (name == "error_id") error.id = ErrorId(NumberOf<int64_t>(pair.second));
    if (name == "rank") error.culprit.rank = NumberOf<int32_t>(pair.second);
    if (name == "pid") error.culprit.pid = NumberOf<int32_t>(pair.second);
    if (name == "asked" && parts.size() == 3) {
      error.ranks.push_back({NumberOf<int32_t>(parts[0]), ValueOf(parts[1]), ValueOf(parts[2])});
    }
    if (name == "ended" && parts.size() == 2) {
      error.ended.push_back(
          {WorldId(NumberOf<int64_t>(parts[0])), Epoch(NumberOf<int64_t>(parts[1]))});
    }
    if (name == "alone") error.alone = true;
  }
  return error;
}

// `encode` of the error with texts shortened, the longest first, until it fits.
std::string Bounded(const Error& error, std::string (*encode)(const Error&)) {
  std::string bytes = encode(error);
  if (bytes.size() <= Error::kMaxBytes) return bytes;
  // 7 texts and 2 for each of 8 ranks share the limit; halving the longest allowed text ends soon.
  Error shorter = error;
  for (size_t limit = Error::kMaxBytes / 2; bytes.size() > Error::kMaxBytes && limit >= 16;
       limit /= 2) {
    Shorten(&shorter.message, limit);
    for (const auto& field : TextsOf(&shorter)) Shorten(field.second, limit);
    for (Error::Version& version : shorter.ranks) {
      Shorten(&version.what, limit);
      Shorten(&version.source, limit);
    }
    bytes = encode(shorter);
  }
  return bytes;
}

}  // namespace

Error::Error(Reason reason_of, std::string text)
    : code(InfoOf(reason_of).code), reason(reason_of), message(std::move(text)) {}

void Error::SetReason(Reason to) {
  reason = to;
  code = InfoOf(to).code;
}

absl::Span<const ReasonInfo> Reasons() { return kReasons; }

const ReasonInfo& InfoOf(Reason reason) {
  for (const ReasonInfo& info : kReasons) {
    if (info.reason == reason) return info;
  }
  return kReasons[0];
}

absl::string_view ReasonName(Reason reason) { return InfoOf(reason).name; }

Reason ReasonFromName(absl::string_view name) {
  for (const ReasonInfo& info : kReasons) {
    if (name == info.name) return info.reason;
  }
  return Reason::kUnspecified;
}

int64_t BytesOf(const Error& error) {
  constexpr size_t kPerText = 32;  // of the heap
  size_t bytes = sizeof(Error) + error.ended.size() * sizeof(Error::EndedEpoch);
  for (const std::string* text : {&error.message, &error.culprit.node, &error.instance, &error.op,
                                  &error.source, &error.expected, &error.got}) {
    bytes += text->size() + kPerText;
  }
  for (const Error::Version& version : error.ranks) {
    bytes += sizeof(version) + version.what.size() + version.source.size() + 2 * kPerText;
  }
  return static_cast<int64_t>(bytes);
}

std::string RemedyText(const Error& error) {
  const ReasonInfo& info = InfoOf(error.reason);
  std::string text = absl::StrCat(" [", info.name, "; ", info.remedy);
  if (error.id != ErrorId()) absl::StrAppend(&text, "; error ", error.id.value());
  text.push_back(']');
  return text;
}

absl::string_view WithoutRemedyText(absl::string_view text, Reason reason) {
  // Another build's remedy may be another one: only the name tells where it begins.
  const size_t begin = text.rfind(absl::StrCat(" [", ReasonName(reason), "; "));
  const bool has_remedy = begin != absl::string_view::npos && absl::EndsWith(text, "]");
  return has_remedy ? text.substr(0, begin) : text;
}

absl::Status ToStatus(const Error& error) {
  if (error.code == absl::StatusCode::kOk) return absl::OkStatus();
  absl::Status status(error.code, absl::StrCat(error.message, RemedyText(error)));
  status.SetPayload(kPayloadUrl, absl::Cord(Bounded(error, EncodePayload)));
  return status;
}

Error ErrorOf(const absl::Status& status) {
  Error error;
  absl::string_view text = status.message();
  if (absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl)) {
    error = DecodePayload(std::string(*payload));
    text = WithoutRemedyText(text, error.reason);
  }
  error.code = status.code();
  error.message = std::string(text);
  return error;
}

absl::Status MakeError(Reason reason, absl::string_view message) {
  return ToStatus(Error(reason, std::string(message)));
}

absl::Status Malformed(absl::string_view message) { return MakeError(Reason::kMalformed, message); }
absl::Status BadType(absl::string_view message) { return MakeError(Reason::kBadType, message); }
absl::Status Unsupported(absl::string_view message) {
  return MakeError(Reason::kUnsupported, message);
}
absl::Status UnknownName(absl::string_view message) {
  return MakeError(Reason::kUnknownName, message);
}
absl::Status DrainingError() { return MakeError(Reason::kDraining, "the daemon is shutting down"); }

std::string Printable(absl::string_view text) { return absl::CHexEscape(text.substr(0, 256)); }

absl::Status Detached(const absl::Status& status) {
  absl::Status copy(status.code(), status.message());
  status.ForEachPayload([&copy](absl::string_view type, const absl::Cord& payload) {
    copy.SetPayload(type, absl::Cord(std::string(payload)));
  });
  return copy;
}

std::string EncodeError(const Error& error) { return Bounded(error, EncodeUnbounded); }

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
  const size_t num_ended = in.GetCount(2);
  for (size_t i = 0; i < num_ended && i < Error::kMaxRanks; ++i) {
    Error::EndedEpoch epoch;
    epoch.world = WorldId(in.GetSigned());
    epoch.open = Epoch(in.GetSigned());
    error.ended.push_back(epoch);
  }
  const uint8_t alone = in.Get<uint8_t>();
  error.alone = alone == 1;
  constexpr uint64_t kLastCode = static_cast<uint64_t>(absl::StatusCode::kUnauthenticated);
  if (!in.Done() || alone > 1 || code == 0 || code > kLastCode) {
    return Error(Reason::kInternal,
                 absl::StrCat("an error record of ", bytes.size(), " bytes does not decode"));
  }
  error.code = static_cast<absl::StatusCode>(code);
  error.reason = ReasonFromName(ReasonName(static_cast<Reason>(reason)));
  return error;
}

}  // namespace chorus
