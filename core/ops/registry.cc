#include "core/ops/registry.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/op_list.h"

namespace chorus {
namespace {

#define CHORUS_FAMILY(name) name##Ops,
constexpr absl::Span<const OpDef* const> (*kFamilies[])() = {CHORUS_OPS(CHORUS_FAMILY)};
#undef CHORUS_FAMILY

struct Registry {
  Registry() {
    for (const auto family : kFamilies) {
      for (const OpDef* def : family()) {
        all.push_back(def);
        by_name.emplace(def->name, def);
      }
    }
    std::sort(all.begin(), all.end(),
              [](const OpDef* a, const OpDef* b) { return a->name < b->name; });
  }
  std::vector<const OpDef*> all;
  absl::flat_hash_map<absl::string_view, const OpDef*> by_name;
};

const Registry& TheRegistry() {
  static const Registry* const registry = new Registry();
  return *registry;
}

absl::string_view KindText(AttributeSpec::Kind kind) {
  switch (kind) {
    case AttributeSpec::Kind::kInt:
      return "an integer";
    case AttributeSpec::Kind::kInts:
      return "a list of integers";
    case AttributeSpec::Kind::kString:
      return "a text";
    case AttributeSpec::Kind::kNumber:
      return "a number";
  }
  return "";
}

bool HasKind(const AttributeValue& value, AttributeSpec::Kind kind) {
  switch (kind) {
    case AttributeSpec::Kind::kInt:
      return absl::holds_alternative<int64_t>(value);
    case AttributeSpec::Kind::kInts:
      return absl::holds_alternative<std::vector<int64_t>>(value);
    case AttributeSpec::Kind::kString:
      return absl::holds_alternative<std::string>(value);
    case AttributeSpec::Kind::kNumber:
      return absl::holds_alternative<int64_t>(value) || absl::holds_alternative<double>(value);
  }
  return false;
}

absl::Status CheckAttributes(const OpDef& def, const NodeView& node) {
  for (size_t i = 0; i < node.attributes.size(); ++i) {
    const Attribute& attribute = node.attributes[i];
    if (i > 0 && !(node.attributes[i - 1].name < attribute.name)) {
      return ShapeError(node, "attributes sorted by name, no name twice",
                        absl::StrCat("'", Printable(attribute.name), "' after '",
                                     Printable(node.attributes[i - 1].name), "'"));
    }
    const auto spec =
        std::find_if(def.attributes.begin(), def.attributes.end(),
                     [&](const AttributeSpec& s) { return s.name == attribute.name; });
    if (spec == def.attributes.end()) {
      std::string names;
      for (const AttributeSpec& s : def.attributes) absl::StrAppend(&names, " '", s.name, "'");
      return ShapeError(node,
                        names.empty() ? "no attributes" : absl::StrCat("attributes among", names),
                        absl::StrCat("'", Printable(attribute.name), "'"));
    }
    if (!HasKind(attribute.value, spec->kind)) {
      return ShapeError(node, absl::StrCat(KindText(spec->kind), " as '", spec->name, "'"),
                        "a value of another kind");
    }
  }
  for (const AttributeSpec& spec : def.attributes) {
    if (spec.required && FindAttribute(node.attributes, spec.name) == nullptr) {
      return ShapeError(node, absl::StrCat(KindText(spec.kind), " as '", spec.name, "'"), "none");
    }
  }
  return absl::OkStatus();
}

// Of one node; with kMaxValueBytes it keeps sums of sizes over inputs within 64 bits.
constexpr size_t kMaxInputs = size_t{1} << 20;

// Where all pieces come from the root, members off it put nothing in.
bool PutsNothingIn(const Collective& c) { return !AnyOn(FactsOf(c.kind).in, c.rank == c.root); }

// x, `sends` and, as the caller likes, `receives`, as far as this member has them.
absl::Status CheckRuntimeArity(const NodeView& node) {
  const Collective& c = *node.collective;
  const int factors = c.reduction == Reduction::kPremulSum ? 1 : 0;
  const int least = (PutsNothingIn(c) ? 0 : 2) + factors;
  const int most = least + (NumRuntimeReceives(c, node.group_size) > 0 ? 1 : 0);
  if (node.num_inputs() >= least && node.num_inputs() <= most) return absl::OkStatus();
  return ShapeError(node,
                    absl::StrCat(least, most > least ? absl::StrCat(" to ", most) : "",
                                 " inputs with counts at run time"),
                    absl::StrCat(node.num_inputs()));
}

absl::Status CheckArity(const OpDef& def, const NodeView& node) {
  if (node.inputs.size() > kMaxInputs) {
    return ShapeError(node, absl::StrCat("at most ", kMaxInputs, " inputs"),
                      absl::StrCat(node.inputs.size()));
  }
  if (node.collective != nullptr && HasRuntimeCounts(*node.collective)) {
    return CheckRuntimeArity(node);
  }
  const int factors = node.collective == nullptr
                          ? 0
                          : node.num_inputs() - NumPieces(*node.collective, node.num_inputs());
  const int count = node.num_inputs() - factors;
  if (count >= def.min_inputs && (def.max_inputs < 0 || count <= def.max_inputs)) {
    return absl::OkStatus();
  }
  std::string expected;
  if (def.max_inputs < 0) {
    expected = absl::StrCat("at least ", def.min_inputs);
  } else if (def.min_inputs == def.max_inputs) {
    expected = absl::StrCat(def.min_inputs);
  } else {
    expected = absl::StrCat(def.min_inputs, " to ", def.max_inputs);
  }
  absl::StrAppend(&expected, expected == "1" ? " input" : " inputs",
                  factors > 0 ? " and a factor" : "");
  return ShapeError(node, expected, absl::StrCat(node.num_inputs()));
}

absl::Status CheckRank(const NodeView& node, absl::string_view what, GroupRank rank) {
  if (rank.value() >= 0 && rank.value() < node.group_size) return absl::OkStatus();
  return ShapeError(node, absl::StrCat(what, " within the group of ", node.group_size),
                    absl::StrCat(rank.value()));
}

// Whose rows they are is the shape rule's business.
absl::Status CheckCounts(const OpDef& def, const NodeView& node) {
  const std::vector<int64_t>& counts = node.collective->counts;
  if (counts.empty()) return absl::OkStatus();
  if (def.counts_per_member == 0) {
    return ShapeError(node, "no counts", absl::StrCat(counts.size()));
  }
  const int64_t wanted = int64_t{def.counts_per_member} * node.group_size;
  if (static_cast<int64_t>(counts.size()) != wanted) {
    return ShapeError(node,
                      absl::StrCat(def.counts_per_member, " counts for each of ", node.group_size,
                                   " members, or none"),
                      absl::StrCat(counts.size()));
  }
  int64_t sum = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (i % static_cast<size_t>(node.group_size) == 0) sum = 0;
    // Compared so that nothing overflows.
    if (counts[i] < 0 || counts[i] > kMaxValueBytes - sum) {
      return ShapeError(node, absl::StrCat("counts of 0 or more, ", kMaxValueBytes, " in all"),
                        absl::StrCat(counts[i], " as count ", i));
    }
    sum += counts[i];
  }
  return absl::OkStatus();
}

absl::Status CheckRuntimeForm(const OpDef& def, const NodeView& node) {
  const Collective& c = *node.collective;
  if (c.runtime_counts_input == -1) {
    if (c.runtime_count_maximum == 0) return absl::OkStatus();
    return ShapeError(node, "no maximum of counts without counts at run time",
                      absl::StrCat(c.runtime_count_maximum));
  }
  if (!def.one_input && !def.one_output) {
    return ShapeError(node, "no counts at run time, which are for pieces in one tensor",
                      absl::StrCat("input ", c.runtime_counts_input));
  }
  const int x = PutsNothingIn(c) ? 0 : 1;
  if (c.runtime_counts_input != x) {
    return ShapeError(node, absl::StrCat("counts at run time from input ", x, " on"),
                      absl::StrCat("from input ", c.runtime_counts_input));
  }
  if (c.runtime_count_maximum < 0 || c.runtime_count_maximum > kMaxValueBytes) {
    return ShapeError(node, absl::StrCat("from 0 to ", kMaxValueBytes, " rows as the output's"),
                      absl::StrCat(c.runtime_count_maximum));
  }
  if (c.counts.empty()) return absl::OkStatus();
  return ShapeError(node, "counts either in the collective or at run time", "both");
}

absl::Status CheckCollective(const OpDef& def, const NodeView& node) {
  if (def.effect != Effect::kCollective) {
    if (node.collective == nullptr) return absl::OkStatus();
    return ShapeError(node, "no collective: it is a local op", "one");
  }
  if (node.collective == nullptr) return ShapeError(node, "a collective", "none");
  const Collective& c = *node.collective;
  if (c.kind != def.kind) {
    return ShapeError(node, absl::StrCat("collective kind ", CollectiveKindName(def.kind)),
                      CollectiveKindName(c.kind));
  }
  CHORUS_RETURN_IF_ERROR(CheckRank(node, "a rank", c.rank));
  if (HasRoot(c.kind)) {
    CHORUS_RETURN_IF_ERROR(CheckRank(node, "a root", c.root));
  } else if (c.root.value() != -1) {
    return ShapeError(node, "no root", absl::StrCat("root ", c.root.value()));
  }
  if (HasPeer(c.kind)) {
    CHORUS_RETURN_IF_ERROR(CheckRank(node, "a peer", c.peer));
    if (c.peer == c.rank) {
      return ShapeError(node, "a peer other than the rank itself", absl::StrCat(c.peer.value()));
    }
    if (c.tag < 0) return ShapeError(node, "a tag of 0 or more", absl::StrCat(c.tag));
  } else if (c.peer.value() != -1 || c.tag != 0) {
    return ShapeError(node, "neither peer nor tag",
                      absl::StrCat("peer ", c.peer.value(), ", tag ", c.tag));
  }
  if (IsReducing(c.kind)) {
    if (c.reduction == Reduction::kNone) return ShapeError(node, "a reduction", "none");
  } else if (c.reduction != Reduction::kNone) {
    return ShapeError(node, "no reduction", ReductionName(c.reduction));
  }
  CHORUS_RETURN_IF_ERROR(CheckRuntimeForm(def, node));
  return CheckCounts(def, node);
}

// What a reduction takes; the factor of PREMUL_SUM, and the view without it.
absl::Status CheckReduction(NodeView* node) {
  const Collective& c = *node->collective;
  const TensorType& type = node->input(0);
  const bool floating = IsFloating(type.dtype);
  switch (c.reduction) {
    case Reduction::kAvg:
      if (!floating) return ShapeError(*node, "floating point for AVG", type.ToString());
      return absl::OkStatus();
    case Reduction::kBand:
    case Reduction::kBor:
    case Reduction::kBxor:
      if (!floating) return absl::OkStatus();
      return ShapeError(*node, absl::StrCat("integers or bool for ", ReductionName(c.reduction)),
                        type.ToString());
    case Reduction::kPremulSum: {
      if (!floating) return ShapeError(*node, "floating point for PREMUL_SUM", type.ToString());
      const TensorType factor(FactorType(type.dtype), {});
      const TensorType& last = *node->inputs.back();
      if (last != factor) {
        return ShapeError(
            *node, absl::StrCat("the factor of PREMUL_SUM as the last input, ", factor.ToString()),
            last.ToString());
      }
      node->inputs.remove_suffix(1);
      return absl::OkStatus();
    }
    default:
      return absl::OkStatus();
  }
}

// Of every op that takes counts at run time; leaves x alone in the view.
absl::StatusOr<std::vector<TensorType>> InferWithRuntimeCounts(NodeView* node) {
  const Collective& c = *node->collective;
  const int32_t receives = NumRuntimeReceives(c, node->group_size);
  for (int i = c.runtime_counts_input; i < node->num_inputs(); ++i) {
    const bool sends = i == c.runtime_counts_input && !PutsNothingIn(c);
    const TensorType counts(DType::kI64, {sends ? NumRuntimeSends(c, node->group_size) : receives});
    if (node->input(i) != counts) {
      return ShapeError(*node,
                        absl::StrCat(counts.ToString(), " as input ", i, ", the rows ",
                                     sends ? "that are sent" : "that are received"),
                        node->input(i).ToString());
    }
  }
  TensorType y;
  if (PutsNothingIn(c)) {
    CHORUS_ASSIGN_OR_RETURN(y, TypeOfAttributes(*node));
  } else {
    if (!node->attributes.empty()) {
      return ShapeError(*node, "no attributes on the root", "'dims' or 'dtype'");
    }
    y = node->input(0);
  }
  node->inputs = node->inputs.subspan(0, static_cast<size_t>(c.runtime_counts_input));
  if (y.dims.empty()) {
    return ShapeError(*node, "a tensor with rows, which has at least one dimension", y.ToString());
  }
  if (PutsNothingIn(c) && y.dims[0].size != c.runtime_count_maximum) {
    return ShapeError(*node,
                      absl::StrCat("dims with the maximum of ", c.runtime_count_maximum, " rows"),
                      y.ToString());
  }
  if (receives == 0) return std::vector<TensorType>();
  y.dims[0] = Dim(c.runtime_count_maximum);
  return std::vector<TensorType>{std::move(y), TensorType(DType::kI64, {receives})};
}

void AppendExtras(const NodeView& node, std::vector<TensorType>* outputs) {
  switch (ExtrasOf(*node.collective, node.input(0).dtype)) {
    case Extras::kNone:
      return;
    case Extras::kHolders:
      for (const TensorType* input : node.inputs) {
        outputs->emplace_back(DType::kF32, input->dims);
      }
      return;
    case Extras::kFactors:
      if (!outputs->empty())
        outputs->insert(outputs->end(), node.group_size, TensorType((*outputs)[0]));
      return;
  }
}

absl::Status CheckType(const OpDef& def, const NodeView& node, absl::string_view what, int index,
                       const TensorType& type) {
  const absl::Status status = type.Validate(kMaxValueBytes);
  if (!status.ok()) {
    const Error invalid = ErrorOf(status);
    Error error = ErrorOf(
        ShapeError(node, absl::StrCat("a valid type as ", what, " ", index), invalid.message));
    if (invalid.reason == Reason::kOutOfMemory) error.SetReason(invalid.reason);
    return ToStatus(error);
  }
  if (!type.is_static()) {
    return Unsupported(absl::StrCat(node.op, ": ", what, " ", index, " is ", type.ToString(),
                                    "; this build runs fixed dimensions only"));
  }
  if (!IsSupported(type.dtype)) {
    return Unsupported(absl::StrCat(node.op, ": ", what, " ", index, " is ", type.ToString(),
                                    "; this build computes with ", DTypeNames(kSupportedDTypes)));
  }
  if (!Contains(def.dtypes, type.dtype)) {
    return Unsupported(absl::StrCat(node.op, ": ", what, " ", index, " is ", type.ToString(),
                                    "; the op takes ", DTypeNames(def.dtypes)));
  }
  return absl::OkStatus();
}

}  // namespace

