#include "core/ops/specialize.h"

#include <string>
#include <tuple>
#include <utility>

#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/utf8.h"
#include "core/ops/op.h"
#include "core/ops/registry.h"

namespace chorus {
namespace {

constexpr size_t kMaxSymbols = 16;

absl::Status Bad(absl::string_view what, absl::string_view expected, absl::string_view got) {
  return Malformed(absl::StrCat(what, ": expected ", expected, ", got ", got));
}

// The number that a rule is about; null: there is none such.
const int64_t* Find(const SizeRule& rule, const Graph& graph) {
  if (rule.node < 0 || static_cast<size_t>(rule.node) >= graph.nodes.size()) return nullptr;
  const Node& node = graph.nodes[rule.node];
  const auto within = [](int32_t i, size_t size) {
    return i >= 0 && static_cast<size_t>(i) < size;
  };
  const size_t element = static_cast<size_t>(rule.element);
  switch (rule.field) {
    case SizeRule::Field::kAttribute: {
      if (!within(rule.attribute, node.attributes.size())) return nullptr;
      const AttributeValue& value = node.attributes[static_cast<size_t>(rule.attribute)].value;
      if (const int64_t* number = absl::get_if<int64_t>(&value)) {
        return rule.element == 0 ? number : nullptr;
      }
      const auto* list = absl::get_if<std::vector<int64_t>>(&value);
      return list != nullptr && within(rule.element, list->size()) ? &(*list)[element] : nullptr;
    }
    case SizeRule::Field::kCount: {
      if (rule.attribute != 0 || !node.collective.has_value()) return nullptr;
      const std::vector<int64_t>& counts = node.collective->counts;
      return within(rule.element, counts.size()) ? &counts[element] : nullptr;
    }
    case SizeRule::Field::kRuntimeCountMaximum:
      if (rule.attribute != 0 || rule.element != 0 || !node.collective.has_value()) return nullptr;
      return &node.collective->runtime_count_maximum;
  }
  return nullptr;
}

// What the rule gives. False: out of bounds. Its numbers are a client's: nothing may overflow.
bool Evaluate(const SizeRule& rule, int64_t size, int64_t* result) {
  const absl::int128 value =
      absl::int128(rule.scale) * absl::int128(size) + absl::int128(rule.offset);
  if (value > absl::int128(kMaxValueBytes) || value < -absl::int128(kMaxValueBytes)) return false;
  *result = static_cast<int64_t>(value);
  return true;
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> CheckSymbols(const Graph& graph) {
  std::vector<int64_t> maxima;
  for (size_t i = 0; i < graph.inputs.size(); ++i) {
    for (const Dim& dim : graph.inputs[i].type.dims) {
      if (!dim.is_symbolic()) continue;
      const std::string what = absl::StrCat("input ", i, ": symbol ", dim.symbol);
      const size_t symbol = static_cast<size_t>(dim.symbol);
      if (symbol > maxima.size() || symbol >= kMaxSymbols) {
        return Bad(what, absl::StrCat("symbols numbered as they come, ", kMaxSymbols, " at most"),
                   absl::StrCat(dim.symbol, " after ", maxima.size()));
      }
      if (dim.size < 1 || dim.size > kMaxValueBytes) {
        return Bad(absl::StrCat(what, ": maximum"), absl::StrCat("from 1 to ", kMaxValueBytes),
                   absl::StrCat(dim.size));
      }
      if (symbol == maxima.size()) maxima.push_back(dim.size);
      if (maxima[symbol] != dim.size) {
        return Bad(absl::StrCat(what, ": maximum"), absl::StrCat(maxima[symbol], ", as before"),
                   absl::StrCat(dim.size));
      }
    }
  }
  const auto place_of = [](const SizeRule& rule) {
    return std::make_tuple(rule.node, rule.field, rule.attribute, rule.element);
  };
  for (size_t r = 0; r < graph.sizes.size(); ++r) {
    const SizeRule& rule = graph.sizes[r];
    const std::string what = absl::StrCat("size rule ", r);
    if (r > 0 && !(place_of(graph.sizes[r - 1]) < place_of(rule))) {
      return Bad(what, "rules in the order of their fields, each once", "another order");
    }
    if (rule.symbol < 0 || static_cast<size_t>(rule.symbol) >= maxima.size()) {
      return Bad(absl::StrCat(what, ": symbol"), absl::StrCat("one of ", maxima.size()),
                 absl::StrCat(rule.symbol));
    }
    const int64_t* const number = Find(rule, graph);
    if (number == nullptr) {
      return Bad(what, "an integer of a node",
                 absl::StrCat("field ", static_cast<int>(rule.field), ", number ", rule.attribute,
                              ", element ", rule.element, " of node ", rule.node.value()));
    }
    int64_t at_maximum = 0;
    const bool fits =
        rule.scale != 0 && Evaluate(rule, maxima[static_cast<size_t>(rule.symbol)], &at_maximum);
    if (!fits || at_maximum != *number) {
      return Bad(what,
                 absl::StrCat("a rule that gives the ", *number, " in the graph at size ",
                              maxima[static_cast<size_t>(rule.symbol)]),
                 absl::StrCat(rule.scale, " * size + ", rule.offset));
    }
  }
  return maxima;
}

absl::StatusOr<Graph> Specialize(const Graph& graph, absl::Span<const int64_t> sizes) {
  Graph result = graph;
  result.sizes.clear();
  for (size_t i = 0; i < result.inputs.size(); ++i) {
    for (Dim& dim : result.inputs[i].type.dims) {
      if (!dim.is_symbolic()) continue;
      const int64_t size = sizes[static_cast<size_t>(dim.symbol)];
      if (size < 1 || size > dim.size) {
        return BadType(absl::StrCat("input ", i, ": expected ", graph.inputs[i].type.ToString(),
                                    ", got size ", size));
      }
      dim = Dim(size);
    }
  }
  for (const SizeRule& rule : graph.sizes) {
    int64_t* const number = const_cast<int64_t*>(Find(rule, result));  // `result` is not const
    if (!Evaluate(rule, sizes[static_cast<size_t>(rule.symbol)], number)) {
      return BadType(absl::StrCat("node ", rule.node.value(), ": ", rule.scale, " * ",
                                  sizes[static_cast<size_t>(rule.symbol)], " + ", rule.offset,
                                  " is out of bounds"));
    }
  }
  std::vector<const TensorType*> types;
  types.reserve(static_cast<size_t>(result.num_values()));
  for (const GraphInput& input : result.inputs) types.push_back(&input.type);
  for (size_t n = 0; n < result.nodes.size(); ++n) {
    Node& node = result.nodes[n];
    std::vector<const TensorType*> inputs;
    for (const ValueIndex v : node.inputs) inputs.push_back(types[static_cast<size_t>(v)]);
    NodeView view = ViewOf(node, inputs);
    if (node.collective.has_value()) {
      view.group_size = result.group_slots[static_cast<size_t>(node.collective->group_slot)].size;
    }
    absl::StatusOr<std::vector<TensorType>> outputs = InferTypes(view);
    if (!outputs.ok() || outputs->size() != node.outputs.size()) {
      Error error = ErrorOf(outputs.ok() ? BadType("another number of results") : outputs.status());
      error.op = Printable(node.op);
      error.source = OneLine(node.source);
      error.message = absl::StrCat("node ", n, " (", error.op, " at ", error.source,
                                   ") cannot be of these sizes: ", error.message);
      return ToStatus(error);
    }
    node.outputs = *std::move(outputs);
    for (const TensorType& type : node.outputs) types.push_back(&type);
  }
  return result;
}

}  // namespace chorus
