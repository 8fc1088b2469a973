#include "tests/random/program.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace chorus {
namespace random_programs {
namespace {

constexpr const char* kNames[] = {"Leaf",
                                  "Neg",
                                  "Abs",
                                  "Relu",
                                  "Sin",
                                  "Cos",
                                  "Exp",
                                  "Log",
                                  "Log1p",
                                  "Expm1",
                                  "Sqrt",
                                  "Rsqrt",
                                  "Sigmoid",
                                  "Tanh",
                                  "Erf",
                                  "Sign",
                                  "Floor",
                                  "Ceil",
                                  "Add",
                                  "Sub",
                                  "Mul",
                                  "Div",
                                  "Maximum",
                                  "Minimum",
                                  "Pow",
                                  "AddNumber",
                                  "MulNumber",
                                  "Less",
                                  "Equal",
                                  "LogicalAnd",
                                  "LogicalNot",
                                  "Where",
                                  "Cast",
                                  "Sum",
                                  "Mean",
                                  "Max",
                                  "Min",
                                  "Product",
                                  "Expand",
                                  "Reshape",
                                  "Transpose",
                                  "Slice",
                                  "Concat",
                                  "Detach",
                                  "CopyTo",
                                  "MatMul",
                                  "Softmax",
                                  "LogSoftmax",
                                  "CrossEntropy",
                                  "OneHot",
                                  "Take",
                                  "ScatterAdd",
                                  "TakeAlong",
                                  "ScatterAddAlong",
                                  "ArgMax",
                                  "Sort",
                                  "ArgSort",
                                  "CumSum",
                                  "Conv2d",
                                  "ConvTranspose2d",
                                  "MaxPool2d",
                                  "AvgPool2d",
                                  "AdaptiveAvgPool2d",
                                  "nn::Linear",
                                  "nn::LayerNorm",
                                  "nn::GroupNorm",
                                  "nn::BatchNorm",
                                  "AllReduce",
                                  "Broadcast",
                                  "Reduce",
                                  "AllGather",
                                  "AllGatherIntoTensor",
                                  "Gather",
                                  "GatherIntoTensor",
                                  "Scatter",
                                  "ScatterTensor",
                                  "ReduceScatter",
                                  "ReduceScatterTensor",
                                  "AllToAll",
                                  "AllToAllSingle",
                                  "Transfer",
                                  "Barrier",
                                  "AllToAllRagged",
                                  "AllGatherRagged",
                                  "GatherRagged",
                                  "ScatterRagged",
                                  "ReduceScatterRagged",
                                  "parallel::Broadcast",
                                  "parallel::ReduceAdd",
                                  "parallel::Scatter",
                                  "parallel::Gather",
                                  "nn::DataParallel(nn::Linear)",
                                  "Gradient"};
static_assert(sizeof(kNames) / sizeof(kNames[0]) == static_cast<size_t>(Op::kCount), "a name each");

// What a value's history leads to: forward collectives as (statement, rank), gradient calls as
// (statement, -1 - trainer).
using Entry = std::pair<int, int>;
using Entries = std::set<Entry>;

struct Lead {
  History history = History::kNo;
  Entries sure;
  Entries may;  // also through ops that have no gradient, and as a gradient's seed
  // Leaves that its gradient reaches; of them those behind collectives; and those that it may
  // reach.
  std::set<int> leaves;
  std::set<int> behind;
  std::set<int> may_leaves;
};

void Add(const Lead& from, bool differentiable, Lead* to) {
  to->history = std::max(to->history, from.history);
  to->may.insert(from.may.begin(), from.may.end());
  to->may_leaves.insert(from.may_leaves.begin(), from.may_leaves.end());
  if (!differentiable) return;
  to->sure.insert(from.sure.begin(), from.sure.end());
  to->leaves.insert(from.leaves.begin(), from.leaves.end());
  to->behind.insert(from.behind.begin(), from.behind.end());
}

// Ops that have no gradient, and what comes out of them is floating all the same.
bool HasGradient(const Program& program, const Statement& s) {
  if (s.op == Op::kSign || s.op == Op::kFloor || s.op == Op::kCeil) return false;
  if (s.op == Op::kCast) return IsFloating(program.value(s.calls[0].in[0]).dtype);
  return true;
}

// A rank that a gradient call asks for and that does not take part.
struct Missing {
  int statement;
  int trainer;
  Entry entry;
};

struct Analysis {
  absl::Status status;
  std::vector<Lead> leads;  // by value
  std::vector<Missing> missing;
};

absl::Status Wrong(int statement, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("statement ", statement, ": ", what));
}

Analysis Analyse(const Program& program, bool directly = false) {
  Analysis result;
  result.leads.resize(program.values.size());
  std::vector<bool> made(program.values.size(), false);
  std::map<int, Entries> took_part;  // by gradient statement: its calls that others may meet
  bool used_up = false;
  const auto refuse = [&result](int s, const std::string& what) {
    if (result.status.ok()) result.status = Wrong(s, what);
  };
  for (int s = 0; s < static_cast<int>(program.statements.size()); ++s) {
    const Statement& statement = program.statements[static_cast<size_t>(s)];
    for (const Call& call : statement.calls) {
      for (const int in : call.in) {
        const bool none = in < 0 && statement.op == Op::kGradient;  // a seed of ones
        if (!none &&
            (in < 0 || static_cast<size_t>(in) >= made.size() || !made[static_cast<size_t>(in)])) {
          refuse(s, absl::StrCat("v", in, " is not there yet"));
          return result;
        }
      }
    }
    for (const Call& call : statement.calls) {
      for (const int out : call.out) made[static_cast<size_t>(out)] = true;
    }
    const auto lead = [&result](int v) -> Lead& { return result.leads[static_cast<size_t>(v)]; };
    if (statement.op == Op::kLeaf) {
      const int leaf = statement.calls[0].out[0];
      if (statement.requires_grad) lead(leaf).history = History::kYes;
      if (statement.requires_grad) lead(leaf).leaves = lead(leaf).may_leaves = {leaf};
    } else if (IsLocal(statement.op)) {
      const Call& call = statement.calls[0];
      if (call.no_grad || statement.op == Op::kDetach) continue;
      const bool differentiable = HasGradient(program, statement);
      for (const int out : call.out) {
        if (!IsFloating(program.value(out).dtype)) continue;
        for (const int in : call.in) Add(lead(in), differentiable, &lead(out));
      }
    } else if (IsCollective(statement.op)) {
      for (const Call& call : statement.calls) {
        if (call.no_grad || statement.op == Op::kBarrier) continue;
        bool floating = false;
        for (const int v : call.in) floating = floating || IsFloating(program.value(v).dtype);
        for (const int v : call.out) floating = floating || IsFloating(program.value(v).dtype);
        if (!floating) continue;
        Lead mine;
        // What a broadcast is given off its root gets no gradient, and leads on all the same.
        const bool off_root = statement.op == Op::kBroadcast &&
                              &call != &statement.calls[static_cast<size_t>(statement.root)];
        for (const int in : call.in) Add(lead(in), !(off_root && directly), &mine);
        if (off_root) mine.leaves = mine.behind;
        mine.behind = mine.leaves;
        mine.history = History::kYes;
        mine.sure.insert({s, call.rank});
        mine.may.insert({s, call.rank});
        for (const int out : call.out) {
          if (IsFloating(program.value(out).dtype)) lead(out) = mine;
        }
      }
    } else if (IsOfDevices(statement.op)) {
      const Call& call = statement.calls[0];
      if (call.no_grad) continue;
      Lead all;
      for (const int in : call.in) Add(lead(in), true, &all);
      for (const int out : call.out) {
        if (IsFloating(program.value(out).dtype)) lead(out) = all;
      }
    } else {  // kGradient
      if (used_up) refuse(s, "the tape is used up");
      std::map<int, Lead> roots;  // by trainer
      for (const Call& call : statement.calls) {
        const size_t n = (call.in.size() - static_cast<size_t>(call.wanted)) / 2;
        if (n == 0) refuse(s, absl::StrCat("trainer ", call.rank, " has no root"));
        for (size_t i = 0; i < n; ++i) {
          const int root = call.in[i];
          const Value& value = program.value(root);
          if (lead(root).history != History::kYes) refuse(s, absl::StrCat("root v", root));
          if (program.trainer_of[static_cast<size_t>(value.rank)] != call.rank) refuse(s, "rank");
          if (!IsFloating(value.dtype)) refuse(s, "dtype");
          if (call.in[n + i] < 0 && !value.absent && Elements(value.shape) != 1) {
            refuse(s, absl::StrCat("root v", root, " has no seed"));
          }
          Add(lead(root), true, &roots[call.rank]);
          // Gradients of this gradient lead through its seeds.
          if (call.in[n + i] >= 0 && statement.create) {
            Add(lead(call.in[n + i]), false, &roots[call.rank]);
          }
        }
        for (size_t i = 2 * n; i < call.in.size(); ++i) {
          if (lead(call.in[i]).history != History::kYes || program.value(call.in[i]).absent) {
            refuse(s, absl::StrCat("wanted v", call.in[i]));
          }
        }
      }
      // The rank is asked, and does not take part.
      std::set<int> collectives;
      for (const auto& [trainer, root] : roots) {
        for (const Entry& entry : root.may) collectives.insert(entry.first);
      }
      for (const int c : collectives) {
        const Statement& asked = program.statements[static_cast<size_t>(c)];
        Entries entries;
        if (asked.op == Op::kGradient) {
          entries = took_part[c];
        } else {
          for (const Call& call : asked.calls) {
            if (!call.no_grad) entries.insert({c, call.rank});
          }
        }
        for (const Entry& entry : entries) {
          const int trainer = entry.second < 0
                                  ? -1 - entry.second
                                  : program.trainer_of[static_cast<size_t>(entry.second)];
          const auto found = roots.find(trainer);
          if (found != roots.end() && found->second.sure.count(entry) > 0) continue;
          result.missing.push_back({s, trainer, entry});
        }
      }
      for (const Call& call : statement.calls) {
        if (!statement.create) continue;
        Lead gradient = roots[call.rank];
        // It has the collectives for history, whatever it is; on local ways alone it may be a
        // constant.
        gradient.leaves = gradient.behind;
        gradient.history = gradient.sure.empty() ? History::kMaybe : History::kYes;
        if (!gradient.sure.empty()) {
          const Entry mine = {s, -1 - call.rank};
          took_part[s].insert(mine);
          gradient.sure.insert(mine);
          gradient.may.insert(mine);
        }
        const size_t first = call.in.size() - static_cast<size_t>(call.wanted);
        for (size_t i = 0; i < call.out.size(); ++i) {
          lead(call.out[i]) = gradient;
          // Backward leaves a leaf alone that it does not reach.
          const Lead& root = roots[call.rank];
          if (!statement.backward || root.leaves.count(call.in[first + i]) > 0) continue;
          Lead none;
          if (root.may_leaves.count(call.in[first + i]) > 0) {
            none.history = History::kMaybe;
            none.may = gradient.may;
            none.may_leaves = gradient.may_leaves;
          }
          lead(call.out[i]) = none;
        }
      }
      used_up = used_up || !(statement.create || statement.retain);
    }
  }
  return result;
}

}  // namespace

