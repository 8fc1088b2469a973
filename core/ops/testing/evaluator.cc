#include "core/ops/testing/evaluator.h"

#include <cmath>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace testing {
namespace {

// Integers wrap: the sum of what is added as unsigned.
double Add(double a, double b) { return a + b; }
float Add(float a, float b) { return a + b; }
int64_t Add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
double Mul(double a, double b) { return a * b; }
float Mul(float a, float b) { return a * b; }
int64_t Mul(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
template <typename T>
T Neg(T a) {
  return Mul(a, static_cast<T>(-1));
}

using Index = std::vector<int64_t>;

// Calls `f` with each index of a tensor of that type, the last dimension fastest.
void ForEach(const TensorType& type, const std::function<void(const Index&)>& f) {
  if (type.num_elements() == 0) return;
  Index index(type.dims.size(), 0);
  while (true) {
    f(index);
    size_t d = index.size();
    while (d > 0 && ++index[d - 1] == type.dims[d - 1].size) index[--d] = 0;
    if (d == 0) return;
  }
}

int64_t Position(const TensorType& type, const Index& index) {
  int64_t position = 0;
  for (size_t d = 0; d < index.size(); ++d) position = position * type.dims[d].size + index[d];
  return position;
}

template <typename T>
class Local {
 public:
  Local(const NodeView& node, absl::Span<const Value* const> inputs, const TensorType& output)
      : node_(node), type_(output), out_(output.num_elements(), T{}) {
    for (const Value* input : inputs) in_.push_back(Elements<T>(*input));
  }

  bool Run() {
    const absl::string_view op = node_.op;
    if (op == "add") return Elementwise([](T a, T b) { return Add(a, b); });
    if (op == "sub") return Elementwise([](T a, T b) { return Add(a, Neg(b)); });
    if (op == "mul") return Elementwise([](T a, T b) { return Mul(a, b); });
    if (op == "neg") return Elementwise([](T a, T) { return Neg(a); });
    if (op == "relu") return Elementwise([](T a, T) { return a > 0 ? a : T{}; });
    if (op == "relu_grad") return Elementwise([](T a, T b) { return a > 0 ? b : T{}; });
    if (op == "sin") return Elementwise([](T a, T) { return static_cast<T>(std::sin(a)); });
    if (op == "cos") return Elementwise([](T a, T) { return static_cast<T>(std::cos(a)); });
    if (op == "matmul") return Matmul();
    if (op == "sum") return Sum();
    if (op == "expand") return Expand();
    if (op == "copy" || op == "reshape") return Elementwise([](T a, T) { return a; });
    if (op == "transpose") return Transpose();
    if (op == "slice") return Shift(0, -Int("begin"));
    if (op == "pad") return Shift(0, Int("before"));
    if (op == "concat") return Concat();
    if (op == "fill") return Fill();
    return false;
  }
  Value Take() { return MakeValue<T>(type_, out_); }

 private:
  int64_t Int(absl::string_view name) const { return IntAttribute(node_.attributes, name); }

  bool Elementwise(T (*f)(T, T)) {
    const std::vector<T>& second = in_.size() > 1 ? in_[1] : in_[0];
    for (size_t i = 0; i < out_.size(); ++i) out_[i] = f(in_[0][i], second[i]);
    return true;
  }

  bool Matmul() {
    const bool ta = Int("transpose_a") != 0;
    const bool tb = Int("transpose_b") != 0;
    const int64_t depth = node_.input(0).dims[ta ? 0 : 1].size;
    ForEach(type_, [&](const Index& i) {
      T sum{};
      for (int64_t k = 0; k < depth; ++k) {
        const Index a = ta ? Index{k, i[0]} : Index{i[0], k};
        const Index b = tb ? Index{i[1], k} : Index{k, i[1]};
        sum =
            Add(sum, Mul(in_[0][Position(node_.input(0), a)], in_[1][Position(node_.input(1), b)]));
      }
      out_[Position(type_, i)] = sum;
    });
    return true;
  }

  bool Sum() {
    const TensorType& input = node_.input(0);
    const Index axes = IntsAttribute(node_.attributes, "axes");
    std::vector<bool> summed(input.dims.size(), axes.empty());
    for (const int64_t axis : axes) summed[axis] = true;
    ForEach(input, [&](const Index& i) {
      Index o;
      for (size_t d = 0; d < i.size(); ++d) {
        if (!summed[d]) {
          o.push_back(i[d]);
        } else if (Int("keep_dims") != 0) {
          o.push_back(0);
        }
      }
      T& sum = out_[Position(type_, o)];
      sum = Add(sum, in_[0][Position(input, i)]);
    });
    return true;
  }

  bool Expand() {
    const TensorType& input = node_.input(0);
    ForEach(type_, [&](const Index& o) {
      Index i(o.end() - input.dims.size(), o.end());
      for (size_t d = 0; d < i.size(); ++d) {
        if (input.dims[d].size == 1) i[d] = 0;
      }
      out_[Position(type_, o)] = in_[0][Position(input, i)];
    });
    return true;
  }

  bool Transpose() {
    const Index perm = IntsAttribute(node_.attributes, "perm");
    ForEach(type_, [&](const Index& o) {
      Index i(o.size());
      for (size_t d = 0; d < o.size(); ++d) i[perm[d]] = o[d];
      out_[Position(type_, o)] = in_[0][Position(node_.input(0), i)];
    });
    return true;
  }

  // Input `n`, moved by `offset` along the axis; what falls outside is dropped.
  bool Shift(int n, int64_t offset) {
    const int64_t axis = Int("axis");
    ForEach(node_.input(n), [&](const Index& i) {
      Index o = i;
      o[axis] += offset;
      if (o[axis] < 0 || o[axis] >= type_.dims[axis].size) return;
      out_[Position(type_, o)] = in_[n][Position(node_.input(n), i)];
    });
    return true;
  }

  bool Concat() {
    int64_t offset = 0;
    for (int n = 0; n < node_.num_inputs(); ++n) {
      Shift(n, offset);
      offset += node_.input(n).dims[Int("axis")].size;
    }
    return true;
  }

  bool Fill() {
    const AttributeValue& value = *FindAttribute(node_.attributes, "value");
    const auto* integer = absl::get_if<int64_t>(&value);
    const T element =
        integer != nullptr ? static_cast<T>(*integer) : static_cast<T>(absl::get<double>(value));
    for (T& out : out_) out = element;
    return true;
  }

  const NodeView& node_;
  const TensorType& type_;
  std::vector<T> out_;
  std::vector<std::vector<T>> in_;
};

Value SumOf(const Value& a, const Value& b) {
  return Dispatch(a.type.dtype, [&](auto t) {
    using T = decltype(t);
    std::vector<T> x = Elements<T>(a);
    const std::vector<T> y = Elements<T>(b);
    for (size_t i = 0; i < x.size(); ++i) x[i] = Add(x[i], y[i]);
    return MakeValue<T>(a.type, x);
  });
}

// One member's part in an instance.
struct Part {
  size_t session = 0;
  int32_t node = -1;
};

struct Instance {
  bool is_gradient = false;
  bool is_pair = false;
  int32_t group_size = 0;
  std::map<int32_t, Part> parts;  // by rank, ascending

  size_t expected() const { return is_pair ? 2 : static_cast<size_t>(group_size); }
};

class Evaluation {
 public:
  explicit Evaluation(absl::Span<const Session> sessions) : sessions_(sessions) {
    for (const Session& session : sessions) {
      values_.emplace_back(session.graph->num_values());
      ready_.emplace_back(session.graph->num_values(), false);
      done_.emplace_back(session.graph->nodes.size(), false);
      names_.push_back(Names(session));
      for (size_t i = 0; i < session.inputs.size(); ++i) {
        values_.back()[i] = session.inputs[i];
        ready_.back()[i] = true;
      }
    }
  }

  absl::Status Run() {
    while (true) {
      bool progress = false;
      for (size_t s = 0; s < sessions_.size(); ++s) {
        for (int32_t n = 0; n < static_cast<int32_t>(done_[s].size()); ++n) {
          if (done_[s][n] || !InputsReady(s, n)) continue;
          done_[s][n] = true;
          progress = true;
          if (node(s, n).collective.has_value()) {
            CHORUS_RETURN_IF_ERROR(Join(s, n));
          } else {
            CHORUS_RETURN_IF_ERROR(RunLocal(s, n));
          }
        }
      }
      if (progress) continue;
      if (waiting_.empty()) break;
      // Nothing else can move: members that are missing from a gradient have abandoned it.
      auto it = waiting_.begin();
      while (it != waiting_.end() && !it->second.is_gradient) ++it;
      if (it == waiting_.end()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "instance ", waiting_.begin()->first, " has ", waiting_.begin()->second.parts.size(),
            " of ", waiting_.begin()->second.expected(), " members"));
      }
      CHORUS_RETURN_IF_ERROR(Complete(it->second));
      waiting_.erase(it);
    }
    for (size_t s = 0; s < sessions_.size(); ++s) {
      for (size_t n = 0; n < done_[s].size(); ++n) {
        if (!done_[s][n]) {
          return absl::FailedPreconditionError(
              absl::StrCat("session ", s, " node ", n, " never became ready"));
        }
      }
    }
    return absl::OkStatus();
  }

