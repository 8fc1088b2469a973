#include "client/internal/unify.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {
namespace {

absl::Status Differs(const Node& node, absl::string_view what, absl::string_view hint = "") {
  return BadType(absl::StrCat(
      node.op, " at ", node.source,
      ": a function of a batch whose size varies must be one function, but ", what, hint));
}

// The rule by which a number that is `a` at size `m` is `b` at size `n`. False: none is linear.
bool Fit(int64_t a, int64_t b, int64_t m, int64_t n, SizeRule* rule) {
  if ((a - b) % (m - n) != 0) return false;
  rule->scale = (a - b) / (m - n);
  rule->offset = a - rule->scale * m;
  return true;
}

// Doubles by their bits: -0 is another number than 0, and a NaN the one that it is.
bool Same(const Attribute& a, const Attribute& b) {
  const auto* number = absl::get_if<double>(&a.value);
  const auto* other = absl::get_if<double>(&b.value);
  if (number == nullptr || other == nullptr) return a == b;
  return a.name == b.name && std::memcmp(number, other, sizeof(*number)) == 0;
}

class Unifier {
 public:
  Unifier(const Graph& most, const Graph& less, int64_t m, int64_t n)
      : most_(most), less_(less), m_(m), n_(n), graph_(most) {}

  absl::StatusOr<Graph> Run() {
    for (size_t i = 0; i < most_.nodes.size(); ++i) {
      if (i >= less_.nodes.size()) {
        return Differs(most_.nodes[i], "with a smaller batch it has not this op");
      }
      CHORUS_RETURN_IF_ERROR(Compare(static_cast<int32_t>(i)));
    }
    if (less_.nodes.size() > most_.nodes.size()) {
      return Differs(less_.nodes[most_.nodes.size()], "with a larger batch it has not this op");
    }
    if (most_.inputs.size() != less_.inputs.size() || !(most_.outputs == less_.outputs) ||
        !(most_.group_slots == less_.group_slots)) {
      return BadType(
          "a function of a batch whose size varies must be one function, but its inputs, results "
          "or "
          "groups depend on the size");
    }
    return std::move(graph_);
  }

 private:
  absl::Status Compare(int32_t n) {
    const Node& a = most_.nodes[static_cast<size_t>(n)];
    const Node& b = less_.nodes[static_cast<size_t>(n)];
    if (a.op != b.op || a.version != b.version || a.source != b.source ||
        a.attributes.size() != b.attributes.size()) {
      return Differs(
          a, absl::StrCat("with a smaller batch it has ", b.op, " at ", b.source, " there"));
    }
    if (a.inputs != b.inputs || a.device_slot != b.device_slot ||
        a.outputs.size() != b.outputs.size()) {
      return Differs(a, "its operands depend on the size");
    }
    for (size_t i = 0; i < a.attributes.size(); ++i) {
      CHORUS_RETURN_IF_ERROR(CompareAttribute(n, static_cast<int32_t>(i)));
    }
    if (a.collective.has_value() != b.collective.has_value()) return Differs(a, "it communicates");
    return a.collective.has_value() ? CompareCollective(n) : absl::OkStatus();
  }

  absl::Status CompareAttribute(int32_t n, int32_t i) {
    const Node& node = most_.nodes[static_cast<size_t>(n)];
    const Attribute& a = node.attributes[static_cast<size_t>(i)];
    const Attribute& b = less_.nodes[static_cast<size_t>(n)].attributes[static_cast<size_t>(i)];
    if (Same(a, b)) return absl::OkStatus();
    SizeRule rule;
    rule.node = n;
    rule.attribute = i;
    const bool is_one = a.name == b.name;
    const auto* number = absl::get_if<int64_t>(&a.value);
    const auto* other = absl::get_if<int64_t>(&b.value);
    if (is_one && number != nullptr && other != nullptr) return Add(rule, *number, *other, a.name);
    const auto* list = absl::get_if<std::vector<int64_t>>(&a.value);
    const auto* others = absl::get_if<std::vector<int64_t>>(&b.value);
    if (!is_one || list == nullptr || others == nullptr || list->size() != others->size()) {
      return Differs(node,
                     absl::StrCat("'", a.name,
                                  "' depends on the size in a way that is not"
                                  " linear"),
                     "; for a constant like 1 / batch use Mean");
    }
    for (size_t e = 0; e < list->size(); ++e) {
      if ((*list)[e] == (*others)[e]) continue;
      rule.element = static_cast<int32_t>(e);
      CHORUS_RETURN_IF_ERROR(Add(rule, (*list)[e], (*others)[e], a.name));
    }
    return absl::OkStatus();
  }