const char* OpName(Op op) { return kNames[static_cast<size_t>(op)]; }
bool IsCollective(Op op) { return op >= Op::kAllReduce && op <= Op::kReduceScatterRagged; }
bool IsOfDevices(Op op) { return op >= Op::kDevicesBroadcast && op <= Op::kDevicesLinear; }
bool IsLocal(Op op) { return op > Op::kLeaf && op < Op::kAllReduce; }
bool CanCoalesce(Op op) {
  return op == Op::kAllReduce || op == Op::kBroadcast || op == Op::kReduce ||
         op == Op::kAllGather || op == Op::kAllGatherIntoTensor || op == Op::kReduceScatter ||
         op == Op::kReduceScatterTensor || op == Op::kTransfer || op == Op::kDevicesBroadcast ||
         op == Op::kDevicesReduceAdd;
}

int Program::trainers() const {
  return trainer_of.empty() ? 0 : *std::max_element(trainer_of.begin(), trainer_of.end()) + 1;
}

std::vector<int> Program::RanksOf(int trainer) const {
  std::vector<int> result;
  for (int r = 0; r < ranks(); ++r) {
    if (trainer_of[static_cast<size_t>(r)] == trainer) result.push_back(r);
  }
  return result;
}

int Program::AddValue(int rank, DType dtype, Dims shape, bool absent) {
  Value value;
  value.rank = rank;
  value.dtype = dtype;
  value.shape = std::move(shape);
  value.absent = absent;
  values.push_back(std::move(value));
  return static_cast<int>(values.size()) - 1;
}