  std::vector<std::vector<Value>> Take() { return std::move(values_); }

 private:
  const Node& node(size_t session, int32_t n) const { return sessions_[session].graph->nodes[n]; }

  // The name of each collective node's instance: next indices are counted in program order.
  static std::vector<std::string> Names(const Session& session) {
    std::map<std::string, int> next;
    std::vector<std::string> names;
    for (const Node& node : session.graph->nodes) {
      names.emplace_back();
      if (!node.collective.has_value()) continue;
      const Collective& c = *node.collective;
      std::string base = absl::StrCat("group ", session.groups[c.group_slot]);
      if (HasPeer(c.kind)) {
        const bool sends = c.kind == CollectiveKind::kSend;
        absl::StrAppend(&base, " ", sends ? c.rank.value() : c.peer.value(), "->",
                        sends ? c.peer.value() : c.rank.value(), " tag ", c.tag);
      }
      switch (c.instance.kind) {
        case InstanceRef::Kind::kNext:
          names.back() =
              absl::StrCat(base, " index ", next[absl::StrCat(base, " as ", c.rank.value())]++);
          break;
        case InstanceRef::Kind::kGradient:
          names.back() = absl::StrCat(names[c.instance.node], ", gradient ", c.instance.request);
          break;
        case InstanceRef::Kind::kBound:
          names.back() = session.instances[c.instance.slot];
          break;
      }
    }
    return names;
  }