const OpDef* FindOp(absl::string_view name) {
  const auto& by_name = TheRegistry().by_name;
  const auto it = by_name.find(name);
  return it == by_name.end() ? nullptr : it->second;
}

absl::Span<const OpDef* const> AllOps() { return TheRegistry().all; }

absl::StatusOr<std::vector<TensorType>> InferTypes(const NodeView& given) {
  NodeView node = given;
  const OpDef* def = FindOp(node.op);
  if (def == nullptr) {
    return Unsupported(absl::StrCat("this build has no op '", Printable(node.op), "'"));
  }
  if (node.version != def->version) {
    return Unsupported(absl::StrCat(node.op, ": this build has version ", def->version,
                                    " of the op, not ", node.version));
  }
  CHORUS_RETURN_IF_ERROR(CheckAttributes(*def, node));
  CHORUS_RETURN_IF_ERROR(CheckCollective(*def, node));
  CHORUS_RETURN_IF_ERROR(CheckArity(*def, node));
  for (int i = 0; i < node.num_inputs(); ++i) {
    CHORUS_RETURN_IF_ERROR(CheckType(*def, node, "input", i, node.input(i)));
  }
  const bool reduces = IsReducing(def->kind);
  if (reduces) CHORUS_RETURN_IF_ERROR(CheckReduction(&node));
  const bool at_run_time = node.collective != nullptr && HasRuntimeCounts(*node.collective);
  CHORUS_ASSIGN_OR_RETURN(std::vector<TensorType> outputs,
                          at_run_time ? InferWithRuntimeCounts(&node) : def->infer_types(node));
  if (reduces) AppendExtras(node, &outputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    CHORUS_RETURN_IF_ERROR(CheckType(*def, node, "output", static_cast<int>(i), outputs[i]));
  }
  return outputs;
}

}  // namespace chorus
