#include "tests/vectors/vector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace vectors {
namespace {

using Json = nlohmann::json;

constexpr char kSchema[] = "golden-collectives/1";
constexpr char kPhi[] = "y + y^2 + y^3";
constexpr int64_t kMaxWorld = 64;  // a daemon has no more devices

// --- What each op has ---------------------------------------------------------------------------

// How many tensors a rank gives or gets.
enum class Count {
  kOne,
  kAtMostOne,
  kAll,  // one for each rank
  kOneAtRoot,
  kAllAtRoot,
  kAny,  // as many on every rank
  kAnyAtRoot,
};

enum Attribute : unsigned {
  kReduction = 1,  // and `premul`, where the reduction has factors
  kSrc = 2,
  kDst = 4,
  kDim = 8,
  kRowSplits = 16,
  kPairSplits = 32,
  kSizes = 64,
  kBufferSize = 128,
};

struct OpFormat {
  Op op;
  const char* name;
  unsigned attributes;
  Count inputs;
  Count outputs;
};

const OpFormat kOps[] = {
    {Op::kBroadcast, "broadcast", kSrc, Count::kOne, Count::kOne},
    {Op::kReduce, "reduce", kReduction | kDst, Count::kOne, Count::kOneAtRoot},
    {Op::kAllReduce, "all_reduce", kReduction, Count::kOne, Count::kOne},
    {Op::kReduceScatter, "reduce_scatter", kReduction, Count::kAll, Count::kOne},
    {Op::kReduceScatterTensor, "reduce_scatter_tensor", kReduction | kRowSplits | kDim, Count::kOne,
     Count::kOne},
    {Op::kAllGather, "all_gather", 0, Count::kOne, Count::kAll},
    {Op::kAllGatherIntoTensor, "all_gather_into_tensor", kDim, Count::kOne, Count::kOne},
    {Op::kGather, "gather", kDst, Count::kOne, Count::kAllAtRoot},
    {Op::kScatter, "scatter", kSrc, Count::kAllAtRoot, Count::kOne},
    {Op::kAllToAll, "all_to_all", 0, Count::kAll, Count::kAll},
    {Op::kAllToAllSingle, "all_to_all_single", kPairSplits, Count::kOne, Count::kOne},
    {Op::kBroadcastCoalesced, "broadcast_coalesced", kSrc | kBufferSize, Count::kAnyAtRoot,
     Count::kAny},
    {Op::kReduceAddCoalesced, "reduce_add_coalesced", kDst | kBufferSize, Count::kAny,
     Count::kAnyAtRoot},
    {Op::kParallelScatter, "parallel_scatter", kSrc | kDim | kSizes, Count::kOneAtRoot,
     Count::kAtMostOne},
    {Op::kParallelGather, "parallel_gather", kDst | kDim, Count::kAtMostOne, Count::kOneAtRoot},
};

// --- Single values ------------------------------------------------------------------------------

// A value, short, for messages. Not what is in it: it may be nested deeper than any stack.
std::string Brief(const Json& json) {
  if (json.is_array()) return absl::StrCat("a list of ", json.size());
  if (json.is_object()) return absl::StrCat("an object of ", json.size());
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 40) text = absl::StrCat(text.substr(0, 37), "...");
  return text;
}

absl::Status Expected(absl::string_view where, absl::string_view what, const Json& got) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": expected ", what, ", got ", Brief(got)));
}

// `what` with its location in front.
absl::Status At(absl::string_view where, const absl::Status& what) {
  if (what.ok()) return what;
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", what.message()));
}

// The value of a key; null when there is none.
const Json* Find(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

absl::StatusOr<const Json*> Get(const Json& object, const char* key, absl::string_view where) {
  const Json* const value = Find(object, key);
  if (value == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": no \"", key, "\""));
  }
  return value;
}

absl::Status OnlyKeys(const Json& object, const std::vector<absl::string_view>& known,
                      absl::string_view where) {
  if (!object.is_object()) return Expected(where, "an object", object);
  for (const auto& item : object.items()) {
    if (std::find(known.begin(), known.end(), item.key()) == known.end()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": unknown key \"", item.key(), "\""));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ToInteger(const Json& json, int64_t least, int64_t most,
                                  absl::string_view where) {
  const bool fits = json.is_number_integer() &&
                    (!json.is_number_unsigned() ||
                     json.get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()}) &&
                    json.get<int64_t>() >= least && json.get<int64_t>() <= most;
  if (!fits) {
    return Expected(where, absl::StrCat("a whole number of ", least, " to ", most), json);
  }
  return json.get<int64_t>();
}