  bool InputsReady(size_t s, int32_t n) const {
    for (const ValueIndex input : node(s, n).inputs) {
      if (!ready_[s][input]) return false;
    }
    return true;
  }

  void Publish(size_t s, int32_t n, int32_t i, Value value) {
    const ValueIndex index = sessions_[s].graph->ValueOf(n, i);
    values_[s][index] = std::move(value);
    ready_[s][index] = true;
  }

  absl::Status RunLocal(size_t s, int32_t n) {
    const Node& local = node(s, n);
    std::vector<const Value*> inputs;
    std::vector<const TensorType*> types;
    for (const ValueIndex input : local.inputs) {
      inputs.push_back(&values_[s][input]);
      types.push_back(&values_[s][input].type);
    }
    NodeView view;
    view.op = local.op;
    view.attributes = local.attributes;
    view.inputs = types;
    CHORUS_ASSIGN_OR_RETURN(std::vector<Value> outputs, EvaluateLocal(view, inputs, local.outputs));
    for (size_t i = 0; i < outputs.size(); ++i) {
      Publish(s, n, static_cast<int32_t>(i), std::move(outputs[i]));
    }
    return absl::OkStatus();
  }

  absl::Status Join(size_t s, int32_t n) {
    const Collective& c = *node(s, n).collective;
    Instance& instance = waiting_[names_[s][n]];
    instance.is_gradient = c.instance.kind != InstanceRef::Kind::kNext;
    instance.is_pair = HasPeer(c.kind);
    instance.group_size = sessions_[s].graph->group_slots[c.group_slot].size;
    if (!instance.parts.emplace(c.rank.value(), Part{s, n}).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(names_[s][n], ": rank ", c.rank.value(), " joins twice"));
    }
    if (instance.parts.size() < instance.expected()) return absl::OkStatus();
    const Instance complete = instance;
    waiting_.erase(names_[s][n]);
    return Complete(complete);
  }

  // Type of what one member puts in or takes out, whatever its role.
  static TensorType ElementType(const Evaluation& e, const Part& part) {
    const Node& node = e.node(part.session, part.node);
    if (!node.inputs.empty()) return e.values_[part.session][node.inputs[0]].type;
    return node.outputs.empty() ? TensorType() : node.outputs[0];
  }

  // Input i of a rank's part; zeros for a member that is missing.
  Value InputOf(const Instance& instance, int32_t rank, size_t i, const TensorType& type) const {
    const auto it = instance.parts.find(rank);
    if (it == instance.parts.end()) return Zeros(type);
    const Part& part = it->second;
    return values_[part.session][node(part.session, part.node).inputs[i]];
  }

  Value SumOverRanks(const Instance& instance, size_t i, const TensorType& type) const {
    Value sum = InputOf(instance, 0, i, type);
    for (int32_t rank = 1; rank < instance.group_size; ++rank) {
      sum = SumOf(sum, InputOf(instance, rank, i, type));
    }
    return sum;
  }

  absl::Status Complete(const Instance& instance) {
    const Part& first = instance.parts.begin()->second;
    const Collective& c = *node(first.session, first.node).collective;
    const std::string& name = names_[first.session][first.node];
    const TensorType type = ElementType(*this, first);
    for (const auto& entry : instance.parts) {
      const Part& part = entry.second;
      const Collective& other = *node(part.session, part.node).collective;
      const bool same_kind = instance.is_pair ? HasPeer(other.kind) : other.kind == c.kind;
      if (!same_kind || other.root != c.root || other.reduction != c.reduction ||
          ElementType(*this, part) != type) {
        return absl::InvalidArgumentError(
            absl::StrCat(name, ": rank ", c.rank.value(), " asks for ", CollectiveKindName(c.kind),
                         " ", type.ToString(), ", rank ", entry.first, " for ",
                         CollectiveKindName(other.kind), " ", ElementType(*this, part).ToString()));
      }
    }
    for (const auto& entry : instance.parts) {
      const Part& part = entry.second;
      const int32_t rank = entry.first;
      const Collective& mine = *node(part.session, part.node).collective;
      switch (mine.kind) {
        case CollectiveKind::kAllReduce:
          Publish(part.session, part.node, 0, SumOverRanks(instance, 0, type));
          break;
        case CollectiveKind::kReduce:
          if (rank == mine.root.value()) {
            Publish(part.session, part.node, 0, SumOverRanks(instance, 0, type));
          }
          break;
        case CollectiveKind::kReduceScatter:
          Publish(part.session, part.node, 0,
                  SumOverRanks(instance, static_cast<size_t>(rank), type));
          break;
        case CollectiveKind::kBroadcast:
          Publish(part.session, part.node, 0, InputOf(instance, mine.root.value(), 0, type));
          break;
        case CollectiveKind::kAllGather:
          for (int32_t r = 0; r < instance.group_size; ++r) {
            Publish(part.session, part.node, r, InputOf(instance, r, 0, type));
          }
          break;
        case CollectiveKind::kRecv:
          Publish(part.session, part.node, 0, InputOf(instance, mine.peer.value(), 0, type));
          break;
        case CollectiveKind::kSend:
        case CollectiveKind::kBarrier:
          break;
        default:
          return absl::UnimplementedError(
              absl::StrCat("evaluator: ", CollectiveKindName(mine.kind)));
      }
    }
    return absl::OkStatus();
  }

  const absl::Span<const Session> sessions_;
  std::vector<std::vector<Value>> values_;
  std::vector<std::vector<bool>> ready_;
  std::vector<std::vector<bool>> done_;  // by node: run, or joined its instance
  std::vector<std::vector<std::string>> names_;
  std::map<std::string, Instance> waiting_;
};

}  // namespace

