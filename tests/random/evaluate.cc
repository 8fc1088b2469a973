#include "tests/random/evaluate.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/tensor/half.h"
#include "tests/random/evaluate_scalars.h"
#include "tests/random/evaluate_tensors.h"

namespace chorus {
namespace random_programs {
namespace {

constexpr size_t kMostNodes = 3000000;

}  // namespace

class Evaluator::Graph {
 public:
  absl::Status Add(const Program& program, int statement) {
    const Statement& s = program.statements[static_cast<size_t>(statement)];
    arrays_.resize(std::max(arrays_.size(), program.values.size()));
    const auto result = Results(program, s);
    if (!result.ok()) return result.status();
    size_t i = 0;
    for (const Call& call : s.calls) {
      for (const int out : call.out) {
        const Value& value = program.value(out);
        const Array& array = (*result)[i++];
        if (!value.absent && (array.shape != value.shape || array.dtype != value.dtype)) {
          return No(absl::StrCat("v", out, " is another type"));
        }
        for (const int node : array.nodes) {
          if (std::isnan(scalars_.at(node).value)) return No("not a number");
        }
      }
    }
    i = 0;
    for (const Call& call : s.calls) {
      for (const int out : call.out) arrays_[static_cast<size_t>(out)] = (*result)[i++];
    }
    return absl::OkStatus();
  }

  Numbers Of(int value) const {
    Numbers numbers;
    for (const int node : arrays_[static_cast<size_t>(value)].nodes) {
      numbers.values.push_back(scalars_.at(node).value);
      numbers.errors.push_back(scalars_.at(node).error);
    }
    return numbers;
  }

  Mark Now() const { return {scalars_.nodes(), scalars_.edges()}; }
  void Undo(const Mark& mark) { scalars_.Truncate(mark.nodes, mark.edges); }
  size_t size() const { return scalars_.nodes(); }

 private:
  // Of all calls, in their order.
  absl::StatusOr<Arrays> Results(const Program& program, const Statement& s) {
    if (s.op == Op::kGradient) return Gradients(program, s);
    std::vector<Arrays> in;
    for (const Call& call : s.calls) {
      in.emplace_back();
      for (const int v : call.in) {
        const Array& x = arrays_[static_cast<size_t>(v)];
        if (program.value(v).absent) return No("an absent operand");
        if (static_cast<int64_t>(x.nodes.size()) != Elements(program.value(v).shape)) {
          return No("an operand that nothing gives");
        }
        in.back().push_back(call.no_grad ? tensors_.DetachedArray(x) : x);
      }
    }
    Arrays result;
    if (s.op == Op::kLeaf) {
      const Value& value = program.value(s.calls[0].out[0]);
      Array leaf{value.dtype, value.shape, {}};
      if (static_cast<int64_t>(s.data.size()) != Elements(value.shape)) return No("leaf");
      for (const double x : s.data) {
        leaf.nodes.push_back(scalars_.Constant(value.dtype, x));
      }
      return Arrays{leaf};
    }
    if (IsLocal(s.op)) {
      CHORUS_ASSIGN_OR_RETURN(const Array y,
                              tensors_.Local(s, in[0], program.value(s.calls[0].out[0])));
      result = {y};
    } else {
      absl::StatusOr<Arrays> y =
          IsOfDevices(s.op) ? OfDevices(program, s, in[0]) : Collective(program, s, in);
      if (!y.ok()) return y.status();
      result = *std::move(y);
    }
    size_t i = 0;
    for (const Call& call : s.calls) {
      for (size_t k = 0; k < call.out.size(); ++k, ++i) {
        if (i >= result.size()) return No("fewer results");
        if (call.no_grad) result[i] = tensors_.DetachedArray(result[i]);
      }
    }
    if (i != result.size()) return No("more results");
    return result;
  }