// Also "nan", "inf", "-inf" and whole numbers, as strings or not.
absl::StatusOr<double> ToDouble(const Json& json, absl::string_view where) {
  if (json.is_number()) return json.get<double>();
  double value = 0;
  if (json.is_string() && absl::SimpleAtod(json.get_ref<const std::string&>(), &value)) {
    return value;
  }
  return Expected(where, "a number", json);
}

absl::Status AppendElement(const Json& json, absl::string_view where, Array* array) {
  if (array->floating()) {
    CHORUS_ASSIGN_OR_RETURN(const double value, ToDouble(json, where));
    return At(where, AppendFloat(value, array));
  }
  int64_t value = 0;
  if (json.is_boolean() && array->dtype == DType::kBool) {
    value = json.get<bool>() ? 1 : 0;
  } else if (!json.is_string() || !absl::SimpleAtoi(json.get_ref<const std::string&>(), &value)) {
    CHORUS_ASSIGN_OR_RETURN(value, ToInteger(json, std::numeric_limits<int64_t>::min(),
                                             std::numeric_limits<int64_t>::max(), where));
  }
  return At(where, AppendInteger(value, array));
}

absl::StatusOr<DType> ToDType(const Json& json, absl::string_view where) {
  const DType dtype =
      json.is_string() ? DTypeFromName(json.get_ref<const std::string&>()) : DType::kUnspecified;
  if (dtype == DType::kComplex64 || dtype == DType::kComplex128) {
    return Expected(where, "a dtype that is not complex", json);
  }
  if (dtype == DType::kUnspecified) return Expected(where, "a dtype", json);
  return dtype;
}

absl::StatusOr<Array> ToArray(const Json& json, DType dtype, absl::string_view where) {
  CHORUS_RETURN_IF_ERROR(OnlyKeys(json, {"dtype", "shape", "data"}, where));
  Array array;
  array.dtype = dtype;
  if (const Json* const own = Find(json, "dtype")) {
    CHORUS_ASSIGN_OR_RETURN(array.dtype, ToDType(*own, absl::StrCat(where, ".dtype")));
  }
  CHORUS_ASSIGN_OR_RETURN(const Json* const shape, Get(json, "shape", where));
  CHORUS_ASSIGN_OR_RETURN(const Json* const data, Get(json, "data", where));
  if (!shape->is_array()) return Expected(absl::StrCat(where, ".shape"), "a list", *shape);
  if (!data->is_array()) return Expected(absl::StrCat(where, ".data"), "a list", *data);
  for (const Json& dim : *shape) {
    CHORUS_ASSIGN_OR_RETURN(const int64_t size,
                            ToInteger(dim, 0, int64_t{1} << 40, absl::StrCat(where, ".shape")));
    array.shape.push_back(size);
  }
  // Also shows that the number of elements does not overflow.
  const TensorType type(array.dtype, {array.shape.begin(), array.shape.end()});
  CHORUS_RETURN_IF_ERROR(At(where, type.Validate(int64_t{1} << 40)));
  if (array.size() != static_cast<int64_t>(data->size())) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", array.TypeText(), " with ",
                                                   data->size(), " elements in \"data\""));
  }
  for (size_t i = 0; i < data->size(); ++i) {
    CHORUS_RETURN_IF_ERROR(
        AppendElement((*data)[i], absl::StrCat(where, ".data[", i, "]"), &array));
  }
  return array;
}

// --- A vector -----------------------------------------------------------------------------------

class Parser {
 public:
  explicit Parser(const Json& json) : json_(json) {}