absl::StatusOr<std::vector<Value>> EvaluateLocal(const NodeView& node,
                                                 absl::Span<const Value* const> inputs,
                                                 absl::Span<const TensorType> outputs) {
  return Dispatch(outputs[0].dtype, [&](auto t) -> absl::StatusOr<std::vector<Value>> {
    Local<decltype(t)> local(node, inputs, outputs[0]);
    if (!local.Run()) return absl::UnimplementedError(absl::StrCat("evaluator: ", node.op));
    return std::vector<Value>{local.Take()};
  });
}

absl::StatusOr<std::vector<std::vector<Value>>> Evaluate(absl::Span<const Session> sessions) {
  for (const Session& session : sessions) {
    if (session.inputs.size() != session.graph->inputs.size()) {
      return absl::InvalidArgumentError("evaluator: as many inputs as the graph has");
    }
    for (size_t i = 0; i < session.inputs.size(); ++i) {
      if (session.inputs[i].type != session.graph->inputs[i].type) {
        return absl::InvalidArgumentError(absl::StrCat("evaluator: type of input ", i));
      }
    }
  }
  Evaluation evaluation(sessions);
  CHORUS_RETURN_IF_ERROR(evaluation.Run());
  return evaluation.Take();
}

}  // namespace testing
}  // namespace chorus