int64_t Elements(const Dims& shape) {
  int64_t elements = 1;
  for (const int64_t n : shape) elements *= n;
  return elements;
}

absl::Status Check(const Program& program) {
  const Analysis analysis = Analyse(program);
  if (!analysis.status.ok()) return analysis.status;
  if (!analysis.missing.empty()) {
    const Missing& missing = analysis.missing[0];
    return Wrong(missing.statement,
                 absl::StrCat("trainer ", missing.trainer,
                              " does not take part in the gradient of ", missing.entry.first));
  }
  for (size_t s = 0; s < program.statements.size(); ++s) {
    const Statement& statement = program.statements[s];
    for (const Call& call : statement.calls) {
      for (size_t i = call.in.size() - static_cast<size_t>(call.wanted); i < call.in.size(); ++i) {
        if (!MayBeAnother(program, static_cast<int>(s), call.in[i])) continue;
        return Wrong(static_cast<int>(s), absl::StrCat("v", call.in[i], " may be another"));
      }
    }
    if (!statement.joined) continue;
    // Into one call with what is before it, and not out of what that gives.
    const Statement& before = program.statements[s - 1];
    bool fits = CanCoalesce(statement.op) && before.op == statement.op &&
                before.group == statement.group && before.reduction == statement.reduction;
    if (statement.op != Op::kTransfer) {
      fits = fits && before.root == statement.root && before.dim == statement.dim &&
             before.calls.size() == statement.calls.size();
    }
    for (size_t c = 0; fits && c < statement.calls.size() && c < before.calls.size(); ++c) {
      fits = before.calls[c].no_grad == statement.calls[c].no_grad &&
             before.calls[c].factor == statement.calls[c].factor;
      if (statement.op != Op::kTransfer) {
        fits = fits && before.calls[c].rank == statement.calls[c].rank;
      }
    }
    if (statement.op == Op::kTransfer) {
      for (const Call& call : statement.calls) fits = fits && !call.no_grad;
      for (const Call& call : before.calls) fits = fits && !call.no_grad;
    }
    for (size_t b = s; fits && b-- > 0;) {
      for (const Call& earlier : program.statements[b].calls) {
        for (const Call& call : statement.calls) {
          for (const int in : call.in) {
            if (std::count(earlier.out.begin(), earlier.out.end(), in) > 0) fits = false;
          }
        }
      }
      if (!program.statements[b].joined) break;
    }
    if (!fits) return Wrong(static_cast<int>(s), "cannot be joined");
  }
  return absl::OkStatus();
}