  absl::Status CompareCollective(int32_t n) {
    const Node& node = most_.nodes[static_cast<size_t>(n)];
    const Collective& a = *node.collective;
    Collective b = *less_.nodes[static_cast<size_t>(n)].collective;
    SizeRule rule;
    rule.node = n;
    if (a.counts.size() == b.counts.size()) {
      rule.field = SizeRule::Field::kCount;
      for (size_t e = 0; e < a.counts.size(); ++e) {
        if (a.counts[e] == b.counts[e]) continue;
        rule.element = static_cast<int32_t>(e);
        CHORUS_RETURN_IF_ERROR(Add(rule, a.counts[e], b.counts[e], "rows"));
      }
      b.counts = a.counts;
    }
    if (a.runtime_count_maximum != b.runtime_count_maximum) {
      rule.field = SizeRule::Field::kRuntimeCountMaximum;
      rule.element = 0;
      CHORUS_RETURN_IF_ERROR(
          Add(rule, a.runtime_count_maximum, b.runtime_count_maximum, "max_rows"));
      b.runtime_count_maximum = a.runtime_count_maximum;
    }
    return a == b ? absl::OkStatus() : Differs(node, "what it says to its group depends on it");
  }

  absl::Status Add(SizeRule rule, int64_t a, int64_t b, absl::string_view what) {
    if (!Fit(a, b, m_, n_, &rule)) {
      return Differs(most_.nodes[static_cast<size_t>(rule.node)],
                     absl::StrCat("'", what, "' is ", a, " at size ", m_, " and ", b, " at size ",
                                  n_, ", which is not linear"));
    }
    graph_.sizes.push_back(rule);
    return absl::OkStatus();
  }

  const Graph& most_;
  const Graph& less_;
  const int64_t m_;
  const int64_t n_;
  Graph graph_;
};

// Numbers that seemed linear between two sizes are so at the third.
absl::Status CheckRules(const Graph& unified, const Graph& graph, int64_t m, int64_t n) {
  CHORUS_ASSIGN_OR_RETURN(const Graph third, UnifyGraphs({unified, graph}, {m, n}, {}));
  for (size_t r = 0; r < std::max(third.sizes.size(), unified.sizes.size()); ++r) {
    if (r < third.sizes.size() && r < unified.sizes.size() && third.sizes[r] == unified.sizes[r]) {
      continue;
    }
    const SizeRule& rule = r < unified.sizes.size() ? unified.sizes[r] : third.sizes[r];
    return Differs(unified.nodes[static_cast<size_t>(rule.node)],
                   "a size in it depends on the batch in a way that is not linear");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Graph> UnifyGraphs(absl::Span<const Graph> graphs, absl::Span<const int64_t> sizes,
                                  absl::Span<const VaryingDim> varying) {
  Graph base = graphs[0];
  base.sizes.clear();
  Graph unified = base;
  if (graphs.size() > 1) {
    CHORUS_ASSIGN_OR_RETURN(unified, Unifier(base, graphs[1], sizes[0], sizes[1]).Run());
  }
  for (size_t i = 2; i < graphs.size(); ++i) {
    CHORUS_RETURN_IF_ERROR(CheckRules(unified, graphs[i], sizes[0], sizes[i]));
  }
  for (const VaryingDim& batch : varying) {
    Dim& dim =
        unified.inputs[static_cast<size_t>(batch.input)].type.dims[static_cast<size_t>(batch.dim)];
    dim = Dim::Symbol(0, sizes[0]);
  }
  return unified;
}

}  // namespace internal
}  // namespace chorus