  absl::StatusOr<Vector> Parse() {
    CHORUS_RETURN_IF_ERROR(
        OnlyKeys(json_,
                 {"id", "op", "world", "group", "dtype", "attrs", "tags", "layout", "inputs",
                  "outputs", "requires_grad", "grad", "second", "exact", "scale"},
                 "vector"));
    CHORUS_ASSIGN_OR_RETURN(v_.id, Text(json_, "id"));
    CHORUS_RETURN_IF_ERROR(ParseOp());
    CHORUS_RETURN_IF_ERROR(ParseRanks());
    CHORUS_ASSIGN_OR_RETURN(const Json* const dtype, Get(json_, "dtype", "vector"));
    CHORUS_ASSIGN_OR_RETURN(v_.dtype, ToDType(*dtype, "dtype"));
    CHORUS_RETURN_IF_ERROR(ParseAttributes());
    CHORUS_RETURN_IF_ERROR(ParseTensors("inputs", format_->inputs, &v_.inputs));
    CHORUS_RETURN_IF_ERROR(ParseTensors("outputs", format_->outputs, &v_.outputs));
    CHORUS_RETURN_IF_ERROR(CheckDim());
    CHORUS_RETURN_IF_ERROR(ParseLayout());
    CHORUS_RETURN_IF_ERROR(ParseRequiresGrad());
    CHORUS_RETURN_IF_ERROR(ParseFirst());
    CHORUS_RETURN_IF_ERROR(ParseSecond());
    CHORUS_RETURN_IF_ERROR(ParseExact());
    CHORUS_RETURN_IF_ERROR(ParseScale());
    return std::move(v_);
  }

 private:
  static absl::StatusOr<std::string> Text(const Json& object, const char* key) {
    CHORUS_ASSIGN_OR_RETURN(const Json* const value, Get(object, key, "vector"));
    if (!value->is_string()) return Expected(key, "a text", *value);
    return value->get<std::string>();
  }

  // A list with an entry for each rank.
  absl::StatusOr<const Json*> PerRank(const Json& object, const char* key,
                                      absl::string_view where) const {
    CHORUS_ASSIGN_OR_RETURN(const Json* const list, Get(object, key, where));
    if (!list->is_array() || list->size() != v_.group.size()) {
      return Expected(key, absl::StrCat("a list for ", v_.group.size(), " ranks"), *list);
    }
    return list;
  }

  absl::Status ParseOp() {
    CHORUS_ASSIGN_OR_RETURN(const std::string name, Text(json_, "op"));
    for (const OpFormat& format : kOps) {
      if (name == format.name) format_ = &format;
    }
    if (format_ == nullptr) return absl::InvalidArgumentError(absl::StrCat("unknown op ", name));
    v_.op = format_->op;
    return absl::OkStatus();
  }