std::vector<History> Histories(const Program& program) {
  std::vector<History> histories;
  for (const Lead& lead : Analyse(program).leads) histories.push_back(lead.history);
  return histories;
}

bool MayBeAnother(const Program& program, int s, int wanted) {
  std::vector<int> made_by(program.values.size(), -1);
  for (int i = 0; i < static_cast<int>(program.statements.size()); ++i) {
    for (const Call& call : program.statements[static_cast<size_t>(i)].calls) {
      for (const int out : call.out) made_by[static_cast<size_t>(out)] = i;
    }
  }
  const int by = made_by[static_cast<size_t>(wanted)];
  if (by < 0) return false;
  const Op op = program.statements[static_cast<size_t>(by)].op;
  // The slopes of the first two are computed from what they were given, and could be from their
  // results; that of the third from its result, and there is more than one way (docs/ops.md).
  if (op == Op::kTanh || op == Op::kSigmoid || op == Op::kSoftmax) {
    return std::any_of(
        program.statements.begin() + by, program.statements.begin() + s,
        [](const Statement& later) { return later.op == Op::kGradient && later.create; });
  }
  if (op != Op::kGradient) return false;
  const auto roots = [](const Call& call) {
    return (call.in.size() - static_cast<size_t>(call.wanted)) / 2;
  };
  std::set<int> others;
  for (const Call& call : program.statements[static_cast<size_t>(by)].calls) {
    others.insert(call.out.begin(), call.out.end());
    others.insert(call.in.begin() + static_cast<std::ptrdiff_t>(roots(call)),
                  call.in.begin() + static_cast<std::ptrdiff_t>(2 * roots(call)));
  }
  others.erase(wanted);
  // What the roots depend on, other than by way of it.
  std::vector<int> left;
  for (const Call& call : program.statements[static_cast<size_t>(s)].calls) {
    left.insert(left.end(), call.in.begin(),
                call.in.begin() + static_cast<std::ptrdiff_t>(roots(call)));
  }
  std::set<int> seen = {-1, wanted};
  while (!left.empty()) {
    const int v = left.back();
    left.pop_back();
    if (!seen.insert(v).second) continue;
    if (others.count(v) > 0) return true;
    const int maker = made_by[static_cast<size_t>(v)];
    const Statement& statement = program.statements[static_cast<size_t>(maker)];
    if (statement.op == Op::kDetach || (statement.op == Op::kGradient && !statement.create)) {
      continue;
    }
    for (const Call& call : statement.calls) {
      if (call.no_grad) continue;
      const size_t n = statement.op == Op::kGradient ? 2 * roots(call) : call.in.size();
      left.insert(left.end(), call.in.begin(), call.in.begin() + static_cast<std::ptrdiff_t>(n));
    }
  }
  return false;
}