  absl::StatusOr<Arrays> Gradients(const Program& program, const Statement& s) {
    std::vector<std::pair<int, int>> roots;
    std::vector<int> wanted;
    for (const Call& call : s.calls) {
      const size_t n = (call.in.size() - static_cast<size_t>(call.wanted)) / 2;
      for (size_t i = 0; i < n; ++i) {
        const Array& root = arrays_[static_cast<size_t>(call.in[i])];
        if (program.value(call.in[i]).absent) continue;
        const int seed = call.in[n + i];
        if (seed >= 0 && arrays_[static_cast<size_t>(seed)].shape != root.shape) return No("seed");
        for (size_t e = 0; e < root.nodes.size(); ++e) {
          const int with = seed < 0 ? scalars_.Constant(root.dtype, 1)
                                    : arrays_[static_cast<size_t>(seed)].nodes[e];
          roots.emplace_back(root.nodes[e], with);
        }
      }
      for (size_t i = 2 * n; i < call.in.size(); ++i) {
        const Array& x = arrays_[static_cast<size_t>(call.in[i])];
        wanted.insert(wanted.end(), x.nodes.begin(), x.nodes.end());
      }
    }
    const std::vector<int> gradients = scalars_.Reverse(roots, wanted);
    if (scalars_.nodes() > kMostNodes) return No("too large");
    Arrays result;
    size_t next = 0;
    for (const Call& call : s.calls) {
      for (size_t i = call.in.size() - static_cast<size_t>(call.wanted); i < call.in.size(); ++i) {
        Array g = arrays_[static_cast<size_t>(call.in[i])];
        for (int& node : g.nodes) {
          node = s.create ? gradients[next] : scalars_.Detached(gradients[next]);
          ++next;
        }
        result.push_back(std::move(g));
      }
    }
    return result;
  }

  absl::StatusOr<Arrays> OfDevices(const Program& program, const Statement& s, const Arrays& in) {
    const GroupOf& group = program.groups[static_cast<size_t>(s.group)];
    Arrays result;
    switch (s.op) {
      case Op::kDevicesBroadcast:
        for (size_t p = 0; p < group.ranks.size(); ++p) result.push_back(tensors_.Copied(in[0]));
        return result;
      case Op::kDevicesReduceAdd: {
        CHORUS_ASSIGN_OR_RETURN(const Array sum, tensors_.Reduced(Reduction::kSum, in, {}));
        return Arrays{sum};
      }
      case Op::kDevicesScatter: {
        std::vector<int64_t> sizes = s.ints;
        if (sizes.empty()) {
          if (in[0].shape.empty()) return No("scatter");
          const auto members = static_cast<int64_t>(group.ranks.size());
          const int64_t rows = in[0].shape[static_cast<size_t>(Axis(s.dim, in[0].shape))];
          if (rows == 0) {
            sizes.assign(group.ranks.size(), 0);
          } else {
            const int64_t chunk = (rows + members - 1) / members;
            for (int64_t at = 0; at < rows; at += chunk)
              sizes.push_back(std::min(chunk, rows - at));
          }
        }
        return tensors_.Split(in[0], s.dim, sizes, sizes.size());
      }
      case Op::kDevicesLinear: {
        // Wherever the rows are.
        CHORUS_ASSIGN_OR_RETURN(const Array y, tensors_.Linear(in[0], in[1], in[2]));
        return Arrays{y};
      }
      default: {
        CHORUS_ASSIGN_OR_RETURN(const Array all, tensors_.Joined(in, s.dim));
        return Arrays{all};
      }
    }
  }

  // With the rows of a tensor of counts: the pieces that lie one after the other from row 0 on.
  absl::StatusOr<Arrays> RaggedPieces(const Array& x, const Array& counts) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, tensors_.Whole(counts));
    if (x.shape.empty()) return No("ragged");
    int64_t at = 0;
    Arrays pieces;
    for (const int64_t n : rows) {
      if (n < 0 || at + n > x.shape[0]) return No("ragged: rows");
      pieces.push_back(tensors_.Sliced(x, 0, at, at + n));
      at += n;
    }
    return pieces;
  }
  absl::StatusOr<Arrays> RaggedResult(const Arrays& pieces, int64_t max_rows) {
    std::vector<int64_t> counts;
    int64_t rows = 0;
    for (const Array& piece : pieces) {
      counts.push_back(piece.shape[0]);
      rows += piece.shape[0];
    }
    if (rows > max_rows) return No("ragged: too many rows");
    Arrays padded = pieces;
    Dims rest = pieces[0].shape;
    rest[0] = max_rows - rows;
    padded.push_back(tensors_.ZerosOf(pieces[0].dtype, rest));
    CHORUS_ASSIGN_OR_RETURN(const Array values, tensors_.Joined(padded, 0));
    return Arrays{values, tensors_.Counts(counts)};
  }

