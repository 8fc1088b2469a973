#include "core/collective/instance.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"

namespace chorus {

std::string CallPosition::ToString() const {
  std::string text;
  if (step != 0) absl::StrAppend(&text, "step ", step, " ");
  absl::StrAppend(&text, "call ", call);
  if (part != 0) absl::StrAppend(&text, " part ", part);
  return text;
}

std::string InstanceKey::ToString() const {
  std::string text = absl::StrCat("group ", group.value());
  if (since > Epoch(1)) absl::StrAppend(&text, " (since epoch ", since.value(), ")");
  if (is_pair()) {
    absl::StrAppend(&text, " from ", source.value(), " to ", destination.value(), " tag ", tag);
  }
  absl::StrAppend(&text, " ", at.ToString());
  if (is_gradient()) {
    const auto request_text = [this](std::string* out, const Request& request) {
      absl::StrAppend(out, request.number);
      if (request.step != at.step) absl::StrAppend(out, "@", request.step);
    };
    absl::StrAppend(&text, ", gradient ", absl::StrJoin(path, ".", request_text));
  }
  return text;
}

bool operator<(const InstanceKey& a, const InstanceKey& b) {
  const auto rest = [](const InstanceKey& k) {
    return std::tie(k.group, k.source, k.destination, k.tag, k.at, k.path);
  };
  // Steps first: a gang's collectives stand in the order of the program where nothing else says.
  return std::make_pair(a.since, a.at.step) != std::make_pair(b.since, b.at.step)
             ? std::make_pair(a.since, a.at.step) < std::make_pair(b.since, b.at.step)
             : rest(a) < rest(b);
}

int64_t HeapBytesOf(const InstanceKey& key) {
  static const size_t in_key = InstanceKey().path.capacity();
  const size_t capacity = key.path.capacity();
  return capacity <= in_key ? 0 : static_cast<int64_t>(capacity * sizeof(InstanceKey::Request));
}

void EncodeInstanceKey(const InstanceKey& key, ByteWriter* out) {
  out->PutSigned(key.group.value());
  out->PutSigned(key.since.value());
  out->PutSigned(key.at.step);
  out->PutSigned(key.at.call);
  out->PutSigned(key.at.part);
  out->PutSigned(key.source.value());
  if (key.is_pair()) {
    out->PutSigned(key.destination.value());
    out->PutSigned(key.tag);
  }
  out->PutVarint(key.path.size());
  for (const InstanceKey::Request& request : key.path) {
    out->PutSigned(request.step);
    out->PutSigned(request.number);
  }
}

InstanceKey DecodeInstanceKey(ByteReader* in) {
  const auto number = [in](int64_t minimum, int64_t maximum) {
    const int64_t value = in->GetSigned();
    if (value < minimum || value > maximum) in->Fail();
    return in->ok() ? value : 0;
  };
  constexpr int64_t kMax32 = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();
  InstanceKey key;
  key.group = GroupId(static_cast<int32_t>(number(0, kMax32)));
  key.since = Epoch(number(0, kMax64));
  key.at.step = number(0, kMaxCallNumber - 1);
  key.at.call = number(0, kMaxCallNumber - 1);
  key.at.part = static_cast<int32_t>(number(0, kMax32));
  key.source = GroupRank(static_cast<int32_t>(number(-1, kMax32)));
  if (key.is_pair()) {
    key.destination = GroupRank(static_cast<int32_t>(number(0, kMax32)));
    key.tag = number(std::numeric_limits<int64_t>::min(), kMax64);
  }
  const size_t order = in->GetCount();
  if (order > kMaxGradientOrder) in->Fail();
  for (size_t i = 0; i < order && in->ok(); ++i) {
    const int64_t step = number(0, kMaxCallNumber - 1);
    key.path.push_back({step, number(0, kMaxCallNumber - 1)});
  }
  return in->ok() ? key : InstanceKey();
}

namespace {

std::string DimsText(const std::vector<int64_t>& dims) {
  std::vector<std::string> texts;
  for (const int64_t dim : dims) {
    texts.push_back(dim == Descriptor::kRowsDiffer ? "*" : absl::StrCat(dim));
  }
  return absl::StrCat("[", absl::StrJoin(texts, ","), "]");
}

// Errors hold at most 4 KiB: of many members the first are enough.
std::string RowsText(const std::vector<int64_t>& rows) {
  if (rows.size() == 1) return absl::StrCat(rows[0], rows[0] == 1 ? " row" : " rows");
  constexpr size_t kShown = 16;
  const auto shown = absl::MakeConstSpan(rows).subspan(0, kShown);
  return absl::StrCat("[", absl::StrJoin(shown, ","), rows.size() > kShown ? ",..." : "", "] rows");
}

}  // namespace

std::string Descriptor::ToString() const {
  std::string text(CollectiveKindName(kind));
  if (reduction != Reduction::kNone) absl::StrAppend(&text, " ", ReductionName(reduction));
  if (root.value() >= 0) absl::StrAppend(&text, " root=", root.value());
  if (dtype != DType::kUnspecified) {
    absl::StrAppend(&text, " ", DTypeName(dtype), DimsText(dims));
  }
  if (!sends.empty()) absl::StrAppend(&text, " sends ", RowsText(sends));
  if (!receives.empty()) absl::StrAppend(&text, " receives ", RowsText(receives));
  if (runtime_counts) absl::StrAppend(&text, " with run-time counts");
  return text;
}

absl::optional<int64_t> Descriptor::RowsOf(const std::vector<int64_t>& rows,
                                           GroupRank member) const {
  if (!rows.empty()) return rows.size() == 1 ? rows[0] : rows[static_cast<size_t>(member.value())];
  if (RowsDiffer()) return absl::nullopt;
  return dims.empty() ? 1 : dims[0];
}

namespace {

bool Contradict(absl::optional<int64_t> one, absl::optional<int64_t> other) {
  return one.has_value() && other.has_value() && *one != *other;
}

// Of all pieces that a member gives, or gets.
struct Side {
  std::vector<int64_t> Descriptor::*list;
  absl::optional<int64_t> (Descriptor::*rows_of)(GroupRank member) const;
  Pieces CollectiveFacts::*other_end;  // how many these pieces are there
  const char* verb;
  const char* preposition;
};
constexpr Side kSends = {&Descriptor::sends, &Descriptor::SendsTo, &CollectiveFacts::out, "sends",
                         "to"};
constexpr Side kReceives = {&Descriptor::receives, &Descriptor::ReceivesFrom, &CollectiveFacts::in,
                            "receives", "from"};

absl::optional<int64_t> RowsOf(const Descriptor& what, const Side& side, GroupRank peer) {
  return (what.*side.rows_of)(peer);
}
bool SaysAny(const Descriptor& what, const Side& side) {
  return RowsOf(what, side, GroupRank(0)).has_value();
}

// "sends 1 row to member 2"
std::string PieceText(const Descriptor& what, const Side& side, GroupRank peer) {
  const int64_t rows = *RowsOf(what, side, peer);
  return absl::StrCat(side.verb, " ", rows, rows == 1 ? " row " : " rows ", side.preposition,
                      " member ", peer.value());
}

// The first member of whose piece the two say different rows, where they may not: what a member
// puts in once has the same rows for all that get it, and what it gets once from all that give it.
// Of a member, too, that says nothing itself, because it is absent.
absl::optional<GroupRank> FirstUnequal(const Descriptor& one, const Descriptor& other,
                                       const Side& side) {
  if (OfEach(FactsOf(one.kind).*side.other_end)) return absl::nullopt;
  const std::vector<int64_t>& of_one = one.*side.list;
  const std::vector<int64_t>& of_other = other.*side.list;
  if (one.RowsDiffer() && other.RowsDiffer() && of_one == of_other) return absl::nullopt;
  const size_t members = std::max({of_one.size(), of_other.size(), size_t{1}});
  for (size_t m = 0; m < members; ++m) {
    const GroupRank peer(static_cast<int32_t>(m));
    if (Contradict(RowsOf(one, side, peer), RowsOf(other, side, peer))) return peer;
  }
  return absl::nullopt;
}

}  // namespace

absl::optional<Difference> FirstDifference(GroupRank member, const Descriptor& expected,
                                           GroupRank other, const Descriptor& got) {
  const Descriptor& e = expected;
  const Descriptor& g = got;
  const auto name = [](absl::string_view text) { return std::string(text.data(), text.size()); };
  if (e.kind != g.kind) {
    return Difference{"op", name(CollectiveKindName(e.kind)), name(CollectiveKindName(g.kind))};
  }
  if (e.reduction != g.reduction) {
    return Difference{"reduction", name(ReductionName(e.reduction)),
                      name(ReductionName(g.reduction))};
  }
  if (e.root != g.root) {
    return Difference{"root", absl::StrCat(e.root.value()), absl::StrCat(g.root.value())};
  }
  if (e.dtype != g.dtype) {
    return Difference{"dtype", name(DTypeName(e.dtype)), name(DTypeName(g.dtype))};
  }
  const bool rows_differ = e.RowsDiffer() || g.RowsDiffer();
  const size_t skipped = rows_differ ? 1 : 0;  // dimension 0
  if (e.dims.size() != g.dims.size() ||
      !std::equal(e.dims.begin() + skipped, e.dims.end(), g.dims.begin() + skipped)) {
    return Difference{"shape", DimsText(e.dims), DimsText(g.dims)};
  }
  if (e.runtime_counts != g.runtime_counts) {
    const auto counts = [](const Descriptor& d) {
      return std::string(d.runtime_counts ? "known at run time" : "fixed");
    };
    return Difference{"counts", counts(e), counts(g)};
  }
  if (!rows_differ) return absl::nullopt;
  const auto pieces = [&](const Side& e_side, GroupRank e_peer, const Side& g_side,
                          GroupRank g_peer) {
    return Difference{"counts", PieceText(e, e_side, e_peer), PieceText(g, g_side, g_peer)};
  };
  if (Contradict(e.SendsTo(other), g.ReceivesFrom(member))) {
    return pieces(kSends, other, kReceives, member);
  }
  if (Contradict(e.ReceivesFrom(other), g.SendsTo(member))) {
    return pieces(kReceives, other, kSends, member);
  }
  for (const Side* side : {&kReceives, &kSends}) {
    const absl::optional<GroupRank> peer = FirstUnequal(e, g, *side);
    if (peer.has_value()) return pieces(*side, *peer, *side, *peer);
  }
  return absl::nullopt;
}

RowsCheck::RowsCheck(GroupRank member, const Descriptor& asked)
    : member_(member),
      asked_(asked),
      compares_sends_(SaysAny(asked, kSends)),
      compares_receives_(SaysAny(asked, kReceives)),
      is_silent_(!compares_sends_ && !compares_receives_) {}

void RowsCheck::Expect(const Descriptor& said) const {
  for (const std::vector<int64_t>* list : {&said.sends, &said.receives}) {
    if (list->size() > 1) __builtin_prefetch(&(*list)[static_cast<size_t>(member_.value())]);
  }
}

bool RowsCheck::Contradicts(GroupRank other, const Descriptor& said) {
  if (Contradict(said.SendsTo(member_), asked_.ReceivesFrom(other)) ||
      Contradict(said.ReceivesFrom(member_), asked_.SendsTo(other))) {
    return true;
  }
  const auto is_unequal = [&](const Side& side, bool* compares) {
    if (!*compares || !SaysAny(said, side)) return false;
    *compares = false;
    return FirstUnequal(said, asked_, side).has_value();
  };
  return is_unequal(kReceives, &compares_receives_) || is_unequal(kSends, &compares_sends_);
}

}  // namespace chorus