void Complete(Program* program, bool directly) {
  for (int rounds = 0; rounds < 400; ++rounds) {
    const Analysis analysis = Analyse(*program, directly);
    if (!analysis.status.ok() || analysis.missing.empty()) return;
    const Missing missing = analysis.missing[0];
    int root = -1;
    // Not all the same ones, and the same ones each time.
    std::vector<int> candidates;
    for (int s = 0; s < missing.statement; ++s) {
      for (const Call& call : program->statements[static_cast<size_t>(s)].calls) {
        for (const int v : call.out) {
          const Lead& lead = analysis.leads[static_cast<size_t>(v)];
          const int rank = program->value(v).rank;
          if (lead.history == History::kYes && lead.sure.count(missing.entry) > 0 &&
              program->trainer_of[static_cast<size_t>(rank)] == missing.trainer) {
            candidates.push_back(v);
          }
        }
      }
    }
    if (candidates.empty()) return;
    root = candidates[(program->seed + static_cast<uint64_t>(rounds)) % candidates.size()];
    const Value value = program->value(root);
    int seed = -1;
    int at = missing.statement;
    if (!value.absent && (Elements(value.shape) != 1 || root % 2 == 0)) {
      Statement leaf;
      leaf.calls.push_back(Call{});
      leaf.calls[0].rank = value.rank;
      seed = program->AddValue(value.rank, value.dtype, value.shape);
      leaf.calls[0].out = {seed};
      for (int64_t i = 0; i < Elements(value.shape); ++i) {
        leaf.data.push_back(static_cast<double>((i + root) % 4 - 1));
      }
      program->statements.insert(program->statements.begin() + at, std::move(leaf));
      ++at;
    }
    Statement& gradient = program->statements[static_cast<size_t>(at)];
    Call* call = nullptr;
    for (Call& c : gradient.calls) {
      if (c.rank == missing.trainer) call = &c;
    }
    if (call == nullptr) {
      gradient.calls.push_back(Call{});
      call = &gradient.calls.back();
      call->rank = missing.trainer;
    }
    const size_t n = (call->in.size() - static_cast<size_t>(call->wanted)) / 2;
    call->in.insert(call->in.begin() + static_cast<std::ptrdiff_t>(2 * n), seed);
    call->in.insert(call->in.begin() + static_cast<std::ptrdiff_t>(n), root);
  }
}