  absl::StatusOr<Arrays> Collective(const Program& program, const Statement& s,
                                    const std::vector<Arrays>& in) {
    const GroupOf& group = program.groups[static_cast<size_t>(s.group)];
    const size_t size = group.ranks.size();
    const auto root = static_cast<size_t>(s.root);
    const Array absent;
    Arrays result;
    std::vector<double> factors;
    for (const Call& call : s.calls) factors.push_back(call.factor);
    const auto column = [&](size_t i) {
      Arrays of;
      for (const Arrays& x : in) of.push_back(x[i]);
      return of;
    };
    const auto rows = [&](size_t from, size_t to) { return s.rows[from * size + to]; };
    // Of ragged forms each result has room of its own.
    const auto max_rows = [&](size_t p) {
      return program.value(s.calls[p].out[0]).shape.empty()
                 ? 0
                 : program.value(s.calls[p].out[0]).shape[0];
    };
    if (s.op == Op::kTransfer) return Arrays{absent, tensors_.Copied(in[0][0])};
    if (s.op == Op::kBarrier) return Arrays(size, absent);
    if (s.calls.size() != size) return No("calls");
    // Pieces from each member for each, by [from][to], where it is that kind.
    std::vector<Arrays> pieces(size);
    switch (s.op) {
      case Op::kAllReduce:
      case Op::kReduce: {
        CHORUS_ASSIGN_OR_RETURN(const Array y, tensors_.Reduced(s.reduction, column(0), factors));
        for (size_t p = 0; p < size; ++p) {
          result.push_back(s.op == Op::kReduce && p != root ? absent : tensors_.Copied(y));
        }
        return result;
      }
      case Op::kBroadcast:
        for (size_t p = 0; p < size; ++p) {
          if (in[p][0].shape != in[root][0].shape) return No("broadcast");
          result.push_back(tensors_.Copied(in[root][0]));
        }
        return result;
      case Op::kAllGather:
      case Op::kGather:
      case Op::kAllGatherIntoTensor:
      case Op::kGatherIntoTensor:
        for (size_t p = 0; p < size; ++p) {
          if ((s.op == Op::kGather || s.op == Op::kGatherIntoTensor) && p != root) {
            result.push_back(absent);
          } else if (s.op == Op::kAllGather || s.op == Op::kGather) {
            for (const Array& x : column(0)) result.push_back(tensors_.Copied(x));
          } else {
            CHORUS_ASSIGN_OR_RETURN(const Array all, tensors_.Joined(column(0), s.dim));
            result.push_back(all);
          }
        }
        return result;
      case Op::kScatter:
        for (size_t p = 0; p < size; ++p) result.push_back(tensors_.Copied(in[root][p]));
        return result;
      case Op::kScatterTensor:
        return tensors_.Split(in[root][0], s.dim, s.rows, size);
      case Op::kReduceScatter:
      case Op::kReduceScatterTensor:
        for (size_t p = 0; p < size; ++p) {
          if (s.op == Op::kReduceScatter) {
            pieces[p] = in[p];
          } else {
            CHORUS_ASSIGN_OR_RETURN(const Arrays split,
                                    tensors_.Split(in[p][0], s.dim, s.rows, size));
            pieces[p] = split;
          }
        }
        for (size_t p = 0; p < size; ++p) {
          Arrays of;
          for (size_t from = 0; from < size; ++from) of.push_back(pieces[from][p]);
          CHORUS_ASSIGN_OR_RETURN(const Array y, tensors_.Reduced(s.reduction, of, factors));
          result.push_back(y);
        }
        return result;
      case Op::kAllToAll:
        for (size_t p = 0; p < size; ++p) {
          for (size_t from = 0; from < size; ++from) result.push_back(tensors_.Copied(in[from][p]));
        }
        return result;
      case Op::kAllToAllSingle:
        for (size_t p = 0; p < size; ++p) {
          std::vector<int64_t> send;
          for (size_t to = 0; to < size && !s.rows.empty(); ++to) send.push_back(rows(p, to));
          CHORUS_ASSIGN_OR_RETURN(const Arrays split, tensors_.Split(in[p][0], 0, send, size));
          pieces[p] = split;
        }
        for (size_t p = 0; p < size; ++p) {
          Arrays mine;
          for (size_t from = 0; from < size; ++from) mine.push_back(pieces[from][p]);
          CHORUS_ASSIGN_OR_RETURN(const Array y, tensors_.Joined(mine, 0));
          result.push_back(y);
        }
        return result;
      case Op::kAllToAllRagged:
      case Op::kReduceScatterRagged:
        for (size_t p = 0; p < size; ++p) {
          CHORUS_ASSIGN_OR_RETURN(const Arrays split, RaggedPieces(in[p][0], in[p][1]));
          if (split.size() != size) return No("ragged: counts");
          pieces[p] = split;
        }
        for (size_t p = 0; p < size; ++p) {
          Arrays mine;
          for (size_t from = 0; from < size; ++from) mine.push_back(pieces[from][p]);
          if (s.op == Op::kReduceScatterRagged) {
            CHORUS_ASSIGN_OR_RETURN(const Array y, tensors_.Reduced(s.reduction, mine, factors));
            mine = {y};
          }
          CHORUS_ASSIGN_OR_RETURN(const Arrays y, RaggedResult(mine, max_rows(p)));
          result.insert(result.end(), y.begin(), y.end());
        }
        return result;
      case Op::kAllGatherRagged:
      case Op::kGatherRagged: {
        Arrays all;
        for (size_t p = 0; p < size; ++p) {
          CHORUS_ASSIGN_OR_RETURN(const Arrays split, RaggedPieces(in[p][0], in[p][1]));
          if (split.size() != 1) return No("ragged: count");
          all.push_back(split[0]);
        }
        for (size_t p = 0; p < size; ++p) {
          Arrays y = {absent, absent};
          if (s.op == Op::kAllGatherRagged || p == root) {
            CHORUS_ASSIGN_OR_RETURN(const Arrays got, RaggedResult(all, max_rows(p)));
            y = got;
          }
          result.insert(result.end(), y.begin(), y.end());
        }
        return result;
      }
      case Op::kScatterRagged: {
        CHORUS_ASSIGN_OR_RETURN(const Arrays split, RaggedPieces(in[root][0], in[root][1]));
        if (split.size() != size) return No("ragged: counts");
        for (size_t p = 0; p < size; ++p) {
          CHORUS_ASSIGN_OR_RETURN(const Arrays y, RaggedResult({split[p]}, max_rows(p)));
          result.insert(result.end(), y.begin(), y.end());
        }
        return result;
      }
      default:
        return No("no collective");
    }
  }