  absl::Status ParseRanks() {
    CHORUS_ASSIGN_OR_RETURN(const Json* const world, Get(json_, "world", "vector"));
    CHORUS_ASSIGN_OR_RETURN(const int64_t size, ToInteger(*world, 1, kMaxWorld, "world"));
    v_.world = static_cast<int>(size);
    const Json* const group = Find(json_, "group");
    if (group == nullptr) {
      v_.group.resize(static_cast<size_t>(size));
      std::iota(v_.group.begin(), v_.group.end(), 0);
      return absl::OkStatus();
    }
    if (v_.one_process()) return Expected("group", "none for an op of one process", *group);
    if (!group->is_array() || group->empty()) return Expected("group", "a list of ranks", *group);
    for (const Json& member : *group) {
      CHORUS_ASSIGN_OR_RETURN(const int64_t rank, ToInteger(member, 0, size - 1, "group"));
      if (std::count(v_.group.begin(), v_.group.end(), rank) != 0) {
        return Expected("group", "different ranks", *group);
      }
      v_.group.push_back(static_cast<int>(rank));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<int64_t>> Splits(const Json& json, absl::string_view where) const {
    if (!json.is_array() || json.size() != v_.group.size()) {
      return Expected(where, absl::StrCat("rows for ", v_.group.size(), " ranks"), json);
    }
    std::vector<int64_t> rows;
    for (const Json& count : json) {
      CHORUS_ASSIGN_OR_RETURN(const int64_t n, ToInteger(count, 0, int64_t{1} << 40, where));
      rows.push_back(n);
    }
    return rows;
  }

  absl::Status ParseReduction(const Json& attrs) {
    CHORUS_ASSIGN_OR_RETURN(const std::string name, Text(attrs, "reduction"));
    for (int r = 1; r <= static_cast<int>(Reduction::kBxor); ++r) {
      const auto reduction = static_cast<Reduction>(r);
      if (absl::AsciiStrToLower(ReductionName(reduction)) == name)
        v_.attributes.reduction = reduction;
    }
    if (v_.attributes.reduction == Reduction::kNone) {
      return absl::InvalidArgumentError(absl::StrCat("unknown reduction ", name));
    }
    if (v_.attributes.reduction != Reduction::kPremulSum) return absl::OkStatus();
    known_.push_back("premul");
    CHORUS_ASSIGN_OR_RETURN(const Json* const premul, PerRank(attrs, "premul", "attrs"));
    for (const Json& factor : *premul) {
      CHORUS_ASSIGN_OR_RETURN(const double value, ToDouble(factor, "premul"));
      v_.attributes.premul.push_back(value);
    }
    return absl::OkStatus();
  }

  absl::Status ParseRoot(const Json& attrs, const char* key) {
    known_.push_back(key);
    CHORUS_ASSIGN_OR_RETURN(const Json* const root, Get(attrs, key, "attrs"));
    if (v_.op >= Op::kParallelScatter && *root == "host") {
      v_.attributes.host = true;
      v_.attributes.root = 0;
      return absl::OkStatus();
    }
    CHORUS_ASSIGN_OR_RETURN(const int64_t rank, ToInteger(*root, 0, v_.size() - 1, key));
    v_.attributes.root = static_cast<int>(rank);
    return absl::OkStatus();
  }

  absl::Status ParseAttributes() {
    CHORUS_ASSIGN_OR_RETURN(const Json* const found, Get(json_, "attrs", "vector"));
    const Json& attrs = *found;
    if (!attrs.is_object()) return Expected("attrs", "an object", attrs);
    Attributes& out = v_.attributes;
    const unsigned has = format_->attributes;
    if (has & kReduction) {
      known_.push_back("reduction");
      CHORUS_RETURN_IF_ERROR(ParseReduction(attrs));
    }
    if (has & kSrc) CHORUS_RETURN_IF_ERROR(ParseRoot(attrs, "src"));
    if (has & kDst) CHORUS_RETURN_IF_ERROR(ParseRoot(attrs, "dst"));
    if (has & kDim) {
      known_.push_back("dim");
      CHORUS_ASSIGN_OR_RETURN(const Json* const dim, Get(attrs, "dim", "attrs"));
      CHORUS_ASSIGN_OR_RETURN(
          out.dim, ToInteger(*dim, -TensorType::kMaxRank, TensorType::kMaxRank - 1, "dim"));
    }
    if (has & (kRowSplits | kPairSplits)) {
      known_.push_back("splits");
      CHORUS_ASSIGN_OR_RETURN(const Json* const splits, PerRank(attrs, "splits", "attrs"));
      if (has & kRowSplits) {
        CHORUS_ASSIGN_OR_RETURN(std::vector<int64_t> rows, Splits(*splits, "splits"));
        out.splits.push_back(std::move(rows));
      } else {
        for (const Json& row : *splits) {
          CHORUS_ASSIGN_OR_RETURN(std::vector<int64_t> rows, Splits(row, "splits"));
          out.splits.push_back(std::move(rows));
        }
      }
    }
    if (has & kSizes) {
      known_.push_back("sizes");
      CHORUS_ASSIGN_OR_RETURN(const Json* const sizes, Get(attrs, "sizes", "attrs"));
      if (!sizes->is_null()) {
        CHORUS_ASSIGN_OR_RETURN(out.sizes, Splits(*sizes, "sizes"));
      }
    }
    if (has & kBufferSize) {
      known_.push_back("buffer_size");
      CHORUS_ASSIGN_OR_RETURN(const Json* const size, Get(attrs, "buffer_size", "attrs"));
      CHORUS_ASSIGN_OR_RETURN(out.buffer_size,
                              ToInteger(*size, 1, int64_t{1} << 40, "buffer_size"));
    }
    return OnlyKeys(attrs, known_, "attrs");
  }

  // Whether a rank may have `count` tensors.
  bool Allows(Count rule, int rank, size_t count) const {
    const bool root = rank == v_.attributes.root;
    switch (rule) {
      case Count::kOne:
        return count == 1;
      case Count::kAtMostOne:
        return count <= 1;
      case Count::kAll:
        return count == v_.group.size();
      case Count::kOneAtRoot:
        return count == (root ? 1 : 0);
      case Count::kAllAtRoot:
        return count == (root ? v_.group.size() : 0);
      case Count::kAnyAtRoot:
        return root || count == 0;
      case Count::kAny:
        return true;
    }
    return false;
  }

  absl::Status ParseTensors(const char* key, Count rule, std::vector<std::vector<Array>>* out) {
    CHORUS_ASSIGN_OR_RETURN(const Json* const ranks, PerRank(json_, key, "vector"));
    for (int r = 0; r < v_.size(); ++r) {
      const Json& list = (*ranks)[static_cast<size_t>(r)];
      const std::string where = absl::StrCat(key, "[", r, "]");
      if (!list.is_array()) return Expected(where, "a list of tensors", list);
      if (!Allows(rule, r, list.size())) {
        return absl::InvalidArgumentError(absl::StrCat(
            where, ": ", list.size(), " tensors are not what ", format_->name, " has"));
      }
      out->emplace_back();
      for (size_t i = 0; i < list.size(); ++i) {
        CHORUS_ASSIGN_OR_RETURN(Array array,
                                ToArray(list[i], v_.dtype, absl::StrCat(where, "[", i, "]")));
        out->back().push_back(std::move(array));
      }
    }
    if (rule == Count::kAny) {
      for (const std::vector<Array>& row : *out) {
        if (row.size() != out->front().size()) {
          return absl::InvalidArgumentError(
              absl::StrCat(key, ": expected as many tensors on every device"));
        }
      }
    }
    return absl::OkStatus();
  }

  // What rank r gives along `dim` must exist: the runner reads it.
  absl::Status CheckDim() const {
    int64_t dim = 0;
    if (format_->attributes & kDim) {
      dim = v_.attributes.dim;
    } else if (v_.op != Op::kAllToAllSingle) {
      return absl::OkStatus();
    }
    for (const std::vector<Array>& row : v_.inputs) {
      for (const Array& array : row) {
        const auto dims = static_cast<int64_t>(array.shape.size());
        if (dims == 0 && v_.op == Op::kParallelGather) continue;  // becomes [W]
        if (dim < -dims || dim >= dims) {
          return absl::InvalidArgumentError(
              absl::StrCat("dimension ", dim, " of ", array.TypeText()));
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status ParseLayout() {
    v_.x_layout.assign(v_.group.size(), Layout::kContiguous);
    v_.g_layout = v_.x_layout;
    const Json* const layout = Find(json_, "layout");
    if (layout == nullptr) return absl::OkStatus();
    CHORUS_RETURN_IF_ERROR(OnlyKeys(*layout, {"x", "g"}, "layout"));
    for (const char* const key : {"x", "g"}) {
      if (Find(*layout, key) == nullptr) continue;
      CHORUS_ASSIGN_OR_RETURN(const Json* const ranks, PerRank(*layout, key, "layout"));
      std::vector<Layout>& out = *key == 'x' ? v_.x_layout : v_.g_layout;
      for (size_t r = 0; r < out.size(); ++r) {
        const Json& name = (*ranks)[r];
        if (name == "transposed") {
          out[r] = Layout::kTransposed;
        } else if (name == "expanded") {
          out[r] = Layout::kExpanded;
        } else if (name != "contiguous") {
          return Expected("layout", "contiguous, transposed or expanded", name);
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status ParseRequiresGrad() {
    v_.requires_grad.assign(v_.group.size(), true);
    if (Find(json_, "requires_grad") == nullptr) return absl::OkStatus();
    CHORUS_ASSIGN_OR_RETURN(const Json* const ranks, PerRank(json_, "requires_grad", "vector"));
    for (size_t r = 0; r < v_.group.size(); ++r) {
      if (!(*ranks)[r].is_boolean()) {
        return Expected("requires_grad", "true or false", (*ranks)[r]);
      }
      v_.requires_grad[r] = (*ranks)[r].get<bool>();
    }
    return absl::OkStatus();
  }

  // Rows like `like`: of its dtypes and shapes, or null.
  absl::Status ParseRows(const Json& object, const char* key,
                         const std::vector<std::vector<Array>>& like, Rows* out) const {
    CHORUS_ASSIGN_OR_RETURN(const Json* const ranks, PerRank(object, key, "gradients"));
    for (size_t r = 0; r < like.size(); ++r) {
      const Json& list = (*ranks)[r];
      out->emplace_back();
      if (list.is_null()) continue;
      const std::string where = absl::StrCat(key, "[", r, "]");
      if (!list.is_array() || list.size() != like[r].size()) {
        return Expected(where, absl::StrCat("null or ", like[r].size(), " tensors"), list);
      }
      Row row;
      for (size_t i = 0; i < list.size(); ++i) {
        row.emplace_back();
        if (list[i].is_null()) continue;
        const std::string location = absl::StrCat(where, "[", i, "]");
        CHORUS_ASSIGN_OR_RETURN(Array array, ToArray(list[i], v_.dtype, location));
        if (array.dtype != like[r][i].dtype || array.shape != like[r][i].shape ||
            !array.floating()) {
          return absl::InvalidArgumentError(absl::StrCat(
              location, ": ", array.TypeText(), " as gradient of ", like[r][i].TypeText()));
        }
        row.back() = std::move(array);
      }
      out->back() = std::move(row);
    }
    return absl::OkStatus();
  }

  absl::Status ParseFirst() {
    const Json* const grad = Find(json_, "grad");
    if (grad == nullptr) return absl::OkStatus();
    CHORUS_RETURN_IF_ERROR(OnlyKeys(*grad, {"g", "xbar"}, "grad"));
    FirstOrder first;
    CHORUS_RETURN_IF_ERROR(ParseRows(*grad, "g", v_.outputs, &first.g));
    CHORUS_RETURN_IF_ERROR(ParseRows(*grad, "xbar", v_.inputs, &first.xbar));
    v_.first = std::move(first);
    return absl::OkStatus();
  }

  absl::Status ParseSecond() {
    const Json* const second = Find(json_, "second");
    if (second == nullptr) return absl::OkStatus();
    CHORUS_RETURN_IF_ERROR(OnlyKeys(*second, {"w", "v", "G", "S", "dS"}, "second"));
    if (!IsFloating(v_.dtype)) {
      return absl::InvalidArgumentError(absl::StrCat("second: none of ", DTypeName(v_.dtype)));
    }
    SecondOrder out;
    CHORUS_RETURN_IF_ERROR(ParseRows(*second, "w", v_.outputs, &out.w));
    CHORUS_RETURN_IF_ERROR(ParseRows(*second, "v", v_.inputs, &out.v));
    CHORUS_RETURN_IF_ERROR(ParseRows(*second, "G", v_.inputs, &out.G));
    CHORUS_RETURN_IF_ERROR(ParseRows(*second, "dS", v_.inputs, &out.dS));
    CHORUS_ASSIGN_OR_RETURN(const Json* const s, Get(*second, "S", "second"));
    CHORUS_ASSIGN_OR_RETURN(out.S, ToDouble(*s, "S"));
    for (int r = 0; r < v_.size() && !v_.one_process(); ++r) {
      const auto rank = static_cast<size_t>(r);
      if (!out.w[rank].has_value() && out.v[rank].has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat("second: rank ", r, " has \"v\" but skips the gradient that it weighs"));
      }
    }
    v_.second = std::move(out);
    return absl::OkStatus();
  }

  absl::Status ParseExact() {
    CHORUS_ASSIGN_OR_RETURN(const Json* const exact, Get(json_, "exact", "vector"));
    if (!exact->is_array()) return Expected("exact", "a list", *exact);
    for (const Json& name : *exact) {
      if (name == "y") {
        v_.exact_y = true;
      } else if (name == "xbar") {
        v_.exact_xbar = true;
      } else {
        return Expected("exact", "y or xbar", name);
      }
    }
    return absl::OkStatus();
  }

  absl::Status ParseScale() {
    bool floating = false;
    for (const std::vector<Array>& row : v_.outputs) {
      for (const Array& array : row) floating = floating || array.floating();
    }
    const Json* const found = Find(json_, "scale");
    if (found == nullptr && !v_.first.has_value() && !v_.second.has_value() &&
        (v_.exact_y || !floating)) {
      return absl::OkStatus();
    }
    if (found == nullptr) return absl::InvalidArgumentError("vector: no \"scale\"");
    CHORUS_RETURN_IF_ERROR(OnlyKeys(*found, {"y", "xbar", "G", "S", "dS"}, "scale"));
    Scale scale;
    const auto read = [found](const char* key, bool needed, double* out) -> absl::Status {
      if (!needed && Find(*found, key) == nullptr) return absl::OkStatus();
      CHORUS_ASSIGN_OR_RETURN(const Json* const value, Get(*found, key, "scale"));
      CHORUS_ASSIGN_OR_RETURN(*out, ToDouble(*value, "scale"));
      if (std::isfinite(*out) && *out >= 0) return absl::OkStatus();
      return Expected("scale", "a number from 0", *value);
    };
    CHORUS_RETURN_IF_ERROR(read("y", floating && !v_.exact_y, &scale.y));
    CHORUS_RETURN_IF_ERROR(read("xbar", v_.first.has_value() && !v_.exact_xbar, &scale.xbar));
    CHORUS_RETURN_IF_ERROR(read("G", v_.second.has_value(), &scale.G));
    CHORUS_RETURN_IF_ERROR(read("S", v_.second.has_value(), &scale.S));
    CHORUS_RETURN_IF_ERROR(read("dS", v_.second.has_value(), &scale.dS));
    v_.scale = scale;
    return absl::OkStatus();
  }

  const Json& json_;
  const OpFormat* format_ = nullptr;
  std::vector<absl::string_view> known_;  // attributes
  Vector v_;
};

// --- A file -------------------------------------------------------------------------------------

absl::Status ReadByDType(const Json& object, const char* key, std::map<DType, double>* out) {
  CHORUS_ASSIGN_OR_RETURN(const Json* const table, Get(object, key, "tolerance"));
  if (!table->is_object()) return Expected(key, "an object", *table);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    const std::string name(DTypeName(dtype));
    CHORUS_ASSIGN_OR_RETURN(const Json* const number, Get(*table, name.c_str(), key));
    CHORUS_ASSIGN_OR_RETURN((*out)[dtype], ToDouble(*number, key));
  }
  return absl::OkStatus();
}

absl::StatusOr<Tolerance> ParseHead(const Json& file) {
  CHORUS_ASSIGN_OR_RETURN(const Json* const schema, Get(file, "schema", "file"));
  if (*schema != kSchema) return Expected("schema", kSchema, *schema);
  CHORUS_ASSIGN_OR_RETURN(const Json* const phi, Get(file, "phi", "file"));
  if (*phi != kPhi) return Expected("phi", kPhi, *phi);
  CHORUS_ASSIGN_OR_RETURN(const Json* const found, Get(file, "tolerance", "file"));
  if (!found->is_object()) return Expected("tolerance", "an object", *found);
  Tolerance tolerance;
  CHORUS_RETURN_IF_ERROR(ReadByDType(*found, "factor", &tolerance.factor));
  CHORUS_RETURN_IF_ERROR(ReadByDType(*found, "eps", &tolerance.eps));
  CHORUS_ASSIGN_OR_RETURN(const Json* const second, Get(*found, "second_factor", "tolerance"));
  CHORUS_ASSIGN_OR_RETURN(tolerance.second_factor, ToDouble(*second, "second_factor"));
  return tolerance;
}

}  // namespace

bool Vector::everybody() const {
  std::vector<int> all(static_cast<size_t>(world));
  std::iota(all.begin(), all.end(), 0);
  return group == all;
}

absl::StatusOr<VectorFile> ParseVectorFile(absl::string_view name, absl::string_view text) {
  const Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": this is no JSON"));
  }
  if (!json.is_object()) return Expected(name, "an object", json);
  const auto list = json.find("vectors");
  if (list == json.end() || !list->is_array()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": no list of \"vectors\""));
  }
  VectorFile file;
  const absl::StatusOr<Tolerance> tolerance = ParseHead(json);
  if (tolerance.ok()) {
    file.tolerance = *tolerance;
  } else if (list->empty()) {
    return At(name, tolerance.status());
  }
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& entry = (*list)[i];
    std::string id = absl::StrCat(name, "#", i);
    if (entry.is_object() && entry.contains("id") && entry["id"].is_string()) {
      id = entry["id"].get<std::string>();
    }
    if (tolerance.ok()) {
      file.entries.push_back({std::move(id), Parser(entry).Parse()});
    } else {
      file.entries.push_back({std::move(id), At(name, tolerance.status())});
    }
  }
  return file;
}

absl::string_view OpName(Op op) {
  for (const OpFormat& format : kOps) {
    if (format.op == op) return format.name;
  }
  return "?";
}

}  // namespace vectors
}  // namespace chorus