std::vector<int> OrderOf(const Program& program, int trainer, bool shuffled) {
  const auto mine = [&](const Statement& s) {
    for (const Call& call : s.calls) {
      if (s.op == Op::kGradient ? call.rank == trainer
                                : program.trainer_of[static_cast<size_t>(call.rank)] == trainer) {
        return true;
      }
    }
    return false;
  };
  // Of joined ones, the first stands for all.
  std::vector<std::vector<int>> blocks;
  for (int s = 0; s < static_cast<int>(program.statements.size()); ++s) {
    const Statement& statement = program.statements[static_cast<size_t>(s)];
    if (statement.joined && !blocks.empty()) {
      blocks.back().push_back(s);
    } else {
      blocks.push_back({s});
    }
  }
  std::vector<int> order;
  if (!shuffled || program.shuffles[static_cast<size_t>(trainer)] == 0) {
    for (const auto& block : blocks) {
      for (const int s : block) {
        if (mine(program.statements[static_cast<size_t>(s)])) order.push_back(s);
      }
    }
    return order;
  }
  std::mt19937_64 random(program.shuffles[static_cast<size_t>(trainer)]);
  std::vector<bool> done(blocks.size(), false);
  std::set<int> have;
  for (size_t left = blocks.size(); left > 0; --left) {
    std::vector<size_t> ready;
    std::set<int> groups;  // with a call that must come first
    bool gradient = false;
    for (size_t b = 0; b < blocks.size(); ++b) {
      if (done[b]) continue;
      bool can = true;
      bool gradients = false;
      int group = -1;
      for (const int s : blocks[b]) {
        const Statement& statement = program.statements[static_cast<size_t>(s)];
        for (const Call& call : statement.calls) {
          const bool own = statement.op == Op::kGradient
                               ? call.rank == trainer
                               : program.trainer_of[static_cast<size_t>(call.rank)] == trainer;
          for (const int in : call.in) can = can && (!own || in < 0 || have.count(in) > 0);
        }
        if (IsCollective(statement.op) || IsOfDevices(statement.op)) group = statement.group;
        gradients = gradients || statement.op == Op::kGradient;
      }
      if (group >= 0) {
        can = can && groups.count(group) == 0;
        groups.insert(group);
      }
      if (gradients) {
        can = can && !gradient;
        gradient = true;
      }
      if (can) ready.push_back(b);
    }
    const size_t next = ready[random() % ready.size()];
    done[next] = true;
    for (const int s : blocks[next]) {
      const Statement& statement = program.statements[static_cast<size_t>(s)];
      for (const Call& call : statement.calls) have.insert(call.out.begin(), call.out.end());
      if (mine(statement)) order.push_back(s);
    }
  }
  return order;
}

void Compact(Program* program) {
  std::vector<int> to(program->values.size(), -1);
  std::vector<Value> values;
  for (Statement& statement : program->statements) {
    for (Call& call : statement.calls) {
      for (int& out : call.out) {
        to[static_cast<size_t>(out)] = static_cast<int>(values.size());
        values.push_back(program->value(out));
        out = to[static_cast<size_t>(out)];
      }
    }
  }
  for (Statement& statement : program->statements) {
    for (Call& call : statement.calls) {
      for (int& in : call.in) {
        if (in >= 0) in = to[static_cast<size_t>(in)];
      }
    }
  }
  std::vector<int> donated;
  for (const int v : program->donated) {
    if (to[static_cast<size_t>(v)] >= 0) donated.push_back(to[static_cast<size_t>(v)]);
  }
  program->donated = std::move(donated);
  program->values = std::move(values);
}

// --- Text ---------------------------------------------------------------------------------------

namespace {

std::string Number(double x) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", x);
  return text;
}

std::string TypeText(const Value& value) {
  return absl::StrCat(DTypeName(value.dtype), "[", absl::StrJoin(value.shape, ","), "]");
}

}  // namespace