  ScalarGraph scalars_;
  TensorOps tensors_{&scalars_};
  std::vector<Array> arrays_;  // by value
};

Evaluator::Evaluator() : graph_(std::make_unique<Graph>()) {}
Evaluator::~Evaluator() = default;
absl::Status Evaluator::Add(const Program& program, int statement) {
  const Mark before = Now();
  const absl::Status status = graph_->Add(program, statement);
  if (!status.ok()) Undo(before);
  return status;
}
Numbers Evaluator::Of(int value) const { return graph_->Of(value); }
Evaluator::Mark Evaluator::Now() const { return graph_->Now(); }
void Evaluator::Undo(const Mark& mark) { graph_->Undo(mark); }
size_t Evaluator::size() const { return graph_->size(); }

absl::StatusOr<std::vector<Numbers>> Evaluate(const Program& program) {
  Evaluator evaluator;
  for (int s = 0; s < static_cast<int>(program.statements.size()); ++s) {
    const absl::Status status = evaluator.Add(program, s);
    if (!status.ok())
      return absl::InvalidArgumentError(absl::StrCat("statement ", s, ": ", status.message()));
  }
  std::vector<Numbers> result;
  for (int v = 0; v < static_cast<int>(program.values.size()); ++v) {
    result.push_back(evaluator.Of(v));
  }
  return result;
}

double RoundTo(DType dtype, double x) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<float>(x);
    case DType::kF16:
      return static_cast<float>(F16(static_cast<float>(x)));
    case DType::kBF16:
      return static_cast<float>(BF16(static_cast<float>(x)));
    default:
      return x;
  }
}

}  // namespace random_programs
}  // namespace chorus