std::string Lines(const Program& program) {
  std::ostringstream out;
  out << "// seed " << program.seed << ", " << program.ranks() << " ranks of trainers "
      << absl::StrJoin(program.trainer_of, " ") << "\n";
  for (size_t g = 0; g < program.groups.size(); ++g) {
    const GroupOf& group = program.groups[g];
    out << "// " << (group.devices ? "devices" : "group") << " g" << g << " = {"
        << absl::StrJoin(group.ranks, ", ") << "}\n";
  }
  const auto name = [&program](int v) {
    if (v < 0) return std::string("-");
    return absl::StrCat("v", v, program.value(v).observed ? "" : "'");
  };
  const auto names = [&name](const std::vector<int>& vs) {
    std::vector<std::string> texts;
    for (const int v : vs) texts.push_back(name(v));
    return absl::StrJoin(texts, ", ");
  };
  for (const Statement& s : program.statements) {
    for (const Call& call : s.calls) {
      out << (s.op == Op::kGradient ? "trainer " : "rank ") << call.rank << ": ";
      if (call.no_grad) out << "NoGrad; ";
      if (!call.out.empty()) out << names(call.out) << " = ";
      out << OpName(s.op) << "(";
      if (s.op == Op::kLeaf) {
        const Value& value = program.value(call.out[0]);
        out << TypeText(value) << " {";
        for (size_t i = 0; i < s.data.size() && i < 12; ++i) {
          out << (i > 0 ? ", " : "") << s.data[i];
        }
        out << (s.data.size() > 12 ? ", ..." : "") << "})"
            << (s.requires_grad ? ".RequireGrad()" : "") << (s.captured ? "  // captured" : "");
        if (std::count(program.donated.begin(), program.donated.end(), call.out[0]) > 0) {
          out << "  // donated";
        }
        out << ";\n";
        continue;
      }
      if (s.op == Op::kGradient) {
        const size_t n = (call.in.size() - static_cast<size_t>(call.wanted)) / 2;
        const auto part = [&](size_t from, size_t to) {
          return names({call.in.begin() + static_cast<std::ptrdiff_t>(from),
                        call.in.begin() + static_cast<std::ptrdiff_t>(to)});
        };
        out << "{" << part(0, n) << "}, {" << part(2 * n, call.in.size()) << "}, seeds {"
            << part(n, 2 * n) << "}" << (s.create ? ", create_graph" : "")
            << (s.retain ? ", retain_graph" : "") << (s.backward ? ", by Backward" : "") << ");\n";
        continue;
      }
      out << names(call.in);
      if (s.group >= 0) out << ", g" << s.group;
      if (s.root >= 0) out << ", root " << s.root;
      if (s.op == Op::kAllReduce || s.op == Op::kReduce || s.op == Op::kReduceScatter ||
          s.op == Op::kReduceScatterTensor || s.op == Op::kReduceScatterRagged) {
        out << ", " << ReductionName(s.reduction);
        if (s.reduction == Reduction::kPremulSum) out << "(" << call.factor << ")";
      }
      if (!s.ints.empty()) out << ", {" << absl::StrJoin(s.ints, ", ") << "}";
      if (!s.rows.empty()) out << ", rows {" << absl::StrJoin(s.rows, ", ") << "}";
      if (s.dim != 0) out << ", dim " << s.dim;
      if (s.number != 0) out << ", " << s.number;
      if (s.flag) out << ", flag";
      out << ");";
      if (!call.out.empty()) {
        const Value& value = program.value(call.out[0]);
        out << "  // " << (value.absent ? "absent" : TypeText(value));
        if (s.joined) out << ", joined";
      }
      out << "\n";
    }
  }
  for (size_t t = 0; t < program.shuffles.size(); ++t) {
    if (program.shuffles[t] != 0) {
      out << "// trainer " << t << " may do it in the order "
          << absl::StrJoin(OrderOf(program, static_cast<int>(t), true), " ") << "\n";
    }
  }
  return out.str();
}

namespace {

template <typename T>
void WriteList(std::ostream& out, const std::vector<T>& list) {
  out << " " << list.size();
  for (const T& x : list) out << " " << x;
}
void WriteList(std::ostream& out, const std::vector<double>& list) {
  out << " " << list.size();
  for (const double x : list) out << " " << Number(x);
}

template <typename T>
bool ReadList(std::istream& in, std::vector<T>* list) {
  size_t size = 0;
  if (!(in >> size) || size > 1u << 20) return false;
  list->resize(size);
  for (T& x : *list) {
    if (!(in >> x)) return false;
  }
  return true;
}

}  // namespace

std::string ToText(const Program& program) {
  std::ostringstream out;
  out << "program-1 " << program.seed;
  WriteList(out, program.trainer_of);
  WriteList(out, program.shuffles);
  WriteList(out, program.donated);
  out << "\n" << program.groups.size();
  for (const GroupOf& group : program.groups) {
    out << " " << group.devices;
    WriteList(out, group.ranks);
  }
  out << "\n" << program.values.size() << "\n";
  for (const Value& value : program.values) {
    out << value.rank << " " << DTypeName(value.dtype) << " " << value.absent << " "
        << value.observed;
    WriteList(out, value.shape);
    out << "\n";
  }
  out << program.statements.size() << "\n";
  for (const Statement& s : program.statements) {
    out << OpName(s.op) << " " << s.group << " " << static_cast<int>(s.reduction) << " " << s.root
        << " " << s.dim << " " << Number(s.number) << " " << s.flag << " " << s.joined << " "
        << s.create << " " << s.retain << " " << s.backward << " " << s.requires_grad << " "
        << s.captured;
    WriteList(out, s.ints);
    WriteList(out, s.rows);
    WriteList(out, s.data);
    out << " " << s.calls.size();
    for (const Call& call : s.calls) {
      out << " " << call.rank << " " << call.no_grad << " " << Number(call.factor) << " "
          << call.wanted;
      WriteList(out, call.in);
      WriteList(out, call.out);
    }
    out << "\n";
  }
  return out.str();
}

absl::StatusOr<Program> FromText(const std::string& text) {
  std::istringstream in(text);
  const auto bad = [] { return absl::InvalidArgumentError("that is no program's text"); };
  Program program;
  std::string word;
  size_t size = 0;
  if (!(in >> word >> program.seed) || word != "program-1") return bad();
  if (!ReadList(in, &program.trainer_of) || !ReadList(in, &program.shuffles) ||
      !ReadList(in, &program.donated) || !(in >> size) || size > 1000) {
    return bad();
  }
  program.groups.resize(size);
  for (GroupOf& group : program.groups) {
    if (!(in >> group.devices) || !ReadList(in, &group.ranks)) return bad();
  }
  if (!(in >> size) || size > 100000) return bad();
  program.values.resize(size);
  for (Value& value : program.values) {
    if (!(in >> value.rank >> word >> value.absent >> value.observed)) return bad();
    value.dtype = DTypeFromName(word);
    if (value.dtype == DType::kUnspecified || !ReadList(in, &value.shape)) return bad();
  }
  if (!(in >> size) || size > 100000) return bad();
  program.statements.resize(size);
  for (Statement& s : program.statements) {
    int reduction = 0;
    if (!(in >> word >> s.group >> reduction >> s.root >> s.dim >> s.number >> s.flag >> s.joined >>
          s.create >> s.retain >> s.backward >> s.requires_grad >> s.captured)) {
      return bad();
    }
    s.op = Op::kCount;
    for (size_t op = 0; op < static_cast<size_t>(Op::kCount); ++op) {
      if (word == kNames[op]) s.op = static_cast<Op>(op);
    }
    s.reduction = static_cast<Reduction>(reduction);
    if (s.op == Op::kCount || !ReadList(in, &s.ints) || !ReadList(in, &s.rows) ||
        !ReadList(in, &s.data) || !(in >> size) || size > 1000) {
      return bad();
    }
    s.calls.resize(size);
    for (Call& call : s.calls) {
      if (!(in >> call.rank >> call.no_grad >> call.factor >> call.wanted) ||
          !ReadList(in, &call.in) || !ReadList(in, &call.out)) {
        return bad();
      }
    }
  }
  return program;
}

}  // namespace random_programs
}  // namespace chorus
